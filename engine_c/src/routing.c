/*
 * routing.c: see routing.h for the rules and an example. Host twin of the router and bucket kernels.
 *
 * Owns nothing. A token's row is written from that token's logits and policy alone; only bucket looks across tokens.
 */
#include "routing.h"

#include <float.h>
#include <stdbool.h>
#include <string.h>

#include "../cpu/float4.h"
#include "exact_math.h"
#include "invariant.h"

static void check_args(const clb_routing_args* args) {
  CLB_ASSERT(args != NULL);
  CLB_ASSERT(args->layer != NULL);
  CLB_ASSERT(args->layer->experts >= 1u && args->layer->experts <= CLB_MAX_EXPERTS);
  CLB_ASSERT(args->layer->experts_per_token >= 1u);
  CLB_ASSERT(args->layer->experts_per_token <= args->layer->experts);
  CLB_ASSERT(args->k_max >= 1u && args->k_max <= CLB_MAX_EXPERTS_PER_TOKEN);
  CLB_ASSERT(args->logits_stride >= args->layer->experts);
  CLB_ASSERT(args->tokens <= UINT32_MAX / CLB_MAX_EXPERTS_PER_TOKEN);
}

/* ----------------------------------------------------------------- select */

#define LANES 32u   /* of a warp of the router kernel; a multiple of four */
#define COLUMNS 16u /* in four vectors of four */
_Static_assert(COLUMNS >= CLB_MAX_EXPERTS_PER_TOKEN, "the k-th largest column exists");

typedef union clb_columns {
  clb_float4 four[COLUMNS / 4u];
  float each[COLUMNS];
} clb_columns;

/* The largest logit of each column; expert e is in column e % COLUMNS. Returns false iff a logit is NaN or infinite. */
static bool column_tops(const float* logits, uint32_t experts, clb_columns* top) {
  const clb_float4 least = {-FLT_MAX, -FLT_MAX, -FLT_MAX, -FLT_MAX};
  const uint32_t whole = experts - experts % COLUMNS;
  clb_columns rest = {{least, least, least, least}};
  clb_columns best = rest;
  clb_int4 finite = {-1, -1, -1, -1};
  (void)memcpy(rest.each, logits + whole, (experts - whole) * sizeof rest.each[0]);
  for (uint32_t first = 0; first < experts; first += COLUMNS) {
    const float* row = first < whole ? logits + first : rest.each;
    for (uint32_t i = 0; i < COLUMNS / 4u; ++i) {
      const clb_float4 next = clb_float4_load(row + 4u * i);
      finite &= clb_float4_finite(next);
      best.four[i] = clb_float4_max(next, best.four[i]);
    }
  }
  *top = best;
  return (finite[0] & finite[1] & finite[2] & finite[3]) != 0;
}

/* The k-th largest top. At least k logits reach it, since each top is one, and few more do. */
static float floor_of(const clb_columns* top, uint32_t k) {
  const int32_t enough = (int32_t)k;
  const clb_float4 least = {-FLT_MAX, -FLT_MAX, -FLT_MAX, -FLT_MAX};
  const clb_int4 none = {0, 0, 0, 0};
  clb_int4 reached[COLUMNS / 4u] = {none, none, none, none};
  for (uint32_t c = 0; c < COLUMNS; ++c) {
    for (uint32_t i = 0; i < COLUMNS / 4u; ++i) {
      reached[i] -= top->each[c] >= top->four[i]; /* true is -1 */
    }
  }
  clb_columns floor;
  for (uint32_t i = 0; i < COLUMNS / 4u; ++i) {
    floor.four[i] = clb_float4_where(reached[i] >= enough, top->four[i], least);
  }
  floor.four[0] =
      clb_float4_max(clb_float4_max(floor.four[0], floor.four[1]), clb_float4_max(floor.four[2], floor.four[3]));
  const float low = floor.each[0] > floor.each[1] ? floor.each[0] : floor.each[1];
  const float high = floor.each[2] > floor.each[3] ? floor.each[2] : floor.each[3];
  return low > high ? low : high;
}

/* The k largest into best[0..k), largest first. Returns false iff a logit is NaN or infinite.
   An expert moves ahead only of strictly smaller ones, and experts come in ascending order, so ties go to the lowest
   index. No branch can be predicted there; the floor leaves about k + 3 experts to it, where without one all experts
   were tested and k ln(experts / k) entered. */
static bool select_best(const float* logits, uint32_t experts, uint32_t k, uint32_t* best) {
  clb_columns top;
  uint32_t candidates[CLB_MAX_EXPERTS];
  if (!column_tops(logits, experts, &top)) {
    return false;
  }
  const float floor = experts > 2u * COLUMNS ? floor_of(&top, k) : -FLT_MAX;
  uint32_t count = 0;
  for (uint32_t e = 0; e < experts; ++e) {
    candidates[count] = e;
    count += logits[e] >= floor ? 1u : 0u;
  }
  uint32_t filled = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t e = candidates[i];
    if (filled == k && logits[e] <= logits[best[k - 1u]]) {
      continue;
    }
    filled += filled < k ? 1u : 0u;
    uint32_t at = filled - 1u;
    for (; at > 0u && logits[best[at - 1u]] < logits[e]; --at) {
      best[at] = best[at - 1u];
    }
    best[at] = e;
  }
  CLB_ASSERT(filled == k);
  return true;
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

/* The sum of values[0 .. count), count a power of two, by halves: value i and value i + count / 2 first. As the lanes
   of a warp do it, so that the device's weights are these to the bit. Overwrites the values. */
static float tree_sum(float* values, uint32_t count) {
  for (uint32_t half = count / 2u; half > 0u; half /= 2u) {
    for (uint32_t i = 0; i < half; ++i) {
      values[i] += values[i + half];
    }
  }
  return values[0];
}

/* sum of clb_exact_exp(logit - largest): lane l adds experts l, l + 32, ... in index order; then the lanes as a tree.
 */
static float sum_of_exponentials(const float* logits, uint32_t experts, float largest) {
  float lanes[LANES];
  uint32_t e = 0;
  (void)memset(lanes, 0, sizeof lanes);
  for (; e + 4u <= experts; e += 4u) {
    float* const four = lanes + e % LANES;
    clb_float4_store(clb_float4_load(four) + clb_float4_exp(clb_float4_load(logits + e) - largest), four);
  }
  for (; e < experts; ++e) {
    lanes[e % LANES] += clb_exact_exp(logits[e] - largest);
  }
  return tree_sum(lanes, LANES);
}

/* What the kept scores are divided by. */
static float divisor(const clb_layer_desc* layer, const float* logits, float largest, const float* scores,
                     uint32_t kept) {
  float sum = 0.0f;
  if (layer->renormalise != 0u) {
    float ranks[CLB_MAX_EXPERTS_PER_TOKEN];
    (void)memset(ranks, 0, sizeof ranks);
    (void)memcpy(ranks, scores, kept * sizeof ranks[0]);
    sum = tree_sum(ranks, CLB_MAX_EXPERTS_PER_TOKEN);
  } else if (layer->score == CLB_SCORE_SOFTMAX) {
    sum = sum_of_exponentials(logits, layer->experts, largest);
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
  const uint32_t k = policy.k != 0u ? policy.k : layer->experts_per_token;
  CLB_ASSERT(k <= args->k_max && k <= layer->experts);
  uint32_t kept = 0;
  args->dropped[token] = 0;
  args->trimmed[token] = 0;
  args->status[token] = CLB_ERR_NOT_FINITE;
  if (select_best(logits, layer->experts, k, indices)) {
    float scores[CLB_MAX_EXPERTS_PER_TOKEN];
    raw_scores(layer, logits, indices, k, scores);
    kept = 1;
    while (kept < k && (policy.threshold <= 0.0f || scores[kept] >= policy.threshold * scores[0])) {
      ++kept;
    }
    const float sum = divisor(layer, logits, logits[indices[0]], scores, kept);
    for (uint32_t rank = 0; rank < kept; ++rank) {
      weights[rank] = scores[rank] / sum * layer->routed_scale;
    }
    args->trimmed[token] = layer->experts_per_token > kept ? layer->experts_per_token - kept : 0u;
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
  for (uint32_t token = 0; token < args->tokens; ++token) {
    select_token(args, token);
  }
}

/* ----------------------------------------------------------------- bucket */

static void count_and_place(const clb_routing_args* args) {
  const uint32_t experts = args->layer->experts;
  (void)memset(args->counts, 0, experts * sizeof *args->counts);
  for (uint32_t token = 0; token < args->tokens; ++token) {
    const uint32_t* indices = args->indices + (size_t)token * args->k_max;
    for (uint32_t rank = 0; rank < args->kept[token]; ++rank) {
      if (indices[rank] != CLB_ROUTING_NONE) {
        ++args->counts[indices[rank]];
      }
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
      if (e == CLB_ROUTING_NONE) {
        continue;
      }
      const uint32_t at = args->offsets[e] + args->counts[e];
      ++args->counts[e];
      args->token_list[at] = token;
      args->place_list[at] = place;
    }
  }
}

/* Does assignment `a` leave before `b`: smaller weight, or equal and a later token? A total order over places. */
static bool leaves_first(const float* weights, uint32_t a, uint32_t b) {
  if (weights[a] < weights[b]) {
    return true;
  }
  if (weights[a] > weights[b]) {
    return false;
  }
  return a > b;
}

/* Restore the heap below `top`: a parent leaves before its children, so the root leaves first of all. */
static void sift_down(const float* weights, uint32_t* heap, uint32_t count, uint32_t top) {
  uint32_t at = top;
  for (;;) {
    uint32_t first = at;
    const uint32_t child = 2u * at + 1u;
    if (child < count && leaves_first(weights, heap[child], heap[first])) {
      first = child;
    }
    if (child + 1u < count && leaves_first(weights, heap[child + 1u], heap[first])) {
      first = child + 1u;
    }
    if (first == at) {
      return;
    }
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
  for (uint32_t at = count / 2u; at > 0u; --at) {
    sift_down(args->weights, heap, count, at - 1u);
  }
  while (count > args->max_tokens_per_expert) {
    const uint32_t place = heap[0];
    --count;
    heap[0] = heap[count];
    sift_down(args->weights, heap, count, 0);
    args->indices[place] = CLB_ROUTING_NONE;
    args->weights[place] = 0.0f;
    ++args->dropped[place / args->k_max];
  }
}

void clb_routing_bucket(const clb_routing_args* args) {
  check_args(args);
  count_and_place(args);
  if (args->max_tokens_per_expert == 0u) {
    return;
  }
  uint32_t over = 0;
  for (uint32_t e = 0; e < args->layer->experts; ++e) {
    if (args->counts[e] <= args->max_tokens_per_expert) {
      continue;
    }
    drop_excess(args, e);
    ++over;
  }
  if (over > 0u) {
    count_and_place(args);
  }
}

void clb_routing_run(const clb_routing_args* args) {
  clb_routing_select(args);
  clb_routing_bucket(args);
}
