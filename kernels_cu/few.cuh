/*
 * few.cuh: the product of few rows, shared by linear.cu and experts.cu. Device code only.
 *
 * A block of 8 warps owns a tile of 16 rows of the weights at a time; each warp takes a contiguous slice of the column
 * tiles, so a tile's 512-byte pieces arrive 8 streams wide. Every warp has a ring in shared memory:
 *
 *   ring of warp i: | stage 0: one piece of each of MATRICES | stage 1 | ... | stage STAGES - 1 |
 *
 * A lane copies its own 16 bytes of a piece with cp.async and later reads these same bytes, which are its operand A:
 * nobody else touches them, so the ring needs no barrier. The copies run STAGES - 1 stages ahead, across the borders of
 * tiles and experts: what comes next is said by a source, take(at) -> false at the end.
 *
 * The sum of one output: the column tiles of a warp in rising order, each high half, then low half; then the 8 warps in
 * order. STEPS (of 8 rows, at most 8) is how many of them are held at once and changes no sum.
 */
#ifndef CLB_FEW_CUH
#define CLB_FEW_CUH

#include "device.cuh"

#define CLB_WARPS (CLB_MATMUL_THREADS / CLB_WARP)
#define CLB_PIECE 512u /* bytes of one tile of 16 x 16 */
#define CLB_STEP 8u    /* rows of one mma */
/* Floats between the rows of a step in sums: writes and reads of a warp hit all banks. */
#define CLB_SUM_STRIDE 20u

/* The slice of `tiles` column tiles that this warp takes. */
struct clb_slice {
  uint32_t begin;
  uint32_t end;

  __device__ __forceinline__ explicit clb_slice(uint32_t tiles) {
    const uint32_t warp = threadIdx.x / CLB_WARP;
    begin = warp * tiles / CLB_WARPS;
    end = (warp + 1u) * tiles / CLB_WARPS;
  }
};

template <uint32_t MATRICES, uint32_t STAGES>
struct clb_ring {
  static constexpr uint32_t bytes = CLB_WARPS * STAGES * MATRICES * CLB_PIECE;
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

/* sum[m][s] += this warp's slice of matrix m times step s. offsets: words from `input` to this lane's part of the row
   that column lane / 4 of each step takes. */
template <class P, uint32_t STEPS, uint32_t MATRICES, uint32_t STAGES, class Source>
CLB_DEVICE void clb_multiply(clb_ring<MATRICES, STAGES>& ring, Source& source, const clb_slice& slice,
                             const uint32_t* input, const uint32_t (&offsets)[STEPS],
                             float (&sum)[MATRICES][STEPS][4]) {
  constexpr uint32_t AHEAD = 8u / STEPS; /* column tiles whose B is loaded at once: 8 loads in flight */
#pragma unroll
  for (uint32_t m = 0u; m < MATRICES; m++)
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++)
#pragma unroll
      for (uint32_t i = 0u; i < 4u; i++)
        sum[m][s][i] = 0.0f;
#pragma unroll 1
  for (uint32_t tile = slice.begin; tile < slice.end; tile += AHEAD) {
    uint4 b[AHEAD][STEPS];
#pragma unroll
    for (uint32_t i = 0u; i < AHEAD; i++)
#pragma unroll
      for (uint32_t s = 0u; s < STEPS; s++)
        b[i][s] = clb_read_split(input, (tile + i < slice.end) ? offsets[s] : CLB_NONE, tile + i);
#pragma unroll
    for (uint32_t i = 0u; i < AHEAD; i++) {
      if (tile + i >= slice.end) break;
      uint4 a[MATRICES];
      ring.next(source, a);
#pragma unroll
      for (uint32_t m = 0u; m < MATRICES; m++)
#pragma unroll
        for (uint32_t s = 0u; s < STEPS; s++) {
          P::mma(sum[m][s], a[m], b[i][s].x, b[i][s].y);
          P::mma(sum[m][s], a[m], b[i][s].z, b[i][s].w);
        }
    }
  }
}

/* ------------------------------------------------------- from sums to results */

/* What the 8 warps have of one step: sums[parity][matrix][warp][row of the step * CLB_SUM_STRIDE + row of the tile].
   Two buffers, so that one barrier a step is enough. */
template <uint32_t MATRICES>
struct clb_step_sums {
  float of[2][MATRICES][CLB_WARPS][CLB_STEP * CLB_SUM_STRIDE];
};

template <uint32_t MATRICES>
CLB_DEVICE void clb_put_sums(clb_step_sums<MATRICES>& sums, uint32_t parity, uint32_t matrix, const float (&c)[4]) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  float* to = sums.of[parity][matrix][threadIdx.x / CLB_WARP] + lane % 4u * 2u * CLB_SUM_STRIDE + lane / 4u;
  to[0] = c[0];
  to[CLB_SUM_STRIDE] = c[1];
  to[8] = c[2];
  to[CLB_SUM_STRIDE + 8u] = c[3];
}

/* Of the 64 threads that finish a step, thread i takes row i / 8 of the step and rows 2 (i % 8), + 1 of the tile. */
template <class P, uint32_t MATRICES>
CLB_DEVICE float2 clb_take_sums(const clb_step_sums<MATRICES>& sums, uint32_t parity, uint32_t matrix) {
  const uint32_t at = threadIdx.x % 64u / 8u * CLB_SUM_STRIDE + threadIdx.x % 8u * 2u;
  float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
  for (uint32_t w = 0u; w < CLB_WARPS; w++) {
    const float2 part = *reinterpret_cast<const float2*>(&sums.of[parity][matrix][w][at]);
    total.x += part.x;
    total.y += part.y;
  }
  return make_float2(total.x * (1.0f / P::scale), total.y * (1.0f / P::scale));
}

/* The four pairs of warps take turns at finishing steps. */
CLB_DEVICE bool clb_finishes(uint32_t step) { return threadIdx.x / 64u == step % 4u; }

/* --------------------------------------------------------- the residual stream */

/* Where a new residual goes: the stream itself, the next product's input, and its sums of squares. */
struct clb_stream {
  float* residual;        /* (T, cols) */
  const float* next_norm; /* (cols) */
  uint32_t* next_input;   /* (T, cols) split rows */
  float* next_sumsq;      /* (T, cols / 16) */
  uint32_t cols;
};

/* Write x at columns col and col + 1 (col even) of a row. Whole warps call it; each 8 lanes that begin at a multiple of
   8 hold the 16 columns of one tile of one row in order. `valid`: the row exists. */
template <class P>
CLB_DEVICE void clb_store_residual(const clb_stream& stream, uint32_t row, uint32_t col, float2 x, bool valid) {
  float square = x.x * x.x + x.y * x.y;
#pragma unroll
  for (uint32_t step = 1u; step < 8u; step *= 2u)
    square += __shfl_xor_sync(CLB_FULL_WARP, square, step);
  if (!valid) return;
  const uint64_t at = (uint64_t)row * stream.cols + col;
  const float2 norm = *reinterpret_cast<const float2*>(stream.next_norm + col);
  *reinterpret_cast<float2*>(stream.residual + at) = x;
  clb_split_store<P>(stream.next_input + (uint64_t)row * stream.cols, col, x.x * norm.x, x.y * norm.y);
  if (threadIdx.x % 8u == 0u) stream.next_sumsq[(uint64_t)row * (stream.cols / CLB_TILE) + col / CLB_TILE] = square;
}

#endif /* CLB_FEW_CUH */
