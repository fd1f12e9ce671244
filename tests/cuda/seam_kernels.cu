/*
 * seam_kernels.cu: the two stand-in kernels of the seam trial (seam_abi.h): seam_gather is the model before the
 * router, seam_publish the sampler after it. What publish does with mapped memory is what the real sampler will do.
 *
 * Grids: seam_gather one block of 128 threads a row, SEAM_ROWS rows; seam_publish one block of 32 threads.
 */
#include "seam_abi.h"

static __device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(128) seam_gather(const __grid_constant__ seam_gather_args a) {
  wait_for_inputs();
  const uint32_t row = blockIdx.x;
  if (row >= *a.token_count) return;
  const uint32_t token = (uint32_t)a.slots[a.row_slots[row]].token % a.rows;
  for (uint32_t e = threadIdx.x; e < a.experts; e += 128u)
    a.logits[row * a.experts + e] = a.table[(uint64_t)token * a.experts + e];
}

/* The record of colibri.h: {position, token, logprob, top_count, ...}; the trial fills the first four words. */
static __device__ __forceinline__ void write_record(const seam_slot& slot, float weight) {
  volatile uint32_t* record = reinterpret_cast<volatile uint32_t*>(
      slot.records + (uint64_t)(slot.position & slot.record_mask) * SEAM_RECORD_BYTES);
  record[0] = slot.position;
  record[1] = (uint32_t)slot.token;
  record[2] = __float_as_uint(weight);
  record[3] = 0u;
}

static __device__ __forceinline__ void publish_row(const seam_publish_args& a, uint32_t row, uint64_t step) {
  seam_slot& slot = a.slots[a.row_slots[row]];
  seam_event event = {};
  event.slot = a.row_slots[row];
  event.generation = slot.generation;
  if (slot.active != 0u) {
    uint32_t sum = (uint32_t)slot.token;
    for (uint32_t r = 0u; r < a.kept[row]; r++)
      sum += (r + 1u) * (a.indices[row * a.k_max + r] + 1u);
    slot.token = (int32_t)(sum % a.rows);
    event.flags = SEAM_TOKEN;
    for (uint32_t i = 0u; i < slot.stop_count; i++)
      if (slot.stops[i] == slot.token) event.flags |= SEAM_STOP;
    if (slot.position + 1u == slot.max_tokens) event.flags |= SEAM_LENGTH;
    event.position = slot.position;
    event.token = slot.token;
    event.kept = a.kept[row];
    event.weight = a.weights[row * a.k_max];
    write_record(slot, event.weight);
    slot.position++;
    if (event.flags != SEAM_TOKEN) slot.active = 0u;
  }
  seam_event* events = reinterpret_cast<seam_event*>(a.mailbox + 64);
  events[(step % SEAM_RING) * SEAM_ROWS + row] = event;
  __threadfence_system();
}

extern "C" __global__ void __launch_bounds__(32) seam_publish(const __grid_constant__ seam_publish_args a) {
  wait_for_inputs();
  const uint64_t step = *a.step;
  if (threadIdx.x < *a.token_count) publish_row(a, threadIdx.x, step);
  __syncwarp();
  if (threadIdx.x == 0u) {
    *a.step = step + 1u;
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(a.mailbox), "l"(step + 1u) : "memory");
  }
}
