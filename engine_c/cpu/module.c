/*
 * module.c: a kernel module over rows16. One source, compiled once per instruction set (which lanes16.h looks up) and
 * weight precision (-DCLB_MODULE_PRECISION=0 fp32, 1 fp16, 2 bf16); exports clb_module_entry and nothing else.
 *
 * Order of additions (what row independence stands on): colibri.h. A lane is a row, so no sum ever crosses lanes.
 *
 * Blocking (speed only, never the order)
 *   panel   up to 48 tokens                    chunk   up to 8 tiles; of gate_up: 4 of gate, the same 4 of up
 *   block   256 columns of a chunk: inputs of the panel are gathered into `x`, then
 *             few tokens    every weight is widened where it is used, several tiles at a time: as many streams
 *             many tokens   a pair of tiles is widened into 32 KiB once and used for groups of tokens whose sums fit
 *                           the registers
 *
 * Thread-safe and re-entrant: no state, no allocation; 112 KiB of stack.
 */
#include <stddef.h>
#include <string.h>

#include "colibri.h"
#include "lanes16.h"

#if CLB_MODULE_PRECISION == 0
#define MODULE_NAME CLB_ISA "-fp32"
#define MODULE_PRECISION CLB_FP32
typedef float weight_t;
static inline clb_lanes16 load_weights(const weight_t* weights) { return clb_lanes16_load(weights); }
static inline float widen_one(weight_t value) { return value; }
#elif CLB_MODULE_PRECISION == 1
#define MODULE_NAME CLB_ISA "-fp16"
#define MODULE_PRECISION CLB_FP16
typedef uint16_t weight_t;
static inline clb_lanes16 load_weights(const weight_t* weights) { return clb_lanes16_load_half(weights); }
static inline float widen_one(weight_t value) { return clb_float_of_half(value); }
#else
#define MODULE_NAME CLB_ISA "-bf16"
#define MODULE_PRECISION CLB_BF16
typedef uint16_t weight_t;
static inline clb_lanes16 load_weights(const weight_t* weights) { return clb_lanes16_load_bf16(weights); }
static inline float widen_one(weight_t value) { return clb_float_of_bf16(value); }
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

enum {
  ROWS = CLB_TILE_ROWS,
  BLOCK_COLS = 256,               /* part of the order of additions */
  INPUT_STRIDE = BLOCK_COLS + 16, /* off a power of two, so that tokens do not fight for the same cache lines */
  PANEL = 48,
  CHUNK = 8,
  PAIR = 2
};

/* Some tiles of one call, up to CHUNK, and some of its tokens, up to PANEL. */
typedef struct chunk {
  const weight_t* tiles[CHUNK]; /* first column of each */
  const float* inputs[PANEL];   /* of each token */
  size_t count;                 /* tiles */
  size_t tokens;
  size_t cols;
  clb_lanes16 sums[CHUNK][PANEL]; /* result of each tile and token */
} chunk;

/* sums[n][t] += tile n . x of token t over `cols` columns. wide: the tiles are fp32, whatever the module's weights are.
   count, tokens and wide are constants wherever this is inlined, so that s lives in registers. */
static ALWAYS_INLINE void add_block(const void* const* tiles, const int wide, const size_t count, const float* x,
                                    size_t cols, const size_t tokens, clb_lanes16 (*sums)[PANEL]) {
  clb_lanes16 s[CHUNK][CLB_GROUP];
#pragma GCC unroll 8
  for (size_t n = 0; n < count; ++n) {
#pragma GCC unroll 12
    for (size_t t = 0; t < tokens; ++t) {
      s[n][t] = clb_lanes16_spread(0.0f);
    }
  }
  for (size_t c = 0; c < cols; ++c) {
#pragma GCC unroll 8
    for (size_t n = 0; n < count; ++n) {
      const clb_lanes16 weights = wide ? clb_lanes16_load((const float*)tiles[n] + c * ROWS)
                                       : load_weights((const weight_t*)tiles[n] + c * ROWS);
#pragma GCC unroll 12
      for (size_t t = 0; t < tokens; ++t) {
        s[n][t] = clb_lanes16_add_scaled(s[n][t], weights, x[t * INPUT_STRIDE + c]);
      }
    }
  }
#pragma GCC unroll 8
  for (size_t n = 0; n < count; ++n) {
#pragma GCC unroll 12
    for (size_t t = 0; t < tokens; ++t) {
      sums[n][t] = clb_lanes16_add(sums[n][t], s[n][t]);
    }
  }
}

/* add_block for any number of tiles, as many at once as the registers hold. */
static ALWAYS_INLINE void add_tiles(const void* const* tiles, const int wide, size_t count, const float* x, size_t cols,
                                    const size_t tokens, clb_lanes16 (*sums)[PANEL]) {
  size_t n = 0;
  for (; CLB_GROUP_TILES(tokens) >= 8 && n + 8 <= count; n += 8) {
    add_block(tiles + n, wide, 8, x, cols, tokens, sums + n);
  }
  for (; CLB_GROUP_TILES(tokens) >= 4 && n + 4 <= count; n += 4) {
    add_block(tiles + n, wide, 4, x, cols, tokens, sums + n);
  }
  for (; CLB_GROUP_TILES(tokens) >= 2 && n + 2 <= count; n += 2) {
    add_block(tiles + n, wide, 2, x, cols, tokens, sums + n);
  }
  for (; n < count; ++n) {
    add_block(tiles + n, wide, 1, x, cols, tokens, sums + n);
  }
}

/* add_tiles for a group of 1 .. CLB_GROUP tokens. */
#define CASE(tokens)                                          \
  case tokens:                                                \
    if ((tokens) <= CLB_GROUP) {                              \
      add_tiles(tiles, wide, count, x, cols, (tokens), sums); \
    }                                                         \
    break
static ALWAYS_INLINE void add_group(const void* const* tiles, const int wide, size_t count, const float* x, size_t cols,
                                    size_t tokens, clb_lanes16 (*sums)[PANEL]) {
  switch (tokens) {
    CASE(1);
    CASE(2);
    CASE(3);
    CASE(4);
    CASE(5);
    CASE(6);
    CASE(7);
    CASE(8);
    CASE(9);
    CASE(10);
    CASE(11);
    CASE(12);
    default:
      break;
  }
}
#undef CASE

/* Kept apart, so that the many forms of add_block exist once for each kind of weights. */
static __attribute__((noinline)) void add_narrow(const void* const* tiles, size_t count, const float* x, size_t cols,
                                                 size_t tokens, clb_lanes16 (*sums)[PANEL]) {
  add_group(tiles, 0, count, x, cols, tokens, sums);
}

static __attribute__((noinline)) void add_wide(const void* const* tiles, size_t count, const float* x, size_t cols,
                                               size_t tokens, clb_lanes16 (*sums)[PANEL]) {
  add_group(tiles, 1, count, x, cols, tokens, sums);
}

/* Many tokens: tiles in pairs, widened once, then used for groups of tokens of nearly equal size. */
static void add_many(const void* const* tiles, size_t count, const float* x, size_t cols, size_t tokens,
                     clb_lanes16 (*sums)[PANEL]) {
  _Alignas(64) float wide[PAIR][BLOCK_COLS * ROWS];
  const size_t groups = (tokens + CLB_GROUP - 1) / CLB_GROUP;
  for (size_t n = 0; n < count; n += PAIR) {
    const size_t pair = count - n < PAIR ? count - n : PAIR;
    const void* sources[PAIR] = {tiles[n], tiles[n + pair - 1]};
    for (size_t i = 0; MODULE_PRECISION != CLB_FP32 && i < pair; ++i) {
      for (size_t c = 0; c < cols; ++c) {
        clb_lanes16_store(load_weights((const weight_t*)sources[i] + c * ROWS), wide[i] + c * ROWS);
      }
      sources[i] = wide[i];
    }
    for (size_t g = 0; g < groups; ++g) {
      const size_t first = tokens * g / groups;
      const size_t next = tokens * (g + 1) / groups;
      clb_lanes16(*const part)[PANEL] = (clb_lanes16(*)[PANEL])(void*)&sums[n][first];
      add_wide(sources, pair, x + first * INPUT_STRIDE, cols, next - first, part);
    }
  }
}

/* sums = the products of all tiles and tokens, block by block. */
static void multiply(chunk* work) {
  _Alignas(64) float gathered[PANEL * INPUT_STRIDE];
  for (size_t n = 0; n < work->count; ++n) {
    for (size_t t = 0; t < work->tokens; ++t) {
      work->sums[n][t] = clb_lanes16_spread(0.0f);
    }
  }
  for (size_t begin = 0; begin < work->cols; begin += BLOCK_COLS) {
    const size_t cols = work->cols - begin < BLOCK_COLS ? work->cols - begin : BLOCK_COLS;
    const void* tiles[CHUNK];
    for (size_t n = 0; n < work->count; ++n) {
      tiles[n] = work->tiles[n] + begin * ROWS;
    }
    if (work->tokens == 1) {
      add_narrow(tiles, work->count, work->inputs[0] + begin, cols, 1, work->sums);
      continue;
    }
    for (size_t t = 0; t < work->tokens; ++t) {
      memcpy(gathered + t * INPUT_STRIDE, work->inputs[t] + begin, cols * sizeof(float));
    }
    if (work->tokens <= CLB_GROUP) {
      add_narrow(tiles, work->count, gathered, cols, work->tokens, work->sums);
    } else {
      add_many(tiles, work->count, gathered, cols, work->tokens, work->sums);
    }
  }
}

/* The next tokens of a call, from `first`. */
static void take_tokens(chunk* work, const float* input, const uint32_t* inputs, uint64_t stride, size_t first,
                        size_t tokens) {
  work->tokens = tokens - first < PANEL ? tokens - first : PANEL;
  for (size_t t = 0; t < work->tokens; ++t) {
    work->inputs[t] = input + (inputs == NULL ? first + t : inputs[first + t]) * stride;
  }
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Writes up to 16 lanes: what is left of the row range. */
static inline void store_rows(clb_lanes16 values, size_t rows, float* output) {
  if (rows >= ROWS) {
    clb_lanes16_store(values, output);
    return;
  }
  float part[ROWS];
  clb_lanes16_store(values, part);
  memcpy(output, part, rows * sizeof(float));
}

static inline clb_lanes16 load_rows(const float* values, size_t rows) {
  if (rows >= ROWS) {
    return clb_lanes16_load(values);
  }
  float part[ROWS] = {0};
  memcpy(part, values, rows * sizeof(float));
  return clb_lanes16_load(part);
}

static void linear(const clb_linear_args* args) {
  chunk work;
  work.cols = args->cols;
  for (size_t first = 0; first < args->tokens; first += PANEL) {
    take_tokens(&work, args->input, args->inputs, args->input_stride, first, args->tokens);
    for (size_t row = args->row_begin; row < args->row_end; row += CHUNK * ROWS) {
      work.count = smaller(CHUNK, (args->row_end - row + ROWS - 1) / ROWS);
      for (size_t n = 0; n < work.count; ++n) {
        work.tiles[n] = (const weight_t*)args->weights + (row + n * ROWS) * work.cols;
      }
      multiply(&work);
      for (size_t n = 0; n < work.count; ++n) {
        const size_t at = row + n * ROWS;
        const size_t rows = args->row_end - at;
        const clb_lanes16 bias = args->bias == NULL ? clb_lanes16_spread(0.0f) : load_rows(args->bias + at, rows);
        for (size_t t = 0; t < work.tokens; ++t) {
          const size_t place = args->outputs == NULL ? first + t : args->outputs[first + t];
          store_rows(clb_lanes16_add(work.sums[n][t], bias), rows, args->output + place * args->output_stride + at);
        }
      }
    }
  }
}

static void gate_up(const clb_gated_linear_args* args) {
  enum { HALF = CHUNK / 2 };
  chunk work;
  work.cols = args->cols;
  for (size_t first = 0; first < args->tokens; first += PANEL) {
    take_tokens(&work, args->input, args->inputs, args->input_stride, first, args->tokens);
    for (size_t row = args->row_begin; row < args->row_end; row += HALF * ROWS) {
      const size_t count = smaller(HALF, (args->row_end - row + ROWS - 1) / ROWS);
      work.count = 2 * count;
      for (size_t n = 0; n < count; ++n) { /* side by side, so that a pair of tiles is a tile of each */
        work.tiles[2 * n] = (const weight_t*)args->gate + (row + n * ROWS) * work.cols;
        work.tiles[2 * n + 1] = (const weight_t*)args->up + (row + n * ROWS) * work.cols;
      }
      multiply(&work);
      for (size_t n = 0; n < count; ++n) {
        const size_t at = row + n * ROWS;
        for (size_t t = 0; t < work.tokens; ++t) {
          store_rows(clb_lanes16_silu_times(work.sums[2 * n][t], work.sums[2 * n + 1][t]), args->row_end - at,
                     args->output + (first + t) * args->output_stride + at);
        }
      }
    }
  }
}

static void widen_row(const void* weights, uint32_t row, uint32_t cols, float* output) {
  const weight_t* const lane = (const weight_t*)weights + (size_t)(row / ROWS) * cols * ROWS + row % ROWS;
  for (size_t c = 0; c < cols; ++c) {
    output[c] = widen_one(lane[c * ROWS]);
  }
}

static const clb_module module_table = {
    .abi_version = CLB_ABI_VERSION,
    .struct_bytes = sizeof(clb_module),
    .name = MODULE_NAME,
    .precision = MODULE_PRECISION,
    .layout = CLB_LAYOUT_ROWS16,
    .rank = CLB_ISA_RANK,
    .reserved = 0,
    .supported = clb_isa_supported,
    .linear = linear,
    .gate_up = gate_up,
    .row = widen_row,
};

CLB_API const clb_module* clb_module_entry(void);
CLB_API const clb_module* clb_module_entry(void) { return &module_table; }
