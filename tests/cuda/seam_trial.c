/*
 * seam_trial.c: the smallest engine that closes the loop through CUDA, to try the seams before they set. Test-only.
 *
 * Commands come from the real command ring, prompts and policies from the real request blocks; the step is one
 * captured graph [gather ▸ router ▸ bucket ▸ publish]; the device writes records straight into the result blocks and
 * its events into the mailbox (seam_abi.h); this file forwards them to the real event ring, one step behind.
 *
 * Owns: the graph, the driver table. Borrows: channel, arena, pinned memory, stream, functions.
 * Threads: one. Nothing is allocated after seam_open.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../engine_c/src/invariant.h"
#include "../../engine_c/src/loader_internal.h"
#include "seam_trial.h"

/* The engine's own, of loader_check.c, which needs all of the loader. */
int32_t clb_fail(clb_error* error, int32_t status, const char* format, ...) {
  if (error != NULL) {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    error->status = status;
  }
  return status;
}

#define SEAM_AHEAD 2u /* steps launched and not yet seen */

/* ------------------------------------------------------------------ memory */

static uint64_t take(uint64_t* end, uint64_t bytes) {
  const uint64_t at = *end;
  *end = (at + bytes + 255u) & ~(uint64_t)255u;
  return at;
}

static seam_arena plan_arena(uint32_t experts, uint32_t k_max, uint32_t rows) {
  seam_arena at = {0};
  const uint64_t assignments = (uint64_t)SEAM_ROWS * k_max * sizeof(uint32_t);
  at.step = take(&at.end, sizeof(uint64_t));
  at.stage = take(&at.end, sizeof(seam_stage));
  at.slots = take(&at.end, SEAM_ROWS * sizeof(seam_slot));
  at.logits = take(&at.end, (uint64_t)SEAM_ROWS * experts * sizeof(float));
  at.indices = take(&at.end, assignments);
  at.weights = take(&at.end, assignments);
  at.kept = take(&at.end, SEAM_ROWS * sizeof(uint32_t));
  at.block_counts = take(&at.end, experts * sizeof(uint32_t));
  at.counts = take(&at.end, experts * sizeof(uint32_t));
  at.offsets = take(&at.end, (experts + 1u) * sizeof(uint32_t));
  at.tokens = take(&at.end, assignments);
  at.places = take(&at.end, assignments);
  at.table = take(&at.end, (uint64_t)rows * experts * sizeof(float));
  return at;
}

uint64_t seam_arena_bytes(uint32_t experts, uint32_t k_max, uint32_t rows) {
  return plan_arena(experts, k_max, rows).end;
}

uint64_t seam_pinned_bytes(void) { return (sizeof(seam_pinned) + 4095u) & ~(uint64_t)4095u; }

clb_device_addr seam_table(const seam_trial* trial) { return trial->config.device->arena + trial->at.table; }

clb_driver* seam_driver(seam_trial* trial) { return &trial->driver; }

void* seam_graph(const seam_trial* trial) { return trial->graph; }

seam_pinned* seam_pinned_of(const seam_trial* trial) { return (seam_pinned*)trial->config.device->pinned; }

/* ------------------------------------------------------------------- graph */

static int32_t launch_one(seam_trial* trial, uint32_t which, const void* args, uint32_t blocks, uint32_t threads) {
  /* The first node follows copies: a programmatic edge from a copy does not exist. */
  const uint32_t edge = (which == 0u) ? (uint32_t)CLB_EDGE_FULL : trial->config.edge;
  const clb_launch launch = {.function = trial->functions[which],
                             .args = args,
                             .grid = {blocks, 1u, 1u},
                             .block = {threads, 1u, 1u},
                             .shared_bytes = 0u,
                             .edge = edge};
  return trial->driver.launch(&trial->driver, trial->config.device->stream, &launch);
}

static int32_t launch_router(seam_trial* trial) {
  const seam_config* c = &trial->config;
  const clb_device_addr base = c->device->arena;
  const clb_router_args router = {.logits = base + trial->at.logits,
                                  .policy = base + trial->at.stage + offsetof(seam_stage, policy),
                                  .rows = base + trial->at.stage + offsetof(seam_stage, rows),
                                  .token_count = base + trial->at.stage,
                                  .indices = base + trial->at.indices,
                                  .weights = base + trial->at.weights,
                                  .kept = base + trial->at.kept,
                                  .block_counts = base + trial->at.block_counts,
                                  .logits_stride = c->experts,
                                  .policy_stride = 1u,
                                  .experts = c->experts,
                                  .k = c->k,
                                  .k_max = c->k_max,
                                  .score = c->score,
                                  .renormalise = c->renormalise,
                                  .routed_scale = c->routed_scale,
                                  .block_tokens = CLB_ROUTER_BLOCK_TOKENS,
                                  .not_finite = CLB_ERR_NOT_FINITE};
  const clb_bucket_args bucket = {.indices = router.indices,
                                  .block_counts = router.block_counts,
                                  .token_count = router.token_count,
                                  .counts = base + trial->at.counts,
                                  .offsets = base + trial->at.offsets,
                                  .tokens = base + trial->at.tokens,
                                  .places = base + trial->at.places,
                                  .experts = c->experts,
                                  .k_max = c->k_max};
  const int32_t status = launch_one(trial, 1u, &router, 1u, CLB_ROUTER_THREADS);
  return (status != CLB_OK) ? status : launch_one(trial, 2u, &bucket, 1u, CLB_ROUTER_THREADS);
}

int32_t seam_launch_step(seam_trial* trial) {
  const seam_config* c = &trial->config;
  const clb_device_addr base = c->device->arena;
  const seam_gather_args gather = {.table = base + trial->at.table,
                                   .slots = base + trial->at.slots,
                                   .row_slots = base + trial->at.stage + offsetof(seam_stage, row_slots),
                                   .token_count = base + trial->at.stage,
                                   .logits = base + trial->at.logits,
                                   .experts = c->experts,
                                   .rows = c->rows};
  const seam_publish_args publish = {.indices = base + trial->at.indices,
                                     .weights = base + trial->at.weights,
                                     .kept = base + trial->at.kept,
                                     .row_slots = gather.row_slots,
                                     .token_count = gather.token_count,
                                     .slots = gather.slots,
                                     .step = base + trial->at.step,
                                     .mailbox = c->device->pinned_device,
                                     .k_max = c->k_max,
                                     .rows = c->rows};
  int32_t status = launch_one(trial, 0u, &gather, SEAM_ROWS, 128u);
  if (status == CLB_OK) status = launch_router(trial);
  if (status == CLB_OK) status = launch_one(trial, 3u, &publish, 1u, 32u);
  return status;
}

static int32_t build_graph(seam_trial* trial) {
  clb_driver* d = &trial->driver;
  int32_t status = d->capture_begin(d, trial->config.device->stream);
  if (status != CLB_OK) return status;
  status = seam_launch_step(trial);
  const int32_t ended = d->capture_end(d, trial->config.device->stream, &trial->graph);
  if (status == CLB_OK) status = ended;
  return (status != CLB_OK) ? status
                            : d->graph_instantiate(d, trial->graph, trial->config.device->stream, &trial->executable);
}

void seam_close(seam_trial* trial) {
  clb_driver* d = &trial->driver;
  /* The device must be done with channel and mailbox before their owner unmaps them; a lost context is done too. */
  if (trial->executable != NULL) (void)d->stream_wait(d, trial->config.device->stream);
  if (trial->executable != NULL) d->executable_destroy(d, trial->executable);
  if (trial->graph != NULL) d->graph_destroy(d, trial->graph);
  free(trial);
}

/* Every kernel by name; its argument struct must have the size that this file passes. */
static int32_t find_kernels(seam_trial* trial, clb_error* error) {
  static const char* const names[4] = {"seam_gather", "clb_router_fp32", "clb_bucket", "seam_publish"};
  static const uint64_t bytes[4] = {sizeof(seam_gather_args), sizeof(clb_router_args), sizeof(clb_bucket_args),
                                    sizeof(seam_publish_args)};
  int32_t status = CLB_OK;
  for (uint32_t i = 0u; i < 4u && status == CLB_OK; i++) {
    status = clb_device_find(trial->config.device, names[i], bytes[i], &trial->functions[i], error);
  }
  return status;
}

int32_t seam_open(const seam_config* config, seam_trial** opened, clb_error* error) {
  seam_trial* trial = calloc(1u, sizeof *trial);
  if (trial == NULL) return CLB_ERR_MEMORY;
  trial->config = *config;
  trial->at = plan_arena(config->experts, config->k_max, config->rows);
  CLB_ASSERT(config->channel->slots <= SEAM_ROWS);
  CLB_ASSERT(sizeof(clb_record) == SEAM_RECORD_BYTES);
  const clb_device_desc* device = config->device;
  clb_driver* d = &trial->driver;
  int32_t status = clb_channel_attach(&trial->channel, config->channel_base, config->channel_bytes, config->channel);
  if (status == CLB_OK) status = clb_device_attach(device, d, error);
  if (status == CLB_OK) status = find_kernels(trial, error);
  if (status == CLB_OK) {
    CLB_ASSERT(device->arena_bytes >= trial->at.end && device->pinned_bytes >= sizeof(seam_pinned));
    (void)memset(device->pinned, 0, sizeof(seam_pinned));
    status = d->bind(d);
  }
  if (status == CLB_OK) status = d->fill(d, device->stream, device->arena, 0u, trial->at.table);
  if (status == CLB_OK) status = build_graph(trial);
  if (status == CLB_OK) status = d->stream_wait(d, device->stream);
  if (status != CLB_OK) {
    seam_close(trial);
    return status;
  }
  clb_channel_set_phase(&trial->channel, CLB_PHASE_READY);
  *opened = trial;
  return CLB_OK;
}

/* ---------------------------------------------------------------- commands */

static int32_t answer(seam_trial* trial, uint32_t kind, uint32_t slot, uint64_t generation, int32_t code) {
  const clb_event event = {.kind = kind, .slot = slot, .generation = generation, .status = code};
  return clb_channel_push_event(&trial->channel, &event);
}

static int32_t open_slot(seam_trial* trial, uint32_t slot, uint64_t generation) {
  seam_host_slot* own = &trial->slots[slot];
  const clb_request request = *clb_channel_request(&trial->channel, slot); /* copy, then check, then use the copy */
  const clb_expert_policy policy = *clb_channel_policy(&trial->channel, slot);
  const int bad = own->open != 0u || request.prompt_tokens < 1u || request.stop_count > SEAM_STOPS ||
                  request.prompt_tokens > trial->config.channel->max_seq_len || policy.k > trial->config.k_max ||
                  !(policy.threshold >= 0.0f && policy.threshold <= 1.0f) || request.max_tokens < 1u;
  if (bad) return answer(trial, CLB_EVENT_FAILED, slot, generation, CLB_ERR_ARGUMENT);
  clb_channel_slot_open(&trial->channel, slot, generation);
  (void)memset(own, 0, sizeof *own);
  own->generation = generation;
  own->close_after = UINT64_MAX;
  own->policy = (clb_router_policy){.k = policy.k, .threshold = policy.threshold};
  own->open = 1u;
  const uint8_t* records = (const uint8_t*)trial->channel.base + trial->channel.layout.results +
                           slot * trial->channel.layout.result_stride + trial->channel.layout.result_records;
  own->fresh.generation = generation;
  own->fresh.records = trial->config.device->channel_device + (uint64_t)(records - trial->channel.base);
  own->fresh.record_mask = trial->config.channel->result_records - 1u;
  own->fresh.active = 1u;
  own->fresh.max_tokens = request.max_tokens;
  own->fresh.token = clb_channel_tokens(&trial->channel, slot)[request.prompt_tokens - 1u];
  own->fresh.stop_count = request.stop_count;
  (void)memcpy(own->fresh.stops, clb_channel_stops(&trial->channel, slot), request.stop_count * sizeof(int32_t));
  return answer(trial, CLB_EVENT_OPENED, slot, generation, CLB_OK);
}

static int32_t apply(seam_trial* trial, const clb_command* command) {
  if (command->slot >= trial->config.channel->slots) return CLB_ERR_ARGUMENT;
  seam_host_slot* own = &trial->slots[command->slot];
  if (command->kind == (uint32_t)CLB_CMD_OPEN) return open_slot(trial, command->slot, command->generation);
  if (own->open == 0u || own->generation != command->generation) return CLB_OK; /* it finished before */
  if (command->kind == (uint32_t)CLB_CMD_PREFILL) {
    own->running = 1u;
    own->patched = 1u;
  } else if (command->kind == (uint32_t)CLB_CMD_CLOSE) {
    own->running = 0u;
    own->close_after = trial->launched;
  }
  return CLB_OK;
}

/* ------------------------------------------------------------------- steps */

/* Who takes part in the next step, and copies of what changed. Staging place s is free: step s - 4 was seen. */
static int32_t send_changes(seam_trial* trial, seam_stage* stage) {
  clb_driver* d = &trial->driver;
  const uint32_t place = (uint32_t)(trial->launched % SEAM_RING);
  seam_pinned* pinned = seam_pinned_of(trial);
  int32_t status = CLB_OK;
  (void)memset(stage, 0, sizeof *stage);
  for (uint32_t slot = 0u; slot < trial->config.channel->slots && status == CLB_OK; slot++) {
    seam_host_slot* own = &trial->slots[slot];
    if (own->running == 0u || clb_channel_room(&trial->channel, slot) <= own->in_flight) continue;
    stage->rows[stage->token_count].slot = slot;
    stage->row_slots[stage->token_count++] = slot;
    stage->policy[slot] = own->policy;
    if (own->patched == 0u) continue;
    pinned->slots[place][slot] = own->fresh;
    status = d->copy_in(d, trial->config.device->stream,
                        trial->config.device->arena + trial->at.slots + slot * sizeof(seam_slot),
                        &pinned->slots[place][slot], sizeof(seam_slot));
    own->patched = 0u;
  }
  if (status != CLB_OK || stage->token_count == 0u || memcmp(stage, &trial->sent, sizeof *stage) == 0) return status;
  pinned->stages[place] = *stage;
  trial->sent = *stage;
  return d->copy_in(d, trial->config.device->stream, trial->config.device->arena + trial->at.stage,
                    &pinned->stages[place], sizeof *stage);
}

static int32_t start_step(seam_trial* trial, uint32_t* worked) {
  seam_stage stage;
  const int32_t status = send_changes(trial, &stage);
  if (status != CLB_OK || stage.token_count == 0u) return status;
  for (uint32_t row = 0u; row < stage.token_count; row++)
    trial->slots[stage.row_slots[row]].in_flight++;
  trial->row_counts[trial->launched % SEAM_RING] = stage.token_count;
  trial->launched++;
  *worked = 1u;
  return trial->driver.graph_launch(&trial->driver, trial->executable, trial->config.device->stream);
}

static int32_t forward_row(seam_trial* trial, const seam_event* from) {
  seam_host_slot* own = &trial->slots[from->slot];
  if (own->generation == from->generation && own->in_flight > 0u) own->in_flight--;
  if ((from->flags & SEAM_TOKEN) == 0u || own->open == 0u || own->generation != from->generation) return CLB_OK;
  if (own->close_after != UINT64_MAX) return CLB_OK; /* cancelled: late tokens are not told */
  clb_event event = {.kind = (uint32_t)CLB_EVENT_TOKEN,
                     .slot = from->slot,
                     .generation = from->generation,
                     .position = from->position,
                     .token = from->token};
  if ((from->flags & SEAM_STOP) != 0u) event.flags |= CLB_FINISH_STOP;
  if ((from->flags & SEAM_LENGTH) != 0u) event.flags |= CLB_FINISH_LENGTH;
  event.record = clb_channel_commit(&trial->channel, from->slot);
  clb_channel_result(&trial->channel, from->slot)->assignments += from->kept;
  if (event.flags != 0u) {
    own->running = 0u;
    own->open = 0u;
  }
  return clb_channel_push_event(&trial->channel, &event);
}

static int32_t forward(seam_trial* trial, uint32_t* worked) {
  const seam_pinned* pinned = seam_pinned_of(trial);
  const uint64_t finished = __atomic_load_n(&pinned->sequence, __ATOMIC_ACQUIRE);
  int32_t status = CLB_OK;
  for (; trial->seen < finished && status == CLB_OK; trial->seen++) {
    const uint64_t place = trial->seen % SEAM_RING;
    for (uint32_t row = 0u; row < trial->row_counts[place] && status == CLB_OK; row++) {
      status = forward_row(trial, &pinned->events[place][row]);
    }
    *worked = 1u;
  }
  for (uint32_t slot = 0u; slot < trial->config.channel->slots && status == CLB_OK; slot++) {
    seam_host_slot* own = &trial->slots[slot];
    if (own->open == 0u || own->close_after > trial->seen) continue;
    own->open = 0u;
    status = answer(trial, CLB_EVENT_CLOSED, slot, own->generation, CLB_OK);
  }
  return status;
}

int32_t seam_turn(seam_trial* trial, uint32_t* worked) {
  clb_command command;
  int32_t status = CLB_OK;
  *worked = 0u;
  while (status == CLB_OK && clb_channel_pop_command(&trial->channel, &command) != 0u) {
    status = apply(trial, &command);
    *worked = 1u;
  }
  if (status == CLB_OK && trial->launched - trial->seen < SEAM_AHEAD) status = start_step(trial, worked);
  if (status == CLB_OK) status = forward(trial, worked);
  if (status == CLB_OK) return CLB_OK;
  for (uint32_t slot = 0u; slot < trial->config.channel->slots; slot++) { /* the context is lost: tell everyone once */
    if (trial->slots[slot].open != 0u) {
      (void)answer(trial, CLB_EVENT_FAILED, slot, trial->slots[slot].generation, status);
    }
    trial->slots[slot].open = 0u;
  }
  return status;
}
