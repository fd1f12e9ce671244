/*
 * linear_wide.cu: a matrix of many row tiles over 9 to 64 rows: the head.
 *
 * Operation  clb_linear_wide_{bf16,fp16}: see clb_matmul_args in abi.h. The bits of clb_linear.
 * Reference  tests/cuda/test_linear.py (numpy, float64).
 * Grid       blocks of 256 threads, at most one a multiprocessor, each taking an equal share of the row tiles. Dynamic
 *            shared memory CLB_LINEAR_WIDE_SHARED.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   2 * rows * cols bytes of weights: head of Qwen3-30B (151,936 x 2,048): 145 us at 4.3 TB/s; but every
 *            block reads operand B once for each of its passes, rows * cols * 4 bytes out of L2: a seventh of the
 *            weights at 32 rows. Target there: 160 us. Measured (H200, 2026-11-30): 152, 165 and 307 us at 16, 32 and
 *            64 rows; clb_linear, which reads operand B for every 64 rows of weights, takes 245 us at 32.
 *
 * A warp takes MATRICES row tiles at a time and all columns; operand B comes in chunks through shared memory, for all
 * warps:
 *
 *   | ring of warp 0 | ... | ring of warp 7 | chunk, chunk of operand B | results: one tile a warp and matrix |
 */
#include "linear.cuh"

#define CHUNK 8u        /* column tiles of operand B that are staged together */
#define CHUNK_TILE 576u /* bytes of one of them and 8 rows: 512, and 64 so that writes hit all banks */

/* How much is held at once at up to 8 * STEPS rows. */
template <uint32_t MATRICES_, uint32_t STEPS_>
struct shape {
  static constexpr uint32_t MATRICES = MATRICES_;
  static constexpr uint32_t STEPS = STEPS_;
  static constexpr uint32_t CHUNK_BYTES = CHUNK * STEPS * CHUNK_TILE;
  static constexpr uint32_t RESULT_BYTES = STEPS * 512u; /* of a tile from one block */
  static constexpr uint32_t RESULTS = CLB_WARPS * MATRICES;
  static constexpr uint32_t RING_BYTES = (CLB_LINEAR_WIDE_SHARED - 2u * CHUNK_BYTES - RESULTS * RESULT_BYTES) /
                                         (CLB_WARPS * MATRICES * CLB_PIECE) * (CLB_WARPS * MATRICES * CLB_PIECE);
  static constexpr uint32_t STAGES = RING_BYTES / (CLB_WARPS * MATRICES * CLB_PIECE);
};

/* The first column tile of a slice of few.cuh. */
CLB_DEVICE uint32_t slice_begin(uint32_t slice, uint32_t tiles) { return slice * tiles / CLB_WARPS; }

/* The row tiles of this block. */
struct share {
  uint32_t begin;
  uint32_t end;

  __device__ __forceinline__ explicit share(const clb_matmul_args& a) {
    const uint64_t tiles = clb_row_tiles(a);
    begin = (uint32_t)(tiles * blockIdx.x / gridDim.x);
    end = (uint32_t)(tiles * (blockIdx.x + 1u) / gridDim.x);
  }
};

/* The pieces of this warp: its row tiles of a pass side by side, their columns in order, then the next pass. */
template <uint32_t MATRICES>
struct pass_source {
  const unsigned char* at; /* this lane's bytes of the next piece of the warp's first row tile */
  uint64_t across;         /* bytes from a row tile to the warp's next one */
  uint64_t jump;           /* from the end of the columns to the next pass */
  uint32_t pieces;
  uint32_t piece;
  uint32_t tile; /* the warp's first */
  uint32_t end;

  __device__ __forceinline__ pass_source(const clb_matmul_args& a, const share& mine) {
    const uint64_t row = (uint64_t)(a.cols / CLB_TILE) * CLB_PIECE;
    pieces = a.cols / CLB_TILE;
    piece = 0u;
    tile = mine.begin + threadIdx.x / CLB_WARP;
    end = mine.end;
    across = CLB_WARPS * row;
    jump = MATRICES * across - (uint64_t)pieces * CLB_PIECE;
    at = reinterpret_cast<const unsigned char*>(a.weights) + tile * row + threadIdx.x % CLB_WARP * 16u;
  }

  /* Row tiles beyond the last are the first again; nobody reads their sums. */
  __device__ __forceinline__ bool take(const unsigned char* (&next)[MATRICES]) {
    if (tile >= end) return false;
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++)
      next[m] = (tile + m * CLB_WARPS < end) ? at + m * across : at;
    at += CLB_PIECE;
    piece++;
    if (piece == pieces) {
      piece = 0u;
      at += jump;
      tile += MATRICES * CLB_WARPS;
    }
    return true;
  }
};

/* Operand B of a chunk on its way through registers: 16 bytes of STEPS rows a thread. */
template <uint32_t STEPS>
struct staged {
  uint4 part[STEPS];

  __device__ __forceinline__ void read(const clb_matmul_args& a, const uint32_t (&from)[STEPS], uint32_t tile,
                                       uint32_t end) {
    const uint32_t mine = tile + threadIdx.x / 4u % CHUNK;
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++)
      part[s] = clb_read_split(a.input, (mine < end) ? from[s] : CLB_NONE, mine);
  }
  __device__ __forceinline__ void write(uint32_t to) const {
    const uint32_t at =
        to + threadIdx.x / 4u % CHUNK * (STEPS * CHUNK_TILE) + threadIdx.x / CLB_WARP * 64u + threadIdx.x % 4u * 16u;
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++)
      clb_write_shared(at + s * CHUNK_TILE, part[s]);
  }
};

/* Sums of MATRICES row tiles and STEPS times 8 rows: of the slice under way, and of the slices before it. */
template <uint32_t MATRICES, uint32_t STEPS>
struct running {
  float slice[MATRICES][STEPS][4];
  float total[MATRICES][STEPS][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t i = 0u; i < MATRICES * STEPS * 4u; i++)
      slice[i / (STEPS * 4u)][i / 4u % STEPS][i % 4u] = total[i / (STEPS * 4u)][i / 4u % STEPS][i % 4u] = 0.0f;
  }
  __device__ __forceinline__ void end_slice() {
#pragma unroll
    for (uint32_t i = 0u; i < MATRICES * STEPS * 4u; i++) {
      total[i / (STEPS * 4u)][i / 4u % STEPS][i % 4u] += slice[i / (STEPS * 4u)][i / 4u % STEPS][i % 4u];
      slice[i / (STEPS * 4u)][i / 4u % STEPS][i % 4u] = 0.0f;
    }
  }
};

template <class P, uint32_t MATRICES, uint32_t STEPS>
CLB_DEVICE void multiply_tile(running<MATRICES, STEPS>& sum, const uint4 (&a)[MATRICES], uint32_t chunk_tile) {
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint4 b = clb_read_shared(chunk_tile + s * CHUNK_TILE + threadIdx.x % CLB_WARP * 16u);
#pragma unroll
    for (uint32_t m = 0u; m < MATRICES; m++) {
      P::mma(sum.slice[m][s], a[m], b.x, b.y);
      P::mma(sum.slice[m][s], a[m], b.z, b.w);
    }
  }
}

/* The sums of a pass to where other threads finish them, in the order of operand C. */
template <class S>
CLB_DEVICE void put_results(const running<S::MATRICES, S::STEPS>& sum, float* results) {
#pragma unroll
  for (uint32_t m = 0u; m < S::MATRICES; m++) {
    float* const to = results + (m * CLB_WARPS + threadIdx.x / CLB_WARP) * (S::RESULT_BYTES / 4u);
#pragma unroll
    for (uint32_t s = 0u; s < S::STEPS; s++)
      *reinterpret_cast<float4*>(to + s * 128u + threadIdx.x % CLB_WARP * 4u) =
          make_float4(sum.total[m][s][0], sum.total[m][s][1], sum.total[m][s][2], sum.total[m][s][3]);
  }
}

/* Element (row of the tile, row of the input) of a result, in the order of operand C. */
CLB_DEVICE uint32_t result_at(uint32_t tile_row, uint32_t row) {
  return row / 8u * 128u + (tile_row % 8u * 4u + row % 8u / 2u) * 4u + row % 2u + tile_row / 8u * 2u;
}

/* The results of a pass: 8 threads a row of the input, two rows of the matrix each. */
template <class P, class S>
CLB_DEVICE void finish_results(const clb_matmul_args& a, uint32_t first, uint32_t tiles, const float* results,
                               const float* scale, uint32_t count) {
  constexpr uint32_t rows = S::STEPS * CLB_STEP;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < tiles * rows * 8u; i += CLB_MATMUL_THREADS) {
    const uint32_t index = i / (rows * 8u);
    const uint32_t row = i / 8u % rows;
    const uint32_t pair = i % 8u * 2u;
    const uint32_t col = (first + index) * CLB_TILE + pair;
    const bool valid = row < count;
    clb_finish_inputs in = clb_finish_weights(a, col);
    clb_finish_residual(a, row, col, valid && col < a.rows, in);
    const float* part = results + index * (S::RESULT_BYTES / 4u);
    const float factor = scale[row] * (1.0f / P::scale);
    const float2 y = make_float2(part[result_at(pair, row)] * factor, part[result_at(pair + 1u, row)] * factor);
    clb_finish<P>(a, row, col, y, in, valid);
  }
}

template <class P, class S>
CLB_DEVICE void linear_wide(const clb_matmul_args& a, const share& mine, uint4* memory, float* scale, uint32_t count) {
  constexpr uint32_t STEPS = S::STEPS;
  pass_source<S::MATRICES> source(a, mine);
  clb_ring<S::MATRICES, S::STAGES> ring(memory);
  uint32_t started = 0u;
  ring.start(source, started);
  ring.complete_start(started);
  const uint32_t chunks = clb_shared_address(memory) + S::RING_BYTES;
  float* const results = reinterpret_cast<float*>(memory) + (S::RING_BYTES + 2u * S::CHUNK_BYTES) / 4u;
  const uint32_t warp = threadIdx.x / CLB_WARP;
  const uint32_t across = a.cols / CLB_TILE;
  clb_wait_for_inputs();
  clb_release_dependents();
  uint32_t from[STEPS];
  float squares[STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint32_t row = s * CLB_STEP + warp;
    from[s] = (row < count) ? clb_input_row(a, row) * a.cols + threadIdx.x % 4u * 4u : CLB_NONE;
  }
  staged<STEPS> next;
  next.read(a, from, 0u, across);
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++)
    squares[s] = (s * CLB_STEP + warp < count) ? clb_input_squares(a, s * CLB_STEP + warp) : 0.0f;
  uint32_t parity = 0u;
#pragma unroll 1
  for (uint32_t first = mine.begin; first < mine.end; first += S::RESULTS) {
    running<S::MATRICES, STEPS> sum;
    sum.clear();
    uint32_t slice = 0u;
    uint32_t border = slice_begin(1u, across);
#pragma unroll 1
    for (uint32_t at = 0u; at < across; at += CHUNK) {
      const uint32_t chunk = chunks + parity * S::CHUNK_BYTES;
      next.write(chunk);
      __syncthreads();
      next.read(a, from, (at + CHUNK < across) ? at + CHUNK : 0u, across);
#pragma unroll 1
      for (uint32_t i = 0u; i < CHUNK && at + i < across; i++) {
        for (; border == at + i; border = slice_begin(++slice + 1u, across))
          sum.end_slice();
        uint4 weights[S::MATRICES];
        ring.next(source, weights);
        multiply_tile<P>(sum, weights, chunk + i * (STEPS * CHUNK_TILE));
      }
      parity ^= 1u;
    }
    sum.end_slice();
    if (first == mine.begin) {
#pragma unroll
      for (uint32_t s = 0u; s < STEPS; s++) {
        const float norm = clb_input_scale(a, squares[s]);
        if (threadIdx.x % CLB_WARP == 0u) scale[s * CLB_STEP + warp] = norm;
      }
    }
    put_results<S>(sum, results);
    __syncthreads();
    finish_results<P, S>(a, first, min(S::RESULTS, mine.end - first), results, scale, count);
  }
  clb_copies_wait<0>();
}

/* *row_count may be read before the wait: it was there before the step began. */
template <class P>
CLB_DEVICE void linear_of(const clb_matmul_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ float scale[CLB_FEW_ROWS]; /* norm(t) */
  const uint32_t count = min(__ldcg(a.row_count), CLB_FEW_ROWS);
  const share mine(a);
  if (count > 32u) {
    linear_wide<P, shape<2u, 8u>>(a, mine, memory, scale, count);
  } else if (count > 16u) {
    linear_wide<P, shape<3u, 4u>>(a, mine, memory, scale, count);
  } else {
    linear_wide<P, shape<3u, 2u>>(a, mine, memory, scale, count);
  }
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS)
    clb_linear_wide_bf16(const __grid_constant__ clb_matmul_args a) {
  linear_of<clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS)
    clb_linear_wide_fp16(const __grid_constant__ clb_matmul_args a) {
  linear_of<clb_fp16>(a);
}
