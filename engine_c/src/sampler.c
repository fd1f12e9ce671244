/*
 * sampler.c: see sampler.h for the order of work and the draw.
 *
 * Owns nothing. Memory of one call, in scratch:
 *   | buckets: double[2048] | value: float[V] | id: uint32[V] | mass: float[V] | bin: uint32[V] |
 * The first three of size V are the candidates, in ascending id order and packed after every filter, so that later
 * passes are as short as the list; every sum and every tie goes by that order.
 */
#include "sampler.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "../cpu/float4.h"
#include "invariant.h"

#define DIGIT_BITS 11u /* 32 bits of a value = digits of 11, 11 and 10 bits */
#define BUCKETS ((uint32_t)1 << DIGIT_BITS)

uint64_t clb_sampler_scratch_bytes(uint32_t vocab) {
  return BUCKETS * sizeof(double) + (uint64_t)vocab * (2u * sizeof(float) + 2u * sizeof(uint32_t));
}

/* ----------------------------------------------------------------- philox */

static void philox_round(uint32_t counter[4], const uint32_t key[2]) {
  const uint64_t first = (uint64_t)0xd2511f53u * counter[0];
  const uint64_t second = (uint64_t)0xcd9e8d57u * counter[2];
  const uint32_t next[4] = {(uint32_t)(second >> 32) ^ counter[1] ^ key[0], (uint32_t)second,
                            (uint32_t)(first >> 32) ^ counter[3] ^ key[1], (uint32_t)first};
  (void)memcpy(counter, next, sizeof next);
}

void clb_philox(uint64_t key, const uint32_t counter[4], uint32_t output[4]) {
  uint32_t state[4] = {counter[0], counter[1], counter[2], counter[3]};
  uint32_t keys[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
  for (uint32_t round = 0; round < 10u; ++round) {
    philox_round(state, keys);
    keys[0] += 0x9e3779b9u;
    keys[1] += 0xbb67ae85u;
  }
  (void)memcpy(output, state, sizeof state);
}

/* A number in [0, 1) with 53 random bits. */
static double uniform(const clb_request* request, uint32_t position) {
  const uint32_t counter[4] = {request->choice, position, 0, 0};
  uint32_t words[4];
  clb_philox(request->seed, counter, words);
  const uint64_t bits = ((uint64_t)words[0] << 21) ^ ((uint64_t)words[1] >> 11);
  return (double)bits * 0x1p-53;
}

/* ------------------------------------------------------------------ checks */

int32_t clb_sampler_check(const clb_request* request, const clb_bias* bias, const int32_t* stops, uint32_t vocab) {
  CLB_ASSERT(request != NULL);
  if (!(isfinite(request->temperature) && request->temperature >= 0.0f)) {
    return CLB_ERR_ARGUMENT;
  }
  if (!(request->top_p > 0.0f && request->top_p <= 1.0f)) {
    return CLB_ERR_ARGUMENT;
  }
  if (!(request->min_p >= 0.0f && request->min_p <= 1.0f)) {
    return CLB_ERR_ARGUMENT;
  }
  if (!isfinite(request->presence_penalty) || !isfinite(request->frequency_penalty)) {
    return CLB_ERR_ARGUMENT;
  }
  if (!(isfinite(request->repetition_penalty) && request->repetition_penalty > 0.0f)) {
    return CLB_ERR_ARGUMENT;
  }
  if (request->top_logprobs > CLB_MAX_TOP_LOGPROBS) {
    return CLB_ERR_ARGUMENT;
  }
  if (request->prompt_top_logprobs > CLB_MAX_TOP_LOGPROBS) {
    return CLB_ERR_ARGUMENT;
  }
  if (request->bias_count > CLB_MAX_BIAS || request->stop_count > CLB_MAX_STOP_IDS) {
    return CLB_ERR_ARGUMENT;
  }
  for (uint32_t i = 0; i < request->bias_count; ++i) {
    if (bias[i].token < 0 || (uint32_t)bias[i].token >= vocab || !isfinite(bias[i].bias)) {
      return CLB_ERR_ARGUMENT;
    }
  }
  for (uint32_t i = 0; i < request->stop_count; ++i) {
    if (stops[i] < 0 || (uint32_t)stops[i] >= vocab) {
      return CLB_ERR_ARGUMENT;
    }
  }
  return CLB_OK;
}

bool clb_sampler_needs_counts(const clb_request* request) {
  const bool repetition = request->repetition_penalty < 1.0f || request->repetition_penalty > 1.0f;
  const bool presence = request->presence_penalty < 0.0f || request->presence_penalty > 0.0f;
  const bool frequency = request->frequency_penalty < 0.0f || request->frequency_penalty > 0.0f;
  return repetition || presence || frequency;
}

/* ------------------------------------------------------------------ counts */

void clb_sampler_reset(uint32_t* counts, uint32_t vocab, const int32_t* tokens, uint32_t token_count) {
  (void)memset(counts, 0, (size_t)vocab * sizeof *counts);
  for (uint32_t i = 0; i < token_count; ++i) {
    if (tokens[i] >= 0 && (uint32_t)tokens[i] < vocab) {
      counts[tokens[i]] = CLB_COUNT_PROMPT;
    }
  }
}

void clb_sampler_count(uint32_t* counts, uint32_t vocab, int32_t token) {
  if (token < 0 || (uint32_t)token >= vocab) {
    return;
  }
  if ((counts[token] & ~CLB_COUNT_PROMPT) < ~CLB_COUNT_PROMPT) {
    ++counts[token];
  }
}

/* ---------------------------------------------------------- log-softmax */

static bool all_finite(const float* logits, uint32_t vocab) {
  uint32_t bad = 0;
  for (uint32_t i = 0; i < vocab; ++i) {
    bad |= (clb_bits_of_float(logits[i]) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  }
  return bad == 0u;
}

/* The largest value that is not NaN; -infinity if there is none. */
static float largest_of(const float* value, uint32_t count) {
  float four[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  clb_float4 best = clb_float4_load(four);
  uint32_t i = 0;
  for (; i + 4u <= count; i += 4u) {
    best = clb_float4_max(clb_float4_load(value + i), best);
  }
  clb_float4_store(best, four);
  for (; i < count; ++i) {
    four[0] = value[i] > four[0] ? value[i] : four[0];
  }
  for (uint32_t l = 1; l < 4u; ++l) {
    four[0] = four[l] > four[0] ? four[l] : four[0];
  }
  return four[0];
}

/* exp(value[l] - largest), added to sums[l]. What is below exp(-87) is 0. */
static void exponentials_of_4(const float value[4], float largest, float mass[4], double sums[4]) {
  const clb_float4 below = clb_float4_load(value) - (clb_float4){largest, largest, largest, largest};
  const clb_float4 floor = {-100.0f, -100.0f, -100.0f, -100.0f}; /* its exp is 0, as that of -infinity should be */
  clb_float4_store(clb_float4_exp(clb_float4_max(below, floor)), mass);
  for (uint32_t l = 0; l < 4u; ++l) {
    sums[l] += (double)mass[l];
  }
}

/* exp(value - largest) of each value, into `mass` unless it is NULL; value <= largest. Returns the sum: four partial
   sums of every fourth, in double. */
static double exponentials(const float* value, uint32_t count, float largest, float* mass) {
  double sums[4] = {0.0, 0.0, 0.0, 0.0};
  float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  uint32_t i = 0;
  for (; i + 4u <= count; i += 4u) {
    exponentials_of_4(value + i, largest, mass != NULL ? mass + i : four, sums);
  }
  if (i < count) {
    float rest[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    for (uint32_t l = 0; i + l < count; ++l) {
      rest[l] = value[i + l];
    }
    exponentials_of_4(rest, largest, four, sums);
    if (mass != NULL) {
      (void)memcpy(mass + i, four, (count - i) * sizeof four[0]);
    }
  }
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* log(sum exp(logits)): logits[i] minus this is the log-probability of i. */
static double log_sum_exp(const float* logits, uint32_t vocab) {
  float largest = logits[0];
  for (uint32_t i = 1; i < vocab; ++i) {
    largest = logits[i] > largest ? logits[i] : largest;
  }
  return (double)largest + log(exponentials(logits, vocab, largest, NULL));
}

/* The `wanted` likeliest ids, likeliest first, ties to the lowest id. Expected O(vocab). */
static uint32_t top_list(const float* logits, uint32_t vocab, uint32_t wanted, double log_sum, int32_t* ids,
                         float* logprobs) {
  const uint32_t count = wanted < vocab ? wanted : vocab;
  uint32_t best[CLB_MAX_TOP_LOGPROBS] = {0};
  uint32_t filled = 0;
  for (uint32_t i = 0; i < vocab && count > 0u; ++i) {
    if (filled == count && logits[i] <= logits[best[count - 1u]]) {
      continue;
    }
    filled += filled < count ? 1u : 0u;
    uint32_t at = filled - 1u;
    for (; at > 0u && logits[best[at - 1u]] < logits[i]; --at) {
      best[at] = best[at - 1u];
    }
    best[at] = i;
  }
  for (uint32_t rank = 0; rank < filled; ++rank) {
    ids[rank] = (int32_t)best[rank];
    logprobs[rank] = (float)((double)logits[best[rank]] - log_sum);
  }
  return filled;
}

int32_t clb_sampler_prompt(const float* logits, uint32_t vocab, int32_t token, uint32_t top_count,
                           clb_prompt_record* record) {
  CLB_ASSERT(logits != NULL && record != NULL && vocab > 0u);
  (void)memset(record, 0, sizeof *record);
  record->logprob = NAN;
  if (token < 0 || (uint32_t)token >= vocab || top_count > CLB_MAX_TOP_LOGPROBS) {
    return CLB_ERR_ARGUMENT;
  }
  if (!all_finite(logits, vocab)) {
    return CLB_ERR_NOT_FINITE;
  }
  const double log_sum = log_sum_exp(logits, vocab);
  record->logprob = (float)((double)logits[token] - log_sum);
  record->top_count = top_list(logits, vocab, top_count, log_sum, record->top_ids, record->top_logprobs);
  return CLB_OK;
}

/* ------------------------------------------------------------- adjustment */

static float saturate(float value) {
  if (value > FLT_MAX) {
    return FLT_MAX;
  }
  if (value < -FLT_MAX) {
    return -FLT_MAX;
  }
  return value;
}

static float penalise(float value, uint32_t count, const clb_request* request) {
  const uint32_t generated = count & ~CLB_COUNT_PROMPT;
  if (count == 0u) {
    return value;
  }
  const float repeated =
      saturate(value > 0.0f ? value / request->repetition_penalty : value * request->repetition_penalty);
  if (generated == 0u) {
    return repeated;
  }
  return saturate(repeated - (request->frequency_penalty * (float)generated + request->presence_penalty));
}

/* values = logits after penalties and bias; NaN where banned. */
static void adjust(const clb_sampler_args* args, float* values) {
  const clb_request* request = args->request;
  const bool penalties = clb_sampler_needs_counts(request);
  CLB_ASSERT(!penalties || args->counts != NULL);
  for (uint32_t i = 0; i < args->vocab; ++i) {
    values[i] = penalties ? penalise(args->logits[i], args->counts[i], request) : args->logits[i];
  }
  for (uint32_t i = 0; i < request->bias_count; ++i) {
    const int32_t token = args->bias[i].token;
    if (token < 0 || (uint32_t)token >= args->vocab) {
      continue;
    }
    values[token] = saturate(values[token] + args->bias[i].bias);
  }
  for (uint32_t i = 0; i < request->stop_count && args->position < request->min_tokens; ++i) {
    const int32_t stop = args->stops[i];
    if (stop >= 0 && (uint32_t)stop < args->vocab) {
      values[stop] = NAN;
    }
  }
  for (uint32_t i = 0; i < args->vocab && args->mask != NULL; ++i) {
    if (((args->mask[i / 32u] >> (i % 32u)) & 1u) == 0u) {
      values[i] = NAN;
    }
  }
}

/* The first id of the largest value, which occurs. */
static uint32_t first_of(const float* values, uint32_t vocab, float largest) {
  uint32_t id = 0;
  while (values[id] < largest || isnan(values[id])) {
    ++id;
  }
  CLB_ASSERT(id < vocab);
  return id;
}

/* -------------------------------------------------------------- selection */

/* What is left to draw from. */
typedef struct clb_candidates {
  double* buckets; /* (BUCKETS) */
  float* value;    /* (count) (logit - largest) / temperature, <= 0 */
  uint32_t* id;    /* (count) ascending */
  float* mass;     /* (count) exp(value), once it is known */
  uint32_t* bin;   /* (count) places of one bucket */
  uint32_t count;
} clb_candidates;

static clb_candidates candidates_in(void* scratch, uint32_t vocab) {
  clb_candidates c = {.buckets = scratch};
  c.value = (float*)(void*)(c.buckets + BUCKETS);
  c.id = (uint32_t*)(void*)(c.value + vocab);
  c.mass = (float*)(void*)(c.id + vocab);
  c.bin = (uint32_t*)(void*)(c.mass + vocab);
  return c;
}

/* Order of floats as order of unsigned integers; -0 equals +0. */
static uint32_t key_of(float value) {
  const uint32_t bits = clb_bits_of_float(value + 0.0f);
  return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

/* From the largest digit down, the one in which the weight `wanted` is reached, counting from *above; rounding may
   leave it just out of reach, then it is the lowest digit that occurs. *above becomes the weight above that digit. */
static uint32_t take_digit(const double* buckets, uint32_t digits, double wanted, double* above) {
  uint32_t chosen = 0;
  double before = *above;
  for (uint32_t left = digits; left > 0u; --left) {
    const double weight = buckets[left - 1u];
    if (before >= wanted) {
      break;
    }
    if (weight > 0.0) {
      chosen = left - 1u;
      *above = before;
      before += weight;
    }
  }
  return chosen;
}

/* Keep the fewest largest values that together weigh `wanted` > 0, of equal ones the first: each weighs 1, or its mass.
   Their border is found digit by digit of the key; only the first pass looks at all. */
static void keep_largest(clb_candidates* c, bool by_mass, double wanted) {
  static const uint32_t widths[3] = {DIGIT_BITS, DIGIT_BITS, 32u - 2u * DIGIT_BITS};
  uint32_t shift = 32; /* of the digit at hand */
  uint32_t border = 0; /* the digits found so far, the others zero */
  uint32_t in_bin = c->count;
  double above = 0.0;
  for (uint32_t i = 0; i < c->count; ++i) {
    c->bin[i] = i;
  }
  for (uint32_t level = 0; level < 3u; ++level) {
    const uint32_t digits = (uint32_t)1 << widths[level];
    shift -= widths[level];
    (void)memset(c->buckets, 0, digits * sizeof(double));
    for (uint32_t i = 0; i < in_bin; ++i) {
      const uint32_t place = level == 0u ? i : c->bin[i];
      c->buckets[(key_of(c->value[place]) >> shift) & (digits - 1u)] += by_mass ? (double)c->mass[place] : 1.0;
    }
    border |= take_digit(c->buckets, digits, wanted, &above) << shift;
    uint32_t packed = 0;
    for (uint32_t i = 0; i < in_bin; ++i) {
      const uint32_t place = level == 0u ? i : c->bin[i];
      c->bin[packed] = place;
      packed += key_of(c->value[place]) >> shift == border >> shift ? 1u : 0u;
    }
    in_bin = packed;
  }
  CLB_ASSERT(in_bin > 0u); /* the border is a value that occurs */
  const double each = by_mass ? (double)c->mass[c->bin[0]] : 1.0;
  uint32_t ties = 1;
  while (ties < in_bin && above + (double)ties * each < wanted) {
    ++ties;
  }
  uint32_t kept = 0;
  for (uint32_t i = 0; i < c->count; ++i) {
    const uint32_t key = key_of(c->value[i]);
    if (key < border || (key == border && ties == 0u)) {
      continue;
    }
    ties -= key == border ? 1u : 0u;
    c->value[kept] = c->value[i];
    c->id[kept] = c->id[i];
    if (by_mass) {
      c->mass[kept] = c->mass[i];
    }
    ++kept;
  }
  c->count = kept;
}

/* ------------------------------------------------------------------- draw */

/* Pack the ids that are not banned, scaled so that the largest is 0. */
static void pack_legal(clb_candidates* c, uint32_t vocab, float largest, float temperature) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < vocab; ++i) {
    const float value = c->value[i];
    c->value[count] = value;
    c->id[count] = i;
    count += isnan(value) ? 0u : 1u;
  }
  for (uint32_t i = 0; i < count; ++i) {
    c->value[i] = (c->value[i] - largest) / temperature;
  }
  c->count = count;
}

/* Masses below min_p become 0. Returns their sum: four partial sums of every fourth. */
static double drop_unlikely(float* mass, uint32_t count, float min_p) {
  double sums[4] = {0.0, 0.0, 0.0, 0.0};
  for (uint32_t i = 0; i < count; ++i) {
    mass[i] = mass[i] < min_p ? 0.0f : mass[i];
    sums[i % 4u] += (double)mass[i];
  }
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

static uint32_t draw_token(const clb_sampler_args* args, clb_candidates* c, float largest) {
  const clb_request* request = args->request;
  pack_legal(c, args->vocab, largest, request->temperature);
  if (request->top_k > 0u && request->top_k < c->count) {
    keep_largest(c, false, (double)request->top_k);
  }
  double whole = exponentials(c->value, c->count, 0.0f, c->mass);
  if (request->top_p < 1.0f) {
    keep_largest(c, true, (double)request->top_p * whole);
  }
  if (request->top_p < 1.0f || request->min_p > 0.0f) {
    whole = drop_unlikely(c->mass, c->count, request->min_p);
  }
  const double target = uniform(request, args->position) * whole;
  double sum = 0.0;
  uint32_t last = 0; /* the last that may be drawn, should rounding keep the sum below the target */
  for (uint32_t i = 0; i < c->count; ++i) {
    sum += (double)c->mass[i];
    last = c->mass[i] > 0.0f ? i : last;
    if (sum > target) {
      break;
    }
  }
  return c->id[last];
}

int32_t clb_sampler_run(const clb_sampler_args* args, clb_record* record) {
  CLB_ASSERT(args != NULL && record != NULL);
  CLB_ASSERT(args->logits != NULL && args->request != NULL && args->scratch != NULL);
  CLB_ASSERT(args->vocab > 0u && args->vocab <= CLB_MAX_VOCAB);
  const clb_request* request = args->request;
  clb_candidates candidates = candidates_in(args->scratch, args->vocab);
  (void)memset(record, 0, sizeof *record);
  if (!all_finite(args->logits, args->vocab)) {
    return CLB_ERR_NOT_FINITE;
  }
  adjust(args, candidates.value);
  const float largest = largest_of(candidates.value, args->vocab);
  if (largest < -FLT_MAX) {
    return CLB_ERR_NO_TOKEN;
  }
  const uint32_t token = request->temperature > 0.0f ? draw_token(args, &candidates, largest)
                                                     : first_of(candidates.value, args->vocab, largest);
  CLB_ASSERT(token < args->vocab);
  record->position = args->position;
  record->token = (int32_t)token;
  record->logprob = NAN;
  if ((request->flags & CLB_REQ_LOGPROBS) == 0u) {
    return CLB_OK;
  }
  const uint32_t tops = request->top_logprobs < CLB_MAX_TOP_LOGPROBS ? request->top_logprobs : CLB_MAX_TOP_LOGPROBS;
  const double log_sum = log_sum_exp(args->logits, args->vocab);
  record->logprob = (float)((double)args->logits[token] - log_sum);
  record->top_count = top_list(args->logits, args->vocab, tops, log_sum, record->top_ids, record->top_logprobs);
  return CLB_OK;
}
