/*
 * experts_many.cu: the FFN of a layer for any number of rows (prompts), from the buckets of clb_bucket.
 *
 * Operation  clb_expert_gate_up_many_{bf16,fp16}, clb_expert_down_many_{bf16,fp16}, clb_combine_{bf16,fp16}: see abi.h.
 *            The shared expert (or a dense FFN) is a launch of its own with offsets NULL.
 * Reference  tests/cuda/test_experts.py (numpy, float64).
 * Grid       gate_up, down: any number of blocks of 256 threads, two a multiprocessor; block b takes units b,
 *            + gridDim.x, ... of (expert, row block, 64 rows of its bucket), the last running fastest. combine:
 * max_rows blocks of 256 threads. Dynamic shared memory CLB_MANY_SHARED, but for combine. Needs      sm_80; sm_90 for
 * programmatic edges. Roofline   6 * assignments * hidden * width flops, done twice (high and low halves), and the
 * bytes of the experts. Qwen3-30B, 2,048 rows, k 8: 155 GFLOP twice = 520 us at 60 % of 990 TFLOP/s; 1.2 GB = 281 us.
 * Target: half of the former. combine: (K + 2) * hidden * 4 bytes a row: 168 MB, 39 us.
 *            Measured (H200, 2026-11-29): gate_up 1,142 us, down 549 us.
 */
#include "many.cuh"

/* Blocks of 64 rows of all experts before each one; experts without rows have none. */
struct unit_table {
  uint32_t before[CLB_ROUTER_MAX_EXPERTS + 1u];
};

CLB_DEVICE uint32_t bucket_begin(const clb_expert_many_args& a, uint32_t expert) {
  return (a.offsets != nullptr) ? a.offsets[expert] : 0u;
}

CLB_DEVICE uint32_t bucket_end(const clb_expert_many_args& a, uint32_t expert) {
  return (a.offsets != nullptr) ? a.offsets[expert + 1u] : *a.row_count;
}

/* By the first warp, a lane a range of experts. Ends with a barrier. */
CLB_DEVICE void count_units(const clb_expert_many_args& a, unit_table& table) {
  if (threadIdx.x < CLB_WARP) {
    const uint32_t each = (a.expert_count + CLB_WARP - 1u) / CLB_WARP;
    const uint32_t begin = min(threadIdx.x * each, a.expert_count);
    const uint32_t end = min(begin + each, a.expert_count);
    uint32_t own = 0u;
    for (uint32_t e = begin; e < end; e++)
      own += (bucket_end(a, e) - bucket_begin(a, e) + MANY_ROWS - 1u) / MANY_ROWS;
    uint32_t sum = own;
#pragma unroll
    for (uint32_t step = 1u; step < CLB_WARP; step *= 2u) {
      const uint32_t before = __shfl_up_sync(CLB_FULL_WARP, sum, step);
      sum += (threadIdx.x >= step) ? before : 0u;
    }
    uint32_t at = sum - own;
    for (uint32_t e = begin; e < end; e++) {
      table.before[e] = at;
      at += (bucket_end(a, e) - bucket_begin(a, e) + MANY_ROWS - 1u) / MANY_ROWS;
    }
    if (threadIdx.x == CLB_WARP - 1u) table.before[a.expert_count] = sum;
  }
  __syncthreads();
}

struct many_unit {
  const clb_expert_weights* weights;
  uint32_t row_block; /* of the weights */
  uint32_t first;     /* assignment */
  uint32_t rows;      /* 1 .. 64 */

  /* The expert of a unit is the last one with before * row_blocks <= unit. */
  __device__ __forceinline__ many_unit(const clb_expert_many_args& a, const unit_table& table, uint32_t unit,
                                       uint32_t row_blocks) {
    uint32_t low = 0u;
    uint32_t high = a.expert_count;
    while (high - low > 1u) {
      const uint32_t middle = (low + high) / 2u;
      if (table.before[middle] * row_blocks <= unit) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const uint32_t blocks = table.before[low + 1u] - table.before[low];
    const uint32_t within = unit - table.before[low] * row_blocks;
    weights = a.experts + low;
    row_block = within / blocks;
    first = bucket_begin(a, low) + within % blocks * MANY_ROWS;
    rows = min(bucket_end(a, low) - first, MANY_ROWS);
  }
};

CLB_DEVICE const unsigned char* tile_bytes(uint64_t weights, uint32_t row_tile, uint32_t across) {
  return reinterpret_cast<const unsigned char*>(weights) + (uint64_t)row_tile * across * CLB_PIECE +
         threadIdx.x % CLB_WARP * 16u;
}

CLB_DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

/* Warp pairs of row tiles are gate and up of one row tile of the expert: four of them a block. */
template <class P>
CLB_DEVICE void gate_up_unit(const clb_expert_many_args& a, const many_unit& unit, const void* memory,
                             float (&scale)[MANY_ROWS]) {
  const uint32_t warp = threadIdx.x / CLB_WARP;
  const uint32_t tiles = a.width / CLB_TILE;
  const uint32_t across = a.hidden / CLB_TILE;
  for (uint32_t i = warp; i < unit.rows; i += CLB_WARPS) {
    const uint32_t row = (a.offsets != nullptr) ? a.tokens[unit.first + i] : unit.first + i;
    const float norm = clb_row_scale(a.sumsq + (uint64_t)row * across, across, a.hidden, a.epsilon);
    if (threadIdx.x % CLB_WARP == 0u) scale[i] = norm * (1.0f / P::scale);
  }
  clb_many_operands from = {nullptr, nullptr};
  const uint32_t loads = unit.row_block * 4u + warp / 2u;
  if (loads < tiles)
    from.weights = tile_bytes((warp % 2u == 0u) ? unit.weights->gate : unit.weights->up, loads, across);
  if (threadIdx.x / 4u < unit.rows) {
    const uint32_t i = unit.first + threadIdx.x / 4u;
    const uint32_t row = (a.offsets != nullptr) ? a.tokens[i] : i;
    from.input = a.input + (uint64_t)row * a.hidden + threadIdx.x % 4u * 4u;
  }
  clb_many_sums sum;
  clb_many_multiply<P>(memory, from, across, sum);
  const uint32_t tile = unit.row_block * 4u + warp % 4u;
#pragma unroll
  for (uint32_t s = 0u; s < MANY_STEPS; s++) {
    const clb_pairs gate = clb_make_pairs(sum[0][s]);
    const clb_pairs up = clb_make_pairs(sum[1][s]);
    const uint32_t i = clb_pair_row(s);
    if (i >= unit.rows || tile >= tiles) continue;
    const float n = scale[i];
    clb_pairs act;
    act.low = make_float2(silu(gate.low.x * n) * (up.low.x * n), silu(gate.low.y * n) * (up.low.y * n));
    act.high = make_float2(silu(gate.high.x * n) * (up.high.x * n), silu(gate.high.y * n) * (up.high.y * n));
    clb_store_split_pairs<P>(a.activation + (uint64_t)(unit.first + i) * a.width, tile, act);
  }
}

template <class P>
CLB_DEVICE void gate_up_many(const clb_expert_many_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ unit_table table;
  __shared__ float scale[MANY_ROWS];
  clb_wait_for_inputs();
  clb_release_dependents();
  count_units(a, table);
  const uint32_t row_blocks = (a.width / CLB_TILE + 3u) / 4u;
  const uint32_t units = table.before[a.expert_count] * row_blocks;
#pragma unroll 1
  for (uint32_t u = blockIdx.x; u < units; u += gridDim.x) {
    gate_up_unit<P>(a, many_unit(a, table, u, row_blocks), memory, scale);
    __syncthreads(); /* scale is read until here */
  }
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, 2)
    clb_expert_gate_up_many_bf16(const __grid_constant__ clb_expert_many_args a) {
  gate_up_many<clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, 2)
    clb_expert_gate_up_many_fp16(const __grid_constant__ clb_expert_many_args a) {
  gate_up_many<clb_fp16>(a);
}

template <class P>
CLB_DEVICE void down_unit(const clb_expert_many_args& a, const many_unit& unit, const void* memory) {
  const uint32_t warp = threadIdx.x / CLB_WARP;
  const uint32_t tiles = a.hidden / CLB_TILE;
  const uint32_t across = a.width / CLB_TILE;
  const uint32_t first = unit.row_block * MANY_ROW_TILES;
  clb_many_operands from = {nullptr, nullptr};
  if (first + warp < tiles) from.weights = tile_bytes(unit.weights->down, first + warp, across);
  if (threadIdx.x / 4u < unit.rows)
    from.input = a.activation + (uint64_t)(unit.first + threadIdx.x / 4u) * a.width + threadIdx.x % 4u * 4u;
  clb_many_sums sum;
  clb_many_multiply<P>(memory, from, across, sum);
#pragma unroll
  for (uint32_t s = 0u; s < MANY_STEPS; s++) {
    const uint32_t i = clb_pair_row(s);
    uint32_t place = unit.first + i;
    if (i < unit.rows && a.offsets != nullptr) place = a.places[unit.first + i];
    float* row = a.partial + (uint64_t)place * a.hidden;
#pragma unroll
    for (uint32_t r = 0u; r < 2u; r++) {
      const clb_pairs y = clb_make_pairs(sum[r][s]);
      const uint32_t tile = first + warp % 4u * 2u + r;
      if (i >= unit.rows || tile >= tiles) continue;
      float* to = row + tile * CLB_TILE + clb_pair_col();
      const float n = 1.0f / P::scale;
      *reinterpret_cast<float2*>(to) = make_float2(y.low.x * n, y.low.y * n);
      *reinterpret_cast<float2*>(to + 8) = make_float2(y.high.x * n, y.high.y * n);
    }
  }
}

template <class P>
CLB_DEVICE void down_many(const clb_expert_many_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ unit_table table;
  clb_wait_for_inputs();
  clb_release_dependents();
  count_units(a, table);
  const uint32_t row_blocks = (a.hidden / CLB_TILE + MANY_ROW_TILES - 1u) / MANY_ROW_TILES;
  const uint32_t units = table.before[a.expert_count] * row_blocks;
#pragma unroll 1
  for (uint32_t u = blockIdx.x; u < units; u += gridDim.x)
    down_unit<P>(a, many_unit(a, table, u, row_blocks), memory);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, 2)
    clb_expert_down_many_bf16(const __grid_constant__ clb_expert_many_args a) {
  down_many<clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, 2)
    clb_expert_down_many_fp16(const __grid_constant__ clb_expert_many_args a) {
  down_many<clb_fp16>(a);
}

/* --------------------------------------------------------------------- combine */

template <class P>
CLB_DEVICE void combine(const clb_combine_args& a) {
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t row = blockIdx.x;
  if (row >= *a.row_count) return;
  const clb_stream stream = {a.residual, a.next_norm, a.next_input, a.next_sumsq, a.hidden};
  const uint32_t ranks = (a.partial != nullptr) ? a.k_max : 0u;
  const float shared_scale = (a.shared_scale != nullptr) ? a.shared_scale[row] : 1.0f;
  for (uint32_t begin = 0u; begin < a.hidden; begin += CLB_MATMUL_THREADS * 2u) {
    const uint32_t col = begin + threadIdx.x * 2u;
    const bool valid = col < a.hidden;
    float2 x = make_float2(0.0f, 0.0f);
    float2 y = make_float2(0.0f, 0.0f);
    for (uint32_t r = 0u; r < ranks; r++) {
      const uint64_t place = (uint64_t)row * a.k_max + r;
      if (!valid || a.indices[place] == CLB_NONE) continue;
      const float2 part = *reinterpret_cast<const float2*>(a.partial + place * a.hidden + col);
      y.x = fmaf(a.weights[place], part.x, y.x);
      y.y = fmaf(a.weights[place], part.y, y.y);
    }
    if (a.shared_partial != nullptr && valid) {
      const float2 part = *reinterpret_cast<const float2*>(a.shared_partial + (uint64_t)row * a.hidden + col);
      y.x = fmaf(shared_scale, part.x, y.x);
      y.y = fmaf(shared_scale, part.y, y.y);
    }
    if (valid) x = *reinterpret_cast<const float2*>(a.residual + (uint64_t)row * a.hidden + col);
    clb_store_residual<P>(stream, row, col, make_float2(x.x + y.x, x.y + y.y), clb_read_pair(a.next_norm + col, valid),
                          valid);
  }
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS)
    clb_combine_bf16(const __grid_constant__ clb_combine_args a) {
  combine<clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS)
    clb_combine_fp16(const __grid_constant__ clb_combine_args a) {
  combine<clb_fp16>(a);
}
