/*
 * test.h: the whole C test harness.
 *
 * A test is a function void name(void). CHECK* report file, line and values, and end the running test; the others
 * still run. A test program lists its tests:
 *
 *   int main(int argc, char** argv) {
 *     static const clb_test tests[] = {TEST(pool_frees_everything), TEST(pool_refuses_zero)};
 *     return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
 *   }
 *
 * `program NAME` runs the tests whose name contains NAME. Each program prints "N passed, N failed" and exits 1 iff
 * one failed or none ran. CHECK* may be used in helpers; they jump out, so free nothing after them that matters to
 * valgrind unless the test passes.
 */
#ifndef CLB_TEST_H
#define CLB_TEST_H

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct clb_test {
  const char* name;
  void (*run)(void);
} clb_test;

#define TEST(function) {#function, function}

static jmp_buf clb_test_out;

static inline _Noreturn void clb_test_fail(void) { longjmp(clb_test_out, 1); }

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      (void)fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      clb_test_fail();                                                                \
    }                                                                                 \
  } while (0)

/* Integers of any kind: both are shown as signed 64-bit. */
#define CHECK_EQ(actual, expected)                                                                           \
  do {                                                                                                       \
    const int64_t clb_actual = (int64_t)(actual);                                                            \
    const int64_t clb_expected = (int64_t)(expected);                                                        \
    if (clb_actual != clb_expected) {                                                                        \
      (void)fprintf(stderr, "%s:%d: %s is %" PRId64 ", expected %" PRId64 "\n", __FILE__, __LINE__, #actual, \
                    clb_actual, clb_expected);                                                               \
      clb_test_fail();                                                                                       \
    }                                                                                                        \
  } while (0)

/* Absolute difference of two numbers; NaN never passes. */
#define CHECK_NEAR(actual, expected, tolerance)                                                                    \
  do {                                                                                                             \
    const double clb_actual = (double)(actual);                                                                    \
    const double clb_expected = (double)(expected);                                                                \
    if (!(fabs(clb_actual - clb_expected) <= (double)(tolerance))) {                                               \
      (void)fprintf(stderr, "%s:%d: %s is %.9g, expected %.9g +- %.3g\n", __FILE__, __LINE__, #actual, clb_actual, \
                    clb_expected, (double)(tolerance));                                                            \
      clb_test_fail();                                                                                             \
    }                                                                                                              \
  } while (0)

#define CHECK_CONTAINS(text, part)                                                                          \
  do {                                                                                                      \
    if (strstr((text), (part)) == NULL) {                                                                   \
      (void)fprintf(stderr, "%s:%d: \"%s\" does not contain \"%s\"\n", __FILE__, __LINE__, (text), (part)); \
      clb_test_fail();                                                                                      \
    }                                                                                                       \
  } while (0)

/* A small counter-free generator for tests (splitmix64); the state is the seed. */
static inline uint64_t clb_test_random(uint64_t* state) {
  *state += 0x9e3779b97f4a7c15u;
  uint64_t z = *state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

static inline int clb_test_main(int argc, char** argv, const clb_test* tests, size_t count) {
  volatile unsigned passed = 0;
  volatile unsigned failed = 0;
  for (volatile size_t i = 0; i < count; ++i) {
    if (argc > 1 && strstr(tests[i].name, argv[1]) == NULL) {
      continue;
    }
    if (setjmp(clb_test_out) == 0) {
      tests[i].run();
      ++passed;
    } else {
      (void)fprintf(stderr, "FAILED %s\n", tests[i].name);
      ++failed;
    }
  }
  (void)printf("%u passed, %u failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

#endif /* CLB_TEST_H */
