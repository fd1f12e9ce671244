/* test_ops.c: operations on rows, of every table that this machine can run. Attention: test_attention.c. */
#include "ops.h"

#include "rope.h"
#include "test.h"

enum { MAX_COLS = 200 };

static const clb_ops* ops; /* the table under test */

static float pick(uint64_t* state) { return ((float)(clb_test_random(state) >> 40) * 0x1p-23f - 1.0f) * 5.0f; }

/* The table that is chosen runs here, and none that does has a higher rank. */
static void the_best_table_is_chosen(void) {
  const clb_ops* const chosen = clb_ops_choose();
  CHECK_EQ(chosen->supported(), 1);
  for (uint32_t i = 0; clb_ops_table(i) != NULL; ++i) {
    CHECK(clb_ops_table(i)->supported() == 0 || clb_ops_table(i)->rank <= chosen->rank);
  }
}

/* dot equals the double-precision sum for every length. */
static void dot_is_a_sum_of_products(void) {
  float a[MAX_COLS];
  float b[MAX_COLS];
  uint64_t state = 3;
  for (size_t count = 0; count <= MAX_COLS; ++count) {
    double sum = 0;
    double size = 0;
    for (size_t i = 0; i < MAX_COLS; ++i) {
      a[i] = pick(&state);
      b[i] = pick(&state);
      sum += i < count ? (double)a[i] * (double)b[i] : 0.0;
      size += i < count ? fabs((double)a[i] * (double)b[i]) : 0.0;
    }
    CHECK_NEAR(ops->dot(a, b, count), sum, 1e-6 * size);
  }
}

/* Each element is added, plain or times a factor, and nothing beyond `count` is touched. */
static void elements_are_added(void) {
  float input[MAX_COLS];
  float output[MAX_COLS];
  float before[MAX_COLS];
  uint64_t state = 4;
  for (size_t count = 0; count < 40; ++count) {
    for (size_t i = 0; i < MAX_COLS; ++i) {
      input[i] = pick(&state);
      before[i] = output[i] = pick(&state);
    }
    ops->add(input, count, output);
    for (size_t i = 0; i < MAX_COLS; ++i) {
      CHECK(output[i] == (i < count ? before[i] + input[i] : before[i]));
    }
    memcpy(output, before, sizeof output);
    ops->add_scaled(input, -2.5f, count, output);
    for (size_t i = 0; i < MAX_COLS; ++i) {
      CHECK_NEAR(output[i], i < count ? (double)before[i] - 2.5 * (double)input[i] : (double)before[i], 2e-6);
    }
  }
}

/* Each token is scaled by its own root mean square and the weights, in place or not. */
static void norm_is_rms(void) {
  float input[3 * MAX_COLS];
  float output[3 * MAX_COLS];
  float weight[MAX_COLS];
  uint64_t state = 1;
  for (uint32_t cols = 1; cols <= MAX_COLS; ++cols) {
    for (uint32_t i = 0; i < 3 * cols; ++i) {
      input[i] = pick(&state);
    }
    for (uint32_t c = 0; c < cols; ++c) {
      weight[c] = 0.5f + (float)c * 0.1f;
    }
    ops->rms_norm(input, weight, 1e-5f, 3, cols, output);
    for (uint32_t i = 0; i < 3; ++i) {
      double sum = 0;
      for (uint32_t c = 0; c < cols; ++c) {
        sum += (double)input[i * cols + c] * (double)input[i * cols + c];
      }
      for (uint32_t c = 0; c < cols; ++c) {
        const double wanted = (double)input[i * cols + c] / sqrt(sum / cols + (double)1e-5f) * (double)weight[c];
        CHECK_NEAR(output[i * cols + c], wanted, 1e-6 + fabs(wanted) * 1e-6);
      }
    }
    ops->rms_norm(input, weight, 1e-5f, 3, cols, input);
    CHECK(memcmp(input, output, (size_t)3 * cols * sizeof(float)) == 0);
  }
}

/* A token of zeros stays zero: epsilon keeps the division finite. */
static void zeros_stay_zero(void) {
  const float input[4] = {0};
  const float weight[4] = {1, 2, 3, 4};
  float output[4] = {9, 9, 9, 9};
  ops->rms_norm(input, weight, 1e-6f, 1, 4, output);
  for (uint32_t c = 0; c < 4; ++c) {
    CHECK(output[c] == 0.0f);
  }
}

/* Each pair (i, i + half) turns by position * inv_freq[i], and the scale multiplies both; odd sizes, too. */
static void pairs_turn_by_their_angle(void) {
  const uint32_t positions[] = {0, 1, 17, 4000};
  for (uint32_t half = 1; half <= 40; half += 3) {
    for (uint32_t p = 0; p < 4; ++p) {
      float inv_freq[40];
      float table[80];
      float values[3 * 80];
      for (uint32_t i = 0; i < half; ++i) {
        inv_freq[i] = 1.0f / (float)(i + 1);
      }
      for (uint32_t i = 0; i < 6 * half; ++i) {
        values[i] = (float)(i % 9) + 1.0f;
      }
      clb_rope_table(positions[p], inv_freq, half, 1.5f, table);
      ops->rope(table, half, 3, values);
      for (uint32_t i = 0; i < 3 * half; ++i) {
        const uint32_t low = i / half * 2 * half + i % half;
        const double angle = (double)((float)positions[p] * inv_freq[i % half]);
        const double a = low % 9 + 1;
        const double b = (low + half) % 9 + 1;
        CHECK_NEAR(values[low], (a * cos(angle) - b * sin(angle)) * 1.5, 2e-5);
        CHECK_NEAR(values[low + half], (b * cos(angle) + a * sin(angle)) * 1.5, 2e-5);
      }
    }
  }
}

/* Position 0 changes nothing, to the bit. */
static void position_zero_is_identity(void) {
  const float inv_freq[2] = {1.0f, 0.5f};
  float table[4];
  float values[4] = {0.1f, -2.0f, 3.3f, 4.0f};
  clb_rope_table(0, inv_freq, 2, 1.0f, table);
  ops->rope(table, 2, 1, values);
  CHECK(values[0] == 0.1f && values[1] == -2.0f && values[2] == 3.3f && values[3] == 4.0f);
}

/* A row of codes: scales, sums and codes by the words of colibri.h, the same bits in every table, zeros behind the end.
 */
static void rows_are_encoded(void) {
  _Alignas(64) unsigned char codes[512];
  _Alignas(64) unsigned char generic[512];
  float input[200];
  uint64_t state = 9;
  for (uint32_t cols = 1; cols <= 200; cols += cols < 70 ? 1 : 43) {
    const uint64_t bytes = clb_code_row_bytes(cols);
    const uint64_t blocks = clb_code_blocks(cols);
    CHECK(bytes % 64 == 0 && blocks * 40 <= bytes && bytes <= sizeof codes);
    for (uint32_t c = 0; c < cols; ++c) {
      input[c] = pick(&state) * (c % 3 == 0 ? 100.0f : 1.0f);
    }
    memset(codes, 0x55, sizeof codes);
    memset(generic, 0x55, sizeof generic);
    ops->encode(input, cols, codes);
    clb_ops_table(0)->encode(input, cols, generic);
    CHECK(memcmp(codes, generic, sizeof codes) == 0);
    const float* const scales = (const float*)(const void*)(codes + blocks * CLB_CODE_BLOCK);
    const int32_t* const sums = (const int32_t*)(const void*)(scales + blocks);
    for (uint32_t b = 0; b < blocks; ++b) {
      float most = 0;
      int32_t sum = 0;
      for (uint32_t c = b * 32; c < b * 32 + 32; ++c) {
        most = c < cols ? fmaxf(most, fabsf(input[c])) : most;
        sum += (int8_t)codes[c];
      }
      CHECK(scales[b] == most / 127.0f);
      CHECK_EQ(sums[b], sum);
      for (uint32_t c = b * 32; c < b * 32 + 32; ++c) {
        CHECK_EQ((int8_t)codes[c], c < cols && most > 0 ? (int)nearbyintf(input[c] * (127.0f / most)) : 0);
      }
    }
  }
}

/* Blocks of tiny numbers are zeros; one with a NaN or an infinity has a scale that is NaN. */
static void extreme_blocks_are_encoded(void) {
  _Alignas(64) unsigned char codes[3 * 64];
  float input[96];
  for (uint32_t c = 0; c < 96; ++c) {
    input[c] = c < 32 ? 1e-38f : c < 64 ? -3e38f : 1.0f;
  }
  input[70] = -INFINITY;
  ops->encode(input, 96, codes);
  const float* const scales = (const float*)(const void*)(codes + 96);
  CHECK(scales[0] == 0.0f && codes[5] == 0);
  CHECK(scales[1] == 3e38f / 127.0f && (int8_t)codes[40] == -127);
  CHECK(isnan(scales[2]) && codes[80] == 0);
  input[70] = NAN;
  ops->encode(input, 96, codes);
  CHECK(isnan(scales[2]));
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(the_best_table_is_chosen),  TEST(dot_is_a_sum_of_products),
                                   TEST(elements_are_added),        TEST(norm_is_rms),
                                   TEST(zeros_stay_zero),           TEST(pairs_turn_by_their_angle),
                                   TEST(position_zero_is_identity), TEST(rows_are_encoded),
                                   TEST(extreme_blocks_are_encoded)};
  int result = 0;
  for (uint32_t i = 0; clb_ops_table(i) != NULL; ++i) {
    ops = clb_ops_table(i);
    if (ops->supported() == 1) {
      result |= clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
    }
  }
  return result;
}
