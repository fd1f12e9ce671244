/*
 * engine_rig.h: an engine with dummy weights and both ends of its channel in one process, for tests.
 *
 * The model: 3 layers (MoE with gated shared expert, dense, MoE with sigmoid scores and no shared expert),
 * norms of q and k (per head, none, over the row), a window of 11 tokens in the first,
 * hidden 32, 4 heads over 2 kv heads of 8, vocabulary 97, 6 experts of which a token uses 2.
 */
#ifndef CLB_ENGINE_RIG_H
#define CLB_ENGINE_RIG_H

#include <stdint.h>

#include "colibri.h"
#include "ops.h"
#include "test.h"

#define RIG_LAYERS 3u
#define RIG_VOCAB 97u
#define RIG_EXPERTS 6u
#define RIG_MAX_SEQ 96u
#define RIG_MAX_SLOTS 8u
#define RIG_RECORDS 64u
#define RIG_MODULES 3u

/* What came out of one slot since its last open. */
typedef struct rig_output {
  uint32_t opened;
  uint32_t waits; /* how often it was told that it has to wait */
  uint32_t ended; /* clb_event_kind of the last event, 0 while it runs */
  uint32_t flags; /* CLB_FINISH_* of the last token */
  int32_t status;
  uint32_t count; /* tokens */
  clb_record records[RIG_MAX_SEQ];
  uint32_t switches; /* experts that were replaced meanwhile, and the positions below which those before it computed */
  uint32_t switched_at[RIG_MAX_SEQ];
  clb_result usage; /* copied when it ended */
} rig_output;

typedef struct rig {
  clb_engine_config config;
  clb_model_desc model;
  clb_layer_desc layers[RIG_LAYERS];
  float inv_freq[8]; /* heads of up to 16 values */
  clb_module_ref modules[RIG_MODULES];
  char paths[RIG_MODULES][512];
  clb_channel_layout layout;
  clb_engine* engine;
  clb_error error;
  uint64_t generation[RIG_MAX_SLOTS];
  rig_output outputs[RIG_MAX_SLOTS];
  uint64_t forgotten;    /* the weights' generation that the last switch began */
  uint32_t hold_records; /* 1: records are popped but never marked as read */
} rig;

/* Engines opened from now on compute by this instruction set, its modules and operations; NULL, as at the start:
   generic. Returns what was used before. */
const clb_ops* rig_use(const clb_ops* table);
/* All tests once for each instruction set that this machine can run. */
int rig_test_main(int argc, char** argv, const clb_test* tests, size_t count);

/* Configuration only; tests may bend it before rig_open. */
void rig_init(rig* r, uint32_t slots);
/* Formats a channel and opens the engine. The engine's status; r->error says more. */
int32_t rig_open(rig* r);
void rig_close(rig* r);

/* A request for `max_tokens` greedy tokens over a prompt that follows from `seed`. */
clb_request rig_request(uint64_t seed, uint32_t prompt_tokens, uint32_t max_tokens);
int32_t rig_prompt_token(uint64_t seed, uint32_t index);
/* Writes the block of a slot: prompt from `seed`, default policies, no stops, no bias. The slot's next
   generation goes in. Returns the block's head, so that a test may bend it. */
clb_request* rig_write(rig* r, uint32_t slot, const clb_request* request, uint64_t seed);
/* Bytes of a slot's request block at `offset`. */
void* rig_block(rig* r, uint32_t slot, uint64_t offset);
clb_prompt_record* rig_prompt_records(rig* r, uint32_t slot);
/* (RIG_LAYERS, RIG_EXPERTS): assignments of the slot's request. */
const uint32_t* rig_counts(const rig* r, uint32_t slot);
/* OPEN, and PREFILL of the whole prompt behind its prefix. */
void rig_start(rig* r, uint32_t slot);
void rig_push(rig* r, uint32_t kind, uint32_t slot, uint64_t generation, uint32_t start, uint32_t count);
/* One turn; takes the events; proves conservation. Returns 1 if a step ran. */
uint32_t rig_turn(rig* r);
/* Turns until nothing is open, at most `turns`. Returns 1 iff nothing is open. */
int rig_drain(rig* r, uint32_t turns);
/* write, start, drain in an otherwise idle engine; the result lies in outputs[slot]. */
void rig_run_alone(rig* r, uint32_t slot, const clb_request* request, uint64_t seed);
clb_stats rig_stats(const rig* r);

#endif /* CLB_ENGINE_RIG_H */
