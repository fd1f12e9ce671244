/* engine_rig.c: see engine_rig.h. */
#include "engine_rig.h"

#include <math.h>

#include "engine_internal.h"

static const clb_ops* used; /* NULL: generic */

static const clb_ops* used_table(void) { return used == NULL ? clb_ops_table(0) : used; }

const clb_ops* rig_use(const clb_ops* table) {
  const clb_ops* const before = used;
  used = table;
  return before;
}

int rig_test_main(int argc, char** argv, const clb_test* tests, size_t count) {
  int result = 0;
  for (uint32_t i = 0; clb_ops_table(i) != NULL; ++i) {
    if (clb_ops_table(i)->supported() == 1) {
      (void)printf("%s: ", clb_ops_table(i)->name);
      (void)rig_use(clb_ops_table(i));
      result |= clb_test_main(argc, argv, tests, count);
    }
  }
  return result;
}

static clb_layer_desc layer_of(uint32_t index) {
  clb_layer_desc layer = {
      .ffn_kind = index == 1 ? CLB_FFN_DENSE : CLB_FFN_MOE, .kv_values_per_token = 32, .routed_scale = 1.0f};
  if (index == 1) {
    layer.shared_width = 40;
    return layer;
  }
  layer.experts = RIG_EXPERTS;
  layer.experts_per_token = 2;
  layer.expert_width = 19; /* no multiple of anything */
  layer.shared_width = index == 0 ? 24 : 0;
  layer.shared_gated = index == 0 ? 1 : 0;
  layer.score = index == 0 ? CLB_SCORE_SOFTMAX : CLB_SCORE_SIGMOID;
  layer.renormalise = index == 0 ? 0 : 1;
  layer.qk_norm = index == 0 ? CLB_QK_NORM_HEAD : CLB_QK_NORM_ROW;
  layer.window = index == 0 ? 11 : 0;
  return layer;
}

static void init_modules(rig* r) {
  static const char* const precisions[RIG_MODULES] = {"fp32", "fp16", "bf16"};
  const char* const folder = getenv("CLB_MODULE_DIR");
  for (uint32_t i = 0; i < RIG_MODULES; ++i) {
    (void)snprintf(r->paths[i], sizeof r->paths[i], "%s/clb_cpu_%s_%s.so", folder == NULL ? "." : folder,
                   used_table()->name, precisions[i]);
    r->modules[i] = (clb_module_ref){.name = precisions[i], .path = r->paths[i]};
  }
}

void rig_init(rig* r, uint32_t slots) {
  memset(r, 0, sizeof *r);
  init_modules(r);
  for (uint32_t i = 0; i < RIG_LAYERS; ++i) {
    r->layers[i] = layer_of(i);
  }
  for (uint32_t i = 0; i < 8; ++i) {
    r->inv_freq[i] = powf(10000.0f, -(float)i / 4.0f);
  }
  r->model = (clb_model_desc){.abi_version = CLB_ABI_VERSION,
                              .struct_bytes = sizeof(clb_model_desc),
                              .vocab_size = RIG_VOCAB,
                              .layers = RIG_LAYERS,
                              .hidden = 32,
                              .heads = 4,
                              .kv_heads = 2,
                              .head_dim = 8,
                              .max_positions = RIG_MAX_SEQ,
                              .tied_head = 1,
                              .rms_norm_eps = 1e-6f,
                              .attention_scale = 0.35355339f,
                              .rope_scale = 1.0f,
                              .rope_inv_freq = r->inv_freq,
                              .layer_table = r->layers};
  const clb_tier_config tier = {.bytes = 0, .page_bytes = 4096, .huge_pages = CLB_HUGE_OFF};
  r->config = (clb_engine_config){.abi_version = CLB_ABI_VERSION,
                                  .struct_bytes = sizeof(clb_engine_config),
                                  .channel = {.abi_version = CLB_ABI_VERSION,
                                              .struct_bytes = sizeof(clb_channel_config),
                                              .slots = slots,
                                              .layers = RIG_LAYERS,
                                              .vocab_size = RIG_VOCAB,
                                              .hidden = 32,
                                              .max_experts = RIG_EXPERTS,
                                              .max_seq_len = RIG_MAX_SEQ,
                                              .result_records = RIG_RECORDS},
                                  .prefill_chunk = 8,
                                  .prefill_tokens = 24,
                                  .kv_precision = CLB_FP16,
                                  .threads = 1,
                                  .weights = CLB_WEIGHTS_DUMMY,
                                  .dummy_seed = 7,
                                  .tier_weights = tier,
                                  .tier_kv = tier,
                                  .tier_temp = tier,
                                  .dir_fd = -1,
                                  .command_fd = -1,
                                  .event_fd = -1,
                                  .module_count = RIG_MODULES,
                                  .modules = r->modules,
                                  .model = &r->model};
}

int32_t rig_open(rig* r) {
  r->config.modules = r->modules; /* the rig may have been copied */
  r->config.model = &r->model;
  CHECK_EQ(clb_channel_plan(&r->config.channel, &r->layout), CLB_OK);
  r->config.channel_bytes = r->layout.total_bytes;
  r->config.channel_base = aligned_alloc(64, (r->layout.total_bytes + 63) & ~UINT64_C(63));
  CHECK(r->config.channel_base != NULL);
  memset(r->config.channel_base, 0, r->layout.total_bytes);
  CHECK_EQ(clb_channel_init(r->config.channel_base, r->config.channel_bytes, &r->config.channel), CLB_OK);
  const int32_t status = clb_engine_open(&r->config, &r->engine, &r->error);
  if (status != CLB_OK) {
    free(r->config.channel_base);
    r->config.channel_base = NULL;
  } else {
    r->engine->ops = used_table();
  }
  return status;
}

void rig_close(rig* r) {
  clb_engine_close(r->engine);
  free(r->config.channel_base);
  r->engine = NULL;
  r->config.channel_base = NULL;
}

int32_t rig_prompt_token(uint64_t seed, uint32_t index) {
  uint64_t state = seed * 1000003u + index;
  return (int32_t)(clb_test_random(&state) % RIG_VOCAB);
}

clb_request rig_request(uint64_t seed, uint32_t prompt_tokens, uint32_t max_tokens) {
  return (clb_request){.seed = seed,
                       .flags = CLB_REQ_LOGPROBS,
                       .prompt_tokens = prompt_tokens,
                       .max_tokens = max_tokens,
                       .top_logprobs = 3,
                       .top_p = 1.0f,
                       .repetition_penalty = 1.0f};
}

void* rig_block(rig* r, uint32_t slot, uint64_t offset) {
  unsigned char* const base = r->config.channel_base;
  return base + r->layout.requests + slot * r->layout.request_stride + offset;
}

static const unsigned char* result_block(const rig* r, uint32_t slot) {
  const unsigned char* const base = r->config.channel_base;
  return base + r->layout.results + slot * r->layout.result_stride;
}

clb_prompt_record* rig_prompt_records(rig* r, uint32_t slot) {
  return (clb_prompt_record*)(void*)(uintptr_t)(result_block(r, slot) + r->layout.result_prompt);
}

const uint32_t* rig_counts(const rig* r, uint32_t slot) {
  return (const uint32_t*)(const void*)(result_block(r, slot) + r->layout.result_counts);
}

clb_request* rig_write(rig* r, uint32_t slot, const clb_request* request, uint64_t seed) {
  clb_request* const head = rig_block(r, slot, 0);
  int32_t* const tokens = rig_block(r, slot, r->layout.request_tokens);
  *head = *request;
  head->generation = ++r->generation[slot];
  for (uint32_t i = 0; i < request->prompt_tokens && i < RIG_MAX_SEQ; ++i) {
    tokens[i] = rig_prompt_token(seed, i);
  }
  memset(rig_block(r, slot, r->layout.request_policy), 0, RIG_LAYERS * sizeof(clb_expert_policy));
  memset(&r->outputs[slot], 0, sizeof r->outputs[slot]);
  return head;
}

void rig_push(rig* r, uint32_t kind, uint32_t slot, uint64_t generation, uint32_t start, uint32_t count) {
  const clb_command command = {kind, slot, generation, start, count};
  CHECK_EQ(clb_command_push(r->config.channel_base, &command, 1), CLB_OK);
}

void rig_start(rig* r, uint32_t slot) {
  const clb_request* const head = rig_block(r, slot, 0);
  rig_push(r, CLB_CMD_OPEN, slot, r->generation[slot], 0, 0);
  rig_push(r, CLB_CMD_PREFILL, slot, r->generation[slot], head->prefix_tokens,
           head->prompt_tokens - head->prefix_tokens);
}

static void take_event(rig* r, const clb_event* event) {
  if (event->kind == CLB_EVENT_SWITCHED && event->slot == CLB_NO_SLOT) {
    CHECK_EQ(event->record, r->forgotten + 1u);
    r->forgotten = event->record;
    return;
  }
  CHECK(event->slot < RIG_MAX_SLOTS);
  rig_output* const output = &r->outputs[event->slot];
  CHECK_EQ(event->generation, r->generation[event->slot]);
  CHECK_EQ(output->ended, 0);
  if (event->kind == CLB_EVENT_SWITCHED) {
    CHECK_EQ(event->record, r->forgotten);
    output->switched_at[output->switches] = event->position;
    output->switches++;
    return;
  }
  if (event->kind == CLB_EVENT_OPENED) {
    output->opened = 1;
    return;
  }
  if (event->kind == CLB_EVENT_WAITING) {
    output->waits++;
    return;
  }
  if (event->kind == CLB_EVENT_TOKEN) {
    const clb_record* const records = (const void*)(result_block(r, event->slot) + r->layout.result_records);
    CHECK_EQ(event->position, output->count);
    output->records[output->count] = records[event->record % RIG_RECORDS];
    CHECK_EQ(output->records[output->count].token, event->token);
    output->count++;
    output->flags = event->flags;
    if (r->hold_records == 0) {
      CHECK_EQ(clb_result_advance(r->config.channel_base, event->slot, event->record + 1), CLB_OK);
    }
    if (event->flags == 0) {
      return;
    }
  }
  output->ended = event->kind;
  output->status = event->status;
  memcpy(&output->usage, result_block(r, event->slot), sizeof output->usage);
}

uint32_t rig_turn(rig* r) {
  uint32_t worked = 0;
  clb_event events[64];
  CHECK_EQ(clb_engine_turn(r->engine, &worked), CLB_OK);
  for (uint32_t count = 1; count > 0;) {
    count = clb_event_pop(r->config.channel_base, events, 64);
    for (uint32_t i = 0; i < count; ++i) {
      take_event(r, &events[i]);
    }
  }
  const int32_t status = clb_engine_check(r->engine, &r->error);
  if (status != CLB_OK) {
    (void)fprintf(stderr, "%s\n", r->error.message);
  }
  CHECK_EQ(status, CLB_OK);
  return worked;
}

int rig_drain(rig* r, uint32_t turns) {
  for (uint32_t i = 0; i < turns; ++i) {
    (void)rig_turn(r);
    if (rig_stats(r).slots_open == 0) {
      return 1;
    }
  }
  return 0;
}

void rig_run_alone(rig* r, uint32_t slot, const clb_request* request, uint64_t seed) {
  (void)rig_write(r, slot, request, seed);
  rig_start(r, slot);
  CHECK(rig_drain(r, 400));
}

clb_stats rig_stats(const rig* r) {
  clb_stats stats;
  CHECK_EQ(clb_engine_stats(r->engine, &stats), CLB_OK);
  return stats;
}
