/*
 * embed.cu: the start of a step: which rows it has, and their residual.
 *
 * Operation  clb_embed_{bf16,fp16}: see abi.h. A decode step's rows come from the slots on the device, so that the next
 *            step needs nothing from the host; a prompt's rows are given.
 * Reference  tests/cuda/test_embed.py (numpy); angles as engine_c/cpu/rope.c: fp32 product of position and frequency.
 * Grid       max_rows blocks of 256 threads.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   about 14 * hidden bytes a row: 64 rows of 2,048 are 1.8 MB. Latency-bound: target 3 us.
 */
#include "few.cuh"

/* Columns col, col + 1 (col even) of row `row` of mma weights. */
template <class P>
CLB_DEVICE float2 weight_pair(const uint32_t* weights, uint32_t across, uint32_t row, uint32_t col) {
  const uint64_t piece = (uint64_t)(row / CLB_TILE) * across + col / CLB_TILE;
  const uint32_t lane = row % 8u * 4u + col % 8u / 2u;
  const uint32_t word = col % CLB_TILE / 8u * 2u + row % CLB_TILE / 8u;
  return P::unpack(weights[(piece * CLB_WARP + lane) * 4u + word]);
}

/* Decode: the row of the t-th slot of the list; idle unless the slot is active. */
CLB_DEVICE clb_row row_of_slot(const clb_embed_args& a, uint32_t t) {
  const uint32_t slot = a.list->slots[t];
  const clb_device_slot& from = a.slots[slot];
  clb_row row = {CLB_NONE, 0u, 0, 0};
  if (from.active != 0u) {
    row.slot = slot;
    row.position = from.position;
    row.token = from.token;
  }
  return row;
}

/* Sines and cosines by half turns: sincospif has no slow path for large angles, so no local memory. */
CLB_DEVICE void rotate(const clb_embed_args& a, uint32_t row, uint32_t position) {
  const uint32_t half = a.head_dim / 2u;
  float* to = a.rope + (uint64_t)row * a.head_dim;
  for (uint32_t i = threadIdx.x; i < half; i += CLB_MATMUL_THREADS) {
    const double turns = (double)((float)position * a.inv_freq[i]) * 0.31830988618379067154;
    float sine;
    float cosine;
    sincospif((float)(turns - 2.0 * rint(turns * 0.5)), &sine, &cosine);
    to[i] = cosine * a.rope_scale;
    to[half + i] = sine * a.rope_scale;
  }
}

template <class P>
CLB_DEVICE void embed(const clb_embed_args& a) {
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t t = blockIdx.x;
  if (t >= *a.row_count) return;
  const clb_row row = (a.list != nullptr) ? row_of_slot(a, t) : a.rows[t];
  const bool idle = row.slot == CLB_NONE;
  if (a.list != nullptr && threadIdx.x == 0u) a.rows[t] = row;
  rotate(a, t, row.position);
  const clb_stream stream = {a.residual, a.norm, a.input, a.half_input, a.sumsq, a.hidden};
  for (uint32_t begin = 0u; begin < a.hidden; begin += CLB_MATMUL_THREADS * 2u) {
    const uint32_t col = begin + threadIdx.x * 2u;
    const bool valid = col < a.hidden;
    float2 x = make_float2(0.0f, 0.0f);
    if (valid && !idle) x = weight_pair<P>(a.embedding, a.hidden / CLB_TILE, (uint32_t)row.token, col);
    clb_store_either<P>(stream, t, col, x, clb_read_pair(a.norm + col, valid), valid);
  }
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS)
    clb_embed_bf16(const __grid_constant__ clb_embed_args a) {
  embed<clb_bf16>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS)
    clb_embed_fp16(const __grid_constant__ clb_embed_args a) {
  embed<clb_fp16>(a);
}
