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
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../engine_c/src/assert.h"
#include "../../engine_c/src/channel.h"
#include "../../engine_c/src/driver.h"
#include "seam_abi.h"

#define SEAM_AHEAD 2u /* steps launched and not yet seen */

typedef struct seam_config {
  void* channel_base;
  const clb_channel_config* channel;
  const clb_cuda_entries* entries;
  void* stream;
  void* functions[4]; /* gather, router, bucket, publish */
  void* pinned;       /* page-locked, zeroed, seam_pinned_bytes() */
  uint64_t channel_bytes;
  clb_device_addr channel_device;
  clb_device_addr pinned_device;
  clb_device_addr arena; /* seam_arena_bytes(); the table is filled by the caller at seam_table() */
  uint32_t rows;
  uint32_t experts;
  uint32_t k;
  uint32_t k_max;
  uint32_t score;
  uint32_t renormalise;
  float routed_scale;
  uint32_t edge;
} seam_config;

/* What the host changes between steps: copied to the device as one piece, and only when it changed. */
typedef struct seam_stage {
  uint32_t token_count;
  uint32_t row_slots[SEAM_ROWS];
  clb_router_policy policy[SEAM_ROWS]; /* by slot */
} seam_stage;

typedef struct seam_arena {
  uint64_t step, stage, slots, logits, indices, weights, kept, block_counts, counts, offsets, tokens, places, table,
      end;
} seam_arena;

typedef struct seam_pinned {
  uint64_t sequence;
  uint64_t pad[7];
  seam_event events[SEAM_RING][SEAM_ROWS];
  seam_stage stages[SEAM_RING];
  seam_slot slots[SEAM_RING][SEAM_ROWS];
} seam_pinned;

typedef struct seam_host_slot {
  uint64_t generation;
  uint64_t launched;    /* positions launched, in flight ones included */
  uint64_t close_after; /* answer CLOSE once this many steps were seen; UINT64_MAX = not closing */
  clb_router_policy policy;
  uint32_t open;
  uint32_t running; /* prefill came, not finished */
  uint32_t patched; /* `fresh` must reach the device before the next step */
  seam_slot fresh;
} seam_host_slot;

typedef struct seam_trial {
  seam_config config;
  clb_driver driver;
  clb_channel channel;
  seam_arena at;
  void* graph;
  void* executable;
  seam_host_slot slots[SEAM_ROWS];
  seam_stage sent;
  uint32_t row_counts[SEAM_RING];
  uint64_t launched;
  uint64_t seen;
} seam_trial;

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

uint64_t seam_arena_bytes(uint32_t experts, uint32_t k_max, uint32_t rows);
uint64_t seam_pinned_bytes(void);
clb_device_addr seam_table(const seam_trial* trial);
clb_driver* seam_driver(seam_trial* trial);
void* seam_graph(const seam_trial* trial);

uint64_t seam_arena_bytes(uint32_t experts, uint32_t k_max, uint32_t rows) {
  return plan_arena(experts, k_max, rows).end;
}

uint64_t seam_pinned_bytes(void) { return (sizeof(seam_pinned) + 4095u) & ~(uint64_t)4095u; }

clb_device_addr seam_table(const seam_trial* trial) { return trial->config.arena + trial->at.table; }

clb_driver* seam_driver(seam_trial* trial) { return &trial->driver; }

void* seam_graph(const seam_trial* trial) { return trial->graph; }

static seam_pinned* pinned_of(const seam_trial* trial) { return (seam_pinned*)trial->config.pinned; }

/* ------------------------------------------------------------------- graph */

static int32_t launch_one(seam_trial* trial, uint32_t which, const void* args, uint32_t blocks, uint32_t threads) {
  /* The first node follows copies: a programmatic edge from a copy does not exist. */
  const uint32_t edge = (which == 0u) ? (uint32_t)CLB_EDGE_FULL : trial->config.edge;
  const clb_launch launch = {.function = trial->config.functions[which],
                             .args = args,
                             .grid = {blocks, 1u, 1u},
                             .block = {threads, 1u, 1u},
                             .shared_bytes = 0u,
                             .edge = edge};
  return trial->driver.launch(&trial->driver, trial->config.stream, &launch);
}

static int32_t launch_router(seam_trial* trial) {
  const seam_config* c = &trial->config;
  const clb_device_addr base = c->arena;
  const clb_router_args router = {.logits = base + trial->at.logits,
                                  .policy = base + trial->at.stage + offsetof(seam_stage, policy),
                                  .slots = base + trial->at.stage + offsetof(seam_stage, row_slots),
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
                                  .routed_scale = c->routed_scale};
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

/* The four kernels of a step, eagerly or into a capture. */
static int32_t launch_step(seam_trial* trial) {
  const seam_config* c = &trial->config;
  const clb_device_addr base = c->arena;
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
                                     .mailbox = c->pinned_device,
                                     .k_max = c->k_max,
                                     .rows = c->rows};
  int32_t status = launch_one(trial, 0u, &gather, SEAM_ROWS, 128u);
  if (status == CLB_OK) status = launch_router(trial);
  if (status == CLB_OK) status = launch_one(trial, 3u, &publish, 1u, 32u);
  return status;
}

static int32_t build_graph(seam_trial* trial) {
  clb_driver* d = &trial->driver;
  int32_t status = d->capture_begin(d, trial->config.stream);
  if (status != CLB_OK) return status;
  status = launch_step(trial);
  const int32_t ended = d->capture_end(d, trial->config.stream, &trial->graph);
  if (status == CLB_OK) status = ended;
  return (status != CLB_OK) ? status : d->graph_instantiate(d, trial->graph, trial->config.stream, &trial->executable);
}

void seam_close(seam_trial* trial);

void seam_close(seam_trial* trial) {
  clb_driver* d = &trial->driver;
  if (trial->executable != NULL) d->executable_destroy(d, trial->executable);
  if (trial->graph != NULL) d->graph_destroy(d, trial->graph);
  free(trial);
}

int32_t seam_open(const seam_config* config, seam_trial** opened);

int32_t seam_open(const seam_config* config, seam_trial** opened) {
  seam_trial* trial = calloc(1u, sizeof *trial);
  if (trial == NULL) return CLB_ERR_MEMORY;
  trial->config = *config;
  trial->at = plan_arena(config->experts, config->k_max, config->rows);
  (void)memset(config->pinned, 0, sizeof(seam_pinned));
  CLB_ASSERT(config->channel->slots <= SEAM_ROWS);
  CLB_ASSERT(sizeof(clb_record) == SEAM_RECORD_BYTES);
  clb_driver* d = &trial->driver;
  int32_t status = clb_channel_attach(&trial->channel, config->channel_base, config->channel_bytes, config->channel);
  if (status == CLB_OK) status = clb_driver_cuda_init(d, config->entries);
  if (status == CLB_OK) status = d->bind(d);
  if (status == CLB_OK) status = d->fill(d, config->stream, config->arena, 0u, trial->at.table);
  if (status == CLB_OK) status = build_graph(trial);
  if (status == CLB_OK) status = d->stream_wait(d, config->stream);
  if (status != CLB_OK) {
    seam_close(trial);
    return status;
  }
  clb_channel_set_phase(&trial->channel, CLB_PHASE_READY);
  *opened = trial;
  return CLB_OK;
}

/* ---------------------------------------------------------------- commands */

static int32_t answer(seam_trial* trial, clb_event_kind kind, uint32_t slot, uint64_t generation, int32_t code) {
  const clb_event event = {.kind = (uint32_t)kind, .slot = slot, .generation = generation, .status = code};
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
  own->fresh.records = trial->config.channel_device + (uint64_t)(records - trial->channel.base);
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

static int has_room(const seam_trial* trial, uint32_t slot) {
  const clb_result* result = clb_channel_result(&trial->channel, slot);
  const uint64_t tail = __atomic_load_n(&result->tail, __ATOMIC_ACQUIRE);
  return trial->slots[slot].launched - tail < trial->config.channel->result_records;
}

/* Who takes part in the next step, and copies of what changed. Staging place s is free: step s - 4 was seen. */
static int32_t send_changes(seam_trial* trial, seam_stage* stage) {
  clb_driver* d = &trial->driver;
  const uint32_t place = (uint32_t)(trial->launched % SEAM_RING);
  seam_pinned* pinned = pinned_of(trial);
  int32_t status = CLB_OK;
  (void)memset(stage, 0, sizeof *stage);
  for (uint32_t slot = 0u; slot < trial->config.channel->slots && status == CLB_OK; slot++) {
    seam_host_slot* own = &trial->slots[slot];
    if (own->running == 0u || !has_room(trial, slot)) continue;
    stage->row_slots[stage->token_count++] = slot;
    stage->policy[slot] = own->policy;
    if (own->patched == 0u) continue;
    pinned->slots[place][slot] = own->fresh;
    status = d->copy_in(d, trial->config.stream, trial->config.arena + trial->at.slots + slot * sizeof(seam_slot),
                        &pinned->slots[place][slot], sizeof(seam_slot));
    own->patched = 0u;
  }
  if (status != CLB_OK || stage->token_count == 0u || memcmp(stage, &trial->sent, sizeof *stage) == 0) return status;
  pinned->stages[place] = *stage;
  trial->sent = *stage;
  return d->copy_in(d, trial->config.stream, trial->config.arena + trial->at.stage, &pinned->stages[place],
                    sizeof *stage);
}

static int32_t start_step(seam_trial* trial, uint32_t* worked) {
  seam_stage stage;
  const int32_t status = send_changes(trial, &stage);
  if (status != CLB_OK || stage.token_count == 0u) return status;
  for (uint32_t row = 0u; row < stage.token_count; row++)
    trial->slots[stage.row_slots[row]].launched++;
  trial->row_counts[trial->launched % SEAM_RING] = stage.token_count;
  trial->launched++;
  *worked = 1u;
  return trial->driver.graph_launch(&trial->driver, trial->executable, trial->config.stream);
}

static int32_t forward_row(seam_trial* trial, const seam_event* from) {
  seam_host_slot* own = &trial->slots[from->slot];
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
  const seam_pinned* pinned = pinned_of(trial);
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

int32_t seam_turn(seam_trial* trial, uint32_t* worked);

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

/* ------------------------------------------------------------ measurements */

static double now_us(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

typedef enum seam_mode {
  SEAM_GRAPH_MAILBOX = 0, /* one graph launch, done when the mailbox shows it */
  SEAM_GRAPH_WAIT = 1,    /* ... when cuStreamSynchronize returns */
  SEAM_EAGER_MAILBOX = 2, /* four launches */
  SEAM_COPY_MAILBOX = 3   /* a copy of the stage before the graph */
} seam_mode;

int32_t seam_measure(seam_trial* trial, uint32_t mode, uint32_t count, double* launch_us, double* done_us);

/* Per step: microseconds of the launching call(s), and from their start until the result is known. Full rows. */
int32_t seam_measure(seam_trial* trial, uint32_t mode, uint32_t count, double* launch_us, double* done_us) {
  clb_driver* d = &trial->driver;
  seam_pinned* pinned = pinned_of(trial);
  void* stream = trial->config.stream;
  int32_t status;
  pinned->stages[0].token_count = SEAM_ROWS;
  for (uint32_t i = 0u; i < SEAM_ROWS; i++)
    pinned->stages[0].row_slots[i] = i;
  status = d->copy_in(d, stream, trial->config.arena + trial->at.stage, &pinned->stages[0], sizeof(seam_stage));
  if (status == CLB_OK) status = d->stream_wait(d, stream);
  for (uint32_t i = 0u; i < count && status == CLB_OK; i++) {
    const uint64_t before = __atomic_load_n(&pinned->sequence, __ATOMIC_ACQUIRE);
    const double begin = now_us();
    if (mode == (uint32_t)SEAM_COPY_MAILBOX) {
      status = d->copy_in(d, stream, trial->config.arena + trial->at.stage, &pinned->stages[0], sizeof(seam_stage));
    }
    if (status == CLB_OK) {
      status =
          (mode == (uint32_t)SEAM_EAGER_MAILBOX) ? launch_step(trial) : d->graph_launch(d, trial->executable, stream);
    }
    launch_us[i] = now_us() - begin;
    if (status == CLB_OK && mode == (uint32_t)SEAM_GRAPH_WAIT) status = d->stream_wait(d, stream);
    while (status == CLB_OK && __atomic_load_n(&pinned->sequence, __ATOMIC_ACQUIRE) == before) {
      if (now_us() - begin > 2e6) status = d->stream_wait(d, stream); /* surfaces a device fault instead of hanging */
    }
    done_us[i] = now_us() - begin;
  }
  trial->launched = trial->seen = pinned->sequence;
  (void)memset(&trial->sent, 0, sizeof trial->sent);
  return status;
}

int32_t seam_period(seam_trial* trial, uint32_t eager, uint32_t count, double* cpu_us, double* device_us);

/* Back to back: microseconds a step of the host's calls and of the device. */
int32_t seam_period(seam_trial* trial, uint32_t eager, uint32_t count, double* cpu_us, double* device_us) {
  clb_driver* d = &trial->driver;
  void* stream = trial->config.stream;
  void* events[2] = {NULL, NULL};
  float ms = 0.0f;
  int32_t status = d->event_create(d, &events[0]);
  if (status == CLB_OK) status = d->event_create(d, &events[1]);
  if (status == CLB_OK) status = d->event_record(d, events[0], stream);
  const double begin = now_us();
  for (uint32_t i = 0u; i < count && status == CLB_OK; i++) {
    status = (eager != 0u) ? launch_step(trial) : d->graph_launch(d, trial->executable, stream);
  }
  *cpu_us = (now_us() - begin) / (double)count;
  if (status == CLB_OK) status = d->event_record(d, events[1], stream);
  if (status == CLB_OK) status = d->stream_wait(d, stream);
  if (status == CLB_OK) status = d->event_ms(d, events[0], events[1], &ms);
  *device_us = (double)ms * 1e3 / (double)count;
  if (events[1] != NULL) d->event_destroy(d, events[1]);
  if (events[0] != NULL) d->event_destroy(d, events[0]);
  trial->launched = trial->seen = pinned_of(trial)->sequence;
  return status;
}

int32_t seam_time(clb_driver* d, void* stream, const clb_launch* launches, uint32_t count, uint32_t repeats, float* ms);

/* One graph of `launches`, replayed: ms[i] of each replay after one that is not counted. */
int32_t seam_time(clb_driver* d, void* stream, const clb_launch* launches, uint32_t count, uint32_t repeats,
                  float* ms) {
  void* graph = NULL;
  void* executable = NULL;
  void* events[2] = {NULL, NULL};
  int32_t status = d->capture_begin(d, stream);
  if (status != CLB_OK) return status;
  for (uint32_t i = 0u; i < count && status == CLB_OK; i++)
    status = d->launch(d, stream, &launches[i]);
  const int32_t ended = d->capture_end(d, stream, &graph);
  if (status == CLB_OK) status = ended;
  if (status == CLB_OK) status = d->graph_instantiate(d, graph, stream, &executable);
  for (uint32_t i = 0u; i < 2u && status == CLB_OK; i++)
    status = d->event_create(d, &events[i]);
  if (status == CLB_OK) status = d->graph_launch(d, executable, stream);
  for (uint32_t i = 0u; i < repeats && status == CLB_OK; i++) {
    status = d->event_record(d, events[0], stream);
    if (status == CLB_OK) status = d->graph_launch(d, executable, stream);
    if (status == CLB_OK) status = d->event_record(d, events[1], stream);
    if (status == CLB_OK) status = d->stream_wait(d, stream);
    if (status == CLB_OK) status = d->event_ms(d, events[0], events[1], &ms[i]);
  }
  for (uint32_t i = 0u; i < 2u; i++) {
    if (events[i] != NULL) d->event_destroy(d, events[i]);
  }
  if (executable != NULL) d->executable_destroy(d, executable);
  if (graph != NULL) d->graph_destroy(d, graph);
  return status;
}
