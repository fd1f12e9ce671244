/*
 * abi.h: the argument structs of all CUDA kernels, shared by C (which fills them) and CUDA (which reads them
 * as one __grid_constant__ parameter).
 *
 * Rules: pointers first, then 64-bit strides, then 32-bit values; no padding; sizes asserted below, checked
 * again against the loaded cubin with cuFuncGetParamInfo. Strides are in elements. C writes device addresses
 * as numbers, so the pointer members are declared through CLB_DEVICE_PTR and have 8 bytes on both sides.
 * Any change of a struct or of a kernel's meaning raises CLB_KERNELS_ABI.
 */
#ifndef CLB_KERNELS_ABI_H
#define CLB_KERNELS_ABI_H

#include <stdint.h>

#define CLB_KERNELS_ABI 1u

#ifdef __CUDACC__
#define CLB_DEVICE_PTR(type) type*
#define CLB_SIZE_ASSERT(type, bytes) static_assert(sizeof(type) == (bytes), "padding in " #type)
#else
#define CLB_DEVICE_PTR(type) uint64_t
#define CLB_SIZE_ASSERT(type, bytes) _Static_assert(sizeof(type) == (bytes), "padding in " #type)
#endif

/* Tokens that one block of the router and bucket kernels takes: one bit of a 64-bit mask each. */
#define CLB_ROUTER_BLOCK_TOKENS 64u
#define CLB_ROUTER_THREADS 1024u /* >= CLB_ROUTER_MAX_EXPERTS */
#define CLB_ROUTER_MAX_EXPERTS 512u
#define CLB_ROUTER_MAX_K 16u
#define CLB_ROUTER_NONE 0xffffffffu /* in indices: this rank holds no expert */

typedef struct clb_router_policy { /* = clb_expert_policy of colibri.h */
  uint32_t k;                      /* 0: the layer's own */
  float threshold;                 /* 0: off */
} clb_router_policy;

/* clb_router_fp32, clb_bucket: T = tokens of this step (read from *token_count, at most max_tokens),
   E = experts, K = k_max, B = ceil(max_tokens / 64). */
typedef struct clb_router_args {
  CLB_DEVICE_PTR(const float) logits;             /* (T, E), rows logits_stride apart */
  CLB_DEVICE_PTR(const clb_router_policy) policy; /* one a slot, policy_stride apart; NULL: the layer's own */
  CLB_DEVICE_PTR(const uint32_t) slots;           /* (T): the slot of each token; NULL: token t is slot t */
  CLB_DEVICE_PTR(const uint32_t) token_count;     /* (1) */
  CLB_DEVICE_PTR(uint32_t) indices;               /* (T, K): experts, best first; NONE from kept on */
  CLB_DEVICE_PTR(float) weights;                  /* (T, K); 0 from kept on */
  CLB_DEVICE_PTR(uint32_t) kept;                  /* (T): ranks in use; 0: a logit is not finite */
  CLB_DEVICE_PTR(uint32_t) block_counts;          /* (B, E): assignments by block of 64 tokens; scratch of bucket */
  uint64_t logits_stride;
  uint64_t policy_stride;
  uint32_t experts;     /* 1 .. 512 */
  uint32_t k;           /* the layer's own k, 1 .. k_max */
  uint32_t k_max;       /* row length of indices and weights, 1 .. min(16, experts) */
  uint32_t score;       /* clb_score of colibri.h */
  uint32_t renormalise; /* 1: kept weights are divided by their sum */
  float routed_scale;   /* the last factor on the weights */
} clb_router_args;
CLB_SIZE_ASSERT(clb_router_args, 104);

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

#endif /* CLB_KERNELS_ABI_H */
