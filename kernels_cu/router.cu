/*
 * router.cu: which experts each token uses, and which tokens each expert gets.
 *
 * Operation  clb_router_fp32: per token, the k best of E logits (ties: the lowest index), less those whose
 *            score is below threshold * the best score; weights = score / sum of all scores (softmax), or the
 *            sigmoid itself; divided by the sum of the kept ones when renormalise is set; times routed_scale.
 *            A token with a NaN or infinite logit keeps nothing (kept 0) and its row says so; an idle row keeps
 *            nothing. The slot's sums of work and its counts per expert go on.
 *            clb_bucket: counts[E], offsets[E + 1] and the token list of every expert, each list by token.
 * Reference  engine_c/src/routing.c, its host twin: indices, kept, counts, offsets and lists are equal bit by
 *            bit for equal logits (selection compares logits, the threshold uses exact_math.h); weights
 *            within 1e-6.
 * Shapes     abi.h, at each pointer. T tokens, read from device memory; E <= 512 experts; K <= 16 ranks.
 * Grid       clb_router_fp32: a warp takes one token at a time, its scores stay in registers (router.cuh); blocks of
 *            1024 threads and 64 tokens, each writing one row of counts for clb_bucket.
 *            clb_bucket: ceil(max_tokens / 64) blocks of 1024 threads, which add up the rows before their own
 * (integers: no order to keep). Needs      sm_80 (redux.sync). sm_90: griddepcontrol, so that both may hang on
 * programmatic edges. Roofline   T = 8192, E = 128, K = 8: reads 4.2 MB logits, writes 1.1 MB and 64 KB counts;
 * clb_bucket reads 0.3 MB + B x B x E x 4 = 8.4 MB (L2), writes 0.5 MB. About 6 MB of memory traffic = 1.4 us at 4.3
 * TB/s; 2 x 8 redux and 8 x 4 compares a token, 32 warps a block, one block a multiprocessor: issue-bound near 4 us.
 * Target: 12 us for both (goal of the routing: 20 us). Measured (H200, 2026-11-29): 8.2 us router, 8.6 us bucket, 17.0
 * us both; 32 tokens: 4.0 and 2.8 us. Not here   capacity (max_tokens_per_expert): capacity.cu.
 */
#include "router.cuh"

#define WARPS (CLB_ROUTER_THREADS / CLB_WARP)

extern "C" __global__ void __launch_bounds__(CLB_ROUTER_THREADS)
    clb_router_fp32(const __grid_constant__ clb_router_args a) {
  __shared__ uint32_t block_counts[CLB_ROUTER_MAX_EXPERTS];
  uint32_t* counts = (a.block_counts != nullptr) ? block_counts : nullptr;
  for (uint32_t e = threadIdx.x; counts != nullptr && e < a.experts; e += blockDim.x)
    block_counts[e] = 0u;
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t begin = blockIdx.x * a.block_tokens;
  const uint32_t count = *a.token_count;
  if (begin >= count) return;
  const uint32_t end = min(begin + a.block_tokens, count);
  __syncthreads();
  for (uint32_t token = begin + threadIdx.x / CLB_WARP; token < end; token += blockDim.x / CLB_WARP)
    clb_route_token(a, token, clb_router_case_of(a, token), counts);
  __syncthreads();
  for (uint32_t e = threadIdx.x; counts != nullptr && e < a.experts; e += blockDim.x)
    a.block_counts[(uint64_t)blockIdx.x * a.experts + e] = block_counts[e];
}

/* Exclusive sum of values[0 .. threads) in place by the whole block; *total becomes their sum. */
static __device__ __forceinline__ void exclusive_scan(uint32_t* values, uint32_t* warp_totals, uint32_t* total) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t warp = threadIdx.x / CLB_WARP;
  const uint32_t own = values[threadIdx.x];
  const uint32_t sum = clb_warp_prefix(own, lane);
  if (lane == CLB_WARP - 1u) warp_totals[warp] = sum;
  __syncthreads();
  uint32_t base = 0u;
  for (uint32_t w = 0u; w < warp; w++)
    base += warp_totals[w];
  values[threadIdx.x] = base + sum - own;
  if (threadIdx.x == CLB_ROUTER_THREADS - 1u) *total = base + sum;
  __syncthreads();
}

/* Rows of block_counts: threads of one group of `columns` read one row; the groups share the rows. */
static __device__ __forceinline__ void add_rows(const clb_bucket_args& a, uint32_t rows, uint32_t* totals,
                                                uint32_t* below) {
  const uint32_t columns = (a.experts + CLB_WARP - 1u) / CLB_WARP * CLB_WARP;
  const uint32_t groups = CLB_ROUTER_THREADS / columns;
  const uint32_t group = threadIdx.x / columns;
  const uint32_t expert = threadIdx.x % columns;
  if (expert >= a.experts || group >= groups) return;
  uint32_t all = 0u;
  uint32_t before = 0u;
#pragma unroll 8
  for (uint32_t b = group; b < rows; b += groups) {
    const uint32_t count = a.block_counts[(uint64_t)b * a.experts + expert];
    all += count;
    before += (b < blockIdx.x) ? count : 0u;
  }
  atomicAdd(&totals[expert], all);
  atomicAdd(&below[expert], before);
}

extern "C" __global__ void __launch_bounds__(CLB_ROUTER_THREADS) clb_bucket(const __grid_constant__ clb_bucket_args a) {
  /* One place a thread; those beyond the experts stay 0. */
  __shared__ uint32_t starts[CLB_ROUTER_THREADS];            /* totals, then offsets */
  __shared__ uint32_t below[CLB_ROUTER_THREADS];             /* assignments in earlier blocks */
  __shared__ unsigned long long members[CLB_ROUTER_THREADS]; /* bit t: token begin + t chose the expert */
  __shared__ uint32_t warp_totals[WARPS];
  __shared__ uint32_t total;
  starts[threadIdx.x] = 0u;
  below[threadIdx.x] = 0u;
  members[threadIdx.x] = 0u;
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t count = *a.token_count;
  const uint32_t rows = (count + CLB_ROUTER_BLOCK_TOKENS - 1u) / CLB_ROUTER_BLOCK_TOKENS;
  const uint32_t begin = blockIdx.x * CLB_ROUTER_BLOCK_TOKENS;
  if (blockIdx.x > 0u && begin >= count) return; /* block 0 writes counts and offsets of an empty step too */
  const uint32_t tokens = (begin < count) ? min(CLB_ROUTER_BLOCK_TOKENS, count - begin) : 0u;
  __syncthreads();
  add_rows(a, rows, starts, below);
  const uint32_t* choices = a.indices + (uint64_t)begin * a.k_max;
  for (uint32_t i = threadIdx.x; i < tokens * a.k_max; i += CLB_ROUTER_THREADS) {
    if (choices[i] != CLB_ROUTER_NONE) atomicOr(&members[choices[i]], 1ull << (i / a.k_max));
  }
  __syncthreads();
  if (blockIdx.x == 0u && threadIdx.x < a.experts) a.counts[threadIdx.x] = starts[threadIdx.x];
  __syncthreads();
  exclusive_scan(starts, warp_totals, &total);
  if (blockIdx.x == 0u) {
    if (threadIdx.x < a.experts) a.offsets[threadIdx.x] = starts[threadIdx.x];
    if (threadIdx.x == 0u) a.offsets[a.experts] = total;
  }
  for (uint32_t i = threadIdx.x; i < tokens * a.k_max; i += CLB_ROUTER_THREADS) {
    const uint32_t expert = choices[i];
    if (expert == CLB_ROUTER_NONE) continue;
    const uint32_t token = i / a.k_max;
    const unsigned long long earlier = members[expert] & ((1ull << token) - 1ull);
    const uint32_t at = starts[expert] + below[expert] + (uint32_t)__popcll(earlier);
    a.tokens[at] = begin + token;
    a.places[at] = begin * a.k_max + i;
  }
}
