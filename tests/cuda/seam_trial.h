/*
 * seam_trial.h: what seam_trial.c and seam_measure.c share. Test-only.
 */
#ifndef CLB_SEAM_TRIAL_H
#define CLB_SEAM_TRIAL_H

#include "../../engine_c/src/channel.h"
#include "../../engine_c/src/driver.h"
#include "seam_abi.h"

typedef struct seam_config {
  void* channel_base;
  const clb_channel_config* channel;
  const clb_device_desc* device; /* arena: seam_arena_bytes() or more, pinned: seam_pinned_bytes() or more */
  uint64_t channel_bytes;
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
  clb_row rows[SEAM_ROWS];             /* for the router; its status is not read */
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
  uint64_t in_flight;   /* records that launched steps will write and that were not forwarded yet */
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
  void* functions[4]; /* gather, router, bucket, publish */
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

/* All functions are called from Python through ctypes. */
uint64_t seam_arena_bytes(uint32_t experts, uint32_t k_max, uint32_t rows);
uint64_t seam_pinned_bytes(void);
/* Device address of the stand-in model, which the caller fills after open. */
clb_device_addr seam_table(const seam_trial* trial);
clb_driver* seam_driver(seam_trial* trial);
void* seam_graph(const seam_trial* trial);
int32_t seam_open(const seam_config* config, seam_trial** opened, clb_error* error);
int32_t seam_turn(seam_trial* trial, uint32_t* worked);
void seam_close(seam_trial* trial);

/* The four kernels of a step, eagerly or into a capture. */
int32_t seam_launch_step(seam_trial* trial);
seam_pinned* seam_pinned_of(const seam_trial* trial);

int32_t seam_measure(seam_trial* trial, uint32_t mode, uint32_t count, double* launch_us, double* done_us);
int32_t seam_period(seam_trial* trial, uint32_t eager, uint32_t count, double* cpu_us, double* device_us);
int32_t seam_time(clb_driver* d, void* stream, const clb_launch* launches, uint32_t count, uint32_t repeats, float* ms);

#endif /* CLB_SEAM_TRIAL_H */
