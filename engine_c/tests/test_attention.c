/* test_attention.c: attention and append of every table that this machine can run, against double precision, and the
   promise about borders, lengths and company. */
#include "colibri.h"
#include "number.h"
#include "ops.h"
#include "test.h"

enum { MAX_POSITIONS = 208, MAX_VALUES = 2 * 4 * 64 };

static const clb_ops* ops; /* the table under test */
static _Alignas(64) unsigned char own[2][4 * MAX_POSITIONS * MAX_VALUES];
static _Alignas(64) unsigned char prefix[2][4 * MAX_POSITIONS * MAX_VALUES];
static float values[MAX_POSITIONS][MAX_VALUES];
static float query[32 * 64];
static float output[32 * 64];
static float again[32 * 64];

/* Positions below `border` in the prefix run; capacities are larger than needed. */
static clb_attention_kv make_kv(uint32_t border) {
  memset(own, 0xff, sizeof own); /* NaN: what was not appended must not be read */
  memset(prefix, 0xff, sizeof prefix);
  return (clb_attention_kv){.prefix = {prefix[0], prefix[1], (border + 15) / 16 * 16, 0},
                            .own = {own[0], own[1], (MAX_POSITIONS - border + 15) / 16 * 16, 0},
                            .prefix_tokens = border};
}

static void fill(uint64_t* state, float* numbers, size_t count, float scale) {
  for (size_t i = 0; i < count; ++i) {
    numbers[i] = ((float)(clb_test_random(state) >> 40) * 0x1p-23f - 1.0f) * scale;
  }
}

static void append_all(const clb_attention_shape* shape, const clb_attention_kv* kv, uint32_t tokens) {
  for (uint32_t p = 0; p < tokens; ++p) {
    ops->kv_append(shape, kv, p, values[p]);
  }
}

static double stored(const clb_attention_shape* shape, float value) {
  return shape->kv_precision == CLB_FP32 ? (double)value : (double)clb_float_of_half(clb_half_of_float(value));
}

static void reference(const clb_attention_shape* shape, uint32_t first, uint32_t tokens, uint32_t head,
                      double* result) {
  const uint32_t dim = shape->head_dim;
  const uint32_t kv_head = head / (shape->heads / shape->kv_heads);
  static double scores[MAX_POSITIONS];
  double largest = -1e300;
  double sum = 0;
  for (uint32_t p = first; p < tokens; ++p) {
    scores[p] = 0;
    for (uint32_t d = 0; d < dim; ++d) {
      scores[p] += (double)query[head * dim + d] * stored(shape, values[p][kv_head * dim + d]);
    }
    scores[p] *= (double)shape->scale;
    largest = fmax(largest, scores[p]);
  }
  for (uint32_t d = 0; d < dim; ++d) {
    result[d] = 0;
  }
  for (uint32_t p = first; p < tokens; ++p) {
    const double weight = exp(scores[p] - largest);
    sum += weight;
    for (uint32_t d = 0; d < dim; ++d) {
      result[d] += weight * stored(shape, values[p][(shape->kv_heads + kv_head) * dim + d]);
    }
  }
  for (uint32_t d = 0; d < dim; ++d) {
    result[d] /= sum;
  }
}

/* All heads of tokens [position, position + rows), whose queries lie one after the other. */
static void attend(const clb_attention_shape* shape, const clb_attention_kv* kv, uint32_t position, uint32_t rows,
                   uint32_t window, const float* queries, float* outputs) {
  const uint64_t stride = (uint64_t)shape->heads * shape->head_dim;
  for (uint32_t kv_head = 0; kv_head < shape->kv_heads; ++kv_head) {
    const uint64_t at = stride / shape->kv_heads * kv_head;
    const clb_attention_work work = {.query = queries + at,
                                     .output = outputs + at,
                                     .query_stride = stride,
                                     .output_stride = stride,
                                     .position = position,
                                     .rows = rows,
                                     .kv_head = kv_head,
                                     .window = window};
    ops->attention(shape, kv, &work);
  }
}

static const clb_attention_shape shapes[] = {
    {4, 2, 8, CLB_FP32, 0.35f},  {4, 4, 64, CLB_FP16, 0.125f}, {32, 2, 16, CLB_FP16, 0.25f}, {8, 1, 6, CLB_FP32, 0.4f},
    {20, 2, 34, CLB_FP16, 0.2f}, {1, 1, 2, CLB_FP16, 1.0f},    {14, 1, 48, CLB_FP32, 0.1f},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

/* Attention equals the double-precision softmax for odd head sizes, groups, lengths, windows and borders. */
static void attention_is_softmax(void) {
  const uint32_t lengths[] = {1, 2, 63, 64, 65, 130, 200};
  uint64_t state = 1;
  for (uint32_t s = 0; s < SHAPES; ++s) {
    const clb_attention_shape* const shape = &shapes[s];
    for (uint32_t i = 0; i < 7; ++i) {
      const uint32_t border = (uint32_t)(clb_test_random(&state) % (lengths[i] + 1));
      const clb_attention_kv kv = make_kv(border);
      double wanted[64];
      fill(&state, &values[0][0], sizeof values / sizeof(float), 2.0f);
      fill(&state, query, sizeof query / sizeof(float), i % 2 == 0 ? 1.0f : 20.0f);
      append_all(shape, &kv, lengths[i]);
      const uint32_t first = (uint32_t)(clb_test_random(&state) % 2 * (clb_test_random(&state) % lengths[i]));
      attend(shape, &kv, lengths[i] - 1, 1, first == 0 ? 0 : lengths[i] - first, query, output);
      for (uint32_t h = 0; h < shape->heads; ++h) {
        reference(shape, first, lengths[i], h, wanted);
        for (uint32_t d = 0; d < shape->head_dim; ++d) {
          const double actual = (double)output[h * shape->head_dim + d];
          if (!(fabs(actual - wanted[d]) <= 2e-5)) {
            (void)fprintf(stderr, "%s: %.9g, expected %.9g; shape %u first %u length %u border %u head %u dim %u\n",
                          ops->name, actual, wanted[d], s, first, lengths[i], border, h, d);
            CHECK(0);
          }
        }
      }
    }
  }
}

/* The bits do not depend on where the prefix run ends, nor on what is appended later. */
static void border_changes_nothing(void) {
  uint64_t state = 2;
  for (uint32_t s = 0; s < SHAPES; ++s) {
    const clb_attention_shape* const shape = &shapes[s];
    const size_t bytes = (size_t)shape->heads * shape->head_dim * sizeof(float);
    fill(&state, &values[0][0], sizeof values / sizeof(float), 2.0f);
    fill(&state, query, sizeof query / sizeof(float), 3.0f);
    clb_attention_kv kv = make_kv(0);
    append_all(shape, &kv, 150);
    const uint32_t window = s % 2 * 73;
    attend(shape, &kv, 149, 1, window, query, output);
    append_all(shape, &kv, 200);
    attend(shape, &kv, 149, 1, window, query, again);
    CHECK(memcmp(again, output, bytes) == 0);
    for (uint32_t border = 1; border <= 150; border += 7) {
      kv = make_kv(border);
      append_all(shape, &kv, 150);
      attend(shape, &kv, 149, 1, window, query, again);
      CHECK(memcmp(again, output, bytes) == 0);
    }
  }
}

/* Tokens computed together have the bits that each has alone, whatever they see of each other's positions. */
static void company_changes_nothing(void) {
  static float queries[CLB_ATTENTION_ROWS * 32 * 64];
  static float together[CLB_ATTENTION_ROWS * 32 * 64];
  const uint32_t positions[] = {0, 1, 50, 63, 64, 120};
  const uint32_t windows[] = {0, 1, 9, 70};
  uint64_t state = 3;
  fill(&state, &values[0][0], sizeof values / sizeof(float), 2.0f);
  fill(&state, queries, sizeof queries / sizeof(float), 3.0f);
  for (uint32_t s = 0; s < SHAPES; ++s) {
    const clb_attention_shape* const shape = &shapes[s];
    const size_t width = (size_t)shape->heads * shape->head_dim;
    for (uint32_t i = 0; i < 24; ++i) {
      const uint32_t position = positions[i % 6];
      const uint32_t rows = i % 5 == 0 ? CLB_ATTENTION_ROWS : 1 + i % 7;
      const clb_attention_kv kv = make_kv(i * 4);
      append_all(shape, &kv, position + rows);
      attend(shape, &kv, position, rows, windows[i / 6], queries, together);
      for (uint32_t r = 0; r < rows; ++r) {
        attend(shape, &kv, position + r, 1, windows[i / 6], queries + r * width, again);
        CHECK(memcmp(again, together + r * width, width * sizeof(float)) == 0);
      }
    }
  }
}

/* fp16 K and V are what clb_half_of_float makes, also of values that are too large. */
static void append_rounds_and_saturates(void) {
  const clb_attention_shape shape = {1, 1, 34, CLB_FP16, 1.0f};
  float row[2 * 34];
  uint64_t state = 4;
  fill(&state, row, 68, 3.0f);
  row[0] = 1e9f;
  row[33] = -1e9f;
  row[34] = 1e-7f;
  for (uint32_t position = 0; position < 40; ++position) {
    const clb_attention_kv kv = make_kv(20);
    const uint32_t index = position < 20 ? position : position - 20;
    const uint16_t* const k = position < 20 ? kv.prefix.k : kv.own.k;
    const uint16_t* const v = position < 20 ? kv.prefix.v : kv.own.v;
    ops->kv_append(&shape, &kv, position, row);
    for (uint32_t d = 0; d < 34; ++d) {
      CHECK_EQ(k[(index / 16 * 34 + d) * 16 + index % 16], clb_half_of_float(row[d]));
      CHECK_EQ(v[index * 34 + d], clb_half_of_float(row[34 + d]));
    }
    CHECK_EQ(k[((index + 1) / 16 * 34) * 16 + (index + 1) % 16], 0xffff); /* its neighbour is not touched */
  }
}

/* A score that is NaN or infinite makes the output NaN, not a number that looks right. */
static void not_finite_scores_are_not_hidden(void) {
  const clb_attention_shape shape = {1, 1, 16, CLB_FP32, 1.0f};
  const float bad[] = {NAN, INFINITY};
  for (uint32_t i = 0; i < 2; ++i) {
    const clb_attention_kv kv = make_kv(0);
    memset(values, 0, sizeof values);
    for (uint32_t d = 0; d < 16; ++d) {
      query[d] = 1.0f;
    }
    append_all(&shape, &kv, 70);
    values[3][5] = bad[i];
    ops->kv_append(&shape, &kv, 3, values[3]);
    attend(&shape, &kv, 69, 1, 0, query, output);
    CHECK(isnan(output[0]));
    attend(&shape, &kv, 69, 1, 60, query, output); /* does not see it */
    CHECK(output[0] == 0.0f);
  }
}

/* All tables give the same numbers within 1e-5 of the largest one. */
static void tables_agree(void) {
  const clb_ops* const table = ops;
  uint64_t state = 5;
  fill(&state, &values[0][0], sizeof values / sizeof(float), 2.0f);
  fill(&state, query, sizeof query / sizeof(float), 3.0f);
  for (uint32_t s = 0; s < SHAPES; ++s) {
    const clb_attention_shape* const shape = &shapes[s];
    const clb_attention_kv kv = make_kv(70);
    append_all(shape, &kv, 200);
    attend(shape, &kv, 199, 1, 0, query, output);
    ops = clb_ops_table(0);
    attend(shape, &kv, 199, 1, 0, query, again);
    ops = table;
    for (uint32_t i = 0; i < shape->heads * shape->head_dim; ++i) {
      CHECK_NEAR(output[i], (double)again[i], 1e-5 * 2.0);
    }
  }
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {
      TEST(attention_is_softmax),        TEST(border_changes_nothing),           TEST(company_changes_nothing),
      TEST(append_rounds_and_saturates), TEST(not_finite_scores_are_not_hidden), TEST(tables_agree)};
  int result = 0;
  for (uint32_t i = 0; clb_ops_table(i) != NULL; ++i) {
    ops = clb_ops_table(i);
    if (ops->supported() == 1) {
      result |= clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
    }
  }
  return result;
}
