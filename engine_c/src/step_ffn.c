/* step_ffn.c: the FFN half of a layer, see step.c. */
#include <stdbool.h>
#include <string.h>

#include "exact_math.h"
#include "invariant.h"
#include "routing.h"
#include "step_internal.h"

/* activation[i] = silu(gate x) * (up x), x = normed[tokens[i]] */
static clb_product gate_up_of(const clb_engine* engine, const clb_expert_entry* entry, const uint32_t* tokens,
                              uint32_t count, float* activation) {
  return (clb_product){.kernel = entry->kernel,
                       .weights = entry->gate,
                       .up = entry->up,
                       .input = engine->buffers.normed,
                       .codes = engine->buffers.codes,
                       .output = activation,
                       .inputs = tokens,
                       .input_stride = engine->model.hidden,
                       .output_stride = entry->width,
                       .tokens = count,
                       .cols = engine->model.hidden,
                       .rows = entry->width};
}

/* output[places[i]] = down activation[i] */
static clb_product down_of(const clb_engine* engine, const clb_expert_entry* entry, const float* activation,
                           const unsigned char* codes, uint32_t count, const uint32_t* places, float* output) {
  return (clb_product){.kernel = entry->kernel,
                       .weights = entry->down,
                       .input = activation,
                       .codes = codes,
                       .output = output,
                       .outputs = places,
                       .input_stride = entry->width,
                       .output_stride = engine->model.hidden,
                       .tokens = count,
                       .cols = entry->width,
                       .rows = engine->model.hidden};
}

static clb_routing_args routing_of(clb_engine* engine, uint32_t layer, uint32_t count) {
  const clb_dispatch_layout* const at = &engine->sizes.dispatch;
  unsigned char* const base = engine->dispatch;
  const clb_layer_desc* const desc = &engine->model.layer_table[layer];
  return (clb_routing_args){
      .logits = (float*)(void*)(base + at->logits),
      .layer = desc,
      .policies = engine->buffers.policies,
      .indices = (uint32_t*)(void*)(base + at->indices),
      .weights = (float*)(void*)(base + at->weights),
      .kept = (uint32_t*)(void*)(base + at->kept),
      .trimmed = (uint32_t*)(void*)(base + at->trimmed),
      .dropped = (uint32_t*)(void*)(base + at->dropped),
      .status = (int32_t*)(void*)(base + at->status),
      .counts = (uint32_t*)(void*)(base + at->counts),
      .offsets = (uint32_t*)(void*)(base + at->offsets),
      .token_list = (uint32_t*)(void*)(base + at->token_list),
      .place_list = (uint32_t*)(void*)(base + at->place_list),
      .logits_stride = desc->experts,
      .tokens = count,
      .k_max = engine->sizes.k_max,
      .max_tokens_per_expert = engine->config.max_tokens_per_expert,
      .reserved = 0,
  };
}

static void select_rows(clb_engine* engine, uint32_t layer, uint32_t first, uint32_t end) {
  clb_routing_args args = routing_of(engine, layer, end - first);
  const size_t ranks = (size_t)first * args.k_max;
  args.logits += first * args.logits_stride;
  args.policies += first;
  args.indices += ranks;
  args.weights += ranks;
  args.kept += first;
  args.trimmed += first;
  args.dropped += first;
  args.status += first;
  clb_routing_select(&args);
}

/* Counters of rows and requests, by the owner alone: rows of one request share them. */
static void count_experts(clb_engine* engine, uint32_t layer, const clb_routing_args* routing) {
  for (uint32_t i = 0; i < routing->tokens; ++i) {
    clb_step_row* const row = &engine->buffers.rows[i];
    uint32_t* const counts =
        clb_channel_counts(&engine->channel, row->slot) + (size_t)layer * engine->config.channel.max_experts;
    for (uint32_t rank = 0; rank < routing->kept[i]; ++rank) {
      const uint32_t expert = routing->indices[(size_t)i * routing->k_max + rank];
      if (expert != CLB_ROUTING_NONE) {
        counts[expert]++;
        row->assignments++;
      }
    }
    row->trimmed += routing->trimmed[i];
    row->dropped += routing->dropped[i];
    row->status = routing->status[i] != CLB_OK ? routing->status[i] : row->status;
  }
}

/* The stage's inputs as codes: every expert reads rows of the same ones. */
static void encode_inputs(clb_engine* engine, uint32_t layer, const clb_routing_args* routing, bool down) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_expert_entry* const shared = &engine->kernels.layers[layer].shared;
  if (!down) {
    clb_step_encode(engine, b->normed, routing->tokens, engine->model.hidden, b->codes);
    return;
  }
  const float* const activations = (const float*)(void*)(engine->dispatch + engine->sizes.dispatch.activation);
  clb_step_encode(engine, activations, routing->offsets[routing->layer->experts], routing->layer->expert_width,
                  b->codes);
  if (shared->gate.values != NULL && shared->kernel->reads_codes != 0u) {
    clb_step_encode(engine, b->shared_activation, routing->tokens, shared->width, b->shared_codes);
  }
}

/* The product of an expert that has tokens, once over its bucket. */
static clb_product expert_product(const clb_engine* engine, const clb_expert_entry* entry,
                                  const clb_routing_args* routing, uint32_t e, bool down) {
  const uint32_t first = routing->offsets[e];
  const uint32_t count = routing->counts[e];
  float* const activation =
      (float*)(void*)(engine->dispatch + engine->sizes.dispatch.activation) + (size_t)first * entry->width;
  CLB_ASSERT(routing->offsets[e + 1u] - first == count);
  if (!down) {
    return gate_up_of(engine, entry, routing->token_list + first, count, activation);
  }
  const unsigned char* const codes =
      entry->kernel->reads_codes == 0u ? NULL : engine->buffers.codes + first * clb_code_row_bytes(entry->width);
  return down_of(engine, entry, activation, codes, count, routing->place_list + first,
                 (float*)(void*)(engine->dispatch + engine->sizes.dispatch.output));
}

static bool contains(const clb_module* const* list, uint32_t count, const clb_module* kernel) {
  uint32_t i = 0;
  while (i < count && list[i] != kernel) {
    ++i;
  }
  return i < count;
}

/* The routed experts that have tokens, those of one kernel after each other: a layer may mix formats. */
static void add_experts(const clb_engine* engine, uint32_t layer, const clb_routing_args* routing, bool down,
                        clb_stage* stage) {
  const clb_expert_entry* const experts = engine->kernels.layers[layer].experts;
  const clb_module* seen[CLB_MAX_MODULES + 1u];
  const clb_module* kernel = NULL; /* of this round; the first one only looks for one */
  uint32_t rounds = 0;
  do {
    const clb_module* next = NULL;
    for (uint32_t e = 0; e < routing->layer->experts; ++e) {
      if (routing->counts[e] == 0u) {
        continue;
      }
      if (experts[e].kernel == kernel) {
        const clb_product product = expert_product(engine, &experts[e], routing, e, down);
        clb_stage_add(stage, &product);
      } else if (next == NULL && !contains(seen, rounds, experts[e].kernel)) {
        next = experts[e].kernel;
      } else {
        /* of an earlier or a later round */
      }
    }
    CLB_ASSERT(rounds <= CLB_MAX_MODULES);
    seen[rounds] = kernel;
    ++rounds;
    kernel = next;
  } while (kernel != NULL);
}

/* One product of each expert that has tokens: the shared one over all rows, each other once over its bucket. */
static void run_experts(clb_engine* engine, uint32_t layer, const clb_routing_args* routing, bool down) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_expert_entry* const shared = &engine->kernels.layers[layer].shared;
  clb_stage stage = clb_step_stage(engine);
  if (shared->gate.values != NULL) {
    const clb_product product =
        down ? down_of(engine, shared, b->shared_activation, b->shared_codes, routing->tokens, NULL, b->shared_output)
             : gate_up_of(engine, shared, NULL, routing->tokens, b->shared_activation);
    clb_stage_add(&stage, &product);
  }
  add_experts(engine, layer, routing, down, &stage);
  if (stage.reads_codes != 0u) {
    encode_inputs(engine, layer, routing, down);
  }
  clb_stage_run(&stage);
}

static void count_launches(clb_engine* engine, uint32_t layer, const clb_routing_args* routing) {
  const uint64_t stamp = engine->step_number * engine->model.layers + layer + 1u;
  uint64_t* const stamps = engine->buffers.expert_stamp;
  for (uint32_t e = 0; e < routing->layer->experts; ++e) {
    if (routing->counts[e] > 0u) {
      engine->stats.expert_launches++;
      engine->stats.expert_relaunches += stamps[e] == stamp ? 1u : 0u;
      stamps[e] = stamp;
    }
  }
}

void clb_step_combine(clb_engine* engine, uint32_t layer, uint32_t row) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_layer_kernels* const weights = &engine->kernels.layers[layer];
  const clb_routing_args routing = routing_of(engine, layer, 0);
  const uint32_t hidden = engine->model.hidden;
  const size_t at = (size_t)row * hidden;
  const float* const outputs = (const float*)(void*)(engine->dispatch + engine->sizes.dispatch.output);
  (void)memset(b->update + at, 0, hidden * sizeof(float));
  for (uint32_t rank = 0; rank < routing.kept[row]; ++rank) {
    const size_t place = (size_t)row * routing.k_max + rank;
    if (routing.indices[place] != CLB_ROUTING_NONE) {
      engine->ops->add_scaled(outputs + place * hidden, routing.weights[place], hidden, b->update + at);
    }
  }
  if (weights->shared.gate.values == NULL) {
    return;
  }
  if (weights->shared_gate == NULL) {
    engine->ops->add(b->shared_output + at, hidden, b->update + at);
    return;
  }
  const float gate = clb_exact_sigmoid(engine->ops->dot(weights->shared_gate, b->normed + at, hidden));
  engine->ops->add_scaled(b->shared_output + at, gate, hidden, b->update + at);
}

void clb_step_moe(clb_engine* engine, uint32_t layer, uint32_t count) {
  const clb_routing_args routing = routing_of(engine, layer, count);
  clb_step_linear(engine, &engine->kernels.layers[layer].router, NULL, engine->buffers.normed, count,
                  (float*)(void*)(engine->dispatch + engine->sizes.dispatch.logits));
  clb_step_rows(engine, layer, count, (uint64_t)16 * routing.layer->experts, select_rows);
  clb_routing_bucket(&routing);
  count_experts(engine, layer, &routing);
  count_launches(engine, layer, &routing);
  run_experts(engine, layer, &routing, false);
  run_experts(engine, layer, &routing, true);
}

void clb_step_dense(clb_engine* engine, uint32_t layer, uint32_t count) {
  const clb_step_buffers* const b = &engine->buffers;
  const clb_expert_entry* const entry = &engine->kernels.layers[layer].shared;
  const clb_product first = gate_up_of(engine, entry, NULL, count, b->shared_activation);
  const clb_product second = down_of(engine, entry, b->shared_activation, b->shared_codes, count, NULL, b->update);
  clb_stage stage = clb_step_stage(engine);
  clb_stage_add(&stage, &first);
  if (stage.reads_codes != 0u) {
    clb_step_encode(engine, b->normed, count, engine->model.hidden, b->codes);
  }
  clb_stage_run(&stage);
  clb_stage_begin(&stage);
  clb_stage_add(&stage, &second);
  if (stage.reads_codes != 0u) {
    clb_step_encode(engine, b->shared_activation, count, entry->width, b->shared_codes);
  }
  clb_stage_run(&stage);
}
