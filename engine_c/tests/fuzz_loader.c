/*
 * fuzz_loader.c: the loader against hostile descriptions and contents.
 *
 * The input is a list of 8-byte edits of a good description: {what, row, word, how, value (4 bytes)}. After them the
 * plan must either refuse or be loadable without touching memory that is not its own (the sanitizers watch), and what
 * loads must have every section inside the weights memory. See fuzz.h for how to run it.
 */
#define _XOPEN_SOURCE 700

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "invariant.h"
#include "loader_internal.h"
#include "tiny_model.h"

#define EDIT_BYTES 8u
#define MOST_EDITS 8u
#define MOST_MEMORY (UINT64_C(16) << 20)

static tiny_model models[3]; /* flat, rows16, and quantised */

static void edit_words(void* target, size_t bytes, const uint8_t* edit) {
  uint32_t value;
  memcpy(&value, edit + 4, sizeof value);
  clb_fuzz_edit(target, bytes, edit[2], edit[3], value);
}

/* Pointers are the caller's word and stay; only numbers are edited. */
static void edit_file(tiny_model* tiny, clb_file_desc* file, const uint8_t* edit) {
  switch (edit[2] % 3) {
    case 0:
      edit_words(&file->bytes, sizeof file->bytes, edit);
      break;
    case 1:
      edit_words(&file->alignment, sizeof file->alignment, edit);
      break;
    default:
      file->name = edit[3] % 2 != 0 ? "../dense.bin" : tiny->names[edit[4] % TINY_FILES];
  }
  file->crc_count = 0;
}

/* sections: rows of the table, whatever the model says by now. */
static void apply(tiny_model* tiny, uint32_t sections, const uint8_t* edit) {
  const size_t numbers = offsetof(clb_model_desc, rope_inv_freq);
  const clb_model_desc before = tiny->model;
  switch (edit[0] % 8) {
    case 0:
      edit_words(&tiny->model, numbers, edit);
      if (tiny->model.section_count > before.section_count) {
        tiny->model.section_count = before.section_count; /* the table's length is the caller's word too */
      }
      if (tiny->model.file_count > before.file_count) {
        tiny->model.file_count = before.file_count;
      }
      if (tiny->model.layers > before.layers) {
        tiny->model.layers = before.layers;
      }
      if (tiny->model.head_dim > before.head_dim) {
        tiny->model.head_dim = before.head_dim;
      }
      break;
    case 1:
      edit_words(&tiny->layers[edit[1] % 2], sizeof tiny->layers[0], edit);
      break;
    case 2:
      edit_file(tiny, &tiny->files[edit[1] % TINY_FILES], edit);
      break;
    case 3:
      tiny->sections[edit[1] % sections] = tiny->sections[edit[2] % sections];
      break;
    default:
      edit_words(&tiny->sections[edit[1] % sections], sizeof tiny->sections[0], edit);
  }
}

static void check_table(const clb_model_desc* model, const clb_weight_table* table, const char* memory,
                        uint64_t bytes) {
  clb_place place = {0, -1, -1};
  do {
    const clb_tensor* tensor = clb_weight(table, place.role, place.layer, place.expert);
    if (tensor->data != NULL) {
      const uint64_t offset = (uint64_t)((const char*)tensor->data - memory);
      CLB_ASSERT(offset < bytes);
      if (clb_is_quantised(tensor->precision)) {
        CLB_ASSERT((const char*)tensor->scales > (const char*)tensor->data &&
                   (uint64_t)((const char*)tensor->scales - memory) + 2u * tensor->rows <= bytes);
      } else {
        CLB_ASSERT(clb_layout_bytes(tensor->layout, tensor->precision, tensor->rows, tensor->cols) <= bytes - offset);
      }
    }
  } while (clb_place_next(model, &place));
}

static void load(const tiny_model* tiny, uint32_t weights) {
  clb_loader_sizes sizes;
  clb_error error;
  const clb_weight_table* table = NULL;
  if (clb_loader_plan(&tiny->model, weights, &sizes, &error) != CLB_OK || sizes.weights_bytes > MOST_MEMORY) {
    return;
  }
  const size_t alignment = (size_t)sizes.weights_alignment;
  char* memory = aligned_alloc(alignment, (size_t)clb_align_up(sizes.weights_bytes, alignment));
  void* host = aligned_alloc(64, (size_t)clb_align_up(sizes.host_bytes, 64));
  CLB_ASSERT(memory != NULL && host != NULL);
  const clb_loader_config config = {.model = &tiny->model,
                                    .weights = weights,
                                    .dir_fd = tiny->dir_fd,
                                    .memory = memory,
                                    .memory_bytes = sizes.weights_bytes,
                                    .host = host,
                                    .host_bytes = sizes.host_bytes};
  if (clb_loader_load(&config, &table, &error) == CLB_OK) {
    check_table(&tiny->model, table, memory, sizes.weights_bytes);
  }
  free(memory);
  free(host);
}

static void free_models(void) {
  tiny_free(&models[0]);
  tiny_free(&models[1]);
  tiny_free(&models[2]);
}

static void make_models(void) {
  for (uint32_t layout = 0; layout < 2; ++layout) {
    tiny_make(&models[layout], 1, CLB_BF16, layout, TINY_VOCAB);
    tiny_write(&models[layout]);
  }
  tiny_make(&models[2], 1, CLB_INT8, CLB_LAYOUT_ROWS16, TINY_VOCAB);
  tiny_write(&models[2]);
  CLB_ASSERT(atexit(free_models) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (models[0].dir_fd == 0) {
    make_models();
  }
  const tiny_model good = models[size / 4 % 3];
  tiny_model bent = good;
  bent.model.layer_table = bent.layers;
  bent.model.section_table = bent.sections;
  bent.model.file_table = bent.files;
  bent.model.rope_inv_freq = bent.inv_freq;
  for (size_t i = 0; i + EDIT_BYTES <= size && i < MOST_EDITS * EDIT_BYTES; i += EDIT_BYTES) {
    apply(&bent, good.model.section_count, data + i);
  }
  load(&bent, size % 4 == 0 ? CLB_WEIGHTS_FILES : CLB_WEIGHTS_DUMMY);
  return 0;
}

CLB_FUZZ_MAIN(MOST_EDITS* EDIT_BYTES + 3)
