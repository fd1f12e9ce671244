/*
 * cuda_open.c: the backend's face to the engine: memory bill, open and close.
 */
#include <string.h>

#include "cuda_internal.h"
#include "invariant.h"

#define HOST_ALIGNMENT 64u

/* -------------------------------------------------------------------- plan */

static int32_t plan_weights(const clb_engine_config* config, clb_sizes* sizes, clb_error* error) {
  const clb_model_desc* const model = config->model;
  int32_t status = clb_model_check(model, error);
  if (status == CLB_OK && (model->section_count != 0u || config->weights == CLB_WEIGHTS_FILES)) {
    status = clb_sections_check(model, error);
  }
  status = status != CLB_OK ? status : clb_cuda_model_check(config, error);
  status = status != CLB_OK ? status : clb_cuda_weights_bytes(config, &sizes->loader.weights_bytes, error);
  if (status == CLB_OK) {
    sizes->loader.weights_alignment = HOST_ALIGNMENT;
    sizes->loader.host_bytes = clb_table_bytes(model);
    sizes->loader.read_bytes = sizes->loader.weights_bytes;
  }
  if (status == CLB_OK) {
    sizes->swap_block = clb_largest_expert_bytes(model, CLB_LAYOUT_MMA);
    sizes->swap_bytes = config->swap_slots * sizes->swap_block;
  }
  return status;
}

static uint64_t rows_bytes(const clb_sizes* sizes) {
  return clb_align_up((uint64_t)sizes->step_tokens * sizeof(clb_step_row), HOST_ALIGNMENT);
}

static int32_t plan_memory(const clb_engine_config* config, clb_sizes* sizes, clb_error* error) {
  const int32_t status = clb_plan_kv(config, sizes, error);
  if (status != CLB_OK) {
    return status;
  }
  const clb_cuda_extents extents = {.weights_bytes = sizes->loader.weights_bytes,
                                    .swap_bytes = sizes->swap_bytes,
                                    .kv_bytes = sizes->kv_tier,
                                    .slot_memory_bytes = sizes->slot_bytes,
                                    .k_max = sizes->k_max,
                                    .max_experts = sizes->max_experts,
                                    .expert_width = sizes->expert_width,
                                    .shared_width = sizes->shared_width};
  clb_cuda_plan(config, &extents, &sizes->cuda);
  sizes->weights_tier = sizes->cuda.swap; /* with the expert tables */
  sizes->swap_bytes = sizes->cuda.kv - sizes->cuda.swap;
  sizes->temp_tier = sizes->cuda.step_bytes;
  sizes->dispatch.bytes = sizes->cuda.dispatch_bytes;
  /* clb_cuda | rows of a prefill step | rows of prompt items */
  sizes->backend_bytes = clb_align_up(sizeof(struct clb_cuda), HOST_ALIGNMENT) + rows_bytes(sizes) +
                         (uint64_t)sizes->step_tokens * sizeof(uint32_t);
  return CLB_OK;
}

/* -------------------------------------------------------------------- open */

static int32_t attach(clb_engine* engine, const clb_engine_config* config, clb_error* error) {
  struct clb_cuda* const cuda = engine->cuda;
  const clb_device_desc* const device = config->device;
  int32_t status = clb_device_attach(device, &cuda->driver, error);
  if (status != CLB_OK) {
    return status;
  }
  if (device->arena_bytes < cuda->at.arena_bytes || device->pinned_bytes < cuda->at.pinned_bytes ||
      device->multiprocessors == 0u) {
    return clb_fail(error, CLB_ERR_ARGUMENT,
                    "device: %llu bytes of arena and %llu of page-locked memory with %u multiprocessors; %llu, %llu "
                    "and at least 1 are needed",
                    (unsigned long long)device->arena_bytes, (unsigned long long)device->pinned_bytes,
                    device->multiprocessors, (unsigned long long)cuda->at.arena_bytes,
                    (unsigned long long)cuda->at.pinned_bytes);
  }
  cuda->device = *device;
  status = cuda->driver.bind(&cuda->driver);
  return status == CLB_OK ? CLB_OK : clb_cuda_fail(engine, error, "making the device's context current");
}

/* The KV tier lies in the arena; its pool counts offsets and never looks at an address. */
static int32_t open_device_cache(clb_engine* engine, const clb_host_parts* parts, clb_error* error) {
  const clb_sizes* const sizes = &engine->sizes;
  clb_pool_tier_config pools[CLB_TIER_COUNT];
  (void)memset(pools, 0, sizeof pools);
  for (uint32_t tier = 0; tier < CLB_TIER_COUNT; ++tier) {
    pools[tier].page_bytes = engine->config.tier_kv.page_bytes;
    pools[tier].nodes = parts->nodes[tier];
    pools[tier].node_count = tier == CLB_TIER_KV ? sizes->cache.nodes : CLB_FIXED_NODES;
  }
  pools[CLB_TIER_KV].bytes = sizes->kv_tier;
  int32_t status = clb_pool_open(&engine->pool, pools);
  if (status != CLB_OK) {
    return clb_fail(error, status, "memory tiers: sizes and pages do not fit together");
  }
  engine->built = CLB_BUILT_POOL;
  clb_cache_config cache = sizes->cache_config;
  cache.layer_table = engine->model.layer_table;
  status = clb_cache_open(&engine->cache, &engine->pool, &cache);
  if (status != CLB_OK) {
    return clb_fail(error, status, "the KV cache does not open");
  }
  engine->built = CLB_BUILT_CACHE;
  return CLB_OK;
}

/* Everything behind the KV tier, and what the device writes into the host's memory, starts as zeros. */
static int32_t clear(clb_engine* engine, clb_error* error) {
  struct clb_cuda* const cuda = engine->cuda;
  (void)memset(clb_cuda_host(cuda, cuda->at.mailbox), 0, CLB_MAILBOX_BYTES);
  const int32_t status =
      cuda->driver.fill(&cuda->driver, cuda->device.stream, clb_cuda_at(cuda, cuda->at.list), 0u, cuda->at.step_bytes);
  return status == CLB_OK ? CLB_OK : clb_cuda_fail(engine, error, "clearing the arena");
}

static int32_t wait_ready(clb_engine* engine, clb_error* error) {
  clb_driver* const d = &engine->cuda->driver;
  const int32_t status = d->stream_wait(d, engine->cuda->device.stream);
  return status == CLB_OK ? CLB_OK : clb_cuda_fail(engine, error, "waiting for the device");
}

static int32_t open_cuda(clb_engine* engine, const clb_engine_config* config, const clb_host_parts* parts,
                         clb_error* error) {
  unsigned char* const memory = parts->backend;
  struct clb_cuda* const cuda = (struct clb_cuda*)(void*)memory;
  unsigned char* const rows = memory + clb_align_up(sizeof *cuda, HOST_ALIGNMENT);
  engine->cuda = cuda;
  engine->buffers.rows = (clb_step_row*)(void*)rows;
  engine->buffers.identity = (uint32_t*)(void*)(rows + rows_bytes(&engine->sizes));
  cuda->at = engine->sizes.cuda;
  cuda->precision = clb_cuda_precision(config);
  uint64_t values = 0;
  for (uint32_t layer = 0; layer < engine->model.layers; ++layer) {
    cuda->layer_values[layer] = values;
    values += engine->model.layer_table[layer].kv_values_per_token;
  }
  int32_t status = attach(engine, config, error);
  if (status != CLB_OK) {
    return status;
  }
  (void)clb_place_slots(&engine->config, clb_cuda_host(cuda, cuda->at.slot_memory), engine->slots);
  engine->swap.piece = clb_cuda_host(cuda, cuda->at.load); /* nobody loads any more when experts are replaced */
  cuda->swap_row = clb_cuda_host(cuda, cuda->at.load + CLB_LOADER_PIECE_BYTES);
  clb_swap_open(&engine->swap, clb_cuda_at(cuda, cuda->at.swap), engine->sizes.swap_block, engine->config.swap_slots,
                clb_cuda_at(cuda, cuda->at.expert_tables));
  status = open_device_cache(engine, parts, error);
  status = status != CLB_OK ? status : clb_cuda_find_kernels(engine, cuda->precision, error);
  status = status != CLB_OK ? status : clear(engine, error);
  status = status != CLB_OK ? status : clb_cuda_load(engine, config, parts->loader, clb_cuda_build_graphs, error);
  cuda->made_at_open = cuda->driver.made;
  return status != CLB_OK ? status : wait_ready(engine, error);
}

/* The device must be done with channel and pinned memory before their owner takes them back; a lost context is. */
static void close_cuda(clb_engine* engine) {
  struct clb_cuda* const cuda = engine->cuda;
  if (cuda->device.stream != NULL) {
    (void)cuda->driver.stream_wait(&cuda->driver, cuda->device.stream);
    clb_cuda_destroy_graphs(cuda);
  }
}

/* All memory belongs to the worker. */
static void give_back_cuda(clb_engine* engine) { engine->cuda = NULL; }

static uint64_t made_since_open_cuda(const clb_engine* engine) {
  return engine->cuda->driver.made - engine->cuda->made_at_open;
}

const clb_backend clb_backend_cuda = {
    .plan_weights = plan_weights,
    .plan_memory = plan_memory,
    .open = open_cuda,
    .close = close_cuda,
    .give_back = give_back_cuda,
    .slot_opened = clb_cuda_slot_opened,
    .mask_set = clb_cuda_mask_set,
    .steps = clb_cuda_steps,
    .count_experts = clb_cuda_count_experts,
    .made_since_open = made_since_open_cuda,
    .swap = &clb_swap_cuda,
};
