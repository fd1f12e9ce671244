/*
 * block.cuh: sums, choices and prefix sums over the 1,024 threads of one block, each in a fixed order; and what the
 * sampler and the prompt's log-probabilities share: log-softmax and lists of the likeliest ids. Device code only.
 *
 * Every function with a `clb_block` argument is called by all threads and begins and ends with a barrier around its
 * shared memory, so that calls may follow each other.
 */
#ifndef CLB_BLOCK_CUH
#define CLB_BLOCK_CUH

#include "../engine_c/include/colibri.h"
#include "../engine_c/src/exact_math.h"
#include "device.cuh"

#define CLB_BLOCK_THREADS 1024u
#define CLB_BLOCK_WARPS (CLB_BLOCK_THREADS / CLB_WARP)

struct clb_block {
  uint64_t words[CLB_BLOCK_WARPS + 1u];
};

CLB_DEVICE bool clb_finite(float value) { return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u; }
CLB_DEVICE bool clb_is_nan(float value) { return (__float_as_uint(value) & 0x7fffffffu) > 0x7f800000u; }

/* Order of floats as order of unsigned integers; -0 equals +0. */
CLB_DEVICE uint32_t clb_key_of(float value) {
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));
  return (bits & 0x80000000u) != 0u ? ~bits : (bits | 0x80000000u);
}

/* A place in the order (value descending, id ascending) as one number: larger is earlier; 0 is no place. */
CLB_DEVICE uint64_t clb_place_of(float value, uint32_t id) {
  return ((uint64_t)clb_key_of(value) << 32) | (uint64_t)(0xffffffffu - id);
}
CLB_DEVICE uint32_t clb_id_of(uint64_t place) { return 0xffffffffu - (uint32_t)place; }

/* The sum over all threads, exact: the order does not matter. */
CLB_DEVICE uint64_t clb_block_sum(clb_block& block, uint64_t value) {
  for (uint32_t step = CLB_WARP / 2u; step > 0u; step /= 2u)
    value += __shfl_xor_sync(CLB_FULL_WARP, value, step);
  __syncthreads();
  if (threadIdx.x % CLB_WARP == 0u) block.words[threadIdx.x / CLB_WARP] = value;
  __syncthreads();
  uint64_t sum = 0u;
  for (uint32_t w = 0u; w < CLB_BLOCK_WARPS; w++)
    sum += block.words[w];
  __syncthreads();
  return sum;
}

CLB_DEVICE uint64_t clb_block_max(clb_block& block, uint64_t value) {
  for (uint32_t step = CLB_WARP / 2u; step > 0u; step /= 2u)
    value = max(value, __shfl_xor_sync(CLB_FULL_WARP, value, step));
  __syncthreads();
  if (threadIdx.x % CLB_WARP == 0u) block.words[threadIdx.x / CLB_WARP] = value;
  __syncthreads();
  uint64_t most = 0u;
  for (uint32_t w = 0u; w < CLB_BLOCK_WARPS; w++)
    most = max(most, block.words[w]);
  __syncthreads();
  return most;
}

/* Lanes by halves, then warps in order. */
CLB_DEVICE double clb_block_sum_double(clb_block& block, double value) {
  for (uint32_t step = CLB_WARP / 2u; step > 0u; step /= 2u)
    value += __shfl_xor_sync(CLB_FULL_WARP, value, step);
  double* words = reinterpret_cast<double*>(block.words);
  __syncthreads();
  if (threadIdx.x % CLB_WARP == 0u) words[threadIdx.x / CLB_WARP] = value;
  __syncthreads();
  double sum = 0.0;
  for (uint32_t w = 0u; w < CLB_BLOCK_WARPS; w++)
    sum += words[w];
  __syncthreads();
  return sum;
}

/* The largest of a row of finite logits and log(sum exp) of all; false for every thread if one is not finite. */
CLB_DEVICE bool clb_log_sum_exp(clb_block& block, const float* logits, uint32_t vocab, double* log_sum) {
  uint64_t most = 0u;
  uint64_t bad = 0u;
  for (uint32_t i = threadIdx.x; i < vocab; i += CLB_BLOCK_THREADS) {
    bad |= clb_finite(logits[i]) ? 0u : 1u;
    most = max(most, clb_place_of(logits[i], i));
  }
  if (clb_block_max(block, bad) != 0u) return false;
  const float largest = logits[clb_id_of(clb_block_max(block, most))];
  double sum = 0.0;
  for (uint32_t i = threadIdx.x; i < vocab; i += CLB_BLOCK_THREADS)
    sum += (double)clb_exact_exp(logits[i] - largest);
  *log_sum = (double)largest + (double)logf((float)clb_block_sum_double(block, sum));
  return true;
}

/* The `wanted` likeliest ids, likeliest first, ties to the lowest id; returns how many there are. */
CLB_DEVICE uint32_t clb_top_list(clb_block& block, const float* logits, uint32_t vocab, uint32_t wanted, double log_sum,
                                 int32_t* ids, float* logprobs) {
  const uint32_t count = min(min(wanted, vocab), CLB_MAX_TOP_LOGPROBS);
  uint64_t last = ~(uint64_t)0u;
  for (uint32_t rank = 0u; rank < count; rank++) {
    uint64_t best = 0u;
    for (uint32_t i = threadIdx.x; i < vocab; i += CLB_BLOCK_THREADS) {
      const uint64_t place = clb_place_of(logits[i], i);
      if (place < last) best = max(best, place);
    }
    last = clb_block_max(block, best);
    if (threadIdx.x == 0u) {
      ids[rank] = (int32_t)clb_id_of(last);
      logprobs[rank] = (float)((double)logits[clb_id_of(last)] - log_sum);
    }
  }
  return count;
}

#endif /* CLB_BLOCK_CUH */
