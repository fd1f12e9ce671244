/* Memory pool: 10^6 random operations against a map of pages (10^4 with CLB_TEST_SHORT), and limits. */
#define _POSIX_C_SOURCE 200809L /* fork */
#include "memory_pool.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

#define PAGE 4096u
#define PAGES 256u
#define NODES 600u
#define LIVE 200u

static clb_pool_node nodes[CLB_TIER_COUNT][NODES];

static int32_t open_pool(clb_pool* pool, uint64_t base, uint64_t pages, uint32_t node_count) {
  clb_pool_tier_config configs[CLB_TIER_COUNT];
  memset(configs, 0, sizeof configs);
  for (uint32_t t = 0; t < CLB_TIER_COUNT; ++t) {
    configs[t] = (clb_pool_tier_config){
        .base = base, .bytes = pages * PAGE, .page_bytes = PAGE, .node_count = node_count, .nodes = nodes[t]};
  }
  return clb_pool_open(pool, configs);
}

static unsigned operations(void) { return getenv("CLB_TEST_SHORT") != NULL ? 10000u : 1000000u; }

/* The shadow: who holds each page (0 = nobody). */
typedef struct shadow {
  uint32_t owner[PAGES];
  uint64_t used;
} shadow;

/* Where best fit, ties to the lowest address, must put `count` pages; PAGES if nowhere. */
static uint32_t best_place(const shadow* of, uint32_t count, uint32_t align, uint32_t* largest) {
  uint32_t best = PAGES;
  uint32_t best_size = UINT32_MAX;
  *largest = 0;
  for (uint32_t start = 0; start < PAGES;) {
    if (of->owner[start] != 0) {
      ++start;
      continue;
    }
    uint32_t end = start;
    while (end < PAGES && of->owner[end] == 0)
      ++end;
    const uint32_t first = (start + align - 1u) / align * align;
    if (end - start > *largest) *largest = end - start;
    if (first + count <= end && end - start < best_size) {
      best = first;
      best_size = end - start;
    }
    start = end;
  }
  return best;
}

static void random_alloc(clb_pool* pool, shadow* of, clb_extent* extent, uint32_t id, uint64_t* seed) {
  const uint64_t bytes = clb_test_random(seed) % (clb_test_random(seed) % 8 == 0 ? 64u * PAGE : 5u * PAGE) + 1u;
  const uint32_t align = clb_test_random(seed) % 4 == 0 ? 8u : 1u;
  const uint32_t count = (uint32_t)((bytes + PAGE - 1u) / PAGE);
  const uint32_t mem_class = (uint32_t)(clb_test_random(seed) % CLB_MEM_CLASS_COUNT);
  uint32_t largest;
  const uint32_t expected = best_place(of, count, align, &largest);
  const int32_t status = clb_pool_alloc(pool, CLB_TIER_KV, bytes, align * PAGE, mem_class, extent);
  CHECK_EQ(status, expected == PAGES ? CLB_ERR_MEMORY : CLB_OK);
  if (status != CLB_OK) {
    CHECK_EQ(extent->node, CLB_POOL_NONE);
    return;
  }
  CHECK_EQ(extent->offset, expected * PAGE);
  CHECK_EQ(extent->bytes, count * PAGE);
  for (uint32_t p = expected; p < expected + count; ++p)
    of->owner[p] = id + 1u;
  of->used += extent->bytes;
}

static void random_free(clb_pool* pool, shadow* of, clb_extent* extent, uint32_t id) {
  const clb_extent was = *extent;
  CHECK_EQ(clb_pool_free(pool, extent), CLB_OK);
  CHECK_EQ(extent->node, CLB_POOL_NONE);
  for (uint64_t p = was.offset / PAGE; p < (was.offset + was.bytes) / PAGE; ++p) {
    CHECK_EQ(of->owner[p], id + 1u);
    of->owner[p] = 0;
  }
  of->used -= was.bytes;
}

/* Any mix of allocations and frees agrees with the map of pages, and the conservation check holds after each. */
static void random_operations_match_a_page_map(void) {
  static clb_extent extents[LIVE];
  static shadow of;
  clb_pool pool;
  uint64_t seed = 7;
  memset(&of, 0, sizeof of);
  CHECK_EQ(open_pool(&pool, 1u << 24, PAGES, 2u * LIVE + 1u), CLB_OK);
  for (uint32_t i = 0; i < LIVE; ++i)
    extents[i].node = CLB_POOL_NONE;
  for (unsigned op = 0; op < operations(); ++op) {
    const uint32_t id = (uint32_t)(clb_test_random(&seed) % LIVE);
    if (extents[id].node == CLB_POOL_NONE) {
      random_alloc(&pool, &of, &extents[id], id, &seed);
    } else {
      random_free(&pool, &of, &extents[id], id);
    }
    CHECK_EQ(clb_pool_check(&pool), CLB_OK);
    CHECK_EQ(pool.tiers[CLB_TIER_KV].used, of.used);
  }
  for (uint32_t i = 0; i < LIVE; ++i)
    CHECK_EQ(clb_pool_free(&pool, &extents[i]), CLB_OK);
  for (uint32_t t = 0; t < CLB_TIER_COUNT; ++t) {
    clb_pool_stats stats;
    clb_pool_get_stats(&pool, t, &stats);
    CHECK_EQ(stats.blocks, 1);
    CHECK_EQ(stats.free_blocks, 1);
    CHECK_EQ(stats.largest_free, PAGES * PAGE);
    CHECK_EQ(stats.used, 0);
  }
  CHECK_EQ(clb_pool_close(&pool), CLB_OK);
}

/* A full tier answers MEMORY, and the same request succeeds after one free. */
static void exhaustion_is_a_status(void) {
  clb_pool pool;
  clb_extent held[4];
  clb_extent more;
  CHECK_EQ(open_pool(&pool, 0, 4, NODES), CLB_OK);
  for (int i = 0; i < 4; ++i)
    CHECK_EQ(clb_pool_alloc(&pool, CLB_TIER_KV, PAGE, 0, CLB_MEM_OTHER, &held[i]), CLB_OK);
  CHECK_EQ(clb_pool_alloc(&pool, CLB_TIER_KV, 1, 0, CLB_MEM_OTHER, &more), CLB_ERR_MEMORY);
  CHECK_EQ(clb_pool_alloc(&pool, CLB_TIER_TEMP, 1, 0, CLB_MEM_OTHER, &more), CLB_OK);
  CHECK_EQ(clb_pool_free(&pool, &more), CLB_OK);
  CHECK_EQ(clb_pool_free(&pool, &held[1]), CLB_OK);
  CHECK_EQ(clb_pool_alloc(&pool, CLB_TIER_KV, 1, 0, CLB_MEM_OTHER, &more), CLB_OK);
  CHECK_EQ(more.offset, PAGE);
  CHECK_EQ(clb_pool_close(&pool), CLB_ERR_STATE);
}

/* Without a spare node an allocation that needs to split fails and changes nothing. */
static void too_few_nodes_is_a_status(void) {
  clb_pool pool;
  clb_extent first;
  clb_extent second;
  CHECK_EQ(open_pool(&pool, 0, 16, 2), CLB_OK);
  CHECK_EQ(clb_pool_alloc(&pool, CLB_TIER_KV, PAGE, 0, CLB_MEM_OTHER, &first), CLB_OK);
  CHECK_EQ(clb_pool_alloc(&pool, CLB_TIER_KV, PAGE, 0, CLB_MEM_OTHER, &second), CLB_ERR_MEMORY);
  CHECK_EQ(clb_pool_check(&pool), CLB_OK);
  CHECK_EQ(clb_pool_alloc(&pool, CLB_TIER_KV, 15u * PAGE, 0, CLB_MEM_OTHER, &second), CLB_OK);
  CHECK_EQ(clb_pool_check(&pool), CLB_OK);
}

/* For every n, an injected failure hits the n-th allocation only and leaves the pool whole. */
static void nth_allocation_fails(void) {
  for (uint64_t n = 1; n <= 8; ++n) {
    clb_pool pool;
    CHECK_EQ(open_pool(&pool, 0, PAGES, NODES), CLB_OK);
    clb_pool_fail_after(&pool, n);
    for (uint64_t i = 1; i <= 8; ++i) {
      clb_extent extent;
      CHECK_EQ(clb_pool_alloc(&pool, CLB_TIER_TEMP, PAGE, 0, CLB_MEM_STEP, &extent), i == n ? CLB_ERR_MEMORY : CLB_OK);
      CHECK_EQ(clb_pool_check(&pool), CLB_OK);
    }
    CHECK_EQ(pool.allocations, 7);
  }
}

/* Arguments outside the limits, double frees and forged extents are refused and change nothing. */
static void bad_arguments_are_refused(void) {
  clb_pool pool;
  clb_extent extent;
  CHECK_EQ(open_pool(&pool, PAGE, 8, NODES), CLB_OK);
  CHECK_EQ(clb_pool_alloc(&pool, 3, 1, 0, 0, &extent), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_pool_alloc(&pool, 1, 0, 0, 0, &extent), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_pool_alloc(&pool, 1, 1, 0, CLB_MEM_CLASS_COUNT, &extent), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_pool_alloc(&pool, 1, 1, 24, 0, &extent), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_pool_alloc(&pool, 1, 1, 2u * PAGE, 0, &extent), CLB_ERR_ARGUMENT); /* base is one page */
  CHECK_EQ(clb_pool_alloc(&pool, 1, UINT64_MAX, 0, 0, &extent), CLB_ERR_MEMORY);
  CHECK_EQ(clb_pool_alloc(&pool, 1, 1, 0, 0, &extent), CLB_OK);
  clb_extent copy = extent;
  clb_extent forged = extent;
  forged.offset += PAGE;
  CHECK_EQ(clb_pool_free(&pool, &forged), CLB_ERR_ARGUMENT);
  forged = extent;
  forged.node = NODES;
  CHECK_EQ(clb_pool_free(&pool, &forged), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_pool_free(&pool, &extent), CLB_OK);
  CHECK_EQ(clb_pool_free(&pool, &extent), CLB_OK); /* "nothing" */
  CHECK_EQ(clb_pool_free(&pool, &copy), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_pool_check(&pool), CLB_OK);
  CHECK_EQ(open_pool(&pool, 100, 8, NODES), CLB_ERR_ARGUMENT);
  CHECK_EQ(open_pool(&pool, 0, 8, 0), CLB_ERR_ARGUMENT);
  CHECK_EQ(open_pool(&pool, UINT64_MAX - PAGE + 1u, 8, NODES), CLB_ERR_ARGUMENT);
}

/* The conservation check notices each kind of damage. */
static void check_finds_damage(void) {
  clb_pool pool;
  clb_extent extents[3];
  for (int kind = 0; kind < 7; ++kind) {
    CHECK_EQ(open_pool(&pool, 0, 16, NODES), CLB_OK);
    for (int i = 0; i < 3; ++i)
      CHECK_EQ(clb_pool_alloc(&pool, CLB_TIER_KV, PAGE, 0, 0, &extents[i]), CLB_OK);
    CHECK_EQ(clb_pool_free(&pool, &extents[1]), CLB_OK);
    CHECK_EQ(clb_pool_check(&pool), CLB_OK);
    clb_pool_tier* tier = &pool.tiers[CLB_TIER_KV];
    switch (kind) {
      case 0:
        tier->nodes[extents[0].node].bytes += PAGE;
        break;
      case 1:
        tier->used += PAGE;
        break;
      case 2:
        tier->class_blocks[0]++;
        break;
      case 3:
        tier->nodes[extents[0].node].state = 1;
        break;
      case 4:
        tier->free_first = CLB_POOL_NONE;
        break;
      case 5:
        tier->nodes[extents[2].node].next = extents[0].node;
        break;
      default:
        tier->spare = CLB_POOL_NONE;
        break;
    }
    CHECK_EQ(clb_pool_check(&pool), CLB_ERR_INTERNAL);
  }
}

/* The report names each holder with its bytes, and tells the length that it needs. */
static void report_names_holders(void) {
  clb_pool pool;
  clb_extent extent;
  char text[2048];
  char small[8];
  CHECK_EQ(open_pool(&pool, 0, 16, NODES), CLB_OK);
  CHECK_EQ(clb_pool_alloc(&pool, CLB_TIER_KV, 3u * PAGE, 0, CLB_MEM_SHARED_RUN, &extent), CLB_OK);
  const size_t needed = clb_pool_report(&pool, text, sizeof text);
  CHECK(needed < sizeof text && needed == strlen(text));
  CHECK_CONTAINS(text, "shared run");
  CHECK_CONTAINS(text, "12288 bytes");
  CHECK_EQ(clb_pool_report(&pool, small, sizeof small), needed);
  CHECK_EQ(strlen(small), sizeof small - 1u);
}

/* A broken promise of the caller ends the process, in release builds too: 3 bytes are no page. */
static void assertions_stay_on(void) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    (void)close(STDERR_FILENO); /* the message is not of interest */
    (void)signal(SIGABRT, SIG_DFL);
    (void)clb_pool_round(1, 3);
    _exit(0);
  }
  int state = 0;
  CHECK_EQ(waitpid(child, &state, 0), child);
  CHECK(WIFSIGNALED(state) && WTERMSIG(state) == SIGABRT);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(random_operations_match_a_page_map),
                                   TEST(exhaustion_is_a_status),
                                   TEST(too_few_nodes_is_a_status),
                                   TEST(nth_allocation_fails),
                                   TEST(bad_arguments_are_refused),
                                   TEST(check_finds_damage),
                                   TEST(report_names_holders),
                                   TEST(assertions_stay_on)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
