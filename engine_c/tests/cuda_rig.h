/*
 * cuda_rig.h: the whole CUDA engine over a fake libcuda, with a stand-in for its kernels, for tests.
 *
 * The stand-in model: token t at position p is followed by rig_next(t, p); with a mask, by the lowest allowed id. Only
 * the kernels that the host's loop depends on do anything: embed takes rows from the slot list, sample writes records
 * and events and moves slots on, router counts experts 1 and 3, of which capacity drops the latter, pool counts rows
 * and launches, publish fills the mailbox, prompt_logprobs writes prompt records, dummy its values.
 *
 * The model: layer 0 MoE with a gated shared expert, layer 1 dense; hidden 32, 2 heads over 1 kv head of 32,
 * vocabulary 97, 4 experts of width 16 of which a token uses 2.
 */
#ifndef CLB_CUDA_RIG_H
#define CLB_CUDA_RIG_H

#include <stdint.h>

#include "colibri.h"

#define CUDA_RIG_VOCAB 97u
#define CUDA_RIG_LAYERS 2u
#define CUDA_RIG_EXPERTS 4u
#define CUDA_RIG_MAX_SEQ 96u
#define CUDA_RIG_SLOTS 6u
#define CUDA_RIG_RECORDS 16u

typedef struct cuda_rig_output {
  uint32_t opened;
  uint32_t waits; /* how often it was told that it has to wait */
  uint32_t ended; /* clb_event_kind of the last event, 0 while it runs */
  uint32_t flags;
  int32_t status;
  uint32_t count;
  int32_t tokens[CUDA_RIG_MAX_SEQ];
} cuda_rig_output;

typedef struct cuda_rig {
  clb_engine_config config;
  clb_model_desc model;
  clb_layer_desc layers[CUDA_RIG_LAYERS];
  float inv_freq[16];
  clb_device_desc device;
  clb_channel_layout layout;
  clb_engine* engine;
  clb_error error;
  uint64_t generation[CUDA_RIG_SLOTS];
  uint64_t read[CUDA_RIG_SLOTS]; /* records that were marked as read */
  cuda_rig_output outputs[CUDA_RIG_SLOTS];
  uint32_t hold_records; /* 1: records are popped but never marked as read */
} cuda_rig;

int32_t cuda_rig_next(int32_t token, uint32_t position);
int32_t cuda_rig_prompt(uint32_t slot, uint32_t index);

/* Configuration only; tests may bend it, and its device, before cuda_rig_open. fail_at: as in fake_cuda.h. */
void cuda_rig_init(cuda_rig* r, uint32_t fail_at);
/* Takes what the plan says and opens. After a failure everything is given back. */
int32_t cuda_rig_open(cuda_rig* r);
void cuda_rig_close(cuda_rig* r);
/* Calls of the driver so far, and handles that are not destroyed. */
uint32_t cuda_rig_calls(void);
int32_t cuda_rig_live(void);
/* 1: launched steps wait until the engine asks whether they are done. */
void cuda_rig_lag(uint32_t lag);

clb_request cuda_rig_request(uint32_t prompt_tokens, uint32_t max_tokens);
/* Writes the request block, OPEN and PREFILL. */
void cuda_rig_start(cuda_rig* r, uint32_t slot, const clb_request* request);
void cuda_rig_push(cuda_rig* r, uint32_t kind, uint32_t slot, uint32_t start, uint32_t count);
void* cuda_rig_block(cuda_rig* r, uint32_t slot, uint64_t offset);
/* One turn; takes the events. The engine's status. */
int32_t cuda_rig_turn(cuda_rig* r);
/* Turns until nothing is open; 1 iff nothing is after `turns` of them. */
int cuda_rig_drain(cuda_rig* r, uint32_t turns);

#endif /* CLB_CUDA_RIG_H */
