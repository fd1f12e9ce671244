/*
 * micro.h: products of up to sixteen tiles of 16 rows with a few vectors, the inner loop of matrices and of attention.
 *
 *   tile n, column c   16 numbers from tiles[n] + c * stride elements on, widened where they are used
 *   vector t           x + t * x_stride
 *   sums[n][t]         16 sums, one a row: += sum over c of column c * x_t[c], c rising
 *
 * As many sums as the registers hold are done at once (CLB_GROUP, CLB_GROUP_TILES of lanes16_*.h). Everything that is
 * called constant below must be a constant where the functions are inlined.
 */
#ifndef CLB_CPU_MICRO_H
#define CLB_CPU_MICRO_H

#include <stddef.h>

#include "colibri.h"
#include "lanes16.h"

#define CLB_ALWAYS_INLINE inline __attribute__((always_inline))
#define CLB_MICRO_VECTORS 64u /* row length of sums */
#define CLB_MICRO_TILES 8u    /* most at once */
#define CLB_MICRO_AHEAD 32u   /* columns that a stream is prefetched ahead */
/* With so few vectors memory is what counts, and many tiles at once are as many streams. */
#define CLB_MICRO_STREAMS(vectors) ((vectors) <= 3u && CLB_GROUP_TILES(vectors) >= 4u)

typedef clb_lanes16 clb_micro_sums[CLB_MICRO_VECTORS];

typedef struct clb_micro {
  const void* const* tiles; /* (count) */
  const void* const* next;  /* (count): what to prefetch column by column meanwhile, unless streamed */
  size_t count;             /* of tiles */
  const float* x;
  size_t cols;
  size_t stride;        /* elements between columns, for callers to whom it is no constant */
  clb_micro_sums* sums; /* (count) */
} clb_micro;

/* precision is constant. */
static CLB_ALWAYS_INLINE size_t clb_micro_bytes(const uint32_t precision) {
  return precision == CLB_FP32 ? 4u : precision == CLB_FP8 ? 1u : 2u;
}

/* The 16 numbers of one column; a 256th of them of FP8. */
static CLB_ALWAYS_INLINE clb_lanes16 clb_micro_column(const uint32_t precision, const void* place) {
  switch (precision) {
    case CLB_FP32:
      return clb_lanes16_load(place);
    case CLB_FP16:
      return clb_lanes16_load_half(place);
    case CLB_FP8:
      return clb_lanes16_load_fp8(place);
    default:
      return clb_lanes16_load_bf16(place);
  }
}

/* `count` tiles from `first` on with `vectors` vectors. chained: the sums go on from where they are; else the products
   are added up by themselves, then to the sums. All but work, first and stride are constant. */
static CLB_ALWAYS_INLINE void clb_micro_block(const clb_micro* work, size_t first, const size_t count,
                                              const size_t vectors, const uint32_t precision, size_t stride,
                                              const size_t x_stride, const int chained) {
  clb_lanes16 s[CLB_MICRO_TILES][CLB_GROUP];
  /* Of tiles and vectors the fewer stay in registers while the others come one by one. */
  const int by_tile = vectors < count;
  const size_t fewer = by_tile ? vectors : count;
  const size_t more = by_tile ? count : vectors;
  const unsigned char* tiles[CLB_MICRO_TILES];
  const unsigned char* next[CLB_MICRO_TILES];
#pragma GCC unroll 8
  for (size_t n = 0; n < count; ++n) {
    tiles[n] = work->tiles[first + n];
    next[n] = work->next[first + n];
#pragma GCC unroll 12
    for (size_t t = 0; t < vectors; ++t) {
      s[n][t] = chained ? work->sums[first + n][t] : clb_lanes16_spread(0.0f);
    }
  }
  for (size_t c = 0; c < work->cols; ++c) {
    const size_t at = c * stride * clb_micro_bytes(precision);
    clb_lanes16 few[CLB_MICRO_TILES];
#pragma GCC unroll 8
    for (size_t n = 0; n < count; ++n) {
      const size_t ahead = CLB_MICRO_AHEAD * stride * clb_micro_bytes(precision);
      __builtin_prefetch(CLB_MICRO_STREAMS(vectors) ? tiles[n] + at + ahead : next[n] + at);
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < fewer; ++i) {
      few[i] = by_tile ? clb_lanes16_spread(work->x[i * x_stride + c]) : clb_micro_column(precision, tiles[i] + at);
    }
#pragma GCC unroll 12
    for (size_t i = 0; i < more; ++i) {
      const clb_lanes16 one =
          by_tile ? clb_micro_column(precision, tiles[i] + at) : clb_lanes16_spread(work->x[i * x_stride + c]);
#pragma GCC unroll 8
      for (size_t j = 0; j < fewer; ++j) {
        clb_lanes16* const sum = by_tile ? &s[i][j] : &s[j][i];
        *sum = clb_lanes16_add_product(*sum, few[j], one);
      }
    }
  }
#pragma GCC unroll 8
  for (size_t n = 0; n < count; ++n) {
#pragma GCC unroll 12
    for (size_t t = 0; t < vectors; ++t) {
      work->sums[first + n][t] = chained ? s[n][t] : clb_lanes16_add(work->sums[first + n][t], s[n][t]);
    }
  }
}

/* All tiles with `vectors` <= CLB_GROUP vectors. All but work and stride is constant. */
static CLB_ALWAYS_INLINE void clb_micro_tiles(const clb_micro* work, const size_t vectors, const uint32_t precision,
                                              size_t stride, const size_t x_stride, const int chained) {
  size_t n = 0;
  for (; CLB_GROUP_TILES(vectors) >= 8u && n + 8u <= work->count; n += 8) {
    clb_micro_block(work, n, 8, vectors, precision, stride, x_stride, chained);
  }
  for (; CLB_GROUP_TILES(vectors) >= 4u && n + 4u <= work->count; n += 4) {
    clb_micro_block(work, n, 4, vectors, precision, stride, x_stride, chained);
  }
  for (; CLB_GROUP_TILES(vectors) >= 2u && n + 2u <= work->count; n += 2) {
    clb_micro_block(work, n, 2, vectors, precision, stride, x_stride, chained);
  }
  for (; n < work->count; ++n) {
    clb_micro_block(work, n, 1, vectors, precision, stride, x_stride, chained);
  }
}

#define CLB_MICRO_CASE(vectors)                                               \
  case vectors:                                                               \
    if ((vectors) <= most) {                                                  \
      clb_micro_tiles(work, (vectors), precision, stride, x_stride, chained); \
    }                                                                         \
    break

/* All tiles with 1 .. most vectors, most <= CLB_GROUP. most, precision, x_stride and chained are constant. */
static CLB_ALWAYS_INLINE void clb_micro_group(const clb_micro* work, size_t vectors, const size_t most,
                                              const uint32_t precision, size_t stride, const size_t x_stride,
                                              const int chained) {
  switch (vectors) {
    CLB_MICRO_CASE(1);
    CLB_MICRO_CASE(2);
    CLB_MICRO_CASE(3);
    CLB_MICRO_CASE(4);
    CLB_MICRO_CASE(5);
    CLB_MICRO_CASE(6);
    CLB_MICRO_CASE(7);
    CLB_MICRO_CASE(8);
    CLB_MICRO_CASE(9);
    CLB_MICRO_CASE(10);
    CLB_MICRO_CASE(11);
    CLB_MICRO_CASE(12);
    default:
      break;
  }
}
#undef CLB_MICRO_CASE

/* Vectors are taken in groups of nearly equal size, at most `most`; this many tiles go with a group. */
static inline size_t clb_micro_groups(size_t vectors, size_t most) { return (vectors + most - 1u) / most; }

static inline size_t clb_micro_step(size_t vectors, size_t most) {
  const size_t groups = clb_micro_groups(vectors, most);
  return CLB_GROUP_TILES((vectors + groups - 1u) / groups);
}

/* Any number of tiles with 1 .. CLB_MICRO_VECTORS vectors: tiles outside, so that they stay in the first-level cache
   for all groups. group: a clb_micro_group with its constants, among them `most`. */
static inline void clb_micro_run(const clb_micro* work, size_t vectors, size_t most, size_t x_stride,
                                 void (*group)(const clb_micro* work, size_t vectors)) {
  const size_t groups = clb_micro_groups(vectors, most);
  const size_t step = clb_micro_step(vectors, most);
  for (size_t n = 0; n < work->count; n += step) {
    for (size_t g = 0; g < groups; ++g) {
      const size_t first = vectors * g / groups;
      clb_micro part = *work;
      part.tiles += n;
      part.next += n;
      part.count = work->count - n < step ? work->count - n : step;
      part.x += first * x_stride;
      part.sums = (clb_micro_sums*)(void*)&work->sums[n][first];
      group(&part, vectors * (g + 1u) / groups - first);
    }
  }
}

#endif /* CLB_CPU_MICRO_H */
