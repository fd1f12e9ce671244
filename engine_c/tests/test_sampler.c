/* Sampler: exact small cases, a naive sorted reference on random input, chi-square of draws, extremes, determinism. */
#include "sampler.h"

#include <float.h>

#include "test.h"

#define VOCAB 777u

static _Alignas(64) unsigned char scratch[1 << 16];
static const clb_request plain = {.temperature = 1.0f, .top_p = 1.0f, .repetition_penalty = 1.0f};

static clb_sampler_args args_of(const float* logits, uint32_t vocab, const clb_request* request) {
  const clb_sampler_args args = {.logits = logits, .request = request, .scratch = scratch, .vocab = vocab};
  return args;
}

static int32_t sample(const clb_sampler_args* args) {
  clb_record record;
  CHECK_EQ(clb_sampler_run(args, &record), CLB_OK);
  CHECK_EQ(record.position, args->position);
  return record.token;
}

static float uniform(uint64_t* seed) { return (float)(clb_test_random(seed) >> 40) * 0x1p-24f; }

static void random_logits(float* logits, uint32_t vocab, int coarse, uint64_t* seed) {
  for (uint32_t i = 0; i < vocab; ++i) {
    const float value = (uniform(seed) - 0.5f) * 16.0f;
    logits[i] = coarse ? floorf(value) : value;
  }
}

/* The generator gives the published answers of Philox4x32-10. */
static void philox_known_answers(void) {
  const uint32_t zeros[4] = {0, 0, 0, 0};
  const uint32_t ones[4] = {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX};
  const uint32_t pi[4] = {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u};
  const uint32_t expected[3][4] = {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u},
                                   {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu},
                                   {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}};
  uint32_t words[4];
  clb_philox(0, zeros, words);
  CHECK(memcmp(words, expected[0], sizeof words) == 0);
  clb_philox(UINT64_MAX, ones, words);
  CHECK(memcmp(words, expected[1], sizeof words) == 0);
  clb_philox(0x299f31d0a4093822u, pi, words);
  CHECK(memcmp(words, expected[2], sizeof words) == 0);
}

/* Temperature 0 takes the largest logit, the lowest id of equals, whatever the other settings are. */
static void zero_temperature_is_argmax(void) {
  const float logits[6] = {1, 3, 2, 3, -1, 3};
  clb_request request = plain;
  request.temperature = 0.0f;
  request.top_p = 0.1f;
  request.top_k = 2;
  clb_sampler_args args = args_of(logits, 6, &request);
  for (args.position = 0; args.position < 20; ++args.position)
    CHECK_EQ(sample(&args), 1);
}

/* What top-k, top-p and min-p leave, by sorting, in the sampler's own order. 1 = kept. */
static void keep_by_sorting(const float* logits, uint32_t vocab, const clb_request* request, unsigned char* kept) {
  static uint32_t order[VOCAB];
  for (uint32_t i = 0; i < vocab; ++i) {
    uint32_t at = i;
    for (; at > 0 && logits[order[at - 1u]] < logits[i]; --at)
      order[at] = order[at - 1u];
    order[at] = i;
  }
  const double top = (double)logits[order[0]];
  const uint32_t k = request->top_k > 0 && request->top_k < vocab ? request->top_k : vocab;
  double whole = 0.0;
  double sum = 0.0;
  memset(kept, 0, vocab);
  for (uint32_t i = 0; i < k; ++i)
    whole += exp(((double)logits[order[i]] - top) / (double)request->temperature);
  for (uint32_t i = 0; i < k; ++i) {
    const double mass = exp(((double)logits[order[i]] - top) / (double)request->temperature);
    if (sum >= (double)request->top_p * whole - 1e-9 * whole) break;
    if (mass >= (double)request->min_p) kept[order[i]] = 1;
    sum += mass;
  }
}

/* Every drawn token lies among those that sorting keeps, and each likely one of them is drawn. */
static void filters_match_sorting(void) {
  static float logits[VOCAB];
  static unsigned char kept[VOCAB];
  static unsigned char drawn[VOCAB];
  uint64_t seed = 3;
  const int rounds = getenv("CLB_TEST_SHORT") != NULL ? 8 : 60;
  for (int round = 0; round < rounds; ++round) {
    const uint32_t vocab = 1u + (uint32_t)(clb_test_random(&seed) % 40u);
    clb_request request = plain;
    request.temperature = 0.5f + 4.0f * uniform(&seed);
    request.top_k = clb_test_random(&seed) % 2 ? (uint32_t)(clb_test_random(&seed) % 12u) : 0;
    request.top_p = clb_test_random(&seed) % 2 ? 0.05f + 0.9f * uniform(&seed) : 1.0f;
    request.min_p = clb_test_random(&seed) % 2 ? 0.3f * uniform(&seed) : 0.0f;
    request.seed = clb_test_random(&seed);
    random_logits(logits, vocab, round % 2, &seed);
    keep_by_sorting(logits, vocab, &request, kept);
    memset(drawn, 0, sizeof drawn);
    clb_sampler_args args = args_of(logits, vocab, &request);
    for (args.position = 0; args.position < 3000; ++args.position)
      drawn[sample(&args)] = 1;
    float top = logits[0];
    for (uint32_t i = 1; i < vocab; ++i)
      top = logits[i] > top ? logits[i] : top;
    for (uint32_t i = 0; i < vocab; ++i) {
      CHECK(!drawn[i] || kept[i]);
      const double share = exp((double)(logits[i] - top) / (double)request.temperature);
      if (kept[i] && share > 0.3) CHECK(drawn[i]);
    }
  }
}

/* Draws follow the softmax: chi-square over 12 tokens stays below the 0.999 quantile for fixed seeds. */
static void draws_follow_the_softmax(void) {
  const float logits[12] = {0.1f, 2.0f, -1.0f, 0.5f, 1.5f, 1.5f, -2.0f, 0.0f, 0.7f, 1.1f, -0.4f, 0.2f};
  const float temperatures[3] = {0.7f, 1.0f, 3.0f};
  for (int t = 0; t < 3; ++t) {
    clb_request request = plain;
    request.temperature = temperatures[t];
    request.seed = 1234u + (uint64_t)t;
    double counts[12] = {0};
    double sum = 0.0;
    double chi = 0.0;
    const uint32_t draws = 20000;
    clb_sampler_args args = args_of(logits, 12, &request);
    for (args.position = 0; args.position < draws; ++args.position)
      counts[sample(&args)] += 1.0;
    for (int i = 0; i < 12; ++i)
      sum += exp((double)logits[i] / (double)request.temperature);
    for (int i = 0; i < 12; ++i) {
      const double expected = draws * exp((double)logits[i] / (double)request.temperature) / sum;
      chi += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    CHECK(chi < 31.26); /* 11 degrees of freedom */
  }
}

/* The draw depends on seed, choice and position, and on nothing else: the same call gives the same token. */
static void draws_are_keyed(void) {
  static float logits[VOCAB];
  uint64_t seed = 5;
  random_logits(logits, VOCAB, 0, &seed);
  clb_request request = plain;
  request.temperature = 5.0f;
  int32_t first[32];
  clb_sampler_args args = args_of(logits, VOCAB, &request);
  for (args.position = 0; args.position < 32; ++args.position)
    first[args.position] = sample(&args);
  unsigned other_seed = 0;
  unsigned other_choice = 0;
  unsigned other_position = 0;
  for (args.position = 0; args.position < 32; ++args.position) {
    memset(scratch, (int)args.position, sizeof scratch);
    CHECK_EQ(sample(&args), first[args.position]);
    other_position += first[args.position] != first[0];
    request.seed = 1;
    other_seed += sample(&args) != first[args.position];
    request.seed = 0;
    request.choice = 1;
    other_choice += sample(&args) != first[args.position];
    request.choice = 0;
  }
  CHECK(other_seed > 25 && other_choice > 25 && other_position > 25);
}

/* A seed gives the same tokens on every machine and with every compiler: exp is our own, sums have one order. */
static void draws_are_the_same_everywhere(void) {
  static float logits[100];
  const int32_t expected[12] = {51, 84, 79, 65, 19, 2, 16, 21, 5, 30, 90, 46};
  clb_request request = {.temperature = 1.5f, .top_p = 0.9f, .top_k = 50, .repetition_penalty = 1.0f, .seed = 20261129};
  for (uint32_t i = 0; i < 100; ++i)
    logits[i] = (float)(i * 37u % 101u) * 0.0625f;
  clb_sampler_args args = args_of(logits, 100, &request);
  for (args.position = 0; args.position < 12; ++args.position)
    CHECK_EQ(sample(&args), expected[args.position]);
}

/* Penalties by hand: repetition over prompt and output, frequency and presence over output only. */
static void penalties_change_what_wins(void) {
  uint32_t counts[5];
  const int32_t prompt[3] = {0, 3, 99};
  const float logits[5] = {4.0f, 3.5f, 3.0f, -1.0f, -0.5f};
  clb_request request = plain;
  request.temperature = 0.0f;
  clb_sampler_reset(counts, 5, prompt, 3);
  clb_sampler_count(counts, 5, 1);
  clb_sampler_count(counts, 5, 1);
  clb_sampler_count(counts, 5, 5);
  clb_sampler_count(counts, 5, -1);
  CHECK_EQ(counts[0], CLB_COUNT_PROMPT);
  CHECK_EQ(counts[1], 2);
  clb_sampler_args args = args_of(logits, 5, &request);
  CHECK(!clb_sampler_needs_counts(&request));
  CHECK_EQ(sample(&args), 0);
  args.counts = counts;
  request.repetition_penalty = 1.2f; /* 3.33 2.92 3 -1.2 -0.5 */
  CHECK(clb_sampler_needs_counts(&request));
  CHECK_EQ(sample(&args), 0);
  request.repetition_penalty = 2.0f; /* 2 1.75 3 -2 -0.5 */
  CHECK_EQ(sample(&args), 2);
  request.repetition_penalty = 1.0f;
  request.frequency_penalty = -0.3f; /* 4 4.1 */
  CHECK_EQ(sample(&args), 1);
  request.frequency_penalty = 0.0f;
  request.presence_penalty = -0.6f; /* 4 4.1: the prompt does not count */
  CHECK_EQ(sample(&args), 1);
  request.presence_penalty = -0.4f;
  CHECK_EQ(sample(&args), 0);
  request.presence_penalty = 0.0f;
  counts[2] = UINT32_MAX; /* saturated */
  clb_sampler_count(counts, 5, 2);
  CHECK_EQ(counts[2], UINT32_MAX);
}

/* A negative logit is multiplied by the repetition penalty: it becomes less likely too. */
static void repetition_lowers_negative_logits(void) {
  const float logits[2] = {-1.0f, -1.5f};
  const uint32_t counts[2] = {CLB_COUNT_PROMPT, 0};
  clb_request request = plain;
  request.temperature = 0.0f;
  request.repetition_penalty = 2.0f;
  clb_sampler_args args = args_of(logits, 2, &request);
  args.counts = counts;
  CHECK_EQ(sample(&args), 1);
}

/* Bias moves tokens, adds up over entries, and bias of -100 on every id changes nothing. */
static void bias_is_added(void) {
  const float logits[4] = {1, 2, 3, 4};
  clb_bias bias[4] = {{0, 2.0f}, {0, 2.0f}, {3, -5.0f}, {1, 0.5f}};
  clb_request request = plain;
  request.temperature = 0.0f;
  request.bias_count = 4;
  clb_sampler_args args = args_of(logits, 4, &request);
  args.bias = bias;
  CHECK_EQ(sample(&args), 0);
  for (int i = 0; i < 4; ++i)
    bias[i] = (clb_bias){i, -100.0f};
  CHECK_EQ(sample(&args), 3);
  request.temperature = 1.0f;
  for (args.position = 0; args.position < 50; ++args.position)
    (void)sample(&args);
}

/* Stop ids are out of reach before min_tokens and reachable from then on. */
static void stops_wait_for_min_tokens(void) {
  const float logits[4] = {1, 2, 3, 4};
  const int32_t stops[2] = {3, 2};
  clb_request request = plain;
  request.temperature = 0.0f;
  request.stop_count = 2;
  request.min_tokens = 2;
  clb_sampler_args args = args_of(logits, 4, &request);
  args.stops = stops;
  CHECK_EQ(sample(&args), 1);
  args.position = 1;
  CHECK_EQ(sample(&args), 1);
  args.position = 2;
  CHECK_EQ(sample(&args), 3);
}

/* Only ids of the mask are drawn; a mask and bans that leave nothing are NO_TOKEN with an empty record. */
static void mask_bans_and_no_token(void) {
  static float logits[70];
  uint32_t mask[3] = {0, 1u << 3, 1u << 5};
  const int32_t stops[1] = {69};
  clb_request request = plain;
  clb_record record;
  clb_sampler_args args = args_of(logits, 70, &request);
  args.mask = mask;
  unsigned seen[2] = {0, 0};
  for (args.position = 0; args.position < 100; ++args.position) {
    const int32_t token = sample(&args);
    CHECK(token == 35 || token == 69);
    ++seen[token == 69];
  }
  CHECK(seen[0] > 20 && seen[1] > 20);
  request.stop_count = 1;
  request.min_tokens = 1000;
  args.stops = stops;
  CHECK_EQ(sample(&args), 35);
  mask[1] = 0;
  for (int greedy = 0; greedy < 2; ++greedy) {
    request.temperature = greedy ? 0.0f : 1.0f;
    memset(&record, 1, sizeof record);
    CHECK_EQ(clb_sampler_run(&args, &record), CLB_ERR_NO_TOKEN);
    CHECK_EQ(record.token, 0);
  }
}

/* NaN and infinite logits are NOT_FINITE, wherever they stand, even where they are banned. */
static void bad_logits_are_not_finite(void) {
  float logits[5] = {0, 1, 2, 3, 4};
  const float values[] = {NAN, INFINITY, -INFINITY};
  clb_record record;
  clb_prompt_record prompt;
  for (int v = 0; v < 3; ++v) {
    for (int i = 0; i < 5; ++i) {
      const float was = logits[i];
      logits[i] = values[v];
      const clb_sampler_args args = args_of(logits, 5, &plain);
      CHECK_EQ(clb_sampler_run(&args, &record), CLB_ERR_NOT_FINITE);
      CHECK_EQ(clb_sampler_prompt(logits, 5, 0, 3, &prompt), CLB_ERR_NOT_FINITE);
      CHECK(isnan(prompt.logprob) && prompt.top_count == 0);
      logits[i] = was;
    }
  }
}

/* Enormous temperatures are uniform, tiny ones are argmax, enormous logits and penalties stay finite. */
static void extremes_stay_defined(void) {
  float logits[8] = {FLT_MAX, -FLT_MAX, 0, 1, 2, FLT_MAX, -1, 5};
  const uint32_t counts[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  clb_request request = plain;
  clb_sampler_args args = args_of(logits, 8, &request);
  args.counts = counts;
  request.temperature = 1e-38f;
  for (args.position = 0; args.position < 20; ++args.position) {
    const int32_t token = sample(&args);
    CHECK(token == 0 || token == 5);
  }
  request.repetition_penalty = 1e-30f; /* positive logits saturate: ids 0, 3, 4, 5 and 7 tie */
  request.temperature = 0.0f;
  CHECK_EQ(sample(&args), 0);
  request = plain;
  request.temperature = 1e30f;
  for (int i = 0; i < 8; ++i)
    logits[i] = (float)i * 10.0f;
  unsigned seen[8] = {0};
  for (args.position = 0; args.position < 800; ++args.position)
    ++seen[sample(&args)];
  for (int i = 0; i < 8; ++i)
    CHECK(seen[i] > 60 && seen[i] < 140);
  request.top_k = 3; /* the order survives the temperature */
  for (args.position = 0; args.position < 50; ++args.position)
    CHECK(sample(&args) >= 5);
  request.top_k = UINT32_MAX;
  request.top_p = FLT_MIN;
  CHECK_EQ(sample(&args), 7);
  request.top_p = 1.0f;
  request.min_p = 1.0f;
  for (int i = 0; i < 8; ++i)
    logits[i] = 2.0f;
  memset(seen, 0, sizeof seen);
  for (args.position = 0; args.position < 800; ++args.position)
    ++seen[sample(&args)];
  for (int i = 0; i < 8; ++i)
    CHECK(seen[i] > 60);
}

/* Of equal values at the border, top-k and top-p keep the lowest ids. */
static void ties_at_the_border_keep_the_lowest_ids(void) {
  static float logits[100];
  clb_request request = plain;
  for (int i = 0; i < 100; ++i)
    logits[i] = i == 50 ? 1.0f : 0.0f;
  clb_sampler_args args = args_of(logits, 100, &request);
  request.top_k = 4;
  for (args.position = 0; args.position < 200; ++args.position) {
    const int32_t token = sample(&args);
    CHECK(token <= 2 || token == 50);
  }
  request.top_k = 0;
  request.top_p = (float)((exp(1.0) + 5.5) / (exp(1.0) + 99.0)); /* id 50 and half of the sixth tie: ids 0..5 */
  unsigned seen = 0;
  for (args.position = 0; args.position < 400; ++args.position) {
    const int32_t token = sample(&args);
    CHECK(token <= 5 || token == 50);
    seen |= token == 5;
  }
  CHECK(seen);
  request.top_k = 4; /* within top-k, top-p counts the remaining mass only */
  request.top_p = 0.999f;
  for (args.position = 0; args.position < 200; ++args.position) {
    const int32_t token = sample(&args);
    CHECK(token <= 2 || token == 50);
  }
}

/* Reported log-probabilities are those of the model's own logits, untouched by bias, temperature and mask. */
static void logprobs_are_the_models_own(void) {
  static float logits[VOCAB];
  const clb_bias bias[1] = {{5, 100.0f}};
  uint64_t seed = 9;
  random_logits(logits, VOCAB, 1, &seed);
  double sum = 0.0;
  for (uint32_t i = 0; i < VOCAB; ++i)
    sum += exp((double)logits[i]);
  clb_request request = plain;
  request.temperature = 0.3f;
  request.bias_count = 1;
  request.flags = CLB_REQ_LOGPROBS;
  request.top_logprobs = CLB_MAX_TOP_LOGPROBS;
  clb_sampler_args args = args_of(logits, VOCAB, &request);
  args.bias = bias;
  clb_record record;
  CHECK_EQ(clb_sampler_run(&args, &record), CLB_OK);
  CHECK_EQ(record.token, 5);
  CHECK_NEAR(record.logprob, (double)logits[5] - log(sum), 1e-5);
  CHECK_EQ(record.top_count, CLB_MAX_TOP_LOGPROBS);
  clb_prompt_record prompt;
  CHECK_EQ(clb_sampler_prompt(logits, VOCAB, 5, 20, &prompt), CLB_OK);
  CHECK(memcmp(&prompt.logprob, &record.logprob, sizeof(float)) == 0);
  CHECK(memcmp(prompt.top_ids, record.top_ids, sizeof prompt.top_ids) == 0);
  for (uint32_t rank = 0; rank < 20; ++rank) {
    const int32_t id = record.top_ids[rank];
    uint32_t ahead = 0;
    for (int32_t i = 0; i < (int32_t)VOCAB; ++i) {
      ahead += logits[i] > logits[id] || (!(logits[i] < logits[id]) && i < id) ? 1u : 0u;
    }
    CHECK_EQ(ahead, rank);
    CHECK_NEAR(record.top_logprobs[rank], (double)logits[id] - log(sum), 1e-5);
  }
  request.flags = 0;
  CHECK_EQ(clb_sampler_run(&args, &record), CLB_OK);
  CHECK(isnan(record.logprob) && record.top_count == 0);
}

/* A top list is never longer than the vocabulary, and a token outside it is refused. */
static void prompt_limits(void) {
  const float logits[3] = {0, 1, 0};
  clb_prompt_record record;
  CHECK_EQ(clb_sampler_prompt(logits, 3, 1, 20, &record), CLB_OK);
  CHECK_EQ(record.top_count, 3);
  CHECK_EQ(record.top_ids[0], 1);
  CHECK_EQ(record.top_ids[1], 0);
  CHECK_EQ(clb_sampler_prompt(logits, 3, 3, 1, &record), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_sampler_prompt(logits, 3, -1, 1, &record), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_sampler_prompt(logits, 3, 0, 21, &record), CLB_ERR_ARGUMENT);
}

/* Every value out of its limits is refused on its own. */
static void check_refuses_each_bad_value(void) {
  const clb_bias bias[1] = {{4, 1.0f}};
  const int32_t stops[1] = {4};
  clb_request good = plain;
  good.bias_count = 1;
  good.stop_count = 1;
  CHECK_EQ(clb_sampler_check(&good, bias, stops, 5), CLB_OK);
  CHECK_EQ(clb_sampler_check(&good, bias, stops, 4), CLB_ERR_ARGUMENT);
  const struct {
    size_t offset;
    float value;
  } floats[] = {{offsetof(clb_request, temperature), -1},
                {offsetof(clb_request, temperature), NAN},
                {offsetof(clb_request, temperature), INFINITY},
                {offsetof(clb_request, top_p), 0},
                {offsetof(clb_request, top_p), 1.1f},
                {offsetof(clb_request, top_p), NAN},
                {offsetof(clb_request, min_p), -0.1f},
                {offsetof(clb_request, min_p), 1.1f},
                {offsetof(clb_request, min_p), NAN},
                {offsetof(clb_request, presence_penalty), NAN},
                {offsetof(clb_request, frequency_penalty), INFINITY},
                {offsetof(clb_request, repetition_penalty), 0},
                {offsetof(clb_request, repetition_penalty), -1},
                {offsetof(clb_request, repetition_penalty), NAN}};
  for (unsigned i = 0; i < sizeof floats / sizeof floats[0]; ++i) {
    clb_request bad = good;
    memcpy((char*)&bad + floats[i].offset, &floats[i].value, sizeof(float));
    CHECK_EQ(clb_sampler_check(&bad, bias, stops, 5), CLB_ERR_ARGUMENT);
  }
  const struct {
    size_t offset;
    uint32_t value;
  } counts[] = {{offsetof(clb_request, top_logprobs), CLB_MAX_TOP_LOGPROBS + 1u},
                {offsetof(clb_request, prompt_top_logprobs), CLB_MAX_TOP_LOGPROBS + 1u},
                {offsetof(clb_request, bias_count), CLB_MAX_BIAS + 1u},
                {offsetof(clb_request, stop_count), CLB_MAX_STOP_IDS + 1u}};
  for (unsigned i = 0; i < 4; ++i) {
    clb_request bad = good;
    memcpy((char*)&bad + counts[i].offset, &counts[i].value, sizeof(uint32_t));
    CHECK_EQ(clb_sampler_check(&bad, bias, stops, 5), CLB_ERR_ARGUMENT);
  }
  const clb_bias bad_bias[3] = {{-1, 0.0f}, {0, NAN}, {0, INFINITY}};
  for (int i = 0; i < 3; ++i)
    CHECK_EQ(clb_sampler_check(&good, &bad_bias[i], stops, 5), CLB_ERR_ARGUMENT);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(philox_known_answers),
                                   TEST(zero_temperature_is_argmax),
                                   TEST(filters_match_sorting),
                                   TEST(draws_follow_the_softmax),
                                   TEST(draws_are_keyed),
                                   TEST(draws_are_the_same_everywhere),
                                   TEST(penalties_change_what_wins),
                                   TEST(repetition_lowers_negative_logits),
                                   TEST(bias_is_added),
                                   TEST(stops_wait_for_min_tokens),
                                   TEST(mask_bans_and_no_token),
                                   TEST(bad_logits_are_not_finite),
                                   TEST(extremes_stay_defined),
                                   TEST(ties_at_the_border_keep_the_lowest_ids),
                                   TEST(logprobs_are_the_models_own),
                                   TEST(prompt_limits),
                                   TEST(check_refuses_each_bad_value)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
