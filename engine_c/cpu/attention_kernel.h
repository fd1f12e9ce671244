/*
 * attention_kernel.h: attention and append for one instruction set; part of ops.c. Contract: attention.h, ops.h.
 *
 * All query heads of some tokens walk over K and V together, block by block:
 *
 *   block   64 positions, as far as one of the tokens sees them; in the prefix run, the own run, or some in each
 *     scores    K tiles x queries       micro.h: tiles of 16 positions, columns are the head's dimensions
 *     weights   exp(score - largest so far); 0 for positions that a token does not see
 *     values    V columns x weights     micro.h: tiles of 16 dimensions, columns are the positions
 *   output = output * exp(largest before - largest) + values
 *
 * A weight of 0 changes no bit of a sum, so it does not matter how much of a block other tokens see.
 */
#ifndef CLB_CPU_ATTENTION_KERNEL_H
#define CLB_CPU_ATTENTION_KERNEL_H

#include <math.h>
#include <string.h>

#include "attention.h"
#include "colibri.h"
#include "micro.h"

enum {
  TILE = CLB_KV_TILE,
  BLOCK = CLB_ATTENTION_BLOCK,
  QUERIES = CLB_MICRO_VECTORS,          /* of one pass */
  QUERY_STRIDE = CLB_MAX_HEAD_DIM + 16, /* off a power of two */
  WEIGHT_STRIDE = BLOCK + 16,
  SCORE_TILES = BLOCK / TILE + 1, /* positions of an own run may begin inside a tile */
  DIM_TILES = CLB_MAX_HEAD_DIM / TILE,
  GROUP = CLB_GROUP < 6 ? CLB_GROUP : 6 /* there are four tiles and more, so larger groups gain nothing */
};

/* Up to QUERIES queries of one call: number first + q is head (first + q) % group of token (first + q) / group. */
typedef struct pass {
  const clb_attention_shape* shape;
  const clb_attention_kv* kv;
  const clb_attention_work* work;
  size_t group; /* query heads of the kv head */
  size_t first;
  size_t count;
  float largest[QUERIES];
  float weight_sum[QUERIES];
  float factor[QUERIES];                 /* of what was summed before this block */
  float queries[QUERIES][QUERY_STRIDE];  /* times scale */
  float weights[QUERIES][WEIGHT_STRIDE]; /* by position in the block: scores, then weights */
} pass;

/* Some positions of a block that lie in one run. */
typedef struct segment {
  const clb_kv_layer* run;
  uint32_t begin; /* positions */
  uint32_t end;
  uint32_t index; /* of begin in the run */
  uint32_t reserved;
} segment;

static segment segment_of(const clb_attention_kv* kv, uint32_t begin, uint32_t end) {
  if (begin < kv->prefix_tokens) {
    return (segment){&kv->prefix, begin, end < kv->prefix_tokens ? end : kv->prefix_tokens, begin, 0};
  }
  return (segment){&kv->own, begin, end, begin - kv->prefix_tokens, 0};
}

static uint32_t first_seen(const clb_attention_work* work, size_t row) {
  const uint32_t tokens = work->position + (uint32_t)row + 1u;
  return work->window != 0u && work->window < tokens ? tokens - work->window : 0u;
}

static float* output_of(const pass* p, size_t q) {
  const size_t number = p->first + q;
  return p->work->output + number / p->group * p->work->output_stride + number % p->group * p->shape->head_dim;
}

static size_t element_bytes(const clb_attention_shape* shape) { return shape->kv_precision == CLB_FP32 ? 4u : 2u; }

static void scores_fp32(const clb_micro* work, size_t vectors) {
  clb_micro_group(work, vectors, GROUP, CLB_FP32, TILE, QUERY_STRIDE, 0);
}

static void scores_fp16(const clb_micro* work, size_t vectors) {
  clb_micro_group(work, vectors, GROUP, CLB_FP16, TILE, QUERY_STRIDE, 0);
}

static void values_fp32(const clb_micro* work, size_t vectors) {
  clb_micro_group(work, vectors, GROUP, CLB_FP32, work->stride, WEIGHT_STRIDE, 1);
}

static void values_fp16(const clb_micro* work, size_t vectors) {
  clb_micro_group(work, vectors, GROUP, CLB_FP16, work->stride, WEIGHT_STRIDE, 1);
}

/* Scores of queries [q, end) against the segment's positions, into their places of the block at `block`. */
static void add_scores(pass* p, const segment* part, uint32_t block, size_t q, size_t end) {
  const size_t dim = p->shape->head_dim;
  const size_t tile_bytes = TILE * dim * element_bytes(p->shape);
  const size_t shift = part->index % TILE;
  const size_t count = part->end - part->begin;
  const unsigned char* const k =
      (const unsigned char*)part->run->k +
      ((size_t)p->work->kv_head * part->run->capacity + part->index - shift) / TILE * tile_bytes;
  const void* tiles[SCORE_TILES];
  const void* next[SCORE_TILES];
  clb_micro_sums sums[SCORE_TILES];
  const size_t tile_count = (shift + count + TILE - 1u) / TILE;
  for (size_t n = 0; n < tile_count; ++n) {
    tiles[n] = k + n * tile_bytes;
    next[n] = k + (n + BLOCK / TILE) * tile_bytes;
    for (size_t i = 0; i < end - q; ++i) {
      sums[n][i] = clb_lanes16_spread(0.0f);
    }
  }
  const clb_micro product = {
      .tiles = tiles, .next = next, .count = tile_count, .x = p->queries[q], .cols = dim, .sums = sums};
  clb_micro_run(&product, end - q, GROUP, QUERY_STRIDE, p->shape->kv_precision == CLB_FP32 ? scores_fp32 : scores_fp16);
  for (size_t i = 0; i < end - q; ++i) {
    float scores[SCORE_TILES * TILE];
    for (size_t n = 0; n < tile_count; ++n) {
      clb_lanes16_store(sums[n][i], scores + n * TILE);
    }
    (void)memcpy(p->weights[q + i] + (part->begin - block), scores + shift, count * sizeof(float));
  }
}

/* Scores at places [from, to) of the block become weights against the new running maximum, all others 0. */
static void weigh(pass* p, size_t q, uint32_t from, uint32_t to) {
  float* const row = p->weights[q];
  for (uint32_t j = 0; j < from; ++j) {
    row[j] = -INFINITY;
  }
  for (uint32_t j = to; j < BLOCK; ++j) {
    row[j] = -INFINITY;
  }
  clb_lanes16 scores[BLOCK / TILE];
  clb_lanes16 highest = clb_lanes16_load(row);
  scores[0] = highest;
  for (size_t n = 1; n < BLOCK / TILE; ++n) {
    scores[n] = clb_lanes16_load(row + n * TILE);
    highest = clb_lanes16_max(highest, scores[n]);
  }
  const float before = p->largest[q];
  const float block_largest = clb_lanes16_largest(highest);
  const float largest = block_largest > before ? block_largest : before;
  const clb_lanes16 offset = clb_lanes16_spread(-largest);
  float change[CLB_LANES16];
  clb_lanes16_store(clb_lanes16_exp(clb_lanes16_spread(before - largest)), change); /* 0 at the first block */
  clb_lanes16 sum = clb_lanes16_spread(0.0f);
  for (size_t n = 0; n < BLOCK / TILE; ++n) {
    const clb_lanes16 weight = clb_lanes16_exp(clb_lanes16_add(scores[n], offset));
    clb_lanes16_store(weight, row + n * TILE);
    sum = clb_lanes16_add(sum, weight);
  }
  p->factor[q] = change[0];
  p->weight_sum[q] = p->weight_sum[q] * change[0] + clb_lanes16_sum(sum);
  p->largest[q] = largest;
}

/* `count` rows of V, whose length is no multiple of 16, as fp32 rows of `padded` values. */
static void pad_rows(const clb_attention_shape* shape, const void* v, size_t count, size_t padded, float* rows) {
  const size_t dim = shape->head_dim;
  for (size_t j = 0; j < count; ++j) {
    for (size_t d = 0; d < padded; ++d) {
      const size_t at = j * dim + d;
      const float value = d >= dim                          ? 0.0f
                          : shape->kv_precision == CLB_FP32 ? ((const float*)v)[at]
                                                            : clb_float_of_half(((const uint16_t*)v)[at]);
      rows[j * padded + d] = value;
    }
  }
}

/* sums[n][i] += dimensions 16 n .. of V, weighted for query q + i, at the segment's positions in rising order. */
static void add_values(const pass* p, const segment* part, uint32_t block, size_t q, size_t end, clb_micro_sums* sums) {
  const size_t dim = p->shape->head_dim;
  const size_t tile_count = (dim + TILE - 1u) / TILE;
  const size_t count = part->end - part->begin;
  const unsigned char* v =
      (const unsigned char*)part->run->v +
      ((size_t)p->work->kv_head * part->run->capacity + part->index) * dim * element_bytes(p->shape);
  size_t element = element_bytes(p->shape);
  size_t stride = dim;
  float padded[BLOCK * CLB_MAX_HEAD_DIM];
  if (dim % TILE != 0u) {
    stride = tile_count * TILE;
    pad_rows(p->shape, v, count, stride, padded);
    v = (const unsigned char*)(const void*)padded;
    element = sizeof(float);
  }
  const void* tiles[DIM_TILES];
  const void* next[DIM_TILES];
  for (size_t n = 0; n < tile_count; ++n) {
    tiles[n] = v + n * TILE * element;
    next[n] = v + (n * TILE + BLOCK * stride) * element;
  }
  const clb_micro product = {.tiles = tiles,
                             .next = next,
                             .count = tile_count,
                             .x = p->weights[q] + (part->begin - block),
                             .cols = count,
                             .stride = stride,
                             .sums = sums};
  clb_micro_run(&product, end - q, GROUP, WEIGHT_STRIDE, element == sizeof(float) ? values_fp32 : values_fp16);
}

/* Queries [q, end) of the pass against positions [begin, limit) of the block at `block`. */
static void attend_block(pass* p, uint32_t block, uint32_t begin, uint32_t limit, size_t q, size_t end) {
  const size_t dim = p->shape->head_dim;
  clb_micro_sums sums[DIM_TILES];
  for (segment part = segment_of(p->kv, begin, limit);; part = segment_of(p->kv, part.end, limit)) {
    add_scores(p, &part, block, q, end);
    if (part.end == limit) {
      break;
    }
  }
  for (size_t i = q; i < end; ++i) {
    const size_t row = (p->first + i) / p->group;
    const uint32_t first = first_seen(p->work, row);
    const uint32_t tokens = p->work->position + (uint32_t)row + 1u;
    weigh(p, i, first > block ? first - block : 0u, (tokens < limit ? tokens : limit) - block);
    for (size_t n = 0; n * TILE < dim; ++n) {
      sums[n][i - q] = clb_lanes16_spread(0.0f);
    }
  }
  for (segment part = segment_of(p->kv, begin, limit);; part = segment_of(p->kv, part.end, limit)) {
    add_values(p, &part, block, q, end, sums);
    if (part.end == limit) {
      break;
    }
  }
  for (size_t i = q; i < end; ++i) {
    float* const output = output_of(p, i);
    const clb_lanes16 factor = clb_lanes16_spread(p->factor[i]);
    for (size_t d = 0; d < dim; d += TILE) {
      const clb_lanes16 sum = sums[d / TILE][i - q];
      if (dim - d >= TILE) {
        clb_lanes16_store(clb_lanes16_add_product(sum, clb_lanes16_load(output + d), factor), output + d);
      } else {
        const clb_lanes16 before = clb_lanes16_load_some(output + d, dim - d);
        clb_lanes16_store_some(clb_lanes16_add_product(sum, before, factor), dim - d, output + d);
      }
    }
  }
}

static void start_pass(pass* p) {
  const size_t dim = p->shape->head_dim;
  for (size_t q = 0; q < p->count; ++q) {
    const size_t number = p->first + q;
    const float* const query = p->work->query + number / p->group * p->work->query_stride + number % p->group * dim;
    for (size_t d = 0; d < dim; ++d) {
      p->queries[q][d] = query[d] * p->shape->scale;
    }
    (void)memset(output_of(p, q), 0, dim * sizeof(float));
    p->largest[q] = -INFINITY;
    p->weight_sum[q] = 0.0f;
  }
}

static void run_pass(pass* p) {
  const size_t dim = p->shape->head_dim;
  const size_t first_row = p->first / p->group;
  const size_t last_row = (p->first + p->count - 1u) / p->group;
  const uint32_t tokens = p->work->position + (uint32_t)last_row + 1u; /* that the last one sees */
  const uint32_t low = first_seen(p->work, first_row);
  start_pass(p);
  for (uint32_t block = low - low % BLOCK; block < tokens; block += BLOCK) {
    const uint32_t limit = tokens - block < BLOCK ? tokens : block + BLOCK;
    size_t row = first_row; /* rows [row, end) see something of the block */
    size_t end = last_row + 1u;
    while (p->work->position + row + 1u <= block) {
      ++row;
    }
    while (first_seen(p->work, end - 1u) >= limit) {
      --end;
    }
    const size_t q = row * p->group > p->first ? row * p->group - p->first : 0u;
    const size_t left = end * p->group - p->first;
    attend_block(p, block, low > block ? low : block, limit, q, left < p->count ? left : p->count);
  }
  for (size_t q = 0; q < p->count; ++q) {
    float* const output = output_of(p, q);
    const float scale = 1.0f / p->weight_sum[q];
    for (size_t d = 0; d < dim; ++d) {
      output[d] *= scale;
    }
  }
}

static void clb_kernel_attention(const clb_attention_shape* shape, const clb_attention_kv* kv,
                                 const clb_attention_work* work) {
  pass p;
  p.shape = shape;
  p.kv = kv;
  p.work = work;
  p.group = shape->heads / shape->kv_heads;
  const size_t all = work->rows * p.group;
  for (p.first = 0; p.first < all; p.first += QUERIES) {
    p.count = all - p.first < QUERIES ? all - p.first : QUERIES;
    run_pass(&p);
  }
}

/* `values` to every `step`-th element from `element` on. */
static void store_values(const clb_attention_shape* shape, const float* values, void* base, size_t element,
                         size_t step) {
  const size_t dim = shape->head_dim;
  if (shape->kv_precision == CLB_FP32) {
    float* const target = (float*)base + element;
    for (size_t d = 0; d < dim; ++d) {
      target[d * step] = values[d];
    }
    return;
  }
  uint16_t* const target = (uint16_t*)base + element;
  for (size_t d = 0; d < dim; d += CLB_LANES16) {
    uint16_t halves[CLB_LANES16];
    const size_t count = dim - d < CLB_LANES16 ? dim - d : CLB_LANES16;
    clb_lanes16_store_half(
        count == CLB_LANES16 ? clb_lanes16_load(values + d) : clb_lanes16_load_some(values + d, count), halves);
    for (size_t i = 0; i < count; ++i) {
      target[(d + i) * step] = halves[i];
    }
  }
}

static void clb_kernel_kv_append(const clb_attention_shape* shape, const clb_attention_kv* kv, uint32_t position,
                                 const float* values) {
  const size_t dim = shape->head_dim;
  const segment place = segment_of(kv, position, position + 1u);
  for (size_t h = 0; h < shape->kv_heads; ++h) {
    const size_t row = h * place.run->capacity + place.index;
    store_values(shape, values + h * dim, place.run->k, row / TILE * TILE * dim + row % TILE, TILE);
    store_values(shape, values + (shape->kv_heads + h) * dim, place.run->v, row * dim, 1);
  }
}

#endif /* CLB_CPU_ATTENTION_KERNEL_H */
