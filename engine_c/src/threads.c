/* threads.c: see threads.h. */
#include "threads.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../cpu/pause.h"
#include "clock.h"
#include "float_mode.h"
#include "invariant.h"

enum {
  YIELD_NS = 4000, /* longer than most waits between two lists of a step */
  SPIN_NS = 50000  /* then sleep: a list every 50 us at least keeps the workers awake */
};

#define LEFT_BITS 24
#define LEFT_MASK UINT64_C(0xffffff)
#define FIRST_LIST (UINT64_C(1) << LEFT_BITS)
#define CLOSING 0u /* this generation has no list and ends the workers */

_Static_assert(LEFT_MASK == CLB_THREADS_MAX_ITEMS, "the items of a list must fit their part of the ticket");

/* Returns when woken, when *word is not `value`, or for no reason. */
static void sleep_on(_Atomic uint32_t* word, uint32_t value) {
  (void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_all(_Atomic uint32_t* word) {
  (void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static uint64_t generation_of(uint64_t ticket) { return ticket >> LEFT_BITS; }

/* Takes and does items of one list until none is left, the next time a share of what is left now: a ticket that goes to
   and fro between cores costs more than most items. Returns how many. */
static uint32_t take_items(clb_threads* pool, uint32_t thread) {
  uint32_t done = 0;
  uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
  const uint64_t generation = generation_of(ticket);
  while (generation_of(ticket) == generation && (ticket & LEFT_MASK) != 0) {
    const uint32_t items = atomic_load_explicit(&pool->items, memory_order_relaxed);
    const clb_work_fn work = atomic_load_explicit(&pool->work, memory_order_relaxed);
    void* const context = atomic_load_explicit(&pool->context, memory_order_relaxed);
    const uint32_t left = (uint32_t)(ticket & LEFT_MASK);
    const uint32_t share = left / (pool->count + 1u);
    const uint32_t some = share == 0u ? 1u : share;
    const bool taken = atomic_compare_exchange_weak_explicit(&pool->ticket, &ticket, ticket - some,
                                                             memory_order_acq_rel, memory_order_acquire);
    if (taken) {
      work(context, items - left, items - left + some, thread);
      done += some;
      ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    }
  }
  return done;
}

/* One breath of a thread that spins since `start`. False once it should sleep. A wait that is not over at once leaves
   the CPU to others that want it, the daemon above all: they would take it anyway, but later, in the middle of an item.
 */
static bool spin_on(uint64_t start) {
  const uint64_t spun = clb_clock_ns() - start;
  clb_pause();
  if (spun > YIELD_NS) {
    (void)sched_yield();
  }
  return spun < SPIN_NS;
}

/* Until the ticket is another than `seen`, on which no item was left. This thread writes `asleep` and then reads the
   ticket, the owner writes the ticket and then reads `asleep`, in one order for all (seq_cst): one of them sees the
   other's. */
static void wait_for_list(clb_threads* pool, uint64_t seen) {
  const uint64_t start = clb_clock_ns();
  while (spin_on(start)) {
    if (atomic_load_explicit(&pool->ticket, memory_order_acquire) != seen) {
      return;
    }
  }
  for (;;) {
    const uint32_t wake = atomic_load(&pool->wake);
    atomic_store(&pool->asleep, 1);
    if (atomic_load(&pool->ticket) != seen) {
      return;
    }
    sleep_on(&pool->wake, wake);
  }
}

static void* worker_main(void* argument) {
  const clb_worker* const self = argument;
  clb_threads* const pool = self->pool;
  (void)clb_float_mode_enter();
  (void)pthread_setname_np(pthread_self(), "clb-worker");
  for (;;) {
    const uint64_t seen = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    if (generation_of(seen) == CLOSING) {
      return NULL;
    }
    if ((seen & LEFT_MASK) == 0) {
      wait_for_list(pool, seen);
      continue;
    }
    const uint32_t done = take_items(pool, self->number);
    if (done > 0u) {
      (void)atomic_fetch_add(&pool->done, done);
      if (atomic_load(&pool->owner_sleeps) != 0) {
        wake_all(&pool->done);
      }
    }
  }
}

/* Makes `ticket` visible and wakes who sleeps. */
static void post(clb_threads* pool, uint64_t ticket) {
  atomic_store(&pool->ticket, ticket);
  if (atomic_load(&pool->asleep) != 0) {
    atomic_store(&pool->asleep, 0);
    (void)atomic_fetch_add(&pool->wake, 1);
    wake_all(&pool->wake);
  }
}

/* Until `items` are done, `own` of them by the owner itself. */
static void wait_for_workers(clb_threads* pool, uint32_t items, uint32_t own) {
  const uint32_t others = items - own;
  const uint64_t start = clb_clock_ns();
  while (atomic_load_explicit(&pool->done, memory_order_acquire) != others) {
    if (spin_on(start)) {
      continue;
    }
    atomic_store(&pool->owner_sleeps, 1);
    const uint32_t done = atomic_load(&pool->done);
    if (done != others) {
      sleep_on(&pool->done, done);
    }
    atomic_store(&pool->owner_sleeps, 0);
  }
}

void clb_threads_run(clb_threads* pool, uint32_t items, clb_work_fn work, void* context) {
  CLB_ASSERT(items <= CLB_THREADS_MAX_ITEMS);
  if (pool->started == 0u || items <= 1u) {
    if (items > 0u) {
      work(context, 0, items, 0);
    }
    return;
  }
  const uint64_t before = atomic_load_explicit(&pool->ticket, memory_order_relaxed);
  CLB_ASSERT((before & LEFT_MASK) == 0);
  const uint64_t next = (generation_of(before) + 1u) << LEFT_BITS; /* a month of lists and more until it wraps */
  atomic_store_explicit(&pool->work, work, memory_order_relaxed);
  atomic_store_explicit(&pool->context, context, memory_order_relaxed);
  atomic_store_explicit(&pool->items, items, memory_order_relaxed);
  atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
  post(pool, (next == 0u ? FIRST_LIST : next) | items);
  const uint32_t own = take_items(pool, 0);
  if (own < items) {
    wait_for_workers(pool, items, own);
  }
}

/* --------------------------------------------------------- open and close */

uint64_t clb_threads_stack_bytes(uint32_t count) { return ((uint64_t)count - 1u) * CLB_THREAD_STACK_BYTES; }

static void set_cpu(cpu_set_t* set, uint32_t cpu) {
  CPU_ZERO(set);
  CPU_SET(cpu, set);
}

static unsigned char* stack_of(const clb_threads* pool, uint32_t number) {
  return pool->stacks + ((size_t)number - 1u) * CLB_THREAD_STACK_BYTES;
}

/* The page into which a stack would overflow. Refused in a mapping of larger pages: there nothing catches it. */
static void protect_end(unsigned char* stack, int protection) {
  (void)mprotect(stack, (size_t)sysconf(_SC_PAGESIZE), protection);
}

static int32_t start_worker(clb_threads* pool, const clb_threads_config* config, uint32_t number) {
  clb_worker* const worker = &pool->workers[number - 1u];
  unsigned char* const stack = stack_of(pool, number);
  cpu_set_t cpu;
  pthread_attr_t attributes;
  *worker = (clb_worker){.pool = pool, .number = number};
  protect_end(stack, PROT_NONE);
  if (pthread_attr_init(&attributes) != 0) {
    return CLB_ERR_MEMORY;
  }
  int failed = pthread_attr_setstack(&attributes, stack, CLB_THREAD_STACK_BYTES);
  if (failed == 0 && config->cpus != NULL) {
    set_cpu(&cpu, config->cpus[number]);
    failed = pthread_attr_setaffinity_np(&attributes, sizeof cpu, &cpu);
  }
  failed = failed != 0 ? failed : pthread_create(&worker->handle, &attributes, worker_main, worker);
  (void)pthread_attr_destroy(&attributes);
  if (failed != 0) {
    protect_end(stack, PROT_READ | PROT_WRITE);
    return failed == EINVAL ? CLB_ERR_ARGUMENT : CLB_ERR_MEMORY;
  }
  pool->started++;
  return CLB_OK;
}

/* Remembers the CPUs of the calling thread and pins it. */
static int32_t pin_owner(clb_threads* pool, uint32_t cpu) {
  cpu_set_t before;
  cpu_set_t one;
  _Static_assert(sizeof before <= sizeof pool->owner_cpus, "an affinity mask must fit");
  set_cpu(&one, cpu);
  if (sched_getaffinity(0, sizeof before, &before) != 0 || sched_setaffinity(0, sizeof one, &one) != 0) {
    return CLB_ERR_ARGUMENT;
  }
  (void)memcpy(pool->owner_cpus, &before, sizeof before);
  pool->pinned = 1;
  return CLB_OK;
}

int32_t clb_threads_open(clb_threads* pool, const clb_threads_config* config) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
  sigset_t all;
  sigset_t before;
  CLB_ASSERT(config->count >= 1u && config->count <= CLB_MAX_THREADS);
  CLB_ASSERT(config->count == 1u || config->stacks != NULL);
  (void)memset(pool, 0, sizeof *pool);
  pool->count = config->count;
  pool->stacks = config->stacks;
  atomic_store(&pool->ticket, FIRST_LIST);
  (void)sigfillset(&all);
  for (size_t i = 0; i < sizeof faults / sizeof faults[0]; ++i) {
    (void)sigdelset(&all, faults[i]);
  }
  (void)pthread_sigmask(SIG_SETMASK, &all, &before); /* workers inherit it */
  int32_t status = CLB_OK;
  for (uint32_t i = 1; i < config->count && status == CLB_OK; ++i) {
    status = start_worker(pool, config, i);
  }
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (status == CLB_OK && config->cpus != NULL) {
    status = pin_owner(pool, config->cpus[0]);
  }
  if (status != CLB_OK) {
    clb_threads_close(pool);
  }
  return status;
}

void clb_threads_close(clb_threads* pool) {
  post(pool, (uint64_t)CLOSING << LEFT_BITS);
  for (uint32_t i = 0; i < pool->started; ++i) {
    const int failed = pthread_join(pool->workers[i].handle, NULL);
    CLB_ASSERT(failed == 0);
    protect_end(stack_of(pool, i + 1u), PROT_READ | PROT_WRITE);
  }
  if (pool->pinned != 0u) {
    cpu_set_t before;
    (void)memcpy(&before, pool->owner_cpus, sizeof before);
    (void)sched_setaffinity(0, sizeof before, &before); /* refused when they were taken away meanwhile */
  }
  pool->started = 0;
  pool->pinned = 0;
  pool->count = 0;
}
