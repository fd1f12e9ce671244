/* alloc_hook.c: see alloc_hook.h. */
#define _DEFAULT_SOURCE 1

#include "alloc_hook.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

alloc_hook_counts alloc_hook;
static uint64_t fail_in;

/* The names are what the linker's --wrap makes of them. NOLINTBEGIN(bugprone-reserved-identifier) */
void* __real_malloc(size_t bytes);
void* __real_calloc(size_t count, size_t bytes);
void* __real_realloc(void* block, size_t bytes);
void* __real_aligned_alloc(size_t alignment, size_t bytes);
void __real_free(void* block);
void* __real_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset);
void* __real_mmap64(void* at, size_t bytes, int protection, int flags, int fd, int64_t offset);
int __real_munmap(void* at, size_t bytes);
void* __wrap_malloc(size_t bytes);
void* __wrap_calloc(size_t count, size_t bytes);
void* __wrap_realloc(void* block, size_t bytes);
void* __wrap_aligned_alloc(size_t alignment, size_t bytes);
void __wrap_free(void* block);
void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset);
void* __wrap_mmap64(void* at, size_t bytes, int protection, int flags, int fd, int64_t offset);
int __wrap_munmap(void* at, size_t bytes);

void alloc_hook_fail(uint64_t n) { fail_in = n; }

static int refused(void) {
  ++alloc_hook.calls;
  if (fail_in == 0 || --fail_in > 0) {
    return 0;
  }
  errno = ENOMEM;
  return 1;
}

static void* taken(void* block) {
  alloc_hook.live_blocks += block == NULL ? 0 : 1;
  return block;
}

void* __wrap_malloc(size_t bytes) { return refused() ? NULL : taken(__real_malloc(bytes)); }

void* __wrap_calloc(size_t count, size_t bytes) { return refused() ? NULL : taken(__real_calloc(count, bytes)); }

void* __wrap_realloc(void* block, size_t bytes) {
  if (refused()) {
    return NULL;
  }
  return block == NULL ? taken(__real_realloc(block, bytes)) : __real_realloc(block, bytes);
}

void* __wrap_aligned_alloc(size_t alignment, size_t bytes) {
  return refused() ? NULL : taken(__real_aligned_alloc(alignment, bytes));
}

void __wrap_free(void* block) {
  alloc_hook.live_blocks -= block == NULL ? 0 : 1;
  __real_free(block);
}

static void* mapped(void* base, size_t bytes, int flags) {
  if (base != MAP_FAILED && (flags & MAP_FIXED) == 0) { /* a fixed mapping replaces one that was counted */
    alloc_hook.mapped_bytes += (int64_t)bytes;
  }
  return base;
}

void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return refused() ? MAP_FAILED : mapped(__real_mmap(at, bytes, protection, flags, fd, offset), bytes, flags);
}

void* __wrap_mmap64(void* at, size_t bytes, int protection, int flags, int fd, int64_t offset) {
  return refused() ? MAP_FAILED : mapped(__real_mmap64(at, bytes, protection, flags, fd, offset), bytes, flags);
}

int __wrap_munmap(void* at, size_t bytes) {
  alloc_hook.mapped_bytes -= (int64_t)bytes;
  return __real_munmap(at, bytes);
}
/* NOLINTEND(bugprone-reserved-identifier) */
