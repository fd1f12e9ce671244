/*
 * engine_cpu.c: the CPU as a backend: its memory, weights, kernels and threads.
 */
#include <string.h>

#include "engine_internal.h"
#include "invariant.h"

#define HUGE_PAGE_BYTES 2097152u

static int32_t map_tier(clb_engine* engine, uint32_t tier, const clb_tier_config* config, uint64_t bytes,
                        uint64_t alignment, clb_pool_tier_config* pool, clb_error* error) {
  static const char* const names[CLB_TIER_COUNT] = {"weights", "kv", "temp"};
  uint64_t align = alignment > config->page_bytes ? alignment : config->page_bytes;
  if (config->huge_pages != CLB_HUGE_OFF && align < HUGE_PAGE_BYTES) {
    align = HUGE_PAGE_BYTES;
  }
  const int32_t status = clb_map_open(&engine->maps[tier], bytes, align, config->huge_pages);
  if (status != CLB_OK) {
    return clb_fail(error, status, "tier %s: the system does not give %llu bytes%s", names[tier],
                    (unsigned long long)bytes,
                    config->huge_pages == CLB_HUGE_REQUIRE ? " of huge pages; set huge_pages to try" : "");
  }
  pool->base = (uint64_t)(uintptr_t)engine->maps[tier].base;
  pool->bytes = bytes;
  pool->page_bytes = config->page_bytes;
  return CLB_OK;
}

static int32_t open_pools(clb_engine* engine, const clb_host_parts* parts, clb_error* error) {
  const clb_engine_config* const config = &engine->config;
  const clb_sizes* const sizes = &engine->sizes;
  clb_pool_tier_config pools[CLB_TIER_COUNT];
  (void)memset(pools, 0, sizeof pools);
  int32_t status = map_tier(engine, CLB_TIER_WEIGHTS, &config->tier_weights, sizes->weights_tier,
                            sizes->loader.weights_alignment, &pools[CLB_TIER_WEIGHTS], error);
  if (status == CLB_OK) {
    status = map_tier(engine, CLB_TIER_KV, &config->tier_kv, sizes->kv_tier, 0, &pools[CLB_TIER_KV], error);
  }
  if (status == CLB_OK) {
    status = map_tier(engine, CLB_TIER_TEMP, &config->tier_temp, sizes->temp_tier, 0, &pools[CLB_TIER_TEMP], error);
  }
  if (status != CLB_OK) {
    return status;
  }
  for (uint32_t tier = 0; tier < CLB_TIER_COUNT; ++tier) {
    pools[tier].nodes = parts->nodes[tier];
    pools[tier].node_count = tier == CLB_TIER_KV ? sizes->cache.nodes : CLB_FIXED_NODES;
  }
  status = clb_pool_open(&engine->pool, pools);
  if (status != CLB_OK) {
    return clb_fail(error, status, "memory tiers: sizes and pages do not fit together");
  }
  engine->built = CLB_BUILT_POOL;
  return CLB_OK;
}

static unsigned char* extent_address(const clb_engine* engine, const clb_extent* extent) {
  return (unsigned char*)engine->maps[extent->tier].base + extent->offset;
}

/* The blocks of the weights and temp tiers; they stay until close. */
static int32_t take_blocks(clb_engine* engine, clb_error* error) {
  const clb_sizes* const sizes = &engine->sizes;
  clb_pool* const pool = &engine->pool;
  int32_t status =
      clb_pool_alloc(pool, CLB_TIER_WEIGHTS, sizes->loader.weights_bytes, 0, CLB_MEM_DENSE, &engine->weights_extent);
  if (status == CLB_OK) {
    status = clb_pool_alloc(pool, CLB_TIER_TEMP, sizes->step_bytes, 0, CLB_MEM_STEP, &engine->step_extent);
  }
  if (status == CLB_OK) {
    status = clb_pool_alloc(pool, CLB_TIER_TEMP, sizes->slot_bytes, 0, CLB_MEM_OTHER, &engine->slot_extent);
  }
  if (status == CLB_OK) {
    status = clb_dispatch_open(pool, &sizes->dispatch, &engine->dispatch_extent);
  }
  if (status == CLB_OK && sizes->swap_bytes > 0u) {
    status = clb_pool_alloc(pool, CLB_TIER_WEIGHTS, sizes->swap_bytes, 0, CLB_MEM_EXPERT, &engine->swap_extent);
  }
  if (status == CLB_OK && sizes->stack_bytes > 0u) {
    status = clb_pool_alloc(pool, CLB_TIER_TEMP, sizes->stack_bytes, 0, CLB_MEM_STACK, &engine->stack_extent);
  }
  if (status != CLB_OK) {
    return clb_fail(error, status, "memory tiers: a block of the plan does not fit");
  }
  (void)clb_place_step_buffers(&engine->config, sizes, extent_address(engine, &engine->step_extent), &engine->buffers);
  (void)clb_place_slots(&engine->config, extent_address(engine, &engine->slot_extent), engine->slots);
  engine->dispatch = extent_address(engine, &engine->dispatch_extent);
  const uint64_t weights = (uint64_t)(uintptr_t)engine->maps[CLB_TIER_WEIGHTS].base;
  clb_swap_open(&engine->swap, weights + engine->swap_extent.offset, sizes->swap_block, engine->config.swap_slots,
                weights + engine->weights_extent.offset + engine->weights_extent.bytes);
  for (uint32_t i = 0; i < sizes->step_tokens; ++i) {
    engine->buffers.identity[i] = i;
  }
  return CLB_OK;
}

static void show_loaded(void* context, uint64_t loaded_bytes) {
  clb_engine* const engine = context;
  engine->stats.loaded_bytes = loaded_bytes;
  clb_channel_set_loaded(&engine->channel, loaded_bytes);
}

static int32_t load_weights(clb_engine* engine, const clb_engine_config* config, const clb_host_parts* parts,
                            clb_error* error) {
  const clb_loader_config loader = {
      .model = config->model,
      .weights = config->weights,
      .dir_fd = config->dir_fd,
      .dummy_seed = config->dummy_seed,
      .memory = extent_address(engine, &engine->weights_extent),
      .memory_bytes = engine->weights_extent.bytes,
      .host = parts->loader,
      .host_bytes = engine->sizes.loader.host_bytes,
      .progress = show_loaded,
      .progress_context = engine,
  };
  const clb_weight_table* table = NULL;
  int32_t status = clb_loader_load(&loader, &table, error);
  if (status == CLB_OK) {
    status = clb_kernels_open(&engine->kernels, config->modules, config->module_count, config->model, table,
                              parts->backend, error);
  }
  return status;
}

static int32_t open_cache(clb_engine* engine, clb_error* error) {
  clb_cache_config config = engine->sizes.cache_config;
  config.layer_table = engine->model.layer_table;
  config.host_base = engine->maps[CLB_TIER_KV].base;
  const int32_t status = clb_cache_open(&engine->cache, &engine->pool, &config);
  if (status != CLB_OK) {
    return clb_fail(error, status, "the KV cache does not open");
  }
  engine->kv = engine->maps[CLB_TIER_KV].base;
  engine->built = CLB_BUILT_CACHE;
  return CLB_OK;
}

static int32_t open_threads(clb_engine* engine, const clb_engine_config* config, clb_error* error) {
  const clb_threads_config threads = {
      .count = config->threads,
      .cpus = config->cpus,
      .stacks = config->threads > 1u ? extent_address(engine, &engine->stack_extent) : NULL,
  };
  const int32_t status = clb_threads_open(&engine->threads, &threads);
  if (status == CLB_ERR_ARGUMENT) {
    return clb_fail(error, status, "the system does not let this process run on one of the CPUs that it was given");
  }
  if (status != CLB_OK) {
    return clb_fail(error, status, "the system does not give %u threads; lower engine.threads", config->threads);
  }
  return CLB_OK;
}

static int32_t open_cpu(clb_engine* engine, const clb_engine_config* config, const clb_host_parts* parts,
                        clb_error* error) {
  int32_t status = open_pools(engine, parts, error);
  status = status != CLB_OK ? status : take_blocks(engine, error);
  status = status != CLB_OK ? status : load_weights(engine, config, parts, error);
  status = status != CLB_OK ? status : open_cache(engine, error);
  return status != CLB_OK ? status : open_threads(engine, config, error);
}

static void close_cpu(clb_engine* engine) { clb_threads_close(&engine->threads); }

static void give_back_cpu(clb_engine* engine) {
  clb_kernels_close(&engine->kernels);
  for (uint32_t tier = CLB_TIER_COUNT; tier > 0u; tier--) {
    clb_map_close(&engine->maps[tier - 1u]);
  }
}

static int32_t open_slot_cpu(clb_engine* engine, uint32_t slot) { return clb_cache_slot_copy(&engine->cache, slot); }

/* Sampling reads the mask where the daemon wrote it. */
static int32_t set_mask_cpu(clb_engine* engine, uint32_t slot, uint32_t position) {
  (void)engine;
  (void)slot;
  (void)position;
  return CLB_OK;
}

/* Steps count where the daemon reads. */
static int32_t count_experts_cpu(clb_engine* engine) {
  (void)engine;
  return CLB_OK;
}

/* The host's allocator is not used after open, which the tests prove by wrapping it. */
static uint64_t made_since_open_cpu(const clb_engine* engine) {
  (void)engine;
  return 0;
}

/* ------------------------------------------------------------------ swaps */

static int32_t swap_check_cpu(const clb_engine* engine, const clb_swap_desc* desc, clb_error* error) {
  (void)engine;
  for (uint32_t i = 0; i < CLB_EXPERT_PARTS; ++i) {
    if (desc->sections[i].layout == CLB_LAYOUT_MMA) {
      return clb_fail(error, CLB_ERR_UNSUPPORTED,
                      "file %s: is laid out for CUDA; take it from a pack of `colibrid convert --backend cpu`",
                      desc->file->name);
    }
  }
  return CLB_OK;
}

static int32_t swap_begin_cpu(clb_engine* engine) {
  (void)engine;
  return CLB_OK;
}

static int32_t swap_put_cpu(clb_engine* engine, const clb_swap_part* part) {
  void* const target = (void*)(uintptr_t)part->address;
  const clb_section_desc* const section = part->section;
  const clb_demand demand = clb_demand_of(&engine->model, section->role, section->layer, section->expert);
  if (clb_is_repacked(section, &demand)) {
    clb_repack(section, part->offset, part->data, part->bytes, target);
  } else {
    (void)memcpy((unsigned char*)target + part->offset, part->data, (size_t)part->bytes);
  }
  return CLB_OK;
}

static int32_t swap_bind_cpu(clb_engine* engine, uint32_t module, clb_error* error) {
  clb_swap* const swap = &engine->swap;
  const clb_place place = {CLB_ROLE_GATE, (int32_t)swap->layer, (int32_t)swap->expert};
  return clb_kernels_bind(&engine->kernels, swap->parts, place, module, &swap->entry, error);
}

static int32_t swap_switch_cpu(clb_engine* engine) {
  const clb_swap* const swap = &engine->swap;
  engine->kernels.layers[swap->layer].experts[swap->expert] = swap->entry;
  return CLB_OK;
}

/* After the steps of a turn no step runs. */
static bool swap_served_cpu(const clb_engine* engine) {
  (void)engine;
  return true;
}

static const clb_swap_backend swap_cpu = {
    .check = swap_check_cpu,
    .begin = swap_begin_cpu,
    .put = swap_put_cpu,
    .wait = swap_begin_cpu,
    .staged = swap_begin_cpu,
    .bind = swap_bind_cpu,
    .put_in_place = swap_switch_cpu,
    .served = swap_served_cpu,
};

const clb_backend clb_backend_cpu = {
    .plan_weights = clb_plan_weights_cpu,
    .plan_memory = clb_plan_memory_cpu,
    .open = open_cpu,
    .close = close_cpu,
    .give_back = give_back_cpu,
    .slot_opened = open_slot_cpu,
    .mask_set = set_mask_cpu,
    .steps = clb_steps_cpu,
    .count_experts = count_experts_cpu,
    .made_since_open = made_since_open_cpu,
    .swap = &swap_cpu,
    .output_is_prompt = true,
};
