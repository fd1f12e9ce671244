/* test_commands.c: what the daemon asks for and what it is told. Row independence: test_step.c. */
#include "engine_rig.h"
#include "test.h"

static rig main_rig; /* large: not on the stack */

static void open_rig(rig* r) {
  const int32_t status = rig_open(r);
  if (status != CLB_OK) {
    (void)fprintf(stderr, "%s\n", r->error.message);
  }
  CHECK_EQ(status, CLB_OK);
}

/* A greedy request gives as many tokens as it asked for, each with its log-probability, and says how it ended. */
static void greedy_request_ends_by_length(void) {
  const clb_request request = rig_request(1, 13, 20);
  rig_init(&main_rig, 2);
  open_rig(&main_rig);
  rig_run_alone(&main_rig, 0, &request, 1);
  const rig_output* const output = &main_rig.outputs[0];
  CHECK_EQ(output->ended, CLB_EVENT_TOKEN);
  CHECK_EQ(output->flags, CLB_FINISH_LENGTH);
  CHECK_EQ(output->count, 20);
  for (uint32_t i = 0; i < output->count; ++i) {
    CHECK_EQ(output->records[i].position, i);
    CHECK_EQ(output->records[i].top_count, 3);
    CHECK_EQ(output->records[i].top_ids[0], output->records[i].token);
    CHECK(output->records[i].logprob == output->records[i].top_logprobs[0]);
  }
  CHECK_EQ(output->usage.assignments, (13 + 19) * 2 * 2); /* tokens x MoE layers x experts per token */
  CHECK_EQ(output->usage.trimmed, 0);
  const clb_stats stats = rig_stats(&main_rig);
  CHECK_EQ(stats.tokens_prefill, 13);
  CHECK_EQ(stats.tokens_decode, 19);
  CHECK_EQ(stats.steps_decode, 19);
  CHECK_EQ(stats.requests_done, 1);
  CHECK_EQ(stats.kv_bytes_used, 0);
  rig_close(&main_rig);
}

/* A stop id ends a request with the STOP flag, but not before min_tokens. */
static void stop_id_ends_request(void) {
  clb_request request = rig_request(2, 5, 20);
  rig_init(&main_rig, 1);
  open_rig(&main_rig);
  rig_run_alone(&main_rig, 0, &request, 2);
  const int32_t third = main_rig.outputs[0].records[2].token;
  uint32_t first = 0;
  while (main_rig.outputs[0].records[first].token != third) {
    ++first;
  }
  rig_write(&main_rig, 0, &request, 2)->stop_count = 1;
  *(int32_t*)rig_block(&main_rig, 0, main_rig.layout.request_stops) = third;
  rig_start(&main_rig, 0);
  CHECK(rig_drain(&main_rig, 100));
  CHECK_EQ(main_rig.outputs[0].flags, CLB_FINISH_STOP);
  CHECK_EQ(main_rig.outputs[0].count, first + 1);
  request.stop_count = 1;
  request.min_tokens = 8;
  rig_run_alone(&main_rig, 0, &request, 2);
  CHECK(main_rig.outputs[0].count > 8);
  rig_close(&main_rig);
}

/* max_tokens 0 computes the prompt and its records, and ends with FINISHED. */
static void no_output_asked_for(void) {
  clb_request request = rig_request(3, 21, 0);
  request.flags = CLB_REQ_PROMPT_LOGPROBS;
  request.prompt_top_logprobs = 2;
  rig_init(&main_rig, 1);
  open_rig(&main_rig);
  rig_run_alone(&main_rig, 0, &request, 3);
  CHECK_EQ(main_rig.outputs[0].ended, CLB_EVENT_FINISHED);
  CHECK_EQ(main_rig.outputs[0].count, 0);
  CHECK_EQ(main_rig.outputs[0].usage.prompt_records, 21);
  const clb_prompt_record* const records = rig_prompt_records(&main_rig, 0);
  CHECK(isnan(records[0].logprob) && records[0].top_count == 0);
  for (uint32_t p = 1; p < 21; ++p) {
    CHECK(records[p].logprob < 0.0f && records[p].top_count == 2);
    CHECK(records[p].top_logprobs[0] >= records[p].logprob);
  }
  rig_close(&main_rig);
}

/* CLOSE ends one request at the next boundary; a late CLOSE of an older generation changes nothing. */
static void close_cancels_one_request(void) {
  const clb_request request = rig_request(4, 10, 30);
  rig* const r = &main_rig;
  rig_init(r, 2);
  open_rig(r);
  for (uint32_t slot = 0; slot < 2; ++slot) {
    (void)rig_write(r, slot, &request, 4 + slot);
    rig_start(r, slot);
  }
  for (uint32_t i = 0; i < 6; ++i) {
    (void)rig_turn(r);
  }
  rig_push(r, CLB_CMD_CLOSE, 0, r->generation[0], 0, 0);
  (void)rig_turn(r);
  CHECK_EQ(r->outputs[0].ended, CLB_EVENT_CLOSED);
  CHECK_EQ(r->outputs[1].ended, 0);
  (void)rig_write(r, 0, &request, 9);
  rig_start(r, 0);
  rig_push(r, CLB_CMD_CLOSE, 0, r->generation[0] - 1, 0, 0);
  CHECK(rig_drain(r, 100));
  CHECK_EQ(r->outputs[0].count, 30);
  CHECK_EQ(r->outputs[1].count, 30);
  rig_close(r);
}

/* A slot whose record ring is full sits steps out, its neighbour goes on, and nothing is lost. */
static void full_record_ring_sits_out(void) {
  const clb_request request = rig_request(5, 2, 90);
  rig* const r = &main_rig;
  rig_init(r, 2);
  open_rig(r);
  rig_run_alone(r, 0, &request, 5);
  static rig_output expected;
  expected = r->outputs[0];
  (void)rig_write(r, 0, &request, 5);
  rig_start(r, 0);
  r->hold_records = 1;
  for (uint32_t i = 0; i < 80; ++i) {
    (void)rig_turn(r);
  }
  CHECK_EQ(r->outputs[0].count, RIG_RECORDS);
  CHECK_EQ(rig_turn(r), 0);
  r->hold_records = 0;
  const clb_request other = rig_request(6, 3, 4);
  (void)rig_write(r, 1, &other, 6);
  rig_start(r, 1);
  for (uint32_t i = 0; i < 10; ++i) {
    (void)rig_turn(r);
  }
  CHECK_EQ(r->outputs[1].count, 4);
  CHECK_EQ(r->outputs[0].count, RIG_RECORDS);
  CHECK_EQ(clb_result_advance(r->config.channel_base, 0, RIG_RECORDS), CLB_OK);
  CHECK(rig_drain(r, 100));
  CHECK_EQ(r->outputs[0].count, 90);
  for (uint32_t i = 0; i < 90; ++i) {
    CHECK_EQ(r->outputs[0].records[i].token, expected.records[i].token);
  }
  rig_close(r);
}

/* A masked request waits for the mask of each position, then draws from it; an empty mask fails it alone. */
static void mask_is_waited_for(void) {
  clb_request request = rig_request(7, 4, 3);
  request.flags |= CLB_REQ_MASKED;
  rig* const r = &main_rig;
  rig_init(r, 1);
  open_rig(r);
  (void)rig_write(r, 0, &request, 7);
  uint32_t* const masks = rig_block(r, 0, r->layout.request_mask);
  const uint32_t words = (RIG_VOCAB + 31) / 32;
  rig_start(r, 0);
  CHECK_EQ(rig_turn(r), 0); /* opened, but its only chunk would sample */
  for (uint32_t position = 0; position < 2; ++position) {
    uint32_t* const mask = masks + (position & 1u) * words;
    memset(mask, 0, words * sizeof *mask);
    mask[position] = 1u << 5;
    rig_push(r, CLB_CMD_SET, 0, r->generation[0], position, 0);
    (void)rig_turn(r);
    (void)rig_turn(r);
    CHECK_EQ(r->outputs[0].count, position + 1);
    CHECK_EQ(r->outputs[0].records[position].token, (int32_t)(position * 32 + 5));
  }
  memset(masks, 0, words * sizeof *masks);
  rig_push(r, CLB_CMD_SET, 0, r->generation[0], 2, 0);
  (void)rig_turn(r);
  CHECK_EQ(r->outputs[0].ended, CLB_EVENT_FAILED);
  CHECK_EQ(r->outputs[0].status, CLB_ERR_NO_TOKEN);
  rig_close(r);
}

/* Requests that do not fit the KV tier together wait their turn in order; what can never fit fails. */
static void kv_tier_is_waited_for(void) {
  const clb_request request = rig_request(8, 40, 20);
  rig* const r = &main_rig;
  rig_init(r, 3);
  r->config.tier_kv.bytes = 6 * 4096; /* 60 tokens x 192 bytes take 3 pages: two runs fit */
  open_rig(r);
  for (uint32_t slot = 0; slot < 3; ++slot) {
    (void)rig_write(r, slot, &request, 8);
    rig_start(r, slot);
  }
  (void)rig_turn(r);
  CHECK_EQ(r->outputs[0].opened, 1);
  CHECK_EQ(r->outputs[1].opened, 1);
  CHECK_EQ(r->outputs[2].opened, 0);
  CHECK(rig_drain(r, 200));
  CHECK_EQ(r->outputs[2].count, 20);
  for (uint32_t i = 0; i < 20; ++i) {
    CHECK_EQ(r->outputs[2].records[i].token, r->outputs[0].records[i].token);
  }
  rig_close(r);
  r->config.tier_kv.bytes = 4096;
  open_rig(r);
  rig_run_alone(r, 0, &request, 8);
  CHECK_EQ(r->outputs[0].ended, CLB_EVENT_FAILED);
  CHECK_EQ(r->outputs[0].status, CLB_ERR_MEMORY);
  rig_close(r);
}

/* A run that the daemon holds stands in the way: the slot says that it waits, once; releasing what does not help makes
   it say so again, releasing the run opens it. */
static void a_held_run_is_in_the_way(void) {
  clb_request request = rig_request(8, 40, 20);
  rig* const r = &main_rig;
  rig_init(r, 3);
  r->config.tier_kv.bytes = 7 * 4096; /* 60 tokens x 192 bytes take 3 pages, 16 take one */
  open_rig(r);
  request.publish_run = 1;
  rig_run_alone(r, 0, &request, 8);
  clb_request small = rig_request(9, 8, 8);
  small.publish_run = 2;
  rig_run_alone(r, 1, &small, 9);
  CHECK_EQ(rig_stats(r).kv_bytes_used, 4 * 4096);
  request = rig_request(8, 40, 50); /* 5 pages */
  (void)rig_write(r, 2, &request, 8);
  rig_start(r, 2);
  for (uint32_t i = 0; i < 3; ++i)
    CHECK_EQ(rig_turn(r), 0);
  CHECK_EQ(r->outputs[2].waits, 1);
  rig_push(r, CLB_CMD_RELEASE_RUN, 0, 0, 3, 0); /* nobody's */
  (void)rig_turn(r);
  CHECK_EQ(r->outputs[2].waits, 1);
  rig_push(r, CLB_CMD_RELEASE_RUN, 0, 0, 2, 0);
  (void)rig_turn(r);
  (void)rig_turn(r);
  CHECK_EQ(r->outputs[2].waits, 2);
  CHECK_EQ(r->outputs[2].opened, 0);
  rig_push(r, CLB_CMD_RELEASE_RUN, 0, 0, 1, 0);
  (void)rig_turn(r);
  CHECK_EQ(r->outputs[2].opened, 1);
  CHECK(rig_drain(r, 200));
  rig_close(r);
}

/* A prefix that leaves no room for the rest, now or ever, is given up rather than waited for. */
static void a_prefix_without_room_beside_it_is_given_up(void) {
  clb_request request = rig_request(8, 40, 20);
  rig* const r = &main_rig;
  rig_init(r, 2);
  r->config.tier_kv.bytes = 5 * 4096;
  open_rig(r);
  request.publish_run = 1;
  rig_run_alone(r, 0, &request, 8);
  request = rig_request(8, 50, 30); /* 4 pages, beside 3 */
  request.prefix_run = 1;
  request.prefix_tokens = 39;
  request.publish_run = 2;
  (void)rig_write(r, 1, &request, 8);
  rig_start(r, 1);
  (void)rig_turn(r);
  CHECK_EQ(r->outputs[1].waits, 1);
  rig_push(r, CLB_CMD_RELEASE_RUN, 0, 0, 1, 0);
  CHECK(rig_drain(r, 200));
  CHECK_EQ(r->outputs[1].count, 30);
  CHECK_EQ(r->outputs[1].usage.cached_tokens, 0);
  rig_close(r);
}

/* Bends one value of the head of a good request. */
static void bend_head(rig* r, uint32_t which) {
  clb_request* const head = rig_block(r, 0, 0);
  switch (which) {
    case 0:
      head->generation += 1;
      break;
    case 1:
      head->flags = 0x80;
      break;
    case 2:
      head->prompt_tokens = 0;
      break;
    case 3:
      head->prompt_tokens = RIG_MAX_SEQ + 1;
      break;
    case 4:
      head->max_tokens = UINT32_MAX;
      break;
    case 5:
      head->max_tokens = RIG_MAX_SEQ - 7;
      break;
    case 6:
      head->top_logprobs = CLB_MAX_TOP_LOGPROBS + 1;
      break;
    case 7:
      head->prompt_top_logprobs = CLB_MAX_TOP_LOGPROBS + 1;
      break;
    case 8:
      head->bias_count = CLB_MAX_BIAS + 1;
      break;
    case 9:
      head->stop_count = UINT32_MAX;
      break;
    case 10:
      head->prefix_run = 1;
      break;
    case 11:
      head->prefix_tokens = 4;
      break;
    case 12:
      head->prefix_run = 1000, head->prefix_tokens = 4;
      break;
    case 13:
      head->publish_run = 1000;
      break;
    case 14:
      head->temperature = NAN;
      break;
    case 15:
      head->top_p = 0.0f;
      break;
    case 16:
      head->min_p = 1.5f;
      break;
    default:
      head->repetition_penalty = 0.0f;
      break;
  }
}

/* Bends one value behind the head. */
static void bend_array(rig* r, uint32_t which) {
  clb_request* const head = rig_block(r, 0, 0);
  int32_t* const tokens = rig_block(r, 0, r->layout.request_tokens);
  clb_expert_policy* const policy = rig_block(r, 0, r->layout.request_policy);
  switch (which) {
    case 18:
      tokens[3] = RIG_VOCAB;
      break;
    case 19:
      tokens[7] = -1;
      break;
    case 20:
      policy[0].k = 3;
      break;
    case 21:
      policy[1].k = 1;
      break;
    case 22:
      policy[2].threshold = NAN;
      break;
    case 23:
      policy[2].threshold = 1.5f;
      break;
    case 24:
      head->bias_count = 1, *(clb_bias*)rig_block(r, 0, r->layout.request_bias) = (clb_bias){97, 1.0f};
      break;
    default:
      head->stop_count = 1, *(int32_t*)rig_block(r, 0, r->layout.request_stops) = -5;
      break;
  }
}

/* Each bad value in a request block fails that request with ARGUMENT and leaves its neighbour alone. */
static void bad_request_blocks_fail_alone(void) {
  const clb_request request = rig_request(10, 8, 40);
  const clb_request longest = rig_request(11, 2, 94);
  rig* const r = &main_rig;
  rig_init(r, 2);
  open_rig(r);
  (void)rig_write(r, 1, &longest, 11);
  rig_start(r, 1);
  for (uint32_t which = 0; which < 26; ++which) {
    (void)rig_write(r, 0, &request, 10);
    (which < 18 ? bend_head : bend_array)(r, which);
    rig_push(r, CLB_CMD_OPEN, 0, r->generation[0], 0, 0);
    (void)rig_turn(r);
    if (r->outputs[0].ended != CLB_EVENT_FAILED || r->outputs[0].status != CLB_ERR_ARGUMENT) {
      (void)fprintf(stderr, "bent value %u\n", which);
    }
    CHECK_EQ(r->outputs[0].ended, CLB_EVENT_FAILED);
    CHECK_EQ(r->outputs[0].status, CLB_ERR_ARGUMENT);
  }
  CHECK(rig_drain(r, 200));
  CHECK_EQ(r->outputs[1].count, 94);
  CHECK_EQ(rig_stats(r).requests_failed, 26);
  rig_close(r);
}

/* A prefill outside the prompt fails its request; a second OPEN of a slot in use is refused, the first goes on. */
static void commands_out_of_place(void) {
  const clb_request request = rig_request(12, 8, 4);
  rig* const r = &main_rig;
  rig_init(r, 2);
  open_rig(r);
  const uint32_t starts[][2] = {{0, 9}, {1, 2}, {UINT32_MAX, UINT32_MAX}};
  for (uint32_t i = 0; i < 3; ++i) {
    (void)rig_write(r, 0, &request, 12);
    rig_push(r, CLB_CMD_OPEN, 0, r->generation[0], 0, 0);
    rig_push(r, CLB_CMD_PREFILL, 0, r->generation[0], starts[i][0], starts[i][1]);
    (void)rig_turn(r);
    CHECK_EQ(r->outputs[0].ended, CLB_EVENT_FAILED);
    CHECK_EQ(r->outputs[0].status, CLB_ERR_ARGUMENT);
  }
  (void)rig_write(r, 1, &request, 12);
  rig_start(r, 1);
  (void)rig_turn(r);
  const clb_command again = {CLB_CMD_OPEN, 1, 77, 0, 0};
  uint32_t worked = 0;
  clb_event events[8];
  CHECK_EQ(clb_command_push(r->config.channel_base, &again, 1), CLB_OK);
  CHECK_EQ(clb_engine_turn(r->engine, &worked), CLB_OK);
  uint32_t refused = 0;
  const uint32_t count = clb_event_pop(r->config.channel_base, events, 8);
  for (uint32_t i = 0; i < count; ++i) {
    refused += events[i].kind == CLB_EVENT_FAILED && events[i].generation == 77 && events[i].status == CLB_ERR_STATE;
  }
  CHECK_EQ(refused, 1);
  CHECK_EQ(rig_stats(r).slots_open, 1);
  rig_close(r);
}

/* k and threshold leave experts out and say so; so does a limit of tokens per expert. */
static void expert_capacity_is_accounted(void) {
  const clb_request request = rig_request(13, 16, 4);
  rig* const r = &main_rig;
  rig_init(r, 1);
  open_rig(r);
  (void)rig_write(r, 0, &request, 13);
  clb_expert_policy* const policy = rig_block(r, 0, r->layout.request_policy);
  policy[0].k = 1;
  policy[2].threshold = 1.0f;
  rig_start(r, 0);
  CHECK(rig_drain(r, 100));
  CHECK_EQ(r->outputs[0].usage.assignments, 19 * 2);
  CHECK_EQ(r->outputs[0].usage.trimmed, 19 * 2);
  CHECK_EQ(rig_stats(r).expert_trimmed, 19 * 2);
  uint32_t counted[RIG_LAYERS] = {0};
  for (uint32_t i = 0; i < RIG_LAYERS * RIG_EXPERTS; ++i) {
    counted[i / RIG_EXPERTS] += rig_counts(r, 0)[i];
  }
  CHECK_EQ(counted[0], 19);
  CHECK_EQ(counted[1], 0);
  CHECK_EQ(counted[2], 19);
  rig_close(r);
  r->config.max_tokens_per_expert = 1;
  open_rig(r);
  rig_run_alone(r, 0, &request, 13);
  CHECK(r->outputs[0].usage.dropped > 0);
  CHECK_EQ(r->outputs[0].usage.dropped + r->outputs[0].usage.assignments, 19 * 2 * 2);
  rig_close(r);
}

/* A request may ask for more experts than the model's own where the configuration says so, up to what it says. */
static void more_experts_are_asked_for_by_name(void) {
  const clb_request request = rig_request(13, 16, 4);
  rig* const r = &main_rig;
  for (uint32_t most = 0; most < 7u; most += 3u) {
    rig_init(r, 1);
    r->config.experts_most = most;
    open_rig(r);
    for (uint32_t k = 2; k < 8u; ++k) {
      (void)rig_write(r, 0, &request, 13);
      clb_expert_policy* const policy = rig_block(r, 0, r->layout.request_policy);
      policy[0].k = k;
      rig_start(r, 0);
      CHECK(rig_drain(r, 100));
      const int allowed = k <= (most > 2u ? most : 2u);
      CHECK_EQ(r->outputs[0].status, allowed ? CLB_OK : CLB_ERR_ARGUMENT);
      CHECK_EQ(r->outputs[0].usage.assignments, allowed ? 19 * (k + 2u) : 0u);
    }
    rig_close(r);
  }
  rig_init(r, 1);
  r->config.experts_most = CLB_MAX_EXPERTS_PER_TOKEN + 1u;
  CHECK_EQ(rig_open(r), CLB_ERR_ARGUMENT);
  rig_close(r);
}

/* A daemon that floods the event ring is a fault of the channel: the engine stops with INTERNAL. */
static void flooded_event_ring_is_a_fault(void) {
  rig* const r = &main_rig;
  uint32_t worked = 0;
  int32_t status = CLB_OK;
  rig_init(r, 1);
  open_rig(r);
  for (uint32_t i = 0; i < r->layout.event_capacity + 1 && status == CLB_OK; ++i) {
    rig_push(r, CLB_CMD_OPEN, 5, 1, 0, 0);
    status = clb_engine_turn(r->engine, &worked);
  }
  CHECK_EQ(status, CLB_ERR_INTERNAL);
  CHECK_EQ(clb_engine_check(r->engine, &r->error), CLB_ERR_INTERNAL);
  rig_close(r);
}

/* So is a read index that the daemon cannot have reached. */
static void impossible_read_index_is_a_fault(void) {
  const clb_request request = rig_request(16, 2, 20);
  rig* const r = &main_rig;
  uint32_t worked = 0;
  rig_init(r, 1);
  open_rig(r);
  (void)rig_write(r, 0, &request, 16);
  rig_start(r, 0);
  (void)rig_turn(r);
  clb_result* const result = (void*)((unsigned char*)r->config.channel_base + r->layout.results);
  result->tail = 1000;
  CHECK_EQ(clb_engine_turn(r->engine, &worked), CLB_ERR_INTERNAL);
  rig_close(r);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(greedy_request_ends_by_length),
                                   TEST(stop_id_ends_request),
                                   TEST(no_output_asked_for),
                                   TEST(close_cancels_one_request),
                                   TEST(full_record_ring_sits_out),
                                   TEST(mask_is_waited_for),
                                   TEST(kv_tier_is_waited_for),
                                   TEST(a_held_run_is_in_the_way),
                                   TEST(a_prefix_without_room_beside_it_is_given_up),
                                   TEST(bad_request_blocks_fail_alone),
                                   TEST(commands_out_of_place),
                                   TEST(expert_capacity_is_accounted),
                                   TEST(more_experts_are_asked_for_by_name),
                                   TEST(flooded_event_ring_is_a_fault),
                                   TEST(impossible_read_index_is_a_fault)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
