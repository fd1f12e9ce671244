/*
 * bench.h: time one operation and print `op shape | us`.
 *
 * The operation runs until 50 ms have passed, in five rounds of equal length; the best round counts, since
 * everything else on the machine can only make it slower.
 */
#ifndef CLB_BENCH_H
#define CLB_BENCH_H

#include <stdint.h>
#include <stdio.h>
#include <time.h>

#define BENCH_ROUND_NS 10000000u
#define BENCH_ROUNDS 5

static inline uint64_t clb_bench_now_ns(void) {
  struct timespec now;
  (void)timespec_get(&now, TIME_UTC);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void clb_bench(const char* op, const char* shape, void (*run)(void* context), void* context) {
  double best = 1e300;
  for (int round = 0; round < BENCH_ROUNDS; ++round) {
    const uint64_t start = clb_bench_now_ns();
    uint64_t runs = 0;
    uint64_t elapsed = 0;
    while (elapsed < BENCH_ROUND_NS) {
      run(context);
      ++runs;
      elapsed = clb_bench_now_ns() - start;
    }
    const double each = (double)elapsed / (double)runs;
    best = each < best ? each : best;
  }
  (void)printf("%-16s %-36s | %10.3f us\n", op, shape, best / 1000.0);
}

#endif /* CLB_BENCH_H */
