/* Channel: layout, refusal of foreign memory, both rings from two threads, a broken other side. */
#include "channel.h"

#include <pthread.h>

#include "test.h"

static clb_channel_config small_config(void) {
  const clb_channel_config config = {.abi_version = CLB_ABI_VERSION,
                                     .struct_bytes = sizeof(clb_channel_config),
                                     .slots = 3,
                                     .layers = 2,
                                     .vocab_size = 1001,
                                     .hidden = 24,
                                     .max_experts = 5,
                                     .max_seq_len = 70,
                                     .result_records = 8};
  return config;
}

typedef struct fixture {
  clb_channel_config config;
  clb_channel_layout layout;
  void* base;
  clb_channel engine;
} fixture;

static void set_up(fixture* f) {
  memset(f, 0, sizeof *f);
  f->config = small_config();
  CHECK_EQ(clb_channel_plan(&f->config, &f->layout), CLB_OK);
  f->base = aligned_alloc(64, f->layout.total_bytes);
  CHECK(f->base != NULL);
  memset(f->base, 0, f->layout.total_bytes);
  CHECK_EQ(clb_channel_init(f->base, f->layout.total_bytes, &f->config), CLB_OK);
  CHECK_EQ(clb_channel_attach(&f->engine, f->base, f->layout.total_bytes, &f->config), CLB_OK);
}

/* Parts and members follow one another on multiples of 64, each large enough, and the last ends at total_bytes. */
static void layout_has_no_overlap(void) {
  const clb_channel_config config = small_config();
  clb_channel_layout at;
  CHECK_EQ(clb_channel_plan(&config, &at), CLB_OK);
  const uint64_t starts[] = {0,
                             sizeof(clb_channel_header),
                             at.command_ring,
                             CLB_RING_HEADER_BYTES + at.command_capacity * sizeof(clb_command),
                             at.event_ring,
                             CLB_RING_HEADER_BYTES + at.event_capacity * sizeof(clb_event),
                             at.requests,
                             config.slots * at.request_stride,
                             at.results,
                             config.slots * at.result_stride};
  for (unsigned i = 0; i + 2 < 10; i += 2)
    CHECK(starts[i] + starts[i + 1] <= starts[i + 2]);
  CHECK(starts[8] + starts[9] <= at.total_bytes);
  const uint64_t members[][2] = {{0, sizeof(clb_request)},
                                 {at.request_tokens, 70 * 4},
                                 {at.request_bias, CLB_MAX_BIAS * 8},
                                 {at.request_stops, CLB_MAX_STOP_IDS * 4},
                                 {at.request_policy, 2 * 8},
                                 {at.request_mask, 2 * 32 * 4},
                                 {at.request_stride, 0},
                                 {0, sizeof(clb_result)},
                                 {at.result_records, 8 * sizeof(clb_record)},
                                 {at.result_prompt, 70 * sizeof(clb_prompt_record)},
                                 {at.result_pooled, 24 * 4},
                                 {at.result_counts, 2 * 5 * 4},
                                 {at.result_stride, 0}};
  for (unsigned i = 0; i < 13; ++i) {
    CHECK_EQ(members[i][0] % 64, 0);
    if (i != 6 && i != 12) CHECK(members[i][0] + members[i][1] <= members[i + 1][0]);
  }
  CHECK(at.event_capacity >= config.slots * (config.result_records + 5u) + 1u);
  CHECK_EQ(at.event_capacity & (at.event_capacity - 1u), 0);
  CHECK_EQ(at.command_capacity & (at.command_capacity - 1u), 0);
}

/* Each limit of the configuration is checked, just inside and just outside. */
static void plan_refuses_values_out_of_range(void) {
  clb_channel_layout layout;
  const struct {
    size_t offset;
    uint32_t good;
    uint32_t bad;
  } cases[] = {{offsetof(clb_channel_config, slots), CLB_MAX_SLOTS, CLB_MAX_SLOTS + 1u},
               {offsetof(clb_channel_config, slots), 1, 0},
               {offsetof(clb_channel_config, layers), CLB_MAX_LAYERS, CLB_MAX_LAYERS + 1u},
               {offsetof(clb_channel_config, layers), 1, 0},
               {offsetof(clb_channel_config, vocab_size), CLB_MAX_VOCAB, CLB_MAX_VOCAB + 1u},
               {offsetof(clb_channel_config, vocab_size), 1, 0},
               {offsetof(clb_channel_config, hidden), CLB_CHANNEL_MAX_HIDDEN, CLB_CHANNEL_MAX_HIDDEN + 1u},
               {offsetof(clb_channel_config, max_experts), 0, CLB_MAX_EXPERTS + 1u},
               {offsetof(clb_channel_config, max_seq_len), CLB_MAX_SEQ_LEN, CLB_MAX_SEQ_LEN + 1u},
               {offsetof(clb_channel_config, result_records), 1, 0},
               {offsetof(clb_channel_config, result_records), 16, 12},
               {offsetof(clb_channel_config, result_records), CLB_MAX_RESULT_RECORDS, 2u * CLB_MAX_RESULT_RECORDS}};
  for (unsigned i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    clb_channel_config config = small_config();
    memcpy((char*)&config + cases[i].offset, &cases[i].good, 4);
    CHECK_EQ(clb_channel_plan(&config, &layout), CLB_OK);
    memcpy((char*)&config + cases[i].offset, &cases[i].bad, 4);
    CHECK_EQ(clb_channel_plan(&config, &layout), CLB_ERR_ARGUMENT);
  }
  clb_channel_config config = small_config();
  config.abi_version++;
  CHECK_EQ(clb_channel_plan(&config, &layout), CLB_ERR_VERSION);
  config = small_config();
  config.struct_bytes++;
  CHECK_EQ(clb_channel_plan(&config, &layout), CLB_ERR_VERSION);
  CHECK_EQ(clb_channel_plan(NULL, &layout), CLB_ERR_ARGUMENT);
}

/* The engine refuses memory with another magic, version, size or configuration, and too small or unaligned memory. */
static void check_refuses_foreign_memory(void) {
  fixture f;
  set_up(&f);
  clb_channel_header* header = f.base;
  const clb_channel_header was = *header;
  const uint64_t bytes = f.layout.total_bytes;
  CHECK_EQ(clb_channel_check(f.base, bytes, &f.config), CLB_OK);
  CHECK_EQ(clb_channel_check(f.base, bytes - 1u, &f.config), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_channel_check((char*)f.base + 8, bytes, &f.config), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_channel_init((char*)f.base + 8, bytes, &f.config), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_channel_init(f.base, bytes - 1u, &f.config), CLB_ERR_ARGUMENT);
  header->magic ^= 1u;
  CHECK_EQ(clb_channel_check(f.base, bytes, &f.config), CLB_ERR_VERSION);
  *header = was;
  header->abi_version++;
  CHECK_EQ(clb_channel_check(f.base, bytes, &f.config), CLB_ERR_VERSION);
  *header = was;
  header->total_bytes += 64;
  CHECK_EQ(clb_channel_check(f.base, bytes, &f.config), CLB_ERR_ARGUMENT);
  *header = was;
  header->config.slots = 2;
  CHECK_EQ(clb_channel_check(f.base, bytes, &f.config), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_channel_attach(&f.engine, f.base, bytes, &f.config), CLB_ERR_ARGUMENT);
  CHECK(f.engine.base == NULL);
  free(f.base);
}

/* Commands arrive in order, all of a push or none, and a full ring says FULL. */
static void commands_are_all_or_nothing(void) {
  fixture f;
  set_up(&f);
  clb_command commands[CLB_COMMAND_CAPACITY];
  memset(commands, 0, sizeof commands);
  for (uint32_t i = 0; i < CLB_COMMAND_CAPACITY; ++i)
    commands[i].start = i;
  clb_command got;
  CHECK_EQ(clb_channel_pop_command(&f.engine, &got), 0);
  CHECK_EQ(clb_command_push(f.base, commands, 5), CLB_OK);
  CHECK_EQ(clb_command_push(f.base, commands, CLB_COMMAND_CAPACITY - 4), CLB_ERR_FULL);
  CHECK_EQ(clb_channel_pending(&f.engine), 5);
  CHECK_EQ(clb_command_push(f.base, commands + 5, CLB_COMMAND_CAPACITY - 5), CLB_OK);
  CHECK_EQ(clb_command_push(f.base, commands, 1), CLB_ERR_FULL);
  CHECK_EQ(clb_command_push(f.base, commands, 0), CLB_OK);
  CHECK_EQ(clb_command_push(f.base, NULL, 1), CLB_ERR_ARGUMENT);
  for (uint32_t i = 0; i < CLB_COMMAND_CAPACITY; ++i) {
    CHECK_EQ(clb_channel_pop_command(&f.engine, &got), 1);
    CHECK_EQ(got.start, i);
  }
  CHECK_EQ(clb_channel_pop_command(&f.engine, &got), 0);
  free(f.base);
}

/* Events arrive in order, at most `max` at a time, and a ring that nobody empties says FULL instead of overwriting. */
static void events_are_never_overwritten(void) {
  fixture f;
  set_up(&f);
  clb_event event = {.kind = CLB_EVENT_TOKEN};
  clb_event got[7];
  for (uint32_t i = 0; i < f.layout.event_capacity; ++i) {
    event.position = i;
    CHECK_EQ(clb_channel_push_event(&f.engine, &event), CLB_OK);
  }
  CHECK_EQ(clb_channel_push_event(&f.engine, &event), CLB_ERR_FULL);
  uint32_t next = 0;
  for (uint32_t count = clb_event_pop(f.base, got, 7); count > 0; count = clb_event_pop(f.base, got, 7)) {
    for (uint32_t i = 0; i < count; ++i)
      CHECK_EQ(got[i].position, next++);
  }
  CHECK_EQ(next, f.layout.event_capacity);
  CHECK_EQ(clb_event_pop(f.base, NULL, 7), 0);
  free(f.base);
}

/* A slot's records wait for the reader: no room while the ring is full, room again after advance. */
static void records_wait_for_the_reader(void) {
  fixture f;
  set_up(&f);
  clb_channel_slot_open(&f.engine, 1, 42);
  clb_result* result = clb_channel_result(&f.engine, 1);
  CHECK_EQ(result->generation, 42);
  for (uint64_t i = 0; i < 8; ++i) {
    clb_record* record = clb_channel_record(&f.engine, 1);
    CHECK(record != NULL);
    record->position = (uint32_t)i;
    CHECK_EQ(clb_channel_commit(&f.engine, 1), i);
  }
  CHECK(clb_channel_record(&f.engine, 1) == NULL);
  CHECK_EQ(clb_channel_room(&f.engine, 1), 0);
  CHECK_EQ(clb_channel_room(&f.engine, 0), 8);
  CHECK(clb_channel_has_room(&f.engine, 0));
  CHECK_EQ(clb_result_advance(f.base, 1, 9), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_result_advance(f.base, 3, 0), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_result_advance(f.base, 1, 3), CLB_OK);
  CHECK_EQ(clb_channel_room(&f.engine, 1), 3);
  CHECK_EQ(clb_result_advance(f.base, 1, 2), CLB_ERR_ARGUMENT);
  clb_record* record = clb_channel_record(&f.engine, 1);
  CHECK_EQ((uint8_t*)record - (uint8_t*)f.base,
           f.layout.results + f.layout.result_stride + f.layout.result_records); /* the ring starts over */
  clb_channel_slot_open(&f.engine, 1, 43);
  CHECK_EQ(result->head, 0);
  CHECK_EQ(result->tail, 0);
  free(f.base);
}

/* Whatever the other side writes into its index, nothing is read or written outside the rings. */
static void broken_indices_read_as_empty(void) {
  fixture f;
  set_up(&f);
  uint64_t* command_head = (uint64_t*)(void*)((char*)f.base + f.layout.command_ring);
  uint64_t* event_tail = (uint64_t*)(void*)((char*)f.base + f.layout.event_ring + 64);
  const uint64_t broken[] = {CLB_COMMAND_CAPACITY + 1u, UINT64_MAX / 3u, (uint64_t)1 << 63}; /* engine's own: 0 */
  for (unsigned i = 0; i < 3; ++i) {
    clb_command command;
    clb_event event = {.kind = CLB_EVENT_TOKEN};
    f.engine.broken = 0;
    *command_head = broken[i];
    CHECK_EQ(clb_channel_pending(&f.engine), 0);
    CHECK_EQ(clb_channel_pop_command(&f.engine, &command), 0);
    CHECK_EQ(f.engine.broken, 1);
    CHECK_EQ(clb_command_push(f.base, &command, 1), CLB_ERR_INTERNAL);
    *event_tail = broken[i];
    CHECK_EQ(clb_channel_push_event(&f.engine, &event), CLB_ERR_FULL);
    CHECK_EQ(clb_event_pop(f.base, &event, 1), 0);
    clb_channel_slot_open(&f.engine, 0, 1);
    clb_channel_result(&f.engine, 0)->tail = broken[i];
    CHECK(clb_channel_record(&f.engine, 0) == NULL);
    CHECK_EQ(clb_channel_room(&f.engine, 0), 0);
  }
  free(f.base);
}

/* The daemon's calls refuse a header whose configuration was overwritten. */
static void broken_header_is_refused(void) {
  fixture f;
  set_up(&f);
  clb_channel_header* header = f.base;
  const clb_command command = {.kind = CLB_CMD_OPEN};
  clb_event event;
  header->config.slots = 64;
  CHECK_EQ(clb_command_push(f.base, &command, 1), CLB_ERR_VERSION);
  CHECK_EQ(clb_event_pop(f.base, &event, 1), 0);
  CHECK_EQ(clb_result_advance(f.base, 0, 0), CLB_ERR_VERSION);
  header->config.slots = UINT32_MAX;
  CHECK_EQ(clb_command_push(f.base, &command, 1), CLB_ERR_ARGUMENT);
  header->magic = 0;
  CHECK_EQ(clb_command_push(f.base, &command, 1), CLB_ERR_VERSION);
  CHECK_EQ(clb_command_push(NULL, &command, 1), CLB_ERR_ARGUMENT);
  free(f.base);
}

/* Counters and phase written by the engine are what any process reads. */
static void counters_come_back(void) {
  fixture f;
  set_up(&f);
  clb_stats in;
  clb_stats out;
  uint64_t* words = (uint64_t*)(void*)&in;
  for (uint64_t i = 0; i < sizeof in / 8; ++i)
    words[i] = i + 1u;
  CHECK_EQ(clb_channel_stats(f.base, &out), CLB_PHASE_STARTING);
  clb_channel_set_stats(&f.engine, &in);
  clb_channel_set_phase(&f.engine, CLB_PHASE_READY);
  CHECK_EQ(clb_channel_stats(f.base, &out), CLB_PHASE_READY);
  CHECK(memcmp(&in, &out, sizeof in) == 0);
  clb_channel_set_progress(&f.engine, 1000);
  clb_channel_set_loaded(&f.engine, 2000);
  CHECK_EQ(clb_channel_stats(f.base, &out), CLB_PHASE_READY);
  CHECK_EQ(out.progress, 1000);
  CHECK_EQ(out.loaded_bytes, 2000);
  CHECK_EQ(clb_channel_stats(f.base, NULL), CLB_PHASE_READY);
  free(f.base);
}

/* Blocks of different slots are disjoint, and masks alternate by output position. */
static void blocks_belong_to_one_slot(void) {
  fixture f;
  set_up(&f);
  for (uint32_t slot = 0; slot + 1u < f.config.slots; ++slot) {
    CHECK_EQ((const char*)clb_channel_request(&f.engine, slot + 1u) - (const char*)clb_channel_request(&f.engine, slot),
             f.layout.request_stride);
    CHECK((const char*)(clb_channel_mask(&f.engine, slot, 1) + 32) <=
          (const char*)clb_channel_request(&f.engine, slot + 1u));
    CHECK((const char*)(clb_channel_counts(&f.engine, slot) + 10) <=
          (const char*)clb_channel_result(&f.engine, slot + 1u));
  }
  CHECK_EQ(clb_channel_mask(&f.engine, 0, 1) - clb_channel_mask(&f.engine, 0, 0), 32);
  CHECK(clb_channel_mask(&f.engine, 0, 6) == clb_channel_mask(&f.engine, 0, 0));
  CHECK((const char*)clb_channel_tokens(&f.engine, 2) > (const char*)clb_channel_request(&f.engine, 2));
  CHECK((const char*)clb_channel_bias(&f.engine, 2) > (const char*)clb_channel_tokens(&f.engine, 2));
  CHECK((const char*)clb_channel_stops(&f.engine, 2) > (const char*)clb_channel_bias(&f.engine, 2));
  CHECK((const char*)clb_channel_policy(&f.engine, 2) > (const char*)clb_channel_stops(&f.engine, 2));
  CHECK((char*)clb_channel_prompt_records(&f.engine, 2) > (char*)clb_channel_result(&f.engine, 2));
  CHECK((char*)clb_channel_pooled(&f.engine, 2) > (char*)clb_channel_prompt_records(&f.engine, 2));
  free(f.base);
}

/* Every status has a name of its own, and strangers are UNKNOWN. */
static void statuses_have_names(void) {
  CHECK_EQ(clb_abi_version(), CLB_ABI_VERSION);
  CHECK(strcmp(clb_status_name(CLB_OK), "OK") == 0);
  CHECK(strcmp(clb_status_name(CLB_ERR_NO_TOKEN), "NO_TOKEN") == 0);
  CHECK(strcmp(clb_status_name(CLB_ERR_INTERNAL), "INTERNAL") == 0);
  CHECK(strcmp(clb_status_name(-1), "UNKNOWN") == 0);
  CHECK(strcmp(clb_status_name(15), "UNKNOWN") == 0);
}

#define ROUNDS_LONG 200000u
#define ROUNDS_SHORT 20000u

static uint32_t rounds(void) { return getenv("CLB_TEST_SHORT") != NULL ? ROUNDS_SHORT : ROUNDS_LONG; }

/* The engine of the stress test: answers each command with a record and an event that carry its number. */
static void* answer_all(void* context) {
  fixture* f = context;
  uint32_t done = 0;
  while (done < rounds()) {
    clb_command command;
    if (!clb_channel_has_room(&f->engine, 1) || !clb_channel_pop_command(&f->engine, &command)) {
      sched_yield();
      continue;
    }
    clb_record* record = clb_channel_record(&f->engine, 1);
    record->position = command.start;
    record->token = (int32_t)(command.start * 7u);
    const clb_event event = {
        .kind = CLB_EVENT_TOKEN, .slot = 1, .record = clb_channel_commit(&f->engine, 1), .position = command.start};
    if (clb_channel_push_event(&f->engine, &event) != CLB_OK) return (void*)1;
    ++done;
  }
  return NULL;
}

/* Two threads pass every command, record and event once, in order, whole. */
static void two_threads_agree(void) {
  fixture f;
  pthread_t thread;
  set_up(&f);
  clb_channel_slot_open(&f.engine, 1, 1);
  CHECK_EQ(pthread_create(&thread, NULL, answer_all, &f), 0);
  const clb_record* records =
      (const clb_record*)(void*)((char*)f.base + f.layout.results + f.layout.result_stride + f.layout.result_records);
  uint32_t sent = 0;
  uint32_t received = 0;
  uint32_t wrong = 0;
  while (received < rounds()) {
    clb_command commands[3];
    clb_event events[4];
    memset(commands, 0, sizeof commands);
    const uint32_t count = sent + 3u <= rounds() ? 3u : rounds() - sent;
    for (uint32_t i = 0; i < count; ++i)
      commands[i].start = sent + i;
    if (count > 0 && clb_command_push(f.base, commands, count) == CLB_OK) sent += count;
    const uint32_t got = clb_event_pop(f.base, events, 4);
    if (got == 0) sched_yield();
    for (uint32_t i = 0; i < got; ++i) {
      const clb_record record = records[events[i].record % f.config.result_records];
      wrong += events[i].position != received || record.position != received;
      wrong += record.token != (int32_t)(received * 7u) || events[i].record != received;
      ++received;
      wrong += clb_result_advance(f.base, 1, received) != CLB_OK;
    }
  }
  void* failed = NULL;
  CHECK_EQ(pthread_join(thread, &failed), 0);
  CHECK(failed == NULL);
  CHECK_EQ(wrong, 0);
  free(f.base);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(layout_has_no_overlap),        TEST(plan_refuses_values_out_of_range),
                                   TEST(check_refuses_foreign_memory), TEST(commands_are_all_or_nothing),
                                   TEST(events_are_never_overwritten), TEST(records_wait_for_the_reader),
                                   TEST(broken_indices_read_as_empty), TEST(broken_header_is_refused),
                                   TEST(counters_come_back),           TEST(blocks_belong_to_one_slot),
                                   TEST(statuses_have_names),          TEST(two_threads_agree)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
