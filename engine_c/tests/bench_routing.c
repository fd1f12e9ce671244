/* Time of router selection and bucketing: routing.h on random logits. */
#include <stdlib.h>

#include "assert.h"
#include "bench.h"
#include "routing.h"
#include "test.h"

static void select_run(void* context) { clb_routing_select(context); }

static void bucket_run(void* context) { clb_routing_bucket(context); }

/* The limit drops assignments for good, so every run needs fresh ones. */
static void limited_run(void* context) { clb_routing_run(context); }

static void* take(size_t count, size_t bytes) {
  void* memory = calloc(count, bytes);
  CLB_ASSERT(memory != NULL);
  return memory;
}

static void bench_shape(uint32_t tokens, uint32_t experts, uint32_t k) {
  const clb_layer_desc layer = {.experts = experts, .experts_per_token = k, .renormalise = 1, .routed_scale = 1.0f};
  const size_t places = (size_t)tokens * k;
  float* logits = take((size_t)tokens * experts, sizeof *logits);
  uint64_t seed = 1;
  for (size_t i = 0; i < (size_t)tokens * experts; ++i)
    logits[i] = (float)(clb_test_random(&seed) >> 40) * 0x1p-22f;
  clb_routing_args args = {.logits = logits,
                           .layer = &layer,
                           .policies = take(tokens, sizeof(clb_expert_policy)),
                           .indices = take(places, sizeof(uint32_t)),
                           .weights = take(places, sizeof(float)),
                           .kept = take(tokens, sizeof(uint32_t)),
                           .trimmed = take(tokens, sizeof(uint32_t)),
                           .dropped = take(tokens, sizeof(uint32_t)),
                           .status = take(tokens, sizeof(int32_t)),
                           .counts = take(experts, sizeof(uint32_t)),
                           .offsets = take(experts + 1u, sizeof(uint32_t)),
                           .token_list = take(places, sizeof(uint32_t)),
                           .place_list = take(places, sizeof(uint32_t)),
                           .logits_stride = experts,
                           .tokens = tokens,
                           .k_max = k};
  char shape[64];
  (void)snprintf(shape, sizeof shape, "T=%u E=%u k=%u", tokens, experts, k);
  clb_bench("routing_select", shape, select_run, &args);
  clb_bench("routing_bucket", shape, bucket_run, &args);
  args.max_tokens_per_expert = (tokens * k + experts - 1u) / experts;
  clb_bench("routing_limited", shape, limited_run, &args);
  free(logits);
  free((void*)(uintptr_t)args.policies);
  void* const outputs[] = {args.indices, args.weights, args.kept,    args.trimmed,    args.dropped,
                           args.status,  args.counts,  args.offsets, args.token_list, args.place_list};
  for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; ++i)
    free(outputs[i]);
}

int main(void) {
  bench_shape(1, 16, 4);
  bench_shape(32, 60, 4);
  bench_shape(32, 128, 8);
  bench_shape(512, 60, 4);
  bench_shape(512, 512, 10);
  return 0;
}
