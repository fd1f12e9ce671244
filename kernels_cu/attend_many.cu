/*
 * attend_many.cu: attention of a prefill step: K and V of all rows first, then every row over the positions it sees.
 *
 * Operation  clb_append_{fp16,bf16,fp32}, clb_attend_many_{fp16,bf16,fp32}: see abi.h. K and V of 16 bits go through
 *            tensor cores (flash.cuh). With K and V of fp32 a warp takes up to 4 following rows of one slot at once,
 *            so that they share the reads of K and V; a row's own sums do not depend on which rows those are: its
 *            positions go to groups of lanes by their own number, in rising order.
 * Reference  tests/cuda/test_attention.py (numpy, float64).
 * Grid       append (rows) blocks of 128 threads; attend: see abi.h.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   4 * heads * head_dim flops a pair of row and position: 2,048 rows of Qwen3-30B are 34 GFLOP a layer,
 *            44 us at 790 TFLOP/s. mma.sync with 16 rows a warp is bound by shared memory at half of that; target
 *            120 us. Measured (H200, 2026-11-30): 171 us; 512 rows 26 us; append 7 us.
 */
#include "flash.cuh"

#define ROWS_OF_BLOCK 64u
#define ROWS_OF_WARP (ROWS_OF_BLOCK / CLB_ATTEND_WARPS)

/* One head a warp: K and V to the slot's runs; for K and V of fp32, q in place. */
template <class KV>
CLB_DEVICE void append(const clb_prefill_attention_args& a) {
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t t = blockIdx.x;
  if (t >= *a.row_count) return;
  const clb_row row = a.rows[t];
  if (row.slot == CLB_NONE) return;
  const clb_attention_dims& shape = a.shape;
  const uint32_t head_dim = shape.head_dim;
  const uint32_t q = shape.heads * head_dim;
  const uint32_t width = shape.kv_heads * head_dim;
  float* qkv = a.qkv + (uint64_t)t * (q + 2u * width);
  const float* rope = a.rope + (uint64_t)t * head_dim;
  const float q_scale = clb_qk_row_scale(shape, qkv, shape.heads);
  const float k_scale = clb_qk_row_scale(shape, qkv + q, shape.kv_heads);
  if (KV::bytes == 4u) {
    __syncthreads(); /* every warp has seen the whole row before one changes q */
    for (uint32_t head = threadIdx.x / CLB_WARP; head < shape.heads; head += CLB_ATTEND_WARPS) {
      float* values = qkv + head * head_dim;
      clb_rotate_head(shape, values, a.q_norm, head, q_scale, rope,
                      [values](uint32_t i, float value) { values[i] = value; });
    }
  } else if (threadIdx.x == 0u) {
    a.q_scale[t] = q_scale;
  }
  for (uint32_t head = threadIdx.x / CLB_WARP; head < shape.kv_heads; head += CLB_ATTEND_WARPS) {
    const clb_kv_head kv = clb_kv_of<KV>(shape, a.slots[row.slot], head);
    uint64_t to_v;
    unsigned char* at = clb_kv_at<KV>(kv, head_dim, row.position, &to_v);
    clb_rotate_head(shape, qkv + q + head * head_dim, a.k_norm, head, k_scale, rope,
                    [at](uint32_t i, float value) { KV::store(at + i * KV::bytes, value); });
    const float* v = qkv + q + width + head * head_dim;
    for (uint32_t i = threadIdx.x % CLB_WARP; i < head_dim; i += CLB_WARP)
      KV::store(at + to_v + i * KV::bytes, v[i]);
  }
}

/* How many rows from t on, at most `most`, follow each other in one slot. */
CLB_DEVICE uint32_t rows_together(const clb_row* rows, uint32_t t, uint32_t most) {
  uint32_t count = 1u;
  while (count < most && rows[t + count].slot == rows[t].slot && rows[t + count].position == rows[t].position + count)
    count++;
  return count;
}

/* Rows t .. t + count - 1 of one slot at following positions, one query head. */
template <class KV, uint32_t HEAD_DIM>
CLB_DEVICE void attend_rows(const clb_prefill_attention_args& a, uint32_t t, uint32_t count) {
  constexpr uint32_t lanes = HEAD_DIM / CLB_LANE_ELEMENTS;
  constexpr uint32_t at_once = CLB_WARP / lanes;
  const clb_attention_dims& shape = a.shape;
  const uint32_t head = blockIdx.x;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t element = lane % lanes * CLB_LANE_ELEMENTS;
  const uint32_t position = a.rows[t].position;
  const uint64_t stride = (uint64_t)(shape.heads + 2u * shape.kv_heads) * HEAD_DIM;
  const clb_kv_head kv = clb_kv_of<KV>(shape, a.slots[a.rows[t].slot], head / (shape.heads / shape.kv_heads));
  float q[CLB_ATTEND_QUERIES][CLB_LANE_ELEMENTS];
  clb_softmax states[CLB_ATTEND_QUERIES];
#pragma unroll
  for (uint32_t r = 0u; r < CLB_ATTEND_QUERIES; r++) {
    const float* from = a.qkv + (t + (r < count ? r : 0u)) * stride + head * HEAD_DIM + element;
    states[r].clear();
#pragma unroll
    for (uint32_t i = 0u; i < CLB_LANE_ELEMENTS; i++)
      q[r][i] = from[i] * (shape.scale * CLB_LOG2_E);
  }
  const uint32_t first = clb_first_seen(shape, position);
  const uint32_t end = position + count;
  for (uint32_t base = first - first % at_once; base < end; base += at_once) {
    const uint32_t p = base + lane / lanes;
    const uint32_t read = min(max(p, first), end - 1u);
    uint64_t to_v;
    const unsigned char* at = clb_kv_at<KV>(kv, HEAD_DIM, read, &to_v) + element * KV::bytes;
    float k[CLB_LANE_ELEMENTS];
    float v[CLB_LANE_ELEMENTS];
    KV::load(at, k);
    KV::load(at + to_v, v);
#pragma unroll
    for (uint32_t r = 0u; r < CLB_ATTEND_QUERIES; r++) {
      const float score = clb_score<lanes>(q[r], k);
      if (r < count && p <= position + r && p >= clb_first_seen(shape, position + r)) states[r].add(score, v);
    }
  }
#pragma unroll
  for (uint32_t r = 0u; r < CLB_ATTEND_QUERIES; r++) {
    states[r].merge_groups(lanes);
    if (r >= count || lane >= lanes) continue;
    uint16_t* to = a.attended + ((uint64_t)(t + r) * shape.heads + head) * HEAD_DIM + element;
#pragma unroll
    for (uint32_t i = 0u; i < CLB_LANE_ELEMENTS; i += 2u)
      *reinterpret_cast<uint32_t*>(to + i) =
          clb_half_pair(states[r].values[i] / states[r].sum, states[r].values[i + 1u] / states[r].sum);
  }
}

template <class KV>
CLB_DEVICE void attend_many(const clb_prefill_attention_args& a) {
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t total = *a.row_count;
  uint32_t t = blockIdx.y * ROWS_OF_BLOCK + threadIdx.x / CLB_WARP * ROWS_OF_WARP;
  const uint32_t end = min(t + ROWS_OF_WARP, total);
  while (t < end) {
    const uint32_t count = rows_together(a.rows, t, min(CLB_ATTEND_QUERIES, end - t));
    if (a.rows[t].slot != CLB_NONE) {
      switch (a.shape.head_dim) {
        case 32u:
          attend_rows<KV, 32u>(a, t, count);
          break;
        case 64u:
          attend_rows<KV, 64u>(a, t, count);
          break;
        default:
          attend_rows<KV, 128u>(a, t, count);
          break;
      }
    }
    t += count;
  }
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS)
    clb_append_fp16(const __grid_constant__ clb_prefill_attention_args a) {
  append<clb_kv_fp16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS)
    clb_append_bf16(const __grid_constant__ clb_prefill_attention_args a) {
  append<clb_kv_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS)
    clb_append_fp32(const __grid_constant__ clb_prefill_attention_args a) {
  append<clb_kv_fp32>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_FLASH_THREADS, 1)
    clb_attend_many_fp16(const __grid_constant__ clb_prefill_attention_args a) {
  extern __shared__ uint4 memory[];
  __shared__ flash_shared shared;
  clb_wait_for_inputs();
  clb_release_dependents();
  flash<clb_kv_fp16, clb_fp16>(a, memory, shared);
}

extern "C" __global__ void __launch_bounds__(CLB_FLASH_THREADS, 1)
    clb_attend_many_bf16(const __grid_constant__ clb_prefill_attention_args a) {
  extern __shared__ uint4 memory[];
  __shared__ flash_shared shared;
  clb_wait_for_inputs();
  clb_release_dependents();
  flash<clb_kv_bf16, clb_bf16>(a, memory, shared);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS)
    clb_attend_many_fp32(const __grid_constant__ clb_prefill_attention_args a) {
  attend_many<clb_kv_fp32>(a);
}
