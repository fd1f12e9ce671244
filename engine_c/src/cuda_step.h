/*
 * cuda_step.h: a step under construction, shared by cuda_step.c (decode, and what both kinds of step begin and end
 * with) and cuda_prompt.c (the layers of a prefill step), and by nobody else.
 */
#ifndef CLB_CUDA_STEP_H
#define CLB_CUDA_STEP_H

#include <stdbool.h>
#include <stddef.h>

#include "cuda_internal.h"
#include "invariant.h"

/* A step under construction. */
typedef struct builder {
  clb_engine* engine;
  struct clb_cuda* cuda;
  uint32_t rows;      /* of the bucket */
  uint64_t row_count; /* device address of how many of them there are */
  uint32_t edge;      /* of the next launch */
  uint32_t nodes;     /* launched so far */
  int32_t status;     /* the first failure; then nothing more is launched */
} builder;

/* row_count: offset of the step's count of rows in device memory. */
static inline builder begin(clb_engine* engine, uint32_t rows, uint64_t row_count) {
  return (builder){engine, engine->cuda, rows, clb_cuda_at(engine->cuda, row_count), CLB_EDGE_FULL, 0u, CLB_OK};
}

static inline void launch(builder* b, uint32_t kernel, const void* args, const uint32_t grid[3], uint32_t threads,
                          uint32_t shared_bytes) {
  if (b->status != CLB_OK) {
    return;
  }
  const clb_launch launched = {.function = b->cuda->functions[kernel],
                               .args = args,
                               .grid = {grid[0], grid[1], grid[2]},
                               .block = {threads, 1u, 1u},
                               .shared_bytes = shared_bytes,
                               .edge = b->edge};
  b->status = b->cuda->driver.launch(&b->cuda->driver, b->cuda->device.stream, &launched);
  b->edge = CLB_EDGE_PROGRAMMATIC;
  ++b->nodes;
  CLB_ASSERT(b->nodes <= clb_cuda_step_nodes(b->engine->model.layers));
}

static inline uint32_t divide_up(uint32_t value, uint32_t by) { return (value + by - 1u) / by; }

/* Device address of a tensor; 0: the model has none. */
static inline uint64_t weight(const builder* b, uint32_t role, uint32_t layer, int32_t expert) {
  return (uint64_t)(uintptr_t)clb_weight(b->cuda->weights, role, (int32_t)layer, expert)->data;
}

static inline uint32_t weight_format(const builder* b, uint32_t role, int32_t layer) {
  return clb_cuda_format(clb_weight(b->cuda->weights, role, layer, -1));
}

static inline uint64_t global(const builder* b, uint32_t role) {
  return (uint64_t)(uintptr_t)clb_weight(b->cuda->weights, role, -1, -1)->data;
}

static inline uint64_t at(const builder* b, uint64_t offset) { return clb_cuda_at(b->cuda, offset); }

static inline uint64_t wanted_count(const builder* b) {
  return at(b, b->cuda->at.rows) + (uint64_t)offsetof(clb_cuda_rows, wanted_count);
}
static inline uint64_t wanted(const builder* b) {
  return at(b, b->cuda->at.rows) + (uint64_t)offsetof(clb_cuda_rows, wanted);
}
static inline uint64_t rows_at(const builder* b) { return at(b, b->cuda->at.rows) + sizeof(clb_cuda_rows); }

/* Blocks of a kernel that shares out row tiles itself: as many as run at once, of `each` a multiprocessor. */
static inline uint32_t wanted_blocks(const builder* b, uint32_t tiles, uint32_t each) {
  const uint32_t most = b->cuda->device.multiprocessors * each;
  return tiles < most ? tiles : most;
}

/* The norm that the next reader of the residual needs, once layer `layer` is done. */
static inline uint64_t norm_after(const builder* b, uint32_t layer) {
  return layer + 1u < b->engine->model.layers ? weight(b, CLB_ROLE_ATTN_NORM, layer + 1u, -1)
                                              : global(b, CLB_ROLE_FINAL_NORM);
}

static inline clb_attention_dims dims_of(const builder* b, uint32_t layer) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_layer_desc* const desc = &model->layer_table[layer];
  return (clb_attention_dims){.layer_values = b->cuda->layer_values[layer],
                              .heads = model->heads,
                              .kv_heads = model->kv_heads,
                              .head_dim = model->head_dim,
                              .window = desc->window,
                              .qk_norm = desc->qk_norm,
                              .scale = model->attention_scale,
                              .epsilon = model->rms_norm_eps};
}

/* The shared expert's row of a layer's table; 0: the layer has none. */
static inline uint64_t shared_row(const builder* b, const clb_layer_desc* desc, uint32_t layer) {
  return desc->shared_width == 0u ? 0u : b->cuda->layer_tables[layer] + desc->experts * sizeof(clb_expert_weights);
}

/* Without the kind of step's own: block_rows of the first, block_counts and block_tokens of the second. */
static inline clb_router_logits_args router_logits_args(const builder* b, uint32_t layer) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_cuda_layout* const p = &b->cuda->at;
  return (clb_router_logits_args){.weights = weight(b, CLB_ROLE_ROUTER, layer, -1),
                                  .shared_gate = weight(b, CLB_ROLE_SHARED_GATE, layer, -1),
                                  .norm = weight(b, CLB_ROLE_FFN_NORM, layer, -1),
                                  .residual = at(b, p->residual),
                                  .sumsq = at(b, p->sumsq[1]),
                                  .row_count = b->row_count,
                                  .logits = at(b, p->router_logits),
                                  .shared_scale = at(b, p->shared_scale),
                                  .experts = model->layer_table[layer].experts,
                                  .hidden = model->hidden,
                                  .epsilon = model->rms_norm_eps};
}

static inline clb_router_args router_args(const builder* b, uint32_t layer) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_layer_desc* const desc = &model->layer_table[layer];
  const clb_cuda_layout* const p = &b->cuda->at;
  const uint64_t counts_row = b->engine->config.channel.max_experts;
  return (clb_router_args){.logits = at(b, p->router_logits),
                           .policy = at(b, p->policies) + layer * sizeof(clb_router_policy),
                           .rows = rows_at(b),
                           .token_count = b->row_count,
                           .indices = at(b, p->indices),
                           .weights = at(b, p->expert_weights),
                           .kept = at(b, p->kept),
                           .slots = at(b, p->slots),
                           .expert_counts = at(b, p->expert_counts) + layer * counts_row * sizeof(uint32_t),
                           .logits_stride = desc->experts,
                           .policy_stride = model->layers,
                           .counts_stride = model->layers * counts_row,
                           .experts = desc->experts,
                           .k = desc->experts_per_token,
                           .k_max = b->engine->sizes.k_max,
                           .score = desc->score,
                           .renormalise = desc->renormalise,
                           .routed_scale = desc->routed_scale,
                           .not_finite = CLB_ERR_NOT_FINITE};
}

/* Whether an expert can have more tokens of this step than it may. */
static inline bool is_limited(const builder* b) {
  const uint32_t most = b->engine->config.max_tokens_per_expert;
  return most != 0u && most < b->rows;
}

/* To drop assignments beyond max_tokens_per_expert; without what prompts add: bucket lists. */
static inline clb_capacity_args capacity_args(const builder* b, uint32_t layer) {
  const clb_cuda_layout* const p = &b->cuda->at;
  const clb_layer_desc* const desc = &b->engine->model.layer_table[layer];
  const uint64_t counts_row = b->engine->config.channel.max_experts;
  return (clb_capacity_args){.indices = at(b, p->indices),
                             .weights = at(b, p->expert_weights),
                             .rows = rows_at(b),
                             .token_count = b->row_count,
                             .slots = at(b, p->slots),
                             .expert_counts = at(b, p->expert_counts) + layer * counts_row * sizeof(uint32_t),
                             .counts_stride = b->engine->model.layers * counts_row,
                             .experts = desc->experts,
                             .k_max = b->engine->sizes.k_max,
                             .max_tokens = b->engine->config.max_tokens_per_expert};
}

/* The layers of a prefill step. */
void clb_cuda_prompt_layers(builder* b);

#endif /* CLB_CUDA_STEP_H */
