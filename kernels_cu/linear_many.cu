/*
 * linear_many.cu: a matrix over any number of rows: qkv and out-projection of prompts.
 *
 * Operation  clb_linear_many_{bf16,fp16,int8,int4,fp8}: see clb_matmul_many_args in abi.h.
 * Reference  tests/cuda/test_linear.py (numpy, float64).
 * Grid       any number of blocks, as many as run at once; see many.cuh for the two forms. Units that follow each other
 *            share their weights. Where there are fewer units than half the blocks they are smaller: a short prompt is
 *            bound by what one multiprocessor can read.
 * Needs      sm_80; sm_90a for wgmma and programmatic edges.
 * Roofline   2 * T * rows * cols flops: qkv of Qwen3-30B (5,120 x 2,048), 2,048 rows: 43 GFLOP, 54 us at 790 TFLOP/s.
 *            Target: twice that. Measured (H200, 2026-11-30): qkv 125 us, out 178 us; 128 rows: 42 and 71 us.
 */
#include "many.cuh"

/* HALVES: units may be smaller where there are few. */
template <bool HALVES>
struct linear_job {
  struct unit {
    uint32_t tile;  /* the first of the weights */
    uint32_t first; /* row */
    uint32_t rows;
  };
  static constexpr bool MAY_HALVE = HALVES && CLB_WIDE != 0;

  const clb_matmul_many_args& a;
  clb_many_shared& shared;
  const uint16_t* input;
  uint32_t count;
  uint32_t across;
  uint32_t tiles;
  bool halved;
  uint32_t most;   /* rows of a unit */
  uint32_t blocks; /* of rows */
  uint32_t units;

  __device__ __forceinline__ linear_job(const clb_matmul_many_args& args, clb_many_shared& memory)
      : a(args),
        shared(memory),
        input(args.input),
        count(*args.row_count),
        across(args.cols / CLB_TILE),
        tiles((args.rows + CLB_TILE - 1u) / CLB_TILE),
        halved(false) {
    set(MANY_ROWS);
    halved = MAY_HALVE && 2u * units <= gridDim.x;
    if (halved) set(MANY_ROWS);
    if (halved && 3u * units <= gridDim.x) set(MANY_ROWS / 2u);
  }

  /* Row tiles of the weights in a unit. */
  __device__ __forceinline__ uint32_t height() const { return halved ? MANY_TILES / 2u : MANY_TILES; }

  __device__ __forceinline__ void set(uint32_t rows) {
    most = rows;
    blocks = (count + rows - 1u) / rows;
    units = (tiles + height() - 1u) / height() * blocks;
  }

  __device__ __forceinline__ unit unit_at(uint32_t u) const {
    const uint32_t first = u % blocks * most;
    return {u / blocks * height(), first, min(count - first, most)};
  }

  __device__ __forceinline__ clb_many_matrix matrix(const unit& of, uint32_t place) const {
    const uint32_t tile = of.tile + place;
    return {(tile < tiles && place < height()) ? reinterpret_cast<uint64_t>(a.weights) : 0u, tiles, tile};
  }

  __device__ __forceinline__ uint32_t format(const unit&) const { return a.format; }

  __device__ __forceinline__ uint32_t input_row(const unit& of, uint32_t i) const { return of.first + i; }

  __device__ __forceinline__ float scale(const unit& of, uint32_t i) const {
    const uint32_t sums = (a.cols + CLB_HALF_SUM - 1u) / CLB_HALF_SUM;
    const float norm =
        (a.sumsq != nullptr) ? clb_half_row_scale(a.sumsq + (uint64_t)(of.first + i) * sums, a.cols, a.epsilon) : 1.0f;
    return norm * (1.0f / CLB_SPLIT_FP16_SCALE);
  }

  /* Four results at columns col, + 1, + 8, + 9 of one row to the residual stream; their squares' sum. */
  __device__ __forceinline__ float add_residual(uint32_t row, uint32_t tile, clb_pairs& y) const {
    const uint32_t col = tile * CLB_TILE + clb_pair_col();
    float square = 0.0f;
#pragma unroll
    for (uint32_t i = 0u; i < 2u; i++) {
      float2& pair = (i == 0u) ? y.low : y.high;
      float2* x = reinterpret_cast<float2*>(a.residual + (uint64_t)row * a.rows + col + i * 8u);
      const float2 norm = *reinterpret_cast<const float2*>(a.next_norm + col + i * 8u);
      const float2 sum = make_float2(x->x + pair.x, x->y + pair.y);
      *x = sum;
      square += sum.x * sum.x + sum.y * sum.y;
      pair = make_float2(sum.x * norm.x, sum.y * norm.y);
    }
    clb_store_half_pairs(a.next_input + (uint64_t)row * a.rows, tile, y);
    return square;
  }

  __device__ __forceinline__ void store(uint32_t row, uint32_t col, float2 y) const {
    float* to = a.output + row * a.output_stride + col;
    if (col + 1u < a.rows && a.output_stride % 2u == 0u) {
      *reinterpret_cast<float2*>(to) = y;
    } else {
      if (col < a.rows) to[0] = y.x;
      if (col + 1u < a.rows) to[1] = y.y;
    }
  }

  __device__ __forceinline__ float2 biased(uint32_t col, float2 y) const {
    if (a.bias != nullptr && col < a.rows) y.x += a.bias[col];
    if (a.bias != nullptr && col + 1u < a.rows) y.y += a.bias[col + 1u];
    return y;
  }

  /* One row tile of the warp, one step: four results of one row. */
  __device__ __forceinline__ void finish_step(const unit& of, const float (&c)[4], uint32_t place, uint32_t i,
                                              float scale) const {
    clb_pairs y = clb_make_pairs(c);
    const uint32_t tile = of.tile + place;
    const uint32_t col = tile * CLB_TILE + clb_pair_col();
    const bool valid = i < of.rows && tile < tiles;
    y.low = biased(col, make_float2(y.low.x * scale, y.low.y * scale));
    y.high = biased(col + 8u, make_float2(y.high.x * scale, y.high.y * scale));
    if (a.residual == nullptr) {
      if (valid) store(of.first + i, col, y.low);
      if (valid) store(of.first + i, col + 8u, y.high);
      return;
    }
    float square = valid ? add_residual(of.first + i, tile, y) : 0.0f;
    square += __shfl_xor_sync(CLB_FULL_WARP, square, 8);
    square += __shfl_xor_sync(CLB_FULL_WARP, square, 16);
    if (threadIdx.x % CLB_WARP < 8u) shared.square[place][i] = square;
  }

  template <uint32_t R, uint32_t STEPS>
  __device__ __forceinline__ void finish(const unit& of, const float (&sum)[R][STEPS][4],
                                         const float (&scales)[MANY_ROWS]) const {
#pragma unroll
    for (uint32_t r = 0u; r < R; r++)
#pragma unroll
      for (uint32_t s = 0u; s < STEPS; s++) {
        const uint32_t i = clb_many_row(s);
        finish_step(of, sum[r][s], clb_many_tile<R>(r), i, scales[i]);
      }
    if (a.residual == nullptr) return;
    clb_many_barrier();
    const uint32_t sums = (a.rows + CLB_HALF_SUM - 1u) / CLB_HALF_SUM;
    for (uint32_t at = threadIdx.x; at < height() / MANY_SUM_TILES * MANY_ROWS; at += MANY_THREADS) {
      const uint32_t group = at / MANY_ROWS;
      const uint32_t i = at % MANY_ROWS;
      const uint32_t index = of.tile / MANY_SUM_TILES + group;
      float total = 0.0f;
      for (uint32_t t = 0u; t < MANY_SUM_TILES; t++)
        total += shared.square[group * MANY_SUM_TILES + t][i];
      if (i < of.rows && index < sums) a.next_sumsq[(uint64_t)(of.first + i) * sums + index] = total;
    }
  }
};

template <class W>
CLB_DEVICE void linear_many(const clb_matmul_many_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ clb_many_shared shared;
  clb_wait_for_inputs();
  clb_release_dependents();
  const linear_job<W::KIND == CLB_KIND_HALF> job(a, shared);
  clb_many_run<W>(job, memory, shared);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_linear_many_bf16(const __grid_constant__ clb_matmul_many_args a) {
  linear_many<clb_many_pure<clb_bf16>>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_linear_many_fp16(const __grid_constant__ clb_matmul_many_args a) {
  linear_many<clb_many_pure<clb_fp16>>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_linear_many_int8(const __grid_constant__ clb_matmul_many_args a) {
  linear_many<clb_many_of<clb_int8_kind>>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_linear_many_int4(const __grid_constant__ clb_matmul_many_args a) {
  linear_many<clb_many_of<clb_int4_kind>>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MANY_WIDE_THREADS, 1)
    clb_linear_many_fp8(const __grid_constant__ clb_matmul_many_args a) {
  linear_many<clb_many_of<clb_fp8_kind>>(a);
}
