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
  BLOCK = CLB_ATTENTION_BLOCK,
  ROWS = CLB_ATTENTION_ROWS
};

/* Running state of one query head of one token. */
typedef struct walk {
  float largest;
  float weight_sum;
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

/* K (or V, if `values`) of one head at positions begin .. begin + count - 1 as (count, head_dim): where it lies if it
   is fp32 in one piece, else put together in `rows`, from the prefix run as far as it goes, then from the own run. */
static const float* fetch(const clb_attention_shape* shape, const clb_attention_kv* kv, int values, uint32_t kv_head,
                          uint32_t begin, uint32_t count, float* rows) {
  const size_t dim = shape->head_dim;
  const uint32_t left = begin < kv->prefix_tokens ? kv->prefix_tokens - begin : 0;
  const uint32_t shared = left < count ? left : count;
  const size_t in_prefix = ((size_t)kv_head * kv->prefix.capacity + begin) * dim;
  const size_t in_own = ((size_t)kv_head * kv->own.capacity + begin + shared - kv->prefix_tokens) * dim;
  const void* const prefix = values ? kv->prefix.v : kv->prefix.k;
  const void* const own = values ? kv->own.v : kv->own.k;
  if (shape->kv_precision == CLB_FP32 && (shared == 0 || shared == count)) {
    return shared == 0 ? (const float*)own + in_own : (const float*)prefix + in_prefix;
  }
  if (shared > 0) {
    widen(shape->kv_precision, prefix, in_prefix, shared * dim, rows);
  }
  if (shared < count) {
    widen(shape->kv_precision, own, in_own, (count - shared) * dim, rows + shared * dim);
  }
  return rows;
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
static void update_softmax(walk* state, float* scores, size_t count, size_t dim, float* output) {
  const float before = state->largest;
  float largest = before;
  for (size_t j = 0; j < count; ++j) {
    largest = scores[j] > largest ? scores[j] : largest;
  }
  const float factor = clb_exact_exp(before - largest); /* 0 at the first block */
  state->weight_sum = state->weight_sum * factor + exponentials(scores, count, largest);
  state->largest = largest;
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

/* One query head of one token against `count` positions. */
static void attend_block(const clb_attention_shape* shape, const float* k, const float* v, size_t count,
                         const float* query, walk* state, float* output) {
  const size_t dim = shape->head_dim;
  float scores[BLOCK];
  for (size_t j = 0; j < count; ++j) {
    scores[j] = clb_lanes_dot(query, k + j * dim, dim) * shape->scale;
  }
  update_softmax(state, scores, count, dim, output);
  add_values(scores, v, count, dim, output);
}

static uint32_t first_seen(const clb_attention_work* work, uint32_t row) {
  const uint32_t tokens = work->position + row + 1;
  return work->window != 0 && work->window < tokens ? tokens - work->window : 0;
}

/* All tokens and `heads` query heads from `head` on against the block of positions [begin, end). */
static void attend_rows(const clb_attention_shape* shape, const clb_attention_kv* kv, const clb_attention_work* work,
                        size_t head, size_t heads, uint32_t begin, uint32_t end, walk states[ROWS][GROUP]) {
  const size_t dim = shape->head_dim;
  float k_rows[(size_t)BLOCK * CLB_MAX_HEAD_DIM];
  float v_rows[(size_t)BLOCK * CLB_MAX_HEAD_DIM];
  const float* const k = fetch(shape, kv, 0, work->kv_head, begin, end - begin, k_rows);
  const float* const v = fetch(shape, kv, 1, work->kv_head, begin, end - begin, v_rows);
  for (uint32_t r = 0; r < work->rows; ++r) {
    const uint32_t first = first_seen(work, r);
    const uint32_t from = first > begin ? first : begin;
    const uint32_t to = work->position + r + 1 < end ? work->position + r + 1 : end;
    if (from >= to) {
      continue;
    }
    const size_t skipped = (size_t)(from - begin) * dim;
    for (size_t h = 0; h < heads; ++h) {
      attend_block(shape, k + skipped, v + skipped, to - from, work->query + r * work->query_stride + (head + h) * dim,
                   &states[r][h], work->output + r * work->output_stride + (head + h) * dim);
    }
  }
}

static void attend_group(const clb_attention_shape* shape, const clb_attention_kv* kv, const clb_attention_work* work,
                         size_t head, size_t heads) {
  const size_t dim = shape->head_dim;
  const uint32_t tokens = work->position + work->rows; /* that the last token sees */
  walk states[ROWS][GROUP];
  for (uint32_t r = 0; r < work->rows; ++r) {
    for (size_t h = 0; h < heads; ++h) {
      states[r][h] = (walk){-INFINITY, 0.0f};
    }
    memset(work->output + r * work->output_stride + head * dim, 0, heads * dim * sizeof(float));
  }
  for (uint32_t begin = first_seen(work, 0), end = 0; begin < tokens; begin = end) {
    const uint32_t border = begin - begin % BLOCK + BLOCK;
    end = tokens < border ? tokens : border;
    attend_rows(shape, kv, work, head, heads, begin, end, states);
  }
  for (uint32_t r = 0; r < work->rows; ++r) {
    for (size_t h = 0; h < heads; ++h) {
      float* const output = work->output + r * work->output_stride + (head + h) * dim;
      const float scale = 1.0f / states[r][h].weight_sum;
      for (size_t d = 0; d < dim; ++d) {
        output[d] *= scale;
      }
    }
  }
}

void clb_attention(const clb_attention_shape* shape, const clb_attention_kv* kv, const clb_attention_work* work) {
  const uint32_t group = shape->heads / shape->kv_heads;
  for (uint32_t head = 0; head < group; head += GROUP) {
    attend_group(shape, kv, work, head, group - head < GROUP ? group - head : GROUP);
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
