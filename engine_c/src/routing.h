/*
 * routing.h: from router logits to one bucket of tokens per expert. The host twin of the router kernel.
 *
 * select, per token (a token's result depends on no other token):
 *   1. k = policy.k, or the layer's own for 0. The k largest logits, largest first, ties to the lowest expert index.
 *      The logits decide, not the rounded scores: both score functions are monotone.
 *   2. scores: softmax over all experts, exp(l - max) / sum; or sigmoid (exact_math.h).
 *   3. threshold t > 0: an expert stays iff its score >= t * the largest score; for softmax the division by the sum is
 *      left out: exp(l - max) >= t, so that host and device agree to the bit. Rank 0 always stays.
 *   4. renormalise: divide by the sum of the kept scores.  5. times routed_scale.
 *   Both sums are trees in the order of the router kernel, so that weights are equal to the bit, and what is dropped
 * too. So k and threshold mean what the checkpoint does with a smaller num_experts_per_tok. bucket, per step:
 *   counts[e], offsets[e + 1], and for each expert its tokens in ascending order; place = token * k_max + rank.
 *   max_tokens_per_expert > 0: an expert keeps its assignments of largest weight, ties: the later token goes. The
 *   weights of what stays are not changed.
 *
 *   Example: k_max 2, token 0 -> {3, 1}, token 1 -> {1, 0}, 4 experts
 *     counts 1 2 0 1   offsets 0 1 3 3 4   tokens 1 | 0 1 | | 0   places 3 | 1 2 | | 0
 *
 * A token with a NaN or infinite logit gets status NOT_FINITE, kept 0 and no expert; others are untouched.
 *
 * Threads: pure functions over their arguments. Arguments come from the engine and are asserted.
 */
#ifndef CLB_ROUTING_H
#define CLB_ROUTING_H

#include <stdint.h>

#include "../include/colibri.h"

#define CLB_ROUTING_NONE UINT32_MAX

typedef struct clb_routing_args {
  const float* logits;               /* (tokens, experts) */
  const clb_layer_desc* layer;       /* experts, experts_per_token, score, renormalise, routed_scale are used */
  const clb_expert_policy* policies; /* (tokens); k <= min(k_max, experts), 0 <= threshold <= 1 */
  uint32_t* indices;                 /* out (tokens, k_max): expert by rank; NONE from kept on, and where dropped */
  float* weights;                    /* out (tokens, k_max): 0 where NONE */
  uint32_t* kept;                    /* out (tokens): ranks in use; dropped ones stay counted, their index is NONE */
  uint32_t* trimmed;                 /* out (tokens): max(0, experts_per_token - kept): left out by k or threshold */
  uint32_t* dropped;                 /* out (tokens): left out by max_tokens_per_expert */
  int32_t* status;                   /* out (tokens): CLB_OK or CLB_ERR_NOT_FINITE */
  uint32_t* counts;                  /* out (experts) */
  uint32_t* offsets;                 /* out (experts + 1) */
  uint32_t* token_list;              /* out (tokens * k_max), offsets[experts] of them used */
  uint32_t* place_list;              /* out, the same */
  uint64_t logits_stride;            /* floats between tokens, >= experts */
  uint32_t tokens;
  uint32_t k_max;                 /* columns of indices and weights, 1 .. CLB_MAX_EXPERTS_PER_TOKEN */
  uint32_t max_tokens_per_expert; /* 0 = none */
  uint32_t reserved;
} clb_routing_args;

/* Fills indices, weights, kept, trimmed, status and zeroes dropped. O(tokens * experts) expected. */
void clb_routing_select(const clb_routing_args* args);

/* Fills counts, offsets, token_list, place_list from indices; applies max_tokens_per_expert to indices, weights and
   dropped. O(tokens * k_max + experts), and O(n log n) for an expert with n > max_tokens_per_expert. */
void clb_routing_bucket(const clb_routing_args* args);

/* Both. */
void clb_routing_run(const clb_routing_args* args);

#endif
