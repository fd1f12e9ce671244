/*
 * many.cuh: the product of many rows (prompts), shared by linear_many.cu and experts_many.cu. Device code only.
 *
 * A block of 8 warps computes 8 row tiles (128 rows of weights; or 64 of gate and the same 64 of up) times 64 rows of
 * input. Both operands go through shared memory in their order of use, STAGES deep, two column tiles a stage:
 *
 *   stage: | weights [2 column tiles][8 row tiles][512 bytes] | input [2][64 rows][64 bytes] |   16 KiB
 *
 * Warp w takes row tiles 2 (w % 4), + 1 and input rows 32 (w / 4) .. + 31. No split of the columns: an output is the
 * sum over column tiles in rising order, each high half, then low half.
 */
#ifndef CLB_MANY_CUH
#define CLB_MANY_CUH

#include "few.cuh"

#define MANY_STAGES 4u
#define MANY_ROW_TILES 8u
#define MANY_ROWS 64u /* of input */
#define MANY_STEPS 4u /* of a warp */
#define MANY_STAGE_BYTES 16384u
static_assert(MANY_STAGES * MANY_STAGE_BYTES == CLB_MANY_SHARED, "abi.h says what the host reserves");

typedef float clb_many_sums[2][MANY_STEPS][4]; /* [row tile of the warp][step] */

/* What one thread copies: its lane of row tile `warp` (NULL: zeros) and 16 bytes q of input row threadIdx.x / 4. */
struct clb_many_operands {
  const unsigned char* weights;
  const uint32_t* input; /* NULL: zeros */
};

CLB_DEVICE void clb_many_put(uint32_t to, const void* from, bool there) {
  if (there) {
    clb_copy_async(to, from);
  } else {
    clb_zero_shared(to);
  }
}

CLB_DEVICE void clb_many_copy(const clb_many_operands& from, uint32_t stage, uint32_t tile, uint32_t across) {
  const uint32_t to = stage + threadIdx.x * 16u;
#pragma unroll
  for (uint32_t i = 0u; i < 2u; i++) {
    const bool there = tile + i < across;
    clb_many_put(to + i * 4096u, from.weights + (uint64_t)(tile + i) * CLB_PIECE, there && from.weights != nullptr);
    clb_many_put(to + 8192u + i * 4096u, from.input + (tile + i) * CLB_TILE, there && from.input != nullptr);
  }
}

template <class P>
CLB_DEVICE void clb_many_step(uint32_t stage, clb_many_sums& sum) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t warp = threadIdx.x / CLB_WARP;
#pragma unroll
  for (uint32_t i = 0u; i < 2u; i++) {
    const uint32_t weights = stage + i * 4096u + warp % 4u * 2u * CLB_PIECE + lane * 16u;
    const uint32_t input = stage + 8192u + i * 4096u + warp / 4u * 2048u + lane * 16u;
    const uint4 a[2] = {clb_read_shared(weights), clb_read_shared(weights + CLB_PIECE)};
#pragma unroll
    for (uint32_t s = 0u; s < MANY_STEPS; s++) {
      const uint4 b = clb_read_shared(input + s * CLB_PIECE);
#pragma unroll
      for (uint32_t r = 0u; r < 2u; r++) {
        P::mma(sum[r][s], a[r], b.x, b.y);
        P::mma(sum[r][s], a[r], b.z, b.w);
      }
    }
  }
}

/* The whole product; `memory` is the block's dynamic shared memory. Ends with a barrier. */
template <class P>
CLB_DEVICE void clb_many_multiply(const void* memory, const clb_many_operands& from, uint32_t across,
                                  clb_many_sums& sum) {
  const uint32_t base = clb_shared_address(memory);
  const uint32_t stages = (across + 1u) / 2u;
#pragma unroll
  for (uint32_t r = 0u; r < 2u; r++)
#pragma unroll
    for (uint32_t s = 0u; s < MANY_STEPS; s++)
#pragma unroll
      for (uint32_t i = 0u; i < 4u; i++)
        sum[r][s][i] = 0.0f;
#pragma unroll
  for (uint32_t i = 0u; i < MANY_STAGES - 1u; i++) {
    if (i < stages) clb_many_copy(from, base + i * MANY_STAGE_BYTES, 2u * i, across);
    clb_copies_end_group();
  }
#pragma unroll 1
  for (uint32_t i = 0u; i < stages; i++) {
    clb_copies_wait<MANY_STAGES - 2u>();
    __syncthreads();
    const uint32_t ahead = i + MANY_STAGES - 1u;
    if (ahead < stages) clb_many_copy(from, base + ahead % MANY_STAGES * MANY_STAGE_BYTES, 2u * ahead, across);
    clb_copies_end_group();
    clb_many_step<P>(base + i % MANY_STAGES * MANY_STAGE_BYTES, sum);
  }
  clb_copies_wait<0>();
  __syncthreads();
}

/* Between lanes 4 g + q and 4 (g ^ 1) + q: from two rows of weights of two input rows to a pair of neighbouring
   results. c: one tile's sums. After it this lane holds results g & ~1 and + 1 (low), and the same + 8 (high), of input
   row 2 q + (g & 1) of the step. */
struct clb_pairs {
  float2 low;
  float2 high;
};

CLB_DEVICE clb_pairs clb_make_pairs(const float (&c)[4]) {
  const bool odd = (threadIdx.x / 4u) % 2u == 1u;
  const float low = __shfl_xor_sync(CLB_FULL_WARP, odd ? c[0] : c[1], 4);
  const float high = __shfl_xor_sync(CLB_FULL_WARP, odd ? c[2] : c[3], 4);
  clb_pairs pairs;
  pairs.low = odd ? make_float2(low, c[1]) : make_float2(c[0], low);
  pairs.high = odd ? make_float2(high, c[3]) : make_float2(c[2], high);
  return pairs;
}

/* Where this lane's pairs of step s belong: input row of the block, and the first result of `low` in its tile. */
CLB_DEVICE uint32_t clb_pair_row(uint32_t step) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  return threadIdx.x / (4u * CLB_WARP) * 32u + step * CLB_STEP + lane % 4u * 2u + lane / 4u % 2u;
}
CLB_DEVICE uint32_t clb_pair_col() { return threadIdx.x % CLB_WARP / 8u * 2u; }

/* The 16 columns of a tile, of which this lane holds four, as 16 bytes of a split row. */
template <class P>
CLB_DEVICE void clb_store_split_pairs(uint32_t* row, uint32_t tile, const clb_pairs& pairs) {
  uint4 words;
  clb_split<P>(pairs.low.x, pairs.low.y, &words.x, &words.z);
  clb_split<P>(pairs.high.x, pairs.high.y, &words.y, &words.w);
  *reinterpret_cast<uint4*>(row + tile * CLB_TILE + clb_pair_col() * 2u) = words;
}

#endif /* CLB_MANY_CUH */
