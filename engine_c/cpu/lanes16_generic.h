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

#include "float4.h"

#define CLB_ISA "generic"
#define CLB_ISA_RANK 0u
#define CLB_GROUP 3u /* tokens whose sums fit the registers beside one tile */
/* Tiles of 16 rows that are done at once with `tokens` of them. */
#define CLB_GROUP_TILES(tokens) ((tokens) == 1u ? 2u : 1u)

typedef struct clb_lanes16 {
  clb_float4 a; /* lanes 0 .. 3 */
  clb_float4 b;
  clb_float4 c;
  clb_float4 d;
} clb_lanes16;

static inline int32_t clb_isa_supported(void) { return 1; }

static inline clb_lanes16 clb_lanes16_load(const float* values) {
  return (clb_lanes16){clb_float4_load(values), clb_float4_load(values + 4), clb_float4_load(values + 8),
                       clb_float4_load(values + 12)};
}

static inline void clb_lanes16_store(clb_lanes16 lanes, float* values) {
  clb_float4_store(lanes.a, values);
  clb_float4_store(lanes.b, values + 4);
  clb_float4_store(lanes.c, values + 8);
  clb_float4_store(lanes.d, values + 12);
}

static inline clb_lanes16 clb_lanes16_spread(float value) {
  const clb_float4 all = {value, value, value, value};
  return (clb_lanes16){all, all, all, all};
}

static inline clb_lanes16 clb_lanes16_add(clb_lanes16 x, clb_lanes16 y) {
  return (clb_lanes16){x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d};
}

static inline clb_lanes16 clb_lanes16_multiply(clb_lanes16 x, clb_lanes16 y) {
  return (clb_lanes16){x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d};
}

/* The larger one in each lane. */
static inline clb_lanes16 clb_lanes16_max(clb_lanes16 x, clb_lanes16 y) {
  return (clb_lanes16){clb_float4_max(x.a, y.a), clb_float4_max(x.b, y.b), clb_float4_max(x.c, y.c),
                       clb_float4_max(x.d, y.d)};
}

/* Lanes added as a tree: l + 8, then l + 4, l + 2, l + 1. The same order in every lanes16_*.h. */
static inline float clb_lanes16_sum(clb_lanes16 lanes) {
  const clb_float4 four = (lanes.a + lanes.c) + (lanes.b + lanes.d);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

static inline float clb_lanes16_largest(clb_lanes16 lanes) {
  const clb_float4 four = clb_float4_max(clb_float4_max(lanes.a, lanes.c), clb_float4_max(lanes.b, lanes.d));
  const float even = four[0] > four[2] ? four[0] : four[2];
  const float odd = four[1] > four[3] ? four[1] : four[3];
  return even > odd ? even : odd;
}

/* sums + x * y */
static inline clb_lanes16 clb_lanes16_add_product(clb_lanes16 sums, clb_lanes16 x, clb_lanes16 y) {
  return (clb_lanes16){sums.a + x.a * y.a, sums.b + x.b * y.b, sums.c + x.c * y.c, sums.d + x.d * y.d};
}

static inline clb_lanes16 clb_lanes16_load_bf16(const uint16_t* values) {
  clb_uint4 words[4];
  clb_spread_16(values, &words[0], &words[1]);
  clb_spread_16(values + 8, &words[2], &words[3]);
  return (clb_lanes16){(clb_float4)words[0], (clb_float4)words[1], (clb_float4)words[2], (clb_float4)words[3]};
}

static inline clb_lanes16 clb_lanes16_load_half(const uint16_t* values) {
  clb_uint4 words[4];
  clb_spread_16(values, &words[0], &words[1]);
  clb_spread_16(values + 8, &words[2], &words[3]);
  return (clb_lanes16){clb_float4_of_half(words[0]), clb_float4_of_half(words[1]), clb_float4_of_half(words[2]),
                       clb_float4_of_half(words[3])};
}

/* A 256th of each of 16 e4m3 numbers. */
static inline clb_lanes16 clb_lanes16_load_fp8(const uint8_t* values) {
  uint16_t halves[16];
  for (size_t i = 0; i < 16u; ++i) {
    halves[i] = clb_half_of_fp8(values[i]);
  }
  return clb_lanes16_load_half(halves);
}

/* Rounded to nearest even; what is too large becomes the largest half. */
static inline void clb_lanes16_store_half(clb_lanes16 lanes, uint16_t* values) {
  float wide[16];
  clb_lanes16_store(lanes, wide);
  for (size_t l = 0; l < 16u; ++l) {
    values[l] = clb_half_of_float(wide[l]);
  }
}

/* The largest magnitude among 32 numbers, as bits: a NaN is larger than infinity, which is larger than any number. */
static inline uint32_t clb_lanes16_largest_bits(clb_lanes16 x, clb_lanes16 y) {
  float values[32];
  uint32_t largest = 0;
  clb_lanes16_store(x, values);
  clb_lanes16_store(y, values + 16);
  for (size_t i = 0; i < 32u; ++i) {
    const uint32_t bits = clb_bits_of_float(values[i]) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

/* Rounds to nearest even what lies within 127 of 0, stores it as bytes and returns the sum of these. */
static inline int32_t clb_lanes16_store_codes(clb_lanes16 x, int8_t* codes) {
  float values[16];
  int32_t sum = 0;
  clb_lanes16_store(x, values);
  for (size_t i = 0; i < 16u; ++i) {
    const int32_t code = (int32_t)clb_bits_of_float(values[i] + 0x1.8p23f) - 0x4b400000; /* the addition rounds */
    codes[i] = (int8_t)code;
    sum += code;
  }
  return sum;
}

/* exp of values up to 87; 0 below -87, NaN stays NaN. */
static inline clb_lanes16 clb_lanes16_exp(clb_lanes16 x) {
  return (clb_lanes16){clb_float4_exp(x.a), clb_float4_exp(x.b), clb_float4_exp(x.c), clb_float4_exp(x.d)};
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
