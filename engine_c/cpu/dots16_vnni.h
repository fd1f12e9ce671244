/* dots16_vnni.h: see dots16.h. One register of 16 rows; one instruction multiplies four columns and adds. */
#ifndef CLB_CPU_DOTS16_VNNI_H
#define CLB_CPU_DOTS16_VNNI_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "colibri.h"
#include "lanes16.h"

#define CLB_DOTS16_ISA "vnni"
#define CLB_DOTS16_RANK CLB_ISA_RANK
#define CLB_DOTS16_MOVED 128
#define CLB_DOTS16_TOKENS 6u /* at once; with so many tiles: */
#define CLB_DOTS16_TILES(tokens) 4u

typedef __m512i clb_ints16;
typedef __m512i clb_dots16;
typedef __m512i clb_bytes64; /* unsigned */

static inline int32_t clb_dots16_supported(void) {
  return clb_isa_supported() == 1 && __builtin_cpu_supports("avx512vnni") ? 1 : 0;
}

static inline clb_ints16 clb_ints16_spread(int32_t value) { return _mm512_set1_epi32(value); }

/* factor times 16 bytes */
static inline clb_ints16 clb_ints16_scale(const uint8_t* bytes, int32_t factor) {
  const __m512i all = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(const void*)bytes));
  return _mm512_mullo_epi32(all, _mm512_set1_epi32(factor));
}

static inline clb_bytes64 clb_bytes64_int8(const unsigned char* place) {
  return _mm512_xor_si512(_mm512_loadu_si512(place), _mm512_set1_epi8((char)-128));
}

static inline void clb_bytes64_int4(const unsigned char* place, clb_bytes64* low, clb_bytes64* high) {
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i both = _mm512_loadu_si512(place);
  *low = _mm512_and_si512(both, mask);
  *high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}

static inline clb_dots16 clb_dots16_begin(const uint32_t precision, clb_ints16 correction) {
  (void)precision;
  return correction;
}

static inline clb_dots16 clb_dots16_add(const uint32_t precision, clb_dots16 sums, clb_bytes64 weights,
                                        const int8_t* codes) {
  int32_t four;
  (void)precision;
  (void)memcpy(&four, codes, sizeof four);
  return _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(four));
}

static inline clb_lanes16 clb_dots16_end(const uint32_t precision, clb_dots16 sums, clb_ints16 correction) {
  (void)precision;
  (void)correction;
  return _mm512_cvtepi32_ps(sums);
}

#endif /* CLB_CPU_DOTS16_VNNI_H */
