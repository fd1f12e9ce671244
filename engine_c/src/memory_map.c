/*
 * memory_map.c: see memory_map.h.
 *
 * Owns nothing. An aligned mapping is made by reserving address space that is longer by the alignment, cutting off
 * both ends, and mapping over what is left.
 */
#include "memory_map.h"

#include <linux/mman.h> /* MAP_HUGE_2MB */
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "invariant.h"

#define HUGE_BYTES 2097152u

static bool is_alignment(uint64_t value) {
  return value >= CLB_MAP_MIN_ALIGNMENT && value <= CLB_MAP_MAX_ALIGNMENT && (value & (value - 1u)) == 0u;
}

/* Address space only: a range of `bytes` at the alignment, to be mapped over; NULL if the kernel refuses. */
static uint8_t* reserve_range(uint64_t bytes, uint64_t alignment) {
  const uint64_t whole = bytes + alignment;
  void* got = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) {
    return NULL;
  }
  uint8_t* start = got;
  const uint64_t head = (alignment - (uintptr_t)got % alignment) % alignment;
  if (head > 0u) {
    (void)munmap(start, head);
  }
  (void)munmap(start + head + bytes, whole - head - bytes);
  return start + head;
}

static uint32_t advise(uint8_t* base, uint64_t bytes, uint32_t policy) {
  if (policy == CLB_HUGE_TRY) {
    return madvise(base, bytes, MADV_HUGEPAGE) == 0 ? CLB_MAP_ADVISED : CLB_MAP_SMALL;
  }
  (void)madvise(base, bytes, MADV_NOHUGEPAGE); /* refused only where there are no huge pages to keep away */
  return CLB_MAP_SMALL;
}

int32_t clb_map_open(clb_map* map, uint64_t bytes, uint64_t alignment, uint32_t policy) {
  CLB_ASSERT(map != NULL);
  (void)memset(map, 0, sizeof *map);
  if (bytes == 0u || bytes > UINT64_MAX / 4u || policy > CLB_HUGE_REQUIRE) {
    return CLB_ERR_ARGUMENT;
  }
  if (!is_alignment(alignment)) {
    return CLB_ERR_ARGUMENT;
  }
  const long system_page = sysconf(_SC_PAGESIZE);
  CLB_ASSERT(system_page > 0 && is_alignment((uint64_t)system_page));
  const uint32_t page = policy == CLB_HUGE_REQUIRE ? HUGE_BYTES : (uint32_t)system_page;
  const uint64_t rounded = (bytes + page - 1u) & ~((uint64_t)page - 1u);
  const uint32_t least = policy != CLB_HUGE_OFF && rounded >= HUGE_BYTES ? HUGE_BYTES : page;
  uint8_t* base = reserve_range(rounded, alignment > least ? alignment : least);
  if (base == NULL) {
    return CLB_ERR_MEMORY;
  }
  const int flags = policy == CLB_HUGE_REQUIRE ? MAP_HUGETLB | MAP_HUGE_2MB : 0;
  void* got = mmap(base, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | flags, -1, 0);
  if (got == MAP_FAILED) {
    (void)munmap(base, rounded); /* the reservation */
    return CLB_ERR_MEMORY;
  }
  map->base = base;
  map->bytes = rounded;
  map->kind = policy == CLB_HUGE_REQUIRE ? CLB_MAP_HUGE : advise(base, rounded, policy);
  return CLB_OK;
}

void clb_map_close(clb_map* map) {
  CLB_ASSERT(map != NULL);
  if (map->base != NULL) {
    const int failed = munmap(map->base, map->bytes);
    CLB_ASSERT(failed == 0);
  }
  (void)memset(map, 0, sizeof *map);
}
