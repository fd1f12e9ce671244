/*
 * step.c: see step.h. The walk through the layers; what is done at once by all threads, and in which order.
 *
 *   rows      embed, norm                      "rows": row by row, some rows an item
 *   for each layer:
 *     stage   qkv                              "stage": matrix products, cut into items by stage.c
 *     rows    norms of q and k, rope, append
 *     heads   attention                        items are (tokens of one slot, kv head)
 *     stage   out
 *     rows    add to the residual, norm
 *     stage   router                           then select by rows, and buckets by the owner alone
 *     stage   gate and up of all experts
 *     stage   down of all experts
 *     rows    combine, add to the residual, norm of the next layer
 *
 * A list that is too small to share is done by the owner at once, so one token of a small model costs four or five
 * barriers a layer.
 */
#include "step.h"

#include "../cpu/rope.h"
#include "invariant.h"
#include "step_internal.h"

enum { LEAST_OPERATIONS = 65536 /* of an item that is no matrix product: some microseconds */ };

/* After each piece of work that may take long with a large model: a busy engine must never look stalled. */
static void show_progress(void* context) {
  clb_engine* const engine = context;
  engine->stats.progress++;
  clb_channel_set_progress(&engine->channel, engine->stats.progress);
}

typedef struct row_list {
  clb_engine* engine;
  clb_rows_fn run;
  uint32_t layer;
  uint32_t count;
  uint32_t block;
} row_list;

static void run_blocks(void* context, uint32_t first, uint32_t end, uint32_t thread) {
  const row_list* const list = context;
  for (uint32_t block = first; block < end; ++block) {
    const uint32_t row = block * list->block;
    const uint32_t left = list->count - row;
    list->run(list->engine, list->layer, row, row + (list->block < left ? list->block : left));
    if (thread == 0u) {
      show_progress(list->engine);
    }
  }
}

void clb_step_rows(clb_engine* engine, uint32_t layer, uint32_t count, uint64_t operations, clb_rows_fn run) {
  const uint32_t block = operations >= LEAST_OPERATIONS ? 1u : (uint32_t)(LEAST_OPERATIONS / operations);
  row_list list = {engine, run, layer, count, block};
  clb_threads_run(&engine->threads, (count + block - 1u) / block, run_blocks, &list);
}

clb_stage clb_step_stage(clb_engine* engine) {
  clb_stage stage = {.threads = &engine->threads,
                     .progress = show_progress,
                     .progress_context = engine,
                     .products = engine->buffers.products,
                     .first_items = engine->buffers.first_items,
                     .capacity = engine->sizes.max_experts + 1u};
  clb_stage_begin(&stage);
  return stage;
}

typedef struct code_rows {
  clb_engine* engine;
  const float* input;
  unsigned char* codes;
  uint32_t count;
  uint32_t cols;
  uint32_t block;
  uint32_t reserved;
} code_rows;

static void encode_blocks(void* context, uint32_t first, uint32_t end, uint32_t thread) {
  const code_rows* const list = context;
  const uint64_t bytes = clb_code_row_bytes(list->cols);
  const uint64_t last = (uint64_t)end * list->block;
  for (uint64_t row = (uint64_t)first * list->block; row < last && row < list->count; ++row) {
    list->engine->ops->encode(list->input + row * list->cols, list->cols, list->codes + row * bytes);
  }
  if (thread == 0u) {
    show_progress(list->engine);
  }
}

void clb_step_encode(clb_engine* engine, const float* input, uint32_t count, uint32_t cols, unsigned char* codes) {
  const uint32_t block = cols >= LEAST_OPERATIONS ? 1u : LEAST_OPERATIONS / cols;
  code_rows list = {engine, input, codes, count, cols, block, 0};
  clb_threads_run(&engine->threads, (count + block - 1u) / block, encode_blocks, &list);
}

void clb_step_linear(clb_engine* engine, const clb_matrix* matrix, const float* bias, const float* input,
                     uint32_t tokens, float* output) {
  const clb_product product = {
      .kernel = matrix->kernel,
      .weights = matrix->weights,
      .bias = bias,
      .input = input,
      .codes = engine->buffers.codes,
      .output = output,
      .input_stride = matrix->cols,
      .output_stride = matrix->rows,
      .tokens = tokens,
      .cols = matrix->cols,
      .rows = matrix->rows,
  };
  clb_stage stage = clb_step_stage(engine);
  clb_stage_add(&stage, &product);
  if (stage.reads_codes != 0u) {
    clb_step_encode(engine, input, tokens, matrix->cols, engine->buffers.codes);
  }
  clb_stage_run(&stage);
}

void clb_step_norm(clb_engine* engine, const float* weight, uint32_t row) {
  const uint32_t hidden = engine->model.hidden;
  const size_t at = (size_t)row * hidden;
  engine->ops->rms_norm(engine->buffers.residual + at, weight, engine->model.rms_norm_eps, 1, hidden,
                        engine->buffers.normed + at);
}

static void start_rows(clb_engine* engine, uint32_t layer, uint32_t first, uint32_t end) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_matrix* const embedding = &engine->kernels.embedding;
  const uint32_t hidden = engine->model.hidden;
  const uint32_t head_dim = engine->model.head_dim;
  for (uint32_t i = first; i < end; ++i) {
    clb_step_row* const row = &b->rows[i];
    CLB_ASSERT(row->token >= 0 && (uint32_t)row->token < engine->model.vocab_size);
    embedding->kernel->row(&embedding->weights, (uint32_t)row->token, hidden, b->residual + (size_t)i * hidden);
    clb_rope_table(row->position, engine->model.rope_inv_freq, head_dim / 2u, engine->model.rope_scale,
                   b->rope + (size_t)i * head_dim);
    row->status = CLB_OK;
    row->assignments = 0;
    row->trimmed = 0;
    row->dropped = 0;
    clb_step_norm(engine, engine->kernels.layers[layer].attn_norm, i);
  }
}

/* The layer's last sums, and the norm with which the next one begins. */
static void finish_rows(clb_engine* engine, uint32_t layer, uint32_t first, uint32_t end) {
  const clb_step_buffers* const b = &engine->buffers;
  const size_t hidden = engine->model.hidden;
  for (uint32_t i = first; i < end; ++i) {
    if (engine->model.layer_table[layer].ffn_kind == CLB_FFN_MOE) {
      clb_step_combine(engine, layer, i);
    }
    engine->ops->add(b->update + i * hidden, hidden, b->residual + i * hidden);
    if (layer + 1u < engine->model.layers) {
      clb_step_norm(engine, engine->kernels.layers[layer + 1u].attn_norm, i);
    }
  }
}

void clb_step_forward(struct clb_engine* engine, uint32_t count) {
  const uint64_t hidden = engine->model.hidden;
  CLB_ASSERT(count > 0u && count <= engine->sizes.step_tokens);
  engine->step_number++;
  clb_step_rows(engine, 0, count, 4u * hidden + (uint64_t)64 * engine->model.head_dim, start_rows);
  for (uint32_t layer = 0; layer < engine->model.layers; ++layer) {
    clb_step_attention(engine, layer, count);
    if (engine->model.layer_table[layer].ffn_kind == CLB_FFN_MOE) {
      clb_step_moe(engine, layer, count);
    } else {
      clb_step_dense(engine, layer, count);
    }
    clb_step_rows(engine, layer, count, (engine->sizes.k_max + 4u) * hidden, finish_rows);
  }
}

void clb_step_logits(struct clb_engine* engine, const uint32_t* rows, uint32_t count) {
  const clb_step_buffers* const b = &engine->buffers;
  const uint32_t hidden = engine->model.hidden;
  CLB_ASSERT(count > 0u && count <= CLB_LOGIT_ROWS);
  for (uint32_t i = 0; i < count; ++i) {
    engine->ops->rms_norm(b->residual + (size_t)rows[i] * hidden, engine->kernels.final_norm,
                          engine->model.rms_norm_eps, 1, hidden, b->head_input + (size_t)i * hidden);
  }
  clb_step_linear(engine, &engine->kernels.head, NULL, b->head_input, count, b->logits);
}
