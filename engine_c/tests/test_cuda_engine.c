/* The CUDA engine over a fake libcuda: plan, kernels, graphs, the closed loop, and every failing driver call. */
#include "cuda_rig.h"
#include "test.h"

/* What the stand-in model says, position by position. */
static void check_tokens(const cuda_rig* r, uint32_t slot, uint32_t prompt_tokens, uint32_t count) {
  int32_t token = cuda_rig_prompt(slot, prompt_tokens - 1u);
  CHECK_EQ(r->outputs[slot].count, count);
  for (uint32_t i = 0; i < count; ++i) {
    token = cuda_rig_next(token, prompt_tokens - 1u + i);
    CHECK_EQ(r->outputs[slot].tokens[i], token);
  }
}

static void open_rig(cuda_rig* r) {
  cuda_rig_init(r, 0);
  const int32_t status = cuda_rig_open(r);
  if (status != CLB_OK) {
    (void)fprintf(stderr, "%s\n", r->error.message);
  }
  CHECK_EQ(status, CLB_OK);
}

/* Requests of many lengths, more prompt than one step takes, with a device that is in time and one that lags. */
static void requests_get_their_own_tokens(void) {
  static const uint32_t prompts[CUDA_RIG_SLOTS] = {1, 7, 8, 9, 40, 70};
  for (uint32_t lag = 0; lag < 2u; ++lag) {
    cuda_rig r;
    open_rig(&r);
    cuda_rig_lag(lag);
    for (uint32_t slot = 0; slot < CUDA_RIG_SLOTS; ++slot) {
      const clb_request request = cuda_rig_request(prompts[slot], 20u + slot);
      cuda_rig_start(&r, slot, &request);
    }
    CHECK(cuda_rig_drain(&r, 200));
    for (uint32_t slot = 0; slot < CUDA_RIG_SLOTS; ++slot) {
      check_tokens(&r, slot, prompts[slot], 20u + slot);
      CHECK_EQ(r.outputs[slot].flags, CLB_FINISH_LENGTH);
    }
    cuda_rig_close(&r);
    CHECK_EQ(cuda_rig_live(), 0);
  }
}

/* A stop id ends a slot on the device; the idle row of the step that was launched already says nothing. */
static void a_stop_id_ends_the_slot(void) {
  cuda_rig r;
  open_rig(&r);
  cuda_rig_lag(1);
  clb_request request = cuda_rig_request(5, 40);
  int32_t token = cuda_rig_prompt(1, 4);
  for (uint32_t i = 0; i < 4u; ++i) {
    token = cuda_rig_next(token, 4u + i);
  }
  request.stop_count = 1;
  *(int32_t*)cuda_rig_block(&r, 1, r.layout.request_stops) = token;
  cuda_rig_start(&r, 1, &request);
  CHECK(cuda_rig_drain(&r, 60));
  CHECK_EQ(r.outputs[1].flags, CLB_FINISH_STOP);
  check_tokens(&r, 1, 5, 4);
  for (uint32_t i = 0; i < 5u; ++i) {
    CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
  }
  cuda_rig_close(&r);
}

/* A slot that is closed while steps of it are in flight may be opened again at once. */
static void a_closed_slot_is_opened_again(void) {
  cuda_rig r;
  open_rig(&r);
  cuda_rig_lag(1);
  const clb_request first = cuda_rig_request(3, 60);
  const clb_request second = cuda_rig_request(9, 12);
  cuda_rig_start(&r, 0, &first);
  for (uint32_t i = 0; i < 6u; ++i) {
    CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
  }
  CHECK(r.outputs[0].count > 2u && r.outputs[0].ended == 0u);
  cuda_rig_push(&r, CLB_CMD_CLOSE, 0, 0, 0);
  CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
  CHECK_EQ(r.outputs[0].ended, CLB_EVENT_CLOSED);
  cuda_rig_start(&r, 0, &second);
  CHECK(cuda_rig_drain(&r, 60));
  check_tokens(&r, 0, 9, 12);
  cuda_rig_close(&r);
}

/* A slot whose ring is full sits out, its neighbours do not wait; it goes on when records are read. */
static void a_full_ring_sits_out(void) {
  cuda_rig r;
  open_rig(&r);
  cuda_rig_lag(1);
  r.hold_records = 1;
  const clb_request request = cuda_rig_request(4, 40);
  cuda_rig_start(&r, 2, &request);
  for (uint32_t i = 0; i < 40u; ++i) {
    CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
  }
  CHECK_EQ(r.outputs[2].count, CUDA_RIG_RECORDS);
  r.hold_records = 0;
  const clb_request other = cuda_rig_request(6, 10);
  cuda_rig_start(&r, 3, &other);
  for (uint32_t i = 0; i < 20u; ++i) {
    CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
  }
  check_tokens(&r, 3, 6, 10);
  CHECK_EQ(r.outputs[2].count, CUDA_RIG_RECORDS);
  CHECK_EQ(clb_result_advance(r.config.channel_base, 2, CUDA_RIG_RECORDS), CLB_OK);
  CHECK(cuda_rig_drain(&r, 60));
  check_tokens(&r, 2, 4, 40);
  cuda_rig_close(&r);
}

/* Each output position of a masked slot waits for its mask and goes by it. */
static void masks_are_waited_for(void) {
  cuda_rig r;
  open_rig(&r);
  cuda_rig_lag(1);
  clb_request request = cuda_rig_request(4, 5);
  request.flags = CLB_REQ_MASKED;
  cuda_rig_start(&r, 0, &request);
  for (uint32_t position = 0; position < 5u; ++position) {
    for (uint32_t i = 0; i < 4u; ++i) {
      CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
    }
    CHECK_EQ(r.outputs[0].count, position);
    uint32_t* const words = (uint32_t*)cuda_rig_block(&r, 0, r.layout.request_mask) + (position & 1u) * 4u;
    (void)memset(words, 0, 16);
    words[(40u + position) / 32u] = 1u << (40u + position) % 32u;
    cuda_rig_push(&r, CLB_CMD_SET, 0, position, 0);
  }
  CHECK(cuda_rig_drain(&r, 20));
  for (uint32_t position = 0; position < 5u; ++position) {
    CHECK_EQ(r.outputs[0].tokens[position], 40 + (int32_t)position);
  }
  cuda_rig_close(&r);
}

/* A request that fails on the device ends alone, with the device's reason. */
static void a_failure_on_the_device_fails_its_request(void) {
  cuda_rig r;
  open_rig(&r);
  clb_request request = cuda_rig_request(4, 5);
  const clb_request other = cuda_rig_request(4, 9);
  request.flags = CLB_REQ_MASKED;
  (void)memset(cuda_rig_block(&r, 0, r.layout.request_mask), 0, 32);
  cuda_rig_start(&r, 0, &request);
  cuda_rig_start(&r, 1, &other);
  cuda_rig_push(&r, CLB_CMD_SET, 0, 0, 0);
  CHECK(cuda_rig_drain(&r, 40));
  CHECK_EQ(r.outputs[0].ended, CLB_EVENT_FAILED);
  CHECK_EQ(r.outputs[0].status, CLB_ERR_NO_TOKEN);
  check_tokens(&r, 1, 4, 9);
  cuda_rig_close(&r);
}

/* Prompt records are there for every position when the first token is told; more rows than one group of 64. */
static void prompt_records_are_written(void) {
  cuda_rig r;
  open_rig(&r);
  cuda_rig_lag(1);
  clb_request request = cuda_rig_request(90, 1);
  request.flags = CLB_REQ_PROMPT_LOGPROBS;
  request.prompt_top_logprobs = 3;
  cuda_rig_start(&r, 4, &request);
  CHECK(cuda_rig_drain(&r, 60));
  const unsigned char* const block =
      (const unsigned char*)r.config.channel_base + r.layout.results + 4u * r.layout.result_stride;
  const clb_prompt_record* const records = (const void*)(block + r.layout.result_prompt);
  CHECK_EQ(((const clb_result*)(const void*)block)->prompt_records, 90);
  CHECK(isnan(records[0].logprob));
  for (uint32_t i = 1; i < 90u; ++i) {
    CHECK_EQ(records[i].logprob, cuda_rig_prompt(4, i));
    CHECK_EQ(records[i].top_count, 3);
  }
  check_tokens(&r, 4, 90, 1);
  cuda_rig_close(&r);
}

/* max_tokens 0: the prompt is computed and the request ends without a token. */
static void a_prompt_alone_ends_without_a_token(void) {
  cuda_rig r;
  open_rig(&r);
  const clb_request request = cuda_rig_request(20, 0);
  cuda_rig_start(&r, 0, &request);
  CHECK(cuda_rig_drain(&r, 20));
  CHECK_EQ(r.outputs[0].ended, CLB_EVENT_FINISHED);
  CHECK_EQ(r.outputs[0].count, 0);
  cuda_rig_close(&r);
}

/* When a request's end is told, its result block says how often it used which expert, for prompt and output. */
static void the_end_brings_the_counts_of_experts(void) {
  for (uint32_t max_tokens = 0; max_tokens < 8u; max_tokens += 7u) {
    cuda_rig r;
    open_rig(&r);
    cuda_rig_lag(1);
    const clb_request request = cuda_rig_request(20, max_tokens);
    cuda_rig_start(&r, 3, &request);
    while (r.outputs[3].ended == 0u) {
      CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
    }
    const unsigned char* const block =
        (const unsigned char*)r.config.channel_base + r.layout.results + 3u * r.layout.result_stride;
    const uint32_t* const counts = (const void*)(block + r.layout.result_counts);
    const uint32_t rows = 20u + (max_tokens > 0u ? max_tokens - 1u : 0u);
    static const uint32_t used[2u * CUDA_RIG_EXPERTS] = {0, 1, 0, 1, 0, 0, 0, 0};
    for (uint32_t i = 0; i < 2u * CUDA_RIG_EXPERTS; ++i) {
      CHECK_EQ(counts[i], used[i] * rows);
    }
    CHECK_EQ(((const clb_result*)(const void*)block)->assignments, 2u * rows);
    cuda_rig_close(&r);
  }
}

/* In between, counts come when they are asked for: exactly those of the steps so far. */
static void counts_are_there_when_asked_for(void) {
  cuda_rig r;
  open_rig(&r);
  const clb_request request = cuda_rig_request(20, 30);
  cuda_rig_start(&r, 3, &request);
  const uint32_t* const counts = (const void*)((const unsigned char*)r.config.channel_base + r.layout.results +
                                               3u * r.layout.result_stride + r.layout.result_counts);
  CHECK_EQ(cuda_rig_turn(&r), CLB_OK); /* the prompt, and the first step of decode behind it */
  CHECK_EQ(counts[1], 0);
  for (uint32_t steps = 1; steps < 8u; ++steps) {
    CHECK_EQ(clb_engine_count_experts(r.engine), CLB_OK);
    CHECK_EQ(counts[1], 20u + steps);
    CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
  }
  cuda_rig_close(&r);
}

/* A limit on the tokens of an expert is one more node of the steps that may exceed it; what is dropped is told. */
static void what_a_limit_drops_is_told(void) {
  for (uint32_t max_tokens = 0; max_tokens < 6u; max_tokens += 5u) {
    cuda_rig r;
    cuda_rig_init(&r, 0);
    r.config.max_tokens_per_expert = 1;
    CHECK_EQ(cuda_rig_open(&r), CLB_OK);
    const clb_request request = cuda_rig_request(20, max_tokens);
    cuda_rig_start(&r, 3, &request);
    CHECK(cuda_rig_drain(&r, 60));
    const clb_result* const result =
        (const void*)((const unsigned char*)r.config.channel_base + r.layout.results + 3u * r.layout.result_stride);
    const uint32_t alone = max_tokens > 0u ? max_tokens - 1u : 0u; /* steps of one row, which cannot exceed it */
    CHECK_EQ(result->dropped, 20);
    CHECK_EQ(result->assignments, 20u + 2u * alone);
    cuda_rig_close(&r);
  }
}

/* Prompts that pool: a mean takes each row of each of its chunks once, a last state the last row of the last. */
static void prompts_are_pooled(void) {
  cuda_rig r;
  open_rig(&r);
  cuda_rig_lag(1);
  for (uint32_t round = 0; round < 2u; ++round) {
    clb_request mean = cuda_rig_request(90, 0);
    clb_request last = cuda_rig_request(30, 0);
    const clb_request other = cuda_rig_request(30, 40);
    mean.flags = CLB_REQ_POOL_MEAN;
    last.flags = CLB_REQ_POOL_LAST;
    cuda_rig_start(&r, 1, &other); /* decodes meanwhile: prompts take a chunk of 8 rows a step */
    CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
    cuda_rig_start(&r, 0, &mean);
    cuda_rig_start(&r, 2, &last);
    CHECK(cuda_rig_drain(&r, 200));
    const unsigned char* const results = (const unsigned char*)r.config.channel_base + r.layout.results;
    const float* const of_mean = (const void*)(results + r.layout.result_pooled);
    const float* const of_last = (const void*)(results + 2u * r.layout.result_stride + r.layout.result_pooled);
    CHECK_EQ(r.outputs[0].ended, CLB_EVENT_FINISHED);
    CHECK_EQ(r.outputs[2].ended, CLB_EVENT_FINISHED);
    CHECK_NEAR(of_mean[0] / of_mean[1], 90.0 / 12.0, 1e-4);
    CHECK_NEAR(of_last[0] / of_last[1], 1.0, 1e-6);
    double squares = 0.0;
    for (uint32_t i = 0; i < 32u; ++i) {
      squares += (double)of_mean[i] * (double)of_mean[i];
    }
    CHECK_NEAR(squares, 1.0, 1e-6);
    CHECK_EQ(((const clb_result*)(const void*)results)->assignments, 180);
  }
  cuda_rig_close(&r);
}

/* Penalties go by the counts of the slot, which start with the prompt's ids. */
static void the_device_gets_the_counts_of_a_prompt(void) {
  cuda_rig r;
  open_rig(&r);
  clb_request request = cuda_rig_request(6, 4);
  request.repetition_penalty = 1.5f;
  cuda_rig_start(&r, 0, &request);
  CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
  const uint32_t* const words = (const uint32_t*)(uintptr_t)r.device.arena;
  uint32_t row = 0; /* some 97 words of the arena are this slot's counts */
  for (uint64_t at = 0; at + CUDA_RIG_VOCAB < r.device.arena_bytes / 4u && row == 0u; at += 64u) {
    uint32_t marked = 0;
    uint32_t other = 0;
    for (uint32_t id = 0; id < CUDA_RIG_VOCAB; ++id) {
      marked += words[at + id] == 0x80000000u ? 1u : 0u;
      other += words[at + id] != 0x80000000u && words[at + id] != 0u ? 1u : 0u;
    }
    row = marked == 6u && other == 0u ? 1u : 0u;
  }
  CHECK_EQ(row, 1);
  CHECK(cuda_rig_drain(&r, 20));
  cuda_rig_close(&r);
}

/* Steps need no more than one graph launch each, and the list is copied only when it changes. */
static void a_decode_step_is_one_call(void) {
  cuda_rig r;
  open_rig(&r);
  const clb_request request = cuda_rig_request(4, 80);
  cuda_rig_start(&r, 0, &request);
  for (uint32_t i = 0; i < 5u; ++i) {
    CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
  }
  const uint32_t before = cuda_rig_calls();
  for (uint32_t i = 0; i < 8u; ++i) {
    CHECK_EQ(cuda_rig_turn(&r), CLB_OK);
  }
  CHECK_EQ(cuda_rig_calls() - before, 8);
  cuda_rig_push(&r, CLB_CMD_CLOSE, 0, 0, 0);
  CHECK(cuda_rig_drain(&r, 10));
  cuda_rig_close(&r);
}

/* A run that touches every path; returns the first status that is not OK. */
static int32_t run_everything(cuda_rig* r) {
  clb_request asks = cuda_rig_request(12, 3);
  asks.flags = CLB_REQ_PROMPT_LOGPROBS;
  asks.presence_penalty = 1.0f;
  asks.stop_count = 1;
  clb_request masked = cuda_rig_request(2, 2);
  masked.flags = CLB_REQ_MASKED;
  const clb_request prompt_only = cuda_rig_request(5, 0);
  cuda_rig_start(r, 0, &asks);
  cuda_rig_start(r, 1, &masked);
  cuda_rig_start(r, 2, &prompt_only);
  (void)memset(cuda_rig_block(r, 1, r->layout.request_mask), 0xff, 32);
  cuda_rig_push(r, CLB_CMD_SET, 1, 0, 0);
  for (uint32_t i = 0; i < 12u; ++i) {
    int32_t status = cuda_rig_turn(r);
    status = status != CLB_OK ? status : clb_engine_count_experts(r->engine);
    if (status != CLB_OK) {
      return status;
    }
  }
  return CLB_OK;
}

/* Whichever driver call fails: open says so and holds nothing, or the loop ends with DEVICE; nothing leaks. */
static void every_failing_call_is_survived(void) {
  uint32_t opened = 0;
  uint32_t failed = 0;
  for (uint32_t n = 1;; ++n) {
    cuda_rig r;
    cuda_rig_init(&r, n);
    int32_t status = cuda_rig_open(&r);
    if (status != CLB_OK) {
      CHECK_EQ(status, CLB_ERR_DEVICE);
      CHECK_CONTAINS(r.error.message, "CUDA_ERROR_LAUNCH_FAILED");
      CHECK_EQ(cuda_rig_live(), 0);
      ++failed;
      continue;
    }
    ++opened;
    status = run_everything(&r);
    const uint32_t calls = cuda_rig_calls();
    cuda_rig_close(&r);
    CHECK_EQ(cuda_rig_live(), 0);
    if (calls < n) {
      CHECK_EQ(status, CLB_OK);
      break;
    }
    CHECK_EQ(status, CLB_ERR_DEVICE);
  }
  CHECK(failed > 20u);
  CHECK(opened > 20u);
}

static void expect_refusal(cuda_rig* r, int32_t status, const char* text) {
  CHECK_EQ(cuda_rig_open(r), status);
  CHECK_CONTAINS(r->error.message, text);
  CHECK_EQ(cuda_rig_live(), 0);
}

/* Kernels that are missing or of another version, and memory that is too small, are refused by name and number. */
static void what_does_not_fit_is_refused(void) {
  cuda_rig r;
  cuda_rig_init(&r, 0);
  r.device.kernel_count--; /* clb_dummy is the last one */
  expect_refusal(&r, CLB_ERR_MODULE, "no cubin has the kernel clb_to_fp16");
  cuda_rig_init(&r, 0);
  ((clb_device_kernel*)(uintptr_t)r.device.kernels)[15].parameter_bytes += 8u;
  expect_refusal(&r, CLB_ERR_MODULE, "kernel clb_sample takes a struct of 128 bytes");
  cuda_rig_init(&r, 0);
  r.device.arena_bytes = (uint64_t)0 - 1u;
  expect_refusal(&r, CLB_ERR_ARGUMENT, "bytes of arena");
  cuda_rig_init(&r, 0);
  r.config.kv_precision = CLB_FP32;
  expect_refusal(&r, CLB_ERR_MODULE, "no cubin has the kernel clb_attend_fp32");
  cuda_rig_init(&r, 0);
  r.device.multiprocessors = 0;
  expect_refusal(&r, CLB_ERR_ARGUMENT, "0 multiprocessors");
}

/* Shapes that the kernels cannot compute are refused by the plan already, with the way out. */
static void shapes_that_do_not_fit_are_refused(void) {
  cuda_rig r;
  cuda_rig_init(&r, 0);
  r.layers[0].expert_width = 24;
  expect_refusal(&r, CLB_ERR_UNSUPPORTED, "width of the experts is 24");
  cuda_rig_init(&r, 0);
  r.layers[1].shared_width = 40;
  expect_refusal(&r, CLB_ERR_UNSUPPORTED, "device: cpu");
  cuda_rig_init(&r, 0);
  r.model.head_dim = 16;
  r.layers[0].kv_values_per_token = r.layers[1].kv_values_per_token = 32;
  expect_refusal(&r, CLB_ERR_UNSUPPORTED, "head_dim is 16");
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {
      TEST(requests_get_their_own_tokens),
      TEST(a_stop_id_ends_the_slot),
      TEST(a_closed_slot_is_opened_again),
      TEST(a_full_ring_sits_out),
      TEST(masks_are_waited_for),
      TEST(a_failure_on_the_device_fails_its_request),
      TEST(prompt_records_are_written),
      TEST(a_prompt_alone_ends_without_a_token),
      TEST(the_end_brings_the_counts_of_experts),
      TEST(counts_are_there_when_asked_for),
      TEST(what_a_limit_drops_is_told),
      TEST(prompts_are_pooled),
      TEST(the_device_gets_the_counts_of_a_prompt),
      TEST(a_decode_step_is_one_call),
      TEST(every_failing_call_is_survived),
      TEST(what_does_not_fit_is_refused),
      TEST(shapes_that_do_not_fit_are_refused),
  };
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
