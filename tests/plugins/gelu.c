/*
 * gelu.c: an example of a custom kernel module (docs/HOT_SWAP.md): experts whose activation is GELU instead of SiLU,
 * for bf16 weights on any processor. Made to be read, not to be fast.
 *
 *   cc -std=c11 -O2 -fPIC -shared -fvisibility=hidden -Iengine_c/include -o gelu.so tests/plugins/gelu.c -lm
 *   sha256sum gelu.so
 *
 *   modules:
 *     folders: [/opt/colibrid/modules]
 *     load: {gelu: {file: /opt/colibrid/modules/gelu.so, sha256: "..."}}
 *
 * A module keeps no state and allocates nothing. Its functions are called by several threads at once, for ranges of
 * rows that begin at multiples of CLB_TILE_ROWS; the bits of an output must not depend on the range, nor on other
 * tokens.
 */
#include <math.h>
#include <string.h>

#include "colibri.h"

#define BLOCK 256u /* columns whose products are added up before the sum is added to the total */

static float widen(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  (void)memcpy(&value, &wide, sizeof value);
  return value;
}

/* rows16: sixteen rows of one column lie side by side. */
static float weight_at(const clb_operand* matrix, uint32_t row, uint32_t col, uint32_t cols) {
  const uint16_t* const values = (const uint16_t*)matrix->values;
  return widen(values[((uint64_t)(row / CLB_TILE_ROWS) * cols + col) * CLB_TILE_ROWS + row % CLB_TILE_ROWS]);
}

static float product(const clb_operand* matrix, uint32_t row, uint32_t cols, const float* input) {
  float total = 0.0f;
  for (uint32_t begin = 0; begin < cols; begin += BLOCK) {
    const uint32_t end = cols - begin < BLOCK ? cols : begin + BLOCK;
    float sum = 0.0f;
    for (uint32_t col = begin; col < end; ++col) {
      sum += weight_at(matrix, row, col, cols) * input[col];
    }
    total += sum;
  }
  return total;
}

static float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }

static void linear(const clb_linear_args* args) {
  for (uint32_t token = 0; token < args->tokens; ++token) {
    const uint32_t from = args->inputs == NULL ? token : args->inputs[token];
    const uint32_t to = args->outputs == NULL ? token : args->outputs[token];
    for (uint32_t row = args->row_begin; row < args->row_end; ++row) {
      const float sum = product(&args->weights, row, args->cols, args->input + from * args->input_stride);
      args->output[to * args->output_stride + row] = sum + (args->bias == NULL ? 0.0f : args->bias[row]);
    }
  }
}

static void gate_up(const clb_gated_linear_args* args) {
  for (uint32_t token = 0; token < args->tokens; ++token) {
    const uint32_t from = args->inputs == NULL ? token : args->inputs[token];
    const float* const input = args->input + from * args->input_stride;
    for (uint32_t row = args->row_begin; row < args->row_end; ++row) {
      const float gate = product(&args->gate, row, args->cols, input);
      args->output[token * args->output_stride + row] = gelu(gate) * product(&args->up, row, args->cols, input);
    }
  }
}

static void widen_row(const clb_operand* weights, uint32_t row, uint32_t cols, float* output) {
  for (uint32_t col = 0; col < cols; ++col) {
    output[col] = weight_at(weights, row, col, cols);
  }
}

static int32_t supported(void) { return 1; }

static const clb_module module = {
    .abi_version = CLB_ABI_VERSION,
    .struct_bytes = sizeof(clb_module),
    .name = "gelu-bf16",
    .precision = CLB_BF16,
    .layout = CLB_LAYOUT_ROWS16,
    .supported = supported,
    .linear = linear,
    .gate_up = gate_up,
    .row = widen_row,
};

CLB_API const clb_module* clb_module_entry(void);
CLB_API const clb_module* clb_module_entry(void) { return &module; }
