/*
 * experts.cuh: which rows each expert has, for the few-row kernels of experts.cu and expert_down.cu. Device code only.
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
    uint32_t sum = own;
#pragma unroll
    for (uint32_t step = 1u; step < CLB_WARP; step *= 2u) {
      const uint32_t before = __shfl_up_sync(CLB_FULL_WARP, sum, step);
      sum += (lane >= step) ? before : 0u;
    }
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

CLB_DEVICE uint32_t clb_passes_of(uint32_t rows, uint32_t pass_rows) { return (rows + pass_rows - 1u) / pass_rows; }

/* This lane's bytes of a piece of a matrix of `across` column tiles. */
CLB_DEVICE const unsigned char* clb_lane_bytes(uint64_t weights, uint32_t row_tile, uint32_t across, uint32_t piece) {
  return reinterpret_cast<const unsigned char*>(weights) + ((uint64_t)row_tile * across + piece) * CLB_PIECE +
         threadIdx.x % CLB_WARP * 16u;
}

#endif /* CLB_EXPERTS_CUH */
