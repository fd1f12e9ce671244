/*
 * device.cuh: what all kernels share: dependencies between nodes, warp sums, and the two types of weights with their
 * split rows (abi.h). Device code only.
 *
 * Every kernel, in every block and before any return: clb_wait_for_inputs(), then clb_release_dependents(). Before the
 * wait a kernel may read weights, and, with __ldcg, what the node before its predecessor wrote (decision 0004).
 */
#ifndef CLB_DEVICE_CUH
#define CLB_DEVICE_CUH

#include "ptx.cuh"

#define CLB_FULL_WARP 0xffffffffu

/* The same order of additions in every lane. */
CLB_DEVICE float clb_warp_sum(float value) {
#pragma unroll
  for (uint32_t step = CLB_WARP / 2u; step > 0u; step /= 2u)
    value += __shfl_xor_sync(CLB_FULL_WARP, value, step);
  return value;
}

/* The sum of this lane's value and of those of all lanes before it; lane: 0 .. 31, of a whole warp. */
CLB_DEVICE uint32_t clb_warp_prefix(uint32_t value, uint32_t lane) {
#pragma unroll
  for (uint32_t step = 1u; step < CLB_WARP; step *= 2u) {
    const uint32_t before = __shfl_up_sync(CLB_FULL_WARP, value, step);
    value += (lane >= step) ? before : 0u;
  }
  return value;
}

/* ------------------------------------------------------------- element types */

struct clb_bf16 {
  static constexpr float scale = 1.0f; /* split rows hold values times this */

  static __device__ __forceinline__ void mma(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    clb_mma_bf16(c, a, b0, b1);
  }
  /* Two values as one register, the first in the low half. */
  static __device__ __forceinline__ uint32_t pack(float first, float second) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t both) {
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
  }
  static __device__ __forceinline__ float fit(float value) { return value; }
  /* The same two values in fp16: exact from 2^-17 to 65504, to 2^-25 below; infinite above. */
  static __device__ __forceinline__ uint32_t to_fp16(uint32_t both) {
    const float2 values = unpack(both);
    const __half2 halves = __floats2half2_rn(values.x, values.y);
    return *reinterpret_cast<const uint32_t*>(&halves);
  }
};

struct clb_fp16 {
  static constexpr float scale = CLB_SPLIT_FP16_SCALE;

  static __device__ __forceinline__ void mma(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    clb_mma_fp16(c, a, b0, b1);
  }
  static __device__ __forceinline__ uint32_t pack(float first, float second) {
    const __half2 both = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t both) {
    return __half22float2(*reinterpret_cast<const __half2*>(&both));
  }
  static __device__ __forceinline__ uint32_t to_fp16(uint32_t both) { return both; }
  /* Saturate what is finite; NaN and infinity stay, so that they are seen at the end. */
  static __device__ __forceinline__ float fit(float value) {
    const float most = 65504.0f;
    const float size = fabsf(value);
    return (size > most && size < __int_as_float(0x7f800000)) ? copysignf(most, value) : value;
  }
};

/* ---------------------------------------------------------------- split rows */

/* Two neighbouring columns as a register of high and one of low halves. */
template <class P>
CLB_DEVICE void clb_split(float first, float second, uint32_t* high, uint32_t* low) {
  const float x = P::fit(first * P::scale);
  const float y = P::fit(second * P::scale);
  *high = P::pack(x, y);
  const float2 rounded = P::unpack(*high);
  *low = P::pack(x - rounded.x, y - rounded.y);
}

/* Write columns col, col + 1 (col even) of a split row. */
template <class P>
CLB_DEVICE void clb_split_store(uint32_t* row, uint32_t col, float first, float second) {
  uint32_t* at = row + col / 16u * 16u + (col % 8u) / 2u * 4u + (col % 16u) / 8u;
  clb_split<P>(first, second, &at[0], &at[2]);
}

/* ----------------------------------------------------------------- half rows */

/* Two neighbouring columns of a half row as one word. */
CLB_DEVICE uint32_t clb_half_pair(float first, float second) {
  return clb_fp16::pack(clb_fp16::fit(first * CLB_SPLIT_FP16_SCALE), clb_fp16::fit(second * CLB_SPLIT_FP16_SCALE));
}

/* Two neighbouring columns of a half row, still scaled. */
CLB_DEVICE float2 clb_read_half_pair(const uint16_t* at) {
  return clb_fp16::unpack(*reinterpret_cast<const uint32_t*>(at));
}

/* The norm of a half row of `cols` columns from its sums of squares, by one thread in a fixed order. */
CLB_DEVICE float clb_half_row_scale(const float* sumsq, uint32_t cols, float epsilon) {
  const uint32_t count = (cols + CLB_HALF_SUM - 1u) / CLB_HALF_SUM;
  float sum = 0.0f;
#pragma unroll 8
  for (uint32_t i = 0u; i < count; i++)
    sum += sumsq[i];
  return 1.0f / sqrtf(sum / (float)cols + epsilon);
}

/* ------------------------------------------------------------ norms of split rows */

/* This lane's part of a row's sums of squares; past L1: they may be read before the wait. */
CLB_DEVICE float clb_row_squares(const float* sumsq, uint32_t count) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  float sum = 0.0f;
  if (count % 4u == 0u) {
    for (uint32_t i = lane * 4u; i < count; i += CLB_WARP * 4u) {
      const float4 four = __ldcg(reinterpret_cast<const float4*>(sumsq + i));
      sum += (four.x + four.y) + (four.z + four.w);
    }
  } else {
    for (uint32_t i = lane; i < count; i += CLB_WARP)
      sum += __ldcg(sumsq + i);
  }
  return sum;
}

/* The norm of one row from all lanes' parts: 1 / sqrt(mean + epsilon). */
CLB_DEVICE float clb_scale_of(float squares, uint32_t cols, float epsilon) {
  return 1.0f / sqrtf(clb_warp_sum(squares) / (float)cols + epsilon);
}

/* The same from its sums of squares, by a warp in a fixed order. */
CLB_DEVICE float clb_row_scale(const float* sumsq, uint32_t count, uint32_t cols, float epsilon) {
  return clb_scale_of(clb_row_squares(sumsq, count), cols, epsilon);
}

/* The sums of a warp's tiles, before the first product. */
template <uint32_t MATRICES, uint32_t STEPS>
CLB_DEVICE void clb_clear(float (&sum)[MATRICES][STEPS][4]) {
#pragma unroll
  for (uint32_t m = 0u; m < MATRICES; m++)
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++)
#pragma unroll
      for (uint32_t i = 0u; i < 4u; i++)
        sum[m][s][i] = 0.0f;
}

#endif /* CLB_DEVICE_CUH */
