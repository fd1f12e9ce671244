/*
 * down.cuh: what the second halves of an FFN for few rows (expert_down.cu, down_mixed.cu) share: which units there are
 * and who takes them, where partial results go, and what becomes of them. Device code only.
 *
 * Item: what a unit reads. It has `rows`, and `first`, the number of its first place in choice.places, or SHARED where
 * its places are the rows; Item::make(args, choices, number, rows) and cost(), in whatever unit all items have.
 */
#ifndef CLB_DOWN_CUH
#define CLB_DOWN_CUH

#include "experts.cuh"

#define PAIR 2u /* row tiles of a unit */
#define PAIR_COLS (PAIR * CLB_TILE)
/* Items of at most `rows` rows. */
#define MOST_ITEMS(rows)  \
  (CLB_SHARED_MAX_PARTS + \
   ((rows) * CLB_ROUTER_MAX_K < CLB_ROUTER_MAX_EXPERTS ? (rows) * CLB_ROUTER_MAX_K : CLB_ROUTER_MAX_EXPERTS))
#define RANKS_AHEAD 8u

template <class Item, uint32_t MOST_ROWS>
struct down_shared {
  clb_sums<PAIR> sums;
  clb_choices<MOST_ROWS> choice;
  Item items[MOST_ITEMS(MOST_ROWS)];
  uint32_t start[MOST_ITEMS(MOST_ROWS) + 1u]; /* cost of the items before it; last of all of them */
  float scale[MOST_ROWS * CLB_ROUTER_MAX_K];  /* the router's weights */
  uint32_t count;
  uint32_t complete;
};

/* start[i] = cost of the items before item i, by one warp; before it, start[i + 1] = cost of item i. */
CLB_DEVICE void sum_costs(uint32_t* start, uint32_t items) {
  const uint32_t lane = threadIdx.x;
  const uint32_t each = (items + CLB_WARP - 1u) / CLB_WARP;
  const uint32_t begin = min(lane * each, items);
  const uint32_t end = min(begin + each, items);
  uint32_t own = 0u;
  for (uint32_t i = begin; i < end; i++)
    own += start[i + 1u];
  const uint32_t sum = clb_warp_prefix(own, lane);
  uint32_t at = sum - own;
  if (lane == 0u) start[0] = 0u;
  for (uint32_t i = begin; i < end; i++) {
    at += start[i + 1u];
    start[i + 1u] = at;
  }
}

/* A unit's number in two parts. */
struct down_place {
  uint32_t pair;
  uint32_t item;

  __device__ __forceinline__ bool operator!=(const down_place& other) const {
    return pair != other.pair || item != other.item;
  }
  __device__ __forceinline__ void advance(uint32_t items) {
    item++;
    if (item < items) return;
    item = 0u;
    pair++;
  }
};

/* The first unit of block `block`. */
CLB_DEVICE down_place first_place(const uint32_t* start, uint32_t items, uint32_t pairs, uint32_t block) {
  const uint32_t all = max(start[items], 1u);
  const uint32_t part = pairs * block % gridDim.x; /* of a pair; no division of 64 bits, which takes long */
  const uint32_t rest = all / gridDim.x * part + all % gridDim.x * part / gridDim.x;
  down_place place = {pairs * block / gridDim.x, 0u};
  uint32_t high = items; /* the lowest item that starts at or behind `rest` is in item .. high */
  while (place.item < high) {
    const uint32_t middle = (place.item + high) / 2u;
    if (start[middle] >= rest) {
      high = middle;
    } else {
      place.item = middle + 1u;
    }
  }
  if (place.item < items) return place;
  return {place.pair + 1u, 0u};
}

/* What the warps have of rows begin .. of an item, a step at a time, goes to `partial`. */
template <class P, uint32_t STEPS, class Item, uint32_t MOST_ROWS>
CLB_DEVICE void put_partial(const clb_expert_down_args& a, down_shared<Item, MOST_ROWS>& shared, const down_place& unit,
                            uint32_t begin, const float (&sum)[PAIR][STEPS][4], uint32_t& parity) {
  const Item& item = shared.items[unit.item];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    shared.sums.put(parity, 0u, sum[0][s]);
    shared.sums.put(parity, 1u, sum[1][s]);
    __syncthreads();
    const uint32_t i = begin + s * CLB_STEP + threadIdx.x % 64u / 8u;
    const uint32_t tile = unit.pair * PAIR + clb_finisher() % PAIR;
    if (clb_finisher() / PAIR == s % 2u && i < item.rows && tile < a.hidden / CLB_TILE) {
      const uint32_t place = (item.first != Item::SHARED) ? shared.choice.places[item.first + i]
                                                          : CLB_FEW_ROWS * (a.k_max + unit.item) + i;
      const float2 y = shared.sums.template take<P>(parity, clb_finisher() % PAIR);
      *reinterpret_cast<float2*>(a.partial + (uint64_t)place * a.hidden + tile * CLB_TILE + threadIdx.x % 8u * 2u) = y;
    }
    parity ^= 1u;
  }
}

/* Weighted ranks in order, then the parts of the shared expert, for one row and two columns. */
template <class Item, uint32_t MOST_ROWS>
CLB_DEVICE float2 sum_ranks(const clb_expert_down_args& a, const down_shared<Item, MOST_ROWS>& shared, uint32_t row,
                            uint32_t col) {
  const uint32_t ranks = (a.expert_count > 0u) ? a.k_max : 0u;
  const float shared_scale = (a.shared_scale != nullptr) ? a.shared_scale[row] : 1.0f;
  float2 y = make_float2(0.0f, 0.0f);
#pragma unroll 1
  for (uint32_t begin = 0u; begin < ranks + a.shared_parts; begin += RANKS_AHEAD) {
    float weight[RANKS_AHEAD];
    float2 part[RANKS_AHEAD];
#pragma unroll
    for (uint32_t r = 0u; r < RANKS_AHEAD; r++) {
      const uint32_t rank = begin + r;
      const bool routed = rank < ranks;
      const uint32_t place = routed ? row * a.k_max + rank : CLB_FEW_ROWS * (a.k_max + rank - ranks) + row;
      weight[r] = routed ? shared.scale[place] : (rank < ranks + a.shared_parts) ? shared_scale : 0.0f;
      part[r] = make_float2(0.0f, 0.0f);
      if (weight[r] == 0.0f) continue; /* no expert in this rank */
      part[r] = __ldcg(reinterpret_cast<const float2*>(a.partial + (uint64_t)place * a.hidden + col));
    }
#pragma unroll
    for (uint32_t r = 0u; r < RANKS_AHEAD; r++) {
      y.x = fmaf(weight[r], part[r].x, y.x);
      y.y = fmaf(weight[r], part[r].y, y.y);
    }
  }
  return y;
}

/* The new residual at the columns of `pair`: 16 rows at a time, two columns a thread. */
template <class P, class Item, uint32_t MOST_ROWS>
CLB_DEVICE void finish_pair(const clb_expert_down_args& a, const down_shared<Item, MOST_ROWS>& shared, uint32_t pair,
                            uint32_t count) {
  const clb_stream stream = {a.residual, a.next_norm, a.next_input, nullptr, a.next_sumsq, a.hidden};
  const uint32_t col = pair * PAIR_COLS + threadIdx.x % 16u * 2u;
  const bool there = col < a.hidden;
  const float2 norm = clb_read_pair(a.next_norm + col, there);
#pragma unroll 1
  for (uint32_t begin = 0u; begin < count; begin += CLB_MATMUL_THREADS / 16u) {
    const uint32_t row = begin + threadIdx.x / 16u;
    const bool valid = there && row < count;
    const float2 x = clb_read_pair(a.residual + (uint64_t)row * a.hidden + col, valid);
    float2 y = make_float2(0.0f, 0.0f);
    if (valid) y = sum_ranks(a, shared, row, col);
    clb_store_residual<P>(stream, row, col, make_float2(x.x + y.x, x.y + y.y), norm, valid);
  }
}

/* This block has written `units` units of a pair: are these the last? Then what all blocks wrote is there. */
CLB_DEVICE bool completes(uint32_t* ticket, uint32_t units, uint32_t all, uint32_t& complete) {
  __syncthreads();
  if (threadIdx.x == 0u) {
    __threadfence();
    const bool last = atomicAdd(ticket, units) + units == all;
    if (last) *ticket = 0u; /* for the next step */
    __threadfence();
    complete = last ? 1u : 0u;
  }
  __syncthreads();
  return complete != 0u;
}

/* Items, their weights and costs; ends with a barrier. All of it may be read before the wait. */
template <class Item, uint32_t MOST_ROWS>
CLB_DEVICE void find_items(const clb_expert_down_args& a, down_shared<Item, MOST_ROWS>& shared, uint32_t count) {
  const uint32_t choices = (a.expert_count > 0u) ? count * a.k_max : 0u;
  const typename clb_choices<MOST_ROWS>::own own(a.indices, choices);
  for (uint32_t i = threadIdx.x; i < choices; i += CLB_MATMUL_THREADS)
    shared.scale[i] = __ldcg(a.weights + i);
  shared.choice.clear(a.expert_count);
  __syncthreads();
  shared.choice.fill(own, a.k_max, a.expert_count);
  const uint32_t items = (count > 0u) ? a.shared_parts + shared.choice.items : 0u;
  for (uint32_t i = threadIdx.x; i < items; i += CLB_MATMUL_THREADS) {
    shared.items[i] = Item::make(a, shared.choice, i, count);
    shared.start[i + 1u] = shared.items[i].cost();
  }
  if (threadIdx.x == 0u) shared.count = items;
  __syncthreads();
  if (threadIdx.x < CLB_WARP) sum_costs(shared.start, items);
  __syncthreads();
}

#endif /* CLB_DOWN_CUH */
