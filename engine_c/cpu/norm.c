/* norm.c: see norm.h. */
#include "norm.h"

#include <math.h>
#include <stddef.h>

enum { LANES = 8 };

static float sum_of_squares(const float* values, size_t count) {
  float s[LANES] = {0};
  size_t c = 0;
  for (; c + LANES <= count; c += LANES) {
    for (size_t l = 0; l < LANES; l++) {
      s[l] += values[c + l] * values[c + l];
    }
  }
  for (size_t l = 0; c + l < count; l++) {
    s[l] += values[c + l] * values[c + l];
  }
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

void clb_rms_norm(const float* input, const float* weight, float epsilon, uint32_t tokens, uint32_t cols,
                  float* output) {
  for (size_t i = 0; i < tokens; i++) {
    const float* const x = input + i * cols;
    float* const y = output + i * cols;
    const float scale = 1.0f / sqrtf(sum_of_squares(x, cols) / (float)cols + epsilon);
    for (size_t c = 0; c < cols; c++) {
      y[c] = x[c] * scale * weight[c];
    }
  }
}
