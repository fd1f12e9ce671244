/*
 * test_step.c: a token's result depends on its request alone. Every output below is compared bit by bit, ids and
 * log-probabilities, with the same request run by itself.
 */
#include "engine_internal.h"
#include "engine_rig.h"
#include "test.h"

static rig main_rig; /* large: not on the stack */
static rig_output expected[RIG_MAX_SLOTS];

static void open_rig(rig* r) {
  const int32_t status = rig_open(r);
  if (status != CLB_OK) {
    (void)fprintf(stderr, "%s\n", r->error.message);
  }
  CHECK_EQ(status, CLB_OK);
}

static void check_same(const rig_output* actual, const rig_output* wanted) {
  CHECK_EQ(actual->ended, wanted->ended);
  CHECK_EQ(actual->flags, wanted->flags);
  CHECK_EQ(actual->count, wanted->count);
  for (uint32_t i = 0; i < actual->count; ++i) {
    CHECK_EQ(actual->records[i].token, wanted->records[i].token);
    CHECK(memcmp(&actual->records[i], &wanted->records[i], sizeof actual->records[i]) == 0);
  }
}

/* A request of any kind that the seed decides. */
static clb_request random_request(uint64_t seed) {
  uint64_t state = seed;
  const uint32_t prompt = 1 + (uint32_t)(clb_test_random(&state) % 40);
  clb_request request = rig_request(seed, prompt, 1 + (uint32_t)(clb_test_random(&state) % 20));
  if (clb_test_random(&state) % 2 == 0) {
    request.temperature = 0.9f;
    request.top_p = 0.9f;
    request.top_k = (uint32_t)(clb_test_random(&state) % 30);
    request.frequency_penalty = clb_test_random(&state) % 2 == 0 ? 0.7f : 0.0f;
    request.choice = (uint32_t)(clb_test_random(&state) % 3);
  }
  return request;
}

/* Random company: requests join at random turns in random slots, some are cancelled, and each of the others gives
   what it gave alone in another engine. */
static void any_company_gives_the_same_bits(void) {
  enum { REQUESTS = 60, TURNS = 3000 };
  static rig_output alone[REQUESTS];
  rig* const r = &main_rig;
  uint64_t state = 99;
  uint32_t running[RIG_MAX_SLOTS] = {0}; /* request number + 1 */
  uint32_t next = 0;
  uint32_t compared = 0;
  rig_init(r, 1);
  open_rig(r);
  for (uint32_t i = 0; i < REQUESTS; ++i) {
    const clb_request request = random_request(i + 1);
    rig_run_alone(r, 0, &request, i + 1);
    alone[i] = r->outputs[0];
  }
  rig_close(r);
  rig_init(r, RIG_MAX_SLOTS);
  open_rig(r);
  for (uint32_t turn = 0; turn < TURNS && compared < REQUESTS; ++turn) {
    const uint32_t slot = (uint32_t)(clb_test_random(&state) % RIG_MAX_SLOTS);
    if (running[slot] == 0 && next < REQUESTS) {
      const clb_request request = random_request(next + 1);
      (void)rig_write(r, slot, &request, next + 1);
      rig_start(r, slot);
      running[slot] = ++next;
    } else if (running[slot] != 0 && clb_test_random(&state) % 40 == 0) {
      rig_push(r, CLB_CMD_CLOSE, slot, r->generation[slot], 0, 0);
    }
    (void)rig_turn(r);
    for (uint32_t s = 0; s < RIG_MAX_SLOTS; ++s) {
      if (running[s] != 0 && r->outputs[s].ended != 0) {
        if (r->outputs[s].ended != CLB_EVENT_CLOSED) {
          check_same(&r->outputs[s], &alone[running[s] - 1]);
        }
        running[s] = 0;
        ++compared;
      }
    }
  }
  CHECK_EQ(compared, REQUESTS);
  CHECK_EQ(rig_stats(r).kv_bytes_used, 0);
  CHECK_EQ(rig_stats(r).expert_relaunches, 0);
  rig_close(r);
}

/* Chunk size, step size and PREFILL commands in pieces change when work is done, not what comes out. */
static void prefill_may_be_cut_anywhere(void) {
  const clb_request request = rig_request(20, 50, 6);
  const uint32_t sizes[][2] = {{8, 24}, {1, 1}, {96, 96}, {13, 17}};
  rig* const r = &main_rig;
  for (uint32_t i = 0; i < 4; ++i) {
    rig_init(r, 1);
    r->config.prefill_chunk = sizes[i][0];
    r->config.prefill_tokens = sizes[i][1];
    open_rig(r);
    (void)rig_write(r, 0, &request, 20);
    rig_push(r, CLB_CMD_OPEN, 0, r->generation[0], 0, 0);
    const uint32_t pieces[] = {0, 3, 20, 47, 50};
    for (uint32_t p = 0; p + 1 < sizeof pieces / sizeof pieces[0]; ++p) {
      rig_push(r, CLB_CMD_PREFILL, 0, r->generation[0], pieces[p], pieces[p + 1] - pieces[p]);
      (void)rig_turn(r);
    }
    CHECK(rig_drain(r, 200));
    if (i == 0) {
      expected[0] = r->outputs[0];
      CHECK_EQ(rig_stats(r).steps_prefill, 3); /* of 16, 24 and 10 tokens: chunks of 8 are never cut short */
    }
    check_same(&r->outputs[0], &expected[0]);
    rig_close(r);
  }
}

/* Short prompts that fit a step together are computed in one, each expert of a layer at most once. */
static void short_prompts_share_one_prefill_step(void) {
  rig* const r = &main_rig;
  rig_init(r, 3);
  open_rig(r);
  for (uint32_t slot = 0; slot < 3; ++slot) {
    const clb_request request = rig_request(30 + slot, 8, 1);
    (void)rig_write(r, slot, &request, 30 + slot);
    rig_start(r, slot);
  }
  CHECK_EQ(rig_turn(r), 1);
  const clb_stats stats = rig_stats(r);
  CHECK_EQ(stats.steps_prefill, 1);
  CHECK_EQ(stats.tokens_prefill, 24);
  CHECK_EQ(stats.requests_done, 3);
  CHECK_EQ(stats.expert_assignments, 24 * 2 * 2);
  CHECK(stats.expert_launches <= 2 * RIG_EXPERTS);
  CHECK(stats.progress >= RIG_LAYERS);
  rig_close(r);
}

/* A prompt takes as many chunks as fit a step while nobody decodes; beside a decoding slot one a step, in which the
   other slot gets its token. */
static void decoding_slots_keep_their_pace(void) {
  const clb_request waiting = rig_request(90, 60, 1);
  const clb_request decoding = rig_request(91, 3, 30);
  rig* const r = &main_rig;
  rig_init(r, 2);
  open_rig(r);
  (void)rig_write(r, 0, &waiting, 90);
  rig_start(r, 0);
  for (uint32_t step = 1; step <= 3; ++step) {
    CHECK_EQ(rig_turn(r), 1);
    CHECK_EQ(rig_stats(r).tokens_prefill, step < 3 ? step * 24 : 60);
  }
  CHECK_EQ(r->outputs[0].count, 1);
  (void)rig_write(r, 1, &decoding, 91);
  rig_start(r, 1);
  (void)rig_turn(r);
  (void)rig_write(r, 0, &waiting, 90);
  rig_start(r, 0);
  for (uint32_t step = 1; step <= 8; ++step) {
    CHECK_EQ(rig_turn(r), 1);
    CHECK_EQ(rig_stats(r).tokens_prefill, 63 + (step < 8 ? step * 8 : 60));
    CHECK_EQ(r->outputs[1].count, 1 + step);
  }
  CHECK_EQ(r->outputs[0].count, 1);
  CHECK_EQ(rig_stats(r).steps_prefill, 3 + 1 + 8);
  CHECK_EQ(rig_stats(r).steps_decode, 8);
  rig_close(r);
}

/* A prompt that does not fit the step any more waits, and no younger one overtakes it. */
static void prefill_is_first_come_first_served(void) {
  rig* const r = &main_rig;
  const uint32_t prompts[] = {8, 8, 9, 1}; /* chunks of 8; 24 tokens a step */
  rig_init(r, 4);
  r->config.prefill_tokens = 20;
  open_rig(r);
  for (uint32_t slot = 0; slot < 4; ++slot) {
    const clb_request request = rig_request(40 + slot, prompts[slot], 1);
    (void)rig_write(r, slot, &request, 40 + slot);
    rig_start(r, slot);
  }
  (void)rig_turn(r);
  CHECK_EQ(r->outputs[0].count + r->outputs[1].count, 2);
  CHECK_EQ(rig_stats(r).tokens_prefill, 16);
  CHECK_EQ(r->outputs[3].count, 0);
  CHECK(rig_drain(r, 10));
  rig_close(r);
}

static void run_with_runs(rig* r, uint32_t slot, clb_request request, uint64_t seed, uint32_t prefix_run,
                          uint32_t prefix_tokens, uint32_t publish_run) {
  request.prefix_run = prefix_run;
  request.prefix_tokens = prefix_tokens;
  request.publish_run = publish_run;
  rig_run_alone(r, slot, &request, seed);
  CHECK_EQ(r->outputs[slot].usage.cached_tokens, prefix_tokens);
}

/* KV out of a shared run gives the bits of KV computed by oneself, wherever the border lies; a run that grew out of
   another, too; and released runs leave nothing behind. Both KV precisions. */
static void prefix_runs_give_the_same_bits(void) {
  const uint32_t borders[] = {1, 7, 8, 29};
  rig* const r = &main_rig;
  for (uint32_t precision = CLB_FP32; precision <= CLB_FP16; ++precision) {
    const clb_request request = rig_request(50, 30, 10);
    rig_init(r, 3);
    r->config.kv_precision = precision;
    open_rig(r);
    rig_run_alone(r, 0, &request, 50);
    expected[0] = r->outputs[0];
    run_with_runs(r, 1, request, 50, 0, 0, 1);
    check_same(&r->outputs[1], &expected[0]);
    for (uint32_t i = 0; i < 4; ++i) {
      run_with_runs(r, i % 3, request, 50, 1, borders[i], 0);
      check_same(&r->outputs[i % 3], &expected[0]);
    }
    run_with_runs(r, 2, request, 50, 1, 13, 2); /* copies 13 positions, computes 17, publishes 30 */
    check_same(&r->outputs[2], &expected[0]);
    rig_push(r, CLB_CMD_RELEASE_RUN, 0, 0, 1, 0);
    run_with_runs(r, 0, request, 50, 2, 29, 0);
    check_same(&r->outputs[0], &expected[0]);
    rig_push(r, CLB_CMD_RELEASE_RUN, 0, 0, 2, 0);
    rig_push(r, CLB_CMD_RELEASE_RUN, 0, 0, 2, 0); /* once more: held by nobody, changes nothing */
    (void)rig_turn(r);
    CHECK_EQ(rig_stats(r).kv_bytes_used, 0);
    rig_close(r);
  }
}

/* A prefix run that is gone, or is shorter than asked, is computed anew: the same bits, nothing cached. */
static void a_missing_prefix_run_is_computed(void) {
  clb_request request = rig_request(51, 30, 2);
  rig* const r = &main_rig;
  rig_init(r, 2);
  open_rig(r);
  run_with_runs(r, 0, rig_request(51, 10, 2), 51, 0, 0, 1);
  rig_run_alone(r, 1, &request, 51);
  expected[0] = r->outputs[1];
  request.prefix_run = 2;
  request.prefix_tokens = 5;
  for (uint32_t i = 0; i < 2; ++i) {
    rig_run_alone(r, 1, &request, 51);
    check_same(&r->outputs[1], &expected[0]);
    CHECK_EQ(r->outputs[1].usage.cached_tokens, 0);
    request.prefix_run = 1;
    request.prefix_tokens = 12; /* 10 of the prompt, one of the output */
  }
  rig_close(r);
}

/* What a slot generated is part of the run that it published: a prompt that goes on from there gets the bits of one
   that is computed alone. The last token never went in. */
static void generated_positions_are_a_prefix(void) {
  rig* const r = &main_rig;
  for (uint32_t precision = CLB_FP32; precision <= CLB_FP16; ++precision) {
    rig_init(r, 2);
    r->config.kv_precision = precision;
    open_rig(r);
    run_with_runs(r, 0, rig_request(52, 20, 12), 52, 0, 0, 1);
    clb_request request = rig_request(52, 40, 10);
    for (uint32_t i = 0; i < 3; ++i) {
      const uint32_t cached = i == 0 ? 0 : i == 1 ? 31 : 23;
      request.prefix_run = cached != 0 ? 1 : 0;
      request.prefix_tokens = cached;
      (void)rig_write(r, 1, &request, 52);
      int32_t* const prompt = rig_block(r, 1, r->layout.request_tokens);
      for (uint32_t p = 0; p < 12; ++p)
        prompt[20 + p] = r->outputs[0].records[p].token;
      rig_start(r, 1);
      CHECK(rig_drain(r, 400));
      CHECK_EQ(r->outputs[1].usage.cached_tokens, cached);
      if (i == 0) expected[0] = r->outputs[1];
      check_same(&r->outputs[1], &expected[0]);
    }
    request.prefix_tokens = 32;
    rig_run_alone(r, 1, &request, 52);
    CHECK_EQ(r->outputs[1].usage.cached_tokens, 0);
    rig_close(r);
  }
}

/* The log-probability of a generated token is, to the bit, that of the same token read as prompt. */
static void prompt_records_equal_generated_ones(void) {
  const clb_request request = rig_request(60, 9, 24);
  rig* const r = &main_rig;
  rig_init(r, 2);
  open_rig(r);
  rig_run_alone(r, 0, &request, 60);
  expected[0] = r->outputs[0];
  clb_request again = rig_request(60, 9 + 24, 0);
  again.flags = CLB_REQ_PROMPT_LOGPROBS;
  again.prompt_top_logprobs = 3;
  (void)rig_write(r, 1, &again, 60);
  int32_t* const tokens = rig_block(r, 1, r->layout.request_tokens);
  for (uint32_t i = 0; i < 24; ++i) {
    tokens[9 + i] = expected[0].records[i].token;
  }
  rig_start(r, 1);
  CHECK(rig_drain(r, 100));
  const clb_prompt_record* const records = rig_prompt_records(r, 1);
  for (uint32_t i = 0; i < 24; ++i) {
    CHECK(records[9 + i].logprob == expected[0].records[i].logprob);
    CHECK_EQ(records[9 + i].top_ids[0], expected[0].records[i].top_ids[0]);
    CHECK(memcmp(records[9 + i].top_logprobs, expected[0].records[i].top_logprobs, 3 * sizeof(float)) == 0);
  }
  rig_close(r);
}

/* One request, with this window and these norms in the first layer. */
static rig_output run_bent(uint32_t window, uint32_t qk_norm) {
  const clb_request request = rig_request(80, 60, 20);
  rig* const r = &main_rig;
  rig_init(r, 1);
  r->layers[0].window = window;
  r->layers[0].qk_norm = qk_norm;
  open_rig(r);
  rig_run_alone(r, 0, &request, 80);
  rig_close(r);
  return r->outputs[0];
}

/* A window that is never reached changes no bit; one that is shorter by a token does, and so does each kind of norm. */
static void windows_and_norms_act(void) {
  const rig_output plain = run_bent(0, CLB_QK_NORM_NONE);
  const rig_output never = run_bent(60 + 20 - 1, CLB_QK_NORM_NONE); /* the last token is generated, not read */
  check_same(&never, &plain);
  const rig_output others[] = {run_bent(60 + 20 - 2, CLB_QK_NORM_NONE), run_bent(0, CLB_QK_NORM_HEAD),
                               run_bent(0, CLB_QK_NORM_ROW)};
  CHECK(memcmp(others[0].records, plain.records, 19 * sizeof plain.records[0]) == 0);
  CHECK(memcmp(&others[0].records[19], &plain.records[19], sizeof plain.records[0]) != 0);
  CHECK(memcmp(others[1].records, plain.records, sizeof plain.records[0]) != 0);
  CHECK(memcmp(others[2].records, plain.records, sizeof plain.records[0]) != 0);
  CHECK(memcmp(others[2].records, others[1].records, sizeof plain.records[0]) != 0);
}

/* A token whose embedding is infinite fails the request that has it in its prompt, in prefill, and not its neighbour.
 */
static void not_finite_values_fail_alone(void) {
  const clb_request request = rig_request(70, 20, 10);
  rig* const r = &main_rig;
  rig_init(r, 2);
  r->model.tied_head = 0; /* or the head would have the infinite row, too */
  open_rig(r);
  rig_run_alone(r, 0, &request, 70);
  expected[0] = r->outputs[0];
  int32_t poisoned = -1; /* a token that the good request neither has nor generates */
  for (int32_t token = 0; token < (int32_t)RIG_VOCAB && poisoned < 0; ++token) {
    uint32_t uses = 0;
    for (uint32_t i = 0; i < 20; ++i) {
      uses += rig_prompt_token(70, i) == token ? 1u : 0u;
      uses += i < 10 && expected[0].records[i].token == token ? 1u : 0u;
    }
    poisoned = uses == 0 ? token : poisoned;
  }
  uint16_t* const embedding = (uint16_t*)(uintptr_t)r->engine->kernels.embedding.weights.values; /* bf16 */
  embedding[poisoned / 16 * 32 * 16 + poisoned % 16] = 0x7f80;                                   /* rows16: column 0 */
  for (uint32_t slot = 0; slot < 2; ++slot) {
    (void)rig_write(r, slot, &request, 70);
  }
  ((int32_t*)rig_block(r, 1, r->layout.request_tokens))[11] = poisoned;
  rig_start(r, 0);
  rig_start(r, 1);
  CHECK(rig_drain(r, 100));
  CHECK_EQ(r->outputs[1].ended, CLB_EVENT_FAILED);
  CHECK_EQ(r->outputs[1].status, CLB_ERR_NOT_FINITE);
  CHECK_EQ(r->outputs[1].count, 0);
  check_same(&r->outputs[0], &expected[0]);
  rig_close(r);
}

/* Every instruction set gives the log-probabilities of the generic one, within 1e-5. */
static void instruction_sets_agree(void) {
  clb_request request = rig_request(80, 60, 0);
  rig* const r = &main_rig;
  const clb_ops* const before = rig_use(NULL);
  float wanted[60];
  request.flags = CLB_REQ_PROMPT_LOGPROBS;
  for (uint32_t i = 0; clb_ops_table(i) != NULL; ++i) {
    if (clb_ops_table(i)->supported() == 0) {
      continue;
    }
    (void)rig_use(clb_ops_table(i));
    rig_init(r, 1);
    r->config.kv_precision = CLB_FP32; /* a half may be rounded the other way */
    open_rig(r);
    rig_run_alone(r, 0, &request, 80);
    for (uint32_t p = 1; p < 60; ++p) {
      const float logprob = rig_prompt_records(r, 0)[p].logprob;
      wanted[p] = i == 0 ? logprob : wanted[p];
      CHECK_NEAR(logprob, wanted[p], 1e-5 * fabs((double)wanted[p]));
    }
    rig_close(r);
  }
  (void)rig_use(before);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(any_company_gives_the_same_bits),      TEST(prefill_may_be_cut_anywhere),
                                   TEST(short_prompts_share_one_prefill_step), TEST(prefill_is_first_come_first_served),
                                   TEST(decoding_slots_keep_their_pace),       TEST(prefix_runs_give_the_same_bits),
                                   TEST(a_missing_prefix_run_is_computed),     TEST(generated_positions_are_a_prefix),
                                   TEST(prompt_records_equal_generated_ones),  TEST(windows_and_norms_act),
                                   TEST(not_finite_values_fail_alone),         TEST(instruction_sets_agree)};
  return rig_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
