/*
 * attention.h: grouped-query attention of tokens of one slot over its KV, and appending to it.
 *
 * K and V of one (run, layer), elements of the KV precision (the layout of cache_pool.h). The capacity is a multiple of
 * 16; K lies in tiles of 16 positions, so that the scores of 16 positions are one vector; V lies row by row:
 *   K  [kv_head][capacity / 16][head_dim][16]
 *   V  [kv_head][capacity][head_dim]
 * The positions of a slot are those of its shared prefix run, then those of its own run:
 *   position  0 .. prefix_tokens - 1        -> index position of the prefix run
 *             prefix_tokens .. tokens - 1   -> index position - prefix_tokens of the own run
 *
 * Order of additions: a score over the dimensions in rising order; positions in blocks of CLB_ATTENTION_BLOCK counted
 * from position 0, in a block rising, a running maximum per block; the weights of a block in 16 partial sums by
 * position % 16. So the bits depend on the values, the window and the position alone, and are the same wherever the
 * border between prefix and own run lies and whichever other tokens are computed in the same call.
 *
 * The functions themselves are in ops.h.
 */
#ifndef CLB_CPU_ATTENTION_H
#define CLB_CPU_ATTENTION_H

#include <stdint.h>

#define CLB_ATTENTION_BLOCK 64u
#define CLB_KV_TILE 16u
#define CLB_MAX_HEAD_DIM 256u

/* One layer of one run. */
typedef struct clb_kv_layer {
  void* k;           /* (kv_heads, capacity / 16, head_dim, 16) */
  void* v;           /* (kv_heads, capacity, head_dim) */
  uint32_t capacity; /* tokens; a multiple of CLB_KV_TILE */
  uint32_t reserved;
} clb_kv_layer;

/* One layer of what a slot sees. */
typedef struct clb_attention_kv {
  clb_kv_layer prefix;    /* unused when prefix_tokens is 0 */
  clb_kv_layer own;       /* unused when no position lies there */
  uint32_t prefix_tokens; /* positions below this lie in the prefix run, for reading and for writing */
  uint32_t reserved;
} clb_attention_kv;

typedef struct clb_attention_shape {
  uint32_t heads;
  uint32_t kv_heads;     /* divides heads */
  uint32_t head_dim;     /* even, at most CLB_MAX_HEAD_DIM */
  uint32_t kv_precision; /* CLB_FP32 or CLB_FP16 */
  float scale;
} clb_attention_shape;

#define CLB_ATTENTION_ROWS 16u /* most tokens of one call: each block of K and V is fetched once for all of them */

/* Tokens at positions position .. position + rows - 1 of one slot, and the query heads of one kv head. */
typedef struct clb_attention_work {
  const float* query;    /* (rows, .. heads of kv_head .., head_dim): the first of these heads, of the first token */
  float* output;         /* the same */
  uint64_t query_stride; /* floats between tokens */
  uint64_t output_stride;
  uint32_t position;
  uint32_t rows; /* 1 .. CLB_ATTENTION_ROWS */
  uint32_t kv_head;
  uint32_t window; /* a token sees itself and window - 1 before it; 0 = all before it */
} clb_attention_work;

#endif /* CLB_CPU_ATTENTION_H */
