/*
 * cache_pool.c: see cache_pool.h for the drawing of a run, the life of a shared run and the size classes.
 *
 * Owns the blocks of the KV tier, all of them: invariant: the sum of run bytes is the tier's used bytes, and each
 * shared run's refs is the number of slots that see or copy it plus one for the daemon.
 * Does not: look into requests of other slots, wait, or decide who goes first.
 */
#include "cache_pool.h"

#include <string.h>

#include "invariant.h"

enum { RUN_FREE = 0, RUN_FILLING = 1, RUN_PUBLISHED = 2 };

#define ALIGN 64u

/* -------------------------------------------------------------- run sizes */

uint32_t clb_cache_capacity(uint32_t tokens) {
  uint32_t step = 1;
  while (tokens / step > 16u || (tokens / step == 16u && tokens % step != 0u)) {
    step *= 2;
  }
  const uint32_t steps = tokens / step + (tokens % step != 0u ? 1u : 0u);
  return (steps * step + CLB_CACHE_TILE - 1u) / CLB_CACHE_TILE * CLB_CACHE_TILE;
}

static int32_t cache_config_valid(const clb_cache_config* config) {
  if (config->slots < 1u || config->slots > CLB_MAX_SLOTS) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->layers < 1u || config->layers > CLB_MAX_LAYERS || config->layer_table == NULL) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->head_dim < 1u || config->head_dim > 256u) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->element_bytes != 2u && config->element_bytes != 4u) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->max_seq_len < 1u || config->max_seq_len > CLB_MAX_SEQ_LEN) {
    return CLB_ERR_ARGUMENT;
  }
  for (uint32_t layer = 0; layer < config->layers; ++layer) {
    const uint32_t values = config->layer_table[layer].kv_values_per_token;
    if (values > CLB_CACHE_MAX_VALUES || values % (2u * config->head_dim) != 0u) {
      return CLB_ERR_ARGUMENT;
    }
  }
  return CLB_OK;
}

int32_t clb_cache_plan(const clb_cache_config* config, uint32_t page_bytes, clb_cache_plan_result* plan) {
  CLB_ASSERT(config != NULL);
  CLB_ASSERT(plan != NULL);
  (void)memset(plan, 0, sizeof *plan);
  if (cache_config_valid(config) != CLB_OK) {
    return CLB_ERR_ARGUMENT;
  }
  if (page_bytes < CLB_POOL_MIN_PAGE || page_bytes > CLB_POOL_MAX_PAGE) {
    return CLB_ERR_ARGUMENT;
  }
  if ((page_bytes & (page_bytes - 1u)) != 0u) {
    return CLB_ERR_ARGUMENT;
  }
  uint64_t values = 0;
  for (uint32_t layer = 0; layer < config->layers; ++layer) {
    values += config->layer_table[layer].kv_values_per_token;
  }
  /* at most 2^8 layers * 2^20 values * 4 bytes * 2^20 tokens * 2^6 slots: below 2^57 */
  plan->bytes_per_token = values * config->element_bytes;
  const uint64_t run = plan->bytes_per_token * clb_cache_capacity(config->max_seq_len);
  /* a shared prompt and an output in two runs round up twice: by less than an eighth and one page more than in one */
  plan->bytes_all = config->slots * clb_pool_round(run, page_bytes) + clb_pool_round(run / 8u, page_bytes) + page_bytes;
  plan->tokens_all = (uint64_t)config->slots * clb_cache_capacity(config->max_seq_len);
  plan->nodes = 2u * (config->slots + 2u * config->slots) + 1u;
  return CLB_OK;
}

int32_t clb_cache_open(clb_cache* cache, clb_pool* pool, const clb_cache_config* config) {
  CLB_ASSERT(cache != NULL);
  CLB_ASSERT(pool != NULL);
  (void)memset(cache, 0, sizeof *cache);
  if (cache_config_valid(config) != CLB_OK) {
    return CLB_ERR_ARGUMENT;
  }
  cache->pool = pool;
  cache->host_base = config->host_base;
  cache->slots = config->slots;
  cache->layers = config->layers;
  cache->head_dim = config->head_dim;
  cache->element_bytes = config->element_bytes;
  cache->max_seq_len = config->max_seq_len;
  for (uint32_t layer = 0; layer < config->layers; ++layer) {
    cache->layer_values[layer + 1u] = cache->layer_values[layer] + config->layer_table[layer].kv_values_per_token;
  }
  for (uint32_t i = 0; i < CLB_MAX_SLOTS; ++i) {
    cache->slot[i].own.extent.node = CLB_POOL_NONE;
  }
  for (uint32_t i = 0; i <= CLB_MAX_RUNS; ++i) {
    cache->shared[i].extent.node = CLB_POOL_NONE;
  }
  return CLB_OK;
}

/* ------------------------------------------------------------------- runs */

static uint64_t run_bytes(const clb_cache* cache, uint32_t capacity) {
  return cache->layer_values[cache->layers] * cache->element_bytes * capacity;
}

static int32_t run_alloc(clb_cache* cache, clb_run* run, uint32_t capacity, uint32_t mem_class) {
  const uint64_t bytes = run_bytes(cache, capacity);
  if (bytes > 0u) {
    const int32_t status = clb_pool_alloc(cache->pool, CLB_TIER_KV, bytes, 0, mem_class, &run->extent);
    if (status != CLB_OK) {
      return status;
    }
  }
  run->capacity = capacity;
  return CLB_OK;
}

static void run_free(clb_cache* cache, clb_run* run) {
#ifdef CLB_POISON
  /* whoever reads a run after its end reads NaN, in fp32 and in fp16 */
  if (cache->host_base != NULL && run->extent.node != CLB_POOL_NONE) {
    (void)memset(cache->host_base + run->extent.offset, 0xff, (size_t)run->extent.bytes);
  }
#endif
  const int32_t status = clb_pool_free(cache->pool, &run->extent);
  CLB_ASSERT(status == CLB_OK);
  (void)memset(run, 0, sizeof *run);
  run->extent.node = CLB_POOL_NONE;
}

static void run_unref(clb_cache* cache, uint32_t id) {
  clb_run* run = &cache->shared[id];
  CLB_ASSERT(run->state != RUN_FREE);
  CLB_ASSERT(run->refs > 0u);
  --run->refs;
  if (run->refs == 0u) {
    run_free(cache, run);
  }
}

/* ------------------------------------------------------------------ slots */

bool clb_cache_run_has(const clb_cache* cache, uint32_t run, uint32_t tokens) {
  return run <= 2u * cache->slots && cache->shared[run].state == RUN_PUBLISHED && cache->shared[run].stale == 0u &&
         cache->shared[run].tokens >= tokens;
}

void clb_cache_forget(clb_cache* cache) {
  for (uint32_t run = 1; run <= 2u * cache->slots; ++run) {
    if (cache->shared[run].state != RUN_FREE) {
      cache->shared[run].stale = 1;
    }
  }
}

static int32_t request_valid(const clb_cache* cache, const clb_cache_request* request) {
  const uint32_t runs = 2u * cache->slots;
  if (request->prompt_tokens < 1u || request->prompt_tokens > cache->max_seq_len) {
    return CLB_ERR_ARGUMENT;
  }
  if (request->max_tokens > cache->max_seq_len - request->prompt_tokens) {
    return CLB_ERR_ARGUMENT;
  }
  if (request->prefix_run > runs || request->publish_run > runs) {
    return CLB_ERR_ARGUMENT;
  }
  if (request->prefix_run != 0u) {
    if (!clb_cache_run_has(cache, request->prefix_run, request->prefix_tokens)) {
      return CLB_ERR_ARGUMENT;
    }
    if (request->prefix_tokens == 0u || request->prefix_tokens >= request->prompt_tokens) {
      return CLB_ERR_ARGUMENT;
    }
  }
  if (request->prefix_run == 0u && request->prefix_tokens != 0u) {
    return CLB_ERR_ARGUMENT;
  }
  if (request->publish_run != 0u && cache->shared[request->publish_run].state != RUN_FREE) {
    return CLB_ERR_ARGUMENT;
  }
  return CLB_OK;
}

/* Both runs at once, or nothing. MEMORY: never; FULL: not now. */
static int32_t runs_alloc(clb_cache* cache, uint32_t shared_capacity, uint32_t own_capacity, uint32_t prefix_run,
                          clb_run* shared, clb_run* own) {
  const uint32_t page = cache->pool->tiers[CLB_TIER_KV].page_bytes;
  const uint64_t held = prefix_run != 0u ? cache->shared[prefix_run].extent.bytes : 0u;
  const uint64_t needed =
      clb_pool_round(run_bytes(cache, shared_capacity), page) + clb_pool_round(run_bytes(cache, own_capacity), page);
  if (!clb_pool_could_fit(cache->pool, CLB_TIER_KV, needed + held)) {
    return CLB_ERR_MEMORY;
  }
  if (run_alloc(cache, shared, shared_capacity, CLB_MEM_SHARED_RUN) != CLB_OK) {
    return CLB_ERR_FULL;
  }
  if (run_alloc(cache, own, own_capacity, CLB_MEM_OWN_RUN) != CLB_OK) {
    run_free(cache, shared);
    return CLB_ERR_FULL;
  }
  return CLB_OK;
}

int32_t clb_cache_slot_open(clb_cache* cache, uint32_t slot, const clb_cache_request* request) {
  CLB_ASSERT(request != NULL);
  if (slot >= cache->slots) {
    return CLB_ERR_ARGUMENT;
  }
  clb_cache_slot* into = &cache->slot[slot];
  if (into->open != 0u) {
    return CLB_ERR_STATE;
  }
  if (request_valid(cache, request) != CLB_OK) {
    return CLB_ERR_ARGUMENT;
  }
  const uint32_t publish = request->publish_run;
  const uint32_t tokens = request->prompt_tokens + request->max_tokens;
  const uint32_t in_prefix = publish != 0u ? tokens : request->prefix_tokens;
  const uint32_t own_tokens = tokens - in_prefix;
  const uint32_t shared_tokens = publish != 0u ? tokens : 0u;
  clb_run shared = {.extent = {.node = CLB_POOL_NONE}};
  clb_run own = {.extent = {.node = CLB_POOL_NONE}};
  const int32_t status = runs_alloc(cache, clb_cache_capacity(shared_tokens), clb_cache_capacity(own_tokens),
                                    request->prefix_run, &shared, &own);
  if (status != CLB_OK) {
    return status;
  }
  into->open = 1;
  into->own = own;
  into->prefix_tokens = in_prefix;
  into->prefix = publish != 0u ? publish : request->prefix_run;
  if (request->prefix_run != 0u) {
    ++cache->shared[request->prefix_run].refs;
  }
  if (publish != 0u) {
    shared.state = RUN_FILLING;
    shared.refs = 1;
    shared.tokens = request->prompt_tokens;
    cache->shared[publish] = shared;
    into->publishes = 1;
    into->copy_from = request->prefix_run;
    into->copy_tokens = request->prefix_tokens;
  }
  return CLB_OK;
}

int32_t clb_cache_slot_close(clb_cache* cache, uint32_t slot) {
  if (slot >= cache->slots || cache->slot[slot].open == 0u) {
    return CLB_ERR_STATE;
  }
  clb_cache_slot* of = &cache->slot[slot];
  run_free(cache, &of->own);
  if (of->copy_from != 0u) {
    run_unref(cache, of->copy_from);
  }
  if (of->prefix != 0u) {
    run_unref(cache, of->prefix);
  }
  (void)memset(of, 0, sizeof *of);
  of->own.extent.node = CLB_POOL_NONE;
  return CLB_OK;
}

int32_t clb_cache_publish(clb_cache* cache, uint32_t slot) {
  if (slot >= cache->slots || cache->slot[slot].open == 0u) {
    return CLB_ERR_STATE;
  }
  clb_cache_slot* of = &cache->slot[slot];
  if (of->publishes != 1u || of->copy_from != 0u) {
    return CLB_ERR_STATE;
  }
  clb_run* run = &cache->shared[of->prefix];
  CLB_ASSERT(run->state == RUN_FILLING);
  run->state = RUN_PUBLISHED;
  run->daemon = 1;
  ++run->refs;
  of->publishes = 2;
  return CLB_OK;
}

int32_t clb_cache_extend(clb_cache* cache, uint32_t slot, uint32_t tokens) {
  if (slot >= cache->slots || cache->slot[slot].publishes != 2u) {
    return CLB_ERR_STATE;
  }
  clb_run* run = &cache->shared[cache->slot[slot].prefix];
  if (tokens > cache->slot[slot].prefix_tokens || tokens < run->tokens) {
    return CLB_ERR_ARGUMENT;
  }
  run->tokens = tokens;
  return CLB_OK;
}

int32_t clb_cache_release_run(clb_cache* cache, uint32_t run) {
  if (run < 1u || run > 2u * cache->slots) {
    return CLB_ERR_ARGUMENT;
  }
  if (cache->shared[run].daemon == 0u) {
    return CLB_ERR_STATE;
  }
  cache->shared[run].daemon = 0;
  run_unref(cache, run);
  return CLB_OK;
}

/* ------------------------------------------------------------------ views */

static uint64_t layer_half(const clb_cache* cache, uint32_t layer) {
  return (cache->layer_values[layer + 1u] - cache->layer_values[layer]) / 2u * cache->element_bytes;
}

static uint64_t layer_k(const clb_cache* cache, const clb_run* run, uint32_t layer) {
  return run->extent.offset + run->capacity * cache->layer_values[layer] * cache->element_bytes;
}

static void view_prefix(const clb_cache* cache, uint32_t id, uint32_t tokens, uint32_t layer, clb_kv_view* view) {
  const clb_run* run = &cache->shared[id];
  CLB_ASSERT(tokens <= run->capacity);
  view->prefix_k = layer_k(cache, run, layer);
  view->prefix_v = view->prefix_k + run->capacity * layer_half(cache, layer);
  view->prefix_tokens = tokens;
  view->prefix_capacity = run->capacity;
}

void clb_cache_view(const clb_cache* cache, uint32_t slot, uint32_t layer, clb_kv_view* view) {
  CLB_ASSERT(slot < cache->slots);
  CLB_ASSERT(layer < cache->layers);
  const clb_cache_slot* of = &cache->slot[slot];
  CLB_ASSERT(of->open != 0u);
  (void)memset(view, 0, sizeof *view);
  if (of->prefix != 0u) {
    view_prefix(cache, of->prefix, of->prefix_tokens, layer, view);
  }
  if (of->own.capacity != 0u) {
    view->own_k = layer_k(cache, &of->own, layer);
    view->own_v = view->own_k + of->own.capacity * layer_half(cache, layer);
    view->own_capacity = of->own.capacity;
  }
  view->kv_heads = (uint32_t)((cache->layer_values[layer + 1u] - cache->layer_values[layer]) / 2u / cache->head_dim);
}

/* A run is one row after the other, each `capacity` tokens of one head: K or V of some layer. K in whole tiles, and V
   with it: what a tile holds beyond the last position is written before it is read. */
bool clb_cache_copy_pending(const clb_cache* cache, uint32_t slot, clb_kv_copy* copy) {
  CLB_ASSERT(slot < cache->slots);
  const clb_cache_slot* of = &cache->slot[slot];
  const uint64_t token_bytes = (uint64_t)cache->head_dim * cache->element_bytes;
  if (of->open == 0u || of->copy_from == 0u) {
    return false;
  }
  const clb_run* from = &cache->shared[of->copy_from];
  const clb_run* to = &cache->shared[of->prefix];
  CLB_ASSERT(of->copy_tokens <= from->tokens);
  *copy = (clb_kv_copy){
      .from = from->extent.offset,
      .to = to->extent.offset,
      .from_pitch = from->capacity * token_bytes,
      .to_pitch = to->capacity * token_bytes,
      .row_bytes = clb_pool_round(of->copy_tokens, CLB_CACHE_TILE) * token_bytes,
      .rows = cache->layer_values[cache->layers] / cache->head_dim,
  };
  return true;
}

void clb_cache_slot_copied(clb_cache* cache, uint32_t slot) {
  CLB_ASSERT(slot < cache->slots);
  clb_cache_slot* of = &cache->slot[slot];
  CLB_ASSERT(of->copy_from != 0u);
  run_unref(cache, of->copy_from);
  of->copy_from = 0;
  of->copy_tokens = 0;
}

int32_t clb_cache_slot_copy(clb_cache* cache, uint32_t slot) {
  clb_kv_copy copy;
  if (slot >= cache->slots || cache->slot[slot].open == 0u) {
    return CLB_ERR_STATE;
  }
  if (!clb_cache_copy_pending(cache, slot, &copy)) {
    return CLB_OK;
  }
  if (cache->host_base == NULL) {
    return CLB_ERR_STATE;
  }
  for (uint64_t row = 0; row < copy.rows; ++row) {
    (void)memcpy(cache->host_base + copy.to + row * copy.to_pitch, cache->host_base + copy.from + row * copy.from_pitch,
                 (size_t)copy.row_bytes);
  }
  clb_cache_slot_copied(cache, slot);
  return CLB_OK;
}

uint32_t clb_cache_slot_tokens(const clb_cache* cache, uint32_t slot) {
  CLB_ASSERT(slot < cache->slots);
  CLB_ASSERT(cache->slot[slot].open != 0u);
  return cache->slot[slot].prefix_tokens + cache->slot[slot].own.capacity;
}

uint64_t clb_cache_used(const clb_cache* cache) { return cache->pool->tiers[CLB_TIER_KV].used; }

/* ------------------------------------------------------------------ check */

static bool shared_holds(const clb_cache* cache, uint32_t id) {
  const clb_run* run = &cache->shared[id];
  uint32_t refs = run->daemon;
  uint32_t writers = 0;
  for (uint32_t s = 0; s < cache->slots; ++s) {
    const clb_cache_slot* slot = &cache->slot[s];
    if (slot->prefix == id) {
      ++refs;
    }
    if (slot->copy_from == id) {
      ++refs;
    }
    if (slot->prefix == id && slot->publishes == 1u) {
      ++writers;
    }
  }
  if (run->refs != refs) {
    return false;
  }
  switch (run->state) {
    case RUN_FREE:
      return refs == 0u && run->capacity == 0u && run->extent.node == CLB_POOL_NONE;
    case RUN_FILLING:
      return refs == 1u && writers == 1u && run->daemon == 0u && run->tokens <= run->capacity;
    case RUN_PUBLISHED:
      return refs >= 1u && writers == 0u && run->tokens <= run->capacity;
    default:
      return false;
  }
}

int32_t clb_cache_check(const clb_cache* cache) {
  CLB_ASSERT(cache != NULL);
  uint64_t own = 0;
  uint64_t shared = 0;
  for (uint32_t s = 0; s < cache->slots; ++s) {
    const clb_cache_slot* slot = &cache->slot[s];
    own += slot->own.extent.bytes;
    if (slot->open == 0u && (slot->own.capacity != 0u || slot->prefix != 0u || slot->copy_from != 0u)) {
      return CLB_ERR_INTERNAL;
    }
    if (slot->prefix == 0u && slot->prefix_tokens != 0u) {
      return CLB_ERR_INTERNAL;
    }
  }
  for (uint32_t id = 1; id <= 2u * cache->slots; ++id) {
    shared += cache->shared[id].extent.bytes;
    if (!shared_holds(cache, id)) {
      return CLB_ERR_INTERNAL;
    }
  }
  const clb_pool_tier* tier = &cache->pool->tiers[CLB_TIER_KV];
  if (own != tier->class_bytes[CLB_MEM_OWN_RUN] || shared != tier->class_bytes[CLB_MEM_SHARED_RUN]) {
    return CLB_ERR_INTERNAL;
  }
  if (own + shared != tier->used) {
    return CLB_ERR_INTERNAL;
  }
  return clb_pool_check(cache->pool);
}

int32_t clb_cache_close(clb_cache* cache) {
  CLB_ASSERT(cache != NULL);
  for (uint32_t s = 0; s < cache->slots; ++s) {
    if (cache->slot[s].open != 0u) {
      return CLB_ERR_STATE;
    }
  }
  for (uint32_t id = 1; id <= 2u * cache->slots; ++id) {
    if (cache->shared[id].daemon != 0u) {
      (void)clb_cache_release_run(cache, id);
    }
  }
  (void)memset(cache, 0, sizeof *cache);
  return CLB_OK;
}

/* ------------------------------------------------- expert dispatch buffers */

/* Place a * b * c 4-byte elements at the next multiple of 64. The limits keep every product below 2^56. */
static uint64_t place_array(uint64_t* end, uint64_t a, uint64_t b, uint64_t c) {
  const uint64_t at = clb_pool_round(*end, ALIGN);
  *end = at + a * b * c * 4u;
  return at;
}

int32_t clb_dispatch_plan(const clb_dispatch_config* config, clb_dispatch_layout* layout) {
  CLB_ASSERT(config != NULL);
  CLB_ASSERT(layout != NULL);
  (void)memset(layout, 0, sizeof *layout);
  if (config->k_max > CLB_MAX_EXPERTS_PER_TOKEN || config->experts > CLB_MAX_EXPERTS) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->k_max == 0u) {
    return CLB_OK;
  }
  if (config->tokens < 1u || config->tokens > CLB_DISPATCH_MAX_TOKENS) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->width > CLB_DISPATCH_MAX_COLS || config->hidden > CLB_DISPATCH_MAX_COLS) {
    return CLB_ERR_ARGUMENT;
  }
  const uint64_t tokens = config->tokens;
  const uint64_t k = config->k_max;
  uint64_t end = 0;
  layout->logits = place_array(&end, tokens, config->experts, 1);
  layout->indices = place_array(&end, tokens, k, 1);
  layout->weights = place_array(&end, tokens, k, 1);
  layout->kept = place_array(&end, tokens, 1, 1);
  layout->trimmed = place_array(&end, tokens, 1, 1);
  layout->dropped = place_array(&end, tokens, 1, 1);
  layout->status = place_array(&end, tokens, 1, 1);
  layout->counts = place_array(&end, config->experts, 1, 1);
  layout->offsets = place_array(&end, config->experts + 1u, 1, 1);
  layout->token_list = place_array(&end, tokens, k, 1);
  layout->place_list = place_array(&end, tokens, k, 1);
  layout->activation = place_array(&end, tokens, k, config->width);
  layout->output = place_array(&end, tokens, k, config->hidden);
  layout->bytes = place_array(&end, 0, 0, 0);
  return CLB_OK;
}

int32_t clb_dispatch_open(clb_pool* pool, const clb_dispatch_layout* layout, clb_extent* extent) {
  (void)memset(extent, 0, sizeof *extent);
  extent->node = CLB_POOL_NONE;
  if (layout->bytes == 0u) {
    return CLB_OK;
  }
  return clb_pool_alloc(pool, CLB_TIER_TEMP, layout->bytes, ALIGN, CLB_MEM_DISPATCH, extent);
}
