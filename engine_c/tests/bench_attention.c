/*
 * bench_attention.c: attention of every table that this machine can run, one thread. Decode is a matter of bytes: GB/s
 * of K and V; prompts are a matter of arithmetic: GFLOP/s.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "colibri.h"
#include "ops.h"

enum { POSITIONS = 8192, MOST_HEADS = 32, RUNS = 8 };

static double thread_us(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

typedef struct work {
  const clb_ops* ops;
  clb_attention_shape shape;
  clb_attention_kv kv[RUNS]; /* slots, so that nothing stays in a cache from call to call */
  uint32_t position;
  uint32_t rows;
  float* query;
  float* output;
} work;

/* All heads of `rows` tokens of every slot. */
static void attend(const work* w) {
  const size_t width = (size_t)w->shape.heads * w->shape.head_dim;
  for (uint32_t slot = 0; slot < RUNS; ++slot) {
    for (uint32_t first = 0; first < w->rows; first += CLB_ATTENTION_ROWS) {
      for (uint32_t head = 0; head < w->shape.kv_heads; ++head) {
        const size_t at = width / w->shape.kv_heads * head + first * width;
        const uint32_t left = w->rows - first;
        const clb_attention_work call = {.query = w->query + at,
                                         .output = w->output + at,
                                         .query_stride = width,
                                         .output_stride = width,
                                         .position = w->position + first,
                                         .rows = left < CLB_ATTENTION_ROWS ? left : CLB_ATTENTION_ROWS,
                                         .kv_head = head};
        w->ops->attention(&w->shape, &w->kv[slot], &call);
      }
    }
  }
}

static void bench(work* w) {
  double best = 1e300;
  for (int round = 0; round < 5; ++round) {
    const double start = thread_us();
    uint32_t runs = 0;
    double elapsed = 0;
    while (elapsed < 2e4) {
      attend(w);
      ++runs;
      elapsed = thread_us() - start;
    }
    best = elapsed / runs < best ? elapsed / runs : best;
  }
  best /= RUNS;
  const double seen = (double)w->position + (w->rows + 1) / 2.0;
  const double values = 2.0 * seen * w->shape.kv_heads * w->shape.head_dim;
  const double bytes = values * (w->shape.kv_precision == CLB_FP32 ? 4 : 2);
  const double flops = 4.0 * seen * w->rows * w->shape.heads * w->shape.head_dim;
  (void)printf("%-8s %s %2u heads, %2u kv heads of %3u, %2u rows at %4u | %9.1f us | %6.2f GB/s | %6.1f GFLOP/s\n",
               w->ops->name, w->shape.kv_precision == CLB_FP32 ? "fp32" : "fp16", w->shape.heads, w->shape.kv_heads,
               w->shape.head_dim, w->rows, w->position, best, bytes / best / 1e3, flops / best / 1e3);
}

static void fill(work* w) {
  float values[2 * MOST_HEADS * 128];
  for (uint32_t slot = 0; slot < RUNS; ++slot) {
    for (uint32_t p = 0; p < POSITIONS; ++p) {
      for (size_t i = 0; i < sizeof values / sizeof values[0]; ++i) {
        values[i] = (float)((i * 7 + p) % 13) * 0.1f - 0.6f;
      }
      w->ops->kv_append(&w->shape, &w->kv[slot], p, values);
    }
  }
}

int main(int argc, char** argv) {
  static const clb_attention_shape shapes[] = {{4, 2, 64, 0, 0.125f}, {16, 16, 64, 0, 0.125f}, {32, 4, 128, 0, 0.09f}};
  const size_t bytes = (size_t)POSITIONS * 16 * 64 * sizeof(float);
  work w = {.query = calloc(64 * MOST_HEADS * 128, sizeof(float)),
            .output = calloc(64 * MOST_HEADS * 128, sizeof(float))};
  for (uint32_t slot = 0; slot < RUNS; ++slot) {
    w.kv[slot].own = (clb_kv_layer){aligned_alloc(64, bytes), aligned_alloc(64, bytes), POSITIONS, 0};
  }
  for (size_t i = 0; i < (size_t)64 * MOST_HEADS * 128; ++i) {
    w.query[i] = (float)(i % 11) * 0.1f - 0.5f;
  }
  for (uint32_t table = 0; clb_ops_table(table) != NULL; ++table) {
    w.ops = clb_ops_table(table);
    for (size_t s = 0; s < 6 && w.ops->supported() == 1; ++s) {
      w.shape = shapes[s / 2];
      w.shape.kv_precision = s % 2 == 0 ? CLB_FP32 : CLB_FP16;
      if (argc > 1 && strcmp(argv[1], w.ops->name) != 0) {
        continue;
      }
      fill(&w);
      static const uint32_t at[][2] = {{1, 100}, {1, 2000}, {1, 8000}, {64, 0}, {64, 448}, {64, 1984}};
      for (size_t i = 0; i < 6; ++i) {
        w.rows = at[i][0];
        w.position = at[i][1];
        bench(&w);
      }
    }
  }
  return 0;
}
