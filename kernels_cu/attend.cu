/*
 * attend.cu: attention of a decode step: one row a slot, its positions split over blocks.
 *
 * Operation  clb_attend_{fp16,bf16,fp32}, clb_attend_combine_{bf16,fp16}: see abi.h. A block takes one kv head of one
 *            row and one split of its positions; 4 query heads share a read of K and V. The block whose split ends with
 *            the row's own position appends its K and V first.
 * Reference  tests/cuda/test_attention.py (numpy, float64).
 * Grid       attend (kv heads, 32, rows) blocks of 128 threads; combine (heads, rows) blocks of head_dim threads.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   4 * kv_heads * head_dim bytes a position in fp16: Qwen3-30B at 512 positions reads 1 MB a row and layer:
 *            0.25 us. Latency-bound at one row: target 4 us; at 32 rows 34 MB: 8 us.
 */
#include "attention.cuh"

struct split {
  uint32_t begin;
  uint32_t end;
};

/* How many positions a split of `seen` positions takes: from the length alone. */
CLB_DEVICE uint32_t split_length(uint32_t seen) {
  const uint32_t share = (seen + CLB_ATTENTION_SPLITS - 1u) / CLB_ATTENTION_SPLITS;
  return share > CLB_ATTENTION_SPLIT ? share : CLB_ATTENTION_SPLIT;
}

CLB_DEVICE split split_of(const clb_attention_dims& shape, uint32_t position, uint32_t index) {
  const uint32_t first = clb_first_seen(shape, position);
  const uint32_t length = split_length(position + 1u - first);
  split part;
  part.begin = min(first + index * length, position + 1u);
  part.end = min(part.begin + length, position + 1u);
  return part;
}

/* K by the first warp, V by the second. */
template <class KV>
CLB_DEVICE void append(const clb_attend_args& a, const clb_kv_head& kv, uint32_t t, uint32_t position) {
  const clb_attention_dims& shape = a.shape;
  const uint32_t kv_head = blockIdx.x;
  const uint32_t q = shape.heads * shape.head_dim;
  const uint32_t width = shape.kv_heads * shape.head_dim;
  const float* row = a.qkv + (uint64_t)t * (q + 2u * width);
  uint64_t to_v;
  unsigned char* at = clb_kv_at<KV>(kv, shape.head_dim, position, &to_v);
  const uint32_t warp = threadIdx.x / CLB_WARP;
  if (warp == 0u) {
    const float scale = clb_qk_row_scale(shape, row + q, shape.kv_heads);
    clb_rotate_head(shape, row + q + kv_head * shape.head_dim, a.k_norm, kv_head, scale,
                    a.rope + (uint64_t)t * shape.head_dim,
                    [at](uint32_t i, float value) { KV::store(at + i * KV::bytes, value); });
  } else if (warp == 1u) {
    const float* v = row + q + width + kv_head * shape.head_dim;
    for (uint32_t i = threadIdx.x % CLB_WARP; i < shape.head_dim; i += CLB_WARP)
      KV::store(at + to_v + i * KV::bytes, v[i]);
  }
}

/* Warps, in order, of one query head: partial sums of this split. `warps`: {values, largest, sum} of each warp. */
template <uint32_t HEAD_DIM>
CLB_DEVICE void merge_warps(const float (*warps)[CLB_ATTEND_QUERIES][HEAD_DIM + 2u], uint32_t query, float* values,
                            float* state) {
  float most = CLB_NO_SCORE;
#pragma unroll
  for (uint32_t w = 0u; w < CLB_ATTEND_WARPS; w++)
    most = fmaxf(most, warps[w][query][HEAD_DIM]);
  float sum = 0.0f;
  float factors[CLB_ATTEND_WARPS];
#pragma unroll
  for (uint32_t w = 0u; w < CLB_ATTEND_WARPS; w++) {
    factors[w] = exp2f(warps[w][query][HEAD_DIM] - most);
    sum = fmaf(warps[w][query][HEAD_DIM + 1u], factors[w], sum);
  }
  for (uint32_t i = threadIdx.x % CLB_WARP; i < HEAD_DIM; i += CLB_WARP) {
    float total = 0.0f;
#pragma unroll
    for (uint32_t w = 0u; w < CLB_ATTEND_WARPS; w++)
      total = fmaf(warps[w][query][i], factors[w], total);
    values[i] = total;
  }
  if (threadIdx.x % CLB_WARP == 0u) {
    state[0] = most;
    state[1] = sum;
  }
}

template <class KV, uint32_t HEAD_DIM>
CLB_DEVICE void attend_split(const clb_attend_args& a, const clb_kv_head& kv, uint32_t t, const split& part) {
  constexpr uint32_t lanes = HEAD_DIM / CLB_LANE_ELEMENTS;
  constexpr uint32_t at_once = CLB_WARP / lanes; /* positions of a warp */
  __shared__ float queries[CLB_ATTEND_QUERIES][HEAD_DIM];
  __shared__ float warps[CLB_ATTEND_WARPS][CLB_ATTEND_QUERIES][HEAD_DIM + 2u];
  const clb_attention_dims& shape = a.shape;
  const uint32_t group = shape.heads / shape.kv_heads;
  const uint32_t warp = threadIdx.x / CLB_WARP;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t element = lane % lanes * CLB_LANE_ELEMENTS;
  const float* row = a.qkv + (uint64_t)t * (shape.heads + 2u * shape.kv_heads) * HEAD_DIM;
  const float row_scale = clb_qk_row_scale(shape, row, shape.heads);
  const float factor = shape.scale * CLB_LOG2_E;
  for (uint32_t done = 0u; done < group; done += CLB_ATTEND_QUERIES) {
    const uint32_t head = blockIdx.x * group + done; /* the first of these */
    const uint32_t count = min(CLB_ATTEND_QUERIES, group - done);
    if (warp < count) {
      float* to = queries[warp];
      clb_rotate_head(shape, row + (head + warp) * HEAD_DIM, a.q_norm, head + warp, row_scale,
                      a.rope + (uint64_t)t * HEAD_DIM,
                      [to, factor](uint32_t i, float value) { to[i] = value * factor; });
    }
    __syncthreads();
    float q[CLB_ATTEND_QUERIES][CLB_LANE_ELEMENTS];
    clb_softmax states[CLB_ATTEND_QUERIES];
#pragma unroll
    for (uint32_t h = 0u; h < CLB_ATTEND_QUERIES; h++) {
      states[h].clear();
#pragma unroll
      for (uint32_t i = 0u; i < CLB_LANE_ELEMENTS; i++)
        q[h][i] = (h < count) ? queries[h][element + i] : 0.0f;
    }
    for (uint32_t base = part.begin + warp * at_once; base < part.end; base += CLB_ATTEND_WARPS * at_once) {
      const uint32_t position = base + lane / lanes;
      const bool seen = position < part.end;
      uint64_t to_v;
      const unsigned char* at = clb_kv_at<KV>(kv, HEAD_DIM, seen ? position : base, &to_v) + element * KV::bytes;
      float k[CLB_LANE_ELEMENTS];
      float v[CLB_LANE_ELEMENTS];
      KV::load(at, k);
      KV::load(at + to_v, v);
#pragma unroll
      for (uint32_t h = 0u; h < CLB_ATTEND_QUERIES; h++) {
        const float score = clb_score<lanes>(q[h], k);
        if (seen) states[h].add(score, v);
      }
    }
#pragma unroll
    for (uint32_t h = 0u; h < CLB_ATTEND_QUERIES; h++) {
      states[h].merge_groups(lanes);
      if (lane < lanes) {
#pragma unroll
        for (uint32_t i = 0u; i < CLB_LANE_ELEMENTS; i++)
          warps[warp][h][element + i] = states[h].values[i];
      }
      if (lane == 0u) {
        warps[warp][h][HEAD_DIM] = states[h].most;
        warps[warp][h][HEAD_DIM + 1u] = states[h].sum;
      }
    }
    __syncthreads();
    if (warp < count) {
      const uint64_t place = ((uint64_t)t * shape.heads + head + warp) * CLB_ATTENTION_SPLITS + blockIdx.y;
      merge_warps<HEAD_DIM>(warps, warp, a.partial + place * HEAD_DIM, a.partial_state + place * 2u);
    }
    __syncthreads();
  }
}

template <class KV>
CLB_DEVICE void attend(const clb_attend_args& a) {
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t t = blockIdx.z;
  if (t >= *a.row_count) return;
  const clb_row row = a.rows[t];
  if (row.slot == CLB_NONE) return;
  const split part = split_of(a.shape, row.position, blockIdx.y);
  if (part.begin >= part.end) return;
  const clb_kv_head kv = clb_kv_of<KV>(a.shape, a.slots[row.slot], blockIdx.x);
  if (part.end == row.position + 1u) append<KV>(a, kv, t, row.position);
  __syncthreads();
  switch (a.shape.head_dim) {
    case 32u:
      attend_split<KV, 32u>(a, kv, t, part);
      break;
    case 64u:
      attend_split<KV, 64u>(a, kv, t, part);
      break;
    default:
      attend_split<KV, 128u>(a, kv, t, part);
      break;
  }
}

/* Splits in order; thread i holds elements 2 i and 2 i + 1 of the head. An idle row is zero. */
template <class P>
CLB_DEVICE void combine(const clb_attend_args& a) {
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t t = blockIdx.y;
  const uint32_t head_dim = a.shape.head_dim;
  const uint32_t col = threadIdx.x * 2u;
  if (t >= *a.row_count || col >= head_dim) return;
  const clb_row row = a.rows[t];
  float2 total = make_float2(0.0f, 0.0f);
  if (row.slot != CLB_NONE) {
    const uint32_t seen = row.position + 1u - clb_first_seen(a.shape, row.position);
    const uint32_t length = split_length(seen);
    const uint32_t splits = (seen + length - 1u) / length;
    const uint64_t place = ((uint64_t)t * a.shape.heads + blockIdx.x) * CLB_ATTENTION_SPLITS;
    const float* states = a.partial_state + place * 2u;
    float most = CLB_NO_SCORE;
    for (uint32_t s = 0u; s < splits; s++)
      most = fmaxf(most, states[2u * s]);
    float sum = 0.0f;
    for (uint32_t s = 0u; s < splits; s++) {
      const float factor = exp2f(states[2u * s] - most);
      const float2 part = *reinterpret_cast<const float2*>(a.partial + (place + s) * head_dim + col);
      sum = fmaf(states[2u * s + 1u], factor, sum);
      total.x = fmaf(part.x, factor, total.x);
      total.y = fmaf(part.y, factor, total.y);
    }
    total = make_float2(total.x / sum, total.y / sum);
  }
  clb_split_store<P>(a.attended + (uint64_t)t * a.shape.heads * head_dim, blockIdx.x * head_dim + col, total.x,
                     total.y);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS)
    clb_attend_fp16(const __grid_constant__ clb_attend_args a) {
  attend<clb_kv_fp16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS)
    clb_attend_bf16(const __grid_constant__ clb_attend_args a) {
  attend<clb_kv_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS)
    clb_attend_fp32(const __grid_constant__ clb_attend_args a) {
  attend<clb_kv_fp32>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS)
    clb_attend_combine_bf16(const __grid_constant__ clb_attend_args a) {
  combine<clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS)
    clb_attend_combine_fp16(const __grid_constant__ clb_attend_args a) {
  combine<clb_fp16>(a);
}
