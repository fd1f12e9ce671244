/*
 * pool.cu: hidden states of a prompt added up, for embeddings.
 *
 * Operation  clb_pool: see abi.h. A mean takes all rows of a prompt, chunk by chunk; a last state is a sum of one row.
 * Reference  tests/cuda/test_pool.py (numpy, float64); engine_c/src/pooling.c is the CPU's.
 * Grid       (hidden / 256 rounded up, items) blocks of 256 threads: a thread owns a column and adds its rows one
 *            after the other, in order of position: neither chunk borders nor other items change a bit.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   4 * hidden bytes a row, and hidden / 16 * 4 of sums of squares for each block: 512 rows of 2,048 are
 *            4.2 MB in L2: 1.5 us at 3 TB/s, but 8 rounds of 64 rows, each a latency of L2, an exchange and 64
 *            additions one after the other: 1.2 us each. Target: 10 us, once for a prefill step of milliseconds.
 *            Measured (H200, 2026-11-30): 29 us; eight items of 64 rows 5.6 us.
 */
#include "device.cuh"

#define ROWS 64u    /* that a block takes at a time: their values of a column are on their way together */
#define QUARTERS 4u /* threads that share a row's sums of squares */

/* The norm of row threadIdx.x / QUARTERS, by four threads: every fourth sum in rising order, then the four. */
CLB_DEVICE float row_scale(const float* sumsq, uint32_t tiles, uint32_t hidden, float epsilon) {
  float sum = 0.0f;
#pragma unroll 8
  for (uint32_t i = threadIdx.x % QUARTERS; i < tiles; i += QUARTERS)
    sum += sumsq[i];
  sum += __shfl_xor_sync(CLB_FULL_WARP, sum, 1u);
  sum += __shfl_xor_sync(CLB_FULL_WARP, sum, 2u);
  return 1.0f / sqrtf(sum / (float)hidden + epsilon);
}

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
    float x[ROWS];
#pragma unroll
    for (uint32_t r = 0u; r < ROWS; r++)
      x[r] = (valid && r < rows) ? a.residual[(first + r) * a.hidden + column] : 0.0f;
    const uint32_t row = threadIdx.x / QUARTERS;
    const float scale = row_scale(a.sumsq + (first + min(row, rows - 1u)) * tiles, tiles, a.hidden, a.epsilon);
    __syncthreads(); /* the scales of the rows before are read */
    if (threadIdx.x % QUARTERS == 0u) scales[row] = scale;
    __syncthreads();
#pragma unroll
    for (uint32_t r = 0u; r < ROWS; r++)
      sum = (r < rows) ? fmaf(x[r] * scales[r], norm, sum) : sum;
  }
  if (!valid) return;
  *place = sum;
  if (item.output != 0u) reinterpret_cast<float*>(item.output)[column] = sum;
}
