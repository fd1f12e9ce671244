/*
 * few.cuh: the product of few rows, shared by linear.cu and experts.cu. Device code only.
 *
 * A group of 8 warps owns a tile of 16 rows of the weights at a time, or MATRICES of them; each warp takes a contiguous
 * slice of the column tiles, so a tile's 512-byte pieces arrive 8 streams wide. Every warp has a ring in shared memory:
 *
 *   ring of warp i: | stage 0: one piece of each of MATRICES | stage 1 | ... | stage STAGES - 1 |
 *
 * A lane copies its own 16 bytes of a piece with cp.async and later reads these same bytes, which are its operand A:
 * nobody else touches them, so the ring needs no barrier. The copies run STAGES - 1 stages ahead, across the borders of
 * tiles and experts: what comes next is said by a source, take(at) -> false at the end.
 *
 * The sum of one output: the column tiles of a warp in rising order, each high half, then low half; then the 8 warps in
 * order. MATRICES and STEPS (of 8 rows, at most 8) say how much is held at once and change no sum: operand B is read
 * once for all MATRICES, operand A once for all STEPS.
 */
#ifndef CLB_FEW_CUH
#define CLB_FEW_CUH

#include "device.cuh"

#define CLB_WARPS (CLB_MATMUL_THREADS / CLB_WARP) /* of a group */
#define CLB_PIECE 512u                            /* bytes of one tile of 16 x 16 */
#define CLB_STEP 8u                               /* rows of one mma */
/* Floats between the rows of a step in sums: writes and reads of a warp hit all banks. */
#define CLB_SUM_STRIDE 20u

/* This warp's number in its group. */
CLB_DEVICE uint32_t clb_group_warp() { return threadIdx.x / CLB_WARP % CLB_WARPS; }

/* The slice of `tiles` column tiles that this warp takes. */
struct clb_slice {
  uint32_t begin;
  uint32_t end;

  __device__ __forceinline__ explicit clb_slice(uint32_t tiles) {
    begin = clb_group_warp() * tiles / CLB_WARPS;
    end = (clb_group_warp() + 1u) * tiles / CLB_WARPS;
  }
};

template <uint32_t MATRICES, uint32_t STAGES>
struct clb_ring {
  static constexpr uint32_t bytes = CLB_WARPS * STAGES * MATRICES * CLB_PIECE; /* of a group */
  static constexpr uint32_t stage_bytes = MATRICES * CLB_PIECE;
  uint32_t base; /* this lane's first byte of stage 0 */
  uint32_t filled;
  uint32_t read;

  __device__ __forceinline__ explicit clb_ring(const void* memory) : filled(0u), read(0u) {
    base = clb_shared_address(memory) + threadIdx.x / CLB_WARP * (STAGES * stage_bytes) + threadIdx.x % CLB_WARP * 16u;
  }

  /* Start the copy of the source's next stage. false: it has none now. */
  template <class Source>
  __device__ __forceinline__ bool fill(Source& source) {
    const unsigned char* at[MATRICES];
    if (!source.take(at)) return false;
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++)
      clb_copy_async(base + filled * stage_bytes + m * CLB_PIECE, at[m]);
    clb_copies_end_group();
    filled = (filled + 1u == STAGES) ? 0u : filled + 1u;
    return true;
  }

  /* Up to STAGES - 1 stages; `started` counts them over several calls. */
  template <class Source>
  __device__ __forceinline__ void start(Source& source, uint32_t& started) {
#pragma unroll 1
    while (started < STAGES - 1u && fill(source))
      started++;
  }

  /* When the source has no more for now: groups must be STAGES - 1 before the first stage is read. */
  __device__ __forceinline__ void complete_start(uint32_t started) {
    for (; started < STAGES - 1u; started++)
      clb_copies_end_group();
  }

  /* Operand A of the next stage, once it is there; then refill the stage that was read before. */
  template <class Source>
  __device__ __forceinline__ void next(Source& source, uint4 (&a)[MATRICES]) {
    clb_copies_wait<STAGES - 2u>();
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++)
      a[m] = clb_read_shared(base + read * stage_bytes + m * CLB_PIECE);
    read = (read + 1u == STAGES) ? 0u : read + 1u;
    if (!fill(source)) clb_copies_end_group();
  }
};

/* Operand B, both halves: 16 bytes of a split row; offset NONE is a row of zeros. */
CLB_DEVICE uint4 clb_read_split(const uint32_t* input, uint32_t offset, uint32_t tile) {
  if (offset == CLB_NONE) return make_uint4(0u, 0u, 0u, 0u);
  return *reinterpret_cast<const uint4*>(input + offset + tile * CLB_TILE);
}

/* Operand B of a few column tiles, AHEAD of their use: of 8 tiles for one step, 4 for two, 2 for four, else 1. */
template <uint32_t STEPS>
struct clb_chunk {
  static constexpr uint32_t TILES = (STEPS >= 8u) ? 1u : 8u / STEPS;
  uint4 b[TILES][STEPS];

  /* offsets: words from `input` to this lane's part of the row that column lane / 4 of each step takes. */
  __device__ __forceinline__ void read(const uint32_t* input, const uint32_t (&offsets)[STEPS], uint32_t tile,
                                       uint32_t end) {
#pragma unroll
    for (uint32_t i = 0u; i < TILES; i++)
#pragma unroll
      for (uint32_t s = 0u; s < STEPS; s++)
        b[i][s] = clb_read_split(input, (tile + i < end) ? offsets[s] : CLB_NONE, tile + i);
  }
};

/* sum[m][s] = this warp's slice of matrix m times step s. `chunk` holds operand B of the slice's first column tiles,
   and afterwards again, for the next product over the same rows. */
template <class P, uint32_t MATRICES, uint32_t STEPS, uint32_t STAGES, class Source>
CLB_DEVICE void clb_multiply(clb_ring<MATRICES, STAGES>& ring, Source& source, const clb_slice& slice,
                             const uint32_t* input, const uint32_t (&offsets)[STEPS], clb_chunk<STEPS>& chunk,
                             float (&sum)[MATRICES][STEPS][4]) {
  constexpr uint32_t TILES = clb_chunk<STEPS>::TILES;
  clb_clear(sum);
#pragma unroll 1
  for (uint32_t tile = slice.begin; tile < slice.end; tile += TILES) {
    clb_chunk<STEPS> next;
    const bool last = tile + TILES >= slice.end;
    next.read(input, offsets, last ? slice.begin : tile + TILES, slice.end);
#pragma unroll
    for (uint32_t i = 0u; i < TILES; i++) {
      if (tile + i >= slice.end) break;
      uint4 a[MATRICES];
      ring.next(source, a);
#pragma unroll
      for (uint32_t m = 0u; m < MATRICES; m++)
#pragma unroll
        for (uint32_t s = 0u; s < STEPS; s++) {
          P::mma(sum[m][s], a[m], chunk.b[i][s].x, chunk.b[i][s].y);
          P::mma(sum[m][s], a[m], chunk.b[i][s].z, chunk.b[i][s].w);
        }
    }
    chunk = next;
  }
}

/* ------------------------------------------------------- from sums to results */

/* What the 8 warps have of up to SLOTS products of a tile and a step: of[parity][slot][warp][row of the step *
   CLB_SUM_STRIDE + row of the tile]. Two buffers, so that one barrier for SLOTS products is enough. */
template <uint32_t SLOTS>
struct clb_sums {
  float of[2][SLOTS][CLB_WARPS][CLB_STEP * CLB_SUM_STRIDE];

  __device__ __forceinline__ void put(uint32_t parity, uint32_t slot, const float (&c)[4]) {
    const uint32_t lane = threadIdx.x % CLB_WARP;
    float* to = of[parity][slot][clb_group_warp()] + lane % 4u * 2u * CLB_SUM_STRIDE + lane / 4u;
    to[0] = c[0];
    to[CLB_SUM_STRIDE] = c[1];
    to[8] = c[2];
    to[CLB_SUM_STRIDE + 8u] = c[3];
  }

  /* Of 64 threads that finish a product, thread i takes row i / 8 of the step and rows 2 (i % 8), + 1 of the tile. */
  template <class P>
  __device__ __forceinline__ float2 take(uint32_t parity, uint32_t slot) const {
    const uint32_t at = threadIdx.x % 64u / 8u * CLB_SUM_STRIDE + threadIdx.x % 8u * 2u;
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
    for (uint32_t w = 0u; w < CLB_WARPS; w++) {
      const float2 part = *reinterpret_cast<const float2*>(&of[parity][slot][w][at]);
      total.x += part.x;
      total.y += part.y;
    }
    return make_float2(total.x * (1.0f / P::scale), total.y * (1.0f / P::scale));
  }
};

/* Four pairs of warps of a group take turns at finishing products. */
CLB_DEVICE uint32_t clb_finisher() { return threadIdx.x % CLB_MATMUL_THREADS / 64u; }

/* --------------------------------------------------------- the residual stream */

/* Where a new residual goes: the stream itself, the next product's input, and its sums of squares. */
struct clb_stream {
  float* residual;        /* (T, cols) */
  const float* next_norm; /* (cols) */
  uint32_t* next_input;   /* (T, cols) split rows, or NULL */
  uint16_t* next_half;    /* (T, cols) half rows; with next_input NULL */
  float* next_sumsq;      /* (T, cols / 16), or one for CLB_HALF_SUM columns */
  uint32_t cols;
};

/* Write x at columns col and col + 1 (col even) of a row; norm: next_norm there. Whole warps call it; each 8 lanes that
   begin at a multiple of 8 hold the 16 columns of one tile of one row in order. `valid`: the row exists. */
template <class P>
CLB_DEVICE void clb_store_residual(const clb_stream& stream, uint32_t row, uint32_t col, float2 x, float2 norm,
                                   bool valid) {
  float square = x.x * x.x + x.y * x.y;
#pragma unroll
  for (uint32_t step = 1u; step < 8u; step *= 2u)
    square += __shfl_xor_sync(CLB_FULL_WARP, square, step);
  if (!valid) return;
  *reinterpret_cast<float2*>(stream.residual + (uint64_t)row * stream.cols + col) = x;
  clb_split_store<P>(stream.next_input + (uint64_t)row * stream.cols, col, x.x * norm.x, x.y * norm.y);
  if (threadIdx.x % 8u == 0u) stream.next_sumsq[(uint64_t)row * (stream.cols / CLB_TILE) + col / CLB_TILE] = square;
}

/* The same for a stream of half rows; each warp holds CLB_HALF_SUM columns of one row in order. */
CLB_DEVICE void clb_store_half_residual(const clb_stream& stream, uint32_t row, uint32_t col, float2 x, float2 norm,
                                        bool valid) {
  static_assert(CLB_HALF_SUM == 2u * CLB_WARP, "a sum is of one warp");
  const float square = clb_warp_sum(valid ? x.x * x.x + x.y * x.y : 0.0f);
  if (!valid) return;
  const uint64_t first = (uint64_t)row * stream.cols;
  *reinterpret_cast<float2*>(stream.residual + first + col) = x;
  *reinterpret_cast<uint32_t*>(stream.next_half + first + col) = clb_half_pair(x.x * norm.x, x.y * norm.y);
  const uint32_t sums = (stream.cols + CLB_HALF_SUM - 1u) / CLB_HALF_SUM;
  if (threadIdx.x % CLB_WARP == 0u) stream.next_sumsq[(uint64_t)row * sums + col / CLB_HALF_SUM] = square;
}

/* One or the other. */
template <class P>
CLB_DEVICE void clb_store_either(const clb_stream& stream, uint32_t row, uint32_t col, float2 x, float2 norm,
                                 bool valid) {
  if (stream.next_input != nullptr) {
    clb_store_residual<P>(stream, row, col, x, norm, valid);
  } else {
    clb_store_half_residual(stream, row, col, x, norm, valid);
  }
}

CLB_DEVICE float2 clb_read_pair(const float* at, bool there) {
  return there ? *reinterpret_cast<const float2*>(at) : make_float2(0.0f, 0.0f);
}

#endif /* CLB_FEW_CUH */
