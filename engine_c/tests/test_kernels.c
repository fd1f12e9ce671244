/*
 * test_kernels.c: each kernel module against double precision, on biased random input: many zeros, a few large values,
 * odd shapes. A mismatch prints every parameter. Then: the same bits whatever the company and the row range.
 */
#include <dlfcn.h>

#include "colibri.h"
#include "number.h"
#include "test.h"

enum { MAX_COLS = 1100, MAX_ROWS = 70, MAX_TOKENS = 70 };

static const char* const precisions[] = {"fp32", "fp16", "bf16"};
static void* handles[3]; /* of the modules; closed by main */
static _Alignas(64) unsigned char weights[3][4 * MAX_ROWS * MAX_COLS];
static double wide[3][MAX_ROWS * MAX_COLS]; /* the same weights */
static float input[MAX_TOKENS * MAX_COLS];
static float output[MAX_TOKENS * 4 * MAX_COLS];
static float again[MAX_TOKENS * 4 * MAX_COLS];
static float activation[MAX_TOKENS * MAX_ROWS];
static float bias[MAX_ROWS];

static const clb_module* module_of(uint32_t precision) {
  char path[512];
  const char* const folder = getenv("CLB_MODULE_DIR");
  (void)snprintf(path, sizeof path, "%s/clb_cpu_generic_%s.so", folder == NULL ? "." : folder, precisions[precision]);
  if (handles[precision] == NULL) {
    handles[precision] = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  }
  CHECK(handles[precision] != NULL);
  clb_module_entry_fn entry = NULL;
  void* const symbol = dlsym(handles[precision], CLB_MODULE_ENTRY);
  memcpy(&entry, &symbol, sizeof entry);
  CHECK(entry != NULL);
  const clb_module* const module = entry();
  CHECK_EQ(module->precision, precision);
  CHECK_EQ(module->abi_version, CLB_ABI_VERSION);
  CHECK_EQ(module->supported(), 1);
  return module;
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

static void fill_weights(uint64_t* state, uint32_t precision, uint32_t matrix, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float value = biased(state) * 0.1f;
    if (precision == CLB_FP32) {
      ((float*)(void*)weights[matrix])[i] = value;
      wide[matrix][i] = (double)value;
    } else if (precision == CLB_FP16) {
      const uint16_t half = clb_half_of_float(value);
      ((uint16_t*)(void*)weights[matrix])[i] = half;
      wide[matrix][i] = (double)clb_float_of_half(half);
    } else {
      const uint16_t top = (uint16_t)(clb_bits_of_float(value) >> 16);
      ((uint16_t*)(void*)weights[matrix])[i] = top;
      wide[matrix][i] = (double)clb_float_of_bf16(top);
    }
  }
}

static void fill_floats(uint64_t* state, float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    values[i] = biased(state);
  }
}

static uint32_t pick(uint64_t* state, uint32_t most) { return 1 + (uint32_t)(clb_test_random(state) % most); }

/* sum and the sum of magnitudes, which bounds the rounding error */
static void dot_reference(const double* w, const float* x, size_t count, double* sum, double* size) {
  *sum = 0;
  *size = 0;
  for (size_t c = 0; c < count; ++c) {
    *sum += w[c] * (double)x[c];
    *size += fabs(w[c] * (double)x[c]);
  }
}

static void check_value(double actual, double wanted, double size, const char* what, const clb_linear_args* args,
                        uint32_t token, uint32_t row) {
  if (!(fabs(actual - wanted) <= 1e-6 * size + 1e-6)) {
    (void)fprintf(stderr, "%s: %.9g, expected %.9g; tokens %u cols %u rows %u..%u strides %llu %llu token %u row %u\n",
                  what, actual, wanted, args->tokens, args->cols, args->row_begin, args->row_end,
                  (unsigned long long)args->input_stride, (unsigned long long)args->output_stride, token, row);
    CHECK(0);
  }
}

static void linear_case(const clb_module* module, uint64_t* state) {
  const uint32_t cols = pick(state, clb_test_random(state) % 2 == 0 ? 40 : MAX_COLS);
  const uint32_t rows = pick(state, MAX_ROWS);
  const uint32_t begin = pick(state, rows) - 1;
  const clb_linear_args args = {.weights = weights[0],
                                .bias = clb_test_random(state) % 2 == 0 ? bias : NULL,
                                .input = input,
                                .output = output,
                                .input_stride = cols,
                                .output_stride = rows + 3u,
                                .tokens = pick(state, MAX_TOKENS),
                                .cols = cols,
                                .row_begin = begin,
                                .row_end = begin + pick(state, rows - begin)};
  fill_weights(state, module->precision, 0, (size_t)rows * cols);
  fill_floats(state, input, (size_t)args.tokens * cols);
  fill_floats(state, bias, rows);
  for (size_t i = 0; i < (size_t)args.tokens * args.output_stride; ++i) {
    output[i] = 12345.0f;
  }
  module->linear(&args);
  for (uint32_t i = 0; i < args.tokens; ++i) {
    for (uint32_t r = 0; r < args.output_stride; ++r) {
      double sum = 12345.0; /* outside the row range nothing is written */
      double size = 0;
      if (r >= args.row_begin && r < args.row_end) {
        dot_reference(wide[0] + (size_t)r * cols, input + (size_t)i * cols, cols, &sum, &size);
        sum += args.bias == NULL ? 0.0 : (double)bias[r];
      }
      check_value((double)output[i * args.output_stride + r], sum, size, module->name, &args, i, r);
    }
  }
}

/* linear equals the double-precision product for odd shapes, strides, row ranges, with and without bias. */
static void linear_is_a_matrix_product(void) {
  uint64_t state = 1;
  for (uint32_t precision = 0; precision < 3; ++precision) {
    const clb_module* const module = module_of(precision);
    for (uint32_t i = 0; i < 40; ++i) {
      linear_case(module, &state);
    }
  }
}

/* One output of linear has the same bits for any number of tokens around it and any row range. */
static void linear_ignores_company(void) {
  const uint32_t cols = 1037;
  const uint32_t rows = 13;
  uint64_t state = 2;
  for (uint32_t precision = 0; precision < 3; ++precision) {
    const clb_module* const module = module_of(precision);
    fill_weights(&state, precision, 0, (size_t)rows * cols);
    fill_floats(&state, input, (size_t)MAX_TOKENS * cols);
    clb_linear_args args = {.weights = weights[0],
                            .input = input,
                            .output = output,
                            .input_stride = cols,
                            .output_stride = rows,
                            .tokens = MAX_TOKENS,
                            .cols = cols,
                            .row_end = rows};
    module->linear(&args);
    for (uint32_t tokens = 1; tokens < 40; tokens += 3) {
      for (uint32_t row = 0; row < rows; row += 5) {
        args.input = input + (size_t)7 * cols;
        args.output = again;
        args.tokens = tokens;
        args.row_begin = row;
        args.row_end = row + 1;
        module->linear(&args);
        for (uint32_t i = 0; i < tokens; ++i) {
          CHECK(again[i * rows + row] == output[(7 + i) * rows + row]);
        }
      }
    }
  }
}

typedef struct expert_shape {
  uint32_t hidden;
  uint32_t width;
  uint32_t count;
} expert_shape;

static clb_expert_args expert_args(const expert_shape* shape, const uint32_t* tokens, const uint32_t* places,
                                   float* result) {
  return (clb_expert_args){.gate = weights[0],
                           .up = weights[1],
                           .down = weights[2],
                           .input = input,
                           .tokens = tokens,
                           .places = places,
                           .activation = activation,
                           .output = result,
                           .input_stride = shape->hidden,
                           .output_stride = shape->hidden,
                           .count = shape->count,
                           .hidden = shape->hidden,
                           .width = shape->width};
}

static void check_expert(const clb_module* module, const expert_shape* shape, uint32_t token, const float* actual) {
  const float* const x = input + (size_t)token * shape->hidden;
  static double act[MAX_ROWS];
  double act_size = 0;
  for (uint32_t w = 0; w < shape->width; ++w) {
    double gate = 0;
    double up = 0;
    double size = 0;
    dot_reference(wide[0] + (size_t)w * shape->hidden, x, shape->hidden, &gate, &size);
    dot_reference(wide[1] + (size_t)w * shape->hidden, x, shape->hidden, &up, &size);
    act[w] = gate / (1.0 + exp(-gate)) * up;
    act_size = fmax(act_size, (fabs(gate) + size) * (fabs(up) + size));
  }
  for (uint32_t c = 0; c < shape->hidden; ++c) {
    double sum = 0;
    double size = 0;
    for (uint32_t w = 0; w < shape->width; ++w) {
      sum += act[w] * wide[2][(size_t)w * shape->hidden + c];
      size += fabs(act[w] * wide[2][(size_t)w * shape->hidden + c]);
    }
    if (!(fabs((double)actual[c] - sum) <= 2e-6 * (size + act_size) + 1e-6)) {
      (void)fprintf(stderr, "%s: %.9g, expected %.9g; count %u hidden %u width %u token %u column %u\n", module->name,
                    (double)actual[c], sum, shape->count, shape->hidden, shape->width, token, c);
      CHECK(0);
    }
  }
}

/* expert equals down(silu(gate x) * up x) in double precision and writes each result to its own place only. */
static void expert_is_a_gated_ffn(void) {
  uint64_t state = 3;
  for (uint32_t precision = 0; precision < 3; ++precision) {
    const clb_module* const module = module_of(precision);
    for (uint32_t i = 0; i < 25; ++i) {
      const expert_shape shape = {pick(&state, 600), pick(&state, MAX_ROWS), pick(&state, 34)};
      uint32_t tokens[34];
      uint32_t places[34];
      for (uint32_t m = 0; m < 3; ++m) {
        fill_weights(&state, precision, m, (size_t)shape.hidden * shape.width);
      }
      fill_floats(&state, input, (size_t)MAX_TOKENS * shape.hidden);
      for (uint32_t t = 0; t < shape.count; ++t) {
        tokens[t] = pick(&state, MAX_TOKENS) - 1;
        places[t] = 2 * (shape.count - 1 - t) + 1;
      }
      for (size_t c = 0; c < (size_t)2 * shape.count * shape.hidden; ++c) {
        output[c] = -777.0f;
      }
      const clb_expert_args args = expert_args(&shape, tokens, places, output);
      module->expert(&args);
      for (uint32_t t = 0; t < shape.count; ++t) {
        check_expert(module, &shape, tokens[t], output + (size_t)places[t] * shape.hidden);
        CHECK(output[(size_t)(places[t] - 1) * shape.hidden] == -777.0f);
      }
    }
  }
}

/* One token's expert result has the same bits alone and in a bucket of any size. */
static void expert_ignores_company(void) {
  const expert_shape full = {517, 67, 37};
  uint64_t state = 4;
  uint32_t identity[37];
  for (uint32_t i = 0; i < 37; ++i) {
    identity[i] = i;
  }
  for (uint32_t precision = 0; precision < 3; ++precision) {
    const clb_module* const module = module_of(precision);
    for (uint32_t m = 0; m < 3; ++m) {
      fill_weights(&state, precision, m, (size_t)full.hidden * full.width);
    }
    fill_floats(&state, input, (size_t)MAX_TOKENS * full.hidden);
    const clb_expert_args all = expert_args(&full, identity, identity, output);
    module->expert(&all);
    for (uint32_t count = 1; count <= 9; ++count) {
      const expert_shape part = {full.hidden, full.width, count};
      const clb_expert_args args = expert_args(&part, identity + 11, identity, again);
      module->expert(&args);
      CHECK(memcmp(again, output + (size_t)11 * full.hidden, (size_t)count * full.hidden * sizeof(float)) == 0);
    }
  }
}

/* row widens one row of weights exactly. */
static void row_is_widened_exactly(void) {
  uint64_t state = 5;
  for (uint32_t precision = 0; precision < 3; ++precision) {
    const clb_module* const module = module_of(precision);
    fill_weights(&state, precision, 0, 5 * 33);
    module->row(weights[0], 3, 33, output);
    for (uint32_t c = 0; c < 33; ++c) {
      CHECK((double)output[c] == wide[0][3 * 33 + c]);
    }
  }
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(linear_is_a_matrix_product), TEST(linear_ignores_company),
                                   TEST(expert_is_a_gated_ffn), TEST(expert_ignores_company),
                                   TEST(row_is_widened_exactly)};
  const int result = clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
  for (uint32_t i = 0; i < 3; ++i) {
    if (handles[i] != NULL) {
      (void)dlclose(handles[i]);
    }
  }
  return result;
}
