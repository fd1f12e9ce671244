/*
 * router_logits.cu: the router's scores of every row, in fp32 throughout: they decide which experts run.
 *
 * Operation  clb_router_logits: see abi.h. The norm is applied here (its scale after the sum); the gate of the shared
 *            expert is one more row of the matrix.
 * Reference  tests/cuda/test_step_kernels.py (numpy, float64).
 * Grid       (experts + 1 rounded up to 4 / 4, max_rows / 8 rounded up) blocks of 256 threads: a block takes 4 experts
 *            and 8 rows; its 8 warps share the columns, 128 at a time each.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   decode: 4 * experts * hidden bytes, 1 MB for Qwen3-30B: 0.24 us, so latency-bound: target 2 us. Prompts:
 *            2 * T * experts * hidden flops, 1.1 GFLOP for 2,048 rows: 18 us at 60 TFLOP/s; bound by L2 reads, 96 KB a
 *            block: 150 us. Measured (H200, 2026-11-29): 6.5 us at 1 to 32 rows, 290 us at 2,048.
 */
#include "../engine_c/src/exact_math.h"
#include "device.cuh"

#define EXPERTS 4u
#define ROWS 8u
#define WARPS (CLB_MATMUL_THREADS / CLB_WARP)
#define PASS_COLS (CLB_MATMUL_THREADS * 4u)
#define PASSES_AHEAD 2u /* whose weights are read before the wait: hidden sizes up to 2,048 */

struct logits_shared {
  float part[WARPS][EXPERTS * ROWS];
  float scale[ROWS];
};

CLB_DEVICE float4 times(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }

/* The weights of this block's experts at four columns, each times the norm there; zeros beyond the last column. */
CLB_DEVICE void read_weights(const clb_router_logits_args& a, uint32_t col, float4 (&w)[EXPERTS]) {
  const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const bool there = col < a.hidden;
  const float4 norm = there ? *reinterpret_cast<const float4*>(a.norm + col) : zero;
#pragma unroll
  for (uint32_t i = 0u; i < EXPERTS; i++) {
    const uint32_t expert = blockIdx.x * EXPERTS + i;
    const float* row = (expert < a.experts)    ? a.weights + (uint64_t)expert * a.hidden
                       : (expert == a.experts) ? a.shared_gate
                                               : nullptr;
    w[i] = (there && row != nullptr) ? times(*reinterpret_cast<const float4*>(row + col), norm) : zero;
  }
}

CLB_DEVICE void add_products(const clb_router_logits_args& a, uint32_t first, uint32_t last, uint32_t col,
                             const float4 (&w)[EXPERTS], float (&sums)[EXPERTS * ROWS]) {
  float4 x[ROWS]; /* rows beyond the last are the last again; their sums are not stored */
#pragma unroll
  for (uint32_t r = 0u; r < ROWS; r++)
    x[r] = *reinterpret_cast<const float4*>(a.residual + (uint64_t)min(first + r, last) * a.hidden + col);
#pragma unroll
  for (uint32_t i = 0u; i < EXPERTS; i++) {
#pragma unroll
    for (uint32_t r = 0u; r < ROWS; r++) {
      float& sum = sums[i * ROWS + r];
      sum = fmaf(w[i].x, x[r].x, sum);
      sum = fmaf(w[i].y, x[r].y, sum);
      sum = fmaf(w[i].z, x[r].z, sum);
      sum = fmaf(w[i].w, x[r].w, sum);
    }
  }
}

/* Lane l gets the sum over all lanes of values[l], each by its own fixed tree. */
CLB_DEVICE float sum_transposed(float (&values)[EXPERTS * ROWS]) {
  static_assert(EXPERTS * ROWS == CLB_WARP, "one value a lane");
  const uint32_t lane = threadIdx.x % CLB_WARP;
#pragma unroll
  for (uint32_t half = CLB_WARP / 2u; half > 0u; half /= 2u) {
    const bool upper = (lane & half) != 0u;
#pragma unroll
    for (uint32_t i = 0u; i < half; i++) {
      const float send = upper ? values[i] : values[i + half];
      const float keep = upper ? values[i + half] : values[i];
      values[i] = keep + __shfl_xor_sync(CLB_FULL_WARP, send, half);
    }
  }
  return values[0];
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS)
    clb_router_logits(const __grid_constant__ clb_router_logits_args a) {
  __shared__ logits_shared shared;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t warp = threadIdx.x / CLB_WARP;
  const uint32_t first = blockIdx.y * ROWS;
  float4 ahead[PASSES_AHEAD][EXPERTS];
#pragma unroll
  for (uint32_t i = 0u; i < PASSES_AHEAD; i++)
    read_weights(a, i * PASS_COLS + threadIdx.x * 4u, ahead[i]);
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t count = *a.row_count;
  if (first >= count) return;
  float sums[EXPERTS * ROWS];
#pragma unroll
  for (uint32_t i = 0u; i < EXPERTS * ROWS; i++)
    sums[i] = 0.0f;
#pragma unroll
  for (uint32_t i = 0u; i < PASSES_AHEAD; i++) {
    const uint32_t col = i * PASS_COLS + threadIdx.x * 4u;
    if (col < a.hidden) add_products(a, first, count - 1u, col, ahead[i], sums);
  }
  for (uint32_t col = PASSES_AHEAD * PASS_COLS + threadIdx.x * 4u; col < a.hidden; col += PASS_COLS) {
    read_weights(a, col, ahead[0]);
    add_products(a, first, count - 1u, col, ahead[0], sums);
  }
  shared.part[warp][lane] = sum_transposed(sums);
  const uint32_t tiles = a.hidden / CLB_TILE;
  const uint32_t mine = min(first + warp, count - 1u);
  const float scale = clb_row_scale(a.sumsq + (uint64_t)mine * tiles, tiles, a.hidden, a.epsilon);
  if (lane == 0u) shared.scale[warp] = scale;
  __syncthreads();
  const uint32_t expert = blockIdx.x * EXPERTS + lane / ROWS;
  const uint32_t row = first + lane % ROWS;
  if (warp > 0u || row >= count) return;
  float logit = 0.0f;
#pragma unroll
  for (uint32_t w = 0u; w < WARPS; w++)
    logit += shared.part[w][lane];
  logit *= shared.scale[lane % ROWS];
  if (expert < a.experts) {
    a.logits[(uint64_t)row * a.experts + expert] = logit;
  } else if (expert == a.experts && a.shared_gate != nullptr) {
    a.shared_scale[row] = clb_exact_sigmoid(logit);
  }
}
