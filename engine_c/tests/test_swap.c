/* test_swap.c: experts that replace others between two steps: what is computed with which, what is refused, and that
   memory goes round. On a device: test_cuda_swap.c. */
#define _DEFAULT_SOURCE 1 /* usleep */
#include "swap.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "alloc_hook.h"
#include "engine_rig.h"
#include "loader_internal.h"
#include "test.h"

enum { LAYER = 0, EXPERT = 2, HIDDEN = 32, MOST_BYTES = 65536 };

static rig main_rig; /* large: not on the stack */

/* An expert's file: the values that dummy weights of `seed` have in this place. */
typedef struct expert_file {
  unsigned char bytes[MOST_BYTES];
  uint32_t crc;
  clb_section_desc sections[3];
  clb_file_desc file;
  clb_swap_desc desc;
} expert_file;

static expert_file old_file; /* as loaded */
static expert_file new_file;

static void write_fd(expert_file* f) {
  f->crc = clb_crc32c(0, f->bytes, (size_t)f->file.bytes);
  CHECK_EQ(pwrite(f->desc.fd, f->bytes, (size_t)f->file.bytes, 0), (ssize_t)f->file.bytes);
}

static void make_file(expert_file* f, uint32_t layer, uint32_t expert, uint32_t precision, uint64_t seed) {
  static const uint32_t roles[3] = {CLB_ROLE_GATE, CLB_ROLE_UP, CLB_ROLE_DOWN};
  uint64_t end = 0;
  memset(f, 0, sizeof *f);
  for (uint32_t i = 0; i < 3; ++i) {
    const clb_demand demand = clb_demand_of(&main_rig.model, roles[i], (int32_t)layer, (int32_t)expert);
    const clb_place place = {roles[i], (int32_t)layer, (int32_t)expert};
    const uint64_t bytes = clb_layout_bytes(CLB_LAYOUT_ROWS16, precision, demand.rows, demand.cols);
    f->sections[i] = (clb_section_desc){.role = roles[i],
                                        .layer = (int32_t)layer,
                                        .expert = (int32_t)expert,
                                        .offset = end,
                                        .bytes = bytes,
                                        .precision = precision,
                                        .layout = CLB_LAYOUT_ROWS16,
                                        .rows = demand.rows,
                                        .cols = demand.cols};
    clb_dummy_fill(seed, place, precision, CLB_LAYOUT_ROWS16, demand.rows, demand.cols, f->bytes + end);
    end = clb_align_up(end + bytes, 256);
    CHECK(end <= MOST_BYTES);
  }
  f->file = (clb_file_desc){.name = "expert.bin",
                            .bytes = f->sections[2].offset + f->sections[2].bytes,
                            .crc32c = &f->crc,
                            .crc_count = 1,
                            .alignment = 4096};
  f->desc = (clb_swap_desc){.abi_version = CLB_ABI_VERSION,
                            .struct_bytes = sizeof(clb_swap_desc),
                            .layer = layer,
                            .expert = expert,
                            .fd = memfd_create("expert", MFD_CLOEXEC),
                            .file = &f->file,
                            .sections = f->sections};
  CHECK(f->desc.fd >= 0);
  write_fd(f);
}

static void open_rig(rig* r, uint32_t slots, uint32_t swap_slots) {
  rig_init(r, slots);
  r->config.swap_slots = swap_slots;
  const int32_t status = rig_open(r);
  if (status != CLB_OK) {
    (void)fprintf(stderr, "%s\n", r->error.message);
  }
  CHECK_EQ(status, CLB_OK);
  make_file(&old_file, LAYER, EXPERT, CLB_BF16, r->config.dummy_seed);
  make_file(&new_file, LAYER, EXPERT, CLB_BF16, 99);
}

static void close_rig(rig* r) {
  (void)close(old_file.desc.fd);
  (void)close(new_file.desc.fd);
  rig_close(r);
}

static int32_t begin(rig* r, const expert_file* f) {
  r->error.message[0] = '\0';
  const int32_t status = clb_engine_swap_stage(r->engine, &f->desc, &r->error);
  return status != CLB_OK ? status : clb_engine_swap_post(r->engine, rig_stats(r).weights_generation + 1u);
}

/* Between two turns of the test's own thread. Returns free swap slots. */
static uint32_t swap_now(rig* r, const expert_file* f) {
  clb_swap_report report;
  const int32_t status = begin(r, f);
  if (status != CLB_OK) {
    (void)fprintf(stderr, "%s\n", r->error.message);
  }
  CHECK_EQ(status, CLB_OK);
  (void)rig_turn(r);
  CHECK_EQ(clb_engine_swap_wait(r->engine, 0, &report, &r->error), CLB_OK);
  CHECK_EQ(report.weights_generation, rig_stats(r).weights_generation);
  return report.free_blocks;
}

static void copy_output(const rig* r, uint32_t slot, rig_output* to) { *to = r->outputs[slot]; }

static int same_tokens(const rig_output* a, const rig_output* b) {
  return a->count == b->count && memcmp(a->records, b->records, a->count * sizeof a->records[0]) == 0;
}

/* The new expert computes from the switch on, the old one again after it is put back; the same bytes change nothing. */
static void experts_are_replaced(void) {
  static rig_output first;
  static rig_output other;
  rig* const r = &main_rig;
  const clb_request request = rig_request(3, 20, 30);
  open_rig(r, 2, 1);
  rig_run_alone(r, 0, &request, 3);
  copy_output(r, 0, &first);
  CHECK_EQ(first.usage.weights_generation, 0);
  CHECK_EQ(swap_now(r, &old_file), 1);
  rig_run_alone(r, 0, &request, 3);
  CHECK(same_tokens(&r->outputs[0], &first));
  CHECK_EQ(r->outputs[0].usage.weights_generation, 1);
  CHECK_EQ(swap_now(r, &new_file), 1);
  rig_run_alone(r, 1, &request, 3);
  copy_output(r, 1, &other);
  CHECK(!same_tokens(&other, &first));
  CHECK_EQ(swap_now(r, &old_file), 1);
  const expert_file kernel_only = {
      .desc = {.abi_version = CLB_ABI_VERSION, .struct_bytes = sizeof(clb_swap_desc), .expert = EXPERT, .fd = -1}};
  CHECK_EQ(swap_now(r, &kernel_only), 1);
  rig_run_alone(r, 0, &request, 3);
  CHECK(same_tokens(&r->outputs[0], &first));
  CHECK_EQ(r->outputs[0].switches, 0);
  CHECK_EQ(rig_stats(r).weights_generation, 4);
  CHECK_EQ(rig_stats(r).allocations_after_open, 0);
  close_rig(r);
}

/* An expert of another format takes the place; one that is too large for every free block is refused. */
static void formats_may_change(void) {
  static rig_output bf16;
  static expert_file wider;
  rig* const r = &main_rig;
  const clb_request request = rig_request(5, 20, 20);
  open_rig(r, 1, 1);
  CHECK_EQ(swap_now(r, &new_file), 1);
  rig_run_alone(r, 0, &request, 5);
  copy_output(r, 0, &bf16);
  make_file(&wider, LAYER, EXPERT, CLB_FP16, 99);
  CHECK_EQ(swap_now(r, &wider), 1);
  rig_run_alone(r, 0, &request, 5);
  CHECK_EQ(r->outputs[0].count, bf16.count);
  CHECK(!same_tokens(&r->outputs[0], &bf16)); /* log-probabilities tell the two roundings apart */
  (void)close(wider.desc.fd);
  make_file(&wider, LAYER, EXPERT, CLB_FP32, 99);
  CHECK_EQ(begin(r, &wider), CLB_ERR_FULL);
  CHECK_CONTAINS(r->error.message, "experts.swap_slots");
  (void)close(wider.desc.fd);
  close_rig(r);
}

/* Opens slot 0 and computes until `positions` of its positions are there. */
static void run_until(rig* r, const clb_request* request, uint64_t seed, uint32_t positions) {
  const uint32_t chunk = positions < request->prompt_tokens ? positions : request->prompt_tokens;
  (void)rig_write(r, 0, request, seed);
  rig_push(r, CLB_CMD_OPEN, 0, r->generation[0], 0, 0);
  rig_push(r, CLB_CMD_PREFILL, 0, r->generation[0], 0, chunk);
  (void)rig_turn(r);
  for (uint32_t i = request->prompt_tokens; i < positions; ++i) {
    (void)rig_turn(r);
  }
  if (chunk < request->prompt_tokens) {
    rig_push(r, CLB_CMD_PREFILL, 0, r->generation[0], chunk, request->prompt_tokens - chunk);
  }
}

/* Streams that are at work get a switch at a position that is told; a replay that switches there is the same, others
   are not. */
static void a_stream_across_can_be_replayed(void) {
  static rig_output across[3];
  uint32_t others = 0;
  rig* const r = &main_rig;
  open_rig(r, 3, 1);
  const clb_request requests[3] = {rig_request(20, 9, 40), rig_request(21, 24, 30), rig_request(22, 40, 12)};
  for (uint32_t slot = 0; slot < 2; ++slot) {
    (void)rig_write(r, slot, &requests[slot], 20 + slot);
    rig_start(r, slot);
    (void)rig_turn(r);
    (void)rig_turn(r);
  }
  (void)rig_write(r, 2, &requests[2], 22); /* its prompt has chunks of 8: the switch is within it */
  rig_start(r, 2);
  (void)rig_turn(r);
  CHECK_EQ(swap_now(r, &new_file), 1);
  CHECK(rig_drain(r, 200));
  for (uint32_t slot = 0; slot < 3; ++slot) {
    copy_output(r, slot, &across[slot]);
    CHECK_EQ(across[slot].switches, 1);
    CHECK_EQ(across[slot].usage.weights_generation, 0);
    CHECK(across[slot].switched_at[0] > 0);
  }
  CHECK(across[2].switched_at[0] < requests[2].prompt_tokens);
  CHECK(across[0].switched_at[0] > requests[0].prompt_tokens);
  for (uint32_t slot = 0; slot < 3; ++slot) {
    for (uint32_t shift = 0; shift < 2; ++shift) {
      CHECK_EQ(swap_now(r, &old_file), 1);
      run_until(r, &requests[slot], 20 + slot, across[slot].switched_at[0] + shift * 8u);
      CHECK_EQ(swap_now(r, &new_file), 1);
      CHECK(rig_drain(r, 200));
      CHECK_EQ(r->outputs[0].switched_at[0], across[slot].switched_at[0] + shift * 8u);
      CHECK(shift != 0 || same_tokens(&r->outputs[0], &across[slot]));
      others += same_tokens(&r->outputs[0], &across[slot]) ? 0u : 1u;
    }
  }
  CHECK(others > 0); /* not all: the expert may have no token between the two positions */
  close_rig(r);
}

/* Runs from before a switch are not seen after it: neither published ones nor those that were being filled. */
static void runs_from_before_are_not_reused(void) {
  static rig_output alone;
  rig* const r = &main_rig;
  clb_request filling = rig_request(30, 24, 30);
  clb_request reader = rig_request(30, 24, 10);
  open_rig(r, 4, 1);
  filling.publish_run = 1;
  (void)rig_write(r, 0, &filling, 30);
  rig_start(r, 0);
  (void)rig_turn(r);
  filling.publish_run = 2;
  (void)rig_write(r, 1, &filling, 30);
  rig_push(r, CLB_CMD_OPEN, 1, r->generation[1], 0, 0);
  rig_push(r, CLB_CMD_PREFILL, 1, r->generation[1], 0, 8);
  (void)rig_turn(r);
  CHECK_EQ(swap_now(r, &new_file), 1);
  rig_push(r, CLB_CMD_PREFILL, 1, r->generation[1], 8, 16);
  (void)rig_turn(r);
  rig_run_alone(r, 2, &reader, 30);
  copy_output(r, 2, &alone);
  for (uint32_t run = 1; run <= 2; ++run) {
    reader.prefix_run = run;
    reader.prefix_tokens = 16;
    (void)rig_write(r, 3, &reader, 30);
    rig_start(r, 3);
    CHECK(rig_drain(r, 100));
    CHECK_EQ(r->outputs[3].usage.cached_tokens, 0);
    CHECK(same_tokens(&r->outputs[3], &alone));
    CHECK_EQ(r->outputs[3].usage.weights_generation, 1);
    rig_push(r, CLB_CMD_RELEASE_RUN, 0, 0, run, 0);
  }
  filling.publish_run = 1; /* a run of the same id that is filled after the switch is seen */
  rig_run_alone(r, 0, &filling, 30);
  reader.prefix_run = 1;
  (void)rig_write(r, 3, &reader, 30);
  rig_start(r, 3);
  CHECK(rig_drain(r, 100));
  CHECK_EQ(r->outputs[3].usage.cached_tokens, 16);
  CHECK(same_tokens(&r->outputs[3], &alone));
  close_rig(r);
}

/* What is wrong is refused, nothing is computed differently, and the swap slot is free again. */
static void bad_experts_are_refused(void) {
  static rig_output first;
  static expert_file bad;
  rig* const r = &main_rig;
  const clb_request request = rig_request(7, 20, 10);
  open_rig(r, 1, 1);
  rig_run_alone(r, 0, &request, 7);
  copy_output(r, 0, &first);
  const struct {
    int32_t status;
    const char* text;
  } cases[] = {{CLB_ERR_CHECKSUM, "crc32c"},      {CLB_ERR_NOT_FINITE, "NaN"},      {CLB_ERR_FORMAT, "bytes"},
               {CLB_ERR_FORMAT, "shape"},         {CLB_ERR_FORMAT, "gate, up"},     {CLB_ERR_FORMAT, "checksums"},
               {CLB_ERR_ARGUMENT, "expert is 6"}, {CLB_ERR_ARGUMENT, "layer is 3"}, {CLB_ERR_MODULE, "named"},
               {CLB_ERR_VERSION, "version"},      {CLB_ERR_UNSUPPORTED, "CUDA"},    {CLB_ERR_ARGUMENT, "1 has 0"},
               {CLB_ERR_FORMAT, "overlaps"},      {CLB_ERR_FORMAT, "file name"}};
  for (uint32_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    bad = new_file;
    bad.file.crc32c = &bad.crc;
    bad.desc.file = &bad.file;
    bad.desc.sections = bad.sections;
    bad.crc ^= i == 0 ? 1u : 0u;
    if (i == 1) {
      const uint16_t nan = 0x7fc0;
      memcpy(bad.bytes + bad.sections[1].offset + 6, &nan, sizeof nan);
      write_fd(&bad);
    }
    bad.file.bytes += i == 2 ? 256u : 0u;
    bad.sections[2].rows -= i == 3 ? 1u : 0u;
    bad.sections[0].role = i == 4 ? CLB_ROLE_UP : bad.sections[0].role;
    bad.file.crc_count = i == 5 ? 0u : 1u;
    bad.desc.expert = i == 6 ? 6u : EXPERT;
    bad.desc.layer = i == 7 ? 3u : i == 11 ? 1u : LAYER;
    bad.desc.module = i == 8 ? 1u : 0u; /* fp32 */
    bad.desc.abi_version = i == 9 ? 1u : CLB_ABI_VERSION;
    bad.sections[0].layout = i == 10 ? CLB_LAYOUT_MMA : CLB_LAYOUT_ROWS16;
    bad.sections[1].offset -= i == 12 ? 2u : 0u;
    bad.file.name = i == 13 ? "a/b" : "expert.bin";
    CHECK_EQ(begin(r, &bad), cases[i].status);
    CHECK_CONTAINS(r->error.message, cases[i].text);
    write_fd(&new_file);
  }
  CHECK_EQ(rig_stats(r).weights_generation, 0);
  rig_run_alone(r, 0, &request, 7);
  CHECK(same_tokens(&r->outputs[0], &first));
  CHECK_EQ(swap_now(r, &new_file), 1);
  close_rig(r);
}

/* Without a step boundary a swap is withdrawn; one that is staged may be cancelled; one at a time; without swap slots
 * none. */
static void swaps_that_do_not_happen(void) {
  rig* const r = &main_rig;
  clb_swap_report report;
  open_rig(r, 1, 1);
  CHECK_EQ(clb_engine_swap_wait(r->engine, 0, &report, &r->error), CLB_ERR_STATE);
  CHECK_EQ(begin(r, &new_file), CLB_OK);
  CHECK_EQ(begin(r, &new_file), CLB_ERR_STATE);
  CHECK_EQ(clb_engine_swap_wait(r->engine, 2, &report, &r->error), CLB_ERR_STATE);
  CHECK_CONTAINS(r->error.message, "step boundary");
  (void)rig_turn(r);
  CHECK_EQ(rig_stats(r).weights_generation, 0);
  CHECK_EQ(clb_engine_swap_stage(r->engine, &new_file.desc, &r->error), CLB_OK);
  clb_engine_swap_cancel(r->engine);
  CHECK_EQ(clb_engine_swap_post(r->engine, 9), CLB_ERR_STATE);
  CHECK_EQ(swap_now(r, &new_file), 1);
  clb_engine_swap_cancel(r->engine);
  close_rig(r);
  open_rig(r, 1, 0);
  CHECK_EQ(begin(r, &new_file), CLB_ERR_FULL);
  close_rig(r);
}

/* A slot is told of one switch at a time: the next one waits until the daemon has taken the events. */
static void switches_wait_for_the_daemon(void) {
  rig* const r = &main_rig;
  clb_swap_report report;
  uint32_t worked = 0;
  clb_event events[64];
  open_rig(r, 1, 1);
  CHECK_EQ(begin(r, &new_file), CLB_OK);
  CHECK_EQ(clb_engine_turn(r->engine, &worked), CLB_OK);
  CHECK_EQ(clb_engine_swap_wait(r->engine, 0, &report, &r->error), CLB_OK);
  CHECK_EQ(begin(r, &old_file), CLB_OK);
  CHECK_EQ(clb_engine_turn(r->engine, &worked), CLB_OK);
  CHECK_EQ(rig_stats(r).weights_generation, 1);
  CHECK_EQ(clb_event_pop(r->config.channel_base, events, 64), 1);
  CHECK_EQ(events[0].kind, CLB_EVENT_SWITCHED);
  CHECK_EQ(events[0].slot, CLB_NO_SLOT);
  CHECK_EQ(clb_engine_turn(r->engine, &worked), CLB_OK);
  CHECK_EQ(clb_engine_swap_wait(r->engine, 0, &report, &r->error), CLB_OK);
  CHECK_EQ(report.weights_generation, 2);
  close_rig(r);
}

/* Memory goes round: any expert of any layer, again and again, with one swap slot, and nothing is taken. */
static void memory_goes_round(void) {
  static expert_file files[4];
  static rig_output first;
  rig* const r = &main_rig;
  const clb_request request = rig_request(11, 20, 20);
  open_rig(r, 2, 1);
  rig_run_alone(r, 0, &request, 11);
  copy_output(r, 0, &first);
  for (uint32_t i = 0; i < 4; ++i) {
    make_file(&files[i], i % 2u == 0u ? 0u : 2u, i, CLB_BF16, 50);
  }
  const uint64_t calls = alloc_hook.calls;
  for (uint32_t i = 0; i < 40; ++i) {
    CHECK_EQ(swap_now(r, &files[i % 4u]), 1);
  }
  CHECK_EQ(alloc_hook.calls, calls);
  rig_run_alone(r, 0, &request, 11);
  CHECK(!same_tokens(&r->outputs[0], &first));
  for (uint32_t i = 0; i < 4; ++i) {
    (void)close(files[i].desc.fd);
    make_file(&files[i], i % 2u == 0u ? 0u : 2u, i, CLB_BF16, r->config.dummy_seed);
    CHECK_EQ(swap_now(r, &files[i]), 1);
    (void)close(files[i].desc.fd);
  }
  rig_run_alone(r, 0, &request, 11);
  CHECK(same_tokens(&r->outputs[0], &first));
  CHECK_EQ(rig_stats(r).allocations_after_open, 0);
  close_rig(r);
}

static void* run_engine(void* engine) {
  static int32_t status;
  status = clb_engine_run(engine);
  return &status;
}

/* A helper beside a running loop: an idle engine is woken, and one that has ended lets the helper go. */
static void a_helper_beside_the_loop(void) {
  rig* const r = &main_rig;
  pthread_t thread;
  void* result = NULL;
  clb_swap_report report;
  clb_event events[64];
  rig_init(r, 2);
  r->config.swap_slots = 1;
  r->config.command_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  CHECK_EQ(rig_open(r), CLB_OK);
  make_file(&old_file, LAYER, EXPERT, CLB_BF16, r->config.dummy_seed);
  make_file(&new_file, LAYER, EXPERT, CLB_BF16, 99);
  CHECK_EQ(pthread_create(&thread, NULL, run_engine, r->engine), 0);
  for (uint32_t i = 0; i < 20; ++i) {
    CHECK_EQ(begin(r, i % 2u == 0u ? &new_file : &old_file), CLB_OK);
    CHECK_EQ(clb_engine_swap_wait(r->engine, 120000, &report, &r->error), CLB_OK);
    CHECK_EQ(report.weights_generation, i + 1u);
    CHECK_EQ(clb_event_pop(r->config.channel_base, events, 64), 1);
  }
  CHECK_EQ(clb_engine_post(r->engine, CLB_MAIL_STOP), CLB_OK);
  CHECK_EQ(pthread_join(thread, &result), 0);
  CHECK_EQ(*(int32_t*)result, CLB_OK);
  CHECK_EQ(begin(r, &new_file), CLB_ERR_STATE);
  (void)close(r->config.command_fd);
  close_rig(r);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(experts_are_replaced),
                                   TEST(formats_may_change),
                                   TEST(a_stream_across_can_be_replayed),
                                   TEST(runs_from_before_are_not_reused),
                                   TEST(bad_experts_are_refused),
                                   TEST(swaps_that_do_not_happen),
                                   TEST(switches_wait_for_the_daemon),
                                   TEST(memory_goes_round),
                                   TEST(a_helper_beside_the_loop)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
