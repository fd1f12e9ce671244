/*
 * memory_map.h: memory of this process from the system, with a huge-page policy. What the CPU backend gives to
 * the memory pool.
 *
 * Threads: a clb_map belongs to its owner; the calls keep no state.
 */
#ifndef CLB_MEMORY_MAP_H
#define CLB_MEMORY_MAP_H

#include <stdint.h>

#include "../include/colibri.h"

#define CLB_MAP_MIN_ALIGNMENT 4096u
#define CLB_MAP_MAX_ALIGNMENT 1073741824u

enum {
  CLB_MAP_SMALL = 0,   /* ordinary pages */
  CLB_MAP_ADVISED = 1, /* ordinary mapping, transparent huge pages were asked for and the kernel said yes */
  CLB_MAP_HUGE = 2     /* 2 MiB pages of the huge page pool */
}; /* clb_map_kind */

typedef struct clb_map {
  void* base;     /* NULL = nothing is mapped; a multiple of alignment */
  uint64_t bytes; /* what was asked, rounded up to the page size in use */
  uint32_t kind;  /* clb_map_kind: what was got */
  uint32_t reserved;
} clb_map;

/* Private anonymous zeroed memory of this process. policy: clb_huge_pages. alignment: a power of two,
   CLB_MAP_MIN_ALIGNMENT .. CLB_MAP_MAX_ALIGNMENT. OFF: ordinary pages. TRY: ordinary pages, transparent huge pages
   asked for; never fails for lack of them. REQUIRE: 2 MiB pages of the pool (MAP_HUGETLB). ARGUMENT iff bytes is 0 or
   overflows, or alignment or policy is invalid. MEMORY iff the kernel refuses. On failure *map is empty. The caller
   owns the mapping until clb_map_close. */
int32_t clb_map_open(clb_map* map, uint64_t bytes, uint64_t alignment, uint32_t policy);
/* Accepts an empty map; leaves it empty. */
void clb_map_close(clb_map* map);

#endif
