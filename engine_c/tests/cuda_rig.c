/* cuda_rig.c: see cuda_rig.h. Device memory is host memory, so the stand-in kernels read and write it directly. */
#include "cuda_rig.h"

#include <math.h>

#include "../../kernels_cu/abi.h"
#include "fake_cuda.h"
#include "test.h"

#define KERNELS 45u

static fake_kernel kernels[KERNELS];
static clb_device_kernel table[KERNELS];
static clb_cuda_entries entries;

int32_t cuda_rig_next(int32_t token, uint32_t position) {
  return (int32_t)(((uint32_t)token * 31u + position * 7u + 5u) % CUDA_RIG_VOCAB);
}

int32_t cuda_rig_prompt(uint32_t slot, uint32_t index) {
  return (int32_t)((slot * 13u + index * 5u + 1u) % CUDA_RIG_VOCAB);
}

/* ----------------------------------------------------------------- kernels */

static void run_nothing(const void* args) { (void)args; }

static void run_embed(const void* args) {
  clb_embed_args a;
  (void)memcpy(&a, args, sizeof a);
  if (a.list == 0u) {
    return;
  }
  const clb_slot_list* const list = fake_pointer(a.list);
  const clb_device_slot* const slots = fake_pointer(a.slots);
  clb_row* const rows = fake_pointer(a.rows);
  for (uint32_t i = 0; i < list->count; ++i) {
    const clb_device_slot* const slot = &slots[list->slots[i]];
    rows[i] =
        slot->active != 0u ? (clb_row){list->slots[i], slot->position, slot->token, 0} : (clb_row){CLB_NONE, 0, 0, 0};
  }
}

/* Every row uses experts 1 and 3. */
static void run_router(const void* args) {
  clb_router_args a;
  (void)memcpy(&a, args, sizeof a);
  const clb_row* const rows = fake_pointer(a.rows);
  for (uint32_t i = 0; i < *(const uint32_t*)fake_pointer(a.token_count); ++i) {
    if (rows[i].slot != CLB_NONE) {
      uint32_t* const counts = (uint32_t*)fake_pointer(a.expert_counts) + rows[i].slot * a.counts_stride;
      ((clb_device_slot*)fake_pointer(a.slots))[rows[i].slot].assignments += 2u;
      ++counts[1];
      ++counts[3];
    }
  }
}

static void run_route(const void* args) {
  clb_route_args a;
  (void)memcpy(&a, args, sizeof a);
  run_router(&a.choice);
}

/* Every row loses expert 3. */
static void run_capacity(const void* args) {
  clb_capacity_args a;
  (void)memcpy(&a, args, sizeof a);
  const clb_row* const rows = fake_pointer(a.rows);
  for (uint32_t i = 0; i < *(const uint32_t*)fake_pointer(a.token_count); ++i) {
    if (rows[i].slot != CLB_NONE) {
      clb_device_slot* const slot = (clb_device_slot*)fake_pointer(a.slots) + rows[i].slot;
      --((uint32_t*)fake_pointer(a.expert_counts) + rows[i].slot * a.counts_stride)[3];
      --slot->assignments;
      ++slot->dropped;
    }
  }
}

/* The first sum counts rows, the second launches; the third is the last first row. */
static void run_pool(const void* args) {
  clb_pool_args a;
  (void)memcpy(&a, args, sizeof a);
  const clb_pool_item* const items = fake_pointer(a.items);
  for (uint32_t i = 0; i < fake_cuda.last_config.grid_y; ++i) {
    float* const sums = (float*)fake_pointer(a.sums) + items[i].slot * a.hidden;
    if (items[i].fresh != 0u) {
      (void)memset(sums, 0, a.hidden * sizeof sums[0]);
    }
    sums[0] += (float)items[i].count;
    sums[1] += 1.0f;
    sums[2] = (float)items[i].first;
    if (items[i].output != 0u) {
      (void)memcpy(fake_pointer(items[i].output), sums, a.hidden * sizeof sums[0]);
    }
  }
}

static int32_t choose(const clb_sample_args* a, const clb_row* row, const clb_device_slot* slot) {
  const uint32_t words = (CUDA_RIG_VOCAB + 31u) / 32u;
  const uint32_t* const mask =
      (const uint32_t*)fake_pointer(a->masks) + (2u * row->slot + (slot->generated & 1u)) * words;
  if ((slot->flags & CLB_REQ_MASKED) == 0u) {
    return cuda_rig_next(row->token, row->position);
  }
  for (uint32_t id = 0; id < CUDA_RIG_VOCAB; ++id) {
    if ((mask[id / 32u] >> (id % 32u) & 1u) != 0u) {
      return (int32_t)id;
    }
  }
  return -1;
}

static uint32_t finish_flags(const clb_sample_args* a, const clb_row* row, const clb_device_slot* slot, int32_t token) {
  const int32_t* const stops = (const int32_t*)fake_pointer(a->stops) + row->slot * CLB_MAX_STOP_IDS;
  for (uint32_t i = 0; i < slot->stop_count; ++i) {
    if (stops[i] == token) {
      return CLB_FINISH_STOP;
    }
  }
  return slot->generated == slot->max_tokens ? CLB_FINISH_LENGTH : 0u;
}

static void sample_row(const clb_sample_args* a, const clb_row* row, clb_device_event* event) {
  (void)memset(event, 0, sizeof *event);
  if (row->slot == CLB_NONE) {
    return;
  }
  clb_device_slot* const slot = (clb_device_slot*)fake_pointer(a->slots) + row->slot;
  const int32_t token = choose(a, row, slot);
  event->generation = slot->generation;
  event->slot = row->slot;
  if (token < 0) {
    event->kind = CLB_DEVICE_FAILED;
    event->status = CLB_ERR_NO_TOKEN;
    slot->active = 0;
    return;
  }
  clb_record* const records = fake_pointer(slot->records);
  records[slot->written & slot->record_mask] = (clb_record){.position = slot->generated, .token = token};
  event->kind = CLB_DEVICE_TOKEN;
  event->record = slot->written++;
  event->position = slot->generated++;
  event->token = token;
  event->assignments = slot->assignments;
  event->dropped = slot->dropped;
  event->flags = finish_flags(a, row, slot, token);
  slot->position++;
  slot->token = token;
  slot->active = event->flags == 0u ? 1u : 0u;
}

static void run_sample(const void* args) {
  clb_sample_args a;
  (void)memcpy(&a, args, sizeof a);
  const uint32_t* const wanted = fake_pointer(a.wanted);
  const clb_row* const rows = fake_pointer(a.rows);
  clb_device_event* const events = fake_pointer(a.events);
  for (uint32_t i = 0; i < *(const uint32_t*)fake_pointer(a.wanted_count); ++i) {
    sample_row(&a, &rows[wanted == NULL ? i : wanted[i]], &events[i]);
  }
}

static void run_publish(const void* args) {
  clb_publish_args a;
  (void)memcpy(&a, args, sizeof a);
  uint64_t* const step = fake_pointer(a.step);
  unsigned char* const mailbox = fake_pointer(a.mailbox);
  const uint64_t place = *step % CLB_MAILBOX_STEPS * CLB_FEW_ROWS * sizeof(clb_device_event);
  (void)memcpy(mailbox + CLB_MAILBOX_EVENTS + place, fake_pointer(a.events),
               *(const uint32_t*)fake_pointer(a.wanted_count) * sizeof(clb_device_event));
  ++*step;
  (void)memcpy(mailbox, step, sizeof *step);
}

/* The record says which token it is for, and which row was asked for. */
static void run_prompt(const void* args) {
  clb_prompt_logprobs_args a;
  (void)memcpy(&a, args, sizeof a);
  const clb_prompt_logprob_item* const items = fake_pointer(a.items);
  int32_t* const status = fake_pointer(a.status);
  for (uint32_t i = 0; i < *(const uint32_t*)fake_pointer(a.wanted_count); ++i) {
    clb_prompt_record* const record = fake_pointer(items[i].record);
    *record = (clb_prompt_record){.logprob = (float)items[i].next, .top_count = items[i].top_count};
    status[i] = CLB_OK;
  }
}

static void add_kernel(uint32_t index, const char* name, uint32_t bytes, void (*run)(const void*)) {
  kernels[index] = (fake_kernel){.run = run, .args_bytes = bytes};
  table[index] = (clb_device_kernel){name, &kernels[index], bytes};
}

/* Of quantised weights; no step of the rig's model has them. */
static void add_quantised(uint32_t index) {
  static const char* const names[] = {
      "clb_linear_quant_int8",        "clb_linear_quant_int4",        "clb_linear_quant_fp8",
      "clb_linear_quant_8_int8",      "clb_linear_quant_8_int4",      "clb_linear_quant_8_fp8",
      "clb_linear_many_int8",         "clb_linear_many_int4",         "clb_linear_many_fp8",
      "clb_expert_gate_up_many_int8", "clb_expert_gate_up_many_int4", "clb_expert_gate_up_many_fp8",
      "clb_expert_down_many_int8",    "clb_expert_down_many_int4",    "clb_expert_down_many_fp8"};
  static const uint32_t bytes[] = {sizeof(clb_matmul_args), sizeof(clb_matmul_args), sizeof(clb_matmul_many_args),
                                   sizeof(clb_expert_many_args), sizeof(clb_expert_many_args)};
  for (uint32_t i = 0; i < 15u; ++i) {
    add_kernel(index + i, names[i], bytes[i / 3u], run_nothing);
  }
  add_kernel(index + 15u, "clb_expert_gate_up_mixed", sizeof(clb_expert_gate_up_args), run_nothing);
  add_kernel(index + 16u, "clb_expert_down_mixed", sizeof(clb_expert_down_args), run_nothing);
  add_kernel(index + 17u, "clb_expert_gate_up_mixed_8", sizeof(clb_expert_gate_up_args), run_nothing);
  add_kernel(index + 18u, "clb_expert_down_mixed_8", sizeof(clb_expert_down_args), run_nothing);
  add_kernel(index + 19u, "clb_to_fp16", sizeof(clb_to_fp16_args), run_nothing);
}

static void make_kernels(void) {
  add_quantised(25);
  add_kernel(0, "clb_embed_bf16", sizeof(clb_embed_args), run_embed);
  add_kernel(1, "clb_linear_bf16", sizeof(clb_matmul_args), run_nothing);
  add_kernel(2, "clb_linear_many_bf16", sizeof(clb_matmul_many_args), run_nothing);
  add_kernel(3, "clb_router_logits", sizeof(clb_router_logits_args), run_nothing);
  add_kernel(4, "clb_router_fp32", sizeof(clb_router_args), run_router);
  add_kernel(5, "clb_bucket", sizeof(clb_bucket_args), run_nothing);
  add_kernel(6, "clb_expert_gate_up_bf16", sizeof(clb_expert_gate_up_args), run_nothing);
  add_kernel(7, "clb_expert_down_bf16", sizeof(clb_expert_down_args), run_nothing);
  add_kernel(8, "clb_expert_gate_up_many_bf16", sizeof(clb_expert_many_args), run_nothing);
  add_kernel(9, "clb_expert_down_many_bf16", sizeof(clb_expert_many_args), run_nothing);
  add_kernel(10, "clb_combine_bf16", sizeof(clb_combine_args), run_nothing);
  add_kernel(11, "clb_attend_fp16_bf16", sizeof(clb_attend_args), run_nothing);
  add_kernel(12, "clb_route", sizeof(clb_route_args), run_route);
  add_kernel(13, "clb_append_fp16", sizeof(clb_prefill_attention_args), run_nothing);
  add_kernel(14, "clb_attend_many_fp16", sizeof(clb_prefill_attention_args), run_nothing);
  add_kernel(15, "clb_sample", sizeof(clb_sample_args), run_sample);
  add_kernel(16, "clb_publish", sizeof(clb_publish_args), run_publish);
  add_kernel(17, "clb_prompt_logprobs", sizeof(clb_prompt_logprobs_args), run_prompt);
  add_kernel(21, "clb_capacity", sizeof(clb_capacity_args), run_capacity);
  add_kernel(22, "clb_pool", sizeof(clb_pool_args), run_pool);
  add_kernel(23, "clb_linear_wide_bf16", sizeof(clb_matmul_args), run_nothing);
  add_kernel(24, "clb_dummy", sizeof(clb_dummy_args), run_nothing);
  add_kernel(18, "clb_linear_8_bf16", sizeof(clb_matmul_args), run_nothing);
  add_kernel(19, "clb_expert_gate_up_8_bf16", sizeof(clb_expert_gate_up_args), run_nothing);
  add_kernel(20, "clb_expert_down_8_bf16", sizeof(clb_expert_down_args), run_nothing);
}

/* -------------------------------------------------------------------- open */

static void make_model(cuda_rig* r) {
  r->layers[0] = (clb_layer_desc){.ffn_kind = CLB_FFN_MOE,
                                  .kv_values_per_token = 64,
                                  .experts = CUDA_RIG_EXPERTS,
                                  .experts_per_token = 2,
                                  .expert_width = 16,
                                  .shared_width = 32,
                                  .shared_gated = 1,
                                  .routed_scale = 1.0f};
  r->layers[1] =
      (clb_layer_desc){.ffn_kind = CLB_FFN_DENSE, .kv_values_per_token = 64, .shared_width = 48, .routed_scale = 1.0f};
  for (uint32_t i = 0; i < 16u; ++i) {
    r->inv_freq[i] = powf(10000.0f, -(float)i / 16.0f);
  }
  r->model = (clb_model_desc){.abi_version = CLB_ABI_VERSION,
                              .struct_bytes = sizeof(clb_model_desc),
                              .vocab_size = CUDA_RIG_VOCAB,
                              .layers = CUDA_RIG_LAYERS,
                              .hidden = 32,
                              .heads = 2,
                              .kv_heads = 1,
                              .head_dim = 32,
                              .max_positions = CUDA_RIG_MAX_SEQ,
                              .tied_head = 1,
                              .rms_norm_eps = 1e-6f,
                              .attention_scale = 0.17f,
                              .rope_scale = 1.0f,
                              .rope_inv_freq = r->inv_freq,
                              .layer_table = r->layers};
}

void cuda_rig_init(cuda_rig* r, uint32_t fail_at) {
  (void)memset(r, 0, sizeof *r);
  (void)memset(&fake_cuda, 0, sizeof fake_cuda);
  fake_cuda.fail_at = fail_at;
  make_kernels();
  fake_cuda_entries(&entries);
  make_model(r);
  const clb_tier_config tier = {.bytes = 0, .page_bytes = 4096, .huge_pages = CLB_HUGE_OFF};
  r->device = (clb_device_desc){.abi_version = CLB_ABI_VERSION,
                                .struct_bytes = sizeof r->device,
                                .kernels_abi = CLB_KERNELS_ABI,
                                .kernel_count = KERNELS,
                                .kernels = table,
                                .entries = &entries,
                                .stream = &kernels,
                                .copy_stream = &entries,
                                .multiprocessors = 4,
                                .capability = 90};
  r->config = (clb_engine_config){.abi_version = CLB_ABI_VERSION,
                                  .struct_bytes = sizeof(clb_engine_config),
                                  .channel = {.abi_version = CLB_ABI_VERSION,
                                              .struct_bytes = sizeof(clb_channel_config),
                                              .slots = CUDA_RIG_SLOTS,
                                              .layers = CUDA_RIG_LAYERS,
                                              .vocab_size = CUDA_RIG_VOCAB,
                                              .hidden = 32,
                                              .max_experts = CUDA_RIG_EXPERTS,
                                              .max_seq_len = CUDA_RIG_MAX_SEQ,
                                              .result_records = CUDA_RIG_RECORDS},
                                  .prefill_chunk = 8,
                                  .prefill_tokens = 80,
                                  .kv_precision = CLB_FP16,
                                  .threads = 1,
                                  .weights = CLB_WEIGHTS_DUMMY,
                                  .tier_weights = tier,
                                  .tier_kv = tier,
                                  .tier_temp = tier,
                                  .dir_fd = -1,
                                  .command_fd = -1,
                                  .event_fd = -1,
                                  .model = &r->model,
                                  .device = &r->device};
}

static void* take(uint64_t bytes, int poison) {
  void* const memory = aligned_alloc(4096, (size_t)((bytes + 4095u) & ~UINT64_C(4095)));
  CHECK(memory != NULL);
  (void)memset(memory, poison, (size_t)bytes);
  return memory;
}

static void give_back(cuda_rig* r) {
  free(fake_pointer(r->device.arena));
  free(r->device.pinned);
  free(r->config.channel_base);
  r->device.arena = 0;
  r->device.pinned = NULL;
  r->config.channel_base = NULL;
}

int32_t cuda_rig_open(cuda_rig* r) {
  clb_memory_plan plan;
  int32_t status = clb_engine_plan(&r->config, &plan, &r->error);
  if (status != CLB_OK) {
    return status;
  }
  CHECK_EQ(clb_channel_plan(&r->config.channel, &r->layout), CLB_OK);
  r->config.channel_bytes = r->layout.total_bytes;
  r->config.channel_base = take(r->layout.total_bytes, 0);
  CHECK_EQ(clb_channel_init(r->config.channel_base, r->config.channel_bytes, &r->config.channel), CLB_OK);
  r->device.pinned = take(plan.pinned, 0);
  r->device.pinned_device = (uint64_t)(uintptr_t)r->device.pinned;
  r->device.pinned_bytes = plan.pinned;
  r->device.arena = (uint64_t)(uintptr_t)take(plan.arena, 0xab);
  r->device.arena_bytes += plan.arena; /* a test may have made it too small */
  r->device.channel_device = (uint64_t)(uintptr_t)r->config.channel_base;
  status = clb_engine_open(&r->config, &r->engine, &r->error);
  if (status != CLB_OK) {
    give_back(r);
  }
  return status;
}

void cuda_rig_close(cuda_rig* r) {
  clb_engine_close(r->engine);
  r->engine = NULL;
  give_back(r);
}

uint32_t cuda_rig_calls(void) { return fake_cuda.calls; }
int32_t cuda_rig_live(void) { return fake_cuda.live; }
void cuda_rig_lag(uint32_t lag) { fake_cuda.lazy = lag; }

/* ---------------------------------------------------------------- requests */

clb_request cuda_rig_request(uint32_t prompt_tokens, uint32_t max_tokens) {
  return (clb_request){
      .prompt_tokens = prompt_tokens, .max_tokens = max_tokens, .top_p = 1.0f, .repetition_penalty = 1.0f};
}

void* cuda_rig_block(cuda_rig* r, uint32_t slot, uint64_t offset) {
  return (unsigned char*)r->config.channel_base + r->layout.requests + slot * r->layout.request_stride + offset;
}

void cuda_rig_push(cuda_rig* r, uint32_t kind, uint32_t slot, uint32_t start, uint32_t count) {
  const clb_command command = {kind, slot, r->generation[slot], start, count};
  CHECK_EQ(clb_command_push(r->config.channel_base, &command, 1), CLB_OK);
}

void cuda_rig_start(cuda_rig* r, uint32_t slot, const clb_request* request) {
  clb_request* const head = cuda_rig_block(r, slot, 0);
  int32_t* const tokens = cuda_rig_block(r, slot, r->layout.request_tokens);
  *head = *request;
  head->generation = ++r->generation[slot];
  for (uint32_t i = 0; i < request->prompt_tokens; ++i) {
    tokens[i] = cuda_rig_prompt(slot, i);
  }
  (void)memset(&r->outputs[slot], 0, sizeof r->outputs[slot]);
  cuda_rig_push(r, CLB_CMD_OPEN, slot, 0, 0);
  cuda_rig_push(r, CLB_CMD_PREFILL, slot, 0, request->prompt_tokens);
}

static void take_event(cuda_rig* r, const clb_event* event) {
  if (event->kind == CLB_EVENT_SWITCHED) {
    return;
  }
  cuda_rig_output* const output = &r->outputs[event->slot];
  CHECK_EQ(event->generation, r->generation[event->slot]);
  CHECK_EQ(output->ended, 0);
  if (event->kind == CLB_EVENT_OPENED) {
    output->opened = 1;
    return;
  }
  if (event->kind == CLB_EVENT_WAITING) {
    output->waits++;
    return;
  }
  if (event->kind == CLB_EVENT_TOKEN) {
    const unsigned char* const block = (const unsigned char*)r->config.channel_base + r->layout.results +
                                       event->slot * r->layout.result_stride + r->layout.result_records;
    const clb_record* const record = (const clb_record*)(const void*)block + event->record % CUDA_RIG_RECORDS;
    CHECK_EQ(event->position, output->count);
    CHECK_EQ(record->token, event->token);
    CHECK_EQ(record->position, event->position);
    output->tokens[output->count++] = event->token;
    output->flags = event->flags;
    if (r->hold_records == 0u) {
      CHECK_EQ(clb_result_advance(r->config.channel_base, event->slot, event->record + 1u), CLB_OK);
    }
    if (event->flags == 0u) {
      return;
    }
  }
  output->ended = event->kind;
  output->status = event->status;
}

int32_t cuda_rig_turn(cuda_rig* r) {
  uint32_t worked = 0;
  clb_event events[64];
  const int32_t status = clb_engine_turn(r->engine, &worked);
  for (uint32_t count = 1; count > 0u;) {
    count = clb_event_pop(r->config.channel_base, events, 64);
    for (uint32_t i = 0; i < count; ++i) {
      take_event(r, &events[i]);
    }
  }
  if (status == CLB_OK) {
    CHECK_EQ(clb_engine_check(r->engine, &r->error), CLB_OK);
  }
  return status;
}

int cuda_rig_drain(cuda_rig* r, uint32_t turns) {
  for (uint32_t i = 0; i < turns; ++i) {
    clb_stats stats;
    CHECK_EQ(cuda_rig_turn(r), CLB_OK);
    CHECK_EQ(clb_engine_stats(r->engine, &stats), CLB_OK);
    if (stats.slots_open == 0u) {
      return 1;
    }
  }
  return 0;
}
