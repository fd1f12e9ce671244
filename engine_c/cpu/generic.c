/*
 * generic.c: the portable kernel module. One source, compiled once per weight precision with
 * -DCLB_MODULE_PRECISION=0 (fp32), 1 (fp16) or 2 (bf16); exports clb_module_entry and nothing else.
 *
 * Order of additions (what row independence stands on)
 *   linear, gate, up   the eight partial sums of lanes.h over the columns (+ bias).
 *   down               one sum per output column, over the rows of the transposed matrix in rising order.
 * Neither depends on the number of tokens, on their places, or on the row range of the call.
 *
 * Blocking (speed only, never the order)
 *   linear             4 weight rows x up to 32 tokens, columns in blocks of 512:
 *                          rows r .. r+3  |  512 columns |  512 columns | ...
 *                      A block is widened once into 8 KiB of stack and used for all tokens, two tokens and
 *                      two rows at a time; a single token reads the weights as they are.
 *   down               8 rows x 256 columns are widened and added to the output of every token.
 *
 * Thread-safe and re-entrant: no state, no allocation; 16 KiB of stack.
 */
#include <stddef.h>

#include "colibri.h"
#include "lanes.h"
#include "number.h"

enum {
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

static inline clb_lanes load_weights(const weight_t* weights) {
#if CLB_MODULE_PRECISION == 0
  return clb_lanes_load(weights);
#elif CLB_MODULE_PRECISION == 1
  return clb_lanes_load_half(weights);
#else
  return clb_lanes_load_bf16(weights);
#endif
}

/* `count` weights as fp32: in place for fp32, else through `buffer`. */
static inline const float* widen(const weight_t* weights, size_t count, float* buffer) {
#if CLB_MODULE_PRECISION == 0
  (void)count;
  (void)buffer;
  return weights;
#else
  size_t c = 0;
  for (; c + CLB_LANES <= count; c += CLB_LANES) {
    clb_lanes_store(load_weights(weights + c), buffer + c);
  }
  for (; c < count; ++c) {
    buffer[c] = widen_one(weights[c]);
  }
  return buffer;
#endif
}

/* sums of 2 rows x 2 tokens over `count` columns: sums[token][row] += row . x[token]. */
static inline void add_products(const float* w0, const float* w1, const float* x0, const float* x1, size_t count,
                                clb_lanes* sums0, clb_lanes* sums1) {
  clb_lanes s00 = sums0[0];
  clb_lanes s01 = sums0[1];
  clb_lanes s10 = sums1[0];
  clb_lanes s11 = sums1[1];
  size_t c = 0;
  for (; c + CLB_LANES <= count; c += CLB_LANES) {
    const clb_lanes a = clb_lanes_load(w0 + c);
    const clb_lanes b = clb_lanes_load(w1 + c);
    const clb_lanes x = clb_lanes_load(x0 + c);
    const clb_lanes y = clb_lanes_load(x1 + c);
    s00 = clb_lanes_add_product(s00, a, x);
    s01 = clb_lanes_add_product(s01, b, x);
    s10 = clb_lanes_add_product(s10, a, y);
    s11 = clb_lanes_add_product(s11, b, y);
  }
  if (c < count) {
    s00 = clb_lanes_add_tail(s00, w0 + c, x0 + c, count - c);
    s01 = clb_lanes_add_tail(s01, w1 + c, x0 + c, count - c);
    s10 = clb_lanes_add_tail(s10, w0 + c, x1 + c, count - c);
    s11 = clb_lanes_add_tail(s11, w1 + c, x1 + c, count - c);
  }
  sums0[0] = s00;
  sums0[1] = s01;
  sums1[0] = s10;
  sums1[1] = s11;
}

/* results[row] of 4 weight rows against one token, straight from the weights. */
static void dot_tile_one(const weight_t* const rows[TILE_ROWS], const float* x, size_t cols, float results[TILE_ROWS]) {
  clb_lanes s[TILE_ROWS] = {clb_lanes_zero(), clb_lanes_zero(), clb_lanes_zero(), clb_lanes_zero()};
  size_t c = 0;
  for (; c + CLB_LANES <= cols; c += CLB_LANES) {
    const clb_lanes value = clb_lanes_load(x + c);
    s[0] = clb_lanes_add_product(s[0], load_weights(rows[0] + c), value);
    s[1] = clb_lanes_add_product(s[1], load_weights(rows[1] + c), value);
    s[2] = clb_lanes_add_product(s[2], load_weights(rows[2] + c), value);
    s[3] = clb_lanes_add_product(s[3], load_weights(rows[3] + c), value);
  }
  for (size_t r = 0; r < TILE_ROWS; ++r) {
    if (c < cols) {
      float buffer[CLB_LANES];
      s[r] = clb_lanes_add_tail(s[r], widen(rows[r] + c, cols - c, buffer), x + c, cols - c);
    }
    results[r] = clb_lanes_sum(s[r]);
  }
}

/* results[token][row] of 4 weight rows against up to 32 tokens. An odd last token is computed twice. */
static void dot_tile(const weight_t* const rows[TILE_ROWS], const float* const* inputs, size_t tokens, size_t cols,
                     float results[TILE_TOKENS][TILE_ROWS]) {
  clb_lanes sums[TILE_TOKENS][TILE_ROWS];
  float buffer[TILE_ROWS][BLOCK_COLS];
  if (tokens == 1) {
    dot_tile_one(rows, inputs[0], cols, results[0]);
    return;
  }
  memset(sums, 0, sizeof sums[0] * tokens);
  for (size_t c = 0; c < cols; c += BLOCK_COLS) {
    const size_t count = cols - c < BLOCK_COLS ? cols - c : BLOCK_COLS;
    const float* wide[TILE_ROWS];
    for (size_t r = 0; r < TILE_ROWS; ++r) {
      wide[r] = widen(rows[r] + c, count, buffer[r]);
    }
    for (size_t i = 0; i < tokens; i += 2) {
      clb_lanes repeated[TILE_ROWS];
      const size_t next = i + 1 < tokens ? i + 1 : i;
      clb_lanes* const other = next == i ? repeated : sums[next];
      if (next == i) {
        memcpy(repeated, sums[i], sizeof repeated);
      }
      add_products(wide[0], wide[1], inputs[i] + c, inputs[next] + c, count, &sums[i][0], &other[0]);
      add_products(wide[2], wide[3], inputs[i] + c, inputs[next] + c, count, &sums[i][2], &other[2]);
    }
  }
  for (size_t i = 0; i < tokens; ++i) {
    for (size_t r = 0; r < TILE_ROWS; ++r) {
      results[i][r] = clb_lanes_sum(sums[i][r]);
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
    for (size_t i = 0; i < tokens; ++i) {
      inputs[i] = args->input + (first + i) * args->input_stride;
    }
    for (size_t row = args->row_begin; row < args->row_end; row += TILE_ROWS) {
      const size_t count = args->row_end - row < TILE_ROWS ? args->row_end - row : TILE_ROWS;
      const weight_t* rows[TILE_ROWS];
      for (size_t r = 0; r < TILE_ROWS; ++r) { /* a short tile repeats its last row and drops the results */
        rows[r] = weights + (row + (r < count ? r : count - 1)) * cols;
      }
      dot_tile(rows, inputs, tokens, cols, results);
      for (size_t i = 0; i < tokens; ++i) {
        float* const output = args->output + (first + i) * args->output_stride + row;
        for (size_t r = 0; r < count; ++r) {
          output[r] = args->bias == NULL ? results[i][r] : results[i][r] + args->bias[row + r];
        }
      }
    }
  }
}

/* output[l] = silu(gate[l]) * up[l] of eight values. silu of less than -87 is 0 but for rounding. */
static inline void silu_times(const float gate[CLB_LANES], const float up[CLB_LANES], float output[CLB_LANES]) {
  for (size_t l = 0; l < CLB_LANES; l += 4) {
    clb_float4 g;
    clb_float4 u;
    memcpy(&g, gate + l, sizeof g);
    memcpy(&u, up + l, sizeof u);
    /* exp(-|g|) never overflows; sigmoid(g) = (g < 0 ? exp(-|g|) : 1) / (1 + exp(-|g|)) */
    const clb_uint4 negative = (clb_uint4)(g < 0.0f);
    const clb_float4 magnitude = (clb_float4)((clb_uint4)g & 0x7fffffffu);
    const clb_float4 e = clb_float4_exp(-magnitude);
    const clb_float4 one = {1.0f, 1.0f, 1.0f, 1.0f};
    const clb_float4 top = (clb_float4)(((clb_uint4)e & negative) | ((clb_uint4)one & ~negative));
    const clb_float4 value = g * (top / (one + e)) * u;
    memcpy(output + l, &value, sizeof value);
  }
}

/* activation[i][w] = silu(gate[w] . x_i) * (up[w] . x_i), eight rows w at a time. */
static void gate_up_rows(const clb_expert_args* args, const float* const* inputs, size_t first, size_t tokens,
                         size_t w) {
  const weight_t* const gate = args->gate;
  const weight_t* const up = args->up;
  const size_t hidden = args->hidden;
  const size_t count = args->width - w < CLB_LANES ? args->width - w : CLB_LANES;
  float gates[TILE_TOKENS][CLB_LANES];
  float ups[TILE_TOKENS][CLB_LANES];
  for (size_t r = 0; r < CLB_LANES; r += 2) {
    float results[TILE_TOKENS][TILE_ROWS];
    const size_t a = w + (r < count ? r : count - 1); /* rows past the end repeat the last one */
    const size_t b = w + (r + 1 < count ? r + 1 : count - 1);
    const weight_t* const rows[TILE_ROWS] = {gate + a * hidden, gate + b * hidden, up + a * hidden, up + b * hidden};
    dot_tile(rows, inputs, tokens, hidden, results);
    for (size_t i = 0; i < tokens; ++i) {
      gates[i][r] = results[i][0];
      gates[i][r + 1] = results[i][1];
      ups[i][r] = results[i][2];
      ups[i][r + 1] = results[i][3];
    }
  }
  for (size_t i = 0; i < tokens; ++i) {
    float values[CLB_LANES];
    silu_times(gates[i], ups[i], values);
    memcpy(args->activation + (first + i) * args->width + w, values, count * sizeof(float));
  }
}

static void gate_up(const clb_expert_args* args) {
  for (size_t first = 0; first < args->count; first += TILE_TOKENS) {
    const size_t tokens = args->count - first < TILE_TOKENS ? args->count - first : TILE_TOKENS;
    const float* inputs[TILE_TOKENS];
    for (size_t i = 0; i < tokens; ++i) {
      inputs[i] = args->input + args->tokens[first + i] * args->input_stride;
    }
    for (size_t w = 0; w < args->width; w += CLB_LANES) {
      gate_up_rows(args, inputs, first, tokens, w);
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
  for (size_t c = 0; c < count; ++c) {
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
  for (size_t r = 0; r < row_count; ++r) {
    rows[r] = widen(down + (row + r) * hidden + begin, count, buffer[r]);
  }
  for (size_t i = 0; i < args->count; ++i) {
    const float* const factors = args->activation + i * width + row;
    float* const output = args->output + args->places[i] * args->output_stride + begin;
    if (row_count == DOWN_ROWS) {
      add_rows(rows, factors, count, output);
      continue;
    }
    for (size_t r = 0; r < row_count; ++r) {
      for (size_t c = 0; c < count; ++c) {
        output[c] += factors[r] * rows[r][c];
      }
    }
  }
}

static void expert(const clb_expert_args* args) {
  const size_t hidden = args->hidden;
  gate_up(args);
  for (size_t i = 0; i < args->count; ++i) {
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
  for (size_t c = 0; c < cols; ++c) {
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
