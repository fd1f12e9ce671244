/*
 * threads.h: a fixed set of threads that share out lists of work items.
 *
 * The owner (thread 0) calls clb_threads_run(items); it and the workers (threads 1 .. count - 1) take items, many at
 * once while many are left and single ones in the end, and run returns when all are done. No thread is waited for that
 * holds no item: if another program has a worker's CPU, the others do its share.
 *
 *   owner    run: post items ── take, do, take, do ──────── wait for items that workers still hold ── return
 *   worker   spin ────────── take, do, take, do, take, do ── spin 50 us ── sleep
 *
 *   ticket   | generation 40 | items left 24 |   the one word that is fought over; taking items is one
 *                                                compare-and-swap, which fails when the list has changed since
 *
 * A worker reads work, context and items only between two looks at the ticket: if its swap succeeds, the list it read
 * is the one that it takes from, because the owner changes the list only after every item of it was taken and done.
 *
 * Which thread does an item, and with which others in one call, is chance: an item's result must not depend on it, and
 * items write different memory.
 *
 * Workers are made at open, with stacks in memory given by the caller; after that nothing is allocated. They take no
 * signals but those of their own faults, and results too small for a normal number become zero (float_mode.h). With a
 * list of CPUs, each thread is pinned to one, the owner too until close.
 */
#ifndef CLB_THREADS_H
#define CLB_THREADS_H

#include <pthread.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdint.h>

#include "../include/colibri.h"

#define CLB_THREAD_STACK_BYTES 1048576u /* of one worker; its lowest page is a guard where the mapping allows it */
#define CLB_THREADS_MAX_ITEMS 16777215u
#define CLB_THREADS_CPU_WORDS 16u /* 64 CPUs each: an affinity mask */

/* Does items [first, end) of a list. `thread` < count: who does it, to find private scratch. */
typedef void (*clb_work_fn)(void* context, uint32_t first, uint32_t end, uint32_t thread);

struct clb_threads;

typedef struct clb_worker {
  struct clb_threads* pool;
  pthread_t handle;
  uint32_t number; /* 1 .. count - 1 */
  uint32_t reserved;
} clb_worker;

/* Embedded in its owner; fields are private. Words that different threads write lie in different cache lines. */
typedef struct clb_threads {
  alignas(64) _Atomic uint64_t ticket;
  clb_work_fn _Atomic work; /* written by the owner between lists */
  void* _Atomic context;
  _Atomic uint32_t items;
  alignas(64) _Atomic uint32_t done; /* items of the list that are done; a futex of the owner */
  _Atomic uint32_t owner_sleeps;
  alignas(64) _Atomic uint32_t wake; /* changes when sleeping workers shall look; their futex */
  _Atomic uint32_t asleep;           /* 1: a worker may sleep on it */
  alignas(64) uint32_t count;        /* threads, the owner's included */
  uint32_t started;                  /* workers that exist */
  uint32_t pinned;                   /* 1: owner_cpus is what the owner had before */
  uint32_t reserved;
  unsigned char* stacks;
  uint64_t owner_cpus[CLB_THREADS_CPU_WORDS];
  clb_worker workers[CLB_MAX_THREADS - 1u];
} clb_threads;

typedef struct clb_threads_config {
  uint32_t count; /* 1 .. CLB_MAX_THREADS (asserted) */
  uint32_t reserved;
  const uint32_t* cpus; /* (count) CPU of each thread, below 64 * CLB_THREADS_CPU_WORDS; NULL: the system decides */
  void* stacks;         /* clb_threads_stack_bytes(count) at a page boundary, until close; unused when that is 0 */
} clb_threads_config;

uint64_t clb_threads_stack_bytes(uint32_t count);

/* The calling thread becomes the owner. The pool must not move until close. MEMORY iff the system gives no thread;
   ARGUMENT iff it does not give one of the CPUs. Then nothing is held. */
int32_t clb_threads_open(clb_threads* pool, const clb_threads_config* config);

/* Runs `work` over each item < items <= CLB_THREADS_MAX_ITEMS (asserted) once; they are taken in rising order. What was
   written before is seen by every item, and what items wrote is seen after. Owner only, not from an item. One item, or
   one thread, costs no more than the calls. */
void clb_threads_run(clb_threads* pool, uint32_t items, clb_work_fn work, void* context);

/* Ends the workers and gives the owner its CPUs back. Owner only. Harmless on zeroed memory and when repeated. */
void clb_threads_close(clb_threads* pool);

#endif /* CLB_THREADS_H */
