/*
 * quant.cuh: quantised weights for the few-row kernels: where a matrix lies, the ring that its pieces and their scales
 * go through, and the product. Device code only. "formats" in abi.h draws the bytes.
 *
 *   ring of warp i: | stage 0: a piece of 512 bytes of each of MATRICES, then scales and zeros of each | stage 1 | ...
 * |
 *
 * A lane copies its own 16 bytes of a piece and, with the first piece of a group, the scales (and zeros) of its own two
 * rows, so that, as in few.cuh, the ring needs no barrier. Products are of fp16: 8 or 4 bits are widened in registers,
 * exactly; what a piece adds up is multiplied by its scale in fp32 and added to the sum.
 *
 * The sum of one output: the pieces of a warp in rising order; of a piece its tiles, each high half, then low half; the
 * pieces' sums times their scales in order (of int4 in groups of 32: half pieces); then the 8 warps in order.
 */
#ifndef CLB_QUANT_CUH
#define CLB_QUANT_CUH

#include "few.cuh"
#include "formats.cuh"

#define CLB_MIXED_STEPS 2u /* steps of 8 rows that the expert kernels hold at once */

/* --------------------------------------------------------------------- the stream */

/* This lane's bytes of the pieces to come of MATRICES matrices of one format: what a source of the ring is made of.
   ALL_BRING: every piece brings scales and not only the first of a group: more instructions, fewer registers. */
template <uint32_t MATRICES, bool ALL_BRING>
struct clb_quant_stream {
  static constexpr bool all_bring = ALL_BRING;
  const unsigned char* values[MATRICES]; /* of the next piece */
  const unsigned char* scales[MATRICES]; /* of its slot 0 */
  uint32_t to_zeros[MATRICES];           /* from there */
  uint32_t left;                         /* pieces in a row */
  uint32_t piece;
  uint32_t turn;  /* the next piece that brings scales */
  uint32_t steps; /* bytes from slot to slot of scales, from bit 8 on of zeros, from bit 16 on of a lane's scales; from
                     bit 24 on the shift from pieces to slots */

  /* From piece `first` on of a row tile of the matrix at `weights`, which has `tiles` row tiles. */
  __device__ __forceinline__ void point(uint32_t m, const clb_packing& pack, uint64_t weights, uint32_t tiles,
                                        uint32_t row_tile, uint32_t first) {
    const unsigned char* const base = reinterpret_cast<const unsigned char*>(weights);
    values[m] = base + ((uint64_t)row_tile * pack.pieces + first) * CLB_PIECE + threadIdx.x % CLB_WARP * 16u;
    scales[m] = pack.scales(base, tiles, row_tile) + pack.own_scales();
    to_zeros[m] = (uint32_t)(pack.zeros(base, tiles, row_tile) + pack.own_zeros() - scales[m]);
  }
  __device__ __forceinline__ void begin(const clb_packing& pack, uint32_t first, uint32_t count) {
    left = count;
    piece = turn = first;
    steps = pack.scale_step() | pack.zero_bytes << 8 | pack.scale_bytes << 16 | pack.shift << 24;
  }
  /* The last `count` pieces again. */
  __device__ __forceinline__ void again(uint32_t count) {
    left = count;
    piece -= count;
    turn = piece;
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++)
      values[m] -= count * CLB_PIECE;
  }
};

/* The ring of few.cuh for pieces with scales. A source is a clb_quant_stream with open(), which finds the next pieces:
   false if there are none now. */
template <uint32_t MATRICES, uint32_t STAGES>
struct clb_quant_ring {
  uint32_t first; /* this lane's bytes of stage 0 */
  uint32_t read;
  uint32_t fill;
  uint32_t meta; /* bytes that a piece brings beside its values */

  __device__ __forceinline__ clb_quant_ring(const void* memory, uint32_t bytes) : meta(bytes) {
    first =
        clb_shared_address(memory) + threadIdx.x / CLB_WARP * (STAGES * stage_bytes()) + threadIdx.x % CLB_WARP * 16u;
    read = fill = first;
  }

  __device__ __forceinline__ uint32_t stage_bytes() const { return MATRICES * (CLB_PIECE + meta); }
  __device__ __forceinline__ uint32_t after(uint32_t stage) const {
    const uint32_t next = stage + stage_bytes();
    return (next == first + STAGES * stage_bytes()) ? first : next;
  }
  /* What the stage brings beside the values of matrix m. */
  __device__ __forceinline__ uint32_t brought(uint32_t stage, uint32_t m) const {
    return stage - threadIdx.x % CLB_WARP * 16u + MATRICES * CLB_PIECE + m * meta;
  }

  template <class Source>
  __device__ __forceinline__ void refill(Source& source) {
    if (source.left == 0u && !source.open()) return;
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++) {
      clb_copy_async(fill + m * CLB_PIECE, source.values[m]);
      source.values[m] += CLB_PIECE;
    }
    if (Source::all_bring || source.piece == source.turn) bring(source);
    source.piece++;
    source.left--;
    fill = after(fill);
  }

  /* Scales and zeros of the group that the next piece begins. */
  template <class Source>
  __device__ __forceinline__ void bring(Source& source) {
    const uint32_t lane = threadIdx.x % CLB_WARP;
    const uint32_t shift = source.steps >> 24;
    const uint32_t slot = source.piece >> shift;
    const uint32_t scale_at = slot * (source.steps & 255u);
    const uint32_t zero_step = source.steps >> 8 & 255u;
    const uint32_t scale_bytes = source.steps >> 16 & 255u;
    source.turn = (slot + 1u) << shift;
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++) {
      const uint32_t to = brought(fill, m);
      if (scale_bytes == 4u) {
        clb_copy_async_few<4u>(to + lane * 4u, source.scales[m] + scale_at);
      } else if (scale_bytes == 8u) {
        clb_copy_async_few<8u>(to + lane * 8u, source.scales[m] + scale_at);
      }
      if (zero_step != 0u)
        clb_copy_async_few<4u>(to + scale_bytes * CLB_WARP + lane * 4u,
                               source.scales[m] + (source.to_zeros[m] + slot * zero_step));
    }
  }

  /* Up to STAGES - 1 stages; `started` counts them over several calls. */
  template <class Source>
  __device__ __forceinline__ void start(Source& source, uint32_t& started) {
    while (started < STAGES - 1u && (source.left > 0u || source.open())) {
      refill(source);
      clb_copies_end_group();
      started++;
    }
  }

  /* Groups must be STAGES - 1 before the first stage is read. */
  __device__ __forceinline__ void complete_start(uint32_t started) {
    for (; started < STAGES - 1u; started++)
      clb_copies_end_group();
  }
};

/* ------------------------------------------------------------------- the product */

/* This lane's words of scales, from what a piece brought: x and y of the first and second group, or of rows g and g +
   8; where there is one word, twice that. */
template <class K>
CLB_DEVICE uint2 clb_scales_at(uint32_t brought, uint32_t format) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const bool two = (K::KIND == CLB_KIND_INT4) ? CLB_FORMAT_GROUP(format) == 5u
                                              : K::KIND == CLB_KIND_FP8 && (format & CLB_FORMAT_BLOCKS) == 0u;
  if (two) return clb_read_shared_pair(brought + lane * 8u);
  const uint32_t word = clb_read_shared_word(brought + lane * 4u);
  return make_uint2(word, word);
}

/* Scales of rows g and g + 8 of its group. */
template <class K>
CLB_DEVICE float2 clb_scales_of(const uint2& words, uint32_t group) {
  if (K::KIND != CLB_KIND_FP8) return clb_fp16::unpack(group == 0u ? words.x : words.y);
  return make_float2(__uint_as_float(words.x) * CLB_FP8_SCALE, __uint_as_float(words.y) * CLB_FP8_SCALE);
}

/* Zeros of its group, from what a piece brought. */
CLB_DEVICE clb_int4_zeros clb_zeros_at(uint32_t brought, uint32_t format, uint32_t group) {
  if ((format & CLB_FORMAT_ZEROS) == 0u) return clb_int4_zeros();
  const bool paired = CLB_FORMAT_GROUP(format) == 5u;
  const uint32_t place = brought + (paired ? 8u : 4u) * CLB_WARP + threadIdx.x % CLB_WARP * 4u;
  return clb_int4_zeros(clb_read_shared_word(place), paired, group);
}

/* Operand B of a step: where this lane reads its part of its row, at the first column tile; or no row. */
struct clb_quant_row {
  const uint32_t* at;
  bool there;

  __device__ __forceinline__ uint4 read(uint32_t tile) const {
    return *reinterpret_cast<const uint4*>(at + tile * CLB_TILE);
  }
};

/* A warp's part of a row tile of each of MATRICES. */
struct clb_quant_part {
  uint32_t format;
  uint32_t first; /* piece */
  uint32_t pieces;
  uint32_t tiles; /* column tiles that the rows have from there on; what is padded is 0 */
};

/* sum += scale * part; part = 0. */
template <class K, uint32_t MATRICES, uint32_t STEPS>
CLB_DEVICE void clb_end_group(const uint2 (&scales)[MATRICES], uint32_t group, float (&part)[MATRICES][STEPS][4],
                              float (&sum)[MATRICES][STEPS][4]) {
#pragma unroll
  for (uint32_t m = 0u; m < MATRICES; m++) {
    const float2 scale = clb_scales_of<K>(scales[m], group);
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++)
#pragma unroll
      for (uint32_t i = 0u; i < 4u; i++) {
        sum[m][s][i] = fmaf(i < 2u ? scale.x : scale.y, part[m][s][i], sum[m][s][i]);
        part[m][s][i] = 0.0f;
      }
  }
}

/* Which pieces begin a group, and its scales and zeros. */
template <class K, uint32_t MATRICES>
struct clb_quant_groups {
  uint32_t format;
  uint32_t shift; /* piece >> shift is its group */
  uint32_t turn;  /* the next piece that begins one */
  uint2 scales[MATRICES];
  clb_int4_zeros zeros[MATRICES];

  __device__ __forceinline__ explicit clb_quant_groups(const clb_quant_part& what)
      : format(what.format), turn(what.first) {
    constexpr uint32_t LOG = (K::KIND == CLB_KIND_INT4) ? 6u : 5u;
    const uint32_t group = CLB_FORMAT_GROUP(format);
    shift = (group == 0u) ? 31u : (group > LOG) ? group - LOG : 0u;
  }
  __device__ __forceinline__ bool halved() const { return K::KIND == CLB_KIND_INT4 && CLB_FORMAT_GROUP(format) == 5u; }
  template <class Ring>
  __device__ __forceinline__ void read_zeros(const Ring& ring, uint32_t stage, uint32_t group) {
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++)
      if (K::KIND == CLB_KIND_INT4) zeros[m] = clb_zeros_at(ring.brought(stage, m), clb_not_ahead(format), group);
  }
  template <class Ring>
  __device__ __forceinline__ void read_scales(const Ring& ring, uint32_t stage) {
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++)
      scales[m] = clb_scales_at<K>(ring.brought(stage, m), clb_not_ahead(format));
  }
  /* Of `piece`, which begins one, in `stage`. */
  template <class Ring>
  __device__ __forceinline__ void read(const Ring& ring, uint32_t stage, uint32_t piece) {
    turn = ((piece >> shift) + 1u) << shift;
    read_scales(ring, stage);
    read_zeros(ring, stage, 0u);
  }
};

/* sum[m][s] = the part of matrix m times step s. Operand B is read AHEAD column tiles ahead. */
template <class K, uint32_t MATRICES, uint32_t STEPS, uint32_t STAGES, class Source>
CLB_DEVICE void clb_multiply_quant(clb_quant_ring<MATRICES, STAGES>& ring, Source& source, const clb_quant_part& what,
                                   clb_quant_row (&rows)[STEPS], float (&sum)[MATRICES][STEPS][4]) {
  constexpr uint32_t AHEAD = (STEPS == 1u) ? 4u : (STEPS == 2u) ? 2u : 1u;
  constexpr uint32_t ROUND = (AHEAD > K::TILES) ? AHEAD : K::TILES;
  const uint32_t end = what.first + what.pieces;
  clb_quant_groups<K, MATRICES> groups(what);
  float part[MATRICES][STEPS][4];
  uint4 raw[MATRICES];
  uint4 b[AHEAD][STEPS];
  int32_t left = (int32_t)min(what.tiles, what.pieces * K::TILES); /* column tiles of operand B from here on */
  clb_clear(sum);
#pragma unroll
  for (uint32_t i = 0u; i < AHEAD; i++)
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++) {
      b[i][s] = make_uint4(0u, 0u, 0u, 0u);
      if (rows[s].there && (int32_t)i < left) b[i][s] = rows[s].read(i);
    }
#pragma unroll 1
  for (uint32_t piece = what.first; piece < end;) {
    uint32_t at = 0u;
#pragma unroll
    for (uint32_t i = 0u; i < ROUND; i++) {
      const uint32_t in_piece = i % K::TILES;
      if (in_piece == 0u) {
        if (i > 0u && piece == end) break;
        clb_copies_wait<STAGES - 2u>();
        at = ring.read; /* which nobody fills again before the next piece is read */
#pragma unroll
        for (uint32_t m = 0u; m < MATRICES; m++)
          raw[m] = clb_read_shared(at + m * CLB_PIECE);
        if (K::GROUPED && Source::all_bring) groups.read_zeros(ring, at, 0u);
        if (K::GROUPED && !Source::all_bring && piece == groups.turn) groups.read(ring, at, piece);
        ring.read = ring.after(ring.read);
        ring.refill(source);
        clb_copies_end_group();
        piece++;
        if (K::GROUPED) clb_clear(part);
      }
      if (in_piece == 2u && groups.halved()) {
        if (Source::all_bring) groups.read_scales(ring, at);
        clb_end_group<K>(groups.scales, 0u, part, sum);
        groups.read_zeros(ring, at, 1u);
      }
      float (&into)[MATRICES][STEPS][4] = K::GROUPED ? part : sum;
#pragma unroll
      for (uint32_t m = 0u; m < MATRICES; m++) {
        const uint4 a = K::widen(raw[m], in_piece, groups.zeros[m].low, groups.zeros[m].high);
#pragma unroll
        for (uint32_t s = 0u; s < STEPS; s++) {
          clb_mma_fp16(into[m][s], a, b[i % AHEAD][s].x, b[i % AHEAD][s].y);
          clb_mma_fp16(into[m][s], a, b[i % AHEAD][s].z, b[i % AHEAD][s].w);
        }
      }
#pragma unroll
      for (uint32_t s = 0u; s < STEPS; s++)
        if (rows[s].there && left > (int32_t)(i + AHEAD)) b[i % AHEAD][s] = rows[s].read(i + AHEAD);
      if (K::GROUPED && in_piece + 1u == K::TILES) {
        if (Source::all_bring) groups.read_scales(ring, at);
        clb_end_group<K>(groups.scales, 1u, part, sum);
      }
    }
    left -= (int32_t)ROUND;
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++)
      rows[s].at += ROUND * CLB_TILE;
  }
}

#endif /* CLB_QUANT_CUH */
