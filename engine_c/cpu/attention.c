/* attention.c: see attention.h. */
#include "attention.h"

#include <math.h>
#include <stddef.h>

#include "colibri.h"
#include "lanes.h"
#include "number.h"

enum { GROUP = 8 }; /* query heads of one kv head that are done in one walk */

/* Running state of up to GROUP query heads that share one kv head. */
typedef struct walk {
  float largest[GROUP];
  float weight_sum[GROUP];
  float scores[GROUP][CLB_ATTENTION_BLOCK];
} walk;

/* One head's rows of K or V at a position and after it, up to `left` positions in the same run. */
typedef struct rows {
  const void* first;
  uint32_t left;
} rows;

/* Rows [position, end) as far as they lie in one run. */
static rows rows_at(const clb_attention_shape* shape, const clb_attention_kv* kv, int values, uint32_t kv_head,
                    uint32_t position, uint32_t end) {
  const int in_prefix = position < kv->prefix_tokens;
  const clb_kv_layer* const run = in_prefix ? &kv->prefix : &kv->own;
  const uint32_t border = in_prefix && kv->prefix_tokens < end ? kv->prefix_tokens : end;
  const size_t index = in_prefix ? position : position - kv->prefix_tokens;
  const size_t element = ((size_t)kv_head * run->capacity + index) * shape->head_dim;
  const size_t bytes = shape->kv_precision == CLB_FP32 ? sizeof(float) : sizeof(uint16_t);
  return (rows){(const unsigned char*)(values ? run->v : run->k) + element * bytes, border - position};
}

/* Row `index` as fp32: in place, or widened into `buffer`. */
static inline const float* row_as_float(const clb_attention_shape* shape, const void* first, size_t index,
                                        float* restrict buffer) {
  const size_t dim = shape->head_dim;
  if (shape->kv_precision == CLB_FP32) {
    return (const float*)first + index * dim;
  }
  const uint16_t* const halves = (const uint16_t*)first + index * dim;
  size_t d = 0;
  for (; d + CLB_LANES <= dim; d += CLB_LANES) {
    clb_lanes_store(clb_lanes_load_half(halves + d), buffer + d);
  }
  for (; d < dim; ++d) {
    buffer[d] = clb_float_of_half(halves[d]);
  }
  return buffer;
}

/* Turns the block's scores into weights against the new running maximum; rescales what was summed. */
static void update_softmax(walk* state, size_t head, uint32_t count, uint32_t head_dim, float* restrict output) {
  float* const scores = state->scores[head];
  float largest = state->largest[head];
  for (size_t j = 0; j < count; ++j) {
    largest = scores[j] > largest ? scores[j] : largest;
  }
  const float factor = expf(state->largest[head] - largest); /* 0 at the first block */
  float sum = state->weight_sum[head] * factor;
  for (size_t j = 0; j < count; ++j) {
    scores[j] = expf(scores[j] - largest);
    sum += scores[j];
  }
  for (size_t d = 0; d < head_dim; ++d) {
    output[d] *= factor;
  }
  state->largest[head] = largest;
  state->weight_sum[head] = sum;
}

/* state.scores[h][j] = scale * query h . K at position begin + j, for `count` positions. */
static void score_block(const clb_attention_shape* shape, const clb_attention_kv* kv, uint32_t kv_head, size_t heads,
                        const float* query, uint32_t begin, uint32_t count, walk* state) {
  const size_t dim = shape->head_dim;
  float buffer[CLB_MAX_HEAD_DIM];
  for (uint32_t j = 0; j < count;) {
    const rows k = rows_at(shape, kv, 0, kv_head, begin + j, begin + count);
    for (uint32_t i = 0; i < k.left; i++, ++j) {
      const float* const row = row_as_float(shape, k.first, i, buffer);
      for (size_t h = 0; h < heads; ++h) {
        state->scores[h][j] = clb_lanes_dot(query + h * dim, row, dim) * shape->scale;
      }
    }
  }
}

/* output[h] += sum_j state.scores[h][j] * V at position begin + j, j rising. */
static void add_values(const clb_attention_shape* shape, const clb_attention_kv* kv, uint32_t kv_head, size_t heads,
                       uint32_t begin, uint32_t count, const walk* state, float* output) {
  const size_t dim = shape->head_dim;
  float buffer[CLB_MAX_HEAD_DIM];
  for (uint32_t j = 0; j < count;) {
    const rows v = rows_at(shape, kv, 1, kv_head, begin + j, begin + count);
    for (uint32_t i = 0; i < v.left; i++, ++j) {
      const float* const row = row_as_float(shape, v.first, i, buffer);
      for (size_t h = 0; h < heads; ++h) {
        const float weight = state->scores[h][j];
        float* restrict const sum = output + h * dim;
        for (size_t d = 0; d < dim; ++d) {
          sum[d] += weight * row[d];
        }
      }
    }
  }
}

/* Query heads [0, heads) of one kv head. */
static void attend_group(const clb_attention_shape* shape, const clb_attention_kv* kv, uint32_t tokens,
                         uint32_t kv_head, size_t heads, const float* query, float* output) {
  const size_t dim = shape->head_dim;
  walk state;
  for (size_t h = 0; h < heads; ++h) {
    state.largest[h] = -INFINITY;
    state.weight_sum[h] = 0.0f;
  }
  memset(output, 0, heads * dim * sizeof(float));
  for (uint32_t begin = 0; begin < tokens; begin += CLB_ATTENTION_BLOCK) {
    const uint32_t count = tokens - begin < CLB_ATTENTION_BLOCK ? tokens - begin : CLB_ATTENTION_BLOCK;
    score_block(shape, kv, kv_head, heads, query, begin, count, &state);
    for (size_t h = 0; h < heads; ++h) {
      update_softmax(&state, h, count, shape->head_dim, output + h * dim);
    }
    add_values(shape, kv, kv_head, heads, begin, count, &state, output);
  }
  for (size_t h = 0; h < heads; ++h) {
    const float scale = 1.0f / state.weight_sum[h];
    for (size_t d = 0; d < dim; ++d) {
      output[h * dim + d] *= scale;
    }
  }
}

void clb_attention(const clb_attention_shape* shape, const clb_attention_kv* kv, uint32_t tokens, const float* query,
                   float* output) {
  const uint32_t group = shape->heads / shape->kv_heads;
  for (uint32_t kv_head = 0; kv_head < shape->kv_heads; ++kv_head) {
    for (uint32_t first = 0; first < group; first += GROUP) {
      const size_t heads = group - first < GROUP ? group - first : GROUP;
      const size_t offset = ((size_t)kv_head * group + first) * shape->head_dim;
      attend_group(shape, kv, tokens, kv_head, heads, query + offset, output + offset);
    }
  }
}

static void store_row(const clb_attention_shape* shape, const float* values, void* base, size_t element) {
  const size_t dim = shape->head_dim;
  if (shape->kv_precision == CLB_FP32) {
    memcpy((float*)base + element, values, dim * sizeof(float));
    return;
  }
  uint16_t* const halves = (uint16_t*)base + element;
  for (size_t d = 0; d < dim; ++d) {
    halves[d] = clb_half_of_float(values[d]);
  }
}

void clb_kv_append(const clb_attention_shape* shape, const clb_attention_kv* kv, uint32_t position,
                   const float* values) {
  const size_t dim = shape->head_dim;
  const int in_prefix = position < kv->prefix_tokens;
  const clb_kv_layer* const run = in_prefix ? &kv->prefix : &kv->own;
  const size_t index = in_prefix ? position : position - kv->prefix_tokens;
  for (size_t h = 0; h < shape->kv_heads; ++h) {
    const size_t element = (h * run->capacity + index) * dim;
    store_row(shape, values + h * dim, run->k, element);
    store_row(shape, values + (shape->kv_heads + h) * dim, run->v, element);
  }
}
