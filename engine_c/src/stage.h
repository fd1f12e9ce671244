/*
 * stage.h: matrix products that do not depend on each other, shared out among the threads as one list of items.
 *
 *   begin ── add_gate_up, add_linear, ... ── run: cut into items, done by all threads, one barrier
 *
 * An item is one product's rows [begin, end) for some of its tokens:
 *
 *   product 0  | item 0 | item 1 | item 2 |      rows are cut at tile borders, so that items of about equal cost come
 *   product 1  | item 3 |                        out however unequal the products are; the tokens of a product with
 *   product 2  | item 4 | item 5 |               few rows and many tokens are cut as well
 *
 * How a stage is cut changes nothing in the results: an output depends on its row and its token alone.
 *
 * Owner: the engine loop. The array of products lies in the temp tier.
 */
#ifndef CLB_STAGE_H
#define CLB_STAGE_H

#include <stdint.h>

#include "../include/colibri.h"
#include "threads.h"

typedef struct clb_product {
  const clb_module* kernel;
  clb_linear_args linear;        /* the whole product; unused when gate_up.gate is set */
  clb_gated_linear_args gate_up; /* gate NULL: it is a linear one */
  uint32_t item_rows;            /* a multiple of CLB_TILE_ROWS */
  uint32_t item_tokens;
  uint32_t first_item;
  uint32_t reserved;
} clb_product;

typedef struct clb_stage {
  clb_threads* threads;
  void (*progress)(void* context); /* called by the owner after each of its items */
  void* progress_context;
  clb_product* products; /* (capacity) */
  uint32_t capacity;
  uint32_t count;
  uint64_t cost;  /* of all products */
  uint32_t items; /* set by run */
  uint32_t reserved;
} clb_stage;

void clb_stage_begin(clb_stage* stage);
/* Rows [row_begin, row_end) of `args`; row_begin must be 0. At most `capacity` products, tokens > 0 (asserted). */
void clb_stage_add_linear(clb_stage* stage, const clb_module* kernel, const clb_linear_args* args);
void clb_stage_add_gate_up(clb_stage* stage, const clb_module* kernel, const clb_gated_linear_args* args);
/* Returns when all products are done. */
void clb_stage_run(clb_stage* stage);

#endif /* CLB_STAGE_H */
