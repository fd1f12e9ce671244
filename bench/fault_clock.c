/* fault_clock.c: a shared object for LD_PRELOAD. The wall clock is off by the seconds in the file that FAULT_CLOCK
 * names, read anew at every call; other clocks go on as they are. For bench/faults.py and the tests only. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
  const char* path = getenv("FAULT_CLOCK");
  char text[32] = "";
  const int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (fd >= 0) {
    const ssize_t got = read(fd, text, sizeof text - 1);
    (void)got;
    (void)close(fd);
  }
  return strtol(text, NULL, 10);
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*);
  if (real == NULL) {
    real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  }
  const int failed = real(clock, now);
  if (failed == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    now->tv_sec += shift();
  }
  return failed;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  (void)zone;
  struct timespec exact;
  const int failed = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return failed;
}

time_t time(time_t* out) {
  struct timespec exact = {0};
  (void)clock_gettime(CLOCK_REALTIME, &exact);
  if (out != NULL) {
    *out = exact.tv_sec;
  }
  return exact.tv_sec;
}
