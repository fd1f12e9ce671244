/*
 * bench_kernels.c [MODULE [TOKENS ...]]: the kernel modules, one thread. Few tokens are a matter of bytes: GB/s, and as
 * a part of a plain read of the same memory. Many tokens are a matter of arithmetic: GFLOP/s.
 */
#define _DEFAULT_SOURCE 1
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "loader_internal.h"
#include "ops.h"

enum { COLS = 2048, ROWS = 1408, MAX_TOKENS = 64, MATRICES = 48 };

static const char* const isas[] = {"generic", "avx2", "avx512", "vnni"};
/* Each precision with groups as short as they get. */
static const struct {
  const char* name;
  const char* module;
  uint32_t group_cols;
  uint32_t zeros;
} formats[] = {{"fp32", "fp32", 0, 0},          {"fp16", "fp16", 0, 0},        {"bf16", "bf16", 0, 0},
               {"int8", "int8", COLS, 0},       {"int8-g128", "int8", 128, 0}, {"int4-g32", "int4", 32, 0},
               {"int4-g128-z", "int4", 128, 1}, {"fp8", "fp8", COLS, 0}};
static unsigned char* weights; /* MATRICES of ROWS x COLS, more than any cache holds */
static float input[MAX_TOKENS * COLS];
static float output[MAX_TOKENS * COLS];
static _Alignas(64) unsigned char codes[MAX_TOKENS * COLS * 2];
static volatile uint64_t sink;

static double thread_us(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

typedef struct work {
  const clb_module* module;
  const clb_ops* ops;
  const char* name;
  clb_section_desc section; /* of one matrix */
  uint32_t tokens;
  uint32_t matrices; /* taken in turn */
  uint32_t next;
  uint64_t bytes; /* of one matrix */
} work;

static clb_operand next_matrix(work* w) {
  const unsigned char* const values = weights + (w->next++ % w->matrices) * clb_align_up(w->bytes, 256);
  const clb_parts parts = clb_parts_of(&w->section);
  return clb_is_quantised(w->section.precision)
             ? (clb_operand){values, values + parts.scales_at, parts.zeros == 0 ? NULL : values + parts.zeros_at, 1,
                             w->section.group_cols}
             : (clb_operand){.values = values};
}

static void run_linear(void* context) {
  work* const w = context;
  const clb_linear_args args = {.weights = next_matrix(w),
                                .input = input,
                                .codes = codes,
                                .output = output,
                                .input_stride = COLS,
                                .output_stride = ROWS,
                                .tokens = w->tokens,
                                .cols = COLS,
                                .row_end = ROWS};
  w->module->linear(&args);
}

static void run_gate_up(void* context) {
  work* const w = context;
  const clb_operand gate = next_matrix(w);
  const clb_gated_linear_args args = {.gate = gate,
                                      .up = next_matrix(w),
                                      .input = input,
                                      .codes = codes,
                                      .output = output,
                                      .input_stride = COLS,
                                      .output_stride = ROWS,
                                      .tokens = w->tokens,
                                      .cols = COLS,
                                      .row_end = ROWS};
  w->module->gate_up(&args);
}

static void run_encode(void* context) {
  const work* const w = context;
  const clb_ops* const ops = w->ops;
  for (uint32_t t = 0; t < w->tokens; ++t) {
    ops->encode(input + (size_t)t * COLS, COLS, codes + t * clb_code_row_bytes(COLS));
  }
}

/* The same bytes, two streams, added up. */
static void run_read(void* context) {
  work* const w = context;
  const size_t count = (size_t)w->bytes / 16;
  const uint64_t* const a = (const uint64_t*)(const void*)(weights + (w->next++ % w->matrices) * count * 16);
  const uint64_t* const b = a + count;
  uint64_t sums[8] = {0};
  for (size_t i = 0; i + 4 <= count; i += 4) {
    for (size_t j = 0; j < 4; ++j) {
      sums[j] += a[i + j];
      sums[4 + j] += b[i + j];
    }
  }
  sink = sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
}

/* Microseconds of this thread's CPU time, so that another program's turns do not count; best of ten rounds. */
static double best_us(void (*run)(void* context), void* context) {
  double best = 1e300;
  for (int round = 0; round < 10; ++round) {
    const double start = thread_us();
    uint32_t runs = 0;
    double elapsed = 0;
    while (elapsed < 5e3) {
      run(context);
      ++runs;
      elapsed = thread_us() - start;
    }
    best = elapsed / runs < best ? elapsed / runs : best;
  }
  return best;
}

static const clb_module* module_of(const char* isa, const char* precision) {
  char path[512];
  const char* const folder = getenv("CLB_MODULE_DIR");
  (void)snprintf(path, sizeof path, "%s/clb_cpu_%s_%s.so", folder == NULL ? "." : folder, isa, precision);
  void* const handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    return NULL;
  }
  clb_module_entry_fn entry = NULL;
  void* const symbol = dlsym(handle, CLB_MODULE_ENTRY);
  memcpy(&entry, &symbol, sizeof entry);
  const clb_module* const module = entry();
  return module->supported() == 1 ? module : NULL;
}

static void report(const char* what, work* w, double us, double read_us, uint32_t parts) {
  const double bytes = (double)w->bytes * parts;
  const double flops = 2.0 * ROWS * COLS * w->tokens * parts;
  (void)printf("%-8s %-12s %-8s %2u tokens, %u matrices | %9.1f us | %6.2f GB/s | %4.2f of a read | %7.1f GFLOP/s\n",
               w->module->name, w->name, what, w->tokens, w->matrices, us, bytes / us / 1e3, read_us * parts / us,
               flops / us / 1e3);
}

static void bench_module(const clb_module* module, size_t format, const uint32_t* tokens, size_t count) {
  work w = {.module = module,
            .ops = clb_ops_choose(),
            .name = formats[format].name,
            .section = {.precision = module->precision,
                        .layout = CLB_LAYOUT_ROWS16,
                        .rows = ROWS,
                        .cols = COLS,
                        .group_rows = formats[format].group_cols != 0 ? 1 : 0,
                        .group_cols = formats[format].group_cols,
                        .zeros_offset = formats[format].zeros},
            .tokens = 1};
  w.bytes = clb_parts_of(&w.section).bytes;
  w.matrices = (uint32_t)((uint64_t)MATRICES * ROWS * COLS * 2 / clb_align_up(w.bytes, 256));
  const double read_us = best_us(run_read, &w);
  for (size_t i = 0; i < count; ++i) {
    w.tokens = tokens[i];
    if (module->reads_codes != 0) {
      (void)printf("%-8s %-12s encode   %2u tokens | %9.1f us\n", module->name, w.name, w.tokens,
                   best_us(run_encode, &w));
    }
    report("linear", &w, best_us(run_linear, &w), read_us, 1);
    report("gate_up", &w, best_us(run_gate_up, &w), read_us, 2);
  }
}

int main(int argc, char** argv) {
  uint32_t tokens[MAX_TOKENS] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
  size_t count = 12;
  for (int i = 2; i < argc && i < MAX_TOKENS; ++i) {
    tokens[i - 2] = (uint32_t)strtoul(argv[i], NULL, 10);
    count = (size_t)i - 1;
    if (tokens[i - 2] == 0 || tokens[i - 2] > MAX_TOKENS) {
      (void)fprintf(stderr, "tokens must be 1 to %d\n", MAX_TOKENS);
      return 1;
    }
  }
  const size_t bytes = (size_t)MATRICES * ROWS * COLS * 2;
  weights = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (weights == MAP_FAILED) {
    return 1;
  }
  (void)madvise(weights, bytes, MADV_HUGEPAGE);
  memset(weights, 0x11, bytes); /* small positive numbers in each precision */
  for (size_t i = 0; i < (size_t)MAX_TOKENS * COLS; ++i) {
    input[i] = (float)(i % 7) * 0.25f - 0.5f;
  }
  for (size_t isa = 0; isa < sizeof isas / sizeof isas[0]; ++isa) {
    for (size_t format = 0; format < sizeof formats / sizeof formats[0]; ++format) {
      const clb_module* const module = module_of(isas[isa], formats[format].module);
      if (module != NULL && (argc < 2 || strncmp(module->name, argv[1], strlen(argv[1])) == 0)) {
        bench_module(module, format, tokens, count);
      }
    }
  }
  return 0;
}
