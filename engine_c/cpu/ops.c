/*
 * ops.c: the operations of ops.h for one instruction set. One source, compiled once for each (which lanes16.h looks
 * up) with -DCLB_OPS_TABLE= the name of the table.
 */
#include "ops.h"

#include <math.h>
#include <string.h>

#include "attention_kernel.h"
#include "lanes16.h"

extern const clb_ops CLB_OPS_TABLE;

static float dot(const float* a, const float* b, size_t count) {
  enum { STEP = 64 };
  clb_lanes16 s[4] = {clb_lanes16_spread(0.0f), clb_lanes16_spread(0.0f), clb_lanes16_spread(0.0f),
                      clb_lanes16_spread(0.0f)};
  size_t i = 0;
  for (; i + STEP <= count; i += STEP) {
    for (size_t j = 0; j < 4u; ++j) {
      s[j] = clb_lanes16_add_product(s[j], clb_lanes16_load(a + i + 16u * j), clb_lanes16_load(b + i + 16u * j));
    }
  }
  if (i < count) { /* filled up with zeros, which change no sum */
    float rest[2][STEP] = {{0}, {0}};
    (void)memcpy(rest[0], a + i, (count - i) * sizeof(float));
    (void)memcpy(rest[1], b + i, (count - i) * sizeof(float));
    for (size_t j = 0; j < 4u; ++j) {
      s[j] = clb_lanes16_add_product(s[j], clb_lanes16_load(rest[0] + 16u * j), clb_lanes16_load(rest[1] + 16u * j));
    }
  }
  return clb_lanes16_sum(clb_lanes16_add(clb_lanes16_add(s[0], s[1]), clb_lanes16_add(s[2], s[3])));
}

static void add(const float* input, size_t count, float* output) {
  for (size_t i = 0; i < count; ++i) {
    output[i] += input[i];
  }
}

static void add_scaled(const float* input, float factor, size_t count, float* output) {
  const clb_lanes16 f = clb_lanes16_spread(factor);
  size_t i = 0;
  for (; i + CLB_LANES16 <= count; i += CLB_LANES16) {
    clb_lanes16_store(clb_lanes16_add_product(clb_lanes16_load(output + i), clb_lanes16_load(input + i), f),
                      output + i);
  }
  if (i < count) {
    const clb_lanes16 sum = clb_lanes16_add_product(clb_lanes16_load_some(output + i, count - i),
                                                    clb_lanes16_load_some(input + i, count - i), f);
    clb_lanes16_store_some(sum, count - i, output + i);
  }
}

static void rms_norm(const float* input, const float* weight, float epsilon, uint32_t tokens, uint32_t cols,
                     float* output) {
  for (size_t t = 0; t < tokens; ++t) {
    const float* const x = input + t * cols;
    float* const y = output + t * cols;
    const float scale = 1.0f / sqrtf(dot(x, x, cols) / (float)cols + epsilon);
    for (size_t c = 0; c < cols; ++c) {
      y[c] = x[c] * scale * weight[c];
    }
  }
}

static void rope(const float* table, uint32_t half, uint32_t heads, float* values) {
  const float* const cosines = table;
  const float* const sines = table + half;
  for (size_t h = 0; h < heads; ++h) {
    float* restrict const low = values + h * 2u * half;
    float* restrict const high = low + half;
    for (size_t i = 0; i < half; ++i) {
      const float a = low[i];
      const float b = high[i];
      low[i] = a * cosines[i] - b * sines[i];
      high[i] = b * cosines[i] + a * sines[i];
    }
  }
}

const clb_ops CLB_OPS_TABLE = {
    .name = CLB_ISA,
    .rank = CLB_ISA_RANK,
    .reserved = 0,
    .supported = clb_isa_supported,
    .dot = dot,
    .add = add,
    .add_scaled = add_scaled,
    .rms_norm = rms_norm,
    .rope = rope,
    .kv_append = clb_kernel_kv_append,
    .attention = clb_kernel_attention,
};
