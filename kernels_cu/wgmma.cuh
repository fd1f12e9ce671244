/*
 * wgmma.cuh: the instructions of compute capability 9.0a that the many-row kernels are made of, one function each.
 * Device code only; included where CLB_WIDE is 1.
 */
#ifndef CLB_WGMMA_CUH
#define CLB_WGMMA_CUH

#include "ptx.cuh"

/* ------------------------------------------------------- barriers in shared memory */

CLB_DEVICE void clb_gate_init(uint32_t gate, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(gate), "r"(arrivals) : "memory");
}

/* What this thread wrote to barriers and shared memory is seen by copies and wgmma. */
CLB_DEVICE void clb_fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

CLB_DEVICE void clb_gate_arrive(uint32_t gate) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(gate) : "memory");
}

/* One arrival, and `bytes` of bulk copies to come. */
CLB_DEVICE void clb_gate_expect(uint32_t gate, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(gate), "r"(bytes) : "memory");
}

/* One arrival once all cp.async of this thread so far are there. */
CLB_DEVICE void clb_gate_arrive_after_copies(uint32_t gate) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(gate) : "memory");
}

/* Until the phase of that parity is complete. */
CLB_DEVICE void clb_gate_wait(uint32_t gate, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(gate),
      "r"(parity)
      : "memory");
}

/* `bytes` from global to shared memory, all multiples of 16, counted at the gate. */
CLB_DEVICE void clb_copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t gate) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(gate)
               : "memory");
}

/* ------------------------------------------------------------------------- wgmma */

/* Registers a thread of this group of four warps may use from here on: fewer, or more once others gave theirs. */
template <uint32_t COUNT>
CLB_DEVICE void clb_registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <uint32_t COUNT>
CLB_DEVICE void clb_registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* Registers and shared memory written so far may be read by the wgmma that follow. */
CLB_DEVICE void clb_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CLB_DEVICE void clb_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <uint32_t PENDING>
CLB_DEVICE void clb_wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

CLB_DEVICE void clb_wgmma_hold(float& value) { asm volatile("" : "+f"(value)::"memory"); }

/* Rows of 128 bytes, 16-byte chunk c of row r at chunk c ^ (r % 8); groups of 8 rows follow each other. `at`: the first
   row, a multiple of 1024, plus the bytes of the columns to skip. */
CLB_DEVICE uint64_t clb_wgmma_rows(uint32_t at) {
  return (uint64_t)((at & 0x3ffffu) >> 4) | (1ull << 16) | ((uint64_t)(1024u >> 4) << 32) | (1ull << 62);
}

/* c += a b: a 64 x 16 of four warps, 16 rows each as in mma.m16n8k16; b (rows of shared memory) 64 or 32 of them; c as
   in mma.m16n8k16, a step of 8 rows of b after the other. */
CLB_DEVICE void clb_wgmma_64(float (&c)[8][4], const uint4& a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),
        "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]),
        "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]),
        "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]),
        "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}

CLB_DEVICE void clb_wgmma_32(float (&c)[4][4], const uint4& a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),
        "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]),
        "+f"(c[3][2]), "+f"(c[3][3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}

#endif /* CLB_WGMMA_CUH */
