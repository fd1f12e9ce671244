/*
 * assert.h: invariants that stay on in release builds.
 *
 * CLB_ASSERT(condition) prints "file:line: function: condition" to stderr and aborts iff the condition
 * is false. Use it for what this program promises itself (inner arguments, pool conservation), in loops
 * over slots, layers and experts, never over elements. Input from the other process is validated and
 * answered with a status instead. Thread-safe; allocates nothing.
 */
#ifndef CLB_ASSERT_H
#define CLB_ASSERT_H

#include <stdio.h>
#include <stdlib.h>

static inline _Noreturn void clb_assert_failed(const char* file, int line, const char* function, const char* text) {
  (void)fprintf(stderr, "%s:%d: %s: invariant broken: %s\n", file, line, function, text);
  abort();
}

#define CLB_ASSERT(condition) ((condition) ? (void)0 : clb_assert_failed(__FILE__, __LINE__, __func__, #condition))

#endif /* CLB_ASSERT_H */
