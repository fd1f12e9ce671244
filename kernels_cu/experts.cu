/*
 * experts.cu: the first half of an FFN for at most 64 rows: gate, up and their product, of routed experts and the
 * shared one. expert_down.cu has the second half.
 *
 * Operation  clb_expert_gate_up_{bf16,fp16}: see abi.h. A unit is a row tile of an expert in use, of gate and up. The
 *            kernels with _8 are for at most 8 rows: the same bits, fewer registers, so that more runs beside them.
 * Reference  tests/cuda/test_experts.py (numpy, float64).
 * Grid       blocks of 256 threads, CLB_GATE_UP_BLOCKS or CLB_GATE_UP_8_BLOCKS a multiprocessor. Dynamic shared memory:
 *            CLB_GATE_UP_SHARED, CLB_GATE_UP_8_SHARED.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   bytes of the experts in use; at up to 8 rows an expert 8 flops a byte: memory-bound. Qwen3-30B at one row:
 *            8 x 6.3 MB = 11.7 us at 4.3 TB/s. Target: 95 %. Measured (H200, 2026-11-30): 16.8 us at one row, 79 at 8,
 *            168 at 32.
 */
#include "experts.cuh"

#define AHEAD 6u /* column tiles of one step whose operand B is on its way */
#define GATE_UP_STAGES 4u
#define GATE_UP_8_STAGES 6u
static_assert(clb_pair_ring<GATE_UP_STAGES>::bytes == CLB_GATE_UP_SHARED, "abi.h says what the host reserves");
static_assert(clb_pair_ring<GATE_UP_8_STAGES>::bytes == CLB_GATE_UP_8_SHARED, "abi.h says what the host reserves");

template <uint32_t MOST_ROWS>
struct gate_up_shared {
  clb_sums<2> sums;
  clb_choices<MOST_ROWS> choice;
  uint64_t gate[CLB_ROUTER_MAX_EXPERTS + 1u]; /* weights of each expert, then of the shared one */
  uint64_t up[CLB_ROUTER_MAX_EXPERTS + 1u];
  float scale[MOST_ROWS];
};

template <uint32_t MOST_ROWS, uint32_t PASS_ROWS>
struct gate_up_source {
  const clb_expert_gate_up_args& a;
  const gate_up_shared<MOST_ROWS>& shared;
  const unsigned char* at[2];
  uint32_t left;
  gate_up_unit next;
  uint32_t items; /* known so far */
  uint32_t row_count;
  uint32_t passes; /* left of the unit before `next`, without the current one */
  uint32_t offset; /* of this warp's slice */
  uint32_t length;
  uint32_t item_step;
  uint32_t tile_step;

  __device__ __forceinline__ gate_up_source(const clb_expert_gate_up_args& args,
                                            const gate_up_shared<MOST_ROWS>& memory, const clb_slice& slice,
                                            uint32_t rows)
      : a(args), shared(memory), left(0u), next(args), items(0u), row_count(rows), passes(0u) {
    offset = slice.begin * CLB_PIECE + threadIdx.x % CLB_WARP * 16u;
    length = slice.end - slice.begin;
    const uint32_t tiles = max(a.width / CLB_TILE, 1u);
    item_step = gridDim.x / tiles;
    tile_step = gridDim.x % tiles;
  }

  __device__ __forceinline__ bool open() {
    if (length == 0u) return false;
    left = length;
    if (passes > 0u) { /* the same again for the next rows */
      passes--;
      at[0] -= length * CLB_PIECE;
      at[1] -= length * CLB_PIECE;
      return true;
    }
    left = 0u;
    if (!next.in(items)) return false;
    const uint32_t expert = (next.item == CLB_NONE) ? a.expert_count : shared.choice.item_expert[next.item];
    const uint32_t rows = (next.item == CLB_NONE) ? row_count : shared.choice.rows_of(expert);
    const uint64_t from = (uint64_t)next.row_tile * (a.hidden / CLB_TILE * CLB_PIECE) + offset;
    at[0] = reinterpret_cast<const unsigned char*>(shared.gate[expert] + from);
    at[1] = reinterpret_cast<const unsigned char*>(shared.up[expert] + from);
    left = length;
    if (PASS_ROWS < MOST_ROWS) passes = max(clb_passes_of(rows, PASS_ROWS), 1u) - 1u;
    next.advance(a, item_step, tile_step);
    return true;
  }
};

CLB_DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

/* An item as a product sees it. */
struct gate_up_rows {
  uint32_t rows;
  uint32_t first; /* of its places; NONE: the shared expert, whose places are the rows */

  template <class Choices>
  __device__ __forceinline__ gate_up_rows(const Choices& choice, uint32_t item, uint32_t row_count)
      : rows(row_count), first(CLB_NONE) {
    if (item == CLB_NONE) return;
    const uint32_t expert = choice.item_expert[item];
    rows = choice.rows_of(expert);
    first = choice.first[expert];
  }
};

template <class P, uint32_t STEPS, uint32_t STAGES, uint32_t MOST_ROWS, class Source>
CLB_DEVICE void gate_up_pass(const clb_expert_gate_up_args& a, clb_pair_ring<STAGES>& ring, Source& source,
                             const clb_slice& slice, gate_up_shared<MOST_ROWS>& shared, const gate_up_rows& unit,
                             uint32_t row_tile, uint32_t begin, uint32_t& parity) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const bool routed = unit.first != CLB_NONE;
  clb_operand rows[STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint32_t i = begin + s * CLB_STEP + lane / 4u;
    uint32_t row = i;
    rows[s].there = i < unit.rows;
    if (rows[s].there && routed) row = shared.choice.places[unit.first + i] / a.k_max;
    rows[s].at = a.input + (uint64_t)row * a.hidden + slice.begin * CLB_TILE + lane % 4u * 4u;
  }
  float sum[2][STEPS][4];
  clb_multiply_pair<P, STEPS, AHEAD>(ring, source, slice.end - slice.begin, rows, sum);
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    shared.sums.put(parity, 0u, sum[0][s]);
    shared.sums.put(parity, 1u, sum[1][s]);
    __syncthreads();
    const uint32_t i = begin + s * CLB_STEP + threadIdx.x % 64u / 8u;
    if (clb_finisher() == s && i < unit.rows) {
      const uint32_t place = routed ? shared.choice.places[unit.first + i] : i;
      const float scale = shared.scale[routed ? place / a.k_max : i];
      const float2 gate = shared.sums.template take<P>(parity, 0u);
      const float2 up = shared.sums.template take<P>(parity, 1u);
      uint32_t* to =
          routed ? a.activation + (uint64_t)place * a.width : a.shared_activation + (uint64_t)place * a.shared_width;
      clb_split_store<P>(to, row_tile * CLB_TILE + threadIdx.x % 8u * 2u, silu(gate.x * scale) * (up.x * scale),
                         silu(gate.y * scale) * (up.y * scale));
    }
    parity ^= 1u;
  }
}

template <uint32_t MOST_ROWS>
CLB_DEVICE void find_norms(const clb_expert_gate_up_args& a, gate_up_shared<MOST_ROWS>& shared, uint32_t count) {
  const uint32_t tiles = a.hidden / CLB_TILE;
#pragma unroll 1
  for (uint32_t row = clb_group_warp(); row < count; row += CLB_WARPS) {
    const float scale = clb_row_scale(a.sumsq + (uint64_t)row * tiles, tiles, a.hidden, a.epsilon);
    if (threadIdx.x % CLB_WARP == 0u) shared.scale[row] = scale;
  }
}

/* MOST_STEPS: of 8 rows, that any expert has: 1, or CLB_PASS_STEPS in passes. Before the wait: tables of weights, the
   first weights of the shared expert, and norms. */
template <class P, uint32_t MOST_STEPS, uint32_t STAGES>
CLB_DEVICE void gate_up(const clb_expert_gate_up_args& a) {
  constexpr uint32_t MOST_ROWS = (MOST_STEPS == 1u) ? CLB_STEP : CLB_FEW_ROWS;
  extern __shared__ uint4 memory[];
  __shared__ gate_up_shared<MOST_ROWS> shared;
  const uint32_t count = min(__ldcg(a.row_count), MOST_ROWS);
  const clb_slice slice(a.hidden / CLB_TILE);
  const uint32_t shared_tiles = a.shared_width / CLB_TILE;
  for (uint32_t e = threadIdx.x; e < a.expert_count; e += CLB_MATMUL_THREADS) {
    shared.gate[e] = a.experts[e].gate;
    shared.up[e] = a.experts[e].up;
  }
  if (threadIdx.x == 0u && shared_tiles > 0u) {
    shared.gate[a.expert_count] = a.shared->gate;
    shared.up[a.expert_count] = a.shared->up;
  }
  shared.choice.clear(a.expert_count);
  __syncthreads();
  gate_up_source<MOST_ROWS, MOST_STEPS * CLB_STEP> source(a, shared, slice, count);
  clb_pair_ring<STAGES> ring(memory);
  uint32_t started = 0u;
  ring.start(source, started);
  if (a.expert_count > 0u) find_norms(a, shared, count);
  clb_wait_for_inputs();
  clb_release_dependents();
  if (a.expert_count == 0u) find_norms(a, shared, count); /* no router's node lies between */
  const typename clb_choices<MOST_ROWS>::own own(a.indices, (a.expert_count > 0u) ? count * a.k_max : 0u);
  shared.choice.fill(own, a.k_max, a.expert_count);
  source.items = shared.choice.items;
  ring.start(source, started);
  ring.complete_start(started);
  uint32_t parity = 0u;
#pragma unroll 1
  for (gate_up_unit unit(a); unit.in(source.items); unit.advance(a, source.item_step, source.tile_step)) {
    const gate_up_rows who(shared.choice, unit.item, count);
#pragma unroll 1
    for (uint32_t begin = 0u; begin < who.rows; begin += MOST_STEPS * CLB_STEP) {
      const uint32_t rows = who.rows - begin;
      if (MOST_STEPS == 1u || rows <= 8u) {
        gate_up_pass<P, 1>(a, ring, source, slice, shared, who, unit.row_tile, begin, parity);
      } else if (rows <= 16u) {
        gate_up_pass<P, 2>(a, ring, source, slice, shared, who, unit.row_tile, begin, parity);
      } else {
        gate_up_pass<P, MOST_STEPS>(a, ring, source, slice, shared, who, unit.row_tile, begin, parity);
      }
    }
  }
  clb_copies_wait<0>();
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_GATE_UP_BLOCKS)
    clb_expert_gate_up_bf16(const __grid_constant__ clb_expert_gate_up_args a) {
  gate_up<clb_bf16, CLB_PASS_STEPS, GATE_UP_STAGES>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_GATE_UP_BLOCKS)
    clb_expert_gate_up_fp16(const __grid_constant__ clb_expert_gate_up_args a) {
  gate_up<clb_fp16, CLB_PASS_STEPS, GATE_UP_STAGES>(a);
}

extern "C" __global__ void __maxnreg__(80)
    clb_expert_gate_up_8_bf16(const __grid_constant__ clb_expert_gate_up_args a) {
  gate_up<clb_bf16, 1, GATE_UP_8_STAGES>(a);
}

extern "C" __global__ void __maxnreg__(80)
    clb_expert_gate_up_8_fp16(const __grid_constant__ clb_expert_gate_up_args a) {
  gate_up<clb_fp16, 1, GATE_UP_8_STAGES>(a);
}
