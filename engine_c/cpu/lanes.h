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

#include "number.h"

#define CLB_LANES 8u

typedef float clb_float4 __attribute__((vector_size(16)));
typedef uint32_t clb_uint4 __attribute__((vector_size(16)));
typedef int32_t clb_int4 __attribute__((vector_size(16)));
typedef uint16_t clb_short4 __attribute__((vector_size(8)));

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

static inline clb_lanes clb_lanes_load(const float* values) {
  clb_lanes lanes;
  memcpy(&lanes, values, sizeof lanes);
  return lanes;
}

static inline void clb_lanes_store(clb_lanes lanes, float* values) { memcpy(values, &lanes, sizeof lanes); }

static inline clb_lanes clb_lanes_zero(void) {
  static const float zeros[CLB_LANES];
  return clb_lanes_load(zeros);
}

static inline clb_lanes clb_lanes_spread(float value) {
  const float values[CLB_LANES] = {value, value, value, value, value, value, value, value};
  return clb_lanes_load(values);
}

static inline clb_lanes clb_lanes_pair(clb_float4 low, clb_float4 high) {
  clb_lanes lanes;
  memcpy(&lanes, &low, sizeof low);
  memcpy((char*)&lanes + sizeof low, &high, sizeof high);
  return lanes;
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

static inline clb_float4 clb_float4_of_bf16(const uint16_t* values) {
  clb_short4 narrow;
  memcpy(&narrow, values, sizeof narrow);
  return (clb_float4)(__builtin_convertvector(narrow, clb_uint4) << 16);
}

/* As clb_float_of_half, four at once. */
static inline clb_float4 clb_float4_of_half(const uint16_t* values) {
  clb_short4 narrow;
  memcpy(&narrow, values, sizeof narrow);
  const clb_uint4 wide = __builtin_convertvector(narrow, clb_uint4);
  const clb_uint4 sign = (wide & 0x8000u) << 16;
  const clb_uint4 magnitude = wide & 0x7fffu;
  const clb_uint4 small = (clb_uint4)((clb_int4)magnitude < 0x400); /* all ones where subnormal */
  const clb_uint4 bits = (magnitude << 13) + (112u << 23) + (small & (1u << 23));
  const clb_uint4 excess = small & (113u << 23); /* 2^-14: what the raised exponent added */
  const clb_float4 value = (clb_float4)bits - (clb_float4)excess;
  return (clb_float4)((clb_uint4)value | sign);
}

static inline clb_lanes clb_lanes_load_bf16(const uint16_t* values) {
  return clb_lanes_pair(clb_float4_of_bf16(values), clb_float4_of_bf16(values + 4));
}

static inline clb_lanes clb_lanes_load_half(const uint16_t* values) {
  return clb_lanes_pair(clb_float4_of_half(values), clb_float4_of_half(values + 4));
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

#endif /* CLB_CPU_LANES_H */
