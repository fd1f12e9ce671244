/*
 * commands.c: what the daemon asks for, applied between steps.
 *
 * The daemon is another process: a request block is copied into private memory first, then checked, and only
 * the copy is used. A bad command fails its own request and touches no other.
 */
#include <stdbool.h>
#include <string.h>

#include "engine_internal.h"
#include "invariant.h"
#include "sampler.h"

enum { KNOWN_FLAGS = CLB_REQ_LOGPROBS | CLB_REQ_PROMPT_LOGPROBS | CLB_REQ_MASKED | CLB_REQ_POOL };

/* Answers a command that opened nothing. */
static void refuse(clb_engine* engine, const clb_command* command, int32_t status) {
  clb_event event;
  (void)memset(&event, 0, sizeof event);
  event.kind = CLB_EVENT_FAILED;
  event.slot = command->slot;
  event.generation = command->generation;
  event.status = status;
  engine->stats.requests_failed++;
  clb_push_event(engine, &event);
}

/* Pooling needs every position that it is over, and a prompt that is the whole request. */
static int32_t check_pooling(const clb_request* request) {
  const uint32_t asked = request->flags & CLB_REQ_POOL;
  const bool possible =
      asked != CLB_REQ_POOL && request->max_tokens == 0u && (asked != CLB_REQ_POOL_MEAN || request->prefix_run == 0u);
  return asked == 0u || possible ? CLB_OK : CLB_ERR_ARGUMENT;
}

/* The numbers of the head that say how much follows, and those that the sampler does not check. */
static int32_t check_head(const clb_engine* engine, const clb_request* request, uint64_t generation) {
  const uint32_t max_runs = 2u * engine->config.channel.slots;
  const uint32_t max_seq_len = engine->config.channel.max_seq_len;
  if (request->generation != generation || (request->flags & ~(uint32_t)KNOWN_FLAGS) != 0u) {
    return CLB_ERR_ARGUMENT;
  }
  if (request->prompt_tokens == 0u || request->prompt_tokens > max_seq_len ||
      request->max_tokens > max_seq_len - request->prompt_tokens) {
    return CLB_ERR_ARGUMENT;
  }
  if (request->bias_count > CLB_MAX_BIAS || request->stop_count > CLB_MAX_STOP_IDS ||
      request->prompt_top_logprobs > CLB_MAX_TOP_LOGPROBS || request->top_logprobs > CLB_MAX_TOP_LOGPROBS) {
    return CLB_ERR_ARGUMENT;
  }
  if (request->prefix_run > max_runs || request->publish_run > max_runs ||
      (request->prefix_run == 0u) != (request->prefix_tokens == 0u)) {
    return CLB_ERR_ARGUMENT;
  }
  return request->prefix_tokens < request->prompt_tokens ? check_pooling(request) : CLB_ERR_ARGUMENT;
}

static int32_t check_arrays(const clb_engine* engine, const clb_slot* slot) {
  const clb_request* const request = &slot->request;
  uint32_t bad = 0;
  for (uint32_t i = 0; i < request->prompt_tokens; ++i) {
    bad |= slot->prompt[i] < 0 || (uint32_t)slot->prompt[i] >= engine->model.vocab_size ? 1u : 0u;
  }
  for (uint32_t layer = 0; layer < engine->model.layers; ++layer) {
    const clb_layer_desc* const desc = &engine->model.layer_table[layer];
    const clb_expert_policy* const policy = &slot->policy[layer];
    bad |= policy->k > clb_most_experts(&engine->config, desc) ? 1u : 0u;
    bad |= policy->threshold >= 0.0f && policy->threshold <= 1.0f ? 0u : 1u; /* NaN is bad */
  }
  if (bad != 0u) {
    return CLB_ERR_ARGUMENT;
  }
  return clb_sampler_check(request, slot->bias, slot->stops, engine->model.vocab_size);
}

/* Copies the request block of a free slot and checks the copy. */
static int32_t take_request(clb_engine* engine, uint32_t index, uint64_t generation) {
  clb_slot* const slot = &engine->slots[index];
  const clb_channel* const channel = &engine->channel;
  (void)memcpy(&slot->request, clb_channel_request(channel, index), sizeof slot->request);
  const int32_t status = check_head(engine, &slot->request, generation);
  if (status != CLB_OK) {
    return status;
  }
  (void)memcpy(slot->prompt, clb_channel_tokens(channel, index), slot->request.prompt_tokens * sizeof slot->prompt[0]);
  (void)memcpy(slot->bias, clb_channel_bias(channel, index), slot->request.bias_count * sizeof slot->bias[0]);
  (void)memcpy(slot->stops, clb_channel_stops(channel, index), slot->request.stop_count * sizeof slot->stops[0]);
  (void)memcpy(slot->policy, clb_channel_policy(channel, index), engine->model.layers * sizeof slot->policy[0]);
  return check_arrays(engine, slot);
}

static void command_open(clb_engine* engine, const clb_command* command) {
  clb_slot* const slot = &engine->slots[command->slot];
  if (slot->state != CLB_SLOT_FREE) {
    refuse(engine, command, CLB_ERR_STATE);
    return;
  }
  const int32_t status = take_request(engine, command->slot, command->generation);
  clb_channel_slot_open(&engine->channel, command->slot, command->generation);
  if (status != CLB_OK) {
    refuse(engine, command, status);
    return;
  }
  slot->computed = slot->request.prefix_tokens;
  slot->asked = slot->request.prefix_tokens;
  slot->generated = 0;
  slot->launched = 0;
  slot->last_token = 0;
  slot->told_to_wait = 0;
  slot->mask_position[0] = CLB_NO_POSITION;
  slot->mask_position[1] = CLB_NO_POSITION;
  slot->assignments = 0;
  slot->trimmed = 0;
  slot->dropped = 0;
  slot->needs_counts = clb_sampler_needs_counts(&slot->request) ? 1u : 0u;
  if (slot->needs_counts != 0u) {
    clb_sampler_reset(slot->counts, engine->model.vocab_size, slot->prompt, slot->request.prompt_tokens);
  }
  clb_channel_result(&engine->channel, command->slot)->cached_tokens = slot->request.prefix_tokens;
  slot->state = CLB_SLOT_WAITING;
  CLB_ASSERT(engine->order_count < CLB_MAX_SLOTS);
  engine->order[engine->order_count] = command->slot;
  engine->order_count++;
}

static void command_prefill(clb_engine* engine, const clb_command* command) {
  clb_slot* const slot = &engine->slots[command->slot];
  const uint64_t end = (uint64_t)command->start + command->count;
  if (command->start > slot->asked || end > slot->request.prompt_tokens) {
    clb_slot_fail(engine, command->slot, CLB_ERR_ARGUMENT);
    return;
  }
  slot->asked = end > slot->asked ? (uint32_t)end : slot->asked;
}

static void command_set(clb_engine* engine, const clb_command* command) {
  clb_slot* const slot = &engine->slots[command->slot];
  slot->mask_position[command->start & 1u] = command->start;
  const int32_t status = engine->backend->mask_set(engine, command->slot, command->start);
  if (status != CLB_OK) {
    engine->fault = status;
  }
}

static void command_close(clb_engine* engine, const clb_command* command) {
  clb_event event;
  (void)memset(&event, 0, sizeof event);
  event.kind = CLB_EVENT_CLOSED;
  event.slot = command->slot;
  event.generation = command->generation;
  clb_slot_keep_output(engine, command->slot);
  clb_slot_release(engine, command->slot);
  engine->stats.requests_done++;
  clb_push_event(engine, &event);
}

/* An id that is not held changes nothing. Whoever still has to wait after this is told again. */
static void command_release_run(clb_engine* engine, const clb_command* command) {
  if (clb_cache_release_run(&engine->cache, command->start) != CLB_OK) {
    return;
  }
  for (uint32_t i = 0; i < engine->order_count; ++i) {
    engine->slots[engine->order[i]].told_to_wait = 0;
  }
}

static void apply(clb_engine* engine, const clb_command* command) {
  if (command->kind == CLB_CMD_RELEASE_RUN) {
    command_release_run(engine, command);
    return;
  }
  if (command->slot >= engine->config.channel.slots || command->kind < CLB_CMD_OPEN || command->kind > CLB_CMD_CLOSE) {
    refuse(engine, command, CLB_ERR_ARGUMENT);
    return;
  }
  if (command->kind == CLB_CMD_OPEN) {
    command_open(engine, command);
    return;
  }
  clb_slot* const slot = &engine->slots[command->slot];
  if (slot->state == CLB_SLOT_FREE || slot->request.generation != command->generation) {
    return; /* meant for a request that has ended; its end is already on the way up */
  }
  if (command->kind == CLB_CMD_PREFILL) {
    command_prefill(engine, command);
  } else if (command->kind == CLB_CMD_SET) {
    command_set(engine, command);
  } else {
    command_close(engine, command);
  }
}

/* The whole prompt is to be computed after all. */
static void forget_prefix(clb_engine* engine, uint32_t index) {
  clb_slot* const slot = &engine->slots[index];
  slot->request.prefix_run = 0;
  slot->request.prefix_tokens = 0;
  slot->computed = 0;
  clb_channel_result(&engine->channel, index)->cached_tokens = 0;
}

/* Reserves the slot's runs. Without the prefix where it is gone, or where beside it they never fit. */
static int32_t reserve(clb_engine* engine, uint32_t index) {
  const clb_request* const request = &engine->slots[index].request;
  if (request->prefix_run != 0u && !clb_cache_run_has(&engine->cache, request->prefix_run, request->prefix_tokens)) {
    forget_prefix(engine, index);
  }
  clb_cache_request need = {
      .prompt_tokens = request->prompt_tokens,
      .max_tokens = request->max_tokens,
      .prefix_run = request->prefix_run,
      .prefix_tokens = request->prefix_tokens,
      .publish_run = request->publish_run,
      .reserved = 0,
  };
  int32_t status = clb_cache_slot_open(&engine->cache, index, &need);
  if (status == CLB_ERR_MEMORY && need.prefix_run != 0u) {
    forget_prefix(engine, index);
    need.prefix_run = 0;
    need.prefix_tokens = 0;
    status = clb_cache_slot_open(&engine->cache, index, &need);
  }
  return status;
}

static void tell_to_wait(clb_engine* engine, uint32_t index) {
  clb_slot* const slot = &engine->slots[index];
  const clb_event event = {.kind = CLB_EVENT_WAITING, .slot = index, .generation = slot->request.generation};
  if (slot->told_to_wait == 0u) {
    slot->told_to_wait = 1;
    clb_push_event(engine, &event);
  }
}

/* Reserves runs, oldest request first; the first that has to wait keeps the younger ones waiting. */
static void open_waiting(clb_engine* engine) {
  uint32_t i = 0;
  while (i < engine->order_count) {
    const uint32_t index = engine->order[i];
    clb_slot* const slot = &engine->slots[index];
    if (slot->state != CLB_SLOT_WAITING) {
      i++;
      continue;
    }
    const int32_t status = reserve(engine, index);
    if (status == CLB_ERR_FULL) {
      tell_to_wait(engine, index);
      return;
    }
    if (status != CLB_OK) {
      clb_slot_fail(engine, index, status); /* takes it out of the order: i now names the next one */
      continue;
    }
    slot->state = CLB_SLOT_PROMPT;
    clb_channel_result(&engine->channel, index)->weights_generation = engine->stats.weights_generation;
    const int32_t opened = engine->backend->slot_opened(engine, index);
    if (opened != CLB_OK) {
      engine->fault = opened;
      return;
    }
    const clb_event event = {
        .kind = CLB_EVENT_OPENED, .slot = index, .generation = slot->request.generation, .record = 0};
    clb_push_event(engine, &event);
    i++;
  }
}

void clb_apply_commands(clb_engine* engine) {
  clb_command command;
  /* Bounded by what waits now, so that a flood of commands cannot keep a step from running. */
  for (uint32_t left = clb_channel_pending(&engine->channel); left > 0u; left--) {
    if (clb_channel_pop_command(&engine->channel, &command) == 0u) {
      break;
    }
    apply(engine, &command);
  }
  open_waiting(engine);
}
