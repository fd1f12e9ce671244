/*
 * seam_abi.h: what the seam trial's C code, its two stand-in kernels and the test share. Test-only.
 *
 * The stand-in model: a table of logits, one row a token id. A step takes each slot's current token, routes its row,
 * and the next token is (token + sum over kept ranks r of (r + 1) * (expert + 1)) mod rows. So every output token
 * depends on all of the router's choices, and a wrong one is seen.
 *
 * The mailbox lies in host memory that the device writes:
 *   | sequence (u64) pad 64 | events[SEAM_RING][SEAM_ROWS] |
 * Step s writes its rows to events[s % SEAM_RING], then stores sequence = s + 1 with release to the whole system.
 */
#ifndef CLB_SEAM_ABI_H
#define CLB_SEAM_ABI_H

#include "../../kernels_cu/abi.h"

#define SEAM_ROWS 8u /* most slots of a step */
#define SEAM_RING 4u /* steps in the mailbox and in the staging ring; the host runs at most 2 ahead */
#define SEAM_STOPS 4u
#define SEAM_TOKEN 1u          /* flags: the row holds a token */
#define SEAM_STOP 2u           /* ... and it is a stop id */
#define SEAM_LENGTH 4u         /* ... and max_tokens is reached */
#define SEAM_RECORD_BYTES 176u /* sizeof(clb_record) */

typedef struct seam_event {
  uint64_t generation;
  uint32_t slot;
  uint32_t flags;
  uint32_t position;
  int32_t token;
  uint32_t kept;
  float weight; /* of rank 0 */
} seam_event;

/* One slot in device memory. */
typedef struct seam_slot {
  uint64_t generation;
  uint64_t records; /* device address of the slot's record ring in the channel */
  uint32_t active;
  uint32_t position;
  uint32_t max_tokens;
  uint32_t record_mask; /* records of the ring - 1 */
  int32_t token;        /* current input */
  uint32_t stop_count;
  int32_t stops[SEAM_STOPS];
} seam_slot;

typedef struct seam_gather_args {
  CLB_DEVICE_PTR(const float) table;          /* (rows, E) */
  CLB_DEVICE_PTR(const seam_slot) slots;      /* (slots) */
  CLB_DEVICE_PTR(const uint32_t) row_slots;   /* (T) */
  CLB_DEVICE_PTR(const uint32_t) token_count; /* (1) */
  CLB_DEVICE_PTR(float) logits;               /* (T, E) */
  uint32_t experts;
  uint32_t rows;
} seam_gather_args;
CLB_SIZE_ASSERT(seam_gather_args, 48);

typedef struct seam_publish_args {
  CLB_DEVICE_PTR(const uint32_t) indices;     /* (T, K) */
  CLB_DEVICE_PTR(const float) weights;        /* (T, K) */
  CLB_DEVICE_PTR(const uint32_t) kept;        /* (T) */
  CLB_DEVICE_PTR(const uint32_t) row_slots;   /* (T) */
  CLB_DEVICE_PTR(const uint32_t) token_count; /* (1) */
  CLB_DEVICE_PTR(seam_slot) slots;            /* (slots) */
  CLB_DEVICE_PTR(uint64_t) step;              /* (1) in device memory */
  CLB_DEVICE_PTR(unsigned char) mailbox;      /* mapped host memory */
  uint32_t k_max;
  uint32_t rows;
} seam_publish_args;
CLB_SIZE_ASSERT(seam_publish_args, 72);

#endif /* CLB_SEAM_ABI_H */
