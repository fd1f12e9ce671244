/*
 * linear.cu: a matrix over at most 64 rows: qkv, out-projection, head.
 *
 * Operation  clb_linear_{bf16,fp16}, and clb_linear_8_{bf16,fp16} for at most 8 rows: see clb_matmul_args in abi.h. The
 *            same bits; the latter takes so few registers that the next node's blocks fit beside it and load ahead.
 * Reference  tests/cuda/test_linear.py (numpy, float64).
 * Grid       blocks of 256 threads, each taking units of row tiles blockIdx.x, + gridDim.x, ...; no more blocks than
 * row tiles or than CLB_LINEAR_BLOCKS (CLB_LINEAR_8_BLOCKS) a multiprocessor. Dynamic shared memory CLB_LINEAR_SHARED
 * (CLB_LINEAR_8_SHARED): the ring. Needs      sm_80; sm_90 for programmatic edges. Roofline   2 * rows * cols bytes of
 * weights; at up to 8 rows 8 flops a byte: memory-bound. qkv of Qwen3-30B (5,120 x 2,048, 21 MB): 4.9 us at 4.3 TB/s;
 * head (151,936 x 2,048): 145 us. Target: 90 % and 98 %. Beyond 16 rows operand B out of L2 weighs as much as the
 * weights: rows * 4 / (32 * MATRICES) of their bytes.
 *            Measured (H200, 2026-11-29): qkv 6.6 us, out 7.0 us, head 139 us at one row; 14, 19 and 245 us at 32.
 */
#include "few.cuh"

template <uint32_t MATRICES, uint32_t RING_BYTES>
struct linear_source {
  const unsigned char* at; /* this lane's bytes of the next piece of the unit's first row tile */
  uint64_t across;         /* bytes of a row tile */
  uint64_t jump;           /* from the end of a slice to the next unit's */
  uint32_t pieces;         /* of a slice */
  uint32_t piece;
  uint32_t tiles; /* from the unit's first on */
  uint32_t step;  /* tiles between this block's units */

  __device__ __forceinline__ linear_source(const clb_matmul_args& a, const clb_slice& slice) {
    const uint32_t all = (a.rows + CLB_TILE - 1u) / CLB_TILE;
    const uint32_t first = blockIdx.x * MATRICES;
    across = (uint64_t)(a.cols / CLB_TILE) * CLB_PIECE;
    pieces = slice.end - slice.begin;
    piece = 0u;
    tiles = (pieces > 0u && first < all) ? all - first : 0u;
    step = gridDim.x * MATRICES;
    jump = step * across - (uint64_t)pieces * CLB_PIECE;
    at = reinterpret_cast<const unsigned char*>(a.weights) + first * across + slice.begin * CLB_PIECE +
         threadIdx.x % CLB_WARP * 16u;
  }

  /* Row tiles beyond the last are the last again; their results are not stored. */
  __device__ __forceinline__ bool take(const unsigned char* (&next)[MATRICES]) {
    if (tiles == 0u) return false;
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++)
      next[m] = at + min(m, tiles - 1u) * across;
    at += CLB_PIECE;
    piece++;
    if (piece == pieces) {
      piece = 0u;
      at += jump;
      tiles = (tiles > step) ? tiles - step : 0u;
    }
    return true;
  }
};

template <uint32_t SLOTS>
struct linear_shared {
  clb_sums<SLOTS> sums;
  float scale[CLB_FEW_ROWS]; /* norm(t) */
};

/* What finishing two results needs, loaded before the sums are there. */
struct finish_inputs {
  float2 bias;
  float2 norm;
  float2 residual;
};

CLB_DEVICE finish_inputs load_weights(const clb_matmul_args& a, uint32_t col) {
  finish_inputs in = {};
  if (a.bias != nullptr) {
    in.bias.x = (col < a.rows) ? a.bias[col] : 0.0f;
    in.bias.y = (col + 1u < a.rows) ? a.bias[col + 1u] : 0.0f;
  }
  if (a.residual != nullptr) in.norm = clb_read_pair(a.next_norm + col, col < a.rows);
  return in;
}

CLB_DEVICE void load_residual(const clb_matmul_args& a, uint32_t row, uint32_t col, bool valid, finish_inputs& in) {
  if (a.residual != nullptr) in.residual = clb_read_pair(a.residual + (uint64_t)row * a.rows + col, valid);
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
    const clb_stream stream = {a.residual, a.next_norm, a.next_input, nullptr, a.next_sumsq, a.rows};
    clb_store_residual<P>(stream, row, col, make_float2(in.residual.x + y.x, in.residual.y + y.y), in.norm, valid);
    return;
  }
  if (a.candidates != nullptr) store_candidate(a, row, col, y, valid);
  if (!valid) return;
  float* to = a.output + row * a.output_stride + col;
  if (col < a.rows) to[0] = y.x;
  if (col + 1u < a.rows) to[1] = y.y;
}

/* norm(t) of every row, a warp a row; read after the barrier that follows. */
template <uint32_t SLOTS>
CLB_DEVICE void find_scales(const clb_matmul_args& a, linear_shared<SLOTS>& shared, uint32_t count) {
  for (uint32_t row = clb_group_warp(); row < count; row += CLB_WARPS) {
    float scale = 1.0f;
    if (a.sumsq != nullptr) {
      const uint32_t from = (a.input_rows != nullptr) ? a.input_rows[row] : row;
      scale = clb_row_scale(a.sumsq + (uint64_t)from * a.sumsq_count, a.sumsq_count, a.cols, a.epsilon);
    }
    if (threadIdx.x % CLB_WARP == 0u) shared.scale[row] = scale;
  }
}

/* Products of a unit are numbered p = step * MATRICES + matrix; SLOTS of them are finished at a time, by a pair of
   warps each. */
template <class P, uint32_t MATRICES, uint32_t STEPS, uint32_t SLOTS, uint32_t RING_BYTES>
CLB_DEVICE void linear(const clb_matmul_args& a, const void* memory, linear_shared<SLOTS>& shared, uint32_t count) {
  constexpr uint32_t STAGES = RING_BYTES / (CLB_WARPS * MATRICES * CLB_PIECE);
  const clb_slice slice(a.cols / CLB_TILE);
  linear_source<MATRICES, RING_BYTES> source(a, slice);
  clb_ring<MATRICES, STAGES> ring(memory);
  uint32_t started = 0u;
  ring.start(source, started);
  ring.complete_start(started);
  const uint32_t tiles = (a.rows + CLB_TILE - 1u) / CLB_TILE;
  const uint32_t own = clb_finisher();
  const uint32_t own_row = own / MATRICES * CLB_STEP + threadIdx.x % 64u / 8u;
  const uint32_t pair = threadIdx.x % 8u * 2u;
  uint32_t unit = blockIdx.x * MATRICES;
  finish_inputs in = load_weights(a, (unit + own % MATRICES) * CLB_TILE + pair);
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t lane = threadIdx.x % CLB_WARP;
  uint32_t offsets[STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint32_t row = s * CLB_STEP + lane / 4u;
    const uint32_t from = (row < count && a.input_rows != nullptr) ? a.input_rows[row] : row;
    offsets[s] = (row < count) ? from * a.cols + lane % 4u * 4u : CLB_NONE;
  }
  clb_chunk<STEPS> chunk;
  chunk.read(a.input, offsets, slice.begin, slice.end);
  find_scales(a, shared, count);
  uint32_t parity = 0u;
#pragma unroll 1
  for (; unit < tiles; unit += gridDim.x * MATRICES) {
    uint32_t row = own_row;
    uint32_t col = (unit + own % MATRICES) * CLB_TILE + pair;
    if (unit != blockIdx.x * MATRICES) in = load_weights(a, col);
    load_residual(a, row, col, row < count && col < a.rows, in);
    float sum[MATRICES][STEPS][4];
    clb_multiply<P, MATRICES, STEPS>(ring, source, slice, a.input, offsets, chunk, sum);
#pragma unroll
    for (uint32_t first = 0u; first < MATRICES * STEPS; first += SLOTS) {
#pragma unroll
      for (uint32_t slot = 0u; slot < SLOTS; slot++)
        shared.sums.put(parity, slot, sum[(first + slot) % MATRICES][(first + slot) / MATRICES]);
      __syncthreads();
      if (own < SLOTS) {
        if (first > 0u) {
          row = (first + own) / MATRICES * CLB_STEP + threadIdx.x % 64u / 8u;
          col = (unit + (first + own) % MATRICES) * CLB_TILE + pair;
          in = load_weights(a, col);
          load_residual(a, row, col, row < count && col < a.rows, in);
        }
        const float2 y = shared.sums.template take<P>(parity, own);
        const bool valid = row < count && col / CLB_TILE < tiles;
        const float scale = valid ? shared.scale[row] : 0.0f;
        finish<P>(a, row, col, make_float2(y.x * scale, y.y * scale), in, valid);
      }
      parity ^= 1u;
    }
  }
  clb_copies_wait<0>();
}

/* *row_count may be read before the wait: it was there before the step began. */
template <class P>
CLB_DEVICE void linear_of_any(const clb_matmul_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ linear_shared<4> shared;
  const uint32_t count = min(__ldcg(a.row_count), CLB_FEW_ROWS);
  if (count > 32u) {
    linear<P, 2, 8, 4, CLB_LINEAR_SHARED>(a, memory, shared, count);
  } else if (count > 16u) {
    linear<P, 4, 4, 4, CLB_LINEAR_SHARED>(a, memory, shared, count);
  } else {
    linear<P, 2, 2, 4, CLB_LINEAR_SHARED>(a, memory, shared, count);
  }
}

template <class P>
CLB_DEVICE void linear_of_8(const clb_matmul_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ linear_shared<1> shared;
  linear<P, 1, 1, 1, CLB_LINEAR_8_SHARED>(a, memory, shared, min(__ldcg(a.row_count), CLB_STEP));
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_BLOCKS)
    clb_linear_bf16(const __grid_constant__ clb_matmul_args a) {
  linear_of_any<clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_BLOCKS)
    clb_linear_fp16(const __grid_constant__ clb_matmul_args a) {
  linear_of_any<clb_fp16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_8_BLOCKS)
    clb_linear_8_bf16(const __grid_constant__ clb_matmul_args a) {
  linear_of_8<clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_8_BLOCKS)
    clb_linear_8_fp16(const __grid_constant__ clb_matmul_args a) {
  linear_of_8<clb_fp16>(a);
}
