/*
 * float4.h: four fp32 numbers by the compiler's vector extension only, so every machine gives the same bits.
 * Multiplication and addition are never fused. Pure functions.
 */
#ifndef CLB_CPU_FLOAT4_H
#define CLB_CPU_FLOAT4_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "number.h"

typedef float clb_float4 __attribute__((vector_size(16)));
typedef uint32_t clb_uint4 __attribute__((vector_size(16)));
typedef int32_t clb_int4 __attribute__((vector_size(16)));
typedef uint16_t clb_short8 __attribute__((vector_size(16)));

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

/* As clb_float_of_half; `word` has the half in its upper bits. The exponent is put right by a multiplication, which
   also makes subnormal halves normal; they pass through subnormal floats, so inputs must not be flushed to zero
   (float_mode.h). */
static inline clb_float4 clb_float4_of_half(clb_uint4 word) {
  const clb_uint4 bits = (clb_uint4)((clb_int4)word >> 3) & 0x8fffe000u;
  return (clb_float4)bits * 0x1p112f;
}

/* clb_exact_exp, four at once, the same bits; NaN stays NaN. Values above 87 are not treated. */
static inline clb_float4 clb_float4_exp(clb_float4 x) {
  const clb_int4 dropped = x < -87.0f;
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
  const clb_uint4 exponent = (clb_uint4) __builtin_convertvector(n, clb_int4) + 127u;
  const clb_uint4 power = exponent << 23; /* analyzer: a shift within each lane of 32 bits */
  return (clb_float4)((clb_int4)(p * (clb_float4)power) & ~dropped);
}

#endif /* CLB_CPU_FLOAT4_H */
