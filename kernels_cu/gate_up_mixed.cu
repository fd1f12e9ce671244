/*
 * gate_up_mixed.cu: the first half of an FFN for at most 64 rows, of experts that may each have another format: gate,
 * up and their product, of routed experts and the shared one. down_mixed.cu has the second half.
 *
 * Operation  clb_expert_gate_up_mixed and, for at most 8 rows, clb_expert_gate_up_mixed_8, with the same bits: see
 * abi.h. A unit is a row tile of an expert in use, of gate and up; a block branches on the unit's format. Reference
 * tests/cuda/test_quant.py (numpy, float64). Grid       blocks of 256 threads, CLB_GATE_UP_MIXED_BLOCKS or
 * CLB_GATE_UP_MIXED_8_BLOCKS a multiprocessor. Dynamic shared memory: CLB_QUANT_SHARED of CLB_GATE_UP_MIXED_STAGES
 * (_8_), 2 matrices, a.meta. Needs      sm_80; sm_90 for programmatic edges. Roofline   bytes of the experts in use:
 * memory-bound. Qwen3-30B at one row, int4 in groups of 64: 8 x 1.7 MB = 3.1 us at 4.3 TB/s.
 */
#include "experts.cuh"
#include "quant.cuh"

template <uint32_t MOST_ROWS>
struct gate_up_shared {
  clb_sums<2> sums;
  clb_choices<MOST_ROWS> choice;
  uint64_t gate[CLB_ROUTER_MAX_EXPERTS + 1u]; /* weights of each expert, then of the shared one */
  uint64_t up[CLB_ROUTER_MAX_EXPERTS + 1u];
  uint16_t format[CLB_ROUTER_MAX_EXPERTS + 1u];
  float scale[MOST_ROWS];
  uint32_t count;     /* rows */
  uint32_t item_step; /* gridDim.x = item_step * row tiles of an item + tile_step */
  uint32_t tile_step;
};

template <uint32_t MOST_ROWS, uint32_t PASS_ROWS>
struct gate_up_source : clb_quant_stream<2u, false> {
  const clb_expert_gate_up_args& a;
  const gate_up_shared<MOST_ROWS>& shared;
  gate_up_unit next;
  uint32_t items;  /* known so far */
  uint32_t passes; /* left of the unit before `next`, without the current one */
  uint32_t length; /* pieces of a pass of it */

  __device__ __forceinline__ gate_up_source(const clb_expert_gate_up_args& args,
                                            const gate_up_shared<MOST_ROWS>& memory)
      : a(args), shared(memory), next(args), items(0u), passes(0u), length(0u) {
    left = 0u;
  }

  __device__ __forceinline__ bool open() {
    if (passes > 0u) { /* the same again for the next rows */
      passes--;
      again(length);
      return true;
    }
    while (left == 0u) { /* a slice may be empty */
      if (!next.in(items)) return false;
      const bool routed = next.item != CLB_NONE;
      const uint32_t expert = routed ? shared.choice.item_expert[next.item] : a.expert_count;
      const uint32_t rows = routed ? shared.choice.rows_of(expert) : shared.count;
      const uint32_t tiles = (routed ? a.width : a.shared_width) / CLB_TILE;
      const clb_packing pack(shared.format[expert], a.hidden);
      const clb_slice slice(pack.pieces);
      length = slice.end - slice.begin;
      point(0u, pack, shared.gate[expert], tiles, next.row_tile, slice.begin);
      point(1u, pack, shared.up[expert], tiles, next.row_tile, slice.begin);
      begin(pack, slice.begin, length);
      if (PASS_ROWS < MOST_ROWS && length > 0u) passes = max(clb_passes_of(rows, PASS_ROWS), 1u) - 1u;
      next.advance(a, shared.item_step, shared.tile_step);
    }
    return true;
  }
};

CLB_DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

/* An item as a product sees it. */
struct gate_up_rows {
  uint32_t rows;
  uint32_t format;
  uint32_t first; /* of its places; NONE: the shared expert, whose places are the rows */

  template <class Shared>
  __device__ __forceinline__ gate_up_rows(const Shared& shared, uint32_t shared_expert, uint32_t item,
                                          uint32_t row_count)
      : rows(row_count), format(shared.format[shared_expert]), first(CLB_NONE) {
    if (item == CLB_NONE) return;
    const uint32_t expert = shared.choice.item_expert[item];
    rows = shared.choice.rows_of(expert);
    format = shared.format[expert];
    first = shared.choice.first[expert];
  }
};

/* Row begin + warp of a unit: lanes 0 .. 15 add up gate, lanes 16 .. 31 up of one result each. */
template <uint32_t MOST_ROWS>
CLB_DEVICE void finish_step(const clb_expert_gate_up_args& a, const gate_up_shared<MOST_ROWS>& shared,
                            const gate_up_rows& unit, uint32_t row_tile, uint32_t begin, uint32_t parity) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t i = begin + clb_group_warp();
  if (i >= unit.rows) return;
  const bool routed = unit.first != CLB_NONE;
  const uint32_t place = routed ? shared.choice.places[unit.first + i] : i;
  const float scale = shared.scale[routed ? place / a.k_max : i] * (1.0f / clb_fp16::scale);
  float own = 0.0f;
#pragma unroll
  for (uint32_t w = 0u; w < CLB_WARPS; w++)
    own += shared.sums.of[parity][lane / CLB_TILE][w][clb_group_warp() * CLB_SUM_STRIDE + lane % CLB_TILE];
  const float other = __shfl_xor_sync(CLB_FULL_WARP, own, CLB_TILE);
  const float gate = (lane < CLB_TILE) ? own : other;
  const float up = (lane < CLB_TILE) ? other : own;
  const float result = silu(gate * scale) * (up * scale);
  const float next = __shfl_xor_sync(CLB_FULL_WARP, result, 1);
  if (lane >= CLB_TILE || lane % 2u != 0u) return;
  uint32_t* to =
      routed ? a.activation + (uint64_t)place * a.width : a.shared_activation + (uint64_t)place * a.shared_width;
  clb_split_store<clb_fp16>(to, row_tile * CLB_TILE + lane, result, next);
}

template <class K, uint32_t STEPS, uint32_t STAGES, uint32_t MOST_ROWS, class Source>
CLB_DEVICE void gate_up_pass(const clb_expert_gate_up_args& a, clb_quant_ring<2u, STAGES>& ring, Source& source,
                             gate_up_shared<MOST_ROWS>& shared, const gate_up_rows& unit, uint32_t row_tile,
                             uint32_t begin, uint32_t& parity) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const bool routed = unit.first != CLB_NONE;
  const uint32_t across = a.hidden / CLB_TILE;
  const clb_slice slice((across + K::TILES - 1u) / K::TILES);
  clb_quant_row rows[STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint32_t i = begin + s * CLB_STEP + lane / 4u;
    uint32_t row = i;
    rows[s].there = i < unit.rows;
    if (rows[s].there && routed) row = shared.choice.places[unit.first + i] / a.k_max;
    rows[s].at = a.input + (uint64_t)row * a.hidden + slice.begin * (K::TILES * CLB_TILE) + lane % 4u * 4u;
  }
  float sum[2][STEPS][4];
  const clb_quant_part what = {unit.format, slice.begin, slice.end - slice.begin,
                               across - min(across, slice.begin * K::TILES)};
  clb_multiply_quant<K, 2u, STEPS, STAGES>(ring, source, what, rows, sum);
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    shared.sums.put(parity, 0u, sum[0][s]);
    shared.sums.put(parity, 1u, sum[1][s]);
    __syncthreads();
    finish_step(a, shared, unit, row_tile, begin + s * CLB_STEP, parity);
    parity ^= 1u;
  }
}

/* All rows of a unit whose weights are of kind K. */
template <class K, uint32_t MOST_STEPS, uint32_t STAGES, uint32_t MOST_ROWS, class Source>
CLB_DEVICE void gate_up_kind(const clb_expert_gate_up_args& a, clb_quant_ring<2u, STAGES>& ring, Source& source,
                             gate_up_shared<MOST_ROWS>& shared, const gate_up_rows& who, uint32_t row_tile,
                             uint32_t& parity) {
#pragma unroll 1
  for (uint32_t begin = 0u; begin < who.rows; begin += MOST_STEPS * CLB_STEP) {
    const uint32_t rows = who.rows - begin;
    if (MOST_STEPS == 1u || rows <= 8u) {
      gate_up_pass<K, 1>(a, ring, source, shared, who, row_tile, begin, parity);
    } else {
      gate_up_pass<K, MOST_STEPS>(a, ring, source, shared, who, row_tile, begin, parity);
    }
  }
}

/* Before the wait: tables of weights and formats, and the first weights of the shared expert. */
template <uint32_t MOST_ROWS>
CLB_DEVICE void read_tables(const clb_expert_gate_up_args& a, gate_up_shared<MOST_ROWS>& shared, uint32_t count) {
  if (threadIdx.x == 0u) {
    const uint32_t tiles = max(a.width / CLB_TILE, 1u);
    shared.count = count;
    shared.item_step = gridDim.x / tiles;
    shared.tile_step = gridDim.x % tiles;
  }
  for (uint32_t e = threadIdx.x; e <= a.expert_count; e += CLB_MATMUL_THREADS) {
    if (e == a.expert_count && a.shared_width == 0u) continue;
    const clb_expert_weights& from = (e < a.expert_count) ? a.experts[e] : *a.shared;
    shared.gate[e] = from.gate;
    shared.up[e] = from.up;
    shared.format[e] = (uint16_t)from.format;
  }
  shared.choice.clear(a.expert_count);
  __syncthreads();
}

/* MOST_STEPS: of 8 rows, that any expert has: 1, or CLB_MIXED_STEPS in passes. */
template <uint32_t MOST_STEPS, uint32_t STAGES>
CLB_DEVICE void gate_up(const clb_expert_gate_up_args& a) {
  constexpr uint32_t MOST_ROWS = (MOST_STEPS == 1u) ? CLB_STEP : CLB_FEW_ROWS;
  extern __shared__ uint4 memory[];
  __shared__ gate_up_shared<MOST_ROWS> shared;
  const uint32_t count = min(__ldcg(a.row_count), MOST_ROWS);
  read_tables(a, shared, count);
  gate_up_source<MOST_ROWS, MOST_STEPS * CLB_STEP> source(a, shared);
  clb_quant_ring<2u, STAGES> ring(memory, a.meta);
  uint32_t started = 0u;
  ring.start(source, started);
  clb_wait_for_inputs();
  clb_release_dependents();
  const typename clb_choices<MOST_ROWS>::own own(a.indices, (a.expert_count > 0u) ? count * a.k_max : 0u);
  shared.choice.fill(own, a.k_max, a.expert_count);
  source.items = shared.choice.items;
  ring.start(source, started);
  ring.complete_start(started);
  for (uint32_t row = clb_group_warp(); row < count; row += CLB_WARPS) {
    const uint32_t tiles = a.hidden / CLB_TILE;
    const float scale = clb_row_scale(a.sumsq + (uint64_t)row * tiles, tiles, a.hidden, a.epsilon);
    if (threadIdx.x % CLB_WARP == 0u) shared.scale[row] = scale;
  }
  uint32_t parity = 0u;
#pragma unroll 1
  for (gate_up_unit unit(a); unit.in(source.items); unit.advance(a, shared.item_step, shared.tile_step)) {
    const gate_up_rows who(shared, a.expert_count, unit.item, count);
    const uint32_t kind = CLB_FORMAT_KIND(who.format);
    if (kind == CLB_KIND_INT4) {
      gate_up_kind<clb_int4_kind, MOST_STEPS>(a, ring, source, shared, who, unit.row_tile, parity);
    } else if (kind == CLB_KIND_INT8) {
      gate_up_kind<clb_int8_kind, MOST_STEPS>(a, ring, source, shared, who, unit.row_tile, parity);
    } else if (kind == CLB_KIND_FP8) {
      gate_up_kind<clb_fp8_kind, MOST_STEPS>(a, ring, source, shared, who, unit.row_tile, parity);
    } else {
      gate_up_kind<clb_half_kind, MOST_STEPS>(a, ring, source, shared, who, unit.row_tile, parity);
    }
  }
  clb_copies_wait<0>();
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_GATE_UP_MIXED_BLOCKS)
    clb_expert_gate_up_mixed(const __grid_constant__ clb_expert_gate_up_args a) {
  gate_up<CLB_MIXED_STEPS, CLB_GATE_UP_MIXED_STAGES>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_GATE_UP_MIXED_8_BLOCKS)
    clb_expert_gate_up_mixed_8(const __grid_constant__ clb_expert_gate_up_args a) {
  gate_up<1, CLB_GATE_UP_MIXED_8_STAGES>(a);
}
