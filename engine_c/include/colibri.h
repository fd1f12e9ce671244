/*
 * colibri.h: the only public header of the colibrid engine.
 *
 * Lifecycle
 * ---------
 *   daemon process                                engine process
 *   clb_channel_plan    -> sizes
 *   clb_channel_init    over a fresh memfd
 *                          --- memfd + 2 eventfds --->
 *                                                 clb_channel_check
 *                                                 clb_engine_open    (all memory is taken here)
 *   fill request block
 *   clb_command_push    ------ command ring ------>
 *                                                 clb_engine_run     (one call; returns on stop or fault)
 *   clb_event_pop       <------ event ring --------
 *   clb_result_advance
 *                                                 clb_engine_post(STOP), clb_engine_close
 *
 * The channel (one shared mapping)
 * --------------------------------
 *   0                                                                               total_bytes
 *   | header | command ring | event ring | request block 0..N-1 | result block 0..N-1 |
 * Every part starts on a multiple of 64 bytes; offsets come from clb_channel_plan, which both
 * processes call with the same configuration, and clb_channel_check compares.
 * Request blocks are written by the daemon only while it owns the slot (before the OPEN command and
 * after the slot was released); result blocks and events are written by the engine only.
 *
 * Threads: each ring has one producer and one consumer. clb_engine_post and clb_engine_stats may be
 * called from any thread while clb_engine_run runs, clb_engine_swap_* from one other thread;
 * everything else from the owner of its object.
 *
 * Lists of constants are enumerations without a type: the fields that hold one have a fixed width, the same in every
 * process and language, and a comment at the field names the list.
 *
 * Errors: functions return a clb_status; 0 is success. A failed call changes nothing unless it says so.
 */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CLB_API __attribute__((visibility("default")))

#define CLB_ABI_VERSION 3u

/* Limits: everything is bounded, in the unit that its name says. */
#define CLB_MAX_SLOTS 64u
#define CLB_MAX_THREADS 256u
#define CLB_MAX_LAYERS 256u
#define CLB_MAX_EXPERTS 512u /* per layer */
#define CLB_MAX_EXPERTS_PER_TOKEN 16u
#define CLB_MAX_SWAP_SLOTS 64u
#define CLB_MAX_TOP_LOGPROBS 20u
#define CLB_MAX_BIAS 1024u   /* logit_bias entries of one request */
#define CLB_MAX_STOP_IDS 64u /* stop token ids of one request, the model's own included */
#define CLB_MAX_VOCAB 1048576u
#define CLB_MAX_SEQ_LEN 1048576u /* tokens */
#define CLB_ERROR_BYTES 512u

enum {
  CLB_OK = 0,
  CLB_ERR_ARGUMENT = 1,    /* a value is outside its limit */
  CLB_ERR_VERSION = 2,     /* abi_version or struct_bytes differ */
  CLB_ERR_MEMORY = 3,      /* the host or a tier has not enough memory */
  CLB_ERR_IO = 4,          /* open or read failed */
  CLB_ERR_FORMAT = 5,      /* the model folder does not fit its own description */
  CLB_ERR_CHECKSUM = 6,    /* crc32c of a file differs from colibri.json */
  CLB_ERR_NOT_FINITE = 7,  /* a weight or a logit is NaN or infinite */
  CLB_ERR_MODULE = 8,      /* no kernel module for a precision and layout, or it does not load */
  CLB_ERR_UNSUPPORTED = 9, /* valid, but this build cannot do it */
  CLB_ERR_FULL = 10,       /* ring or pool is full */
  CLB_ERR_STATE = 11,      /* the call does not fit the state of its object */
  CLB_ERR_NO_TOKEN = 12,   /* bias and masks leave no token to sample */
  CLB_ERR_DEVICE = 13,     /* the accelerator's driver reported an error */
  CLB_ERR_INTERNAL = 14    /* an invariant is broken; the engine must be closed */
}; /* clb_status */

/* Where a failing open says what was wrong: file, section, expected, found. Never a folder's path. */
typedef struct clb_error {
  int32_t status;
  char message[CLB_ERROR_BYTES];
} clb_error;

/* ------------------------------------------------------------------ model */

/* clb_precision. The last three are quantised: a number is (value - zero) * scale, scale and zero those of its group.
   INT8: -127 .. 127, fp16 scales, no zeros. INT4: 0 .. 15, two to a byte, fp16 scales; zeros 0 .. 15, or 8 everywhere.
   FP8: e4m3 (largest 448, no infinities), fp32 scales, no zeros. */
enum { CLB_FP32 = 0, CLB_FP16 = 1, CLB_BF16 = 2, CLB_INT8 = 3, CLB_INT4 = 4, CLB_FP8 = 5 };

/* How the elements of a section lie in a file. In memory every matrix of the CPU is rows16; vectors stay flat.
   flat: row-major; down is transposed: (width, hidden). The form to exchange packs in, repacked while loading.
   rows16: rows are padded with zeros to a multiple of 16; element (r, c) of a (rows, cols) matrix lies at
           ((r / 16) * cols + c) * 16 + r % 16, so 16 rows of one column are one vector:
             tile 0:  (0,0) (1,0) .. (15,0) | (0,1) (1,1) .. (15,1) | ...    tile 1:  (16,0) (17,0) .. | ...
           INT8 and INT4 have four columns side by side, so that 64 bytes are four columns of 16 rows, or eight:
           int8 (r, c) is byte ((r / 16) * (cols4 / 4) + c / 4) * 64 + r % 16 * 4 + c % 4, cols4 = cols padded to 4;
           int4 (r, c) is in byte ((r / 16) * (cols / 8) + c / 8) * 64 + r % 16 * 4 + c % 4, in its low half if c / 4 is
           even. Scales and zeros of groups of one row: number ((r / 16) * groups + c / group_cols) * 16 + r % 16, rows
           padded; scales of blocks of several rows: row-major by block.
   mma:    tiles of 16 x 16 in the order in which a GPU's lanes read them (kernels_cu/abi.h), rows and columns padded
           with zeros to multiples of 16. Matrices of 16-bit weights of packs for CUDA; the router stays flat there.
   Quantised matrices are never flat. */
enum { CLB_LAYOUT_FLAT = 0, CLB_LAYOUT_ROWS16 = 1, CLB_LAYOUT_MMA = 2 }; /* clb_layout */

#define CLB_TILE_ROWS 16u /* rows of one tile of rows16 */

enum { CLB_FFN_DENSE = 0, CLB_FFN_MOE = 1 }; /* clb_ffn_kind */
enum { CLB_KV_FULL = 0 };                    /* clb_kv_kind */
enum {
  CLB_QK_NORM_NONE = 0,
  CLB_QK_NORM_HEAD = 1, /* RMSNorm of each head of q and k, before RoPE */
  CLB_QK_NORM_ROW = 2   /* RMSNorm over all heads of q, and over all of k, before RoPE */
}; /* clb_qk_norm */
enum { CLB_SCORE_SOFTMAX = 0, CLB_SCORE_SIGMOID = 1 }; /* clb_score */

/* One row of the layer table. */
typedef struct clb_layer_desc {
  uint32_t ffn_kind;            /* clb_ffn_kind */
  uint32_t kv_kind;             /* clb_kv_kind */
  uint32_t kv_values_per_token; /* K and V values of one token in this layer: 2 * kv_heads * head_dim */
  uint32_t window;              /* a token sees this many positions, its own the last; 0 = all */
  uint32_t experts;             /* 0 in a dense layer */
  uint32_t experts_per_token;   /* the checkpoint's own k; 0 in a dense layer */
  uint32_t expert_width;        /* rows of gate and up of one expert; 0 in a dense layer */
  uint32_t shared_width;        /* width of the shared expert (MoE) or of the whole FFN (dense); 0 = none */
  uint32_t score;               /* clb_score */
  uint32_t renormalise;         /* 1: kept weights are divided by their sum */
  uint32_t shared_gated;        /* 1: the shared expert is scaled by sigmoid(x . SHARED_GATE) */
  uint32_t qk_norm;             /* clb_qk_norm */
  float routed_scale;           /* factor on the routed weights after renormalisation; 1 = none */
} clb_layer_desc;

/* What a section holds. rows x cols are given as (rows, cols). d = hidden, q = heads * head_dim,
   kv = kv_heads * head_dim, V = vocab, E = experts, w = width. */
enum {
  CLB_ROLE_EMBEDDING = 0,   /* (V, d) */
  CLB_ROLE_HEAD = 1,        /* (V, d); absent when the head is tied to the embedding */
  CLB_ROLE_FINAL_NORM = 2,  /* (1, d) fp32 */
  CLB_ROLE_ATTN_NORM = 3,   /* (1, d) fp32 */
  CLB_ROLE_QKV = 4,         /* (q + 2 kv, d): rows of q, then k, then v */
  CLB_ROLE_QKV_BIAS = 5,    /* (1, q + 2 kv) fp32; absent = no bias */
  CLB_ROLE_OUT = 6,         /* (d, q) */
  CLB_ROLE_FFN_NORM = 7,    /* (1, d) fp32 */
  CLB_ROLE_ROUTER = 8,      /* (E, d) fp32 */
  CLB_ROLE_SHARED_GATE = 9, /* (1, d) fp32 */
  CLB_ROLE_OUT_BIAS = 10,   /* (1, d) fp32; absent = no bias */
  CLB_ROLE_Q_NORM = 11,     /* fp32; clb_qk_norm HEAD: (1, head_dim), ROW: (1, q) */
  CLB_ROLE_K_NORM = 12,     /* fp32; clb_qk_norm HEAD: (1, head_dim), ROW: (1, kv) */
  CLB_ROLE_GATE = 13,       /* (w, d); expert >= 0: routed expert; expert == -1: shared expert or dense FFN */
  CLB_ROLE_UP = 14,         /* (w, d) */
  CLB_ROLE_DOWN = 15        /* (d, w); flat: transposed, (w, d) */
}; /* clb_role */

/* A quantised section is values, then scales, then zeros if there are any, each at a multiple of 256 bytes. */
typedef struct clb_section_desc {
  uint32_t role;   /* clb_role */
  int32_t layer;   /* -1 for EMBEDDING, HEAD, FINAL_NORM */
  int32_t expert;  /* -1 unless a routed expert */
  uint32_t file;   /* index into the file table */
  uint64_t offset; /* bytes from the start of the file; a multiple of the element size */
  uint64_t bytes;
  uint32_t precision; /* clb_precision */
  uint32_t layout;    /* clb_layout */
  uint32_t rows;
  uint32_t cols;
  uint32_t group_rows;    /* rows and columns of a group; 0 unless quantised; a scale per row: 1 and cols */
  uint32_t group_cols;    /* INT4: divides cols; the last group of the others may be short */
  uint64_t scales_offset; /* bytes from the start of the file; 0 unless quantised */
  uint64_t zeros_offset;  /* the same; 0 = none */
} clb_section_desc;

/* One file of the model folder, opened with openat(dir_fd, name). Two sections, of any layers, may
   name the same file: it is read once and takes memory once. */
typedef struct clb_file_desc {
  const char* name;       /* no '/'; owned by the caller until open returns */
  uint64_t bytes;         /* must equal the file's size */
  const uint32_t* crc32c; /* one per started MiB; may be NULL when crc_count is 0 (not checked) */
  uint32_t crc_count;
  uint32_t alignment; /* of the file's first byte in memory: 4096 or 2097152 */
} clb_file_desc;

typedef struct clb_model_desc {
  uint32_t abi_version;
  uint32_t struct_bytes;
  uint32_t vocab_size;
  uint32_t layers;
  uint32_t hidden;
  uint32_t heads;
  uint32_t kv_heads;
  uint32_t head_dim;      /* even, at most 256 */
  uint32_t max_positions; /* the checkpoint's own context in tokens */
  uint32_t tied_head;
  float rms_norm_eps;
  float attention_scale; /* usually 1 / sqrt(head_dim) */
  float rope_scale;      /* factor on cos and sin (yarn); 1 = none */
  uint32_t section_count;
  uint32_t file_count;
  uint32_t reserved;
  const float* rope_inv_freq;            /* (head_dim / 2) radians per position */
  const clb_layer_desc* layer_table;     /* (layers) */
  const clb_section_desc* section_table; /* (section_count) */
  const clb_file_desc* file_table;       /* (file_count) */
} clb_model_desc;

/* ---------------------------------------------------------------- channel */

typedef struct clb_channel_config {
  uint32_t abi_version;
  uint32_t struct_bytes;
  uint32_t slots; /* 1 .. CLB_MAX_SLOTS */
  uint32_t layers;
  uint32_t vocab_size;
  uint32_t hidden;
  uint32_t max_experts;    /* the most experts of any layer */
  uint32_t max_seq_len;    /* prompt + output of one slot, tokens */
  uint32_t result_records; /* records in one slot's ring; a power of two */
  uint32_t reserved;
} clb_channel_config;

/* Byte offsets: of parts from the start of the channel, of members from the start of their block. */
typedef struct clb_channel_layout {
  uint64_t total_bytes;
  uint64_t command_ring;
  uint64_t event_ring;
  uint64_t requests;
  uint64_t request_stride;
  uint64_t results;
  uint64_t result_stride;
  uint64_t request_tokens;   /* int32_t[max_seq_len]: the prompt */
  uint64_t request_bias;     /* clb_bias[CLB_MAX_BIAS] */
  uint64_t request_stops;    /* int32_t[CLB_MAX_STOP_IDS] */
  uint64_t request_policy;   /* clb_expert_policy[layers] */
  uint64_t request_mask;     /* uint32_t[2][(vocab + 31) / 32]: allowed ids, alternating by output position */
  uint64_t result_records;   /* clb_record[result_records] */
  uint64_t result_prompt;    /* clb_prompt_record[max_seq_len] */
  uint64_t result_pooled;    /* float[hidden]: see CLB_REQ_POOL_MEAN */
  uint64_t result_counts;    /* uint32_t[layers][max_experts]: assignments of this request */
  uint32_t command_capacity; /* commands; a power of two */
  uint32_t event_capacity;   /* events; a power of two, >= slots * (result_records + 4) */
} clb_channel_layout;

enum {
  CLB_PHASE_STARTING = 0,
  CLB_PHASE_LOADING = 1,
  CLB_PHASE_READY = 2,
  CLB_PHASE_STOPPED = 3,
  CLB_PHASE_FAILED = 4
}; /* clb_phase */

/* Counters since open, in the header, written by the engine with relaxed atomic stores. */
typedef struct clb_stats {
  uint64_t progress; /* moves when work finishes (per layer on the CPU), and once a second while idle */
  uint64_t steps_prefill;
  uint64_t steps_decode;
  uint64_t tokens_prefill;         /* prompt tokens computed */
  uint64_t tokens_decode;          /* tokens generated by decode steps */
  uint64_t expert_launches;        /* runs of one routed expert's kernel: once per expert, layer and step */
  uint64_t expert_relaunches;      /* more than one run of an expert in one layer and step: must stay 0 */
  uint64_t expert_assignments;     /* (token, expert) pairs computed */
  uint64_t expert_trimmed;         /* left out by a request's k or threshold against the model's own k */
  uint64_t expert_dropped;         /* left out by max_tokens_per_expert */
  uint64_t allocations_after_open; /* must stay 0 */
  uint64_t slots_open;
  uint64_t kv_bytes; /* size of the KV tier */
  uint64_t kv_bytes_used;
  uint64_t weights_bytes;
  uint64_t temp_bytes;
  uint64_t loaded_bytes; /* weight bytes read so far (percent while loading) */
  uint64_t requests_done;
  uint64_t requests_failed;
  uint64_t weights_generation; /* 0: nothing was replaced; see clb_engine_swap_post */
} clb_stats;

typedef struct clb_channel_header {
  uint32_t magic; /* CLB_CHANNEL_MAGIC */
  uint32_t abi_version;
  uint64_t total_bytes;
  clb_channel_config config;
  uint32_t phase; /* clb_phase, written by the engine */
  uint32_t reserved;
  clb_stats stats;
} clb_channel_header;

#define CLB_CHANNEL_MAGIC 0x42494c43u /* "CLIB" */

enum {
  CLB_CMD_OPEN = 1,       /* take the slot's request block, reserve its run; answered by OPENED, WAITING or FAILED */
  CLB_CMD_PREFILL = 2,    /* compute prompt tokens [start, start + count); the engine cuts at chunk borders */
  CLB_CMD_SET = 3,        /* the mask for output position `start` lies in the request block */
  CLB_CMD_CLOSE = 4,      /* stop and release the slot; answered by CLOSED unless it finished before */
  CLB_CMD_RELEASE_RUN = 5 /* the daemon drops its reference to shared run `start`; nothing if it holds none */
}; /* clb_command_kind */

typedef struct clb_command {
  uint32_t kind;
  uint32_t slot;
  uint64_t generation;
  uint32_t start;
  uint32_t count;
} clb_command;

enum {
  CLB_EVENT_OPENED = 1,   /* the run is reserved; prefill may start */
  CLB_EVENT_TOKEN = 2,    /* record `record` of the slot's ring is written; with a FINISH flag the slot is released */
  CLB_EVENT_FINISHED = 3, /* ended without a token (max_tokens 0); the slot is released */
  CLB_EVENT_CLOSED = 4,   /* answer to CLOSE; the slot is released */
  CLB_EVENT_FAILED = 5,   /* `status` says why; the slot is released */
  CLB_EVENT_WAITING = 6,  /* the run does not fit yet; told once, and again if a RELEASE_RUN did not help */
  CLB_EVENT_SWITCHED = 7  /* an expert was replaced; `record` is the weights' generation since. With slot CLB_NO_SLOT:
                             no shared run from before will be seen by a slot that opens; then for each slot that
                             had computed some: the slot's positions, prompt and output, below `position` are from
                             before */
}; /* clb_event_kind */

#define CLB_NO_SLOT 0xffffffffu

#define CLB_FINISH_STOP 1u   /* a stop id was generated: it is in the record, not part of the text */
#define CLB_FINISH_LENGTH 2u /* max_tokens reached */

typedef struct clb_event {
  uint32_t kind;
  uint32_t slot;
  uint64_t generation;
  uint64_t record;   /* index of the record since the slot's open; its place is record % result_records */
  uint32_t position; /* output position, 0 = first generated token; with SWITCHED see there */
  int32_t token;
  uint32_t flags; /* CLB_FINISH_* */
  int32_t status; /* clb_status, with FAILED */
} clb_event;

typedef struct clb_bias {
  int32_t token;
  float bias;
} clb_bias;

/* What a request may use in one layer. k = 0: the model's own; above it at most clb_engine_config.experts_most.
   threshold: experts whose weight is below threshold * (the token's largest weight) are left out; 0 = off. */
typedef struct clb_expert_policy {
  uint32_t k;
  float threshold;
} clb_expert_policy;

#define CLB_REQ_LOGPROBS 1u        /* fill record.logprob and its top list */
#define CLB_REQ_PROMPT_LOGPROBS 2u /* fill the prompt records */
#define CLB_REQ_MASKED 4u          /* sampling needs a mask for each output position (SET) */
/* At most one of these, and only with max_tokens 0: result_pooled gets the prompt's hidden state after the final norm,
   of length 1 (all zero if it is zero). Complete when FINISHED is seen, until the slot is opened again. */
#define CLB_REQ_POOL_MEAN 8u  /* the mean over all positions, added in rising order; not with a prefix run */
#define CLB_REQ_POOL_LAST 16u /* of the last position */

/* The head of a request block; arrays follow at the offsets of clb_channel_layout. */
typedef struct clb_request {
  uint64_t generation;
  uint64_t seed;
  uint32_t flags;               /* CLB_REQ_* */
  uint32_t choice;              /* choice index; part of the sampling key */
  uint32_t prompt_tokens;       /* 1 .. max_seq_len */
  uint32_t max_tokens;          /* prompt_tokens + max_tokens <= max_seq_len; 0 = only the prompt */
  uint32_t min_tokens;          /* stop ids are not sampled before this many outputs */
  uint32_t top_logprobs;        /* 0 .. CLB_MAX_TOP_LOGPROBS, for generated tokens */
  uint32_t prompt_top_logprobs; /* the same for prompt tokens */
  uint32_t bias_count;
  uint32_t stop_count;
  uint32_t prefix_run;      /* 0 = none; else the id of a published run whose first prefix_tokens are used, if it is
                               still there when the slot opens: cached_tokens tells */
  uint32_t prefix_tokens;   /* < prompt_tokens; prefill then starts there */
  uint32_t publish_run;     /* 0 = none; else an id (1 .. 2 * slots) that no run has: the slot's KV is then shared under
                               it. When the prompt is computed, which the first TOKEN or FINISHED tells, the prompt's
                               positions may be used; when the slot ends well, those of the output too, but for the
                               last token, where a generated token has the bits of one in a prompt (the CPU). The daemon
                               holds the run until RELEASE_RUN; a slot that fails may have shared it or not */
  float temperature;        /* 0 = argmax, ties to the lowest id */
  float top_p;              /* (0, 1] */
  float min_p;              /* [0, 1] */
  uint32_t top_k;           /* 0 = off */
  float presence_penalty;   /* over generated tokens */
  float frequency_penalty;  /* over generated tokens */
  float repetition_penalty; /* over prompt and generated tokens; 1 = off */
  uint32_t reserved;
} clb_request;

/* One generated token. logprob: log-softmax of the model's own logits, before bias, penalties and temperature. */
typedef struct clb_record {
  uint32_t position;
  int32_t token;
  float logprob;
  uint32_t top_count;
  int32_t top_ids[CLB_MAX_TOP_LOGPROBS];
  float top_logprobs[CLB_MAX_TOP_LOGPROBS];
} clb_record;

/* One prompt position p: log-probability of token p given tokens < p, and the likeliest tokens at p.
   Position 0 has logprob NaN and top_count 0. */
typedef struct clb_prompt_record {
  float logprob;
  uint32_t top_count;
  int32_t top_ids[CLB_MAX_TOP_LOGPROBS];
  float top_logprobs[CLB_MAX_TOP_LOGPROBS];
} clb_prompt_record;

/* The head of a result block. */
typedef struct clb_result {
  uint64_t generation;
  uint64_t head; /* records written; atomic, by the engine */
  uint64_t pad0[6];
  uint64_t tail; /* records read; atomic, by the daemon (clb_result_advance) */
  uint64_t pad1[7];
  uint64_t assignments; /* (token, expert) pairs computed for this request, prompt and output */
  uint64_t trimmed;
  uint64_t dropped;
  uint32_t prompt_records;     /* prompt records written so far */
  uint32_t cached_tokens;      /* prompt tokens taken from a prefix run */
  uint64_t weights_generation; /* that the first position was computed with */
} clb_result;

/* Sizes and offsets for a configuration. Pure. ARGUMENT: a limit is exceeded. VERSION: struct mismatch. */
CLB_API int32_t clb_channel_plan(const clb_channel_config* config, clb_channel_layout* layout);
/* Daemon: format fresh zeroed memory of at least layout.total_bytes at a 64-byte boundary. */
CLB_API int32_t clb_channel_init(void* base, uint64_t bytes, const clb_channel_config* config);
/* Engine: verify magic, version, sizes and configuration of memory formatted by the other side. */
CLB_API int32_t clb_channel_check(const void* base, uint64_t bytes, const clb_channel_config* config);
/* Daemon: publish all `count` commands at once, or none. FULL: not enough room. The caller then signals the eventfd. */
CLB_API int32_t clb_command_push(void* base, const clb_command* commands, uint32_t count);
/* Daemon: take up to max events; returns how many. */
CLB_API uint32_t clb_event_pop(void* base, clb_event* events, uint32_t max);
/* Daemon: records below `tail` of this slot have been read. */
CLB_API int32_t clb_result_advance(void* base, uint32_t slot, uint64_t tail);
/* Any process: a consistent-enough copy of the counters and the phase. */
CLB_API uint32_t clb_channel_stats(const void* base, clb_stats* stats);

/* ----------------------------------------------------------------- engine */

enum { CLB_HUGE_OFF = 0, CLB_HUGE_TRY = 1, CLB_HUGE_REQUIRE = 2 }; /* clb_huge_pages */

typedef struct clb_tier_config {
  uint64_t
      bytes; /* 0 = exactly what the model (weights), one worst step (temp) or all slots at full length (kv) need */
  uint32_t page_bytes; /* a power of two, 4096 .. 1 GiB: unit of allocation in this tier */
  uint32_t huge_pages; /* clb_huge_pages */
} clb_tier_config;

/* A kernel module that may be loaded: the caller has checked its hash and the path names those very bytes. */
typedef struct clb_module_ref {
  const char* name; /* for messages */
  const char* path; /* for dlopen */
  uint32_t by_name; /* 1: computes nothing but experts for which it is named (clb_swap_desc.module) */
  uint32_t reserved;
} clb_module_ref;

/* A kernel of a loaded cubin. parameter_bytes: the driver's word on the size of its one argument struct. */
typedef struct clb_device_kernel {
  const char* name; /* "clb_router_fp32" */
  void* function;
  uint64_t parameter_bytes;
} clb_device_kernel;

/* An accelerator that the worker set up (colibrid/engine/device_cuda.py): everything that C needs to drive it.
   Owned by the caller, with all that it points to, until the engine is closed. C makes every later driver call. */
typedef struct clb_device_desc {
  uint32_t abi_version;
  uint32_t struct_bytes;
  uint32_t kernels_abi; /* CLB_KERNELS_ABI of the cubins' manifest; must equal clb_kernels_abi() */
  uint32_t kernel_count;
  const clb_device_kernel* kernels; /* (kernel_count) */
  const void* entries;              /* clb_cuda_entries of src/driver.h */
  void* stream;
  void* copy_stream; /* another one: weights are on their way in it while `stream` is captured */
  void* pinned;      /* page-locked host memory, zeroed: staging and the device's mailbox */
  uint64_t pinned_bytes;
  uint64_t pinned_device; /* its address as the device sees it */
  uint64_t arena;         /* device memory: the one allocation */
  uint64_t arena_bytes;
  uint64_t channel_device; /* the channel's mapping as the device sees it: results are written in place */
  uint32_t multiprocessors;
  uint32_t capability; /* compute capability, 90 for 9.0 */
} clb_device_desc;

enum { CLB_WEIGHTS_FILES = 0, CLB_WEIGHTS_DUMMY = 1 }; /* clb_weights */

typedef struct clb_weight_format {
  uint32_t precision;  /* clb_precision */
  uint32_t group_rows; /* 0 where not quantised */
  uint32_t group_cols; /* 0: a whole row */
  uint32_t zeros;      /* 1: a zero point beside each scale */
} clb_weight_format;

typedef struct clb_engine_config {
  uint32_t abi_version;
  uint32_t struct_bytes;
  clb_channel_config channel;
  uint32_t prefill_chunk;         /* a slot's prefill is cut at multiples of this many tokens */
  uint32_t prefill_tokens;        /* most prompt tokens of one prefill step, over all slots; >= prefill_chunk */
  uint32_t kv_precision;          /* CLB_FP32 or CLB_FP16 */
  uint32_t max_tokens_per_expert; /* 0 = none */
  uint32_t threads;               /* that compute, the caller's own included: 1 .. CLB_MAX_THREADS */
  uint32_t weights;               /* clb_weights */
  uint64_t dummy_seed;
  uint32_t swap_slots;   /* blocks of the largest expert for experts that replace others: 0 .. CLB_MAX_SWAP_SLOTS */
  uint32_t experts_most; /* experts a token that a request may ask for beyond the model's own; 0 = none */
  clb_tier_config tier_weights;
  clb_tier_config tier_kv;
  clb_tier_config tier_temp;
  int32_t dir_fd;     /* the model folder; -1 with dummy weights */
  int32_t command_fd; /* eventfd, readable when commands were pushed; -1: clb_engine_turn only */
  int32_t event_fd;   /* eventfd, written once a step that pushed events; -1: none */
  uint32_t module_count;
  const clb_module_ref* modules;
  const clb_model_desc* model;
  void* channel_base;
  uint64_t channel_bytes;
  const clb_device_desc* device; /* NULL: the CPU; for clb_engine_plan, its members may be unset */
  const uint32_t* cpus;          /* (threads): the CPU of each, the caller's own first; NULL: the system decides */
  const clb_weight_format* swap_formats; /* that swaps may bring to a device beside the model's own; on the CPU any */
  uint64_t swap_format_count;
} clb_engine_config;

/* The memory bill, bytes. total = weights + swap + kv + temp + graphs + host. On a device weights, swap, kv and temp
   lie in its arena, graphs beside it, and host holds the page-locked memory. */
typedef struct clb_memory_plan {
  uint64_t weights;
  uint64_t kv;
  uint64_t kv_bytes_per_token;
  uint64_t kv_tokens; /* tokens that the KV tier holds */
  uint64_t temp;
  uint64_t dispatch; /* part of temp: what experts read and write, partial results of (token, rank) included */
  uint64_t host;     /* engine structures */
  uint64_t total;
  uint64_t arena;  /* device memory to give to open; 0 on the CPU */
  uint64_t pinned; /* part of host: page-locked memory to give to open */
  uint64_t swap;   /* swap_slots blocks of the largest expert */
  uint64_t graphs; /* device memory that the driver takes for the steps' graphs, at most; 0 on the CPU */
} clb_memory_plan;

typedef struct clb_engine clb_engine;

enum { CLB_MAIL_STOP = 1, CLB_MAIL_CHECK = 2 }; /* clb_mail */

CLB_API uint32_t clb_abi_version(void);
CLB_API const char* clb_status_name(int32_t status);
/* What clb_engine_open would take. Pure; reads no file; channel_base, fds and modules may be unset. */
CLB_API int32_t clb_engine_plan(const clb_engine_config* config, clb_memory_plan* plan, clb_error* error);
/* Takes all memory, loads and checks the weights, resolves every kernel. On failure nothing is held.
   channel_base stays owned by the caller and must outlive the engine; strings and tables need not. */
CLB_API int32_t clb_engine_open(const clb_engine_config* config, clb_engine** engine, clb_error* error);
/* Serve until MAIL_STOP (returns OK) or a broken invariant (INTERNAL). Allocates nothing. */
CLB_API int32_t clb_engine_run(clb_engine* engine);
/* One turn of the loop without waiting: commands, at most one prefill and one decode step.
 *worked = 1 if a step ran. For tests and single-process tools; not while clb_engine_run runs. */
CLB_API int32_t clb_engine_turn(clb_engine* engine, uint32_t* worked);
CLB_API int32_t clb_engine_post(clb_engine* engine, uint32_t mail);
CLB_API int32_t clb_engine_stats(const clb_engine* engine, clb_stats* stats);
/* Brings the counts of experts in the result blocks of open slots up to date with all steps so far, and waits for
   these. On a device they are there only when a request has ended otherwise. For tools; not while clb_engine_run runs.
   DEVICE. */
CLB_API int32_t clb_engine_count_experts(clb_engine* engine);
/* Conservation of pools, runs and slots. INTERNAL with a message iff one is broken. */
CLB_API int32_t clb_engine_check(const clb_engine* engine, clb_error* error);
/* After every clb_engine_swap_* has returned. */
CLB_API void clb_engine_close(clb_engine* engine);

/* An expert that shall replace another, or the kernel that shall compute it from now on. */
typedef struct clb_swap_desc {
  uint32_t abi_version;
  uint32_t struct_bytes;
  uint32_t layer;
  uint32_t expert;
  int32_t fd;      /* the expert's file, read from its start by position; -1: only the kernel changes */
  uint32_t module; /* 1 + index of the kernel module (clb_engine_config.modules); 0: the best that fits. CPU only */
  const clb_file_desc* file;        /* its checksums must be there */
  const clb_section_desc* sections; /* (3): gate, up, down of this layer and expert; `file` is 0 */
} clb_swap_desc;

typedef struct clb_swap_report {
  uint64_t weights_generation; /* that it began */
  uint32_t streams;            /* slots that had computed positions before it and went on */
  uint32_t free_blocks;        /* swap slots that are free now */
} clb_swap_report;

/* Reads the file into a free swap slot and checks it. Serving goes on meanwhile, by this and the next calls. The caller
   gives all of `desc` for as long as the call lasts. After a failure nothing has changed: ARGUMENT (no such expert),
   FORMAT, CHECKSUM, NOT_FINITE, IO, UNSUPPORTED (a format that this engine does not compute), MODULE, FULL (no free
   slot is large enough), STATE (another swap is under way), DEVICE. */
CLB_API int32_t clb_engine_swap_stage(clb_engine* engine, const clb_swap_desc* desc, clb_error* error);
/* Asks the loop to switch between two steps to what is staged; that begins the weights' generation of this number,
   larger than all before. STATE: nothing is staged. */
CLB_API int32_t clb_engine_swap_post(clb_engine* engine, uint64_t weights_generation);
/* Waits until it has, and no step needs the old expert, whose memory is then a free swap slot. STATE with nothing
   changed and nothing staged iff no step boundary came within timeout_ms, or the engine ended before one; or if nothing
   was posted. */
CLB_API int32_t clb_engine_swap_wait(clb_engine* engine, uint32_t timeout_ms, clb_swap_report* report,
                                     clb_error* error);
/* Forgets what is staged and not posted; else nothing. */
CLB_API void clb_engine_swap_cancel(clb_engine* engine);
/* Kernel ABI (kernels_cu/abi.h) that this library was compiled with. */
CLB_API uint32_t clb_kernels_abi(void);
/* CRC-32C (Castagnoli); start with crc 0. */
CLB_API uint32_t clb_crc32c(uint32_t crc, const void* data, size_t bytes);

/* ---------------------------------------------------------- kernel modules */

/*
 * Matrices are rows16. Row ranges begin at a multiple of CLB_TILE_ROWS, and end at one or at the last row; work may be
 * cut at these borders among threads. Ranges of several tiles stream several parts of memory at once, so 128 rows (of
 * gate_up: 64) or a multiple are best.
 * The order of additions of one output depends on nothing but cols: columns in rising order in blocks of 256, whose
 * sums are added in rising order. So its bits are the same for any tokens, lists and row range.
 * Index lists: inputs[i] is the row of `input` that token i reads, outputs[i] the row of `output` that it writes;
 * NULL: row i.
 * Modules of INT8 and INT4 read `codes` instead of `input` (clb_module.reads_codes): the same rows, rounded to 8 bits
 * in blocks of 32, made once for all products of a stage. Integers are summed exactly in each block; code scale times
 * sum is added up by blocks in rising order within a group; these sums times the group's scale, by groups. A group of
 * any format that ends within a block of additions ends that block.
 */

/* A matrix as a kernel reads it. All but values is 0 unless it is quantised. */
typedef struct clb_operand {
  const void* values; /* (rows, cols) in the module's precision */
  const void* scales;
  const void* zeros; /* NULL: none */
  uint32_t group_rows;
  uint32_t group_cols;
} clb_operand;

/*
 * A row of codes, from a multiple of 64 bytes on; blocks = cols / 32, rounded up:
 *   | int8 codes, blocks * 32, zeros behind cols | fp32 scale of each block | int32 sum of the codes of each block |
 * scale = m / 127, m the largest magnitude of the block; code = x * (127 / m) rounded to nearest even, in fp32. Below
 * m = 2^-100 scale and codes are 0; with a NaN or an infinity among them the scale is NaN and codes are 0.
 */
#define CLB_CODE_BLOCK 32u

static inline uint64_t clb_code_blocks(uint32_t cols) {
  return ((uint64_t)cols + CLB_CODE_BLOCK - 1u) / CLB_CODE_BLOCK;
}
static inline uint64_t clb_code_row_bytes(uint32_t cols) {
  return (clb_code_blocks(cols) * (CLB_CODE_BLOCK + 8u) + 63u) / 64u * 64u;
}

/* output[outputs[i]][r] = sum_c weights[r][c] * input[inputs[i]][c] (+ bias[r]), r in [row_begin, row_end). */
typedef struct clb_linear_args {
  clb_operand weights;        /* (rows, cols) */
  const float* bias;          /* (rows) or NULL */
  const float* input;         /* (.., cols) */
  const unsigned char* codes; /* (.., clb_code_row_bytes(cols)): of input's rows; NULL unless the module reads them */
  float* output;              /* (.., rows) */
  const uint32_t* inputs;     /* (tokens) or NULL */
  const uint32_t* outputs;    /* (tokens) or NULL */
  uint64_t input_stride;      /* floats between rows */
  uint64_t output_stride;
  uint32_t tokens;
  uint32_t cols;
  uint32_t row_begin;
  uint32_t row_end;
} clb_linear_args;

/* output[i][r] = silu(gate[r] . x) * (up[r] . x), x = input[inputs[i]], r in [row_begin, row_end). */
typedef struct clb_gated_linear_args {
  clb_operand gate;           /* (rows, cols) */
  clb_operand up;             /* (rows, cols) */
  const float* input;         /* (.., cols) */
  const unsigned char* codes; /* as above */
  float* output;              /* (tokens, rows) */
  const uint32_t* inputs;     /* (tokens) or NULL */
  uint64_t input_stride;      /* floats between rows */
  uint64_t output_stride;
  uint32_t tokens;
  uint32_t cols;
  uint32_t row_begin;
  uint32_t row_end;
} clb_gated_linear_args;

typedef struct clb_module {
  uint32_t abi_version;
  uint32_t struct_bytes;
  const char* name;           /* "generic-bf16" */
  uint32_t precision;         /* clb_precision */
  uint32_t layout;            /* clb_layout: rows16 */
  uint32_t rank;              /* of several that fit, the highest supported one is taken; generic = 0 */
  uint32_t reads_codes;       /* 1: linear and gate_up read `codes` (INT8 and INT4 only), else `input` */
  int32_t (*supported)(void); /* 1 if this machine can run it */
  void (*linear)(const clb_linear_args* args);
  void (*gate_up)(const clb_gated_linear_args* args);
  /* output[c] = weights[row][c], widened to fp32 */
  void (*row)(const clb_operand* weights, uint32_t row, uint32_t cols, float* output);
} clb_module;

/* The one symbol that a module exports: const clb_module* clb_module_entry(void). */
typedef const clb_module* (*clb_module_entry_fn)(void);
#define CLB_MODULE_ENTRY "clb_module_entry"

#ifdef __cplusplus
}
#endif
#endif /* COLIBRI_H */
