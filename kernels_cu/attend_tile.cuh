/*
 * attend_tile.cuh: 16 positions of K and V times up to 8 queries, by a warp. Device code only; only attend.cu uses it.
 *
 * A warp takes 16 positions at a time, straight from memory into operands B of mma.m16n8k16:
 *
 *   scores: rows 0..7 of A are the high halves of 8 queries, rows 8..15 their low halves; K = 16 of the head's
 * elements; N = 8 positions. Lane 4 g + q takes elements 32 c + 8 q .. + 7 of position g: which elements an instruction
 *           calls 2q, 2q + 1, 2q + 8, 2q + 9 is free, as long as A and B agree.
 *   values: A = 16 elements at 16 positions; lane 4 g + q takes PIECE neighbouring elements of positions 2q, 2q + 1,
 *           2q + 8, 2q + 9, and halves of two positions pair up in a word. N = 8 queries: their shares, high halves,
 *           then low ones, are where the scores' instruction left them.
 *
 * fp32 K and V are split into two fp16 halves each and multiplied twice.
 */
#ifndef CLB_ATTEND_TILE_CUH
#define CLB_ATTEND_TILE_CUH

#include "attend_items.cuh"

/* ------------------------------------------------------------ elements of KV */

/* value = high + low, two of them in a word each. */
template <class M>
CLB_DEVICE void split_pair(float first, float second, uint32_t* high, uint32_t* low) {
  const float x = M::fit(first);
  const float y = M::fit(second);
  *high = M::pack(x, y);
  const float2 rounded = M::unpack(*high);
  *low = M::pack(x - rounded.x, y - rounded.y);
}

/* K and V of one type as operands: type M of the instructions, HALVES words for two elements. */
template <class KV, class M>
struct operand_of_half : KV {
  typedef M type;
  static constexpr uint32_t HALVES = 1u;
  static __device__ __forceinline__ void pair(const uint32_t* raw, uint32_t (&halves)[1]) { halves[0] = raw[0]; }
};
struct operand_of_fp32 : clb_kv_fp32 {
  typedef clb_fp16 type;
  static constexpr uint32_t HALVES = 2u;
  static __device__ __forceinline__ void pair(const uint32_t* raw, uint32_t (&halves)[2]) {
    split_pair<clb_fp16>(__uint_as_float(raw[0]), __uint_as_float(raw[1]), &halves[0], &halves[1]);
  }
};
typedef operand_of_half<clb_kv_fp16, clb_fp16> kv_fp16;
typedef operand_of_half<clb_kv_bf16, clb_bf16> kv_bf16;
typedef operand_of_fp32 kv_fp32;

template <uint32_t WORDS>
CLB_DEVICE void read_words(uint32_t* to, const unsigned char* at) {
  if constexpr (WORDS % 4u == 0u) {
#pragma unroll
    for (uint32_t i = 0u; i < WORDS / 4u; i++) {
      const uint4 four = __ldcg(reinterpret_cast<const uint4*>(at) + i);
      to[4u * i] = four.x;
      to[4u * i + 1u] = four.y;
      to[4u * i + 2u] = four.z;
      to[4u * i + 3u] = four.w;
    }
  } else {
    const uint2 two = __ldcg(reinterpret_cast<const uint2*>(at));
    to[0] = two.x;
    to[1] = two.y;
  }
}

/* ------------------------------------------------------------------- tiles */

template <class KV, uint32_t HEAD_DIM>
struct tile {
  static constexpr uint32_t RAW = KV::bytes / 2u;                          /* words of two elements */
  static constexpr uint32_t CHUNKS = HEAD_DIM / 32u;                       /* of 8 elements of K a lane and position */
  static constexpr uint32_t PIECE = (HEAD_DIM < 64u) ? HEAD_DIM / 8u : 8u; /* elements of V together */
  static constexpr uint32_t PIECES = HEAD_DIM / 8u / PIECE;
  uint32_t k[2][CHUNKS * 4u * RAW];
  uint32_t v[4][PIECES * PIECE / 2u * RAW];

  /* Positions beyond the last of a split are its last again; their shares are zero. */
  __device__ __forceinline__ void read_keys(const item& from, uint32_t base) {
    const uint32_t lane = threadIdx.x % CLB_WARP;
#pragma unroll
    for (uint32_t j = 0u; j < 2u; j++) {
      const unsigned char* at = place<KV, HEAD_DIM>(from, min(base + 8u * j + lane / 4u, from.end - 1u), false);
#pragma unroll
      for (uint32_t c = 0u; c < CHUNKS; c++)
        read_words<4u * RAW>(&k[j][c * 4u * RAW], at + (32u * c + lane % 4u * 8u) * KV::bytes);
    }
  }

  __device__ __forceinline__ void read_values(const item& from, uint32_t base) {
    const uint32_t lane = threadIdx.x % CLB_WARP;
#pragma unroll
    for (uint32_t p = 0u; p < 4u; p++) {
      const uint32_t position = base + lane % 4u * 2u + p % 2u + p / 2u * 8u;
      const unsigned char* at = place<KV, HEAD_DIM>(from, min(position, from.end - 1u), true);
#pragma unroll
      for (uint32_t c = 0u; c < PIECES; c++)
        read_words<PIECE / 2u * RAW>(&v[p][c * PIECE / 2u * RAW],
                                     at + (8u * PIECE * c + lane / 4u * PIECE) * KV::bytes);
    }
  }

  /* The row's own position, from shared memory: `own` holds its K, then its V. */
  __device__ __forceinline__ void patch(const item& from, uint32_t base, const unsigned char* own) {
    const uint32_t lane = threadIdx.x % CLB_WARP;
#pragma unroll
    for (uint32_t j = 0u; j < 2u; j++) {
      if (min(base + 8u * j + lane / 4u, from.end - 1u) != from.own) continue;
#pragma unroll
      for (uint32_t i = 0u; i < CHUNKS * 4u * RAW; i++) {
        const uint32_t element = i / (4u * RAW) * 32u + lane % 4u * 8u;
        k[j][i] = reinterpret_cast<const uint32_t*>(own + element * KV::bytes)[i % (4u * RAW)];
      }
    }
#pragma unroll
    for (uint32_t p = 0u; p < 4u; p++) {
      if (min(base + lane % 4u * 2u + p % 2u + p / 2u * 8u, from.end - 1u) != from.own) continue;
      constexpr uint32_t words = PIECE / 2u * RAW;
#pragma unroll
      for (uint32_t i = 0u; i < PIECES * words; i++) {
        const uint32_t element = HEAD_DIM + i / words * 8u * PIECE + lane / 4u * PIECE;
        v[p][i] = reinterpret_cast<const uint32_t*>(own + element * KV::bytes)[i % words];
      }
    }
  }
};

/* What the warps of a block share of an item. */
template <uint32_t HEAD_DIM>
struct item_shared {
  static constexpr uint32_t STRIDE = HEAD_DIM / 2u + ((HEAD_DIM % 64u == 0u) ? 16u : 0u); /* no two rows on one bank */
  uint32_t high[QUERIES][STRIDE]; /* halves of queries in units of log2 */
  uint32_t low[QUERIES][STRIDE];
  alignas(16) unsigned char own[2u * HEAD_DIM * 4u]; /* K and V of the row's own position */
  float values[CLB_ATTEND_WARPS][QUERIES][HEAD_DIM + 4u];
  float state[CLB_ATTEND_WARPS][QUERIES][2]; /* largest score, sum */
  uint32_t last;
};

/* --------------------------------------------------------------- the products */

/* What lane 4 g + q of a warp has: of head g the largest score and the sum; of heads 2q and 2q + 1 the weighted sums of
   elements 2 i, then 2 i + 1, of the lane's pieces of V. */
template <uint32_t HEAD_DIM>
struct progress {
  float most;
  float sum; /* of this lane's positions */
  float values[HEAD_DIM / 16u][4];

  __device__ __forceinline__ void clear() {
    most = CLB_NO_SCORE;
    sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0u; i < HEAD_DIM / 16u; i++)
      values[i][0] = values[i][1] = values[i][2] = values[i][3] = 0.0f;
  }
};

template <class KV, uint32_t HEAD_DIM>
CLB_DEVICE void find_scores(const tile<KV, HEAD_DIM>& from, const item_shared<HEAD_DIM>& shared,
                            float (&scores)[2][2]) {
  typedef typename KV::type M;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  float c[2][4] = {};
#pragma unroll
  for (uint32_t chunk = 0u; chunk < HEAD_DIM / 32u; chunk++) {
    const uint32_t at = chunk * 16u + lane % 4u * 4u;
    const uint4 high = *reinterpret_cast<const uint4*>(&shared.high[lane / 4u][at]);
    const uint4 low = *reinterpret_cast<const uint4*>(&shared.low[lane / 4u][at]);
#pragma unroll
    for (uint32_t j = 0u; j < 2u; j++) {
      uint32_t words[4][KV::HALVES];
#pragma unroll
      for (uint32_t i = 0u; i < 4u; i++)
        KV::pair(&from.k[j][(chunk * 4u + i) * (KV::bytes / 2u)], words[i]);
#pragma unroll
      for (uint32_t h = 0u; h < KV::HALVES; h++) {
        M::mma(c[j], make_uint4(high.x, low.x, high.y, low.y), words[0][h], words[1][h]);
        M::mma(c[j], make_uint4(high.z, low.z, high.w, low.w), words[2][h], words[3][h]);
      }
    }
  }
#pragma unroll
  for (uint32_t j = 0u; j < 2u; j++) {
    scores[j][0] = c[j][0] + c[j][2];
    scores[j][1] = c[j][1] + c[j][3];
  }
}

/* Scores to shares of the new maximum; what was added up before is scaled to it. */
template <uint32_t HEAD_DIM>
CLB_DEVICE void find_shares(uint32_t base, uint32_t end, float (&scores)[2][2], progress<HEAD_DIM>& state) {
  const uint32_t first = base + threadIdx.x % 4u * 2u;
  float most = state.most;
#pragma unroll
  for (uint32_t i = 0u; i < 4u; i++) {
    float& score = scores[i / 2u][i % 2u];
    score = (first + i / 2u * 8u + i % 2u < end) ? score : CLB_NO_SCORE;
    most = fmaxf(most, score);
  }
  most = fmaxf(most, __shfl_xor_sync(CLB_FULL_WARP, most, 1u));
  most = fmaxf(most, __shfl_xor_sync(CLB_FULL_WARP, most, 2u));
  const float keep = exp2f(state.most - most);
  state.most = most;
  state.sum *= keep;
#pragma unroll
  for (uint32_t i = 0u; i < 4u; i++) {
    float& score = scores[i / 2u][i % 2u];
    score = (first + i / 2u * 8u + i % 2u < end) ? exp2f(score - most) : 0.0f;
    state.sum += score;
  }
  const float first_keep = __shfl_sync(CLB_FULL_WARP, keep, threadIdx.x % 4u * 8u);
  const float second_keep = __shfl_sync(CLB_FULL_WARP, keep, threadIdx.x % 4u * 8u + 4u);
#pragma unroll
  for (uint32_t i = 0u; i < HEAD_DIM / 16u; i++) {
    state.values[i][0] *= first_keep;
    state.values[i][1] *= second_keep;
    state.values[i][2] *= first_keep;
    state.values[i][3] *= second_keep;
  }
}

template <class KV, uint32_t HEAD_DIM>
CLB_DEVICE void add_values(const tile<KV, HEAD_DIM>& from, const float (&shares)[2][2], progress<HEAD_DIM>& state) {
  typedef typename KV::type M;
  typedef tile<KV, HEAD_DIM> T;
  uint32_t high[2];
  uint32_t low[2];
#pragma unroll
  for (uint32_t j = 0u; j < 2u; j++)
    split_pair<M>(shares[j][0], shares[j][1], &high[j], &low[j]);
#pragma unroll
  for (uint32_t i = 0u; i < HEAD_DIM / 16u; i++) { /* two elements, of 4 positions */
    uint32_t words[4][KV::HALVES];
#pragma unroll
    for (uint32_t p = 0u; p < 4u; p++)
      KV::pair(&from.v[p][i * T::RAW], words[p]);
#pragma unroll
    for (uint32_t h = 0u; h < KV::HALVES; h++) {
      const uint4 a =
          make_uint4(__byte_perm(words[0][h], words[1][h], 0x5410u), __byte_perm(words[0][h], words[1][h], 0x7632u),
                     __byte_perm(words[2][h], words[3][h], 0x5410u), __byte_perm(words[2][h], words[3][h], 0x7632u));
      M::mma(state.values[i], a, high[0], high[1]);
      M::mma(state.values[i], a, low[0], low[1]);
    }
  }
}

#endif /* CLB_ATTEND_TILE_CUH */
