/*
 * read.cu: how fast this device reads its memory: the floor under every step, measured beside it.
 *
 * Operation  clb_read: the sum of all 32-bit words of a block of memory, modulo 2^32; see clb_read_args in abi.h.
 * Reference  tests/cuda/test_read.py.
 * Grid       any number of blocks of 256 threads; 8 a multiprocessor fill the memory's queues.
 * Needs      sm_80. For benches, never in a step.
 * Roofline   bytes of the block over the memory's bandwidth, which it measures; 8 loads of 16 bytes in flight a lane.
 */
#include "device.cuh"

#define LOADS 8u

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS) clb_read(const __grid_constant__ clb_read_args a) {
  const uint64_t stride = (uint64_t)gridDim.x * CLB_MATMUL_THREADS;
  uint32_t sum = 0;
  clb_wait_for_inputs();
  clb_release_dependents();
  uint64_t i = (uint64_t)blockIdx.x * CLB_MATMUL_THREADS + threadIdx.x;
  for (; i + (LOADS - 1u) * stride < a.vectors; i += LOADS * stride) {
    uint4 loaded[LOADS];
#pragma unroll
    for (uint32_t k = 0; k < LOADS; ++k)
      loaded[k] = __ldcs(&a.input[i + k * stride]);
#pragma unroll
    for (uint32_t k = 0; k < LOADS; ++k)
      sum += loaded[k].x + loaded[k].y + loaded[k].z + loaded[k].w;
  }
  for (; i < a.vectors; i += stride) {
    const uint4 one = __ldcs(&a.input[i]);
    sum += one.x + one.y + one.z + one.w;
  }
  sum = __reduce_add_sync(CLB_FULL_WARP, sum);
  if (threadIdx.x % CLB_WARP == 0u) atomicAdd(a.sum, sum);
}
