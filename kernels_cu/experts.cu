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
 *            8 x 6.3 MB = 11.7 us at 4.3 TB/s. Target: 95 %.
 */
#include "experts.cuh"

#define GATE_UP_STAGES 8u
#define GATE_UP_8_STAGES 5u
static_assert(clb_ring<2u, GATE_UP_STAGES>::bytes == CLB_GATE_UP_SHARED, "abi.h says what the host reserves");
static_assert(clb_ring<2u, GATE_UP_8_STAGES>::bytes == CLB_GATE_UP_8_SHARED, "abi.h says what the host reserves");

template <uint32_t MOST_ROWS>
struct gate_up_shared {
  clb_sums<2> sums;
  clb_choices<MOST_ROWS> choice;
  uint64_t gate[CLB_ROUTER_MAX_EXPERTS + 1u]; /* weights of each expert, then of the shared one */
  uint64_t up[CLB_ROUTER_MAX_EXPERTS + 1u];
  float scale[MOST_ROWS];
};

/* What unit number `unit` is: a row tile of the shared expert, or of an expert in use. */
struct gate_up_unit {
  uint32_t expert; /* expert_count: the shared one */
  uint32_t row_tile;
  uint32_t rows;
  uint32_t first; /* of its places; NONE: the shared expert, whose places are the rows */

  template <class Choices>
  __device__ __forceinline__ gate_up_unit(const clb_expert_gate_up_args& a, const Choices& choice, uint32_t unit,
                                          uint32_t row_count) {
    const uint32_t shared_tiles = a.shared_width / CLB_TILE;
    if (unit < shared_tiles) {
      expert = a.expert_count;
      row_tile = unit;
      rows = row_count;
      first = CLB_NONE;
      return;
    }
    const uint32_t tiles = a.width / CLB_TILE;
    expert = choice.item_expert[(unit - shared_tiles) / tiles];
    row_tile = (unit - shared_tiles) % tiles;
    rows = choice.rows_of(expert);
    first = choice.first[expert];
  }
};

template <uint32_t MOST_ROWS, uint32_t PASS_ROWS>
struct gate_up_source {
  const clb_expert_gate_up_args& a;
  const gate_up_shared<MOST_ROWS>& shared;
  const clb_slice& slice;
  const unsigned char* at[2];
  uint32_t unit;
  uint32_t units; /* known so far */
  uint32_t row_count;
  uint32_t passes; /* left of this unit, this one included; 0: not opened yet */
  uint32_t piece;

  __device__ __forceinline__ gate_up_source(const clb_expert_gate_up_args& args,
                                            const gate_up_shared<MOST_ROWS>& memory, const clb_slice& part,
                                            uint32_t rows)
      : a(args), shared(memory), slice(part), unit(blockIdx.x), units(0u), row_count(rows), passes(0u), piece(0u) {}

  __device__ __forceinline__ void rewind(const gate_up_unit& now) {
    const uint32_t across = a.hidden / CLB_TILE;
    at[0] = clb_lane_bytes(shared.gate[now.expert], now.row_tile, across, slice.begin);
    at[1] = clb_lane_bytes(shared.up[now.expert], now.row_tile, across, slice.begin);
    piece = slice.begin;
  }

  __device__ __forceinline__ bool take(const unsigned char* (&next)[2]) {
    if (unit >= units || slice.begin == slice.end) return false;
    if (passes == 0u) {
      const gate_up_unit now(a, shared.choice, unit, row_count);
      passes = max(clb_passes_of(now.rows, PASS_ROWS), 1u);
      rewind(now);
    }
    next[0] = at[0];
    next[1] = at[1];
    at[0] += CLB_PIECE;
    at[1] += CLB_PIECE;
    piece++;
    if (piece < slice.end) return true;
    /* The slice is through: again for the next rows, or on to the next unit. */
    passes--;
    if (passes > 0u) {
      rewind(gate_up_unit(a, shared.choice, unit, row_count));
    } else {
      unit += gridDim.x;
    }
    return true;
  }
};

CLB_DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

template <class P, uint32_t STEPS, uint32_t STAGES, uint32_t MOST_ROWS, class Source>
CLB_DEVICE void gate_up_pass(const clb_expert_gate_up_args& a, clb_ring<2, STAGES>& ring, Source& source,
                             const clb_slice& slice, gate_up_shared<MOST_ROWS>& shared, const gate_up_unit& unit,
                             uint32_t begin, uint32_t& parity) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const bool routed = unit.first != CLB_NONE;
  uint32_t offsets[STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint32_t i = begin + s * CLB_STEP + lane / 4u;
    uint32_t row = i;
    if (i < unit.rows && routed) row = shared.choice.places[unit.first + i] / a.k_max;
    offsets[s] = (i < unit.rows) ? row * a.hidden + lane % 4u * 4u : CLB_NONE;
  }
  clb_chunk<STEPS, (STEPS == 4u) ? 1u : (MOST_ROWS == CLB_STEP) ? 2u : 4u / STEPS> chunk;
  chunk.read(a.input, offsets, slice.begin, slice.end);
  float sum[2][STEPS][4];
  clb_multiply<P, 2, STEPS>(ring, source, slice, a.input, offsets, chunk, sum);
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
      clb_split_store<P>(to, unit.row_tile * CLB_TILE + threadIdx.x % 8u * 2u, silu(gate.x * scale) * (up.x * scale),
                         silu(gate.y * scale) * (up.y * scale));
    }
    parity ^= 1u;
  }
}

/* MOST_STEPS: of 8 rows, that any expert has: 1, or CLB_PASS_STEPS in passes. Before the wait: tables of weights, and
   the first weights of the shared expert. */
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
  clb_ring<2, STAGES> ring(memory);
  uint32_t started = 0u;
  source.units = shared_tiles;
  ring.start(source, started);
  clb_wait_for_inputs();
  clb_release_dependents();
  const typename clb_choices<MOST_ROWS>::own own(a.indices, (a.expert_count > 0u) ? count * a.k_max : 0u);
  shared.choice.fill(own, a.k_max, a.expert_count);
  source.units = shared_tiles + shared.choice.items * (a.width / CLB_TILE);
  ring.start(source, started);
  ring.complete_start(started);
  for (uint32_t row = clb_group_warp(); row < count; row += CLB_WARPS) {
    const uint32_t tiles = a.hidden / CLB_TILE;
    const float scale = clb_row_scale(a.sumsq + (uint64_t)row * tiles, tiles, a.hidden, a.epsilon);
    if (threadIdx.x % CLB_WARP == 0u) shared.scale[row] = scale;
  }
  uint32_t parity = 0u;
#pragma unroll 1
  for (uint32_t u = blockIdx.x; u < source.units; u += gridDim.x) {
    const gate_up_unit unit(a, shared.choice, u, count);
#pragma unroll 1
    for (uint32_t begin = 0u; begin < unit.rows; begin += MOST_STEPS * CLB_STEP) {
      const uint32_t rows = unit.rows - begin;
      if (MOST_STEPS == 1u || rows <= 8u) {
        gate_up_pass<P, 1>(a, ring, source, slice, shared, unit, begin, parity);
      } else if (rows <= 16u) {
        gate_up_pass<P, 2>(a, ring, source, slice, shared, unit, begin, parity);
      } else {
        gate_up_pass<P, MOST_STEPS>(a, ring, source, slice, shared, unit, begin, parity);
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

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_GATE_UP_8_BLOCKS)
    clb_expert_gate_up_8_bf16(const __grid_constant__ clb_expert_gate_up_args a) {
  gate_up<clb_bf16, 1, GATE_UP_8_STAGES>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_GATE_UP_8_BLOCKS)
    clb_expert_gate_up_8_fp16(const __grid_constant__ clb_expert_gate_up_args a) {
  gate_up<clb_fp16, 1, GATE_UP_8_STAGES>(a);
}
