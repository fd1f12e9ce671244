/*
 * lanes16.h: sixteen fp32 numbers, one per row of a tile, in the registers of the instruction set that a file is
 * compiled for. Every lanes16_*.h has the same functions; they differ in speed, and in the last bits where
 * multiplication and addition are fused.
 */
#ifndef CLB_CPU_LANES16_H
#define CLB_CPU_LANES16_H

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "lanes16_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "lanes16_avx2.h"
#else
#include "lanes16_generic.h"
#endif

#include <string.h>

#define CLB_LANES16 16u

/* The first `count` < 16 lanes, the others 0. */
static inline clb_lanes16 clb_lanes16_load_some(const float* values, size_t count) {
  float part[CLB_LANES16] = {0};
  (void)memcpy(part, values, count * sizeof(float));
  return clb_lanes16_load(part);
}

/* The first `count` < 16 lanes; nothing is written behind them. */
static inline void clb_lanes16_store_some(clb_lanes16 lanes, size_t count, float* values) {
  float part[CLB_LANES16];
  clb_lanes16_store(lanes, part);
  (void)memcpy(values, part, count * sizeof(float));
}

/* Of a tile that may be the last one: `rows` are left. */
static inline void clb_lanes16_store_rows(clb_lanes16 values, size_t rows, float* output) {
  if (rows >= CLB_LANES16) {
    clb_lanes16_store(values, output);
  } else {
    clb_lanes16_store_some(values, rows, output);
  }
}

static inline clb_lanes16 clb_lanes16_load_rows(const float* values, size_t rows) {
  return rows >= CLB_LANES16 ? clb_lanes16_load(values) : clb_lanes16_load_some(values, rows);
}

static inline size_t clb_smaller(size_t a, size_t b) { return a < b ? a : b; }

#endif /* CLB_CPU_LANES16_H */
