/*
 * test_step_threads.c: how many threads compute changes no bit. The rig's model is made wide enough here that its
 * products, rows and attention are worth sharing.
 */
#include "engine_internal.h"
#include "engine_rig.h"
#include "test.h"

enum { REQUESTS = 12, HIDDEN = 256, HEADS = 16, KV_HEADS = 2, HEAD_DIM = 16 };

static rig main_rig; /* large: not on the stack */
static rig_output expected[REQUESTS];

static void init_wide(rig* r, uint32_t threads) {
  rig_init(r, RIG_MAX_SLOTS);
  r->model.hidden = HIDDEN;
  r->model.heads = HEADS;
  r->model.kv_heads = KV_HEADS;
  r->config.channel.hidden = HIDDEN;
  r->model.head_dim = HEAD_DIM;
  for (uint32_t i = 0; i < RIG_LAYERS; ++i) {
    r->layers[i].kv_values_per_token = 2 * KV_HEADS * HEAD_DIM;
    r->layers[i].expert_width *= 5;
    r->layers[i].shared_width *= 5;
  }
  r->config.prefill_chunk = 48;
  r->config.prefill_tokens = 300;
  r->config.threads = threads;
}

static void open_wide(rig* r, uint32_t threads) {
  init_wide(r, threads);
  const int32_t status = rig_open(r);
  if (status != CLB_OK) {
    (void)fprintf(stderr, "%s\n", r->error.message);
  }
  CHECK_EQ(status, CLB_OK);
}

static clb_request request_of(uint32_t number) {
  clb_request request = rig_request(number, 20 + 5 * (number % 9), 3 + number % 7);
  request.temperature = number % 3 == 0 ? 0.8f : 0.0f;
  if (number % 4 == 0) {
    request.flags |= CLB_REQ_PROMPT_LOGPROBS;
    request.prompt_top_logprobs = 2;
  }
  return request;
}

/* All requests, as many at once as there are slots. */
static void serve(rig* r, rig_output* outputs) {
  uint32_t running[RIG_MAX_SLOTS] = {0}; /* request + 1 */
  uint32_t next = 0;
  uint32_t done = 0;
  for (uint32_t turn = 0; turn < 500 && done < REQUESTS; ++turn) {
    for (uint32_t slot = 0; slot < RIG_MAX_SLOTS; ++slot) {
      if (running[slot] == 0 && next < REQUESTS) {
        const clb_request request = request_of(next);
        (void)rig_write(r, slot, &request, next);
        rig_start(r, slot);
        running[slot] = ++next;
      }
    }
    (void)rig_turn(r);
    for (uint32_t slot = 0; slot < RIG_MAX_SLOTS; ++slot) {
      if (running[slot] != 0 && r->outputs[slot].ended != 0) {
        outputs[running[slot] - 1] = r->outputs[slot];
        running[slot] = 0;
        ++done;
      }
    }
  }
  CHECK_EQ(done, REQUESTS);
}

static uint64_t lists_run(const rig* r) { return atomic_load(&r->engine->threads.ticket) >> 24; }

/* Every record of every request has the same bits with one, two, three and seven threads. */
static void threads_change_no_bit(void) {
  static rig_output outputs[REQUESTS];
  const uint32_t counts[] = {1, 2, 3, 7};
  rig* const r = &main_rig;
  for (uint32_t c = 0; c < 4; ++c) {
    open_wide(r, counts[c]);
    serve(r, c == 0 ? expected : outputs);
    CHECK(counts[c] == 1 ? lists_run(r) == 1 : lists_run(r) > 100); /* the work was shared */
    CHECK_EQ(rig_stats(r).allocations_after_open, 0);
    CHECK_EQ(rig_stats(r).expert_relaunches, 0);
    rig_close(r);
    for (uint32_t i = 0; i < REQUESTS && c > 0; ++i) {
      CHECK_EQ(outputs[i].count, expected[i].count);
      CHECK(memcmp(outputs[i].records, expected[i].records, expected[i].count * sizeof expected[i].records[0]) == 0);
      CHECK_EQ(outputs[i].usage.assignments, expected[i].usage.assignments);
    }
  }
}

/* What each worker needs is in the bill: its stack, and some scratch to sample with. */
static void workers_are_in_the_bill(void) {
  clb_memory_plan plans[3];
  for (uint32_t i = 0; i < 3; ++i) {
    init_wide(&main_rig, 1 + i);
    CHECK_EQ(clb_engine_plan(&main_rig.config, &plans[i], &main_rig.error), CLB_OK);
  }
  for (uint32_t i = 1; i < 3; ++i) {
    const uint64_t more = plans[i].temp - plans[i - 1].temp;
    CHECK(more >= CLB_THREAD_STACK_BYTES && more <= CLB_THREAD_STACK_BYTES + 65536);
  }
}

/* A CPU that this process may not use fails open with a reason, and nothing is held. */
static void a_missing_cpu_fails_open(void) {
  const uint32_t cpus[] = {1023, 1023};
  init_wide(&main_rig, 2);
  main_rig.config.cpus = cpus;
  CHECK_EQ(rig_open(&main_rig), CLB_ERR_ARGUMENT);
  CHECK_CONTAINS(main_rig.error.message, "CPU");
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(threads_change_no_bit), TEST(workers_are_in_the_bill),
                                   TEST(a_missing_cpu_fails_open)};
  return rig_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
