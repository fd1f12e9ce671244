/* Time of one allocation and one free in a fragmented tier, and of the conservation check. */
#include "bench.h"
#include "invariant.h"
#include "memory_pool.h"
#include "test.h"

#define PAGE 65536u
#define MAX_LIVE 4096u

static clb_pool_node nodes[CLB_TIER_COUNT][2u * MAX_LIVE + 1u];
static clb_extent extents[MAX_LIVE];

typedef struct churn {
  clb_pool pool;
  uint32_t live;
  uint64_t seed;
} churn;

/* Replace a random block by one of another size: the tier stays about as full and as fragmented as it is. */
static void replace_run(void* context) {
  churn* c = context;
  clb_extent* extent = &extents[clb_test_random(&c->seed) % c->live];
  int32_t status = clb_pool_free(&c->pool, extent);
  CLB_ASSERT(status == CLB_OK);
  status =
      clb_pool_alloc(&c->pool, CLB_TIER_KV, clb_test_random(&c->seed) % (16u * PAGE) + 1u, 0, CLB_MEM_OWN_RUN, extent);
  CLB_ASSERT(status == CLB_OK || status == CLB_ERR_MEMORY);
}

static void check_run(void* context) {
  const churn* c = context;
  const int32_t status = clb_pool_check(&c->pool);
  CLB_ASSERT(status == CLB_OK);
}

static void bench_live(uint32_t live) {
  static churn c;
  clb_pool_tier_config configs[CLB_TIER_COUNT];
  memset(&c, 0, sizeof c);
  memset(configs, 0, sizeof configs);
  for (uint32_t t = 0; t < CLB_TIER_COUNT; ++t) {
    configs[t] = (clb_pool_tier_config){
        .bytes = 10ull * live * PAGE, .page_bytes = PAGE, .node_count = 2u * live + 1u, .nodes = nodes[t]};
  }
  const int32_t status = clb_pool_open(&c.pool, configs);
  CLB_ASSERT(status == CLB_OK);
  c.live = live;
  for (uint32_t i = 0; i < live; ++i)
    extents[i].node = CLB_POOL_NONE;
  for (uint32_t i = 0; i < 20u * live; ++i)
    replace_run(&c);
  clb_pool_stats stats;
  clb_pool_get_stats(&c.pool, CLB_TIER_KV, &stats);
  char shape[64];
  (void)snprintf(shape, sizeof shape, "blocks=%u free=%u", stats.blocks, stats.free_blocks);
  clb_bench("pool_replace", shape, replace_run, &c);
  clb_bench("pool_check", shape, check_run, &c);
}

int main(void) {
  bench_live(32);
  bench_live(192);
  bench_live(MAX_LIVE);
  return 0;
}
