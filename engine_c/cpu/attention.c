/* attention.c: see attention.h. */
#include "attention.h"

#include <math.h>
#include <stddef.h>

#include "colibri.h"
#include "number.h"

enum { LANES = 8, GROUP = 8 }; /* query heads of one kv head that are done in one walk */

/* Running state of up to GROUP query heads that share one kv head. */
typedef struct walk {
  float largest[GROUP];
  float weight_sum[GROUP];
  float scores[GROUP][CLB_ATTENTION_BLOCK];
} walk;

static float dot(const float* restrict a, const float* restrict b, size_t count) {
  float s[LANES] = {0};
  size_t c = 0;
  for (; c + LANES <= count; c += LANES) {
    for (size_t l = 0; l < LANES; l++) {
      s[l] += a[c + l] * b[c + l];
    }
  }
  for (size_t l = 0; c + l < count; l++) {
    s[l] += a[c + l] * b[c + l];
  }
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

/* head_dim values that start `offset` values into the KV of one position, as fp32. */
static inline const float* kv_row(const clb_attention_shape* shape, const clb_kv_view* kv, uint32_t position,
                                  size_t offset, float* restrict buffer) {
  const size_t token_values = (size_t)2 * shape->kv_heads * shape->head_dim;
  const int in_prefix = position < kv->prefix_tokens;
  const void* const base = in_prefix ? kv->prefix : kv->own;
  const size_t start = (size_t)(in_prefix ? position : position - kv->prefix_tokens) * token_values + offset;
  if (shape->kv_precision == CLB_FP32) {
    return (const float*)base + start;
  }
  const uint16_t* const halves = (const uint16_t*)base + start;
  for (size_t d = 0; d < shape->head_dim; d++) {
    buffer[d] = clb_float_of_half(halves[d]);
  }
  return buffer;
}

/* Turns the block's scores into weights against the new running maximum; rescales what was summed. */
static void update_softmax(walk* state, size_t head, uint32_t count, uint32_t head_dim, float* restrict output) {
  float* const scores = state->scores[head];
  float largest = state->largest[head];
  for (size_t j = 0; j < count; j++) {
    largest = scores[j] > largest ? scores[j] : largest;
  }
  const float factor = expf(state->largest[head] - largest); /* 0 at the first block */
  float sum = state->weight_sum[head] * factor;
  for (size_t j = 0; j < count; j++) {
    scores[j] = expf(scores[j] - largest);
    sum += scores[j];
  }
  for (size_t d = 0; d < head_dim; d++) {
    output[d] *= factor;
  }
  state->largest[head] = largest;
  state->weight_sum[head] = sum;
}

/* Query heads [0, heads) of kv head `kv_head`. */
static void attend_group(const clb_attention_shape* shape, const clb_kv_view* kv, uint32_t kv_head, size_t heads,
                         const float* query, float* output) {
  const size_t dim = shape->head_dim;
  const size_t k_offset = (size_t)kv_head * dim;
  const size_t v_offset = (size_t)(shape->kv_heads + kv_head) * dim;
  float buffer[CLB_MAX_HEAD_DIM];
  walk state;
  for (size_t h = 0; h < heads; h++) {
    state.largest[h] = -INFINITY;
    state.weight_sum[h] = 0.0f;
  }
  for (size_t i = 0; i < heads * dim; i++) {
    output[i] = 0.0f;
  }
  for (uint32_t begin = 0; begin < kv->tokens; begin += CLB_ATTENTION_BLOCK) {
    const uint32_t count = kv->tokens - begin < CLB_ATTENTION_BLOCK ? kv->tokens - begin : CLB_ATTENTION_BLOCK;
    for (uint32_t j = 0; j < count; j++) {
      const float* const k = kv_row(shape, kv, begin + j, k_offset, buffer);
      for (size_t h = 0; h < heads; h++) {
        state.scores[h][j] = dot(query + h * dim, k, dim) * shape->scale;
      }
    }
    for (size_t h = 0; h < heads; h++) {
      update_softmax(&state, h, count, shape->head_dim, output + h * dim);
    }
    for (uint32_t j = 0; j < count; j++) {
      const float* const v = kv_row(shape, kv, begin + j, v_offset, buffer);
      for (size_t h = 0; h < heads; h++) {
        const float weight = state.scores[h][j];
        float* restrict const sum = output + h * dim;
        for (size_t d = 0; d < dim; d++) {
          sum[d] += weight * v[d];
        }
      }
    }
  }
  for (size_t h = 0; h < heads; h++) {
    const float scale = 1.0f / state.weight_sum[h];
    for (size_t d = 0; d < dim; d++) {
      output[h * dim + d] *= scale;
    }
  }
}

void clb_attention(const clb_attention_shape* shape, const clb_kv_view* kv, const float* query, float* output) {
  const uint32_t group = shape->heads / shape->kv_heads;
  for (uint32_t kv_head = 0; kv_head < shape->kv_heads; kv_head++) {
    for (uint32_t first = 0; first < group; first += GROUP) {
      const size_t heads = group - first < GROUP ? group - first : GROUP;
      const size_t offset = ((size_t)kv_head * group + first) * shape->head_dim;
      attend_group(shape, kv, kv_head, heads, query + offset, output + offset);
    }
  }
}

void clb_kv_append(const clb_attention_shape* shape, const float* values, uint32_t index, void* run_layer) {
  const size_t count = (size_t)2 * shape->kv_heads * shape->head_dim;
  if (shape->kv_precision == CLB_FP32) {
    memcpy((float*)run_layer + index * count, values, count * sizeof(float));
    return;
  }
  uint16_t* const halves = (uint16_t*)run_layer + index * count;
  for (size_t i = 0; i < count; i++) {
    halves[i] = clb_half_of_float(values[i]);
  }
}
