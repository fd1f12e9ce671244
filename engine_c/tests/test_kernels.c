/*
 * test_kernels.c: each kernel module that this machine can run, against double precision, on biased random input: many
 * zeros, a few large values, odd shapes. A mismatch prints every parameter. Then: the same bits whatever the company,
 * the lists and the row range; and nearly the same numbers in all modules of one precision.
 */
#include <dlfcn.h>

#include "colibri.h"
#include "number.h"
#include "test.h"

enum { MAX_COLS = 1100, MAX_ROWS = 150, MAX_TOKENS = 70, TILE = CLB_TILE_ROWS, ISAS = 3 };

static const char* const isas[ISAS] = {"generic", "avx2", "avx512"};
static const char* const precisions[] = {"fp32", "fp16", "bf16"};
static void* handles[ISAS][3]; /* of the modules; closed by main */
static _Alignas(64) unsigned char weights[2][4 * (MAX_ROWS + TILE) * MAX_COLS];
static double wide[2][MAX_ROWS * MAX_COLS]; /* the same weights, row by row */
static float input[MAX_TOKENS * MAX_COLS];
static float output[2 * MAX_TOKENS * (MAX_ROWS + 3)];
static float again[2 * MAX_TOKENS * (MAX_ROWS + 3)];
static float bias[MAX_ROWS];
static uint32_t inputs[MAX_TOKENS];
static uint32_t outputs[MAX_TOKENS];

/* NULL: this machine cannot run it. */
static const clb_module* module_of(uint32_t isa, uint32_t precision) {
  char path[512];
  const char* const folder = getenv("CLB_MODULE_DIR");
  (void)snprintf(path, sizeof path, "%s/clb_cpu_%s_%s.so", folder == NULL ? "." : folder, isas[isa],
                 precisions[precision]);
  if (handles[isa][precision] == NULL) {
    handles[isa][precision] = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  }
  CHECK(handles[isa][precision] != NULL);
  clb_module_entry_fn entry = NULL;
  void* const symbol = dlsym(handles[isa][precision], CLB_MODULE_ENTRY);
  memcpy(&entry, &symbol, sizeof entry);
  CHECK(entry != NULL);
  const clb_module* const module = entry();
  CHECK_EQ(module->precision, precision);
  CHECK_EQ(module->layout, CLB_LAYOUT_ROWS16);
  CHECK_EQ(module->abi_version, CLB_ABI_VERSION);
  CHECK_EQ(module->rank, 10 * isa);
  CHECK(isa != 0 || module->supported() == 1);
  return module->supported() == 1 ? module : NULL;
}

static void for_each_module(void (*check)(const clb_module* module)) {
  for (uint32_t isa = 0; isa < ISAS; ++isa) {
    for (uint32_t precision = 0; precision < 3; ++precision) {
      const clb_module* const module = module_of(isa, precision);
      if (module != NULL) {
        check(module);
      }
    }
  }
}

/* Zero one time in four, large one time in sixteen. */
static float biased(uint64_t* state) {
  const uint64_t bits = clb_test_random(state);
  const float value = (float)(int32_t)(bits >> 40) * 0x1p-23f - 1.0f;
  if (bits % 4 == 0) {
    return 0.0f;
  }
  return bits % 16 == 1 ? value * 30.0f : value;
}

/* A (rows, cols) matrix in rows16; what pads the last tile is garbage that must not show. */
static void fill_weights(uint64_t* state, uint32_t precision, uint32_t matrix, uint32_t rows, uint32_t cols) {
  for (uint32_t row = 0; row < rows || row % TILE != 0; ++row) {
    for (uint32_t col = 0; col < cols; ++col) {
      const size_t at = ((size_t)(row / TILE) * cols + col) * TILE + row % TILE;
      const float value = biased(state) * 0.1f;
      double exact = (double)value;
      if (precision == CLB_FP32) {
        ((float*)(void*)weights[matrix])[at] = value;
      } else if (precision == CLB_FP16) {
        const uint16_t half = clb_half_of_float(value);
        ((uint16_t*)(void*)weights[matrix])[at] = half;
        exact = (double)clb_float_of_half(half);
      } else {
        const uint16_t top = (uint16_t)(clb_bits_of_float(value) >> 16);
        ((uint16_t*)(void*)weights[matrix])[at] = top;
        exact = (double)clb_float_of_bf16(top);
      }
      if (row < rows) {
        wide[matrix][(size_t)row * cols + col] = exact;
      }
    }
  }
}

static void fill_floats(uint64_t* state, float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    values[i] = biased(state);
  }
}

static uint32_t pick(uint64_t* state, uint32_t most) { return 1 + (uint32_t)(clb_test_random(state) % most); }

/* A random row range: from a tile's border to another one, or to the last row. */
static void pick_range(uint64_t* state, uint32_t rows, uint32_t* begin, uint32_t* end) {
  const uint32_t tiles = (rows + TILE - 1) / TILE;
  const uint32_t first = pick(state, tiles) - 1;
  const uint32_t last = first + pick(state, tiles - first);
  *begin = first * TILE;
  *end = last * TILE < rows ? last * TILE : rows;
}

/* sum and the sum of magnitudes, which bounds the rounding error */
static void dot_reference(const double* w, const float* x, size_t count, double* sum, double* size) {
  *sum = 0;
  *size = 0;
  for (size_t c = 0; c < count; ++c) {
    *sum += w[c] * (double)x[c];
    *size += fabs(w[c] * (double)x[c]);
  }
}

/* Any lists: inputs may repeat, outputs are every second row from the end. */
static void pick_lists(uint64_t* state, uint32_t tokens) {
  for (uint32_t t = 0; t < tokens; ++t) {
    inputs[t] = pick(state, MAX_TOKENS) - 1;
    outputs[t] = 2 * (tokens - 1 - t) + 1;
  }
}

static void check_linear(const clb_module* module, const clb_linear_args* args, const float* result) {
  for (uint32_t t = 0; t < args->tokens; ++t) {
    const uint32_t from = args->inputs == NULL ? t : args->inputs[t];
    const uint32_t to = args->outputs == NULL ? t : args->outputs[t];
    for (uint32_t r = 0; r < args->output_stride; ++r) {
      double sum = 12345.0; /* outside the row range nothing is written */
      double size = 0;
      if (r >= args->row_begin && r < args->row_end) {
        dot_reference(wide[0] + (size_t)r * args->cols, args->input + from * args->input_stride, args->cols, &sum,
                      &size);
        sum += args->bias == NULL ? 0.0 : (double)args->bias[r];
      }
      const double actual = (double)result[to * args->output_stride + r];
      if (!(fabs(actual - sum) <= 1e-6 * size + 1e-6)) {
        (void)fprintf(stderr,
                      "%s: %.9g, expected %.9g; tokens %u cols %u rows %u..%u strides %llu %llu lists %d %d "
                      "token %u row %u\n",
                      module->name, actual, sum, args->tokens, args->cols, args->row_begin, args->row_end,
                      (unsigned long long)args->input_stride, (unsigned long long)args->output_stride,
                      args->inputs != NULL, args->outputs != NULL, t, r);
        CHECK(0);
      }
    }
  }
}

static void linear_cases(const clb_module* module) {
  uint64_t state = 1;
  for (uint32_t i = 0; i < 40; ++i) {
    const uint32_t cols = pick(&state, i % 2 == 0 ? 40 : MAX_COLS);
    const uint32_t rows = pick(&state, MAX_ROWS);
    clb_linear_args args = {.weights = {.values = weights[0]},
                            .bias = i / 2 % 2 == 0 ? bias : NULL,
                            .input = input,
                            .output = output,
                            .inputs = i / 4 % 2 == 0 ? inputs : NULL,
                            .outputs = i / 8 % 2 == 0 ? outputs : NULL,
                            .input_stride = cols,
                            .output_stride = rows + 3u,
                            .tokens = pick(&state, i % 3 == 0 ? 4 : MAX_TOKENS),
                            .cols = cols};
    pick_range(&state, rows, &args.row_begin, &args.row_end);
    pick_lists(&state, args.tokens);
    fill_weights(&state, module->precision, 0, rows, cols);
    fill_floats(&state, input, (size_t)MAX_TOKENS * cols);
    fill_floats(&state, bias, rows);
    for (size_t j = 0; j < 2 * (size_t)args.tokens * args.output_stride; ++j) {
      output[j] = 12345.0f;
    }
    module->linear(&args);
    check_linear(module, &args, output);
    for (uint32_t t = 0; args.outputs != NULL && t < args.tokens; ++t) {
      CHECK(output[2 * t * args.output_stride] == 12345.0f); /* in no list */
    }
  }
}

/* linear equals the double-precision product for odd shapes, strides, row ranges and lists, with and without bias. */
static void linear_is_a_matrix_product(void) { for_each_module(linear_cases); }

static void linear_company(const clb_module* module) {
  const uint32_t cols = 1037;
  const uint32_t rows = 149;
  uint64_t state = 2;
  fill_weights(&state, module->precision, 0, rows, cols);
  fill_floats(&state, input, (size_t)MAX_TOKENS * cols);
  for (uint32_t t = 0; t < MAX_TOKENS; ++t) {
    inputs[t] = (t * 29 + 7) % MAX_TOKENS;
  }
  clb_linear_args args = {.weights = {.values = weights[0]},
                          .input = input,
                          .output = output,
                          .input_stride = cols,
                          .output_stride = rows,
                          .tokens = MAX_TOKENS,
                          .cols = cols,
                          .row_end = rows};
  module->linear(&args);
  args.inputs = inputs;
  args.output = again;
  for (uint32_t tokens = 1; tokens <= MAX_TOKENS; tokens += tokens < 30 ? 1 : 13) {
    args.tokens = tokens;
    args.row_begin = tokens * TILE % 144;
    args.row_end = args.row_begin + 16 * (1 + tokens % 9);
    args.row_end = args.row_end < rows ? args.row_end : rows;
    module->linear(&args);
    for (uint32_t t = 0; t < tokens; ++t) {
      for (uint32_t row = args.row_begin; row < args.row_end; ++row) {
        CHECK(again[t * rows + row] == output[inputs[t] * rows + row]);
      }
    }
  }
}

/* One output of linear has the same bits for any number of tokens around it, any place in a list and any row range. */
static void linear_ignores_company(void) { for_each_module(linear_company); }

static void check_gate_up(const clb_module* module, const clb_gated_linear_args* args) {
  for (uint32_t t = 0; t < args->tokens; ++t) {
    const uint32_t from = args->inputs == NULL ? t : args->inputs[t];
    const float* const x = input + from * args->input_stride;
    for (uint32_t r = 0; r < args->output_stride; ++r) {
      double wanted = 12345.0;
      double bound = 0;
      if (r >= args->row_begin && r < args->row_end) {
        double gate;
        double up;
        double gate_size;
        double up_size;
        dot_reference(wide[0] + (size_t)r * args->cols, x, args->cols, &gate, &gate_size);
        dot_reference(wide[1] + (size_t)r * args->cols, x, args->cols, &up, &up_size);
        wanted = gate / (1.0 + exp(-gate)) * up;
        bound = 2e-6 * (gate_size * (fabs(up) + up_size) + 1.0);
      }
      const double actual = (double)output[t * args->output_stride + r];
      if (!(fabs(actual - wanted) <= bound)) {
        (void)fprintf(stderr, "%s: %.9g, expected %.9g; tokens %u cols %u rows %u..%u lists %d token %u row %u\n",
                      module->name, actual, wanted, args->tokens, args->cols, args->row_begin, args->row_end,
                      args->inputs != NULL, t, r);
        CHECK(0);
      }
    }
  }
}

static void gate_up_cases(const clb_module* module) {
  uint64_t state = 3;
  for (uint32_t i = 0; i < 25; ++i) {
    const uint32_t cols = pick(&state, i % 2 == 0 ? 40 : 600);
    const uint32_t rows = pick(&state, MAX_ROWS);
    clb_gated_linear_args args = {.gate = {.values = weights[0]},
                                  .up = {.values = weights[1]},
                                  .input = input,
                                  .output = output,
                                  .inputs = i / 2 % 2 == 0 ? inputs : NULL,
                                  .input_stride = cols,
                                  .output_stride = rows + 2u,
                                  .tokens = pick(&state, i % 3 == 0 ? 4 : MAX_TOKENS),
                                  .cols = cols};
    pick_range(&state, rows, &args.row_begin, &args.row_end);
    pick_lists(&state, args.tokens);
    fill_weights(&state, module->precision, 0, rows, cols);
    fill_weights(&state, module->precision, 1, rows, cols);
    fill_floats(&state, input, (size_t)MAX_TOKENS * cols);
    for (size_t j = 0; j < (size_t)args.tokens * args.output_stride; ++j) {
      output[j] = 12345.0f;
    }
    module->gate_up(&args);
    check_gate_up(module, &args);
  }
}

/* gate_up equals silu(gate x) * (up x) in double precision. */
static void gate_up_is_a_gated_product(void) { for_each_module(gate_up_cases); }

static void gate_up_company(const clb_module* module) {
  const uint32_t cols = 517;
  const uint32_t rows = 101;
  uint64_t state = 4;
  for (uint32_t m = 0; m < 2; ++m) {
    fill_weights(&state, module->precision, m, rows, cols);
  }
  fill_floats(&state, input, (size_t)MAX_TOKENS * cols);
  clb_gated_linear_args args = {.gate = {.values = weights[0]},
                                .up = {.values = weights[1]},
                                .input = input,
                                .output = output,
                                .input_stride = cols,
                                .output_stride = rows,
                                .tokens = MAX_TOKENS,
                                .cols = cols,
                                .row_end = rows};
  module->gate_up(&args);
  for (uint32_t tokens = 1; tokens < 40; ++tokens) {
    args.input = input + (size_t)11 * cols;
    args.output = again;
    args.tokens = tokens;
    args.row_begin = tokens * TILE % 96;
    module->gate_up(&args);
    for (uint32_t t = 0; t < tokens; ++t) {
      for (uint32_t row = args.row_begin; row < rows; ++row) {
        CHECK(again[t * rows + row] == output[(11 + t) * rows + row]);
      }
    }
  }
}

/* One output of gate_up has the same bits for any number of tokens around it and any row range. */
static void gate_up_ignores_company(void) { for_each_module(gate_up_company); }

static void row_case(const clb_module* module) {
  uint64_t state = 5;
  fill_weights(&state, module->precision, 0, 37, 33);
  for (uint32_t row = 0; row < 37; ++row) {
    const clb_operand operand = {.values = weights[0]};
    module->row(&operand, row, 33, output);
    for (uint32_t c = 0; c < 33; ++c) {
      CHECK((double)output[c] == wide[0][row * 33 + c]);
    }
  }
}

/* row widens one row of weights exactly. */
static void row_is_widened_exactly(void) { for_each_module(row_case); }

/* The generic module's results lie in `output`, another one's in `again`. */
static void check_agreement(const clb_module* module, size_t count, const char* what) {
  double largest = 0;
  for (size_t i = 0; i < count; ++i) {
    largest = fmax(largest, fabs((double)output[i]));
  }
  for (size_t i = 0; i < count; ++i) {
    if (!(fabs((double)again[i] - (double)output[i]) <= 1e-5 * largest)) {
      (void)fprintf(stderr, "%s, %s: %.9g, generic %.9g, largest %.9g\n", module->name, what, (double)again[i],
                    (double)output[i], largest);
      CHECK(0);
    }
  }
}

static void agreement(const clb_module* module) {
  const uint32_t cols = 1100;
  const uint32_t rows = 150;
  const uint32_t tokens = 13;
  const clb_module* const generic = module_of(0, module->precision);
  uint64_t state = 6;
  for (uint32_t m = 0; m < 2; ++m) {
    fill_weights(&state, module->precision, m, rows, cols);
  }
  fill_floats(&state, input, (size_t)tokens * cols);
  clb_linear_args product = {.weights = {.values = weights[0]},
                             .input = input,
                             .output = output,
                             .input_stride = cols,
                             .output_stride = rows,
                             .tokens = tokens,
                             .cols = cols,
                             .row_end = rows};
  clb_gated_linear_args gated = {.gate = {.values = weights[0]},
                                 .up = {.values = weights[1]},
                                 .input = input,
                                 .output = output,
                                 .input_stride = cols,
                                 .output_stride = rows,
                                 .tokens = tokens,
                                 .cols = cols,
                                 .row_end = rows};
  generic->linear(&product);
  product.output = again;
  module->linear(&product);
  check_agreement(module, (size_t)tokens * rows, "linear");
  generic->gate_up(&gated);
  gated.output = again;
  module->gate_up(&gated);
  check_agreement(module, (size_t)tokens * rows, "gate_up");
}

/* All modules of one precision give the same numbers within 1e-5 of the largest one. */
static void modules_agree(void) { for_each_module(agreement); }

/* gate_up of inputs that overflow exp, of zeros and of NaN: silu(-huge) is 0, silu(huge) is huge, NaN stays. */
static void extremes(const clb_module* module) {
  const float values[] = {-1e30f, -200.0f, -88.0f, 0.0f, 88.0f, 200.0f, 1e15f, NAN};
  const uint32_t count = sizeof values / sizeof values[0];
  memset(weights, 0, sizeof weights);
  for (uint32_t row = 0; row < TILE; ++row) { /* gate = up = (1), a column vector */
    for (uint32_t m = 0; m < 2; ++m) {
      if (module->precision == CLB_FP32) {
        ((float*)(void*)weights[m])[row] = 1.0f;
      } else {
        ((uint16_t*)(void*)weights[m])[row] = module->precision == CLB_FP16 ? 0x3c00 : 0x3f80;
      }
    }
  }
  memcpy(input, values, sizeof values);
  const clb_gated_linear_args args = {.gate = {.values = weights[0]},
                                      .up = {.values = weights[1]},
                                      .input = input,
                                      .output = output,
                                      .input_stride = 1,
                                      .output_stride = TILE,
                                      .tokens = count,
                                      .cols = 1,
                                      .row_end = TILE};
  module->gate_up(&args);
  for (uint32_t t = 0; t + 1 < count; ++t) {
    const double x = (double)values[t];
    const double wanted = x * (x / (1.0 + exp(-x)));
    for (uint32_t row = 0; row < TILE; ++row) {
      CHECK_NEAR(output[t * TILE + row], wanted, 1e-6 * wanted + 1e-30);
    }
  }
  for (uint32_t row = 0; row < TILE; ++row) {
    CHECK(isnan(output[(count - 1) * TILE + row]));
  }
}

/* Extreme inputs of silu neither overflow nor lose NaN. */
static void extremes_are_finite_and_nan_stays(void) { for_each_module(extremes); }

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(linear_is_a_matrix_product),       TEST(linear_ignores_company),
                                   TEST(gate_up_is_a_gated_product),       TEST(gate_up_ignores_company),
                                   TEST(row_is_widened_exactly),           TEST(modules_agree),
                                   TEST(extremes_are_finite_and_nan_stays)};
  const int result = clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
  for (uint32_t i = 0; i < ISAS * 3; ++i) {
    if (handles[i / 3][i % 3] != NULL) {
      (void)dlclose(handles[i / 3][i % 3]);
    }
  }
  return result;
}
