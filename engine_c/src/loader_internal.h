/*
 * loader_internal.h: what the files of the loader share: error messages, what a model demands of each section, and
 * the walk over all of them. Included by loader*.c, model_check.c, dummy.c and their tests only.
 */
#ifndef CLB_LOADER_INTERNAL_H
#define CLB_LOADER_INTERNAL_H

#include <inttypes.h>
#include <stddef.h>

#include "loader.h"

/* Writes status and message (cut at CLB_ERROR_BYTES) unless error is NULL; returns status. */
__attribute__((format(printf, 3, 4))) int32_t clb_fail(clb_error* error, int32_t status, const char* format, ...);

/* What the model wants in one place. rows == 0: nothing may lie there. */
typedef struct clb_demand {
  uint32_t rows;
  uint32_t cols;
  uint32_t optional; /* may be absent */
  uint32_t narrow;   /* any precision; else fp32 only */
} clb_demand;

/* role, layer and expert may be any numbers: what no model has gets rows == 0. */
clb_demand clb_demand_of(const clb_model_desc* model, uint32_t role, int32_t layer, int32_t expert);

typedef struct clb_place {
  uint32_t role;
  int32_t layer;
  int32_t expert;
} clb_place;

/* Steps through all places of the table in order: globals, then per layer its own, its shared and its routed ones.
   Start with {0, -1, -1}; returns 0 when there is no next. */
int clb_place_next(const clb_model_desc* model, clb_place* place);

/* "qkv of layer 3", "gate of layer 3, expert 7", "embedding": fills and returns text. */
#define CLB_PLACE_BYTES 64u
const char* clb_place_text(clb_place place, char text[CLB_PLACE_BYTES]);

static inline uint64_t clb_element_bytes(uint32_t precision) { return precision == CLB_FP32 ? 4u : 2u; }

static inline uint64_t clb_align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1u) / alignment * alignment;
}

/* Bytes of the table for a checked model, and its set-up at the start of `host`, all tensors empty. */
uint64_t clb_table_bytes(const clb_model_desc* model);
clb_weight_table* clb_table_init(const clb_model_desc* model, void* host);

/* Sections and files against the model: all that can be known before a byte is read. For a model that passed
   clb_model_check. FORMAT, UNSUPPORTED or MEMORY. */
int32_t clb_sections_check(const clb_model_desc* model, clb_error* error);

/* Fills a (rows, cols) section with values that depend on seed, place and index only. */
void clb_dummy_fill(uint64_t seed, clb_place place, uint32_t precision, uint32_t rows, uint32_t cols, void* data);

/* Index of the first value that is NaN or infinite, or count. */
uint64_t clb_first_not_finite(const void* data, uint32_t precision, uint64_t count);

#endif /* CLB_LOADER_INTERNAL_H */
