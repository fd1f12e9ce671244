/* Routing against a naive reference on biased random input, and the promises of routing.h one by one. */
#include "routing.h"

#include "exact_math.h"
#include "test.h"

#define TOKENS 96u
#define EXPERTS 512u /* = CLB_MAX_EXPERTS */
#define K 16u

typedef struct board {
  float logits[TOKENS * EXPERTS];
  clb_expert_policy policies[TOKENS];
  uint32_t indices[TOKENS * K];
  float weights[TOKENS * K];
  uint32_t kept[TOKENS];
  uint32_t trimmed[TOKENS];
  uint32_t dropped[TOKENS];
  int32_t status[TOKENS];
  uint32_t counts[EXPERTS];
  uint32_t offsets[EXPERTS + 1u];
  uint32_t token_list[TOKENS * K];
  uint32_t place_list[TOKENS * K];
  clb_layer_desc layer;
} board;

static clb_routing_args args_of(board* b, uint32_t tokens, uint32_t k_max) {
  const clb_routing_args args = {.logits = b->logits,
                                 .layer = &b->layer,
                                 .policies = b->policies,
                                 .indices = b->indices,
                                 .weights = b->weights,
                                 .kept = b->kept,
                                 .trimmed = b->trimmed,
                                 .dropped = b->dropped,
                                 .status = b->status,
                                 .counts = b->counts,
                                 .offsets = b->offsets,
                                 .token_list = b->token_list,
                                 .place_list = b->place_list,
                                 .logits_stride = b->layer.experts,
                                 .tokens = tokens,
                                 .k_max = k_max};
  return args;
}

static float uniform(uint64_t* seed) { return (float)(clb_test_random(seed) >> 40) * 0x1p-24f; }

/* Random layer, policies and logits; few distinct values, so that ties are common. */
static clb_routing_args random_board(board* b, uint64_t* seed) {
  memset(b, 0xee, sizeof *b);
  memset(&b->layer, 0, sizeof b->layer);
  b->layer.experts = 1u + (uint32_t)(clb_test_random(seed) % (clb_test_random(seed) % 4 == 0 ? EXPERTS : 80u));
  const uint32_t k_most = b->layer.experts < K ? b->layer.experts : K;
  b->layer.experts_per_token = 1u + (uint32_t)(clb_test_random(seed) % k_most);
  b->layer.score = clb_test_random(seed) % 2 ? CLB_SCORE_SIGMOID : CLB_SCORE_SOFTMAX;
  b->layer.renormalise = clb_test_random(seed) % 2;
  b->layer.routed_scale = clb_test_random(seed) % 2 ? 1.0f : 2.5f;
  const uint32_t k_max =
      b->layer.experts_per_token + (uint32_t)(clb_test_random(seed) % (K + 1u - b->layer.experts_per_token));
  const uint32_t tokens = (uint32_t)(clb_test_random(seed) % (TOKENS + 1u));
  const float scale = clb_test_random(seed) % 4 == 0 ? 40.0f : 4.0f;
  const int coarse = clb_test_random(seed) % 2 == 0;
  for (uint32_t i = 0; i < tokens * b->layer.experts; ++i) {
    const float value = (uniform(seed) - 0.5f) * scale;
    b->logits[i] = coarse ? floorf(value) : value;
  }
  for (uint32_t t = 0; t < tokens; ++t) {
    const uint32_t limit = k_max < b->layer.experts ? k_max : b->layer.experts;
    b->policies[t].k = (uint32_t)(clb_test_random(seed) % (limit + 1u));
    b->policies[t].threshold = clb_test_random(seed) % 2 ? 0.0f : uniform(seed);
  }
  return args_of(b, tokens, k_max);
}

/* Does expert a come before b for this token? */
static int before(const float* logits, uint32_t a, uint32_t b) {
  return logits[a] > logits[b] || (!(logits[a] < logits[b]) && a < b);
}

static double score(const board* b, const float* logits, uint32_t e) {
  if (b->layer.score == CLB_SCORE_SIGMOID) return 1.0 / (1.0 + exp(-(double)logits[e]));
  float top = logits[0];
  double sum = 0.0;
  for (uint32_t i = 1; i < b->layer.experts; ++i)
    top = logits[i] > top ? logits[i] : top;
  for (uint32_t i = 0; i < b->layer.experts; ++i)
    sum += exp((double)logits[i] - (double)top);
  return exp((double)logits[e] - (double)top) / sum;
}

/* One token by counting who comes before whom, scores in double. */
static void check_token(const clb_routing_args* args, const board* b, uint32_t t) {
  const float* logits = b->logits + (size_t)t * b->layer.experts;
  const uint32_t k = b->policies[t].k != 0 ? b->policies[t].k : b->layer.experts_per_token;
  const uint32_t* indices = b->indices + (size_t)t * args->k_max;
  const float* weights = b->weights + (size_t)t * args->k_max;
  CHECK_EQ(b->status[t], CLB_OK);
  CHECK(b->kept[t] >= 1 && b->kept[t] <= k);
  double sum = 0.0;
  for (uint32_t rank = 0; rank < b->kept[t]; ++rank)
    sum += score(b, logits, indices[rank]);
  for (uint32_t rank = 0; rank < args->k_max; ++rank) {
    if (rank >= b->kept[t]) {
      CHECK_EQ(indices[rank], CLB_ROUTING_NONE);
      CHECK(weights[rank] == 0.0f);
      continue;
    }
    uint32_t ahead = 0;
    for (uint32_t e = 0; e < b->layer.experts; ++e)
      ahead += before(logits, e, indices[rank]) ? 1u : 0u;
    CHECK_EQ(ahead, rank);
    const double weight = score(b, logits, indices[rank]) / (b->layer.renormalise ? sum : 1.0);
    CHECK_NEAR(weights[rank], weight * (double)b->layer.routed_scale, 2e-6);
  }
  const double largest = score(b, logits, indices[0]);
  const double border = (double)b->policies[t].threshold * largest;
  if (b->kept[t] > 1) CHECK(score(b, logits, indices[b->kept[t] - 1u]) >= border * (1.0 - 1e-5));
  if (b->kept[t] < k) {
    CHECK(border > 0.0);
    for (uint32_t e = 0; e < b->layer.experts; ++e) {
      int chosen = 0;
      for (uint32_t rank = 0; rank < b->kept[t]; ++rank)
        chosen |= indices[rank] == e;
      if (!chosen) CHECK(score(b, logits, e) < border * (1.0 + 1e-5));
    }
  }
  const uint32_t own = b->layer.experts_per_token;
  CHECK_EQ(b->trimmed[t], own > b->kept[t] ? own - b->kept[t] : 0);
}

/* Buckets hold each remaining assignment once, by expert, then token. */
static void check_buckets(const clb_routing_args* args, const board* b) {
  uint32_t at = 0;
  for (uint32_t e = 0; e < b->layer.experts; ++e) {
    CHECK_EQ(b->offsets[e], at);
    for (uint32_t t = 0; t < args->tokens; ++t) {
      for (uint32_t rank = 0; rank < b->kept[t]; ++rank) {
        if (b->indices[t * args->k_max + rank] != e) continue;
        CHECK_EQ(b->token_list[at], t);
        CHECK_EQ(b->place_list[at], t * args->k_max + rank);
        ++at;
      }
    }
    CHECK_EQ(b->counts[e], at - b->offsets[e]);
  }
  CHECK_EQ(b->offsets[b->layer.experts], at);
}

/* Selection, weights, trimming and buckets agree with counting, for random layers and policies with many ties. */
static void random_boards_match_the_reference(void) {
  static board b;
  uint64_t seed = 11;
  const int boards = getenv("CLB_TEST_SHORT") != NULL ? 15 : 200;
  for (int i = 0; i < boards; ++i) {
    const clb_routing_args args = random_board(&b, &seed);
    clb_routing_run(&args);
    for (uint32_t t = 0; t < args.tokens; ++t) {
      check_token(&args, &b, t);
      CHECK_EQ(b.dropped[t], 0);
    }
    check_buckets(&args, &b);
  }
}

/* With a limit, an expert keeps the assignments of largest weight, ties to the earlier token, and counts the rest. */
static void limit_keeps_the_largest_weights(void) {
  static board b;
  static board free_of_limit;
  uint64_t seed = 13;
  const int boards = getenv("CLB_TEST_SHORT") != NULL ? 15 : 200;
  for (int i = 0; i < boards; ++i) {
    clb_routing_args args = random_board(&b, &seed);
    clb_routing_run(&args);
    memcpy(&free_of_limit, &b, sizeof b);
    const uint32_t limit = 1u + (uint32_t)(clb_test_random(&seed) % 6u);
    args.max_tokens_per_expert = limit;
    clb_routing_run(&args);
    check_buckets(&args, &b);
    uint32_t dropped[TOKENS] = {0};
    for (uint32_t at = 0; at < free_of_limit.offsets[b.layer.experts]; ++at) {
      const uint32_t place = free_of_limit.place_list[at];
      const uint32_t e = free_of_limit.indices[place];
      const float weight = free_of_limit.weights[place];
      uint32_t ahead = 0;
      for (uint32_t other = free_of_limit.offsets[e]; other < free_of_limit.offsets[e + 1u]; ++other) {
        const float theirs = free_of_limit.weights[free_of_limit.place_list[other]];
        ahead += theirs > weight || (!(theirs < weight) && other < at) ? 1u : 0u;
      }
      const int stays = ahead < limit;
      CHECK_EQ(b.indices[place], stays ? e : CLB_ROUTING_NONE);
      CHECK(stays ? memcmp(&b.weights[place], &weight, 4) == 0 : b.weights[place] == 0.0f);
      dropped[place / args.k_max] += stays ? 0u : 1u;
    }
    for (uint32_t t = 0; t < args.tokens; ++t) {
      CHECK_EQ(b.dropped[t], dropped[t]);
      CHECK_EQ(b.kept[t], free_of_limit.kept[t]);
      CHECK_EQ(b.trimmed[t], free_of_limit.trimmed[t]);
    }
  }
}

/* The example in routing.h. */
static void example_of_the_header(void) {
  static board b;
  memset(&b, 0, sizeof b);
  b.layer = (clb_layer_desc){.experts = 4, .experts_per_token = 2, .renormalise = 1, .routed_scale = 1.0f};
  const float logits[8] = {0, 2, 1, 3, 2, 3, 0, 1};
  memcpy(b.logits, logits, sizeof logits);
  const clb_routing_args args = args_of(&b, 2, 2);
  clb_routing_run(&args);
  const uint32_t indices[4] = {3, 1, 1, 0};
  const uint32_t offsets[5] = {0, 1, 3, 3, 4};
  const uint32_t tokens[4] = {1, 0, 1, 0};
  const uint32_t places[4] = {3, 1, 2, 0};
  CHECK(memcmp(b.indices, indices, sizeof indices) == 0);
  CHECK(memcmp(b.offsets, offsets, sizeof offsets) == 0);
  CHECK(memcmp(b.token_list, tokens, sizeof tokens) == 0);
  CHECK(memcmp(b.place_list, places, sizeof places) == 0);
  CHECK_NEAR(b.weights[0], 1.0 / (1.0 + exp(-1.0)), 1e-6);
}

/* k and threshold mean what the checkpoint does with a smaller num_experts_per_tok: equal bits. */
static void policy_k_equals_a_smaller_checkpoint_k(void) {
  static board a;
  static board b;
  uint64_t seed = 17;
  for (int i = 0; i < 50; ++i) {
    clb_routing_args args = random_board(&a, &seed);
    const uint32_t k = 1u + (uint32_t)(clb_test_random(&seed) % a.layer.experts_per_token);
    for (uint32_t t = 0; t < args.tokens; ++t)
      a.policies[t] = (clb_expert_policy){.k = k};
    memcpy(&b, &a, sizeof a);
    b.layer.experts_per_token = k;
    for (uint32_t t = 0; t < args.tokens; ++t)
      b.policies[t].k = 0;
    const clb_routing_args other = args_of(&b, args.tokens, args.k_max);
    clb_routing_run(&args);
    clb_routing_run(&other);
    CHECK(memcmp(a.weights, b.weights, sizeof a.weights) == 0);
    CHECK(memcmp(a.indices, b.indices, sizeof a.indices) == 0);
    CHECK(memcmp(a.place_list, b.place_list, sizeof a.place_list) == 0);
  }
}

/* A token's row has the same bits alone as in company. */
static void rows_are_independent(void) {
  static board b;
  static board alone;
  uint64_t seed = 19;
  for (int i = 0; i < 50; ++i) {
    const clb_routing_args args = random_board(&b, &seed);
    clb_routing_run(&args);
    for (uint32_t t = 0; t < args.tokens; t += 7) {
      memset(&alone, 0, sizeof alone);
      alone.layer = b.layer;
      alone.policies[0] = b.policies[t];
      memcpy(alone.logits, b.logits + (size_t)t * b.layer.experts, b.layer.experts * sizeof(float));
      const clb_routing_args one = args_of(&alone, 1, args.k_max);
      clb_routing_run(&one);
      CHECK(memcmp(alone.weights, b.weights + t * args.k_max, args.k_max * sizeof(float)) == 0);
      CHECK(memcmp(alone.indices, b.indices + t * args.k_max, args.k_max * sizeof(uint32_t)) == 0);
    }
  }
}

/* A token with NaN or infinity gets a status and no expert; its neighbours keep their bits. */
static void bad_logits_harm_one_token_only(void) {
  static board good;
  static board bad;
  const float values[] = {NAN, INFINITY, -INFINITY};
  uint64_t seed = 23;
  for (int i = 0; i < 30; ++i) {
    clb_routing_args args = random_board(&good, &seed);
    if (args.tokens < 3) continue;
    memcpy(&bad, &good, sizeof good);
    const uint32_t victim = (uint32_t)(clb_test_random(&seed) % args.tokens);
    const uint32_t where = (uint32_t)(clb_test_random(&seed) % good.layer.experts);
    bad.logits[victim * good.layer.experts + where] = values[i % 3];
    const clb_routing_args other = args_of(&bad, args.tokens, args.k_max);
    clb_routing_run(&args);
    clb_routing_run(&other);
    check_buckets(&other, &bad);
    for (uint32_t t = 0; t < args.tokens; ++t) {
      const size_t row = (size_t)t * args.k_max;
      if (t == victim) {
        CHECK_EQ(bad.status[t], CLB_ERR_NOT_FINITE);
        CHECK_EQ(bad.kept[t], 0);
        CHECK_EQ(bad.indices[row], CLB_ROUTING_NONE);
        continue;
      }
      CHECK_EQ(bad.status[t], CLB_OK);
      CHECK(memcmp(&bad.weights[row], &good.weights[row], args.k_max * sizeof(float)) == 0);
      CHECK(memcmp(&bad.indices[row], &good.indices[row], args.k_max * sizeof(uint32_t)) == 0);
    }
  }
}

/* However the large logits lie, all of them are found: first, last, in one column of the search, among equals. */
static void places_of_the_best_do_not_matter(void) {
  static board b;
  const uint32_t strides[] = {1, 2, 4, 8, 16, 32};
  memset(&b, 0, sizeof b);
  for (uint32_t experts = 16; experts <= EXPERTS; experts += 31) {
    b.layer = (clb_layer_desc){.experts = experts, .experts_per_token = 8, .renormalise = 1, .routed_scale = 1.0f};
    for (uint32_t t = 0; t < 12; ++t) {
      const uint32_t stride = strides[t % 6u] * 8u <= experts ? strides[t % 6u] : 1u;
      float* logits = b.logits + (size_t)t * experts;
      for (uint32_t e = 0; e < experts; ++e)
        logits[e] = -1.0f;
      for (uint32_t i = 0; i < 8; ++i)
        logits[t < 6 ? i * stride : experts - 1u - i * stride] = 1.0f + (float)(i / 2u);
    }
    const clb_routing_args args = args_of(&b, 12, 8);
    clb_routing_run(&args);
    for (uint32_t t = 0; t < args.tokens; ++t)
      check_token(&args, &b, t);
  }
}

/* Equal logits go to the lowest experts, largest finite logits give finite weights, threshold 1 keeps only ties. */
static void extremes_are_finite(void) {
  static board b;
  memset(&b, 0, sizeof b);
  b.layer = (clb_layer_desc){.experts = 8, .experts_per_token = 4, .renormalise = 0, .routed_scale = 1.0f};
  const float big = 3.4e38f;
  for (uint32_t e = 0; e < 8; ++e) {
    b.logits[e] = 5.0f;
    b.logits[8 + e] = e == 6 ? big : -big;
    b.logits[16 + e] = e == 2 || e == 5 ? 1.0f : 0.99f;
  }
  b.policies[2].threshold = 1.0f;
  for (uint32_t scoring = 0; scoring < 2; ++scoring) {
    b.layer.score = scoring;
    const clb_routing_args args = args_of(&b, 3, 4);
    clb_routing_run(&args);
    for (uint32_t rank = 0; rank < 4; ++rank)
      CHECK_EQ(b.indices[rank], rank);
    CHECK_EQ(b.indices[4], 6);
    CHECK_EQ(b.indices[5], 0);
    CHECK_EQ(b.kept[2], 2);
    CHECK_EQ(b.indices[8], 2);
    CHECK_EQ(b.indices[9], 5);
    CHECK_EQ(b.trimmed[2], 2);
    for (uint32_t i = 0; i < 12; ++i)
      CHECK(isfinite(b.weights[i]));
  }
}

/* exp and sigmoid of the router stay within 2 ulp of the exact value over the range that matters. */
static void exact_math_is_accurate(void) {
  uint64_t seed = 29;
  for (int i = 0; i < 20000; ++i) {
    const float x = (uniform(&seed) - 0.5f) * 170.0f;
    const double expected = exp((double)x);
    CHECK_NEAR(clb_exact_exp(x), expected, expected * 2.4e-7);
    const double sigmoid = 1.0 / (1.0 + exp(-(double)x));
    CHECK_NEAR(clb_exact_sigmoid(x), sigmoid, sigmoid * 4e-7);
  }
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(random_boards_match_the_reference),
                                   TEST(limit_keeps_the_largest_weights),
                                   TEST(example_of_the_header),
                                   TEST(policy_k_equals_a_smaller_checkpoint_k),
                                   TEST(rows_are_independent),
                                   TEST(bad_logits_harm_one_token_only),
                                   TEST(places_of_the_best_do_not_matter),
                                   TEST(extremes_are_finite),
                                   TEST(exact_math_is_accurate)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
