/*
 * float_mode.h: results too small for a normal number become zero while the engine computes, on the calling thread.
 *
 * Subnormal numbers are slow on some x86 machines and matter nowhere here. Inputs are not flushed: that would
 * lose subnormal halves (cpu/lanes.h). Other machines are as fast with them, so nothing is changed there. The caller's
 * mode comes back afterwards, because the thread belongs to another language's run-time.
 */
#ifndef CLB_FLOAT_MODE_H
#define CLB_FLOAT_MODE_H

#include <stdint.h>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

typedef struct clb_float_mode {
  uint32_t control;
} clb_float_mode;

static inline clb_float_mode clb_float_mode_enter(void) {
#if defined(__SSE2__)
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | 0x8000u); /* flush to zero */
  return (clb_float_mode){before};
#else
  return (clb_float_mode){0};
#endif
}

static inline void clb_float_mode_leave(clb_float_mode mode) {
#if defined(__SSE2__)
  _mm_setcsr(mode.control);
#else
  (void)mode;
#endif
}

#endif /* CLB_FLOAT_MODE_H */
