/*
 * fuzz_request.c: the engine against a daemon that writes and says anything.
 *
 * The input is a byte that chooses the configuration, then deeds of 8 bytes: {what, slot, which, how, value (4 bytes)}.
 * They write requests, bend them before and after they are taken, open, prefill, mask, cancel, share prefixes, send
 * wild commands, write over ring indices, and let the engine turn. Beside them a bystander in the last slot asks
 * properly.
 *
 * After each turn the engine's own check holds and every event makes sense. In the end the bystander has the tokens
 * that it gets alone, and closing the slots and releasing the runs gives everything back. The engine may fault only
 * after ring indices were written over. See fuzz.h for how to run it.
 */
#include "engine_internal.h"
#include "engine_rig.h"
#include "fuzz.h"

#define DEED_BYTES 8u
#define MOST_DEEDS 48u
#define BYSTANDER_GENERATION UINT64_C(0xb157a4de00000000) /* beyond what deeds can name */
#define BYSTANDER_TOKENS 12u

typedef struct world {
  rig r;
  uint32_t bystander; /* its slot; deeds that are heeded go to those below */
  uint32_t tokens;    /* of the bystander so far */
  int32_t token[BYSTANDER_TOKENS];
  uint32_t hold;   /* 1: records are not marked as read */
  uint32_t broken; /* 1: ring indices were written over */
  int32_t status;  /* of the last turn */
} world;

static world here; /* large: not on the stack */

static void check_event(world* w, const clb_event* event) {
  const uint32_t last = w->r.config.channel.slots;
  CLB_ASSERT(event->kind >= CLB_EVENT_OPENED && event->kind <= CLB_EVENT_WAITING);
  CLB_ASSERT((event->kind == CLB_EVENT_FAILED) == (event->status != CLB_OK));
  CLB_ASSERT(event->status >= CLB_OK && event->status < CLB_ERR_INTERNAL);
  CLB_ASSERT(event->slot < last || event->kind == CLB_EVENT_FAILED);
  if (event->kind != CLB_EVENT_TOKEN) {
    return;
  }
  CLB_ASSERT(event->token >= 0 && event->token < (int32_t)RIG_VOCAB);
  const unsigned char* const block =
      (const unsigned char*)w->r.config.channel_base + w->r.layout.results + event->slot * w->r.layout.result_stride;
  const clb_record* const records = (const void*)(block + w->r.layout.result_records);
  CLB_ASSERT(records[event->record % RIG_RECORDS].token == event->token);
  CLB_ASSERT(records[event->record % RIG_RECORDS].position == event->position);
  if (w->hold == 0) {
    CLB_ASSERT(clb_result_advance(w->r.config.channel_base, event->slot, event->record + 1) == CLB_OK);
  }
  if (event->slot == w->bystander && event->generation == BYSTANDER_GENERATION) {
    CLB_ASSERT(w->tokens == event->position && w->tokens < BYSTANDER_TOKENS);
    w->token[w->tokens++] = event->token;
  }
}

static void turn(world* w) {
  uint32_t worked;
  clb_event events[32];
  w->status = clb_engine_turn(w->r.engine, &worked);
  if (w->status != CLB_OK) {
    CLB_ASSERT(w->status == CLB_ERR_INTERNAL && w->broken != 0);
    return;
  }
  if (clb_engine_check(w->r.engine, &w->r.error) != CLB_OK) {
    (void)fprintf(stderr, "%s\n", w->r.error.message);
    abort();
  }
  for (uint32_t count = 1; count > 0;) {
    count = clb_event_pop(w->r.config.channel_base, events, 32);
    for (uint32_t i = 0; i < count && w->broken == 0; ++i) {
      check_event(w, &events[i]);
    }
  }
}

/* A full command ring is no news: what does not fit is lost. */
static void push(world* w, uint32_t kind, uint32_t slot, uint64_t generation, uint32_t start, uint32_t count) {
  const clb_command command = {kind, slot, generation, start, count};
  (void)clb_command_push(w->r.config.channel_base, &command, 1);
}

static void begin(world* w, uint32_t slot) {
  const clb_request* const head = rig_block(&w->r, slot, 0);
  push(w, CLB_CMD_OPEN, slot, w->r.generation[slot], 0, 0);
  push(w, CLB_CMD_PREFILL, slot, w->r.generation[slot], head->prefix_tokens, head->prompt_tokens - head->prefix_tokens);
}

/* A request as the daemon could have written it. */
static void write_request(world* w, uint32_t slot, const uint8_t* deed, uint32_t value) {
  clb_request request = rig_request(value % 4u, 1u + deed[2] % 40u, deed[3] % 16u);
  request.flags = (value >> 8) & 7u;
  request.temperature = (value & 0x1000u) != 0 ? 1.0f : 0.0f;
  request.top_k = (value >> 16) & 7u;
  request.presence_penalty = (value & 0x80000u) != 0 ? 0.5f : 0.0f;
  request.prompt_top_logprobs = (value >> 20) & 3u;
  request.stop_count = (value >> 22) & 7u;
  request.bias_count = (value >> 25) & 3u;
  request.min_tokens = (value >> 27) & 3u;
  request.min_p = (value & 0x20u) != 0 ? 0.05f : 0.0f;
  request.publish_run = ((value >> 2) & 1u) * (1u + ((value >> 6) & 1u));
  request.prefix_run = ((value >> 3) & 1u) * (1u + ((value >> 7) & 1u));
  request.prefix_tokens = request.prefix_run != 0 ? 1u + deed[3] / 16u : 0;
  (void)rig_write(&w->r, slot, &request, value % 4u);
  int32_t* const stops = rig_block(&w->r, slot, w->r.layout.request_stops);
  clb_bias* const bias = rig_block(&w->r, slot, w->r.layout.request_bias);
  clb_expert_policy* const policy = rig_block(&w->r, slot, w->r.layout.request_policy);
  for (uint32_t i = 0; i < 8; ++i) {
    stops[i] = (int32_t)((value + 12u * i) % RIG_VOCAB);
    bias[i] = (clb_bias){(int32_t)((value + 5u * i) % RIG_VOCAB), 100.0f};
  }
  policy[0] = (clb_expert_policy){(value >> 29) & 1u, 0.0f};
  policy[2] = (clb_expert_policy){0, (value & 0x40000000u) != 0 ? 0.9f : 0.0f};
}

/* A mask for the position that `value` says, of ids that `which` says. */
static void set_mask(world* w, uint32_t slot, const uint8_t* deed, uint32_t value) {
  const uint32_t words = (RIG_VOCAB + 31u) / 32u;
  const uint32_t position = value % 16u;
  uint32_t* const masks = rig_block(&w->r, slot, w->r.layout.request_mask);
  memset(masks + (position & 1u) * words, deed[2] % 4u != 0 ? deed[2] : 0, words * sizeof *masks);
  push(w, CLB_CMD_SET, slot, w->r.generation[slot], position, 0);
}

/* One word of one of the arrays behind the head, in the part that good requests use. */
static void bend_array(world* w, uint32_t slot, const uint8_t* deed, uint32_t value) {
  const clb_channel_layout* const at = &w->r.layout;
  const struct {
    uint64_t offset;
    size_t bytes;
  } arrays[5] = {{at->request_tokens, 40 * sizeof(int32_t)},
                 {at->request_bias, 4 * sizeof(clb_bias)},
                 {at->request_stops, 8 * sizeof(int32_t)},
                 {at->request_policy, RIG_LAYERS * sizeof(clb_expert_policy)},
                 {at->request_mask, 8 * sizeof(uint32_t)}};
  const uint32_t which = deed[2] % 5u;
  clb_fuzz_edit(rig_block(&w->r, slot, arrays[which].offset), arrays[which].bytes, deed[2] / 5u, deed[3], value);
}

/* Indices of both rings and of a slot's records. */
static void break_index(world* w, uint32_t slot, const uint8_t* deed, uint32_t value) {
  unsigned char* const base = w->r.config.channel_base;
  const clb_channel_layout* const at = &w->r.layout;
  const uint64_t parts[3] = {at->command_ring, at->event_ring, at->results + slot * at->result_stride};
  w->broken = 1;
  clb_fuzz_edit(base + parts[deed[2] % 3], 128, deed[3] / 4u, deed[3], value);
}

static void wild_command(world* w, const uint8_t* deed, uint32_t value) {
  const uint32_t slot = deed[2] % 8u == 7 ? value : deed[2] % (w->r.config.channel.slots + 1u);
  const uint64_t generation = deed[3] % 2 != 0 && slot < w->bystander ? w->r.generation[slot] : value;
  push(w, deed[3] / 2u % 8u, slot, generation, value >> (deed[2] / 8u), value >> (deed[3] / 16u));
}

static void act(world* w, const uint8_t* deed) {
  const uint32_t slot = deed[1] % w->bystander;
  const uint32_t any = deed[1] % w->r.config.channel.slots;
  uint32_t value;
  memcpy(&value, deed + 4, sizeof value);
  switch (deed[0] % 16) {
    case 0:
      write_request(w, slot, deed, value);
      break;
    case 1: /* the bystander's block too: the engine has its copy */
      clb_fuzz_edit(rig_block(&w->r, any, 0), sizeof(clb_request), deed[2], deed[3], value);
      break;
    case 2:
      bend_array(w, any, deed, value);
      break;
    case 3:
      begin(w, slot);
      break;
    case 4:
      push(w, CLB_CMD_PREFILL, slot, w->r.generation[slot], deed[2] % 64u, deed[3] % 64u);
      break;
    case 5:
      set_mask(w, slot, deed, value);
      break;
    case 6:
      push(w, CLB_CMD_CLOSE, slot, w->r.generation[slot], 0, 0);
      break;
    case 7:
      push(w, CLB_CMD_RELEASE_RUN, 0, 0, deed[2] % (2u * w->r.config.channel.slots + 2u), 0);
      break;
    case 8:
      wild_command(w, deed, value);
      break;
    case 9:
      w->hold ^= 1u;
      break;
    case 10: /* rarely: afterwards little can be said */
      if (deed[1] % 16 == 0) {
        break_index(w, slot, deed, value);
      }
      break;
    case 11:
    case 12:
      write_request(w, slot, deed, value);
      begin(w, slot);
      break;
    default:
      for (uint32_t i = 0; i <= deed[2] % 4u && w->status == CLB_OK; ++i) {
        turn(w);
      }
  }
}

static void open_world(world* w, uint32_t choice) {
  memset(w, 0, sizeof *w);
  rig_init(&w->r, 2 + choice % 3u);
  w->r.config.tier_kv.bytes = (choice & 4u) != 0 ? UINT64_C(8) * 4096 : 0; /* so small that requests wait */
  w->r.config.kv_precision = (choice & 8u) != 0 ? CLB_FP32 : CLB_FP16;
  const int32_t status = rig_open(&w->r);
  if (status != CLB_OK) {
    (void)fprintf(stderr, "%s\n", w->r.error.message);
    abort();
  }
  w->bystander = w->r.config.channel.slots - 1;
  const clb_request request = rig_request(9, 11, BYSTANDER_TOKENS);
  w->r.generation[w->bystander] = BYSTANDER_GENERATION - 1;
  (void)rig_write(&w->r, w->bystander, &request, 9);
  begin(w, w->bystander);
  turn(w); /* from here on its block may be bent */
}

static void finish_bystander(world* w) {
  for (uint32_t i = 0; i < 2 * BYSTANDER_TOKENS && w->tokens < BYSTANDER_TOKENS; ++i) {
    turn(w);
  }
  CLB_ASSERT(w->tokens == BYSTANDER_TOKENS);
}

static void close_slots(world* w) {
  for (uint32_t slot = 0; slot < w->r.config.channel.slots; ++slot) {
    push(w, CLB_CMD_CLOSE, slot, w->r.engine->slots[slot].request.generation, 0, 0);
  }
  for (uint32_t run = 1; run <= 2 * w->r.config.channel.slots; ++run) {
    push(w, CLB_CMD_RELEASE_RUN, 0, 0, run, 0);
  }
  turn(w);
  const clb_stats stats = rig_stats(&w->r);
  CLB_ASSERT(stats.slots_open == 0);
  CLB_ASSERT(stats.kv_bytes_used == 0);
  CLB_ASSERT(stats.allocations_after_open == 0);
  CLB_ASSERT(stats.expert_relaunches == 0);
}

/* What the bystander gets alone, for each KV precision. */
static const int32_t* expected_tokens(uint32_t choice) {
  static int32_t alone[2][BYSTANDER_TOKENS];
  static uint32_t known[2];
  const uint32_t precision = (choice & 8u) != 0 ? 1u : 0u;
  if (known[precision] == 0) {
    open_world(&here, choice & 8u);
    finish_bystander(&here);
    memcpy(alone[precision], here.token, sizeof here.token);
    rig_close(&here.r);
    known[precision] = 1;
  }
  return alone[precision];
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const uint32_t choice = size > 0 ? data[0] : 0;
  const int32_t* const expected = expected_tokens(choice);
  world* const w = &here;
  open_world(w, choice);
  for (size_t i = 1; i + DEED_BYTES <= size && i < 1 + MOST_DEEDS * DEED_BYTES && w->status == CLB_OK;
       i += DEED_BYTES) {
    act(w, data + i);
  }
  if (w->broken == 0) {
    turn(w);
    finish_bystander(w);
    CLB_ASSERT(memcmp(w->token, expected, sizeof w->token) == 0);
    close_slots(w);
  }
  rig_close(&w->r);
  return 0;
}

CLB_FUZZ_MAIN(1 + MOST_DEEDS * DEED_BYTES)
