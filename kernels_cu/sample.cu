/*
 * sample.cu: from logits to the next token of each wanted row, and the slot moved on to it.
 *
 * Operation  clb_sample: see abi.h. The order of work is that of engine_c/src/sampler.h, and the draw is its generator.
 *            Masses are whole numbers (exp scaled by 2^43), so that histograms by atomic additions have one result
 *            whatever the order; a token less likely than e^-29 of the likeliest is never drawn.
 * Reference  tests/cuda/test_sample.py (engine_c/src/sampler.c).
 * Grid       one block of 1,024 threads a wanted row.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   greedy: 8 * vocab / 16 bytes of candidates: latency-bound, target 4 us. Sampled: about 8 passes over
 *            4 * vocab bytes that stay in L2, 0.6 MB for 151,936 ids: target 40 us.
 */
#include "block.cuh"

#define DIGIT_BITS 11u
#define BUCKETS (1u << DIGIT_BITS)
#define MASS_ONE 8796093022208.0f /* 2^43: 2^20 of them fit into 63 bits */
#define COUNT_PROMPT 0x80000000u  /* CLB_COUNT_PROMPT of sampler.h */
#define LARGEST 3.402823466e+38f

struct sampler {
  const clb_sample_args& a;
  const clb_device_slot& slot; /* a copy in shared memory: the slot as the step found it */
  uint32_t index;              /* of the slot */
  const float* logits;
  float* value; /* (V) adjusted, later scaled; NaN: not in the draw */
};

/* ------------------------------------------------------------------- philox */

CLB_DEVICE double uniform(uint64_t seed, uint32_t choice, uint32_t position) {
  uint32_t c[4] = {choice, position, 0u, 0u};
  uint32_t keys[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  for (uint32_t round = 0u; round < 10u; round++) {
    const uint64_t first = (uint64_t)0xd2511f53u * c[0];
    const uint64_t second = (uint64_t)0xcd9e8d57u * c[2];
    c[0] = (uint32_t)(second >> 32) ^ c[1] ^ keys[0];
    c[1] = (uint32_t)second;
    c[2] = (uint32_t)(first >> 32) ^ c[3] ^ keys[1];
    c[3] = (uint32_t)first;
    keys[0] += 0x9e3779b9u;
    keys[1] += 0xbb67ae85u;
  }
  const uint64_t bits = ((uint64_t)c[0] << 21) ^ ((uint64_t)c[1] >> 11);
  return (double)bits * (1.0 / 9007199254740992.0);
}

/* --------------------------------------------------------------- adjustment */

CLB_DEVICE float saturate_value(float value) {
  return value > LARGEST ? LARGEST : (value < -LARGEST ? -LARGEST : value);
}

CLB_DEVICE float penalise(const clb_device_slot& slot, float value, uint32_t count) {
  const uint32_t generated = count & ~COUNT_PROMPT;
  if (count == 0u) return value;
  const float repeated =
      saturate_value(value > 0.0f ? value / slot.repetition_penalty : value * slot.repetition_penalty);
  if (generated == 0u) return repeated;
  return saturate_value(
      __fsub_rn(repeated, __fadd_rn(__fmul_rn(slot.frequency_penalty, (float)generated), slot.presence_penalty)));
}

/* Entry i adds up its token's biases if it is the first of them. */
CLB_DEVICE void add_bias(const sampler& s) {
  const clb_token_bias* bias = s.a.bias + (uint64_t)s.index * CLB_MAX_BIAS;
  const uint32_t i = threadIdx.x;
  if (i >= min(s.slot.bias_count, CLB_MAX_BIAS)) return;
  for (uint32_t j = 0u; j < i; j++) {
    if (bias[j].token == bias[i].token) return;
  }
  float value = s.value[bias[i].token];
  for (uint32_t j = i; j < min(s.slot.bias_count, CLB_MAX_BIAS); j++) {
    if (bias[j].token == bias[i].token) value = saturate_value(__fadd_rn(value, bias[j].bias));
  }
  s.value[bias[i].token] = value;
}

/* value = logits after penalties and bias, NaN where banned. false: a logit is not finite. */
CLB_DEVICE bool adjust(const sampler& s, clb_block& block) {
  const uint32_t vocab = s.a.vocab;
  const uint32_t* counts = s.a.counts + (uint64_t)s.index * vocab;
  uint64_t bad = 0u;
  for (uint32_t i = threadIdx.x; i < vocab; i += CLB_BLOCK_THREADS) {
    const float logit = s.logits[i];
    bad |= clb_finite(logit) ? 0u : 1u;
    s.value[i] = (s.slot.needs_counts != 0u) ? penalise(s.slot, logit, counts[i]) : logit;
  }
  if (clb_block_max(block, bad) != 0u) return false;
  add_bias(s);
  __syncthreads();
  const float banned = __uint_as_float(0x7fc00000u);
  if (s.slot.generated < s.slot.min_tokens && threadIdx.x < min(s.slot.stop_count, CLB_MAX_STOP_IDS))
    s.value[s.a.stops[(uint64_t)s.index * CLB_MAX_STOP_IDS + threadIdx.x]] = banned;
  if ((s.slot.flags & CLB_REQ_MASKED) != 0u) {
    const uint32_t words = (vocab + 31u) / 32u;
    const uint32_t* mask = s.a.masks + ((uint64_t)s.index * 2u + s.slot.generated % 2u) * words;
    for (uint32_t i = threadIdx.x; i < vocab; i += CLB_BLOCK_THREADS) {
      if ((mask[i / 32u] >> (i % 32u) & 1u) == 0u) s.value[i] = banned;
    }
  }
  __syncthreads();
  return true;
}

/* ---------------------------------------------------------------- selection */

CLB_DEVICE uint64_t mass_of(float scaled) { return (uint64_t)(clb_exact_exp(scaled) * MASS_ONE); }

/* What an id weighs in a selection: 1, or its mass; 0 outside the draw. */
template <bool BY_MASS>
CLB_DEVICE uint64_t weight_of(float scaled) {
  if (clb_is_nan(scaled)) return 0u;
  return BY_MASS ? mass_of(scaled) : 1u;
}

/* From the largest digit down, the one in which `wanted` is reached, counting from *above, which becomes the weight
   above that digit. One warp; every lane gets the same. */
CLB_DEVICE uint32_t take_digit(const uint64_t* buckets, uint64_t wanted, uint64_t* above) {
  uint64_t before = *above;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  for (uint32_t high = BUCKETS; high > 0u; high -= CLB_WARP) {
    const uint32_t digit = high - 1u - lane; /* lanes go down */
    uint64_t upto = buckets[digit];
    for (uint32_t step = 1u; step < CLB_WARP; step *= 2u) {
      const uint64_t other = __shfl_up_sync(CLB_FULL_WARP, upto, step);
      if (lane >= step) upto += other;
    }
    const uint32_t reached = __ballot_sync(CLB_FULL_WARP, before + upto >= wanted);
    if (reached != 0u) {
      const uint32_t at = (uint32_t)__ffs((int)reached) - 1u;
      const uint64_t inside = __shfl_sync(CLB_FULL_WARP, upto - buckets[digit], at);
      *above = before + inside;
      return high - 1u - at;
    }
    before += __shfl_sync(CLB_FULL_WARP, upto, CLB_WARP - 1u);
  }
  return 0u; /* not reached: `wanted` is at most the sum */
}

/* Of the ids in the draw whose key is `border`, the first `ties` stay, in rising order of ids; what is below the border
   goes. A warp owns a contiguous range of ids. */
CLB_DEVICE void cut(const sampler& s, clb_block& block, uint32_t border, uint64_t ties) {
  const uint32_t share = ((s.a.vocab + CLB_BLOCK_WARPS - 1u) / CLB_BLOCK_WARPS + CLB_WARP - 1u) / CLB_WARP * CLB_WARP;
  const uint32_t warp = threadIdx.x / CLB_WARP;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t begin = min(warp * share, s.a.vocab);
  const uint32_t end = min(begin + share, s.a.vocab);
  const float gone = __uint_as_float(0x7fc00000u);
  uint32_t equal = 0u;
  for (uint32_t i = begin; i < end; i += CLB_WARP) {
    const bool valid = i + lane < end && !clb_is_nan(s.value[i + lane]);
    equal += (uint32_t)__popc(__ballot_sync(CLB_FULL_WARP, valid && clb_key_of(s.value[i + lane]) == border));
  }
  __syncthreads();
  if (lane == 0u) block.words[warp] = equal;
  __syncthreads();
  uint64_t rank = 0u;
  for (uint32_t w = 0u; w < warp; w++)
    rank += block.words[w];
  for (uint32_t i = begin; i < end; i += CLB_WARP) {
    const bool valid = i + lane < end && !clb_is_nan(s.value[i + lane]);
    const uint32_t key = valid ? clb_key_of(s.value[i + lane]) : 0u;
    const uint32_t votes = __ballot_sync(CLB_FULL_WARP, valid && key == border);
    const uint64_t own = rank + (uint32_t)__popc(votes & ((1u << lane) - 1u));
    if (valid && (key < border || (key == border && own >= ties))) s.value[i + lane] = gone;
    rank += (uint32_t)__popc(votes);
  }
  __syncthreads();
}

/* Keep the fewest largest values that together weigh `wanted` > 0, of equal ones the first. The border is found digit
   by digit of the key. */
template <bool BY_MASS>
CLB_DEVICE void keep_largest(const sampler& s, clb_block& block, uint64_t* buckets, uint64_t wanted) {
  __shared__ uint64_t above_shared;
  __shared__ uint32_t border_shared;
  uint32_t border = 0u;
  uint32_t shift = 32u;
  uint64_t above = 0u;
  for (uint32_t level = 0u; level < 3u; level++) {
    const uint32_t width = (level < 2u) ? DIGIT_BITS : 32u - 2u * DIGIT_BITS;
    const uint32_t upper = shift; /* digits above this bit are found */
    shift -= width;
    for (uint32_t i = threadIdx.x; i < BUCKETS; i += CLB_BLOCK_THREADS)
      buckets[i] = 0u;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < s.a.vocab; i += CLB_BLOCK_THREADS) {
      const uint64_t weight = weight_of<BY_MASS>(s.value[i]);
      const uint32_t key = clb_key_of(s.value[i]);
      if (weight == 0u || (upper < 32u && (key >> upper) != (border >> upper))) continue;
      atomicAdd(reinterpret_cast<unsigned long long*>(&buckets[(key >> shift) & ((1u << width) - 1u)]),
                (unsigned long long)weight);
    }
    __syncthreads();
    if (threadIdx.x < CLB_WARP) {
      const uint32_t digit = take_digit(buckets, wanted, &above);
      if (threadIdx.x == 0u) {
        border_shared = border | (digit << shift);
        above_shared = above;
      }
    }
    __syncthreads();
    border = border_shared;
    above = above_shared;
    __syncthreads();
  }
  const uint32_t bits = (border & 0x80000000u) != 0u ? border & 0x7fffffffu : ~border;
  const uint64_t each = weight_of<BY_MASS>(__uint_as_float(bits));
  cut(s, block, border, max((uint64_t)1u, (wanted - above + each - 1u) / each));
}

/* --------------------------------------------------------------------- draw */

/* The sum of masses, those below min_p of the largest left out of it and of the draw. */
CLB_DEVICE uint64_t masses(const sampler& s, clb_block& block, float min_p) {
  uint64_t sum = 0u;
  for (uint32_t i = threadIdx.x; i < s.a.vocab; i += CLB_BLOCK_THREADS) {
    const uint64_t mass = weight_of<true>(s.value[i]);
    if (mass != 0u && (float)mass < min_p * MASS_ONE) {
      s.value[i] = __uint_as_float(0x7fc00000u);
    } else {
      sum += mass;
    }
  }
  return clb_block_sum(block, sum);
}

/* The first id, in rising order, at which the masses so far exceed `target`. A warp owns a contiguous range. */
CLB_DEVICE uint32_t find(const sampler& s, clb_block& block, uint64_t target) {
  __shared__ uint32_t found;
  const uint32_t share = ((s.a.vocab + CLB_BLOCK_WARPS - 1u) / CLB_BLOCK_WARPS + CLB_WARP - 1u) / CLB_WARP * CLB_WARP;
  const uint32_t warp = threadIdx.x / CLB_WARP;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t begin = min(warp * share, s.a.vocab);
  const uint32_t end = min(begin + share, s.a.vocab);
  uint64_t sum = 0u;
  for (uint32_t i = begin + lane; i < end; i += CLB_WARP)
    sum += weight_of<true>(s.value[i]);
  for (uint32_t step = CLB_WARP / 2u; step > 0u; step /= 2u)
    sum += __shfl_xor_sync(CLB_FULL_WARP, sum, step);
  __syncthreads();
  if (lane == 0u) block.words[warp] = sum;
  __syncthreads();
  uint64_t before = 0u;
  for (uint32_t w = 0u; w < warp; w++)
    before += block.words[w];
  if (before <= target && target < before + sum) { /* this warp's range */
    for (uint32_t i = begin; i < end; i += CLB_WARP) {
      uint64_t upto = (i + lane < end) ? weight_of<true>(s.value[i + lane]) : 0u;
      for (uint32_t step = 1u; step < CLB_WARP; step *= 2u) {
        const uint64_t other = __shfl_up_sync(CLB_FULL_WARP, upto, step);
        if (lane >= step) upto += other;
      }
      const uint32_t reached = __ballot_sync(CLB_FULL_WARP, before + upto > target);
      if (reached != 0u) {
        if (lane == 0u) found = i + (uint32_t)__ffs((int)reached) - 1u;
        break;
      }
      before += __shfl_sync(CLB_FULL_WARP, upto, CLB_WARP - 1u);
    }
  }
  __syncthreads();
  return found;
}

CLB_DEVICE uint32_t draw(const sampler& s, clb_block& block, uint64_t* buckets, float largest) {
  uint64_t legal = 0u;
  for (uint32_t i = threadIdx.x; i < s.a.vocab; i += CLB_BLOCK_THREADS) {
    s.value[i] = __fdiv_rn(__fsub_rn(s.value[i], largest), s.slot.temperature); /* NaN stays NaN */
    legal += clb_is_nan(s.value[i]) ? 0u : 1u;
  }
  legal = clb_block_sum(block, legal);
  if (s.slot.top_k > 0u && s.slot.top_k < legal) keep_largest<false>(s, block, buckets, s.slot.top_k);
  uint64_t whole = masses(s, block, 0.0f);
  if (s.slot.top_p < 1.0f) {
    const uint64_t wanted = (uint64_t)ceil((double)s.slot.top_p * (double)whole);
    keep_largest<true>(s, block, buckets, min(max(wanted, (uint64_t)1u), whole));
  }
  if (s.slot.top_p < 1.0f || s.slot.min_p > 0.0f) whole = masses(s, block, s.slot.min_p);
  const uint64_t target = (uint64_t)(uniform(s.slot.seed, s.slot.choice, s.slot.generated) * (double)whole);
  return find(s, block, min(target, whole - 1u));
}

/* ------------------------------------------------------------------ choices */

/* The best candidate of a row that needs nothing but the largest logit; 0: a logit is not finite. */
CLB_DEVICE uint64_t best_candidate(const clb_sample_args& a, clb_block& block, uint32_t h) {
  const uint32_t tiles = (a.vocab + CLB_TILE - 1u) / CLB_TILE;
  const clb_token_bias* candidates = a.candidates + (uint64_t)h * tiles;
  uint64_t best = 0u;
  uint64_t bad = 0u;
  for (uint32_t i = threadIdx.x; i < tiles; i += CLB_BLOCK_THREADS) {
    const clb_token_bias one = candidates[i];
    bad |= clb_finite(one.bias) ? 0u : 1u;
    best = max(best, clb_place_of(one.bias, (uint32_t)one.token));
  }
  return clb_block_max(block, bad) != 0u ? 0u : clb_block_max(block, best);
}

/* Status of the choice; *token. */
CLB_DEVICE int32_t choose(const sampler& s, clb_block& block, uint64_t* buckets, uint32_t h, uint32_t* token) {
  const clb_device_slot& slot = s.slot;
  const bool greedy = !(slot.temperature > 0.0f);
  const bool banned = slot.stop_count > 0u && slot.generated < slot.min_tokens;
  if (greedy && slot.needs_counts == 0u && slot.bias_count == 0u && !banned && (slot.flags & CLB_REQ_MASKED) == 0u) {
    const uint64_t best = best_candidate(s.a, block, h);
    *token = clb_id_of(best);
    return best != 0u ? CLB_OK : s.a.not_finite;
  }
  if (!adjust(s, block)) return s.a.not_finite;
  uint64_t best = 0u;
  for (uint32_t i = threadIdx.x; i < s.a.vocab; i += CLB_BLOCK_THREADS) {
    if (!clb_is_nan(s.value[i])) best = max(best, clb_place_of(s.value[i], i));
  }
  best = clb_block_max(block, best);
  if (best == 0u) return s.a.no_token;
  *token = clb_id_of(best);
  if (!greedy) {
    const float largest = s.value[clb_id_of(best)];
    __syncthreads(); /* before values are scaled in place */
    *token = draw(s, block, buckets, largest);
  }
  return CLB_OK;
}

/* The record of a token, in the slot's ring. */
CLB_DEVICE int32_t write_record(const sampler& s, clb_block& block, uint32_t token) {
  clb_record* record = reinterpret_cast<clb_record*>(s.slot.records) + (s.slot.written & s.slot.record_mask);
  const bool wanted = (s.slot.flags & CLB_REQ_LOGPROBS) != 0u;
  double log_sum = 0.0;
  if (wanted && !clb_log_sum_exp(block, s.logits, s.a.vocab, &log_sum)) return s.a.not_finite;
  const uint32_t tops = wanted ? clb_top_list(block, s.logits, s.a.vocab, s.slot.top_logprobs, log_sum, record->top_ids,
                                              record->top_logprobs)
                               : 0u;
  if (threadIdx.x >= tops && threadIdx.x < CLB_MAX_TOP_LOGPROBS) {
    record->top_ids[threadIdx.x] = 0;
    record->top_logprobs[threadIdx.x] = 0.0f;
  }
  if (threadIdx.x == 0u) {
    record->position = s.slot.generated;
    record->token = (int32_t)token;
    record->logprob = wanted ? (float)((double)s.logits[token] - log_sum) : __uint_as_float(0x7fc00000u);
    record->top_count = tops;
  }
  return CLB_OK;
}

/* Thread 0: the slot goes on to its token, or ends. */
CLB_DEVICE void move_on(const sampler& s, uint32_t token, clb_device_event* event) {
  clb_device_slot* slot = s.a.slots + s.index;
  const int32_t* stops = s.a.stops + (uint64_t)s.index * CLB_MAX_STOP_IDS;
  uint32_t flags = (s.slot.generated + 1u == s.slot.max_tokens) ? CLB_FINISH_LENGTH : 0u;
  for (uint32_t i = 0u; i < min(s.slot.stop_count, CLB_MAX_STOP_IDS); i++) {
    if (stops[i] == (int32_t)token) flags = CLB_FINISH_STOP;
  }
  if (s.slot.needs_counts != 0u) {
    uint32_t* count = s.a.counts + (uint64_t)s.index * s.a.vocab + token;
    if ((*count & ~COUNT_PROMPT) < ~COUNT_PROMPT) *count += 1u;
  }
  event->kind = CLB_DEVICE_TOKEN;
  event->token = (int32_t)token;
  event->flags = flags;
  slot->written = s.slot.written + 1u;
  slot->token = (int32_t)token;
  slot->position = s.slot.position + 1u;
  slot->generated = s.slot.generated + 1u;
  if (flags != 0u) slot->active = 0u;
}

extern "C" __global__ void __launch_bounds__(CLB_BLOCK_THREADS) clb_sample(const __grid_constant__ clb_sample_args a) {
  __shared__ clb_block block;
  __shared__ uint64_t buckets[BUCKETS];
  __shared__ clb_device_slot slot;
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint32_t h = blockIdx.x;
  if (h >= *a.wanted_count) return;
  const clb_row row = a.rows[a.wanted != nullptr ? a.wanted[h] : h];
  if (row.slot == CLB_NONE) {
    if (threadIdx.x == 0u) a.events[h].kind = CLB_DEVICE_IDLE;
    return;
  }
  if (threadIdx.x == 0u) slot = a.slots[row.slot];
  __syncthreads();
  const sampler s = {a, slot, row.slot, a.logits + (uint64_t)h * a.vocab,
                     reinterpret_cast<float*>(a.scratch + h * a.scratch_stride)};
  uint32_t token = 0u;
  int32_t status = row.status;
  if (status == CLB_OK) status = choose(s, block, buckets, h, &token);
  if (status == CLB_OK) status = write_record(s, block, token);
  if (threadIdx.x != 0u) return;
  clb_device_event event = {};
  event.generation = s.slot.generation;
  event.record = s.slot.written;
  event.assignments = s.slot.assignments;
  event.trimmed = s.slot.trimmed;
  event.dropped = s.slot.dropped;
  event.slot = row.slot;
  event.position = s.slot.generated;
  event.status = status;
  if (status == CLB_OK) {
    move_on(s, token, &event);
  } else {
    event.kind = CLB_DEVICE_FAILED;
    a.slots[row.slot].active = 0u;
  }
  a.events[h] = event;
}
