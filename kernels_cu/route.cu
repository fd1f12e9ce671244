/*
 * route.cu: the router of a decode step in one node: scores of every row, and the choice of its experts by the block
 * that finishes last.
 *
 * Operation  clb_route: see abi.h. Scores are fp32 throughout, because they decide which experts run; the norm is
 *            applied here (its scale after the sum); the gate of the shared expert is one more row of the matrix. The
 *            choice is router.cuh's.
 * Reference  tests/cuda/test_step_kernels.py (numpy, float64).
 * Grid       (experts + 1 rounded up to 4 / 4, max_rows / 8 rounded up) blocks of 256 threads: a block takes 4 experts
 *            and 8 rows; its 8 warps share the columns, 128 at a time each. The last of the blocks of 8 rows chooses, a
 *            warp a row.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   4 * experts * hidden bytes, 1 MB for Qwen3-30B: 0.24 us, so latency-bound: a read of the residual, one
 *            exchange through L2, k rounds of the choice. Target: 4 us.
 *
 * The sum of a score: a lane's columns in rising order, lanes by a butterfly, warps in order: the same for one row and
 * for eight.
 */
#include "router.cuh"

#define EXPERTS 4u
#define ROWS 8u
#define WARPS (CLB_MATMUL_THREADS / CLB_WARP)
#define PASS_COLS (CLB_MATMUL_THREADS * 4u)
#define PASSES_AHEAD 2u /* whose weights are read before the wait: hidden sizes up to 2,048 */

struct route_shared {
  float part[WARPS][EXPERTS * ROWS];
  float scale[ROWS];
  uint32_t last;
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

/* Four columns of `rows` rows; those that do not exist are zeros. */
template <uint32_t MOST>
CLB_DEVICE void read_rows(const clb_router_logits_args& a, uint32_t first, uint32_t rows, uint32_t col,
                          float4 (&x)[MOST]) {
#pragma unroll
  for (uint32_t r = 0u; r < MOST; r++)
    x[r] = (r < rows && col < a.hidden)
               ? *reinterpret_cast<const float4*>(a.residual + (uint64_t)(first + r) * a.hidden + col)
               : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

template <uint32_t MOST>
CLB_DEVICE void add_products(const float4 (&w)[EXPERTS], const float4 (&x)[MOST], float (&sums)[EXPERTS * MOST]) {
#pragma unroll
  for (uint32_t i = 0u; i < EXPERTS; i++) {
#pragma unroll
    for (uint32_t r = 0u; r < MOST; r++) {
      float& sum = sums[i * MOST + r];
      sum = fmaf(w[i].x, x[r].x, sum);
      sum = fmaf(w[i].y, x[r].y, sum);
      sum = fmaf(w[i].z, x[r].z, sum);
      sum = fmaf(w[i].w, x[r].w, sum);
    }
  }
}

/* Lane l gets the sum over all lanes of values[l % COUNT], by halves of the warp, the largest first: each step adds
   what the two lanes of a pair have, so that COUNT changes no sum. */
template <uint32_t COUNT, uint32_t HALF = CLB_WARP / 2u>
CLB_DEVICE float sum_transposed(float (&values)[COUNT]) {
  const bool upper = (threadIdx.x & HALF) != 0u;
  if constexpr (HALF < COUNT) {
#pragma unroll
    for (uint32_t i = 0u; i < HALF; i++) {
      const float send = upper ? values[i] : values[i + HALF];
      const float keep = upper ? values[i + HALF] : values[i];
      values[i] = keep + __shfl_xor_sync(CLB_FULL_WARP, send, HALF);
    }
  } else {
#pragma unroll
    for (uint32_t i = 0u; i < COUNT; i++)
      values[i] += __shfl_xor_sync(CLB_FULL_WARP, values[i], HALF);
  }
  if constexpr (HALF > 1u) {
    return sum_transposed<COUNT, HALF / 2u>(values);
  } else {
    return values[0];
  }
}

/* Scores of this block's experts for `rows` rows from `first` on, of which there are at most MOST. */
template <uint32_t MOST>
CLB_DEVICE void find_scores(const clb_router_logits_args& a, float4 (&ahead)[PASSES_AHEAD][EXPERTS], uint32_t first,
                            uint32_t rows, route_shared& shared) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t warp = threadIdx.x / CLB_WARP;
  const uint32_t tiles = a.hidden / CLB_TILE;
  const float* sumsq = a.sumsq + (uint64_t)(first + min(warp, rows - 1u)) * tiles;
  const float squares = clb_row_squares(sumsq, tiles);
  float sums[EXPERTS * MOST];
#pragma unroll
  for (uint32_t i = 0u; i < EXPERTS * MOST; i++)
    sums[i] = 0.0f;
#pragma unroll
  for (uint32_t i = 0u; i < PASSES_AHEAD; i++) {
    float4 x[MOST];
    read_rows<MOST>(a, first, rows, i * PASS_COLS + threadIdx.x * 4u, x);
    add_products<MOST>(ahead[i], x, sums);
  }
  for (uint32_t col = PASSES_AHEAD * PASS_COLS + threadIdx.x * 4u; col < a.hidden; col += PASS_COLS) {
    float4 x[MOST];
    read_weights(a, col, ahead[0]);
    read_rows<MOST>(a, first, rows, col, x);
    add_products<MOST>(ahead[0], x, sums);
  }
  const float sum = sum_transposed<EXPERTS * MOST>(sums);
  if (lane < EXPERTS * MOST) shared.part[warp][lane] = sum;
  const float scale = clb_scale_of(squares, a.hidden, a.epsilon);
  if (lane == 0u) shared.scale[warp] = scale;
  __syncthreads();
  const uint32_t expert = blockIdx.x * EXPERTS + lane / MOST;
  const uint32_t row = lane % MOST;
  if (warp > 0u || row >= rows || lane >= EXPERTS * MOST) return;
  float logit = 0.0f;
#pragma unroll
  for (uint32_t w = 0u; w < WARPS; w++)
    logit += shared.part[w][lane];
  logit *= shared.scale[row];
  if (expert < a.experts) {
    a.logits[(uint64_t)(first + row) * a.experts + expert] = logit;
  } else if (expert == a.experts && a.shared_gate != nullptr) {
    a.shared_scale[first + row] = clb_exact_sigmoid(logit);
  }
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS) clb_route(const __grid_constant__ clb_route_args a) {
  __shared__ route_shared shared;
  const uint32_t first = blockIdx.y * ROWS;
  const uint32_t count = __ldcg(a.scores.row_count); /* there since before the step */
  const uint32_t rows = (first < count) ? min(count - first, ROWS) : 0u;
  const uint32_t warp = threadIdx.x / CLB_WARP;
  float4 ahead[PASSES_AHEAD][EXPERTS];
#pragma unroll
  for (uint32_t i = 0u; i < PASSES_AHEAD; i++)
    read_weights(a.scores, i * PASS_COLS + threadIdx.x * 4u, ahead[i]);
  clb_router_case with = {};
  if (warp < rows) with = clb_router_case_of(a.choice, first + warp);
  clb_wait_for_inputs();
  clb_release_dependents();
  if (rows == 0u) return;
  if (rows == 1u) {
    find_scores<1u>(a.scores, ahead, first, rows, shared);
  } else {
    find_scores<ROWS>(a.scores, ahead, first, rows, shared);
  }
  if (warp == 0u) {
    __syncwarp();
    if (threadIdx.x == 0u) {
      shared.last = (uint32_t)(clb_take_ticket(a.tickets + blockIdx.y) + 1u == gridDim.x);
      if (shared.last != 0u) {
        clb_acquire_tickets();
        a.tickets[blockIdx.y] = 0u; /* for the next layer */
      }
    }
  }
  __syncthreads();
  if (shared.last != 0u && warp < rows) clb_route_token(a.choice, first + warp, with, nullptr);
}
