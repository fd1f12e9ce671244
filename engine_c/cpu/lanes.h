/*
 * lanes.h: eight fp32 partial sums, the unit in which every dot product of the CPU kernels is added up.
 *
 *   lane l adds elements l, l + 8, l + 16, ... in rising order; a tail of n < 8 elements goes to lanes 0 .. n - 1;
 *   sum = ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7)).
 *
 * The bits are the same whether the machine has vectors of 4 or of 8 floats: only the compiler's vector
 * extension is used, multiplication and addition are never fused. Pure functions.
 */
#ifndef CLB_CPU_LANES_H
#define CLB_CPU_LANES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "number.h"

#define CLB_LANES 8u

typedef float clb_float4 __attribute__((vector_size(16)));
typedef uint32_t clb_uint4 __attribute__((vector_size(16)));
typedef int32_t clb_int4 __attribute__((vector_size(16)));
typedef uint16_t clb_short8 __attribute__((vector_size(16)));

/* With wider registers one vector of eight, else two of four. */
#if defined(__AVX__)
typedef float clb_float8 __attribute__((vector_size(32)));
typedef struct clb_lanes {
  clb_float8 all;
} clb_lanes;
#else
typedef struct clb_lanes {
  clb_float4 low;
  clb_float4 high;
} clb_lanes;
#endif

static inline clb_float4 clb_float4_load(const float* values) {
  clb_float4 four;
  (void)memcpy(&four, values, sizeof four);
  return four;
}

static inline void clb_float4_store(clb_float4 four, float* values) { (void)memcpy(values, &four, sizeof four); }

/* `first` in the lanes whose mask is all ones, `second` where it is 0. */
static inline clb_float4 clb_float4_where(clb_int4 mask, clb_float4 first, clb_float4 second) {
  return (clb_float4)(((clb_int4)first & mask) | ((clb_int4)second & ~mask));
}

/* a > b ? a : b in each lane. */
static inline clb_float4 clb_float4_max(clb_float4 a, clb_float4 b) { return clb_float4_where(a > b, a, b); }

/* All ones where the lane is finite, 0 where it is NaN or infinite: finite * 0 is 0, all else is NaN. */
static inline clb_int4 clb_float4_finite(clb_float4 four) { return four * 0.0f >= 0.0f; }

static inline clb_lanes clb_lanes_load(const float* values) {
  clb_lanes lanes;
  (void)memcpy(&lanes, values, sizeof lanes);
  return lanes;
}

static inline void clb_lanes_store(clb_lanes lanes, float* values) { (void)memcpy(values, &lanes, sizeof lanes); }

static inline clb_lanes clb_lanes_zero(void) {
  static const float zeros[CLB_LANES];
  return clb_lanes_load(zeros);
}

static inline clb_lanes clb_lanes_spread(float value) {
  const float values[CLB_LANES] = {value, value, value, value, value, value, value, value};
  return clb_lanes_load(values);
}

static inline clb_lanes clb_lanes_pair(clb_float4 low, clb_float4 high) {
#if defined(__AVX__)
  return (clb_lanes){(clb_float8)_mm256_set_m128((__m128)high, (__m128)low)};
#else
  return (clb_lanes){low, high};
#endif
}

/* sums + a * b */
static inline clb_lanes clb_lanes_add_product(clb_lanes sums, clb_lanes a, clb_lanes b) {
#if defined(__AVX__)
  sums.all += a.all * b.all;
#else
  sums.low += a.low * b.low;
  sums.high += a.high * b.high;
#endif
  return sums;
}

/* sums + values */
static inline clb_lanes clb_lanes_add(clb_lanes sums, clb_lanes values) {
#if defined(__AVX__)
  sums.all += values.all;
#else
  sums.low += values.low;
  sums.high += values.high;
#endif
  return sums;
}

static inline float clb_lanes_sum(clb_lanes lanes) {
  float s[CLB_LANES];
  clb_lanes_store(lanes, s);
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

/* Adds the tail products of a[0 .. count), count < 8, to lanes 0 .. count - 1. */
static inline clb_lanes clb_lanes_add_tail(clb_lanes sums, const float* a, const float* b, size_t count) {
  float s[CLB_LANES];
  clb_lanes_store(sums, s);
  for (size_t l = 0; l < count; ++l) {
    s[l] += a[l] * b[l];
  }
  return clb_lanes_load(s);
}

/* Eight 16-bit numbers in the upper halves of two vectors of four words, whose lower halves are zero. Little-endian. */
static inline void clb_spread_16(const uint16_t* values, clb_uint4* low, clb_uint4* high) {
  const clb_short8 zero = {0};
  clb_short8 narrow;
  (void)memcpy(&narrow, values, sizeof narrow);
#if defined(__clang__)
  *low = (clb_uint4)__builtin_shufflevector(zero, narrow, 0, 8, 1, 9, 2, 10, 3, 11);
  *high = (clb_uint4)__builtin_shufflevector(zero, narrow, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  *low = (clb_uint4)__builtin_shuffle(zero, narrow, (clb_short8){0, 8, 1, 9, 2, 10, 3, 11});
  *high = (clb_uint4)__builtin_shuffle(zero, narrow, (clb_short8){4, 12, 5, 13, 6, 14, 7, 15});
#endif
}

static inline clb_lanes clb_lanes_load_bf16(const uint16_t* values) {
  clb_uint4 low;
  clb_uint4 high;
  clb_spread_16(values, &low, &high);
  return clb_lanes_pair((clb_float4)low, (clb_float4)high);
}

/* As clb_float_of_half; `word` has the half in its upper bits. The exponent is put right by a multiplication, which
   also makes subnormal halves normal; they pass through subnormal floats, so inputs must not be flushed to zero
   (float_mode.h). */
static inline clb_float4 clb_float4_of_half(clb_uint4 word) {
  const clb_uint4 bits = (clb_uint4)((clb_int4)word >> 3) & 0x8fffe000u;
  return (clb_float4)bits * 0x1p112f;
}

static inline clb_lanes clb_lanes_load_half(const uint16_t* values) {
  clb_uint4 low;
  clb_uint4 high;
  clb_spread_16(values, &low, &high);
  return clb_lanes_pair(clb_float4_of_half(low), clb_float4_of_half(high));
}

/* a . b */
static inline float clb_lanes_dot(const float* a, const float* b, size_t count) {
  clb_lanes sums = clb_lanes_zero();
  size_t c = 0;
  for (; c + CLB_LANES <= count; c += CLB_LANES) {
    sums = clb_lanes_add_product(sums, clb_lanes_load(a + c), clb_lanes_load(b + c));
  }
  return clb_lanes_sum(c == count ? sums : clb_lanes_add_tail(sums, a + c, b + c, count - c));
}

/* clb_exact_exp, four at once, the same bits. Values above 87 or NaN are not treated: x <= 87. */
static inline clb_float4 clb_float4_exp(clb_float4 x) {
  const clb_int4 kept = x >= -87.0f;
  const clb_float4 n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  clb_float4 r = x + n * -0.693359375f;
  r = r + n * 2.12194440e-4f;
  clb_float4 p = r * 1.98412698e-4f + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const clb_uint4 power = ((clb_uint4) __builtin_convertvector(n, clb_int4) + 127u) << 23;
  return (clb_float4)((clb_int4)(p * (clb_float4)power) & kept);
}

#endif /* CLB_CPU_LANES_H */
