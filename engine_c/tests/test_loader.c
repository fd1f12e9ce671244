/*
 * The loader: good folders become the right table; every kind of damage is refused with the status and the words that
 * name it, before or while reading, never after.
 */
#define _XOPEN_SOURCE 700

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "alloc_hook.h"
#include "loader_internal.h"
#include "test.h"
#include "tiny_load.h"

static void expect_good(const tiny_model* tiny) {
  loaded out;
  const int32_t status = load_as(tiny, CLB_WEIGHTS_FILES, 0, &out);
  unload(&out);
  CHECK_EQ(status, CLB_OK);
}

/* Bits of element (row, col) of a (rows, cols) block. */
static uint32_t element_of(const void* data, uint32_t precision, uint32_t layout, uint64_t row, uint64_t col,
                           uint64_t cols) {
  const uint64_t index = layout == CLB_LAYOUT_ROWS16 ? (row / 16 * cols + col) * 16 + row % 16 : row * cols + col;
  return precision == CLB_FP32 ? ((const uint32_t*)data)[index] : ((const uint16_t*)data)[index];
}

static void check_section_loaded(const tiny_model* tiny, const clb_section_desc* section, const clb_tensor* tensor) {
  const void* const file = tiny->bytes[section->file] + section->offset;
  const clb_demand demand = clb_demand_of(&tiny->model, section->role, section->layer, section->expert);
  const int transposed = section->role == CLB_ROLE_DOWN && section->layout == CLB_LAYOUT_FLAT;
  CHECK_EQ(tensor->layout, demand.matrix != 0 ? CLB_LAYOUT_ROWS16 : CLB_LAYOUT_FLAT);
  CHECK_EQ(tensor->precision, section->precision);
  CHECK_EQ(tensor->rows, transposed ? section->cols : section->rows);
  CHECK_EQ(tensor->cols, transposed ? section->rows : section->cols);
  CHECK_EQ((uintptr_t)tensor->data % 256, 0);
  for (uint32_t row = 0; row < tensor->rows || (demand.matrix != 0 && row % 16 != 0); ++row) {
    for (uint32_t col = 0; col < tensor->cols; ++col) {
      const uint32_t found = element_of(tensor->data, tensor->precision, tensor->layout, row, col, tensor->cols);
      const uint32_t wanted = row >= tensor->rows ? 0
                              : transposed
                                  ? element_of(file, section->precision, section->layout, col, row, section->cols)
                                  : element_of(file, section->precision, section->layout, row, col, section->cols);
      CHECK_EQ(found, wanted);
    }
  }
}

/* Every section lies in the table with its shape and the values of its file, matrices as rows16 whatever the file has,
   rows beyond the last one zero. */
static void loads_every_section(void) {
  for (uint32_t kind = 0; kind < 12; ++kind) {
    tiny_model tiny;
    loaded out;
    tiny_make(&tiny, (int)(kind % 2), kind / 4, kind / 2 % 2, TINY_VOCAB);
    tiny_write(&tiny);
    CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_FILES, 0, &out), CLB_OK);
    for (uint32_t i = 0; i < tiny.model.section_count; ++i) {
      const clb_section_desc* section = &tiny.sections[i];
      check_section_loaded(&tiny, section, clb_weight(out.table, section->role, section->layer, section->expert));
    }
    CHECK_EQ(out.progress, out.sizes.read_bytes);
    unload(&out);
    tiny_free(&tiny);
  }
}

/* Matrices that are larger than a piece of a file, and begin inside one, are repacked whole. */
static void repacks_across_pieces(void) {
  tiny_model tiny;
  loaded out;
  tiny_make(&tiny, 0, CLB_FP32, CLB_LAYOUT_FLAT, 20003);
  tiny_write(&tiny);
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_FILES, 0, &out), CLB_OK);
  const clb_section_desc* const embedding = tiny_section(&tiny, CLB_ROLE_EMBEDDING, -1, -1);
  const clb_section_desc* const head = tiny_section(&tiny, CLB_ROLE_HEAD, -1, -1);
  check_section_loaded(&tiny, embedding, clb_weight(out.table, CLB_ROLE_EMBEDDING, -1, -1));
  check_section_loaded(&tiny, head, clb_weight(out.table, CLB_ROLE_HEAD, -1, -1));
  unload(&out);
  tiny_free(&tiny);
}

/* What was laid out for a GPU is no use to the CPU; the message names the convert command. */
static void mma_files_are_refused(void) {
  tiny_model tiny;
  clb_loader_sizes sizes;
  clb_error error;
  tiny_make(&tiny, 0, CLB_BF16, CLB_LAYOUT_MMA, TINY_VOCAB);
  CHECK_EQ(clb_loader_plan(&tiny.model, CLB_WEIGHTS_FILES, &sizes, &error), CLB_ERR_UNSUPPORTED);
  CHECK_CONTAINS(error.message, "convert --backend cpu");
  tiny_free(&tiny);
}

/* A rows16 file lies in memory as on disk, at its alignment. */
static void rows16_files_are_kept_as_they_are(void) {
  tiny_model tiny;
  loaded out;
  tiny_make(&tiny, 1, CLB_BF16, CLB_LAYOUT_ROWS16, TINY_VOCAB);
  tiny_write(&tiny);
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_FILES, 0, &out), CLB_OK);
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < TINY_FILES; ++i) {
    bytes = clb_align_up(bytes, tiny.files[i].alignment);
    CHECK(memcmp((const uint8_t*)out.memory + bytes, tiny.bytes[i], (size_t)tiny.files[i].bytes) == 0);
    bytes += tiny.files[i].bytes;
  }
  CHECK_EQ(out.sizes.weights_bytes, bytes);
  unload(&out);
  tiny_free(&tiny);
}

/* Two layers that name the same expert files get the same addresses, and the files take memory once. */
static void shared_files_take_memory_once(void) {
  for (uint32_t layout = CLB_LAYOUT_FLAT; layout <= CLB_LAYOUT_ROWS16; ++layout) {
    uint64_t bytes[2];
    for (int shared = 0; shared < 2; ++shared) {
      tiny_model tiny;
      loaded out;
      tiny_make(&tiny, shared, CLB_BF16, layout, TINY_VOCAB);
      tiny_write(&tiny);
      CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_FILES, 0, &out), CLB_OK);
      for (uint32_t role = CLB_ROLE_GATE; shared && role <= CLB_ROLE_DOWN; ++role) {
        for (int32_t expert = 0; expert < (int32_t)TINY_EXPERTS; ++expert) {
          CHECK(clb_weight(out.table, role, 0, expert)->data == clb_weight(out.table, role, 1, expert)->data);
        }
      }
      const char* const first = clb_weight(out.table, CLB_ROLE_GATE, 0, 0)->data;
      const char* const last = clb_weight(out.table, CLB_ROLE_DOWN, 0, TINY_EXPERTS - 1)->data;
      bytes[shared] = (uint64_t)(last - first);
      unload(&out);
      tiny_free(&tiny);
    }
    CHECK_EQ(bytes[0], bytes[1]);
  }
}

/* A file cut at any multiple of 4 KiB is refused with both sizes. */
static void truncated_files(void) {
  tiny_model tiny;
  char found[64];
  tiny_make(&tiny, 0, CLB_FP32, CLB_LAYOUT_FLAT, 20000); /* dense.bin: 2.5 MiB, three checksums */
  tiny_write(&tiny);
  for (uint32_t file = 0; file < TINY_FILES; ++file) {
    for (uint64_t pages = (tiny.files[file].bytes - 1) / 4096 + 1; pages-- > 0;) {
      const uint64_t bytes = pages * 4096;
      tiny_cut_file(&tiny, file, bytes);
      (void)snprintf(found, sizeof found, "found %" PRIu64 " bytes", bytes);
      expect_refusal(&tiny, CLB_ERR_FORMAT, tiny.names[file], found);
    }
    tiny_write_file(&tiny, file);
  }
  expect_good(&tiny);
  tiny_free(&tiny);
}

/* Any flipped bit, padding included, is refused by the checksum of its MiB. */
static void flipped_bits(void) {
  tiny_model tiny;
  uint64_t seed = 3;
  tiny_make(&tiny, 0, CLB_FP32, CLB_LAYOUT_FLAT, 20000);
  tiny_write(&tiny);
  for (int i = 0; i < 100; ++i) {
    const uint32_t file = (uint32_t)(clb_test_random(&seed) % TINY_FILES);
    const uint64_t byte = clb_test_random(&seed) % tiny.files[file].bytes;
    const uint8_t bit = (uint8_t)(1u << (clb_test_random(&seed) % 8));
    tiny_poke(&tiny, file, byte, tiny.bytes[file][byte] ^ bit);
    expect_refusal(&tiny, CLB_ERR_CHECKSUM, tiny.names[file], "crc32c is");
    tiny_poke(&tiny, file, byte, tiny.bytes[file][byte]);
  }
  expect_good(&tiny);
  tiny_free(&tiny);
}

/* Without checksums (a hand-written pack) the bytes are taken as they are, but NaN is still found and named. */
static void values_that_are_not_finite(void) {
  static const uint32_t patterns[] = {0x7f800000u, 0xff800000u, 0x7fc00001u};
  for (uint32_t precision = CLB_FP32; precision <= CLB_BF16; ++precision) {
    tiny_model tiny;
    char text[64];
    tiny_make(&tiny, 0, precision, CLB_LAYOUT_FLAT, TINY_VOCAB);
    tiny_write(&tiny);
    const clb_section_desc* section = tiny_section(&tiny, CLB_ROLE_UP, 0, 2);
    uint8_t* values = tiny.bytes[section->file] + section->offset;
    for (uint32_t index = 0; index < section->rows * section->cols; index += 37) {
      uint8_t kept[4];
      const size_t element = (size_t)clb_element_bytes(precision);
      const uint32_t bits = patterns[index % 3];
      const uint16_t half = (uint16_t)(precision == CLB_BF16 ? bits >> 16 : (bits >> 16 & 0x8000u) | 0x7c00u);
      memcpy(kept, values + index * element, element);
      memcpy(values + index * element, precision == CLB_FP32 ? (const void*)&bits : (const void*)&half, element);
      tiny_sum(&tiny);
      tiny_write_file(&tiny, section->file);
      (void)snprintf(text, sizeof text, "up of layer 0, expert 2: value %u ", index);
      expect_refusal(&tiny, CLB_ERR_NOT_FINITE, "expert_0_2.bin", text);
      tiny.files[section->file].crc_count = 0;
      expect_refusal(&tiny, CLB_ERR_NOT_FINITE, "expert_0_2.bin", text);
      memcpy(values + index * element, kept, element);
    }
    tiny_free(&tiny);
  }
}

static void files_that_are_not_there(void) {
  tiny_model tiny;
  tiny_make(&tiny, 0, CLB_BF16, CLB_LAYOUT_FLAT, TINY_VOCAB);
  tiny_write(&tiny);
  CHECK_EQ(unlinkat(tiny.dir_fd, tiny.names[2], 0), 0);
  expect_refusal(&tiny, CLB_ERR_IO, "expert_0_1.bin", "cannot be opened");
  CHECK_EQ(mkfifoat(tiny.dir_fd, tiny.names[2], 0600), 0);
  expect_refusal(&tiny, CLB_ERR_IO, "expert_0_1.bin", "not a regular file"); /* and does not wait for a writer */
  CHECK_EQ(unlinkat(tiny.dir_fd, tiny.names[2], 0), 0);
  CHECK_EQ(mkdirat(tiny.dir_fd, tiny.names[2], 0700), 0);
  expect_refusal(&tiny, CLB_ERR_IO, "expert_0_1.bin", "not a regular file");
  CHECK_EQ(unlinkat(tiny.dir_fd, tiny.names[2], AT_REMOVEDIR), 0);
  tiny_free(&tiny);
}

static void memory_that_is_too_small(void) {
  tiny_model tiny;
  clb_loader_sizes sizes;
  clb_error error;
  const clb_weight_table* table = NULL;
  static _Alignas(64) char block[128];
  tiny_make(&tiny, 0, CLB_BF16, CLB_LAYOUT_FLAT, TINY_VOCAB);
  CHECK_EQ(clb_loader_plan(&tiny.model, CLB_WEIGHTS_FILES, &sizes, &error), CLB_OK);
  const clb_loader_config config = {.model = &tiny.model,
                                    .dir_fd = -1,
                                    .memory = block,
                                    .memory_bytes = sizeof block,
                                    .host = block,
                                    .host_bytes = sizeof block};
  CHECK_EQ(clb_loader_load(&config, &table, &error), CLB_ERR_ARGUMENT);
  CHECK(table == NULL);
  CHECK_EQ(clb_loader_plan(&tiny.model, 2, &sizes, &error), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_loader_plan(NULL, 0, &sizes, NULL), CLB_ERR_ARGUMENT);
  tiny_free(&tiny);
}

/* Whichever scratch allocation fails: MEMORY, nothing leaked (the sanitizers look), and the next try succeeds. */
static void every_allocation_may_fail(void) {
  tiny_model tiny;
  loaded out;
  clb_error error;
  tiny_make(&tiny, 0, CLB_BF16, CLB_LAYOUT_FLAT, TINY_VOCAB);
  tiny_write(&tiny);
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_FILES, 0, &out), CLB_OK);
  const clb_loader_config config = {.model = &tiny.model,
                                    .dir_fd = tiny.dir_fd,
                                    .memory = out.memory,
                                    .memory_bytes = out.sizes.weights_bytes,
                                    .host = out.host,
                                    .host_bytes = out.sizes.host_bytes};
  int32_t status = CLB_ERR_MEMORY;
  uint64_t n = 0;
  while (status == CLB_ERR_MEMORY && n < 10) {
    alloc_hook_fail(++n);
    status = clb_loader_load(&config, &out.table, &error);
    alloc_hook_fail(0);
  }
  CHECK_EQ(status, CLB_OK);
  CHECK_EQ(n, 5); /* four: for the check of all sections, for their places twice, for a piece of a file */
  unload(&out);
  tiny_free(&tiny);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(loads_every_section),
                                   TEST(repacks_across_pieces),
                                   TEST(rows16_files_are_kept_as_they_are),
                                   TEST(mma_files_are_refused),
                                   TEST(shared_files_take_memory_once),
                                   TEST(truncated_files),
                                   TEST(flipped_bits),
                                   TEST(values_that_are_not_finite),
                                   TEST(files_that_are_not_there),
                                   TEST(memory_that_is_too_small),
                                   TEST(every_allocation_may_fail)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
