/* test_norm.c: RMSNorm against double precision. */
#include "norm.h"

#include "test.h"

/* Each token is scaled by its own root mean square and the weights, in place or not. */
static void norm_is_rms(void) {
  float input[3 * 37];
  float output[3 * 37];
  float weight[37];
  uint64_t state = 1;
  for (uint32_t cols = 1; cols <= 37; ++cols) {
    for (uint32_t i = 0; i < 3 * cols; ++i) {
      input[i] = ((float)(clb_test_random(&state) >> 40) * 0x1p-23f - 1.0f) * 5.0f;
    }
    for (uint32_t c = 0; c < cols; ++c) {
      weight[c] = 0.5f + (float)c;
    }
    clb_rms_norm(input, weight, 1e-5f, 3, cols, output);
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
    clb_rms_norm(input, weight, 1e-5f, 3, cols, input);
    CHECK(memcmp(input, output, (size_t)3 * cols * sizeof(float)) == 0);
  }
}

/* A token of zeros stays zero: epsilon keeps the division finite. */
static void zeros_stay_zero(void) {
  const float input[4] = {0};
  const float weight[4] = {1, 2, 3, 4};
  float output[4] = {9, 9, 9, 9};
  clb_rms_norm(input, weight, 1e-6f, 1, 4, output);
  for (uint32_t c = 0; c < 4; ++c) {
    CHECK(output[c] == 0.0f);
  }
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(norm_is_rms), TEST(zeros_stay_zero)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
