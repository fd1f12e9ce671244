/*
 * attention.h: grouped-query attention of one token over its slot's KV, and appending to it.
 *
 * KV of one (run, layer), in values of the KV precision:
 *   token 0                         | token 1 ...
 *   K (kv_heads, head_dim) | V (kv_heads, head_dim) | K | V ...
 * The positions of a slot are those of its shared prefix run, then those of its own run:
 *   position  0 .. prefix_tokens - 1        -> prefix[position]
 *             prefix_tokens .. tokens - 1   -> own[position - prefix_tokens]
 *
 * Order of additions: positions in rising order in blocks of CLB_ATTENTION_BLOCK counted from position
 * 0, a running maximum per block; so the bits depend on the values and the length alone, and are the
 * same wherever the border between prefix and own run lies.
 *
 * Pure but for the memory written; no allocation; thread-safe for different outputs.
 */
#ifndef CLB_CPU_ATTENTION_H
#define CLB_CPU_ATTENTION_H

#include <stdint.h>

#define CLB_ATTENTION_BLOCK 64u
#define CLB_MAX_HEAD_DIM 256u

typedef struct clb_kv_view {
  const void* prefix; /* one layer of the prefix run; may be NULL when prefix_tokens is 0 */
  const void* own;    /* one layer of the own run */
  uint32_t prefix_tokens;
  uint32_t tokens;    /* positions to attend to, prefix included; > 0 */
} clb_kv_view;

typedef struct clb_attention_shape {
  uint32_t heads;
  uint32_t kv_heads;     /* divides heads */
  uint32_t head_dim;     /* even, at most CLB_MAX_HEAD_DIM */
  uint32_t kv_precision; /* CLB_FP32 or CLB_FP16 */
  float scale;
} clb_attention_shape;

/* output (heads, head_dim) = softmax(scale * query . K) V. query: (heads, head_dim). */
void clb_attention(const clb_attention_shape* shape, const clb_kv_view* kv, const float* query, float* output);

/* Writes one token's K and V, (2, kv_heads, head_dim) fp32, at place `index` of one layer of a run.
   fp16 rounds to nearest even and saturates. */
void clb_kv_append(const clb_attention_shape* shape, const float* values, uint32_t index, void* run_layer);

#endif /* CLB_CPU_ATTENTION_H */
