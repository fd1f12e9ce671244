/*
 * engine_plan.c: how much memory an engine takes, as a function of its configuration and model.
 *
 * Owns nothing. clb_engine_plan and clb_engine_open use the same numbers, so the bill is what is taken.
 * All products below stay far under 2^63: clb_model_check and the limits here bound every factor.
 */
#include <string.h>

#include "engine_internal.h"
#include "invariant.h"
#include "sampler.h"

#define CLB_MAX_STEP_TOKENS 65536u /* rows of one prefill step */

static int32_t check_tier(const clb_tier_config* tier, const char* name, clb_error* error) {
  const uint32_t page = tier->page_bytes;
  if (page < CLB_POOL_MIN_PAGE || page > CLB_POOL_MAX_PAGE || (page & (page - 1u)) != 0u) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "tier %s: page_bytes is %u, must be a power of two from %u to %u", name,
                    page, CLB_POOL_MIN_PAGE, CLB_POOL_MAX_PAGE);
  }
  if (tier->huge_pages > CLB_HUGE_REQUIRE) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "tier %s: huge_pages is %u, must be 0 (off), 1 (try) or 2 (require)", name,
                    tier->huge_pages);
  }
  return CLB_OK;
}

static int32_t check_versions(const clb_engine_config* config, clb_error* error) {
  if (config->abi_version != CLB_ABI_VERSION || config->struct_bytes != sizeof *config) {
    return clb_fail(error, CLB_ERR_VERSION, "engine configuration: version %u with %u bytes, expected %u with %zu",
                    config->abi_version, config->struct_bytes, CLB_ABI_VERSION, sizeof *config);
  }
  if (config->model == NULL) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "engine configuration: no model");
  }
  return CLB_OK;
}

/* The channel was planned for a model and a length: they must be this model's. */
static int32_t check_channel(const clb_engine_config* config, uint32_t max_experts, clb_error* error) {
  const clb_channel_config* const channel = &config->channel;
  const clb_model_desc* const model = config->model;
  if (channel->layers != model->layers || channel->vocab_size != model->vocab_size ||
      channel->hidden != model->hidden || channel->max_experts < max_experts) {
    return clb_fail(error, CLB_ERR_ARGUMENT,
                    "channel is for %u layers, vocabulary %u, hidden %u, %u experts; the model has %u, %u, %u, %u",
                    channel->layers, channel->vocab_size, channel->hidden, channel->max_experts, model->layers,
                    model->vocab_size, model->hidden, max_experts);
  }
  if (channel->max_seq_len > model->max_positions) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "max_seq_len is %u, but the model's context is %u tokens; lower it",
                    channel->max_seq_len, model->max_positions);
  }
  return CLB_OK;
}

static int32_t check_values(const clb_engine_config* config, clb_error* error) {
  if (config->prefill_chunk == 0u || config->prefill_tokens < config->prefill_chunk ||
      config->prefill_tokens > CLB_MAX_STEP_TOKENS) {
    return clb_fail(error, CLB_ERR_ARGUMENT,
                    "prefill_chunk is %u and prefill_tokens %u; 1 <= prefill_chunk <= prefill_tokens <= %u must hold",
                    config->prefill_chunk, config->prefill_tokens, CLB_MAX_STEP_TOKENS);
  }
  if (config->kv_precision != CLB_FP32 && config->kv_precision != CLB_FP16) {
    return clb_fail(error, CLB_ERR_UNSUPPORTED, "kv_precision is %u, must be 0 (fp32) or 1 (fp16)",
                    config->kv_precision);
  }
  if (config->threads == 0u || config->threads > CLB_MAX_THREADS) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "threads is %u, must be from 1 to %u", config->threads, CLB_MAX_THREADS);
  }
  if (config->experts_most > CLB_MAX_EXPERTS_PER_TOKEN) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "experts_most is %u, at most %u fit", config->experts_most,
                    CLB_MAX_EXPERTS_PER_TOKEN);
  }
  if (config->weights > CLB_WEIGHTS_DUMMY) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "weights is %u, must be 0 (files) or 1 (dummy)", config->weights);
  }
  if (config->swap_slots > CLB_MAX_SWAP_SLOTS) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "swap_slots is %u, must be from 0 to %u", config->swap_slots,
                    CLB_MAX_SWAP_SLOTS);
  }
  if (config->module_count > CLB_MAX_MODULES) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "module_count is %u, at most %u fit", config->module_count,
                    CLB_MAX_MODULES);
  }
  int32_t status = check_tier(&config->tier_weights, "weights", error);
  status = status != CLB_OK ? status : check_tier(&config->tier_kv, "kv", error);
  return status != CLB_OK ? status : check_tier(&config->tier_temp, "temp", error);
}

/* ------------------------------------------------------------ laying out */

typedef struct carver {
  unsigned char* base; /* NULL: only the size is meant */
  uint64_t used;
} carver;

/* The next `count` elements at a 64-byte boundary, or NULL when only counting. */
static void* carve(carver* at, uint64_t count, uint64_t element_bytes) {
  const uint64_t offset = at->used;
  at->used = offset + ((count * element_bytes + 63u) & ~UINT64_C(63));
  return at->base == NULL ? NULL : at->base + offset;
}

static bool reads_codes(const clb_model_desc* model) {
  bool found = false;
  for (uint32_t i = 0; i < model->section_count && !found; ++i) {
    found = clb_wants_codes(model->section_table[i].precision);
  }
  return found;
}

/* Of the rows that go into the attention's products, the head, or down of the routed experts. */
static uint64_t code_bytes(const clb_engine_config* config, const clb_sizes* sizes) {
  const clb_model_desc* const model = config->model;
  const uint32_t q = model->heads * model->head_dim;
  const uint64_t rows = sizes->step_tokens > CLB_LOGIT_ROWS ? sizes->step_tokens : CLB_LOGIT_ROWS;
  const uint64_t dense = rows * clb_code_row_bytes(model->hidden > q ? model->hidden : q);
  const uint64_t routed = (uint64_t)sizes->step_tokens * sizes->k_max * clb_code_row_bytes(sizes->expert_width);
  return sizes->reads_codes == 0u ? 0u : dense > routed ? dense : routed;
}

static uint64_t shared_code_bytes(const clb_sizes* sizes) {
  return sizes->reads_codes != 0u ? (uint64_t)sizes->step_tokens * clb_code_row_bytes(sizes->shared_width) : 0u;
}

uint64_t clb_place_step_buffers(const clb_engine_config* config, const clb_sizes* sizes, unsigned char* base,
                                clb_step_buffers* buffers) {
  const clb_model_desc* const model = config->model;
  const uint64_t tokens = sizes->step_tokens;
  const uint64_t hidden = model->hidden;
  const uint64_t q = (uint64_t)model->heads * model->head_dim;
  const uint64_t kv = (uint64_t)model->kv_heads * model->head_dim;
  const uint64_t vocab = model->vocab_size;
  const uint64_t scratches = config->threads < CLB_LOGIT_ROWS ? config->threads : CLB_LOGIT_ROWS;
  carver at = {base, 0};
  buffers->rows = carve(&at, tokens, sizeof *buffers->rows);
  buffers->residual = carve(&at, tokens * hidden, sizeof(float));
  buffers->normed = carve(&at, tokens * hidden, sizeof(float));
  buffers->update = carve(&at, tokens * hidden, sizeof(float));
  buffers->qkv = carve(&at, tokens * (q + 2u * kv), sizeof(float));
  buffers->attended = carve(&at, tokens * q, sizeof(float));
  buffers->rope = carve(&at, tokens * model->head_dim, sizeof(float));
  buffers->shared_activation = carve(&at, tokens * sizes->shared_width, sizeof(float));
  buffers->shared_output = carve(&at, tokens * hidden, sizeof(float));
  buffers->head_input = carve(&at, CLB_LOGIT_ROWS * hidden, sizeof(float));
  buffers->logits = carve(&at, CLB_LOGIT_ROWS * vocab, sizeof(float));
  buffers->codes = carve(&at, code_bytes(config, sizes), 1);
  buffers->shared_codes = carve(&at, shared_code_bytes(sizes), 1);
  buffers->scratch_stride = (clb_sampler_scratch_bytes(model->vocab_size) + 63u) & ~UINT64_C(63);
  buffers->sampler_scratch = carve(&at, scratches, buffers->scratch_stride);
  buffers->draws = carve(&at, CLB_LOGIT_ROWS, sizeof *buffers->draws);
  buffers->policies = carve(&at, tokens, sizeof *buffers->policies);
  buffers->identity = carve(&at, tokens, sizeof *buffers->identity);
  buffers->groups = carve(&at, tokens + 1u, sizeof *buffers->groups);
  buffers->products = carve(&at, (uint64_t)sizes->max_experts + 1u, sizeof *buffers->products);
  buffers->first_items = carve(&at, (uint64_t)sizes->max_experts + 1u, sizeof *buffers->first_items);
  buffers->expert_stamp = carve(&at, sizes->max_experts, sizeof *buffers->expert_stamp);
  return at.used;
}

uint64_t clb_place_slots(const clb_engine_config* config, unsigned char* base, clb_slot* slots) {
  carver at = {base, 0};
  clb_slot unused = {0};
  for (uint32_t i = 0; i < config->channel.slots; ++i) {
    clb_slot* const slot = slots == NULL ? &unused : &slots[i];
    slot->prompt = carve(&at, config->channel.max_seq_len, sizeof *slot->prompt);
    slot->counts = carve(&at, config->channel.vocab_size, sizeof *slot->counts);
    slot->bias = carve(&at, CLB_MAX_BIAS, sizeof *slot->bias);
    slot->stops = carve(&at, CLB_MAX_STOP_IDS, sizeof *slot->stops);
    slot->policy = carve(&at, config->channel.layers, sizeof *slot->policy);
  }
  return at.used;
}

/* ----------------------------------------------------------------- sizes */

/* What the widest layer of each kind needs. */
static void widest_layers(const clb_engine_config* config, clb_sizes* sizes) {
  const clb_model_desc* const model = config->model;
  for (uint32_t l = 0; l < model->layers; ++l) {
    const clb_layer_desc* const layer = &model->layer_table[l];
    const uint32_t most = clb_most_experts(config, layer);
    sizes->k_max = most > sizes->k_max ? most : sizes->k_max;
    sizes->max_experts = layer->experts > sizes->max_experts ? layer->experts : sizes->max_experts;
    sizes->shared_width = layer->shared_width > sizes->shared_width ? layer->shared_width : sizes->shared_width;
    sizes->expert_width = layer->expert_width > sizes->expert_width ? layer->expert_width : sizes->expert_width;
  }
}

/* bytes configured, or needed when none are; MEMORY when the configured ones are too few. */
static int32_t tier_bytes(const clb_tier_config* tier, const char* name, uint64_t needed, uint64_t* bytes,
                          clb_error* error) {
  *bytes =
      tier->bytes == 0u ? clb_pool_round(needed, tier->page_bytes) : tier->bytes & ~((uint64_t)tier->page_bytes - 1u);
  if (*bytes < needed) {
    return clb_fail(error, CLB_ERR_MEMORY,
                    "tier %s: %llu bytes are configured, %llu are needed; raise memory.tiers.%s.bytes or leave it out",
                    name, (unsigned long long)tier->bytes, (unsigned long long)needed, name);
  }
  return CLB_OK;
}

int32_t clb_plan_kv(const clb_engine_config* config, clb_sizes* sizes, clb_error* error) {
  const uint64_t needed = config->tier_kv.bytes == 0u ? sizes->cache.bytes_all : config->tier_kv.page_bytes;
  return tier_bytes(&config->tier_kv, "kv", needed, &sizes->kv_tier, error);
}

static int32_t compute_tiers(const clb_engine_config* config, clb_sizes* sizes, clb_error* error) {
  const uint32_t temp_page = config->tier_temp.page_bytes;
  const uint64_t temp = clb_pool_round(sizes->step_bytes, temp_page) + clb_pool_round(sizes->slot_bytes, temp_page) +
                        clb_pool_round(sizes->dispatch.bytes, temp_page) +
                        clb_pool_round(sizes->stack_bytes, temp_page);
  const uint64_t weights = clb_pool_round(sizes->loader.weights_bytes, config->tier_weights.page_bytes);
  int32_t status =
      tier_bytes(&config->tier_weights, "weights", weights + sizes->swap_bytes, &sizes->weights_tier, error);
  status = status != CLB_OK ? status : clb_plan_kv(config, sizes, error);
  return status != CLB_OK ? status : tier_bytes(&config->tier_temp, "temp", temp, &sizes->temp_tier, error);
}

static int32_t compute_cache(const clb_engine_config* config, clb_sizes* sizes, clb_error* error) {
  const clb_model_desc* const model = config->model;
  sizes->cache_config = (clb_cache_config){
      .slots = config->channel.slots,
      .layers = model->layers,
      .head_dim = model->head_dim,
      .element_bytes = config->kv_precision == CLB_FP32 ? 4u : 2u,
      .max_seq_len = config->channel.max_seq_len,
      .reserved = 0,
      .layer_table = model->layer_table,
      .host_base = NULL,
  };
  if (clb_cache_plan(&sizes->cache_config, config->tier_kv.page_bytes, &sizes->cache) != CLB_OK) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "the KV cache of %u slots of %u tokens is too large to count",
                    config->channel.slots, config->channel.max_seq_len);
  }
  return CLB_OK;
}

static int32_t compute_dispatch(clb_sizes* sizes, uint32_t hidden, clb_error* error) {
  const clb_dispatch_config dispatch = {
      .tokens = sizes->step_tokens,
      .k_max = sizes->k_max,
      .experts = sizes->max_experts,
      .width = sizes->expert_width,
      .hidden = hidden,
      .reserved = 0,
  };
  if (clb_dispatch_plan(&dispatch, &sizes->dispatch) != CLB_OK) {
    return clb_fail(error, CLB_ERR_ARGUMENT,
                    "the expert buffers of %u tokens with %u experts each are too large; lower prefill_tokens",
                    sizes->step_tokens, sizes->k_max);
  }
  return CLB_OK;
}

int32_t clb_plan_weights_cpu(const clb_engine_config* config, clb_sizes* sizes, clb_error* error) {
  const int32_t status = clb_loader_plan(config->model, config->weights, &sizes->loader, error);
  if (status == CLB_OK) {
    sizes->swap_block = clb_largest_expert_bytes(config->model, CLB_LAYOUT_ROWS16);
    sizes->swap_bytes = clb_pool_round(config->swap_slots * sizes->swap_block, config->tier_weights.page_bytes);
    sizes->swap_piece = sizes->swap_bytes == 0u ? UINT64_C(0) : UINT64_C(1) * CLB_LOADER_PIECE_BYTES;
  }
  return status;
}

int32_t clb_plan_memory_cpu(const clb_engine_config* config, clb_sizes* sizes, clb_error* error) {
  clb_step_buffers unused;
  sizes->reads_codes = reads_codes(config->model) || config->swap_slots > 0u ? UINT64_C(1) : UINT64_C(0);
  sizes->step_bytes = clb_place_step_buffers(config, sizes, NULL, &unused);
  sizes->stack_bytes = clb_threads_stack_bytes(config->threads);
  sizes->backend_bytes = clb_kernels_bytes(config->model);
  const int32_t status = compute_dispatch(sizes, config->model->hidden, error);
  return status != CLB_OK ? status : compute_tiers(config, sizes, error);
}

/* engine | nodes of three tiers | layer table | rope | loader's table | backend's part | swap's two, each 64-aligned */
static uint64_t host_bytes(const clb_model_desc* model, const clb_sizes* sizes) {
  carver at = {NULL, 0};
  (void)carve(&at, 1, sizeof(clb_engine));
  (void)carve(&at, (uint64_t)CLB_FIXED_NODES * 2u + sizes->cache.nodes, sizeof(clb_pool_node));
  (void)carve(&at, model->layers, sizeof(clb_layer_desc));
  (void)carve(&at, model->head_dim / 2u, sizeof(float));
  (void)carve(&at, sizes->loader.host_bytes, 1);
  (void)carve(&at, sizes->backend_bytes, 1);
  (void)carve(&at, sizes->swap_own, 1);
  (void)carve(&at, sizes->swap_piece, 1);
  return at.used;
}

int32_t clb_sizes_compute(const clb_engine_config* config, clb_sizes* sizes, clb_error* error) {
  (void)memset(sizes, 0, sizeof *sizes);
  int32_t status = check_versions(config, error);
  status = status != CLB_OK ? status : check_values(config, error);
  if (status != CLB_OK) {
    return status;
  }
  const clb_backend* const backend = clb_backend_of(config);
  status = backend->plan_weights(config, sizes, error); /* checks the model, too */
  if (status != CLB_OK) {
    return status;
  }
  widest_layers(config, sizes);
  status = check_channel(config, sizes->max_experts, error);
  if (status != CLB_OK) {
    return status;
  }
  status = clb_channel_plan(&config->channel, &sizes->channel);
  if (status != CLB_OK) {
    return clb_fail(error, status, "channel configuration: slots, max_seq_len or result_records is out of range");
  }
  const uint32_t slots = config->channel.slots;
  sizes->step_tokens = config->prefill_tokens + slots; /* prompts, and a token of each decoding slot */
  sizes->slot_bytes = clb_place_slots(config, NULL, NULL);
  sizes->swap_own = clb_swap_expert_count(config->model) * sizeof(uint64_t);
  status = compute_cache(config, sizes, error);
  status = status != CLB_OK ? status : backend->plan_memory(config, sizes, error);
  sizes->host_bytes = status != CLB_OK ? 0u : host_bytes(config->model, sizes);
  return status;
}

int32_t clb_engine_plan(const clb_engine_config* config, clb_memory_plan* plan, clb_error* error) {
  clb_sizes sizes;
  (void)memset(plan, 0, sizeof *plan);
  const int32_t status = clb_sizes_compute(config, &sizes, error);
  if (status != CLB_OK) {
    return status;
  }
  plan->weights = sizes.weights_tier - (config->device == NULL ? sizes.swap_bytes : 0u);
  plan->swap = sizes.swap_bytes;
  plan->kv = sizes.kv_tier;
  plan->kv_bytes_per_token = sizes.cache.bytes_per_token;
  plan->kv_tokens = sizes.kv_tier / sizes.cache.bytes_per_token;
  plan->temp = sizes.temp_tier;
  plan->dispatch = sizes.dispatch.bytes;
  plan->host = sizes.host_bytes + sizes.cuda.pinned_bytes;
  plan->arena = sizes.cuda.arena_bytes;
  plan->pinned = sizes.cuda.pinned_bytes;
  plan->graphs = sizes.cuda.graph_bytes;
  plan->total = plan->weights + plan->swap + plan->kv + plan->temp + plan->graphs + plan->host;
  return CLB_OK;
}
