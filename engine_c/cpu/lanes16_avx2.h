/*
 * lanes16_avx2.h: sixteen fp32 numbers in two registers of AVX2, with FMA and F16C. Included through lanes16.h.
 *
 * Multiplication and addition are fused.
 */
#ifndef CLB_CPU_LANES16_AVX2_H
#define CLB_CPU_LANES16_AVX2_H

#include <cpuid.h>
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "number.h"

#define CLB_ISA "avx2"
#define CLB_ISA_RANK 10u
#define CLB_GROUP 6u /* tokens whose sums fit the registers beside one tile */
/* Tiles of 16 rows that are done at once with `tokens` of them: at most 12 registers of sums. */
#define CLB_GROUP_TILES(tokens) ((tokens) == 1u ? 4u : (tokens) == 2u ? 2u : 1u)

typedef struct clb_lanes16 {
  __m256 low; /* lanes 0 .. 7 */
  __m256 high;
} clb_lanes16;

/* F16C is asked of the processor itself: some compilers' __builtin_cpu_supports does not know its name. */
static inline int32_t clb_isa_supported(void) {
  unsigned int eax = 0;
  unsigned int ebx = 0;
  unsigned int ecx = 0;
  unsigned int edx = 0;
  const int known = __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  const int f16c = known != 0 && (ecx & bit_F16C) != 0u;
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
}

static inline clb_lanes16 clb_lanes16_load(const float* values) {
  return (clb_lanes16){_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
}

static inline void clb_lanes16_store(clb_lanes16 lanes, float* values) {
  _mm256_storeu_ps(values, lanes.low);
  _mm256_storeu_ps(values + 8, lanes.high);
}

static inline clb_lanes16 clb_lanes16_spread(float value) {
  return (clb_lanes16){_mm256_set1_ps(value), _mm256_set1_ps(value)};
}

static inline clb_lanes16 clb_lanes16_add(clb_lanes16 x, clb_lanes16 y) {
  return (clb_lanes16){_mm256_add_ps(x.low, y.low), _mm256_add_ps(x.high, y.high)};
}

static inline clb_lanes16 clb_lanes16_multiply(clb_lanes16 x, clb_lanes16 y) {
  return (clb_lanes16){_mm256_mul_ps(x.low, y.low), _mm256_mul_ps(x.high, y.high)};
}

/* The larger one in each lane. */
static inline clb_lanes16 clb_lanes16_max(clb_lanes16 x, clb_lanes16 y) {
  return (clb_lanes16){_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high)};
}

/* Lanes added as a tree: l + 8, then l + 4, l + 2, l + 1. The same order in every lanes16_*.h. */
static inline float clb_lanes16_sum(clb_lanes16 lanes) {
  const __m256 eight = _mm256_add_ps(lanes.low, lanes.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float clb_lanes16_largest(clb_lanes16 lanes) {
  const __m256 eight = _mm256_max_ps(lanes.low, lanes.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* sums + x * y */
static inline clb_lanes16 clb_lanes16_add_product(clb_lanes16 sums, clb_lanes16 x, clb_lanes16 y) {
  return (clb_lanes16){_mm256_fmadd_ps(x.low, y.low, sums.low), _mm256_fmadd_ps(x.high, y.high, sums.high)};
}

static inline __m256 clb_load_bf16_8(const uint16_t* values) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(const void*)values));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

static inline clb_lanes16 clb_lanes16_load_bf16(const uint16_t* values) {
  return (clb_lanes16){clb_load_bf16_8(values), clb_load_bf16_8(values + 8)};
}

static inline clb_lanes16 clb_lanes16_load_half(const uint16_t* values) {
  return (clb_lanes16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(const void*)values)),
                       _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(const void*)(values + 8)))};
}

/* A 256th of each of 16 e4m3 numbers. */
static inline clb_lanes16 clb_lanes16_load_fp8(const uint8_t* values) {
  const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(const void*)values));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x80)), 8);
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x7f)), 7);
  const __m256i halves = _mm256_or_si256(sign, rest);
  return (clb_lanes16){_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                       _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

/* Rounded to nearest even; what is too large becomes the largest half. */
static inline __m128i clb_half_8(__m256 values) {
  const __m256 bound = _mm256_set1_ps(65504.0f);
  const __m256 bounded = _mm256_max_ps(_mm256_min_ps(values, bound), _mm256_sub_ps(_mm256_setzero_ps(), bound));
  return _mm256_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT);
}

static inline void clb_lanes16_store_half(clb_lanes16 lanes, uint16_t* values) {
  _mm_storeu_si128((__m128i*)(void*)values, clb_half_8(lanes.low));
  _mm_storeu_si128((__m128i*)(void*)(values + 8), clb_half_8(lanes.high));
}

/* The largest magnitude among 32 numbers, as bits: a NaN is larger than infinity, which is larger than any number. */
static inline uint32_t clb_lanes16_largest_bits(clb_lanes16 x, clb_lanes16 y) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const __m256i a = _mm256_max_epu32(_mm256_and_si256(_mm256_castps_si256(x.low), magnitude),
                                     _mm256_and_si256(_mm256_castps_si256(x.high), magnitude));
  const __m256i b = _mm256_max_epu32(_mm256_and_si256(_mm256_castps_si256(y.low), magnitude),
                                     _mm256_and_si256(_mm256_castps_si256(y.high), magnitude));
  const __m256i eight = _mm256_max_epu32(a, b);
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1)));
}

/* Rounds to nearest even what lies within 127 of 0, stores it as bytes and returns the sum of these. */
static inline int32_t clb_lanes16_store_codes(clb_lanes16 x, int8_t* codes) {
  const __m256i low = _mm256_cvtps_epi32(x.low);
  const __m256i high = _mm256_cvtps_epi32(x.high);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  const __m256i eight = _mm256_add_epi32(low, high);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  _mm_storeu_si128((__m128i*)(void*)codes, bytes);
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

/* exp of values up to 87; 0 below -87, NaN stays NaN. Error below 2 ulp. */
static inline __m256 clb_exp_8(__m256 x) {
  const __m256 kept = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_NLT_UQ);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), 8);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(1.98412698e-4f), r, _mm256_set1_ps(1.38888889e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.33333333e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.16666667e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.66666667e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), kept);
}

static inline clb_lanes16 clb_lanes16_exp(clb_lanes16 x) { return (clb_lanes16){clb_exp_8(x.low), clb_exp_8(x.high)}; }

/* silu(gate) * up. exp(-|g|) never overflows: sigmoid(g) = (g < 0 ? exp(-|g|) : 1) / (1 + exp(-|g|)). */
static inline __m256 clb_silu_times_8(__m256 gate, __m256 up) {
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 e = clb_exp_8(_mm256_or_ps(gate, _mm256_set1_ps(-0.0f)));
  const __m256 top = _mm256_blendv_ps(one, e, gate);
  return _mm256_mul_ps(_mm256_mul_ps(gate, _mm256_div_ps(top, _mm256_add_ps(one, e))), up);
}

static inline clb_lanes16 clb_lanes16_silu_times(clb_lanes16 gate, clb_lanes16 up) {
  return (clb_lanes16){clb_silu_times_8(gate.low, up.low), clb_silu_times_8(gate.high, up.high)};
}

#endif /* CLB_CPU_LANES16_AVX2_H */
