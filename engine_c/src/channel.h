/*
 * channel.h: the engine's side of the shared mapping. The public half is in colibri.h.
 *
 *   ring   | head (u64) pad 64 | tail (u64) pad 64 | entries[capacity] |
 *   head: entries written since init, tail: entries read; both only grow; entry i lies at i % capacity.
 *   The producer stores head with release after the entry; the consumer loads it with acquire, and the same for tail.
 *
 * Distrust: the engine keeps its own copy of configuration, layout, and of the index that it owns. Of the other side's
 * index only the distance to its own is used, after a range check; a distance above the capacity is "broken" and
 * reads as empty (or as no room), never as memory outside the ring. Slots and counts in entries are checked by their
 * user. The daemon's half recomputes the layout from the header at each call and refuses a header whose configuration
 * and total_bytes no longer agree.
 *
 * Why the event ring cannot overflow: a slot has at most result_records unread TOKEN events (a record is written only
 * if there is room, and the daemon frees it after it popped the event), one OPENED and one closing event, and the
 * daemon opens a slot again only after it popped the closing event. Of replaced experts a slot is told once, and again
 * only when the daemon has popped that. Capacity is slots * (result_records + 5) + 1.
 *
 * Threads: the engine loop only, except progress and stats, which any thread may read.
 */
#ifndef CLB_CHANNEL_H
#define CLB_CHANNEL_H

#include <stdbool.h>
#include <stdint.h>

#include "../include/colibri.h"

#define CLB_COMMAND_CAPACITY 1024u
#define CLB_RING_HEADER_BYTES 128u
#define CLB_MAX_RESULT_RECORDS 65536u
#define CLB_CHANNEL_MAX_HIDDEN 65536u

/* Embedded in its owner; fields are private. */
typedef struct clb_channel {
  uint8_t* base; /* not owned */
  clb_channel_config config;
  clb_channel_layout layout;
  uint64_t command_tail;               /* ours */
  uint64_t event_head;                 /* ours */
  uint64_t record_head[CLB_MAX_SLOTS]; /* ours */
  uint32_t broken;                     /* 1 once the other side's index was out of range */
  uint32_t reserved;
} clb_channel;

/* Engine: clb_channel_check, then private copies. Fails like clb_channel_check: *channel is then zero. */
int32_t clb_channel_attach(clb_channel* channel, void* base, uint64_t bytes, const clb_channel_config* config);

/* 1 if a command was taken, 0 if there is none (or the ring is broken). */
uint32_t clb_channel_pop_command(clb_channel* channel, clb_command* command);
/* Commands that wait. */
uint32_t clb_channel_pending(const clb_channel* channel);

/* FULL iff there is no room, which only a daemon that breaks the protocol can bring about: treat as a fault. */
int32_t clb_channel_push_event(clb_channel* channel, const clb_event* event);
/* Has the daemon popped the events before number `head` (event_head when it was pushed)? */
bool clb_channel_events_taken(const clb_channel* channel, uint64_t head);

/* Start a slot's result block for a new generation: head = tail = 0, counters zero. Only at OPEN, when the daemon
   neither reads records nor advances. slot < slots (asserted, here and below). */
void clb_channel_slot_open(clb_channel* channel, uint32_t slot, uint64_t generation);

/* Free records of the slot's ring. An engine with steps in flight compares it with the records that these will write.
 */
uint64_t clb_channel_room(clb_channel* channel, uint32_t slot);
/* 1 iff the slot's ring has room for a record. */
bool clb_channel_has_room(clb_channel* channel, uint32_t slot);
/* Where the next record goes; NULL iff there is no room. Visible to the daemon after commit, which returns the index
   of the record since open (the event's `record`). */
clb_record* clb_channel_record(clb_channel* channel, uint32_t slot);
uint64_t clb_channel_commit(clb_channel* channel, uint32_t slot);

/* Parts of a slot's blocks. Request memory can change under our hands: copy, then check, then use the copy. */
const clb_request* clb_channel_request(const clb_channel* channel, uint32_t slot);
const int32_t* clb_channel_tokens(const clb_channel* channel, uint32_t slot);                   /* (max_seq_len) */
const clb_bias* clb_channel_bias(const clb_channel* channel, uint32_t slot);                    /* (CLB_MAX_BIAS) */
const int32_t* clb_channel_stops(const clb_channel* channel, uint32_t slot);                    /* (CLB_MAX_STOP_IDS) */
const clb_expert_policy* clb_channel_policy(const clb_channel* channel, uint32_t slot);         /* (layers) */
const uint32_t* clb_channel_mask(const clb_channel* channel, uint32_t slot, uint32_t position); /* ((vocab+31)/32) */
clb_result* clb_channel_result(const clb_channel* channel, uint32_t slot);
clb_prompt_record* clb_channel_prompt_records(const clb_channel* channel, uint32_t slot); /* (max_seq_len) */
float* clb_channel_pooled(const clb_channel* channel, uint32_t slot);                     /* (hidden) */
uint32_t* clb_channel_counts(const clb_channel* channel, uint32_t slot);                  /* (layers, max_experts) */

/* Header, relaxed stores. */
void clb_channel_set_phase(clb_channel* channel, uint32_t phase);
void clb_channel_set_progress(clb_channel* channel, uint64_t progress);
void clb_channel_set_loaded(clb_channel* channel, uint64_t loaded_bytes);
void clb_channel_set_stats(clb_channel* channel, const clb_stats* stats);

#endif
