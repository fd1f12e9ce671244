/*
 * ptx.cuh: every instruction that CUDA C++ has no name for, one function each. Device code only.
 *
 * Nothing else in this folder has inline assembly, so that the kernels can also be compiled for the CPU over another
 * version of this file (tests/cuda/emulator.h) and tested where there is no GPU.
 */
#ifndef CLB_PTX_CUH
#define CLB_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "abi.h"

#define CLB_WARP 32u
#define CLB_DEVICE static __device__ __forceinline__

/* Wait for the grids that this one depends on: before it, nothing that the predecessor writes may be read. */
CLB_DEVICE void clb_wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Let dependent grids start their prologue; their own wait still covers all that this grid writes. */
CLB_DEVICE void clb_release_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* Add 1 and return what was there. What this thread and, through a barrier before, its block wrote is visible to
   whoever takes a later ticket and then calls clb_acquire_tickets. */
CLB_DEVICE uint32_t clb_take_ticket(uint32_t* at) {
  uint32_t before;
  asm volatile("atom.add.release.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
  return before;
}

/* What those who took earlier tickets wrote is visible to this thread and, through a barrier after, to its block. */
CLB_DEVICE void clb_acquire_tickets() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

/* c += a b for one tile: a 16 x 16 weights, b 16 x 8 (two registers), c 16 x 8. Lane 4 g + q holds of c:
   rows g, g, g + 8, g + 8 and columns 2q, 2q + 1, 2q, 2q + 1. */
CLB_DEVICE void clb_mma_bf16(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

CLB_DEVICE void clb_mma_fp16(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

/* Shared memory by its own address, for the functions below. */
CLB_DEVICE uint32_t clb_shared_address(const void* at) { return (uint32_t)__cvta_generic_to_shared(at); }

/* Bytes of dynamic shared memory that the launch gave. */
CLB_DEVICE uint32_t clb_dynamic_shared_bytes() {
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

/* Start to copy 16 bytes from global to shared memory, both 16-byte aligned, past L1. */
CLB_DEVICE void clb_copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* The same of 4 or 8 bytes, through L1. */
template <uint32_t BYTES>
CLB_DEVICE void clb_copy_async_few(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}

/* The copies that this thread started since the last group are a group. */
CLB_DEVICE void clb_copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* All groups of this thread but the youngest PENDING are there, for this thread to read. */
template <uint32_t PENDING>
CLB_DEVICE void clb_copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

CLB_DEVICE uint4 clb_read_shared(uint32_t at) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(at)
               : "memory");
  return value;
}

CLB_DEVICE uint32_t clb_read_shared_word(uint32_t at) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  return value;
}

CLB_DEVICE uint2 clb_read_shared_pair(uint32_t at) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(at) : "memory");
  return value;
}

/* Two fp16 numbers at a time. */
CLB_DEVICE uint32_t clb_half_add(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

CLB_DEVICE uint32_t clb_half_multiply(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

CLB_DEVICE uint32_t clb_half_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

/* (value & mask) | bits, as one instruction also where mask and bits are constants. */
CLB_DEVICE uint32_t clb_and_or(uint32_t value, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(value), "r"(mask), "r"(bits));
  return result;
}

CLB_DEVICE void clb_write_shared(uint32_t at, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

/* Four matrices of 8 x 8 halves: lane l names row l % 8 of matrix l / 8 (16 bytes, aligned); lane 4 g + q gets columns
   2q, 2q + 1 of row g of each matrix. Transposed: of each matrix' transpose. */
CLB_DEVICE uint4 clb_load_matrices(uint32_t row) {
  uint4 value;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(row)
               : "memory");
  return value;
}

CLB_DEVICE uint4 clb_load_matrices_transposed(uint32_t row) {
  uint4 value;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(row)
               : "memory");
  return value;
}

/* The same value, which the compiler may not compute with ahead of here: fewer registers. */
CLB_DEVICE uint32_t clb_not_ahead(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

/* Barrier 1 .. 15 of the block, for `threads` of its threads, whole warps; 0 is __syncthreads. */
CLB_DEVICE void clb_barrier(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/* 16 bytes of zeros. */
CLB_DEVICE void clb_zero_shared(uint32_t at) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0u) : "memory");
}

#endif /* CLB_PTX_CUH */
