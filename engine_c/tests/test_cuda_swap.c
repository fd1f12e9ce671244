/* test_cuda_swap.c: experts that replace others in a device's arena: their bytes, the row of the expert table between
   two steps, the old bytes until no step needs them, and every driver call that fails. */
#define _DEFAULT_SOURCE 1
#include <sys/mman.h>
#include <unistd.h>

#include "../src/cuda_internal.h"
#include "cuda_rig.h"
#include "test.h"

enum { LAYER = 0, EXPERT = 1, MOST_BYTES = 16384 };

typedef struct expert_file {
  unsigned char bytes[MOST_BYTES];
  uint32_t crc;
  clb_section_desc sections[3];
  clb_file_desc file;
  clb_swap_desc desc;
} expert_file;

/* All values are small numbers that tell files apart. */
static void make_file(const cuda_rig* r, expert_file* f, uint16_t value) {
  uint64_t end = 0;
  memset(f, 0, sizeof *f);
  for (uint32_t i = 0; i < 3; ++i) {
    const clb_demand demand = clb_demand_of(&r->model, CLB_ROLE_GATE + i, LAYER, EXPERT);
    const uint64_t bytes = clb_layout_bytes(CLB_LAYOUT_MMA, CLB_BF16, demand.rows, demand.cols);
    f->sections[i] = (clb_section_desc){.role = CLB_ROLE_GATE + i,
                                        .layer = LAYER,
                                        .expert = EXPERT,
                                        .offset = end,
                                        .bytes = bytes,
                                        .precision = CLB_BF16,
                                        .layout = CLB_LAYOUT_MMA,
                                        .rows = demand.rows,
                                        .cols = demand.cols};
    for (uint64_t at = 0; at < bytes; at += sizeof value) {
      const uint16_t next = (uint16_t)(value + i);
      memcpy(f->bytes + end + at, &next, sizeof next);
    }
    end += bytes;
  }
  f->file = (clb_file_desc){.name = "expert.bin", .bytes = end, .crc32c = &f->crc, .crc_count = 1, .alignment = 4096};
  f->crc = clb_crc32c(0, f->bytes, (size_t)end);
  f->desc = (clb_swap_desc){.abi_version = CLB_ABI_VERSION,
                            .struct_bytes = sizeof(clb_swap_desc),
                            .layer = LAYER,
                            .expert = EXPERT,
                            .fd = memfd_create("expert", MFD_CLOEXEC),
                            .file = &f->file,
                            .sections = f->sections};
  CHECK_EQ(pwrite(f->desc.fd, f->bytes, (size_t)end, 0), (ssize_t)end);
}

static void init(cuda_rig* r, uint32_t fail_at) {
  cuda_rig_init(r, fail_at);
  r->config.swap_slots = 1;
}

static void open_rig(cuda_rig* r) {
  init(r, 0);
  CHECK_EQ(cuda_rig_open(r), CLB_OK);
}

/* The expert as the device's table has it. */
static const clb_expert_weights* row_of(const cuda_rig* r) {
  const clb_expert_weights* const rows = (const clb_expert_weights*)(uintptr_t)r->engine->cuda->layer_tables[LAYER];
  return &rows[EXPERT];
}

static int holds(const cuda_rig* r, const expert_file* f) {
  const uint64_t addresses[3] = {row_of(r)->gate, row_of(r)->up, row_of(r)->down};
  int same = 1;
  for (uint32_t i = 0; i < 3; ++i) {
    same &= memcmp((const void*)(uintptr_t)addresses[i], f->bytes + f->sections[i].offset,
                   (size_t)f->sections[i].bytes) == 0;
  }
  return same;
}

static int32_t stage_and_post(cuda_rig* r, const expert_file* f) {
  const int32_t status = clb_engine_swap_stage(r->engine, &f->desc, &r->error);
  clb_stats stats;
  CHECK_EQ(clb_engine_stats(r->engine, &stats), CLB_OK);
  return status != CLB_OK ? status : clb_engine_swap_post(r->engine, stats.weights_generation + 1u);
}

static int32_t end_of_swap(cuda_rig* r, clb_swap_report* report) {
  return clb_engine_swap_wait(r->engine, 0, report, &r->error);
}

/* An idle engine and one with steps in flight: the table gets the new row, and the memory goes round. */
static void experts_are_replaced(void) {
  static expert_file files[2];
  for (uint32_t lag = 0; lag < 2u; ++lag) {
    cuda_rig r;
    clb_swap_report report;
    clb_stats stats;
    open_rig(&r);
    cuda_rig_lag(lag);
    make_file(&r, &files[0], 0x3c00);
    make_file(&r, &files[1], 0x3d00);
    const clb_request request = cuda_rig_request(9, 60);
    cuda_rig_start(&r, 0, &request);
    for (uint32_t i = 0; i < 10u; ++i) {
      CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
      CHECK_EQ(stage_and_post(&r, &files[i % 2u]), CLB_OK);
      CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
      CHECK(holds(&r, &files[i % 2u]));
      CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
      CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
      CHECK_EQ(end_of_swap(&r, &report), CLB_OK);
      CHECK_EQ(report.free_blocks, 1);
      CHECK_EQ(report.streams, 1);
      CHECK_EQ(report.weights_generation, i + 1u);
    }
    CHECK(cuda_rig_drain(&r, 100));
    CHECK_EQ(stage_and_post(&r, &files[0]), CLB_OK);
    CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
    CHECK_EQ(end_of_swap(&r, &report), CLB_OK);
    CHECK_EQ(report.streams, 0);
    CHECK_EQ(clb_engine_stats(r.engine, &stats), CLB_OK);
    CHECK_EQ(stats.allocations_after_open, 0);
    cuda_rig_close(&r);
    CHECK_EQ(cuda_rig_live(), 0);
    (void)close(files[0].desc.fd);
    (void)close(files[1].desc.fd);
  }
}

/* While a step that was launched before the switch is not seen, the old memory is not given away. */
static void the_old_expert_stays_while_steps_need_it(void) {
  static expert_file file;
  cuda_rig r;
  open_rig(&r);
  cuda_rig_lag(1);
  make_file(&r, &file, 0x3c00);
  const clb_request request = cuda_rig_request(9, 60);
  cuda_rig_start(&r, 0, &request);
  for (uint32_t i = 0; i < 4u; ++i) {
    CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
  }
  const struct clb_cuda* const cuda = r.engine->cuda;
  CHECK(cuda->launched > cuda->seen);
  CHECK_EQ(stage_and_post(&r, &file), CLB_OK);
  CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
  CHECK_EQ(atomic_load(&r.engine->swap.state), CLB_SWAP_SWITCHED);
  CHECK(cuda->seen <= r.engine->swap.switched_at);
  while (cuda->seen <= r.engine->swap.switched_at) {
    CHECK_EQ(atomic_load(&r.engine->swap.state), CLB_SWAP_SWITCHED);
    CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
  }
  CHECK_EQ(atomic_load(&r.engine->swap.state), CLB_SWAP_DONE);
  cuda_rig_close(&r);
  (void)close(file.desc.fd);
}

/* Another layout or precision than the kernels', and a kernel module, are refused with what to do. */
static void what_a_gpu_cannot_do_is_refused(void) {
  static expert_file file;
  cuda_rig r;
  open_rig(&r);
  make_file(&r, &file, 0x3c00);
  file.desc.module = 1;
  CHECK_EQ(stage_and_post(&r, &file), CLB_ERR_UNSUPPORTED);
  CHECK_CONTAINS(r.error.message, "leave the kernel module out");
  file.desc.module = 0;
  for (uint32_t i = 0; i < 3; ++i) {
    file.sections[i].precision = CLB_FP16;
  }
  CHECK_EQ(stage_and_post(&r, &file), CLB_ERR_UNSUPPORTED);
  CHECK_CONTAINS(r.error.message, "precision");
  for (uint32_t i = 0; i < 3; ++i) {
    file.sections[i].precision = CLB_BF16;
    file.sections[i].layout = CLB_LAYOUT_ROWS16;
  }
  CHECK_EQ(stage_and_post(&r, &file), CLB_ERR_UNSUPPORTED);
  CHECK_CONTAINS(r.error.message, "--backend cuda");
  cuda_rig_close(&r);
  (void)close(file.desc.fd);
}

/* Whichever driver call of a swap fails: the helper says so, the old expert serves on, and the next swap works; a
   failing switch ends the loop. */
static void every_failing_call_is_survived(void) {
  static expert_file file;
  uint32_t refused = 0;
  uint32_t ended = 0;
  uint32_t done = 0;
  cuda_rig r;
  open_rig(&r);
  const uint32_t first = cuda_rig_calls() + 1u;
  cuda_rig_close(&r);
  for (uint32_t n = first; done == 0u; ++n) {
    clb_swap_report report;
    init(&r, n);
    CHECK_EQ(cuda_rig_open(&r), CLB_OK);
    make_file(&r, &file, 0x3c00);
    int32_t status = stage_and_post(&r, &file);
    if (status != CLB_OK) {
      CHECK_EQ(status, CLB_ERR_DEVICE);
      CHECK_CONTAINS(r.error.message, "expert.bin");
      CHECK(!holds(&r, &file));
      CHECK_EQ(stage_and_post(&r, &file), CLB_OK);
      ++refused;
    }
    status = cuda_rig_turn(&r);
    status = status != CLB_OK ? status : cuda_rig_turn(&r);
    if (status != CLB_OK) {
      CHECK_EQ(status, CLB_ERR_DEVICE);
      ++ended;
    } else {
      CHECK_EQ(end_of_swap(&r, &report), CLB_OK);
      CHECK(holds(&r, &file));
      done = cuda_rig_calls() < n ? 1u : 0u;
    }
    cuda_rig_close(&r);
    CHECK_EQ(cuda_rig_live(), 0);
    (void)close(file.desc.fd);
  }
  CHECK(refused >= 4u); /* bind, three sections, their end */
  CHECK(ended >= 1u);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(experts_are_replaced), TEST(the_old_expert_stays_while_steps_need_it),
                                   TEST(what_a_gpu_cannot_do_is_refused), TEST(every_failing_call_is_survived)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
