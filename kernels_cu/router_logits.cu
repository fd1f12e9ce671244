/*
 * router_logits.cu: the router's scores of prompts, in fp32 throughout: they decide which experts run.
 *
 * Operation  clb_router_logits: see abi.h.
 * Reference  tests/cuda/test_step_kernels.py (numpy, float64).
 * Grid       (experts, and the gate of the shared expert, / 32 rounded up, max_rows / block_rows rounded up) blocks of
 *            256 threads. Columns go through shared memory 32 at a time, four stages deep; four groups of two warps
 * take 8 of them each, a thread 4 experts times 4 rows, or times one where there are few: the same bits on more
 *            multiprocessors. The four sums are added in order. The norm's weights are multiplied in on the way, its
 *            scale after the sum.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   2 * T * experts * hidden flops, 1.1 GFLOP for 2,048 rows of Qwen3-30B: 18 us at 60 TFLOP/s; a thread's
 *            eight 16-byte reads of shared memory serve 64 fused multiply-adds and 16 products. Target: 40 us, and
 *            12 us up to 512 rows. Measured (H200, 2026-11-30): 49 us, and 30 us up to 512 rows.
 */
#include "../engine_c/src/exact_math.h"
#include "device.cuh"

#define SIDE 32u /* experts, and most rows, of a block */
#define COLS 32u /* of a stage */
#define STAGES 4u
#define GROUPS 4u
#define GROUP_THREADS (CLB_MATMUL_THREADS / GROUPS)
#define GROUP_COLS (COLS / GROUPS)
#define EACH 4u            /* experts, and most rows, of a thread: 8 apart */
#define STRIDE (COLS + 4u) /* of a row in a stage: eight rows of 16 bytes hit all banks */

struct logits_stage {
  alignas(16) float weights[SIDE][STRIDE];
  alignas(16) float rows[SIDE][STRIDE];
  alignas(16) float norm[COLS];
};

struct logits_shared {
  logits_stage stages[STAGES];
  float scale[SIDE];
};

/* What one thread copies of a stage: four columns of an expert and of a row; the first eight also of the norm. */
struct logits_source {
  const float* weights; /* NULL: zeros */
  const float* row;     /* NULL: zeros */
  const float* norm;    /* NULL: nothing */
};

CLB_DEVICE void put(uint32_t to, const float* from, bool there) {
  if (there) {
    clb_copy_async(to, from);
  } else {
    clb_zero_shared(to);
  }
}

template <uint32_t ROWS>
CLB_DEVICE void copy(const logits_source& from, logits_stage& stage, uint32_t begin, uint32_t hidden) {
  const uint32_t col = threadIdx.x % (COLS / 4u) * 4u;
  const uint32_t side = threadIdx.x / (COLS / 4u);
  const bool in = begin + col < hidden;
  put(clb_shared_address(&stage.weights[side][col]), from.weights + begin, in && from.weights != nullptr);
  if (side < ROWS * 8u) put(clb_shared_address(&stage.rows[side][col]), from.row + begin, in && from.row != nullptr);
  if (from.norm != nullptr) put(clb_shared_address(&stage.norm[col]), from.norm + begin, in);
}

CLB_DEVICE float4 four_of(const float* at) { return *reinterpret_cast<const float4*>(at); }

/* This group's columns of a stage. Thread i of a group: experts i % 8, + 8, .. and rows i / 8, + 8, ... */
template <uint32_t ROWS>
CLB_DEVICE void add_columns(const logits_stage& stage, float (&sum)[ROWS][EACH]) {
  const uint32_t own = threadIdx.x % GROUP_THREADS;
  const uint32_t first = threadIdx.x / GROUP_THREADS * GROUP_COLS;
#pragma unroll
  for (uint32_t c = first; c < first + GROUP_COLS; c += 4u) {
    const float4 norm = four_of(&stage.norm[c]);
    float4 w[EACH];
#pragma unroll
    for (uint32_t e = 0u; e < EACH; e++)
      w[e] = four_of(&stage.weights[own % 8u + e * 8u][c]);
#pragma unroll
    for (uint32_t r = 0u; r < ROWS; r++) {
      const float4 x = four_of(&stage.rows[own / 8u + r * 8u][c]);
      const float4 y = make_float4(x.x * norm.x, x.y * norm.y, x.z * norm.z, x.w * norm.w);
#pragma unroll
      for (uint32_t e = 0u; e < EACH; e++)
        sum[r][e] = fmaf(w[e].w, y.w, fmaf(w[e].z, y.z, fmaf(w[e].y, y.y, fmaf(w[e].x, y.x, sum[r][e]))));
    }
  }
}

/* sums: of each group, (row, expert). */
template <uint32_t ROWS>
CLB_DEVICE void finish(const clb_router_logits_args& a, const logits_shared& shared,
                       const float (&sums)[GROUPS][SIDE][SIDE + 1u], uint32_t count) {
  for (uint32_t i = threadIdx.x; i < ROWS * 8u * SIDE; i += CLB_MATMUL_THREADS) {
    const uint32_t row = blockIdx.y * (ROWS * 8u) + i / SIDE;
    const uint32_t expert = blockIdx.x * SIDE + i % SIDE;
    if (row >= count || expert > a.experts) continue;
    float logit = 0.0f;
#pragma unroll
    for (uint32_t g = 0u; g < GROUPS; g++)
      logit += sums[g][i / SIDE][i % SIDE];
    logit *= shared.scale[i / SIDE];
    if (expert < a.experts) {
      a.logits[(uint64_t)row * a.experts + expert] = logit;
    } else if (a.shared_gate != nullptr) {
      a.shared_scale[row] = clb_exact_sigmoid(logit);
    }
  }
}

template <uint32_t ROWS>
CLB_DEVICE logits_source source_of(const clb_router_logits_args& a, uint32_t count) {
  const uint32_t expert = blockIdx.x * SIDE + threadIdx.x / (COLS / 4u);
  const uint32_t row = blockIdx.y * (ROWS * 8u) + threadIdx.x / (COLS / 4u);
  const uint32_t col = threadIdx.x % (COLS / 4u) * 4u;
  logits_source from = {nullptr, nullptr, nullptr};
  if (expert < a.experts) from.weights = a.weights + (uint64_t)expert * a.hidden + col;
  if (expert == a.experts && a.shared_gate != nullptr) from.weights = a.shared_gate + col;
  if (row < count) from.row = a.residual + (uint64_t)row * a.hidden + col;
  if (threadIdx.x < COLS / 4u) from.norm = a.norm + col;
  return from;
}

/* ROWS: of a thread. */
template <uint32_t ROWS>
CLB_DEVICE void router_logits(const clb_router_logits_args& a, logits_shared& shared, uint32_t count) {
  if (blockIdx.y * (ROWS * 8u) >= count) return;
  const logits_source from = source_of<ROWS>(a, count);
  const uint32_t stages = (a.hidden + COLS - 1u) / COLS;
  for (uint32_t i = 0u; i < STAGES - 1u; i++) {
    if (i < stages) copy<ROWS>(from, shared.stages[i], i * COLS, a.hidden);
    clb_copies_end_group();
  }
  if (threadIdx.x < ROWS * 8u && blockIdx.y * (ROWS * 8u) + threadIdx.x < count) {
    const uint32_t sums = (a.hidden + CLB_HALF_SUM - 1u) / CLB_HALF_SUM;
    const uint32_t row = blockIdx.y * (ROWS * 8u) + threadIdx.x;
    shared.scale[threadIdx.x] = clb_half_row_scale(a.sumsq + (uint64_t)row * sums, a.hidden, a.epsilon);
  }
  float sum[ROWS][EACH];
#pragma unroll
  for (uint32_t i = 0u; i < ROWS * EACH; i++)
    sum[i / EACH][i % EACH] = 0.0f;
#pragma unroll 1
  for (uint32_t i = 0u; i < stages; i++) {
    clb_copies_wait<STAGES - 2u>();
    __syncthreads();
    const uint32_t ahead = i + STAGES - 1u;
    if (ahead < stages) copy<ROWS>(from, shared.stages[ahead % STAGES], ahead * COLS, a.hidden);
    clb_copies_end_group();
    add_columns<ROWS>(shared.stages[i % STAGES], sum);
  }
  clb_copies_wait<0>();
  __syncthreads(); /* the stages are free: the sums of the groups meet there */
  static_assert(sizeof(float[GROUPS][SIDE][SIDE + 1u]) <= sizeof shared.stages, "sums fit the stages");
  float (&sums)[GROUPS][SIDE][SIDE + 1u] = *reinterpret_cast<float (*)[GROUPS][SIDE][SIDE + 1u]>(shared.stages);
  const uint32_t own = threadIdx.x % GROUP_THREADS;
#pragma unroll
  for (uint32_t i = 0u; i < ROWS * EACH; i++)
    sums[threadIdx.x / GROUP_THREADS][own / 8u + i / EACH * 8u][own % 8u + i % EACH * 8u] = sum[i / EACH][i % EACH];
  __syncthreads();
  finish<ROWS>(a, shared, sums, count);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, 2)
    clb_router_logits(const __grid_constant__ clb_router_logits_args a) {
  __shared__ logits_shared shared;
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t count = *a.row_count;
  if (a.block_rows == SIDE) {
    router_logits<EACH>(a, shared, count);
  } else {
    router_logits<1u>(a, shared, count);
  }
}
