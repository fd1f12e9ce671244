/*
 * generic.c: the portable kernel module. One source, compiled once per weight precision with
 * -DCLB_MODULE_PRECISION=0 (fp32), 1 (fp16) or 2 (bf16); exports clb_module_entry and nothing else.
 *
 * Order of additions (what row independence stands on)
 * -----------------------------------------------------
 *   linear, gate, up   8 partial sums: lane l adds columns l, l + 8, l + 16, ... in rising order;
 *                      result = ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7)) (+ bias).
 *   down               one sum per output column, over the rows of the transposed matrix in rising order.
 * Neither depends on the number of tokens, on their places, or on the row range of the call.
 *
 * Blocking (speed only, never the order)
 *   linear             4 weight rows x up to 32 tokens; columns in blocks of 512, widened once per block
 *                      into 8 KiB of stack and used for all tokens:
 *                          rows r..r+3  |  512 columns |  512 columns | ...
 *                                          x every token of the tile, sums kept in sums[4][32][8]
 *   down               8 rows x 256 columns are widened and added to the output of every token.
 *
 * Thread-safe and re-entrant: no state, no allocation; 13 KiB of stack.
 */
#include <math.h>
#include <stddef.h>

#include "colibri.h"
#include "number.h"

enum {
  LANES = 8,
  TILE_ROWS = 4,
  TILE_TOKENS = 32,
  BLOCK_COLS = 512,
  DOWN_ROWS = 8,
  DOWN_COLS = 256,
  FEW_TOKENS = 4 /* up to here the output of all tokens stays in the first-level cache */
};

#if CLB_MODULE_PRECISION == 0
#define MODULE_NAME "generic-fp32"
#define MODULE_PRECISION CLB_FP32
typedef float weight_t;
#elif CLB_MODULE_PRECISION == 1
#define MODULE_NAME "generic-fp16"
#define MODULE_PRECISION CLB_FP16
typedef uint16_t weight_t;
#else
#define MODULE_NAME "generic-bf16"
#define MODULE_PRECISION CLB_BF16
typedef uint16_t weight_t;
#endif

#if CLB_MODULE_PRECISION == 0
static inline float widen_one(weight_t value) { return value; }
#elif CLB_MODULE_PRECISION == 1
static inline float widen_one(weight_t value) { return clb_float_of_half(value); }
#else
static inline float widen_one(weight_t value) { return clb_float_of_bf16(value); }
#endif

/* `count` weights as fp32: in place for fp32, else through `buffer`. */
static inline const float* widen(const weight_t* weights, size_t count, float* restrict buffer) {
#if CLB_MODULE_PRECISION == 0
  (void)count;
  (void)buffer;
  return weights;
#else
  for (size_t c = 0; c < count; c++) {
    buffer[c] = widen_one(weights[c]);
  }
  return buffer;
#endif
}

/* sums[row][lane] += row . x over `count` columns, for 4 rows. */
static inline void add_products(const float* const rows[TILE_ROWS], const float* restrict x, size_t count,
                                float sums[TILE_ROWS][LANES]) {
  const float* restrict w0 = rows[0];
  const float* restrict w1 = rows[1];
  const float* restrict w2 = rows[2];
  const float* restrict w3 = rows[3];
  float s0[LANES];
  float s1[LANES];
  float s2[LANES];
  float s3[LANES];
  memcpy(s0, sums[0], sizeof s0);
  memcpy(s1, sums[1], sizeof s1);
  memcpy(s2, sums[2], sizeof s2);
  memcpy(s3, sums[3], sizeof s3);
  size_t c = 0;
  for (; c + LANES <= count; c += LANES) {
    for (size_t l = 0; l < LANES; l++) {
      const float value = x[c + l];
      s0[l] += w0[c + l] * value;
      s1[l] += w1[c + l] * value;
      s2[l] += w2[c + l] * value;
      s3[l] += w3[c + l] * value;
    }
  }
  memcpy(sums[0], s0, sizeof s0);
  memcpy(sums[1], s1, sizeof s1);
  memcpy(sums[2], s2, sizeof s2);
  memcpy(sums[3], s3, sizeof s3);
  for (size_t l = 0; c + l < count; l++) { /* the last columns, where cols is no multiple of 8 */
    for (size_t r = 0; r < TILE_ROWS; r++) {
      sums[r][l] += rows[r][c + l] * x[c + l];
    }
  }
}

static inline float reduce(const float s[LANES]) {
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

/* results[token][row] of 4 weight rows against up to 32 tokens. */
static void dot_tile(const weight_t* const rows[TILE_ROWS], const float* const* inputs, size_t tokens, size_t cols,
                     float results[TILE_TOKENS][TILE_ROWS]) {
  float sums[TILE_TOKENS][TILE_ROWS][LANES];
  float buffer[TILE_ROWS][BLOCK_COLS];
  memset(sums, 0, tokens * sizeof sums[0]);
  for (size_t c = 0; c < cols; c += BLOCK_COLS) {
    const size_t count = cols - c < BLOCK_COLS ? cols - c : BLOCK_COLS;
    const float* wide[TILE_ROWS];
    for (size_t r = 0; r < TILE_ROWS; r++) {
      wide[r] = widen(rows[r] + c, count, buffer[r]);
    }
    for (size_t i = 0; i < tokens; i++) {
      add_products(wide, inputs[i] + c, count, sums[i]);
    }
  }
  for (size_t i = 0; i < tokens; i++) {
    for (size_t r = 0; r < TILE_ROWS; r++) {
      results[i][r] = reduce(sums[i][r]);
    }
  }
}

static void linear(const clb_linear_args* args) {
  const weight_t* const weights = args->weights;
  const size_t cols = args->cols;
  for (size_t first = 0; first < args->tokens; first += TILE_TOKENS) {
    const size_t tokens = args->tokens - first < TILE_TOKENS ? args->tokens - first : TILE_TOKENS;
    const float* inputs[TILE_TOKENS];
    float results[TILE_TOKENS][TILE_ROWS];
    for (size_t i = 0; i < tokens; i++) {
      inputs[i] = args->input + (first + i) * args->input_stride;
    }
    for (size_t row = args->row_begin; row < args->row_end; row += TILE_ROWS) {
      const size_t count = args->row_end - row < TILE_ROWS ? args->row_end - row : TILE_ROWS;
      const weight_t* rows[TILE_ROWS];
      for (size_t r = 0; r < TILE_ROWS; r++) { /* a short tile repeats its last row and drops the results */
        rows[r] = weights + (row + (r < count ? r : count - 1)) * cols;
      }
      dot_tile(rows, inputs, tokens, cols, results);
      for (size_t i = 0; i < tokens; i++) {
        float* const output = args->output + (first + i) * args->output_stride + row;
        for (size_t r = 0; r < count; r++) {
          output[r] = args->bias == NULL ? results[i][r] : results[i][r] + args->bias[row + r];
        }
      }
    }
  }
}

/* activation[i][w] = silu(gate[w] . x_i) * (up[w] . x_i); a tile holds two rows of gate and the same of up. */
static void gate_up(const clb_expert_args* args) {
  const weight_t* const gate = args->gate;
  const weight_t* const up = args->up;
  const size_t hidden = args->hidden;
  for (size_t first = 0; first < args->count; first += TILE_TOKENS) {
    const size_t tokens = args->count - first < TILE_TOKENS ? args->count - first : TILE_TOKENS;
    const float* inputs[TILE_TOKENS];
    float results[TILE_TOKENS][TILE_ROWS];
    for (size_t i = 0; i < tokens; i++) {
      inputs[i] = args->input + args->tokens[first + i] * args->input_stride;
    }
    for (size_t w = 0; w < args->width; w += 2) {
      const size_t next = w + 1 < args->width ? w + 1 : w;
      const weight_t* const rows[TILE_ROWS] = {gate + w * hidden, gate + next * hidden, up + w * hidden,
                                               up + next * hidden};
      dot_tile(rows, inputs, tokens, hidden, results);
      for (size_t i = 0; i < tokens; i++) {
        float* const activation = args->activation + (first + i) * args->width;
        activation[w] = results[i][0] / (1.0f + expf(-results[i][0])) * results[i][2];
        activation[next] = results[i][1] / (1.0f + expf(-results[i][1])) * results[i][3];
      }
    }
  }
}

/* output[c] += sum over 8 rows of factor[row] * row[c], rows in rising order. */
static inline void add_rows(const float* const rows[DOWN_ROWS], const float factors[DOWN_ROWS], size_t count,
                            float* restrict output) {
  const float* restrict w0 = rows[0];
  const float* restrict w1 = rows[1];
  const float* restrict w2 = rows[2];
  const float* restrict w3 = rows[3];
  const float* restrict w4 = rows[4];
  const float* restrict w5 = rows[5];
  const float* restrict w6 = rows[6];
  const float* restrict w7 = rows[7];
  for (size_t c = 0; c < count; c++) {
    float sum = output[c];
    sum += factors[0] * w0[c];
    sum += factors[1] * w1[c];
    sum += factors[2] * w2[c];
    sum += factors[3] * w3[c];
    sum += factors[4] * w4[c];
    sum += factors[5] * w5[c];
    sum += factors[6] * w6[c];
    sum += factors[7] * w7[c];
    output[c] = sum;
  }
}

/* Adds up to 8 rows of `down`, columns [begin, begin + count), to the outputs of all tokens. */
static void down_block(const clb_expert_args* args, size_t row, size_t begin, size_t count) {
  const weight_t* const down = args->down;
  const size_t hidden = args->hidden;
  const size_t width = args->width;
  const size_t row_count = width - row < DOWN_ROWS ? width - row : DOWN_ROWS;
  float buffer[DOWN_ROWS][DOWN_COLS];
  const float* rows[DOWN_ROWS];
  for (size_t r = 0; r < row_count; r++) {
    rows[r] = widen(down + (row + r) * hidden + begin, count, buffer[r]);
  }
  for (size_t i = 0; i < args->count; i++) {
    const float* const factors = args->activation + i * width + row;
    float* const output = args->output + args->places[i] * args->output_stride + begin;
    if (row_count == DOWN_ROWS) {
      add_rows(rows, factors, count, output);
      continue;
    }
    for (size_t r = 0; r < row_count; r++) {
      for (size_t c = 0; c < count; c++) {
        output[c] += factors[r] * rows[r][c];
      }
    }
  }
}

static void expert(const clb_expert_args* args) {
  const size_t hidden = args->hidden;
  gate_up(args);
  for (size_t i = 0; i < args->count; i++) {
    memset(args->output + args->places[i] * args->output_stride, 0, hidden * sizeof(float));
  }
  /* Few tokens: stream whole rows, their outputs stay near. Many: stay in 256 columns for all rows. */
  const size_t span = args->count <= FEW_TOKENS ? hidden : DOWN_COLS;
  for (size_t outer = 0; outer < hidden; outer += span) {
    const size_t end = hidden - outer < span ? hidden : outer + span;
    for (size_t row = 0; row < args->width; row += DOWN_ROWS) {
      for (size_t c = outer; c < end; c += DOWN_COLS) {
        down_block(args, row, c, end - c < DOWN_COLS ? end - c : DOWN_COLS);
      }
    }
  }
}

static void widen_row(const void* weights, uint32_t row, uint32_t cols, float* output) {
  const weight_t* const values = (const weight_t*)weights + (size_t)row * cols;
  for (size_t c = 0; c < cols; c++) {
    output[c] = widen_one(values[c]);
  }
}

static int32_t always(void) { return 1; }

static const clb_module module_table = {
    .abi_version = CLB_ABI_VERSION,
    .struct_bytes = sizeof(clb_module),
    .name = MODULE_NAME,
    .precision = MODULE_PRECISION,
    .layout = CLB_LAYOUT_FLAT,
    .rank = 0,
    .reserved = 0,
    .supported = always,
    .linear = linear,
    .expert = expert,
    .row = widen_row,
};

CLB_API const clb_module* clb_module_entry(void);
CLB_API const clb_module* clb_module_entry(void) { return &module_table; }
