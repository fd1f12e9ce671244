/*
 * pool.cu: hidden states of a prompt added up, for embeddings.
 *
 * Operation  clb_pool: see abi.h. A mean takes all rows of a prompt, chunk by chunk; the last state is a sum of one
 * row. Reference  tests/cuda/test_pool.py (numpy, float64); engine_c/src/pooling.c is the CPU's. Grid       (hidden /
 * 256 rounded up, items) blocks of 256 threads: a thread owns a column and adds its rows one after the other, in order
 * of position: neither chunk borders nor other items change a bit. Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   4 * hidden bytes a row, and hidden / 16 * 4 of sums of squares for each block: 512 rows of 2,048 are 4.2
 * MB in L2: 1.5 us at 3 TB/s, but one addition after the other: 512 * 4 cycles and 8 rounds of 64 rows, so
 *            latency-bound near 6 us, once for a prefill step of milliseconds. Target: 15 us.
 */
#include "device.cuh"

#define ROWS 64u /* whose norms are kept at a time */

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS) clb_pool(const __grid_constant__ clb_pool_args a) {
  __shared__ float scales[ROWS];
  clb_wait_for_inputs();
  clb_release_dependents();
  const clb_pool_item item = a.items[blockIdx.y];
  const uint32_t column = blockIdx.x * CLB_MATMUL_THREADS + threadIdx.x;
  const bool valid = column < a.hidden;
  const uint32_t tiles = a.hidden / CLB_TILE;
  const float norm = valid ? a.norm[column] : 0.0f;
  float* place = a.sums + (uint64_t)item.slot * a.hidden + column;
  float sum = (valid && item.fresh == 0u) ? *place : 0.0f;
  for (uint32_t begin = 0u; begin < item.count; begin += ROWS) {
    const uint32_t rows = min(item.count - begin, ROWS);
    const uint64_t first = (uint64_t)item.first + begin;
    __syncthreads();
    for (uint32_t r = threadIdx.x / CLB_WARP; r < rows; r += CLB_MATMUL_THREADS / CLB_WARP) {
      const float scale = clb_row_scale(a.sumsq + (first + r) * tiles, tiles, a.hidden, a.epsilon);
      if (threadIdx.x % CLB_WARP == 0u) scales[r] = scale;
    }
    __syncthreads();
#pragma unroll 8
    for (uint32_t r = 0u; valid && r < rows; r++)
      sum = fmaf(a.residual[(first + r) * a.hidden + column] * scales[r], norm, sum);
  }
  if (!valid) return;
  *place = sum;
  if (item.output != 0u) reinterpret_cast<float*>(item.output)[column] = sum;
}
