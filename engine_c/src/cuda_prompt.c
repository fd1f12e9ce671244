/*
 * cuda_prompt.c: the layers of a prefill step as launches; docs/decisions/0004-cuda-engine.md has the nodes in order.
 *
 * Activations are half rows (abi.h) from the embedding to the last layer, which leaves split rows for the head.
 */
#include "cuda_step.h"

#define MANY_LOGITS 32u     /* experts of a block of the router's logits */
#define FEW_LOGITS 256u     /* up to as many rows, its blocks take 8 of them instead of 32 */
#define WIDE_CAPABILITY 90u /* the GPUs with wgmma: kernels for it are built for no other */
#define APPEND_THREADS 128u
#define FP32_ROWS 64u /* that a block of attention with K and V of fp32 takes */

/* How the many-row kernels of this GPU are launched. */
typedef struct form {
  uint32_t threads;
  uint32_t shared_bytes;
  uint32_t blocks;      /* of a multiprocessor */
  uint32_t rows;        /* of input that a block takes at once */
  uint32_t weight_rows; /* of weights */
} form;

static form form_of(const builder* b) {
  return b->cuda->device.capability == WIDE_CAPABILITY
             ? (form){CLB_MANY_WIDE_THREADS, CLB_MANY_WIDE_SHARED, CLB_MANY_WIDE_BLOCKS, 128u, 256u}
             : (form){CLB_MATMUL_THREADS, CLB_MANY_SHARED, CLB_MANY_BLOCKS, 64u, 128u};
}

/* units: most that the step can have. */
static void launch_units(builder* b, uint32_t kernel, const void* args, const form* with, uint32_t units) {
  launch(b, kernel, args, (uint32_t[3]){wanted_blocks(b, units, with->blocks), 1u, 1u}, with->threads,
         with->shared_bytes);
}

/* --------------------------------------------------------------- attention */

static void prompt_linear(builder* b, const clb_matmul_many_args* args) {
  const form with = form_of(b); /* all blocks: how large units are hangs on how many blocks there are */
  const uint32_t kind = CLB_FORMAT_KIND(args->format);
  launch_units(b, kind == CLB_KIND_HALF ? CLB_CUDA_LINEAR_MANY : CLB_CUDA_LINEAR_QUANT_MANY + kind - CLB_KIND_INT8,
               args, &with, b->cuda->device.multiprocessors * with.blocks);
}

static void prompt_qkv(builder* b, uint32_t layer) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_cuda_layout* const p = &b->cuda->at;
  const uint32_t rows = (model->heads + 2u * model->kv_heads) * model->head_dim;
  const clb_matmul_many_args args = {.weights = weight(b, CLB_ROLE_QKV, layer, -1),
                                     .bias = weight(b, CLB_ROLE_QKV_BIAS, layer, -1),
                                     .input = at(b, p->input[0]),
                                     .sumsq = at(b, p->sumsq[0]),
                                     .row_count = b->row_count,
                                     .output = at(b, p->qkv),
                                     .output_stride = rows,
                                     .rows = rows,
                                     .cols = model->hidden,
                                     .epsilon = model->rms_norm_eps,
                                     .format = weight_format(b, CLB_ROLE_QKV, (int32_t)layer)};
  prompt_linear(b, &args);
}

static void prompt_out(builder* b, uint32_t layer) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_cuda_layout* const p = &b->cuda->at;
  const clb_matmul_many_args args = {.weights = weight(b, CLB_ROLE_OUT, layer, -1),
                                     .bias = weight(b, CLB_ROLE_OUT_BIAS, layer, -1),
                                     .input = at(b, p->attended),
                                     .row_count = b->row_count,
                                     .residual = at(b, p->residual),
                                     .next_norm = weight(b, CLB_ROLE_FFN_NORM, layer, -1),
                                     .next_input = at(b, p->input[1]),
                                     .next_sumsq = at(b, p->sumsq[1]),
                                     .rows = model->hidden,
                                     .cols = model->heads * model->head_dim,
                                     .epsilon = model->rms_norm_eps,
                                     .format = weight_format(b, CLB_ROLE_OUT, (int32_t)layer)};
  prompt_linear(b, &args);
}

static void launch_attention(builder* b, const clb_prefill_attention_args* args) {
  const clb_attention_dims* const shape = &args->shape;
  if (b->engine->config.kv_precision == CLB_FP32) {
    launch(b, CLB_CUDA_ATTEND_MANY, args, (uint32_t[3]){shape->heads, divide_up(b->rows, FP32_ROWS), 1u},
           APPEND_THREADS, 0u);
    return;
  }
  const uint32_t group = shape->heads / shape->kv_heads;
  const uint32_t most = group < CLB_FLASH_HEADS ? group : CLB_FLASH_HEADS;
  launch(b, CLB_CUDA_ATTEND_MANY, args,
         (uint32_t[3]){shape->kv_heads * divide_up(group, most), divide_up(b->rows, CLB_FLASH_PAIRS / most), 1u},
         CLB_FLASH_THREADS, CLB_FLASH_SHARED);
}

static void prompt_attend(builder* b, uint32_t layer) {
  const clb_cuda_layout* const p = &b->cuda->at;
  const clb_prefill_attention_args args = {.qkv = at(b, p->qkv),
                                           .rope = at(b, p->rope),
                                           .q_norm = weight(b, CLB_ROLE_Q_NORM, layer, -1),
                                           .k_norm = weight(b, CLB_ROLE_K_NORM, layer, -1),
                                           .rows = rows_at(b),
                                           .row_count = b->row_count,
                                           .slots = at(b, p->slots),
                                           .q_scale = at(b, p->q_scale),
                                           .attended = at(b, p->attended),
                                           .shape = dims_of(b, layer)};
  launch(b, CLB_CUDA_APPEND, &args, (uint32_t[3]){b->rows, 1u, 1u}, APPEND_THREADS, 0u);
  launch_attention(b, &args);
}

/* --------------------------------------------------------------------- FFN */

static void prompt_route(builder* b, uint32_t layer) {
  const clb_layer_desc* const desc = &b->engine->model.layer_table[layer];
  const clb_cuda_layout* const p = &b->cuda->at;
  clb_router_logits_args logits = router_logits_args(b, layer);
  clb_router_args router = router_args(b, layer);
  const clb_bucket_args bucket = {.indices = router.indices,
                                  .block_counts = at(b, p->block_counts),
                                  .token_count = b->row_count,
                                  .counts = at(b, p->bucket_counts),
                                  .offsets = at(b, p->bucket_offsets),
                                  .tokens = at(b, p->bucket_tokens),
                                  .places = at(b, p->bucket_places),
                                  .experts = desc->experts,
                                  .k_max = router.k_max};
  const uint32_t blocks = divide_up(b->rows, CLB_ROUTER_BLOCK_TOKENS);
  const uint32_t rows = desc->experts + (logits.shared_gate != 0u ? 1u : 0u); /* of the matrix */
  logits.block_rows = 32u;
  if (b->rows <= FEW_LOGITS) {
    logits.block_rows = 8u;
  }
  router.block_counts = bucket.block_counts;
  router.block_tokens = CLB_ROUTER_BLOCK_TOKENS;
  launch(b, CLB_CUDA_ROUTER_LOGITS, &logits,
         (uint32_t[3]){divide_up(rows, MANY_LOGITS), divide_up(b->rows, logits.block_rows), 1u}, CLB_MATMUL_THREADS,
         0u);
  launch(b, CLB_CUDA_ROUTER, &router, (uint32_t[3]){blocks, 1u, 1u}, CLB_ROUTER_THREADS, 0u);
  launch(b, CLB_CUDA_BUCKET, &bucket, (uint32_t[3]){blocks, 1u, 1u}, CLB_ROUTER_THREADS, 0u);
  if (is_limited(b)) {
    clb_capacity_args capacity = capacity_args(b, layer);
    capacity.offsets = bucket.offsets;
    capacity.places = bucket.places;
    capacity.block_counts = bucket.block_counts;
    launch(b, CLB_CUDA_CAPACITY, &capacity, (uint32_t[3]){desc->experts, 1u, 1u}, CLB_CAPACITY_THREADS, 0u);
    launch(b, CLB_CUDA_BUCKET, &bucket, (uint32_t[3]){blocks, 1u, 1u}, CLB_ROUTER_THREADS, 0u);
  }
}

/* One expert pair over many rows: the routed experts by bucket, or with `offsets` 0 a single expert over all rows. A
   node for each of `kinds` of weights takes the experts of that kind. */
static void expert_pair(builder* b, const clb_expert_many_args* args, uint32_t kinds, uint32_t assignments) {
  const form with = form_of(b);
  const uint32_t row_blocks = divide_up(assignments, with.rows) + args->expert_count;
  const uint32_t up = divide_up(args->width, with.weight_rows / 2u) * row_blocks;
  const uint32_t down = divide_up(args->hidden, with.weight_rows) * row_blocks;
  if ((kinds & clb_cuda_kind(CLB_KIND_HALF)) != 0u) {
    launch_units(b, CLB_CUDA_GATE_UP_MANY, args, &with, up);
  }
  for (uint32_t kind = CLB_KIND_INT8; kind <= CLB_KIND_FP8; ++kind) {
    if ((kinds & clb_cuda_kind(kind)) != 0u) {
      launch_units(b, CLB_CUDA_GATE_UP_QUANT_MANY + kind - CLB_KIND_INT8, args, &with, up);
    }
  }
  if ((kinds & clb_cuda_kind(CLB_KIND_HALF)) != 0u) {
    launch_units(b, CLB_CUDA_DOWN_MANY, args, &with, down);
  }
  for (uint32_t kind = CLB_KIND_INT8; kind <= CLB_KIND_FP8; ++kind) {
    if ((kinds & clb_cuda_kind(kind)) != 0u) {
      launch_units(b, CLB_CUDA_DOWN_QUANT_MANY + kind - CLB_KIND_INT8, args, &with, down);
    }
  }
}

static void routed_experts(builder* b, uint32_t layer, const clb_layer_desc* desc) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_cuda_layout* const p = &b->cuda->at;
  const clb_expert_many_args args = {.experts = b->cuda->layer_tables[layer],
                                     .offsets = at(b, p->bucket_offsets),
                                     .tokens = at(b, p->bucket_tokens),
                                     .places = at(b, p->bucket_places),
                                     .row_count = b->row_count,
                                     .input = at(b, p->input[1]),
                                     .sumsq = at(b, p->sumsq[1]),
                                     .activation = at(b, p->activation),
                                     .partial = at(b, p->expert_partial),
                                     .expert_count = desc->experts,
                                     .hidden = model->hidden,
                                     .width = desc->expert_width,
                                     .epsilon = model->rms_norm_eps};
  expert_pair(b, &args, b->cuda->kinds, b->rows * b->engine->sizes.k_max);
}

/* Kinds of the matrices of the shared expert, or of a dense FFN. */
static uint32_t shared_kinds(const builder* b, uint32_t layer) {
  return clb_cuda_kind(CLB_FORMAT_KIND(weight_format(b, CLB_ROLE_GATE, (int32_t)layer))) |
         clb_cuda_kind(CLB_FORMAT_KIND(weight_format(b, CLB_ROLE_DOWN, (int32_t)layer)));
}

static void prompt_experts(builder* b, uint32_t layer) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_layer_desc* const desc = &model->layer_table[layer];
  const clb_cuda_layout* const p = &b->cuda->at;
  const bool last = layer + 1u == model->layers;
  if (desc->experts != 0u) {
    prompt_route(b, layer);
    routed_experts(b, layer, desc);
  }
  if (desc->shared_width != 0u) {
    const clb_expert_many_args args = {.experts = shared_row(b, desc, layer),
                                       .row_count = b->row_count,
                                       .input = at(b, p->input[1]),
                                       .sumsq = at(b, p->sumsq[1]),
                                       .activation = at(b, p->shared_activation),
                                       .partial = at(b, p->shared_partial),
                                       .expert_count = 1u,
                                       .hidden = model->hidden,
                                       .width = desc->shared_width,
                                       .epsilon = model->rms_norm_eps};
    expert_pair(b, &args, shared_kinds(b, layer), b->rows);
  }
  const clb_combine_args combine = {.partial = desc->experts != 0u ? at(b, p->expert_partial) : 0u,
                                    .indices = at(b, p->indices),
                                    .weights = at(b, p->expert_weights),
                                    .shared_partial = desc->shared_width != 0u ? at(b, p->shared_partial) : 0u,
                                    .shared_scale = desc->shared_gated != 0u ? at(b, p->shared_scale) : 0u,
                                    .row_count = b->row_count,
                                    .residual = at(b, p->residual),
                                    .next_norm = norm_after(b, layer),
                                    .next_input = last ? at(b, p->input[0]) : 0u,
                                    .next_half = last ? 0u : at(b, p->input[0]),
                                    .next_sumsq = at(b, p->sumsq[0]),
                                    .k_max = b->engine->sizes.k_max,
                                    .hidden = model->hidden};
  launch(b, CLB_CUDA_COMBINE, &combine, (uint32_t[3]){b->rows, 1u, 1u}, CLB_MATMUL_THREADS, 0u);
}

void clb_cuda_prompt_layers(builder* b) {
  CLB_ASSERT(b->rows > 0u);
  for (uint32_t layer = 0; layer < b->engine->model.layers; ++layer) {
    prompt_qkv(b, layer);
    prompt_attend(b, layer);
    prompt_out(b, layer);
    prompt_experts(b, layer);
  }
}
