/*
 * alloc_hook.h: counts what the program takes from the system, and refuses it on request.
 *
 * Link the program with --wrap for malloc, calloc, realloc, aligned_alloc, free, mmap, mmap64 and munmap. Only calls
 * from our own objects are seen, not those inside the C library. One thread.
 */
#ifndef CLB_ALLOC_HOOK_H
#define CLB_ALLOC_HOOK_H

#include <stdint.h>

typedef struct alloc_hook_counts {
  uint64_t calls;       /* that asked for memory */
  int64_t live_blocks;  /* taken minus given back */
  int64_t mapped_bytes; /* the same for mappings, which are cut piece by piece */
} alloc_hook_counts;

extern alloc_hook_counts alloc_hook;

/* The n-th call from now fails (1 = the next); 0: none does. */
void alloc_hook_fail(uint64_t n);

#endif /* CLB_ALLOC_HOOK_H */
