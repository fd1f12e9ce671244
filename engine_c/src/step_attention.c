/* step_attention.c: the attention half of a layer, see step.c. */
#include "step_internal.h"

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
    engine->ops->rms_norm(qkv, weights->q_norm, epsilon, shape->heads, dim, qkv);
    engine->ops->rms_norm(k, weights->k_norm, epsilon, shape->kv_heads, dim, k);
  } else {
    engine->ops->rms_norm(qkv, weights->q_norm, epsilon, 1, shape->heads * dim, qkv);
    engine->ops->rms_norm(k, weights->k_norm, epsilon, 1, shape->kv_heads * dim, k);
  }
}

static size_t qkv_width(const clb_engine* engine) {
  const clb_attention_shape* const shape = &engine->attention;
  return ((size_t)shape->heads + (size_t)2 * shape->kv_heads) * shape->head_dim;
}

/* All rows before any attention: a prompt row sees the earlier rows of its own step. */
static void append_rows(clb_engine* engine, uint32_t layer, uint32_t first, uint32_t end) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_attention_shape* const shape = &engine->attention;
  for (uint32_t i = first; i < end; ++i) {
    float* const qkv = b->qkv + i * qkv_width(engine);
    const float* const rope = b->rope + (size_t)i * shape->head_dim;
    if (engine->model.layer_table[layer].qk_norm != CLB_QK_NORM_NONE) {
      norm_qk(engine, layer, qkv);
    }
    engine->ops->rope(rope, shape->head_dim / 2u, shape->heads + shape->kv_heads, qkv);
    const clb_attention_kv kv = kv_of(engine, b->rows[i].slot, layer);
    engine->ops->kv_append(shape, &kv, b->rows[i].position, qkv + (size_t)shape->heads * shape->head_dim);
  }
}

/* Items are (group of rows, kv head). */
static void attend(clb_engine* engine, uint32_t layer, uint32_t first, uint32_t end) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_attention_shape* const shape = &engine->attention;
  const size_t q = (size_t)shape->heads * shape->head_dim;
  const size_t group = q / shape->kv_heads;
  for (uint32_t i = first; i < end; ++i) {
    const uint32_t row = b->groups[i / shape->kv_heads];
    const uint32_t kv_head = i % shape->kv_heads;
    const clb_attention_kv kv = kv_of(engine, b->rows[row].slot, layer);
    const clb_attention_work work = {
        .query = b->qkv + row * qkv_width(engine) + kv_head * group,
        .output = b->attended + row * q + kv_head * group,
        .query_stride = qkv_width(engine),
        .output_stride = q,
        .position = b->rows[row].position,
        .rows = b->groups[i / shape->kv_heads + 1u] - row,
        .kv_head = kv_head,
        .window = engine->model.layer_table[layer].window,
    };
    engine->ops->attention(shape, &kv, &work);
  }
}

/* groups[g] .. groups[g + 1]: rows of one slot that attend together; fewer rows a group where there are few groups
   for many threads. Returns how many, and in *seen the positions that an average group sees. */
static uint32_t group_rows(const clb_engine* engine, uint32_t count, uint64_t* seen) {
  const clb_step_buffers* const b = &engine->buffers;
  const uint32_t share = count * engine->attention.kv_heads / (engine->threads.count * 4u) + 1u;
  const uint32_t most = share < CLB_ATTENTION_ROWS ? share : CLB_ATTENTION_ROWS;
  uint32_t groups = 0;
  *seen = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (i == 0u || b->rows[i].slot != b->rows[i - 1u].slot || i - b->groups[groups - 1u] == most) {
      b->groups[groups] = i;
      ++groups;
    }
    *seen += b->rows[i].position + 1u;
  }
  b->groups[groups] = count;
  *seen = *seen / groups + 1u;
  return groups;
}

static void after_attention(clb_engine* engine, uint32_t layer, uint32_t first, uint32_t end) {
  const clb_step_buffers* const b = &engine->buffers;
  const size_t hidden = engine->model.hidden;
  for (uint32_t i = first; i < end; ++i) {
    engine->ops->add(b->update + i * hidden, hidden, b->residual + i * hidden);
    clb_step_norm(engine, engine->kernels.layers[layer].ffn_norm, i);
    b->policies[i] = engine->slots[b->rows[i].slot].policy[layer];
  }
}

void clb_step_attention(clb_engine* engine, uint32_t layer, uint32_t count) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_layer_kernels* const weights = &engine->kernels.layers[layer];
  const uint64_t group = (uint64_t)engine->attention.heads / engine->attention.kv_heads * engine->attention.head_dim;
  uint64_t seen = 0;
  clb_step_linear(engine, &weights->qkv, weights->qkv_bias, b->normed, count, b->qkv);
  clb_step_rows(engine, layer, count, 4u * qkv_width(engine), append_rows);
  const uint32_t groups = group_rows(engine, count, &seen);
  clb_step_rows(engine, layer, groups * engine->attention.kv_heads, 2u * seen * group, attend);
  clb_step_linear(engine, &weights->out, weights->out_bias, b->attended, count, b->update);
  clb_step_rows(engine, layer, count, (uint64_t)4 * engine->model.hidden, after_attention);
}
