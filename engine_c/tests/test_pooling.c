/*
 * test_pooling.c: the pooled vector of a prompt depends on the prompt alone, has length 1, and is refused where it
 * would not be over the whole prompt. tests/test_golden_c.py and tests/engine/test_pooling.py compare its values.
 */
#include <math.h>

#include "engine_internal.h"
#include "engine_rig.h"
#include "test.h"

#define HIDDEN 32u /* of the rig's model */

static rig main_rig; /* large: not on the stack */

static void open_rig(rig* r, uint32_t slots, uint32_t threads, uint32_t chunk, uint32_t tokens) {
  rig_init(r, slots);
  r->config.threads = threads;
  r->config.prefill_chunk = chunk;
  r->config.prefill_tokens = tokens;
  CHECK_EQ(rig_open(r), CLB_OK);
}

static const float* pooled(rig* r, uint32_t slot) {
  unsigned char* const base = r->config.channel_base;
  return (const float*)(void*)(base + r->layout.results + slot * r->layout.result_stride + r->layout.result_pooled);
}

static clb_request pool_request(uint64_t seed, uint32_t prompt_tokens, uint32_t flag) {
  clb_request request = rig_request(seed, prompt_tokens, 0);
  request.flags = flag;
  return request;
}

static void run_alone(rig* r, uint32_t flag, uint32_t prompt_tokens, float* vector) {
  const clb_request request = pool_request(5, prompt_tokens, flag);
  rig_run_alone(r, 0, &request, 5);
  CHECK_EQ(r->outputs[0].ended, CLB_EVENT_FINISHED);
  (void)memcpy(vector, pooled(r, 0), HIDDEN * sizeof vector[0]);
}

/* Chunks, threads and neighbours of every kind change no bit of a mean or of a last state; both have length 1. */
static void a_vector_depends_on_its_prompt_alone(void) {
  const uint32_t flags[] = {CLB_REQ_POOL_MEAN, CLB_REQ_POOL_LAST};
  rig* const r = &main_rig;
  for (uint32_t f = 0; f < 2u; ++f) {
    float wanted[HIDDEN];
    float got[HIDDEN];
    open_rig(r, 1, 1, 64, 64);
    run_alone(r, flags[f], 50, wanted);
    rig_close(r);
    double squares = 0.0;
    for (uint32_t i = 0; i < HIDDEN; ++i) {
      squares += (double)wanted[i] * (double)wanted[i];
    }
    CHECK(fabs(squares - 1.0) < 1e-6);
    open_rig(r, 1, 1, 7, 7);
    run_alone(r, flags[f], 50, got);
    CHECK(memcmp(wanted, got, sizeof got) == 0);
    rig_close(r);
    open_rig(r, RIG_MAX_SLOTS, 3, 16, 40);
    for (uint32_t slot = 0; slot < RIG_MAX_SLOTS; ++slot) {
      const clb_request other = slot % 2u == 0u ? rig_request(slot + 20u, 3u + 5u * slot, 9)
                                                : pool_request(slot + 20u, 40, flags[slot / 2u % 2u]);
      const clb_request own = pool_request(5, 50, flags[f]);
      (void)rig_write(r, slot, slot == 3u ? &own : &other, slot == 3u ? 5u : slot + 20u);
      rig_start(r, slot);
      (void)rig_turn(r);
    }
    CHECK(rig_drain(r, 400));
    CHECK(memcmp(wanted, pooled(r, 3), sizeof wanted) == 0);
    rig_close(r);
  }
}

/* Of one token, mean and last state are the same; of more, they differ. */
static void one_token_has_one_state(void) {
  rig* const r = &main_rig;
  float mean[HIDDEN];
  float last[HIDDEN];
  open_rig(r, 1, 1, 64, 64);
  for (uint32_t tokens = 1; tokens < 3u; ++tokens) {
    run_alone(r, CLB_REQ_POOL_MEAN, tokens, mean);
    run_alone(r, CLB_REQ_POOL_LAST, tokens, last);
    CHECK_EQ(memcmp(mean, last, sizeof mean) == 0, tokens == 1u);
  }
  rig_close(r);
}

/* Both kinds at once, generated tokens, and a mean over a prefix that was computed elsewhere fail alone. */
static void what_is_not_the_whole_prompt_is_refused(void) {
  rig* const r = &main_rig;
  open_rig(r, 1, 1, 64, 64);
  clb_request request = pool_request(5, 20, CLB_REQ_POOL_MEAN | CLB_REQ_POOL_LAST);
  rig_run_alone(r, 0, &request, 5);
  CHECK_EQ(r->outputs[0].status, CLB_ERR_ARGUMENT);
  request = pool_request(5, 20, CLB_REQ_POOL_LAST);
  request.max_tokens = 1;
  rig_run_alone(r, 0, &request, 5);
  CHECK_EQ(r->outputs[0].status, CLB_ERR_ARGUMENT);
  request = pool_request(5, 20, CLB_REQ_POOL_LAST);
  request.publish_run = 1;
  rig_run_alone(r, 0, &request, 5);
  CHECK_EQ(r->outputs[0].ended, CLB_EVENT_FINISHED);
  float whole[HIDDEN];
  (void)memcpy(whole, pooled(r, 0), sizeof whole);
  request.publish_run = 0;
  request.prefix_run = 1;
  request.prefix_tokens = 16;
  rig_run_alone(r, 0, &request, 5);
  CHECK_EQ(r->outputs[0].ended, CLB_EVENT_FINISHED);
  CHECK(memcmp(whole, pooled(r, 0), sizeof whole) == 0);
  request.flags = CLB_REQ_POOL_MEAN;
  rig_run_alone(r, 0, &request, 5);
  CHECK_EQ(r->outputs[0].status, CLB_ERR_ARGUMENT);
  rig_close(r);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(a_vector_depends_on_its_prompt_alone), TEST(one_token_has_one_state),
                                   TEST(what_is_not_the_whole_prompt_is_refused)};
  return rig_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
