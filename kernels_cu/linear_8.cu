/*
 * linear_8.cu: a matrix over at most 8 rows: qkv, out-projection, head of small decode steps.
 *
 * Operation  clb_linear_8_{bf16,fp16}: see clb_matmul_args in abi.h. The bits of clb_linear and clb_linear_wide.
 * Reference  tests/cuda/test_linear.py (numpy, float64).
 * Grid       blocks of 256 threads, each taking row tiles blockIdx.x, + gridDim.x, ...; no more blocks than row
 *            tiles or than CLB_LINEAR_8_BLOCKS a multiprocessor. Dynamic shared memory CLB_LINEAR_8_SHARED: the ring;
 *            where there may be as few rows as CLB_LINEAR_8_STAGED, CLB_LINEAR_8_INPUT more for operand B.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   2 * rows * cols bytes of weights, 8 flops a byte: memory-bound. qkv of Qwen3-30B (5,120 x 2,048, 21 MB):
 *            4.9 us at 4.3 TB/s; out (2,048 x 4,096): 3.9 us; head (151,936 x 2,048): 145 us. Target: 90 % and 98 %.
 *
 * Warp w takes slice w of a row tile. The ring is filled before the wait and runs on across row tiles, so that what
 * is left after the wait is operand B out of L2 and a slice of dependent instructions. One row of up to 4,096 columns,
 * or two of 2,048, come to shared memory at once; more are on their way for AHEAD column tiles at a time.
 */
#include "linear.cuh"

#define AHEAD 8u /* column tiles whose operand B is on its way */
#define STAGES (CLB_LINEAR_8_SHARED / (CLB_WARPS * CLB_PIECE))

struct linear_8_shared {
  clb_sums<1> sums;
  float scale[CLB_STEP]; /* norm(t) */
};

/* The pieces of the warp's slice, row tile after row tile. */
struct slice_source {
  const unsigned char* at; /* this lane's bytes of the next piece */
  uint64_t jump;           /* from the end of a slice to the next row tile's */
  uint32_t pieces;
  uint32_t piece;
  uint32_t tiles; /* row tiles that are left, this one included */

  __device__ __forceinline__ slice_source(const clb_matmul_args& a, const clb_slice& slice) {
    const uint32_t all = clb_row_tiles(a);
    const uint64_t across = (uint64_t)(a.cols / CLB_TILE) * CLB_PIECE;
    at = reinterpret_cast<const unsigned char*>(a.weights) + blockIdx.x * across + slice.begin * CLB_PIECE +
         threadIdx.x % CLB_WARP * 16u;
    pieces = slice.end - slice.begin;
    piece = 0u;
    tiles = (pieces > 0u && blockIdx.x < all) ? (all - blockIdx.x + gridDim.x - 1u) / gridDim.x : 0u;
    jump = gridDim.x * across - (uint64_t)pieces * CLB_PIECE;
  }

  __device__ __forceinline__ bool take(const unsigned char* (&next)[1]) {
    if (tiles == 0u) return false;
    next[0] = at;
    at += CLB_PIECE;
    piece++;
    if (piece == pieces) {
      piece = 0u;
      tiles--;
      at += jump;
    }
    return true;
  }
};

/* This warp's slice of all rows to shared memory, 64 bytes a column tile, row after row; the warp alone reads it. */
CLB_DEVICE void stage_inputs(const clb_matmul_args& a, const clb_slice& slice, uint32_t count, uint4* to) {
  const uint32_t each = (slice.end - slice.begin) * 4u; /* of 16 bytes, of a row */
  const uint32_t lane = threadIdx.x % CLB_WARP;
#pragma unroll 1
  for (uint32_t row = 0u; row < count; row++) {
    const uint4* from =
        reinterpret_cast<const uint4*>(a.input + (uint64_t)clb_input_row(a, row) * a.cols + slice.begin * CLB_TILE);
#pragma unroll 1
    for (uint32_t i = lane; i < each; i += CLB_WARP * 4u) {
      uint4 part[4];
#pragma unroll
      for (uint32_t j = 0u; j < 4u; j++)
        if (i + j * CLB_WARP < each) part[j] = from[i + j * CLB_WARP];
#pragma unroll
      for (uint32_t j = 0u; j < 4u; j++)
        if (i + j * CLB_WARP < each) to[row * each + i + j * CLB_WARP] = part[j];
    }
  }
  __syncwarp();
}

/* The slice's sum for one row tile of staged inputs: `at` is where this lane's row begins. */
template <class P>
CLB_DEVICE void multiply_staged(clb_ring<1u, STAGES>& ring, slice_source& source, uint32_t tiles, const uint4* at,
                                float (&sum)[4]) {
  sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
  if (tiles == 0u) return;
  uint4 a[1]; /* operands of a tile are read while the one before it is multiplied */
  uint4 b = at[0];
  ring.next(source, a);
#pragma unroll 4
  for (uint32_t i = 1u; i < tiles; i++) {
    uint4 a_next[1];
    const uint4 b_next = at[i * 4u];
    ring.next(source, a_next);
    P::mma(sum, a[0], b.x, b.y);
    P::mma(sum, a[0], b.z, b.w);
    a[0] = a_next[0];
    b = b_next;
  }
  P::mma(sum, a[0], b.x, b.y);
  P::mma(sum, a[0], b.z, b.w);
}

/* The slice's sum for one row tile. `inputs` holds operand B of its first column tiles, and afterwards again. */
template <class P>
CLB_DEVICE void multiply(clb_ring<1u, STAGES>& ring, slice_source& source, const clb_slice& slice,
                         const uint32_t* input, uint32_t offset, uint4 (&inputs)[AHEAD], float (&sum)[4]) {
  sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll 1
  for (uint32_t base = slice.begin; base < slice.end; base += AHEAD) {
#pragma unroll
    for (uint32_t i = 0u; i < AHEAD; i++) {
      if (base + i >= slice.end) break;
      uint4 a[1];
      ring.next(source, a);
      P::mma(sum, a[0], inputs[i].x, inputs[i].y);
      P::mma(sum, a[0], inputs[i].z, inputs[i].w);
      const uint32_t next = (base + i + AHEAD < slice.end) ? base + i + AHEAD : slice.begin + i;
      if (slice.end - slice.begin > AHEAD) inputs[i] = clb_read_split(input, offset, next);
    }
  }
}

/* Everything behind the wait. STAGED: operand B comes to shared memory, of this warp's slice to `staged`. */
template <class P, bool STAGED>
CLB_DEVICE void take_tiles(const clb_matmul_args& a, clb_ring<1u, STAGES>& ring, slice_source& source,
                           const clb_slice& slice, linear_8_shared& shared, uint32_t count, uint4* staged,
                           clb_finish_inputs in) {
  const uint32_t tiles = clb_row_tiles(a);
  const uint32_t warp = threadIdx.x / CLB_WARP;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t row = threadIdx.x % 64u / 8u;
  const bool finishes = threadIdx.x < 64u;
  const uint32_t offset = (lane / 4u < count) ? clb_input_row(a, lane / 4u) * a.cols + lane % 4u * 4u : CLB_NONE;
  uint4 inputs[STAGED ? 1u : AHEAD];
  if constexpr (STAGED) {
    stage_inputs(a, slice, count, staged);
    /* lanes of rows that do not exist take the last: their results go nowhere */
    staged += min(lane / 4u, max(count, 1u) - 1u) * (slice.end - slice.begin) * 4u + lane % 4u;
  } else {
#pragma unroll
    for (uint32_t i = 0u; i < AHEAD; i++)
      inputs[i] = clb_read_split(a.input, (slice.begin + i < slice.end) ? offset : CLB_NONE, slice.begin + i);
  }
  const float squares = (warp < count) ? clb_input_squares(a, warp) : 0.0f;
  uint32_t parity = 0u;
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const uint32_t col = tile * CLB_TILE + threadIdx.x % 8u * 2u;
    if (tile != blockIdx.x) in = clb_finish_weights(a, col);
    clb_finish_residual(a, row, col, finishes && row < count && col < a.rows, in);
    float sum[4];
    if constexpr (STAGED) {
      multiply_staged<P>(ring, source, slice.end - slice.begin, staged, sum);
    } else {
      multiply<P>(ring, source, slice, a.input, offset, inputs, sum);
    }
    shared.sums.put(parity, 0u, sum);
    if (tile == blockIdx.x) {
      const float scale = clb_input_scale(a, squares);
      if (lane == 0u) shared.scale[warp] = scale;
    }
    __syncthreads();
    if (finishes) {
      const float2 y = shared.sums.take<P>(parity, 0u);
      const float scale = (row < count) ? shared.scale[row] : 0.0f;
      clb_finish<P>(a, row, col, make_float2(y.x * scale, y.y * scale), in, row < count);
    }
    parity ^= 1u;
  }
}

template <class P>
CLB_DEVICE void linear_8(const clb_matmul_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ linear_8_shared shared;
  const uint32_t count = min(__ldcg(a.row_count), CLB_STEP); /* there since before the step */
  const clb_slice slice(a.cols / CLB_TILE);
  slice_source source(a, slice);
  clb_ring<1u, STAGES> ring(memory);
  uint32_t started = 0u;
  ring.start(source, started);
  ring.complete_start(started);
  const clb_finish_inputs in = clb_finish_weights(a, blockIdx.x * CLB_TILE + threadIdx.x % 8u * 2u);
  constexpr uint32_t each = CLB_LINEAR_8_INPUT / CLB_WARPS; /* bytes of a warp */
  uint4* const staged = memory + (CLB_LINEAR_8_SHARED + clb_group_warp() * each) / sizeof(uint4);
  clb_wait_for_inputs();
  clb_release_dependents();
  const bool room = clb_dynamic_shared_bytes() >= CLB_LINEAR_8_SHARED + CLB_LINEAR_8_INPUT;
  if (room && count * ((a.cols / CLB_TILE + CLB_WARPS - 1u) / CLB_WARPS) * 64u <= each) {
    take_tiles<P, true>(a, ring, source, slice, shared, count, staged, in);
  } else {
    take_tiles<P, false>(a, ring, source, slice, shared, count, staged, in);
  }
  clb_copies_wait<0>();
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_8_BLOCKS)
    clb_linear_8_bf16(const __grid_constant__ clb_matmul_args a) {
  linear_8<clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_LINEAR_8_BLOCKS)
    clb_linear_8_fp16(const __grid_constant__ clb_matmul_args a) {
  linear_8<clb_fp16>(a);
}
