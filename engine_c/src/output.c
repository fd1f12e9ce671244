/*
 * output.c: what comes out of a step: prompt records, sampled tokens, events, and the end of a slot.
 *
 * Owns nothing; works on the engine's slots, channel and logits buffer. Called by loop.c and commands.c at
 * step boundaries only. Sampling depends on the request, its output position and its logits, never on slot,
 * row or company.
 */
#include <math.h>
#include <string.h>

#include "engine_internal.h"
#include "invariant.h"
#include "sampler.h"

void clb_push_event(clb_engine* engine, const clb_event* event) {
  /* The event ring holds more than all open slots can say, so no room means that the other side broke the rules. */
  if (clb_channel_push_event(&engine->channel, event) != CLB_OK) {
    engine->fault = CLB_ERR_INTERNAL;
    return;
  }
  engine->events_pushed++;
}

static clb_event event_of(const clb_engine* engine, uint32_t kind, uint32_t slot) {
  clb_event event;
  (void)memset(&event, 0, sizeof event);
  event.kind = kind;
  event.slot = slot;
  event.generation = engine->slots[slot].request.generation;
  return event;
}

/* The counters of the slot's request, as far as they are known. */
static void write_usage(clb_engine* engine, uint32_t slot) {
  const clb_slot* const s = &engine->slots[slot];
  clb_result* const result = clb_channel_result(&engine->channel, slot);
  result->assignments = s->assignments;
  result->trimmed = s->trimmed;
  result->dropped = s->dropped;
}

void clb_slot_release(clb_engine* engine, uint32_t slot) {
  clb_slot* const s = &engine->slots[slot];
  CLB_ASSERT(s->state != CLB_SLOT_FREE);
  if (s->state != CLB_SLOT_WAITING) {
    const int32_t status = clb_cache_slot_close(&engine->cache, slot);
    CLB_ASSERT(status == CLB_OK);
  }
  write_usage(engine, slot);
  s->state = CLB_SLOT_FREE;
  uint32_t kept = 0;
  for (uint32_t i = 0; i < engine->order_count; ++i) {
    if (engine->order[i] != slot) {
      engine->order[kept] = engine->order[i];
      ++kept;
    }
  }
  CLB_ASSERT(kept + 1u == engine->order_count);
  engine->order_count = kept;
}

void clb_slot_keep_output(clb_engine* engine, uint32_t slot) {
  const clb_slot* const s = &engine->slots[slot];
  if (!engine->backend->output_is_prompt || s->request.publish_run == 0u || s->generated == 0u) {
    return;
  }
  /* the last token was sampled, but never went in */
  const int32_t status = clb_cache_extend(&engine->cache, slot, s->request.prompt_tokens + s->generated - 1u);
  CLB_ASSERT(status == CLB_OK);
}

void clb_slot_fail(clb_engine* engine, uint32_t slot, int32_t status) {
  clb_event event = event_of(engine, CLB_EVENT_FAILED, slot);
  event.status = status;
  clb_slot_release(engine, slot);
  engine->stats.requests_failed++;
  clb_push_event(engine, &event);
}

/* Generation ended as it should; `event` says how. */
static void finish(clb_engine* engine, uint32_t slot, const clb_event* event) {
  clb_slot_keep_output(engine, slot);
  clb_slot_release(engine, slot);
  engine->stats.requests_done++;
  clb_push_event(engine, event);
}

bool clb_slot_may_sample(clb_engine* engine, uint32_t slot) {
  const clb_slot* const s = &engine->slots[slot];
  if (!clb_channel_has_room(&engine->channel, slot)) {
    return false;
  }
  return (s->request.flags & CLB_REQ_MASKED) == 0u || s->mask_position[s->generated & 1u] == s->generated;
}

static bool is_stop(const clb_slot* slot, int32_t token) {
  for (uint32_t i = 0; i < slot->request.stop_count; ++i) {
    if (slot->stops[i] == token) {
      return true;
    }
  }
  return false;
}

/* Samples from one row of logits; pure, so any thread may do it. */
static void draw(const clb_engine* engine, uint32_t item, uint32_t thread) {
  const clb_step_buffers* const b = &engine->buffers;
  const uint32_t vocab = engine->model.vocab_size;
  const uint32_t scratch = engine->threads.count < CLB_LOGIT_ROWS ? thread : item; /* nobody else's at this time */
  clb_draw* const drawn = &b->draws[item];
  const clb_slot* const s = &engine->slots[drawn->slot];
  const bool masked = (s->request.flags & CLB_REQ_MASKED) != 0u;
  const clb_sampler_args args = {
      .logits = b->logits + (size_t)item * vocab,
      .request = &s->request,
      .bias = s->bias,
      .stops = s->stops,
      .mask = masked ? clb_channel_mask(&engine->channel, drawn->slot, s->generated) : NULL,
      .counts = s->needs_counts != 0u ? s->counts : NULL,
      .scratch = b->sampler_scratch + scratch * b->scratch_stride,
      .vocab = vocab,
      .position = s->generated,
  };
  drawn->status = clb_sampler_run(&args, &drawn->record);
}

void clb_slot_take_token(clb_engine* engine, uint32_t slot, int32_t token, uint32_t flags) {
  clb_slot* const s = &engine->slots[slot];
  clb_event event = event_of(engine, CLB_EVENT_TOKEN, slot);
  event.record = clb_channel_commit(&engine->channel, slot);
  event.position = s->generated;
  event.token = token;
  event.flags = flags;
  s->generated++;
  s->last_token = token;
  if (flags != 0u) {
    finish(engine, slot, &event);
  } else {
    clb_push_event(engine, &event);
  }
}

static void draw_rows(void* context, uint32_t first, uint32_t end, uint32_t thread) {
  for (uint32_t i = first; i < end; ++i) {
    draw(context, i, thread);
  }
}

/* Makes what was drawn the slot's next token. May release the slot. */
static void take_token(clb_engine* engine, const clb_draw* drawn) {
  const uint32_t slot = drawn->slot;
  clb_slot* const s = &engine->slots[slot];
  clb_record* const record = clb_channel_record(&engine->channel, slot);
  CLB_ASSERT(record != NULL);
  if (drawn->status != CLB_OK) {
    clb_slot_fail(engine, slot, drawn->status);
    return;
  }
  *record = drawn->record; /* which the other side may change: all below goes by our copy */
  const int32_t token = drawn->record.token;
  uint32_t flags = 0;
  if (s->needs_counts != 0u) {
    clb_sampler_count(s->counts, engine->model.vocab_size, token);
  }
  if (s->generated + 1u == s->request.max_tokens) {
    flags = CLB_FINISH_LENGTH;
  }
  if (is_stop(s, token)) {
    flags = CLB_FINISH_STOP;
  }
  clb_slot_take_token(engine, slot, token, flags);
}

/* The next token of each slot whose last position is one of these rows of the step; one row a slot. */
static void sample(clb_engine* engine, const uint32_t* rows, uint32_t count) {
  clb_draw* const draws = engine->buffers.draws;
  for (uint32_t first = 0; first < count; first += CLB_LOGIT_ROWS) {
    const uint32_t some = count - first < CLB_LOGIT_ROWS ? count - first : CLB_LOGIT_ROWS;
    clb_step_logits(engine, rows + first, some);
    for (uint32_t i = 0; i < some; ++i) {
      draws[i].slot = engine->buffers.rows[rows[first + i]].slot;
    }
    clb_threads_run(&engine->threads, some, draw_rows, engine);
    for (uint32_t i = 0; i < some; ++i) {
      take_token(engine, &draws[i]);
    }
  }
}

void clb_slot_add_usage(clb_engine* engine, uint32_t slot, uint64_t assignments, uint64_t trimmed, uint64_t dropped) {
  clb_slot* const s = &engine->slots[slot];
  s->assignments += assignments;
  s->trimmed += trimmed;
  s->dropped += dropped;
  engine->stats.expert_assignments += assignments;
  engine->stats.expert_trimmed += trimmed;
  engine->stats.expert_dropped += dropped;
  write_usage(engine, slot);
}

/* Adds rows [first, end) of the step to the slot's counters. The status of the first bad row, or OK. */
static int32_t count_rows(clb_engine* engine, uint32_t slot, uint32_t first, uint32_t end) {
  uint64_t assignments = 0;
  uint64_t trimmed = 0;
  uint64_t dropped = 0;
  int32_t status = CLB_OK;
  for (uint32_t i = first; i < end; ++i) {
    const clb_step_row* const row = &engine->buffers.rows[i];
    assignments += row->assignments;
    trimmed += row->trimmed;
    dropped += row->dropped;
    status = status == CLB_OK ? row->status : status;
  }
  clb_slot_add_usage(engine, slot, assignments, trimmed, dropped);
  return status;
}

void clb_slot_skip_prompt_records(clb_engine* engine, uint32_t slot) {
  const clb_slot* const s = &engine->slots[slot];
  clb_prompt_record* const records = clb_channel_prompt_records(&engine->channel, slot);
  for (uint32_t p = 0; p <= s->request.prefix_tokens; ++p) {
    (void)memset(&records[p], 0, sizeof records[p]);
    records[p].logprob = NAN;
  }
  clb_channel_result(&engine->channel, slot)->prompt_records = s->request.prefix_tokens + 1u;
}

/* Rows [first, end) of one slot: the row of position p gives the record of p + 1. */
static int32_t prompt_records(clb_engine* engine, uint32_t slot, uint32_t first, uint32_t end) {
  const clb_slot* const s = &engine->slots[slot];
  const uint32_t vocab = engine->model.vocab_size;
  clb_prompt_record* const records = clb_channel_prompt_records(&engine->channel, slot);
  clb_result* const result = clb_channel_result(&engine->channel, slot);
  if (engine->buffers.rows[first].position == s->request.prefix_tokens) {
    clb_slot_skip_prompt_records(engine, slot);
  }
  for (uint32_t begin = first; begin < end; begin += CLB_LOGIT_ROWS) {
    const uint32_t count = end - begin < CLB_LOGIT_ROWS ? end - begin : CLB_LOGIT_ROWS;
    clb_step_logits(engine, engine->buffers.identity + begin, count);
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t position = engine->buffers.rows[begin + i].position + 1u;
      if (position == s->request.prompt_tokens) {
        continue;
      }
      const int32_t status = clb_sampler_prompt(engine->buffers.logits + (size_t)i * vocab, vocab, s->prompt[position],
                                                s->request.prompt_top_logprobs, &records[position]);
      if (status != CLB_OK) {
        return status;
      }
      result->prompt_records = position + 1u;
    }
  }
  return CLB_OK;
}

uint32_t clb_slot_finish_prompt(clb_engine* engine, uint32_t slot) {
  clb_slot* const s = &engine->slots[slot];
  if (s->request.publish_run != 0u) {
    const int32_t status = clb_cache_publish(&engine->cache, slot);
    CLB_ASSERT(status == CLB_OK);
  }
  if ((s->request.flags & CLB_REQ_POOL) != 0u) {
    const int32_t status = clb_pool_finish(engine, slot);
    if (status != CLB_OK) {
      clb_slot_fail(engine, slot, status);
      return 0;
    }
  }
  if (s->request.max_tokens == 0u) {
    const clb_event event = event_of(engine, CLB_EVENT_FINISHED, slot);
    finish(engine, slot, &event);
    return 0;
  }
  s->state = CLB_SLOT_DECODE;
  return 1;
}

/* After the prompt rows [0, count) of a step: prompt records and ends. Returns the number of first tokens to sample,
   whose rows go to `ready`. */
static uint32_t finish_prompt_rows(clb_engine* engine, uint32_t count, uint32_t* ready) {
  const clb_step_row* const rows = engine->buffers.rows;
  uint32_t ready_count = 0;
  uint32_t end = 0;
  for (uint32_t first = 0; first < count; first = end) {
    const uint32_t slot = rows[first].slot;
    clb_slot* const s = &engine->slots[slot];
    while (end < count && rows[end].slot == slot) {
      end++;
    }
    int32_t status = count_rows(engine, slot, first, end);
    if (status == CLB_OK && (s->request.flags & CLB_REQ_PROMPT_LOGPROBS) != 0u) {
      status = prompt_records(engine, slot, first, end);
    }
    if (status == CLB_OK && (s->request.flags & CLB_REQ_POOL) != 0u) {
      clb_pool_rows(engine, slot, first, end);
    }
    s->computed += end - first;
    if (status != CLB_OK) {
      clb_slot_fail(engine, slot, status);
    }
    if (status == CLB_OK && s->computed == s->request.prompt_tokens) {
      ready[ready_count] = end - 1u;
      ready_count += clb_slot_finish_prompt(engine, slot);
    }
  }
  return ready_count;
}

void clb_finish_step(clb_engine* engine, uint32_t prompt_rows, uint32_t decode_rows) {
  uint32_t ready[CLB_MAX_SLOTS]; /* a slot has prompt rows or a decode row */
  uint32_t count = finish_prompt_rows(engine, prompt_rows, ready);
  for (uint32_t i = prompt_rows; i < prompt_rows + decode_rows; ++i) {
    const uint32_t slot = engine->buffers.rows[i].slot;
    const int32_t status = count_rows(engine, slot, i, i + 1u);
    if (status != CLB_OK) {
      clb_slot_fail(engine, slot, status);
    } else {
      ready[count] = i;
      ++count;
    }
  }
  sample(engine, ready, count);
  engine->stats.steps_prefill += prompt_rows > 0u ? 1u : 0u;
  engine->stats.steps_decode += decode_rows > 0u ? 1u : 0u;
  engine->stats.tokens_prefill += prompt_rows;
  engine->stats.tokens_decode += decode_rows;
}
