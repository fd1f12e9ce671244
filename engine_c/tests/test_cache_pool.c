/* Cache pool: run sizes, views, the life of shared runs, random slots against a shadow, dispatch buffers. */
#include "cache_pool.h"

#include "memory_map.h"
#include "test.h"

#define PAGE 4096u
#define SLOTS 6u
#define LAYERS 3u
#define HEAD_DIM 8u
#define SEQ 200u

static const clb_layer_desc layer_table[LAYERS] = {{.kv_values_per_token = 2 * 2 * HEAD_DIM},
                                                   {.kv_values_per_token = 2 * 1 * HEAD_DIM},
                                                   {.kv_values_per_token = 2 * 4 * HEAD_DIM}};
static const uint32_t kv_heads[LAYERS] = {2, 1, 4};

typedef struct fixture {
  clb_pool pool;
  clb_pool_node nodes[CLB_TIER_COUNT][256];
  clb_cache cache;
  clb_cache_config config;
  clb_cache_plan_result plan;
  clb_map memory;
} fixture;

/* pages = 0: the plan's own size. */
static void set_up(fixture* f, uint32_t element_bytes, uint64_t pages) {
  memset(f, 0, sizeof *f);
  f->config = (clb_cache_config){.slots = SLOTS,
                                 .layers = LAYERS,
                                 .head_dim = HEAD_DIM,
                                 .element_bytes = element_bytes,
                                 .max_seq_len = SEQ,
                                 .layer_table = layer_table};
  CHECK_EQ(clb_cache_plan(&f->config, PAGE, &f->plan), CLB_OK);
  CHECK(f->plan.nodes <= 256);
  const uint64_t bytes = pages != 0 ? pages * PAGE : f->plan.bytes_all;
  CHECK_EQ(clb_map_open(&f->memory, bytes, PAGE, CLB_HUGE_OFF), CLB_OK);
  f->config.host_base = f->memory.base;
  clb_pool_tier_config tiers[CLB_TIER_COUNT];
  memset(tiers, 0, sizeof tiers);
  for (uint32_t t = 0; t < CLB_TIER_COUNT; ++t) {
    tiers[t] = (clb_pool_tier_config){
        .bytes = t == CLB_TIER_WEIGHTS ? 0 : bytes, .page_bytes = PAGE, .node_count = 256, .nodes = f->nodes[t]};
  }
  tiers[CLB_TIER_KV].base = (uint64_t)(uintptr_t)f->memory.base;
  CHECK_EQ(clb_pool_open(&f->pool, tiers), CLB_OK);
  CHECK_EQ(clb_cache_open(&f->cache, &f->pool, &f->config), CLB_OK);
}

/* Everything goes back: one free block, nothing used. */
static void tear_down(fixture* f) {
  for (uint32_t s = 0; s < SLOTS; ++s) {
    if (f->cache.slot[s].open) CHECK_EQ(clb_cache_slot_close(&f->cache, s), CLB_OK);
  }
  CHECK_EQ(clb_cache_check(&f->cache), CLB_OK);
  CHECK_EQ(clb_cache_close(&f->cache), CLB_OK);
  CHECK_EQ(f->pool.tiers[CLB_TIER_KV].blocks, 1);
  CHECK_EQ(clb_pool_close(&f->pool), CLB_OK);
  clb_map_close(&f->memory);
}

static int32_t open_slot(fixture* f, uint32_t slot, uint32_t prompt, uint32_t max, uint32_t prefix_run,
                         uint32_t prefix_tokens, uint32_t publish) {
  const clb_cache_request request = {.prompt_tokens = prompt,
                                     .max_tokens = max,
                                     .prefix_run = prefix_run,
                                     .prefix_tokens = prefix_tokens,
                                     .publish_run = publish};
  return clb_cache_slot_open(&f->cache, slot, &request);
}

/* A run holds at least what was asked, wastes less than 12.5 % or a tile, and longer requests never get shorter runs.
 */
static void run_sizes_waste_little(void) {
  uint32_t last = 0;
  CHECK_EQ(clb_cache_capacity(0), 0);
  for (uint32_t tokens = 1; tokens <= 70000; ++tokens) {
    const uint32_t capacity = clb_cache_capacity(tokens);
    CHECK(capacity >= tokens && capacity >= last);
    CHECK((capacity - tokens) * 8u < capacity || capacity - tokens < CLB_CACHE_TILE);
    CHECK_EQ(capacity % CLB_CACHE_TILE, 0);
    CHECK_EQ(clb_cache_capacity(capacity), capacity);
    last = capacity;
  }
  CHECK_EQ(clb_cache_capacity(CLB_MAX_SEQ_LEN), CLB_MAX_SEQ_LEN);
  CHECK(clb_cache_capacity(2u * CLB_MAX_SEQ_LEN - 1u) >= 2u * CLB_MAX_SEQ_LEN - 1u);
}

/* Each limit of the configuration is checked. */
static void plan_refuses_bad_configurations(void) {
  fixture f;
  set_up(&f, 4, 0);
  clb_cache_plan_result plan;
  clb_cache_config bad[] = {f.config, f.config, f.config, f.config, f.config, f.config, f.config, f.config};
  bad[0].slots = CLB_MAX_SLOTS + 1u;
  bad[1].layers = 0;
  bad[2].head_dim = 257;
  bad[3].element_bytes = 3;
  bad[4].max_seq_len = CLB_MAX_SEQ_LEN + 1u;
  bad[5].head_dim = 7; /* values are no multiple of 2 * 7 */
  bad[6].layer_table = NULL;
  bad[7].slots = 0;
  for (unsigned i = 0; i < 8; ++i) {
    clb_cache cache;
    CHECK_EQ(clb_cache_plan(&bad[i], PAGE, &plan), CLB_ERR_ARGUMENT);
    CHECK_EQ(clb_cache_open(&cache, &f.pool, &bad[i]), CLB_ERR_ARGUMENT);
  }
  CHECK_EQ(clb_cache_plan(&f.config, PAGE + 1u, &plan), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_cache_plan(&f.config, 1024, &plan), CLB_ERR_ARGUMENT);
  tear_down(&f);
}

/* The byte range of one half of one layer, for the overlap test. */
typedef struct range {
  uint64_t begin;
  uint64_t end;
} range;

static uint32_t ranges_of(const fixture* f, uint32_t slot, range* out) {
  uint32_t count = 0;
  for (uint32_t layer = 0; layer < LAYERS; ++layer) {
    clb_kv_view view;
    clb_cache_view(&f->cache, slot, layer, &view);
    const uint64_t row = (uint64_t)view.kv_heads * HEAD_DIM * f->config.element_bytes;
    CHECK_EQ(view.kv_heads, kv_heads[layer]);
    if (view.own_capacity > 0) {
      out[count++] = (range){view.own_k, view.own_k + row * view.own_capacity};
      out[count++] = (range){view.own_v, view.own_v + row * view.own_capacity};
    }
    if (view.prefix_tokens > 0) {
      out[count++] = (range){view.prefix_k, view.prefix_k + row * view.prefix_capacity};
      out[count++] = (range){view.prefix_v, view.prefix_v + row * view.prefix_capacity};
    }
  }
  return count;
}

/* K and V of all layers and slots lie in the tier and never overlap, for both element sizes. */
static void views_are_disjoint(void) {
  static fixture f;
  static range all[SLOTS * LAYERS * 4u];
  for (uint32_t element = 2; element <= 4; element += 2) {
    set_up(&f, element, 0);
    for (uint32_t s = 0; s < SLOTS; ++s)
      CHECK_EQ(open_slot(&f, s, 17 + s, 100, 0, 0, s == 2 ? 1 : 0), CLB_OK);
    uint32_t count = 0;
    for (uint32_t s = 0; s < SLOTS; ++s)
      count += ranges_of(&f, s, all + count);
    for (uint32_t i = 0; i < count; ++i) {
      CHECK(all[i].begin < all[i].end && all[i].end <= f.pool.tiers[CLB_TIER_KV].bytes);
      CHECK_EQ(all[i].begin % element, 0);
      for (uint32_t j = 0; j < i; ++j)
        CHECK(all[i].end <= all[j].begin || all[j].end <= all[i].begin);
    }
    tear_down(&f);
  }
}

/* The plan's tier holds every slot at full length at the same time, and one that publishes all it may. */
static void planned_tier_holds_all_slots(void) {
  static fixture f;
  set_up(&f, 4, 0);
  for (uint32_t s = 0; s < SLOTS; ++s) {
    CHECK_EQ(open_slot(&f, s, SEQ - 50u, 50, 0, 0, 0), CLB_OK);
    CHECK(clb_cache_slot_tokens(&f.cache, s) >= SEQ);
  }
  CHECK(clb_cache_used(&f.cache) <= f.plan.bytes_all);
  CHECK_EQ(f.plan.bytes_per_token, (32 + 16 + 64) * 4);
  for (uint32_t s = 0; s < SLOTS; ++s)
    CHECK_EQ(clb_cache_slot_close(&f.cache, s), CLB_OK);
  tear_down(&f);
  clb_cache_config one = f.config;
  clb_cache_plan_result plan;
  one.slots = 1;
  CHECK_EQ(clb_cache_plan(&one, PAGE, &plan), CLB_OK);
  set_up(&f, 4, plan.bytes_all / PAGE);
  for (uint32_t prompt = 1; prompt <= SEQ; ++prompt) {
    CHECK_EQ(open_slot(&f, 0, prompt, SEQ - prompt, 0, 0, 1), CLB_OK);
    CHECK_EQ(clb_cache_slot_close(&f.cache, 0), CLB_OK);
  }
  tear_down(&f);
}

/* What does not fit now is FULL and works after a close; what can never fit is MEMORY; both change nothing. */
static void full_and_never(void) {
  static fixture f;
  set_up(&f, 4, 20); /* 80 KiB: a token takes 448 bytes */
  CHECK_EQ(open_slot(&f, 0, 100, 0, 0, 0, 0), CLB_OK);
  const uint64_t used = clb_cache_used(&f.cache);
  CHECK_EQ(open_slot(&f, 1, 100, 0, 0, 0, 0), CLB_ERR_FULL);
  CHECK_EQ(open_slot(&f, 1, 190, 0, 0, 0, 0), CLB_ERR_MEMORY);
  CHECK_EQ(open_slot(&f, 1, 30, 20, 0, 0, 1), CLB_OK);
  CHECK_EQ(clb_cache_publish(&f.cache, 1), CLB_OK);
  CHECK_EQ(open_slot(&f, 2, 100, 90, 1, 30, 0), CLB_ERR_MEMORY); /* not even beside the prefix alone */
  CHECK_EQ(open_slot(&f, 2, 100, 20, 1, 30, 0), CLB_ERR_FULL);
  CHECK_EQ(clb_cache_slot_close(&f.cache, 1), CLB_OK);
  CHECK_EQ(clb_cache_release_run(&f.cache, 1), CLB_OK);
  CHECK_EQ(clb_cache_used(&f.cache), used);
  CHECK_EQ(clb_cache_check(&f.cache), CLB_OK);
  CHECK_EQ(clb_cache_slot_close(&f.cache, 0), CLB_OK);
  CHECK_EQ(open_slot(&f, 1, 100, 0, 0, 0, 0), CLB_OK);
  tear_down(&f);
}

/* Requests that contradict the state or the limits are refused and change nothing. */
static void bad_requests_are_refused(void) {
  static fixture f;
  set_up(&f, 4, 0);
  CHECK_EQ(open_slot(&f, SLOTS, 1, 1, 0, 0, 0), CLB_ERR_ARGUMENT);
  CHECK_EQ(open_slot(&f, 0, 0, 1, 0, 0, 0), CLB_ERR_ARGUMENT);
  CHECK_EQ(open_slot(&f, 0, SEQ, 1, 0, 0, 0), CLB_ERR_ARGUMENT);
  CHECK_EQ(open_slot(&f, 0, 1, UINT32_MAX, 0, 0, 0), CLB_ERR_ARGUMENT);
  CHECK_EQ(open_slot(&f, 0, 10, 1, 1, 5, 0), CLB_ERR_ARGUMENT); /* run 1 is free */
  CHECK_EQ(open_slot(&f, 0, 10, 1, 0, 5, 0), CLB_ERR_ARGUMENT);
  CHECK_EQ(open_slot(&f, 0, 10, 1, 0, 0, 2 * SLOTS + 1), CLB_ERR_ARGUMENT);
  CHECK_EQ(open_slot(&f, 0, 10, 1, 0, 0, 1), CLB_OK);
  CHECK_EQ(open_slot(&f, 0, 10, 1, 0, 0, 2), CLB_ERR_STATE);
  CHECK_EQ(open_slot(&f, 1, 10, 1, 0, 0, 1), CLB_ERR_ARGUMENT); /* being filled */
  CHECK_EQ(open_slot(&f, 1, 20, 1, 1, 5, 0), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_cache_release_run(&f.cache, 1), CLB_ERR_STATE);
  CHECK_EQ(clb_cache_release_run(&f.cache, 0), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_cache_release_run(&f.cache, 2 * SLOTS + 1), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_cache_publish(&f.cache, 1), CLB_ERR_STATE);
  CHECK_EQ(clb_cache_publish(&f.cache, 0), CLB_OK);
  CHECK_EQ(clb_cache_publish(&f.cache, 0), CLB_ERR_STATE);
  CHECK_EQ(open_slot(&f, 1, 20, 1, 1, 11, 0), CLB_ERR_ARGUMENT); /* longer than the run */
  CHECK_EQ(open_slot(&f, 1, 10, 1, 1, 10, 0), CLB_ERR_ARGUMENT); /* nothing left to compute */
  CHECK_EQ(open_slot(&f, 1, 10, 1, 1, 0, 0), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_cache_slot_close(&f.cache, 1), CLB_ERR_STATE);
  CHECK_EQ(clb_cache_slot_copy(&f.cache, 1), CLB_ERR_STATE);
  CHECK_EQ(clb_cache_close(&f.cache), CLB_ERR_STATE);
  CHECK_EQ(clb_cache_check(&f.cache), CLB_OK);
  tear_down(&f);
}

/* A shared run lives as long as anybody holds it, and dies unpublished with its writer. */
static void shared_runs_are_counted(void) {
  static fixture f;
  set_up(&f, 4, 0);
  CHECK_EQ(open_slot(&f, 0, 40, 10, 0, 0, 3), CLB_OK);
  CHECK_EQ(clb_cache_slot_close(&f.cache, 0), CLB_OK);
  CHECK_EQ(clb_cache_used(&f.cache), 0);
  CHECK_EQ(open_slot(&f, 0, 40, 10, 0, 0, 3), CLB_OK);
  CHECK_EQ(clb_cache_publish(&f.cache, 0), CLB_OK);
  CHECK_EQ(open_slot(&f, 1, 41, 10, 3, 40, 0), CLB_OK);
  clb_kv_view writer;
  clb_kv_view reader;
  clb_cache_view(&f.cache, 0, 1, &writer);
  clb_cache_view(&f.cache, 1, 1, &reader);
  CHECK_EQ(writer.prefix_k, reader.prefix_k);
  CHECK_EQ(writer.prefix_v, reader.prefix_v);
  CHECK_EQ(reader.prefix_tokens, 40);
  CHECK_EQ(writer.own_capacity, 0);
  CHECK_EQ(writer.prefix_tokens, 50);
  CHECK(reader.own_capacity >= 11);
  CHECK_EQ(clb_cache_slot_close(&f.cache, 0), CLB_OK);
  CHECK_EQ(clb_cache_release_run(&f.cache, 3), CLB_OK);
  CHECK_EQ(clb_cache_release_run(&f.cache, 3), CLB_ERR_STATE);
  CHECK_EQ(open_slot(&f, 0, 5, 5, 0, 0, 3), CLB_ERR_ARGUMENT); /* the reader still holds it */
  CHECK_EQ(clb_cache_check(&f.cache), CLB_OK);
  CHECK_EQ(clb_cache_slot_close(&f.cache, 1), CLB_OK);
  CHECK_EQ(clb_cache_used(&f.cache), 0);
  CHECK_EQ(open_slot(&f, 0, 5, 5, 0, 0, 3), CLB_OK);
  tear_down(&f);
}

/* Others see the prompt when it is published, and the output as far as the writer says, never more than it has. */
static void published_runs_grow(void) {
  static fixture f;
  set_up(&f, 4, 0);
  CHECK_EQ(open_slot(&f, 0, 40, 30, 0, 0, 3), CLB_OK);
  CHECK_EQ(clb_cache_extend(&f.cache, 0, 50), CLB_ERR_STATE); /* publish first */
  CHECK(!clb_cache_run_has(&f.cache, 3, 1));
  CHECK_EQ(clb_cache_publish(&f.cache, 0), CLB_OK);
  CHECK(clb_cache_run_has(&f.cache, 3, 40));
  CHECK(!clb_cache_run_has(&f.cache, 3, 41));
  CHECK_EQ(clb_cache_extend(&f.cache, 0, 71), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_cache_extend(&f.cache, 0, 39), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_cache_extend(&f.cache, 0, 69), CLB_OK);
  CHECK_EQ(clb_cache_extend(&f.cache, 1, 1), CLB_ERR_STATE);
  CHECK_EQ(clb_cache_extend(&f.cache, SLOTS, 1), CLB_ERR_STATE);
  CHECK_EQ(clb_cache_slot_close(&f.cache, 0), CLB_OK);
  CHECK(clb_cache_run_has(&f.cache, 3, 69));
  CHECK(!clb_cache_run_has(&f.cache, 0, 0));
  CHECK(!clb_cache_run_has(&f.cache, 2u * SLOTS + 1u, 0));
  CHECK_EQ(open_slot(&f, 1, 80, 10, 3, 69, 0), CLB_OK);
  CHECK_EQ(clb_cache_release_run(&f.cache, 3), CLB_OK);
  CHECK(clb_cache_run_has(&f.cache, 3, 69)); /* as long as somebody holds it */
  CHECK_EQ(clb_cache_slot_close(&f.cache, 1), CLB_OK);
  CHECK(!clb_cache_run_has(&f.cache, 3, 1));
  CHECK_EQ(clb_cache_used(&f.cache), 0);
  tear_down(&f);
}

/* Where K (which = 0) or V of one position and head lies. */
static unsigned char* row_of(const fixture* f, uint32_t slot, uint32_t layer, uint32_t which, uint32_t head,
                             uint32_t p) {
  clb_kv_view view;
  clb_cache_view(&f->cache, slot, layer, &view);
  const int own = p >= view.prefix_tokens;
  const uint64_t base = own ? (which ? view.own_v : view.own_k) : (which ? view.prefix_v : view.prefix_k);
  const uint64_t capacity = own ? view.own_capacity : view.prefix_capacity;
  const uint64_t index = own ? p - view.prefix_tokens : p;
  CHECK(index < capacity);
  return (unsigned char*)f->memory.base + base + (head * capacity + index) * HEAD_DIM * f->config.element_bytes;
}

/* Write (check = 0) or verify marks for positions [0, count) of a slot, all layers, heads and both halves. */
static void mark(const fixture* f, uint32_t slot, uint32_t count, int check) {
  const size_t bytes = (size_t)HEAD_DIM * f->config.element_bytes;
  for (uint32_t layer = 0; layer < LAYERS; ++layer) {
    for (uint32_t which = 0; which < 2; ++which) {
      for (uint32_t head = 0; head < kv_heads[layer]; ++head) {
        for (uint32_t p = 0; p < count; ++p) {
          unsigned char* row = row_of(f, slot, layer, which, head, p);
          const unsigned char value = (unsigned char)(layer * 64u + which * 32u + head * 8u + p * 7u + 1u);
          if (!check) {
            memset(row, value, bytes);
            continue;
          }
          for (size_t i = 0; i < bytes; ++i)
            CHECK_EQ(row[i], value);
        }
      }
    }
  }
}

/* A slot that extends a shared prefix and publishes the longer prompt gets the older positions copied, then lets go. */
static void extending_a_prefix_copies_it(void) {
  static fixture f;
  for (uint32_t element = 2; element <= 4; element += 2) {
    set_up(&f, element, 0);
    CHECK_EQ(open_slot(&f, 0, 40, 10, 0, 0, 1), CLB_OK);
    mark(&f, 0, 40, 0);
    CHECK_EQ(clb_cache_publish(&f.cache, 0), CLB_OK);
    CHECK_EQ(clb_cache_slot_close(&f.cache, 0), CLB_OK);
    CHECK_EQ(open_slot(&f, 2, 90, 10, 1, 33, 2), CLB_OK);
    CHECK_EQ(clb_cache_release_run(&f.cache, 1), CLB_OK);
    CHECK_EQ(clb_cache_check(&f.cache), CLB_OK);
    CHECK_EQ(clb_cache_publish(&f.cache, 2), CLB_ERR_STATE); /* copy first */
    CHECK_EQ(f.cache.shared[1].refs, 1);
    CHECK_EQ(clb_cache_slot_copy(&f.cache, 2), CLB_OK);
    CHECK_EQ(f.cache.shared[1].refs, 0);
    CHECK_EQ(clb_cache_slot_copy(&f.cache, 2), CLB_OK);
    mark(&f, 2, 33, 1);
    CHECK_EQ(clb_cache_publish(&f.cache, 2), CLB_OK);
    CHECK_EQ(open_slot(&f, 3, 90, 10, 2, 33, 0), CLB_OK);
    mark(&f, 3, 33, 1);
    tear_down(&f);
  }
}

/* A pending copy is undone by closing, and without host memory it is left to the device. */
static void pending_copies_can_be_dropped(void) {
  static fixture f;
  clb_kv_copy copy;
  set_up(&f, 4, 0);
  f.cache.host_base = NULL;
  CHECK_EQ(open_slot(&f, 0, 40, 0, 0, 0, 1), CLB_OK);
  CHECK_EQ(clb_cache_publish(&f.cache, 0), CLB_OK);
  CHECK_EQ(open_slot(&f, 1, 60, 0, 1, 20, 2), CLB_OK);
  CHECK(!clb_cache_copy_pending(&f.cache, 0, &copy));
  CHECK(clb_cache_copy_pending(&f.cache, 1, &copy));
  CHECK_EQ(copy.row_bytes, 32u * HEAD_DIM * 4u); /* 20 tokens are 2 tiles */
  CHECK_EQ(copy.from_pitch, 48u * HEAD_DIM * 4u);
  CHECK_EQ(copy.to_pitch, 64u * HEAD_DIM * 4u);
  CHECK_EQ(copy.rows, 2u * (2 + 1 + 4));
  CHECK(copy.from != copy.to);
  CHECK_EQ(clb_cache_slot_copy(&f.cache, 1), CLB_ERR_STATE);
  CHECK_EQ(clb_cache_slot_close(&f.cache, 1), CLB_OK);
  CHECK_EQ(clb_cache_check(&f.cache), CLB_OK);
  CHECK_EQ(open_slot(&f, 1, 60, 0, 1, 20, 2), CLB_OK);
  clb_cache_slot_copied(&f.cache, 1);
  CHECK_EQ(clb_cache_publish(&f.cache, 1), CLB_OK);
  tear_down(&f);
}

/* A freed run reads as NaN in test builds; other builds leave it alone. */
static void freed_runs_are_poisoned(void) {
  static fixture f;
  set_up(&f, 4, 0);
  CHECK_EQ(open_slot(&f, 0, 4, 4, 0, 0, 0), CLB_OK);
  mark(&f, 0, 4, 0);
  const unsigned char* row = row_of(&f, 0, 0, 0, 0, 0);
  CHECK_EQ(clb_cache_slot_close(&f.cache, 0), CLB_OK);
#ifdef CLB_POISON
  CHECK_EQ(row[0], 0xff);
#else
  CHECK_EQ(row[0], 1);
#endif
  tear_down(&f);
}

/* The check notices a lost reference, a lost run and a wrong state. */
static void check_finds_damage(void) {
  static fixture f;
  set_up(&f, 4, 0);
  CHECK_EQ(open_slot(&f, 0, 40, 10, 0, 0, 1), CLB_OK);
  CHECK_EQ(clb_cache_check(&f.cache), CLB_OK);
  f.cache.shared[1].refs++;
  CHECK_EQ(clb_cache_check(&f.cache), CLB_ERR_INTERNAL);
  f.cache.shared[1].refs--;
  f.cache.shared[1].state = 2;
  CHECK_EQ(clb_cache_check(&f.cache), CLB_ERR_INTERNAL);
  f.cache.shared[1].state = 1;
  f.cache.slot[0].own.extent.bytes -= PAGE;
  CHECK_EQ(clb_cache_check(&f.cache), CLB_ERR_INTERNAL);
  f.cache.slot[0].own.extent.bytes += PAGE;
  f.pool.tiers[CLB_TIER_KV].used += PAGE;
  CHECK_EQ(clb_cache_check(&f.cache), CLB_ERR_INTERNAL);
  f.pool.tiers[CLB_TIER_KV].used -= PAGE;
  tear_down(&f);
}

static void random_open(fixture* f, uint32_t slot, uint64_t* seed) {
  const uint32_t prompt = 1u + (uint32_t)(clb_test_random(seed) % SEQ);
  const uint32_t max = (uint32_t)(clb_test_random(seed) % (SEQ - prompt + 1u));
  uint32_t prefix = clb_test_random(seed) % 2 ? 1u + (uint32_t)(clb_test_random(seed) % (2u * SLOTS)) : 0;
  uint32_t tokens = 0;
  if (prefix != 0) {
    tokens = f->cache.shared[prefix].tokens;
    if (f->cache.shared[prefix].state != 2 || prompt < 2) prefix = tokens = 0;
    if (tokens >= prompt) tokens = prompt - 1u;
  }
  uint32_t publish = clb_test_random(seed) % 2 ? 1u + (uint32_t)(clb_test_random(seed) % (2u * SLOTS)) : 0;
  if (publish != 0 && f->cache.shared[publish].state != 0) publish = 0;
  const uint64_t used = clb_cache_used(&f->cache);
  const int32_t status = open_slot(f, slot, prompt, max, prefix, tokens, publish);
  CHECK(status == CLB_OK || status == CLB_ERR_FULL || status == CLB_ERR_MEMORY);
  if (status != CLB_OK) CHECK_EQ(clb_cache_used(&f->cache), used);
  if (status == CLB_OK) CHECK(clb_cache_slot_tokens(&f->cache, slot) >= prompt + max);
}

/* Random openings, copies, publications, releases and closings in a tight tier keep every invariant. */
static void random_slots_conserve(void) {
  static fixture f;
  uint64_t seed = 31;
  const int operations = getenv("CLB_TEST_SHORT") != NULL ? 5000 : 200000;
  set_up(&f, 2, 40);
  for (int op = 0; op < operations; ++op) {
    const uint32_t slot = (uint32_t)(clb_test_random(&seed) % SLOTS);
    const uint32_t run = 1u + (uint32_t)(clb_test_random(&seed) % (2u * SLOTS));
    const uint64_t what = clb_test_random(&seed) % 6u;
    if (!f.cache.slot[slot].open) {
      random_open(&f, slot, &seed);
    } else if (what == 0) {
      CHECK_EQ(clb_cache_slot_close(&f.cache, slot), CLB_OK);
    } else if (what == 1) {
      CHECK_EQ(clb_cache_slot_copy(&f.cache, slot), CLB_OK);
    } else if (what == 2 && f.cache.slot[slot].publishes == 2) {
      CHECK_EQ(clb_cache_extend(&f.cache, slot, f.cache.slot[slot].prefix_tokens), CLB_OK);
    } else if (what <= 3) {
      const int ready = f.cache.slot[slot].publishes == 1 && f.cache.slot[slot].copy_from == 0;
      CHECK_EQ(clb_cache_publish(&f.cache, slot), ready ? CLB_OK : CLB_ERR_STATE);
    } else {
      const int held = f.cache.shared[run].daemon != 0;
      CHECK_EQ(clb_cache_release_run(&f.cache, run), held ? CLB_OK : CLB_ERR_STATE);
    }
    CHECK_EQ(clb_cache_check(&f.cache), CLB_OK);
  }
  tear_down(&f);
}

/* Dispatch buffers are disjoint, aligned, as large as the worst step needs, and come from the temp tier. */
static void dispatch_buffers_fit_the_worst_step(void) {
  static fixture f;
  const clb_dispatch_config config = {.tokens = 37, .k_max = 3, .experts = 11, .width = 29, .hidden = 13};
  clb_dispatch_layout at;
  clb_extent extent;
  CHECK_EQ(clb_dispatch_plan(&config, &at), CLB_OK);
  const uint64_t parts[][2] = {{at.logits, 37 * 11},     {at.indices, 37 * 3},
                               {at.weights, 37 * 3},     {at.kept, 37},
                               {at.trimmed, 37},         {at.dropped, 37},
                               {at.status, 37},          {at.counts, 11},
                               {at.offsets, 12},         {at.token_list, 37 * 3},
                               {at.place_list, 37 * 3},  {at.activation, 37 * 3 * 29},
                               {at.output, 37 * 3 * 13}, {at.bytes, 0}};
  for (unsigned i = 0; i + 1 < 14; ++i) {
    CHECK_EQ(parts[i][0] % 64, 0);
    CHECK(parts[i][0] + parts[i][1] * 4u <= parts[i + 1][0]);
  }
  set_up(&f, 4, 0);
  CHECK_EQ(clb_dispatch_open(&f.pool, &at, &extent), CLB_OK);
  CHECK_EQ(extent.tier, CLB_TIER_TEMP);
  CHECK(extent.bytes >= at.bytes);
  CHECK_EQ(f.pool.tiers[CLB_TIER_TEMP].class_blocks[CLB_MEM_DISPATCH], 1);
  CHECK_EQ(clb_pool_free(&f.pool, &extent), CLB_OK);
  tear_down(&f);
}

/* A model without MoE layers takes nothing; values beyond the limits are refused. */
static void dispatch_limits(void) {
  clb_dispatch_config config = {.tokens = 1, .k_max = 0};
  clb_dispatch_layout layout;
  CHECK_EQ(clb_dispatch_plan(&config, &layout), CLB_OK);
  CHECK_EQ(layout.bytes, 0);
  config.k_max = CLB_MAX_EXPERTS_PER_TOKEN + 1u;
  CHECK_EQ(clb_dispatch_plan(&config, &layout), CLB_ERR_ARGUMENT);
  config = (clb_dispatch_config){.tokens = 0, .k_max = 1};
  CHECK_EQ(clb_dispatch_plan(&config, &layout), CLB_ERR_ARGUMENT);
  config.tokens = CLB_DISPATCH_MAX_TOKENS + 1u;
  CHECK_EQ(clb_dispatch_plan(&config, &layout), CLB_ERR_ARGUMENT);
  config.tokens = 1;
  config.experts = CLB_MAX_EXPERTS + 1u;
  CHECK_EQ(clb_dispatch_plan(&config, &layout), CLB_ERR_ARGUMENT);
  config.experts = 1;
  config.width = CLB_DISPATCH_MAX_COLS + 1u;
  CHECK_EQ(clb_dispatch_plan(&config, &layout), CLB_ERR_ARGUMENT);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(run_sizes_waste_little),
                                   TEST(plan_refuses_bad_configurations),
                                   TEST(views_are_disjoint),
                                   TEST(planned_tier_holds_all_slots),
                                   TEST(full_and_never),
                                   TEST(bad_requests_are_refused),
                                   TEST(shared_runs_are_counted),
                                   TEST(published_runs_grow),
                                   TEST(extending_a_prefix_copies_it),
                                   TEST(pending_copies_can_be_dropped),
                                   TEST(freed_runs_are_poisoned),
                                   TEST(check_finds_damage),
                                   TEST(random_slots_conserve),
                                   TEST(dispatch_buffers_fit_the_worst_step),
                                   TEST(dispatch_limits)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
