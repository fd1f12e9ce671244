/*
 * cuda_plan.h: where everything lies in the device's arena and in page-locked memory, computed before anything loads.
 *
 *   arena    | weights | expert tables | swap slots | KV tier | state of the slots | rows | buffers of a step |
 *   pinned   | mailbox | slots as the device has them | stages of steps | prompt items | usage | slot memory | load |
 *
 * Letters as in kernels_cu/abi.h and docs/decisions/0004-cuda-engine.md, which draws the parts. Offsets are in bytes
 * and multiples of 256. Pure: a function of the configuration.
 */
#ifndef CLB_CUDA_PLAN_H
#define CLB_CUDA_PLAN_H

#include <stdint.h>

#include "../../kernels_cu/abi.h"
#include "../include/colibri.h"

#define CLB_CUDA_DECODE_BUCKETS 9u   /* rows 1, 2, 4, 8, 16, 24, 32, 48, 64 */
#define CLB_CUDA_PREFILL_BUCKETS 12u /* rows 64, 128, 256, ... and prefill_tokens */
#define CLB_CUDA_STAGES CLB_MAILBOX_STEPS
#define CLB_CUDA_LOAD_BUFFERS 2u /* of each reader */
#define CLB_CUDA_READERS 8u      /* threads that read files, at most */
#define CLB_CUDA_USAGE 3u        /* assignments, trimmed and dropped, as they lie in clb_device_slot */
/* Nodes of a step's graph at most, and what the driver keeps of each on the device: 2.4 KB were measured on an H200. */
#define CLB_CUDA_LAYER_NODES 24u
#define CLB_CUDA_STEP_NODES 8u
#define CLB_CUDA_NODE_BYTES 4096u

/* What changes from step to step and is copied in before it; a decode step copies `list` alone, a prefill step the
   rest in one piece. The rows themselves (row_count of clb_row) lie behind it. */
typedef struct clb_cuda_rows {
  uint32_t row_count;
  uint32_t wanted_count;
  uint32_t wanted[CLB_FEW_ROWS];
  uint32_t reserved[2];
} clb_cuda_rows;

static inline clb_row* clb_cuda_rows_behind(clb_cuda_rows* head) { return (clb_row*)(void*)(head + 1); }

typedef struct clb_cuda_layout {
  /* arena */
  uint64_t weights;
  uint64_t expert_tables; /* clb_expert_weights (sum over layers of experts + 1): the shared expert last */
  uint64_t swap;          /* blocks for experts that replace others */
  uint64_t kv;
  uint64_t list;          /* clb_slot_list */
  uint64_t slots;         /* clb_device_slot (N) */
  uint64_t policies;      /* clb_router_policy (N, L) */
  uint64_t stops;         /* int32_t (N, CLB_MAX_STOP_IDS) */
  uint64_t bias;          /* clb_token_bias (N, CLB_MAX_BIAS) */
  uint64_t masks;         /* uint32_t (N, 2, V / 32 rounded up) */
  uint64_t token_counts;  /* uint32_t (N, V) */
  uint64_t expert_counts; /* uint32_t (N, L, E of the channel) */
  uint64_t inv_freq;      /* float (head_dim / 2) */
  uint64_t step;          /* uint64_t */
  uint64_t rows;          /* clb_cuda_rows with R rows */
  uint64_t events;        /* clb_device_event (64) */
  uint64_t prompt_items;  /* clb_prompt_logprob_item (64) */
  uint64_t prompt_status; /* int32_t (64) */
  uint64_t pool_items;    /* clb_pool_item (N) */
  uint64_t pool_sums;     /* float (N, d) */
  uint64_t residual;
  uint64_t input[2]; /* attention's, the FFN's */
  uint64_t sumsq[2];
  uint64_t rope;
  uint64_t qkv;
  uint64_t attended;
  uint64_t q_scale; /* of prompts whose queries are normed by the row */
  uint64_t partial; /* of attention */
  uint64_t partial_state;
  uint64_t attend_tickets;
  uint64_t router_logits;
  uint64_t route_tickets;
  uint64_t shared_scale;
  uint64_t indices;
  uint64_t expert_weights;
  uint64_t kept;
  uint64_t block_counts;
  uint64_t bucket_counts;
  uint64_t bucket_offsets;
  uint64_t bucket_tokens;
  uint64_t bucket_places;
  uint64_t activation;
  uint64_t shared_activation;
  uint64_t expert_partial;
  uint64_t shared_partial;
  uint64_t down_partial; /* of the few-row kernels */
  uint64_t down_tickets;
  uint64_t logits;
  uint64_t candidates;
  uint64_t scratch;
  uint64_t scratch_stride;
  uint64_t arena_bytes;

  /* page-locked memory */
  uint64_t mailbox;
  uint64_t host_slots;  /* clb_device_slot (N) */
  uint64_t host_lists;  /* clb_slot_list (CLB_CUDA_STAGES), each stage_list_bytes */
  uint64_t host_rows;   /* clb_cuda_rows (CLB_CUDA_STAGES), each stage_rows_bytes */
  uint64_t host_items;  /* clb_prompt_logprob_item (R) */
  uint64_t host_groups; /* clb_cuda_rows without rows (R / 64), each stage_list_bytes: wanted rows of prompt items */
  uint64_t host_status; /* int32_t (R) */
  uint64_t host_usage;  /* uint64_t (N, 3): assignments, trimmed, dropped of prompts that generate nothing */
  uint64_t host_pool;   /* clb_pool_item (CLB_CUDA_STAGES, N), each stage_pool_bytes */
  uint64_t slot_memory; /* clb_place_slots */
  uint64_t load;        /* CLB_CUDA_LOAD_BUFFERS pieces for each reader; expert tables and inv_freq while loading */
  uint64_t pinned_bytes;

  uint64_t stage_list_bytes;
  uint64_t stage_rows_bytes;
  uint64_t stage_pool_bytes;
  uint64_t step_bytes;     /* of the arena: all but weights, tables, swap slots and KV */
  uint64_t dispatch_bytes; /* part of it: activations and partial results of experts */
  uint64_t graph_bytes;    /* beside the arena */
  uint64_t table_bytes;
  uint32_t max_rows; /* R */
  uint32_t reserved;
} clb_cuda_layout;

/* What the plan needs to know of the model beyond its description; from clb_sizes. */
typedef struct clb_cuda_extents {
  uint64_t weights_bytes;
  uint64_t swap_bytes;
  uint64_t kv_bytes; /* whole pages */
  uint64_t slot_memory_bytes;
  uint32_t k_max;
  uint32_t max_experts;
  uint32_t expert_width; /* largest */
  uint32_t shared_width; /* largest shared or dense */
} clb_cuda_extents;

/* Can the CUDA kernels compute this model? UNSUPPORTED, saying what stands in the way. For a checked model. */
int32_t clb_cuda_model_check(const clb_engine_config* config, clb_error* error);

void clb_cuda_plan(const clb_engine_config* config, const clb_cuda_extents* extents, clb_cuda_layout* layout);

static inline uint32_t clb_cuda_reader_count(const clb_engine_config* config) {
  return config->threads < CLB_CUDA_READERS ? config->threads : CLB_CUDA_READERS;
}

/* The most nodes that the graph of a step has. */
static inline uint32_t clb_cuda_step_nodes(uint32_t layers) {
  return layers * CLB_CUDA_LAYER_NODES + CLB_CUDA_STEP_NODES;
}

/* Rows of a bucket: decode steps by index below CLB_CUDA_DECODE_BUCKETS; prefill steps of at most `max_rows` rows,
   where the last bucket is max_rows itself. 0: there is no such bucket. */
uint32_t clb_cuda_decode_rows(uint32_t bucket);
uint32_t clb_cuda_prefill_rows(uint32_t bucket, uint32_t max_rows);
/* Most rows that one prefill step has, as a bucket; of decode, the smallest bucket index that holds `rows`. */
uint32_t clb_cuda_decode_bucket(uint32_t rows);
uint32_t clb_cuda_prefill_bucket(uint32_t rows, uint32_t max_rows);

#endif /* CLB_CUDA_PLAN_H */
