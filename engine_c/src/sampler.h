/*
 * sampler.h: from one row of logits to one token.
 *
 * Order of work:
 *   1. raw log-softmax of the model's own logits, for record.logprob and the top list (ties to the lowest id);
 *   2. repetition penalty (ids of prompt and output: l > 0 ? l / r : l * r), then frequency * count and presence
 *      (ids of the output) are subtracted;
 *   3. bias is added;
 *   4. banned: stop ids while position < min_tokens, and ids outside the mask;
 *   5. temperature 0: the largest, ties to the lowest id. Else (l - max) / temperature; what is below -87 is never
 * drawn;
 *   6. top-k, then top-p over what is left (renormalised), then min-p against the largest. The order of tokens is
 *      (value descending, id ascending), so borders are exact; the largest token always stays;
 *   7. a draw over what is left in ascending id order.
 *
 * The draw is Philox4x32-10, key = seed, counter = (choice, position, 0, 0): a function of the request and the output
 * position, never of slot, step or company. Values after 2 and 3 saturate at +-FLT_MAX.
 *
 * No allocation, no sort: borders are found digit by digit over the ordered bits of the values (radix selection),
 * O(vocab) whatever the values are, in scratch given by the caller.
 *
 * Threads: pure functions over their arguments; counts and scratch belong to the caller.
 */
#ifndef CLB_SAMPLER_H
#define CLB_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#include "../include/colibri.h"

typedef struct clb_sampler_args {
  const float* logits;        /* (vocab) the model's own; not changed */
  const clb_request* request; /* a private copy, checked by clb_sampler_check */
  const clb_bias* bias;       /* (request->bias_count) */
  const int32_t* stops;       /* (request->stop_count) */
  const uint32_t* mask;       /* ((vocab + 31) / 32) allowed ids, bit id % 32 of word id / 32; NULL = all */
  const uint32_t* counts;     /* (vocab) see clb_sampler_reset; may be NULL iff clb_sampler_needs_counts is 0 */
  void* scratch;              /* clb_sampler_scratch_bytes(vocab), 64-byte aligned */
  uint32_t vocab;
  uint32_t position; /* output position, 0 = first generated token */
} clb_sampler_args;

/* A token count: the top bit says "in the prompt", the others count generated tokens (saturating). */
#define CLB_COUNT_PROMPT 0x80000000u

uint64_t clb_sampler_scratch_bytes(uint32_t vocab);

/* Are all values, bias tokens and stop ids of a request within their limits? ARGUMENT if not. Checks what the sampler
   uses: temperature finite >= 0, 0 < top_p <= 1, 0 <= min_p <= 1, penalties finite, repetition > 0, counts of
   bias, stops and top lists, ids < vocab, bias finite. */
int32_t clb_sampler_check(const clb_request* request, const clb_bias* bias, const int32_t* stops, uint32_t vocab);

/* Is a penalty on? */
bool clb_sampler_needs_counts(const clb_request* request);

/* Start a slot's counts: zero, then mark the prompt's ids. Ids outside [0, vocab) are skipped. O(vocab + tokens). */
void clb_sampler_reset(uint32_t* counts, uint32_t vocab, const int32_t* tokens, uint32_t token_count);
/* A token was generated. O(1). */
void clb_sampler_count(uint32_t* counts, uint32_t vocab, int32_t token);

/* Fills the whole record (logprob NaN and top_count 0 unless CLB_REQ_LOGPROBS).
   NOT_FINITE iff a logit is NaN or infinite. NO_TOKEN iff every id is banned. On failure *record is zero. */
int32_t clb_sampler_run(const clb_sampler_args* args, clb_record* record);

/* Log-probability of `token` and the top list of one prompt position. NOT_FINITE as above; ARGUMENT iff token is
   outside [0, vocab) or top_count > CLB_MAX_TOP_LOGPROBS. On failure logprob is NaN and top_count 0. */
int32_t clb_sampler_prompt(const float* logits, uint32_t vocab, int32_t token, uint32_t top_count,
                           clb_prompt_record* record);

/* The four words of Philox4x32-10. */
void clb_philox(uint64_t key, const uint32_t counter[4], uint32_t output[4]);

#endif
