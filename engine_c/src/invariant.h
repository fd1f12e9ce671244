/*
 * invariant.h: invariants that stay on in release builds.
 *
 * CLB_ASSERT(condition) prints where and what to stderr and aborts iff the condition is false. Use it for what this
 * program promises itself (inner arguments, pool conservation), in loops over slots, layers and experts, never over
 * elements. Input from the other process is validated and answered with a status instead.
 */
#ifndef CLB_INVARIANT_H
#define CLB_INVARIANT_H

#include <assert.h>

#ifdef NDEBUG
#error "NDEBUG takes the engine's invariants away: build with -Db_ndebug=false"
#endif

#define CLB_ASSERT(condition) assert(condition)

#endif /* CLB_INVARIANT_H */
