/*
 * memory_pool.c: see memory_pool.h for the drawing, the invariant and the policy.
 *
 * Owns the links between nodes, nothing else: neither the memory of a tier nor the node arrays.
 * Does not: touch a tier's bytes, lock, allocate.
 */
#include "memory_pool.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "invariant.h"

enum { NODE_SPARE = 0, NODE_FREE = 1, NODE_USED = 2 };

static bool is_power_of_two(uint64_t value) { return value != 0u && (value & (value - 1u)) == 0u; }

uint64_t clb_pool_round(uint64_t bytes, uint32_t page_bytes) {
  CLB_ASSERT(is_power_of_two(page_bytes));
  const uint64_t mask = (uint64_t)page_bytes - 1u;
  return bytes > UINT64_MAX - mask ? UINT64_MAX : (bytes + mask) & ~mask;
}

/* ------------------------------------------------------------------ nodes */

static uint32_t node_take(clb_pool_tier* tier) {
  const uint32_t index = tier->spare;
  CLB_ASSERT(index != CLB_POOL_NONE);
  CLB_ASSERT(tier->nodes[index].state == NODE_SPARE);
  tier->spare = tier->nodes[index].next;
  return index;
}

static void node_give(clb_pool_tier* tier, uint32_t index) {
  clb_pool_node* node = &tier->nodes[index];
  (void)memset(node, 0, sizeof *node);
  node->state = NODE_SPARE;
  node->next = tier->spare;
  tier->spare = index;
}

/* Put a new block behind `index` in address order: bytes [offset, offset + bytes). */
static uint32_t block_after(clb_pool_tier* tier, uint32_t index, uint64_t offset, uint64_t bytes) {
  const uint32_t created = node_take(tier);
  clb_pool_node* node = &tier->nodes[created];
  clb_pool_node* left = &tier->nodes[index];
  node->offset = offset;
  node->bytes = bytes;
  node->prev = index;
  node->next = left->next;
  if (left->next != CLB_POOL_NONE) {
    tier->nodes[left->next].prev = created;
  }
  left->next = created;
  ++tier->blocks;
  return created;
}

/* Join block `index` with its right neighbour, whose node is given back. */
static void block_join(clb_pool_tier* tier, uint32_t index) {
  clb_pool_node* left = &tier->nodes[index];
  const uint32_t right_index = left->next;
  const clb_pool_node* right = &tier->nodes[right_index];
  CLB_ASSERT(left->offset + left->bytes == right->offset);
  left->bytes += right->bytes;
  left->next = right->next;
  if (right->next != CLB_POOL_NONE) {
    tier->nodes[right->next].prev = index;
  }
  node_give(tier, right_index);
  --tier->blocks;
}

/* -------------------------------------------------------------- free list */

static void free_link(clb_pool_tier* tier, uint32_t index, uint32_t before, uint32_t after) {
  clb_pool_node* node = &tier->nodes[index];
  node->state = NODE_FREE;
  node->free_prev = before;
  node->free_next = after;
  if (before != CLB_POOL_NONE) {
    tier->nodes[before].free_next = index;
  } else {
    tier->free_first = index;
  }
  if (after != CLB_POOL_NONE) {
    tier->nodes[after].free_prev = index;
  }
  ++tier->free_blocks;
}

static void free_unlink(clb_pool_tier* tier, uint32_t index) {
  const clb_pool_node* node = &tier->nodes[index];
  CLB_ASSERT(node->state == NODE_FREE);
  if (node->free_prev != CLB_POOL_NONE) {
    tier->nodes[node->free_prev].free_next = node->free_next;
  } else {
    tier->free_first = node->free_next;
  }
  if (node->free_next != CLB_POOL_NONE) {
    tier->nodes[node->free_next].free_prev = node->free_prev;
  }
  --tier->free_blocks;
}

static void free_insert(clb_pool_tier* tier, uint32_t index) {
  uint32_t before = CLB_POOL_NONE;
  uint32_t after = tier->free_first;
  while (after != CLB_POOL_NONE && tier->nodes[after].offset < tier->nodes[index].offset) {
    before = after;
    after = tier->nodes[after].free_next;
  }
  free_link(tier, index, before, after);
}

/* ------------------------------------------------------------- open, close */

static int32_t tier_valid(const clb_pool_tier_config* config) {
  if (!is_power_of_two(config->page_bytes)) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->page_bytes < CLB_POOL_MIN_PAGE || config->page_bytes > CLB_POOL_MAX_PAGE) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->nodes == NULL || config->node_count == 0u) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->node_count > CLB_POOL_MAX_NODES) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->base % config->page_bytes != 0u) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->bytes > UINT64_MAX - config->base) {
    return CLB_ERR_ARGUMENT;
  }
  return CLB_OK;
}

static void tier_open(clb_pool_tier* tier, const clb_pool_tier_config* config) {
  (void)memset(tier, 0, sizeof *tier);
  tier->base = config->base;
  tier->bytes = config->bytes & ~((uint64_t)config->page_bytes - 1u);
  tier->page_bytes = config->page_bytes;
  tier->nodes = config->nodes;
  tier->node_count = config->node_count;
  tier->first = CLB_POOL_NONE;
  tier->free_first = CLB_POOL_NONE;
  tier->spare = CLB_POOL_NONE;
  for (uint32_t i = config->node_count; i > 0u; --i) {
    node_give(tier, i - 1u);
  }
  if (tier->bytes == 0u) {
    return;
  }
  tier->first = node_take(tier);
  clb_pool_node* node = &tier->nodes[tier->first];
  node->offset = 0;
  node->bytes = tier->bytes;
  node->prev = CLB_POOL_NONE;
  node->next = CLB_POOL_NONE;
  tier->blocks = 1;
  free_link(tier, tier->first, CLB_POOL_NONE, CLB_POOL_NONE);
}

int32_t clb_pool_open(clb_pool* pool, const clb_pool_tier_config configs[CLB_TIER_COUNT]) {
  CLB_ASSERT(pool != NULL);
  CLB_ASSERT(configs != NULL);
  (void)memset(pool, 0, sizeof *pool);
  for (uint32_t i = 0; i < CLB_TIER_COUNT; ++i) {
    if (tier_valid(&configs[i]) != CLB_OK) {
      return CLB_ERR_ARGUMENT;
    }
  }
  for (uint32_t i = 0; i < CLB_TIER_COUNT; ++i) {
    tier_open(&pool->tiers[i], &configs[i]);
  }
  return CLB_OK;
}

int32_t clb_pool_close(clb_pool* pool) {
  CLB_ASSERT(pool != NULL);
  for (uint32_t i = 0; i < CLB_TIER_COUNT; ++i) {
    if (pool->tiers[i].used != 0u) {
      return CLB_ERR_STATE;
    }
  }
  (void)memset(pool, 0, sizeof *pool);
  return CLB_OK;
}

/* ------------------------------------------------------------- alloc, free */

static void extent_clear(clb_extent* extent) {
  (void)memset(extent, 0, sizeof *extent);
  extent->node = CLB_POOL_NONE;
}

/* The smallest free block that holds `bytes` at the alignment, the lowest of equals; NONE if there is none. */
static uint32_t find_best(const clb_pool_tier* tier, uint64_t bytes, uint64_t alignment) {
  uint32_t best = CLB_POOL_NONE;
  for (uint32_t i = tier->free_first; i != CLB_POOL_NONE; i = tier->nodes[i].free_next) {
    const clb_pool_node* node = &tier->nodes[i];
    const uint64_t gap = (alignment - node->offset % alignment) % alignment;
    if (node->bytes < bytes || node->bytes - bytes < gap) {
      continue;
    }
    if (best == CLB_POOL_NONE || node->bytes < tier->nodes[best].bytes) {
      best = i;
    }
    if (node->bytes == bytes) {
      break;
    }
  }
  return best;
}

static bool has_spares(const clb_pool_tier* tier, uint32_t count) {
  uint32_t index = tier->spare;
  for (uint32_t i = 0; i < count; ++i) {
    if (index == CLB_POOL_NONE) {
      return false;
    }
    index = tier->nodes[index].next;
  }
  return true;
}

/* Cut `bytes` at the alignment out of free block `index`; what is left on both sides stays free.
   Returns the used block, or NONE iff nodes are missing. */
static uint32_t block_cut(clb_pool_tier* tier, uint32_t index, uint64_t bytes, uint64_t alignment) {
  const uint64_t offset = tier->nodes[index].offset;
  const uint64_t gap = (alignment - offset % alignment) % alignment;
  const uint64_t rest = tier->nodes[index].bytes - bytes - gap;
  if (!has_spares(tier, (gap != 0u ? 1u : 0u) + (rest != 0u ? 1u : 0u))) {
    return CLB_POOL_NONE;
  }
  uint32_t before = tier->nodes[index].free_prev;
  const uint32_t after = tier->nodes[index].free_next;
  uint32_t taken = index;
  if (gap != 0u) {
    tier->nodes[index].bytes = gap;
    taken = block_after(tier, index, offset + gap, bytes);
    before = index;
  } else {
    free_unlink(tier, index);
    tier->nodes[index].bytes = bytes;
  }
  tier->nodes[taken].state = NODE_USED;
  if (rest != 0u) {
    free_link(tier, block_after(tier, taken, offset + gap + bytes, rest), before, after);
  }
  return taken;
}

static int32_t alloc_valid(const clb_pool* pool, uint32_t tier, uint64_t bytes, uint64_t alignment,
                           uint32_t mem_class) {
  if (tier >= CLB_TIER_COUNT || mem_class >= CLB_MEM_CLASS_COUNT || bytes == 0u) {
    return CLB_ERR_ARGUMENT;
  }
  if (pool->tiers[tier].nodes == NULL) {
    return CLB_ERR_ARGUMENT;
  }
  if (alignment != 0u && !is_power_of_two(alignment)) {
    return CLB_ERR_ARGUMENT;
  }
  if (alignment != 0u && pool->tiers[tier].base % alignment != 0u) {
    return CLB_ERR_ARGUMENT;
  }
  return CLB_OK;
}

int32_t clb_pool_alloc(clb_pool* pool, uint32_t tier, uint64_t bytes, uint64_t alignment, uint32_t mem_class,
                       clb_extent* extent) {
  CLB_ASSERT(pool != NULL);
  CLB_ASSERT(extent != NULL);
  extent_clear(extent);
  if (alloc_valid(pool, tier, bytes, alignment, mem_class) != CLB_OK) {
    return CLB_ERR_ARGUMENT;
  }
  if (pool->fail_at != 0u) {
    --pool->fail_at;
    if (pool->fail_at == 0u) {
      return CLB_ERR_MEMORY;
    }
  }
  clb_pool_tier* from = &pool->tiers[tier];
  const uint64_t rounded = clb_pool_round(bytes, from->page_bytes);
  const uint64_t step = alignment > from->page_bytes ? alignment : from->page_bytes;
  const uint32_t best = find_best(from, rounded, step);
  if (best == CLB_POOL_NONE) {
    return CLB_ERR_MEMORY;
  }
  const uint32_t taken = block_cut(from, best, rounded, step);
  if (taken == CLB_POOL_NONE) {
    return CLB_ERR_MEMORY;
  }
  from->nodes[taken].mem_class = mem_class;
  from->used += rounded;
  if (from->used > from->peak) {
    from->peak = from->used;
  }
  from->class_bytes[mem_class] += rounded;
  ++from->class_blocks[mem_class];
  ++pool->allocations;
  extent->offset = from->nodes[taken].offset;
  extent->bytes = rounded;
  extent->tier = tier;
  extent->node = taken;
  CLB_ASSERT(extent->offset % step == 0u);
  CLB_ASSERT(from->used <= from->bytes);
  return CLB_OK;
}

int32_t clb_pool_free(clb_pool* pool, clb_extent* extent) {
  CLB_ASSERT(pool != NULL);
  CLB_ASSERT(extent != NULL);
  if (extent->node == CLB_POOL_NONE) {
    return CLB_OK;
  }
  if (extent->tier >= CLB_TIER_COUNT) {
    return CLB_ERR_ARGUMENT;
  }
  clb_pool_tier* tier = &pool->tiers[extent->tier];
  if (extent->node >= tier->node_count) {
    return CLB_ERR_ARGUMENT;
  }
  const uint32_t index = extent->node;
  clb_pool_node* node = &tier->nodes[index];
  if (node->state != NODE_USED || node->offset != extent->offset || node->bytes != extent->bytes) {
    return CLB_ERR_ARGUMENT;
  }
  tier->used -= node->bytes;
  tier->class_bytes[node->mem_class] -= node->bytes;
  --tier->class_blocks[node->mem_class];
  const bool left_free = node->prev != CLB_POOL_NONE && tier->nodes[node->prev].state == NODE_FREE;
  const bool right_free = node->next != CLB_POOL_NONE && tier->nodes[node->next].state == NODE_FREE;
  if (right_free) {
    const uint32_t right = node->next;
    const uint32_t before = tier->nodes[right].free_prev;
    const uint32_t after = tier->nodes[right].free_next;
    free_unlink(tier, right);
    block_join(tier, index);
    if (!left_free) {
      free_link(tier, index, before, after);
    }
  }
  if (!left_free && !right_free) {
    free_insert(tier, index);
  }
  if (left_free) {
    block_join(tier, node->prev);
  }
  extent_clear(extent);
  return CLB_OK;
}

bool clb_pool_could_fit(const clb_pool* pool, uint32_t tier, uint64_t bytes) {
  CLB_ASSERT(tier < CLB_TIER_COUNT);
  return clb_pool_round(bytes, pool->tiers[tier].page_bytes) <= pool->tiers[tier].bytes;
}

/* --------------------------------------------------- statistics and check */

void clb_pool_get_stats(const clb_pool* pool, uint32_t tier, clb_pool_stats* stats) {
  CLB_ASSERT(tier < CLB_TIER_COUNT);
  const clb_pool_tier* of = &pool->tiers[tier];
  (void)memset(stats, 0, sizeof *stats);
  stats->bytes = of->bytes;
  stats->used = of->used;
  stats->peak = of->peak;
  stats->page_bytes = of->page_bytes;
  stats->blocks = of->blocks;
  stats->free_blocks = of->free_blocks;
  for (uint32_t i = of->free_first; i != CLB_POOL_NONE; i = of->nodes[i].free_next) {
    if (of->nodes[i].bytes > stats->largest_free) {
      stats->largest_free = of->nodes[i].bytes;
    }
  }
  (void)memcpy(stats->class_bytes, of->class_bytes, sizeof stats->class_bytes);
  (void)memcpy(stats->class_blocks, of->class_blocks, sizeof stats->class_blocks);
}

/* What a walk over the blocks finds, to be compared with the counters. */
typedef struct clb_pool_walk {
  uint64_t end;
  uint64_t used;
  uint64_t class_bytes[CLB_MEM_CLASS_COUNT];
  uint32_t class_blocks[CLB_MEM_CLASS_COUNT];
  uint32_t blocks;
  uint32_t free_blocks;
  uint32_t prev;
  uint32_t next_free; /* the free list's node that must come next */
  uint32_t prev_free;
} clb_pool_walk;

static bool walk_block(const clb_pool_tier* tier, uint32_t index, clb_pool_walk* walk) {
  const clb_pool_node* node = &tier->nodes[index];
  if (node->prev != walk->prev || node->offset != walk->end) {
    return false;
  }
  if (node->bytes == 0u || node->bytes % tier->page_bytes != 0u || node->bytes > tier->bytes - walk->end) {
    return false;
  }
  if (node->state == NODE_FREE) {
    if (walk->prev != CLB_POOL_NONE && tier->nodes[walk->prev].state == NODE_FREE) {
      return false;
    }
    if (walk->next_free != index || node->free_prev != walk->prev_free) {
      return false;
    }
    walk->prev_free = index;
    walk->next_free = node->free_next;
    ++walk->free_blocks;
  } else {
    if (node->state != NODE_USED || node->mem_class >= CLB_MEM_CLASS_COUNT) {
      return false;
    }
    walk->used += node->bytes;
    walk->class_bytes[node->mem_class] += node->bytes;
    ++walk->class_blocks[node->mem_class];
  }
  walk->end += node->bytes;
  walk->prev = index;
  ++walk->blocks;
  return true;
}

static bool tier_holds(const clb_pool_tier* tier) {
  clb_pool_walk walk = {.prev = CLB_POOL_NONE, .next_free = tier->free_first, .prev_free = CLB_POOL_NONE};
  for (uint32_t i = tier->first; i != CLB_POOL_NONE; i = tier->nodes[i].next) {
    if (i >= tier->node_count || walk.blocks >= tier->node_count) {
      return false;
    }
    if (!walk_block(tier, i, &walk)) {
      return false;
    }
  }
  if (walk.end != tier->bytes || walk.used != tier->used || walk.next_free != CLB_POOL_NONE) {
    return false;
  }
  if (walk.blocks != tier->blocks || walk.free_blocks != tier->free_blocks || tier->peak < tier->used) {
    return false;
  }
  if (memcmp(walk.class_bytes, tier->class_bytes, sizeof walk.class_bytes) != 0) {
    return false;
  }
  if (memcmp(walk.class_blocks, tier->class_blocks, sizeof walk.class_blocks) != 0) {
    return false;
  }
  uint32_t spares = 0;
  for (uint32_t i = tier->spare; i != CLB_POOL_NONE; i = tier->nodes[i].next) {
    if (i >= tier->node_count || spares >= tier->node_count || tier->nodes[i].state != NODE_SPARE) {
      return false;
    }
    ++spares;
  }
  return spares + walk.blocks == tier->node_count;
}

int32_t clb_pool_check(const clb_pool* pool) {
  CLB_ASSERT(pool != NULL);
  for (uint32_t i = 0; i < CLB_TIER_COUNT; ++i) {
    if (!tier_holds(&pool->tiers[i])) {
      return CLB_ERR_INTERNAL;
    }
  }
  return CLB_OK;
}

void clb_pool_fail_after(clb_pool* pool, uint64_t n) { pool->fail_at = n; }

/* snprintf behind what is there already; *length counts what the whole text needs. */
static void append(char* text, size_t bytes, size_t* length, const char* name, uint64_t amount, uint32_t blocks) {
  const size_t room = *length < bytes ? bytes - *length : 0u;
  const int n = snprintf(room > 0u ? text + *length : NULL, room, "%-12s %16" PRIu64 " bytes %8" PRIu32 " blocks\n",
                         name, amount, blocks);
  CLB_ASSERT(n >= 0);
  *length += (size_t)n;
}

size_t clb_pool_report(const clb_pool* pool, char* text, size_t bytes) {
  static const char* const class_names[CLB_MEM_CLASS_COUNT] = {"dense",    "expert", "own run", "shared run",
                                                               "dispatch", "step",   "stack",   "other"};
  static const char* const tier_names[CLB_TIER_COUNT] = {"weights", "kv", "temp"};
  size_t length = 0;
  if (bytes > 0u) {
    text[0] = '\0';
  }
  for (uint32_t t = 0; t < CLB_TIER_COUNT; ++t) {
    const clb_pool_tier* tier = &pool->tiers[t];
    append(text, bytes, &length, tier_names[t], tier->bytes, tier->blocks);
    for (uint32_t c = 0; c < CLB_MEM_CLASS_COUNT; ++c) {
      if (tier->class_blocks[c] == 0u) {
        continue;
      }
      append(text, bytes, &length, class_names[c], tier->class_bytes[c], tier->class_blocks[c]);
    }
    append(text, bytes, &length, "free", tier->bytes - tier->used, tier->free_blocks);
  }
  return length;
}
