/*
 * quant.cuh: quantised weights for the few-row kernels: where a matrix lies, the ring that its pieces and their scales
 * go through, and the product. Device code only. "formats" in abi.h draws the bytes.
 *
 *   ring of warp i: | stage 0: piece of 512 bytes, scales, zeros of each of MATRICES | stage 1 | ... |
 *
 * A lane copies its own 16 bytes of a piece and the scales (and zeros) of its own two rows, so that, as in few.cuh, the
 * ring needs no barrier. Products are of fp16: 8 or 4 bits are widened in registers, exactly; what a group adds up is
 * multiplied by its scale in fp32 and added to the sum.
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

/* This lane's bytes of the pieces to come of MATRICES matrices of one format: what a source of the ring is made of. */
template <uint32_t MATRICES>
struct clb_quant_stream {
  const unsigned char* values[MATRICES]; /* of the next piece */
  const unsigned char* scales[MATRICES]; /* of its slot 0 */
  uint32_t to_zeros[MATRICES];           /* from there */
  uint32_t left;                         /* pieces in a row */
  uint32_t piece;
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
    piece = first;
    steps = pack.scale_step() | pack.zero_bytes << 8 | pack.scale_bytes << 16 | pack.shift << 24;
  }
  /* The last `count` pieces again. */
  __device__ __forceinline__ void again(uint32_t count) {
    left = count;
    piece -= count;
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++)
      values[m] -= count * CLB_PIECE;
  }
};

/* The ring of few.cuh for pieces with scales. A source is a clb_quant_stream with open(), which finds the next pieces:
   false if there are none now. */
template <uint32_t MATRICES, uint32_t STAGES>
struct clb_quant_ring {
  uint32_t first; /* of stage 0, this warp's */
  uint32_t read;
  uint32_t fill;
  uint32_t place; /* bytes of a piece and what it brings */

  __device__ __forceinline__ clb_quant_ring(const void* memory, uint32_t meta) : place(CLB_PIECE + meta) {
    first = clb_shared_address(memory) + threadIdx.x / CLB_WARP * (STAGES * MATRICES * place);
    read = fill = first;
  }

  __device__ __forceinline__ uint32_t after(uint32_t stage) const {
    const uint32_t next = stage + MATRICES * place;
    return (next == first + STAGES * MATRICES * place) ? first : next;
  }

  template <class Source>
  __device__ __forceinline__ void refill(Source& source) {
    if (source.left == 0u && !source.open()) return;
    const uint32_t lane = threadIdx.x % CLB_WARP;
    const uint32_t slot = source.piece >> (source.steps >> 24);
    const uint32_t scale_at = slot * (source.steps & 255u);
    const uint32_t zero_step = source.steps >> 8 & 255u;
    const uint32_t scale_bytes = source.steps >> 16 & 255u;
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++) {
      const uint32_t to = fill + m * place;
      clb_copy_async(to + lane * 16u, source.values[m]);
      source.values[m] += CLB_PIECE;
      if (scale_bytes == 4u) {
        clb_copy_async_few<4u>(to + CLB_PIECE + lane * 4u, source.scales[m] + scale_at);
      } else if (scale_bytes == 8u) {
        clb_copy_async_few<8u>(to + CLB_PIECE + lane * 8u, source.scales[m] + scale_at);
      }
      if (zero_step != 0u)
        clb_copy_async_few<4u>(to + CLB_PIECE + scale_bytes * CLB_WARP + lane * 4u,
                               source.scales[m] + (source.to_zeros[m] + slot * zero_step));
    }
    source.piece++;
    source.left--;
    fill = after(fill);
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

/* Scales of rows g and g + 8, of group `group` of the piece at `at` in the ring. */
template <class K>
CLB_DEVICE float2 clb_scales_at(uint32_t at, uint32_t format, uint32_t group) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const bool paired = K::KIND == CLB_KIND_INT4 && CLB_FORMAT_GROUP(format) == 5u;
  if (K::KIND != CLB_KIND_FP8)
    return clb_fp16::unpack(clb_read_shared_word(at + CLB_PIECE + (paired ? lane * 8u + group * 4u : lane * 4u)));
  const bool blocks = (format & CLB_FORMAT_BLOCKS) != 0u;
  const uint32_t first = clb_read_shared_word(at + CLB_PIECE + lane * (blocks ? 4u : 8u));
  const uint32_t second = blocks ? first : clb_read_shared_word(at + CLB_PIECE + lane * 8u + 4u);
  return make_float2(__uint_as_float(first) * CLB_FP8_SCALE, __uint_as_float(second) * CLB_FP8_SCALE);
}

/* Zeros of its group. */
CLB_DEVICE clb_int4_zeros clb_zeros_at(uint32_t at, uint32_t format, uint32_t group) {
  if ((format & CLB_FORMAT_ZEROS) == 0u) return clb_int4_zeros();
  const bool paired = CLB_FORMAT_GROUP(format) == 5u;
  const uint32_t place = at + CLB_PIECE + (paired ? 8u : 4u) * CLB_WARP + threadIdx.x % CLB_WARP * 4u;
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

/* sum += scale * part; part = 0. at, place: of the pieces in the ring. */
template <class K, uint32_t MATRICES, uint32_t STEPS>
CLB_DEVICE void clb_end_group(uint32_t at, uint32_t place, uint32_t format, uint32_t group,
                              float (&part)[MATRICES][STEPS][4], float (&sum)[MATRICES][STEPS][4]) {
#pragma unroll
  for (uint32_t m = 0u; m < MATRICES; m++) {
    const float2 scale = clb_scales_at<K>(at + m * place, format, group);
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++)
#pragma unroll
      for (uint32_t i = 0u; i < 4u; i++) {
        sum[m][s][i] = fmaf(i < 2u ? scale.x : scale.y, part[m][s][i], sum[m][s][i]);
        part[m][s][i] = 0.0f;
      }
  }
}

/* sum[m][s] = `pieces` pieces of matrix m times step s. `tiles`: column tiles that the rows have from there on; what is
   padded is 0. Operand B is read AHEAD column tiles ahead. */
template <class K, uint32_t MATRICES, uint32_t STEPS, uint32_t STAGES, class Source>
CLB_DEVICE void clb_multiply_quant(clb_quant_ring<MATRICES, STAGES>& ring, Source& source, uint32_t format,
                                   uint32_t pieces, uint32_t tiles, const clb_quant_row (&rows)[STEPS],
                                   float (&sum)[MATRICES][STEPS][4]) {
  constexpr uint32_t AHEAD = (STEPS == 1u) ? 4u : (STEPS == 2u) ? 2u : 1u;
  constexpr uint32_t ROUND = (AHEAD > K::TILES) ? AHEAD : K::TILES;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  uint4 b[AHEAD][STEPS];
  clb_clear(sum);
#pragma unroll
  for (uint32_t i = 0u; i < AHEAD; i++)
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++) {
      b[i][s] = make_uint4(0u, 0u, 0u, 0u);
      if (rows[s].there && i < tiles) b[i][s] = rows[s].read(i);
    }
  const uint32_t end = pieces * K::TILES;
#pragma unroll 1
  for (uint32_t tile = 0u; tile < end; tile += ROUND) {
    uint4 raw[MATRICES];
    clb_int4_zeros zeros[MATRICES];
    float part[MATRICES][STEPS][4];
    uint32_t at = 0u;
#pragma unroll
    for (uint32_t i = 0u; i < ROUND; i++) {
      const uint32_t in_piece = i % K::TILES;
      if (in_piece == 0u) {
        if (tile + i >= end) break;
        clb_copies_wait<STAGES - 2u>();
        at = ring.read; /* which nobody fills again before the next piece is read */
#pragma unroll
        for (uint32_t m = 0u; m < MATRICES; m++) {
          raw[m] = clb_read_shared(at + m * ring.place + lane * 16u);
          if (K::KIND == CLB_KIND_INT4) zeros[m] = clb_zeros_at(at + m * ring.place, format, 0u);
        }
        ring.read = ring.after(ring.read);
        ring.refill(source);
        clb_copies_end_group();
        if (K::GROUPED) clb_clear(part);
      }
      if (K::KIND == CLB_KIND_INT4 && in_piece == 2u && CLB_FORMAT_GROUP(format) == 5u) { /* the second group */
        clb_end_group<K>(at, ring.place, format, 0u, part, sum);
#pragma unroll
        for (uint32_t m = 0u; m < MATRICES; m++)
          zeros[m] = clb_zeros_at(at + m * ring.place, format, 1u);
      }
      float (&into)[MATRICES][STEPS][4] = K::GROUPED ? part : sum;
#pragma unroll
      for (uint32_t m = 0u; m < MATRICES; m++) {
        const uint4 a = K::widen(raw[m], in_piece, zeros[m].low, zeros[m].high);
#pragma unroll
        for (uint32_t s = 0u; s < STEPS; s++) {
          clb_mma_fp16(into[m][s], a, b[i % AHEAD][s].x, b[i % AHEAD][s].y);
          clb_mma_fp16(into[m][s], a, b[i % AHEAD][s].z, b[i % AHEAD][s].w);
        }
      }
#pragma unroll
      for (uint32_t s = 0u; s < STEPS; s++)
        if (rows[s].there && tile + i + AHEAD < min(tiles, end)) b[i % AHEAD][s] = rows[s].read(tile + i + AHEAD);
      if (K::GROUPED && in_piece + 1u == K::TILES) clb_end_group<K>(at, ring.place, format, 1u, part, sum);
    }
  }
}

#endif /* CLB_QUANT_CUH */
