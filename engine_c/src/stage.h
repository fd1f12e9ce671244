/*
 * stage.h: matrix products that do not depend on each other, shared out among the threads as one list of items.
 *
 *   begin ── add, add, ... ── run: cut into items, done by all threads, one barrier
 *
 * An item is some tiles of one product's rows, for some of its tokens:
 *
 *   product 0  | item 0 | item 1 | item 2 |      rows are cut at tile borders, so that items of about equal cost come
 *   product 1  | item 3 |                        out however unequal the products are; the tokens of a product with
 *   product 2  | item 4 | item 5 |               few rows and many tokens are cut as well
 *
 * A thread takes several items at once while many are left (threads.h), and does neighbours in one call of the kernel.
 * How a stage is cut changes nothing in the results: an output depends on its row and its token alone.
 *
 * Owner: the engine loop. The arrays lie in the temp tier.
 */
#ifndef CLB_STAGE_H
#define CLB_STAGE_H

#include <stdint.h>

#include "../include/colibri.h"
#include "threads.h"

/* linear: output[outputs[i]][r] = weights[r] . x (+ bias[r]); with `up`: output[i][r] = silu(weights[r] . x) * (up[r] .
   x), x = input[inputs[i]]. See clb_linear_args and clb_gated_linear_args. */
typedef struct clb_product {
  const clb_module* kernel;
  clb_operand weights;        /* (rows, cols) */
  clb_operand up;             /* (rows, cols); values NULL: linear */
  const float* bias;          /* (rows) or NULL */
  const float* input;         /* (.., cols) */
  const unsigned char* codes; /* where the rows' codes are when the stage runs, if the kernel reads them */
  float* output;              /* (.., rows) */
  const uint32_t* inputs;     /* (tokens) or NULL */
  const uint32_t* outputs;    /* (tokens) or NULL; linear only */
  uint64_t input_stride;
  uint64_t output_stride;
  uint32_t tokens;
  uint32_t cols;
  uint32_t rows;
  uint32_t item_tiles; /* these two are set by run */
  uint32_t item_tokens;
  uint32_t reserved;
} clb_product;

typedef struct clb_stage {
  clb_threads* threads;
  void (*progress)(void* context); /* called by the owner between calls of kernels */
  void* progress_context;
  clb_product* products; /* (capacity) */
  uint32_t* first_items; /* (capacity): of each product; close together, for threads look things up here */
  uint64_t cost;         /* of all products */
  uint32_t capacity;
  uint32_t count;
  uint32_t items;       /* set by run */
  uint32_t reads_codes; /* 1: a kernel of a product does */
} clb_stage;

void clb_stage_begin(clb_stage* stage);
/* Copies the product. At most `capacity` of them, with tokens and rows (asserted). */
void clb_stage_add(clb_stage* stage, const clb_product* product);
/* Returns when all products are done. */
void clb_stage_run(clb_stage* stage);

#endif /* CLB_STAGE_H */
