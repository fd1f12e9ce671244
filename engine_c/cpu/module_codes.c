/*
 * module_codes.c: a kernel module over rows16 of 8-bit or 4-bit integers (-DCLB_MODULE_PRECISION=3 int8, 4 int4), whose
 * inputs are rows of codes (colibri.h). One source, compiled once per instruction set (which lanes16.h and dots16.h
 * look up); exports clb_module_entry and nothing else.
 *
 * Some tiles are done at once, which are as many streams from memory, each prefetched ahead; they stay in the
 * second-level cache while the tokens come in groups whose sums fit the registers.
 *
 *   block of 32 columns   integers, exact         dots16.h
 *   group of blocks       part += code scale * integer sum, by blocks in rising order
 *   row                   sum += group scale * part, by groups in rising order
 *
 * A lane is a row and no sum crosses lanes, so bits depend on nothing but weights, the token's codes and the groups.
 * Thread-safe and re-entrant: no state, no allocation; 8 KiB of stack.
 */
#include <stddef.h>
#include <string.h>

#include "colibri.h"
#include "dots16.h"
#include "lanes16.h"
#include "number.h"

#define CLB_ALWAYS_INLINE inline __attribute__((always_inline))

#if CLB_MODULE_PRECISION == 3
#define MODULE_NAME CLB_DOTS16_ISA "-int8"
#define MODULE_PRECISION CLB_INT8
#else
#define MODULE_NAME CLB_DOTS16_ISA "-int4"
#define MODULE_PRECISION CLB_INT4
#endif

enum {
  ROWS = CLB_TILE_ROWS,
  LINE = 64, /* bytes of four columns of int8, of eight of int4 */
  LINE_COLS = MODULE_PRECISION == CLB_INT8 ? 4 : 8,
  BLOCK_LINES = CLB_CODE_BLOCK / LINE_COLS,
  MIDDLE = 8, /* zero point of int4 without zero points */
  TILES = 4,
  TOKENS = CLB_DOTS16_TOKENS,
  AHEAD = 2048,       /* bytes that values are prefetched ahead */
  SCALES_AHEAD = 128, /* numbers that scales are, for so few tokens that memory is what counts */
  FEW = 4
};

typedef struct tile {
  const unsigned char* values;
  const uint16_t* scales; /* of its rows, group by group */
  const uint8_t* zeros;   /* the same; NULL: none */
} tile;

/* Some tiles and some tokens, whose products are made at once. */
typedef struct patch {
  tile tiles[TILES];
  const int8_t* codes[TOKENS];
  size_t cols;
  size_t blocks;
  size_t group_blocks;
  clb_lanes16 sums[TILES][TOKENS]; /* results */
} patch;

/* What a token says of all blocks lies behind its codes. */
static inline const float* scales_of(const patch* work, size_t token) {
  return (const float*)(const void*)(work->codes[token] + work->blocks * CLB_CODE_BLOCK);
}

static inline int32_t sum_of(const patch* work, size_t token, size_t block) {
  return ((const int32_t*)(const void*)(scales_of(work, token) + work->blocks))[block];
}

/* Lines [0, lines) of a block. All but work, block and lines are constant. */
static CLB_ALWAYS_INLINE void add_lines(const patch* work, size_t first, const size_t count, const size_t tokens,
                                        size_t block, size_t lines, clb_dots16 dots[][CLB_DOTS16_TOKENS]) {
  for (size_t l = 0; l < lines; ++l) {
    const size_t at = (block * BLOCK_LINES + l) * LINE;
    const size_t column = block * CLB_CODE_BLOCK + l * LINE_COLS;
    clb_bytes64 low[TILES];
#if CLB_MODULE_PRECISION == 4
    clb_bytes64 high[TILES];
#endif
#pragma GCC unroll 8
    for (size_t n = 0; n < count; ++n) {
      const unsigned char* const line = work->tiles[first + n].values + at;
      __builtin_prefetch(line + AHEAD);
#if CLB_MODULE_PRECISION == 4
      clb_bytes64_int4(line, &low[n], &high[n]);
#else
      low[n] = clb_bytes64_int8(line);
#endif
    }
#pragma GCC unroll 8
    for (size_t t = 0; t < tokens; ++t) {
#pragma GCC unroll 8
      for (size_t n = 0; n < count; ++n) {
        dots[n][t] = clb_dots16_add(MODULE_PRECISION, dots[n][t], low[n], work->codes[t] + column);
      }
#if CLB_MODULE_PRECISION == 4
#pragma GCC unroll 8
      for (size_t n = 0; n < count; ++n) {
        dots[n][t] = clb_dots16_add(MODULE_PRECISION, dots[n][t], high[n], work->codes[t] + column + 4);
      }
#endif
    }
  }
}

static CLB_ALWAYS_INLINE clb_ints16 correction(const tile* at, size_t group, int32_t sum, const int zeros) {
#if CLB_MODULE_PRECISION == 4
  return zeros ? clb_ints16_scale(at->zeros + group * ROWS, -sum) : clb_ints16_spread(-MIDDLE * sum);
#else
  (void)at;
  (void)group;
  (void)zeros;
  return clb_ints16_spread(-CLB_DOTS16_MOVED * sum);
#endif
}

/* `count` tiles from `first` on with `tokens` tokens. All but work and first is constant. */
static CLB_ALWAYS_INLINE void multiply_some(patch* work, size_t first, const size_t count, const size_t tokens,
                                            const int zeros) {
  clb_lanes16 parts[TILES][TOKENS];
  clb_lanes16 sums[TILES][TOKENS];
  size_t group = 0;
  size_t in_group = 0; /* blocks of it that are done */
#pragma GCC unroll 8
  for (size_t n = 0; n < count; ++n) {
#pragma GCC unroll 8
    for (size_t t = 0; t < tokens; ++t) {
      parts[n][t] = clb_lanes16_spread(0.0f);
      sums[n][t] = clb_lanes16_spread(0.0f);
    }
  }
  for (size_t b = 0; b < work->blocks; ++b) {
    clb_dots16 dots[TILES][TOKENS];
    const size_t left = work->cols - b * CLB_CODE_BLOCK;
#pragma GCC unroll 8
    for (size_t t = 0; t < tokens; ++t) {
#pragma GCC unroll 8
      for (size_t n = 0; n < count; ++n) {
        dots[n][t] =
            clb_dots16_begin(MODULE_PRECISION, correction(&work->tiles[first + n], group, sum_of(work, t, b), zeros));
      }
    }
    add_lines(work, first, count, tokens, b,
              left < CLB_CODE_BLOCK ? (left + LINE_COLS - 1) / LINE_COLS : (size_t)BLOCK_LINES, dots);
#pragma GCC unroll 8
    for (size_t t = 0; t < tokens; ++t) {
      const clb_lanes16 scale = clb_lanes16_spread(scales_of(work, t)[b]);
#pragma GCC unroll 8
      for (size_t n = 0; n < count; ++n) {
        const clb_lanes16 exact = clb_dots16_end(MODULE_PRECISION, dots[n][t],
                                                 correction(&work->tiles[first + n], group, sum_of(work, t, b), zeros));
        parts[n][t] = clb_lanes16_add_product(parts[n][t], exact, scale);
      }
    }
    ++in_group;
    if (in_group < work->group_blocks && b + 1 < work->blocks) {
      continue;
    }
#pragma GCC unroll 8
    for (size_t n = 0; n < count; ++n) {
      const uint16_t* const scales = work->tiles[first + n].scales + group * ROWS;
      const clb_lanes16 scale = clb_lanes16_load_half(scales);
      if (tokens <= FEW) {
        __builtin_prefetch(scales + SCALES_AHEAD);
      }
#pragma GCC unroll 8
      for (size_t t = 0; t < tokens; ++t) {
        sums[n][t] = clb_lanes16_add_product(sums[n][t], parts[n][t], scale);
        parts[n][t] = clb_lanes16_spread(0.0f);
      }
    }
    in_group = 0;
    ++group;
  }
#pragma GCC unroll 8
  for (size_t n = 0; n < count; ++n) {
#pragma GCC unroll 8
    for (size_t t = 0; t < tokens; ++t) {
      work->sums[first + n][t] = sums[n][t];
    }
  }
}

/* All tiles with `tokens` tokens. tokens and zeros are constant. */
static CLB_ALWAYS_INLINE void multiply_tiles(patch* work, size_t count, const size_t tokens, const int zeros) {
  size_t n = 0;
  for (; CLB_DOTS16_TILES(tokens) >= 4u && n + 4 <= count; n += 4) {
    multiply_some(work, n, 4, tokens, zeros);
  }
  for (; CLB_DOTS16_TILES(tokens) >= 2u && n + 2 <= count; n += 2) {
    multiply_some(work, n, 2, tokens, zeros);
  }
  for (; n < count; ++n) {
    multiply_some(work, n, 1, tokens, zeros);
  }
}

#define CASE(number)                                \
  case number:                                      \
    if ((number) <= TOKENS) {                       \
      multiply_tiles(work, count, (number), zeros); \
    }                                               \
    break

static CLB_ALWAYS_INLINE void multiply_tokens(patch* work, size_t count, size_t tokens, const int zeros) {
  switch (tokens) {
    CASE(1);
    CASE(2);
    CASE(3);
    CASE(4);
    CASE(5);
    CASE(6);
    default:
      break;
  }
}
#undef CASE

/* work->sums of `count` tiles and `tokens` tokens. */
static void multiply(patch* work, size_t count, size_t tokens) {
#if CLB_MODULE_PRECISION == 4
  if (work->tiles[0].zeros != NULL) {
    multiply_tokens(work, count, tokens, 1);
    return;
  }
#endif
  multiply_tokens(work, count, tokens, 0);
}

static size_t row_bytes(size_t cols) { return (cols + LINE_COLS - 1) / LINE_COLS * LINE / ROWS; }

static tile tile_of(const clb_operand* operand, size_t row, size_t cols) {
  const size_t groups = (cols + operand->group_cols - 1) / operand->group_cols;
  return (tile){(const unsigned char*)operand->values + row * row_bytes(cols),
                (const uint16_t*)operand->scales + row * groups,
                operand->zeros == NULL ? NULL : (const uint8_t*)operand->zeros + row * groups};
}

static void set_up(patch* work, const clb_operand* operand, size_t cols) {
  work->cols = cols;
  work->blocks = (size_t)clb_code_blocks((uint32_t)cols);
  work->group_blocks = (operand->group_cols + CLB_CODE_BLOCK - 1u) / CLB_CODE_BLOCK;
}

/* Tokens come in groups of nearly equal size. */
static size_t groups_of(size_t tokens) { return (tokens + TOKENS - 1) / TOKENS; }

static void take_tokens(patch* work, const unsigned char* codes, const uint32_t* inputs, size_t first, size_t count) {
  const size_t bytes = (size_t)clb_code_row_bytes((uint32_t)work->cols);
  for (size_t t = 0; t < count; ++t) {
    work->codes[t] = (const int8_t*)codes + (inputs == NULL ? first + t : inputs[first + t]) * bytes;
  }
}

static void linear(const clb_linear_args* args) {
  patch work;
  set_up(&work, &args->weights, args->cols);
  const size_t groups = groups_of(args->tokens);
  const size_t step = CLB_DOTS16_TILES((args->tokens + groups - 1) / groups);
  for (size_t row = args->row_begin; row < args->row_end; row += step * ROWS) {
    const size_t count = clb_smaller(step, (args->row_end - row + ROWS - 1) / ROWS);
    for (size_t n = 0; n < count; ++n) {
      work.tiles[n] = tile_of(&args->weights, row + n * ROWS, args->cols);
    }
    for (size_t g = 0; g < groups; ++g) {
      const size_t first = args->tokens * g / groups;
      const size_t tokens = args->tokens * (g + 1) / groups - first;
      take_tokens(&work, args->codes, args->inputs, first, tokens);
      multiply(&work, count, tokens);
      for (size_t n = 0; n < count; ++n) {
        const size_t at = row + n * ROWS;
        const size_t rows = args->row_end - at;
        const clb_lanes16 bias =
            args->bias == NULL ? clb_lanes16_spread(0.0f) : clb_lanes16_load_rows(args->bias + at, rows);
        for (size_t t = 0; t < tokens; ++t) {
          const size_t place = args->outputs == NULL ? first + t : args->outputs[first + t];
          clb_lanes16_store_rows(clb_lanes16_add(work.sums[n][t], bias), rows,
                                 args->output + place * args->output_stride + at);
        }
      }
    }
  }
}

static void gate_up(const clb_gated_linear_args* args) {
  patch work;
  set_up(&work, &args->gate, args->cols);
  const size_t groups = groups_of(args->tokens);
  const size_t step = CLB_DOTS16_TILES((args->tokens + groups - 1) / groups);
  const size_t half = step == 1 ? 1 : step / 2;
  for (size_t row = args->row_begin; row < args->row_end; row += half * ROWS) {
    const size_t count = clb_smaller(half, (args->row_end - row + ROWS - 1) / ROWS);
    for (size_t n = 0; n < count; ++n) {
      work.tiles[2 * n] = tile_of(&args->gate, row + n * ROWS, args->cols);
      work.tiles[2 * n + 1] = tile_of(&args->up, row + n * ROWS, args->cols);
    }
    for (size_t g = 0; g < groups; ++g) {
      const size_t first = args->tokens * g / groups;
      const size_t tokens = args->tokens * (g + 1) / groups - first;
      take_tokens(&work, args->codes, args->inputs, first, tokens);
      multiply(&work, 2 * count, tokens);
      for (size_t n = 0; n < count; ++n) {
        const size_t at = row + n * ROWS;
        for (size_t t = 0; t < tokens; ++t) {
          clb_lanes16_store_rows(clb_lanes16_silu_times(work.sums[2 * n][t], work.sums[2 * n + 1][t]),
                                 args->row_end - at, args->output + (first + t) * args->output_stride + at);
        }
      }
    }
  }
}

static void widen_row(const clb_operand* weights, uint32_t row, uint32_t cols, float* output) {
  const size_t lane = row % ROWS;
  const tile at = tile_of(weights, row - lane, cols);
  for (size_t c = 0; c < cols; ++c) {
    const size_t group = c / weights->group_cols * ROWS + lane;
    const unsigned char byte = at.values[c / LINE_COLS * LINE + lane * 4 + c % 4];
#if CLB_MODULE_PRECISION == 4
    const int32_t zero = at.zeros == NULL ? MIDDLE : at.zeros[group];
    const int32_t value = (c / 4 % 2 == 0 ? byte & 15 : byte >> 4) - zero;
#else
    const int32_t value = (int8_t)byte;
#endif
    output[c] = (float)value * clb_float_of_half(at.scales[group]);
  }
}

static const clb_module module_table = {
    .abi_version = CLB_ABI_VERSION,
    .struct_bytes = sizeof(clb_module),
    .name = MODULE_NAME,
    .precision = MODULE_PRECISION,
    .layout = CLB_LAYOUT_ROWS16,
    .rank = CLB_DOTS16_RANK,
    .reads_codes = 1,
    .supported = clb_dots16_supported,
    .linear = linear,
    .gate_up = gate_up,
    .row = widen_row,
};

CLB_API const clb_module* clb_module_entry(void);
CLB_API const clb_module* clb_module_entry(void) { return &module_table; }
