/*
 * ops.h: what the engine does to rows besides matrix products, once for each instruction set behind one table.
 *
 * The table is chosen when the engine opens; nobody branches on the machine after that. One table's results have the
 * same bits for a row whatever other rows there are; two tables differ in the last bits where one fuses multiplication
 * and addition.
 *
 * Order of additions
 *   dot, rms_norm   64 partial sums: element i goes to sum i % 64, in rising order; sums 0 .. 15, 16 .. 31, .. are then
 *                   added as ((a + b) + (c + d)) and the 16 results as a tree (lanes16_*.h)
 *   attention       attention.h
 *
 * Pure but for the memory written; no allocation; thread-safe for different outputs; 256 KiB of stack.
 */
#ifndef CLB_CPU_OPS_H
#define CLB_CPU_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "attention.h"
#include "colibri.h"

typedef struct clb_ops {
  const char* name; /* "avx2" */
  uint32_t rank;    /* of several that are supported the highest is taken; generic = 0 */
  uint32_t reserved;
  int32_t (*supported)(void); /* 1 if this machine can run it */
  /* a . b */
  float (*dot)(const float* a, const float* b, size_t count);
  /* output[i] += input[i] */
  void (*add)(const float* input, size_t count, float* output);
  /* output[i] += factor * input[i] */
  void (*add_scaled)(const float* input, float factor, size_t count, float* output);
  /* output[t][c] = input[t][c] / sqrt(mean of input[t]^2 + epsilon) * weight[c]; output may be input */
  void (*rms_norm)(const float* input, const float* weight, float epsilon, uint32_t tokens, uint32_t cols,
                   float* output);
  /* A row of codes (colibri.h) of `cols` values. The same bits in every table. */
  void (*encode)(const float* input, uint32_t cols, unsigned char* codes);
  /* Turns each of `heads` vectors of 2 * half values by a table of clb_rope_table. */
  void (*rope)(const float* table, uint32_t half, uint32_t heads, float* values);
  /* Writes K and V of one position, given as (2, kv_heads, head_dim) fp32: K, then V. fp16 rounds to nearest even and
     saturates. */
  void (*kv_append)(const clb_attention_shape* shape, const clb_attention_kv* kv, uint32_t position,
                    const float* values);
  /* output = softmax(scale * query . K) V over the positions that each token sees; all of them were appended before. */
  void (*attention)(const clb_attention_shape* shape, const clb_attention_kv* kv, const clb_attention_work* work);
} clb_ops;

/* The tables that this library was built with, generic first; NULL past the last. */
const clb_ops* clb_ops_table(uint32_t index);
/* The supported table of the highest rank. */
const clb_ops* clb_ops_choose(void);

#endif /* CLB_CPU_OPS_H */
