/*
 * Every limit of the description itself: bent one number at a time, refused with its name and value.
 */
#include "loader_internal.h"
#include "test.h"
#include "tiny_load.h"

/* Each limit of the description itself. */
static void hostile_models(void) {
  tiny_model tiny;
  tiny_make(&tiny, 1, CLB_BF16, CLB_LAYOUT_FLAT, TINY_VOCAB);
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
  tiny_make(&tiny, 0, CLB_BF16, CLB_LAYOUT_FLAT, TINY_VOCAB);
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

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(hostile_models), TEST(hostile_layers)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
