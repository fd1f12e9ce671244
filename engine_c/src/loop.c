/*
 * loop.c: receive, plan, step, fan out.
 *
 *   turn   an expert to replace, commands -> one step: chunks of prompts and a token of every decoding slot -> eventfd
 * and counters run    turns until MAIL_STOP or a fault; with nothing to do it spins 50 us, then sleeps in poll
 *
 * Prompt rows and decode rows share the step, so that each weight is read once for both; a row's result does not
 * depend on it. Prompts: oldest request first, from each slot the tokens up to its next chunk border, up to
 * prefill_tokens in all; a chunk that does not fit any more waits, and so do the younger ones. While nobody decodes,
 * whose pace a long step would break, a prompt may have several chunks in a step. Borders are multiples of
 * prefill_chunk in the request's own positions, so they do not depend on company.
 */
#include <poll.h>
#include <stdbool.h>
#include <unistd.h>

#include "clock.h"
#include "engine_internal.h"
#include "float_mode.h"
#include "invariant.h"

enum {
  SPIN_NS = 50000,
  IDLE_WAIT_MS = 1000,
  BLOCKED_WAIT_MS = 20 /* a full record ring: the daemon wakes us after reading, but may just miss that it has to */
};

static void add_row(clb_engine* engine, uint32_t index, uint32_t slot, uint32_t position, int32_t token) {
  engine->buffers.rows[index] = (clb_step_row){.slot = slot, .position = position, .token = token};
}

/* Where the chunk ends that begins at prompt position `begin`; `begin` when it may not run. */
static uint32_t chunk_end(clb_engine* engine, uint32_t slot, uint32_t begin) {
  const clb_slot* const s = &engine->slots[slot];
  const uint32_t chunk = engine->config.prefill_chunk;
  const uint32_t border = begin - begin % chunk + chunk;
  const uint32_t end = border < s->request.prompt_tokens ? border : s->request.prompt_tokens;
  if (end > s->asked) {
    return begin; /* whole chunks only: the rest was not asked for yet */
  }
  if (end == s->request.prompt_tokens && s->request.max_tokens > 0u && !clb_slot_may_sample(engine, slot)) {
    return begin; /* the last chunk samples the first token, whose mask is late */
  }
  return end;
}

static uint32_t decoding_slots(const clb_engine* engine) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < engine->order_count; ++i) {
    count += engine->slots[engine->order[i]].state == CLB_SLOT_DECODE ? 1u : 0u;
  }
  return count;
}

/* Rows of the slot's next chunk, or chunks, behind the `count` rows that are planned already; *full is set when one
   does not fit. Returns how many rows there are then. */
static uint32_t add_chunks(clb_engine* engine, uint32_t slot, uint32_t count, bool several, bool* full) {
  const clb_slot* const s = &engine->slots[slot];
  uint32_t position = s->computed;
  uint32_t rows = count;
  do {
    const uint32_t end = chunk_end(engine, slot, position);
    *full = end - position > engine->config.prefill_tokens - rows;
    if (end == position || *full) {
      break;
    }
    for (; position < end; ++position) {
      add_row(engine, rows, slot, position, s->prompt[position]);
      ++rows;
    }
  } while (several && position < s->request.prompt_tokens);
  return rows;
}

uint32_t clb_plan_prefill(clb_engine* engine) {
  const bool several = decoding_slots(engine) == 0u;
  uint32_t count = 0;
  bool full = false;
  for (uint32_t i = 0; i < engine->order_count && !full; ++i) {
    const uint32_t slot = engine->order[i];
    if (engine->slots[slot].state == CLB_SLOT_PROMPT) {
      count = add_chunks(engine, slot, count, several, &full);
    }
  }
  return count;
}

/* Rows behind the `before` rows of the step that are planned already. Returns how many. */
static uint32_t plan_decode(clb_engine* engine, uint32_t before) {
  uint32_t count = 0;
  for (uint32_t slot = 0; slot < engine->config.channel.slots; ++slot) {
    const clb_slot* const s = &engine->slots[slot];
    if (s->state == CLB_SLOT_DECODE && clb_slot_may_sample(engine, slot)) {
      add_row(engine, before + count, slot, s->request.prompt_tokens + s->generated - 1u, s->last_token);
      ++count;
    }
  }
  return count;
}

/* The weights and temp tiers are carved up at open and stay as they are; a device's driver makes nothing after it. */
static uint64_t taken_since_open(const clb_engine* engine) {
  return clb_fixed_blocks(engine) - engine->fixed_blocks + engine->backend->made_since_open(engine);
}

static void publish(clb_engine* engine) {
  engine->stats.slots_open = engine->order_count;
  engine->stats.kv_bytes_used = clb_cache_used(&engine->cache);
  engine->stats.allocations_after_open = taken_since_open(engine);
  clb_channel_set_stats(&engine->channel, &engine->stats);
  if (engine->events_pushed > 0u && engine->config.event_fd >= 0) {
    const uint64_t one = 1;
    if (write(engine->config.event_fd, &one, sizeof one) != (ssize_t)sizeof one) {
      engine->fault = CLB_ERR_INTERNAL; /* an eventfd takes a 1 unless nobody ever reads it */
    }
  }
  engine->events_pushed = 0;
}

int32_t clb_steps_cpu(clb_engine* engine, uint32_t* worked) {
  const uint32_t prompt_rows = clb_plan_prefill(engine);
  const uint32_t decode_rows = plan_decode(engine, prompt_rows);
  if (prompt_rows + decode_rows > 0u) {
    clb_step_forward(engine, prompt_rows + decode_rows);
    clb_finish_step(engine, prompt_rows, decode_rows);
    *worked = 1;
  }
  return CLB_OK;
}

int32_t clb_engine_turn(clb_engine* engine, uint32_t* worked) {
  const clb_float_mode mode = clb_float_mode_enter();
  *worked = 0;
  clb_swap_before_steps(engine);
  clb_apply_commands(engine);
  const int32_t status = engine->fault != CLB_OK ? engine->fault : engine->backend->steps(engine, worked);
  if (status != CLB_OK) {
    engine->fault = status;
  }
  clb_swap_after_steps(engine);
  if (engine->channel.broken != 0u) {
    engine->fault = CLB_ERR_INTERNAL; /* the other side's index left its range: nothing it says can be trusted */
  }
  publish(engine);
  clb_float_mode_leave(mode);
  return engine->fault;
}

static bool something_waits(clb_engine* engine) {
  return clb_channel_pending(&engine->channel) > 0u || clb_swap_waits(engine) ||
         atomic_load_explicit(&engine->mail, memory_order_acquire) != 0u;
}

/* A slot could go on if the daemon read its records or wrote its mask. */
static bool somebody_blocked(const clb_engine* engine) {
  for (uint32_t i = 0; i < engine->order_count; ++i) {
    const clb_slot* const s = &engine->slots[engine->order[i]];
    if (s->state == CLB_SLOT_DECODE) {
      return true;
    }
  }
  return false;
}

/* Returns when there may be something to do, after a second at the latest. */
static void wait_for_work(clb_engine* engine) {
  const uint64_t start = clb_clock_ns();
  const bool blocked = somebody_blocked(engine);
  while (!blocked && clb_clock_ns() - start < SPIN_NS) {
    if (something_waits(engine)) {
      return;
    }
  }
  struct pollfd wake = {.fd = engine->config.command_fd, .events = POLLIN, .revents = 0};
  if (poll(&wake, 1, blocked ? BLOCKED_WAIT_MS : IDLE_WAIT_MS) > 0) {
    uint64_t signals;
    if (read(engine->config.command_fd, &signals, sizeof signals) < 0) {
      return; /* somebody else took the signal; the ring is looked at in any case */
    }
  }
}

static void idle(clb_engine* engine, uint64_t* last_beat) {
  wait_for_work(engine);
  const uint64_t now = clb_clock_ns();
  if (now - *last_beat >= 1000000000u) {
    *last_beat = now;
    engine->stats.progress++;
    clb_channel_set_progress(&engine->channel, engine->stats.progress);
  }
}

static bool asks_to(uint32_t mail, uint32_t what) { return (mail & ((uint32_t)1 << what)) != 0u; }

static int32_t serve(clb_engine* engine) {
  uint64_t last_beat = 0;
  for (;;) {
    uint32_t worked = 0;
    const uint32_t mail = atomic_exchange_explicit(&engine->mail, 0, memory_order_acq_rel);
    if (asks_to(mail, CLB_MAIL_STOP)) {
      clb_channel_set_phase(&engine->channel, CLB_PHASE_STOPPED);
      return CLB_OK;
    }
    if (asks_to(mail, CLB_MAIL_CHECK)) {
      clb_error error;
      engine->fault = clb_engine_check(engine, &error);
    }
    const int32_t status = engine->fault != CLB_OK ? engine->fault : clb_engine_turn(engine, &worked);
    if (status != CLB_OK) {
      clb_channel_set_phase(&engine->channel, CLB_PHASE_FAILED);
      return status;
    }
    if (worked == 0u) {
      idle(engine, &last_beat);
    }
  }
}

int32_t clb_engine_run(clb_engine* engine) {
  if (engine->config.command_fd < 0) {
    return CLB_ERR_STATE;
  }
  const int32_t status = serve(engine);
  atomic_store_explicit(&engine->swap.ended, 1u, memory_order_release);
  return status;
}
