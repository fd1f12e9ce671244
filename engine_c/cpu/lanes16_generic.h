/*
 * lanes16_generic.h: sixteen fp32 numbers in four vectors of four, by the compiler's vector extension only. For any
 * machine; the reference of the other lanes16_*.h. Included through lanes16.h.
 *
 * Multiplication and addition are never fused here (-std=c11 turns contraction off).
 */
#ifndef CLB_CPU_LANES16_GENERIC_H
#define CLB_CPU_LANES16_GENERIC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "number.h"

#define CLB_ISA "generic"
#define CLB_ISA_RANK 0u
#define CLB_GROUP 3u /* tokens whose sums fit the registers beside one tile */
/* Tiles of 16 rows that are done at once with `tokens` of them. */
#define CLB_GROUP_TILES(tokens) ((tokens) == 1u ? 2u : 1u)

typedef float clb_float4 __attribute__((vector_size(16)));
typedef uint32_t clb_uint4 __attribute__((vector_size(16)));
typedef int32_t clb_int4 __attribute__((vector_size(16)));
typedef uint16_t clb_short8 __attribute__((vector_size(16)));

typedef struct clb_lanes16 {
  clb_float4 a; /* lanes 0 .. 3 */
  clb_float4 b;
  clb_float4 c;
  clb_float4 d;
} clb_lanes16;

static inline int32_t clb_isa_supported(void) { return 1; }

static inline clb_lanes16 clb_lanes16_load(const float* values) {
  clb_lanes16 lanes;
  memcpy(&lanes.a, values, sizeof lanes.a);
  memcpy(&lanes.b, values + 4, sizeof lanes.b);
  memcpy(&lanes.c, values + 8, sizeof lanes.c);
  memcpy(&lanes.d, values + 12, sizeof lanes.d);
  return lanes;
}

static inline void clb_lanes16_store(clb_lanes16 lanes, float* values) {
  memcpy(values, &lanes.a, sizeof lanes.a);
  memcpy(values + 4, &lanes.b, sizeof lanes.b);
  memcpy(values + 8, &lanes.c, sizeof lanes.c);
  memcpy(values + 12, &lanes.d, sizeof lanes.d);
}

static inline clb_lanes16 clb_lanes16_spread(float value) {
  const clb_float4 all = {value, value, value, value};
  return (clb_lanes16){all, all, all, all};
}

static inline clb_lanes16 clb_lanes16_add(clb_lanes16 x, clb_lanes16 y) {
  return (clb_lanes16){x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d};
}

/* sums + x * y */
static inline clb_lanes16 clb_lanes16_add_product(clb_lanes16 sums, clb_lanes16 x, clb_lanes16 y) {
  return (clb_lanes16){sums.a + x.a * y.a, sums.b + x.b * y.b, sums.c + x.c * y.c, sums.d + x.d * y.d};
}

/* Eight 16-bit numbers in the upper halves of two vectors of four words, whose lower halves are zero. Little-endian. */
static inline void clb_spread_16(const uint16_t* values, clb_uint4* low, clb_uint4* high) {
  const clb_short8 zero = {0};
  clb_short8 narrow;
  memcpy(&narrow, values, sizeof narrow);
#if defined(__clang__)
  *low = (clb_uint4)__builtin_shufflevector(zero, narrow, 0, 8, 1, 9, 2, 10, 3, 11);
  *high = (clb_uint4)__builtin_shufflevector(zero, narrow, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  *low = (clb_uint4)__builtin_shuffle(zero, narrow, (clb_short8){0, 8, 1, 9, 2, 10, 3, 11});
  *high = (clb_uint4)__builtin_shuffle(zero, narrow, (clb_short8){4, 12, 5, 13, 6, 14, 7, 15});
#endif
}

static inline clb_lanes16 clb_lanes16_load_bf16(const uint16_t* values) {
  clb_uint4 words[4];
  clb_spread_16(values, &words[0], &words[1]);
  clb_spread_16(values + 8, &words[2], &words[3]);
  return (clb_lanes16){(clb_float4)words[0], (clb_float4)words[1], (clb_float4)words[2], (clb_float4)words[3]};
}

/* As clb_float_of_half; `word` has the half in its upper bits. The exponent is put right by a multiplication, which
   also makes subnormal halves normal; they pass through subnormal floats, so inputs must not be flushed to zero
   (float_mode.h). */
static inline clb_float4 clb_float4_of_half(clb_uint4 word) {
  const clb_uint4 bits = (clb_uint4)((clb_int4)word >> 3) & 0x8fffe000u;
  return (clb_float4)bits * 0x1p112f;
}

static inline clb_lanes16 clb_lanes16_load_half(const uint16_t* values) {
  clb_uint4 words[4];
  clb_spread_16(values, &words[0], &words[1]);
  clb_spread_16(values + 8, &words[2], &words[3]);
  return (clb_lanes16){clb_float4_of_half(words[0]), clb_float4_of_half(words[1]), clb_float4_of_half(words[2]),
                       clb_float4_of_half(words[3])};
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

/* silu(gate) * up. exp(-|g|) never overflows: sigmoid(g) = (g < 0 ? exp(-|g|) : 1) / (1 + exp(-|g|)). */
static inline clb_float4 clb_float4_silu_times(clb_float4 gate, clb_float4 up) {
  const clb_float4 one = {1.0f, 1.0f, 1.0f, 1.0f};
  const clb_uint4 negative = (clb_uint4)(gate < 0.0f);
  const clb_float4 e = clb_float4_exp(-(clb_float4)((clb_uint4)gate & 0x7fffffffu));
  const clb_float4 top = (clb_float4)(((clb_uint4)e & negative) | ((clb_uint4)one & ~negative));
  return gate * (top / (one + e)) * up;
}

static inline clb_lanes16 clb_lanes16_silu_times(clb_lanes16 gate, clb_lanes16 up) {
  return (clb_lanes16){clb_float4_silu_times(gate.a, up.a), clb_float4_silu_times(gate.b, up.b),
                       clb_float4_silu_times(gate.c, up.c), clb_float4_silu_times(gate.d, up.d)};
}

#endif /* CLB_CPU_LANES16_GENERIC_H */
