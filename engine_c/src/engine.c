/*
 * engine.c: open, check, stats, mail, close. The owner of everything below it; the loop is in loop.c.
 *
 * Open takes all memory in a fixed order and gives it back in reverse: every step leaves its object either
 * whole or zero, so close works on a half-built engine and is the only error path.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine_internal.h"
#include "invariant.h"

static unsigned char* next_part(unsigned char** at, uint64_t bytes) {
  unsigned char* const part = *at;
  *at += (bytes + 63u) & ~UINT64_C(63);
  return part;
}

static clb_engine* take_host(const clb_model_desc* model, const clb_sizes* sizes, clb_host_parts* parts) {
  unsigned char* at = aligned_alloc(64, sizes->host_bytes);
  if (at == NULL) {
    return NULL;
  }
  const unsigned char* const end = at + sizes->host_bytes;
  (void)memset(at, 0, sizes->host_bytes);
  clb_engine* const engine = (clb_engine*)(void*)next_part(&at, sizeof *engine);
  clb_pool_node* const nodes =
      (clb_pool_node*)(void*)next_part(&at, ((uint64_t)CLB_FIXED_NODES * 2u + sizes->cache.nodes) * sizeof *nodes);
  parts->nodes[CLB_TIER_WEIGHTS] = nodes;
  parts->nodes[CLB_TIER_TEMP] = nodes + CLB_FIXED_NODES;
  parts->nodes[CLB_TIER_KV] = nodes + 2u * CLB_FIXED_NODES;
  parts->layer_table = (clb_layer_desc*)(void*)next_part(&at, model->layers * sizeof(clb_layer_desc));
  parts->rope = (float*)(void*)next_part(&at, model->head_dim / 2u * sizeof(float));
  parts->loader = next_part(&at, sizes->loader.host_bytes);
  parts->backend = next_part(&at, sizes->backend_bytes);
  parts->swap_own = (uint64_t*)(void*)next_part(&at, sizes->swap_own);
  parts->swap_piece = next_part(&at, sizes->swap_piece);
  CLB_ASSERT(at == end);
  return engine;
}

/* Our own copies of what the caller may free after open. */
static void copy_model(clb_engine* engine, const clb_engine_config* config, const clb_host_parts* parts) {
  const clb_model_desc* const model = config->model;
  (void)memcpy(parts->layer_table, model->layer_table, model->layers * sizeof model->layer_table[0]);
  (void)memcpy(parts->rope, model->rope_inv_freq, model->head_dim / 2u * sizeof(float));
  engine->config = *config;
  engine->config.model = &engine->model;
  engine->config.modules = NULL;
  engine->config.module_count = 0;
  engine->config.cpus = NULL;
  engine->model = *model;
  engine->model.layer_table = parts->layer_table;
  engine->model.rope_inv_freq = parts->rope;
  engine->model.section_table = NULL;
  engine->model.file_table = NULL;
  engine->weights = parts->loader;
  engine->swap.own_bytes = parts->swap_own;
  engine->swap.piece = parts->swap_piece;
  engine->ops = clb_ops_choose();
  engine->attention = (clb_attention_shape){
      .heads = model->heads,
      .kv_heads = model->kv_heads,
      .head_dim = model->head_dim,
      .kv_precision = config->kv_precision,
      .scale = model->attention_scale,
  };
}

uint64_t clb_fixed_blocks(const clb_engine* engine) {
  clb_pool_stats weights;
  clb_pool_stats temp;
  clb_pool_get_stats(&engine->pool, CLB_TIER_WEIGHTS, &weights);
  clb_pool_get_stats(&engine->pool, CLB_TIER_TEMP, &temp);
  return (uint64_t)weights.blocks - weights.free_blocks + temp.blocks - temp.free_blocks;
}

static int32_t build(clb_engine* engine, const clb_engine_config* config, const clb_host_parts* parts,
                     clb_error* error) {
  int32_t status = clb_channel_attach(&engine->channel, config->channel_base, config->channel_bytes, &config->channel);
  if (status != CLB_OK) {
    return clb_fail(error, status, "the channel was formatted by another version or for another configuration");
  }
  clb_channel_set_phase(&engine->channel, CLB_PHASE_LOADING);
  status = engine->backend->open(engine, config, parts, error);
  clb_channel_set_phase(&engine->channel, status == CLB_OK ? CLB_PHASE_READY : CLB_PHASE_FAILED);
  return status;
}

int32_t clb_engine_open(const clb_engine_config* config, clb_engine** engine, clb_error* error) {
  clb_sizes sizes;
  clb_host_parts parts;
  *engine = NULL;
  int32_t status = clb_sizes_compute(config, &sizes, error);
  if (status != CLB_OK) {
    return status;
  }
  if (config->module_count > 0u && config->modules == NULL) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "engine configuration: module_count is %u, but there is no list",
                    config->module_count);
  }
  clb_engine* const made = take_host(config->model, &sizes, &parts);
  if (made == NULL) {
    return clb_fail(error, CLB_ERR_MEMORY, "the system does not give %llu bytes for the engine",
                    (unsigned long long)sizes.host_bytes);
  }
  made->sizes = sizes;
  made->backend = clb_backend_of(config);
  copy_model(made, config, &parts);
  status = build(made, config, &parts, error);
  if (status != CLB_OK) {
    clb_engine_close(made);
    return status;
  }
  made->fixed_blocks = clb_fixed_blocks(made);
  made->stats.kv_bytes = sizes.kv_tier;
  made->stats.weights_bytes = sizes.weights_tier;
  made->stats.temp_bytes = sizes.temp_tier;
  clb_channel_set_stats(&made->channel, &made->stats);
  *engine = made;
  return CLB_OK;
}

static void give_back(clb_engine* engine, clb_extent* extent) {
  if (extent->bytes > 0u) {
    const int32_t status = clb_pool_free(&engine->pool, extent);
    CLB_ASSERT(status == CLB_OK);
  }
}

/* Everything that open slots and shared runs hold; then the fixed blocks. */
static void give_back_blocks(clb_engine* engine) {
  for (uint32_t slot = 0; slot < engine->config.channel.slots; ++slot) {
    if (engine->slots[slot].state != CLB_SLOT_FREE) {
      clb_slot_release(engine, slot);
    }
  }
  int32_t status = engine->built < CLB_BUILT_CACHE ? CLB_OK : clb_cache_close(&engine->cache);
  CLB_ASSERT(status == CLB_OK);
  give_back(engine, &engine->swap_extent);
  give_back(engine, &engine->stack_extent);
  give_back(engine, &engine->dispatch_extent);
  give_back(engine, &engine->slot_extent);
  give_back(engine, &engine->step_extent);
  give_back(engine, &engine->weights_extent);
  status = clb_pool_close(&engine->pool);
  CLB_ASSERT(status == CLB_OK); /* all free: nothing of ours was lost */
}

void clb_engine_close(clb_engine* engine) {
  if (engine == NULL) {
    return;
  }
  engine->backend->close(engine);
  if (engine->built >= CLB_BUILT_POOL) {
    give_back_blocks(engine);
  }
  engine->backend->give_back(engine);
  free(engine);
}

/* ------------------------------------------------------- while it is open */

int32_t clb_engine_post(clb_engine* engine, uint32_t mail) {
  if (mail != CLB_MAIL_STOP && mail != CLB_MAIL_CHECK) {
    return CLB_ERR_ARGUMENT;
  }
  (void)atomic_fetch_or_explicit(&engine->mail, 1u << mail, memory_order_release);
  if (engine->config.command_fd >= 0) {
    const uint64_t one = 1;
    if (write(engine->config.command_fd, &one, sizeof one) < 0) {
      return CLB_OK; /* the counter is full, so the loop is being woken anyway */
    }
  }
  return CLB_OK;
}

int32_t clb_engine_stats(const clb_engine* engine, clb_stats* stats) {
  (void)clb_channel_stats(engine->channel.base, stats);
  return CLB_OK;
}

int32_t clb_engine_count_experts(clb_engine* engine) { return engine->backend->count_experts(engine); }

/* Open slots stand in `order` once each, and nobody else does. */
static int32_t check_slots(const clb_engine* engine, clb_error* error) {
  uint32_t seen[CLB_MAX_SLOTS] = {0};
  for (uint32_t i = 0; i < engine->order_count; ++i) {
    seen[engine->order[i]]++;
  }
  for (uint32_t i = 0; i < engine->config.channel.slots; ++i) {
    const clb_slot* const slot = &engine->slots[i];
    if (seen[i] != (slot->state == CLB_SLOT_FREE ? 0u : 1u)) {
      return clb_fail(error, CLB_ERR_INTERNAL, "slot %u: in state %u, but %u times in the order", i, slot->state,
                      seen[i]);
    }
    if (slot->state == CLB_SLOT_FREE) {
      continue;
    }
    if (slot->computed > slot->asked || slot->asked > slot->request.prompt_tokens) {
      return clb_fail(error, CLB_ERR_INTERNAL, "slot %u: computed %u, asked %u, prompt %u", i, slot->computed,
                      slot->asked, slot->request.prompt_tokens);
    }
    const bool decoding = slot->state == CLB_SLOT_DECODE;
    const bool computed = slot->computed == slot->request.prompt_tokens;
    if (decoding != computed || slot->generated > slot->request.max_tokens || (!decoding && slot->generated != 0u)) {
      return clb_fail(error, CLB_ERR_INTERNAL, "slot %u: in state %u with %u of %u prompt and %u of %u output tokens",
                      i, slot->state, slot->computed, slot->request.prompt_tokens, slot->generated,
                      slot->request.max_tokens);
    }
  }
  return CLB_OK;
}

int32_t clb_engine_check(const clb_engine* engine, clb_error* error) {
  const int32_t status = check_slots(engine, error);
  if (status != CLB_OK) {
    return status;
  }
  if (clb_cache_check(&engine->cache) != CLB_OK) {
    return clb_fail(error, CLB_ERR_INTERNAL, "KV cache or memory pool: a count does not add up");
  }
  if (engine->stats.expert_relaunches != 0u || engine->stats.allocations_after_open != 0u) {
    return clb_fail(error, CLB_ERR_INTERNAL, "%llu experts ran twice in a step, %llu blocks were taken after open",
                    (unsigned long long)engine->stats.expert_relaunches,
                    (unsigned long long)engine->stats.allocations_after_open);
  }
  return engine->fault == CLB_OK ? CLB_OK : clb_fail(error, engine->fault, "the event ring or its fd broke");
}
