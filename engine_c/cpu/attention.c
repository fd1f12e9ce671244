/* attention.c: see attention.h. */
#include "attention.h"

#include <math.h>
#include <stddef.h>

#include "colibri.h"
#include "exact_math.h"
#include "lanes.h"
#include "number.h"

enum {
  GROUP = 8, /* query heads of one kv head that are done in one walk */
  BLOCK = CLB_ATTENTION_BLOCK
};

/* Running state of up to GROUP query heads that share one kv head. */
typedef struct walk {
  float largest[GROUP];
  float weight_sum[GROUP];
  float scores[GROUP][BLOCK];
} walk;

/* `count` stored values as fp32. */
static void widen(uint32_t precision, const void* base, size_t element, size_t count, float* output) {
  if (precision == CLB_FP32) {
    memcpy(output, (const float*)base + element, count * sizeof(float));
    return;
  }
  const uint16_t* const halves = (const uint16_t*)base + element;
  size_t i = 0;
  for (; i + CLB_LANES <= count; i += CLB_LANES) {
    clb_lanes_store(clb_lanes_load_half(halves + i), output + i);
  }
  for (; i < count; ++i) {
    output[i] = clb_float_of_half(halves[i]);
  }
}

/* rows (count, head_dim) = K (or V, if `values`) of one head at positions begin .. begin + count - 1, from the prefix
   run as far as it goes, then from the own run. */
static void gather(const clb_attention_shape* shape, const clb_attention_kv* kv, int values, uint32_t kv_head,
                   uint32_t begin, uint32_t count, float* rows) {
  const size_t dim = shape->head_dim;
  const uint32_t left = begin < kv->prefix_tokens ? kv->prefix_tokens - begin : 0;
  const uint32_t shared = left < count ? left : count;
  if (shared > 0) {
    const size_t element = ((size_t)kv_head * kv->prefix.capacity + begin) * dim;
    widen(shape->kv_precision, values ? kv->prefix.v : kv->prefix.k, element, shared * dim, rows);
  }
  if (shared < count) {
    const size_t index = begin + shared - kv->prefix_tokens;
    const size_t element = ((size_t)kv_head * kv->own.capacity + index) * dim;
    widen(shape->kv_precision, values ? kv->own.v : kv->own.k, element, (count - shared) * dim, rows + shared * dim);
  }
}

/* scores[j] = exp(scores[j] - largest), every score <= largest. Returns their sum, added up in lanes. */
static float exponentials(float* scores, size_t count, float largest) {
  const clb_float4 offset = {largest, largest, largest, largest};
  clb_lanes sums = clb_lanes_zero();
  for (size_t j = count; j % CLB_LANES != 0; ++j) {
    scores[j] = -INFINITY; /* fills the last lanes with weights of 0 */
  }
  for (size_t j = 0; j < count; j += CLB_LANES) {
    clb_float4 halves[2];
    memcpy(halves, scores + j, sizeof halves);
    const clb_lanes weights = clb_lanes_pair(clb_float4_exp(halves[0] - offset), clb_float4_exp(halves[1] - offset));
    clb_lanes_store(weights, scores + j);
    sums = clb_lanes_add(sums, weights);
  }
  return clb_lanes_sum(sums);
}

/* Turns the block's scores into weights against the new running maximum; rescales what was summed. */
static void update_softmax(walk* state, size_t head, size_t count, size_t dim, float* output) {
  float* const scores = state->scores[head];
  const float before = state->largest[head];
  float largest = before;
  for (size_t j = 0; j < count; ++j) {
    largest = scores[j] > largest ? scores[j] : largest;
  }
  const float factor = clb_exact_exp(before - largest); /* 0 at the first block */
  state->weight_sum[head] = state->weight_sum[head] * factor + exponentials(scores, count, largest);
  state->largest[head] = largest;
  for (size_t d = 0; d < dim; ++d) {
    output[d] *= factor;
  }
}

/* output[d] += sum_j weights[j] * rows[j][d], j rising. */
static void add_values(const float* weights, const float* rows, size_t count, size_t dim, float* output) {
  size_t d = 0;
  for (; d + 2 * CLB_LANES <= dim; d += 2 * CLB_LANES) {
    clb_lanes a = clb_lanes_load(output + d);
    clb_lanes b = clb_lanes_load(output + d + CLB_LANES);
    for (size_t j = 0; j < count; ++j) {
      const clb_lanes weight = clb_lanes_spread(weights[j]);
      a = clb_lanes_add_product(a, weight, clb_lanes_load(rows + j * dim + d));
      b = clb_lanes_add_product(b, weight, clb_lanes_load(rows + j * dim + d + CLB_LANES));
    }
    clb_lanes_store(a, output + d);
    clb_lanes_store(b, output + d + CLB_LANES);
  }
  for (; d < dim; ++d) {
    for (size_t j = 0; j < count; ++j) {
      output[d] += weights[j] * rows[j * dim + d];
    }
  }
}

/* Query heads [0, heads) of one kv head. */
static void attend_group(const clb_attention_shape* shape, const clb_attention_kv* kv, uint32_t first, uint32_t tokens,
                         uint32_t kv_head, size_t heads, const float* query, float* output) {
  const size_t dim = shape->head_dim;
  float rows[(size_t)BLOCK * CLB_MAX_HEAD_DIM];
  walk state;
  for (size_t h = 0; h < heads; ++h) {
    state.largest[h] = -INFINITY;
    state.weight_sum[h] = 0.0f;
  }
  memset(output, 0, heads * dim * sizeof(float));
  for (uint32_t begin = first, count = 0; begin < tokens; begin += count) {
    const uint32_t room = BLOCK - begin % BLOCK; /* up to the next border */
    count = tokens - begin < room ? tokens - begin : room;
    gather(shape, kv, 0, kv_head, begin, count, rows);
    for (size_t h = 0; h < heads; ++h) {
      for (size_t j = 0; j < count; ++j) {
        state.scores[h][j] = clb_lanes_dot(query + h * dim, rows + j * dim, dim) * shape->scale;
      }
      update_softmax(&state, h, count, dim, output + h * dim);
    }
    gather(shape, kv, 1, kv_head, begin, count, rows);
    for (size_t h = 0; h < heads; ++h) {
      add_values(state.scores[h], rows, count, dim, output + h * dim);
    }
  }
  for (size_t h = 0; h < heads; ++h) {
    const float scale = 1.0f / state.weight_sum[h];
    for (size_t d = 0; d < dim; ++d) {
      output[h * dim + d] *= scale;
    }
  }
}

void clb_attention(const clb_attention_shape* shape, const clb_attention_kv* kv, uint32_t first, uint32_t tokens,
                   const float* query, float* output) {
  const uint32_t group = shape->heads / shape->kv_heads;
  for (uint32_t kv_head = 0; kv_head < shape->kv_heads; ++kv_head) {
    for (uint32_t head = 0; head < group; head += GROUP) {
      const size_t heads = group - head < GROUP ? group - head : GROUP;
      const size_t offset = ((size_t)kv_head * group + head) * shape->head_dim;
      attend_group(shape, kv, first, tokens, kv_head, heads, query + offset, output + offset);
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
