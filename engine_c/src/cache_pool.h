/*
 * cache_pool.h: KV runs and expert dispatch buffers out of the memory pool.
 *
 * A run is one block of the KV tier that holds the K and V of `capacity` token positions in all layers:
 *
 *   run   | layer 0: K | layer 0: V | layer 1: K | layer 1: V | ...
 *   K, V  [kv_head][capacity][head_dim]        element: fp32 or fp16
 *
 *   address of element c of head h, token t:  base + ((h * capacity + t) * head_dim + c) * element_bytes
 *   on the CPU K lies in tiles of 16 tokens:  base + (((h * capacity + t) / 16 * head_dim + c) * 16 + t % 16) * ...
 *
 * So the K of one head is one contiguous stream over tokens, which is what attention reads (a split of the tokens is
 * a contiguous range); an append writes kv_heads short rows, once per token.
 *
 * A slot has an own run and may see a prefix run. Position p of a slot lies
 *   p <  prefix_tokens : in the prefix run at index p
 *   p >= prefix_tokens : in the own run at index p - prefix_tokens
 * and that rule holds for reading and for writing. A slot that publishes has no own run: it writes prompt and output
 * into the shared run, others see the first `tokens` of its positions; what it took from an older prefix run is copied
 * first, so there are never more than two runs to look at.
 *
 * Life of a shared run (ids 1 .. 2 * slots):
 *   free --slot_open with publish_run--> filling (1 ref: the writer)
 *        --publish--> published (+1 ref: the daemon) --slot_open with prefix_run--> +1 ref each
 *        --extend: more of the writer's positions may be seen-->
 *        --release_run: the daemon's ref, slot_close: a slot's ref--> free at 0 refs
 *   The writer's slot_close before publish frees it.
 *
 * Run sizes: capacity = tokens rounded up to n * 2^e, n in 8..16, and to whole tiles, so unused positions are < 12.5 %
 * of the capacity, or less than a tile. The tier's page rounding comes on top of that.
 *
 * Threads: one owner (the engine loop). No call allocates from the host.
 */
#ifndef CLB_CACHE_POOL_H
#define CLB_CACHE_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "../include/colibri.h"
#include "memory_pool.h"

#define CLB_CACHE_TILE 16u /* tokens */
#define CLB_MAX_RUNS (2u * CLB_MAX_SLOTS)
#define CLB_CACHE_MAX_VALUES 1048576u    /* K and V values of one token in one layer */
#define CLB_DISPATCH_MAX_TOKENS 1048576u /* tokens of one step */
#define CLB_DISPATCH_MAX_COLS 65536u     /* hidden, and the rows of one expert */

typedef struct clb_cache_config {
  uint32_t slots;  /* 1 .. CLB_MAX_SLOTS */
  uint32_t layers; /* 1 .. CLB_MAX_LAYERS */
  uint32_t head_dim;
  uint32_t element_bytes; /* 4 (fp32) or 2 (fp16) */
  uint32_t max_seq_len;   /* tokens, 1 .. CLB_MAX_SEQ_LEN */
  uint32_t reserved;
  const clb_layer_desc*
      layer_table; /* (layers); kv_values_per_token is a multiple of 2 * head_dim. Read at open only */
  void* host_base; /* the KV tier's first byte when the CPU may touch it (copy, poison); NULL on a device */
} clb_cache_config;

typedef struct clb_cache_plan_result {
  uint64_t bytes_per_token; /* all layers */
  uint64_t bytes_all;       /* the KV tier for all slots at max_seq_len, and one that publishes; whole pages */
  uint64_t tokens_all;      /* positions of all slots */
  uint32_t nodes;           /* pool nodes that the tier needs */
  uint32_t reserved;
} clb_cache_plan_result;

typedef struct clb_run {
  clb_extent extent; /* "nothing" if capacity is 0 */
  uint32_t capacity; /* tokens */
  uint32_t tokens;   /* shared run: how many of them others may see once it is published */
  uint32_t refs;     /* shared run only */
  uint32_t state;    /* shared run: 0 free, 1 filling, 2 published */
  uint32_t daemon;   /* shared run: 1 while the daemon holds a reference */
  uint32_t stale;    /* shared run: 1 if no slot that opens from now on may see it */
} clb_run;

typedef struct clb_cache_slot {
  clb_run own;
  uint32_t open;
  uint32_t prefix;        /* id of the run that it sees, or 0 */
  uint32_t prefix_tokens; /* positions below this lie in that run */
  uint32_t publishes;     /* 0: nothing; 1: `prefix` is a run that this slot fills; 2: and has published */
  uint32_t copy_from;     /* id of the older prefix run to be copied first, or 0 */
  uint32_t copy_tokens;
} clb_cache_slot;

/* Embedded in its owner; fields are private. */
typedef struct clb_cache {
  clb_pool* pool; /* not owned */
  uint8_t* host_base;
  uint32_t slots;
  uint32_t layers;
  uint32_t head_dim;
  uint32_t element_bytes;
  uint32_t max_seq_len;
  uint32_t reserved;
  uint64_t layer_values[CLB_MAX_LAYERS + 1u]; /* values per token in the layers below; [layers] = all */
  clb_cache_slot slot[CLB_MAX_SLOTS];
  clb_run shared[CLB_MAX_RUNS + 1u]; /* by id; 0 is unused */
} clb_cache;

/* What a slot needs; from the request block, copied and checked by the caller against shared-memory changes. */
typedef struct clb_cache_request {
  uint32_t prompt_tokens; /* >= 1 */
  uint32_t max_tokens;    /* outputs; prompt + max <= max_seq_len */
  uint32_t prefix_run;    /* as in clb_request */
  uint32_t prefix_tokens;
  uint32_t publish_run;
  uint32_t reserved;
} clb_cache_request;

/* A copy of rows, in offsets and bytes of the KV tier: all heads of K and V of all layers. */
typedef struct clb_kv_copy {
  uint64_t from;
  uint64_t to;
  uint64_t from_pitch; /* from one row to the next */
  uint64_t to_pitch;
  uint64_t row_bytes; /* whole tiles */
  uint64_t rows;
} clb_kv_copy;

/* What attention and append get for one (slot, layer): offsets into the KV tier, bytes. */
typedef struct clb_kv_view {
  uint64_t prefix_k; /* 0 if prefix_tokens is 0 */
  uint64_t prefix_v;
  uint64_t own_k; /* 0 if own_capacity is 0 */
  uint64_t own_v;
  uint32_t prefix_tokens;   /* positions below this lie in the prefix run */
  uint32_t prefix_capacity; /* token stride of a head in the prefix run */
  uint32_t own_capacity;    /* the same in the own run */
  uint32_t kv_heads;
} clb_kv_view;

/* Tokens of the smallest run size that holds `tokens`; 0 for 0. Pure, O(1). */
uint32_t clb_cache_capacity(uint32_t tokens);

/* Sizes for a configuration (page_bytes: of the KV tier). Pure. ARGUMENT iff a limit is exceeded. */
int32_t clb_cache_plan(const clb_cache_config* config, uint32_t page_bytes, clb_cache_plan_result* plan);

/* pool must outlive the cache. ARGUMENT as in clb_cache_plan. */
int32_t clb_cache_open(clb_cache* cache, clb_pool* pool, const clb_cache_config* config);

/* Reserve a slot's runs. O(free blocks).
   FULL iff the runs do not fit now but would into an empty tier: wait and try again. FULL while no slot is open means
   that runs held by the daemon are in the way: only RELEASE_RUN can help.
   MEMORY iff they would not fit even then (beside the prefix run that the slot itself holds).
   STATE iff the slot is open already.
   ARGUMENT iff a number is out of range, prefix_run is no published run or has fewer than prefix_tokens tokens,
   prefix_tokens is 0 or >= prompt_tokens with a prefix_run, or publish_run is not free.
   On failure nothing changed. */
int32_t clb_cache_slot_open(clb_cache* cache, uint32_t slot, const clb_cache_request* request);

/* Must be called after slot_open and before the slot's first prefill: copies, in host memory, the positions taken over
   from an older prefix run into the run to be published, and drops the reference to the older one. A no-op for all
   other slots. STATE iff the slot is not open or a copy is needed and there is no host_base (then the device copies
   what clb_cache_copy_pending says, and clb_cache_slot_copied is called). O(bytes). */
int32_t clb_cache_slot_copy(clb_cache* cache, uint32_t slot);
/* Is a copy pending, and which? */
bool clb_cache_copy_pending(const clb_cache* cache, uint32_t slot, clb_kv_copy* copy);
void clb_cache_slot_copied(clb_cache* cache, uint32_t slot);

/* The slot's prompt is complete: its shared run may be used by others and the daemon holds a reference.
   STATE iff the slot is not open, publishes nothing, did so already, or its copy is still pending. */
int32_t clb_cache_publish(clb_cache* cache, uint32_t slot);

/* The slot has computed `tokens` positions, prompt and output; others may see these in the run that it published.
   STATE iff the slot has published nothing. ARGUMENT iff that is more than it reserved, or less than is seen now. */
int32_t clb_cache_extend(clb_cache* cache, uint32_t slot, uint32_t tokens);

/* No slot that opens from now on sees a run that is there now, published or not. Who sees one goes on. */
void clb_cache_forget(clb_cache* cache);

/* May `tokens` positions of this run be seen by a slot that opens now? False for an id out of range. */
bool clb_cache_run_has(const clb_cache* cache, uint32_t run, uint32_t tokens);

/* Give back the slot's own run and its reference. STATE iff not open. With CLB_POISON and host_base, freed bytes
   become 0xFF (NaN in both element types). */
int32_t clb_cache_slot_close(clb_cache* cache, uint32_t slot);

/* The daemon's reference to a published run is dropped. STATE iff it holds none; ARGUMENT iff the id is out of range.
 */
int32_t clb_cache_release_run(clb_cache* cache, uint32_t run);

/* Direct lookup, O(1). The slot must be open and layer < layers (asserted). */
void clb_cache_view(const clb_cache* cache, uint32_t slot, uint32_t layer, clb_kv_view* view);

/* Positions that the slot can hold: prefix_tokens + own capacity (>= prompt + max_tokens). */
uint32_t clb_cache_slot_tokens(const clb_cache* cache, uint32_t slot);

/* Bytes of the KV tier in use. */
uint64_t clb_cache_used(const clb_cache* cache);

/* O(slots + runs + nodes). INTERNAL iff a reference count, a state, or the sum of run bytes against the tier's used
   bytes is wrong, or clb_pool_check fails. */
int32_t clb_cache_check(const clb_cache* cache);

/* STATE iff a slot is open (nothing changed); drops the daemon's references and frees their runs. */
int32_t clb_cache_close(clb_cache* cache);

/* ------------------------------------------------- expert dispatch buffers */

typedef struct clb_dispatch_config {
  uint32_t tokens;  /* most tokens of one step: max(slots, prefill_tokens) */
  uint32_t k_max;   /* most experts of one token, over all layers and policies; 0 = no MoE layer */
  uint32_t experts; /* most experts of a layer */
  uint32_t width;   /* most expert rows of a layer */
  uint32_t hidden;
  uint32_t reserved;
} clb_dispatch_config;

/* Offsets from the block's first byte; every buffer starts on a multiple of 64 bytes. T = tokens, K = k_max. */
typedef struct clb_dispatch_layout {
  uint64_t logits;     /* float (T, experts) */
  uint64_t indices;    /* uint32 (T, K) */
  uint64_t weights;    /* float (T, K) */
  uint64_t kept;       /* uint32 (T) */
  uint64_t trimmed;    /* uint32 (T) */
  uint64_t dropped;    /* uint32 (T) */
  uint64_t status;     /* int32 (T) */
  uint64_t counts;     /* uint32 (experts) */
  uint64_t offsets;    /* uint32 (experts + 1) */
  uint64_t token_list; /* uint32 (T * K) */
  uint64_t place_list; /* uint32 (T * K) */
  uint64_t activation; /* float (T * K, width): expert e uses rows offsets[e] .. offsets[e + 1] */
  uint64_t output;     /* float (T * K, hidden): row = place */
  uint64_t bytes;
} clb_dispatch_layout;

/* Pure. ARGUMENT iff a limit is exceeded. k_max 0: a layout of zero bytes. */
int32_t clb_dispatch_plan(const clb_dispatch_config* config, clb_dispatch_layout* layout);
/* Takes layout->bytes from the temp tier (class DISPATCH). Fails like clb_pool_alloc. Freed by clb_pool_free. */
int32_t clb_dispatch_open(clb_pool* pool, const clb_dispatch_layout* layout, clb_extent* extent);

#endif
