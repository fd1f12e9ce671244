/*
 * step.h: one step = some tokens through all layers. Data in, residual stream out; no policy, no allocation.
 *
 * A step is a list of rows, each one token at one position of one slot. Rows of one slot follow each other in
 * rising position. Every row's result has the same bits whatever other rows the step holds.
 *
 *   clb_step_forward   rows -> residual (rows, hidden); writes each row's K and V; counts expert work per row
 *   clb_step_logits    some rows -> logits (rows, vocab), at most CLB_LOGIT_ROWS at once
 *
 * Owner: the engine loop. The buffers are carved from the temp tier when the engine opens.
 */
#ifndef CLB_STEP_H
#define CLB_STEP_H

#include <stdint.h>

#include "../include/colibri.h"
#include "cache_pool.h"
#include "kernel_dispatch.h"
#include "stage.h"

#define CLB_LOGIT_ROWS 32u /* rows of logits held at once */

typedef struct clb_step_row {
  uint32_t slot;
  uint32_t position;
  int32_t token;
  int32_t status;       /* set by forward: CLB_OK, or NOT_FINITE when the router's logits were not finite */
  uint32_t assignments; /* set by forward: (token, expert) pairs computed, all layers */
  uint32_t trimmed;
  uint32_t dropped;
  uint32_t reserved;
} clb_step_row;

/* What was sampled from one row of logits. */
typedef struct clb_draw {
  clb_record record;
  uint32_t slot;
  int32_t status;
} clb_draw;

/* Buffers of the worst step; T = most rows of a step. */
typedef struct clb_step_buffers {
  clb_step_row* rows;             /* (T) */
  float* residual;                /* (T, hidden) */
  float* normed;                  /* (T, hidden): input of attention, then of the FFN */
  float* update;                  /* (T, hidden): what attention or FFN adds */
  float* qkv;                     /* (T, q + 2 kv) */
  float* attended;                /* (T, q) */
  float* rope;                    /* (T, head_dim): cosines, then sines */
  float* shared_activation;       /* (T, largest shared or dense width) */
  float* shared_output;           /* (T, hidden) */
  float* head_input;              /* (CLB_LOGIT_ROWS, hidden) */
  float* logits;                  /* (CLB_LOGIT_ROWS, vocab) */
  unsigned char* codes;           /* of the inputs of the stage at work; NULL: no weights want them */
  unsigned char* shared_codes;    /* of shared_activation while `codes` has those of experts */
  unsigned char* sampler_scratch; /* one a thread, at most CLB_LOGIT_ROWS */
  uint64_t scratch_stride;        /* bytes of one */
  clb_draw* draws;                /* (CLB_LOGIT_ROWS) */
  clb_expert_policy* policies;    /* (T) of the layer at work */
  uint32_t* groups;               /* (T + 1): first rows of the groups that attend together */
  clb_product* products;          /* (most experts + 1): of the stage at work */
  uint32_t* first_items;          /* the same */
  uint32_t* identity;             /* (T): 0, 1, 2, ... */
  uint64_t* expert_stamp;         /* (most experts): the last (step, layer) that ran it */
} clb_step_buffers;

struct clb_engine;

/* Runs rows [0, count) of buffers.rows. 1 <= count <= T (asserted), tokens in [0, vocab), slots open. */
void clb_step_forward(struct clb_engine* engine, uint32_t count);

/* Final norm and head of `count` <= CLB_LOGIT_ROWS rows; logits of rows[i] lie at buffers.logits + i * vocab. */
void clb_step_logits(struct clb_engine* engine, const uint32_t* rows, uint32_t count);

#endif /* CLB_STEP_H */
