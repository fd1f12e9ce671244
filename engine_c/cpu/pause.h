/*
 * pause.h: tells the processor that this thread is waiting in a loop. Costs some ten to a hundred cycles.
 */
#ifndef CLB_CPU_PAUSE_H
#define CLB_CPU_PAUSE_H

static inline void clb_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb"); /* `yield` does nothing on most cores */
#endif
}

#endif /* CLB_CPU_PAUSE_H */
