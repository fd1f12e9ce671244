/*
 * cuda_step.c: a step as launches; docs/decisions/0004-cuda-engine.md has the nodes in order.
 *
 * Every launch but the first follows its predecessor with a programmatic edge. Nothing here depends on what a step
 * holds, only on how many rows its bucket has, so that a captured step serves every step of its bucket.
 */
#include <stdbool.h>
#include <stddef.h>

#include "cuda_internal.h"
#include "invariant.h"

#define EIGHT 8u      /* most rows of the kernels with _8 in their names */
#define MANY_ROWS 64u /* of input, and of weights, that a block of a many-row kernel takes at once */
#define MANY_WEIGHT_ROWS 128u
#define SAMPLE_THREADS 1024u
#define PUBLISH_THREADS 64u
#define PART_COLS 1024u /* of a shared expert: fewer columns are not worth a part */

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
static builder begin(clb_engine* engine, uint32_t rows, uint64_t row_count) {
  return (builder){engine, engine->cuda, rows, clb_cuda_at(engine->cuda, row_count), CLB_EDGE_FULL, 0u, CLB_OK};
}

static void launch(builder* b, uint32_t kernel, const void* args, const uint32_t grid[3], uint32_t threads,
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

static uint32_t divide_up(uint32_t value, uint32_t by) { return (value + by - 1u) / by; }

/* Device address of a tensor; 0: the model has none. */
static uint64_t weight(const builder* b, uint32_t role, uint32_t layer, int32_t expert) {
  return (uint64_t)(uintptr_t)clb_weight(b->cuda->weights, role, (int32_t)layer, expert)->data;
}

static uint64_t global(const builder* b, uint32_t role) {
  return (uint64_t)(uintptr_t)clb_weight(b->cuda->weights, role, -1, -1)->data;
}

static uint64_t at(const builder* b, uint64_t offset) { return clb_cuda_at(b->cuda, offset); }

static uint64_t wanted_count(const builder* b) {
  return at(b, b->cuda->at.rows) + (uint64_t)offsetof(clb_cuda_rows, wanted_count);
}
static uint64_t wanted(const builder* b) { return at(b, b->cuda->at.rows) + (uint64_t)offsetof(clb_cuda_rows, wanted); }
static uint64_t rows_at(const builder* b) { return at(b, b->cuda->at.rows) + sizeof(clb_cuda_rows); }

/* Blocks of a kernel that shares out row tiles itself: as many as run at once, of `each` a multiprocessor. */
static uint32_t wanted_blocks(const builder* b, uint32_t tiles, uint32_t each) {
  const uint32_t most = b->cuda->device.multiprocessors * each;
  return tiles < most ? tiles : most;
}

/* The norm that the next reader of the residual needs, once layer `layer` is done. */
static uint64_t norm_after(const builder* b, uint32_t layer) {
  return layer + 1u < b->engine->model.layers ? weight(b, CLB_ROLE_ATTN_NORM, layer + 1u, -1)
                                              : global(b, CLB_ROLE_FINAL_NORM);
}

static void embed(builder* b, uint64_t list) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_cuda_layout* const p = &b->cuda->at;
  const clb_embed_args args = {.embedding = global(b, CLB_ROLE_EMBEDDING),
                               .norm = weight(b, CLB_ROLE_ATTN_NORM, 0, -1),
                               .inv_freq = at(b, p->inv_freq),
                               .list = list,
                               .slots = at(b, p->slots),
                               .rows = rows_at(b),
                               .row_count = b->row_count,
                               .residual = at(b, p->residual),
                               .input = at(b, p->input[0]),
                               .sumsq = at(b, p->sumsq[0]),
                               .rope = at(b, p->rope),
                               .hidden = model->hidden,
                               .head_dim = model->head_dim,
                               .rope_scale = model->rope_scale};
  launch(b, CLB_CUDA_EMBED, &args, (uint32_t[3]){b->rows, 1u, 1u}, CLB_MATMUL_THREADS, 0u);
}

/* --------------------------------------------------------------- attention */

static void launch_linear(builder* b, const clb_matmul_args* args, uint32_t most_rows, bool many) {
  const uint32_t tiles = divide_up(args->rows, CLB_TILE);
  if (many) {
    launch(b, CLB_CUDA_LINEAR_MANY, args,
           (uint32_t[3]){divide_up(b->rows, MANY_ROWS), divide_up(args->rows, MANY_WEIGHT_ROWS), 1u},
           CLB_MATMUL_THREADS, CLB_MANY_SHARED);
  } else {
    const bool eight = most_rows <= EIGHT;
    launch(b, eight ? CLB_CUDA_LINEAR_8 : CLB_CUDA_LINEAR, args,
           (uint32_t[3]){wanted_blocks(b, tiles, eight ? CLB_LINEAR_8_BLOCKS : CLB_LINEAR_BLOCKS), 1u, 1u},
           CLB_MATMUL_THREADS, eight ? CLB_LINEAR_8_SHARED : CLB_LINEAR_SHARED);
  }
}

static void project_qkv(builder* b, uint32_t layer, bool many) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_cuda_layout* const p = &b->cuda->at;
  const uint32_t rows = (model->heads + 2u * model->kv_heads) * model->head_dim;
  const clb_matmul_args args = {.weights = weight(b, CLB_ROLE_QKV, layer, -1),
                                .bias = weight(b, CLB_ROLE_QKV_BIAS, layer, -1),
                                .input = at(b, p->input[0]),
                                .sumsq = at(b, p->sumsq[0]),
                                .row_count = b->row_count,
                                .output = at(b, p->qkv),
                                .output_stride = rows,
                                .rows = rows,
                                .cols = model->hidden,
                                .sumsq_count = model->hidden / CLB_TILE,
                                .epsilon = model->rms_norm_eps};
  launch_linear(b, &args, b->rows, many);
}

static void project_out(builder* b, uint32_t layer, bool many) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_cuda_layout* const p = &b->cuda->at;
  const clb_matmul_args args = {.weights = weight(b, CLB_ROLE_OUT, layer, -1),
                                .bias = weight(b, CLB_ROLE_OUT_BIAS, layer, -1),
                                .input = at(b, p->attended),
                                .row_count = b->row_count,
                                .residual = at(b, p->residual),
                                .next_norm = weight(b, CLB_ROLE_FFN_NORM, layer, -1),
                                .next_input = at(b, p->input[1]),
                                .next_sumsq = at(b, p->sumsq[1]),
                                .rows = model->hidden,
                                .cols = model->heads * model->head_dim,
                                .epsilon = model->rms_norm_eps};
  launch_linear(b, &args, b->rows, many);
}

static clb_attention_dims dims_of(const builder* b, uint32_t layer) {
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

static void attend_few(builder* b, uint32_t layer) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_cuda_layout* const p = &b->cuda->at;
  const clb_attend_args args = {.qkv = at(b, p->qkv),
                                .rope = at(b, p->rope),
                                .q_norm = weight(b, CLB_ROLE_Q_NORM, layer, -1),
                                .k_norm = weight(b, CLB_ROLE_K_NORM, layer, -1),
                                .rows = rows_at(b),
                                .row_count = b->row_count,
                                .slots = at(b, p->slots),
                                .partial = at(b, p->partial),
                                .partial_state = at(b, p->partial_state),
                                .tickets = at(b, p->attend_tickets),
                                .attended = at(b, p->attended),
                                .shape = dims_of(b, layer)};
  const uint32_t most = b->rows * model->heads * CLB_ATTENTION_SPLITS; /* items that there can be, or more */
  launch(b, CLB_CUDA_ATTEND, &args, (uint32_t[3]){wanted_blocks(b, most, CLB_ATTEND_BLOCKS), 1u, 1u}, 128u, 0u);
}

static void attend_many(builder* b, uint32_t layer) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_cuda_layout* const p = &b->cuda->at;
  const clb_prefill_attention_args args = {.qkv = at(b, p->qkv),
                                           .rope = at(b, p->rope),
                                           .q_norm = weight(b, CLB_ROLE_Q_NORM, layer, -1),
                                           .k_norm = weight(b, CLB_ROLE_K_NORM, layer, -1),
                                           .rows = rows_at(b),
                                           .row_count = b->row_count,
                                           .slots = at(b, p->slots),
                                           .attended = at(b, p->attended),
                                           .shape = dims_of(b, layer)};
  launch(b, CLB_CUDA_APPEND, &args, (uint32_t[3]){b->rows, 1u, 1u}, 128u, 0u);
  launch(b, CLB_CUDA_ATTEND_MANY, &args, (uint32_t[3]){model->heads, divide_up(b->rows, 64u), 1u}, 128u, 0u);
}

/* --------------------------------------------------------------------- FFN */

static clb_router_logits_args scores_of(const builder* b, uint32_t layer) {
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

/* block_counts: 0 in decode. */
static clb_router_args choice_of(const builder* b, uint32_t layer, uint64_t block_counts) {
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
                           .block_counts = block_counts,
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
                           .block_tokens = CLB_ROUTER_BLOCK_TOKENS,
                           .not_finite = CLB_ERR_NOT_FINITE};
}

/* Router scores and choice of a layer. many: in two nodes, with counts for the bucket kernel. */
static void route(builder* b, uint32_t layer, bool many) {
  const clb_cuda_layout* const p = &b->cuda->at;
  const clb_router_logits_args scores = scores_of(b, layer);
  const clb_router_args choice = choice_of(b, layer, many ? at(b, p->block_counts) : 0u);
  const uint32_t grid[3] = {divide_up(scores.experts + 1u, 4u), divide_up(b->rows, EIGHT), 1u};
  if (many) {
    launch(b, CLB_CUDA_ROUTER_LOGITS, &scores, grid, CLB_MATMUL_THREADS, 0u);
    launch(b, CLB_CUDA_ROUTER, &choice, (uint32_t[3]){divide_up(b->rows, CLB_ROUTER_BLOCK_TOKENS), 1u, 1u},
           CLB_ROUTER_THREADS, 0u);
  } else {
    const clb_route_args both = {.scores = scores, .choice = choice, .tickets = at(b, p->route_tickets)};
    launch(b, CLB_CUDA_ROUTE, &both, grid, CLB_MATMUL_THREADS, 0u);
  }
}

/* Whether an expert can have more tokens of this step than it may. */
static bool is_limited(const builder* b) {
  const uint32_t most = b->engine->config.max_tokens_per_expert;
  return most != 0u && most < b->rows;
}

/* Drops assignments beyond max_tokens_per_expert. many: after the bucket kernel. */
static void limit(builder* b, uint32_t layer, bool many) {
  const clb_cuda_layout* const p = &b->cuda->at;
  const clb_layer_desc* const desc = &b->engine->model.layer_table[layer];
  const uint64_t counts_row = b->engine->config.channel.max_experts;
  const clb_capacity_args args = {.indices = at(b, p->indices),
                                  .weights = at(b, p->expert_weights),
                                  .rows = rows_at(b),
                                  .token_count = b->row_count,
                                  .offsets = many ? at(b, p->bucket_offsets) : 0u,
                                  .places = many ? at(b, p->bucket_places) : 0u,
                                  .block_counts = many ? at(b, p->block_counts) : 0u,
                                  .slots = at(b, p->slots),
                                  .expert_counts = at(b, p->expert_counts) + layer * counts_row * sizeof(uint32_t),
                                  .counts_stride = b->engine->model.layers * counts_row,
                                  .experts = desc->experts,
                                  .k_max = b->engine->sizes.k_max,
                                  .max_tokens = b->engine->config.max_tokens_per_expert};
  launch(b, CLB_CUDA_CAPACITY, &args, (uint32_t[3]){desc->experts, 1u, 1u}, CLB_CAPACITY_THREADS, 0u);
}

/* The shared expert's row of a layer's table; 0: the layer has none. */
static uint64_t shared_row(const builder* b, const clb_layer_desc* desc, uint32_t layer) {
  return desc->shared_width == 0u ? 0u : b->cuda->layer_tables[layer] + desc->experts * sizeof(clb_expert_weights);
}

/* In how many parts the shared expert's columns are taken: as long as another expert's, but not too short. */
static uint32_t shared_parts(const clb_layer_desc* desc) {
  const uint32_t wanted = desc->shared_width / (desc->expert_width > PART_COLS ? desc->expert_width : PART_COLS);
  const uint32_t parts = wanted < CLB_SHARED_MAX_PARTS ? wanted : CLB_SHARED_MAX_PARTS;
  return desc->shared_width == 0u ? 0u : (parts == 0u ? 1u : parts);
}

static void experts_few(builder* b, uint32_t layer) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_layer_desc* const desc = &model->layer_table[layer];
  const clb_cuda_layout* const p = &b->cuda->at;
  const uint32_t k_max = b->engine->sizes.k_max;
  const clb_expert_gate_up_args up = {.experts = b->cuda->layer_tables[layer],
                                      .shared = shared_row(b, desc, layer),
                                      .indices = at(b, p->indices),
                                      .input = at(b, p->input[1]),
                                      .sumsq = at(b, p->sumsq[1]),
                                      .row_count = b->row_count,
                                      .activation = at(b, p->activation),
                                      .shared_activation = at(b, p->shared_activation),
                                      .expert_count = desc->experts,
                                      .k_max = k_max,
                                      .hidden = model->hidden,
                                      .width = desc->expert_width,
                                      .shared_width = desc->shared_width,
                                      .epsilon = model->rms_norm_eps};
  const clb_expert_down_args down = {.experts = up.experts,
                                     .shared = up.shared,
                                     .indices = up.indices,
                                     .weights = at(b, p->expert_weights),
                                     .shared_scale = desc->shared_gated != 0u ? at(b, p->shared_scale) : 0u,
                                     .activation = up.activation,
                                     .shared_activation = up.shared_activation,
                                     .row_count = up.row_count,
                                     .residual = at(b, p->residual),
                                     .next_norm = norm_after(b, layer),
                                     .next_input = at(b, p->input[0]),
                                     .next_sumsq = at(b, p->sumsq[0]),
                                     .partial = at(b, p->down_partial),
                                     .tickets = at(b, p->down_tickets),
                                     .expert_count = desc->experts,
                                     .k_max = k_max,
                                     .hidden = model->hidden,
                                     .width = desc->expert_width,
                                     .shared_width = desc->shared_width,
                                     .shared_parts = shared_parts(desc)};
  const uint32_t ranks = desc->experts == 0u ? 0u : k_max;
  const bool eight = b->rows <= EIGHT;
  /* Most units that can be in use. */
  const uint32_t up_units = b->rows * ranks * (desc->expert_width / CLB_TILE) + desc->shared_width / CLB_TILE;
  const uint32_t down_units = (b->rows * ranks + down.shared_parts) * divide_up(model->hidden, 2u * CLB_TILE);
  const uint32_t up_blocks = wanted_blocks(b, up_units, eight ? CLB_GATE_UP_8_BLOCKS : CLB_GATE_UP_BLOCKS);
  const uint32_t down_blocks = wanted_blocks(b, down_units, eight ? CLB_DOWN_8_BLOCKS : CLB_DOWN_BLOCKS);
  launch(b, eight ? CLB_CUDA_GATE_UP_8 : CLB_CUDA_GATE_UP, &up, (uint32_t[3]){up_blocks, 1u, 1u}, CLB_MATMUL_THREADS,
         eight ? CLB_GATE_UP_8_SHARED : CLB_GATE_UP_SHARED);
  launch(b, eight ? CLB_CUDA_DOWN_8 : CLB_CUDA_DOWN, &down, (uint32_t[3]){down_blocks, 1u, 1u}, CLB_MATMUL_THREADS,
         eight ? CLB_DOWN_8_SHARED : CLB_DOWN_SHARED);
}

/* One expert pair over many rows: the routed experts by bucket, or with `offsets` 0 a single expert over all rows. */
static void expert_pair(builder* b, clb_expert_many_args* args, uint32_t assignments) {
  const uint32_t token_tiles = divide_up(assignments, MANY_ROWS) + args->expert_count;
  const uint32_t up_tiles = divide_up(args->width, MANY_WEIGHT_ROWS / 2u) * token_tiles;
  const uint32_t down_tiles = divide_up(args->hidden, MANY_WEIGHT_ROWS) * token_tiles;
  launch(b, CLB_CUDA_GATE_UP_MANY, args, (uint32_t[3]){wanted_blocks(b, up_tiles, CLB_MANY_BLOCKS), 1u, 1u},
         CLB_MATMUL_THREADS, CLB_MANY_SHARED);
  launch(b, CLB_CUDA_DOWN_MANY, args, (uint32_t[3]){wanted_blocks(b, down_tiles, CLB_MANY_BLOCKS), 1u, 1u},
         CLB_MATMUL_THREADS, CLB_MANY_SHARED);
}

static void routed_many(builder* b, uint32_t layer, const clb_layer_desc* desc) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_cuda_layout* const p = &b->cuda->at;
  const uint32_t k_max = b->engine->sizes.k_max;
  const clb_bucket_args bucket = {.indices = at(b, p->indices),
                                  .block_counts = at(b, p->block_counts),
                                  .token_count = b->row_count,
                                  .counts = at(b, p->bucket_counts),
                                  .offsets = at(b, p->bucket_offsets),
                                  .tokens = at(b, p->bucket_tokens),
                                  .places = at(b, p->bucket_places),
                                  .experts = desc->experts,
                                  .k_max = k_max};
  clb_expert_many_args args = {.experts = b->cuda->layer_tables[layer],
                               .offsets = bucket.offsets,
                               .tokens = bucket.tokens,
                               .places = bucket.places,
                               .row_count = b->row_count,
                               .input = at(b, p->input[1]),
                               .sumsq = at(b, p->sumsq[1]),
                               .activation = at(b, p->activation),
                               .partial = at(b, p->expert_partial),
                               .expert_count = desc->experts,
                               .hidden = model->hidden,
                               .width = desc->expert_width,
                               .epsilon = model->rms_norm_eps};
  const uint32_t blocks[3] = {divide_up(b->rows, CLB_ROUTER_BLOCK_TOKENS), 1u, 1u};
  launch(b, CLB_CUDA_BUCKET, &bucket, blocks, CLB_ROUTER_THREADS, 0u);
  if (is_limited(b)) {
    limit(b, layer, true);
    launch(b, CLB_CUDA_BUCKET, &bucket, blocks, CLB_ROUTER_THREADS, 0u);
  }
  expert_pair(b, &args, b->rows * k_max);
}

static void experts_many(builder* b, uint32_t layer) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_layer_desc* const desc = &model->layer_table[layer];
  const clb_cuda_layout* const p = &b->cuda->at;
  if (desc->experts != 0u) {
    routed_many(b, layer, desc);
  }
  if (desc->shared_width != 0u) {
    clb_expert_many_args args = {.experts = shared_row(b, desc, layer),
                                 .row_count = b->row_count,
                                 .input = at(b, p->input[1]),
                                 .sumsq = at(b, p->sumsq[1]),
                                 .activation = at(b, p->shared_activation),
                                 .partial = at(b, p->shared_partial),
                                 .expert_count = 1u,
                                 .hidden = model->hidden,
                                 .width = desc->shared_width,
                                 .epsilon = model->rms_norm_eps};
    expert_pair(b, &args, b->rows);
  }
  const clb_combine_args combine = {.partial = desc->experts != 0u ? at(b, p->expert_partial) : 0u,
                                    .indices = at(b, p->indices),
                                    .weights = at(b, p->expert_weights),
                                    .shared_partial = desc->shared_width != 0u ? at(b, p->shared_partial) : 0u,
                                    .shared_scale = desc->shared_gated != 0u ? at(b, p->shared_scale) : 0u,
                                    .row_count = b->row_count,
                                    .residual = at(b, p->residual),
                                    .next_norm = norm_after(b, layer),
                                    .next_input = at(b, p->input[0]),
                                    .next_sumsq = at(b, p->sumsq[0]),
                                    .k_max = b->engine->sizes.k_max,
                                    .hidden = model->hidden};
  launch(b, CLB_CUDA_COMBINE, &combine, (uint32_t[3]){b->rows, 1u, 1u}, CLB_MATMUL_THREADS, 0u);
}

static void layers(builder* b, bool many) {
  for (uint32_t layer = 0; layer < b->engine->model.layers; ++layer) {
    project_qkv(b, layer, many);
    if (many) {
      attend_many(b, layer);
    } else {
      attend_few(b, layer);
    }
    project_out(b, layer, many);
    if (b->engine->model.layer_table[layer].experts != 0u) {
      route(b, layer, many);
    }
    if (b->engine->model.layer_table[layer].experts != 0u && !many && is_limited(b)) {
      limit(b, layer, false);
    }
    if (many) {
      experts_many(b, layer);
    } else {
      experts_few(b, layer);
    }
  }
}

/* ----------------------------------------------------------------- outputs */

/* Logits of rows wanted[0 .. *count); with `chosen` 0 of rows 0 .. *count. */
static void head(builder* b, uint64_t chosen, uint64_t count, uint32_t most_rows, uint64_t candidates) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_cuda_layout* const p = &b->cuda->at;
  const clb_matmul_args args = {.weights = global(b, model->tied_head != 0u ? CLB_ROLE_EMBEDDING : CLB_ROLE_HEAD),
                                .input = at(b, p->input[0]),
                                .sumsq = at(b, p->sumsq[0]),
                                .input_rows = chosen,
                                .row_count = count,
                                .output = at(b, p->logits),
                                .candidates = candidates,
                                .output_stride = model->vocab_size,
                                .rows = model->vocab_size,
                                .cols = model->hidden,
                                .sumsq_count = model->hidden / CLB_TILE,
                                .epsilon = model->rms_norm_eps};
  launch_linear(b, &args, most_rows, false);
}

static void launch_sample(builder* b, uint64_t chosen, uint64_t count, uint32_t blocks) {
  const clb_cuda_layout* const p = &b->cuda->at;
  const clb_sample_args args = {.logits = at(b, p->logits),
                                .candidates = at(b, p->candidates),
                                .wanted = chosen,
                                .wanted_count = count,
                                .rows = rows_at(b),
                                .slots = at(b, p->slots),
                                .bias = at(b, p->bias),
                                .stops = at(b, p->stops),
                                .masks = at(b, p->masks),
                                .counts = at(b, p->token_counts),
                                .scratch = at(b, p->scratch),
                                .events = at(b, p->events),
                                .scratch_stride = p->scratch_stride,
                                .vocab = b->engine->model.vocab_size,
                                .not_finite = CLB_ERR_NOT_FINITE,
                                .no_token = CLB_ERR_NO_TOKEN};
  const clb_publish_args publish = {.events = at(b, p->events),
                                    .wanted_count = count,
                                    .step = at(b, p->step),
                                    .mailbox = b->cuda->device.pinned_device + p->mailbox};
  launch(b, CLB_CUDA_SAMPLE, &args, (uint32_t[3]){blocks, 1u, 1u}, SAMPLE_THREADS, 0u);
  launch(b, CLB_CUDA_PUBLISH, &publish, (uint32_t[3]){1u, 1u, 1u}, PUBLISH_THREADS, 0u);
}

int32_t clb_cuda_launch_decode(clb_engine* engine, uint32_t rows) {
  builder b = begin(engine, rows, engine->cuda->at.list + (uint64_t)offsetof(clb_slot_list, count));
  CLB_ASSERT(rows <= CLB_FEW_ROWS);
  embed(&b, at(&b, b.cuda->at.list));
  layers(&b, false);
  head(&b, 0u, b.row_count, rows, at(&b, b.cuda->at.candidates));
  launch_sample(&b, 0u, b.row_count, rows);
  return b.status;
}

int32_t clb_cuda_launch_prefill(clb_engine* engine, uint32_t rows) {
  builder b = begin(engine, rows, engine->cuda->at.rows + (uint64_t)offsetof(clb_cuda_rows, row_count));
  CLB_ASSERT(rows <= b.cuda->at.max_rows);
  embed(&b, 0u);
  layers(&b, true);
  head(&b, wanted(&b), wanted_count(&b), engine->config.channel.slots, at(&b, b.cuda->at.candidates));
  launch_sample(&b, wanted(&b), wanted_count(&b), engine->config.channel.slots);
  return b.status;
}

int32_t clb_cuda_launch_prompt(clb_engine* engine) {
  builder b = begin(engine, CLB_FEW_ROWS, engine->cuda->at.rows + (uint64_t)offsetof(clb_cuda_rows, row_count));
  const clb_prompt_logprobs_args args = {.logits = at(&b, b.cuda->at.logits),
                                         .items = at(&b, b.cuda->at.prompt_items),
                                         .wanted_count = wanted_count(&b),
                                         .status = at(&b, b.cuda->at.prompt_status),
                                         .vocab = engine->model.vocab_size,
                                         .not_finite = CLB_ERR_NOT_FINITE};
  head(&b, wanted(&b), wanted_count(&b), CLB_FEW_ROWS, 0u);
  launch(&b, CLB_CUDA_PROMPT_LOGPROBS, &args, (uint32_t[3]){CLB_FEW_ROWS, 1u, 1u}, SAMPLE_THREADS, 0u);
  return b.status;
}

int32_t clb_cuda_launch_pool(clb_engine* engine, uint32_t count) {
  const uint32_t hidden = engine->model.hidden;
  builder b = begin(engine, count, 0u);
  const clb_pool_args args = {.items = at(&b, b.cuda->at.pool_items),
                              .residual = at(&b, b.cuda->at.residual),
                              .sumsq = at(&b, b.cuda->at.sumsq[0]),
                              .norm = global(&b, CLB_ROLE_FINAL_NORM),
                              .sums = at(&b, b.cuda->at.pool_sums),
                              .hidden = hidden,
                              .epsilon = engine->model.rms_norm_eps};
  launch(&b, CLB_CUDA_POOL, &args, (uint32_t[3]){divide_up(hidden, CLB_MATMUL_THREADS), count, 1u}, CLB_MATMUL_THREADS,
         0u);
  return b.status;
}
