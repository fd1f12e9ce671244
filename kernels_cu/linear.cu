/*
 * linear.cu: a matrix over at most 64 rows: qkv, out-projection, head.
 *
 * Operation  clb_linear_{bf16,fp16}: see clb_matmul_args in abi.h.
 * Reference  tests/cuda/test_linear.py (numpy, float64).
 * Grid       blocks of 256 threads, each taking row tiles blockIdx.x, + gridDim.x, ...; as many blocks as there are
 *            tiles, or two a multiprocessor, whichever is less. Dynamic shared memory CLB_LINEAR_SHARED: the ring.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   2 * rows * cols bytes of weights; at up to 8 rows 8 flops a byte: memory-bound. qkv of Qwen3-30B (5,120 x
 *            2,048, 21 MB): 4.9 us at 4.3 TB/s; head (151,936 x 2,048): 145 us. Target: 90 % and 98 %.
 */
#include "few.cuh"

#define STAGES 16u
static_assert(clb_ring<1u, STAGES>::bytes == CLB_LINEAR_SHARED, "abi.h says what the host reserves");

struct linear_source {
  const unsigned char* at; /* this lane's bytes of the next piece */
  uint64_t jump;           /* from the end of a slice to the next tile's */
  uint32_t pieces;         /* of a slice */
  uint32_t piece;
  uint32_t tiles; /* left */

  __device__ __forceinline__ linear_source(const clb_matmul_args& a, const clb_slice& slice) {
    const uint32_t across = a.cols / CLB_TILE;
    const uint32_t all = (a.rows + CLB_TILE - 1u) / CLB_TILE;
    pieces = slice.end - slice.begin;
    piece = 0u;
    tiles = (pieces > 0u && blockIdx.x < all) ? (all - blockIdx.x + gridDim.x - 1u) / gridDim.x : 0u;
    jump = ((uint64_t)gridDim.x * across - pieces) * CLB_PIECE;
    at = reinterpret_cast<const unsigned char*>(a.weights) + ((uint64_t)blockIdx.x * across + slice.begin) * CLB_PIECE +
         threadIdx.x % CLB_WARP * 16u;
  }

  __device__ __forceinline__ bool take(const unsigned char* (&next)[1]) {
    if (tiles == 0u) return false;
    next[0] = at;
    at += CLB_PIECE;
    piece++;
    if (piece == pieces) {
      piece = 0u;
      at += jump;
      tiles--;
    }
    return true;
  }
};

struct linear_shared {
  clb_step_sums<1> sums;
  float scale[CLB_FEW_ROWS]; /* norm(t) */
};

/* What finishing two results needs, loaded before the sums are there. */
struct finish_inputs {
  float2 bias;
  float2 residual;
};

CLB_DEVICE finish_inputs load_finish(const clb_matmul_args& a, uint32_t row, uint32_t col, bool valid) {
  finish_inputs in = {};
  if (a.bias != nullptr) {
    in.bias.x = (col < a.rows) ? a.bias[col] : 0.0f;
    in.bias.y = (col + 1u < a.rows) ? a.bias[col + 1u] : 0.0f;
  }
  if (a.residual != nullptr && valid)
    in.residual = *reinterpret_cast<const float2*>(a.residual + (uint64_t)row * a.rows + col);
  return in;
}

/* The largest of the tile's 16 results of one row, held by 8 lanes in order; the lowest place of equal ones. */
CLB_DEVICE void store_candidate(const clb_matmul_args& a, uint32_t row, uint32_t col, float2 y, bool valid) {
  const float none = __int_as_float((int32_t)0xff800000u);
  const float first = (col < a.rows) ? y.x : none;
  const float second = (col + 1u < a.rows) ? y.y : none;
  bool bad = (col < a.rows && !isfinite(y.x)) || (col + 1u < a.rows && !isfinite(y.y));
  float value = (second > first) ? second : first;
  uint32_t place = (second > first) ? col + 1u : col;
#pragma unroll
  for (uint32_t step = 1u; step < 8u; step *= 2u) {
    const float other = __shfl_xor_sync(CLB_FULL_WARP, value, step);
    const uint32_t where = __shfl_xor_sync(CLB_FULL_WARP, place, step);
    bad = (__shfl_xor_sync(CLB_FULL_WARP, (uint32_t)bad, step) != 0u) || bad;
    if (other > value || (other == value && where < place)) {
      value = other;
      place = where;
    }
  }
  if (valid && threadIdx.x % 8u == 0u) {
    const uint32_t tiles = (a.rows + CLB_TILE - 1u) / CLB_TILE;
    a.candidates[(uint64_t)row * tiles + col / CLB_TILE] = {(int32_t)place, bad ? __int_as_float(0x7fffffff) : value};
  }
}

template <class P>
CLB_DEVICE void finish(const clb_matmul_args& a, uint32_t row, uint32_t col, float2 y, const finish_inputs& in,
                       bool valid) {
  y.x += in.bias.x;
  y.y += in.bias.y;
  if (a.residual != nullptr) {
    const clb_stream stream = {a.residual, a.next_norm, a.next_input, a.next_sumsq, a.rows};
    clb_store_residual<P>(stream, row, col, make_float2(in.residual.x + y.x, in.residual.y + y.y), valid);
    return;
  }
  if (a.candidates != nullptr) store_candidate(a, row, col, y, valid);
  if (!valid) return;
  float* to = a.output + row * a.output_stride + col;
  if (col < a.rows) to[0] = y.x;
  if (col + 1u < a.rows) to[1] = y.y;
}

template <class P, uint32_t STEPS>
CLB_DEVICE void all_tiles(const clb_matmul_args& a, clb_ring<1, STAGES>& ring, linear_source& source,
                          const clb_slice& slice, linear_shared& shared, uint32_t count) {
  const uint32_t tiles = (a.rows + CLB_TILE - 1u) / CLB_TILE;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  uint32_t offsets[STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint32_t row = s * CLB_STEP + lane / 4u;
    const uint32_t from = (row < count && a.input_rows != nullptr) ? a.input_rows[row] : row;
    offsets[s] = (row < count) ? from * a.cols + lane % 4u * 4u : CLB_NONE;
  }
  uint32_t parity = 0u;
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const uint32_t col = tile * CLB_TILE + threadIdx.x % 8u * 2u;
    uint32_t row = threadIdx.x / 8u; /* of the first step that this thread finishes */
    finish_inputs in = load_finish(a, row, col, row < count);
    float sum[1][STEPS][4];
    clb_multiply<P, STEPS>(ring, source, slice, a.input, offsets, sum);
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++) {
      clb_put_sums(shared.sums, parity, 0u, sum[0][s]);
      __syncthreads();
      if (clb_finishes(s)) {
        if (s >= 4u) {
          row = s * CLB_STEP + threadIdx.x % 64u / 8u;
          in = load_finish(a, row, col, row < count);
        }
        float2 y = clb_take_sums<P>(shared.sums, parity, 0u);
        const float scale = shared.scale[row];
        finish<P>(a, row, col, make_float2(y.x * scale, y.y * scale), in, row < count);
      }
      parity ^= 1u;
    }
  }
}

template <class P>
CLB_DEVICE void linear(const clb_matmul_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ linear_shared shared;
  const clb_slice slice(a.cols / CLB_TILE);
  linear_source source(a, slice);
  clb_ring<1, STAGES> ring(memory);
  uint32_t started = 0u;
  ring.start(source, started);
  ring.complete_start(started);
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t count = min(*a.row_count, CLB_FEW_ROWS);
  for (uint32_t row = threadIdx.x / CLB_WARP; row < CLB_FEW_ROWS; row += CLB_WARPS) {
    float scale = 1.0f;
    if (a.sumsq != nullptr && row < count) {
      const uint32_t from = (a.input_rows != nullptr) ? a.input_rows[row] : row;
      scale = clb_row_scale(a.sumsq + (uint64_t)from * a.sumsq_count, a.sumsq_count, a.cols, a.epsilon);
    }
    if (threadIdx.x % CLB_WARP == 0u) shared.scale[row] = scale;
  }
  __syncthreads();
  if (count > 32u) {
    all_tiles<P, 8>(a, ring, source, slice, shared, count);
  } else if (count > 16u) {
    all_tiles<P, 4>(a, ring, source, slice, shared, count);
  } else if (count > 8u) {
    all_tiles<P, 2>(a, ring, source, slice, shared, count);
  } else if (count > 0u) {
    all_tiles<P, 1>(a, ring, source, slice, shared, count);
  }
  clb_copies_wait<0>();
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, 2)
    clb_linear_bf16(const __grid_constant__ clb_matmul_args a) {
  linear<clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, 2)
    clb_linear_fp16(const __grid_constant__ clb_matmul_args a) {
  linear<clb_fp16>(a);
}
