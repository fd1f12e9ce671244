/* What a list of items costs: threads.h with empty items, and with items of some microseconds to share. */
#include <stdlib.h>

#include "bench.h"
#include "invariant.h"
#include "threads.h"

typedef struct list {
  clb_threads* pool;
  uint32_t items;
  uint32_t rounds; /* of arithmetic in an item */
} list;

static void spend(void* context, uint32_t first, uint32_t end, uint32_t thread) {
  const list* const l = context;
  volatile uint32_t x = thread;
  for (uint32_t i = 0; i < l->rounds * (end - first); ++i) {
    x = x * 3u + 1u;
  }
}

static void run_list(void* context) {
  list* const l = context;
  clb_threads_run(l->pool, l->items, spend, l);
}

static void bench_shape(uint32_t threads, uint32_t items, uint32_t rounds) {
  static clb_threads pool;
  const uint64_t bytes = clb_threads_stack_bytes(threads);
  void* const stacks = bytes == 0 ? NULL : aligned_alloc(4096, bytes);
  const clb_threads_config config = {.count = threads, .stacks = stacks};
  CLB_ASSERT(clb_threads_open(&pool, &config) == CLB_OK);
  list l = {&pool, items, rounds};
  char shape[64];
  (void)snprintf(shape, sizeof shape, "threads=%u items=%u rounds=%u", threads, items, rounds);
  clb_bench("threads_run", shape, run_list, &l);
  clb_threads_close(&pool);
  free(stacks);
}

int main(void) {
  for (uint32_t threads = 1; threads <= 2; ++threads) {
    bench_shape(threads, 2, 0);
    bench_shape(threads, 16, 0);
    bench_shape(threads, 16, 400);
    bench_shape(threads, 256, 400);
  }
  return 0;
}
