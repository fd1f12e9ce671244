/*
 * swap.h: experts that replace others while the engine serves.
 *
 *   helper   stage: IDLE ▸ STAGING ── file ▸ checked piece by piece ▸ free block ── STAGED    post: POSTED    wait: ▸
 * IDLE └─ anything wrong: the block is free again, IDLE  ◀── cancel ─┘          │            ▲ loop between two steps,
 * if not withdrawn: ▸ SWITCHED ── served: DONE
 *
 * The helper is any one thread that is not the loop's; it alone touches the free blocks, and the loop's part begins
 * and ends with `state`. What the switch changes (table of weights, dispatch table) is read by the helper only while no
 * swap is posted.
 *
 *   free blocks    | block of the largest expert | ...   swap_slots at open. A swap takes one that is large enough;
 * when the new expert has served, the old one's memory takes its place
 *
 * The old expert's memory is reused only if nothing else lies in it: two layers may share one file.
 *
 * Does not: allocate, decide who may swap what, read descriptions. Owner: the engine.
 */
#ifndef CLB_SWAP_H
#define CLB_SWAP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../include/colibri.h"
#include "kernel_dispatch.h"
#include "loader.h"

enum {
  CLB_SWAP_IDLE = 0,
  CLB_SWAP_STAGING = 1,
  CLB_SWAP_STAGED = 2,
  CLB_SWAP_POSTED = 3,
  CLB_SWAP_SWITCHING = 4,
  CLB_SWAP_SWITCHED = 5,
  CLB_SWAP_DONE = 6
}; /* clb_swap_state */

#define CLB_EXPERT_PARTS 3u /* gate, up, down */

typedef struct clb_swap_block {
  uint64_t address; /* of the host or the device; a multiple of 256 */
  uint64_t bytes;   /* 0: no block */
} clb_swap_block;

/* Embedded in the engine; fields are private to swap.c and the backends. */
typedef struct clb_swap {
  _Atomic uint32_t state;
  _Atomic uint32_t ended; /* 1: the loop has ended, nothing will be switched any more */
  uint32_t free_count;
  uint32_t layer;
  uint32_t expert;
  uint32_t reserved;
  clb_swap_block free[CLB_MAX_SWAP_SLOTS];
  clb_swap_block staged; /* taken from `free`; no block: the weights stay where they are */
  clb_swap_block old;    /* free when the new expert has served */
  clb_tensor parts[CLB_EXPERT_PARTS];
  clb_expert_entry entry; /* CPU */
  uint64_t weights_end;   /* address behind the weights that were loaded */
  uint64_t switched_at;   /* CUDA: steps that were launched before the switch */
  uint64_t events_until;  /* events pushed up to those that tell of the last switch */
  uint64_t* own_bytes;    /* (routed experts of all layers): size of the block that an expert lies in; 0: as loaded */
  unsigned char* piece;   /* CLB_LOADER_PIECE_BYTES, page-locked on a device */
  clb_swap_report report;
} clb_swap;

/* Index of a routed expert among those of all layers, and how many there are. */
uint64_t clb_swap_expert_index(const clb_model_desc* model, uint32_t layer, uint32_t expert);
uint64_t clb_swap_expert_count(const clb_model_desc* model);

/* Memory from `address` on is that of the free blocks. weights_end: of the memory of the weights that are loaded. */
void clb_swap_open(clb_swap* swap, uint64_t address, uint64_t block_bytes, uint32_t blocks, uint64_t weights_end);

struct clb_engine;

/* Loop: makes the switch that is posted. A failing device is engine->fault. */
void clb_swap_before_steps(struct clb_engine* engine);
/* Loop: after the steps of a turn. */
void clb_swap_after_steps(struct clb_engine* engine);
/* Is there something that the loop should do? */
bool clb_swap_waits(const struct clb_engine* engine);

#endif /* CLB_SWAP_H */
