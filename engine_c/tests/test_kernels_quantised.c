/*
 * test_kernels_quantised.c: the modules of int8, int4 and fp8 that this machine can run, in every kind of groups.
 *
 * The reference dequantises exactly and adds up in double precision, over inputs that were rounded to codes by the
 * words of colibri.h; a second, wider bound is against the product with the inputs themselves. Random odd shapes, lists
 * and row ranges; a mismatch prints every parameter. Then: the same bits whatever the company.
 */
#include <dlfcn.h>

#include "colibri.h"
#include "loader_internal.h"
#include "number.h"
#include "ops.h"
#include "test.h"

enum { MAX_COLS = 1024, MAX_ROWS = 290, MAX_TOKENS = 40, TILE = CLB_TILE_ROWS, ISAS = 4 };

static const char* const isas[ISAS] = {"generic", "avx2", "avx512", "vnni"};

typedef struct format {
  const char* module;
  uint32_t precision;
  uint32_t group_rows;
  uint32_t group_cols; /* 0: all */
  uint32_t zeros;
} format;

static const format formats[] = {{"int8", CLB_INT8, 1, 0, 0},   {"int8", CLB_INT8, 1, 128, 0},
                                 {"int4", CLB_INT4, 1, 32, 0},  {"int4", CLB_INT4, 1, 64, 0},
                                 {"int4", CLB_INT4, 1, 128, 0}, {"int4", CLB_INT4, 1, 32, 1},
                                 {"int4", CLB_INT4, 1, 64, 1},  {"int4", CLB_INT4, 1, 128, 1},
                                 {"fp8", CLB_FP8, 1, 0, 0},     {"fp8", CLB_FP8, 128, 128, 0}};
enum { FORMATS = sizeof formats / sizeof formats[0] };

/* A random matrix: its bytes, and what they mean, row by row. */
typedef struct matrix {
  clb_section_desc section;
  clb_operand operand;
  double* wide;
  _Alignas(64) unsigned char bytes[2 * (MAX_ROWS + TILE) * MAX_COLS];
} matrix;

static matrix matrices[2];
static double wides[2][MAX_ROWS * MAX_COLS];
static void* handles[ISAS][FORMATS];
static float input[MAX_TOKENS * MAX_COLS];
static double rounded[MAX_TOKENS * MAX_COLS]; /* what the codes of `input` mean */
static double steps[MAX_TOKENS * MAX_COLS];   /* the scale of each */
static _Alignas(64) unsigned char codes[2 * MAX_TOKENS * MAX_COLS];
static float output[2 * MAX_TOKENS * (MAX_ROWS + 3)];
static float again[2 * MAX_TOKENS * (MAX_ROWS + 3)];
static float bias[MAX_ROWS];
static uint32_t inputs[MAX_TOKENS];
static uint32_t outputs[MAX_TOKENS];

/* NULL: there is none, or this machine cannot run it. */
static const clb_module* module_of(uint32_t isa, uint32_t f) {
  char path[512];
  const char* const folder = getenv("CLB_MODULE_DIR");
  (void)snprintf(path, sizeof path, "%s/clb_cpu_%s_%s.so", folder == NULL ? "." : folder, isas[isa], formats[f].module);
  if (handles[isa][f] == NULL) {
    handles[isa][f] = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  }
  if (handles[isa][f] == NULL) { /* vnni is for integers, avx512 for fp8 */
    CHECK(isa == 2 || isa == 3);
    return NULL;
  }
  clb_module_entry_fn entry = NULL;
  void* const symbol = dlsym(handles[isa][f], CLB_MODULE_ENTRY);
  memcpy(&entry, &symbol, sizeof entry);
  CHECK(entry != NULL);
  const clb_module* const module = entry();
  CHECK_EQ(module->precision, formats[f].precision);
  CHECK_EQ(module->abi_version, CLB_ABI_VERSION);
  CHECK_EQ(module->reads_codes, formats[f].precision == CLB_FP8 ? 0 : 1);
  CHECK(isa != 0 || module->supported() == 1);
  return module->supported() == 1 ? module : NULL;
}

static void for_each_module(void (*check)(const clb_module* module, const format* kind)) {
  uint32_t checked = 0;
  for (uint32_t isa = 0; isa < ISAS; ++isa) {
    for (uint32_t f = 0; f < FORMATS; ++f) {
      const clb_module* const module = module_of(isa, f);
      if (module != NULL) {
        check(module, &formats[f]);
        ++checked;
      }
    }
  }
  CHECK(checked >= FORMATS);
}

/* ------------------------------------------------------------- matrices */

static uint32_t pick(uint64_t* state, uint32_t most) { return 1 + (uint32_t)(clb_test_random(state) % most); }

static double value_of(const matrix* m, uint32_t row, uint32_t col) {
  const clb_section_desc* const s = &m->section;
  const unsigned char* const at = m->bytes;
  const uint64_t tile = row / TILE;
  switch (s->precision) {
    case CLB_INT8:
      return (double)(int8_t)at[(tile * (clb_align_up(s->cols, 4) / 4) + col / 4) * 64 + row % TILE * 4 + col % 4];
    case CLB_INT4: {
      const unsigned char pair = at[(tile * (s->cols / 8) + col / 8) * 64 + row % TILE * 4 + col % 4];
      return (double)(col / 4 % 2 == 0 ? pair & 15 : pair >> 4);
    }
    default: {
      const unsigned char bits = at[clb_rows16_index(row, col, s->cols)];
      const int exponent = bits >> 3 & 15;
      const double magnitude = exponent == 0 ? ldexp(bits & 7, -9) : ldexp(8 + (bits & 7), exponent - 10);
      return bits >= 128 ? -magnitude : magnitude;
    }
  }
}

static void widen(matrix* m) {
  const clb_section_desc* const s = &m->section;
  const uint32_t groups = (s->cols + s->group_cols - 1) / s->group_cols;
  for (uint32_t r = 0; r < s->rows; ++r) {
    for (uint32_t c = 0; c < s->cols; ++c) {
      const size_t group = s->group_rows == 1 ? ((size_t)(r / TILE) * groups + c / s->group_cols) * TILE + r % TILE
                                              : (size_t)(r / s->group_rows) * groups + c / s->group_cols;
      const double middle = s->precision == CLB_INT4 ? 8.0 : 0.0;
      const double zero = m->operand.zeros == NULL ? middle : (double)((const uint8_t*)m->operand.zeros)[group];
      const double scale = s->precision == CLB_FP8
                               ? (double)((const float*)m->operand.scales)[group]
                               : (double)clb_float_of_half(((const uint16_t*)m->operand.scales)[group]);
      m->wide[(size_t)r * s->cols + c] = (value_of(m, r, c) - zero) * scale;
    }
  }
}

/* Any bytes are values; what pads rows and columns is garbage that must not show. */
static void fill_matrix(uint64_t* state, const format* kind, uint32_t index, uint32_t rows, uint32_t cols) {
  matrix* const m = &matrices[index];
  m->wide = wides[index];
  m->section = (clb_section_desc){.precision = kind->precision,
                                  .layout = CLB_LAYOUT_ROWS16,
                                  .rows = rows,
                                  .cols = cols,
                                  .group_rows = kind->group_rows,
                                  .group_cols = kind->group_cols == 0 ? cols : kind->group_cols,
                                  .zeros_offset = kind->zeros};
  const clb_parts parts = clb_parts_of(&m->section);
  CHECK(parts.bytes <= sizeof m->bytes);
  for (uint64_t i = 0; i < parts.values; ++i) {
    const uint8_t byte = (uint8_t)(clb_test_random(state) >> 20);
    m->bytes[i] = kind->precision == CLB_FP8 && (byte & 0x7f) == 0x7f ? 0 : byte;
  }
  for (uint64_t i = 0; i < parts.scales; i += kind->precision == CLB_FP8 ? 4 : 2) {
    const float scale = ((float)(clb_test_random(state) >> 40) * 0x1p-23f - 1.0f) * 0.01f;
    const uint16_t half = clb_half_of_float(scale);
    memcpy(&m->bytes[parts.scales_at + i], kind->precision == CLB_FP8 ? (const void*)&scale : (const void*)&half,
           kind->precision == CLB_FP8 ? sizeof scale : sizeof half);
  }
  for (uint64_t i = 0; i < parts.zeros; ++i) {
    m->bytes[parts.zeros_at + i] = (uint8_t)(clb_test_random(state) % 16);
  }
  m->operand = (clb_operand){m->bytes, m->bytes + parts.scales_at, parts.zeros == 0 ? NULL : m->bytes + parts.zeros_at,
                             m->section.group_rows, m->section.group_cols};
  widen(m);
}

/* --------------------------------------------------------------- inputs */

/* By the words of colibri.h, with the library's rounding. */
static void round_block(const float* x, uint32_t count, double* values, double* scales) {
  float most = 0.0f;
  for (uint32_t i = 0; i < count; ++i) {
    most = fmaxf(most, fabsf(x[i]));
  }
  const float scale = most < 0x1p-100f ? 0.0f : most / 127.0f;
  const float inverse = most < 0x1p-100f ? 0.0f : 127.0f / most;
  for (uint32_t i = 0; i < count; ++i) {
    values[i] = (double)nearbyintf(x[i] * inverse) * (double)scale;
    scales[i] = (double)scale;
  }
}

/* Zero one time in four, large one time in sixteen; a block of zeros now and then. */
static void fill_input(uint64_t* state, const clb_module* module, uint32_t cols) {
  for (size_t i = 0; i < (size_t)MAX_TOKENS * cols; ++i) {
    const uint64_t bits = clb_test_random(state);
    const float value = (float)(int32_t)(bits >> 40) * 0x1p-23f - 1.0f;
    input[i] = bits % 4 == 0 || i / 32 % 11 == 3 ? 0.0f : bits % 16 == 1 ? value * 30.0f : value;
  }
  for (uint32_t t = 0; t < MAX_TOKENS; ++t) {
    clb_ops_choose()->encode(input + (size_t)t * cols, cols, codes + t * clb_code_row_bytes(cols));
    for (uint32_t c = 0; c < cols; ++c) {
      const size_t at = (size_t)t * cols + c;
      if (module->reads_codes == 0) {
        rounded[at] = (double)input[at];
        steps[at] = 0;
      } else if (c % CLB_CODE_BLOCK == 0) {
        const uint32_t left = cols - c;
        round_block(input + at, left < CLB_CODE_BLOCK ? left : CLB_CODE_BLOCK, rounded + at, steps + at);
      } else {
        /* done with its block */
      }
    }
  }
}

/* sum: over the rounded inputs; size: of magnitudes; slack: what rounding may change. */
static void dot(const matrix* m, uint32_t row, uint32_t token, double* sum, double* size, double* exact,
                double* slack) {
  const uint32_t cols = m->section.cols;
  *sum = *size = *exact = *slack = 0;
  for (uint32_t c = 0; c < cols; ++c) {
    const double w = m->wide[(size_t)row * cols + c];
    const size_t at = (size_t)token * cols + c;
    *sum += w * rounded[at];
    *size += fabs(w * rounded[at]);
    *exact += w * (double)input[at];
    *slack += fabs(w) * steps[at] * 0.501;
  }
}

/* Rows, columns that the format allows, and a row range: from a tile's border to another one or to the last row. */
static void pick_shape(uint64_t* state, const format* kind, uint32_t round, uint32_t* rows, uint32_t* cols,
                       uint32_t* begin, uint32_t* end) {
  *rows = pick(state, round % 3 == 0 ? MAX_ROWS : 60);
  *cols = kind->precision == CLB_INT4 ? kind->group_cols * pick(state, round % 2 == 0 ? 3 : MAX_COLS / kind->group_cols)
                                      : pick(state, round % 2 == 0 ? 70 : MAX_COLS);
  if (kind->precision == CLB_INT8 && kind->group_cols != 0) {
    *cols = *cols + kind->group_cols > MAX_COLS ? MAX_COLS : *cols + kind->group_cols;
  }
  const uint32_t tiles = (*rows + TILE - 1) / TILE;
  const uint32_t first = pick(state, tiles) - 1;
  const uint32_t last = first + pick(state, tiles - first);
  *begin = first * TILE;
  *end = last * TILE < *rows ? last * TILE : *rows;
}

static void complain(const clb_module* module, const format* kind, double actual, double expected, uint32_t cols,
                     uint32_t tokens, uint32_t token, uint32_t row) {
  (void)fprintf(stderr, "%s groups %u x %u zeros %u: %.9g, expected %.9g; cols %u tokens %u token %u row %u\n",
                module->name, kind->group_rows, kind->group_cols, kind->zeros, actual, expected, cols, tokens, token,
                row);
  CHECK(0);
}

/* --------------------------------------------------------------- linear */

static void check_linear(const clb_module* module, const format* kind, const clb_linear_args* args) {
  for (uint32_t t = 0; t < args->tokens; ++t) {
    const uint32_t from = args->inputs == NULL ? t : args->inputs[t];
    const uint32_t to = args->outputs == NULL ? t : args->outputs[t];
    for (uint32_t r = 0; r < args->output_stride; ++r) {
      const double actual = (double)output[to * args->output_stride + r];
      if (r < args->row_begin || r >= args->row_end) {
        CHECK(actual == 12345.0); /* outside the row range nothing is written */
        continue;
      }
      double sum;
      double size;
      double exact;
      double slack;
      dot(&matrices[0], r, from, &sum, &size, &exact, &slack);
      const double b = args->bias == NULL ? 0.0 : (double)args->bias[r];
      const double error = 2e-6 * (size + fabs(b)) + 1e-6;
      if (!(fabs(actual - (sum + b)) <= error) || !(fabs(actual - (exact + b)) <= slack + error)) {
        complain(module, kind, actual, sum + b, args->cols, args->tokens, t, r);
      }
    }
  }
}

static void linear_cases(const clb_module* module, const format* kind) {
  uint64_t state = 1;
  for (uint32_t i = 0; i < 24; ++i) {
    uint32_t rows;
    uint32_t cols;
    clb_linear_args args = {.bias = i / 2 % 2 == 0 ? bias : NULL,
                            .input = input,
                            .codes = codes,
                            .output = output,
                            .inputs = i / 4 % 2 == 0 ? inputs : NULL,
                            .outputs = i / 8 % 2 == 0 ? outputs : NULL,
                            .tokens = pick(&state, i % 3 == 0 ? 4 : MAX_TOKENS)};
    pick_shape(&state, kind, i, &rows, &cols, &args.row_begin, &args.row_end);
    fill_matrix(&state, kind, 0, rows, cols);
    fill_input(&state, module, cols);
    for (uint32_t t = 0; t < args.tokens; ++t) { /* inputs may repeat, outputs are every second row from the end */
      inputs[t] = pick(&state, MAX_TOKENS) - 1;
      outputs[t] = 2 * (args.tokens - 1 - t) + 1;
    }
    for (uint32_t r = 0; r < rows; ++r) {
      bias[r] = (float)r * 0.25f - 3.0f;
    }
    args.weights = matrices[0].operand;
    args.cols = cols;
    args.input_stride = cols;
    args.output_stride = rows + 3u;
    for (size_t j = 0; j < 2 * (size_t)args.tokens * args.output_stride; ++j) {
      output[j] = 12345.0f;
    }
    module->linear(&args);
    check_linear(module, kind, &args);
  }
}

/* linear equals the double-precision product with the rounded inputs, and is near that with the inputs themselves. */
static void linear_is_a_matrix_product(void) { for_each_module(linear_cases); }

/* -------------------------------------------------------------- gate_up */

static void check_gate_up(const clb_module* module, const format* kind, const clb_gated_linear_args* args) {
  for (uint32_t t = 0; t < args->tokens; ++t) {
    const uint32_t from = args->inputs == NULL ? t : args->inputs[t];
    for (uint32_t r = args->row_begin; r < args->row_end; ++r) {
      double gate;
      double up;
      double gate_size;
      double up_size;
      double unused[2];
      dot(&matrices[0], r, from, &gate, &gate_size, &unused[0], &unused[1]);
      dot(&matrices[1], r, from, &up, &up_size, &unused[0], &unused[1]);
      const double wanted = gate / (1.0 + exp(-gate)) * up;
      const double actual = (double)output[t * args->output_stride + r];
      if (!(fabs(actual - wanted) <= 3e-6 * (gate_size * (fabs(up) + up_size) + 1.0))) {
        complain(module, kind, actual, wanted, args->cols, args->tokens, t, r);
      }
    }
  }
}

static void gate_up_cases(const clb_module* module, const format* kind) {
  uint64_t state = 3;
  for (uint32_t i = 0; i < 12; ++i) {
    uint32_t rows;
    uint32_t cols;
    clb_gated_linear_args args = {.input = input,
                                  .codes = codes,
                                  .output = output,
                                  .inputs = i / 2 % 2 == 0 ? inputs : NULL,
                                  .tokens = pick(&state, i % 3 == 0 ? 4 : MAX_TOKENS)};
    pick_shape(&state, kind, i, &rows, &cols, &args.row_begin, &args.row_end);
    fill_matrix(&state, kind, 0, rows, cols);
    fill_matrix(&state, kind, 1, rows, cols);
    fill_input(&state, module, cols);
    for (uint32_t t = 0; t < args.tokens; ++t) {
      inputs[t] = pick(&state, MAX_TOKENS) - 1;
    }
    args.gate = matrices[0].operand;
    args.up = matrices[1].operand;
    args.cols = cols;
    args.input_stride = cols;
    args.output_stride = rows + 2u;
    module->gate_up(&args);
    check_gate_up(module, kind, &args);
  }
}

/* gate_up equals silu(gate x) * (up x) of the rounded inputs in double precision. */
static void gate_up_is_a_gated_product(void) { for_each_module(gate_up_cases); }

/* -------------------------------------------------------------- company */

static void company(const clb_module* module, const format* kind) {
  const uint32_t cols = kind->group_cols == 32 ? 480 : 512;
  const uint32_t rows = 149;
  uint64_t state = 4;
  fill_matrix(&state, kind, 0, rows, cols);
  fill_matrix(&state, kind, 1, rows, cols);
  fill_input(&state, module, cols);
  for (uint32_t t = 0; t < MAX_TOKENS; ++t) {
    inputs[t] = (t * 29 + 7) % MAX_TOKENS;
  }
  clb_gated_linear_args gated = {.gate = matrices[0].operand,
                                 .up = matrices[1].operand,
                                 .input = input,
                                 .codes = codes,
                                 .output = output,
                                 .input_stride = cols,
                                 .output_stride = rows,
                                 .tokens = MAX_TOKENS,
                                 .cols = cols,
                                 .row_end = rows};
  clb_linear_args args = {.weights = matrices[0].operand,
                          .input = input,
                          .codes = codes,
                          .input_stride = cols,
                          .output_stride = rows,
                          .cols = cols};
  for (uint32_t both = 0; both < 2; ++both) {
    gated.output = output;
    gated.inputs = NULL;
    gated.tokens = MAX_TOKENS;
    args.output = output;
    args.inputs = NULL;
    args.tokens = MAX_TOKENS;
    args.row_begin = gated.row_begin = 0;
    args.row_end = gated.row_end = rows;
    if (both == 0) {
      module->linear(&args);
    } else {
      module->gate_up(&gated);
    }
    args.output = gated.output = again;
    args.inputs = gated.inputs = inputs;
    for (uint32_t tokens = 1; tokens <= MAX_TOKENS; tokens += tokens < 15 ? 1 : 12) {
      args.tokens = gated.tokens = tokens;
      args.row_begin = gated.row_begin = tokens * TILE % 144;
      const uint32_t last = args.row_begin + 16 * (1 + tokens % 9);
      args.row_end = gated.row_end = last < rows ? last : rows;
      if (both == 0) {
        module->linear(&args);
      } else {
        module->gate_up(&gated);
      }
      for (uint32_t t = 0; t < tokens; ++t) {
        for (uint32_t row = args.row_begin; row < args.row_end; ++row) {
          CHECK(again[t * rows + row] == output[inputs[t] * rows + row]);
        }
      }
    }
  }
}

/* An output has the same bits for any number of tokens around it, any place in a list and any row range. */
static void company_changes_no_bit(void) { for_each_module(company); }

static void row_case(const clb_module* module, const format* kind) {
  uint64_t state = 5;
  const uint32_t cols = kind->precision == CLB_INT4 ? 256 : 250;
  fill_matrix(&state, kind, 0, 150, cols);
  for (uint32_t row = 0; row < 150; ++row) {
    module->row(&matrices[0].operand, row, cols, output);
    for (uint32_t c = 0; c < cols; ++c) { /* fp8 is rounded once, the others not at all */
      CHECK(output[c] == (float)matrices[0].wide[(size_t)row * cols + c]);
    }
  }
}

/* row dequantises one row exactly. */
static void row_is_dequantised(void) { for_each_module(row_case); }

static void not_finite(const clb_module* module, const format* kind) {
  static const float bad[] = {NAN, INFINITY, -INFINITY};
  uint64_t state = 6;
  const uint32_t cols = 256;
  fill_matrix(&state, kind, 0, 20, cols);
  for (uint32_t b = 0; b < 3; ++b) {
    fill_input(&state, module, cols);
    input[cols + 77] = bad[b];
    clb_ops_choose()->encode(input + cols, cols, codes + clb_code_row_bytes(cols));
    const clb_linear_args args = {.weights = matrices[0].operand,
                                  .input = input,
                                  .codes = codes,
                                  .output = output,
                                  .input_stride = cols,
                                  .output_stride = 20,
                                  .tokens = 3,
                                  .cols = cols,
                                  .row_end = 20};
    module->linear(&args);
    for (uint32_t r = 0; r < 20; ++r) {
      CHECK(isfinite(output[r]) && isfinite(output[40 + r]));
      CHECK(!isfinite(output[20 + r]) || (module->reads_codes == 0 && matrices[0].wide[r * cols + 77] == 0.0));
    }
  }
}

/* A NaN or an infinity among a token's inputs shows in all of its outputs, and in no other token's. */
static void what_is_not_finite_shows(void) { for_each_module(not_finite); }

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(linear_is_a_matrix_product), TEST(gate_up_is_a_gated_product),
                                   TEST(company_changes_no_bit), TEST(row_is_dequantised),
                                   TEST(what_is_not_finite_shows)};
  const int result = clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
  for (uint32_t i = 0; i < ISAS * FORMATS; ++i) {
    if (handles[i / FORMATS][i % FORMATS] != NULL) {
      (void)dlclose(handles[i / FORMATS][i % FORMATS]);
    }
  }
  return result;
}
