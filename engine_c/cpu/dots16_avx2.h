/*
 * dots16_avx2.h: see dots16.h. Two registers of 8 rows.
 *
 * maddubs multiplies unsigned by signed bytes and adds pairs, saturating at 16 bits. INT8 stays below by taking the
 * weight's sign over to the code (at most 2 * 128 * 127); of INT4 eight such pairs fit 16 bits (8 * 2 * 15 * 127), so
 * they are widened once a block.
 */
#ifndef CLB_CPU_DOTS16_AVX2_H
#define CLB_CPU_DOTS16_AVX2_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "colibri.h"
#include "lanes16.h"

#define CLB_DOTS16_ISA CLB_ISA
#define CLB_DOTS16_RANK CLB_ISA_RANK
#define CLB_DOTS16_MOVED 0
#define CLB_DOTS16_TOKENS 4u /* at once; with so many tiles: */
#define CLB_DOTS16_TILES(tokens) ((tokens) == 1u ? 4u : (tokens) == 2u ? 2u : 1u)

typedef struct clb_ints16 {
  __m256i low; /* rows 0 .. 7 */
  __m256i high;
} clb_ints16;

typedef clb_ints16 clb_dots16;  /* INT4: pairs of 16-bit sums */
typedef clb_ints16 clb_bytes64; /* the same 32 + 32 bytes */

static inline int32_t clb_dots16_supported(void) { return clb_isa_supported(); }

static inline clb_ints16 clb_ints16_spread(int32_t value) {
  return (clb_ints16){_mm256_set1_epi32(value), _mm256_set1_epi32(value)};
}

/* factor times 16 bytes */
static inline clb_ints16 clb_ints16_scale(const uint8_t* bytes, int32_t factor) {
  const __m128i all = _mm_loadu_si128((const __m128i*)(const void*)bytes);
  const __m256i times = _mm256_set1_epi32(factor);
  return (clb_ints16){_mm256_mullo_epi32(_mm256_cvtepu8_epi32(all), times),
                      _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)), times)};
}

static inline clb_bytes64 clb_bytes64_int8(const unsigned char* place) {
  return (clb_bytes64){_mm256_loadu_si256((const __m256i*)(const void*)place),
                       _mm256_loadu_si256((const __m256i*)(const void*)(place + 32))};
}

static inline void clb_bytes64_int4(const unsigned char* place, clb_bytes64* low, clb_bytes64* high) {
  const __m256i mask = _mm256_set1_epi8(15);
  const clb_bytes64 both = clb_bytes64_int8(place);
  low->low = _mm256_and_si256(both.low, mask);
  low->high = _mm256_and_si256(both.high, mask);
  high->low = _mm256_and_si256(_mm256_srli_epi16(both.low, 4), mask);
  high->high = _mm256_and_si256(_mm256_srli_epi16(both.high, 4), mask);
}

static inline clb_dots16 clb_dots16_begin(const uint32_t precision, clb_ints16 correction) {
  return precision == CLB_INT8 ? correction : clb_ints16_spread(0);
}

static inline __m256i clb_dots8_add(const uint32_t precision, __m256i sums, __m256i weights, __m256i codes) {
  if (precision == CLB_INT8) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(codes, weights));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, codes));
}

static inline clb_dots16 clb_dots16_add(const uint32_t precision, clb_dots16 sums, clb_bytes64 weights,
                                        const int8_t* codes) {
  int32_t four;
  (void)memcpy(&four, codes, sizeof four);
  const __m256i spread = _mm256_set1_epi32(four);
  return (clb_dots16){clb_dots8_add(precision, sums.low, weights.low, spread),
                      clb_dots8_add(precision, sums.high, weights.high, spread)};
}

static inline __m256i clb_dots8_end(const uint32_t precision, __m256i sums, __m256i correction) {
  return precision == CLB_INT8 ? sums : _mm256_add_epi32(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)), correction);
}

static inline clb_lanes16 clb_dots16_end(const uint32_t precision, clb_dots16 sums, clb_ints16 correction) {
  return (clb_lanes16){_mm256_cvtepi32_ps(clb_dots8_end(precision, sums.low, correction.low)),
                       _mm256_cvtepi32_ps(clb_dots8_end(precision, sums.high, correction.high))};
}

#endif /* CLB_CPU_DOTS16_AVX2_H */
