/*
 * emulator.cpp: the machine behind emulator.h: blocks, fibers, meetings, late copies. Test-only. One thread.
 *
 * emulator_launch(run, args, grid, block, shared bytes) runs a kernel to its end; `run` calls it with its argument
 * struct (a table of these is generated from the sources by cuda_harness.py).
 */
#include "emulator.h"

#include <ucontext.h>
#include <cstdio>
#include <cstdlib>
#include <vector>

uint3 threadIdx, blockIdx, blockDim, gridDim;
uint32_t emulator_order;
uint32_t emulator_shared_bytes;
static constexpr uint32_t SHARED_BYTES = 227 * 1024; /* of a block on sm_90 */
static constexpr uint32_t MAX_THREADS = 1024;
static constexpr size_t STACK_BYTES = 128 * 1024;
thread_local uint4 memory[SHARED_BYTES / sizeof(uint4)];

struct copy {
  void* to;
  const void* from;
  uint32_t bytes;
};

struct fiber {
  ucontext_t context;
  uint32_t index;
  bool done;
  bool at_barrier;
  uint32_t barrier;                      /* which, if at_barrier */
  uint64_t waits_for;                    /* number of the meeting that must have happened */
  uint64_t groups;                       /* ended so far */
  std::vector<std::vector<copy>> copies; /* the groups that were not waited for; the last one is open */
};

struct warp {
  uint32_t arrived;
  uint64_t meetings;
  emulator_words in[32];
  emulator_words out[2][32];
};

static fiber fibers[MAX_THREADS];
static warp warps[MAX_THREADS / 32];
static char* stacks;
static ucontext_t scheduler;
static fiber* current;
static uint32_t thread_count, live;
static uint32_t barrier_arrived[16];
static void (*run_kernel)(const void* args);
static const void* kernel_args;

[[noreturn]] static void fail(const char* what) {
  std::fprintf(stderr, "emulator: %s in block (%u, %u, %u), thread %u\n", what, blockIdx.x, blockIdx.y, blockIdx.z,
               current != nullptr ? current->index : 0u);
  std::abort();
}

static void yield_now() { swapcontext(&current->context, &scheduler); }

static void finish_copies(fiber& f, size_t groups) {
  for (size_t i = 0; i < groups; i++)
    for (const copy& c : f.copies[i])
      std::memcpy(c.to, c.from, c.bytes);
  f.copies.erase(f.copies.begin(), f.copies.begin() + (std::ptrdiff_t)groups);
}

void emulator_copy_later(void* to, const void* from, uint32_t bytes) {
  current->copies.back().push_back({to, from, bytes});
}
void emulator_end_group() { current->copies.emplace_back(); }
void emulator_wait_groups(uint32_t pending) {
  const size_t ended = current->copies.size() - 1;
  if (ended > pending) finish_copies(*current, ended - pending);
}

static void release_barrier(uint32_t barrier, uint32_t threads) {
  if (barrier_arrived[barrier] == 0 || barrier_arrived[barrier] < threads) return;
  barrier_arrived[barrier] = 0;
  for (uint32_t i = 0; i < thread_count; i++)
    if (fibers[i].barrier == barrier) fibers[i].at_barrier = false;
}

void emulator_barrier(uint32_t barrier, uint32_t threads) {
  if (barrier > 15 || threads % 32 != 0) fail("no such barrier");
  current->barrier = barrier;
  current->at_barrier = true;
  barrier_arrived[barrier]++;
  release_barrier(barrier, threads == 0 ? live : threads);
  while (current->at_barrier)
    yield_now();
}

emulator_words emulator_meet(const emulator_words& own, void (*work)(const emulator_words*, emulator_words*, uint32_t),
                             uint32_t argument) {
  const uint32_t lane = current->index % 32;
  warp& w = warps[current->index / 32];
  const uint64_t meeting = w.meetings;
  for (uint32_t i = current->index - lane; i < current->index - lane + 32; i++)
    if (i >= thread_count || fibers[i].done) fail("a warp meets without all of its lanes");
  w.in[lane] = own;
  w.arrived++;
  if (w.arrived == 32) {
    work(w.in, w.out[meeting % 2], argument);
    w.arrived = 0;
    w.meetings++;
  }
  current->waits_for = meeting + 1;
  while (w.meetings <= meeting)
    yield_now();
  return w.out[meeting % 2][lane];
}

static void fiber_main() {
  run_kernel(kernel_args);
  if (current->copies.size() > 1 || !current->copies.back().empty()) fail("copies in flight at the end");
  current->done = true;
  live--;
  release_barrier(0, live);
  yield_now();
}

static bool ready(const fiber& f) { return !f.done && !f.at_barrier && warps[f.index / 32].meetings >= f.waits_for; }

static void run_block() {
  std::memset(memory, 0xff, sizeof memory);
  std::memset(warps, 0, sizeof warps);
  live = thread_count;
  std::memset(barrier_arrived, 0, sizeof barrier_arrived);
  for (uint32_t i = 0; i < thread_count; i++) {
    fiber& f = fibers[i];
    f.index = i;
    f.done = f.at_barrier = false;
    f.waits_for = 0;
    f.copies.assign(1, {});
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks + i * STACK_BYTES;
    f.context.uc_stack.ss_size = STACK_BYTES;
    f.context.uc_link = nullptr;
    makecontext(&f.context, fiber_main, 0);
  }
  while (live > 0) {
    bool any = false;
    for (uint32_t n = 0; n < thread_count; n++) {
      fiber& f = fibers[emulator_order == 0 ? n : thread_count - 1 - n];
      if (!ready(f)) continue;
      any = true;
      current = &f;
      threadIdx = {f.index % blockDim.x, f.index / blockDim.x % blockDim.y, f.index / blockDim.x / blockDim.y};
      swapcontext(&scheduler, &f.context);
    }
    if (!any) fail("every thread waits");
  }
}

extern "C" void emulator_launch(void (*run)(const void*), const void* args, const uint32_t* grid, const uint32_t* block,
                                uint32_t shared_bytes) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  emulator_shared_bytes = shared_bytes;
  thread_count = block[0] * block[1] * block[2];
  current = nullptr;
  blockIdx = {0, 0, 0};
  if (thread_count == 0 || thread_count > MAX_THREADS || shared_bytes > SHARED_BYTES) fail("bad launch");
  if (stacks == nullptr) stacks = static_cast<char*>(std::malloc(MAX_THREADS * STACK_BYTES));
  run_kernel = run;
  kernel_args = args;
  for (uint32_t z = 0; z < grid[2]; z++)
    for (uint32_t y = 0; y < grid[1]; y++)
      for (uint32_t x = 0; x < grid[0]; x++) {
        blockIdx = {x, y, z};
        run_block();
      }
}
