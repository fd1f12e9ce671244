/* test_threads.c: every item once, seen by all, whoever is late; and what a thread is given. */
#define _GNU_SOURCE 1 /* affinity masks */
#include "threads.h"

#include <float.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "float_mode.h"
#include "test.h"

enum { MOST_THREADS = 8, MOST_ITEMS = 5000 };

static clb_threads pool; /* must not move */
static _Alignas(4096) unsigned char stacks[(MOST_THREADS - 1) * CLB_THREAD_STACK_BYTES];

static int32_t open_with(uint32_t count, const uint32_t* cpus) {
  const clb_threads_config config = {.count = count, .cpus = cpus, .stacks = stacks};
  return clb_threads_open(&pool, &config);
}

static void open_pool(uint32_t count) { CHECK_EQ(open_with(count, NULL), CLB_OK); }

static void sleep_ms(uint32_t ms) {
  const struct timespec time = {.tv_sec = 0, .tv_nsec = (long)ms * 1000000};
  (void)nanosleep(&time, NULL);
}

typedef struct job {
  uint32_t count;             /* threads */
  uint32_t input;             /* written before each list */
  uint32_t times[MOST_ITEMS]; /* not atomic: the thread sanitizer sees what is not ordered */
  uint32_t results[MOST_ITEMS];
} job;

static job the_job;

static void note(void* context, uint32_t first, uint32_t end, uint32_t thread) {
  job* const j = context;
  for (uint32_t i = first; i < end; ++i) {
    j->times[i] += 1 + (thread < j->count ? 0u : 1000u);
    j->results[i] = j->input + i;
  }
}

/* Lists of any length run each item exactly once; items see what was written before, and the owner what they wrote. */
static void every_item_runs_once_and_is_seen(void) {
  const uint32_t counts[] = {1, 2, 3, MOST_THREADS};
  uint64_t state = 5;
  for (uint32_t c = 0; c < 4; ++c) {
    open_pool(counts[c]);
    the_job.count = counts[c];
    for (uint32_t list = 0; list < 2000; ++list) {
      const uint32_t items =
          list < 20 ? list : (uint32_t)(clb_test_random(&state) % (list % 50 == 0 ? MOST_ITEMS : 40));
      memset(the_job.times, 0, sizeof the_job.times);
      the_job.input = list;
      clb_threads_run(&pool, items, note, &the_job);
      for (uint32_t i = 0; i < items; ++i) {
        CHECK_EQ(the_job.times[i], 1);
        CHECK_EQ(the_job.results[i], list + i);
      }
      CHECK(items == MOST_ITEMS || the_job.times[items] == 0);
    }
    clb_threads_close(&pool);
  }
}

typedef struct stuck {
  _Atomic uint32_t by_owner;
  _Atomic uint32_t by_workers;
  uint32_t items;
  uint32_t enough; /* a worker goes on when the owner has done so many, or all are done */
} stuck;

/* A worker keeps its items until the owner has done its part, and then some: the owner falls asleep. */
static void hold(void* context, uint32_t first, uint32_t end, uint32_t thread) {
  stuck* const s = context;
  if (thread == 0) {
    (void)atomic_fetch_add(&s->by_owner, end - first);
    return;
  }
  (void)atomic_fetch_add(&s->by_workers, end - first);
  while (atomic_load(&s->by_owner) < s->enough && atomic_load(&s->by_owner) + atomic_load(&s->by_workers) < s->items) {
    sleep_ms(1);
  }
  sleep_ms(2);
}

/* The others do the share of a worker that does not come on, and the list ends only when its items are done, too. */
static void a_late_worker_holds_up_what_it_took(void) {
  open_pool(3);
  for (uint32_t list = 0; list < 20; ++list) {
    stuck s = {.items = 300, .enough = 150};
    clb_threads_run(&pool, s.items, hold, &s);
    CHECK_EQ(atomic_load(&s.by_owner) + atomic_load(&s.by_workers), s.items);
    CHECK(atomic_load(&s.by_owner) >= s.enough);
  }
  clb_threads_close(&pool);
}

typedef struct calls {
  _Atomic uint32_t count;
  _Atomic uint32_t last; /* items of the call that held the last one */
  uint32_t items;
} calls;

static void count_calls(void* context, uint32_t first, uint32_t end, uint32_t thread) {
  calls* const c = context;
  (void)thread;
  (void)atomic_fetch_add(&c->count, 1);
  if (end == c->items) {
    atomic_store(&c->last, end - first);
  }
}

/* Many items are taken at once, the last ones one by one. */
static void shares_become_smaller(void) {
  open_pool(2);
  calls c = {.items = 1000};
  clb_threads_run(&pool, c.items, count_calls, &c);
  CHECK(atomic_load(&c.count) < 40);
  CHECK_EQ(atomic_load(&c.last), 1);
  clb_threads_close(&pool);
}

static double cpu_seconds(void) {
  struct timespec time;
  CHECK_EQ(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time), 0);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Processor time of a tenth of a second, the least of some: a busy machine may take long to let them sleep. */
static double least_idle_seconds(void) {
  double least = 1.0;
  for (uint32_t tries = 0; tries < 10 && least >= 0.02; ++tries) {
    sleep_ms(5); /* longer than they spin */
    const double before = cpu_seconds();
    sleep_ms(100);
    const double spent = cpu_seconds() - before;
    least = spent < least ? spent : least;
  }
  return least;
}

/* Workers without work sleep, and wake for the next list: one that only they can finish. */
static void idle_workers_sleep_and_wake(void) {
  open_pool(3);
  for (uint32_t round = 0; round < 5; ++round) {
    the_job.count = 3;
    clb_threads_run(&pool, 100, note, &the_job);
    CHECK(least_idle_seconds() < 0.02);
    stuck s = {.items = 3, .enough = 3};
    clb_threads_run(&pool, s.items, hold, &s);
    CHECK_EQ(atomic_load(&s.by_owner) + atomic_load(&s.by_workers), 3);
  }
  clb_threads_close(&pool);
}

typedef struct seen {
  _Atomic uint32_t arrived;
  uint32_t count;
  float tiny[MOST_THREADS];
  int takes_signal[MOST_THREADS];
  int takes_fault[MOST_THREADS];
  cpu_set_t cpus[MOST_THREADS];
} seen;

/* One item a thread: nobody leaves before all have come. */
static void look(void* context, uint32_t first, uint32_t end, uint32_t thread) {
  seen* const s = context;
  volatile float small = FLT_MIN;
  sigset_t blocked;
  CHECK_EQ(end - first, 1);
  (void)pthread_sigmask(SIG_SETMASK, NULL, &blocked);
  s->tiny[thread] = small * 0.5f;
  s->takes_signal[thread] = sigismember(&blocked, SIGTERM) == 0;
  s->takes_fault[thread] = sigismember(&blocked, SIGSEGV) == 0;
  (void)sched_getaffinity(0, sizeof s->cpus[thread], &s->cpus[thread]);
  (void)atomic_fetch_add(&s->arrived, 1);
  while (atomic_load(&s->arrived) < s->count) {
    sleep_ms(1);
  }
}

/* Workers compute in the engine's float mode and leave signals to the owner, but not those of their own faults. */
static void workers_have_the_float_mode_and_no_signals(void) {
  seen s = {.count = 3};
  volatile float small = FLT_MIN;
  const clb_float_mode mode = clb_float_mode_enter();
  const float flushed = small * 0.5f; /* 0 where the machine can do that; valgrind cannot */
  clb_float_mode_leave(mode);
  open_pool(3);
  clb_threads_run(&pool, 3, look, &s);
  for (uint32_t i = 1; i < 3; ++i) {
    CHECK(s.tiny[i] == flushed);
    CHECK(!s.takes_signal[i]);
    CHECK(s.takes_fault[i]);
  }
  CHECK(s.tiny[0] > 0.0f);
  CHECK(s.takes_signal[0]);
  clb_threads_close(&pool);
}

/* Every thread runs on its own CPU of the list, and the owner gets back the CPUs that it had. */
static void threads_are_pinned_until_close(void) {
  cpu_set_t before;
  cpu_set_t after;
  uint32_t cpus[2] = {0, 0};
  CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  for (uint32_t cpu = 0, found = 0; cpu < 1024 && found < 2; ++cpu) {
    if (CPU_ISSET(cpu, &before)) {
      cpus[found++] = cpu;
      cpus[1] = cpu; /* one CPU only: both on it */
    }
  }
  seen s = {.count = 2};
  CHECK_EQ(open_with(2, cpus), CLB_OK);
  clb_threads_run(&pool, 2, look, &s);
  for (uint32_t i = 0; i < 2; ++i) {
    CHECK_EQ(CPU_COUNT(&s.cpus[i]), 1);
    CHECK(CPU_ISSET(cpus[i], &s.cpus[i]));
  }
  clb_threads_close(&pool);
  CHECK_EQ(sched_getaffinity(0, sizeof after, &after), 0);
  CHECK(CPU_EQUAL(&before, &after));
}

/* A CPU that the machine does not have is refused, whichever thread was to have it, and nothing is held. */
static void a_missing_cpu_is_refused(void) {
  cpu_set_t before;
  cpu_set_t after;
  CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  uint32_t cpu = 0;
  while (!CPU_ISSET(cpu, &before)) {
    ++cpu;
  }
  for (uint32_t place = 0; place < 3; ++place) {
    uint32_t cpus[3] = {cpu, cpu, cpu};
    cpus[place] = 1023;
    CHECK_EQ(open_with(3, cpus), CLB_ERR_ARGUMENT);
    CHECK_EQ(pool.started, 0);
    CHECK_EQ(sched_getaffinity(0, sizeof after, &after), 0);
    CHECK(CPU_EQUAL(&before, &after));
  }
}

/* Open and close may follow each other at once, close may be repeated, and zeroed memory is a closed pool. */
static void close_is_clean_at_any_time(void) {
  static clb_threads never_opened;
  clb_threads_close(&never_opened);
  for (uint32_t i = 0; i < 200; ++i) {
    open_pool(1 + i % 4);
    if (i % 3 == 0) {
      the_job.count = MOST_THREADS;
      clb_threads_run(&pool, i, note, &the_job);
    }
    clb_threads_close(&pool);
    clb_threads_close(&pool);
  }
}

/* Numbering of lists starts anew after the last number. */
static void numbers_of_lists_wrap(void) {
  open_pool(2);
  the_job.count = 2;
  atomic_store(&pool.ticket, UINT64_MAX << 24);
  for (uint32_t list = 0; list < 100; ++list) {
    memset(the_job.times, 0, sizeof the_job.times);
    clb_threads_run(&pool, 50, note, &the_job);
    for (uint32_t i = 0; i < 50; ++i) {
      CHECK_EQ(the_job.times[i], 1);
    }
  }
  CHECK_EQ(pool.started, 2 - 1);
  clb_threads_close(&pool);
}

static void fail_in_worker(void* context, uint32_t first, uint32_t end, uint32_t thread) {
  (void)context;
  (void)first;
  (void)end;
  if (thread != 0) {
    (void)raise(SIGSEGV);
  }
  sleep_ms(1);
}

/* A fault in a worker ends the whole process by the fault's own signal: its parent sees why. */
static void a_fault_in_a_worker_ends_the_process(void) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    (void)signal(SIGSEGV, SIG_DFL);
    open_pool(2);
    clb_threads_run(&pool, 10000, fail_in_worker, NULL);
    _exit(0);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFSIGNALED(status));
  CHECK_EQ(WTERMSIG(status), SIGSEGV);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {
      TEST(every_item_runs_once_and_is_seen),
      TEST(a_late_worker_holds_up_what_it_took),
      TEST(shares_become_smaller),
      TEST(idle_workers_sleep_and_wake),
      TEST(workers_have_the_float_mode_and_no_signals),
      TEST(threads_are_pinned_until_close),
      TEST(a_missing_cpu_is_refused),
      TEST(close_is_clean_at_any_time),
      TEST(numbers_of_lists_wrap),
      TEST(a_fault_in_a_worker_ends_the_process),
  };
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
