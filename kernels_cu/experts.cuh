/*
 * experts.cuh: which rows each expert has, and the units of gate and up, for the few-row kernels of experts. Device
 * code only.
 *
 * No permutation pass: every block finds the rows of each expert from the (T, K) indices. An expert in use is an item;
 * items are numbered by rising expert, and the places (t * K + rank) of an item are in a row, by rising t.
 */
#ifndef CLB_EXPERTS_CUH
#define CLB_EXPERTS_CUH

#include "few.cuh"

#define CLB_PASS_STEPS 4u /* steps of 8 rows that are held at once; more rows take the weights again, out of L2 */

/* MOST_ROWS: 8 or 64. */
template <uint32_t MOST_ROWS>
struct clb_choices {
  static constexpr uint32_t WORDS = (MOST_ROWS + 31u) / 32u;
  static constexpr uint32_t PLACES = MOST_ROWS * CLB_ROUTER_MAX_K;
  static constexpr uint32_t EACH = (PLACES + CLB_MATMUL_THREADS - 1u) / CLB_MATMUL_THREADS;

  uint32_t rows[CLB_ROUTER_MAX_EXPERTS][WORDS]; /* bit t: row t chose the expert */
  uint16_t first[CLB_ROUTER_MAX_EXPERTS];       /* of its places */
  uint16_t item_expert[CLB_ROUTER_MAX_EXPERTS];
  uint16_t places[PLACES]; /* by expert, then row */
  uint32_t items;

  /* Of `count` places those of this thread, kept in registers between the two passes over them. */
  struct own {
    uint32_t expert[EACH];

    /* Past L1: they may come from before the predecessor. */
    __device__ __forceinline__ own(const uint32_t* indices, uint32_t count) {
#pragma unroll
      for (uint32_t i = 0u; i < EACH; i++) {
        const uint32_t place = threadIdx.x + i * CLB_MATMUL_THREADS;
        expert[i] = (place < count) ? __ldcg(indices + place) : CLB_NONE;
      }
    }
  };

  __device__ __forceinline__ void clear(uint32_t experts) {
    for (uint32_t i = threadIdx.x; i < experts; i += CLB_MATMUL_THREADS)
#pragma unroll
      for (uint32_t w = 0u; w < WORDS; w++)
        rows[i][w] = 0u;
  }

  __device__ __forceinline__ uint32_t rows_of(uint32_t expert) const {
    uint32_t count = 0u;
#pragma unroll
    for (uint32_t w = 0u; w < WORDS; w++)
      count += (uint32_t)__popc(rows[expert][w]);
    return count;
  }

  /* After clear and a barrier; ends with a barrier. */
  __device__ __forceinline__ void fill(const own& mine, uint32_t k_max, uint32_t experts) {
#pragma unroll
    for (uint32_t i = 0u; i < EACH; i++) {
      if (mine.expert[i] == CLB_NONE) continue;
      const uint32_t row = (threadIdx.x + i * CLB_MATMUL_THREADS) / k_max;
      atomicOr(&rows[mine.expert[i]][row / 32u], 1u << row % 32u);
    }
    __syncthreads();
    if (threadIdx.x < CLB_WARP) number(experts);
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0u; i < EACH; i++) {
      const uint32_t expert = mine.expert[i];
      if (expert == CLB_NONE) continue;
      const uint32_t place = threadIdx.x + i * CLB_MATMUL_THREADS;
      const uint32_t row = place / k_max;
      uint32_t earlier = 0u;
#pragma unroll
      for (uint32_t w = 0u; w < WORDS; w++) {
        const uint32_t below = (row / 32u > w) ? CLB_FULL_WARP : (row / 32u < w) ? 0u : (1u << row % 32u) - 1u;
        earlier += (uint32_t)__popc(rows[expert][w] & below);
      }
      places[first[expert] + earlier] = (uint16_t)place;
    }
    __syncthreads();
  }

 private:
  /* Numbers the experts in use and gives each its part of `places`; by one warp, a lane a range of experts. */
  __device__ __forceinline__ void number(uint32_t experts) {
    const uint32_t lane = threadIdx.x;
    const uint32_t each = (experts + CLB_WARP - 1u) / CLB_WARP;
    const uint32_t begin = min(lane * each, experts);
    const uint32_t end = min(begin + each, experts);
    uint32_t own = 0u; /* experts in use above bit 16, assignments below: at most 1,024 */
    for (uint32_t e = begin; e < end; e++) {
      const uint32_t count = rows_of(e);
      own += count + ((count > 0u) ? 65536u : 0u);
    }
    const uint32_t sum = clb_warp_prefix(own, lane);
    uint32_t at = sum - own;
    for (uint32_t e = begin; e < end; e++) {
      const uint32_t count = rows_of(e);
      first[e] = (uint16_t)at;
      if (count > 0u) item_expert[at >> 16] = (uint16_t)e;
      at += count + ((count > 0u) ? 65536u : 0u);
    }
    if (lane == CLB_WARP - 1u) items = sum >> 16;
  }
};

/* ------------------------------------------------- two matrices as a stream */

/* The ring of few.cuh for two matrices, with less to do a stage. A source has `at`, this lane's bytes of the next piece
   of each, `left`, how many there are in a row, and open(), which finds the next ones: false if there are none now. */
template <uint32_t STAGES>
struct clb_pair_ring {
  static constexpr uint32_t stage_bytes = 2u * CLB_PIECE;
  static constexpr uint32_t bytes = CLB_WARPS * STAGES * stage_bytes; /* of a group */
  uint32_t first;                                                     /* this lane's bytes of stage 0 */
  uint32_t read;                                                      /* of the stage that is read next */
  uint32_t fill;                                                      /* of the one that is filled next */

  __device__ __forceinline__ explicit clb_pair_ring(const void* memory) {
    first = clb_shared_address(memory) + threadIdx.x / CLB_WARP * (STAGES * stage_bytes) + threadIdx.x % CLB_WARP * 16u;
    read = first;
    fill = first;
  }

  __device__ __forceinline__ uint32_t after(uint32_t stage) const {
    return (stage == first + (STAGES - 1u) * stage_bytes) ? first : stage + stage_bytes;
  }

  template <class Source>
  __device__ __forceinline__ bool refill(Source& source) {
    if (source.left == 0u && !source.open()) return false;
    clb_copy_async(fill, source.at[0]);
    clb_copy_async(fill + CLB_PIECE, source.at[1]);
    source.at[0] += CLB_PIECE;
    source.at[1] += CLB_PIECE;
    source.left--;
    fill = after(fill);
    return true;
  }

  /* Up to STAGES - 1 stages; `started` counts them over several calls. */
  template <class Source>
  __device__ __forceinline__ void start(Source& source, uint32_t& started) {
    while (started < STAGES - 1u && refill(source)) {
      clb_copies_end_group();
      started++;
    }
  }

  /* Groups must be STAGES - 1 before the first stage is read. */
  __device__ __forceinline__ void complete_start(uint32_t started) {
    for (; started < STAGES - 1u; started++)
      clb_copies_end_group();
  }

  /* Operand A of both, once it is there; then refill the stage that was read before. */
  template <class Source>
  __device__ __forceinline__ void next(Source& source, uint4 (&a)[2]) {
    clb_copies_wait<STAGES - 2u>();
    a[0] = clb_read_shared(read);
    a[1] = clb_read_shared(read + CLB_PIECE);
    read = after(read);
    (void)refill(source);
    clb_copies_end_group();
  }
};

/* Operand B of a step: where this lane reads its part of its row, at the warp's first column tile; or no row. */
struct clb_operand {
  const uint32_t* at;
  bool there;
};

/* sum[m][s] = `tiles` column tiles of matrix m times step s. Operand B is read TILES column tiles ahead: of one step
   ONE_AHEAD. */
template <class P, uint32_t STEPS, uint32_t ONE_AHEAD = 4u, uint32_t STAGES, class Source>
CLB_DEVICE void clb_multiply_pair(clb_pair_ring<STAGES>& ring, Source& source, uint32_t tiles,
                                  clb_operand (&rows)[STEPS], float (&sum)[2][STEPS][4]) {
  constexpr uint32_t TILES = (STEPS == 1u) ? ONE_AHEAD : 8u / STEPS;
  uint4 b[TILES][STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
#pragma unroll
    for (uint32_t i = 0u; i < TILES; i++) {
      b[i][s] = make_uint4(0u, 0u, 0u, 0u);
      if (rows[s].there && i < tiles) b[i][s] = *reinterpret_cast<const uint4*>(rows[s].at + i * CLB_TILE);
    }
#pragma unroll
    for (uint32_t i = 0u; i < 4u; i++)
      sum[0][s][i] = sum[1][s][i] = 0.0f;
  }
#pragma unroll 1
  for (uint32_t left = tiles; left > 0u;) {
#pragma unroll
    for (uint32_t i = 0u; i < TILES; i++) {
      if (left == 0u) break;
      left--;
      uint4 a[2];
      ring.next(source, a);
#pragma unroll
      for (uint32_t s = 0u; s < STEPS; s++) {
        P::mma(sum[0][s], a[0], b[i][s].x, b[i][s].y);
        P::mma(sum[1][s], a[1], b[i][s].x, b[i][s].y);
        P::mma(sum[0][s], a[0], b[i][s].z, b[i][s].w);
        P::mma(sum[1][s], a[1], b[i][s].z, b[i][s].w);
        if (left >= TILES && rows[s].there)
          b[i][s] = *reinterpret_cast<const uint4*>(rows[s].at + (i + TILES) * CLB_TILE);
      }
    }
#pragma unroll
    for (uint32_t s = 0u; s < STEPS; s++)
      rows[s].at += TILES * CLB_TILE;
  }
}

CLB_DEVICE uint32_t clb_passes_of(uint32_t rows, uint32_t pass_rows) { return (rows + pass_rows - 1u) / pass_rows; }

/* A unit of gate and up. Units are dealt round to the blocks: first the row tiles of the shared expert, then those of
 * each item. */
struct gate_up_unit {
  uint32_t item; /* NONE: the shared expert */
  uint32_t row_tile;

  __device__ __forceinline__ explicit gate_up_unit(const clb_expert_gate_up_args& a) : item(CLB_NONE) {
    row_tile = blockIdx.x;
    leave_shared(a);
  }

  __device__ __forceinline__ void leave_shared(const clb_expert_gate_up_args& a) {
    const uint32_t shared_tiles = a.shared_width / CLB_TILE;
    const uint32_t tiles = a.width / CLB_TILE;
    if (row_tile < shared_tiles) return;
    item = (tiles > 0u) ? (row_tile - shared_tiles) / tiles : CLB_NONE - 1u;
    row_tile = row_tile - shared_tiles - item * tiles;
  }

  __device__ __forceinline__ bool in(uint32_t items) const { return item == CLB_NONE || item < items; }

  /* items, tiles: gridDim.x = items * row tiles of an item + tiles. */
  __device__ __forceinline__ void advance(const clb_expert_gate_up_args& a, uint32_t items, uint32_t tiles) {
    if (item == CLB_NONE) {
      row_tile += gridDim.x;
      leave_shared(a);
      return;
    }
    item += items;
    row_tile += tiles;
    if (row_tile < a.width / CLB_TILE) return;
    row_tile -= a.width / CLB_TILE;
    item++;
  }
};

#endif /* CLB_EXPERTS_CUH */
