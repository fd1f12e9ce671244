/*
 * experts_many.cu: the FFN of a layer for any number of rows (prompts), from the buckets of clb_bucket.
 *
 * Operation  clb_expert_gate_up_many_{bf16,fp16,int8,int4,fp8}, clb_expert_down_many_{the same},
 *            clb_combine_{bf16,fp16}: see abi.h.
 *            The shared expert (or a dense FFN) is a launch of its own with offsets NULL.
 * Reference  tests/cuda/test_experts.py (numpy, float64).
 * Grid       gate_up, down: any number of blocks, as many as run at once; see many.cuh for the two forms. Units are
 *            (expert, row block, rows of its bucket), the last running fastest.
 *            combine: max_rows blocks of 256 threads.
 * Needs      sm_80; sm_90a for wgmma and programmatic edges.
 * Roofline   6 * assignments * hidden * width flops and the bytes of the experts. Qwen3-30B, 2,048 rows, k 8:
 *            155 GFLOP, 196 us at 790 TFLOP/s; 1.2 GB, 281 us at 4.3 TB/s. Target: 400 us for both.
 *            combine: (2 K + 10) * hidden bytes a row: 109 MB, 25 us.
 *            Measured (H200, 2026-11-30): gate_up 361 us, down 190 us, combine 46 us; 128 rows: 202, 102 and 10 us.
 */
#include "few.cuh"
#include "many.cuh"

#define RANKS_AHEAD 8u /* results of a row that are on their way at once */

/* Units of an expert: its bucket in as few blocks of MANY_ROWS rows as hold it, evenly filled. */
CLB_DEVICE uint32_t row_blocks(uint32_t rows) { return (rows + MANY_ROWS - 1u) / MANY_ROWS; }

/* Row blocks of all experts before each one; experts without rows have none. */
struct unit_table {
  uint32_t before[CLB_ROUTER_MAX_EXPERTS + 1u];
};

CLB_DEVICE uint32_t bucket_begin(const clb_expert_many_args& a, uint32_t expert) {
  return (a.offsets != nullptr) ? a.offsets[expert] : 0u;
}

CLB_DEVICE uint32_t bucket_end(const clb_expert_many_args& a, uint32_t expert) {
  return (a.offsets != nullptr) ? a.offsets[expert + 1u] : *a.row_count;
}

/* Row blocks of an expert whose weights (of gate and up, or of down) are of this kind; those of other kinds have other
   nodes. */
template <uint32_t KIND, bool DOWN>
CLB_DEVICE uint32_t own_blocks(const clb_expert_many_args& a, uint32_t expert) {
  const uint32_t format = DOWN ? a.experts[expert].down_format : a.experts[expert].format;
  const uint32_t blocks = row_blocks(bucket_end(a, expert) - bucket_begin(a, expert));
  return (CLB_FORMAT_KIND(format) == KIND) ? blocks : 0u;
}

/* By the first warp, a lane a range of experts. Ends with a barrier. */
template <uint32_t KIND, bool DOWN>
CLB_DEVICE void count_units(const clb_expert_many_args& a, unit_table& table) {
  if (threadIdx.x < CLB_WARP) {
    const uint32_t each = (a.expert_count + CLB_WARP - 1u) / CLB_WARP;
    const uint32_t begin = min(threadIdx.x * each, a.expert_count);
    const uint32_t end = min(begin + each, a.expert_count);
    uint32_t own = 0u;
    for (uint32_t e = begin; e < end; e++)
      own += own_blocks<KIND, DOWN>(a, e);
    const uint32_t sum = clb_warp_prefix(own, threadIdx.x);
    uint32_t at = sum - own;
    for (uint32_t e = begin; e < end; e++) {
      table.before[e] = at;
      at += own_blocks<KIND, DOWN>(a, e);
    }
    if (threadIdx.x == CLB_WARP - 1u) table.before[a.expert_count] = sum;
  }
  __syncthreads();
}

struct expert_unit {
  const clb_expert_weights* weights;
  uint32_t row_block; /* of the weights */
  uint32_t first;     /* assignment */
  uint32_t rows;

  /* The expert of a unit is the last one with before * height <= number; height: row blocks of an expert's weights. */
  __device__ __forceinline__ expert_unit(const clb_expert_many_args& a, const unit_table& table, uint32_t number,
                                         uint32_t height) {
    uint32_t low = 0u;
    uint32_t high = a.expert_count;
    while (high - low > 1u) {
      const uint32_t middle = (low + high) / 2u;
      if (table.before[middle] * height <= number) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const uint32_t blocks = table.before[low + 1u] - table.before[low];
    const uint32_t within = number - table.before[low] * height;
    const uint32_t begin = bucket_begin(a, low);
    const uint32_t count = bucket_end(a, low) - begin;
    const uint32_t i = within % blocks;
    weights = a.experts + low;
    row_block = within / blocks;
    first = begin + i * count / blocks;
    rows = begin + (i + 1u) * count / blocks - first;
  }
};

CLB_DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

/* --------------------------------------------------------------------- gate, up */

/* Gate and up of MANY_TILES / 2 row tiles of the expert. */
struct gate_up_job {
  typedef expert_unit unit;
  static constexpr bool MAY_HALVE = false;

  const clb_expert_many_args& a;
  const unit_table& table;
  const uint16_t* input;
  uint32_t across;
  uint32_t tiles;
  uint32_t height;
  uint32_t units;

  __device__ __forceinline__ gate_up_job(const clb_expert_many_args& args, const unit_table& counted)
      : a(args),
        table(counted),
        input(args.input),
        across(args.hidden / CLB_TILE),
        tiles(args.width / CLB_TILE),
        height((tiles + MANY_TILES / 2u - 1u) / (MANY_TILES / 2u)),
        units(counted.before[args.expert_count] * height) {}

  __device__ __forceinline__ unit unit_at(uint32_t u) const { return unit(a, table, u, height); }

  __device__ __forceinline__ clb_many_matrix matrix(const unit& of, uint32_t place) const {
    const uint32_t tile = of.row_block * (MANY_TILES / 2u) + clb_many_pair(place);
    const uint64_t base = clb_many_which(place) == 0u ? of.weights->gate : of.weights->up;
    return {(tile < tiles) ? base : 0u, tiles, tile};
  }

  __device__ __forceinline__ uint32_t format(const unit& of) const { return of.weights->format; }

  __device__ __forceinline__ uint32_t input_row(const unit& of, uint32_t i) const {
    return (a.offsets != nullptr) ? a.tokens[of.first + i] : of.first + i;
  }

  __device__ __forceinline__ float scale(const unit& of, uint32_t i) const {
    const uint32_t sums = (a.hidden + CLB_HALF_SUM - 1u) / CLB_HALF_SUM;
    return clb_half_row_scale(a.sumsq + (uint64_t)input_row(of, i) * sums, a.hidden, a.epsilon) *
           (1.0f / CLB_SPLIT_FP16_SCALE);
  }

  template <uint32_t STEPS>
  __device__ __forceinline__ void finish(const unit& of, const float (&sum)[2][STEPS][4],
                                         const float (&scales)[MANY_ROWS]) const {
    const uint32_t tile = of.row_block * (MANY_TILES / 2u) + clb_many_pair(clb_many_tile(0u));
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++) {
      const clb_pairs gate = clb_make_pairs(sum[0][s]);
      const clb_pairs up = clb_make_pairs(sum[1][s]);
      const uint32_t i = clb_many_row(s);
      if (i >= of.rows || tile >= tiles) continue;
      const float n = scales[i];
      clb_pairs act;
      act.low = make_float2(silu(gate.low.x * n) * (up.low.x * n), silu(gate.low.y * n) * (up.low.y * n));
      act.high = make_float2(silu(gate.high.x * n) * (up.high.x * n), silu(gate.high.y * n) * (up.high.y * n));
      clb_store_half_pairs(a.activation + (uint64_t)(of.first + i) * a.width, tile, act);
    }
  }
};

template <class W>
CLB_DEVICE void gate_up_many(const clb_expert_many_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ clb_many_shared shared;
  __shared__ unit_table table;
  clb_wait_for_inputs();
  clb_release_dependents();
  count_units<W::KIND, false>(a, table);
  clb_many_run<W>(gate_up_job(a, table), memory, shared);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_expert_gate_up_many_bf16(const __grid_constant__ clb_expert_many_args a) {
  gate_up_many<clb_many_pure<clb_bf16>>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_expert_gate_up_many_fp16(const __grid_constant__ clb_expert_many_args a) {
  gate_up_many<clb_many_pure<clb_fp16>>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_expert_gate_up_many_int8(const __grid_constant__ clb_expert_many_args a) {
  gate_up_many<clb_many_of<clb_int8_kind>>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_expert_gate_up_many_int4(const __grid_constant__ clb_expert_many_args a) {
  gate_up_many<clb_many_of<clb_int4_kind>>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_expert_gate_up_many_fp8(const __grid_constant__ clb_expert_many_args a) {
  gate_up_many<clb_many_of<clb_fp8_kind>>(a);
}

/* ------------------------------------------------------------------------- down */

struct down_job {
  typedef expert_unit unit;
  static constexpr bool MAY_HALVE = false;

  const clb_expert_many_args& a;
  const unit_table& table;
  const uint16_t* input;
  uint32_t across;
  uint32_t tiles;
  uint32_t height;
  uint32_t units;

  __device__ __forceinline__ down_job(const clb_expert_many_args& args, const unit_table& counted)
      : a(args),
        table(counted),
        input(args.activation),
        across(args.width / CLB_TILE),
        tiles(args.hidden / CLB_TILE),
        height((tiles + MANY_TILES - 1u) / MANY_TILES),
        units(counted.before[args.expert_count] * height) {}

  __device__ __forceinline__ unit unit_at(uint32_t u) const { return unit(a, table, u, height); }

  __device__ __forceinline__ clb_many_matrix matrix(const unit& of, uint32_t place) const {
    const uint32_t tile = of.row_block * MANY_TILES + place;
    return {(tile < tiles) ? of.weights->down : 0u, tiles, tile};
  }

  __device__ __forceinline__ uint32_t format(const unit& of) const { return of.weights->down_format; }

  __device__ __forceinline__ uint32_t input_row(const unit& of, uint32_t i) const { return of.first + i; }

  __device__ __forceinline__ float scale(const unit&, uint32_t) const { return 1.0f / CLB_SPLIT_FP16_SCALE; }

  template <uint32_t STEPS>
  __device__ __forceinline__ void finish(const unit& of, const float (&sum)[2][STEPS][4],
                                         const float (&)[MANY_ROWS]) const {
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++) {
      const uint32_t i = clb_many_row(s);
      uint32_t place = of.first + i;
      if (i < of.rows && a.offsets != nullptr) place = a.places[of.first + i];
      uint16_t* row = a.partial + (uint64_t)place * a.hidden;
#pragma unroll
      for (uint32_t r = 0u; r < 2u; r++) {
        const clb_pairs y = clb_make_pairs(sum[r][s]);
        const uint32_t tile = of.row_block * MANY_TILES + clb_many_tile(r);
        if (i >= of.rows || tile >= tiles) continue;
        clb_store_half_sums(row, tile, y);
      }
    }
  }
};

template <class W>
CLB_DEVICE void down_many(const clb_expert_many_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ clb_many_shared shared;
  __shared__ unit_table table;
  clb_wait_for_inputs();
  clb_release_dependents();
  count_units<W::KIND, true>(a, table);
  clb_many_run<W>(down_job(a, table), memory, shared);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_expert_down_many_bf16(const __grid_constant__ clb_expert_many_args a) {
  down_many<clb_many_pure<clb_bf16>>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_expert_down_many_fp16(const __grid_constant__ clb_expert_many_args a) {
  down_many<clb_many_pure<clb_fp16>>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_expert_down_many_int8(const __grid_constant__ clb_expert_many_args a) {
  down_many<clb_many_of<clb_int8_kind>>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_expert_down_many_int4(const __grid_constant__ clb_expert_many_args a) {
  down_many<clb_many_of<clb_int4_kind>>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_expert_down_many_fp8(const __grid_constant__ clb_expert_many_args a) {
  down_many<clb_many_of<clb_fp8_kind>>(a);
}

/* --------------------------------------------------------------------- combine */

template <class P>
CLB_DEVICE void combine(const clb_combine_args& a) {
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t row = blockIdx.x;
  if (row >= *a.row_count) return;
  __shared__ float weights[CLB_ROUTER_MAX_K]; /* 0: no expert in this rank */
  const uint32_t ranks = (a.partial != nullptr) ? a.k_max : 0u;
  if (threadIdx.x < ranks) {
    const uint64_t place = (uint64_t)row * a.k_max + threadIdx.x;
    weights[threadIdx.x] = (a.indices[place] == CLB_NONE) ? 0.0f : a.weights[place] * (1.0f / CLB_SPLIT_FP16_SCALE);
  }
  __syncthreads();
  const clb_stream stream = {a.residual, a.next_norm, a.next_input, a.next_half, a.next_sumsq, a.hidden};
  const float shared_scale = ((a.shared_scale != nullptr) ? a.shared_scale[row] : 1.0f) * (1.0f / CLB_SPLIT_FP16_SCALE);
  for (uint32_t begin = 0u; begin < a.hidden; begin += CLB_MATMUL_THREADS * 2u) {
    const uint32_t col = begin + threadIdx.x * 2u;
    const bool valid = col < a.hidden;
    float2 x = make_float2(0.0f, 0.0f);
    float2 y = make_float2(0.0f, 0.0f);
#pragma unroll 1
    for (uint32_t first = 0u; first < ranks; first += RANKS_AHEAD) {
      float2 part[RANKS_AHEAD];
#pragma unroll
      for (uint32_t i = 0u; i < RANKS_AHEAD; i++) {
        const bool there = valid && first + i < ranks && weights[first + i] != 0.0f;
        const uint64_t place = (uint64_t)row * a.k_max + first + i;
        part[i] = there ? clb_read_half_pair(a.partial + place * a.hidden + col) : make_float2(0.0f, 0.0f);
      }
#pragma unroll
      for (uint32_t i = 0u; i < RANKS_AHEAD; i++) {
        const float weight = (first + i < ranks) ? weights[first + i] : 0.0f;
        y.x = fmaf(weight, part[i].x, y.x);
        y.y = fmaf(weight, part[i].y, y.y);
      }
    }
    if (a.shared_partial != nullptr && valid) {
      const float2 part = clb_read_half_pair(a.shared_partial + (uint64_t)row * a.hidden + col);
      y.x = fmaf(shared_scale, part.x, y.x);
      y.y = fmaf(shared_scale, part.y, y.y);
    }
    if (valid) x = *reinterpret_cast<const float2*>(a.residual + (uint64_t)row * a.hidden + col);
    clb_store_either<P>(stream, row, col, make_float2(x.x + y.x, x.y + y.y), clb_read_pair(a.next_norm + col, valid),
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
