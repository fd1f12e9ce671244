/*
 * down_mixed.cu: the second half of an FFN for at most 64 rows, of experts that may each have another format: down, the
 * weighted sum of the ranks, the shared expert, and the new residual. gate_up_mixed.cu has the first half.
 *
 * Operation  clb_expert_down_mixed and, for at most 8 rows, clb_expert_down_mixed_8, with the same bits: see abi.h.
 * Units and their order are those of expert_down.cu; a block branches on the unit's format. Reference
 * tests/cuda/test_quant.py (numpy, float64). Grid       blocks of 256 threads, CLB_DOWN_MIXED_BLOCKS or
 * CLB_DOWN_MIXED_8_BLOCKS a multiprocessor. Dynamic shared memory: CLB_QUANT_SHARED of CLB_DOWN_MIXED_STAGES (_8_), 2
 * matrices, a.meta. Needs      sm_80; sm_90 for programmatic edges. Roofline   bytes of the experts in use:
 * memory-bound. Qwen3-30B at one row, int4 in groups of 64: 8 x 0.8 MB = 1.6 us at 4.3 TB/s.
 */
#include "down.cuh"
#include "quant.cuh"

/* One item: the parts of the shared expert come first. */
struct down_item {
  uint64_t weights;
  uint16_t begin; /* pieces before it */
  uint16_t pieces;
  uint16_t rows;
  uint16_t first; /* of its places in choice.places; SHARED: its places are the rows */
  uint32_t format;

  static constexpr uint16_t SHARED = 0xffffu;

  __device__ __forceinline__ uint32_t row_words(const clb_expert_down_args& a) const {
    return (first != SHARED) ? a.width : a.shared_width;
  }

  template <class Choices>
  static __device__ __forceinline__ down_item make(const clb_expert_down_args& a, const Choices& choice,
                                                   uint32_t number, uint32_t row_count) {
    if (number >= a.shared_parts) {
      const uint32_t expert = choice.item_expert[number - a.shared_parts];
      const uint32_t format = a.experts[expert].down_format;
      return {a.experts[expert].down,
              0u,
              (uint16_t)clb_packing(format, a.width).pieces,
              (uint16_t)choice.rows_of(expert),
              choice.first[expert],
              format};
    }
    const uint32_t format = a.shared->down_format;
    const uint32_t across = clb_packing(format, a.shared_width).pieces;
    const uint32_t begin = number * across / a.shared_parts;
    const uint32_t end = (number + 1u) * across / a.shared_parts;
    return {a.shared->down, (uint16_t)begin, (uint16_t)(end - begin), (uint16_t)row_count, down_item::SHARED, format};
  }

  /* What a unit of it costs: its pieces, and their column tiles times its rows in steps. */
  __device__ __forceinline__ uint32_t cost() const {
    const uint32_t kind = CLB_FORMAT_KIND(format);
    const uint32_t tiles = (kind == CLB_KIND_HALF) ? 1u : (kind == CLB_KIND_INT4) ? 4u : 2u;
    return pieces * (3u + tiles * min(clb_passes_of(rows, CLB_STEP), CLB_MIXED_STEPS));
  }
};

template <uint32_t MOST_ROWS, uint32_t PASS_ROWS>
struct down_source : clb_quant_stream<PAIR, (MOST_ROWS > CLB_STEP)> {
  const clb_expert_down_args& a;
  const down_shared<down_item, MOST_ROWS>& shared;
  down_place next;
  down_place end;
  uint32_t length; /* pieces of a pass of the unit before `next` */
  uint32_t passes; /* left of it, without the current one */

  __device__ __forceinline__ down_source(const clb_expert_down_args& args,
                                         const down_shared<down_item, MOST_ROWS>& memory, const down_place& from,
                                         const down_place& to)
      : a(args), shared(memory), next(from), end(to), length(0u), passes(0u) {
    this->left = 0u;
  }

  __device__ __forceinline__ bool open() {
    if (passes > 0u) { /* the same again for the next rows */
      passes--;
      this->again(length);
      return true;
    }
    while (this->left == 0u) { /* a slice may be empty */
      if (!(next != end)) return false;
      const down_item& item = shared.items[next.item];
      const clb_packing pack(item.format, item.row_words(a));
      const clb_slice slice(item.pieces);
      const uint32_t tiles = a.hidden / CLB_TILE;
      const uint32_t first = item.begin + slice.begin;
      length = slice.end - slice.begin;
#pragma unroll
      for (uint32_t m = 0u; m < PAIR; m++) /* the last again where there is no other */
        this->point(m, pack, item.weights, tiles, min(next.pair * PAIR + m, tiles - 1u), first);
      this->begin(pack, first, length);
      if (PASS_ROWS < MOST_ROWS && length > 0u) passes = max(clb_passes_of(item.rows, PASS_ROWS), 1u) - 1u;
      next.advance(shared.count);
    }
    return true;
  }
};

/* Operand B of row begin + lane / 4 of an item, from column tile `tile` on. */
template <uint32_t MOST_ROWS>
CLB_DEVICE clb_quant_row operand_of(const clb_expert_down_args& a, const down_shared<down_item, MOST_ROWS>& shared,
                                    const down_item& item, uint32_t begin, uint32_t tile) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t i = begin + lane / 4u;
  const bool there = i < item.rows;
  const bool routed = item.first != down_item::SHARED;
  uint32_t row = i;
  if (there && routed) row = shared.choice.places[item.first + i];
  const uint32_t* input = routed ? a.activation : a.shared_activation;
  return {input + (uint64_t)row * item.row_words(a) + tile * CLB_TILE + lane % 4u * 4u, there};
}

template <class K, uint32_t STEPS, uint32_t STAGES, uint32_t MOST_ROWS, class Source>
CLB_DEVICE void down_pass(const clb_expert_down_args& a, clb_quant_ring<PAIR, STAGES>& ring, Source& source,
                          down_shared<down_item, MOST_ROWS>& shared, const down_place& unit, uint32_t begin,
                          uint32_t& parity) {
  const down_item& item = shared.items[unit.item];
  const clb_slice slice(item.pieces);
  const uint32_t tile = (item.begin + slice.begin) * K::TILES;
  const uint32_t across = item.row_words(a) / CLB_TILE;
  clb_quant_row rows[STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++)
    rows[s] = operand_of(a, shared, item, begin + s * CLB_STEP, tile);
  float sum[PAIR][STEPS][4];
  const clb_quant_part what = {item.format, item.begin + slice.begin, slice.end - slice.begin,
                               across - min(across, tile)};
  clb_multiply_quant<K, PAIR, STEPS, STAGES>(ring, source, what, rows, sum);
  put_partial<clb_fp16>(a, shared, unit, begin, sum, parity);
}

/* All rows of a unit whose weights are of kind K. */
template <class K, uint32_t MOST_STEPS, uint32_t STAGES, uint32_t MOST_ROWS, class Source>
CLB_DEVICE void down_kind(const clb_expert_down_args& a, clb_quant_ring<PAIR, STAGES>& ring, Source& source,
                          down_shared<down_item, MOST_ROWS>& shared, const down_place& unit, uint32_t& parity) {
  const uint32_t row_count = shared.items[unit.item].rows;
#pragma unroll 1
  for (uint32_t begin = 0u; begin < row_count; begin += MOST_STEPS * CLB_STEP) {
    const uint32_t rows = row_count - begin;
    if (MOST_STEPS == 1u || rows <= 8u) {
      down_pass<K, 1>(a, ring, source, shared, unit, begin, parity);
    } else {
      down_pass<K, MOST_STEPS>(a, ring, source, shared, unit, begin, parity);
    }
  }
}

template <uint32_t MOST_STEPS, uint32_t STAGES, uint32_t MOST_ROWS, class Source>
CLB_DEVICE void down_unit(const clb_expert_down_args& a, clb_quant_ring<PAIR, STAGES>& ring, Source& source,
                          down_shared<down_item, MOST_ROWS>& shared, const down_place& unit, uint32_t& parity) {
  const uint32_t kind = CLB_FORMAT_KIND(shared.items[unit.item].format);
  if (kind == CLB_KIND_INT4) {
    down_kind<clb_int4_kind, MOST_STEPS>(a, ring, source, shared, unit, parity);
  } else if (kind == CLB_KIND_INT8) {
    down_kind<clb_int8_kind, MOST_STEPS>(a, ring, source, shared, unit, parity);
  } else if (kind == CLB_KIND_FP8) {
    down_kind<clb_fp8_kind, MOST_STEPS>(a, ring, source, shared, unit, parity);
  } else {
    down_kind<clb_half_kind, MOST_STEPS>(a, ring, source, shared, unit, parity);
  }
}

/* Before the wait: everything that says which weights, and the first of them. */
template <uint32_t MOST_STEPS, uint32_t STAGES>
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
  clb_quant_ring<PAIR, STAGES> ring(memory, a.meta);
  uint32_t started = 0u;
  if (items > 0u) ring.start(source, started);
  ring.complete_start(started);
  clb_wait_for_inputs();
  clb_release_dependents();
  uint32_t parity = 0u;
  uint32_t done = 0u; /* units of this pair */
  while (items > 0u && unit != end) {
    down_unit<MOST_STEPS>(a, ring, source, shared, unit, parity);
    done++;
    const uint32_t pair = unit.pair;
    unit.advance(items);
    if (unit.pair == pair && unit != end) continue;
    if (completes(&a.tickets[pair], done, items, shared.complete)) finish_pair<clb_fp16>(a, shared, pair, count);
    done = 0u;
  }
  /* Rows without any expert. */
  for (uint32_t pair = blockIdx.x; items == 0u && pair < pairs; pair += gridDim.x)
    finish_pair<clb_fp16>(a, shared, pair, count);
  clb_copies_wait<0>();
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_DOWN_MIXED_BLOCKS)
    clb_expert_down_mixed(const __grid_constant__ clb_expert_down_args a) {
  down<CLB_MIXED_STEPS, CLB_DOWN_MIXED_STAGES>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_DOWN_MIXED_8_BLOCKS)
    clb_expert_down_mixed_8(const __grid_constant__ clb_expert_down_args a) {
  down<1, CLB_DOWN_MIXED_8_STAGES>(a);
}
