/*
 * router_logits.cu: the router's scores of prompts, in fp32 throughout: they decide which experts run.
 *
 * Operation  clb_router_logits: see abi.h.
 * Reference  tests/cuda/test_step_kernels.py (numpy, float64).
 * Grid       (experts, and the gate of the shared expert, / 32 rounded up, max_rows / 32 rounded up) blocks of 256
 *            threads. Columns go through shared memory 64 at a time; four groups of two warps take 16 of them each, a
 *            thread 4 experts times 4 rows; the four sums are added in order.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   2 * T * experts * hidden flops, 1.1 GFLOP for 2,048 rows of Qwen3-30B: 18 us at 60 TFLOP/s; a thread's two
 *            16-byte reads of shared memory serve 16 fused multiply-adds. Target: 40 us, and 12 us up to 512 rows.
 */
#include "../engine_c/src/exact_math.h"
#include "device.cuh"

#define SIDE 32u /* experts, and rows, of a block */
#define COLS 64u
#define GROUPS 4u
#define GROUP_THREADS (CLB_MATMUL_THREADS / GROUPS)
#define GROUP_COLS (COLS / GROUPS)
#define EACH 4u                                       /* experts, and rows, of a thread */
#define QUADS (COLS / 4u * SIDE / CLB_MATMUL_THREADS) /* of four columns that a thread copies of a side */
#define PAD 4u

struct logits_shared {
  alignas(16) float weights[COLS][SIDE + PAD]; /* times the norm */
  alignas(16) float rows[COLS][SIDE + PAD];
  float sums[GROUPS][SIDE][SIDE + 1u]; /* row, expert */
};

/* What a thread copies: columns 4 (i * 8 + warp), .. of expert and row `lane`. */
struct ahead {
  float4 weights[QUADS];
  float4 rows[QUADS];
};

CLB_DEVICE float4 read_four(const float* at, bool there) {
  return there ? *reinterpret_cast<const float4*>(at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

CLB_DEVICE void read_ahead(const clb_router_logits_args& a, const float* weights, const float* row, uint32_t begin,
                           ahead& next) {
#pragma unroll
  for (uint32_t i = 0u; i < QUADS; i++) {
    const uint32_t col = begin + (i * (CLB_MATMUL_THREADS / CLB_WARP) + threadIdx.x / CLB_WARP) * 4u;
    const bool in = col < a.hidden;
    const float4 w = read_four(weights + col, in && weights != nullptr);
    const float4 norm = read_four(a.norm + col, in);
    next.weights[i] = make_float4(w.x * norm.x, w.y * norm.y, w.z * norm.z, w.w * norm.w);
    next.rows[i] = read_four(row + col, in && row != nullptr);
  }
}

CLB_DEVICE void put_column(float (&side)[COLS][SIDE + PAD], uint32_t col, const float4& four) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  side[col][lane] = four.x;
  side[col + 1u][lane] = four.y;
  side[col + 2u][lane] = four.z;
  side[col + 3u][lane] = four.w;
}

CLB_DEVICE void put(logits_shared& shared, const ahead& next) {
#pragma unroll
  for (uint32_t i = 0u; i < QUADS; i++) {
    const uint32_t col = (i * (CLB_MATMUL_THREADS / CLB_WARP) + threadIdx.x / CLB_WARP) * 4u;
    put_column(shared.weights, col, next.weights[i]);
    put_column(shared.rows, col, next.rows[i]);
  }
}

/* This group's columns of a stage. Thread i of a group: experts 4 (i % 8), .. and rows 4 (i / 8), ... */
CLB_DEVICE void add_columns(const logits_shared& shared, float (&sum)[EACH][EACH]) {
  const uint32_t own = threadIdx.x % GROUP_THREADS;
  const uint32_t first = threadIdx.x / GROUP_THREADS * GROUP_COLS;
#pragma unroll
  for (uint32_t c = 0u; c < GROUP_COLS; c++) {
    const float4 w = *reinterpret_cast<const float4*>(&shared.weights[first + c][own % 8u * EACH]);
    const float4 x = *reinterpret_cast<const float4*>(&shared.rows[first + c][own / 8u * EACH]);
    const float of_expert[EACH] = {w.x, w.y, w.z, w.w};
    const float of_row[EACH] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (uint32_t r = 0u; r < EACH; r++)
#pragma unroll
      for (uint32_t e = 0u; e < EACH; e++)
        sum[r][e] = fmaf(of_expert[e], of_row[r], sum[r][e]);
  }
}

/* Results 4 i, .. of the block's 32 x 32, experts running fastest. */
CLB_DEVICE void finish(const clb_router_logits_args& a, const logits_shared& shared, uint32_t count) {
  const uint32_t sums = (a.hidden + CLB_HALF_SUM - 1u) / CLB_HALF_SUM;
  for (uint32_t i = threadIdx.x; i < SIDE * SIDE; i += CLB_MATMUL_THREADS) {
    const uint32_t row = blockIdx.y * SIDE + i / SIDE;
    const uint32_t expert = blockIdx.x * SIDE + i % SIDE;
    if (row >= count || expert > a.experts) continue;
    float logit = 0.0f;
#pragma unroll
    for (uint32_t g = 0u; g < GROUPS; g++)
      logit += shared.sums[g][i / SIDE][i % SIDE];
    logit *= clb_half_row_scale(a.sumsq + (uint64_t)row * sums, a.hidden, a.epsilon);
    if (expert < a.experts) {
      a.logits[(uint64_t)row * a.experts + expert] = logit;
    } else if (a.shared_gate != nullptr) {
      a.shared_scale[row] = clb_exact_sigmoid(logit);
    }
  }
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, 2)
    clb_router_logits(const __grid_constant__ clb_router_logits_args a) {
  __shared__ logits_shared shared;
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t count = *a.row_count;
  if (blockIdx.y * SIDE >= count) return;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t expert = blockIdx.x * SIDE + lane;
  const uint32_t row = blockIdx.y * SIDE + lane;
  const float* weights = (expert < a.experts)    ? a.weights + (uint64_t)expert * a.hidden
                         : (expert == a.experts) ? a.shared_gate
                                                 : nullptr;
  const float* residual = (row < count) ? a.residual + (uint64_t)row * a.hidden : nullptr;
  float sum[EACH][EACH];
#pragma unroll
  for (uint32_t i = 0u; i < EACH * EACH; i++)
    sum[i / EACH][i % EACH] = 0.0f;
  ahead next;
  read_ahead(a, weights, residual, 0u, next);
#pragma unroll 1
  for (uint32_t begin = 0u; begin < a.hidden; begin += COLS) {
    put(shared, next);
    __syncthreads();
    if (begin + COLS < a.hidden) read_ahead(a, weights, residual, begin + COLS, next);
    add_columns(shared, sum);
    __syncthreads();
  }
  const uint32_t own = threadIdx.x % GROUP_THREADS;
#pragma unroll
  for (uint32_t i = 0u; i < EACH * EACH; i++)
    shared.sums[threadIdx.x / GROUP_THREADS][own / 8u * EACH + i / EACH][own % 8u * EACH + i % EACH] =
        sum[i / EACH][i % EACH];
  __syncthreads();
  finish(a, shared, count);
}
