/*
 * many.cuh: the product of many rows (prompts), shared by linear_many.cu and experts_many.cu. Device code only.
 *
 * A block takes units of work, blockIdx.x, + gridDim.x, ...: MANY_TILES row tiles of weights times up to MANY_ROWS rows
 * of input (half rows). A job (linear_many.cu, experts_many.cu) says what a unit is and what becomes of its sums:
 *
 *   job.units, job.across            units of the step, column tiles
 *   job.unit_at(u)                   with .rows, 1 .. MANY_ROWS
 *   job.matrix(unit, tile)           where the row tile in place `tile` lies; base 0: there is none
 *   job.format(unit)                 of the weights
 *   job.input, job.input_row(unit, i)  half rows, and the number of the unit's i-th
 *   job.scale(unit, i)               the factor of the sums of that row
 *   job.finish(unit, sum, scale)     sum[r][s], r < R: row tile in place clb_many_tile<R>(r), rows clb_many_row(s)
 *   Job::MAY_HALVE, job.halved       whether units are of half as many row tiles (R = 1): where there are few of them
 *
 * Two forms of the same product, of which one is compiled:
 *
 *   wgmma (sm_90a), 16 row tiles, 128 rows, one block of 384 threads a multiprocessor: four warps copy, two groups
 *   of four warps multiply. Weights are operand A from registers, which is what their order is made for; input is
 *   operand B from shared memory. 4 stages of 4 column tiles, each with two gates (mbarriers), full and empty:
 *
 *     | weights [16 row tiles][4 column tiles][512 bytes] | input [128 rows][128 bytes] |   48 KiB
 *
 *   mma.sync, 8 row tiles, 64 rows, two blocks of 256 threads a multiprocessor, who all copy and multiply. 3 stages:
 *
 *     | weights [8 row tiles][4 column tiles][512 bytes] | input [64 rows][128 bytes] |     24 KiB
 *
 * Chunk c (16 bytes) of input row r lies at chunk c ^ r % 8 of its 128 bytes.
 *
 * An output is one sum over column tiles in rising order, no split of the columns, whatever the unit it is in. Products
 * are of fp16 in both: bf16 weights are converted on the way from shared memory (exact but for tiny ones), and so are
 * quantised ones (formats.cuh), which fill a half or a quarter of their place in a stage. Scales of groups are
 * multiplied in there, which rounds to fp16; scales of whole rows at the end. Who multiplies is a policy, a W:
 *
 *   clb_many_pure<P>      16-bit weights of type P
 *   clb_many_of<K>        quantised weights of kind K
 */
#ifndef CLB_MANY_CUH
#define CLB_MANY_CUH

#include "formats.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CLB_WIDE 1
#include "wgmma.cuh"
#define MANY_TILES 16u
#define MANY_ROWS 128u
#define MANY_STAGES 4u
#else
#define CLB_WIDE 0
#define MANY_TILES 8u
#define MANY_ROWS 64u
#define MANY_STAGES 3u
#endif

#define MANY_WARPS 8u /* that multiply */
#define MANY_THREADS (MANY_WARPS * CLB_WARP)
#define MANY_PIECE 512u     /* bytes of one tile of 16 x 16 */
#define MANY_COLS 4u        /* column tiles of a stage */
#define MANY_ROW_BYTES 128u /* of input in a stage */
#define MANY_CHUNKS 8u      /* of 16 bytes in them */
#define MANY_WEIGHT_BYTES (MANY_TILES * MANY_COLS * MANY_PIECE)
#define MANY_STAGE_BYTES (MANY_WEIGHT_BYTES + MANY_ROWS * MANY_ROW_BYTES)
#define MANY_SUM_TILES (CLB_HALF_SUM / CLB_TILE)
#define MANY_TILE_BYTES (MANY_COLS * MANY_PIECE) /* of a row tile in a stage; of which quantised ones take half: */
#define MANY_SCALES (MANY_TILE_BYTES / 2u)       /* behind that their scales, 64 bytes at most */
#define MANY_ZEROS (MANY_TILE_BYTES / 2u + 64u)  /* and zeros, 32 bytes at most */

struct clb_many_shared {
  float scale[2][MANY_ROWS];           /* of this unit and of the one before or after it */
  float square[MANY_TILES][MANY_ROWS]; /* sums of squares of row tiles */
  uint64_t gates[2u * MANY_STAGES];    /* full, then empty */
};

/* ------------------------------------------------------------- places of the sums */

/* The place of the row tile of sum[r]: 16 rows of 64 that wgmma multiplies at once, or two neighbours. */
template <uint32_t R = 2u>
CLB_DEVICE uint32_t clb_many_tile(uint32_t r) {
  const uint32_t warp = threadIdx.x / CLB_WARP;
  return CLB_WIDE ? warp / 4u * (4u * R) + r * 4u + warp % 4u : warp % 4u * 2u + r;
}

/* Gate and up share a warp: which of the two is in a place, and of which row tile of the unit's MANY_TILES / 2. */
CLB_DEVICE uint32_t clb_many_which(uint32_t place) { return CLB_WIDE ? place / 4u % 2u : place % 2u; }
CLB_DEVICE uint32_t clb_many_pair(uint32_t place) { return CLB_WIDE ? place / 8u * 4u + place % 4u : place / 2u; }

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

/* Where this lane's pairs of step s belong: row of the unit, and the first result of `low` in its tile. */
CLB_DEVICE uint32_t clb_many_row(uint32_t step) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t first = CLB_WIDE ? 0u : threadIdx.x / (4u * CLB_WARP) * (MANY_ROWS / 2u);
  return first + step * 8u + lane % 4u * 2u + lane / 4u % 2u;
}
CLB_DEVICE uint32_t clb_pair_col() { return threadIdx.x % CLB_WARP / 8u * 2u; }

/* The 16 columns of a tile, of which this lane holds four, into a half row. */
CLB_DEVICE void clb_store_half_pairs(uint16_t* row, uint32_t tile, const clb_pairs& pairs) {
  uint32_t* to = reinterpret_cast<uint32_t*>(row + tile * CLB_TILE + clb_pair_col());
  to[0] = clb_half_pair(pairs.low.x, pairs.low.y);
  to[4] = clb_half_pair(pairs.high.x, pairs.high.y);
}

/* The same for sums over half rows with weights as they are: they have the scale of half rows already. */
CLB_DEVICE void clb_store_half_sums(uint16_t* row, uint32_t tile, const clb_pairs& sums) {
  uint32_t* to = reinterpret_cast<uint32_t*>(row + tile * CLB_TILE + clb_pair_col());
  to[0] = clb_fp16::pack(clb_fp16::fit(sums.low.x), clb_fp16::fit(sums.low.y));
  to[4] = clb_fp16::pack(clb_fp16::fit(sums.high.x), clb_fp16::fit(sums.high.y));
}

/* Where a row tile lies. */
struct clb_many_matrix {
  uint64_t base; /* of its matrix; 0: no tile */
  uint32_t tiles;
  uint32_t tile;
};

/* What a thread copies of the scales of groups and zeros of a row tile, a stage at a time: 16 bytes of either, or the
   one scale of a block. */
struct clb_many_meta {
  const unsigned char* from; /* NULL: nothing */
  uint32_t to;               /* behind the row tile in the stage */
  uint32_t step;             /* from slot to slot */
  uint32_t log;              /* stages of a slot */
  bool block;

  __device__ __forceinline__ void copy(uint32_t row_tile, uint32_t stage) const {
    if (from == nullptr) return;
    const unsigned char* const at = from + (stage >> log) * step;
    if (block) {
      clb_copy_async_few<4u>(row_tile + to, at);
    } else {
      clb_copy_async(row_tile + to, at);
    }
  }
};

/* part: 0 .. 3 scales, 4 and 5 zeros. */
CLB_DEVICE clb_many_meta clb_make_meta(const clb_many_matrix& matrix, uint32_t across, uint32_t format, uint32_t part) {
  const clb_packing pack(format, across * CLB_TILE);
  const unsigned char* const base = reinterpret_cast<const unsigned char*>(matrix.base);
  const uint32_t scale_parts = pack.blocks ? 1u : pack.scale_bytes / 2u;
  clb_many_meta meta = {nullptr, 0u, 0u, 0u, pack.blocks};
  if (matrix.base == 0u || CLB_FORMAT_GROUP(format) == 0u) return meta;
  if (CLB_FORMAT_GROUP(format) > 6u) meta.log = CLB_FORMAT_GROUP(format) - 6u;
  if (part < scale_parts) {
    meta.from = pack.scales(base, matrix.tiles, matrix.tile) + part * 16u;
    meta.to = MANY_SCALES + part * 16u;
    meta.step = pack.scale_step();
  } else if (part >= 4u && part < 4u + pack.zero_bytes / 16u) {
    meta.from = pack.zeros(base, matrix.tiles, matrix.tile) + (part - 4u) * 16u;
    meta.to = MANY_ZEROS + (part - 4u) * 16u;
    meta.step = pack.zero_bytes;
  }
  return meta;
}

/* Barrier of the threads that multiply. */
CLB_DEVICE void clb_many_barrier() { clb_barrier(1u, MANY_THREADS); }

/* Where chunk c of input row i lies in a stage. */
CLB_DEVICE uint32_t clb_many_chunk(uint32_t i, uint32_t c) {
  return MANY_WEIGHT_BYTES + i * MANY_ROW_BYTES + (c ^ i % 8u) * 16u;
}

/* 16-bit weights. */
template <class P>
struct clb_many_half {
  static constexpr uint32_t TILES = 1u; /* of 16 columns in a piece */

  template <class Job>
  __device__ __forceinline__ clb_many_half(const Job&, const typename Job::unit&) {}
  __device__ __forceinline__ uint4 operand(uint32_t at, uint32_t col) const {
    const uint4 a = clb_read_shared(at + col * MANY_PIECE + threadIdx.x % CLB_WARP * 16u);
    return make_uint4(P::to_fp16(a.x), P::to_fp16(a.y), P::to_fp16(a.z), P::to_fp16(a.w));
  }
  template <uint32_t R, uint32_t STEPS, class Job>
  __device__ __forceinline__ void finish(const Job&, const typename Job::unit&, float (&)[R][STEPS][4]) const {}
};

/* Quantised weights. Behind the pieces of a row tile in a stage lie its scales (of groups) and zeros. */
template <class K>
struct clb_many_quant {
  static constexpr uint32_t TILES = K::TILES;

  uint32_t format;

  template <class Job>
  __device__ __forceinline__ clb_many_quant(const Job& job, const typename Job::unit& unit)
      : format(job.format(unit)) {}

  __device__ __forceinline__ bool of_rows() const { return CLB_FORMAT_GROUP(format) == 0u; }

  /* The scales of two rows, g in the low half. */
  __device__ __forceinline__ uint32_t scale_of(uint32_t at, bool paired, uint32_t group) const {
    const uint32_t lane = threadIdx.x % CLB_WARP;
    if (K::KIND == CLB_KIND_FP8) {
      const float block = __uint_as_float(clb_read_shared_word(at + MANY_SCALES)) * CLB_FP8_SCALE;
      return clb_fp16::pack(block, block);
    }
    return clb_read_shared_word(at + MANY_SCALES + (paired ? lane / 4u * 8u + group * 4u : lane / 4u * 4u));
  }

  /* at: the row tile in the stage. */
  __device__ __forceinline__ uint4 operand(uint32_t at, uint32_t col) const {
    const bool paired = K::KIND == CLB_KIND_INT4 && CLB_FORMAT_GROUP(format) == 5u;
    const uint32_t group = col / (MANY_COLS / 2u);
    const uint4 raw = clb_read_shared(at + col / TILES * MANY_PIECE + threadIdx.x % CLB_WARP * 16u);
    clb_int4_zeros add;
    if (K::KIND == CLB_KIND_INT4 && (format & CLB_FORMAT_ZEROS) != 0u)
      add = clb_int4_zeros(clb_read_shared_word(at + MANY_ZEROS + clb_own_zeros(paired)), paired, group);
    const uint4 a = K::widen(raw, col % TILES, add.low, add.high);
    if (of_rows()) return a;
    const uint32_t both = scale_of(at, paired, group);
    const uint32_t low = __byte_perm(both, 0u, 0x1010u);
    const uint32_t high = __byte_perm(both, 0u, 0x3232u);
    return make_uint4(clb_half_multiply(a.x, low), clb_half_multiply(a.y, high), clb_half_multiply(a.z, low),
                      clb_half_multiply(a.w, high));
  }

  /* Scales of rows. */
  template <uint32_t STEPS, class Job>
  __device__ __forceinline__ void finish(const Job& job, const typename Job::unit& unit,
                                         float (&sum)[2][STEPS][4]) const {
    if (!of_rows()) return;
    const clb_packing pack(format, job.across * CLB_TILE);
#pragma unroll
    for (uint32_t r = 0u; r < 2u; r++) {
      const clb_many_matrix from = job.matrix(unit, clb_many_tile(r));
      if (from.base == 0u) continue;
      const unsigned char* const base = reinterpret_cast<const unsigned char*>(from.base);
      const uint32_t* const at =
          reinterpret_cast<const uint32_t*>(pack.scales(base, from.tiles, from.tile) + pack.own_scales());
      const float2 row = (K::KIND == CLB_KIND_FP8) ? make_float2(__uint_as_float(at[0]) * CLB_FP8_SCALE,
                                                                 __uint_as_float(at[1]) * CLB_FP8_SCALE)
                                                   : clb_fp16::unpack(at[0]);
#pragma unroll
      for (uint32_t s = 0u; s < STEPS; s++)
#pragma unroll
        for (uint32_t i = 0u; i < 4u; i++)
          sum[r][s][i] *= (i < 2u) ? row.x : row.y;
    }
  }
};

/* Pieces of `cols` column tiles, and of those before the stage that begins at column tile `tile`. */
CLB_DEVICE uint32_t clb_many_pieces(uint32_t cols, uint32_t format) {
  const uint32_t kind = CLB_FORMAT_KIND(format);
  const uint32_t log = (kind == CLB_KIND_HALF) ? 0u : (kind == CLB_KIND_INT4) ? 2u : 1u;
  return (cols + (1u << log) - 1u) >> log;
}

/* First piece of a row tile. */
CLB_DEVICE const unsigned char* clb_many_values(const clb_many_matrix& from, uint32_t across, uint32_t format) {
  if (from.base == 0u) return nullptr;
  return reinterpret_cast<const unsigned char*>(from.base) +
         (uint64_t)from.tile * clb_many_pieces(across, format) * MANY_PIECE;
}

#if CLB_WIDE

static_assert(MANY_STAGES * MANY_STAGE_BYTES + 1024u == CLB_MANY_WIDE_SHARED, "abi.h says what the host reserves");
#define MANY_COPY_THREADS (CLB_MANY_WIDE_THREADS - MANY_THREADS)
#define MANY_PASSES (MANY_ROWS * MANY_CHUNKS / MANY_COPY_THREADS) /* over the rows of a stage */

/* A stage of the ring and how often it came round. */
struct clb_many_stage {
  uint32_t base;
  uint32_t gates;
  uint32_t index;
  uint32_t round;

  __device__ __forceinline__ uint32_t at() const { return base + index * MANY_STAGE_BYTES; }
  __device__ __forceinline__ uint32_t full() const { return gates + index * 8u; }
  __device__ __forceinline__ uint32_t empty() const { return gates + (MANY_STAGES + index) * 8u; }
  __device__ __forceinline__ void next() {
    index = (index + 1u == MANY_STAGES) ? 0u : index + 1u;
    round ^= (index == 0u) ? 1u : 0u;
  }
};

/* By the threads that copy: all stages of all units of this block. */
template <bool QUANTISED, class Job>
CLB_DEVICE void clb_many_copy(const Job& job, clb_many_stage stage) {
  const uint32_t own = threadIdx.x - MANY_THREADS;
  const uint32_t chunk = own % MANY_CHUNKS;
  const uint32_t row = own / MANY_CHUNKS;
  constexpr uint32_t each = MANY_COPY_THREADS / MANY_CHUNKS;
  static_assert(each % 8u == 0u, "the rows of a thread have their chunk at the same place");
  /* Bulk copies: a warp issues one lane's at a time, so every warp takes some. */
  constexpr uint32_t each_warp = MANY_TILES / (MANY_COPY_THREADS / CLB_WARP);
  constexpr uint32_t each_tile = MANY_COPY_THREADS / MANY_TILES;
  const uint64_t row_bytes = (uint64_t)job.across * (CLB_TILE * 2u);
#pragma unroll 1
  for (uint32_t u = blockIdx.x; u < job.units; u += gridDim.x) {
    const typename Job::unit unit = job.unit_at(u);
    const uint32_t place = own % CLB_WARP < each_warp ? own / CLB_WARP * each_warp + own % CLB_WARP : MANY_TILES;
    const uint32_t format = QUANTISED ? job.format(unit) : 0u;
    clb_many_meta meta = {};
    if (QUANTISED) meta = clb_make_meta(job.matrix(unit, own / each_tile), job.across, format, own % each_tile);
    const unsigned char* weights =
        (place < MANY_TILES) ? clb_many_values(job.matrix(unit, place), job.across, format) : nullptr;
    const bool there = own < MANY_TILES && job.matrix(unit, own).base != 0u;
    const uint32_t tiles = (uint32_t)__popc(__ballot_sync(CLB_FULL_WARP, there)); /* in the first warp: of all */
    const unsigned char* rows[MANY_PASSES];
#pragma unroll
    for (uint32_t i = 0u; i < MANY_PASSES; i++)
      rows[i] = reinterpret_cast<const unsigned char*>(job.input) + chunk * 16u +
                (row + i * each < unit.rows ? job.input_row(unit, row + i * each) : 0u) * row_bytes;
#pragma unroll 1
    for (uint32_t tile = 0u; tile < job.across; tile += MANY_COLS) {
      const uint32_t cols = min(job.across - tile, MANY_COLS);
      const uint32_t bytes = clb_many_pieces(cols, format) * MANY_PIECE;
      clb_gate_wait(stage.empty(), stage.round ^ 1u);
      if (own == 0u) clb_gate_expect(stage.full(), tiles * bytes);
      if (weights != nullptr) {
        clb_copy_bulk(stage.at() + place * MANY_TILE_BYTES, weights, bytes, stage.full());
        weights += bytes;
      }
      if (QUANTISED) meta.copy(stage.at() + own / each_tile * MANY_TILE_BYTES, tile / MANY_COLS);
      if (chunk < cols * 2u) {
#pragma unroll
        for (uint32_t i = 0u; i < MANY_PASSES; i++)
          if (row + i * each < unit.rows)
            clb_copy_async(stage.at() + clb_many_chunk(row, chunk) + i * each * MANY_ROW_BYTES,
                           rows[i] + tile * (CLB_TILE * 2u));
      }
      clb_gate_arrive_after_copies(stage.full());
      stage.next();
    }
  }
}

/* Column tile `col` of the stage, whose operand A is `a`. */
template <uint32_t R, uint32_t STEPS>
CLB_DEVICE void clb_many_step(uint64_t rows, uint32_t col, const uint4 (&a)[R], float (&sum)[R][STEPS][4]) {
  const uint64_t b = rows + col * 2u; /* 32 bytes further */
#pragma unroll
  for (uint32_t r = 0u; r < R; r++) {
#pragma unroll
    for (uint32_t s = 0u; s + 8u <= STEPS; s += 8u)
      clb_wgmma_64(reinterpret_cast<float (&)[8][4]>(sum[r][s]), a[r], b + s * 64u);
    if (STEPS % 8u != 0u)
      clb_wgmma_32(reinterpret_cast<float (&)[4][4]>(sum[r][STEPS / 8u * 8u]), a[r], b + STEPS / 8u * 8u * 64u);
  }
}

/* The compiler does not know that wgmma writes its registers late: none of them is moved across this. */
template <uint32_t R, uint32_t STEPS>
CLB_DEVICE void clb_many_hold(float (&sum)[R][STEPS][4]) {
#pragma unroll
  for (uint32_t r = 0u; r < R; r++)
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++)
#pragma unroll
      for (uint32_t i = 0u; i < 4u; i++)
        clb_wgmma_hold(sum[r][s][i]);
}

/* Starts column tiles col, .. + COUNT - 1 of a stage, one group, once the group before the last is done: its operands A
   may be in the same registers. */
template <uint32_t COUNT, class Weights, uint32_t R, uint32_t STEPS>
CLB_DEVICE void clb_many_start(const clb_many_stage& stage, const Weights& weights, uint32_t col,
                               float (&sum)[R][STEPS][4]) {
  const uint64_t rows = clb_wgmma_rows(stage.at() + MANY_WEIGHT_BYTES);
  uint4 a[COUNT][R];
#pragma unroll
  for (uint32_t i = 0u; i < COUNT; i++)
#pragma unroll
    for (uint32_t r = 0u; r < R; r++)
      a[i][r] = weights.operand(stage.at() + clb_many_tile<R>(r) * MANY_TILE_BYTES, col + i);
  clb_wgmma_fence();
#pragma unroll
  for (uint32_t i = 0u; i < COUNT; i++)
    clb_many_step(rows, col + i, a[i], sum);
  clb_wgmma_commit();
  clb_wgmma_wait<1>();
}

/* The stage is there. What cp.async wrote is fenced here: its writers would wait for all their copies in flight. */
CLB_DEVICE void clb_many_await(const clb_many_stage& stage) {
  clb_gate_wait(stage.full(), stage.round);
  clb_fence_async();
}

/* The stage is read. */
CLB_DEVICE void clb_many_release(const clb_many_stage& stage) {
  if (threadIdx.x % CLB_WARP == 0u) clb_gate_arrive(stage.empty());
}

/* The product of a unit of at most 8 * STEPS rows: while a group of wgmma runs, the operands A of the next are read. */
template <class Weights, uint32_t R, uint32_t STEPS>
CLB_DEVICE void clb_many_multiply(clb_many_stage& stage, const Weights& weights, uint32_t across,
                                  float (&sum)[R][STEPS][4]) {
  clb_many_stage before = stage;
  clb_clear(sum);
  clb_many_hold(sum);
#pragma unroll 1
  for (uint32_t left = across; left >= MANY_COLS; left -= MANY_COLS) {
    clb_many_await(stage);
    clb_many_start<1u>(stage, weights, 0u, sum);
    if (left != across) clb_many_release(before);
    before = stage;
#pragma unroll
    for (uint32_t i = 1u; i < MANY_COLS; i++)
      clb_many_start<1u>(stage, weights, i, sum);
    stage.next();
  }
  clb_wgmma_wait<0>();
  clb_many_hold(sum);
  if (across >= MANY_COLS) clb_many_release(before);
  if (across % MANY_COLS == 0u) return;
  clb_many_await(stage);
#pragma unroll 1
  for (uint32_t i = 0u; i < across % MANY_COLS; i++) {
    clb_many_start<1u>(stage, weights, i, sum);
    clb_wgmma_wait<0>();
    clb_many_hold(sum);
  }
  clb_many_release(stage);
  stage.next();
}

template <class Weights, uint32_t R, uint32_t STEPS, class Job>
CLB_DEVICE void clb_many_unit(const Job& job, const typename Job::unit& unit, clb_many_stage& stage,
                              const float (&scale)[MANY_ROWS]) {
  float sum[R][STEPS][4];
  const Weights weights(job, unit);
  clb_many_multiply(stage, weights, job.across, sum);
  weights.finish(job, unit, sum);
  clb_many_barrier(); /* scale is there; what the unit before last left in shared memory is read */
  job.finish(unit, sum, scale);
}

template <class Weights, uint32_t R, class Job>
CLB_DEVICE void clb_many_any(const Job& job, const typename Job::unit& unit, clb_many_stage& stage,
                             const float (&scale)[MANY_ROWS]) {
  if (unit.rows > 96u) {
    clb_many_unit<Weights, R, 16u>(job, unit, stage, scale);
  } else if (unit.rows > 64u) {
    clb_many_unit<Weights, R, 12u>(job, unit, stage, scale);
  } else if (unit.rows > 32u) {
    clb_many_unit<Weights, R, 8u>(job, unit, stage, scale);
  } else {
    clb_many_unit<Weights, R, 4u>(job, unit, stage, scale);
  }
}

template <class W, class Job>
CLB_DEVICE void clb_many_run(const Job& job, const void* memory, clb_many_shared& shared) {
  clb_many_stage stage = {(clb_shared_address(memory) + 1023u) / 1024u * 1024u, clb_shared_address(shared.gates), 0u,
                          0u};
  if (threadIdx.x == 0u) {
    for (uint32_t i = 0u; i < MANY_STAGES; i++) {
      clb_gate_init(stage.gates + i * 8u, MANY_COPY_THREADS + 1u);
      clb_gate_init(stage.gates + (MANY_STAGES + i) * 8u, MANY_WARPS);
    }
    clb_fence_async();
  }
  __syncthreads();
  if (threadIdx.x >= MANY_THREADS) {
    clb_registers_give<72u>();
    clb_many_copy<W::KIND != CLB_KIND_HALF>(job, stage);
    return;
  }
  clb_registers_take<216u>();
  uint32_t turn = 0u;
#pragma unroll 1
  for (uint32_t u = blockIdx.x; u < job.units; u += gridDim.x, turn ^= 1u) {
    const typename Job::unit unit = job.unit_at(u);
    if (threadIdx.x < unit.rows) shared.scale[turn][threadIdx.x] = job.scale(unit, threadIdx.x);
    W::run(job, unit, stage, shared.scale[turn]);
  }
}

#else                                    /* mma.sync */

static_assert(MANY_STAGES * MANY_STAGE_BYTES == CLB_MANY_SHARED, "abi.h says what the host reserves");
#define MANY_STEPS (MANY_ROWS / 2u / 8u) /* of a warp */
#define MANY_PASSES (MANY_ROWS * MANY_CHUNKS / MANY_THREADS)

/* What a thread copies: its lane of row tile `warp` (NULL: nothing), and chunk threadIdx.x % 8 of rows threadIdx.x / 8,
   + 32 (NULL: nothing). */
struct clb_many_operands {
  const unsigned char* weights;
  const unsigned char* rows[MANY_PASSES];
  uint32_t format;
  clb_many_meta meta;
};

/* What a unit is multiplied from: the ring, and what comes into it. */
struct clb_many_stage {
  uint32_t base;
  clb_many_operands from;
};

CLB_DEVICE void clb_many_copy(const clb_many_operands& from, uint32_t stage, uint32_t tile, uint32_t across) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t chunk = threadIdx.x % MANY_CHUNKS;
  const uint32_t first = clb_many_pieces(tile, from.format);
  const uint32_t pieces = clb_many_pieces(min(across - tile, MANY_COLS), from.format);
#pragma unroll
  for (uint32_t i = 0u; i < MANY_COLS; i++)
    if (i < pieces && from.weights != nullptr)
      clb_copy_async(stage + (threadIdx.x / CLB_WARP * MANY_COLS + i) * MANY_PIECE + lane * 16u,
                     from.weights + (uint64_t)(first + i) * MANY_PIECE);
  from.meta.copy(stage + threadIdx.x / CLB_WARP * MANY_TILE_BYTES, tile / MANY_COLS);
#pragma unroll
  for (uint32_t i = 0u; i < MANY_PASSES; i++)
    if (tile + chunk / 2u < across && from.rows[i] != nullptr)
      clb_copy_async(stage + clb_many_chunk(threadIdx.x / MANY_CHUNKS + i * 32u, chunk),
                     from.rows[i] + tile * (CLB_TILE * 2u));
}

template <class Weights>
CLB_DEVICE void clb_many_step(uint32_t stage, const Weights& weights, uint32_t col, float (&sum)[2][MANY_STEPS][4]) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  uint4 a[2];
#pragma unroll
  for (uint32_t r = 0u; r < 2u; r++)
    a[r] = weights.operand(stage + clb_many_tile(r) * MANY_TILE_BYTES, col);
#pragma unroll
  for (uint32_t s = 0u; s < MANY_STEPS; s += 2u) {
    const uint32_t row = threadIdx.x / (4u * CLB_WARP) * (MANY_ROWS / 2u) + s * 8u + lane / 16u * 8u + lane % 8u;
    const uint4 b = clb_load_matrices(stage + clb_many_chunk(row, col * 2u + lane / 8u % 2u));
#pragma unroll
    for (uint32_t r = 0u; r < 2u; r++) {
      clb_mma_fp16(sum[r][s], a[r], b.x, b.y);
      clb_mma_fp16(sum[r][s + 1u], a[r], b.z, b.w);
    }
  }
}

/* Ends with a barrier. */
template <class Weights>
CLB_DEVICE void clb_many_multiply(uint32_t base, const clb_many_operands& from, const Weights& weights, uint32_t across,
                                  float (&sum)[2][MANY_STEPS][4]) {
  const uint32_t stages = (across + MANY_COLS - 1u) / MANY_COLS;
  clb_clear(sum);
#pragma unroll
  for (uint32_t i = 0u; i < MANY_STAGES - 1u; i++) {
    if (i < stages) clb_many_copy(from, base + i * MANY_STAGE_BYTES, i * MANY_COLS, across);
    clb_copies_end_group();
  }
#pragma unroll 1
  for (uint32_t i = 0u; i < stages; i++) {
    clb_copies_wait<MANY_STAGES - 2u>();
    __syncthreads();
    const uint32_t ahead = i + MANY_STAGES - 1u;
    if (ahead < stages) clb_many_copy(from, base + ahead % MANY_STAGES * MANY_STAGE_BYTES, ahead * MANY_COLS, across);
    clb_copies_end_group();
    for (uint32_t c = 0u; c < MANY_COLS && i * MANY_COLS + c < across; c++)
      clb_many_step(base + i % MANY_STAGES * MANY_STAGE_BYTES, weights, c, sum);
  }
  clb_copies_wait<0>();
  __syncthreads();
}

template <class Weights, uint32_t R, class Job>
CLB_DEVICE void clb_many_any(const Job& job, const typename Job::unit& unit, const clb_many_stage& stage,
                             const float (&scale)[MANY_ROWS]) {
  float sum[2][MANY_STEPS][4];
  const Weights weights(job, unit);
  clb_many_multiply(stage.base, stage.from, weights, job.across, sum);
  weights.finish(job, unit, sum);
  job.finish(unit, sum, scale);
}

template <class W, class Job>
CLB_DEVICE void clb_many_run(const Job& job, const void* memory, clb_many_shared& shared) {
  if (threadIdx.x >= MANY_THREADS) return; /* launched for the other form */
  const uint32_t row = threadIdx.x / MANY_CHUNKS;
  const uint64_t row_bytes = (uint64_t)job.across * (CLB_TILE * 2u);
  uint32_t turn = 0u;
#pragma unroll 1
  for (uint32_t u = blockIdx.x; u < job.units; u += gridDim.x, turn ^= 1u) {
    const typename Job::unit unit = job.unit_at(u);
    if (threadIdx.x < unit.rows) shared.scale[turn][threadIdx.x] = job.scale(unit, threadIdx.x);
    clb_many_stage stage = {clb_shared_address(memory), {}};
    clb_many_operands& from = stage.from;
    from.format = W::KIND != CLB_KIND_HALF ? job.format(unit) : 0u;
    if (W::KIND != CLB_KIND_HALF)
      from.meta =
          clb_make_meta(job.matrix(unit, threadIdx.x / CLB_WARP), job.across, from.format, threadIdx.x % CLB_WARP);
    from.weights = clb_many_values(job.matrix(unit, threadIdx.x / CLB_WARP), job.across, from.format);
    if (from.weights != nullptr) from.weights += threadIdx.x % CLB_WARP * 16u;
#pragma unroll
    for (uint32_t i = 0u; i < MANY_PASSES; i++)
      from.rows[i] = (row + i * 32u < unit.rows)
                         ? reinterpret_cast<const unsigned char*>(job.input) +
                               job.input_row(unit, row + i * 32u) * row_bytes + threadIdx.x % MANY_CHUNKS * 16u
                         : nullptr;
    W::run(job, unit, stage, shared.scale[turn]);
  }
}

#endif /* CLB_WIDE */

/* ------------------------------------------------------------------- the policies */

template <class P>
struct clb_many_pure {
  static constexpr uint32_t KIND = CLB_KIND_HALF;

  template <class Job>
  static __device__ __forceinline__ void run(const Job& job, const typename Job::unit& unit, clb_many_stage& stage,
                                             const float (&scale)[MANY_ROWS]) {
    if constexpr (Job::MAY_HALVE) {
      if (job.halved) {
        clb_many_any<clb_many_half<P>, 1u>(job, unit, stage, scale);
        return;
      }
    }
    clb_many_any<clb_many_half<P>, 2u>(job, unit, stage, scale);
  }
};

template <class K>
struct clb_many_of {
  static constexpr uint32_t KIND = K::KIND;

  template <class Job>
  static __device__ __forceinline__ void run(const Job& job, const typename Job::unit& unit, clb_many_stage& stage,
                                             const float (&scale)[MANY_ROWS]) {
    clb_many_any<clb_many_quant<K>, 2u>(job, unit, stage, scale);
  }
};

#endif /* CLB_MANY_CUH */
