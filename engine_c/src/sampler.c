/*
 * sampler.c: see sampler.h for the order of work and the draw.
 *
 * Owns nothing. Memory of one call, in scratch:
 *   | buckets: double[2048] | values: float[vocab], by id; NaN = banned |
 * Nothing is moved: every pass walks ids upwards, so sums and ties have one order.
 */
#include "sampler.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "assert.h"

#define DIGIT_BITS 11u /* 32 bits of a value = digits of 11, 11 and 10 bits */
#define BUCKETS (1u << DIGIT_BITS)

uint64_t clb_sampler_scratch_bytes(uint32_t vocab) {
  return BUCKETS * sizeof(double) + (uint64_t)vocab * sizeof(float);
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
  for (uint32_t round = 0; round < 10; ++round) {
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
  if (!(isfinite(request->temperature) && request->temperature >= 0.0f)) return CLB_ERR_ARGUMENT;
  if (!(request->top_p > 0.0f && request->top_p <= 1.0f)) return CLB_ERR_ARGUMENT;
  if (!(request->min_p >= 0.0f && request->min_p <= 1.0f)) return CLB_ERR_ARGUMENT;
  if (!isfinite(request->presence_penalty) || !isfinite(request->frequency_penalty)) return CLB_ERR_ARGUMENT;
  if (!(isfinite(request->repetition_penalty) && request->repetition_penalty > 0.0f)) return CLB_ERR_ARGUMENT;
  if (request->top_logprobs > CLB_MAX_TOP_LOGPROBS) return CLB_ERR_ARGUMENT;
  if (request->prompt_top_logprobs > CLB_MAX_TOP_LOGPROBS) return CLB_ERR_ARGUMENT;
  if (request->bias_count > CLB_MAX_BIAS || request->stop_count > CLB_MAX_STOP_IDS) return CLB_ERR_ARGUMENT;
  for (uint32_t i = 0; i < request->bias_count; ++i) {
    if (bias[i].token < 0 || (uint32_t)bias[i].token >= vocab || !isfinite(bias[i].bias)) return CLB_ERR_ARGUMENT;
  }
  for (uint32_t i = 0; i < request->stop_count; ++i) {
    if (stops[i] < 0 || (uint32_t)stops[i] >= vocab) return CLB_ERR_ARGUMENT;
  }
  return CLB_OK;
}

int clb_sampler_needs_counts(const clb_request* request) {
  const int repetition = request->repetition_penalty < 1.0f || request->repetition_penalty > 1.0f;
  const int presence = request->presence_penalty < 0.0f || request->presence_penalty > 0.0f;
  const int frequency = request->frequency_penalty < 0.0f || request->frequency_penalty > 0.0f;
  return repetition || presence || frequency;
}

/* ------------------------------------------------------------------ counts */

void clb_sampler_reset(uint32_t* counts, uint32_t vocab, const int32_t* tokens, uint32_t token_count) {
  (void)memset(counts, 0, (size_t)vocab * sizeof *counts);
  for (uint32_t i = 0; i < token_count; ++i) {
    if (tokens[i] >= 0 && (uint32_t)tokens[i] < vocab) counts[tokens[i]] = CLB_COUNT_PROMPT;
  }
}

void clb_sampler_count(uint32_t* counts, uint32_t vocab, int32_t token) {
  if (token < 0 || (uint32_t)token >= vocab) return;
  if ((counts[token] & ~CLB_COUNT_PROMPT) < ~CLB_COUNT_PROMPT) ++counts[token];
}

/* ---------------------------------------------------------- log-softmax */

static int all_finite(const float* logits, uint32_t vocab) {
  for (uint32_t i = 0; i < vocab; ++i) {
    if (!isfinite(logits[i])) return 0;
  }
  return 1;
}

/* log(sum exp(logits)): logits[i] minus this is the log-probability of i. Sum in id order, in double. */
static double log_sum_exp(const float* logits, uint32_t vocab) {
  float largest = logits[0];
  for (uint32_t i = 1; i < vocab; ++i) {
    if (logits[i] > largest) largest = logits[i];
  }
  double sum = 0.0;
  for (uint32_t i = 0; i < vocab; ++i)
    sum += (double)expf(logits[i] - largest);
  return (double)largest + log(sum);
}

/* The `count` likeliest ids, likeliest first, ties to the lowest id. Expected O(vocab). */
static uint32_t top_list(const float* logits, uint32_t vocab, uint32_t count, double log_sum, int32_t* ids,
                         float* logprobs) {
  uint32_t best[CLB_MAX_TOP_LOGPROBS];
  uint32_t filled = 0;
  if (count > vocab) count = vocab;
  for (uint32_t i = 0; i < vocab && count > 0; ++i) {
    if (filled == count && logits[i] <= logits[best[count - 1u]]) continue;
    uint32_t at = filled < count ? filled++ : count - 1u;
    for (; at > 0 && logits[best[at - 1u]] < logits[i]; --at)
      best[at] = best[at - 1u];
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
  CLB_ASSERT(logits != NULL && record != NULL && vocab > 0);
  (void)memset(record, 0, sizeof *record);
  record->logprob = NAN;
  if (token < 0 || (uint32_t)token >= vocab || top_count > CLB_MAX_TOP_LOGPROBS) return CLB_ERR_ARGUMENT;
  if (!all_finite(logits, vocab)) return CLB_ERR_NOT_FINITE;
  const double log_sum = log_sum_exp(logits, vocab);
  record->logprob = (float)((double)logits[token] - log_sum);
  record->top_count = top_list(logits, vocab, top_count, log_sum, record->top_ids, record->top_logprobs);
  return CLB_OK;
}

/* ------------------------------------------------------------- adjustment */

static float saturate(float value) {
  if (value > FLT_MAX) return FLT_MAX;
  if (value < -FLT_MAX) return -FLT_MAX;
  return value;
}

static float penalise(float value, uint32_t count, const clb_request* request) {
  const uint32_t generated = count & ~CLB_COUNT_PROMPT;
  if (count == 0) return value;
  value = value > 0.0f ? value / request->repetition_penalty : value * request->repetition_penalty;
  value = saturate(value);
  if (generated == 0) return value;
  return saturate(value - (request->frequency_penalty * (float)generated + request->presence_penalty));
}

/* values = logits after penalties and bias; NaN where banned. */
static void adjust(const clb_sampler_args* args, float* values) {
  const clb_request* request = args->request;
  const int penalties = clb_sampler_needs_counts(request);
  CLB_ASSERT(!penalties || args->counts != NULL);
  for (uint32_t i = 0; i < args->vocab; ++i) {
    values[i] = penalties ? penalise(args->logits[i], args->counts[i], request) : args->logits[i];
  }
  for (uint32_t i = 0; i < request->bias_count; ++i) {
    const int32_t token = args->bias[i].token;
    if (token < 0 || (uint32_t)token >= args->vocab) continue;
    values[token] = saturate(values[token] + args->bias[i].bias);
  }
  for (uint32_t i = 0; i < request->stop_count && args->position < request->min_tokens; ++i) {
    const int32_t stop = args->stops[i];
    if (stop >= 0 && (uint32_t)stop < args->vocab) values[stop] = NAN;
  }
  for (uint32_t i = 0; i < args->vocab && args->mask != NULL; ++i) {
    if (((args->mask[i / 32u] >> (i % 32u)) & 1u) == 0) values[i] = NAN;
  }
}

/* The largest value's id, ties to the lowest; vocab if all are banned. */
static uint32_t argmax(const float* values, uint32_t vocab) {
  uint32_t best = vocab;
  for (uint32_t i = 0; i < vocab; ++i) {
    if (isnan(values[i])) continue;
    if (best == vocab || values[i] > values[best]) best = i;
  }
  return best;
}

/* -------------------------------------------------------------- selection */

/* What is kept: values whose key is above `key`, and of those equal to it the first `ties` ids. */
typedef struct clb_border {
  uint32_t key;
  uint32_t ties;
} clb_border;

/* Order of floats as order of unsigned integers; -0 equals +0. */
static uint32_t key_of(float value) {
  const float positive_zero = value + 0.0f;
  uint32_t bits;
  (void)memcpy(&bits, &positive_zero, sizeof bits);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

/* Is the next id, in ascending order, kept? *seen counts the equal ones so far. */
static int is_kept(const clb_border* border, float value, uint32_t* seen) {
  if (isnan(value)) return 0;
  const uint32_t key = key_of(value);
  if (key != border->key) return key > border->key;
  if (*seen >= border->ties) return 0;
  ++*seen;
  return 1;
}

/* A search for the border of the largest values that together weigh `wanted`: each weighs 1, or exp(value). */
typedef struct clb_search {
  const float* values;
  double* buckets; /* (BUCKETS) */
  uint32_t vocab;
  uint32_t by_mass;
  clb_border within; /* only these take part */
  double wanted;     /* a share of the whole mass until the first pass is done, if by_mass */
  double above;      /* weight of what lies above the digits found so far */
  uint32_t key;      /* the digits found so far, the others zero */
} clb_search;

/* Sum the weights by one digit of the key, among values that agree with the digits above it. */
static void fill_buckets(const clb_search* search, uint32_t shift, uint32_t bits) {
  const uint32_t digits = 1u << bits;
  const uint32_t above = shift + bits;
  uint32_t seen = 0;
  (void)memset(search->buckets, 0, BUCKETS * sizeof(double));
  for (uint32_t i = 0; i < search->vocab; ++i) {
    const float value = search->values[i];
    if (!is_kept(&search->within, value, &seen)) continue;
    const uint32_t key = key_of(value);
    if (above < 32u && key >> above != search->key >> above) continue;
    search->buckets[(key >> shift) & (digits - 1u)] += search->by_mass ? (double)expf(value) : 1.0;
  }
}

/* Find the digit in which the wanted weight is reached, from the largest down; rounding may leave it just out of
   reach, then it is the lowest digit that occurs. */
static void take_digit(clb_search* search, uint32_t shift, uint32_t bits) {
  uint32_t digit = 1u << bits;
  uint32_t chosen = 0;
  double before = search->above;
  double above = search->above;
  while (digit > 0) {
    --digit;
    const double weight = search->buckets[digit];
    if (!(weight > 0.0)) continue;
    above = before;
    chosen = digit;
    before += weight;
    if (before >= search->wanted) break;
  }
  search->above = above;
  search->key |= chosen << shift;
}

static clb_border find_border(clb_search* search) {
  fill_buckets(search, 32u - DIGIT_BITS, DIGIT_BITS);
  if (search->by_mass) {
    double whole = 0.0;
    for (uint32_t digit = 0; digit < BUCKETS; ++digit)
      whole += search->buckets[digit];
    search->wanted *= whole;
  }
  take_digit(search, 32u - DIGIT_BITS, DIGIT_BITS);
  fill_buckets(search, 32u - 2u * DIGIT_BITS, DIGIT_BITS);
  take_digit(search, 32u - 2u * DIGIT_BITS, DIGIT_BITS);
  fill_buckets(search, 0, 32u - 2u * DIGIT_BITS);
  take_digit(search, 0, 32u - 2u * DIGIT_BITS);

  float value;
  const uint32_t bits = (search->key & 0x80000000u) != 0 ? search->key & 0x7fffffffu : ~search->key;
  (void)memcpy(&value, &bits, sizeof value);
  const double weight = search->by_mass ? (double)expf(value) : 1.0;
  const double ties = ceil((search->wanted - search->above) / weight);
  clb_border border = {.key = search->key, .ties = search->vocab};
  if (ties < (double)search->vocab) border.ties = ties > 1.0 ? (uint32_t)ties : 1u;
  if (border.key == search->within.key && border.ties > search->within.ties) border.ties = search->within.ties;
  return border;
}

/* ------------------------------------------------------------------- draw */

/* Walk the kept ids upwards until their mass exceeds `target`; the last kept one if rounding keeps it below.
 *whole becomes the mass walked over. */
static uint32_t walk(const clb_sampler_args* args, const float* values, const clb_border* border, double target,
                     double* whole) {
  uint32_t seen = 0;
  uint32_t last = args->vocab;
  double sum = 0.0;
  for (uint32_t i = 0; i < args->vocab; ++i) {
    if (!is_kept(border, values[i], &seen)) continue;
    const float mass = expf(values[i]);
    if (mass < args->request->min_p || !(mass > 0.0f)) continue;
    last = i;
    sum += (double)mass;
    if (sum > target) break;
  }
  *whole = sum;
  return last;
}

static uint32_t draw(const clb_sampler_args* args, float* values, uint32_t largest, double* buckets) {
  const clb_request* request = args->request;
  const float top = values[largest];
  for (uint32_t i = 0; i < args->vocab; ++i)
    values[i] = (values[i] - top) / request->temperature;
  clb_border border = {.key = 0, .ties = 0};
  if (request->top_k > 0 && request->top_k < args->vocab) {
    clb_search search = {.values = values, .buckets = buckets, .vocab = args->vocab, .wanted = request->top_k};
    border = find_border(&search);
  }
  if (request->top_p < 1.0f) {
    clb_search search = {.values = values,
                         .buckets = buckets,
                         .vocab = args->vocab,
                         .by_mass = 1,
                         .within = border,
                         .wanted = (double)request->top_p};
    border = find_border(&search);
  }
  double whole = 0.0;
  (void)walk(args, values, &border, INFINITY, &whole);
  return walk(args, values, &border, uniform(request, args->position) * whole, &whole);
}

int32_t clb_sampler_run(const clb_sampler_args* args, clb_record* record) {
  CLB_ASSERT(args != NULL && record != NULL);
  CLB_ASSERT(args->logits != NULL && args->request != NULL && args->scratch != NULL);
  CLB_ASSERT(args->vocab > 0 && args->vocab <= CLB_MAX_VOCAB);
  const clb_request* request = args->request;
  double* buckets = args->scratch;
  float* values = (float*)(void*)(buckets + BUCKETS);
  (void)memset(record, 0, sizeof *record);
  if (!all_finite(args->logits, args->vocab)) return CLB_ERR_NOT_FINITE;
  adjust(args, values);
  uint32_t token = argmax(values, args->vocab);
  if (token == args->vocab) return CLB_ERR_NO_TOKEN;
  if (request->temperature > 0.0f) token = draw(args, values, token, buckets);
  CLB_ASSERT(token < args->vocab);
  record->position = args->position;
  record->token = (int32_t)token;
  record->logprob = NAN;
  if ((request->flags & CLB_REQ_LOGPROBS) == 0) return CLB_OK;
  const uint32_t tops = request->top_logprobs < CLB_MAX_TOP_LOGPROBS ? request->top_logprobs : CLB_MAX_TOP_LOGPROBS;
  const double log_sum = log_sum_exp(args->logits, args->vocab);
  record->logprob = (float)((double)args->logits[token] - log_sum);
  record->top_count = top_list(args->logits, args->vocab, tops, log_sum, record->top_ids, record->top_logprobs);
  return CLB_OK;
}
