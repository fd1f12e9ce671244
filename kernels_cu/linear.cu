/*
 * linear.cu: a matrix of few row tiles over 9 to 64 rows: qkv, out-projection.
 *
 * Operation  clb_linear_{bf16,fp16}: see clb_matmul_args in abi.h. The bits of clb_linear_8 and clb_linear_wide.
 * Reference  tests/cuda/test_linear.py (numpy, float64).
 * Grid       blocks of 256 threads, each taking units of row tiles blockIdx.x, + gridDim.x, ...; no more blocks
 *            than row tiles or than CLB_LINEAR_BLOCKS a multiprocessor. Dynamic shared memory CLB_LINEAR_SHARED.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   2 * rows * cols bytes of weights: qkv of Qwen3-30B (5,120 x 2,048, 21 MB): 4.9 us at 4.3 TB/s. Beyond
 *            16 rows operand B out of L2 weighs as much as the weights: rows * 4 / (32 * MATRICES) of their bytes.
 *            Measured (H200, 2026-11-30): qkv 13.8 us, out 18.3 us at 32 rows.
 */
#include "linear.cuh"

template <uint32_t MATRICES, uint32_t RING_BYTES>
struct linear_source {
  const unsigned char* at; /* this lane's bytes of the next piece of the unit's first row tile */
  uint64_t across;         /* bytes of a row tile */
  uint64_t jump;           /* from the end of a slice to the next unit's */
  uint32_t pieces;         /* of a slice */
  uint32_t piece;
  uint32_t tiles; /* from the unit's first on */
  uint32_t step;  /* tiles between this block's units */

  __device__ __forceinline__ linear_source(const clb_matmul_args& a, const clb_slice& slice) {
    const uint32_t all = (a.rows + CLB_TILE - 1u) / CLB_TILE;
    const uint32_t first = blockIdx.x * MATRICES;
    across = (uint64_t)(a.cols / CLB_TILE) * CLB_PIECE;
    pieces = slice.end - slice.begin;
    piece = 0u;
    tiles = (pieces > 0u && first < all) ? all - first : 0u;
    step = gridDim.x * MATRICES;
    jump = step * across - (uint64_t)pieces * CLB_PIECE;
    at = reinterpret_cast<const unsigned char*>(a.weights) + first * across + slice.begin * CLB_PIECE +
         threadIdx.x % CLB_WARP * 16u;
  }

  /* Row tiles beyond the last are the last again; their results are not stored. */
  __device__ __forceinline__ bool take(const unsigned char* (&next)[MATRICES]) {
    if (tiles == 0u) return false;
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++)
      next[m] = at + min(m, tiles - 1u) * across;
    at += CLB_PIECE;
    piece++;
    if (piece == pieces) {
      piece = 0u;
      at += jump;
      tiles = (tiles > step) ? tiles - step : 0u;
    }
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
template <class P, uint32_t MATRICES, uint32_t STEPS, uint32_t SLOTS, uint32_t RING_BYTES>
CLB_DEVICE void linear(const clb_matmul_args& a, const void* memory, linear_shared<SLOTS>& shared, uint32_t count) {
  constexpr uint32_t STAGES = RING_BYTES / (CLB_WARPS * MATRICES * CLB_PIECE);
  const clb_slice slice(a.cols / CLB_TILE);
  linear_source<MATRICES, RING_BYTES> source(a, slice);
  clb_ring<MATRICES, STAGES> ring(memory);
  uint32_t started = 0u;
  ring.start(source, started);
  ring.complete_start(started);
  const uint32_t tiles = (a.rows + CLB_TILE - 1u) / CLB_TILE;
  const uint32_t own = clb_finisher();
  const uint32_t own_row = own / MATRICES * CLB_STEP + threadIdx.x % 64u / 8u;
  const uint32_t pair = threadIdx.x % 8u * 2u;
  uint32_t unit = blockIdx.x * MATRICES;
  clb_finish_inputs in = clb_finish_weights(a, (unit + own % MATRICES) * CLB_TILE + pair);
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t lane = threadIdx.x % CLB_WARP;
  uint32_t offsets[STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint32_t row = s * CLB_STEP + lane / 4u;
    offsets[s] = (row < count) ? clb_input_row(a, row) * a.cols + lane % 4u * 4u : CLB_NONE;
  }
  clb_chunk<STEPS> chunk;
  chunk.read(a.input, offsets, slice.begin, slice.end);
  float squares[STEPS]; /* of rows clb_group_warp(), + 8, ...; norms are found once the first products are under way */
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint32_t mine = s * CLB_STEP + clb_group_warp();
    squares[s] = (mine < count) ? clb_input_squares(a, mine) : 0.0f;
  }
  uint32_t parity = 0u;
#pragma unroll 1
  for (; unit < tiles; unit += gridDim.x * MATRICES) {
    uint32_t row = own_row;
    uint32_t col = (unit + own % MATRICES) * CLB_TILE + pair;
    if (unit != blockIdx.x * MATRICES) in = clb_finish_weights(a, col);
    clb_finish_residual(a, row, col, row < count && col < a.rows, in);
    float sum[MATRICES][STEPS][4];
    clb_multiply<P, MATRICES, STEPS>(ring, source, slice, a.input, offsets, chunk, sum);
    if (unit == blockIdx.x * MATRICES) {
#pragma unroll
      for (uint32_t s = 0u; s < STEPS; s++) {
        const float scale = clb_input_scale(a, squares[s]);
        if (lane == 0u) shared.scale[s * CLB_STEP + clb_group_warp()] = scale;
      }
    }
#pragma unroll
    for (uint32_t first = 0u; first < MATRICES * STEPS; first += SLOTS) {
#pragma unroll
      for (uint32_t slot = 0u; slot < SLOTS; slot++)
        shared.sums.put(parity, slot, sum[(first + slot) % MATRICES][(first + slot) / MATRICES]);
      __syncthreads();
      if (own < SLOTS) {
        if (first > 0u) {
          row = (first + own) / MATRICES * CLB_STEP + threadIdx.x % 64u / 8u;
          col = (unit + (first + own) % MATRICES) * CLB_TILE + pair;
          in = clb_finish_weights(a, col);
          clb_finish_residual(a, row, col, row < count && col < a.rows, in);
        }
        const float2 y = shared.sums.template take<P>(parity, own);
        const bool valid = row < count && col / CLB_TILE < tiles;
        const float scale = valid ? shared.scale[row] : 0.0f;
        clb_finish<P>(a, row, col, make_float2(y.x * scale, y.y * scale), in, valid);
      }
      parity ^= 1u;
    }
  }
  clb_copies_wait<0>();
}

/* *row_count may be read before the wait: it was there before the step began. */
template <class P>
CLB_DEVICE void linear_of_any(const clb_matmul_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ linear_shared<4> shared;
  const uint32_t count = min(__ldcg(a.row_count), CLB_FEW_ROWS);
  if (count > 32u) {
    linear<P, 2, 8, 4, CLB_LINEAR_SHARED>(a, memory, shared, count);
  } else if (count > 16u) {
    linear<P, 4, 4, 4, CLB_LINEAR_SHARED>(a, memory, shared, count);
  } else {
    linear<P, 2, 2, 4, CLB_LINEAR_SHARED>(a, memory, shared, count);
  }
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_BLOCKS)
    clb_linear_bf16(const __grid_constant__ clb_matmul_args a) {
  linear_of_any<clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_BLOCKS)
    clb_linear_fp16(const __grid_constant__ clb_matmul_args a) {
  linear_of_any<clb_fp16>(a);
}
