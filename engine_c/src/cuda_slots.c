/*
 * cuda_slots.c: what the device must know of a request, copied in when its runs are reserved.
 *
 * Everything is copied in stream order from page-locked memory that belongs to the slot. A later request of the same
 * slot may overwrite that memory while a copy of a request that was closed at once is still waiting; what it then
 * copies is overwritten by the later request's own copy, which follows it in the stream.
 *
 * A slot needs no cancelling on the device: what is not in the slot list is not computed.
 */
#include <stddef.h>

#include "cuda_internal.h"
#include "invariant.h"
#include "sampler.h"

static int32_t put_some(struct clb_cuda* cuda, uint64_t offset, const void* from, uint64_t bytes) {
  return bytes == 0u ? CLB_OK
                     : cuda->driver.copy_in(&cuda->driver, cuda->device.stream, clb_cuda_at(cuda, offset), from, bytes);
}

/* The arrays that follow from the request. */
static int32_t put_arrays(clb_engine* engine, uint32_t index) {
  struct clb_cuda* const cuda = engine->cuda;
  const clb_cuda_layout* const at = &cuda->at;
  const clb_slot* const slot = &engine->slots[index];
  const uint64_t layers = engine->model.layers;
  const uint64_t vocab = engine->model.vocab_size;
  const uint64_t expert_counts = layers * engine->config.channel.max_experts * sizeof(uint32_t);
  int32_t status = put_some(cuda, at->policies + index * layers * sizeof slot->policy[0], slot->policy,
                            layers * sizeof slot->policy[0]);
  if (status == CLB_OK) {
    status = put_some(cuda, at->stops + index * CLB_MAX_STOP_IDS * sizeof slot->stops[0], slot->stops,
                      slot->request.stop_count * sizeof slot->stops[0]);
  }
  if (status == CLB_OK) {
    status = put_some(cuda, at->bias + index * CLB_MAX_BIAS * sizeof slot->bias[0], slot->bias,
                      slot->request.bias_count * sizeof slot->bias[0]);
  }
  if (status == CLB_OK && slot->needs_counts != 0u) {
    status = put_some(cuda, at->token_counts + index * vocab * sizeof slot->counts[0], slot->counts,
                      vocab * sizeof slot->counts[0]);
  }
  if (status == CLB_OK && expert_counts != 0u) {
    status = cuda->driver.fill(&cuda->driver, cuda->device.stream,
                               clb_cuda_at(cuda, at->expert_counts + index * expert_counts), 0u, expert_counts);
  }
  return status;
}

/* The slot as kernels see it: a run's first byte in place of its offset in the KV tier. */
static void fill_slot(const clb_engine* engine, uint32_t index, clb_device_slot* device) {
  const struct clb_cuda* const cuda = engine->cuda;
  const clb_slot* const slot = &engine->slots[index];
  const clb_request* const request = &slot->request;
  const clb_channel_layout* const channel = &engine->channel.layout;
  const clb_device_addr kv = clb_cuda_at(cuda, cuda->at.kv);
  clb_kv_view view;
  clb_cache_view(&engine->cache, index, 0, &view);
  *device = (clb_device_slot){
      .generation = request->generation,
      .seed = request->seed,
      .prefix_run = view.prefix_tokens != 0u ? kv + view.prefix_k : 0u,
      .own_run = view.own_capacity != 0u ? kv + view.own_k : 0u,
      .records =
          cuda->device.channel_device + channel->results + index * channel->result_stride + channel->result_records,
      .prefix_tokens = view.prefix_tokens,
      .prefix_capacity = view.prefix_capacity,
      .own_capacity = view.own_capacity,
      .active = 1u,
      .position = request->prompt_tokens - 1u, /* sampling the first token moves it on */
      .record_mask = engine->config.channel.result_records - 1u,
      .flags = request->flags,
      .choice = request->choice,
      .max_tokens = request->max_tokens,
      .min_tokens = request->min_tokens,
      .top_logprobs = request->top_logprobs,
      .top_k = request->top_k,
      .stop_count = request->stop_count,
      .bias_count = request->bias_count,
      .temperature = request->temperature,
      .top_p = request->top_p,
      .min_p = request->min_p,
      .presence_penalty = request->presence_penalty,
      .frequency_penalty = request->frequency_penalty,
      .repetition_penalty = request->repetition_penalty,
      .needs_counts = slot->needs_counts,
      .prompt_top_logprobs = request->prompt_top_logprobs,
  };
}

/* A prefix goes into the run that the slot will publish. Whoever gets the older run's memory next writes it behind this
   copy in the stream. */
static int32_t copy_prefix(clb_engine* engine, uint32_t slot) {
  struct clb_cuda* const cuda = engine->cuda;
  clb_kv_copy copy;
  if (!clb_cache_copy_pending(&engine->cache, slot, &copy)) {
    return CLB_OK;
  }
  const clb_copy_rows rows = {.to = clb_cuda_at(cuda, cuda->at.kv + copy.to),
                              .from = clb_cuda_at(cuda, cuda->at.kv + copy.from),
                              .to_pitch = copy.to_pitch,
                              .from_pitch = copy.from_pitch,
                              .row_bytes = copy.row_bytes,
                              .rows = copy.rows};
  clb_cache_slot_copied(&engine->cache, slot);
  return cuda->driver.copy_rows(&cuda->driver, cuda->device.stream, &rows);
}

int32_t clb_cuda_slot_opened(clb_engine* engine, uint32_t slot) {
  struct clb_cuda* const cuda = engine->cuda;
  clb_device_slot* const staged = (clb_device_slot*)clb_cuda_host(cuda, cuda->at.host_slots) + slot;
  int32_t status = copy_prefix(engine, slot);
  fill_slot(engine, slot, staged);
  if (status == CLB_OK) {
    status = put_some(cuda, cuda->at.slots + slot * sizeof *staged, staged, sizeof *staged);
  }
  return status != CLB_OK ? status : put_arrays(engine, slot);
}

/* The mask is copied from the channel itself, which is page-locked: the daemon writes this half again only after it
   saw a token that follows the one for which this copy is made. */
int32_t clb_cuda_mask_set(clb_engine* engine, uint32_t slot, uint32_t position) {
  struct clb_cuda* const cuda = engine->cuda;
  const uint64_t bytes = ((uint64_t)engine->model.vocab_size + 31u) / 32u * sizeof(uint32_t);
  const uint64_t half = 2u * (uint64_t)slot + (position & 1u);
  return put_some(cuda, cuda->at.masks + half * bytes, clb_channel_mask(&engine->channel, slot, position), bytes);
}
