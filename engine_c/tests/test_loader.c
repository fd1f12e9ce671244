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
#include "tiny_model.h"

typedef struct loaded {
  clb_loader_sizes sizes;
  const clb_weight_table* table;
  void* memory;
  void* host;
  clb_error error;
  uint64_t progress;
} loaded;

static void on_progress(void* context, uint64_t bytes) { *(uint64_t*)context = bytes; }

static int32_t load_as(const tiny_model* tiny, uint32_t weights, uint64_t seed, loaded* out) {
  memset(out, 0, sizeof *out);
  const int32_t status = clb_loader_plan(&tiny->model, weights, &out->sizes, &out->error);
  if (status != CLB_OK) {
    return status;
  }
  const size_t alignment = (size_t)out->sizes.weights_alignment;
  out->memory = aligned_alloc(alignment, (size_t)clb_align_up(out->sizes.weights_bytes, alignment));
  out->host = aligned_alloc(64, (size_t)clb_align_up(out->sizes.host_bytes, 64));
  CHECK(out->memory != NULL && out->host != NULL);
  const clb_loader_config config = {.model = &tiny->model,
                                    .weights = weights,
                                    .dir_fd = tiny->dir_fd,
                                    .dummy_seed = seed,
                                    .memory = out->memory,
                                    .memory_bytes = out->sizes.weights_bytes,
                                    .host = out->host,
                                    .host_bytes = out->sizes.host_bytes,
                                    .progress = on_progress,
                                    .progress_context = &out->progress};
  return clb_loader_load(&config, &out->table, &out->error);
}

static void unload(loaded* out) {
  free(out->memory);
  free(out->host);
}

/* Loads and expects a failure whose message has both words. */
static void expect_refusal(const tiny_model* tiny, int32_t status, const char* word, const char* other) {
  loaded out;
  const int32_t actual = load_as(tiny, CLB_WEIGHTS_FILES, 0, &out);
  const clb_error error = out.error;
  unload(&out);
  if (actual != status) {
    (void)fprintf(stderr, "message: %s\n", error.message);
  }
  CHECK_EQ(actual, status);
  CHECK_EQ(error.status, status);
  CHECK_CONTAINS(error.message, word);
  CHECK_CONTAINS(error.message, other);
}

static void expect_good(const tiny_model* tiny) {
  loaded out;
  const int32_t status = load_as(tiny, CLB_WEIGHTS_FILES, 0, &out);
  unload(&out);
  CHECK_EQ(status, CLB_OK);
}

/* Every section lies in the table with its shape and the bytes of its file, at the file's alignment. */
static void loads_every_section(void) {
  for (uint32_t precision = CLB_FP32; precision <= CLB_BF16; ++precision) {
    for (int shared = 0; shared < 2; ++shared) {
      tiny_model tiny;
      loaded out;
      tiny_make(&tiny, shared, precision, TINY_VOCAB);
      tiny_write(&tiny);
      CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_FILES, 0, &out), CLB_OK);
      for (uint32_t i = 0; i < tiny.model.section_count; ++i) {
        const clb_section_desc* section = &tiny.sections[i];
        const clb_tensor* tensor = clb_weight(out.table, section->role, section->layer, section->expert);
        CHECK_EQ(tensor->rows, section->rows);
        CHECK_EQ(tensor->cols, section->cols);
        CHECK_EQ(tensor->precision, section->precision);
        CHECK_EQ(((uintptr_t)tensor->data - section->offset) % tiny.files[section->file].alignment, 0);
        CHECK(memcmp(tensor->data, tiny.bytes[section->file] + section->offset, (size_t)section->bytes) == 0);
      }
      CHECK_EQ(out.progress, out.sizes.read_bytes);
      unload(&out);
      tiny_free(&tiny);
    }
  }
}

/* Two layers that name the same expert files get the same addresses, and the files take memory once. */
static void shared_files_take_memory_once(void) {
  tiny_model tiny;
  loaded out;
  tiny_make(&tiny, 1, CLB_BF16, TINY_VOCAB);
  tiny_write(&tiny);
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_FILES, 0, &out), CLB_OK);
  for (uint32_t role = CLB_ROLE_GATE; role <= CLB_ROLE_DOWN; ++role) {
    for (int32_t expert = 0; expert < (int32_t)TINY_EXPERTS; ++expert) {
      CHECK(clb_weight(out.table, role, 0, expert)->data == clb_weight(out.table, role, 1, expert)->data);
    }
  }
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < TINY_FILES; ++i) {
    bytes = clb_align_up(bytes, tiny.files[i].alignment) + tiny.files[i].bytes;
  }
  CHECK_EQ(out.sizes.weights_bytes, bytes);
  unload(&out);
  tiny_free(&tiny);
}

static void absent_sections_have_no_data(void) {
  tiny_model tiny;
  loaded out;
  tiny_make(&tiny, 0, CLB_BF16, TINY_VOCAB);
  tiny_section(&tiny, CLB_ROLE_QKV_BIAS, 1, -1)->role = CLB_ROLE_QKV; /* becomes a duplicate ... */
  tiny_write(&tiny);
  expect_refusal(&tiny, CLB_ERR_FORMAT, "dense.bin", "qkv of layer 1");
  tiny_free(&tiny);
  tiny_make(&tiny, 0, CLB_BF16, TINY_VOCAB);
  tiny_write(&tiny);
  /* The bias is optional: without its sections the layer has none, if the gap that it leaves is padding-sized. */
  *tiny_section(&tiny, CLB_ROLE_QKV_BIAS, 0, -1) = tiny.sections[--tiny.model.section_count];
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_FILES, 0, &out), CLB_OK);
  CHECK(clb_weight(out.table, CLB_ROLE_QKV_BIAS, 0, -1)->data == NULL);
  CHECK(clb_weight(out.table, CLB_ROLE_QKV_BIAS, 1, -1)->data != NULL);
  CHECK(clb_weight(out.table, CLB_ROLE_ROUTER, 1, -1)->data == NULL);
  unload(&out);
  tiny_free(&tiny);
}

/* A file cut at any multiple of 4 KiB is refused with both sizes. */
static void truncated_files(void) {
  tiny_model tiny;
  char found[64];
  tiny_make(&tiny, 0, CLB_FP32, 20000); /* dense.bin: 2.5 MiB, three checksums */
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
  tiny_make(&tiny, 0, CLB_FP32, 20000);
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
    tiny_make(&tiny, 0, precision, TINY_VOCAB);
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
  tiny_make(&tiny, 0, CLB_BF16, TINY_VOCAB);
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

static void hostile_names_and_files(void) {
  static const char* const names[] = {"", ".", "..", "../x", "/etc/passwd", "a/b"};
  tiny_model tiny;
  tiny_make(&tiny, 0, CLB_BF16, TINY_VOCAB);
  for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
    tiny.files[1].name = names[i];
    expect_refusal(&tiny, CLB_ERR_FORMAT, "file 1", "name");
  }
  tiny.files[1].name = NULL;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "file 1", "name");
  tiny.files[1].name = tiny.names[1];
  tiny.files[1].alignment = 3;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "alignment is 3", "4096");
  tiny.files[1].alignment = 4096;
  tiny.files[1].crc_count = 2;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "2 checksums", "need 1");
  tiny.files[1].crc_count = 1;
  tiny.files[1].crc32c = NULL;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "checksums", "need 1");
  tiny.files[1].crc_count = 0;
  tiny.files[1].bytes = UINT64_MAX;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "size is", "2^46");
  tiny.files[1].bytes = 0;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "size is 0", "2^46");
  tiny_free(&tiny);
}

/* One number of one section is bent; the message names section and value. */
static void hostile_sections(void) {
  tiny_model tiny;
  tiny_make(&tiny, 0, CLB_BF16, TINY_VOCAB);
  clb_section_desc* gate = tiny_section(&tiny, CLB_ROLE_GATE, 0, 1);
  clb_section_desc* router = tiny_section(&tiny, CLB_ROLE_ROUTER, 0, -1);
  const clb_section_desc good = *gate;
  const struct {
    clb_section_desc bent;
    int32_t status;
    const char* word;
  } cases[] = {
      {{16, 0, 1, good.file, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols}, CLB_ERR_FORMAT, "role 16"},
      {{CLB_ROLE_GATE, 2, 1, good.file, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols},
       CLB_ERR_FORMAT,
       "layer 2"},
      {{CLB_ROLE_GATE, -7, 1, good.file, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols},
       CLB_ERR_FORMAT,
       "not part"},
      {{CLB_ROLE_GATE, 0, 3, good.file, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols},
       CLB_ERR_FORMAT,
       "expert 3"},
      {{CLB_ROLE_GATE, 0, -2, good.file, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols},
       CLB_ERR_FORMAT,
       "not part"},
      {{CLB_ROLE_GATE, 0, 1, 4, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols},
       CLB_ERR_FORMAT,
       "file index is 4"},
      {{CLB_ROLE_GATE, 0, 1, good.file, 1, good.bytes, CLB_BF16, 0, good.rows, good.cols}, CLB_ERR_FORMAT, "offset 1"},
      {{CLB_ROLE_GATE, 0, 1, good.file, UINT64_MAX - 1, good.bytes, CLB_BF16, 0, good.rows, good.cols},
       CLB_ERR_FORMAT,
       "beyond"},
      {{CLB_ROLE_GATE, 0, 1, good.file, good.offset, UINT64_MAX, CLB_BF16, 0, good.rows, good.cols},
       CLB_ERR_FORMAT,
       "its shape"},
      {{CLB_ROLE_GATE, 0, 1, good.file, good.offset, 0, CLB_BF16, 0, good.rows, good.cols},
       CLB_ERR_FORMAT,
       "its shape"},
      {{CLB_ROLE_GATE, 0, 1, good.file, good.offset, good.bytes, 3, 0, good.rows, good.cols},
       CLB_ERR_UNSUPPORTED,
       "precision 3"},
      {{CLB_ROLE_GATE, 0, 1, good.file, good.offset, good.bytes, CLB_BF16, 1, good.rows, good.cols},
       CLB_ERR_UNSUPPORTED,
       "layout 1"},
      {{CLB_ROLE_GATE, 0, 1, good.file, good.offset, good.bytes, CLB_BF16, 0, good.cols, good.rows},
       CLB_ERR_FORMAT,
       "(16, 8)"},
      {{CLB_ROLE_GATE, 0, 1, good.file, good.offset, good.bytes, CLB_BF16, 0, 65536, 65536},
       CLB_ERR_FORMAT,
       "(65536, 65536)"},
      {{CLB_ROLE_GATE, 0, 2, good.file, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols},
       CLB_ERR_FORMAT,
       "twice"},
      {{CLB_ROLE_GATE, 0, 1, good.file, good.bytes, good.bytes, CLB_BF16, 0, good.rows, good.cols},
       CLB_ERR_FORMAT,
       "overlaps"},
      {{CLB_ROLE_GATE, 0, 1, good.file, good.offset + 2, good.bytes, CLB_BF16, 0, good.rows, good.cols},
       CLB_ERR_FORMAT,
       "overlaps"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    *gate = cases[i].bent;
    if (strcmp(cases[i].word, "overlaps") == 0 && gate->offset == gate->bytes) {
      gate->offset = tiny_section(&tiny, CLB_ROLE_UP, 0, 1)->offset; /* exactly on another role's bytes */
    }
    expect_refusal(&tiny, cases[i].status, cases[i].word, "");
  }
  *gate = good;
  router->precision = CLB_BF16;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "router of layer 0", "fp32");
  tiny_free(&tiny);
}

static void missing_sections_and_gaps(void) {
  tiny_model tiny;
  tiny_make(&tiny, 0, CLB_BF16, TINY_VOCAB);
  clb_section_desc* last = &tiny.sections[--tiny.model.section_count];
  CHECK_EQ(last->role, CLB_ROLE_DOWN);
  expect_refusal(&tiny, CLB_ERR_FORMAT, "down of layer 1", "missing");
  ++tiny.model.section_count;
  tiny.files[1].bytes += 4096;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "expert_0_0.bin", "belong to no section");
  tiny.files[1].bytes -= 4096;
  tiny.model.tied_head = 1;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "head", "not part of this model");
  tiny_free(&tiny);
}

/* Each limit of the description itself. */
static void hostile_models(void) {
  tiny_model tiny;
  tiny_make(&tiny, 1, CLB_BF16, TINY_VOCAB);
  const clb_model_desc good = tiny.model;
#define BEND(field, value, status, word)         \
  do {                                           \
    tiny.model.field = (value);                  \
    expect_refusal(&tiny, (status), (word), ""); \
    tiny.model = good;                           \
  } while (0)
  BEND(abi_version, 99, CLB_ERR_VERSION, "version 99");
  BEND(struct_bytes, 8, CLB_ERR_VERSION, "8 bytes");
  BEND(vocab_size, 0, CLB_ERR_ARGUMENT, "vocab_size is 0");
  BEND(vocab_size, CLB_MAX_VOCAB + 1, CLB_ERR_ARGUMENT, "vocab_size");
  BEND(layers, 0, CLB_ERR_ARGUMENT, "layers is 0");
  BEND(layers, CLB_MAX_LAYERS + 1, CLB_ERR_ARGUMENT, "layers is 257");
  BEND(hidden, UINT32_MAX, CLB_ERR_ARGUMENT, "hidden");
  BEND(heads, 0, CLB_ERR_ARGUMENT, "heads is 0");
  BEND(heads, 3, CLB_ERR_FORMAT, "shape");
  BEND(kv_heads, 3, CLB_ERR_ARGUMENT, "kv_heads is 3");
  BEND(head_dim, 7, CLB_ERR_ARGUMENT, "must be even");
  BEND(head_dim, 258, CLB_ERR_ARGUMENT, "head_dim is 258");
  BEND(attention_scale, NAN, CLB_ERR_ARGUMENT, "attention_scale");
  BEND(rope_scale, INFINITY, CLB_ERR_ARGUMENT, "rope_scale");
  BEND(rms_norm_eps, -1.0f, CLB_ERR_ARGUMENT, "rms_norm_eps");
  BEND(rope_inv_freq, NULL, CLB_ERR_ARGUMENT, "rope_inv_freq");
  BEND(layer_table, NULL, CLB_ERR_ARGUMENT, "layer_table");
  BEND(section_table, NULL, CLB_ERR_ARGUMENT, "no address");
  BEND(section_count, UINT32_MAX, CLB_ERR_ARGUMENT, "section_count");
  BEND(file_count, UINT32_MAX, CLB_ERR_ARGUMENT, "file_count");
#undef BEND
  tiny.inv_freq[3] = NAN;
  expect_refusal(&tiny, CLB_ERR_ARGUMENT, "rope_inv_freq", "finite");
  tiny_free(&tiny);
}

static void hostile_layers(void) {
  tiny_model tiny;
  tiny_make(&tiny, 0, CLB_BF16, TINY_VOCAB);
#define BEND(layer, field, value, status, word)     \
  do {                                              \
    const clb_layer_desc good = tiny.layers[layer]; \
    tiny.layers[layer].field = (value);             \
    expect_refusal(&tiny, (status), (word), "");    \
    tiny.layers[layer] = good;                      \
  } while (0)
  BEND(0, ffn_kind, 2, CLB_ERR_ARGUMENT, "layer 0: ffn_kind is 2");
  BEND(0, score, 2, CLB_ERR_ARGUMENT, "score is 2");
  BEND(0, renormalise, 2, CLB_ERR_ARGUMENT, "renormalise is 2");
  BEND(0, kv_values_per_token, 1, CLB_ERR_ARGUMENT, "kv_values_per_token is 1, must be 16");
  BEND(0, qk_norm, 3, CLB_ERR_ARGUMENT, "qk_norm is 3");
  BEND(0, kv_kind, 1, CLB_ERR_UNSUPPORTED, "kv_kind is 1");
  BEND(0, experts, 0, CLB_ERR_ARGUMENT, "experts is 0");
  BEND(0, experts, CLB_MAX_EXPERTS + 1, CLB_ERR_ARGUMENT, "experts is 513");
  BEND(0, experts_per_token, TINY_EXPERTS + 1, CLB_ERR_ARGUMENT, "experts_per_token is 4, must be 1 to 3");
  BEND(0, expert_width, 0, CLB_ERR_ARGUMENT, "expert_width is 0");
  BEND(0, expert_width, UINT32_MAX, CLB_ERR_ARGUMENT, "expert_width");
  BEND(0, shared_width, UINT32_MAX, CLB_ERR_ARGUMENT, "shared_width");
  BEND(0, routed_scale, NAN, CLB_ERR_ARGUMENT, "routed_scale");
  BEND(1, experts, 4, CLB_ERR_ARGUMENT, "layer 1: experts is 4");
  BEND(1, experts_per_token, 1, CLB_ERR_ARGUMENT, "experts_per_token is 1");
  BEND(1, expert_width, 1, CLB_ERR_ARGUMENT, "expert_width is 1");
  BEND(1, shared_width, 0, CLB_ERR_ARGUMENT, "shared_width is 0");
  BEND(1, shared_gated, 1, CLB_ERR_ARGUMENT, "shared_gated is 1");
#undef BEND
  tiny_free(&tiny);
}

static void memory_that_is_too_small(void) {
  tiny_model tiny;
  clb_loader_sizes sizes;
  clb_error error;
  const clb_weight_table* table = NULL;
  static _Alignas(64) char block[128];
  tiny_make(&tiny, 0, CLB_BF16, TINY_VOCAB);
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
  tiny_make(&tiny, 0, CLB_BF16, TINY_VOCAB);
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
  CHECK_EQ(n, 3); /* two allocations: for the check of all sections, for the places of the files */
  unload(&out);
  tiny_free(&tiny);
}

/* Dummy weights: same seed same bytes, another seed others; all finite; norms 1; spread 1 / sqrt(inputs). */
static void dummy_weights(void) {
  tiny_model tiny;
  loaded first;
  loaded again;
  loaded other;
  tiny_make(&tiny, 0, CLB_FP32, 4000);
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_DUMMY, 7, &first), CLB_OK);
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_DUMMY, 7, &again), CLB_OK);
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_DUMMY, 8, &other), CLB_OK);
  CHECK_EQ(first.progress, first.sizes.read_bytes);
  for (uint32_t i = 0; i < tiny.model.section_count; ++i) {
    const clb_section_desc* section = &tiny.sections[i];
    const clb_tensor* tensor = clb_weight(first.table, section->role, section->layer, section->expert);
    const void* same = clb_weight(again.table, section->role, section->layer, section->expert)->data;
    CHECK(memcmp(tensor->data, same, (size_t)section->bytes) == 0);
    CHECK_EQ(clb_first_not_finite(tensor->data, CLB_FP32, (uint64_t)section->rows * section->cols),
             (uint64_t)section->rows * section->cols);
  }
  const float* norm = clb_weight(first.table, CLB_ROLE_FINAL_NORM, -1, -1)->data;
  CHECK_NEAR(norm[0], 1.0, 0);
  const clb_tensor* head = clb_weight(first.table, CLB_ROLE_HEAD, -1, -1);
  const float* values = head->data;
  double sum = 0;
  double squares = 0;
  const uint32_t count = head->rows * head->cols;
  for (uint32_t i = 0; i < count; ++i) {
    sum += (double)values[i];
    squares += (double)values[i] * (double)values[i];
  }
  CHECK_NEAR(sum / count, 0.0, 0.01);
  CHECK_NEAR(squares / count, 1.0 / head->cols, 0.02 / head->cols);
  CHECK(memcmp(values, clb_weight(other.table, CLB_ROLE_HEAD, -1, -1)->data, 64) != 0);
  CHECK(memcmp(values, clb_weight(first.table, CLB_ROLE_EMBEDDING, -1, -1)->data, 64) != 0);
  unload(&first);
  unload(&again);
  unload(&other);
  tiny_free(&tiny);
}

/* A description without sections and files is laid out by the loader: all places but the biases, 256-aligned. */
static void dummy_lays_out_itself(void) {
  tiny_model tiny;
  loaded out;
  tiny_make(&tiny, 0, CLB_FP32, TINY_VOCAB);
  tiny.model.section_count = 0;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "embedding", "missing");
  tiny.model.file_count = 0;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "embedding", "missing");
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_DUMMY, 1, &out), CLB_OK);
  clb_place place = {0, -1, -1};
  do {
    const clb_demand demand = clb_demand_of(&tiny.model, place.role, place.layer, place.expert);
    const clb_tensor* tensor = clb_weight(out.table, place.role, place.layer, place.expert);
    CHECK_EQ(tensor->data != NULL, demand.rows != 0 && demand.optional == 0);
    if (tensor->data != NULL) {
      CHECK_EQ(tensor->precision, demand.narrow != 0 ? CLB_BF16 : CLB_FP32);
      CHECK_EQ((uintptr_t)tensor->data % 256, 0);
    }
  } while (clb_place_next(&tiny.model, &place));
  unload(&out);
  tiny_free(&tiny);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {
      TEST(loads_every_section),
      TEST(shared_files_take_memory_once),
      TEST(absent_sections_have_no_data),
      TEST(truncated_files),
      TEST(flipped_bits),
      TEST(values_that_are_not_finite),
      TEST(files_that_are_not_there),
      TEST(hostile_names_and_files),
      TEST(hostile_sections),
      TEST(missing_sections_and_gaps),
      TEST(hostile_models),
      TEST(hostile_layers),
      TEST(memory_that_is_too_small),
      TEST(every_allocation_may_fail),
      TEST(dummy_weights),
      TEST(dummy_lays_out_itself),
  };
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
