/*
 * capacity.cu: the most tokens that one expert takes from a step (max_tokens_per_expert).
 *
 * Operation  clb_capacity: see abi.h. Off by default: the node is in a step's graph only where there is a limit.
 * Reference  engine_c/src/routing.c, its host twin: what is dropped is equal bit by bit for equal weights.
 * Grid       a block of 256 threads an expert.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   an expert with n assignments over the limit reads n places and their weights, 8 bytes each, in each of
 *            some four rounds, from L2: T = 8192, K = 8 over 128 experts 2.6 MB. A round is two latencies of L2,
 *            counts in shared memory that mostly hit one digit, and three barriers. Few rows: 64 * K indices a block.
 *            Target: 10 us for 64 tokens, 30 us for 8,192.
 *            Measured (H200, 2026-11-30): 5 us for 64, 27 to 39 us for 8,192.
 *
 * An assignment's place in the order (weight descending, token ascending) is one number of 64 bits (block.cuh);
 * numbers of one expert differ. The max_tokens-th largest is found digit by digit, from the highest, 8 bits at a time,
 * as far as needed: counts of digits in shared memory, integers, so that no order of threads shows. What is smaller is
 * dropped.
 */
#include "block.cuh"

#define DIGITS 256u /* one a thread */

struct capacity_shared {
  uint32_t found[CLB_FEW_ROWS]; /* places of the expert's assignments, in any order */
  uint32_t count;
  uint32_t digits[DIGITS];
  uint32_t totals[CLB_CAPACITY_THREADS / CLB_WARP];
  uint32_t digit;
  uint32_t above;  /* assignments with a larger digit */
  uint32_t within; /* with this one */
};

/* Few rows: the expert's assignments into shared.found. A token has an expert once. */
CLB_DEVICE void find(const clb_capacity_args& a, capacity_shared& shared) {
  if (threadIdx.x == 0u) shared.count = 0u;
  __syncthreads();
  const uint32_t ranks = min(*a.token_count, CLB_FEW_ROWS) * a.k_max;
  for (uint32_t place = threadIdx.x; place < ranks; place += CLB_CAPACITY_THREADS) {
    if (a.indices[place] == blockIdx.x) shared.found[atomicAdd(&shared.count, 1u)] = place;
  }
  __syncthreads();
}

CLB_DEVICE uint64_t order_of(const clb_capacity_args& a, uint32_t place) {
  return clb_place_of(a.weights[place], place);
}

/* The digit of the wanted-th largest number among those that were counted, and how many have a larger one. */
CLB_DEVICE void choose_digit(capacity_shared& shared, uint32_t wanted) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t warp = threadIdx.x / CLB_WARP;
  const uint32_t mine = DIGITS - 1u - threadIdx.x; /* the largest digit first */
  const uint32_t own = shared.digits[mine];
  uint32_t sum = clb_warp_prefix(own, lane);
  if (lane == CLB_WARP - 1u) shared.totals[warp] = sum;
  __syncthreads();
  for (uint32_t w = 0u; w < warp; w++)
    sum += shared.totals[w];
  if (sum >= wanted && sum - own < wanted) {
    shared.digit = mine;
    shared.above = sum - own;
    shared.within = own;
  }
  __syncthreads();
}

/* Below every number of a list of more than max_tokens that stays, above every other. */
CLB_DEVICE uint64_t border_of(const clb_capacity_args& a, capacity_shared& shared, const uint32_t* list,
                              uint32_t count) {
  uint64_t border = 0u;
  uint32_t wanted = a.max_tokens;
  for (uint32_t bits = 64u; bits > 0u; bits -= 8u) {
    const uint32_t shift = bits - 8u;
    shared.digits[threadIdx.x] = 0u;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += CLB_CAPACITY_THREADS) {
      const uint64_t order = order_of(a, list[i]);
      const bool same = bits == 64u || (order >> bits) == (border >> bits);
      if (same) atomicAdd(&shared.digits[(uint32_t)(order >> shift) % DIGITS], 1u);
    }
    __syncthreads();
    choose_digit(shared, wanted);
    border |= (uint64_t)shared.digit << shift;
    wanted -= shared.above;
    if (shared.within == wanted) break; /* all with this digit stay: what is below it does not matter */
    __syncthreads();
  }
  return border;
}

CLB_DEVICE void drop(const clb_capacity_args& a, uint32_t place) {
  const uint32_t minus_one = 0xffffffffu;
  const uint32_t token = place / a.k_max;
  a.indices[place] = CLB_ROUTER_NONE;
  a.weights[place] = 0.0f;
  if (a.block_counts != nullptr)
    atomicAdd(&a.block_counts[(uint64_t)(token / CLB_ROUTER_BLOCK_TOKENS) * a.experts + blockIdx.x], minus_one);
  if (a.rows == nullptr) return;
  const uint32_t slot = a.rows[token].slot;
  if (a.slots != nullptr) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&a.slots[slot].dropped), 1ull);
    atomicAdd(reinterpret_cast<unsigned long long*>(&a.slots[slot].assignments), ~0ull);
  }
  if (a.expert_counts != nullptr) atomicAdd(&a.expert_counts[slot * a.counts_stride + blockIdx.x], minus_one);
}

extern "C" __global__ void __launch_bounds__(CLB_CAPACITY_THREADS)
    clb_capacity(const __grid_constant__ clb_capacity_args a) {
  __shared__ capacity_shared shared;
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t* list = shared.found;
  uint32_t count = 0u;
  if (a.offsets != nullptr) {
    list = a.places + a.offsets[blockIdx.x];
    count = a.offsets[blockIdx.x + 1u] - a.offsets[blockIdx.x];
  } else {
    find(a, shared);
    count = shared.count;
  }
  if (count <= a.max_tokens) return;
  const uint64_t border = border_of(a, shared, list, count);
  for (uint32_t i = threadIdx.x; i < count; i += CLB_CAPACITY_THREADS) {
    if (order_of(a, list[i]) < border) drop(a, list[i]);
  }
}
