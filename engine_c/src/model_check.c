/*
 * model_check.c: every number of a clb_model_desc except its sections and files, checked against limits that make
 * all later arithmetic fit: dimensions below 2^24, so that rows * cols * 4 fits in 64 bits by far.
 * Owns nothing, keeps nothing.
 */
#include <math.h>
#include <stdbool.h>

#include "loader.h"
#include "loader_internal.h"

static int32_t check_range(clb_error* error, const char* name, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) {
    return CLB_OK;
  }
  return clb_fail(error, CLB_ERR_ARGUMENT, "model: %s is %" PRIu64 ", must be %" PRIu64 " to %" PRIu64, name, value,
                  low, high);
}

static int32_t check_layer_range(clb_error* error, uint32_t layer, const char* name, uint64_t value, uint64_t low,
                                 uint64_t high) {
  if (value >= low && value <= high) {
    return CLB_OK;
  }
  return clb_fail(error, CLB_ERR_ARGUMENT, "model: layer %u: %s is %" PRIu64 ", must be %" PRIu64 " to %" PRIu64, layer,
                  name, value, low, high);
}

static int32_t check_scalar(clb_error* error, const char* name, float value, bool positive) {
  if (isfinite(value) && (!positive || value > 0.0f)) {
    return CLB_OK;
  }
  return clb_fail(error, CLB_ERR_ARGUMENT, "model: %s is %g, must be finite%s", name, (double)value,
                  positive ? " and positive" : "");
}

static int32_t check_dimensions(const clb_model_desc* model, clb_error* error) {
  const struct {
    const char* name;
    uint64_t value;
    uint64_t low;
    uint64_t high;
  } ranges[] = {
      {"vocab_size", model->vocab_size, 1, CLB_MAX_VOCAB},
      {"layers", model->layers, 1, CLB_MAX_LAYERS},
      {"hidden", model->hidden, 1, CLB_MAX_HIDDEN},
      {"heads", model->heads, 1, CLB_MAX_HEADS},
      {"kv_heads", model->kv_heads, 1, model->heads},
      {"head_dim", model->head_dim, 2, 256},
      {"max_positions", model->max_positions, 1, UINT32_MAX},
      {"tied_head", model->tied_head, 0, 1},
      {"section_count", model->section_count, 0, CLB_MAX_SECTIONS},
      {"file_count", model->file_count, 0, CLB_MAX_FILES},
  };
  for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; ++i) {
    const int32_t status = check_range(error, ranges[i].name, ranges[i].value, ranges[i].low, ranges[i].high);
    if (status != CLB_OK) {
      return status;
    }
  }
  if (model->heads % model->kv_heads != 0u) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "model: heads is %u, must be a multiple of kv_heads (%u)", model->heads,
                    model->kv_heads);
  }
  if (model->head_dim % 2u != 0u) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "model: head_dim is %u, must be even", model->head_dim);
  }
  return CLB_OK;
}

static int32_t check_scalars(const clb_model_desc* model, clb_error* error) {
  int32_t status = check_scalar(error, "attention_scale", model->attention_scale, true);
  if (status == CLB_OK) {
    status = check_scalar(error, "rope_scale", model->rope_scale, true);
  }
  if (status == CLB_OK && !(isfinite(model->rms_norm_eps) && model->rms_norm_eps >= 0.0f)) {
    status = clb_fail(error, CLB_ERR_ARGUMENT, "model: rms_norm_eps is %g, must be finite and at least 0",
                      (double)model->rms_norm_eps);
  }
  if (status == CLB_OK && (model->rope_inv_freq == NULL || model->layer_table == NULL)) {
    status = clb_fail(error, CLB_ERR_ARGUMENT, "model: rope_inv_freq and layer_table must be given");
  }
  for (uint32_t i = 0; status == CLB_OK && i < model->head_dim / 2u; ++i) {
    status = check_scalar(error, "rope_inv_freq", model->rope_inv_freq[i], false);
  }
  return status;
}

/* What a layer's feed-forward part may be: dense has a width and nothing of experts; MoE the other way round. */
static int32_t check_experts(const clb_layer_desc* row, uint32_t layer, clb_error* error) {
  const bool moe = row->ffn_kind == CLB_FFN_MOE;
  uint32_t least = 0; /* of what a MoE layer must have and a dense one must not */
  if (moe) {
    least = 1;
  }
  const uint64_t most = row->experts < CLB_MAX_EXPERTS_PER_TOKEN ? row->experts : CLB_MAX_EXPERTS_PER_TOKEN;
  int32_t status = check_layer_range(error, layer, "experts", row->experts, least, moe ? CLB_MAX_EXPERTS : 0u);
  if (status == CLB_OK) {
    status = check_layer_range(error, layer, "experts_per_token", row->experts_per_token, least, most);
  }
  if (status == CLB_OK) {
    status = check_layer_range(error, layer, "expert_width", row->expert_width, least, moe ? CLB_MAX_WIDTH : 0u);
  }
  if (status == CLB_OK) {
    status = check_layer_range(error, layer, "shared_width", row->shared_width, 1u - least, CLB_MAX_WIDTH);
  }
  if (status == CLB_OK) {
    status = check_layer_range(error, layer, "shared_gated", row->shared_gated, 0, row->shared_width > 0u ? least : 0u);
  }
  return status;
}

static int32_t check_layer(const clb_model_desc* model, uint32_t layer, clb_error* error) {
  const clb_layer_desc* row = &model->layer_table[layer];
  const uint64_t kv_values = 2u * (uint64_t)model->kv_heads * model->head_dim;
  int32_t status = check_layer_range(error, layer, "ffn_kind", row->ffn_kind, CLB_FFN_DENSE, CLB_FFN_MOE);
  if (status == CLB_OK) {
    status = check_layer_range(error, layer, "score", row->score, CLB_SCORE_SOFTMAX, CLB_SCORE_SIGMOID);
  }
  if (status == CLB_OK) {
    status = check_layer_range(error, layer, "renormalise", row->renormalise, 0, 1);
  }
  if (status == CLB_OK) {
    status = check_layer_range(error, layer, "kv_values_per_token", row->kv_values_per_token, kv_values, kv_values);
  }
  if (status == CLB_OK && !isfinite(row->routed_scale)) {
    status = clb_fail(error, CLB_ERR_ARGUMENT, "model: layer %u: routed_scale is not finite", layer);
  }
  if (status == CLB_OK) {
    status = check_layer_range(error, layer, "qk_norm", row->qk_norm, CLB_QK_NORM_NONE, CLB_QK_NORM_ROW);
  }
  if (status == CLB_OK && row->kv_kind != CLB_KV_FULL) {
    status = clb_fail(error, CLB_ERR_UNSUPPORTED, "model: layer %u: kv_kind is %u, but only 0 is built in", layer,
                      row->kv_kind);
  }
  return status != CLB_OK ? status : check_experts(row, layer, error);
}

int32_t clb_model_check(const clb_model_desc* model, clb_error* error) {
  if (model == NULL) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "model: no description given");
  }
  if (model->abi_version != CLB_ABI_VERSION || model->struct_bytes != sizeof *model) {
    return clb_fail(error, CLB_ERR_VERSION, "model: version %u with %u bytes, this library has version %u with %zu",
                    model->abi_version, model->struct_bytes, CLB_ABI_VERSION, sizeof *model);
  }
  int32_t status = check_dimensions(model, error);
  if (status == CLB_OK) {
    status = check_scalars(model, error);
  }
  for (uint32_t layer = 0; status == CLB_OK && layer < model->layers; ++layer) {
    status = check_layer(model, layer, error);
  }
  return status;
}
