/*
 * attend.cu: attention of a decode step: one row a slot, its positions split over blocks, on tensor cores.
 *
 * Operation  clb_attend_{fp16,bf16,fp32}_{bf16,fp16} (K and V, then split rows): see abi.h. The block whose split ends
 *            with the row's own position appends its K and V; the last block of a row and its heads to finish adds up
 *            the splits in order.
 * Reference  tests/cuda/test_attention.py (numpy, float64).
 * Grid       any number of blocks of 128 threads. Items are (row, split, up to 8 query heads of one kv head), counted
 *            from the rows' lengths; a block takes items blockIdx.x, + gridDim.x, ...
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   4 * kv_heads * head_dim bytes a position in fp16: Qwen3-30B at 512 positions reads 1 MB a row and layer:
 *            0.25 us, so latency-bound at one row: target 4 us; at 32 rows 34 MB: 8 us.
 *
 * The first tile of K and V is on its way before the wait: only the row's own position comes from this step, and is
 * taken from shared memory. How a warp multiplies: attend_tile.cuh.
 */
#include "attend_tile.cuh"

/* --------------------------------------------------------- queries and own K, V */

/* Elements of a head that a lane has: 2 i, 2 i + 1 and the same of the other half of the head, for i = lane, + 32. */
template <uint32_t HEAD_DIM>
struct head_part {
  static constexpr uint32_t PAIRS = (HEAD_DIM + 127u) / 128u;
  float2 low[PAIRS];
  float2 high[PAIRS];
};

/* `otherwise` where there are no values. */
template <uint32_t HEAD_DIM>
CLB_DEVICE head_part<HEAD_DIM> read_head(const float* values, float otherwise) {
  head_part<HEAD_DIM> part;
#pragma unroll
  for (uint32_t i = 0u; i < head_part<HEAD_DIM>::PAIRS; i++) {
    const uint32_t at = (threadIdx.x % CLB_WARP + i * CLB_WARP) * 2u;
    const bool there = at < HEAD_DIM / 2u && values != nullptr;
    const float2 none = make_float2(otherwise, otherwise);
    part.low[i] = there ? *reinterpret_cast<const float2*>(values + at) : none;
    part.high[i] = there ? *reinterpret_cast<const float2*>(values + at + HEAD_DIM / 2u) : none;
  }
  return part;
}

/* The factor of the norm over a whole row of heads; 1 unless rows are normed. */
CLB_DEVICE float find_row_scale(const clb_attention_dims& shape, const float* values, uint32_t heads) {
  if (shape.qk_norm != CLB_QK_NORM_ROW) return 1.0f;
  const uint32_t count = heads * shape.head_dim;
  float sum = 0.0f;
#pragma unroll 4
  for (uint32_t i = threadIdx.x % CLB_WARP * 2u; i < count; i += CLB_WARP * 2u) {
    const float2 x = *reinterpret_cast<const float2*>(values + i);
    sum += x.x * x.x + x.y * x.y;
  }
  return rsqrtf(clb_warp_sum(sum) / (float)count + shape.epsilon);
}

/* Norm (weights `norm`, or NULL) and rotation of one head by a warp, in place. */
template <uint32_t HEAD_DIM>
CLB_DEVICE void rotate(const clb_attention_dims& shape, head_part<HEAD_DIM>& x, const head_part<HEAD_DIM>& norm,
                       const head_part<HEAD_DIM>& rope, float row_scale) {
  float scale = row_scale;
  if (shape.qk_norm == CLB_QK_NORM_HEAD) {
    float sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0u; i < head_part<HEAD_DIM>::PAIRS; i++)
      sum +=
          (x.low[i].x * x.low[i].x + x.low[i].y * x.low[i].y) + (x.high[i].x * x.high[i].x + x.high[i].y * x.high[i].y);
    scale = rsqrtf(clb_warp_sum(sum) * (1.0f / (float)HEAD_DIM) + shape.epsilon);
  }
#pragma unroll
  for (uint32_t i = 0u; i < head_part<HEAD_DIM>::PAIRS; i++) {
    const float2 low = make_float2(x.low[i].x * scale * norm.low[i].x, x.low[i].y * scale * norm.low[i].y);
    const float2 high = make_float2(x.high[i].x * scale * norm.high[i].x, x.high[i].y * scale * norm.high[i].y);
    x.low[i].x = low.x * rope.low[i].x - high.x * rope.high[i].x;
    x.low[i].y = low.y * rope.low[i].y - high.y * rope.high[i].y;
    x.high[i].x = high.x * rope.low[i].x + low.x * rope.high[i].x;
    x.high[i].y = high.y * rope.low[i].y + low.y * rope.high[i].y;
  }
}

/* Two neighbouring elements of K or V of the row's own position: to shared memory, and once a kv head to the run. */
template <class KV>
CLB_DEVICE void append_pair(unsigned char* copy, unsigned char* at, uint32_t i, float2 value) {
  KV::store(copy + i * KV::bytes, value.x);
  KV::store(copy + (i + 1u) * KV::bytes, value.y);
  if (at == nullptr) return;
  KV::store(at + i * KV::bytes, value.x);
  KV::store(at + (i + 1u) * KV::bytes, value.y);
}

/* Job `job` of an item: the values of one of its queries, of the row's K, of its V; NULL: a query that is not there. */
template <uint32_t HEAD_DIM>
CLB_DEVICE const float* job_values(const clb_attend_args& a, const item& it, uint32_t job) {
  const uint32_t heads = a.shape.heads;
  const uint32_t kv_heads = a.shape.kv_heads;
  if (job < QUERIES && job >= it.count) return nullptr;
  const uint32_t head = (job < QUERIES) ? it.head + job : heads + (job - QUERIES) * kv_heads + it.kv_head;
  return a.qkv + ((uint64_t)it.row * (heads + 2u * kv_heads) + head) * HEAD_DIM;
}

/* The item's queries, and K and V of the row's own position where the item ends with it, a warp each. */
template <class KV, uint32_t HEAD_DIM>
CLB_DEVICE void prepare(const clb_attend_args& a, const item& it, item_shared<HEAD_DIM>& shared) {
  typedef typename KV::type M;
  typedef head_part<HEAD_DIM> part;
  const clb_attention_dims& shape = a.shape;
  const float factor = shape.scale * CLB_LOG2_E;
  const bool first = it.head == it.kv_head * (shape.heads / shape.kv_heads);
  const uint32_t jobs = QUERIES + ((it.own != CLB_NONE && it.end == it.own + 1u) ? 2u : 0u);
  part next = read_head<HEAD_DIM>(job_values<HEAD_DIM>(a, it, threadIdx.x / CLB_WARP), 0.0f);
#pragma unroll 1
  for (uint32_t job = threadIdx.x / CLB_WARP; job < jobs; job += CLB_ATTEND_WARPS) {
    const bool query = job < QUERIES;
    const uint32_t head = query ? it.head + job : it.kv_head;
    const float* norm = query ? a.q_norm : a.k_norm;
    if (norm != nullptr && shape.qk_norm == CLB_QK_NORM_ROW) norm += head * HEAD_DIM;
    part x = next;
    if (job + CLB_ATTEND_WARPS < jobs)
      next = read_head<HEAD_DIM>(job_values<HEAD_DIM>(a, it, job + CLB_ATTEND_WARPS), 0.0f);
    if (job <= QUERIES) {
      const float* row = job_values<HEAD_DIM>(a, it, query ? 0u : QUERIES) - (query ? it.head : it.kv_head) * HEAD_DIM;
      rotate<HEAD_DIM>(shape, x, read_head<HEAD_DIM>(norm, 1.0f),
                       read_head<HEAD_DIM>(a.rope + (uint64_t)it.row * HEAD_DIM, 0.0f),
                       find_row_scale(shape, row, query ? shape.heads : shape.kv_heads));
    }
    unsigned char* const at = (query || !first) ? nullptr : place<KV, HEAD_DIM>(it, it.own, job > QUERIES);
    unsigned char* const copy = shared.own + (job - QUERIES) * HEAD_DIM * KV::bytes;
#pragma unroll
    for (uint32_t i = 0u; i < 2u * part::PAIRS; i++) {
      const uint32_t element = (threadIdx.x % CLB_WARP + i / 2u * CLB_WARP) * 2u;
      if (element >= HEAD_DIM / 2u) continue;
      const uint32_t to = element + i % 2u * (HEAD_DIM / 2u);
      const float2 value = (i % 2u == 0u) ? x.low[i / 2u] : x.high[i / 2u];
      if (query) {
        split_pair<M>(value.x * factor, value.y * factor, &shared.high[job][to / 2u], &shared.low[job][to / 2u]);
      } else {
        append_pair<KV>(copy, at, to, value);
      }
    }
  }
}

/* ------------------------------------------------------------- adding it all up */

template <class KV, uint32_t HEAD_DIM>
CLB_DEVICE void put_progress(item_shared<HEAD_DIM>& shared, progress<HEAD_DIM>& state) {
  typedef tile<KV, HEAD_DIM> T;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t warp = threadIdx.x / CLB_WARP;
  state.sum += __shfl_xor_sync(CLB_FULL_WARP, state.sum, 1u);
  state.sum += __shfl_xor_sync(CLB_FULL_WARP, state.sum, 2u);
#pragma unroll
  for (uint32_t i = 0u; i < HEAD_DIM / 16u; i++) {
    const uint32_t element = 2u * i / T::PIECE * 8u * T::PIECE + lane / 4u * T::PIECE + 2u * i % T::PIECE;
#pragma unroll
    for (uint32_t odd = 0u; odd < 2u; odd++)
      *reinterpret_cast<float2*>(&shared.values[warp][lane % 4u * 2u + odd][element]) =
          make_float2(state.values[i][odd], state.values[i][2u + odd]);
  }
  if (lane % 4u == 0u) {
    shared.state[warp][lane / 4u][0] = state.most;
    shared.state[warp][lane / 4u][1] = state.sum;
  }
}

/* Elements of a head that a lane finishes: those from lane * COUNT on, if below HEAD_DIM. */
template <uint32_t HEAD_DIM>
struct finished {
  static constexpr uint32_t COUNT = (HEAD_DIM < 64u) ? 2u : HEAD_DIM / 32u;
  float of[COUNT];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t i = 0u; i < COUNT; i++)
      of[i] = 0.0f;
  }
  static __device__ __forceinline__ finished read(const float* at) {
    finished made;
#pragma unroll
    for (uint32_t i = 0u; i < COUNT; i += 2u) {
      const float2 two = __ldcg(reinterpret_cast<const float2*>(at + i));
      made.of[i] = two.x;
      made.of[i + 1u] = two.y;
    }
    return made;
  }
  __device__ __forceinline__ void add(const finished& part, float factor) {
#pragma unroll
    for (uint32_t i = 0u; i < COUNT; i++)
      of[i] = fmaf(part.of[i], factor, of[i]);
  }
};

template <class P, uint32_t HEAD_DIM>
CLB_DEVICE void store_finished(const clb_attend_args& a, uint32_t row, uint32_t head, const finished<HEAD_DIM>& total,
                               float scale) {
#pragma unroll
  for (uint32_t i = 0u; i < finished<HEAD_DIM>::COUNT; i += 2u)
    clb_split_store<P>(a.attended + (uint64_t)row * a.shape.heads * HEAD_DIM,
                       head * HEAD_DIM + threadIdx.x % CLB_WARP * finished<HEAD_DIM>::COUNT + i, total.of[i] * scale,
                       total.of[i + 1u] * scale);
}

/* The warps in order; goes out whole if the row has one split, else to `partial`. */
template <class P, uint32_t HEAD_DIM>
CLB_DEVICE void merge_warps(const clb_attend_args& a, const item& it, const item_shared<HEAD_DIM>& shared) {
  const uint32_t element = threadIdx.x % CLB_WARP * finished<HEAD_DIM>::COUNT;
#pragma unroll 1
  for (uint32_t head = threadIdx.x / CLB_WARP; head < it.count; head += CLB_ATTEND_WARPS) {
    float most = CLB_NO_SCORE;
#pragma unroll
    for (uint32_t w = 0u; w < CLB_ATTEND_WARPS; w++)
      most = fmaxf(most, shared.state[w][head][0]);
    float sum = 0.0f;
    finished<HEAD_DIM> total;
    total.clear();
#pragma unroll
    for (uint32_t w = 0u; w < CLB_ATTEND_WARPS; w++) {
      const float factor = exp2f(shared.state[w][head][0] - most);
      sum = fmaf(shared.state[w][head][1], factor, sum);
#pragma unroll
      for (uint32_t i = 0u; i < finished<HEAD_DIM>::COUNT; i++)
        if (element < HEAD_DIM) total.of[i] = fmaf(shared.values[w][head][element + i], factor, total.of[i]);
    }
    if (element >= HEAD_DIM) continue;
    if (it.splits == 1u) {
      store_finished<P, HEAD_DIM>(a, it.row, it.head + head, total, (it.own == CLB_NONE) ? 0.0f : 1.0f / sum);
      continue;
    }
    const uint64_t place = ((uint64_t)it.row * a.shape.heads + it.head + head) * CLB_ATTENTION_SPLITS + it.split;
#pragma unroll
    for (uint32_t i = 0u; i < finished<HEAD_DIM>::COUNT; i += 2u)
      *reinterpret_cast<float2*>(a.partial + place * HEAD_DIM + element + i) =
          make_float2(total.of[i], total.of[i + 1u]);
    if (element == 0u) *reinterpret_cast<float2*>(a.partial_state + place * 2u) = make_float2(most, sum);
  }
}

#define AT_ONCE 8u /* splits whose values are read together */

/* This lane's elements of AT_ONCE splits from `first` on; zeros beyond the last. */
template <uint32_t HEAD_DIM>
CLB_DEVICE void read_parts(const clb_attend_args& a, uint64_t place, uint32_t first, uint32_t splits,
                           finished<HEAD_DIM> (&parts)[AT_ONCE]) {
  const uint32_t element = threadIdx.x % CLB_WARP * finished<HEAD_DIM>::COUNT;
#pragma unroll
  for (uint32_t i = 0u; i < AT_ONCE; i++) {
    if (first + i < splits && element < HEAD_DIM) {
      parts[i] = finished<HEAD_DIM>::read(a.partial + (place + first + i) * HEAD_DIM + element);
    } else {
      parts[i].clear();
    }
  }
}

/* The splits of a row in order, by the block that finished last. Lane l has the state of split l. */
template <class P, uint32_t HEAD_DIM>
CLB_DEVICE void merge_splits(const clb_attend_args& a, const item& it, item_shared<HEAD_DIM>& shared) {
  static_assert(CLB_ATTENTION_SPLITS == CLB_WARP, "a split a lane");
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t element = lane * finished<HEAD_DIM>::COUNT;
  float* factors = shared.values[threadIdx.x / CLB_WARP][0]; /* of this warp's head: its splits, then zeros */
#pragma unroll 1
  for (uint32_t head = threadIdx.x / CLB_WARP; head < it.count; head += CLB_ATTEND_WARPS) {
    const uint64_t place = ((uint64_t)it.row * a.shape.heads + it.head + head) * CLB_ATTENTION_SPLITS;
    finished<HEAD_DIM> parts[AT_ONCE];
    read_parts<HEAD_DIM>(a, place, 0u, it.splits, parts);
    const float2 state = (lane < it.splits) ? __ldcg(reinterpret_cast<const float2*>(a.partial_state) + place + lane)
                                            : make_float2(CLB_NO_SCORE, 0.0f);
    float most = state.x;
#pragma unroll
    for (uint32_t step = CLB_WARP / 2u; step > 0u; step /= 2u)
      most = fmaxf(most, __shfl_xor_sync(CLB_FULL_WARP, most, step));
    factors[lane] = (lane < it.splits) ? exp2f(state.x - most) : 0.0f;
    const float sum = clb_warp_sum(state.y * factors[lane]);
    __syncwarp();
    finished<HEAD_DIM> total;
    total.clear();
#pragma unroll 1
    for (uint32_t s = 0u; s < it.splits; s += AT_ONCE) {
      if (s > 0u) read_parts<HEAD_DIM>(a, place, s, it.splits, parts);
#pragma unroll
      for (uint32_t i = 0u; i < AT_ONCE; i++)
        total.add(parts[i], factors[s + i]);
    }
    if (element < HEAD_DIM) store_finished<P, HEAD_DIM>(a, it.row, it.head + head, total, 1.0f / sum);
    __syncwarp();
  }
}

/* Whether all other splits of the item's row and heads are there; the whole block asks. */
template <uint32_t HEAD_DIM>
CLB_DEVICE bool is_last(const clb_attend_args& a, const item& it, item_shared<HEAD_DIM>& shared) {
  __syncthreads();
  if (threadIdx.x == 0u) {
    uint32_t* ticket = a.tickets + it.row * a.shape.heads + it.head;
    shared.last = (uint32_t)(clb_take_ticket(ticket) + 1u == it.splits);
    if (shared.last != 0u) {
      clb_acquire_tickets();
      *ticket = 0u; /* for the next layer */
    }
  }
  __syncthreads();
  return shared.last != 0u;
}

template <class KV, class P, uint32_t HEAD_DIM>
CLB_DEVICE void attend_items(const clb_attend_args& a, const plan& items, void* at) {
  item_shared<HEAD_DIM>& shared = *static_cast<item_shared<HEAD_DIM>*>(at);
  const uint32_t offset = threadIdx.x / CLB_WARP * POSITIONS;
  bool waited = false;
#pragma unroll 1
  for (uint32_t number = blockIdx.x;; number += gridDim.x) {
    item it;
    tile<KV, HEAD_DIM> now;
    const bool there = find_item<KV>(a, items, number, it);
    if (there && it.begin + offset < it.end) {
      now.read_keys(it, it.begin + offset);
      now.read_values(it, it.begin + offset);
    }
    if (!waited) {
      clb_wait_for_inputs();
      clb_release_dependents();
      waited = true;
    }
    if (!there) return;
    prepare<KV, HEAD_DIM>(a, it, shared);
    __syncthreads();
    progress<HEAD_DIM> state;
    state.clear();
#pragma unroll 1
    for (uint32_t base = it.begin + offset; base < it.end; base += ROUND) {
      if (base + POSITIONS >= it.end && it.end == it.own + 1u) now.patch(it, base, shared.own);
      const bool another = base + ROUND < it.end;
      float scores[2][2];
      find_scores<KV, HEAD_DIM>(now, shared, scores);
      if (another) now.read_keys(it, base + ROUND);
      find_shares<HEAD_DIM>(base, it.end, scores, state);
      add_values<KV, HEAD_DIM>(now, scores, state);
      if (another) now.read_values(it, base + ROUND);
    }
    put_progress<KV, HEAD_DIM>(shared, state);
    __syncthreads();
    merge_warps<P, HEAD_DIM>(a, it, shared);
    if (it.splits > 1u && is_last<HEAD_DIM>(a, it, shared)) merge_splits<P, HEAD_DIM>(a, it, shared);
  }
}

/* rows and slots were written by the step's first node or before; K and V of earlier positions by earlier steps. */
template <class KV, class P>
CLB_DEVICE void attend(const clb_attend_args& a) {
  __shared__ plan items;
  __shared__ uint4 space[sizeof(item_shared<128u>) / sizeof(uint4) + 1u];
  make_plan(a, items);
  __syncthreads();
  switch (a.shape.head_dim) {
    case 32u:
      attend_items<KV, P, 32u>(a, items, space);
      break;
    case 64u:
      attend_items<KV, P, 64u>(a, items, space);
      break;
    default:
      attend_items<KV, P, 128u>(a, items, space);
      break;
  }
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS, CLB_ATTEND_BLOCKS)
    clb_attend_fp16_bf16(const __grid_constant__ clb_attend_args a) {
  attend<kv_fp16, clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS, CLB_ATTEND_BLOCKS)
    clb_attend_fp16_fp16(const __grid_constant__ clb_attend_args a) {
  attend<kv_fp16, clb_fp16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS, CLB_ATTEND_BLOCKS - 1u)
    clb_attend_bf16_bf16(const __grid_constant__ clb_attend_args a) {
  attend<kv_bf16, clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS, CLB_ATTEND_BLOCKS - 1u)
    clb_attend_bf16_fp16(const __grid_constant__ clb_attend_args a) {
  attend<kv_bf16, clb_fp16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS)
    clb_attend_fp32_bf16(const __grid_constant__ clb_attend_args a) {
  attend<kv_fp32, clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_ATTEND_THREADS)
    clb_attend_fp32_fp16(const __grid_constant__ clb_attend_args a) {
  attend<kv_fp32, clb_fp16>(a);
}
