/* stage.c: see stage.h. */
#include "stage.h"

#include <string.h>

#include "invariant.h"

/* A column of a tile costs one unit a token (a multiplication of 16 numbers) and READ_COST units to be read. */
enum {
  READ_COST = 16,
  ITEMS_PER_THREAD = 8, /* so that the last item of a stage is a small part of it */
  LEAST_COST = 16384,   /* some microseconds: many times what taking an item costs */
  MOST_COST = 33554432, /* some milliseconds: progress is shown between items */
  STREAM_TILES = 8,     /* a kernel reads so many tiles side by side */
  TOKEN_UNIT = 8,       /* tokens are cut at multiples of this */
  LEAST_TOKENS = 2 * TOKEN_UNIT
};

static uint32_t rows_of(const clb_product* product) {
  return product->gate_up.gate != NULL ? product->gate_up.row_end : product->linear.row_end;
}

static uint32_t tokens_of(const clb_product* product) {
  return product->gate_up.gate != NULL ? product->gate_up.tokens : product->linear.tokens;
}

static uint32_t tiles_of(const clb_product* product) { return (rows_of(product) + CLB_TILE_ROWS - 1u) / CLB_TILE_ROWS; }

static uint64_t tile_cost(const clb_product* product) {
  const uint64_t cols = product->gate_up.gate != NULL ? (uint64_t)2 * product->gate_up.cols : product->linear.cols;
  return cols * (READ_COST + (uint64_t)tokens_of(product));
}

void clb_stage_begin(clb_stage* stage) {
  stage->count = 0;
  stage->cost = 0;
  stage->items = 0;
}

static clb_product* add(clb_stage* stage, const clb_module* kernel) {
  CLB_ASSERT(stage->count < stage->capacity);
  clb_product* const product = &stage->products[stage->count];
  ++stage->count;
  (void)memset(product, 0, sizeof *product);
  product->kernel = kernel;
  return product;
}

static void count_in(clb_stage* stage, const clb_product* product) {
  CLB_ASSERT(tokens_of(product) > 0u && rows_of(product) > 0u);
  stage->cost += tiles_of(product) * tile_cost(product);
}

void clb_stage_add_linear(clb_stage* stage, const clb_module* kernel, const clb_linear_args* args) {
  CLB_ASSERT(args->row_begin == 0u);
  clb_product* const product = add(stage, kernel);
  product->linear = *args;
  count_in(stage, product);
}

void clb_stage_add_gate_up(clb_stage* stage, const clb_module* kernel, const clb_gated_linear_args* args) {
  CLB_ASSERT(args->row_begin == 0u && args->gate != NULL);
  clb_product* const product = add(stage, kernel);
  product->gate_up = *args;
  count_in(stage, product);
}

/* Rows and tokens of one item of about `cost`. */
static void cut(clb_product* product, uint64_t cost, uint32_t enough_items) {
  const uint32_t tiles = tiles_of(product);
  const uint32_t tokens = tokens_of(product);
  const uint32_t stream = product->gate_up.gate != NULL ? STREAM_TILES / 2 : STREAM_TILES;
  const uint64_t wanted = cost / tile_cost(product);
  uint32_t item_tiles = wanted < 1u ? 1u : wanted > tiles ? tiles : (uint32_t)wanted;
  item_tiles -= item_tiles > stream ? item_tiles % stream : 0u;
  product->item_rows = item_tiles * CLB_TILE_ROWS;
  product->item_tokens = tokens;
  if (tiles < enough_items && tokens >= LEAST_TOKENS && tile_cost(product) > cost) {
    const uint64_t parts = tile_cost(product) / cost + 1u;
    const uint64_t part = (tokens + parts - 1u) / parts;
    product->item_tokens = (uint32_t)((part + TOKEN_UNIT - 1) / TOKEN_UNIT * TOKEN_UNIT);
  }
}

static uint32_t parts_of(uint32_t whole, uint32_t part) { return (whole + part - 1u) / part; }

static const uint32_t* skip(const uint32_t* list, uint32_t count) { return list == NULL ? NULL : list + count; }

static void run_linear(const clb_product* product, uint32_t row_begin, uint32_t row_end, uint32_t first,
                       uint32_t tokens) {
  clb_linear_args args = product->linear;
  args.input += args.inputs == NULL ? first * args.input_stride : 0u;
  args.output += args.outputs == NULL ? first * args.output_stride : 0u;
  args.inputs = skip(args.inputs, first);
  args.outputs = skip(args.outputs, first);
  args.tokens = tokens;
  args.row_begin = row_begin;
  args.row_end = row_end;
  product->kernel->linear(&args);
}

static void run_gate_up(const clb_product* product, uint32_t row_begin, uint32_t row_end, uint32_t first,
                        uint32_t tokens) {
  clb_gated_linear_args args = product->gate_up;
  args.input += args.inputs == NULL ? first * args.input_stride : 0u;
  args.output += first * args.output_stride;
  args.inputs = skip(args.inputs, first);
  args.tokens = tokens;
  args.row_begin = row_begin;
  args.row_end = row_end;
  product->kernel->gate_up(&args);
}

/* The last product whose first item is not behind `item`. */
static const clb_product* product_of(const clb_stage* stage, uint32_t item) {
  uint32_t low = 0;
  uint32_t high = stage->count;
  while (high - low > 1u) {
    const uint32_t middle = low + (high - low) / 2u;
    if (stage->products[middle].first_item <= item) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return &stage->products[low];
}

static void run_item(void* context, uint32_t item, uint32_t thread) {
  const clb_stage* const stage = context;
  const clb_product* const product = product_of(stage, item);
  const uint32_t token_parts = parts_of(tokens_of(product), product->item_tokens);
  const uint32_t local = item - product->first_item;
  const uint32_t row_begin = local / token_parts * product->item_rows;
  const uint32_t first = local % token_parts * product->item_tokens;
  const uint32_t rows_left = rows_of(product) - row_begin;
  const uint32_t tokens_left = tokens_of(product) - first;
  const uint32_t row_end = row_begin + (product->item_rows < rows_left ? product->item_rows : rows_left);
  const uint32_t tokens = product->item_tokens < tokens_left ? product->item_tokens : tokens_left;
  if (product->gate_up.gate != NULL) {
    run_gate_up(product, row_begin, row_end, first, tokens);
  } else {
    run_linear(product, row_begin, row_end, first, tokens);
  }
  if (thread == 0u) {
    stage->progress(stage->progress_context);
  }
}

void clb_stage_run(clb_stage* stage) {
  const uint32_t enough = stage->threads->count * ITEMS_PER_THREAD;
  uint64_t cost = stage->cost / enough;
  cost = cost < LEAST_COST ? LEAST_COST : cost > MOST_COST ? MOST_COST : cost;
  stage->items = 0;
  for (uint32_t i = 0; i < stage->count; ++i) {
    clb_product* const product = &stage->products[i];
    cut(product, cost, enough);
    product->first_item = stage->items;
    stage->items += parts_of(rows_of(product), product->item_rows) * parts_of(tokens_of(product), product->item_tokens);
  }
  clb_threads_run(stage->threads, stage->items, run_item, stage);
}
