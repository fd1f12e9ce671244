/*
 * linear_quant.cu: a quantised matrix over at most 64 rows: qkv, out-projection, head.
 *
 * Operation  clb_linear_quant_{int8,int4,fp8}, and for at most 8 rows clb_linear_quant_8_{int8,int4,fp8}, with the same
 *            bits: see clb_matmul_args in abi.h.
 * Reference  tests/cuda/test_quant.py (numpy, float64).
 * Grid       blocks of 256 threads, each taking units of row tiles blockIdx.x, + gridDim.x, ...; no more blocks than
 *            units or than CLB_LINEAR_QUANT_BLOCKS (CLB_LINEAR_QUANT_8_BLOCKS) a multiprocessor. Dynamic shared memory:
 *            CLB_QUANT_SHARED of the stages, as many matrices as a unit has row tiles (1 or 2) and what the format
 * brings. Needs      sm_80; sm_90 for programmatic edges. Roofline   bytes of values and scales: memory-bound. qkv of
 * Qwen3-30B (5,120 x 2,048): int8 10.5 MB, 2.4 us at 4.3 TB/s; int4 in groups of 64 5.6 MB, 1.3 us.
 */
#include "linear.cuh"
#include "quant.cuh"

template <uint32_t MATRICES, bool ALL_BRING>
struct linear_source : clb_quant_stream<MATRICES, ALL_BRING> {
  const clb_matmul_args& a;
  clb_packing pack;
  clb_slice slice;
  uint32_t unit; /* row tile: the next unit's first */

  __device__ __forceinline__ explicit linear_source(const clb_matmul_args& args)
      : a(args), pack(args.format, args.cols), slice(pack.pieces), unit(blockIdx.x * MATRICES) {
    this->left = 0u;
  }

  /* Row tiles beyond the last are the last again; their results are not stored. */
  __device__ __forceinline__ bool open() {
    const uint32_t tiles = clb_row_tiles(a);
    if (unit >= tiles || slice.begin == slice.end) return false;
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++)
      this->point(m, pack, reinterpret_cast<uint64_t>(a.weights), tiles, min(unit + m, tiles - 1u), slice.begin);
    this->begin(pack, slice.begin, slice.end - slice.begin);
    unit += gridDim.x * MATRICES;
    return true;
  }
};

template <uint32_t SLOTS>
struct linear_shared {
  clb_sums<SLOTS> sums;
  float scale[CLB_FEW_ROWS]; /* norm(t) */
};

/* Products of a unit are numbered p = step * MATRICES + matrix; SLOTS of them are finished at a time, by a pair of
   warps each. */
template <class K, uint32_t MATRICES, uint32_t STEPS, uint32_t SLOTS, uint32_t STAGES>
CLB_DEVICE void linear(const clb_matmul_args& a, const void* memory, linear_shared<SLOTS>& shared, uint32_t count) {
  linear_source<MATRICES, (STEPS > 1u)> source(a);
  clb_quant_ring<MATRICES, STAGES> ring(memory, CLB_FORMAT_META(a.format));
  uint32_t started = 0u;
  ring.start(source, started);
  ring.complete_start(started);
  const uint32_t tiles = clb_row_tiles(a);
  const uint32_t own = clb_finisher();
  const uint32_t pair = threadIdx.x % 8u * 2u;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t begin = source.slice.begin * K::TILES; /* column tile */
  const uint32_t across = a.cols / CLB_TILE;
  clb_wait_for_inputs();
  clb_release_dependents();
  const clb_quant_part what = {a.format, source.slice.begin, source.slice.end - source.slice.begin,
                               (across > begin) ? across - begin : 0u};
  clb_quant_row rows[STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint32_t row = s * CLB_STEP + lane / 4u;
    rows[s].there = row < count;
    const uint64_t place = rows[s].there ? (uint64_t)clb_input_row(a, row) * a.cols : 0u;
    rows[s].at = a.input + place + begin * CLB_TILE + lane % 4u * 4u;
  }
  float squares[STEPS]; /* of rows clb_group_warp(), + 8, ...; norms are found once the first products are under way */
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint32_t mine = s * CLB_STEP + clb_group_warp();
    squares[s] = (mine < count) ? clb_input_squares(a, mine) : 0.0f;
  }
  uint32_t parity = 0u;
#pragma unroll 1
  for (uint32_t unit = blockIdx.x * MATRICES; unit < tiles; unit += gridDim.x * MATRICES) {
    float sum[MATRICES][STEPS][4];
    clb_quant_row from[STEPS];
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++)
      from[s] = rows[s];
    clb_multiply_quant<K, MATRICES, STEPS, STAGES>(ring, source, what, from, sum);
    if (unit == blockIdx.x * MATRICES) {
#pragma unroll
      for (uint32_t s = 0u; s < STEPS; s++) {
        const float scale = clb_input_scale(a, squares[s]);
        if (lane == 0u) shared.scale[s * CLB_STEP + clb_group_warp()] = scale;
      }
    }
#pragma unroll
    for (uint32_t first = 0u; first < MATRICES * STEPS; first += SLOTS) {
      const uint32_t row = (first + own) / MATRICES * CLB_STEP + threadIdx.x % 64u / 8u;
      const uint32_t col = (unit + (first + own) % MATRICES) * CLB_TILE + pair;
      const bool valid = row < count && col / CLB_TILE < tiles;
      clb_finish_inputs in = {};
      if (own < SLOTS) in = clb_finish_weights(a, col);
      if (own < SLOTS) clb_finish_residual(a, row, col, valid && col < a.rows, in);
#pragma unroll
      for (uint32_t slot = 0u; slot < SLOTS; slot++)
        shared.sums.put(parity, slot, sum[(first + slot) % MATRICES][(first + slot) / MATRICES]);
      __syncthreads();
      if (own < SLOTS) {
        const float2 y = shared.sums.template take<clb_fp16>(parity, own);
        const float scale = valid ? shared.scale[row] : 0.0f;
        clb_finish<clb_fp16>(a, row, col, make_float2(y.x * scale, y.y * scale), in, valid);
      }
      parity ^= 1u;
    }
  }
  clb_copies_wait<0>();
}

/* *row_count may be read before the wait: it was there before the step began. */
template <class K>
CLB_DEVICE void linear_of_any(const clb_matmul_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ linear_shared<4> shared;
  const uint32_t count = min(__ldcg(a.row_count), CLB_FEW_ROWS);
  if (count > 32u) {
    linear<K, 1, 8, 4, CLB_LINEAR_QUANT_STAGES>(a, memory, shared, count);
  } else if (count > 16u) {
    linear<K, 2, 4, 4, CLB_LINEAR_QUANT_STAGES>(a, memory, shared, count);
  } else {
    linear<K, 2, 2, 4, CLB_LINEAR_QUANT_STAGES>(a, memory, shared, count);
  }
}

template <class K>
CLB_DEVICE void linear_of_8(const clb_matmul_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ linear_shared<1> shared;
  linear<K, 1, 1, 1, CLB_LINEAR_QUANT_8_STAGES>(a, memory, shared, min(__ldcg(a.row_count), CLB_STEP));
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_QUANT_8_BLOCKS)
    clb_linear_quant_8_int8(const __grid_constant__ clb_matmul_args a) {
  linear_of_8<clb_int8_kind>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_QUANT_8_BLOCKS)
    clb_linear_quant_8_int4(const __grid_constant__ clb_matmul_args a) {
  linear_of_8<clb_int4_kind>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_QUANT_8_BLOCKS)
    clb_linear_quant_8_fp8(const __grid_constant__ clb_matmul_args a) {
  linear_of_8<clb_fp8_kind>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_QUANT_BLOCKS)
    clb_linear_quant_int8(const __grid_constant__ clb_matmul_args a) {
  linear_of_any<clb_int8_kind>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_QUANT_BLOCKS)
    clb_linear_quant_int4(const __grid_constant__ clb_matmul_args a) {
  linear_of_any<clb_int4_kind>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_QUANT_BLOCKS)
    clb_linear_quant_fp8(const __grid_constant__ clb_matmul_args a) {
  linear_of_any<clb_fp8_kind>(a);
}
