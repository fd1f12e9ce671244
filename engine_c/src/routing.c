/*
 * routing.c: see routing.h for the rules and an example. Host twin of the router and bucket kernels.
 *
 * Owns nothing. A token's row is written from that token's logits and policy alone; only bucket looks across tokens.
 */
#include "routing.h"

#include <math.h>
#include <string.h>

#include "assert.h"
#include "exact_math.h"

static void check_args(const clb_routing_args* args) {
  CLB_ASSERT(args != NULL);
  CLB_ASSERT(args->layer != NULL);
  CLB_ASSERT(args->layer->experts >= 1 && args->layer->experts <= CLB_MAX_EXPERTS);
  CLB_ASSERT(args->layer->experts_per_token >= 1);
  CLB_ASSERT(args->layer->experts_per_token <= args->layer->experts);
  CLB_ASSERT(args->k_max >= 1 && args->k_max <= CLB_MAX_EXPERTS_PER_TOKEN);
  CLB_ASSERT(args->logits_stride >= args->layer->experts);
  CLB_ASSERT(args->tokens <= UINT32_MAX / CLB_MAX_EXPERTS_PER_TOKEN);
}

/* ----------------------------------------------------------------- select */

static int all_finite(const float* logits, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    if (!isfinite(logits[i])) return 0;
  }
  return 1;
}

/* The k largest into best[0..k), largest first. An expert moves ahead only of strictly smaller ones, and experts come
   in ascending order, so ties go to the lowest index. Expected O(experts): few of them enter. */
static void select_best(const float* logits, uint32_t experts, uint32_t k, uint32_t* best) {
  uint32_t filled = 0;
  for (uint32_t e = 0; e < experts; ++e) {
    if (filled == k && logits[e] <= logits[best[k - 1u]]) continue;
    uint32_t at = filled < k ? filled++ : k - 1u;
    for (; at > 0 && logits[best[at - 1u]] < logits[e]; --at)
      best[at] = best[at - 1u];
    best[at] = e;
  }
}

/* Scores of the chosen experts without the softmax's division (best score 1), which leaves their ratios exact. */
static void raw_scores(const clb_layer_desc* layer, const float* logits, const uint32_t* best, uint32_t k,
                       float* scores) {
  for (uint32_t rank = 0; rank < k; ++rank) {
    const float logit = logits[best[rank]];
    scores[rank] =
        layer->score == CLB_SCORE_SOFTMAX ? clb_exact_exp(logit - logits[best[0]]) : clb_exact_sigmoid(logit);
  }
}

/* What the kept scores are divided by. */
static float divisor(const clb_layer_desc* layer, const float* logits, float largest, const float* scores,
                     uint32_t kept) {
  float sum = 0.0f;
  if (layer->renormalise) {
    for (uint32_t rank = 0; rank < kept; ++rank)
      sum += scores[rank];
  } else if (layer->score == CLB_SCORE_SOFTMAX) {
    for (uint32_t e = 0; e < layer->experts; ++e)
      sum += clb_exact_exp(logits[e] - largest);
  } else {
    sum = 1.0f;
  }
  CLB_ASSERT(sum > 0.0f); /* exact_math.h keeps every sigmoid above 0, and the best softmax score here is 1 */
  return sum;
}

static void select_token(const clb_routing_args* args, uint32_t token) {
  const clb_layer_desc* layer = args->layer;
  const float* logits = args->logits + token * args->logits_stride;
  const clb_expert_policy policy = args->policies[token];
  uint32_t* indices = args->indices + (size_t)token * args->k_max;
  float* weights = args->weights + (size_t)token * args->k_max;
  const uint32_t k = policy.k != 0 ? policy.k : layer->experts_per_token;
  CLB_ASSERT(k <= args->k_max && k <= layer->experts);
  uint32_t kept = 0;
  args->dropped[token] = 0;
  args->trimmed[token] = 0;
  args->status[token] = CLB_ERR_NOT_FINITE;
  if (all_finite(logits, layer->experts)) {
    float scores[CLB_MAX_EXPERTS_PER_TOKEN];
    select_best(logits, layer->experts, k, indices);
    raw_scores(layer, logits, indices, k, scores);
    kept = 1;
    while (kept < k && (policy.threshold <= 0.0f || scores[kept] >= policy.threshold * scores[0]))
      ++kept;
    const float sum = divisor(layer, logits, logits[indices[0]], scores, kept);
    for (uint32_t rank = 0; rank < kept; ++rank)
      weights[rank] = scores[rank] / sum * layer->routed_scale;
    args->trimmed[token] = layer->experts_per_token > kept ? layer->experts_per_token - kept : 0;
    args->status[token] = CLB_OK;
  }
  args->kept[token] = kept;
  for (uint32_t rank = kept; rank < args->k_max; ++rank) {
    indices[rank] = CLB_ROUTING_NONE;
    weights[rank] = 0.0f;
  }
}

void clb_routing_select(const clb_routing_args* args) {
  check_args(args);
  for (uint32_t token = 0; token < args->tokens; ++token)
    select_token(args, token);
}

/* ----------------------------------------------------------------- bucket */

static void count_and_place(const clb_routing_args* args) {
  const uint32_t experts = args->layer->experts;
  (void)memset(args->counts, 0, experts * sizeof *args->counts);
  for (uint32_t token = 0; token < args->tokens; ++token) {
    const uint32_t* indices = args->indices + (size_t)token * args->k_max;
    for (uint32_t rank = 0; rank < args->kept[token]; ++rank) {
      if (indices[rank] != CLB_ROUTING_NONE) ++args->counts[indices[rank]];
    }
  }
  args->offsets[0] = 0;
  for (uint32_t e = 0; e < experts; ++e) {
    args->offsets[e + 1u] = args->offsets[e] + args->counts[e];
    args->counts[e] = 0;
  }
  for (uint32_t token = 0; token < args->tokens; ++token) {
    for (uint32_t rank = 0; rank < args->kept[token]; ++rank) {
      const uint32_t place = token * args->k_max + rank;
      const uint32_t e = args->indices[place];
      if (e == CLB_ROUTING_NONE) continue;
      const uint32_t at = args->offsets[e] + args->counts[e]++;
      args->token_list[at] = token;
      args->place_list[at] = place;
    }
  }
}

/* Does assignment `a` leave before `b`: smaller weight, or equal and a later token? A total order over places. */
static int leaves_first(const float* weights, uint32_t a, uint32_t b) {
  if (weights[a] < weights[b]) return 1;
  if (weights[a] > weights[b]) return 0;
  return a > b;
}

/* Restore the heap below `at`: a parent leaves before its children, so the root leaves first of all. */
static void sift_down(const float* weights, uint32_t* heap, uint32_t count, uint32_t at) {
  for (;;) {
    uint32_t first = at;
    const uint32_t child = 2u * at + 1u;
    if (child < count && leaves_first(weights, heap[child], heap[first])) first = child;
    if (child + 1u < count && leaves_first(weights, heap[child + 1u], heap[first])) first = child + 1u;
    if (first == at) return;
    const uint32_t place = heap[at];
    heap[at] = heap[first];
    heap[first] = place;
    at = first;
  }
}

/* Take the assignments that leave first out of one expert's places, which are only scratch here: the lists are built
   again afterwards. */
static void drop_excess(const clb_routing_args* args, uint32_t expert) {
  uint32_t* heap = args->place_list + args->offsets[expert];
  uint32_t count = args->counts[expert];
  for (uint32_t at = count / 2u; at > 0; --at)
    sift_down(args->weights, heap, count, at - 1u);
  while (count > args->max_tokens_per_expert) {
    const uint32_t place = heap[0];
    heap[0] = heap[--count];
    sift_down(args->weights, heap, count, 0);
    args->indices[place] = CLB_ROUTING_NONE;
    args->weights[place] = 0.0f;
    ++args->dropped[place / args->k_max];
  }
}

void clb_routing_bucket(const clb_routing_args* args) {
  check_args(args);
  count_and_place(args);
  if (args->max_tokens_per_expert == 0) return;
  uint32_t over = 0;
  for (uint32_t e = 0; e < args->layer->experts; ++e) {
    if (args->counts[e] <= args->max_tokens_per_expert) continue;
    drop_excess(args, e);
    ++over;
  }
  if (over > 0) count_and_place(args);
}

void clb_routing_run(const clb_routing_args* args) {
  clb_routing_select(args);
  clb_routing_bucket(args);
}
