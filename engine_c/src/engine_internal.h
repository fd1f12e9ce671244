/*
 * engine_internal.h: the engine and its slots, shared by engine.c, engine_plan.c, loop.c, commands.c, output.c
 * and step.c, and by nobody else.
 *
 * Ownership: clb_engine owns three tier mappings, the pools over them, and one host block that holds the engine
 * itself and every table. After clb_engine_open nothing is allocated.
 *
 *   host block  | clb_engine | pool nodes | layer table | rope | loader's table | kernel map | swap |
 *   temp tier   | step buffers | expert dispatch buffers | slot memory | stacks of the threads |
 *
 * A slot:   FREE --OPEN, request valid--> WAITING --its runs fit--> PROMPT --prompt computed--> DECODE
 *           any of them --finish, failure or CLOSE--> FREE
 * Open slots are kept in `order`, oldest first; memory and prefill are given in that order.
 */
#ifndef CLB_ENGINE_INTERNAL_H
#define CLB_ENGINE_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../cpu/ops.h"
#include "../include/colibri.h"
#include "cache_pool.h"
#include "channel.h"
#include "cuda_plan.h"
#include "kernel_dispatch.h"
#include "loader.h"
#include "loader_internal.h" /* clb_fail */
#include "memory_map.h"
#include "memory_pool.h"
#include "step.h"
#include "swap.h"
#include "threads.h"

enum {
  CLB_SLOT_FREE = 0,
  CLB_SLOT_WAITING = 1, /* for KV memory */
  CLB_SLOT_PROMPT = 2,  /* prompt tokens are left to compute */
  CLB_SLOT_DECODE = 3
}; /* clb_slot_state */

#define CLB_NO_POSITION UINT32_MAX
#define CLB_FIXED_NODES 16u /* pool nodes of a tier whose blocks stay from open to close */

enum { CLB_BUILT_NOTHING = 0, CLB_BUILT_POOL = 1, CLB_BUILT_CACHE = 2 }; /* clb_built */

typedef struct clb_slot {
  clb_request request;       /* private, checked copy */
  uint32_t state;            /* clb_slot_state */
  uint32_t computed;         /* prompt positions whose KV is there, prefix included */
  uint32_t asked;            /* prompt positions that PREFILL commands asked for */
  uint32_t generated;        /* tokens sampled */
  uint32_t launched;         /* the same with those of steps in flight, on a device */
  int32_t last_token;        /* input of the next decode step */
  uint32_t needs_counts;     /* 1: penalties are on */
  uint32_t told_to_wait;     /* 1: the daemon knows that the runs do not fit now */
  uint32_t mask_position[2]; /* output position whose mask lies in each half of request_mask, or NO_POSITION */
  uint64_t assignments;
  uint64_t trimmed;
  uint64_t dropped;
  int32_t* prompt;           /* (max_seq_len) */
  uint32_t* counts;          /* (vocab) see sampler.h */
  clb_bias* bias;            /* (CLB_MAX_BIAS) */
  int32_t* stops;            /* (CLB_MAX_STOP_IDS) */
  clb_expert_policy* policy; /* (layers) */
} clb_slot;

/* The parts of the host block that open hands on; sizes as in engine_plan.c. */
typedef struct clb_host_parts {
  clb_pool_node* nodes[CLB_TIER_COUNT];
  clb_layer_desc* layer_table;
  float* rope;
  void* loader;
  void* backend;      /* backend_bytes */
  uint64_t* swap_own; /* clb_swap.own_bytes; without swap slots these two have no bytes */
  unsigned char* swap_piece;
} clb_host_parts;

/* Every size that open takes; computed by clb_sizes_compute, which reads no file. */
typedef struct clb_sizes {
  clb_channel_layout channel;
  clb_loader_sizes loader;
  clb_cache_config cache_config;
  clb_cache_plan_result cache;
  clb_dispatch_layout dispatch;
  uint64_t step_bytes;  /* step buffers */
  uint64_t slot_bytes;  /* slot memory, all slots */
  uint64_t stack_bytes; /* of the worker threads; 0 when there are none */
  uint64_t reads_codes; /* 1: there are weights whose kernels want codes */
  uint64_t swap_bytes;  /* swap slots: part of the weights tier on the CPU, beside it on CUDA */
  uint64_t swap_block;  /* bytes of one of them */
  uint64_t swap_own;    /* bytes in the host block of clb_swap.own_bytes, and of clb_swap.piece unless that is pinned */
  uint64_t swap_piece;
  uint64_t weights_tier; /* bytes of each tier, a multiple of its page */
  uint64_t kv_tier;
  uint64_t temp_tier;
  uint64_t host_bytes;
  uint64_t backend_bytes; /* part of it: the kernel map of the CPU, or clb_cuda and its rows */
  clb_cuda_layout cuda;   /* all zero on the CPU */
  uint32_t step_tokens;   /* T: most rows of one step */
  uint32_t k_max;         /* most experts of one token in any layer; 0: no MoE layer */
  uint32_t max_experts;
  uint32_t shared_width; /* largest shared or dense width */
  uint32_t expert_width; /* largest of a routed expert */
  uint32_t reserved;
} clb_sizes;

/* Some bytes of a section of an expert that is being staged, and the address of the section in its block. */
typedef struct clb_swap_part {
  const clb_section_desc* section;
  uint64_t offset; /* in the section */
  const unsigned char* data;
  uint64_t bytes;
  uint64_t address;
} clb_swap_part;

/* What swap.c leaves to a backend. */
typedef struct clb_swap_backend {
  /* In the helper's thread. Is the format one that this engine computes? */
  int32_t (*check)(const clb_engine* engine, const clb_swap_desc* desc, clb_error* error);
  int32_t (*begin)(clb_engine* engine);
  int32_t (*put)(clb_engine* engine, const clb_swap_part* part); /* may be on its way until `wait` returns */
  int32_t (*wait)(clb_engine* engine);
  int32_t (*staged)(clb_engine* engine); /* all bytes are there: the expert in swap.parts becomes what steps read */
  /* Prepares what the switch will put in place: the expert in swap.parts. */
  int32_t (*bind)(clb_engine* engine, uint32_t module, clb_error* error);
  /* In the loop's: steps from now on use that expert. A failure is final. */
  int32_t (*put_in_place)(clb_engine* engine);
  /* No step uses the old expert any more, and the new one has served, or nobody wants to be served. */
  bool (*served)(const clb_engine* engine);
} clb_swap_backend;

extern const clb_swap_backend clb_swap_cuda;

/* What differs between processors. Chosen at open; everything else is the same code. */
typedef struct clb_backend {
  /* Checks the model and fills sizes->loader; before anything else is computed. Fails like clb_engine_plan. */
  int32_t (*plan_weights)(const clb_engine_config* config, clb_sizes* sizes, clb_error* error);
  /* The rest, when everything common is known: tiers and what lies in them, backend_bytes. */
  int32_t (*plan_memory)(const clb_engine_config* config, clb_sizes* sizes, clb_error* error);
  /* Takes memory, loads weights, opens the cache. After a failure, close and give_back undo what was done. */
  int32_t (*open)(clb_engine* engine, const clb_engine_config* config, const clb_host_parts* parts, clb_error* error);
  void (*close)(clb_engine* engine);     /* ends everything that runs; slots and pools are still there */
  void (*give_back)(clb_engine* engine); /* after the pools are closed */
  /* A slot's runs are reserved and its request is checked: copy what it takes from an older run. A failure is final. */
  int32_t (*slot_opened)(clb_engine* engine, uint32_t slot);
  /* The mask for output position `position` lies in the request block. A failure is final. */
  int32_t (*mask_set)(clb_engine* engine, uint32_t slot, uint32_t position);
  /* The steps of one turn; *worked becomes 1 if there was one. A failure is final. */
  int32_t (*steps)(clb_engine* engine, uint32_t* worked);
  /* Counts of experts of all open slots, into their result blocks. A failure is final. */
  int32_t (*count_experts)(clb_engine* engine);
  /* What was made since open by calls that may take memory, beyond the pools. */
  uint64_t (*made_since_open)(const clb_engine* engine);
  const clb_swap_backend* swap;
  bool output_is_prompt; /* K and V of a generated token have the bits that they would have in a prompt */
} clb_backend;

extern const clb_backend clb_backend_cpu;
extern const clb_backend clb_backend_cuda;

static inline const clb_backend* clb_backend_of(const clb_engine_config* config) {
  return config->device == NULL ? &clb_backend_cpu : &clb_backend_cuda;
}

struct clb_cuda;

struct clb_engine {
  const clb_backend* backend;
  struct clb_cuda* cuda;    /* NULL on the CPU */
  clb_engine_config config; /* model, modules and their strings are not valid after open */
  clb_model_desc model;     /* layer_table and rope_inv_freq point to our copies, the other tables are NULL */
  clb_sizes sizes;
  clb_channel channel;
  clb_map maps[CLB_TIER_COUNT];
  clb_pool pool;
  clb_extent weights_extent;
  clb_extent step_extent;
  clb_extent dispatch_extent;
  clb_extent slot_extent;
  clb_extent stack_extent;
  clb_extent swap_extent;
  clb_weight_table* weights; /* where every tensor lies; of a device its addresses */
  clb_cache cache;
  clb_kernels kernels;
  clb_attention_shape attention;
  const clb_ops* ops; /* of this machine */
  clb_step_buffers buffers;
  clb_threads threads;
  clb_swap swap;
  unsigned char* dispatch; /* start of the expert dispatch buffers */
  unsigned char* kv;       /* start of the KV tier */
  clb_slot slots[CLB_MAX_SLOTS];
  uint32_t order[CLB_MAX_SLOTS]; /* open slots, oldest first */
  uint32_t order_count;
  uint32_t events_pushed; /* since the event fd was last written */
  int32_t fault;          /* not OK: an invariant is broken, the loop ends */
  uint32_t built;         /* clb_built: how far open came */
  clb_stats stats;
  uint64_t fixed_blocks; /* blocks of the weights and temp tiers after open */
  uint64_t step_number;
  _Atomic uint32_t mail;
};

/* ------------------------------------------------------- engine_plan.c */

int32_t clb_plan_weights_cpu(const clb_engine_config* config, clb_sizes* sizes, clb_error* error);
int32_t clb_plan_memory_cpu(const clb_engine_config* config, clb_sizes* sizes, clb_error* error);
/* sizes->kv_tier from what is configured, or what all slots need. */
int32_t clb_plan_kv(const clb_engine_config* config, clb_sizes* sizes, clb_error* error);

/* The most experts of this layer that a request may ask for. */
static inline uint32_t clb_most_experts(const clb_engine_config* config, const clb_layer_desc* layer) {
  const uint32_t allowed = config->experts_most < layer->experts ? config->experts_most : layer->experts;
  return allowed > layer->experts_per_token ? allowed : layer->experts_per_token;
}

/* Checks the whole configuration and computes every size. Fails like clb_engine_plan. */
int32_t clb_sizes_compute(const clb_engine_config* config, clb_sizes* sizes, clb_error* error);
/* Lay out a block: with base NULL only the size is meant. Both return the bytes they need. */
uint64_t clb_place_step_buffers(const clb_engine_config* config, const clb_sizes* sizes, unsigned char* base,
                                clb_step_buffers* buffers);
uint64_t clb_place_slots(const clb_engine_config* config, unsigned char* base, clb_slot* slots);

/* ------------------------------------------------------------ engine.c */

/* Blocks in use in the weights and temp tiers. */
uint64_t clb_fixed_blocks(const clb_engine* engine);

/* ---------------------------------------------------------- commands.c */

/* Takes every command that waits, then opens slots whose memory fits, oldest first. */
void clb_apply_commands(clb_engine* engine);

/* -------------------------------------------------------------- loop.c */

/* Rows of the next prefill step, in buffers.rows. Returns how many. */
uint32_t clb_plan_prefill(clb_engine* engine);
/* clb_backend_cpu.steps */
int32_t clb_steps_cpu(clb_engine* engine, uint32_t* worked);

/* ----------------------------------------------------------- pooling.c */

#define CLB_REQ_POOL (CLB_REQ_POOL_MEAN | CLB_REQ_POOL_LAST)

/* Adds what rows [first, end) of the step, all of one slot that pools, say to its result_pooled. CPU only. */
void clb_pool_rows(clb_engine* engine, uint32_t slot, uint32_t first, uint32_t end);
/* The sum in result_pooled is complete: brings it to length 1. NOT_FINITE. */
int32_t clb_pool_finish(clb_engine* engine, uint32_t slot);

/* ------------------------------------------------------------ output.c */

void clb_push_event(clb_engine* engine, const clb_event* event);
/* Gives back everything the slot holds; its state becomes FREE. No event. */
void clb_slot_release(clb_engine* engine, uint32_t slot);
/* Lets others see, in the run that the slot published, what it generated. Before its release. */
void clb_slot_keep_output(clb_engine* engine, uint32_t slot);
/* Releases the slot and tells why. */
void clb_slot_fail(clb_engine* engine, uint32_t slot, int32_t status);
/* After a step of `prompt_rows` rows of prompts, then `decode_rows` of decoding slots: prompt records, tokens, ends. */
void clb_finish_step(clb_engine* engine, uint32_t prompt_rows, uint32_t decode_rows);
/* (token, expert) pairs of the slot's request, beyond those that are known. */
void clb_slot_add_usage(clb_engine* engine, uint32_t slot, uint64_t assignments, uint64_t trimmed, uint64_t dropped);
/* Prompt records of positions that no row of ours computes: 0, and what a prefix run already holds. */
void clb_slot_skip_prompt_records(clb_engine* engine, uint32_t slot);
/* The prompt is computed: publishes its run. Returns 1 iff a first token is wanted; else the slot is released, with
   what it pooled. */
uint32_t clb_slot_finish_prompt(clb_engine* engine, uint32_t slot);
/* `token` of output position `generated` lies in the next record of the slot's ring. flags: CLB_FINISH_*; with one of
   them the slot is released. */
void clb_slot_take_token(clb_engine* engine, uint32_t slot, int32_t token, uint32_t flags);
/* 1 iff output position `slot.generated` may be sampled now: the record ring has room and its mask is there. */
bool clb_slot_may_sample(clb_engine* engine, uint32_t slot);

#endif /* CLB_ENGINE_INTERNAL_H */
