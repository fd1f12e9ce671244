/*
 * tiny_load.h: load a tiny_model into memory of its own, or expect that it is refused. For test programs only.
 */
#ifndef CLB_TINY_LOAD_H
#define CLB_TINY_LOAD_H

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

static inline void on_progress(void* context, uint64_t bytes) { *(uint64_t*)context = bytes; }

static inline int32_t load_as(const tiny_model* tiny, uint32_t weights, uint64_t seed, loaded* out) {
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

static inline void unload(loaded* out) {
  free(out->memory);
  free(out->host);
}

/* Loads and expects a failure whose message has both words. */
static inline void expect_refusal(const tiny_model* tiny, int32_t status, const char* word, const char* other) {
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

#endif /* CLB_TINY_LOAD_H */
