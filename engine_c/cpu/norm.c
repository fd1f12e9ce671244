/* norm.c: see norm.h. */
#include "norm.h"

#include <math.h>
#include <stddef.h>

#include "lanes.h"

void clb_rms_norm(const float* input, const float* weight, float epsilon, uint32_t tokens, uint32_t cols,
                  float* output) {
  for (size_t i = 0; i < tokens; ++i) {
    const float* const x = input + i * cols;
    float* const y = output + i * cols;
    const float scale = 1.0f / sqrtf(clb_lanes_dot(x, x, cols) / (float)cols + epsilon);
    for (size_t c = 0; c < cols; ++c) {
      y[c] = x[c] * scale * weight[c];
    }
  }
}
