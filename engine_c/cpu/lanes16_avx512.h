/*
 * lanes16_avx512.h: sixteen fp32 numbers in one register of AVX-512 (F, BW, VL, DQ). Included through lanes16.h.
 *
 * Multiplication and addition are fused. bf16 is widened: the dot-product instructions round each pair of products,
 * and are slower for few tokens, where memory is what counts.
 */
#ifndef CLB_CPU_LANES16_AVX512_H
#define CLB_CPU_LANES16_AVX512_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "number.h"

#define CLB_ISA "avx512"
#define CLB_ISA_RANK 20u
#define CLB_GROUP 12u /* tokens whose sums fit the registers beside two tiles */
/* Tiles of 16 rows that are done at once with `tokens` of them: at most 24 sums. */
#define CLB_GROUP_TILES(tokens) ((tokens) <= 3u ? 8u : (tokens) <= 6u ? 4u : 2u)

typedef __m512 clb_lanes16;

static inline int32_t clb_isa_supported(void) {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
             ? 1
             : 0;
}

static inline clb_lanes16 clb_lanes16_load(const float* values) { return _mm512_loadu_ps(values); }

static inline void clb_lanes16_store(clb_lanes16 lanes, float* values) { _mm512_storeu_ps(values, lanes); }

static inline clb_lanes16 clb_lanes16_spread(float value) { return _mm512_set1_ps(value); }

static inline clb_lanes16 clb_lanes16_add(clb_lanes16 x, clb_lanes16 y) { return _mm512_add_ps(x, y); }

static inline clb_lanes16 clb_lanes16_multiply(clb_lanes16 x, clb_lanes16 y) { return _mm512_mul_ps(x, y); }

/* The larger one in each lane. */
static inline clb_lanes16 clb_lanes16_max(clb_lanes16 x, clb_lanes16 y) { return _mm512_max_ps(x, y); }

/* Lanes added as a tree: l + 8, then l + 4, l + 2, l + 1. The same order in every lanes16_*.h. */
static inline float clb_lanes16_sum(clb_lanes16 lanes) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float clb_lanes16_largest(clb_lanes16 lanes) { return _mm512_reduce_max_ps(lanes); }

/* sums + x * y */
static inline clb_lanes16 clb_lanes16_add_product(clb_lanes16 sums, clb_lanes16 x, clb_lanes16 y) {
  return _mm512_fmadd_ps(x, y, sums);
}

static inline clb_lanes16 clb_lanes16_load_bf16(const uint16_t* values) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(const void*)values));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

static inline clb_lanes16 clb_lanes16_load_half(const uint16_t* values) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(const void*)values));
}

/* A 256th of each of 16 e4m3 numbers. */
static inline clb_lanes16 clb_lanes16_load_fp8(const uint8_t* values) {
  const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(const void*)values));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x80)), 8);
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x7f)), 7);
  return _mm512_cvtph_ps(_mm256_or_si256(sign, rest));
}

/* Rounded to nearest even; what is too large becomes the largest half. */
static inline void clb_lanes16_store_half(clb_lanes16 lanes, uint16_t* values) {
  const __m512 bound = _mm512_set1_ps(65504.0f);
  const __m512 bounded = _mm512_max_ps(_mm512_min_ps(lanes, bound), _mm512_sub_ps(_mm512_setzero_ps(), bound));
  _mm256_storeu_si256((__m256i*)(void*)values, _mm512_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT));
}

/* The largest magnitude among 32 numbers, as bits: a NaN is larger than infinity, which is larger than any number. */
static inline uint32_t clb_lanes16_largest_bits(clb_lanes16 x, clb_lanes16 y) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  return _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(x), magnitude),
                                                  _mm512_and_si512(_mm512_castps_si512(y), magnitude)));
}

/* Rounds to nearest even what lies within 127 of 0, stores it as bytes and returns the sum of these. */
static inline int32_t clb_lanes16_store_codes(clb_lanes16 x, int8_t* codes) {
  const __m512i rounded = _mm512_cvtps_epi32(x);
  _mm_storeu_si128((__m128i*)(void*)codes, _mm512_cvtepi32_epi8(rounded));
  return _mm512_reduce_add_epi32(rounded);
}

/* exp of values up to 87; 0 below -87, NaN stays NaN. Error below 2 ulp. */
static inline clb_lanes16 clb_lanes16_exp(clb_lanes16 x) {
  const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.98412698e-4f), r, _mm512_set1_ps(1.38888889e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.33333333e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.16666667e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.66666667e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(kept, p, n);
}

/* silu(gate) * up. exp(-|g|) never overflows: sigmoid(g) = (g < 0 ? exp(-|g|) : 1) / (1 + exp(-|g|)). */
static inline clb_lanes16 clb_lanes16_silu_times(clb_lanes16 gate, clb_lanes16 up) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 e = clb_lanes16_exp(_mm512_or_ps(gate, _mm512_set1_ps(-0.0f)));
  const __m512 top = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ), one, e);
  return _mm512_mul_ps(_mm512_mul_ps(gate, _mm512_div_ps(top, _mm512_add_ps(one, e))), up);
}

#endif /* CLB_CPU_LANES16_AVX512_H */
