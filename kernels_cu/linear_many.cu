/*
 * linear_many.cu: a matrix over any number of rows: qkv and out-projection of prompts.
 *
 * Operation  clb_linear_many_{bf16,fp16}: see clb_matmul_args in abi.h; no candidates, no input_rows.
 * Reference  tests/cuda/test_linear.py (numpy, float64).
 * Grid       (max_rows / 64 rounded up, rows / 128 rounded up) blocks of 256 threads: blocks that run together share
 *            their weights. Dynamic shared memory CLB_MANY_SHARED.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   2 * T * rows * cols flops, done twice (high and low halves). qkv of Qwen3-30B (5,120 x 2,048), 2,048 rows:
 *            43 GFLOP twice; mma.sync reaches about 60 % of 990 TFLOP/s: 145 us. Target: half of that.
 *            Measured (H200, 2026-11-29): 299 us.
 */
#include "many.cuh"

/* One row tile of the warp, step s: four results of one input row. */
template <class P>
CLB_DEVICE void finish(const clb_matmul_args& a, const float (&c)[4], uint32_t tile, uint32_t row, float scale,
                       bool valid) {
  clb_pairs y = clb_make_pairs(c);
  const uint32_t col = tile * CLB_TILE + clb_pair_col();
  float* const value[4] = {&y.low.x, &y.low.y, &y.high.x, &y.high.y};
#pragma unroll
  for (uint32_t i = 0u; i < 4u; i++) {
    const uint32_t at = col + i / 2u * 8u + i % 2u;
    *value[i] *= scale;
    if (a.bias != nullptr && at < a.rows) *value[i] += a.bias[at];
    if (a.residual == nullptr && valid && at < a.rows) a.output[row * a.output_stride + at] = *value[i];
  }
  if (a.residual == nullptr) return;
  float square = 0.0f;
#pragma unroll
  for (uint32_t i = 0u; i < 4u; i++) {
    const uint32_t at = col + i / 2u * 8u + i % 2u;
    if (valid) {
      float* x = a.residual + (uint64_t)row * a.rows + at;
      *value[i] += *x;
      *x = *value[i];
      square += *value[i] * *value[i];
      *value[i] *= a.next_norm[at];
    }
  }
  square += __shfl_xor_sync(CLB_FULL_WARP, square, 8);
  square += __shfl_xor_sync(CLB_FULL_WARP, square, 16);
  if (!valid) return;
  clb_store_split_pairs<P>(a.next_input + (uint64_t)row * a.rows, tile, y);
  if (threadIdx.x % CLB_WARP < 8u) a.next_sumsq[(uint64_t)row * (a.rows / CLB_TILE) + tile] = square;
}

template <class P>
CLB_DEVICE void linear_many(const clb_matmul_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ float scale[MANY_ROWS];
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t count = *a.row_count;
  const uint32_t first = blockIdx.x * MANY_ROWS;
  if (first >= count) return;
  const uint32_t warp = threadIdx.x / CLB_WARP;
  for (uint32_t i = warp; i < MANY_ROWS; i += CLB_WARPS) {
    const bool normed = a.sumsq != nullptr && first + i < count;
    const float norm =
        normed ? clb_row_scale(a.sumsq + (uint64_t)(first + i) * a.sumsq_count, a.sumsq_count, a.cols, a.epsilon)
               : 1.0f;
    if (threadIdx.x % CLB_WARP == 0u) scale[i] = norm * (1.0f / P::scale);
  }
  const uint32_t tiles = (a.rows + CLB_TILE - 1u) / CLB_TILE;
  const uint32_t across = a.cols / CLB_TILE;
  const uint32_t tile = blockIdx.y * MANY_ROW_TILES;
  const uint32_t mine = first + threadIdx.x / 4u;
  clb_many_operands from = {nullptr, nullptr};
  if (tile + warp < tiles)
    from.weights = reinterpret_cast<const unsigned char*>(a.weights) + (uint64_t)(tile + warp) * across * CLB_PIECE +
                   threadIdx.x % CLB_WARP * 16u;
  if (mine < count) from.input = a.input + (uint64_t)mine * a.cols + threadIdx.x % 4u * 4u;
  clb_many_sums sum;
  clb_many_multiply<P>(memory, from, across, sum);
#pragma unroll
  for (uint32_t r = 0u; r < 2u; r++) {
    const uint32_t at = tile + warp % 4u * 2u + r;
#pragma unroll
    for (uint32_t s = 0u; s < MANY_STEPS; s++) {
      const uint32_t row = clb_pair_row(s);
      finish<P>(a, sum[r][s], at, first + row, scale[row], at < tiles && first + row < count);
    }
  }
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, 2)
    clb_linear_many_bf16(const __grid_constant__ clb_matmul_args a) {
  linear_many<clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, 2)
    clb_linear_many_fp16(const __grid_constant__ clb_matmul_args a) {
  linear_many<clb_fp16>(a);
}
