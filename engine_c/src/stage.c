/* stage.c: see stage.h. */
#include "stage.h"

#include "invariant.h"

/* A column of a tile costs one unit a token (a multiplication of 16 numbers) and READ_COST units to be read, less of it
   where it has fewer bytes, and of integers less a token; a unit is some ten picoseconds. */
enum {
  READ_COST = 16,
  READ_COST_8 = 8,
  READ_COST_4 = 5,
  ITEMS_PER_THREAD = 32, /* so that the last item of a stage is a small part of it */
  LEAST_COST = 32768,    /* of an item: several times what it costs to hand one to another core */
  SHARED_COST = 100000,  /* of a stage that is worth waking other threads' caches for */
  MOST_COST = 33554432,  /* of one call: progress is shown between calls */
  STREAM_TILES = 8,      /* a kernel reads so many tiles side by side, and less well fewer */
  TOKEN_UNIT = 8,        /* tokens are cut at multiples of this */
  LEAST_TOKENS = 2 * TOKEN_UNIT
};

static uint32_t parts_of(uint32_t whole, uint32_t part) { return (whole + part - 1u) / part; }

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

static uint32_t tiles_of(const clb_product* product) { return parts_of(product->rows, CLB_TILE_ROWS); }

static uint64_t column_cost(uint32_t precision, uint64_t tokens) {
  switch (precision) {
    case CLB_INT8:
      return READ_COST_8 + tokens * 3u / 8u;
    case CLB_INT4:
      return READ_COST_4 + tokens * 3u / 8u;
    case CLB_FP8:
      return READ_COST_8 + tokens;
    default:
      return READ_COST + tokens;
  }
}

static uint64_t tile_cost(const clb_product* product, uint32_t tokens) {
  const uint64_t cols = product->up.values != NULL ? (uint64_t)2 * product->cols : product->cols;
  return cols * column_cost(product->kernel->precision, tokens);
}

void clb_stage_begin(clb_stage* stage) {
  stage->count = 0;
  stage->cost = 0;
  stage->items = 0;
  stage->reads_codes = 0;
}

void clb_stage_add(clb_stage* stage, const clb_product* product) {
  CLB_ASSERT(stage->count < stage->capacity);
  CLB_ASSERT(product->tokens > 0u && product->rows > 0u);
  stage->products[stage->count] = *product;
  stage->cost += tiles_of(product) * tile_cost(product, product->tokens);
  stage->reads_codes |= product->kernel->reads_codes;
  stage->count++;
}

/* Tiles and tokens of one item of about `cost`: as many tiles as a kernel likes to read side by side, or a multiple,
   unless single tiles are long enough. A product that has not even these for each thread is cut by tokens. */
static void cut(clb_product* product, uint64_t cost, uint32_t threads) {
  const uint32_t tiles = tiles_of(product);
  const uint64_t one = tile_cost(product, product->tokens);
  const uint32_t stream = one >= LEAST_COST ? 1u : product->up.values != NULL ? STREAM_TILES / 2u : STREAM_TILES;
  const uint64_t wanted = cost / one;
  const uint32_t item_tiles = wanted >= tiles ? tiles : (uint32_t)(wanted - wanted % stream);
  product->item_tiles = least(item_tiles < stream ? stream : item_tiles, tiles);
  product->item_tokens = product->tokens;
  if (parts_of(tiles, product->item_tiles) < threads && product->tokens >= LEAST_TOKENS) {
    const uint64_t parts = product->item_tiles * one / cost + 1u;
    const uint32_t part = (uint32_t)((product->tokens + parts - 1u) / parts);
    product->item_tokens = parts_of(part, TOKEN_UNIT) * TOKEN_UNIT;
  }
}

static const uint32_t* skip(const uint32_t* list, uint32_t count) { return list == NULL ? NULL : list + count; }

/* Rows [row_begin, row_end) for tokens [first, first + tokens). */
static void call(const clb_product* p, uint32_t row_begin, uint32_t row_end, uint32_t first, uint32_t tokens) {
  const float* const input = p->input + (p->inputs == NULL ? first * p->input_stride : 0u);
  const uint64_t skipped_codes = p->inputs == NULL && p->codes != NULL ? first * clb_code_row_bytes(p->cols) : 0u;
  const unsigned char* const codes = p->kernel->reads_codes != 0u ? p->codes + skipped_codes : NULL;
  float* const output = p->output + (p->outputs == NULL ? first * p->output_stride : 0u);
  if (p->up.values == NULL) {
    const clb_linear_args args = {
        .weights = p->weights,
        .bias = p->bias,
        .input = input,
        .codes = codes,
        .output = output,
        .inputs = skip(p->inputs, first),
        .outputs = skip(p->outputs, first),
        .input_stride = p->input_stride,
        .output_stride = p->output_stride,
        .tokens = tokens,
        .cols = p->cols,
        .row_begin = row_begin,
        .row_end = row_end,
    };
    p->kernel->linear(&args);
    return;
  }
  const clb_gated_linear_args args = {
      .gate = p->weights,
      .up = p->up,
      .input = input,
      .codes = codes,
      .output = output,
      .inputs = skip(p->inputs, first),
      .input_stride = p->input_stride,
      .output_stride = p->output_stride,
      .tokens = tokens,
      .cols = p->cols,
      .row_begin = row_begin,
      .row_end = row_end,
  };
  p->kernel->gate_up(&args);
}

/* The last product whose first item is not behind `item`. */
static uint32_t product_of(const clb_stage* stage, uint32_t item) {
  uint32_t low = 0;
  uint32_t high = stage->count;
  while (high - low > 1u) {
    const uint32_t middle = low + (high - low) / 2u;
    if (stage->first_items[middle] <= item) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/* Does as many of the `count` items of one product, from `item` on, as make one call. Returns how many. Items go
   through the tokens first, so neighbours are one range of rows where tokens are not cut. */
static uint32_t run_some(const clb_product* product, uint32_t item, uint32_t count) {
  const uint32_t token_parts = parts_of(product->tokens, product->item_tokens);
  const uint64_t cost = product->item_tiles * tile_cost(product, product->item_tokens);
  const uint32_t most = cost >= MOST_COST ? 1u : (uint32_t)(MOST_COST / cost);
  const uint32_t some = token_parts > 1u ? 1u : least(count, most);
  const uint32_t item_rows = product->item_tiles * CLB_TILE_ROWS;
  const uint32_t row_begin = item / token_parts * item_rows;
  const uint32_t first = item % token_parts * product->item_tokens;
  call(product, row_begin, row_begin + least(some * item_rows, product->rows - row_begin), first,
       least(product->item_tokens, product->tokens - first));
  return some;
}

static void run_items(void* context, uint32_t first, uint32_t end, uint32_t thread) {
  const clb_stage* const stage = context;
  uint32_t item = first;
  uint32_t index = product_of(stage, first);
  while (item < end) {
    const uint32_t begin = stage->first_items[index];
    const uint32_t next = index + 1u < stage->count ? stage->first_items[index + 1u] : stage->items;
    while (item < least(next, end)) {
      item += run_some(&stage->products[index], item - begin, least(next, end) - item);
      if (thread == 0u) {
        stage->progress(stage->progress_context);
      }
    }
    ++index;
  }
}

void clb_stage_run(clb_stage* stage) {
  const uint32_t threads = stage->threads->count;
  const uint64_t share = stage->cost / (threads * ITEMS_PER_THREAD);
  const uint64_t cost = share < LEAST_COST ? LEAST_COST : share > MOST_COST ? MOST_COST : share;
  stage->items = 0;
  for (uint32_t i = 0; i < stage->count; ++i) {
    clb_product* const product = &stage->products[i];
    cut(product, cost, threads);
    stage->first_items[i] = stage->items;
    stage->items += parts_of(tiles_of(product), product->item_tiles) * parts_of(product->tokens, product->item_tokens);
  }
  if (stage->items == 0u) {
    return;
  }
  if (stage->cost >= SHARED_COST) {
    clb_threads_run(stage->threads, stage->items, run_items, stage);
  } else {
    run_items(stage, 0, stage->items, 0);
  }
}
