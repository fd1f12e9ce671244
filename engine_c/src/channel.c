/*
 * channel.c: layout of the shared mapping, both ends of its rings. See channel.h and colibri.h.
 *
 * Owns nothing but the private indices in clb_channel. Reads of shared indices are acquire, writes release;
 * counters are relaxed. Everything shared is reached through the helpers at the top.
 */
#include "channel.h"

#include <string.h>

#include "invariant.h"

#define ALIGN UINT64_C(64)

/* Shared words are plain integers in colibri.h, which Python mirrors; these make the accesses atomic. */
static uint64_t load_acquire(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static void store_release(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

static void store_relaxed(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }

uint32_t clb_abi_version(void) { return CLB_ABI_VERSION; }

const char* clb_status_name(int32_t status) {
  static const char* const names[] = {"OK",     "ARGUMENT", "VERSION",    "MEMORY", "IO",
                                      "FORMAT", "CHECKSUM", "NOT_FINITE", "MODULE", "UNSUPPORTED",
                                      "FULL",   "STATE",    "NO_TOKEN",   "DEVICE", "INTERNAL"};
  _Static_assert(sizeof names / sizeof names[0] == CLB_ERR_INTERNAL + 1, "one name for each status");
  if (status < 0 || status > CLB_ERR_INTERNAL) {
    return "UNKNOWN";
  }
  return names[status];
}

/* ----------------------------------------------------------------- layout */

static uint64_t align_up(uint64_t bytes) { return (bytes + (ALIGN - 1u)) & ~(ALIGN - 1u); }

/* Place `bytes` at *end, move *end behind them. The limits of config keep every sum below 2^50. */
static uint64_t place(uint64_t* end, uint64_t bytes) {
  const uint64_t at = align_up(*end);
  *end = at + bytes;
  return at;
}

static uint32_t next_power_of_two(uint32_t value) {
  uint32_t power = 1;
  while (power < value) {
    power *= 2;
  }
  return power;
}

static int32_t channel_config_valid(const clb_channel_config* config) {
  if (config->abi_version != CLB_ABI_VERSION || config->struct_bytes != sizeof *config) {
    return CLB_ERR_VERSION;
  }
  if (config->slots < 1u || config->slots > CLB_MAX_SLOTS) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->layers < 1u || config->layers > CLB_MAX_LAYERS) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->vocab_size < 1u || config->vocab_size > CLB_MAX_VOCAB) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->hidden < 1u || config->hidden > CLB_CHANNEL_MAX_HIDDEN) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->max_experts > CLB_MAX_EXPERTS) {
    return CLB_ERR_ARGUMENT;
  }
  if (config->max_seq_len < 1u || config->max_seq_len > CLB_MAX_SEQ_LEN) {
    return CLB_ERR_ARGUMENT;
  }
  const uint32_t records = config->result_records;
  if (records < 1u || records > CLB_MAX_RESULT_RECORDS || (records & (records - 1u)) != 0u) {
    return CLB_ERR_ARGUMENT;
  }
  return CLB_OK;
}

static uint64_t mask_words(const clb_channel_config* config) { return ((uint64_t)config->vocab_size + 31u) / 32u; }

int32_t clb_channel_plan(const clb_channel_config* config, clb_channel_layout* layout) {
  if (config == NULL || layout == NULL) {
    return CLB_ERR_ARGUMENT;
  }
  const int32_t valid = channel_config_valid(config);
  if (valid != CLB_OK) {
    return valid;
  }
  clb_channel_layout out = {0};
  out.command_capacity = CLB_COMMAND_CAPACITY;
  out.event_capacity = next_power_of_two(config->slots * (config->result_records + 5u) + 1u);

  uint64_t end = sizeof(clb_request);
  out.request_tokens = place(&end, (uint64_t)config->max_seq_len * sizeof(int32_t));
  out.request_bias = place(&end, (uint64_t)CLB_MAX_BIAS * sizeof(clb_bias));
  out.request_stops = place(&end, (uint64_t)CLB_MAX_STOP_IDS * sizeof(int32_t));
  out.request_policy = place(&end, (uint64_t)config->layers * sizeof(clb_expert_policy));
  out.request_mask = place(&end, 2u * mask_words(config) * sizeof(uint32_t));
  out.request_stride = align_up(end);

  end = sizeof(clb_result);
  out.result_records = place(&end, (uint64_t)config->result_records * sizeof(clb_record));
  out.result_prompt = place(&end, (uint64_t)config->max_seq_len * sizeof(clb_prompt_record));
  out.result_pooled = place(&end, (uint64_t)config->hidden * sizeof(float));
  out.result_counts = place(&end, (uint64_t)config->layers * config->max_experts * sizeof(uint32_t));
  out.result_stride = align_up(end);

  end = sizeof(clb_channel_header);
  out.command_ring = place(&end, CLB_RING_HEADER_BYTES + (uint64_t)out.command_capacity * sizeof(clb_command));
  out.event_ring = place(&end, CLB_RING_HEADER_BYTES + (uint64_t)out.event_capacity * sizeof(clb_event));
  out.requests = place(&end, config->slots * out.request_stride);
  out.results = place(&end, config->slots * out.result_stride);
  out.total_bytes = align_up(end);
  *layout = out;
  return CLB_OK;
}

int32_t clb_channel_init(void* base, uint64_t bytes, const clb_channel_config* config) {
  clb_channel_layout layout;
  if (base == NULL || (uintptr_t)base % ALIGN != 0u) {
    return CLB_ERR_ARGUMENT;
  }
  const int32_t planned = clb_channel_plan(config, &layout);
  if (planned != CLB_OK) {
    return planned;
  }
  if (bytes < layout.total_bytes) {
    return CLB_ERR_ARGUMENT;
  }
  clb_channel_header* header = base;
  header->magic = CLB_CHANNEL_MAGIC;
  header->abi_version = CLB_ABI_VERSION;
  header->total_bytes = layout.total_bytes;
  header->config = *config;
  __atomic_store_n(&header->phase, (uint32_t)CLB_PHASE_STARTING, __ATOMIC_RELEASE);
  return CLB_OK;
}

static bool config_same(const clb_channel_config* a, const clb_channel_config* b) {
  return a->slots == b->slots && a->layers == b->layers && a->vocab_size == b->vocab_size && a->hidden == b->hidden &&
         a->max_experts == b->max_experts && a->max_seq_len == b->max_seq_len &&
         a->result_records == b->result_records && a->reserved == b->reserved;
}

int32_t clb_channel_check(const void* base, uint64_t bytes, const clb_channel_config* config) {
  clb_channel_layout layout;
  if (base == NULL || (uintptr_t)base % ALIGN != 0u) {
    return CLB_ERR_ARGUMENT;
  }
  const int32_t planned = clb_channel_plan(config, &layout);
  if (planned != CLB_OK) {
    return planned;
  }
  if (bytes < layout.total_bytes) {
    return CLB_ERR_ARGUMENT;
  }
  const clb_channel_header* header = base;
  if (header->magic != CLB_CHANNEL_MAGIC || header->abi_version != CLB_ABI_VERSION) {
    return CLB_ERR_VERSION;
  }
  if (header->total_bytes != layout.total_bytes) {
    return CLB_ERR_ARGUMENT;
  }
  if (!config_same(&header->config, config)) {
    return CLB_ERR_ARGUMENT;
  }
  return CLB_OK;
}

/* The daemon's functions get only the base: the layout follows from the header, taken once and checked again. */
static int32_t layout_of(const void* base, clb_channel_config* config, clb_channel_layout* layout) {
  if (base == NULL || (uintptr_t)base % ALIGN != 0u) {
    return CLB_ERR_ARGUMENT;
  }
  const clb_channel_header* header = base;
  if (header->magic != CLB_CHANNEL_MAGIC || header->abi_version != CLB_ABI_VERSION) {
    return CLB_ERR_VERSION;
  }
  *config = header->config;
  const int32_t planned = clb_channel_plan(config, layout);
  if (planned != CLB_OK) {
    return planned;
  }
  return layout->total_bytes == header->total_bytes ? CLB_OK : CLB_ERR_VERSION;
}

/* ------------------------------------------------------------------ rings */

typedef struct clb_ring {
  uint64_t* head;
  uint64_t* tail;
  uint8_t* entries;
  uint64_t capacity; /* a power of two */
} clb_ring;

static clb_ring ring_at(void* base, uint64_t offset, uint32_t capacity) {
  uint8_t* start = (uint8_t*)base + offset;
  const clb_ring ring = {.head = (uint64_t*)(void*)start,
                         .tail = (uint64_t*)(void*)(start + ALIGN),
                         .entries = start + CLB_RING_HEADER_BYTES,
                         .capacity = capacity};
  return ring;
}

/* head - tail, or UINT64_MAX if no state of a sound ring has that distance. */
static uint64_t ring_distance(uint64_t head, uint64_t tail, uint64_t capacity) {
  const uint64_t distance = head - tail;
  return distance <= capacity ? distance : UINT64_MAX;
}

static void* ring_entry(const clb_ring* ring, uint64_t index, size_t entry_bytes) {
  return ring->entries + (index & (ring->capacity - 1u)) * entry_bytes;
}

int32_t clb_command_push(void* base, const clb_command* commands, uint32_t count) {
  clb_channel_config config;
  clb_channel_layout layout;
  if (commands == NULL && count > 0u) {
    return CLB_ERR_ARGUMENT;
  }
  const int32_t found = layout_of(base, &config, &layout);
  if (found != CLB_OK) {
    return found;
  }
  const clb_ring ring = ring_at(base, layout.command_ring, layout.command_capacity);
  const uint64_t head = load_acquire(ring.head);
  const uint64_t waiting = ring_distance(head, load_acquire(ring.tail), ring.capacity);
  if (waiting == UINT64_MAX) {
    return CLB_ERR_INTERNAL;
  }
  if (count > ring.capacity - waiting) {
    return CLB_ERR_FULL;
  }
  for (uint32_t i = 0; i < count; ++i) {
    (void)memcpy(ring_entry(&ring, head + i, sizeof(clb_command)), &commands[i], sizeof(clb_command));
  }
  store_release(ring.head, head + count);
  return CLB_OK;
}

uint32_t clb_event_pop(void* base, clb_event* events, uint32_t max) {
  clb_channel_config config;
  clb_channel_layout layout;
  if (events == NULL || layout_of(base, &config, &layout) != CLB_OK) {
    return 0;
  }
  const clb_ring ring = ring_at(base, layout.event_ring, layout.event_capacity);
  const uint64_t tail = load_acquire(ring.tail);
  const uint64_t waiting = ring_distance(load_acquire(ring.head), tail, ring.capacity);
  if (waiting == UINT64_MAX) {
    return 0;
  }
  const uint32_t count = waiting < max ? (uint32_t)waiting : max;
  for (uint32_t i = 0; i < count; ++i) {
    (void)memcpy(&events[i], ring_entry(&ring, tail + i, sizeof(clb_event)), sizeof(clb_event));
  }
  store_release(ring.tail, tail + count);
  return count;
}

int32_t clb_result_advance(void* base, uint32_t slot, uint64_t tail) {
  clb_channel_config config;
  clb_channel_layout layout;
  const int32_t found = layout_of(base, &config, &layout);
  if (found != CLB_OK) {
    return found;
  }
  if (slot >= config.slots) {
    return CLB_ERR_ARGUMENT;
  }
  clb_result* result = (clb_result*)(void*)((uint8_t*)base + layout.results + slot * layout.result_stride);
  if (tail > load_acquire(&result->head) || tail < load_acquire(&result->tail)) {
    return CLB_ERR_ARGUMENT;
  }
  store_release(&result->tail, tail);
  return CLB_OK;
}

uint32_t clb_channel_stats(const void* base, clb_stats* stats) {
  CLB_ASSERT(base != NULL);
  const clb_channel_header* header = base;
  if (stats != NULL) {
    const uint64_t* from = (const uint64_t*)(const void*)&header->stats;
    uint64_t* to = (uint64_t*)(void*)stats;
    for (size_t i = 0; i < sizeof *stats / sizeof *to; ++i) {
      to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
    }
  }
  return __atomic_load_n(&header->phase, __ATOMIC_ACQUIRE);
}

/* ----------------------------------------------------------- engine's side */

int32_t clb_channel_attach(clb_channel* channel, void* base, uint64_t bytes, const clb_channel_config* config) {
  CLB_ASSERT(channel != NULL);
  (void)memset(channel, 0, sizeof *channel);
  const int32_t checked = clb_channel_check(base, bytes, config);
  if (checked != CLB_OK) {
    return checked;
  }
  channel->base = base;
  channel->config = *config;
  const int32_t planned = clb_channel_plan(config, &channel->layout);
  CLB_ASSERT(planned == CLB_OK);
  channel->command_tail = load_acquire(ring_at(base, channel->layout.command_ring, 1).tail);
  channel->event_head = load_acquire(ring_at(base, channel->layout.event_ring, 1).head);
  return CLB_OK;
}

uint32_t clb_channel_pending(const clb_channel* channel) {
  const clb_ring ring = ring_at(channel->base, channel->layout.command_ring, channel->layout.command_capacity);
  const uint64_t waiting = ring_distance(load_acquire(ring.head), channel->command_tail, ring.capacity);
  return waiting == UINT64_MAX ? 0u : (uint32_t)waiting;
}

uint32_t clb_channel_pop_command(clb_channel* channel, clb_command* command) {
  const clb_ring ring = ring_at(channel->base, channel->layout.command_ring, channel->layout.command_capacity);
  const uint64_t waiting = ring_distance(load_acquire(ring.head), channel->command_tail, ring.capacity);
  if (waiting == UINT64_MAX) {
    channel->broken = 1;
  }
  if (waiting == UINT64_MAX || waiting == 0u) {
    return 0;
  }
  (void)memcpy(command, ring_entry(&ring, channel->command_tail, sizeof *command), sizeof *command);
  ++channel->command_tail;
  store_release(ring.tail, channel->command_tail);
  return 1;
}

int32_t clb_channel_push_event(clb_channel* channel, const clb_event* event) {
  const clb_ring ring = ring_at(channel->base, channel->layout.event_ring, channel->layout.event_capacity);
  const uint64_t waiting = ring_distance(channel->event_head, load_acquire(ring.tail), ring.capacity);
  if (waiting == UINT64_MAX) {
    channel->broken = 1;
  }
  if (waiting == UINT64_MAX || waiting == ring.capacity) {
    return CLB_ERR_FULL;
  }
  (void)memcpy(ring_entry(&ring, channel->event_head, sizeof *event), event, sizeof *event);
  ++channel->event_head;
  store_release(ring.head, channel->event_head);
  return CLB_OK;
}

bool clb_channel_events_taken(const clb_channel* channel, uint64_t head) {
  const clb_ring ring = ring_at(channel->base, channel->layout.event_ring, channel->layout.event_capacity);
  const uint64_t waiting = ring_distance(channel->event_head, load_acquire(ring.tail), ring.capacity);
  return waiting != UINT64_MAX && channel->event_head - waiting >= head;
}

/* ----------------------------------------------------------------- blocks */

static uint8_t* request_at(const clb_channel* channel, uint32_t slot, uint64_t member) {
  CLB_ASSERT(slot < channel->config.slots);
  return channel->base + channel->layout.requests + slot * channel->layout.request_stride + member;
}

static uint8_t* result_at(const clb_channel* channel, uint32_t slot, uint64_t member) {
  CLB_ASSERT(slot < channel->config.slots);
  return channel->base + channel->layout.results + slot * channel->layout.result_stride + member;
}

const clb_request* clb_channel_request(const clb_channel* channel, uint32_t slot) {
  return (const clb_request*)(void*)request_at(channel, slot, 0);
}

const int32_t* clb_channel_tokens(const clb_channel* channel, uint32_t slot) {
  return (const int32_t*)(void*)request_at(channel, slot, channel->layout.request_tokens);
}

const clb_bias* clb_channel_bias(const clb_channel* channel, uint32_t slot) {
  return (const clb_bias*)(void*)request_at(channel, slot, channel->layout.request_bias);
}

const int32_t* clb_channel_stops(const clb_channel* channel, uint32_t slot) {
  return (const int32_t*)(void*)request_at(channel, slot, channel->layout.request_stops);
}

const clb_expert_policy* clb_channel_policy(const clb_channel* channel, uint32_t slot) {
  return (const clb_expert_policy*)(void*)request_at(channel, slot, channel->layout.request_policy);
}

const uint32_t* clb_channel_mask(const clb_channel* channel, uint32_t slot, uint32_t position) {
  const uint32_t* both = (const uint32_t*)(void*)request_at(channel, slot, channel->layout.request_mask);
  return both + (position % 2u) * mask_words(&channel->config);
}

clb_result* clb_channel_result(const clb_channel* channel, uint32_t slot) {
  return (clb_result*)(void*)result_at(channel, slot, 0);
}

clb_prompt_record* clb_channel_prompt_records(const clb_channel* channel, uint32_t slot) {
  return (clb_prompt_record*)(void*)result_at(channel, slot, channel->layout.result_prompt);
}

float* clb_channel_pooled(const clb_channel* channel, uint32_t slot) {
  return (float*)(void*)result_at(channel, slot, channel->layout.result_pooled);
}

uint32_t* clb_channel_counts(const clb_channel* channel, uint32_t slot) {
  return (uint32_t*)(void*)result_at(channel, slot, channel->layout.result_counts);
}

void clb_channel_slot_open(clb_channel* channel, uint32_t slot, uint64_t generation) {
  clb_result* result = clb_channel_result(channel, slot);
  channel->record_head[slot] = 0;
  result->generation = generation;
  result->assignments = 0;
  result->trimmed = 0;
  result->dropped = 0;
  result->prompt_records = 0;
  result->cached_tokens = 0;
  const size_t counts = (size_t)channel->config.layers * channel->config.max_experts;
  (void)memset(clb_channel_counts(channel, slot), 0, counts * sizeof(uint32_t));
  store_release(&result->tail, 0);
  store_release(&result->head, 0);
}

uint64_t clb_channel_room(clb_channel* channel, uint32_t slot) {
  const clb_result* result = clb_channel_result(channel, slot);
  const uint64_t capacity = channel->config.result_records;
  const uint64_t unread = ring_distance(channel->record_head[slot], load_acquire(&result->tail), capacity);
  if (unread == UINT64_MAX) {
    channel->broken = 1;
  }
  return unread == UINT64_MAX ? 0u : capacity - unread;
}

bool clb_channel_has_room(clb_channel* channel, uint32_t slot) { return clb_channel_room(channel, slot) > 0u; }

clb_record* clb_channel_record(clb_channel* channel, uint32_t slot) {
  if (!clb_channel_has_room(channel, slot)) {
    return NULL;
  }
  const uint64_t index = channel->record_head[slot] & (channel->config.result_records - 1u);
  clb_record* records = (clb_record*)(void*)result_at(channel, slot, channel->layout.result_records);
  return &records[index];
}

uint64_t clb_channel_commit(clb_channel* channel, uint32_t slot) {
  clb_result* result = clb_channel_result(channel, slot);
  const uint64_t index = channel->record_head[slot];
  channel->record_head[slot] = index + 1u;
  store_release(&result->head, index + 1u);
  return index;
}

/* ----------------------------------------------------------------- header */

static clb_channel_header* header_of(const clb_channel* channel) { return (clb_channel_header*)(void*)channel->base; }

void clb_channel_set_phase(clb_channel* channel, uint32_t phase) {
  __atomic_store_n(&header_of(channel)->phase, phase, __ATOMIC_RELEASE);
}

void clb_channel_set_progress(clb_channel* channel, uint64_t progress) {
  store_relaxed(&header_of(channel)->stats.progress, progress);
}

void clb_channel_set_loaded(clb_channel* channel, uint64_t loaded_bytes) {
  store_relaxed(&header_of(channel)->stats.loaded_bytes, loaded_bytes);
}

void clb_channel_set_stats(clb_channel* channel, const clb_stats* stats) {
  const uint64_t* from = (const uint64_t*)(const void*)stats;
  uint64_t* to = (uint64_t*)(void*)&header_of(channel)->stats;
  for (size_t i = 0; i < sizeof *stats / sizeof *to; ++i) {
    store_relaxed(&to[i], from[i]);
  }
}
