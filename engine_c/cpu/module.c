/*
 * module.c: a kernel module over rows16. One source, compiled once per instruction set (which lanes16.h looks up) and
 * weight precision (-DCLB_MODULE_PRECISION=0 fp32, 1 fp16, 2 bf16, 5 fp8); exports clb_module_entry and nothing else.
 *
 * Order of additions (what row independence stands on): colibri.h. A lane is a row, so no sum ever crosses lanes.
 *
 * Blocking (speed only, never the order)
 *   panel   up to 64 tokens
 *   chunk   up to 8 tiles; of gate_up: 4 of gate, the same 4 of up
 *   block   256 columns of a chunk, inputs of the panel gathered side by side
 *   group   tokens of a panel and tiles of a chunk whose sums fit the registers
 * For few tokens a group has many tiles, which are as many streams from memory, and each is prefetched a little ahead.
 * For many it has few tiles, which stay in the first-level cache for the groups of all tokens while the next ones are
 * prefetched. Weights are widened where they are used: beside the sums that costs nothing.
 *
 * Of fp8 the numbers are added up unscaled within a group, a row or 128 of its columns; a group's sum times its scale
 * is what is added to the others.
 *
 * Thread-safe and re-entrant: no state, no allocation; 140 KiB of stack.
 */
#include <stddef.h>
#include <string.h>

#include "colibri.h"
#include "lanes16.h"
#include "micro.h"

#if CLB_MODULE_PRECISION == 0
#define MODULE_NAME CLB_ISA "-fp32"
#define MODULE_PRECISION CLB_FP32
typedef float weight_t;
static inline float widen_one(weight_t value) { return value; }
#elif CLB_MODULE_PRECISION == 1
#define MODULE_NAME CLB_ISA "-fp16"
#define MODULE_PRECISION CLB_FP16
typedef uint16_t weight_t;
static inline float widen_one(weight_t value) { return clb_float_of_half(value); }
#elif CLB_MODULE_PRECISION == 5
#define MODULE_NAME CLB_ISA "-fp8"
#define MODULE_PRECISION CLB_FP8
typedef uint8_t weight_t;
#define WIDENED 256.0f /* what the numbers of lanes16 are to be multiplied with beside their scale */
static inline float widen_one(weight_t value) { return clb_float_of_half(clb_half_of_fp8(value)) * WIDENED; }
#else
#define MODULE_NAME CLB_ISA "-bf16"
#define MODULE_PRECISION CLB_BF16
typedef uint16_t weight_t;
static inline float widen_one(weight_t value) { return clb_float_of_bf16(value); }
#endif

enum {
  ROWS = CLB_TILE_ROWS,
  BLOCK_COLS = 256,               /* part of the order of additions */
  INPUT_STRIDE = BLOCK_COLS + 16, /* off a power of two, so that tokens do not fight for the same cache lines */
  PANEL = CLB_MICRO_VECTORS,
  CHUNK = 8,
  GROUP = CLB_GROUP
};

/* Some tiles of one call, and some of its tokens. */
typedef struct chunk {
  const weight_t* tiles[CHUNK]; /* first column of each */
#if CLB_MODULE_PRECISION == 5
  const float* scales[CHUNK]; /* of each tile: of its rows, or of its groups */
  size_t group;               /* columns of one */
  int by_block;               /* 1: a group has several rows */
  clb_micro_sums totals[CHUNK];
#endif
  const float* inputs[PANEL]; /* of each token */
  size_t count;               /* tiles */
  size_t tokens;
  size_t cols;
  size_t stride;              /* weights from a tile to the one of the next chunk */
  clb_micro_sums sums[CHUNK]; /* result of each tile and token */
} chunk;

static void add_group(const clb_micro* work, size_t vectors) {
  clb_micro_group(work, vectors, GROUP, MODULE_PRECISION, ROWS, INPUT_STRIDE, 0);
}

/* One block of columns, from `begin`, for all tiles and tokens of a chunk. x: the first token's inputs. */
static void add_columns(chunk* work, const float* x, size_t begin, size_t cols) {
  const size_t step = clb_micro_step(work->tokens, GROUP);
  const void* tiles[CHUNK];
  const void* next[CHUNK];
  for (size_t n = 0; n < work->count; ++n) {
    tiles[n] = work->tiles[n] + begin * ROWS;
  }
  for (size_t n = 0; n < work->count; ++n) {
    const weight_t* const again =
        work->tiles[n % step]; /* first ones of the next block or chunk: after the last ones */
    next[n] = n + step < work->count      ? work->tiles[n + step] + begin * ROWS
              : begin + cols < work->cols ? again + (begin + cols) * ROWS
                                          : again + work->stride;
  }
  const clb_micro product = {
      .tiles = tiles, .next = next, .count = work->count, .x = x, .cols = cols, .sums = work->sums};
  clb_micro_run(&product, work->tokens, GROUP, INPUT_STRIDE, add_group);
}

#if CLB_MODULE_PRECISION == 5
/* Matrix `operand` delivers tile n of a chunk, from `row` on. */
static void take_tile(chunk* work, size_t n, const clb_operand* operand, size_t row) {
  const size_t groups = (work->cols + operand->group_cols - 1) / operand->group_cols;
  work->tiles[n] = (const weight_t*)operand->values + row * work->cols;
  work->scales[n] =
      (const float*)operand->scales + (operand->group_rows == 1 ? row : row / operand->group_rows * groups);
  work->group = operand->group_cols;
  work->by_block = operand->group_rows != 1;
}

static size_t block_cols(const chunk* work) { return work->group < BLOCK_COLS ? work->group : BLOCK_COLS; }

static void clear(chunk* work, clb_micro_sums* sums) {
  for (size_t n = 0; n < work->count; ++n) {
    for (size_t t = 0; t < work->tokens; ++t) {
      sums[n][t] = clb_lanes16_spread(0.0f);
    }
  }
}

static void begin_sums(chunk* work) {
  clear(work, work->sums);
  clear(work, work->totals);
}

/* The columns before `end` are added up: what a finished group gives goes to the totals. */
static void end_block(chunk* work, size_t end) {
  if (end != work->cols && end % work->group != 0) {
    return;
  }
  for (size_t n = 0; n < work->count; ++n) {
    const clb_lanes16 scale = work->by_block ? clb_lanes16_spread(work->scales[n][(end - 1) / work->group])
                                             : clb_lanes16_load(work->scales[n]);
    for (size_t t = 0; t < work->tokens; ++t) {
      const clb_lanes16 widened = clb_lanes16_multiply(work->sums[n][t], clb_lanes16_spread(WIDENED));
      work->totals[n][t] = clb_lanes16_add_product(work->totals[n][t], widened, scale);
    }
  }
  clear(work, work->sums);
}

static const clb_micro_sums* results(const chunk* work) { return work->totals; }
#else
static void take_tile(chunk* work, size_t n, const clb_operand* operand, size_t row) {
  work->tiles[n] = (const weight_t*)operand->values + row * work->cols;
}

static size_t block_cols(const chunk* work) {
  (void)work;
  return BLOCK_COLS;
}

static void begin_sums(chunk* work) {
  for (size_t n = 0; n < work->count; ++n) {
    for (size_t t = 0; t < work->tokens; ++t) {
      work->sums[n][t] = clb_lanes16_spread(0.0f);
    }
  }
}

static void end_block(const chunk* work, size_t end) {
  (void)work;
  (void)end;
}

static const clb_micro_sums* results(const chunk* work) { return work->sums; }
#endif

/* The products of all tiles and tokens, block by block. */
static void multiply(chunk* work) {
  _Alignas(64) float gathered[PANEL * INPUT_STRIDE];
  const size_t block = block_cols(work);
  begin_sums(work);
  for (size_t begin = 0; begin < work->cols; begin += block) {
    const size_t cols = work->cols - begin < block ? work->cols - begin : block;
    if (work->tokens == 1) {
      add_columns(work, work->inputs[0] + begin, begin, cols);
    } else {
      for (size_t t = 0; t < work->tokens; ++t) {
        memcpy(gathered + t * INPUT_STRIDE, work->inputs[t] + begin, cols * sizeof(float));
      }
      add_columns(work, gathered, begin, cols);
    }
    end_block(work, begin + cols);
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

static void linear(const clb_linear_args* args) {
  chunk work;
  work.cols = args->cols;
  work.stride = CHUNK * ROWS * work.cols;
  for (size_t first = 0; first < args->tokens; first += PANEL) {
    take_tokens(&work, args->input, args->inputs, args->input_stride, first, args->tokens);
    for (size_t row = args->row_begin; row < args->row_end; row += CHUNK * ROWS) {
      work.count = clb_smaller(CHUNK, (args->row_end - row + ROWS - 1) / ROWS);
      for (size_t n = 0; n < work.count; ++n) {
        take_tile(&work, n, &args->weights, row + n * ROWS);
      }
      multiply(&work);
      for (size_t n = 0; n < work.count; ++n) {
        const size_t at = row + n * ROWS;
        const size_t rows = args->row_end - at;
        const clb_lanes16 bias =
            args->bias == NULL ? clb_lanes16_spread(0.0f) : clb_lanes16_load_rows(args->bias + at, rows);
        for (size_t t = 0; t < work.tokens; ++t) {
          const size_t place = args->outputs == NULL ? first + t : args->outputs[first + t];
          clb_lanes16_store_rows(clb_lanes16_add(results(&work)[n][t], bias), rows,
                                 args->output + place * args->output_stride + at);
        }
      }
    }
  }
}

static void gate_up(const clb_gated_linear_args* args) {
  enum { HALF = CHUNK / 2 };
  chunk work;
  work.cols = args->cols;
  work.stride = HALF * ROWS * work.cols;
  for (size_t first = 0; first < args->tokens; first += PANEL) {
    take_tokens(&work, args->input, args->inputs, args->input_stride, first, args->tokens);
    for (size_t row = args->row_begin; row < args->row_end; row += HALF * ROWS) {
      const size_t count = clb_smaller(HALF, (args->row_end - row + ROWS - 1) / ROWS);
      work.count = 2 * count;
      for (size_t n = 0; n < count; ++n) { /* side by side, so that a pair of tiles is a tile of each */
        take_tile(&work, 2 * n, &args->gate, row + n * ROWS);
        take_tile(&work, 2 * n + 1, &args->up, row + n * ROWS);
      }
      multiply(&work);
      for (size_t n = 0; n < count; ++n) {
        const size_t at = row + n * ROWS;
        for (size_t t = 0; t < work.tokens; ++t) {
          clb_lanes16_store_rows(clb_lanes16_silu_times(results(&work)[2 * n][t], results(&work)[2 * n + 1][t]),
                                 args->row_end - at, args->output + (first + t) * args->output_stride + at);
        }
      }
    }
  }
}

static void widen_row(const clb_operand* weights, uint32_t row, uint32_t cols, float* output) {
  const weight_t* const lane = (const weight_t*)weights->values + (size_t)(row / ROWS) * cols * ROWS + row % ROWS;
  for (size_t c = 0; c < cols; ++c) {
    output[c] = widen_one(lane[c * ROWS]);
  }
#if CLB_MODULE_PRECISION == 5
  const float* const scales = weights->scales;
  const size_t groups = (cols + weights->group_cols - 1) / weights->group_cols;
  for (size_t c = 0; c < cols; ++c) {
    const size_t group = row / weights->group_rows * groups + c / weights->group_cols;
    output[c] *= scales[group];
  }
#endif
}

static const clb_module module_table = {
    .abi_version = CLB_ABI_VERSION,
    .struct_bytes = sizeof(clb_module),
    .name = MODULE_NAME,
    .precision = MODULE_PRECISION,
    .layout = CLB_LAYOUT_ROWS16,
    .rank = CLB_ISA_RANK,
    .reads_codes = 0,
    .supported = clb_isa_supported,
    .linear = linear,
    .gate_up = gate_up,
    .row = widen_row,
};

CLB_API const clb_module* clb_module_entry(void);
CLB_API const clb_module* clb_module_entry(void) { return &module_table; }
