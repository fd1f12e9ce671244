/* vector.c: see vector.h. */
#include "vector.h"

#include "number.h"

void clb_vector_add(const float* input, size_t count, float* output) {
  for (size_t i = 0; i < count; i++) {
    output[i] += input[i];
  }
}

void clb_vector_add_scaled(const float* input, float factor, size_t count, float* output) {
  for (size_t i = 0; i < count; i++) {
    output[i] += factor * input[i];
  }
}

int clb_vector_finite(const float* values, size_t count) {
  uint32_t bad = 0;
  for (size_t i = 0; i < count; i++) {
    bad |= (clb_bits_of_float(values[i]) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  }
  return bad == 0;
}
