/*
 * router.cuh: the choice of a token's experts by a warp, for prompts (router.cu) and decode (router_logits.cu). Device
 * code only. What it does and its host twin: router.cu.
 */
#ifndef CLB_ROUTER_CUH
#define CLB_ROUTER_CUH

#include "../engine_c/src/exact_math.h"
#include "device.cuh"

/* Order of finite floats as order of unsigned integers above 0; -0 and +0 are equal. */
CLB_DEVICE uint32_t clb_key_of(float value) {
  const uint32_t bits = (value == 0.0f) ? 0u : __float_as_uint(value);
  return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}

CLB_DEVICE float clb_value_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) ? (key & 0x7fffffffu) : ~key);
}

/* What a token's choice depends on beside its logits. */
struct clb_router_case {
  uint32_t slot; /* NONE: an idle row */
  uint32_t k;
  float threshold;
};

CLB_DEVICE clb_router_case clb_router_case_of(const clb_router_args& a, uint32_t token) {
  clb_router_case made = {(a.rows != nullptr) ? __ldcg(&a.rows[token].slot) : token, a.k, 0.0f};
  if (a.policy != nullptr && made.slot != CLB_NONE) {
    const clb_router_policy policy = a.policy[made.slot * a.policy_stride];
    if (policy.k != 0u) made.k = min(policy.k, a.k_max);
    made.threshold = policy.threshold;
  }
  return made;
}

/* The lowest of all lanes' numbers, NONE where a lane has none; ONE: mostly only one has, which is found sooner. */
template <bool ONE>
CLB_DEVICE uint32_t clb_lowest_of(uint32_t mine) {
  if constexpr (ONE) {
    const uint32_t holders = __ballot_sync(CLB_FULL_WARP, mine != CLB_NONE);
    if ((holders & (holders - 1u)) == 0u) return __shfl_sync(CLB_FULL_WARP, mine, (uint32_t)__ffs((int)holders) - 1u);
  }
  return __reduce_min_sync(CLB_FULL_WARP, mine);
}

/* One token by one warp. Lane l holds experts l, l + 32, ...; lane r ends up with the choice of rank r. */
template <uint32_t PER_LANE>
CLB_DEVICE void clb_route_token_of(const clb_router_args& a, uint32_t token, const clb_router_case& with,
                                   uint32_t* block_counts) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const float* row = a.logits + token * a.logits_stride;
  uint32_t keys[PER_LANE];
  bool finite = true;
#pragma unroll
  for (uint32_t i = 0u; i < PER_LANE; i++) {
    const float logit = (lane + i * CLB_WARP < a.experts) ? __ldcg(row + lane + i * CLB_WARP) : 0.0f;
    finite = finite && fabsf(logit) < __int_as_float(0x7f800000);
    keys[i] = (lane + i * CLB_WARP < a.experts) ? clb_key_of(logit) : 0u;
  }
  const uint32_t slot = with.slot;
  const bool idle = slot == CLB_NONE;
  const bool bad = !__all_sync(CLB_FULL_WARP, finite);
  const uint32_t k = (bad || idle) ? 0u : with.k;

  /* All scores are needed only where the denominator is the sum over all experts. */
  uint32_t best = 0u;
#pragma unroll
  for (uint32_t i = 0u; i < PER_LANE; i++)
    best = max(best, keys[i]);
  const float top = clb_value_of(__reduce_max_sync(CLB_FULL_WARP, best));
  float all = 1.0f;
  if (a.score == 0u && a.renormalise == 0u) {
    float sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0u; i < PER_LANE; i++)
      sum += (keys[i] != 0u) ? clb_exact_exp(clb_exact_add(clb_value_of(keys[i]), -top)) : 0.0f;
    all = clb_warp_sum(sum);
  }

  uint32_t my_index = 0u;
  uint32_t my_key = 0u;
  for (uint32_t rank = 0u; rank < k; rank++) {
    uint32_t local = keys[0];
    uint32_t where = 0u;
#pragma unroll
    for (uint32_t i = 1u; i < PER_LANE; i++) {
      if (keys[i] > local) {
        local = keys[i];
        where = i;
      }
    }
    const uint32_t winner = __reduce_max_sync(CLB_FULL_WARP, local);
    const uint32_t mine = (local == winner) ? lane + where * CLB_WARP : CLB_NONE;
    const uint32_t index = clb_lowest_of<(PER_LANE <= 4u)>(mine);
#pragma unroll
    for (uint32_t i = 0u; i < PER_LANE; i++)
      keys[i] = (index == lane + i * CLB_WARP) ? 0u : keys[i];
    if (lane == rank) {
      my_index = index;
      my_key = winner;
    }
  }

  const float value = clb_value_of(my_key);
  const float score = (a.score == 0u) ? clb_exact_exp(clb_exact_add(value, -top)) : clb_exact_sigmoid(value);
  const float best_score = __shfl_sync(CLB_FULL_WARP, score, 0);
  /* Kept is a prefix of the ranks, as on the host, and rank 0 always stays. */
  const bool passes = lane < k && (lane == 0u || score >= clb_exact_mul(with.threshold, best_score));
  const uint32_t kept = (uint32_t)__ffs((int)~__ballot_sync(CLB_FULL_WARP, passes)) - 1u;
  const bool in = lane < kept;
  const float chosen = clb_warp_sum(in ? score : 0.0f);
  const float sum = (a.renormalise != 0u) ? chosen : all;
  const float divisor = (sum > 0.0f) ? sum : 1.0f;
  if (lane < a.k_max) {
    a.indices[(uint64_t)token * a.k_max + lane] = in ? my_index : CLB_ROUTER_NONE;
    a.weights[(uint64_t)token * a.k_max + lane] = in ? __fdiv_rn(score, divisor) * a.routed_scale : 0.0f;
  }
  if (in && block_counts != nullptr) atomicAdd(&block_counts[my_index], 1u);
  if (in && a.expert_counts != nullptr) atomicAdd(&a.expert_counts[slot * a.counts_stride + my_index], 1u);
  if (lane == 0u) {
    a.kept[token] = kept;
    if (bad && !idle && a.rows != nullptr) a.rows[token].status = a.not_finite;
    if (a.slots != nullptr && !idle && !bad) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&a.slots[slot].assignments), kept);
      if (kept < a.k) atomicAdd(reinterpret_cast<unsigned long long*>(&a.slots[slot].trimmed), a.k - kept);
    }
  }
}

CLB_DEVICE void clb_route_token(const clb_router_args& a, uint32_t token, const clb_router_case& with,
                                uint32_t* block_counts) {
  if (a.experts <= 32u) {
    clb_route_token_of<1>(a, token, with, block_counts);
  } else if (a.experts <= 64u) {
    clb_route_token_of<2>(a, token, with, block_counts);
  } else if (a.experts <= 128u) {
    clb_route_token_of<4>(a, token, with, block_counts);
  } else if (a.experts <= 256u) {
    clb_route_token_of<8>(a, token, with, block_counts);
  } else {
    clb_route_token_of<CLB_ROUTER_MAX_EXPERTS / CLB_WARP>(a, token, with, block_counts);
  }
}

#endif /* CLB_ROUTER_CUH */
