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
#include "down.cuh"

#define DOWN_STAGES 4u
#define DOWN_8_STAGES 6u
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

  template <class Choices>
  static __device__ __forceinline__ down_item make(const clb_expert_down_args& a, const Choices& choice,
                                                   uint32_t number, uint32_t row_count) {
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
  __device__ __forceinline__ uint32_t cost() const {
    return tiles * (2u + min(clb_passes_of(rows, CLB_STEP), CLB_PASS_STEPS));
  }
};

template <uint32_t MOST_ROWS, uint32_t PASS_ROWS>
struct down_source {
  const clb_expert_down_args& a;
  const down_shared<down_item, MOST_ROWS>& shared;
  const unsigned char* at[PAIR];
  uint32_t left; /* pieces of this pass */
  down_place next;
  down_place end;
  uint32_t length; /* pieces of a pass of the unit before `next` */
  uint32_t passes; /* left of it, without the current one */

  __device__ __forceinline__ down_source(const clb_expert_down_args& args,
                                         const down_shared<down_item, MOST_ROWS>& memory, const down_place& from,
                                         const down_place& to)
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
CLB_DEVICE clb_operand operand_of(const clb_expert_down_args& a, const down_shared<down_item, MOST_ROWS>& shared,
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

template <class P, uint32_t STEPS, uint32_t STAGES, uint32_t MOST_ROWS, class Source>
CLB_DEVICE void down_pass(const clb_expert_down_args& a, clb_pair_ring<STAGES>& ring, Source& source,
                          down_shared<down_item, MOST_ROWS>& shared, const down_place& unit, uint32_t begin,
                          uint32_t& parity) {
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

template <class P, uint32_t MOST_STEPS, uint32_t STAGES, uint32_t MOST_ROWS, class Source>
CLB_DEVICE void down_unit(const clb_expert_down_args& a, clb_pair_ring<STAGES>& ring, Source& source,
                          down_shared<down_item, MOST_ROWS>& shared, const down_place& unit, uint32_t& parity) {
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
  __shared__ down_shared<down_item, MOST_ROWS> shared;
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
