/*
 * Time of router selection and bucketing: routing.h on random logits.
 *
 * Each run takes the next of many sets of tokens. With one set the branch predictor learns every token by heart, which
 * flatters selection by insertion four times over and tells nothing about serving.
 */
#include <stdlib.h>

#include "bench.h"
#include "invariant.h"
#include "routing.h"
#include "test.h"

#define SET_TOKENS 2048u /* in all sets together, at least */

typedef struct board {
  clb_routing_args args;
  clb_layer_desc layer;
  float* logits; /* (sets, tokens, experts) */
  uint32_t sets;
  uint32_t next;
} board;

static const clb_routing_args* next_set(board* b) {
  b->next = b->next + 1u < b->sets ? b->next + 1u : 0;
  b->args.logits = b->logits + (size_t)b->next * b->args.tokens * b->layer.experts;
  return &b->args;
}

static void select_run(void* context) { clb_routing_select(next_set(context)); }

static void bucket_run(void* context) { clb_routing_bucket(&((board*)context)->args); }

static void both_run(void* context) { clb_routing_run(next_set(context)); }

static void* take(size_t count, size_t bytes) {
  void* memory = calloc(count, bytes);
  CLB_ASSERT(memory != NULL);
  return memory;
}

static void open_board(board* b, uint32_t tokens, uint32_t experts, uint32_t k) {
  const size_t places = (size_t)tokens * k;
  memset(b, 0, sizeof *b);
  b->layer = (clb_layer_desc){.experts = experts, .experts_per_token = k, .renormalise = 1, .routed_scale = 1.0f};
  b->sets = (SET_TOKENS + tokens - 1u) / tokens;
  const size_t logits = (size_t)b->sets * tokens * experts;
  b->logits = take(logits, sizeof *b->logits);
  uint64_t seed = 1;
  for (size_t i = 0; i < logits * 4u; ++i)
    b->logits[i / 4u] += (float)(clb_test_random(&seed) >> 40) * 0x1p-23f - 1.0f; /* four uniforms: nearly normal */
  b->args = (clb_routing_args){.logits = b->logits,
                               .layer = &b->layer,
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
}

static void close_board(board* b) {
  free(b->logits);
  free((void*)(uintptr_t)b->args.policies);
  void* const outputs[] = {b->args.indices, b->args.weights, b->args.kept,    b->args.trimmed,    b->args.dropped,
                           b->args.status,  b->args.counts,  b->args.offsets, b->args.token_list, b->args.place_list};
  for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; ++i)
    free(outputs[i]);
}

static void bench_shape(uint32_t tokens, uint32_t experts, uint32_t k) {
  char shape[64];
  board b;
  open_board(&b, tokens, experts, k);
  (void)snprintf(shape, sizeof shape, "T=%u E=%u k=%u", tokens, experts, k);
  clb_bench("routing_select", shape, select_run, &b);
  b.layer.renormalise = 0; /* softmax over all experts */
  clb_bench("routing_softmax", shape, select_run, &b);
  clb_bench("routing_bucket", shape, bucket_run, &b);
  /* The limit drops assignments for good, so every run needs fresh ones. */
  b.args.max_tokens_per_expert = (tokens * k + experts - 1u) / experts;
  clb_bench("routing_limited", shape, both_run, &b);
  close_board(&b);
}

int main(void) {
  static const uint32_t shapes[][2] = {{8, 2}, {60, 4}, {64, 8}, {128, 8}, {256, 8}, {512, 16}};
  for (uint32_t tokens = 4; tokens <= 512; tokens *= 128) {
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; ++i)
      bench_shape(tokens, shapes[i][0], shapes[i][1]);
  }
  return 0;
}
