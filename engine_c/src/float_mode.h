/*
 * float_mode.h: subnormal numbers become zero while the engine computes, on the calling thread only.
 *
 * They are slow on some machines and matter nowhere here. The caller's mode comes back afterwards, because
 * the thread belongs to another language's run-time.
 */
#ifndef CLB_FLOAT_MODE_H
#define CLB_FLOAT_MODE_H

#include <stdint.h>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

typedef struct clb_float_mode {
  uint64_t control;
} clb_float_mode;

static inline clb_float_mode clb_float_mode_enter(void) {
#if defined(__SSE2__)
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u); /* flush to zero, subnormals are zeros */
  return (clb_float_mode){before};
#elif defined(__aarch64__)
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(before | (UINT64_C(1) << 24)));
  return (clb_float_mode){before};
#else
  return (clb_float_mode){0};
#endif
}

static inline void clb_float_mode_leave(clb_float_mode mode) {
#if defined(__SSE2__)
  _mm_setcsr((uint32_t)mode.control);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(mode.control));
#else
  (void)mode;
#endif
}

#endif /* CLB_FLOAT_MODE_H */
