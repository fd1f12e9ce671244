/*
 * cuda_loop.c: steps in flight, and their events one step behind.
 *
 *   turn n     | plan ▸ copy what changed ▸ launch step n | wait for step n - 1 ▸ forward its events |
 *   device     ...... step n - 1 ................|.... step n .................
 *
 * The loop is closed on the device: a step takes its tokens, positions and stop flags from what the step before left
 * there. So the host may launch a step before it knows what the last one sampled; a slot that ended meanwhile is an
 * idle row. Requests that want log-probabilities of their prompt, or nothing but the prompt, are waited for.
 */
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "../cpu/pause.h"
#include "cuda_internal.h"
#include "invariant.h"

enum { SPINS_BETWEEN_QUERIES = 4096 }; /* of the mailbox: some hundred microseconds */

static uint64_t in_flight(const struct clb_cuda* cuda) { return cuda->launched - cuda->seen; }

static clb_cuda_flight* flight_of(struct clb_cuda* cuda, uint64_t step) {
  return &cuda->flights[step % CLB_CUDA_STAGES];
}

static int32_t put(struct clb_cuda* cuda, uint64_t offset, const void* from, uint64_t bytes) {
  return cuda->driver.copy_in(&cuda->driver, cuda->device.stream, clb_cuda_at(cuda, offset), from, bytes);
}

/* The stage of the next step: its last user was seen, because fewer steps than stages are in flight. */
static void* next_stage(const struct clb_cuda* cuda, uint64_t offset, uint64_t bytes) {
  CLB_ASSERT(in_flight(cuda) < CLB_CUDA_STAGES);
  return clb_cuda_host(cuda, offset + cuda->launched % CLB_CUDA_STAGES * bytes);
}

static void expect_token(clb_engine* engine, clb_cuda_flight* flight, uint32_t slot) {
  clb_slot* const s = &engine->slots[slot];
  flight->slots[flight->count] = slot;
  flight->generations[flight->count] = s->request.generation;
  ++flight->count;
  ++s->launched;
}

/* ------------------------------------------------------------------ decode */

/* May the slot's next output position be computed, whatever the steps in flight bring? */
static bool may_launch(clb_engine* engine, uint32_t slot) {
  const clb_slot* const s = &engine->slots[slot];
  if (s->state != CLB_SLOT_DECODE || s->launched >= s->request.max_tokens) {
    return false;
  }
  if (clb_channel_room(&engine->channel, slot) <= s->launched - s->generated) {
    return false;
  }
  return (s->request.flags & CLB_REQ_MASKED) == 0u || s->mask_position[s->launched & 1u] == s->launched;
}

static int32_t launch_decode(clb_engine* engine, uint32_t* worked) {
  struct clb_cuda* const cuda = engine->cuda;
  clb_slot_list list = {.count = 0};
  clb_cuda_flight* const flight = flight_of(cuda, cuda->launched);
  int32_t status = CLB_OK;
  for (uint32_t slot = 0; slot < engine->config.channel.slots; ++slot) {
    if (may_launch(engine, slot)) {
      list.slots[list.count] = slot;
      ++list.count;
    }
  }
  if (list.count == 0u) {
    return CLB_OK;
  }
  *flight = (clb_cuda_flight){.tokens = list.count};
  for (uint32_t i = 0; i < list.count; ++i) {
    expect_token(engine, flight, list.slots[i]);
  }
  if (list.count != cuda->list.count || memcmp(list.slots, cuda->list.slots, list.count * sizeof list.slots[0]) != 0) {
    clb_slot_list* const stage = next_stage(cuda, cuda->at.host_lists, cuda->at.stage_list_bytes);
    *stage = list;
    cuda->list = list;
    status = put(cuda, cuda->at.list, stage, sizeof *stage);
  }
  if (status == CLB_OK) {
    status =
        cuda->driver.graph_launch(&cuda->driver, cuda->decode[clb_cuda_decode_bucket(list.count)], cuda->device.stream);
  }
  ++cuda->launched;
  *worked = 1;
  return status;
}

/* ----------------------------------------------------------------- prefill */

/* Rows [first, end) of buffers.rows are those of one slot. */
static uint32_t end_of_slot(const clb_engine* engine, uint32_t first, uint32_t count) {
  uint32_t end = first;
  while (end < count && engine->buffers.rows[end].slot == engine->buffers.rows[first].slot) {
    ++end;
  }
  return end;
}

static int32_t launch_rows(clb_engine* engine, uint32_t count) {
  struct clb_cuda* const cuda = engine->cuda;
  clb_cuda_rows* const stage = next_stage(cuda, cuda->at.host_rows, cuda->at.stage_rows_bytes);
  clb_cuda_flight* const flight = flight_of(cuda, cuda->launched);
  uint32_t end = 0;
  *flight = (clb_cuda_flight){.prefill = 1, .tokens = count};
  for (uint32_t first = 0; first < count; first = end) {
    const uint32_t slot = engine->buffers.rows[first].slot;
    clb_slot* const s = &engine->slots[slot];
    end = end_of_slot(engine, first, count);
    for (uint32_t i = first; i < end; ++i) {
      const clb_step_row* const row = &engine->buffers.rows[i];
      clb_cuda_rows_behind(stage)[i] =
          (clb_row){.slot = slot, .position = row->position, .token = row->token, .status = CLB_OK};
    }
    s->computed += end - first;
    if (s->computed < s->request.prompt_tokens) {
      continue;
    }
    s->state = CLB_SLOT_DECODE;
    if (s->request.max_tokens > 0u) {
      stage->wanted[flight->count] = end - 1u;
      expect_token(engine, flight, slot);
    }
  }
  stage->row_count = count;
  stage->wanted_count = flight->count;
  int32_t status = put(cuda, cuda->at.rows, stage, sizeof *stage + count * sizeof(clb_row));
  if (status == CLB_OK) {
    status = cuda->driver.graph_launch(&cuda->driver, cuda->prefill[clb_cuda_prefill_bucket(count, cuda->at.max_rows)],
                                       cuda->device.stream);
  }
  ++cuda->launched;
  return status;
}

/* ------------------------------------------------- what is waited for */

/* Fills the prompt items of all rows whose slot wants them and whose next token is of the prompt. `rows` gets the row
   of each. Returns how many. */
static uint32_t collect_items(clb_engine* engine, uint32_t count, uint32_t* rows) {
  struct clb_cuda* const cuda = engine->cuda;
  const clb_channel_layout* const channel = &engine->channel.layout;
  clb_prompt_logprob_item* const items = clb_cuda_host(cuda, cuda->at.host_items);
  uint32_t found = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const clb_step_row* const row = &engine->buffers.rows[i];
    const clb_slot* const s = &engine->slots[row->slot];
    const uint64_t next = (uint64_t)row->position + 1u;
    if ((s->request.flags & CLB_REQ_PROMPT_LOGPROBS) == 0u) {
      continue;
    }
    if (row->position == s->request.prefix_tokens) {
      clb_slot_skip_prompt_records(engine, row->slot);
    }
    if (next < s->request.prompt_tokens) {
      items[found] = (clb_prompt_logprob_item){
          .record = cuda->device.channel_device + channel->results + row->slot * channel->result_stride +
                    channel->result_prompt + next * sizeof(clb_prompt_record),
          .next = s->prompt[next],
          .top_count = s->request.prompt_top_logprobs,
      };
      rows[found] = i;
      ++found;
    }
  }
  return found;
}

/* Log-probabilities of the rows of `found` items, 64 at a time, behind the step that computed them. */
static int32_t launch_items(clb_engine* engine, uint32_t count, uint32_t found, const uint32_t* rows) {
  struct clb_cuda* const cuda = engine->cuda;
  const clb_prompt_logprob_item* const items = clb_cuda_host(cuda, cuda->at.host_items);
  int32_t* const statuses = clb_cuda_host(cuda, cuda->at.host_status);
  int32_t status = CLB_OK;
  for (uint32_t first = 0; first < found && status == CLB_OK; first += CLB_FEW_ROWS) {
    const uint32_t some = found - first < CLB_FEW_ROWS ? found - first : CLB_FEW_ROWS;
    clb_cuda_rows* const group =
        clb_cuda_host(cuda, cuda->at.host_groups + first / CLB_FEW_ROWS * cuda->at.stage_list_bytes);
    group->row_count = count;
    group->wanted_count = some;
    (void)memcpy(group->wanted, rows + first, some * sizeof rows[0]);
    status = put(cuda, cuda->at.rows, group, sizeof *group);
    if (status == CLB_OK) {
      status = put(cuda, cuda->at.prompt_items, items + first, some * sizeof items[0]);
    }
    status = status != CLB_OK ? status : clb_cuda_launch_prompt(engine);
    if (status == CLB_OK) {
      status = cuda->driver.copy_out(&cuda->driver, cuda->device.stream, statuses + first,
                                     clb_cuda_at(cuda, cuda->at.prompt_status), some * sizeof statuses[0]);
    }
  }
  return status;
}

/* A slot whose prompt is computed and that generates nothing: what it used is on the device only. */
static bool is_prompt_only(const clb_engine* engine, uint32_t slot) {
  const clb_slot* const s = &engine->slots[slot];
  return s->state == CLB_SLOT_DECODE && s->request.max_tokens == 0u;
}

static int32_t copy_usage(clb_engine* engine, uint32_t slot) {
  struct clb_cuda* const cuda = engine->cuda;
  uint64_t* const usage = (uint64_t*)clb_cuda_host(cuda, cuda->at.host_usage) + CLB_CUDA_USAGE * (uint64_t)slot;
  const uint64_t from =
      cuda->at.slots + slot * sizeof(clb_device_slot) + (uint64_t)offsetof(clb_device_slot, assignments);
  return cuda->driver.copy_out(&cuda->driver, cuda->device.stream, usage, clb_cuda_at(cuda, from),
                               CLB_CUDA_USAGE * sizeof usage[0]);
}

/* The request's sums as the device has them. */
static void add_usage(clb_engine* engine, uint32_t slot, uint64_t assignments, uint64_t trimmed, uint64_t dropped) {
  const clb_slot* const s = &engine->slots[slot];
  clb_slot_add_usage(engine, slot, assignments - s->assignments, trimmed - s->trimmed, dropped - s->dropped);
}

/* The device is done: prompt records are written, and prompts that generate nothing have ended. */
static void finish_waited(clb_engine* engine, uint32_t count, uint32_t found, const uint32_t* rows) {
  const struct clb_cuda* const cuda = engine->cuda;
  const int32_t* const statuses = clb_cuda_host(cuda, cuda->at.host_status);
  const uint64_t* const usage = clb_cuda_host(cuda, cuda->at.host_usage);
  int32_t failed[CLB_MAX_SLOTS] = {0};
  for (uint32_t i = 0; i < found; ++i) {
    const clb_step_row* const row = &engine->buffers.rows[rows[i]];
    failed[row->slot] = failed[row->slot] != CLB_OK ? failed[row->slot] : statuses[i];
    if (failed[row->slot] == CLB_OK) {
      clb_channel_result(&engine->channel, row->slot)->prompt_records = row->position + 2u;
    }
  }
  uint32_t end = 0;
  for (uint32_t first = 0; first < count; first = end) {
    const uint32_t slot = engine->buffers.rows[first].slot;
    end = end_of_slot(engine, first, count);
    if (failed[slot] != CLB_OK) {
      clb_slot_fail(engine, slot, failed[slot]);
    }
    if (failed[slot] == CLB_OK && is_prompt_only(engine, slot)) {
      const uint64_t* const own = &usage[CLB_CUDA_USAGE * slot];
      add_usage(engine, slot, own[0], own[1], own[2]);
      (void)clb_slot_finish_prompt(engine, slot);
    }
  }
}

/* The request's assignments by layer and expert, to its result block, which is page-locked. */
static int32_t copy_counts(clb_engine* engine, uint32_t slot) {
  struct clb_cuda* const cuda = engine->cuda;
  const uint64_t bytes = (uint64_t)engine->model.layers * engine->config.channel.max_experts * sizeof(uint32_t);
  if (engine->sizes.max_experts == 0u) {
    return CLB_OK;
  }
  return cuda->driver.copy_out(&cuda->driver, cuda->device.stream, clb_channel_counts(&engine->channel, slot),
                               clb_cuda_at(cuda, cuda->at.expert_counts + slot * bytes), bytes);
}

int32_t clb_cuda_count_experts(clb_engine* engine) {
  struct clb_cuda* const cuda = engine->cuda;
  int32_t status = CLB_OK;
  for (uint32_t slot = 0; status == CLB_OK && slot < engine->config.channel.slots; ++slot) {
    if (engine->slots[slot].state != CLB_SLOT_FREE) {
      status = copy_counts(engine, slot);
    }
  }
  return status != CLB_OK ? status : cuda->driver.stream_wait(&cuda->driver, cuda->device.stream);
}

/* Adds the rows of the step that was launched last to the sums of the slots that pool. */
static int32_t launch_pool(clb_engine* engine, uint32_t count) {
  struct clb_cuda* const cuda = engine->cuda;
  const clb_channel_layout* const channel = &engine->channel.layout;
  const uint64_t stage = (cuda->launched - 1u) % CLB_CUDA_STAGES;
  clb_pool_item* const items = clb_cuda_host(cuda, cuda->at.host_pool + stage * cuda->at.stage_pool_bytes);
  uint32_t found = 0;
  uint32_t end = 0;
  for (uint32_t first = 0; first < count; first = end) {
    const clb_step_row* const row = &engine->buffers.rows[first];
    const clb_slot* const s = &engine->slots[row->slot];
    const bool whole = is_prompt_only(engine, row->slot);
    const bool last = (s->request.flags & CLB_REQ_POOL_LAST) != 0u;
    end = end_of_slot(engine, first, count);
    if ((s->request.flags & CLB_REQ_POOL_MEAN) != 0u || (last && whole)) {
      items[found] = (clb_pool_item){
          .output = whole ? cuda->device.channel_device + channel->results + row->slot * channel->result_stride +
                                channel->result_pooled
                          : 0u,
          .slot = row->slot,
          .first = last ? end - 1u : first,
          .count = last ? 1u : end - first,
          .fresh = last || row->position == 0u ? 1u : 0u,
      };
      ++found;
    }
  }
  if (found == 0u) {
    return CLB_OK;
  }
  const int32_t status = put(cuda, cuda->at.pool_items, items, found * sizeof items[0]);
  return status != CLB_OK ? status : clb_cuda_launch_pool(engine, found);
}

static int32_t launch_prefill(clb_engine* engine, uint32_t* worked) {
  struct clb_cuda* const cuda = engine->cuda;
  uint32_t* const item_rows = engine->buffers.identity; /* (R) */
  const uint32_t count = clb_plan_prefill(engine);
  if (count == 0u) {
    return CLB_OK;
  }
  *worked = 1;
  int32_t status = launch_rows(engine, count);
  status = status != CLB_OK ? status : launch_pool(engine, count);
  if (status != CLB_OK) {
    return status;
  }
  const uint32_t found = collect_items(engine, count, item_rows);
  uint32_t waits = found;
  status = launch_items(engine, count, found, item_rows);
  uint32_t end = 0;
  for (uint32_t first = 0; first < count && status == CLB_OK; first = end) {
    const uint32_t slot = engine->buffers.rows[first].slot;
    end = end_of_slot(engine, first, count);
    if (is_prompt_only(engine, slot)) {
      status = copy_usage(engine, slot);
      status = status != CLB_OK ? status : copy_counts(engine, slot);
      ++waits;
    }
  }
  if (status == CLB_OK && waits > 0u) {
    status = cuda->driver.stream_wait(&cuda->driver, cuda->device.stream);
    if (status == CLB_OK) {
      finish_waited(engine, count, found, item_rows);
    }
  }
  return status;
}

/* ------------------------------------------------------------------ events */

static uint64_t published(const struct clb_cuda* cuda) {
  const _Atomic uint64_t* const sequence = clb_cuda_host(cuda, cuda->at.mailbox);
  return atomic_load_explicit(sequence, memory_order_acquire);
}

/* Waits until `steps` steps are published. DEVICE: the driver reports a fault. INTERNAL: the device is done and did not
   publish them. */
static int32_t wait_published(struct clb_cuda* cuda, uint64_t steps) {
  uint32_t spins = 0;
  while (published(cuda) < steps) {
    ++spins;
    if (spins % SPINS_BETWEEN_QUERIES == 0u) {
      const int32_t status = cuda->driver.stream_done(&cuda->driver, cuda->device.stream);
      if (status != CLB_ERR_STATE && published(cuda) < steps) {
        return status == CLB_OK ? CLB_ERR_INTERNAL : status;
      }
    }
    clb_pause();
  }
  return CLB_OK;
}

/* 0: the slot was closed, and maybe opened again, since the step was launched. */
static int is_current(const clb_engine* engine, const clb_cuda_flight* flight, uint32_t i) {
  const clb_slot* const s = &engine->slots[flight->slots[i]];
  return s->state != CLB_SLOT_FREE && s->request.generation == flight->generations[i];
}

/* Requests that end with this step: their counts must be there when their ends are told. Waits for the copies, and
   with them for the step behind this one, in which these slots are idle. */
static int32_t fetch_counts(clb_engine* engine, const clb_cuda_flight* flight, const clb_device_event* events) {
  clb_driver* const d = &engine->cuda->driver;
  int32_t status = CLB_OK;
  uint32_t ended = 0;
  for (uint32_t i = 0; i < flight->count && status == CLB_OK; ++i) {
    if (is_current(engine, flight, i) && events[i].flags != 0u) {
      status = copy_counts(engine, flight->slots[i]);
      ++ended;
    }
  }
  return status != CLB_OK || ended == 0u ? status : d->stream_wait(d, engine->cuda->device.stream);
}

static int32_t forward_event(clb_engine* engine, const clb_cuda_flight* flight, uint32_t i,
                             const clb_device_event* event) {
  const uint32_t slot = flight->slots[i];
  const clb_slot* const s = &engine->slots[slot];
  if (!is_current(engine, flight, i)) {
    return CLB_OK;
  }
  if (event->slot != slot || event->generation != flight->generations[i]) {
    return CLB_ERR_INTERNAL;
  }
  add_usage(engine, slot, event->assignments, event->trimmed, event->dropped);
  if (event->kind == CLB_DEVICE_FAILED) {
    clb_slot_fail(engine, slot, event->status);
    return CLB_OK;
  }
  if (event->kind != CLB_DEVICE_TOKEN || event->position != s->generated) {
    return CLB_ERR_INTERNAL;
  }
  if (flight->prefill != 0u) {
    (void)clb_slot_finish_prompt(engine, slot);
  }
  clb_slot_take_token(engine, slot, event->token, event->flags);
  return CLB_OK;
}

/* The oldest step in flight is published. */
static int32_t forward_step(clb_engine* engine) {
  struct clb_cuda* const cuda = engine->cuda;
  const clb_cuda_flight* const flight = flight_of(cuda, cuda->seen);
  const clb_device_event* const events =
      (const clb_device_event*)clb_cuda_host(cuda, cuda->at.mailbox + CLB_MAILBOX_EVENTS) +
      cuda->seen % CLB_MAILBOX_STEPS * CLB_FEW_ROWS;
  int32_t status = fetch_counts(engine, flight, events);
  for (uint32_t i = 0; i < flight->count && status == CLB_OK; ++i) {
    status = forward_event(engine, flight, i, &events[i]);
  }
  if (flight->prefill != 0u) {
    engine->stats.steps_prefill++;
    engine->stats.tokens_prefill += flight->tokens;
  } else {
    engine->stats.steps_decode++;
    engine->stats.tokens_decode += flight->tokens;
  }
  ++cuda->seen;
  ++engine->stats.progress;
  clb_channel_set_progress(&engine->channel, engine->stats.progress);
  return status;
}

int32_t clb_cuda_steps(clb_engine* engine, uint32_t* worked) {
  struct clb_cuda* const cuda = engine->cuda;
  int32_t status = launch_prefill(engine, worked);
  status = status != CLB_OK ? status : launch_decode(engine, worked);
  /* With a new step behind it, the last one but that is waited for; without one, the last. */
  const uint64_t needed = *worked != 0u ? cuda->launched - 1u : cuda->launched;
  while (status == CLB_OK && (cuda->seen < needed || (in_flight(cuda) > 0u && published(cuda) > cuda->seen))) {
    status = wait_published(cuda, cuda->seen + 1u);
    status = status != CLB_OK ? status : forward_step(engine);
    *worked = 1;
  }
  return status;
}
