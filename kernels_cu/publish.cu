/*
 * publish.cu: what leaves the device: events of a step, and log-probabilities of prompt positions.
 *
 * Operation  clb_publish, clb_prompt_logprobs: see abi.h.
 * Reference  tests/cuda/test_sample.py.
 * Grid       publish one block of 64 threads; prompt_logprobs one block of 1,024 threads a wanted row.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   publish: at most 3.6 KB over PCIe, bound by one round of writes: target 2 us. prompt_logprobs: two passes
 *            over 4 * vocab bytes a row, and one a listed id, in L2.
 */
#include "block.cuh"

extern "C" __global__ void __launch_bounds__(CLB_FEW_ROWS) clb_publish(const __grid_constant__ clb_publish_args a) {
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint64_t step = *a.step;
  clb_device_event* to =
      reinterpret_cast<clb_device_event*>(a.mailbox + CLB_MAILBOX_EVENTS) + step % CLB_MAILBOX_STEPS * CLB_FEW_ROWS;
  if (threadIdx.x < *a.wanted_count) to[threadIdx.x] = a.events[threadIdx.x];
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0u) return;
  *a.step = step + 1u;
  __threadfence_system(); /* records of the sampler and events come before the number that announces them */
  *reinterpret_cast<volatile uint64_t*>(a.mailbox) = step + 1u;
}

extern "C" __global__ void __launch_bounds__(CLB_BLOCK_THREADS)
    clb_prompt_logprobs(const __grid_constant__ clb_prompt_logprobs_args a) {
  __shared__ clb_block block;
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t h = blockIdx.x;
  if (h >= *a.wanted_count) return;
  const clb_prompt_logprob_item item = a.items[h];
  if (item.record == 0u) return;
  const float* logits = a.logits + (uint64_t)h * a.vocab;
  clb_prompt_record* record = reinterpret_cast<clb_prompt_record*>(item.record);
  double log_sum = 0.0;
  const bool finite = clb_log_sum_exp(block, logits, a.vocab, &log_sum);
  const uint32_t tops =
      finite ? clb_top_list(block, logits, a.vocab, item.top_count, log_sum, record->top_ids, record->top_logprobs)
             : 0u;
  if (threadIdx.x >= tops && threadIdx.x < CLB_MAX_TOP_LOGPROBS) {
    record->top_ids[threadIdx.x] = 0;
    record->top_logprobs[threadIdx.x] = 0.0f;
  }
  if (threadIdx.x != 0u) return;
  record->logprob = finite ? (float)((double)logits[item.next] - log_sum) : __uint_as_float(0x7fc00000u);
  record->top_count = tops;
  a.status[h] = finite ? CLB_OK : a.not_finite;
}
