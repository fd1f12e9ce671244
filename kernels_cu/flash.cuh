/*
 * flash.cuh: attention of prompts on tensor cores, for K and V of 16 bits. Device code only; attend_many.cu is its
 * user.
 *
 * A block of 8 warps takes the query heads of one kv head (at most FLASH_HEADS of them) at following rows of the step,
 * 128 pairs in all, 16 a warp:
 *
 *   pair r of the block = row r / heads of the block's rows, query head r % heads of its heads
 *
 * Rows of one slot at following positions are a segment. Segment by segment the block runs over K and V in tiles of 64
 * positions that begin at multiples of 64, three tiles in shared memory, with the online softmax. So the order of a
 * row's sums follows from its position and window alone; tiles in which it sees nothing change no bit of it.
 *
 * Products are of fp16: queries (times scale * log2 e), shares, and K and V, converted when they are bf16.
 *   stage: | K [64 positions][head_dim] | V the same |   16-byte chunk c of position p at flash_chunk
 */
#ifndef CLB_FLASH_CUH
#define CLB_FLASH_CUH

#include "attention.cuh"

#define FLASH_WARPS (CLB_FLASH_THREADS / CLB_WARP)
#define FLASH_TILE 64u /* positions */
#define FLASH_STAGES 3u
#define FLASH_STEPS (FLASH_TILE / 8u)
static_assert(FLASH_WARPS * 16u == CLB_FLASH_PAIRS, "a warp takes 16 pairs");
static_assert(FLASH_STAGES * 2u * FLASH_TILE * 128u * 2u == CLB_FLASH_SHARED, "abi.h says what the host reserves");

/* What a block does, and which of its pairs this lane holds: pairs `warp * 16 + lane / 4` and + 8. */
struct flash_place {
  uint32_t heads;      /* query heads of the block */
  uint32_t first_head; /* of them */
  uint32_t kv_head;
  uint32_t first; /* row of the step */
  uint32_t rows;  /* of the block */

  __device__ __forceinline__ void set(const clb_attention_dims& shape, uint32_t total) {
    const uint32_t group = shape.heads / shape.kv_heads;
    const uint32_t most = min(group, CLB_FLASH_HEADS);
    const uint32_t parts = (group + most - 1u) / most;
    const uint32_t each = CLB_FLASH_PAIRS / most;
    kv_head = blockIdx.x / parts;
    first_head = kv_head * group + blockIdx.x % parts * most;
    heads = min(most, (kv_head + 1u) * group - first_head);
    first = (gridDim.y - 1u - blockIdx.y) * each; /* the longest first */
    rows = (first < total) ? min(each, total - first) : 0u;
  }

  __device__ __forceinline__ uint32_t pair(uint32_t half) const {
    return threadIdx.x / CLB_WARP * 16u + threadIdx.x % CLB_WARP / 4u + half * 8u;
  }
};

/* Rows of the block [begin, end) of one slot, at following positions. */
struct flash_segment {
  uint32_t begin;
  uint32_t end;
  uint32_t position; /* of the first */
  uint32_t seen;     /* positions [seen, sees) are looked at; a multiple of FLASH_TILE */
  uint32_t sees;
};

struct flash_shared {
  flash_place place;
  flash_segment segment;
  clb_kv_head kv;               /* of the segment */
  uint32_t starts[FLASH_WARPS]; /* bit i of word w: row 32 w + i of the block begins a segment */
};

/* Where the segment that begins at row `begin` ends. */
CLB_DEVICE uint32_t flash_end(const flash_shared& shared, uint32_t begin, uint32_t rows) {
  uint32_t at = begin + 1u;
  while (at < rows) {
    const uint32_t left = shared.starts[at / 32u] >> (at % 32u);
    if (left != 0u) return min(at + (uint32_t)__ffs((int)left) - 1u, rows);
    at = (at / 32u + 1u) * 32u;
  }
  return rows;
}

template <uint32_t HEAD_DIM>
CLB_DEVICE uint32_t flash_chunk(uint32_t row, uint32_t chunk) {
  constexpr uint32_t chunks = HEAD_DIM / 8u;
  const uint32_t turn = (chunks >= 8u) ? row % 8u : row / 2u % 4u;
  return (row * chunks + (chunk ^ turn)) * 16u;
}

/* K and V of positions [base, base + FLASH_TILE) to shared memory, zeros from `end` on. */
template <class KV, uint32_t HEAD_DIM>
CLB_DEVICE void flash_copy(const clb_kv_head& kv, uint32_t stage, uint32_t base, uint32_t end) {
  constexpr uint32_t chunks = HEAD_DIM / 8u;
  constexpr uint32_t bytes = FLASH_TILE * HEAD_DIM * 2u;
#pragma unroll 1
  for (uint32_t i = clb_not_ahead(threadIdx.x); i < FLASH_TILE * chunks; i += CLB_FLASH_THREADS) {
    const uint32_t row = i / chunks;
    const uint32_t to = stage + flash_chunk<HEAD_DIM>(row, i % chunks);
    if (base + row < end) {
      uint64_t to_v;
      const unsigned char* at = clb_kv_at<KV>(kv, HEAD_DIM, base + row, &to_v) + i % chunks * 16u;
      clb_copy_async(to, at);
      clb_copy_async(to + bytes, at + to_v);
    } else {
      clb_zero_shared(to);
      clb_zero_shared(to + bytes);
    }
  }
}

/* What a lane holds of its two pairs. */
template <uint32_t HEAD_DIM>
struct flash_state {
  uint4 q[HEAD_DIM / 16u];
  float values[HEAD_DIM / 8u][4]; /* sums of shares times V: columns 8 n + 2 (lane % 4), + 1 of either pair */
  float most[2];
  float sum[2];    /* of this lane's shares */
  int32_t last[2]; /* position; -1: the pair is not of this segment */
};

/* One query as this lane holds it: elements 16 k + 2 (lane % 4), + 1, + 8, + 9 of its head. */
template <uint32_t HEAD_DIM>
struct flash_query {
  float2 low[HEAD_DIM / 16u];
  float2 high[HEAD_DIM / 16u];

  __device__ __forceinline__ void read(const float* q, bool in) {
#pragma unroll
    for (uint32_t k = 0u; k < HEAD_DIM / 16u; k++) {
      low[k] = clb_read_float2(q + k * 16u, in);
      high[k] = clb_read_float2(q + k * 16u + 8u, in);
    }
  }

  /* The factor of a norm over the head, by the four lanes that hold it. */
  __device__ __forceinline__ float norm_scale(float epsilon) const {
    float sum = 0.0f;
#pragma unroll
    for (uint32_t k = 0u; k < HEAD_DIM / 16u; k++)
      sum += low[k].x * low[k].x + low[k].y * low[k].y + high[k].x * high[k].x + high[k].y * high[k].y;
    sum += __shfl_xor_sync(CLB_FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(CLB_FULL_WARP, sum, 2);
    return 1.0f / sqrtf(sum / (float)HEAD_DIM + epsilon);
  }

  __device__ __forceinline__ void multiply(const float* norm, float scale) {
#pragma unroll
    for (uint32_t k = 0u; k < HEAD_DIM / 16u; k++) {
      const float2 one = make_float2(1.0f, 1.0f);
      const float2 w = (norm != nullptr) ? clb_read_float2(norm + k * 16u, true) : one;
      const float2 v = (norm != nullptr) ? clb_read_float2(norm + k * 16u + 8u, true) : one;
      low[k] = make_float2(low[k].x * scale * w.x, low[k].y * scale * w.y);
      high[k] = make_float2(high[k].x * scale * v.x, high[k].y * scale * v.y);
    }
  }

  static __device__ __forceinline__ void rotate_pair(float2& near, float2& far, float2 cosine, float2 sine) {
    const float2 before = near;
    near = make_float2(near.x * cosine.x - far.x * sine.x, near.y * cosine.y - far.y * sine.y);
    far = make_float2(far.x * cosine.x + before.x * sine.x, far.y * cosine.y + before.y * sine.y);
  }

  /* rope: at this lane's first element. Elements i and i + HEAD_DIM / 2 turn together: both are this lane's. */
  __device__ __forceinline__ void rotate(const float* rope, bool in) {
    constexpr uint32_t half = HEAD_DIM / 32u;
#pragma unroll
    for (uint32_t k = 0u; k < half; k++) {
      const float* at = rope + k * 16u;
      rotate_pair(low[k], low[k + half], clb_read_float2(at, in), clb_read_float2(at + HEAD_DIM / 2u, in));
      rotate_pair(high[k], high[k + half], clb_read_float2(at + 8u, in), clb_read_float2(at + HEAD_DIM / 2u + 8u, in));
    }
  }
};

CLB_DEVICE uint32_t flash_pack(float2 values, float scale) {
  return clb_fp16::pack(clb_fp16::fit(values.x * scale), clb_fp16::fit(values.y * scale));
}

/* The query of one pair of this lane: normed, rotated, in units of log2. */
template <uint32_t HEAD_DIM>
CLB_DEVICE void flash_read_query(const clb_prefill_attention_args& a, uint32_t row, uint32_t head, bool in,
                                 flash_query<HEAD_DIM>& query) {
  const clb_attention_dims& shape = a.shape;
  const uint32_t element = threadIdx.x % 4u * 2u;
  const uint64_t stride = (uint64_t)(shape.heads + 2u * shape.kv_heads) * HEAD_DIM;
  query.read(a.qkv + row * stride + head * HEAD_DIM + element, in);
  if (shape.qk_norm == CLB_QK_NORM_HEAD) {
    const float scale = query.norm_scale(shape.epsilon);
    query.multiply((a.q_norm != nullptr) ? a.q_norm + element : nullptr, scale);
  } else if (shape.qk_norm == CLB_QK_NORM_ROW) {
    const float* norm = (a.q_norm != nullptr && in) ? a.q_norm + head * HEAD_DIM + element : nullptr;
    query.multiply(norm, in ? a.q_scale[row] : 1.0f);
  }
  query.rotate(a.rope + (uint64_t)row * HEAD_DIM + element, in);
}

template <uint32_t HEAD_DIM>
CLB_DEVICE void flash_begin(const clb_prefill_attention_args& a, const flash_place& place, const flash_segment& segment,
                            flash_state<HEAD_DIM>& state) {
  const float scale = a.shape.scale * CLB_LOG2_E;
#pragma unroll
  for (uint32_t h = 0u; h < 2u; h++) {
    const uint32_t row = place.pair(h) / place.heads;
    const uint32_t head = place.first_head + place.pair(h) % place.heads;
    const bool in = row >= segment.begin && row < segment.end;
    flash_query<HEAD_DIM> query;
    flash_read_query(a, place.first + row, head, in, query);
    state.most[h] = CLB_NO_SCORE;
    state.sum[h] = 0.0f;
    state.last[h] = in ? (int32_t)(segment.position + row - segment.begin) : -1;
#pragma unroll
    for (uint32_t k = 0u; k < HEAD_DIM / 16u; k++) {
      (h == 0u ? state.q[k].x : state.q[k].y) = flash_pack(query.low[k], scale);
      (h == 0u ? state.q[k].z : state.q[k].w) = flash_pack(query.high[k], scale);
    }
  }
#pragma unroll
  for (uint32_t n = 0u; n < HEAD_DIM / 8u; n++)
#pragma unroll
    for (uint32_t i = 0u; i < 4u; i++)
      state.values[n][i] = 0.0f;
}

/* Four matrices of K or V as fp16. */
template <class P>
CLB_DEVICE uint4 flash_halves(const uint4& words) {
  return make_uint4(P::to_fp16(words.x), P::to_fp16(words.y), P::to_fp16(words.z), P::to_fp16(words.w));
}

/* How many positions a row sees, its own the last. */
CLB_DEVICE uint32_t flash_reach(uint32_t window) { return (window != 0u) ? window : 0xffffffffu; }

/* Scores of a tile that begins at position `base`; those that a pair does not see are NO_SCORE. */
template <class P, uint32_t HEAD_DIM>
CLB_DEVICE void flash_scores(const flash_state<HEAD_DIM>& state, uint32_t keys, uint32_t base, uint32_t window,
                             float (&scores)[FLASH_STEPS][4]) {
  constexpr uint32_t row_bytes = HEAD_DIM * 2u;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t own = clb_not_ahead(flash_chunk<HEAD_DIM>(lane / 16u * 8u + lane % 8u, lane / 8u % 2u));
#pragma unroll
  for (uint32_t n = 0u; n < FLASH_STEPS; n++)
#pragma unroll
    for (uint32_t i = 0u; i < 4u; i++)
      scores[n][i] = 0.0f;
#pragma unroll
  for (uint32_t k = 0u; k < HEAD_DIM / 16u; k++)
#pragma unroll
    for (uint32_t n = 0u; n < FLASH_STEPS; n += 2u) {
      const uint4 b = flash_halves<P>(clb_load_matrices(keys + n * 8u * row_bytes + (own ^ (k * 32u))));
      clb_mma_fp16(scores[n], state.q[k], b.x, b.y);
      clb_mma_fp16(scores[n + 1u], state.q[k], b.z, b.w);
    }
  const uint32_t reach = flash_reach(window);
  const int32_t end = (int32_t)(base + FLASH_TILE) - 1;
  if (min(state.last[0], state.last[1]) >= end && (uint32_t)(max(state.last[0], state.last[1]) - (int32_t)base) < reach)
    return; /* all is seen */
#pragma unroll
  for (uint32_t n = 0u; n < FLASH_STEPS; n++)
#pragma unroll
    for (uint32_t i = 0u; i < 4u; i++) {
      const int32_t p = (int32_t)(base + n * 8u + lane % 4u * 2u + i % 2u);
      const int32_t last = state.last[i / 2u];
      if (p > last || (uint32_t)(last - p) >= reach) scores[n][i] = CLB_NO_SCORE;
    }
}

/* Scores become shares (pairs of fp16); what was summed so far is scaled down to the new largest score. */
template <uint32_t HEAD_DIM>
CLB_DEVICE void flash_shares(flash_state<HEAD_DIM>& state, const float (&scores)[FLASH_STEPS][4],
                             uint32_t (&shares)[FLASH_STEPS][2]) {
#pragma unroll
  for (uint32_t h = 0u; h < 2u; h++) {
    float most = state.most[h];
#pragma unroll
    for (uint32_t n = 0u; n < FLASH_STEPS; n++)
      most = fmaxf(most, fmaxf(scores[n][2u * h], scores[n][2u * h + 1u]));
    most = fmaxf(most, __shfl_xor_sync(CLB_FULL_WARP, most, 1));
    most = fmaxf(most, __shfl_xor_sync(CLB_FULL_WARP, most, 2));
    const float keep = exp2f(state.most[h] - most);
    const float from = (most == CLB_NO_SCORE) ? 0.0f : most; /* nothing seen yet: all shares are 0 */
    state.most[h] = most;
    float sum = 0.0f;
#pragma unroll
    for (uint32_t n = 0u; n < FLASH_STEPS; n++) {
      const float left = exp2f(scores[n][2u * h] - from);
      const float right = exp2f(scores[n][2u * h + 1u] - from);
      sum += left + right;
      shares[n][h] = clb_fp16::pack(left, right);
    }
    state.sum[h] = fmaf(state.sum[h], keep, sum);
#pragma unroll
    for (uint32_t n = 0u; n < HEAD_DIM / 8u; n++) {
      state.values[n][2u * h] *= keep;
      state.values[n][2u * h + 1u] *= keep;
    }
  }
}

template <class P, uint32_t HEAD_DIM>
CLB_DEVICE void flash_add(flash_state<HEAD_DIM>& state, uint32_t values, const uint32_t (&shares)[FLASH_STEPS][2]) {
  constexpr uint32_t row_bytes = HEAD_DIM * 2u;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t own = clb_not_ahead(flash_chunk<HEAD_DIM>(lane / 8u % 2u * 8u + lane % 8u, lane / 16u));
#pragma unroll
  for (uint32_t k = 0u; k < FLASH_TILE / 16u; k++) {
    const uint4 a = make_uint4(shares[2u * k][0], shares[2u * k][1], shares[2u * k + 1u][0], shares[2u * k + 1u][1]);
#pragma unroll
    for (uint32_t n = 0u; n < HEAD_DIM / 8u; n += 2u) {
      const uint4 b = flash_halves<P>(clb_load_matrices_transposed(values + k * 16u * row_bytes + (own ^ (n * 16u))));
      clb_mma_fp16(state.values[n], a, b.x, b.y);
      clb_mma_fp16(state.values[n + 1u], a, b.z, b.w);
    }
  }
}

template <uint32_t HEAD_DIM>
CLB_DEVICE void flash_end_segment(const clb_prefill_attention_args& a, const flash_place& place,
                                  const flash_state<HEAD_DIM>& state) {
#pragma unroll
  for (uint32_t h = 0u; h < 2u; h++) {
    float sum = state.sum[h];
    sum += __shfl_xor_sync(CLB_FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(CLB_FULL_WARP, sum, 2);
    if (state.last[h] < 0) continue;
    const uint32_t row = place.first + place.pair(h) / place.heads;
    const uint32_t head = place.first_head + place.pair(h) % place.heads;
    uint16_t* to = a.attended + ((uint64_t)row * a.shape.heads + head) * HEAD_DIM + threadIdx.x % 4u * 2u;
    const float scale = 1.0f / sum;
#pragma unroll
    for (uint32_t n = 0u; n < HEAD_DIM / 8u; n++)
      *reinterpret_cast<uint32_t*>(to + n * 8u) =
          clb_half_pair(state.values[n][2u * h] * scale, state.values[n][2u * h + 1u] * scale);
  }
}

template <class KV, class P, uint32_t HEAD_DIM>
CLB_DEVICE void flash_rows(const clb_prefill_attention_args& a, const flash_shared& shared, const void* dynamic) {
  constexpr uint32_t stage_bytes = 2u * FLASH_TILE * HEAD_DIM * 2u;
  const flash_segment& segment = shared.segment;
  const uint32_t memory = clb_shared_address(dynamic);
  flash_state<HEAD_DIM> state;
  flash_begin(a, shared.place, segment, state);
  for (uint32_t i = 0u; i < FLASH_STAGES - 1u; i++) {
    const uint32_t base = segment.seen + i * FLASH_TILE;
    if (base < segment.sees) flash_copy<KV, HEAD_DIM>(shared.kv, memory + i * stage_bytes, base, segment.sees);
    clb_copies_end_group();
  }
  uint32_t stage = 0u;
#pragma unroll 1
  for (uint32_t base = segment.seen; base < segment.sees; base += FLASH_TILE) {
    clb_copies_wait<FLASH_STAGES - 2u>();
    __syncthreads();
    const uint32_t before = (stage == 0u) ? (FLASH_STAGES - 1u) * stage_bytes : stage - stage_bytes; /* is read */
    const uint32_t ahead = base + (FLASH_STAGES - 1u) * FLASH_TILE;
    if (ahead < segment.sees) flash_copy<KV, HEAD_DIM>(shared.kv, memory + before, ahead, segment.sees);
    clb_copies_end_group();
    const uint32_t keys = memory + stage;
    stage = (stage == (FLASH_STAGES - 1u) * stage_bytes) ? 0u : stage + stage_bytes;
    if (!__any_sync(CLB_FULL_WARP, max(state.last[0], state.last[1]) >= (int32_t)base)) continue;
    float scores[FLASH_STEPS][4];
    flash_scores<P>(state, keys, base, a.shape.window, scores);
    uint32_t shares[FLASH_STEPS][2];
    flash_shares(state, scores, shares);
    flash_add<P>(state, keys + stage_bytes / 2u, shares);
  }
  clb_copies_wait<0>();
  __syncthreads();
  flash_end_segment(a, shared.place, state);
}

template <class KV, class P>
CLB_DEVICE void flash(const clb_prefill_attention_args& a, const void* dynamic, flash_shared& shared) {
  const uint32_t own = threadIdx.x;
  flash_place place;
  place.set(a.shape, *a.row_count);
  if (place.rows == 0u) return;
  bool starts = own == 0u;
  if (own > 0u && own < place.rows) {
    const clb_row before = a.rows[place.first + own - 1u];
    const clb_row here = a.rows[place.first + own];
    starts = here.slot != before.slot || here.position != before.position + 1u;
  }
  const uint32_t votes = __ballot_sync(CLB_FULL_WARP, starts);
  if (own % CLB_WARP == 0u) shared.starts[own / CLB_WARP] = votes;
  if (own == 0u) shared.place = place;
  __syncthreads();
  for (uint32_t begin = 0u; begin < shared.place.rows; begin = shared.segment.end) {
    const clb_row row = a.rows[shared.place.first + begin];
    const uint32_t end = flash_end(shared, begin, shared.place.rows);
    __syncthreads(); /* the segment before is read */
    if (own == 0u) {
      const uint32_t seen = clb_first_seen(a.shape, row.position) / FLASH_TILE * FLASH_TILE;
      shared.segment = {begin, end, row.position, seen, row.position + end - begin};
      if (row.slot != CLB_NONE) shared.kv = clb_kv_of<KV>(a.shape, a.slots[row.slot], shared.place.kv_head);
    }
    __syncthreads();
    if (row.slot == CLB_NONE) continue;
    switch (a.shape.head_dim) {
      case 32u:
        flash_rows<KV, P, 32u>(a, shared, dynamic);
        break;
      case 64u:
        flash_rows<KV, P, 64u>(a, shared, dynamic);
        break;
      default:
        flash_rows<KV, P, 128u>(a, shared, dynamic);
        break;
    }
  }
}

#endif /* CLB_FLASH_CUH */
