/* vector.c: see vector.h. */
#include "vector.h"

void clb_vector_add(const float* input, size_t count, float* output) {
  for (size_t i = 0; i < count; ++i) {
    output[i] += input[i];
  }
}

void clb_vector_add_scaled(const float* input, float factor, size_t count, float* output) {
  for (size_t i = 0; i < count; ++i) {
    output[i] += factor * input[i];
  }
}
