/* dots16_generic.h: see dots16.h. For any machine; the reference of the others. */
#ifndef CLB_CPU_DOTS16_GENERIC_H
#define CLB_CPU_DOTS16_GENERIC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "lanes16.h"

#define CLB_DOTS16_ISA CLB_ISA
#define CLB_DOTS16_RANK CLB_ISA_RANK
#define CLB_DOTS16_MOVED 0
#define CLB_DOTS16_TOKENS 2u /* at once; with so many tiles: */
#define CLB_DOTS16_TILES(tokens) ((tokens) == 1u ? 2u : 1u)

typedef struct clb_ints16 {
  int32_t lane[16];
} clb_ints16;

typedef clb_ints16 clb_dots16;

typedef struct clb_bytes64 {
  int8_t value[64];
} clb_bytes64;

static inline int32_t clb_dots16_supported(void) { return clb_isa_supported(); }

static inline clb_ints16 clb_ints16_spread(int32_t value) {
  clb_ints16 all;
  for (size_t r = 0; r < 16u; ++r) {
    all.lane[r] = value;
  }
  return all;
}

/* factor times 16 bytes */
static inline clb_ints16 clb_ints16_scale(const uint8_t* bytes, int32_t factor) {
  clb_ints16 all;
  for (size_t r = 0; r < 16u; ++r) {
    all.lane[r] = factor * bytes[r];
  }
  return all;
}

static inline clb_bytes64 clb_bytes64_int8(const unsigned char* place) {
  clb_bytes64 bytes;
  (void)memcpy(bytes.value, place, sizeof bytes.value);
  return bytes;
}

static inline void clb_bytes64_int4(const unsigned char* place, clb_bytes64* low, clb_bytes64* high) {
  for (size_t i = 0; i < 64u; ++i) {
    low->value[i] = (int8_t)(place[i] & 15u);
    high->value[i] = (int8_t)(place[i] >> 4);
  }
}

static inline clb_dots16 clb_dots16_begin(const uint32_t precision, clb_ints16 correction) {
  (void)precision;
  return correction;
}

static inline clb_dots16 clb_dots16_add(const uint32_t precision, clb_dots16 sums, clb_bytes64 weights,
                                        const int8_t* codes) {
  (void)precision;
  for (size_t r = 0; r < 16u; ++r) {
    int32_t sum = sums.lane[r];
    for (size_t c = 0; c < 4u; ++c) {
      sum += weights.value[4u * r + c] * codes[c];
    }
    sums.lane[r] = sum;
  }
  return sums;
}

static inline clb_lanes16 clb_dots16_end(const uint32_t precision, clb_dots16 sums, clb_ints16 correction) {
  float values[16];
  (void)precision;
  (void)correction;
  for (size_t r = 0; r < 16u; ++r) {
    values[r] = (float)sums.lane[r];
  }
  return clb_lanes16_load(values);
}

#endif /* CLB_CPU_DOTS16_GENERIC_H */
