/*
 * cuda_plan.c: see cuda_plan.h. All products stay far under 2^63: clb_model_check bounds every factor.
 */
#include "cuda_plan.h"

#include <string.h>

#include "loader_internal.h" /* clb_fail */

#define ALIGNMENT 256u

static const uint32_t decode_rows[CLB_CUDA_DECODE_BUCKETS] = {1, 2, 4, 8, 16, 24, 32, 48, 64};

uint32_t clb_cuda_decode_rows(uint32_t bucket) { return bucket < CLB_CUDA_DECODE_BUCKETS ? decode_rows[bucket] : 0u; }

uint32_t clb_cuda_prefill_rows(uint32_t bucket, uint32_t max_rows) {
  const uint64_t rows = (uint64_t)CLB_FEW_ROWS << bucket;
  const uint64_t below = bucket == 0u ? 0u : rows / 2u;
  if (bucket >= CLB_CUDA_PREFILL_BUCKETS || below >= max_rows) {
    return 0u;
  }
  return rows < max_rows && bucket + 1u < CLB_CUDA_PREFILL_BUCKETS ? (uint32_t)rows : max_rows;
}

uint32_t clb_cuda_decode_bucket(uint32_t rows) {
  uint32_t bucket = 0;
  while (decode_rows[bucket] < rows) {
    ++bucket;
  }
  return bucket;
}

uint32_t clb_cuda_prefill_bucket(uint32_t rows, uint32_t max_rows) {
  uint32_t bucket = 0;
  while (clb_cuda_prefill_rows(bucket, max_rows) < rows) {
    ++bucket;
  }
  return bucket;
}

static uint32_t graph_count(const clb_engine_config* config, uint32_t max_rows) {
  uint32_t count = clb_cuda_decode_bucket(config->channel.slots) + 1u;
  for (uint32_t bucket = 0; clb_cuda_prefill_rows(bucket, max_rows) != 0u; ++bucket) {
    ++count;
  }
  return count;
}

/* ------------------------------------------------------------------ checks */

static int32_t refuse_size(clb_error* error, const char* what, uint32_t value) {
  return clb_fail(error, CLB_ERR_UNSUPPORTED,
                  "%s is %u; the CUDA kernels take multiples of 16 only; use device: cpu for this model", what, value);
}

static int32_t check_layers(const clb_model_desc* model, clb_error* error) {
  for (uint32_t l = 0; l < model->layers; ++l) {
    const clb_layer_desc* const layer = &model->layer_table[l];
    if (layer->expert_width % CLB_TILE != 0u) {
      return refuse_size(error, "the width of the experts", layer->expert_width);
    }
    if (layer->shared_width % CLB_TILE != 0u) {
      return refuse_size(error, "the width of a dense layer or shared expert", layer->shared_width);
    }
  }
  return CLB_OK;
}

static int32_t check_matrix(const clb_section_desc* section, clb_error* error) {
  if (section->precision == CLB_FP32) {
    return clb_fail(error, CLB_ERR_UNSUPPORTED,
                    "the CUDA kernels take no fp32 matrices; convert the model with --dtype bf16, or use device: cpu");
  }
  if (section->layout != CLB_LAYOUT_MMA) {
    return clb_fail(error, CLB_ERR_UNSUPPORTED,
                    "the pack is not laid out for CUDA; make another with `colibrid convert --backend cuda`");
  }
  if (section->role == CLB_ROLE_EMBEDDING && clb_is_quantised(section->precision)) {
    return clb_fail(error, CLB_ERR_UNSUPPORTED,
                    "the embedding is quantised; the CUDA kernels take it in bf16 or fp16, so convert it with "
                    "embedding=bf16, or use device: cpu");
  }
  return CLB_OK;
}

/* Matrices are of 16 bits or quantised, in tiles; else the message says what to convert. */
static int32_t check_sections(const clb_model_desc* model, clb_error* error) {
  int32_t status = CLB_OK;
  for (uint32_t i = 0; status == CLB_OK && i < model->section_count; ++i) {
    const clb_section_desc* const section = &model->section_table[i];
    if (clb_demand_of(model, section->role, section->layer, section->expert).narrow != 0u) {
      status = check_matrix(section, error);
    }
  }
  return status;
}

int32_t clb_cuda_model_check(const clb_engine_config* config, clb_error* error) {
  const clb_model_desc* const model = config->model;
  if (model->hidden % CLB_TILE != 0u) {
    return refuse_size(error, "hidden", model->hidden);
  }
  if (model->head_dim != 32u && model->head_dim != 64u && model->head_dim != 128u) {
    return clb_fail(error, CLB_ERR_UNSUPPORTED,
                    "head_dim is %u; the CUDA kernels take 32, 64 and 128; use device: cpu for this model",
                    model->head_dim);
  }
  const int32_t status = check_layers(model, error);
  return status != CLB_OK ? status : check_sections(model, error);
}

/* ------------------------------------------------------------------ layout */

static uint64_t take(uint64_t* end, uint64_t bytes) {
  const uint64_t at = *end;
  *end = clb_align_up(at + bytes, ALIGNMENT);
  return at;
}

/* Bytes of (rows, cols) activations: half rows of prompts, or split rows of a decode step. */
static uint64_t row_bytes(uint64_t rows, uint64_t few, uint64_t cols) {
  const uint64_t half = rows * sizeof(uint16_t);
  const uint64_t split = few * sizeof(uint32_t);
  return (half > split ? half : split) * cols;
}

static uint64_t table_rows(const clb_model_desc* model) {
  uint64_t rows = 0;
  for (uint32_t l = 0; l < model->layers; ++l) {
    rows += (uint64_t)model->layer_table[l].experts + 1u;
  }
  return rows;
}

static void plan_state(const clb_engine_config* config, clb_cuda_layout* at, uint64_t* end) {
  const clb_model_desc* const model = config->model;
  const uint64_t slots = config->channel.slots;
  const uint64_t vocab = model->vocab_size;
  at->list = take(end, sizeof(clb_slot_list));
  at->slots = take(end, slots * sizeof(clb_device_slot));
  at->policies = take(end, slots * model->layers * sizeof(clb_router_policy));
  at->stops = take(end, slots * CLB_MAX_STOP_IDS * sizeof(int32_t));
  at->bias = take(end, slots * CLB_MAX_BIAS * sizeof(clb_token_bias));
  at->masks = take(end, slots * 2u * ((vocab + 31u) / 32u) * sizeof(uint32_t));
  at->token_counts = take(end, slots * vocab * sizeof(uint32_t));
  at->expert_counts = take(end, slots * model->layers * config->channel.max_experts * sizeof(uint32_t));
  at->inv_freq = take(end, model->head_dim / 2u * sizeof(float));
  at->step = take(end, sizeof(uint64_t));
  at->rows = take(end, at->stage_rows_bytes);
  at->events = take(end, CLB_FEW_ROWS * sizeof(clb_device_event));
  at->prompt_items = take(end, CLB_FEW_ROWS * sizeof(clb_prompt_logprob_item));
  at->prompt_status = take(end, CLB_FEW_ROWS * sizeof(int32_t));
  at->pool_items = take(end, slots * sizeof(clb_pool_item));
  at->pool_sums = take(end, slots * model->hidden * sizeof(float));
}

static void plan_attention(const clb_model_desc* model, clb_cuda_layout* at, uint64_t* end) {
  const uint64_t rows = at->max_rows;
  const uint64_t hidden = model->hidden;
  const uint64_t q = (uint64_t)model->heads * model->head_dim;
  const uint64_t kv = (uint64_t)model->kv_heads * model->head_dim;
  const uint64_t splits = (uint64_t)CLB_FEW_ROWS * model->heads * CLB_ATTENTION_SPLITS;
  at->residual = take(end, rows * hidden * sizeof(float));
  at->input[0] = take(end, rows * hidden * sizeof(uint32_t)); /* the head's: split rows of prompts too */
  at->input[1] = take(end, row_bytes(rows, CLB_FEW_ROWS, hidden));
  at->sumsq[0] = take(end, rows * (hidden / CLB_TILE) * sizeof(float));
  at->sumsq[1] = take(end, rows * (hidden / CLB_TILE) * sizeof(float));
  at->rope = take(end, rows * model->head_dim * sizeof(float));
  at->qkv = take(end, rows * (q + 2u * kv) * sizeof(float));
  at->attended = take(end, row_bytes(rows, CLB_FEW_ROWS, q));
  at->q_scale = take(end, rows * sizeof(float));
  at->partial = take(end, splits * model->head_dim * sizeof(float));
  at->partial_state = take(end, splits * 2u * sizeof(float));
  at->attend_tickets = take(end, (uint64_t)CLB_FEW_ROWS * model->heads * sizeof(uint32_t));
}

static void plan_ffn(const clb_model_desc* model, const clb_cuda_extents* extents, clb_cuda_layout* at, uint64_t* end) {
  const uint64_t rows = at->max_rows;
  const uint64_t experts = extents->max_experts;
  const uint64_t places = rows * extents->k_max;
  const uint64_t blocks = (rows + CLB_ROUTER_BLOCK_TOKENS - 1u) / CLB_ROUTER_BLOCK_TOKENS;
  const uint64_t hidden = model->hidden;
  at->router_logits = take(end, rows * experts * sizeof(float));
  at->route_tickets = take(end, CLB_FEW_ROWS / 8u * sizeof(uint32_t));
  at->shared_scale = take(end, rows * sizeof(float));
  at->indices = take(end, places * sizeof(uint32_t));
  at->expert_weights = take(end, places * sizeof(float));
  at->kept = take(end, rows * sizeof(uint32_t));
  at->block_counts = take(end, blocks * experts * sizeof(uint32_t));
  at->bucket_counts = take(end, experts * sizeof(uint32_t));
  at->bucket_offsets = take(end, (experts + 1u) * sizeof(uint32_t));
  at->bucket_tokens = take(end, places * sizeof(uint32_t));
  at->bucket_places = take(end, places * sizeof(uint32_t));
  const uint64_t first = *end;
  at->activation = take(end, row_bytes(places, (uint64_t)CLB_FEW_ROWS * extents->k_max, extents->expert_width));
  at->shared_activation = take(end, row_bytes(rows, CLB_FEW_ROWS, extents->shared_width));
  at->expert_partial = take(end, places * hidden * sizeof(uint16_t));
  at->shared_partial = take(end, extents->shared_width == 0u ? 0u : rows * hidden * sizeof(uint16_t));
  uint64_t places_few = extents->k_max;
  if (extents->shared_width != 0u) {
    places_few += CLB_SHARED_MAX_PARTS;
  }
  at->down_partial = take(end, CLB_FEW_ROWS * places_few * hidden * sizeof(float));
  at->down_tickets = take(end, hidden / CLB_TILE * sizeof(uint32_t));
  at->dispatch_bytes = *end - first;
}

static void plan_outputs(const clb_model_desc* model, clb_cuda_layout* at, uint64_t* end) {
  const uint64_t vocab = model->vocab_size;
  at->logits = take(end, CLB_FEW_ROWS * vocab * sizeof(float));
  at->candidates = take(end, CLB_FEW_ROWS * ((vocab + CLB_TILE - 1u) / CLB_TILE) * sizeof(clb_token_bias));
  at->scratch_stride = clb_align_up(vocab * sizeof(float), ALIGNMENT);
  at->scratch = take(end, CLB_FEW_ROWS * at->scratch_stride);
}

static void plan_pinned(const clb_engine_config* config, const clb_cuda_extents* extents, clb_cuda_layout* at) {
  const uint64_t slots = config->channel.slots;
  const uint64_t rows = at->max_rows;
  const uint64_t groups = (rows + CLB_FEW_ROWS - 1u) / CLB_FEW_ROWS + slots;
  const uint64_t inv_freq = config->model->head_dim / 2u * sizeof(float);
  const uint64_t pieces = (uint64_t)clb_cuda_reader_count(config) * CLB_CUDA_LOAD_BUFFERS * CLB_LOADER_PIECE_BYTES;
  uint64_t end = 0;
  at->mailbox = take(&end, CLB_MAILBOX_BYTES);
  at->host_slots = take(&end, slots * sizeof(clb_device_slot));
  at->host_lists = take(&end, CLB_CUDA_STAGES * at->stage_list_bytes);
  at->host_rows = take(&end, CLB_CUDA_STAGES * at->stage_rows_bytes);
  at->host_items = take(&end, rows * sizeof(clb_prompt_logprob_item));
  at->host_groups = take(&end, groups * at->stage_list_bytes);
  at->host_status = take(&end, rows * sizeof(int32_t));
  at->host_usage = take(&end, slots * CLB_CUDA_USAGE * sizeof(uint64_t));
  at->stage_pool_bytes = clb_align_up(slots * sizeof(clb_pool_item), ALIGNMENT);
  at->host_pool = take(&end, CLB_CUDA_STAGES * at->stage_pool_bytes);
  at->slot_memory = take(&end, extents->slot_memory_bytes);
  at->load = take(&end, pieces > at->table_bytes + inv_freq ? pieces : at->table_bytes + inv_freq);
  at->pinned_bytes = clb_align_up(end, 4096u);
}

void clb_cuda_plan(const clb_engine_config* config, const clb_cuda_extents* extents, clb_cuda_layout* layout) {
  clb_cuda_layout* const at = layout;
  uint64_t end = 0;
  (void)memset(at, 0, sizeof *at);
  at->max_rows = config->prefill_tokens > CLB_FEW_ROWS ? config->prefill_tokens : CLB_FEW_ROWS;
  at->stage_list_bytes = clb_align_up(sizeof(clb_cuda_rows), ALIGNMENT);
  at->stage_rows_bytes = clb_align_up(sizeof(clb_cuda_rows) + (uint64_t)at->max_rows * sizeof(clb_row), ALIGNMENT);
  at->table_bytes = table_rows(config->model) * sizeof(clb_expert_weights);
  at->weights = take(&end, extents->weights_bytes);
  at->expert_tables = take(&end, at->table_bytes);
  at->swap = take(&end, extents->swap_bytes);
  at->kv = take(&end, extents->kv_bytes);
  const uint64_t first = end;
  plan_state(config, at, &end);
  plan_attention(config->model, at, &end);
  plan_ffn(config->model, extents, at, &end);
  plan_outputs(config->model, at, &end);
  at->step_bytes = end - first;
  at->arena_bytes = end;
  at->graph_bytes =
      (uint64_t)graph_count(config, at->max_rows) * clb_cuda_step_nodes(config->model->layers) * CLB_CUDA_NODE_BYTES;
  plan_pinned(config, extents, at);
}
