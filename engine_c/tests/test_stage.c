/* test_stage.c: however a stage is cut, each output of each product is computed once, from its own inputs. */
#include "stage.h"

#include "test.h"

enum { MOST_ROWS = 700, MOST_TOKENS = 90, MOST_PRODUCTS = 9, STACKS = 4, CODE_BYTES = 448 };

static clb_threads pool;                                        /* must not move */
static uint32_t outputs[MOST_PRODUCTS][MOST_TOKENS][MOST_ROWS]; /* times written, if by the right token */
static _Alignas(4096) unsigned char stacks[STACKS * CLB_THREAD_STACK_BYTES];
static uint32_t lists[MOST_PRODUCTS][2][MOST_TOKENS];
static unsigned char codes[MOST_PRODUCTS][MOST_TOKENS * CODE_BYTES];
static _Atomic uint32_t progress;

/* Inputs are the numbers of their rows, so a kernel can tell which token it was given; outputs are counters. */
static float inputs[2 * MOST_TOKENS];

static void mark(uint32_t* row, uint32_t wanted, float input, uint32_t begin, uint32_t end) {
  for (uint32_t r = begin; r < end; ++r) {
    row[r] += (uint32_t)input == wanted && begin % CLB_TILE_ROWS == 0 ? 1u : 1000u;
  }
}

static void fake_linear(const clb_linear_args* args) {
  for (uint32_t i = 0; i < args->tokens; ++i) {
    const uint32_t in = args->inputs == NULL ? i : args->inputs[i];
    const uint32_t out = args->outputs == NULL ? i : args->outputs[i];
    uint32_t* const row = (uint32_t*)(void*)(args->output + out * args->output_stride);
    const uint32_t token = (uint32_t)(((uintptr_t)row - (uintptr_t)args->weights.values) / sizeof outputs[0][0]);
    mark(row, args->inputs == NULL ? token : in, args->input[in * args->input_stride], args->row_begin, args->row_end);
  }
}

static void fake_gate_up(const clb_gated_linear_args* args) {
  const clb_linear_args linear = {.weights = args->gate,
                                  .input = args->input,
                                  .output = args->output,
                                  .inputs = args->inputs,
                                  .input_stride = args->input_stride,
                                  .output_stride = args->output_stride,
                                  .tokens = args->tokens,
                                  .cols = args->cols,
                                  .row_begin = args->row_begin,
                                  .row_end = args->row_end};
  fake_linear(&linear);
}

/* The same with codes, whose first byte is the number of the row; `input` must not be needed. */
static void coded_linear(const clb_linear_args* args) {
  for (uint32_t i = 0; i < args->tokens; ++i) {
    const uint32_t in = args->inputs == NULL ? i : args->inputs[i];
    const float number = (float)args->codes[in * clb_code_row_bytes(args->cols)];
    const uint32_t out = args->outputs == NULL ? i : args->outputs[i];
    uint32_t* const row = (uint32_t*)(void*)(args->output + out * args->output_stride);
    const uint32_t token = (uint32_t)(((uintptr_t)row - (uintptr_t)args->weights.values) / sizeof outputs[0][0]);
    mark(row, args->inputs == NULL ? token : in, number, args->row_begin, args->row_end);
  }
}

static void coded_gate_up(const clb_gated_linear_args* args) {
  const clb_linear_args linear = {.weights = args->gate,
                                  .codes = args->codes,
                                  .output = args->output,
                                  .inputs = args->inputs,
                                  .output_stride = args->output_stride,
                                  .tokens = args->tokens,
                                  .cols = args->cols,
                                  .row_begin = args->row_begin,
                                  .row_end = args->row_end};
  coded_linear(&linear);
}

static const clb_module coded = {
    .precision = CLB_INT8, .reads_codes = 1, .linear = coded_linear, .gate_up = coded_gate_up};
static const clb_module fake = {.linear = fake_linear, .gate_up = fake_gate_up};

static void count_progress(void* context) {
  (void)context;
  (void)atomic_fetch_add(&progress, 1);
}

typedef struct shape {
  uint32_t rows;
  uint32_t tokens;
  uint32_t cols;
  uint32_t
      kind; /* bit 0: gate_up; bit 1: with an input list; bit 2: with an output list, if not gate_up; bit 3: of codes */
} shape;

static void add(clb_stage* stage, uint32_t p, const shape* s) {
  uint32_t* const ins = lists[p][0];
  uint32_t* const outs = lists[p][1];
  for (uint32_t i = 0; i < s->tokens; ++i) {
    ins[i] = s->tokens - 1 - i;
    outs[i] = i;
  }
  CHECK((s->kind & 8u) == 0 || clb_code_row_bytes(s->cols) <= CODE_BYTES);
  for (uint32_t i = 0; i < MOST_TOKENS && (s->kind & 8u) != 0; ++i) {
    codes[p][i * clb_code_row_bytes(s->cols)] = (unsigned char)i;
  }
  const clb_product product = {.kernel = (s->kind & 8u) != 0 ? &coded : &fake,
                               .codes = codes[p],
                               .weights = {.values = outputs[p]},
                               .up = {.values = (s->kind & 1u) != 0 ? outputs[p] : NULL},
                               .input = inputs,
                               .output = (float*)(void*)outputs[p],
                               .inputs = (s->kind & 2u) != 0 ? ins : NULL,
                               .outputs = (s->kind & 5u) == 4u ? outs : NULL,
                               .input_stride = 2,
                               .output_stride = MOST_ROWS,
                               .tokens = s->tokens,
                               .cols = s->cols,
                               .rows = s->rows};
  clb_stage_add(stage, &product);
}

static void check_outputs(uint32_t p, const shape* s) {
  for (uint32_t t = 0; t < MOST_TOKENS; ++t) {
    for (uint32_t r = 0; r < MOST_ROWS; ++r) {
      const uint32_t wanted = t < s->tokens && r < s->rows ? 1u : 0u;
      if (outputs[p][t][r] != wanted) {
        (void)fprintf(stderr, "product %u of rows %u tokens %u cols %u kind %u: token %u row %u\n", p, s->rows,
                      s->tokens, s->cols, s->kind, t, r);
        CHECK_EQ(outputs[p][t][r], wanted);
      }
    }
  }
}

/* Random products with and without index lists, from one tile and one token to many, on one to four threads. */
static void each_output_is_computed_once(void) {
  const uint32_t cols[] = {16, 300, 5000, 200000};
  clb_product products[MOST_PRODUCTS];
  uint32_t first_items[MOST_PRODUCTS];
  uint64_t state = 3;
  for (uint32_t i = 0; i < MOST_TOKENS; ++i) {
    inputs[(size_t)2 * i] = (float)i;
  }
  for (uint32_t round = 0; round < 120; ++round) {
    const clb_threads_config config = {.count = 1 + round % 4, .stacks = stacks};
    CHECK_EQ(clb_threads_open(&pool, &config), CLB_OK);
    clb_stage stage = {.threads = &pool,
                       .progress = count_progress,
                       .products = products,
                       .first_items = first_items,
                       .capacity = MOST_PRODUCTS};
    shape shapes[MOST_PRODUCTS];
    const uint32_t count = (uint32_t)(clb_test_random(&state) % (MOST_PRODUCTS + 1));
    memset(outputs, 0, sizeof outputs);
    clb_stage_begin(&stage);
    for (uint32_t p = 0; p < count; ++p) {
      shapes[p] = (shape){.rows = 1 + (uint32_t)(clb_test_random(&state) % (p % 2 == 0 ? 40 : MOST_ROWS)),
                          .tokens = 1 + (uint32_t)(clb_test_random(&state) % (p % 3 == 0 ? 3 : MOST_TOKENS)),
                          .cols = cols[clb_test_random(&state) % 4],
                          .kind = (uint32_t)(clb_test_random(&state) % 8)};
      shapes[p].kind |= shapes[p].cols <= 300 && p % 2 == 1 ? 8u : 0u;
      add(&stage, p, &shapes[p]);
    }
    uint32_t coded_products = 0;
    for (uint32_t p = 0; p < count; ++p) {
      coded_products |= shapes[p].kind >> 3;
    }
    CHECK_EQ(stage.reads_codes, coded_products);
    clb_stage_run(&stage);
    clb_threads_close(&pool);
    for (uint32_t p = 0; p < count; ++p) {
      check_outputs(p, &shapes[p]);
    }
  }
  CHECK(atomic_load(&progress) > 0);
}

/* A stage is cut into several items a thread, whether its products are few and large or many and small; one that is
   too small to share stays whole. */
static void cuts_follow_the_cost(void) {
  const struct {
    uint32_t products;
    shape shape;
    uint32_t least;
    uint32_t most;
  } cases[] = {{1, {640, 1, 200000, 0}, 32, 128}, {1, {16, 80, 200000, 0}, 8, 128}, {8, {160, 2, 20000, 1}, 32, 128},
               {8, {64, 90, 200000, 0}, 32, 128}, {1, {16, 1, 64, 0}, 1, 1},        {1, {320, 1, 64, 1}, 1, 6}};
  for (uint32_t c = 0; c < sizeof cases / sizeof cases[0]; ++c) {
    clb_product products[MOST_PRODUCTS];
    uint32_t first_items[MOST_PRODUCTS];
    const clb_threads_config config = {.count = 2, .stacks = stacks};
    CHECK_EQ(clb_threads_open(&pool, &config), CLB_OK);
    clb_stage stage = {.threads = &pool,
                       .progress = count_progress,
                       .products = products,
                       .first_items = first_items,
                       .capacity = MOST_PRODUCTS};
    clb_stage_begin(&stage);
    for (uint32_t p = 0; p < cases[c].products; ++p) {
      add(&stage, p, &cases[c].shape);
    }
    clb_stage_run(&stage);
    clb_threads_close(&pool);
    if (stage.items < cases[c].least || stage.items > cases[c].most) {
      (void)fprintf(stderr, "case %u: %u items\n", c, stage.items);
      CHECK(0);
    }
  }
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(each_output_is_computed_once), TEST(cuts_follow_the_cost)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
