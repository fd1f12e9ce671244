/*
 * abi.h: the argument structs of all CUDA kernels, shared by C (which fills them) and CUDA (which reads them
 * as one __grid_constant__ parameter), and the state that lives in device memory between steps.
 *
 * Rules: pointers first, then 64-bit strides, then 32-bit values; no padding; sizes asserted below, checked
 * again against the loaded cubin with cuFuncGetParamInfo. Strides are in elements. C writes device addresses
 * as numbers, so the pointer members are declared through CLB_DEVICE_PTR and have 8 bytes on both sides.
 * Any change of a struct or of a kernel's meaning raises CLB_KERNELS_ABI.
 *
 * Letters: T rows of a step (read from *row_count, at most max_rows), d hidden, q = heads * head_dim,
 * kv = kv_heads * head_dim, E experts of the layer, K = k_max columns of the routing tables, w width of an expert,
 * V vocabulary, H rows whose logits are wanted (at most CLB_FEW_ROWS), N slots.
 *
 * Two forms of numbers that only this folder knows (docs/decisions/0004-cuda-engine.md draws both):
 *   mma weights   (rows, cols) padded with zeros to multiples of 16, in tiles of 16 x 16 of 512 bytes:
 *                 tile (R, C) is number R * (cols / 16) + C; lane l of 32 owns its bytes 16 l .. 16 l + 15, which are
 *                 the four registers of operand A of mma.m16n8k16.
 *   split rows    (T, cols), 4 bytes an element: every value as a high and a low half of the weights' type, 64 bytes
 *                 for 16 columns: lane q of 4 owns 16 bytes = {high of columns 2q, 2q+1 | high of 2q+8, 2q+9 |
 *                 low of 2q, 2q+1 | low of 2q+8, 2q+9}: two registers of operand B, twice. fp16 halves hold the value
 *                 times CLB_SPLIT_FP16_SCALE.
 *   quantised mma pieces of 512 bytes, 16 bytes a lane: 16 rows of 32 columns (int8, fp8) or of 64 (int4), then scales,
 *                 then zeros, each at a multiple of 256 bytes; see "formats" below and docs/PACK.md. Where they are
 *                 read, 16-bit weights of the same model are fp16, and so are the halves of split rows.
 *   half rows     (T, cols) fp16, row-major, the value times CLB_SPLIT_FP16_SCALE: input of the many-row kernels
 * whatever the weights' type (docs/decisions/0015-prompts-on-tensor-cores.md). Sums of squares that go with half rows
 * are one for CLB_HALF_SUM columns.
 */
#ifndef CLB_KERNELS_ABI_H
#define CLB_KERNELS_ABI_H

#include <stdint.h>

#define CLB_KERNELS_ABI 8u

#ifdef __CUDACC__
#define CLB_DEVICE_PTR(type) type*
#define CLB_SIZE_ASSERT(type, bytes) static_assert(sizeof(type) == (bytes), "padding in " #type)
#else
#define CLB_DEVICE_PTR(type) uint64_t
#define CLB_SIZE_ASSERT(type, bytes) _Static_assert(sizeof(type) == (bytes), "padding in " #type)
#endif

#define CLB_NONE 0xffffffffu           /* no slot, no expert */
#define CLB_TILE 16u                   /* rows and columns of a tile; partial sums of squares are one a tile */
#define CLB_HALF_SUM 64u               /* columns of one sum of squares that goes with half rows */
#define CLB_FEW_ROWS 64u               /* most rows of the few-row kernels, of a decode step, of the head */
#define CLB_SPLIT_FP16_SCALE 0.015625f /* a power of two: residuals up to 4e6 fit */
#define CLB_MATMUL_THREADS 256u        /* all matrix kernels: 8 warps */
/* Launches: most blocks a multiprocessor (as many as run at once: where more fit, the blocks of the next node are
   spread unevenly), and dynamic shared memory in bytes: the rings of the few-row kernels, the stages of the many-row
   ones. Names with 8 are the kernels for at most 8 rows. */
#define CLB_LINEAR_BLOCKS 1u
#define CLB_LINEAR_SHARED 131072u
#define CLB_LINEAR_8_BLOCKS 3u
#define CLB_LINEAR_8_SHARED 49152u
#define CLB_LINEAR_8_INPUT 16384u /* more, for operand B of at most CLB_LINEAR_8_STAGED rows; L1 has them otherwise */
#define CLB_LINEAR_8_STAGED 2u
#define CLB_LINEAR_WIDE_SHARED 163840u
#define CLB_GATE_UP_BLOCKS 2u
#define CLB_GATE_UP_SHARED 32768u
#define CLB_GATE_UP_8_BLOCKS 2u
#define CLB_GATE_UP_8_SHARED 49152u
#define CLB_DOWN_BLOCKS 2u
#define CLB_DOWN_SHARED 32768u /* little, so that much is left for L1 */
#define CLB_DOWN_8_BLOCKS 2u
#define CLB_DOWN_8_SHARED 49152u
#define CLB_SHARED_MAX_PARTS 8u /* of the shared expert's columns, see clb_expert_down_args */
/* The many-row kernels: the form on mma.sync, and where the GPU has wgmma (compute capability 9.0) that on wgmma. */
#define CLB_MANY_BLOCKS 2u
#define CLB_MANY_SHARED 73728u
#define CLB_MANY_WIDE_THREADS 384u
#define CLB_MANY_WIDE_BLOCKS 1u
#define CLB_MANY_WIDE_SHARED 197632u
/* The kernels of quantised weights: stages of a ring whose size hangs on the format, see CLB_QUANT_SHARED. */
#define CLB_LINEAR_QUANT_8_BLOCKS 3u
#define CLB_LINEAR_QUANT_8_STAGES 8u
#define CLB_LINEAR_QUANT_BLOCKS 1u
#define CLB_LINEAR_QUANT_STAGES 8u
#define CLB_GATE_UP_MIXED_8_BLOCKS 2u
#define CLB_GATE_UP_MIXED_8_STAGES 4u
#define CLB_GATE_UP_MIXED_BLOCKS 1u
#define CLB_GATE_UP_MIXED_STAGES 8u
#define CLB_DOWN_MIXED_8_BLOCKS 2u
#define CLB_DOWN_MIXED_8_STAGES 4u
#define CLB_DOWN_MIXED_BLOCKS 2u
#define CLB_DOWN_MIXED_STAGES 4u
#define CLB_FLASH_THREADS 256u
#define CLB_FLASH_SHARED 98304u
#define CLB_FLASH_PAIRS 128u /* of row and query head that a block of prompts' attention takes */
#define CLB_FLASH_HEADS 16u  /* most query heads of them */

/* ------------------------------------------------------------------- formats */

/* How the elements of a matrix are written, in one word: the kind, the columns of a group as a power of two (0: one
   scale a row), and two flags. A number is (value - zero) * scale; the zero is 0, of int4 without zeros 8. Scales are
   fp16, of fp8 fp32. With R the row tiles (of 16) of a matrix and P the pieces across:

     values   piece (r, p) is number r * P + p; lane 4 g + q (g = 0 .. 7, q = 0 .. 3) owns its bytes 16 (4 g + q) ..
              Of tile t (16 columns) of the piece, half of columns e and half of rows h, parity i, the element of row
              8 h + g and column 16 t + 8 e + 2 q + i of the piece is
                int8   byte ((2 t + e) * 2 + h) * 2 + i, biased by 128
                int4   nibble 4 i + 2 e + h of word t
                fp8    of the 16-bit word (2 t + e) * 2 + i, for h = 0 bits 15 and 13 .. 7, for h = 1 bits 14 and 6 .. 0
     scales   [r][slot][g][h], a slot the pieces that share a group; of int4 in groups of 32, where two groups share a
              piece, [r][p][g][group][h]; of blocks (fp8, 128 x 128) row-major by block
     zeros    a byte each, in the order of scales */
enum { CLB_KIND_HALF = 0, CLB_KIND_INT8 = 1, CLB_KIND_INT4 = 2, CLB_KIND_FP8 = 3 }; /* clb_format_kind */
#define CLB_FORMAT_KIND(format) ((format) & 15u)
#define CLB_FORMAT_GROUP(format) ((format) >> 4 & 15u)
#define CLB_FORMAT_ZEROS 256u
#define CLB_FORMAT_BLOCKS 512u
#define CLB_FORMAT_PART 256u /* values, scales and zeros begin at multiples of it */

/* What a piece brings into a ring beside its 512 bytes: a lane's scales, 4 or 8 bytes, and 4 of zeros. */
#define CLB_FORMAT_IS_WIDE(format) \
  (CLB_FORMAT_GROUP(format) == 5u || (CLB_FORMAT_KIND(format) == CLB_KIND_FP8 && ((format) & CLB_FORMAT_BLOCKS) == 0u))
#define CLB_FORMAT_META(format)             \
  (CLB_FORMAT_KIND(format) == CLB_KIND_HALF \
       ? 0u                                 \
       : (((format) & CLB_FORMAT_ZEROS) != 0u ? 128u : 0u) + (CLB_FORMAT_IS_WIDE(format) ? 256u : 128u))
/* Dynamic shared memory of a kernel whose ring holds `stages` pieces of each of `matrices`. */
#define CLB_QUANT_SHARED(stages, matrices, meta) (8u * (stages) * (matrices) * (512u + (meta)))

/* ------------------------------------------------------- state between steps */

/* One row of a step. Decode: written by clb_embed from the slots. Prefill: copied in by the host. */
typedef struct clb_row {
  uint32_t slot; /* NONE: an idle row (its slot ended on the device): no kernel writes anything for it that counts */
  uint32_t position; /* in the slot's sequence, where its K and V go */
  int32_t token;
  int32_t status; /* clb_status: OK, or NOT_FINITE set by the router */
} clb_row;
CLB_SIZE_ASSERT(clb_row, 16);

/* Which slots a decode step takes; copied in by the host when it changes. The graph's bucket is >= count. */
typedef struct clb_slot_list {
  uint32_t count;
  uint32_t slots[CLB_FEW_ROWS];
} clb_slot_list;
CLB_SIZE_ASSERT(clb_slot_list, 260);

typedef struct clb_router_policy { /* = clb_expert_policy of colibri.h */
  uint32_t k;                      /* 0: the layer's own */
  float threshold;                 /* 0: off */
} clb_router_policy;
CLB_SIZE_ASSERT(clb_router_policy, 8);

typedef struct clb_token_bias { /* = clb_bias of colibri.h */
  int32_t token;
  float bias;
} clb_token_bias;
CLB_SIZE_ASSERT(clb_token_bias, 8);

/* One slot. Copied in whole at open, after which the device moves on what is marked with *; the host may copy in single
   members in stream order (active = 0 cancels). */
typedef struct clb_device_slot {
  uint64_t generation;
  uint64_t seed;
  uint64_t prefix_run;  /* device address of a KV run, 0 = none */
  uint64_t own_run;     /* device address, 0 = none */
  uint64_t records;     /* device address of the slot's record ring in the channel (clb_record of colibri.h) */
  uint64_t written;     /* * records written since open; the next one's place is written & record_mask */
  uint64_t assignments; /* * (token, expert) pairs computed, prompt and output */
  uint64_t trimmed;     /* * left out by k or threshold */
  uint64_t dropped;     /* * left out by max_tokens_per_expert */
  uint32_t
      prefix_tokens; /* positions below this lie in the prefix run, at their own index; others at p - prefix_tokens */
  uint32_t prefix_capacity; /* tokens between heads of the prefix run */
  uint32_t own_capacity;    /* the same of the own run */
  uint32_t active;          /* * 1: decode steps take it; 0 from a stop id, the length or a failure on */
  uint32_t position;        /* * of `token`: the K and V of earlier positions are there */
  uint32_t generated;       /* * output position of the next sampled token */
  int32_t token;            /* * input of the next decode step */
  uint32_t record_mask;     /* records of the ring - 1 */
  uint32_t flags;           /* CLB_REQ_* of colibri.h */
  uint32_t choice;
  uint32_t max_tokens;
  uint32_t min_tokens;
  uint32_t top_logprobs;
  uint32_t top_k;
  uint32_t stop_count;
  uint32_t bias_count;
  float temperature;
  float top_p;
  float min_p;
  float presence_penalty;
  float frequency_penalty;
  float repetition_penalty;
  uint32_t needs_counts; /* 1: a penalty is on, its row of token counts is in use */
  uint32_t prompt_top_logprobs;
} clb_device_slot;
CLB_SIZE_ASSERT(clb_device_slot, 168);

/* What the host learns of a row of a step, in mapped host memory. */
enum {
  CLB_DEVICE_IDLE = 0,   /* nothing: an idle row */
  CLB_DEVICE_TOKEN = 1,  /* record `record` of the slot's ring is written */
  CLB_DEVICE_FAILED = 2, /* `status` says why; the slot is inactive now */
  CLB_DEVICE_CHUNK = 3   /* a prompt row was computed and nothing sampled; status OK */
}; /* clb_device_event_kind */

typedef struct clb_device_event {
  uint64_t generation;
  uint64_t record;
  uint64_t assignments; /* the slot's sums so far */
  uint64_t trimmed;
  uint64_t dropped;
  uint32_t slot;
  uint32_t position; /* output position */
  int32_t token;
  uint32_t flags; /* CLB_FINISH_* of colibri.h */
  int32_t status;
  uint32_t kind; /* clb_device_event_kind */
} clb_device_event;
CLB_SIZE_ASSERT(clb_device_event, 64);

/* The mailbox: | sequence u64, 56 bytes of nothing | events[CLB_MAILBOX_STEPS][CLB_FEW_ROWS] |. Step s (counted from 0
   on the device) writes its rows to events[s % STEPS] and then sequence = s + 1 with release to the whole system. The
   host has at most STEPS - 1 steps in flight. */
#define CLB_MAILBOX_STEPS 4u
#define CLB_MAILBOX_EVENTS 64u /* byte offset of events */
#define CLB_MAILBOX_BYTES 16448u
CLB_SIZE_ASSERT(clb_device_event[CLB_MAILBOX_STEPS * CLB_FEW_ROWS], CLB_MAILBOX_BYTES - CLB_MAILBOX_EVENTS);

/* The matrices of one expert, mma weights: gate (w, d), up (w, d), down (d, w), and how they are written. One table a
   layer in device memory; swapping an expert is one copy of 32 bytes between steps. */
typedef struct clb_expert_weights {
  uint64_t gate;
  uint64_t up;
  uint64_t down;
  uint32_t format; /* of gate and up */
  uint32_t down_format;
} clb_expert_weights;
CLB_SIZE_ASSERT(clb_expert_weights, 32);

/* ----------------------------------------------------------------- embedding */

/* clb_embed_{bf16,fp16}: the start of a step. Grid max_rows blocks of 256 threads.
   residual = the token's embedding; input = split rows of residual * norm; sumsq = sum of squares of each 16 columns of
   residual; rope = cosines, then sines of the row's position. With `list`, row t becomes that of slot list->slots[t],
   or idle if the slot is inactive; row_count is then &list->count, for the whole step: a step's later kernels may read
   it before their wait. A row of an idle slot is zero everywhere. */
typedef struct clb_embed_args {
  CLB_DEVICE_PTR(const uint32_t) embedding;    /* (V, d) mma weights */
  CLB_DEVICE_PTR(const float) norm;            /* (d): attention norm of layer 0 */
  CLB_DEVICE_PTR(const float) inv_freq;        /* (head_dim / 2) */
  CLB_DEVICE_PTR(const clb_slot_list) list;    /* decode; NULL: rows are given */
  CLB_DEVICE_PTR(const clb_device_slot) slots; /* (N) */
  CLB_DEVICE_PTR(clb_row) rows;                /* (max_rows) */
  CLB_DEVICE_PTR(const uint32_t) row_count;    /* (1) */
  CLB_DEVICE_PTR(float) residual;              /* (T, d) */
  CLB_DEVICE_PTR(uint32_t) input;              /* (T, d) split rows, or NULL */
  CLB_DEVICE_PTR(uint16_t) half_input;         /* (T, d) half rows; with input NULL */
  CLB_DEVICE_PTR(float) sumsq;                 /* (T, d / 16); with half_input (T, d / CLB_HALF_SUM rounded up) */
  CLB_DEVICE_PTR(float) rope;                  /* (T, head_dim) */
  uint32_t hidden;                             /* d, a multiple of 16 */
  uint32_t head_dim;
  float rope_scale;
  uint32_t reserved;
} clb_embed_args;
CLB_SIZE_ASSERT(clb_embed_args, 112);

/* ------------------------------------------------------------------ matrices */

/* clb_linear_{bf16,fp16} and clb_linear_wide_{bf16,fp16} (at most 64 rows), clb_linear_8_{bf16,fp16} (at most 8):
     y[t][r] = norm(t) * sum_c weights[r][c] * input[t][c] + bias[r],   norm(t) = 1 / sqrt(sum of sumsq[t] / cols + eps)
   With `residual`: x = residual[t][r] + y goes back to residual, x * next_norm[r] to next_input, and the sums of x * x
   over 16 rows of the matrix to next_sumsq. Otherwise y goes to output, and with `candidates` each row tile says its
   largest y and where (the lowest row of equal ones); NaN if one of its 16 values is not finite.
   Grid: at most a block a row tile and CLB_LINEAR_BLOCKS (CLB_LINEAR_8_BLOCKS) a multiprocessor; wide, for matrices of
   many row tiles: a block a multiprocessor.
   clb_linear_quant_8_{int8,int4,fp8} and clb_linear_quant_{int8,int4,fp8}: the same of quantised weights. */
typedef struct clb_matmul_args {
  CLB_DEVICE_PTR(const uint32_t) weights;    /* (rows, cols) mma weights */
  CLB_DEVICE_PTR(const float) bias;          /* (rows) or NULL */
  CLB_DEVICE_PTR(const uint32_t) input;      /* (., cols) split rows */
  CLB_DEVICE_PTR(const float) sumsq;         /* (., sumsq_count) of input, or NULL: norm(t) = 1 */
  CLB_DEVICE_PTR(const uint32_t) input_rows; /* (T): input and sumsq row of each row; NULL: identity */
  CLB_DEVICE_PTR(const uint32_t) row_count;  /* (1): T */
  CLB_DEVICE_PTR(float) output;              /* (T, rows) at output_stride, or NULL */
  CLB_DEVICE_PTR(float) residual;            /* (T, rows), or NULL */
  CLB_DEVICE_PTR(const float) next_norm;     /* (rows), with residual */
  CLB_DEVICE_PTR(uint32_t) next_input;       /* (T, rows) split rows, with residual */
  CLB_DEVICE_PTR(float) next_sumsq;          /* (T, rows / 16), with residual */
  CLB_DEVICE_PTR(clb_token_bias) candidates; /* (T, rows / 16 rounded up) {row, value}, or NULL */
  uint64_t output_stride;
  uint32_t rows; /* as the model means them; with residual a multiple of 16 */
  uint32_t cols; /* a multiple of 16 */
  uint32_t sumsq_count;
  float epsilon;
  uint32_t format; /* of the weights, for clb_linear_quant* */
  uint32_t reserved;
} clb_matmul_args;
CLB_SIZE_ASSERT(clb_matmul_args, 128);

/* clb_linear_many_{bf16,fp16}: the same product for any number of rows, from and to half rows; no gathered rows, no
   candidates. Grid: blocks wanted, each taking (row tile, token tile) in turn. */
typedef struct clb_matmul_many_args {
  CLB_DEVICE_PTR(const uint32_t) weights;   /* (rows, cols) mma weights */
  CLB_DEVICE_PTR(const float) bias;         /* (rows) or NULL */
  CLB_DEVICE_PTR(const uint16_t) input;     /* (T, cols) half rows */
  CLB_DEVICE_PTR(const float) sumsq;        /* (T, cols / CLB_HALF_SUM rounded up) of input, or NULL: norm(t) = 1 */
  CLB_DEVICE_PTR(const uint32_t) row_count; /* (1): T */
  CLB_DEVICE_PTR(float) output;             /* (T, rows) at output_stride, or NULL */
  CLB_DEVICE_PTR(float) residual;           /* (T, rows), or NULL */
  CLB_DEVICE_PTR(const float) next_norm;    /* (rows), with residual */
  CLB_DEVICE_PTR(uint16_t) next_input;      /* (T, rows) half rows, with residual */
  CLB_DEVICE_PTR(float) next_sumsq;         /* (T, rows / CLB_HALF_SUM rounded up), with residual */
  uint64_t output_stride;
  uint32_t rows; /* as the model means them; with residual a multiple of 16 */
  uint32_t cols; /* a multiple of 16 */
  float epsilon;
  uint32_t format; /* of the weights, for clb_linear_many_{int8,int4,fp8} */
} clb_matmul_many_args;
CLB_SIZE_ASSERT(clb_matmul_many_args, 104);

/* clb_router_logits: prompts: fp32 weights, fp32 sums. logits[t][e] = norm(t) * sum_c weights[e][c] * norm[c] *
   residual[t][c], and shared_scale[t] = sigmoid of the same with the row shared_gate. Grid (E, and 1 with shared_gate,
   / 32 rounded up, max_rows / block_rows rounded up), 256 threads. */
typedef struct clb_router_logits_args {
  CLB_DEVICE_PTR(const float) weights;      /* (E, d) row-major */
  CLB_DEVICE_PTR(const float) shared_gate;  /* (d) or NULL */
  CLB_DEVICE_PTR(const float) norm;         /* (d) */
  CLB_DEVICE_PTR(const float) residual;     /* (T, d) */
  CLB_DEVICE_PTR(const float) sumsq;        /* (T, d / CLB_HALF_SUM rounded up); of clb_route (T, d / 16) */
  CLB_DEVICE_PTR(const uint32_t) row_count; /* (1) */
  CLB_DEVICE_PTR(float) logits;             /* (T, E) */
  CLB_DEVICE_PTR(float) shared_scale;       /* (T), with shared_gate */
  uint32_t experts;
  uint32_t hidden;
  float epsilon;
  uint32_t block_rows; /* rows of a block of clb_router_logits: 8 or 32 */
} clb_router_logits_args;
CLB_SIZE_ASSERT(clb_router_logits_args, 80);

/* ------------------------------------------------------------------- routing */

/* Tokens that one block of the bucket kernel takes: one bit of a 64-bit mask each. */
#define CLB_ROUTER_BLOCK_TOKENS 64u
#define CLB_ROUTER_THREADS 1024u /* >= CLB_ROUTER_MAX_EXPERTS; of the bucket kernel, and most of the router's */
#define CLB_ROUTER_MAX_EXPERTS 512u
#define CLB_ROUTER_MAX_K 16u
#define CLB_ROUTER_NONE CLB_NONE /* in indices: this rank holds no expert */

/* clb_router_fp32: B = ceil(max_tokens / block_tokens) blocks of any whole number of warps; a warp takes a token at a
   time. Decode: block_tokens 1, 32 threads, block_counts NULL. Before clb_bucket: 64 and 1024. */
typedef struct clb_router_args {
  CLB_DEVICE_PTR(const float) logits;             /* (T, E), rows logits_stride apart */
  CLB_DEVICE_PTR(const clb_router_policy) policy; /* one a slot, policy_stride apart; NULL: the layer's own */
  CLB_DEVICE_PTR(clb_row) rows;               /* (T): slot of each token, gets its status; NULL: token t is slot t */
  CLB_DEVICE_PTR(const uint32_t) token_count; /* (1) */
  CLB_DEVICE_PTR(uint32_t) indices;           /* (T, K): experts, best first; NONE from kept on */
  CLB_DEVICE_PTR(float) weights;              /* (T, K); 0 from kept on */
  CLB_DEVICE_PTR(uint32_t) kept;              /* (T): ranks in use; 0: a logit is not finite, or an idle row */
  CLB_DEVICE_PTR(uint32_t) block_counts;      /* (B, E): assignments by block, for clb_bucket; or NULL */
  CLB_DEVICE_PTR(clb_device_slot) slots;      /* (N): assignments and trimmed are added up; or NULL */
  CLB_DEVICE_PTR(uint32_t) expert_counts;     /* (N, ., E): this layer's row of slot 0; or NULL */
  uint64_t logits_stride;
  uint64_t policy_stride;
  uint64_t counts_stride; /* between slots of expert_counts */
  uint32_t experts;       /* 1 .. 512 */
  uint32_t k;             /* the layer's own k, 1 .. k_max */
  uint32_t k_max;         /* row length of indices and weights, 1 .. min(16, experts) */
  uint32_t score;         /* clb_score of colibri.h */
  uint32_t renormalise;   /* 1: kept weights are divided by their sum */
  float routed_scale;     /* the last factor on the weights */
  uint32_t block_tokens;
  int32_t not_finite; /* status of a row with a NaN or infinite logit */
} clb_router_args;
CLB_SIZE_ASSERT(clb_router_args, 136);

/* clb_route: decode: scores and choice in one node, as clb_router_logits and clb_router_fp32 with block_tokens 1 make
   them; choice.logits is scores.logits. Grid (E + 1 rounded up to 4 / 4, max_rows / 8 rounded up), 256 threads. */
typedef struct clb_route_args {
  clb_router_logits_args scores;
  clb_router_args choice;
  CLB_DEVICE_PTR(uint32_t) tickets; /* (max_rows / 8 rounded up): 0 before and after each launch */
} clb_route_args;
CLB_SIZE_ASSERT(clb_route_args, 224);

/* Prefill only: the few-row expert kernels find their tokens from `indices` by themselves. */
typedef struct clb_bucket_args {
  CLB_DEVICE_PTR(const uint32_t) indices;      /* (T, K) of the router */
  CLB_DEVICE_PTR(const uint32_t) block_counts; /* (B, E) of the router */
  CLB_DEVICE_PTR(const uint32_t) token_count;  /* (1) */
  CLB_DEVICE_PTR(uint32_t) counts;             /* (E): assignments of each expert */
  CLB_DEVICE_PTR(uint32_t) offsets;            /* (E + 1): exclusive sum of counts */
  CLB_DEVICE_PTR(uint32_t) tokens;             /* (assignments): token of each assignment, by expert, then token */
  CLB_DEVICE_PTR(uint32_t) places;             /* (assignments): token * K + rank */
  uint32_t experts;
  uint32_t k_max;
} clb_bucket_args;
CLB_SIZE_ASSERT(clb_bucket_args, 64);

/* clb_capacity: with max_tokens_per_expert only, after the router: an expert with more assignments keeps those of
   largest weight, of equal ones the earlier token's (engine_c/src/routing.h). For at most CLB_FEW_ROWS rows with
   offsets NULL: the expert looks for its assignments in `indices`. For any number after clb_bucket, whose lists are
   then made again from what is left: indices, and block_counts, less what was dropped. Slots and expert_counts are
   corrected. Grid E blocks of CLB_CAPACITY_THREADS. */
#define CLB_CAPACITY_THREADS 256u
typedef struct clb_capacity_args {
  CLB_DEVICE_PTR(uint32_t) indices;           /* (T, K): NONE where dropped */
  CLB_DEVICE_PTR(float) weights;              /* (T, K): 0 where dropped */
  CLB_DEVICE_PTR(const clb_row) rows;         /* (T); or NULL with slots and expert_counts NULL */
  CLB_DEVICE_PTR(const uint32_t) token_count; /* (1) */
  CLB_DEVICE_PTR(const uint32_t) offsets;     /* (E + 1) of clb_bucket, or NULL */
  CLB_DEVICE_PTR(const uint32_t) places;      /* (assignments) of clb_bucket */
  CLB_DEVICE_PTR(uint32_t) block_counts;      /* (B, E) of the router; with offsets */
  CLB_DEVICE_PTR(clb_device_slot) slots;      /* (N): assignments and dropped; or NULL */
  CLB_DEVICE_PTR(uint32_t) expert_counts;     /* as the router's; or NULL */
  uint64_t counts_stride;                     /* as the router's */
  uint32_t experts;
  uint32_t k_max;
  uint32_t max_tokens; /* of one expert, at least 1 */
  uint32_t reserved;
} clb_capacity_args;
CLB_SIZE_ASSERT(clb_capacity_args, 96);

/* ------------------------------------------------------------------- experts */

/* clb_expert_gate_up_{bf16,fp16}: at most 64 rows; clb_expert_gate_up_8_{bf16,fp16}: at most 8;
   clb_expert_gate_up_mixed and clb_expert_gate_up_mixed_8 the same of experts each in its own format. Routed experts
   and the shared expert (or the FFN of a dense layer: experts 0) in one launch: activation[t * K + r] = split rows of
   silu(gate x) * (up x) with x = norm(t) * input[t], of the expert in rank r of token t; shared_activation[t] likewise.
   Where there are routed experts a node lies between this one and that which wrote sumsq. Grid: blocks wanted, each
   taking row tiles of experts in use. */
typedef struct clb_expert_gate_up_args {
  CLB_DEVICE_PTR(const clb_expert_weights) experts; /* (E) */
  CLB_DEVICE_PTR(const clb_expert_weights) shared;  /* (1) or NULL */
  CLB_DEVICE_PTR(const uint32_t) indices;           /* (T, K) */
  CLB_DEVICE_PTR(const uint32_t) input;             /* (T, d) split rows */
  CLB_DEVICE_PTR(const float) sumsq;                /* (T, d / 16) */
  CLB_DEVICE_PTR(const uint32_t) row_count;         /* (1) */
  CLB_DEVICE_PTR(uint32_t) activation;              /* (T * K, w) split rows */
  CLB_DEVICE_PTR(uint32_t) shared_activation;       /* (T, shared_width) split rows */
  uint32_t expert_count;                            /* E; 0: no routed experts */
  uint32_t k_max;
  uint32_t hidden;       /* a multiple of 16 */
  uint32_t width;        /* a multiple of 16 */
  uint32_t shared_width; /* a multiple of 16; 0: none */
  float epsilon;
  uint32_t meta; /* of _mixed: CLB_FORMAT_META of any expert at most */
  uint32_t reserved;
} clb_expert_gate_up_args;
CLB_SIZE_ASSERT(clb_expert_gate_up_args, 96);

/* clb_expert_down_{bf16,fp16}, clb_expert_down_8_{bf16,fp16}, clb_expert_down_mixed and clb_expert_down_mixed_8: after
   clb_expert_gate_up:
     x = residual + sum over ranks, in order, of weights[t][r] * down(activation)
                  + sum over parts, in order, of shared_scale[t] * down(shared activation),
   which goes where clb_linear with residual puts it. The columns of the shared expert are taken in shared_parts parts,
   as long as those of other experts where that can be, so that the work can be shared out evenly.
   Grid: blocks wanted. */
typedef struct clb_expert_down_args {
  CLB_DEVICE_PTR(const clb_expert_weights) experts;
  CLB_DEVICE_PTR(const clb_expert_weights) shared;
  CLB_DEVICE_PTR(const uint32_t) indices;           /* (T, K) */
  CLB_DEVICE_PTR(const float) weights;              /* (T, K) */
  CLB_DEVICE_PTR(const float) shared_scale;         /* (T) or NULL: 1 */
  CLB_DEVICE_PTR(const uint32_t) activation;        /* (T * K, w) split rows */
  CLB_DEVICE_PTR(const uint32_t) shared_activation; /* (T, shared_width) split rows */
  CLB_DEVICE_PTR(const uint32_t) row_count;         /* (1) */
  CLB_DEVICE_PTR(float) residual;                   /* (T, d) */
  CLB_DEVICE_PTR(const float) next_norm;            /* (d): attention norm of the next layer, or the final norm */
  CLB_DEVICE_PTR(uint32_t) next_input;              /* (T, d) split rows */
  CLB_DEVICE_PTR(float) next_sumsq;                 /* (T, d / 16) */
  CLB_DEVICE_PTR(float) partial;                    /* (64 * K + 64 * shared_parts, d) */
  CLB_DEVICE_PTR(uint32_t) tickets;                 /* (d / 32 rounded up): 0 before and after */
  uint32_t expert_count;
  uint32_t k_max;
  uint32_t hidden;
  uint32_t width;
  uint32_t shared_width;
  uint32_t shared_parts; /* 0: no shared expert */
  uint32_t meta;         /* as above */
  uint32_t reserved;
} clb_expert_down_args;
CLB_SIZE_ASSERT(clb_expert_down_args, 144);

/* clb_expert_gate_up_many_{bf16,fp16,int8,int4,fp8}: any number of tokens, by bucket: row i of activation belongs to
   assignment i. clb_expert_down_many_{the same}: partial[places[i]] = down(activation[i]), unweighted. With offsets
   NULL one expert (experts[0]) over all T rows, tokens and places being the identity: shared expert or dense FFN. Grid:
   blocks wanted, each taking (expert, row tile, token tile) in turn, of the experts with weights of its own kind. */
typedef struct clb_expert_many_args {
  CLB_DEVICE_PTR(const clb_expert_weights) experts;
  CLB_DEVICE_PTR(const uint32_t) offsets;   /* (E + 1) or NULL */
  CLB_DEVICE_PTR(const uint32_t) tokens;    /* (assignments): row of input; gate_up only */
  CLB_DEVICE_PTR(const uint32_t) places;    /* (assignments): row of partial; down only */
  CLB_DEVICE_PTR(const uint32_t) row_count; /* (1) */
  CLB_DEVICE_PTR(const uint16_t) input;     /* gate_up: (T, d) half rows */
  CLB_DEVICE_PTR(const float) sumsq;        /* gate_up: (T, d / CLB_HALF_SUM rounded up) */
  CLB_DEVICE_PTR(uint16_t) activation;      /* (assignments, w) half rows; gate_up writes, down reads */
  CLB_DEVICE_PTR(uint16_t) partial;         /* down: (places, d) half rows */
  uint32_t expert_count;                    /* 1 with offsets NULL */
  uint32_t hidden;
  uint32_t width;
  float epsilon;
} clb_expert_many_args;
CLB_SIZE_ASSERT(clb_expert_many_args, 88);

/* clb_combine_{bf16,fp16}: what clb_expert_down does after its products, for partial results of clb_expert_down_many.
   Grid max_rows blocks of 256 threads. */
typedef struct clb_combine_args {
  CLB_DEVICE_PTR(const uint16_t) partial;        /* (T * K, d) half rows; NULL: dense layer */
  CLB_DEVICE_PTR(const uint32_t) indices;        /* (T, K) */
  CLB_DEVICE_PTR(const float) weights;           /* (T, K) */
  CLB_DEVICE_PTR(const uint16_t) shared_partial; /* (T, d) half rows, or NULL */
  CLB_DEVICE_PTR(const float) shared_scale;      /* (T) or NULL: 1 */
  CLB_DEVICE_PTR(const uint32_t) row_count;      /* (1) */
  CLB_DEVICE_PTR(float) residual;                /* (T, d) */
  CLB_DEVICE_PTR(const float) next_norm;         /* (d) */
  CLB_DEVICE_PTR(uint32_t) next_input;           /* (T, d) split rows for the head, or NULL */
  CLB_DEVICE_PTR(uint16_t) next_half;            /* (T, d) half rows for the next layer; with next_input NULL */
  CLB_DEVICE_PTR(float) next_sumsq;              /* (T, d / 16); with next_half (T, d / CLB_HALF_SUM rounded up) */
  uint32_t k_max;
  uint32_t hidden;
} clb_combine_args;
CLB_SIZE_ASSERT(clb_combine_args, 96);

/* ----------------------------------------------------------------- attention */

/* A split of the tokens [first, tokens) that one row sees is CLB_ATTENTION_SPLIT tokens at least, and more where it
   takes that to make do with CLB_ATTENTION_SPLITS: a function of the row's length alone. */
#define CLB_ATTENTION_SPLIT 128u
#define CLB_ATTENTION_SPLITS 32u
#define CLB_ATTEND_BLOCKS 3u
#define CLB_ATTEND_HEADS 8u /* most query heads of a kv head that an item has */

/* What all attention kernels share. K of layer l, head h, token t of a run with `capacity` tokens:
   run + (layer_values * capacity + (h * capacity + t) * head_dim) * element bytes; V follows K at
   kv_heads * capacity * head_dim. QK-norm and RoPE in this order. */
typedef struct clb_attention_dims {
  uint64_t layer_values; /* K and V values a token in the layers below this one */
  uint32_t heads;
  uint32_t kv_heads;
  uint32_t head_dim; /* 32, 64 or 128 */
  uint32_t window;   /* a token sees this many positions, its own the last; 0 = all */
  uint32_t qk_norm;  /* clb_qk_norm of colibri.h */
  float scale;
  float epsilon;
  uint32_t reserved;
} clb_attention_dims;
CLB_SIZE_ASSERT(clb_attention_dims, 40);

/* clb_attend_{fp16,bf16,fp32}_{bf16,fp16} (type of K and V, then of the split rows): decode, one row a slot. Norms and
   rotates the row's q, and (in the split that holds its position) its k, appends k and v, attends; the last block of a
   row's heads to finish adds up its splits. Grid: blocks wanted of 128 threads, at most CLB_ATTEND_BLOCKS a
   multiprocessor run at once. */
typedef struct clb_attend_args {
  CLB_DEVICE_PTR(const float) qkv;             /* (T, q + 2 kv) */
  CLB_DEVICE_PTR(const float) rope;            /* (T, head_dim) */
  CLB_DEVICE_PTR(const float) q_norm;          /* (head_dim) or (q), or NULL */
  CLB_DEVICE_PTR(const float) k_norm;          /* (head_dim) or (kv), or NULL */
  CLB_DEVICE_PTR(const clb_row) rows;          /* (T) */
  CLB_DEVICE_PTR(const uint32_t) row_count;    /* (1) */
  CLB_DEVICE_PTR(const clb_device_slot) slots; /* (N) */
  CLB_DEVICE_PTR(float) partial;               /* (T, heads, SPLITS, head_dim): sums of exp(score - largest) * v */
  CLB_DEVICE_PTR(float) partial_state;         /* (T, heads, SPLITS, 2): largest score, sum of exponentials */
  CLB_DEVICE_PTR(uint32_t) tickets;            /* (T, heads): 0 before and after each launch */
  CLB_DEVICE_PTR(uint32_t) attended;           /* (T, q) split rows: input of the out-projection */
  clb_attention_dims shape;
} clb_attend_args;
CLB_SIZE_ASSERT(clb_attend_args, 128);

/* clb_append_{fp16,bf16,fp32}: prefill, before attention: norms and rotates k, writes K and V. With K and V of fp32
   also norms and rotates q in place; otherwise attention does, for which q_scale gets the factor of a norm over whole
   rows. clb_attend_many_{fp16,bf16,fp32}: every row sees the positions up to its own. Rows of one slot follow each
   other in rising position. Grid, with K and V of 16 bits and `most` = min(heads / kv_heads, CLB_FLASH_HEADS):
   (kv_heads * (heads / kv_heads / most rounded up), max_rows / (CLB_FLASH_PAIRS / most rounded down) rounded up) blocks
   of CLB_FLASH_THREADS; with fp32 (heads, max_rows / 64 rounded up) blocks of 128 threads. */
typedef struct clb_prefill_attention_args {
  CLB_DEVICE_PTR(float) qkv;                   /* (T, q + 2 kv) */
  CLB_DEVICE_PTR(const float) rope;            /* (T, head_dim) */
  CLB_DEVICE_PTR(const float) q_norm;          /* as above */
  CLB_DEVICE_PTR(const float) k_norm;          /* as above */
  CLB_DEVICE_PTR(const clb_row) rows;          /* (T) */
  CLB_DEVICE_PTR(const uint32_t) row_count;    /* (1) */
  CLB_DEVICE_PTR(const clb_device_slot) slots; /* (N) */
  CLB_DEVICE_PTR(float) q_scale;               /* (T) */
  CLB_DEVICE_PTR(uint16_t) attended;           /* (T, q) half rows */
  clb_attention_dims shape;
} clb_prefill_attention_args;
CLB_SIZE_ASSERT(clb_prefill_attention_args, 112);

/* ------------------------------------------------------------------- outputs */

/* clb_sample: one block a wanted row. What engine_c/src/sampler.h says, then moves the slot on: record, token,
   generated, position, active, counts. Greedy rows without bias, penalties and mask need the candidates alone. */
typedef struct clb_sample_args {
  CLB_DEVICE_PTR(const float) logits;              /* (H, V) */
  CLB_DEVICE_PTR(const clb_token_bias) candidates; /* (H, V / 16 rounded up) */
  CLB_DEVICE_PTR(const uint32_t) wanted;           /* (H): row of the step; NULL: identity */
  CLB_DEVICE_PTR(const uint32_t) wanted_count;     /* (1): H */
  CLB_DEVICE_PTR(const clb_row) rows;              /* (T) */
  CLB_DEVICE_PTR(clb_device_slot) slots;           /* (N) */
  CLB_DEVICE_PTR(const clb_token_bias) bias;       /* (N, CLB_MAX_BIAS) */
  CLB_DEVICE_PTR(const int32_t) stops;             /* (N, CLB_MAX_STOP_IDS) */
  CLB_DEVICE_PTR(const uint32_t) masks;            /* (N, 2, V / 32 rounded up): by output position mod 2 */
  CLB_DEVICE_PTR(uint32_t) counts;                 /* (N, V): see sampler.h */
  CLB_DEVICE_PTR(unsigned char) scratch;           /* (H, scratch_stride bytes) */
  CLB_DEVICE_PTR(clb_device_event) events;         /* (H) in device memory, for clb_publish */
  uint64_t scratch_stride;
  uint32_t vocab;
  int32_t not_finite; /* status codes of colibri.h */
  int32_t no_token;
  uint32_t reserved;
} clb_sample_args;
CLB_SIZE_ASSERT(clb_sample_args, 120);

/* clb_publish: the end of every step, one block of 64 threads: events to the mailbox, then the step's number. */
typedef struct clb_publish_args {
  CLB_DEVICE_PTR(const clb_device_event) events; /* (H) */
  CLB_DEVICE_PTR(const uint32_t) wanted_count;   /* (1): H, may be 0 */
  CLB_DEVICE_PTR(uint64_t) step;                 /* (1) in device memory, starts at 0 */
  CLB_DEVICE_PTR(unsigned char) mailbox;         /* mapped host memory, CLB_MAILBOX_BYTES */
} clb_publish_args;
CLB_SIZE_ASSERT(clb_publish_args, 32);

/* clb_prompt_logprobs: one block a wanted row: its log-probability of `next` and the top list, into a record of
   clb_prompt_record of colibri.h. */
typedef struct clb_prompt_logprob_item {
  uint64_t record; /* device address in the channel; 0: skip */
  int32_t next;    /* the prompt's token at the row's position + 1 */
  uint32_t top_count;
} clb_prompt_logprob_item;
CLB_SIZE_ASSERT(clb_prompt_logprob_item, 16);

typedef struct clb_prompt_logprobs_args {
  CLB_DEVICE_PTR(const float) logits;                  /* (H, V) */
  CLB_DEVICE_PTR(const clb_prompt_logprob_item) items; /* (H) */
  CLB_DEVICE_PTR(const uint32_t) wanted_count;         /* (1): H */
  CLB_DEVICE_PTR(int32_t) status;                      /* (H): OK or not_finite */
  uint32_t vocab;
  int32_t not_finite;
} clb_prompt_logprobs_args;
CLB_SIZE_ASSERT(clb_prompt_logprobs_args, 40);

/* clb_pool: behind a prefill step, for slots that pool: the hidden states after the final norm of rows [first, first +
   count) of one slot are added to its sum in rising order. fresh: the sum begins here. With `output`, of the channel,
   the sum is also written there; its length is not 1 yet. Grid (d / CLB_MATMUL_THREADS rounded up, most items). */
typedef struct clb_pool_item {
  uint64_t output; /* device address of (d) floats; 0: the prompt goes on */
  uint32_t slot;
  uint32_t first;
  uint32_t count;
  uint32_t fresh;
} clb_pool_item;
CLB_SIZE_ASSERT(clb_pool_item, 24);

typedef struct clb_pool_args {
  CLB_DEVICE_PTR(const clb_pool_item) items; /* (grid.y) */
  CLB_DEVICE_PTR(const float) residual;      /* (T, d) */
  CLB_DEVICE_PTR(const float) sumsq;         /* (T, d / 16) */
  CLB_DEVICE_PTR(const float) norm;          /* (d): the final norm */
  CLB_DEVICE_PTR(float) sums;                /* (N, d) */
  uint32_t hidden;
  float epsilon;
} clb_pool_args;
CLB_SIZE_ASSERT(clb_pool_args, 48);

/* -------------------------------------------------------------------- weights */

/* clb_dummy: random weights while an engine without files loads: the values of engine_c/src/dummy.c, of a quantised
   matrix without its zeros. Grid: any number of blocks of 256 threads. */
#define CLB_DUMMY_VALUES 4096u /* that a block takes at a time; of quantised matrices words of four bytes */
typedef struct clb_dummy_args {
  CLB_DEVICE_PTR(unsigned char) output;
  uint64_t key;         /* clb_dummy_key */
  uint64_t scales_at;   /* bytes from output on; with scales */
  uint64_t scale_words; /* words of four bytes */
  uint32_t rows;
  uint32_t cols;
  float half_width;   /* clb_dummy_half_width; 0: all values are 1 */
  uint32_t precision; /* clb_precision of colibri.h */
  uint32_t tiled;     /* 1: mma weights; 0: row-major */
  uint32_t by_column; /* 1: values are counted along columns, as a transposed matrix has them */
  uint32_t scale;     /* two fp16 scales, or one of fp32 */
  uint32_t reserved;
} clb_dummy_args;
CLB_SIZE_ASSERT(clb_dummy_args, 64);

/* clb_to_fp16: bf16 numbers become fp16, in place: exact from 2^-14 to 65504, to 2^-25 below. Grid: any number of
   blocks of 256 threads. */
typedef struct clb_to_fp16_args {
  CLB_DEVICE_PTR(uint4) data;
  uint64_t vectors; /* of 16 bytes */
} clb_to_fp16_args;
CLB_SIZE_ASSERT(clb_to_fp16_args, 16);

/* clb_read: adds all 32-bit words of the input to *sum, modulo 2^32: what reading them costs, for benches. Grid: any
   number of blocks of 256 threads. */
typedef struct clb_read_args {
  CLB_DEVICE_PTR(const uint4) input; /* (vectors) of 16 bytes */
  CLB_DEVICE_PTR(uint32_t) sum;      /* (1) */
  uint64_t vectors;
} clb_read_args;
CLB_SIZE_ASSERT(clb_read_args, 24);

#endif /* CLB_KERNELS_ABI_H */
