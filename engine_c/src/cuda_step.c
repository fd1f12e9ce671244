/*
 * cuda_step.c: a step as launches; docs/decisions/0004-cuda-engine.md has the nodes in order.
 *
 * Every launch but the first follows its predecessor with a programmatic edge. Nothing here depends on what a step
 * holds, only on how many rows its bucket has, so that a captured step serves every step of its bucket.
 */
#include "cuda_step.h"

#define EIGHT 8u      /* most rows of the kernels with _8 in their names */
#define WIDE_TILES 8u /* row tiles a multiprocessor from which on more than 8 rows go to the wide form */
#define SAMPLE_THREADS 1024u
#define PUBLISH_THREADS 64u
#define PART_COLS 1024u /* of a shared expert: fewer columns are not worth a part */

/* list: offset of the slots of a decode step; 0: rows are given, those of prompts. */
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
                               .input = list != 0u ? at(b, p->input[0]) : 0u,
                               .half_input = list != 0u ? 0u : at(b, p->input[0]),
                               .sumsq = at(b, p->sumsq[0]),
                               .rope = at(b, p->rope),
                               .hidden = model->hidden,
                               .head_dim = model->head_dim,
                               .rope_scale = model->rope_scale};
  launch(b, CLB_CUDA_EMBED, &args, (uint32_t[3]){b->rows, 1u, 1u}, CLB_MATMUL_THREADS, 0u);
}

/* --------------------------------------------------------------- attention */

static void launch_quantised(builder* b, const clb_matmul_args* args, uint32_t most_rows) {
  const uint32_t kind = CLB_FORMAT_KIND(args->format) - CLB_KIND_INT8;
  const uint32_t meta = clb_cuda_meta(args->format);
  const uint32_t tiles = divide_up(args->rows, CLB_TILE);
  if (most_rows <= EIGHT) {
    launch(b, CLB_CUDA_LINEAR_QUANT_8 + kind, args,
           (uint32_t[3]){wanted_blocks(b, tiles, CLB_LINEAR_QUANT_8_BLOCKS), 1u, 1u}, CLB_MATMUL_THREADS,
           CLB_QUANT_SHARED(CLB_LINEAR_QUANT_8_STAGES, 1u, meta));
  } else {
    launch(b, CLB_CUDA_LINEAR_QUANT + kind, args,
           (uint32_t[3]){wanted_blocks(b, divide_up(tiles, 2u), CLB_LINEAR_QUANT_BLOCKS), 1u, 1u}, CLB_MATMUL_THREADS,
           CLB_QUANT_SHARED(CLB_LINEAR_QUANT_STAGES, 2u, meta));
  }
}

static void launch_linear(builder* b, const clb_matmul_args* args, uint32_t most_rows) {
  const uint32_t tiles = divide_up(args->rows, CLB_TILE);
  const uint32_t blocks = b->cuda->device.multiprocessors;
  if (CLB_FORMAT_KIND(args->format) != CLB_KIND_HALF) {
    launch_quantised(b, args, most_rows);
  } else if (most_rows <= EIGHT) {
    launch(b, CLB_CUDA_LINEAR_8, args, (uint32_t[3]){wanted_blocks(b, tiles, CLB_LINEAR_8_BLOCKS), 1u, 1u},
           CLB_MATMUL_THREADS, CLB_LINEAR_8_SHARED + ((most_rows <= CLB_LINEAR_8_STAGED) ? CLB_LINEAR_8_INPUT : 0u));
  } else if (tiles >= blocks * WIDE_TILES) {
    launch(b, CLB_CUDA_LINEAR_WIDE, args, (uint32_t[3]){blocks, 1u, 1u}, CLB_MATMUL_THREADS, CLB_LINEAR_WIDE_SHARED);
  } else {
    launch(b, CLB_CUDA_LINEAR, args, (uint32_t[3]){wanted_blocks(b, tiles, CLB_LINEAR_BLOCKS), 1u, 1u},
           CLB_MATMUL_THREADS, CLB_LINEAR_SHARED);
  }
}

static void project_qkv(builder* b, uint32_t layer) {
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
                                .epsilon = model->rms_norm_eps,
                                .format = weight_format(b, CLB_ROLE_QKV, (int32_t)layer)};
  launch_linear(b, &args, b->rows);
}

static void project_out(builder* b, uint32_t layer) {
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
                                .epsilon = model->rms_norm_eps,
                                .format = weight_format(b, CLB_ROLE_OUT, (int32_t)layer)};
  launch_linear(b, &args, b->rows);
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
  const uint32_t groups = divide_up(model->heads / model->kv_heads, CLB_ATTEND_HEADS);
  const uint32_t most = b->rows * model->kv_heads * groups * CLB_ATTENTION_SPLITS; /* items that there can be */
  launch(b, CLB_CUDA_ATTEND, &args, (uint32_t[3]){wanted_blocks(b, most, CLB_ATTEND_BLOCKS), 1u, 1u}, 128u, 0u);
}

/* --------------------------------------------------------------------- FFN */

/* Router scores and choice of a layer. */
static void route(builder* b, uint32_t layer) {
  const clb_route_args both = {.scores = router_logits_args(b, layer),
                               .choice = router_args(b, layer),
                               .tickets = at(b, b->cuda->at.route_tickets)};
  const uint32_t experts = both.scores.experts;
  launch(b, CLB_CUDA_ROUTE, &both, (uint32_t[3]){divide_up(experts + 1u, 4u), divide_up(b->rows, EIGHT), 1u},
         CLB_MATMUL_THREADS, 0u);
  if (is_limited(b)) {
    const clb_capacity_args capacity = capacity_args(b, layer);
    launch(b, CLB_CUDA_CAPACITY, &capacity, (uint32_t[3]){experts, 1u, 1u}, CLB_CAPACITY_THREADS, 0u);
  }
}

/* In how many parts the shared expert's columns are taken: as long as another expert's, but not too short. */
static uint32_t shared_parts(const clb_layer_desc* desc) {
  const uint32_t wanted = desc->shared_width / (desc->expert_width > PART_COLS ? desc->expert_width : PART_COLS);
  const uint32_t parts = wanted < CLB_SHARED_MAX_PARTS ? wanted : CLB_SHARED_MAX_PARTS;
  return desc->shared_width == 0u ? 0u : (parts == 0u ? 1u : parts);
}

/* How an expert kernel is launched: of one 16-bit format, or of mixed ones. */
typedef struct expert_form {
  uint32_t kernel;
  uint32_t blocks; /* a multiprocessor */
  uint32_t shared_bytes;
} expert_form;

static expert_form gate_up_form(const builder* b) {
  const uint32_t meta = b->cuda->meta;
  if (clb_cuda_mixed(b->cuda)) {
    return b->rows <= EIGHT ? (expert_form){CLB_CUDA_GATE_UP_MIXED_8, CLB_GATE_UP_MIXED_8_BLOCKS,
                                            CLB_QUANT_SHARED(CLB_GATE_UP_MIXED_8_STAGES, 2u, meta)}
                            : (expert_form){CLB_CUDA_GATE_UP_MIXED, CLB_GATE_UP_MIXED_BLOCKS,
                                            CLB_QUANT_SHARED(CLB_GATE_UP_MIXED_STAGES, 2u, meta)};
  }
  return b->rows <= EIGHT ? (expert_form){CLB_CUDA_GATE_UP_8, CLB_GATE_UP_8_BLOCKS, CLB_GATE_UP_8_SHARED}
                          : (expert_form){CLB_CUDA_GATE_UP, CLB_GATE_UP_BLOCKS, CLB_GATE_UP_SHARED};
}

static expert_form down_form(const builder* b) {
  const uint32_t meta = b->cuda->meta;
  if (clb_cuda_mixed(b->cuda)) {
    return b->rows <= EIGHT ? (expert_form){CLB_CUDA_DOWN_MIXED_8, CLB_DOWN_MIXED_8_BLOCKS,
                                            CLB_QUANT_SHARED(CLB_DOWN_MIXED_8_STAGES, 2u, meta)}
                            : (expert_form){CLB_CUDA_DOWN_MIXED, CLB_DOWN_MIXED_BLOCKS,
                                            CLB_QUANT_SHARED(CLB_DOWN_MIXED_STAGES, 2u, meta)};
  }
  return b->rows <= EIGHT ? (expert_form){CLB_CUDA_DOWN_8, CLB_DOWN_8_BLOCKS, CLB_DOWN_8_SHARED}
                          : (expert_form){CLB_CUDA_DOWN, CLB_DOWN_BLOCKS, CLB_DOWN_SHARED};
}

/* units: most that can be in use. */
static void launch_experts(builder* b, const clb_expert_gate_up_args* up, uint32_t up_units,
                           const clb_expert_down_args* down, uint32_t down_units) {
  const expert_form first = gate_up_form(b);
  const expert_form second = down_form(b);
  launch(b, first.kernel, up, (uint32_t[3]){wanted_blocks(b, up_units, first.blocks), 1u, 1u}, CLB_MATMUL_THREADS,
         first.shared_bytes);
  launch(b, second.kernel, down, (uint32_t[3]){wanted_blocks(b, down_units, second.blocks), 1u, 1u}, CLB_MATMUL_THREADS,
         second.shared_bytes);
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
                                      .epsilon = model->rms_norm_eps,
                                      .meta = b->cuda->meta};
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
                                     .shared_parts = shared_parts(desc),
                                     .meta = b->cuda->meta};
  const uint32_t ranks = desc->experts == 0u ? 0u : k_max;
  /* Most units that can be in use. */
  const uint32_t up_units = b->rows * ranks * (desc->expert_width / CLB_TILE) + desc->shared_width / CLB_TILE;
  const uint32_t down_units = (b->rows * ranks + down.shared_parts) * divide_up(model->hidden, 2u * CLB_TILE);
  launch_experts(b, &up, up_units, &down, down_units);
}

static void layers(builder* b) {
  for (uint32_t layer = 0; layer < b->engine->model.layers; ++layer) {
    project_qkv(b, layer);
    attend_few(b, layer);
    project_out(b, layer);
    if (b->engine->model.layer_table[layer].experts != 0u) {
      route(b, layer);
    }
    experts_few(b, layer);
  }
}

/* ----------------------------------------------------------------- outputs */

/* Logits of rows wanted[0 .. *count); with `chosen` 0 of rows 0 .. *count. */
static void head(builder* b, uint64_t chosen, uint64_t count, uint32_t most_rows, uint64_t candidates) {
  const clb_model_desc* const model = &b->engine->model;
  const clb_cuda_layout* const p = &b->cuda->at;
  const uint32_t role = model->tied_head != 0u ? CLB_ROLE_EMBEDDING : CLB_ROLE_HEAD;
  const clb_matmul_args args = {.weights = global(b, role),
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
                                .epsilon = model->rms_norm_eps,
                                .format = weight_format(b, role, -1)};
  launch_linear(b, &args, most_rows);
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
  layers(&b);
  head(&b, 0u, b.row_count, rows, at(&b, b.cuda->at.candidates));
  launch_sample(&b, 0u, b.row_count, rows);
  return b.status;
}

int32_t clb_cuda_launch_prefill(clb_engine* engine, uint32_t rows) {
  builder b = begin(engine, rows, engine->cuda->at.rows + (uint64_t)offsetof(clb_cuda_rows, row_count));
  CLB_ASSERT(rows <= b.cuda->at.max_rows);
  embed(&b, 0u);
  clb_cuda_prompt_layers(&b);
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
