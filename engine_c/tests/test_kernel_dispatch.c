/* test_kernel_dispatch.c: which module serves which tensor, and which modules are refused. */
#include "kernel_dispatch.h"

#include "test.h"

enum {
  GENERIC_FP32,
  GENERIC_BF16,
  RANK_5,
  RANK_9_UNSUPPORTED,
  OTHER_ABI,
  INCOMPLETE,
  NO_ENTRY,
  CODES,
  NO_FILE,
  MODULES
};

static clb_module_ref refs[MODULES];
static char paths[MODULES][512];
static clb_layer_desc layers[2];
static clb_model_desc model;
static clb_tensor tensors[64];
static clb_weight_table table;
static _Alignas(64) unsigned char memory[8192];
static float data[16];

static void set_up(void) {
  static const char* const names[MODULES] = {"clb_cpu_generic_fp32", "clb_cpu_generic_bf16", "fake_module_1",
                                             "fake_module_2",        "fake_module_3",        "fake_module_4",
                                             "fake_module_5",        "fake_module_6",        "fake_module_missing"};
  const char* const folder = getenv("CLB_MODULE_DIR");
  const char* const fakes = getenv("CLB_FAKE_DIR");
  for (uint32_t i = 0; i < MODULES; ++i) {
    (void)snprintf(paths[i], sizeof paths[i], "%s/%s.so", i <= GENERIC_BF16 ? folder : fakes, names[i]);
    refs[i] = (clb_module_ref){.name = names[i], .path = paths[i]};
  }
  layers[0] = (clb_layer_desc){.ffn_kind = CLB_FFN_MOE, .experts = 2};
  layers[1] = (clb_layer_desc){.ffn_kind = CLB_FFN_DENSE};
  model = (clb_model_desc){.layers = 2, .layer_table = layers};
  memset(tensors, 0, sizeof tensors);
  table = (clb_weight_table){.layers = 2,
                             .tensor_count = 64,
                             .layer_first = {3, 3 + CLB_LAYER_TENSORS(2)},
                             .layer_experts = {2, 0},
                             .tensors = tensors};
}

static void put(uint32_t role, int32_t layer, int32_t expert, uint32_t precision) {
  tensors[clb_weight_index(&table, role, layer, expert)] = (clb_tensor){
      .data = &data[role], .precision = precision, .layout = CLB_LAYOUT_ROWS16, .rows = role + 1, .cols = 7};
}

static int32_t open_with(clb_kernels* kernels, uint32_t first, uint32_t second, uint32_t count, clb_error* error) {
  const clb_module_ref chosen[2] = {refs[first], refs[second]};
  CHECK(clb_kernels_bytes(&model) <= sizeof memory);
  memset(error, 0, sizeof *error);
  return clb_kernels_open(kernels, chosen, count, &model, &table, memory, error);
}

/* Each tensor gets a kernel of its own precision; experts, the shared one and the tied head get their own entries. */
static void tensors_get_kernels_of_their_precision(void) {
  clb_kernels kernels;
  clb_error error;
  set_up();
  put(CLB_ROLE_EMBEDDING, -1, -1, CLB_BF16);
  put(CLB_ROLE_ROUTER, 0, -1, CLB_FP32);
  put(CLB_ROLE_QKV, 1, -1, CLB_BF16);
  for (uint32_t role = CLB_ROLE_GATE; role <= CLB_ROLE_DOWN; ++role) {
    put(role, 0, 1, CLB_BF16);
    put(role, 0, -1, CLB_FP32);
    put(role, 1, -1, CLB_BF16);
  }
  CHECK_EQ(open_with(&kernels, GENERIC_FP32, GENERIC_BF16, 2, &error), CLB_OK);
  const clb_layer_kernels* const layer = kernels.layers;
  CHECK_EQ(layer[0].router.kernel->precision, CLB_FP32);
  CHECK_EQ(layer[1].qkv.kernel->precision, CLB_BF16);
  CHECK_EQ(layer[1].qkv.rows, CLB_ROLE_QKV + 1);
  CHECK(layer[0].qkv.weights.values == NULL && layer[0].experts[0].gate.values == NULL);
  CHECK(layer[0].experts[1].gate.values == &data[CLB_ROLE_GATE]);
  CHECK(layer[0].experts[1].down.values == &data[CLB_ROLE_DOWN]);
  CHECK_EQ(layer[0].experts[1].width, CLB_ROLE_GATE + 1);
  CHECK(layer[0].experts[1].kernel == layer[1].shared.kernel);
  CHECK(layer[0].experts[1].kernel != layer[0].shared.kernel);
  CHECK(kernels.head.weights.values == kernels.embedding.weights.values);
  clb_kernels_close(&kernels);
  CHECK(kernels.layers == NULL);
  clb_kernels_close(&kernels);
}

/* Of several modules the highest rank that runs here is taken, whatever their order. */
static void highest_supported_rank_wins(void) {
  clb_kernels kernels;
  clb_error error;
  set_up();
  put(CLB_ROLE_EMBEDDING, -1, -1, CLB_BF16);
  for (uint32_t order = 0; order < 2; ++order) {
    CHECK_EQ(open_with(&kernels, order == 0 ? RANK_5 : GENERIC_BF16, order == 0 ? GENERIC_BF16 : RANK_5, 2, &error),
             CLB_OK);
    CHECK_EQ(kernels.embedding.kernel->rank, 5);
    clb_kernels_close(&kernels);
    CHECK_EQ(open_with(&kernels, order == 0 ? RANK_9_UNSUPPORTED : GENERIC_BF16,
                       order == 0 ? GENERIC_BF16 : RANK_9_UNSUPPORTED, 2, &error),
             CLB_OK);
    CHECK_EQ(kernels.embedding.kernel->rank, 0);
    clb_kernels_close(&kernels);
  }
}

/* A module that does not load, is of another version or incomplete is refused by name, never by path. */
static void broken_modules_are_refused(void) {
  static const struct {
    uint32_t module;
    const char* text;
  } cases[] = {{OTHER_ABI, "another version"},
               {INCOMPLETE, "incomplete"},
               {CODES, "reads codes, which are made for int8 and int4 only"},
               {NO_ENTRY, CLB_MODULE_ENTRY},
               {NO_FILE, "cannot be loaded"}};
  clb_kernels kernels;
  clb_error error;
  set_up();
  for (uint32_t i = 0; i < 4; ++i) {
    CHECK_EQ(open_with(&kernels, GENERIC_BF16, cases[i].module, 2, &error), CLB_ERR_MODULE);
    CHECK_EQ(error.status, CLB_ERR_MODULE);
    CHECK_CONTAINS(error.message, cases[i].text);
    CHECK_CONTAINS(error.message, refs[cases[i].module].name);
    CHECK(strchr(error.message, '/') == NULL);
    CHECK_EQ(kernels.module_count, 0);
  }
}

/* A tensor that no module can read, and an expert of two precisions, are refused. */
static void tensors_without_a_kernel_are_refused(void) {
  clb_kernels kernels;
  clb_error error;
  set_up();
  put(CLB_ROLE_OUT, 1, -1, CLB_FP16);
  CHECK_EQ(open_with(&kernels, GENERIC_FP32, GENERIC_BF16, 2, &error), CLB_ERR_MODULE);
  CHECK_CONTAINS(error.message, "fp16");
  set_up();
  put(CLB_ROLE_GATE, 0, 1, CLB_BF16);
  put(CLB_ROLE_UP, 0, 1, CLB_BF16);
  put(CLB_ROLE_DOWN, 0, 1, CLB_FP32);
  CHECK_EQ(open_with(&kernels, GENERIC_FP32, GENERIC_BF16, 2, &error), CLB_ERR_UNSUPPORTED);
  CHECK_CONTAINS(error.message, "layer 0 expert 1");
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(tensors_get_kernels_of_their_precision), TEST(highest_supported_rank_wins),
                                   TEST(broken_modules_are_refused), TEST(tensors_without_a_kernel_are_refused)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
