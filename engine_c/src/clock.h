/*
 * clock.h: the one clock of the engine. Thread-safe.
 */
#ifndef CLB_CLOCK_H
#define CLB_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Nanoseconds since some moment before the program began; never goes back. */
static inline uint64_t clb_clock_ns(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#endif /* CLB_CLOCK_H */
