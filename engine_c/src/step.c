/* step.c: see step.h. */
#include "step.h"

#include <string.h>

#include "../cpu/lanes.h"
#include "../cpu/norm.h"
#include "../cpu/rope.h"
#include "../cpu/vector.h"
#include "assert.h"
#include "engine_internal.h"
#include "exact_math.h"
#include "routing.h"

/* After each piece of work that may take long with a large model: a busy engine must never look stalled. */
static void show_progress(clb_engine* engine) {
  engine->stats.progress++;
  clb_channel_set_progress(&engine->channel, engine->stats.progress);
}

static void run_linear(const clb_matrix* matrix, const float* bias, const float* input, uint32_t tokens,
                       float* output) {
  const clb_linear_args args = {
      .weights = matrix->data,
      .bias = bias,
      .input = input,
      .output = output,
      .input_stride = matrix->cols,
      .output_stride = matrix->rows,
      .tokens = tokens,
      .cols = matrix->cols,
      .row_begin = 0,
      .row_end = matrix->rows,
  };
  matrix->kernel->linear(&args);
}

static void embed(clb_engine* engine, uint32_t count) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_matrix* const embedding = &engine->kernels.embedding;
  const uint32_t hidden = engine->model.hidden;
  const uint32_t head_dim = engine->model.head_dim;
  for (uint32_t i = 0; i < count; ++i) {
    clb_step_row* const row = &b->rows[i];
    CLB_ASSERT(row->token >= 0 && (uint32_t)row->token < engine->model.vocab_size);
    embedding->kernel->row(embedding->data, (uint32_t)row->token, hidden, b->residual + (size_t)i * hidden);
    clb_rope_table(row->position, engine->model.rope_inv_freq, head_dim / 2, engine->model.rope_scale,
                   b->rope + (size_t)i * head_dim);
    row->status = CLB_OK;
    row->assignments = 0;
    row->trimmed = 0;
    row->dropped = 0;
  }
}

/* Where one layer of a slot's positions lies. */
static clb_attention_kv kv_of(const clb_engine* engine, uint32_t slot, uint32_t layer) {
  clb_kv_view view;
  clb_cache_view(&engine->cache, slot, layer, &view);
  return (clb_attention_kv){
      .prefix = {engine->kv + view.prefix_k, engine->kv + view.prefix_v, view.prefix_capacity, 0},
      .own = {engine->kv + view.own_k, engine->kv + view.own_v, view.own_capacity, 0},
      .prefix_tokens = view.prefix_tokens,
      .reserved = 0,
  };
}

/* RMSNorm of q and k of one row, in place: per head, or over each of the two as a whole. */
static void norm_qk(const clb_engine* engine, uint32_t layer, float* qkv) {
  const clb_attention_shape* const shape = &engine->attention;
  const clb_layer_kernels* const weights = &engine->kernels.layers[layer];
  const float epsilon = engine->model.rms_norm_eps;
  const uint32_t dim = shape->head_dim;
  float* const k = qkv + (size_t)shape->heads * dim;
  if (engine->model.layer_table[layer].qk_norm == CLB_QK_NORM_HEAD) {
    clb_rms_norm(qkv, weights->q_norm, epsilon, shape->heads, dim, qkv);
    clb_rms_norm(k, weights->k_norm, epsilon, shape->kv_heads, dim, k);
  } else {
    clb_rms_norm(qkv, weights->q_norm, epsilon, 1, shape->heads * dim, qkv);
    clb_rms_norm(k, weights->k_norm, epsilon, 1, shape->kv_heads * dim, k);
  }
}

/* Norm, RoPE and append for all rows first: a prompt row sees the earlier rows of its own step. */
static void append_kv(clb_engine* engine, uint32_t layer, uint32_t count) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_attention_shape* const shape = &engine->attention;
  const size_t q = (size_t)shape->heads * shape->head_dim;
  const size_t width = q + (size_t)2 * shape->kv_heads * shape->head_dim;
  for (uint32_t i = 0; i < count; ++i) {
    float* const qkv = b->qkv + i * width;
    const float* const rope = b->rope + (size_t)i * shape->head_dim;
    if (engine->model.layer_table[layer].qk_norm != CLB_QK_NORM_NONE) {
      norm_qk(engine, layer, qkv);
    }
    clb_rope_apply(rope, shape->head_dim / 2, shape->heads + shape->kv_heads, qkv);
    const clb_attention_kv kv = kv_of(engine, b->rows[i].slot, layer);
    clb_kv_append(shape, &kv, b->rows[i].position, qkv + q);
  }
}

static void attention_block(clb_engine* engine, uint32_t layer, uint32_t count) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_layer_kernels* const weights = &engine->kernels.layers[layer];
  const clb_attention_shape* const shape = &engine->attention;
  const uint32_t hidden = engine->model.hidden;
  const size_t q = (size_t)shape->heads * shape->head_dim;
  const size_t width = q + (size_t)2 * shape->kv_heads * shape->head_dim;
  const uint32_t window = engine->model.layer_table[layer].window;
  clb_rms_norm(b->residual, weights->attn_norm, engine->model.rms_norm_eps, count, hidden, b->normed);
  run_linear(&weights->qkv, weights->qkv_bias, b->normed, count, b->qkv);
  show_progress(engine);
  append_kv(engine, layer, count);
  for (uint32_t i = 0; i < count; ++i) {
    const clb_attention_kv kv = kv_of(engine, b->rows[i].slot, layer);
    const uint32_t tokens = b->rows[i].position + 1;
    clb_attention(shape, &kv, window != 0 && window < tokens ? tokens - window : 0, tokens, b->qkv + i * width,
                  b->attended + i * q);
    show_progress(engine);
  }
  run_linear(&weights->out, weights->out_bias, b->attended, count, b->update);
  clb_vector_add(b->update, (size_t)count * hidden, b->residual);
}

/* One expert over `count` tokens: output[places[i]] = down(silu(gate x) * up x), x = normed[tokens[i]]. */
static void run_expert(const clb_engine* engine, const clb_expert_entry* entry, const uint32_t* tokens,
                       const uint32_t* places, uint32_t count, float* activation, float* output) {
  const uint32_t hidden = engine->model.hidden;
  const clb_gated_linear_args first = {.gate = entry->gate,
                                  .up = entry->up,
                                  .input = engine->buffers.normed,
                                  .output = activation,
                                  .inputs = tokens,
                                  .input_stride = hidden,
                                  .output_stride = entry->width,
                                  .tokens = count,
                                  .cols = hidden,
                                  .row_begin = 0,
                                  .row_end = entry->width};
  const clb_linear_args second = {.weights = entry->down,
                                  .input = activation,
                                  .output = output,
                                  .outputs = places,
                                  .input_stride = entry->width,
                                  .output_stride = hidden,
                                  .tokens = count,
                                  .cols = entry->width,
                                  .row_begin = 0,
                                  .row_end = hidden};
  entry->kernel->gate_up(&first);
  entry->kernel->linear(&second);
}

static void route(clb_engine* engine, uint32_t layer, uint32_t count, clb_routing_args* args) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_dispatch_layout* const at = &engine->sizes.dispatch;
  unsigned char* const base = engine->dispatch;
  const clb_layer_desc* const desc = &engine->model.layer_table[layer];
  float* const logits = (float*)(void*)(base + at->logits);
  for (uint32_t i = 0; i < count; ++i) {
    b->policies[i] = engine->slots[b->rows[i].slot].policy[layer];
  }
  run_linear(&engine->kernels.layers[layer].router, NULL, b->normed, count, logits);
  *args = (clb_routing_args){
      .logits = logits,
      .layer = desc,
      .policies = b->policies,
      .indices = (uint32_t*)(void*)(base + at->indices),
      .weights = (float*)(void*)(base + at->weights),
      .kept = (uint32_t*)(void*)(base + at->kept),
      .trimmed = (uint32_t*)(void*)(base + at->trimmed),
      .dropped = (uint32_t*)(void*)(base + at->dropped),
      .status = (int32_t*)(void*)(base + at->status),
      .counts = (uint32_t*)(void*)(base + at->counts),
      .offsets = (uint32_t*)(void*)(base + at->offsets),
      .token_list = (uint32_t*)(void*)(base + at->token_list),
      .place_list = (uint32_t*)(void*)(base + at->place_list),
      .logits_stride = desc->experts,
      .tokens = count,
      .k_max = engine->sizes.k_max,
      .max_tokens_per_expert = engine->config.max_tokens_per_expert,
      .reserved = 0,
  };
  clb_routing_run(args);
}

/* Each expert once over its bucket, with the kernel of its own precision. */
static void run_experts(clb_engine* engine, uint32_t layer, const clb_routing_args* routing) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_dispatch_layout* const at = &engine->sizes.dispatch;
  const clb_layer_desc* const desc = &engine->model.layer_table[layer];
  const uint64_t stamp = engine->step_number * engine->model.layers + layer + 1;
  float* const activation = (float*)(void*)(engine->dispatch + at->activation);
  for (uint32_t e = 0; e < desc->experts; ++e) {
    const clb_expert_entry* const entry = &engine->kernels.layers[layer].experts[e];
    const uint32_t first = routing->offsets[e];
    if (routing->counts[e] == 0) {
      continue;
    }
    CLB_ASSERT(routing->offsets[e + 1] - first == routing->counts[e]);
    run_expert(engine, entry, routing->token_list + first, routing->place_list + first, routing->counts[e],
               activation + (size_t)first * entry->width, (float*)(void*)(engine->dispatch + at->output));
    show_progress(engine);
    engine->stats.expert_launches++;
    engine->stats.expert_relaunches += b->expert_stamp[e] == stamp ? 1u : 0u;
    b->expert_stamp[e] = stamp;
  }
}

/* update[i] = the kept experts' results times their weights, in rank order; and the row's counters. */
static void combine(clb_engine* engine, uint32_t layer, const clb_routing_args* routing) {
  const clb_step_buffers* const b = &engine->buffers;
  const uint32_t hidden = engine->model.hidden;
  const float* const outputs = (const float*)(void*)(engine->dispatch + engine->sizes.dispatch.output);
  memset(b->update, 0, (size_t)routing->tokens * hidden * sizeof(float));
  for (uint32_t i = 0; i < routing->tokens; ++i) {
    clb_step_row* const row = &b->rows[i];
    uint32_t* const counts =
        clb_channel_counts(&engine->channel, row->slot) + (size_t)layer * engine->config.channel.max_experts;
    for (uint32_t rank = 0; rank < routing->kept[i]; ++rank) {
      const size_t place = (size_t)i * routing->k_max + rank;
      const uint32_t expert = routing->indices[place];
      if (expert != CLB_ROUTING_NONE) {
        clb_vector_add_scaled(outputs + place * hidden, routing->weights[place], hidden,
                              b->update + (size_t)i * hidden);
        counts[expert]++;
        row->assignments++;
      }
    }
    row->trimmed += routing->trimmed[i];
    row->dropped += routing->dropped[i];
    row->status = routing->status[i] != CLB_OK ? routing->status[i] : row->status;
  }
}

static void moe_block(clb_engine* engine, uint32_t layer, uint32_t count) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_layer_kernels* const weights = &engine->kernels.layers[layer];
  const uint32_t hidden = engine->model.hidden;
  clb_routing_args routing;
  route(engine, layer, count, &routing);
  run_experts(engine, layer, &routing);
  combine(engine, layer, &routing);
  show_progress(engine);
  if (weights->shared.gate == NULL) {
    return;
  }
  run_expert(engine, &weights->shared, NULL, NULL, count, b->shared_activation, b->shared_output);
  if (weights->shared_gate == NULL) {
    clb_vector_add(b->shared_output, (size_t)count * hidden, b->update);
    return;
  }
  for (uint32_t i = 0; i < count; ++i) {
    const size_t at = (size_t)i * hidden;
    const float gate = clb_exact_sigmoid(clb_lanes_dot(weights->shared_gate, b->normed + at, hidden));
    clb_vector_add_scaled(b->shared_output + at, gate, hidden, b->update + at);
  }
}

static void ffn_block(clb_engine* engine, uint32_t layer, uint32_t count) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_layer_kernels* const weights = &engine->kernels.layers[layer];
  const uint32_t hidden = engine->model.hidden;
  clb_rms_norm(b->residual, weights->ffn_norm, engine->model.rms_norm_eps, count, hidden, b->normed);
  if (engine->model.layer_table[layer].ffn_kind == CLB_FFN_MOE) {
    moe_block(engine, layer, count);
  } else {
    run_expert(engine, &weights->shared, NULL, NULL, count, b->shared_activation, b->update);
  }
  clb_vector_add(b->update, (size_t)count * hidden, b->residual);
}

void clb_step_forward(struct clb_engine* engine, uint32_t count) {
  CLB_ASSERT(count > 0 && count <= engine->sizes.step_tokens);
  engine->step_number++;
  embed(engine, count);
  for (uint32_t layer = 0; layer < engine->model.layers; ++layer) {
    attention_block(engine, layer, count);
    show_progress(engine);
    ffn_block(engine, layer, count);
    show_progress(engine);
  }
}

void clb_step_logits(struct clb_engine* engine, const uint32_t* rows, uint32_t count) {
  const clb_step_buffers* const b = &engine->buffers;
  const uint32_t hidden = engine->model.hidden;
  CLB_ASSERT(count > 0 && count <= CLB_LOGIT_ROWS);
  for (uint32_t i = 0; i < count; ++i) {
    clb_rms_norm(b->residual + (size_t)rows[i] * hidden, engine->kernels.final_norm, engine->model.rms_norm_eps, 1,
                 hidden, b->head_input + (size_t)i * hidden);
  }
  run_linear(&engine->kernels.head, NULL, b->head_input, count, b->logits);
  show_progress(engine);
}
