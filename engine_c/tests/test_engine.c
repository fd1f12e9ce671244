/* test_engine.c: the engine's life: configuration, open and close, memory, run. Commands: test_commands.c. */
#define _DEFAULT_SOURCE 1 /* usleep */
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "alloc_hook.h"
#include "engine_rig.h"
#include "test.h"

static rig main_rig; /* large: not on the stack */

static void open_rig(rig* r) {
  const int32_t status = rig_open(r);
  if (status != CLB_OK) {
    (void)fprintf(stderr, "%s\n", r->error.message);
  }
  CHECK_EQ(status, CLB_OK);
}

/* After open nothing is taken from the system, and close gives everything back. */
static void nothing_is_allocated_after_open(void) {
  const int64_t blocks = alloc_hook.live_blocks;
  const int64_t mapped = alloc_hook.mapped_bytes;
  clb_request request = rig_request(14, 30, 20);
  request.flags |= CLB_REQ_PROMPT_LOGPROBS;
  request.temperature = 1.0f;
  request.top_k = 7;
  request.frequency_penalty = 0.5f;
  rig_init(&main_rig, 2);
  main_rig.config.threads = 3;
  open_rig(&main_rig);
  const uint64_t calls = alloc_hook.calls;
  rig_run_alone(&main_rig, 1, &request, 14);
  CHECK_EQ(alloc_hook.calls, calls);
  CHECK_EQ(rig_stats(&main_rig).allocations_after_open, 0);
  CHECK_EQ(rig_stats(&main_rig).expert_relaunches, 0);
  rig_close(&main_rig);
  CHECK_EQ(alloc_hook.live_blocks, blocks);
  CHECK_EQ(alloc_hook.mapped_bytes, mapped);
}

/* Whichever allocation fails, open says MEMORY with a message and holds nothing. */
static void open_survives_each_failed_allocation(void) {
  rig* const r = &main_rig;
  const int64_t blocks = alloc_hook.live_blocks;
  const int64_t mapped = alloc_hook.mapped_bytes;
  uint32_t failures = 0;
  rig_init(r, 2);
  r->config.threads = 2;
  for (uint64_t n = 2; n < 100; ++n) { /* the first is the rig's own channel */
    alloc_hook_fail(n);
    const int32_t status = rig_open(r);
    alloc_hook_fail(0);
    if (status == CLB_OK) {
      break;
    }
    CHECK_EQ(status, CLB_ERR_MEMORY);
    CHECK_EQ(r->error.status, CLB_ERR_MEMORY);
    CHECK(r->error.message[0] != '\0');
    CHECK_EQ(alloc_hook.live_blocks, blocks);
    CHECK_EQ(alloc_hook.mapped_bytes, mapped);
    ++failures;
  }
  CHECK(failures >= 7); /* scratch of the loader, the host block, two mappings a tier */
  rig_close(r);
  CHECK_EQ(alloc_hook.live_blocks, blocks);
}

/* What cannot work is refused by plan and open alike, with the value and its limit. */
static void bad_configurations_are_refused(void) {
  rig* const r = &main_rig;
  clb_memory_plan plan;
  clb_error error;
  const struct {
    uint32_t which;
    int32_t status;
    const char* text;
  } cases[] = {{0, CLB_ERR_VERSION, "engine configuration"},
               {1, CLB_ERR_ARGUMENT, "prefill_chunk is 0"},
               {2, CLB_ERR_ARGUMENT, "prefill_tokens 7"},
               {3, CLB_ERR_UNSUPPORTED, "kv_precision is 2"},
               {4, CLB_ERR_ARGUMENT, "threads is 257"},
               {5, CLB_ERR_ARGUMENT, "page_bytes is 5000"},
               {6, CLB_ERR_MEMORY, "tier temp"},
               {7, CLB_ERR_ARGUMENT, "max_seq_len is 97"},
               {8, CLB_ERR_ARGUMENT, "vocabulary 98"},
               {9, CLB_ERR_ARGUMENT, "slots"},
               {10, CLB_ERR_ARGUMENT, "swap_slots is 65"}};
  for (uint32_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    rig_init(r, 2);
    clb_engine_config* const config = &r->config;
    config->struct_bytes += i == 0 ? 8u : 0u;
    config->prefill_chunk = i == 1 ? 0 : config->prefill_chunk;
    config->prefill_tokens = i == 2 ? 7 : config->prefill_tokens;
    config->kv_precision = i == 3 ? CLB_BF16 : config->kv_precision;
    config->threads = i == 4 ? CLB_MAX_THREADS + 1 : config->threads;
    config->tier_kv.page_bytes = i == 5 ? 5000 : config->tier_kv.page_bytes;
    config->tier_temp.bytes = i == 6 ? 8192 : 0;
    config->channel.max_seq_len = i == 7 ? 97 : config->channel.max_seq_len;
    config->channel.vocab_size = i == 8 ? 98 : config->channel.vocab_size;
    config->channel.slots = i == 9 ? CLB_MAX_SLOTS + 1 : config->channel.slots;
    config->swap_slots = i == 10 ? CLB_MAX_SWAP_SLOTS + 1 : 0;
    memset(&error, 0, sizeof error);
    CHECK_EQ(clb_engine_plan(config, &plan, &error), cases[i].status);
    CHECK_CONTAINS(error.message, cases[i].text);
    CHECK_EQ(clb_engine_open(config, &r->engine, &error), cases[i].status);
    CHECK(r->engine == NULL);
  }
  rig_init(r, 2);
  r->config.module_count = 1; /* fp32 alone, while the dummy's matrices are bf16 */
  CHECK_EQ(rig_open(r), CLB_ERR_MODULE);
  CHECK_CONTAINS(r->error.message, "bf16");
  (void)snprintf(r->paths[0], sizeof r->paths[0], "/nowhere/at/all.so");
  CHECK_EQ(rig_open(r), CLB_ERR_MODULE);
  CHECK(strstr(r->error.message, "nowhere") == NULL);
}

/* The bill is what open takes. */
static void plan_is_what_open_takes(void) {
  clb_memory_plan plan;
  rig_init(&main_rig, 3);
  CHECK_EQ(clb_engine_plan(&main_rig.config, &plan, &main_rig.error), CLB_OK);
  CHECK_EQ(plan.total, plan.weights + plan.kv + plan.temp + plan.host);
  CHECK_EQ(plan.kv_bytes_per_token, 3 * 32 * 2);
  CHECK(plan.kv_tokens >= 3 * RIG_MAX_SEQ);
  CHECK(plan.dispatch > 0 && plan.dispatch <= plan.temp);
  open_rig(&main_rig);
  const clb_stats stats = rig_stats(&main_rig);
  CHECK_EQ(stats.weights_bytes, plan.weights);
  CHECK_EQ(stats.kv_bytes, plan.kv);
  CHECK_EQ(stats.temp_bytes, plan.temp);
  CHECK(stats.loaded_bytes > 0);
  rig_close(&main_rig);
}

static void* run_engine(void* argument) {
  static int32_t status;
  status = clb_engine_run(argument);
  return &status;
}

/* run serves what is pushed while it sleeps, signals its events, beats while idle, and ends by mail. */
static void run_serves_until_stopped(void) {
  rig* const r = &main_rig;
  pthread_t thread;
  void* result = NULL;
  rig_init(r, 2);
  r->config.command_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  r->config.event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  open_rig(r);
  CHECK_EQ(pthread_create(&thread, NULL, run_engine, r->engine), 0);
  (void)usleep(20000); /* long enough for the engine to sleep; it must be woken in any case */
  const clb_request request = rig_request(15, 9, 6);
  (void)rig_write(r, 0, &request, 15);
  rig_start(r, 0);
  const uint64_t one = 1;
  CHECK_EQ(write(r->config.command_fd, &one, sizeof one), (ssize_t)sizeof one);
  uint32_t tokens = 0;
  while (tokens < 6) {
    struct pollfd wait = {.fd = r->config.event_fd, .events = POLLIN};
    uint64_t signals = 0;
    clb_event events[16];
    CHECK_EQ(poll(&wait, 1, 120000), 1);
    CHECK_EQ(read(r->config.event_fd, &signals, sizeof signals), (ssize_t)sizeof signals);
    const uint32_t count = clb_event_pop(r->config.channel_base, events, 16);
    for (uint32_t i = 0; i < count; ++i) {
      tokens += events[i].kind == CLB_EVENT_TOKEN ? 1u : 0u;
    }
  }
  CHECK_EQ(clb_engine_post(r->engine, 99), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_engine_post(r->engine, CLB_MAIL_CHECK), CLB_OK);
  const uint64_t beat = rig_stats(r).progress;
  for (uint32_t i = 0; i < 12000 && rig_stats(r).progress == beat; ++i) {
    (void)usleep(10000);
  }
  CHECK(rig_stats(r).progress > beat);
  CHECK_EQ(clb_engine_post(r->engine, CLB_MAIL_STOP), CLB_OK);
  CHECK_EQ(pthread_join(thread, &result), 0);
  CHECK_EQ(*(int32_t*)result, CLB_OK);
  (void)close(r->config.command_fd);
  (void)close(r->config.event_fd);
  rig_close(r);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(nothing_is_allocated_after_open), TEST(open_survives_each_failed_allocation),
                                   TEST(bad_configurations_are_refused), TEST(plan_is_what_open_takes),
                                   TEST(run_serves_until_stopped)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
