/*
 * ops.c: the operations of ops.h for one instruction set. One source, compiled once for each (which lanes16.h looks
 * up) with -DCLB_OPS_TABLE= the name of the table.
 */
#include "ops.h"

#include <math.h>
#include <string.h>

#include "attention_kernel.h"
#include "lanes16.h"
#include "number.h"

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

/* One block: its scale and the sum of its codes. */
static float encode_block(const float* x, int8_t* codes, int32_t* sum) {
  const uint32_t infinite = 0x7f800000u;
  const clb_lanes16 low = clb_lanes16_load(x);
  const clb_lanes16 high = clb_lanes16_load(x + CLB_LANES16);
  const uint32_t largest = clb_lanes16_largest_bits(low, high);
  const float most = clb_float_of_bits(largest);
  if (largest >= infinite || most < 0x1p-100f) {
    (void)memset(codes, 0, CLB_CODE_BLOCK);
    *sum = 0;
    return largest >= infinite ? clb_float_of_bits(0x7fc00000u) : 0.0f;
  }
  const clb_lanes16 inverse = clb_lanes16_spread(127.0f / most);
  *sum = clb_lanes16_store_codes(clb_lanes16_multiply(low, inverse), codes) +
         clb_lanes16_store_codes(clb_lanes16_multiply(high, inverse), codes + CLB_LANES16);
  return most / 127.0f;
}

static void encode(const float* input, uint32_t cols, unsigned char* codes) {
  const size_t blocks = (size_t)clb_code_blocks(cols);
  int8_t* const values = (int8_t*)codes;
  float* const scales = (float*)(void*)(codes + blocks * CLB_CODE_BLOCK);
  int32_t* const sums = (int32_t*)(void*)(scales + blocks);
  for (size_t b = 0; b < cols / CLB_CODE_BLOCK; ++b) {
    scales[b] = encode_block(input + b * CLB_CODE_BLOCK, values + b * CLB_CODE_BLOCK, &sums[b]);
  }
  if (cols % CLB_CODE_BLOCK != 0u) {
    const size_t last = blocks - 1u;
    float rest[CLB_CODE_BLOCK] = {0};
    (void)memcpy(rest, input + last * CLB_CODE_BLOCK, cols % CLB_CODE_BLOCK * sizeof(float));
    scales[last] = encode_block(rest, values + last * CLB_CODE_BLOCK, &sums[last]);
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
    .encode = encode,
    .kv_append = clb_kernel_kv_append,
    .attention = clb_kernel_attention,
};
