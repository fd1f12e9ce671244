/*
 * memory_pool.h: blocks out of memory that somebody else owns.
 *
 * A pool has tiers (weights, KV, temporaries). A tier is a range of addresses, never dereferenced here:
 * it may be device memory. All bookkeeping lies in a host array of nodes given at open.
 *
 *   tier      0                                                        bytes
 *             | used | free      | used | used | free                  |
 *   nodes       0 <--> 4 <---------> 1 <--> 2 <--> 3        (linked in address order)
 *   free list          4 <---------------------> 3          (the free ones, also in address order)
 *
 * Invariant: the blocks cover the tier without gaps, in order; no two free blocks are neighbours;
 * every block is a positive multiple of page_bytes. Holds before and after every call (clb_pool_check).
 *
 * Policy: best fit, ties to the lowest address. Small runs then fill holes of their own size and the large
 * holes stay whole for long runs, which matters more here than speed: a tier has few free blocks.
 *
 * Threads: one owner; no locking. Allocates nothing, keeps no pointer but those given at open.
 */
#ifndef CLB_MEMORY_POOL_H
#define CLB_MEMORY_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../include/colibri.h"

enum { CLB_TIER_WEIGHTS = 0, CLB_TIER_KV = 1, CLB_TIER_TEMP = 2 };
#define CLB_TIER_COUNT 3u

/* Who holds a block; the statistics are kept per class. */
enum {
  CLB_MEM_DENSE = 0,      /* dense weights */
  CLB_MEM_EXPERT = 1,     /* routed experts' weights */
  CLB_MEM_OWN_RUN = 2,    /* KV of one slot */
  CLB_MEM_SHARED_RUN = 3, /* KV of a shared prefix */
  CLB_MEM_DISPATCH = 4,   /* expert dispatch buffers */
  CLB_MEM_STEP = 5,       /* activations of a step */
  CLB_MEM_STACK = 6,      /* per-thread stacks */
  CLB_MEM_OTHER = 7
};
#define CLB_MEM_CLASS_COUNT 8u

#define CLB_POOL_NONE UINT32_MAX
#define CLB_POOL_MAX_NODES 1048576u
#define CLB_POOL_MIN_PAGE 4096u
#define CLB_POOL_MAX_PAGE 1073741824u

/* One block of a tier. Private to memory_pool.c; the caller only provides the array. */
typedef struct clb_pool_node {
  uint64_t offset; /* bytes from the tier's base */
  uint64_t bytes;
  uint32_t prev; /* neighbours in address order; unused nodes are chained by next */
  uint32_t next;
  uint32_t free_prev;
  uint32_t free_next;
  uint32_t state; /* 0 unused node, 1 free block, 2 used block */
  uint32_t mem_class;
} clb_pool_node;

typedef struct clb_pool_tier_config {
  uint64_t base;        /* address of the first byte, host or device */
  uint64_t bytes;       /* rounded down to a multiple of page_bytes; 0 = the tier is empty */
  uint32_t page_bytes;  /* power of two, CLB_POOL_MIN_PAGE .. CLB_POOL_MAX_PAGE */
  uint32_t node_count;  /* most blocks, free ones included, >= 1; 2 * (most used blocks at a time) + 1 is always enough,
                           because no two free blocks are neighbours */
  clb_pool_node* nodes; /* (node_count), owned by the caller until close, host memory */
} clb_pool_tier_config;

typedef struct clb_pool_tier {
  uint64_t base;
  uint64_t bytes;
  uint64_t used;
  uint64_t peak;
  uint64_t class_bytes[CLB_MEM_CLASS_COUNT];
  uint32_t class_blocks[CLB_MEM_CLASS_COUNT];
  clb_pool_node* nodes;
  uint32_t node_count;
  uint32_t page_bytes;
  uint32_t first;      /* lowest block */
  uint32_t free_first; /* lowest free block */
  uint32_t spare;      /* chain of unused nodes */
  uint32_t blocks;     /* used + free */
  uint32_t free_blocks;
} clb_pool_tier;

/* Embedded in its owner; fields are private. */
typedef struct clb_pool {
  clb_pool_tier tiers[CLB_TIER_COUNT];
  uint64_t allocations; /* successful ones since open */
  uint64_t fail_at;     /* fault injection: this many more calls, then one failure; 0 = off */
} clb_pool;

/* What an allocation returns; all zero with node CLB_POOL_NONE is "nothing". */
typedef struct clb_extent {
  uint64_t offset; /* bytes from the tier's base, a multiple of page_bytes and of the alignment */
  uint64_t bytes;  /* what was asked, rounded up to page_bytes */
  uint32_t tier;
  uint32_t node;
} clb_extent;

typedef struct clb_pool_stats {
  uint64_t bytes;
  uint64_t used;
  uint64_t peak;
  uint64_t largest_free;
  uint32_t page_bytes;
  uint32_t blocks;
  uint32_t free_blocks;
  uint32_t reserved;
  uint64_t class_bytes[CLB_MEM_CLASS_COUNT];
  uint32_t class_blocks[CLB_MEM_CLASS_COUNT];
} clb_pool_stats;

/* O(nodes). ARGUMENT iff a limit above is exceeded, base + bytes overflows, or base is not a multiple of
   page_bytes. The pool then holds nothing. */
int32_t clb_pool_open(clb_pool* pool, const clb_pool_tier_config configs[CLB_TIER_COUNT]);

/* O(free blocks). alignment: a power of two; 0 = page. bytes >= 1.
   MEMORY iff no free block fits, no node is left, or a failure was injected.
   ARGUMENT iff tier or class is unknown, bytes is 0, alignment is no power of two or base is not a multiple of it.
   On failure nothing changed and *extent is "nothing". */
int32_t clb_pool_alloc(clb_pool* pool, uint32_t tier, uint64_t bytes, uint64_t alignment, uint32_t mem_class,
                       clb_extent* extent);

/* O(free blocks). Gives the block back, joins it with free neighbours and makes *extent "nothing".
   "nothing" is accepted. ARGUMENT iff the extent is no live block of this pool (double free): nothing changed. */
int32_t clb_pool_free(clb_pool* pool, clb_extent* extent);

/* O(1): could this many bytes ever fit into the empty tier? */
bool clb_pool_could_fit(const clb_pool* pool, uint32_t tier, uint64_t bytes);

/* bytes rounded up to a page; UINT64_MAX on overflow. */
uint64_t clb_pool_round(uint64_t bytes, uint32_t page_bytes);

/* O(free blocks). */
void clb_pool_get_stats(const clb_pool* pool, uint32_t tier, clb_pool_stats* stats);

/* O(nodes). INTERNAL iff the invariant above, the free list, or a counter is broken. */
int32_t clb_pool_check(const clb_pool* pool);

/* The n-th clb_pool_alloc from now fails with MEMORY (1 = the next one); 0 switches it off. For tests. */
void clb_pool_fail_after(clb_pool* pool, uint64_t n);

/* Who holds what, as lines of text; always terminated; returns the length that the whole text needs. */
size_t clb_pool_report(const clb_pool* pool, char* text, size_t bytes);

/* STATE iff a block is still held (the pool stays open). Frees no memory: base and nodes are the caller's. */
int32_t clb_pool_close(clb_pool* pool);

#endif
