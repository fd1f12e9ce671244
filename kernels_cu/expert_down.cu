/*
 * expert_down.cu: the second half of an FFN for at most 64 rows: down, the weighted sum of the ranks, the shared
 * expert, and the new residual. experts.cu has the first half.
 *
 * Operation  clb_expert_down_{bf16,fp16}: see abi.h. A unit is an item (an expert in use, or a part of the columns of
 *            the shared one) and two row tiles of it: pair by pair of row tiles, in each the items in order. A block
 *            takes a contiguous range of units, as long as every other in what it costs to read, and writes their
 *            results, one place each, to `partial`. Who completes a pair (a ticket says so) sums its places in order.
 *            The kernels with _8 are for at most 8 rows: the same bits, fewer registers.
 * Reference  tests/cuda/test_experts.py (numpy, float64).
 * Grid       blocks of 256 threads, CLB_DOWN_BLOCKS a multiprocessor. Dynamic shared memory: CLB_DOWN_SHARED,
 *            CLB_DOWN_8_SHARED.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   bytes of the experts in use: memory-bound. Qwen3-30B at one row: 8 x 3.1 MB = 5.9 us at 4.3 TB/s. Measured
 *            (H200, 2026-11-30): 11.2 us at one row, 44 at 8, 92 at 32.
 */
#include "experts.cuh"

#define DOWN_STAGES 4u
#define DOWN_8_STAGES 6u
#define PAIR 2u /* row tiles of a unit */
#define PAIR_COLS (PAIR * CLB_TILE)
/* Items of at most `rows` rows. */
#define MOST_ITEMS(rows)  \
  (CLB_SHARED_MAX_PARTS + \
   ((rows) * CLB_ROUTER_MAX_K < CLB_ROUTER_MAX_EXPERTS ? (rows) * CLB_ROUTER_MAX_K : CLB_ROUTER_MAX_EXPERTS))
#define RANKS_AHEAD 8u
static_assert(clb_pair_ring<DOWN_STAGES>::bytes == CLB_DOWN_SHARED, "abi.h says what the host reserves");
static_assert(clb_pair_ring<DOWN_8_STAGES>::bytes == CLB_DOWN_8_SHARED, "abi.h says what the host reserves");

/* One item: the parts of the shared expert come first. */
struct down_item {
  uint64_t weights; /* of its first column tile, row tile 0 */
  uint16_t begin;   /* column tiles before it */
  uint16_t tiles;
  uint16_t rows;
  uint16_t first; /* of its places in choice.places; SHARED: its places are the rows */

  static constexpr uint16_t SHARED = 0xffffu;

  __device__ __forceinline__ uint32_t row_words(const clb_expert_down_args& a) const {
    return (first != SHARED) ? a.width : a.shared_width;
  }
};

template <uint32_t MOST_ROWS>
struct down_shared {
  clb_sums<PAIR> sums;
  clb_choices<MOST_ROWS> choice;
  down_item items[MOST_ITEMS(MOST_ROWS)];
  uint32_t start[MOST_ITEMS(MOST_ROWS) + 1u]; /* cost of the items before it; last of all of them */
  float scale[MOST_ROWS * CLB_ROUTER_MAX_K];  /* the router's weights */
  uint32_t count;
  uint32_t complete;
};

template <class Choices>
CLB_DEVICE down_item make_item(const clb_expert_down_args& a, const Choices& choice, uint32_t number,
                               uint32_t row_count) {
  if (number >= a.shared_parts) {
    const uint32_t expert = choice.item_expert[number - a.shared_parts];
    return {a.experts[expert].down, 0u, (uint16_t)(a.width / CLB_TILE), (uint16_t)choice.rows_of(expert),
            choice.first[expert]};
  }
  const uint32_t across = a.shared_width / CLB_TILE;
  const uint32_t begin = number * across / a.shared_parts;
  const uint32_t end = (number + 1u) * across / a.shared_parts;
  return {a.shared->down + begin * CLB_PIECE, (uint16_t)begin, (uint16_t)(end - begin), (uint16_t)row_count,
          down_item::SHARED};
}

/* What a unit of it reads: two row tiles, and its rows in steps, half as much each. */
CLB_DEVICE uint32_t cost_of(const down_item& item) {
  return item.tiles * (2u + min(clb_passes_of(item.rows, CLB_STEP), CLB_PASS_STEPS));
}

/* start[i] = cost of the items before item i, by one warp; before it, start[i + 1] = cost of item i. */
CLB_DEVICE void sum_costs(uint32_t* start, uint32_t items) {
  const uint32_t lane = threadIdx.x;
  const uint32_t each = (items + CLB_WARP - 1u) / CLB_WARP;
  const uint32_t begin = min(lane * each, items);
  const uint32_t end = min(begin + each, items);
  uint32_t own = 0u;
  for (uint32_t i = begin; i < end; i++)
    own += start[i + 1u];
  uint32_t sum = own;
#pragma unroll
  for (uint32_t step = 1u; step < CLB_WARP; step *= 2u) {
    const uint32_t before = __shfl_up_sync(CLB_FULL_WARP, sum, step);
    sum += (lane >= step) ? before : 0u;
  }
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

template <uint32_t MOST_ROWS, uint32_t PASS_ROWS>
struct down_source {
  const clb_expert_down_args& a;
  const down_shared<MOST_ROWS>& shared;
  const unsigned char* at[PAIR];
  uint32_t left; /* pieces of this pass */
  down_place next;
  down_place end;
  uint32_t length; /* pieces of a pass of the unit before `next` */
  uint32_t passes; /* left of it, without the current one */

  __device__ __forceinline__ down_source(const clb_expert_down_args& args, const down_shared<MOST_ROWS>& memory,
                                         const down_place& from, const down_place& to)
      : a(args), shared(memory), left(0u), next(from), end(to), length(0u), passes(0u) {}

  __device__ __forceinline__ bool open() {
    if (passes > 0u) { /* the same again for the next rows */
      passes--;
      left = length;
      at[0] -= length * CLB_PIECE;
      at[1] -= length * CLB_PIECE;
      return true;
    }
    while (left == 0u) { /* a slice may be empty */
      if (!(next != end)) return false;
      const down_item& item = shared.items[next.item];
      const clb_slice slice(item.tiles);
      left = length = slice.end - slice.begin;
      const uint32_t tile = next.pair * PAIR;
      const unsigned char* from = reinterpret_cast<const unsigned char*>(item.weights);
      const uint32_t row_bytes = item.row_words(a) * (CLB_TILE * 2u); /* of a row tile */
      at[0] = from + (uint64_t)tile * row_bytes + slice.begin * CLB_PIECE + threadIdx.x % CLB_WARP * 16u;
      at[1] = at[0] + ((tile + 1u < a.hidden / CLB_TILE) ? row_bytes : 0u); /* the last again where there is no other */
      if (PASS_ROWS < MOST_ROWS && left > 0u) passes = max(clb_passes_of(item.rows, PASS_ROWS), 1u) - 1u;
      next.advance(shared.count);
    }
    return true;
  }
};

/* Operand B of row begin + lane / 4 of an item. */
template <uint32_t MOST_ROWS>
CLB_DEVICE clb_operand operand_of(const clb_expert_down_args& a, const down_shared<MOST_ROWS>& shared,
                                  const down_item& item, uint32_t begin) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t i = begin + lane / 4u;
  const bool there = i < item.rows;
  const bool routed = item.first != down_item::SHARED;
  uint32_t row = i;
  if (there && routed) row = shared.choice.places[item.first + i];
  const uint32_t* input = routed ? a.activation : a.shared_activation;
  const uint32_t tile = item.begin + clb_slice(item.tiles).begin;
  return {input + (uint64_t)row * item.row_words(a) + tile * CLB_TILE + lane % 4u * 4u, there};
}

/* What the warps have of rows begin .. of an item, a step at a time, goes to `partial`. */
template <class P, uint32_t STEPS, uint32_t MOST_ROWS>
CLB_DEVICE void put_partial(const clb_expert_down_args& a, down_shared<MOST_ROWS>& shared, const down_place& unit,
                            uint32_t begin, const float (&sum)[PAIR][STEPS][4], uint32_t& parity) {
  const down_item& item = shared.items[unit.item];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    shared.sums.put(parity, 0u, sum[0][s]);
    shared.sums.put(parity, 1u, sum[1][s]);
    __syncthreads();
    const uint32_t i = begin + s * CLB_STEP + threadIdx.x % 64u / 8u;
    const uint32_t tile = unit.pair * PAIR + clb_finisher() % PAIR;
    if (clb_finisher() / PAIR == s % 2u && i < item.rows && tile < a.hidden / CLB_TILE) {
      const uint32_t place = (item.first != down_item::SHARED) ? shared.choice.places[item.first + i]
                                                               : CLB_FEW_ROWS * (a.k_max + unit.item) + i;
      const float2 y = shared.sums.template take<P>(parity, clb_finisher() % PAIR);
      *reinterpret_cast<float2*>(a.partial + (uint64_t)place * a.hidden + tile * CLB_TILE + threadIdx.x % 8u * 2u) = y;
    }
    parity ^= 1u;
  }
}

template <class P, uint32_t STEPS, uint32_t STAGES, uint32_t MOST_ROWS, class Source>
CLB_DEVICE void down_pass(const clb_expert_down_args& a, clb_pair_ring<STAGES>& ring, Source& source,
                          down_shared<MOST_ROWS>& shared, const down_place& unit, uint32_t begin, uint32_t& parity) {
  const down_item& item = shared.items[unit.item];
  const clb_slice slice(item.tiles);
  clb_operand rows[STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++)
    rows[s] = operand_of(a, shared, item, begin + s * CLB_STEP);
  float sum[PAIR][STEPS][4];
  clb_multiply_pair<P, STEPS>(ring, source, slice.end - slice.begin, rows, sum);
  put_partial<P>(a, shared, unit, begin, sum, parity);
}

/* Weighted ranks in order, then the parts of the shared expert, for one row and two columns. */
template <uint32_t MOST_ROWS>
CLB_DEVICE float2 sum_ranks(const clb_expert_down_args& a, const down_shared<MOST_ROWS>& shared, uint32_t row,
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
template <class P, uint32_t MOST_ROWS>
CLB_DEVICE void finish_pair(const clb_expert_down_args& a, const down_shared<MOST_ROWS>& shared, uint32_t pair,
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
template <uint32_t MOST_ROWS>
CLB_DEVICE void find_items(const clb_expert_down_args& a, down_shared<MOST_ROWS>& shared, uint32_t count) {
  const uint32_t choices = (a.expert_count > 0u) ? count * a.k_max : 0u;
  const typename clb_choices<MOST_ROWS>::own own(a.indices, choices);
  for (uint32_t i = threadIdx.x; i < choices; i += CLB_MATMUL_THREADS)
    shared.scale[i] = __ldcg(a.weights + i);
  shared.choice.clear(a.expert_count);
  __syncthreads();
  shared.choice.fill(own, a.k_max, a.expert_count);
  const uint32_t items = (count > 0u) ? a.shared_parts + shared.choice.items : 0u;
  for (uint32_t i = threadIdx.x; i < items; i += CLB_MATMUL_THREADS) {
    shared.items[i] = make_item(a, shared.choice, i, count);
    shared.start[i + 1u] = cost_of(shared.items[i]);
  }
  if (threadIdx.x == 0u) shared.count = items;
  __syncthreads();
  if (threadIdx.x < CLB_WARP) sum_costs(shared.start, items);
  __syncthreads();
}

template <class P, uint32_t MOST_STEPS, uint32_t STAGES, uint32_t MOST_ROWS, class Source>
CLB_DEVICE void down_unit(const clb_expert_down_args& a, clb_pair_ring<STAGES>& ring, Source& source,
                          down_shared<MOST_ROWS>& shared, const down_place& unit, uint32_t& parity) {
  const uint32_t row_count = shared.items[unit.item].rows;
#pragma unroll 1
  for (uint32_t begin = 0u; begin < row_count; begin += MOST_STEPS * CLB_STEP) {
    const uint32_t rows = row_count - begin;
    if (MOST_STEPS == 1u || rows <= 8u) {
      down_pass<P, 1>(a, ring, source, shared, unit, begin, parity);
    } else if (rows <= 16u) {
      down_pass<P, 2>(a, ring, source, shared, unit, begin, parity);
    } else {
      down_pass<P, MOST_STEPS>(a, ring, source, shared, unit, begin, parity);
    }
  }
}

/* Before the wait: everything that says which weights, and the first of them. */
template <class P, uint32_t MOST_STEPS, uint32_t STAGES>
CLB_DEVICE void down(const clb_expert_down_args& a) {
  constexpr uint32_t MOST_ROWS = (MOST_STEPS == 1u) ? CLB_STEP : CLB_FEW_ROWS;
  extern __shared__ uint4 memory[];
  __shared__ down_shared<MOST_ROWS> shared;
  const uint32_t count = min(__ldcg(a.row_count), MOST_ROWS);
  const uint32_t pairs = (a.hidden + PAIR_COLS - 1u) / PAIR_COLS;
  find_items(a, shared, count);
  const uint32_t items = shared.count;
  down_place unit = first_place(shared.start, items, pairs, blockIdx.x);
  const down_place end = first_place(shared.start, items, pairs, blockIdx.x + 1u);
  down_source<MOST_ROWS, MOST_STEPS * CLB_STEP> source(a, shared, unit, end);
  clb_pair_ring<STAGES> ring(memory);
  uint32_t started = 0u;
  if (items > 0u) ring.start(source, started);
  ring.complete_start(started);
  clb_wait_for_inputs();
  clb_release_dependents();
  uint32_t parity = 0u;
  uint32_t done = 0u; /* units of this pair */
  while (items > 0u && unit != end) {
    down_unit<P, MOST_STEPS>(a, ring, source, shared, unit, parity);
    done++;
    const uint32_t pair = unit.pair;
    unit.advance(items);
    if (unit.pair == pair && unit != end) continue;
    if (completes(&a.tickets[pair], done, items, shared.complete)) finish_pair<P>(a, shared, pair, count);
    done = 0u;
  }
  /* Rows without any expert. */
  for (uint32_t pair = blockIdx.x; items == 0u && pair < pairs; pair += gridDim.x)
    finish_pair<P>(a, shared, pair, count);
  clb_copies_wait<0>();
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_DOWN_BLOCKS)
    clb_expert_down_bf16(const __grid_constant__ clb_expert_down_args a) {
  down<clb_bf16, CLB_PASS_STEPS, DOWN_STAGES>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_DOWN_BLOCKS)
    clb_expert_down_fp16(const __grid_constant__ clb_expert_down_args a) {
  down<clb_fp16, CLB_PASS_STEPS, DOWN_STAGES>(a);
}

extern "C" __global__ void __maxnreg__(80) clb_expert_down_8_bf16(const __grid_constant__ clb_expert_down_args a) {
  down<clb_bf16, 1, DOWN_8_STAGES>(a);
}

extern "C" __global__ void __maxnreg__(80) clb_expert_down_8_fp16(const __grid_constant__ clb_expert_down_args a) {
  down<clb_fp16, 1, DOWN_8_STAGES>(a);
}
