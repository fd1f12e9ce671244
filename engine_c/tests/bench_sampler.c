/* Time of one sampled token by vocabulary and setting: sampler.h on random logits. */
#include <stdlib.h>

#include "bench.h"
#include "invariant.h"
#include "sampler.h"
#include "test.h"

static void sample_run(void* context) {
  clb_record record;
  const int32_t status = clb_sampler_run(context, &record);
  CLB_ASSERT(status == CLB_OK);
}

static void reset_run(void* context) {
  const clb_sampler_args* args = context;
  clb_sampler_reset((uint32_t*)(uintptr_t)args->counts, args->vocab, NULL, 0);
}

static void bench_vocab(uint32_t vocab) {
  static const struct {
    const char* name;
    clb_request request;
  } cases[] = {{"greedy", {.temperature = 0.0f, .top_p = 1.0f, .repetition_penalty = 1.0f}},
               {"plain", {.temperature = 1.0f, .top_p = 1.0f, .repetition_penalty = 1.0f}},
               {"top_k=40", {.temperature = 1.0f, .top_p = 1.0f, .top_k = 40, .repetition_penalty = 1.0f}},
               {"top_p=0.95", {.temperature = 1.0f, .top_p = 0.95f, .repetition_penalty = 1.0f}},
               {"top_k=40 top_p=0.95", {.temperature = 1.0f, .top_p = 0.95f, .top_k = 40, .repetition_penalty = 1.0f}},
               {"greedy repetition=1.1", {.temperature = 0.0f, .top_p = 1.0f, .repetition_penalty = 1.1f}},
               {"greedy logprobs=20",
                {.temperature = 0.0f,
                 .top_p = 1.0f,
                 .repetition_penalty = 1.0f,
                 .flags = CLB_REQ_LOGPROBS,
                 .top_logprobs = 20}}};
  float* logits = malloc(vocab * sizeof *logits);
  uint32_t* counts = calloc(vocab, sizeof *counts);
  void* scratch = aligned_alloc(64, (clb_sampler_scratch_bytes(vocab) + 63u) & ~UINT64_C(63));
  CLB_ASSERT(logits != NULL && counts != NULL && scratch != NULL);
  uint64_t seed = 1;
  for (uint32_t i = 0; i < vocab; ++i)
    logits[i] = (float)(clb_test_random(&seed) >> 40) * 0x1p-20f;
  clb_sampler_args args = {.logits = logits, .counts = counts, .scratch = scratch, .vocab = vocab};
  char shape[64];
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    args.request = &cases[i].request;
    (void)snprintf(shape, sizeof shape, "V=%u %s", vocab, cases[i].name);
    clb_bench("sampler", shape, sample_run, &args);
  }
  (void)snprintf(shape, sizeof shape, "V=%u", vocab);
  clb_bench("sampler_reset", shape, reset_run, &args);
  free(logits);
  free(counts);
  free(scratch);
}

int main(void) {
  bench_vocab(8192);
  bench_vocab(151936);
  return 0;
}
