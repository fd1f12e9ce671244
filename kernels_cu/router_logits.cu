/*
 * router_logits.cu: the router's scores of every row, in fp32 throughout: they decide which experts run.
 *
 * Operation  clb_router_logits: see abi.h. The norm is applied here (its scale after the sum); the gate of the shared
 *            expert is one more row of the matrix.
 * Reference  tests/cuda/test_router_logits.py (numpy, float64).
 * Grid       (experts + 1 rounded up to 4 / 4, max_rows / 8 rounded up) blocks of 128 threads: a warp takes one expert
 *            and 8 rows, its lanes every 32nd group of 4 columns.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   decode: 4 * experts * hidden bytes, 1 MB for Qwen3-30B: 0.24 us, so latency-bound: target 2 us. Prompts:
 *            2 * T * experts * hidden flops, 1.1 GFLOP for 2,048 rows: 18 us at 60 TFLOP/s; bound by L1 reads: 60 us.
 */
#include "../engine_c/src/exact_math.h"
#include "device.cuh"

#define ROWS 8u
#define THREADS 128u

/* sums[i] += w . (norm x of row first + i), lanes added in a fixed order. `last`: the highest row that exists. */
CLB_DEVICE void dot_rows(const clb_router_logits_args& a, const float* weights, uint32_t first, uint32_t last,
                         float (&sums)[ROWS]) {
#pragma unroll
  for (uint32_t i = 0u; i < ROWS; i++)
    sums[i] = 0.0f;
  for (uint32_t col = threadIdx.x % CLB_WARP * 4u; col < a.hidden; col += CLB_WARP * 4u) {
    float4 w = *reinterpret_cast<const float4*>(weights + col);
    const float4 norm = *reinterpret_cast<const float4*>(a.norm + col);
    w = make_float4(w.x * norm.x, w.y * norm.y, w.z * norm.z, w.w * norm.w);
#pragma unroll
    for (uint32_t i = 0u; i < ROWS; i++) {
      if (first + i > last) break;
      const float4 x = *reinterpret_cast<const float4*>(a.residual + (uint64_t)(first + i) * a.hidden + col);
      sums[i] = fmaf(w.x, x.x, sums[i]);
      sums[i] = fmaf(w.y, x.y, sums[i]);
      sums[i] = fmaf(w.z, x.z, sums[i]);
      sums[i] = fmaf(w.w, x.w, sums[i]);
    }
  }
#pragma unroll
  for (uint32_t i = 0u; i < ROWS; i++)
    sums[i] = clb_warp_sum(sums[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    clb_router_logits(const __grid_constant__ clb_router_logits_args a) {
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t expert = blockIdx.x * (THREADS / CLB_WARP) + threadIdx.x / CLB_WARP;
  const uint32_t first = blockIdx.y * ROWS;
  const uint32_t count = *a.row_count;
  const bool gate = expert == a.experts && a.shared_gate != nullptr;
  if (first >= count || (expert >= a.experts && !gate)) return;
  float sums[ROWS];
  dot_rows(a, gate ? a.shared_gate : a.weights + (uint64_t)expert * a.hidden, first, count - 1u, sums);
  const uint32_t tiles = a.hidden / CLB_TILE;
#pragma unroll
  for (uint32_t i = 0u; i < ROWS; i++) {
    const uint32_t row = first + i;
    if (row >= count) break;
    const float logit = sums[i] * clb_row_scale(a.sumsq + (uint64_t)row * tiles, tiles, a.hidden, a.epsilon);
    if (threadIdx.x % CLB_WARP != 0u) continue;
    if (gate) {
      a.shared_scale[row] = clb_exact_sigmoid(logit);
    } else {
      a.logits[(uint64_t)row * a.experts + expert] = logit;
    }
  }
}
