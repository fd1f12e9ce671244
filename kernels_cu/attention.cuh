/*
 * attention.cuh: what the attention kernels share: where K and V lie, QK-norm and RoPE of one head, and the online
 * softmax over positions. Device code only.
 *
 * A lane holds 8 neighbouring elements of a head, so LANES = head_dim / 8 lanes hold one position and a warp takes
 * 32 / LANES positions at a time:
 *
 *   head_dim 128: | position p, lanes 0..15 | position p + 1, lanes 16..31 |      32: 8 positions of 4 lanes
 *
 * Each group of lanes keeps its own running maximum, sum and weighted sum of V; groups, then warps are merged in a
 * fixed order. Scores are in units of log2 (the query is scaled by scale * log2 e).
 */
#ifndef CLB_ATTENTION_CUH
#define CLB_ATTENTION_CUH

#include "../engine_c/include/colibri.h"
#include "device.cuh"

#define CLB_ATTEND_THREADS 128u
#define CLB_ATTEND_WARPS (CLB_ATTEND_THREADS / CLB_WARP)
#define CLB_LANE_ELEMENTS 8u
#define CLB_ATTEND_QUERIES 4u /* queries that share one read of K and V */
#define CLB_NO_SCORE (-1e30f) /* below every score, and finite: differences stay numbers */
#define CLB_LOG2_E 1.4426950408889634f

/* ------------------------------------------------------------ elements of KV */

/* Two halves in a word, each widened by the type of weights of the same name. */
template <class P>
struct clb_kv_half {
  static constexpr uint32_t bytes = 2u;

  static __device__ __forceinline__ void load(const unsigned char* at, float (&values)[CLB_LANE_ELEMENTS]) {
    const uint4 words = *reinterpret_cast<const uint4*>(at);
    const uint32_t each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (uint32_t i = 0u; i < 4u; i++) {
      const float2 both = P::unpack(each[i]);
      values[2u * i] = both.x;
      values[2u * i + 1u] = both.y;
    }
  }
  static __device__ __forceinline__ void store(unsigned char* at, float value) {
    *reinterpret_cast<uint16_t*>(at) = (uint16_t)(P::pack(P::fit(value), 0.0f) & 0xffffu);
  }
};
typedef clb_kv_half<clb_fp16> clb_kv_fp16;
typedef clb_kv_half<clb_bf16> clb_kv_bf16;

struct clb_kv_fp32 {
  static constexpr uint32_t bytes = 4u;

  static __device__ __forceinline__ void load(const unsigned char* at, float (&values)[CLB_LANE_ELEMENTS]) {
#pragma unroll
    for (uint32_t i = 0u; i < 2u; i++) {
      const float4 four = *reinterpret_cast<const float4*>(at + i * 16u);
      values[4u * i] = four.x;
      values[4u * i + 1u] = four.y;
      values[4u * i + 2u] = four.z;
      values[4u * i + 3u] = four.w;
    }
  }
  static __device__ __forceinline__ void store(unsigned char* at, float value) {
    *reinterpret_cast<float*>(at) = value;
  }
};

/* One kv head of one layer of what a slot sees. */
struct clb_kv_head {
  unsigned char* prefix_k;
  unsigned char* own_k;
  uint64_t prefix_v; /* bytes from K to V */
  uint64_t own_v;
  uint32_t prefix_tokens;
};

template <class KV>
CLB_DEVICE clb_kv_head clb_kv_of(const clb_attention_dims& shape, const clb_device_slot& slot, uint32_t kv_head) {
  const uint64_t size = (uint64_t)shape.head_dim * KV::bytes;
  const uint64_t below = shape.layer_values * KV::bytes;
  clb_kv_head kv;
  kv.prefix_tokens = slot.prefix_tokens;
  kv.prefix_k = reinterpret_cast<unsigned char*>(slot.prefix_run) + below * slot.prefix_capacity +
                (uint64_t)kv_head * slot.prefix_capacity * size;
  kv.own_k = reinterpret_cast<unsigned char*>(slot.own_run) + below * slot.own_capacity +
             (uint64_t)kv_head * slot.own_capacity * size;
  kv.prefix_v = (uint64_t)shape.kv_heads * slot.prefix_capacity * size;
  kv.own_v = (uint64_t)shape.kv_heads * slot.own_capacity * size;
  return kv;
}

/* First byte of K of a position; *to_v: from there to its V. */
template <class KV>
CLB_DEVICE unsigned char* clb_kv_at(const clb_kv_head& kv, uint32_t head_dim, uint32_t position, uint64_t* to_v) {
  const bool shared = position < kv.prefix_tokens;
  const uint32_t index = shared ? position : position - kv.prefix_tokens;
  *to_v = shared ? kv.prefix_v : kv.own_v;
  return (shared ? kv.prefix_k : kv.own_k) + (uint64_t)index * head_dim * KV::bytes;
}

/* The positions [first, tokens) that a row at `position` sees. */
CLB_DEVICE uint32_t clb_first_seen(const clb_attention_dims& shape, uint32_t position) {
  return (shape.window != 0u && position >= shape.window) ? position + 1u - shape.window : 0u;
}

/* ------------------------------------------------------------ queries and keys */

/* The factor of a norm over `count` values, by a warp; 1 without a norm of that kind. */
CLB_DEVICE float clb_norm_scale(const float* values, uint32_t count, float epsilon) {
  float sum = 0.0f;
  for (uint32_t i = threadIdx.x % CLB_WARP; i < count; i += CLB_WARP)
    sum = fmaf(values[i], values[i], sum);
  return 1.0f / sqrtf(clb_warp_sum(sum) / (float)count + epsilon);
}

/* The factor of a whole row of heads, the same in every warp that asks; 1 unless rows are normed. */
CLB_DEVICE float clb_qk_row_scale(const clb_attention_dims& shape, const float* values, uint32_t heads) {
  if (shape.qk_norm != CLB_QK_NORM_ROW) return 1.0f;
  return clb_norm_scale(values, heads * shape.head_dim, shape.epsilon);
}

/* What one lane holds of a head after norm and rotation: elements i and i + head_dim / 2. */
struct clb_rotated {
  float low;
  float high;
};

/* Norm (weights `norm`, or NULL) and rotation of a head by a warp; `store(index, value)` gets every element once. */
template <class Store>
CLB_DEVICE void clb_rotate_head(const clb_attention_dims& shape, const float* values, const float* norm, uint32_t head,
                                float row_scale, const float* rope, const Store& store) {
  const uint32_t half = shape.head_dim / 2u;
  const bool by_head = shape.qk_norm == CLB_QK_NORM_HEAD;
  const float scale = by_head ? clb_norm_scale(values, shape.head_dim, shape.epsilon) : row_scale;
  const float* weights = (norm != nullptr && !by_head) ? norm + head * shape.head_dim : norm;
  for (uint32_t i = threadIdx.x % CLB_WARP; i < half; i += CLB_WARP) {
    float low = values[i];
    float high = values[i + half];
    if (weights != nullptr) {
      low = low * scale * weights[i];
      high = high * scale * weights[i + half];
    }
    const float cosine = rope[i];
    const float sine = rope[half + i];
    store(i, low * cosine - high * sine);
    store(i + half, high * cosine + low * sine);
  }
}

CLB_DEVICE float2 clb_read_float2(const float* at, bool there) {
  return there ? *reinterpret_cast<const float2*>(at) : make_float2(0.0f, 0.0f);
}

/* ------------------------------------------------------------- online softmax */

struct clb_softmax {
  float most; /* largest score so far */
  float sum;  /* of exp2(score - most) */
  float values[CLB_LANE_ELEMENTS];

  __device__ __forceinline__ void clear() {
    most = CLB_NO_SCORE;
    sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0u; i < CLB_LANE_ELEMENTS; i++)
      values[i] = 0.0f;
  }

  __device__ __forceinline__ void add(float score, const float (&v)[CLB_LANE_ELEMENTS]) {
    const float larger = fmaxf(most, score);
    const float keep = exp2f(most - larger);
    const float share = exp2f(score - larger);
    most = larger;
    sum = fmaf(sum, keep, share);
#pragma unroll
    for (uint32_t i = 0u; i < CLB_LANE_ELEMENTS; i++)
      values[i] = fmaf(values[i], keep, share * v[i]);
  }

  /* The groups of `lanes` lanes of a warp, the same result in each. */
  __device__ __forceinline__ void merge_groups(uint32_t lanes) {
    for (uint32_t step = lanes; step < CLB_WARP; step *= 2u) {
      const float other_most = __shfl_xor_sync(CLB_FULL_WARP, most, step);
      const float other_sum = __shfl_xor_sync(CLB_FULL_WARP, sum, step);
      const float larger = fmaxf(most, other_most);
      const float keep = exp2f(most - larger);
      const float other = exp2f(other_most - larger);
      most = larger;
      sum = sum * keep + other_sum * other;
#pragma unroll
      for (uint32_t i = 0u; i < CLB_LANE_ELEMENTS; i++)
        values[i] = values[i] * keep + __shfl_xor_sync(CLB_FULL_WARP, values[i], step) * other;
    }
  }
};

/* q . k of this lane's group. */
template <uint32_t LANES>
CLB_DEVICE float clb_score(const float (&q)[CLB_LANE_ELEMENTS], const float (&k)[CLB_LANE_ELEMENTS]) {
  float sum = 0.0f;
#pragma unroll
  for (uint32_t i = 0u; i < CLB_LANE_ELEMENTS; i++)
    sum = fmaf(q[i], k[i], sum);
#pragma unroll
  for (uint32_t step = LANES / 2u; step > 0u; step /= 2u)
    sum += __shfl_xor_sync(CLB_FULL_WARP, sum, step);
  return sum;
}

#endif /* CLB_ATTENTION_CUH */
