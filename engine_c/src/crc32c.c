/*
 * crc32c.c: CRC-32C (Castagnoli) in software, eight bytes a step ("slicing by 8").
 *
 * Table k holds, for each byte value, the remainder of that byte followed by k zero bytes, so the eight lookups of
 * one step are independent of each other. The tables are constants of the program: no set-up, no lock, and any
 * thread may call. About 2 GB/s on one core, well above a disk.
 */
#include <string.h>

#include "colibri.h"
#include "crc32c_tables.h"

static uint32_t step_bytes(uint32_t start, const uint8_t* data, size_t bytes) {
  uint32_t crc = start;
  for (size_t i = 0; i < bytes; ++i) {
    crc = (crc >> 8) ^ clb_crc32c_tables[0][(crc ^ data[i]) & 0xffu];
  }
  return crc;
}

uint32_t clb_crc32c(uint32_t before, const void* data, size_t bytes) {
  const uint8_t* next = data;
  uint32_t crc = ~before;
  size_t left = bytes;
  while (left >= 8u) {
    /* Composed from bytes so that the result is the same on every byte order; compilers make it one load. */
    const uint32_t low =
        crc ^ ((uint32_t)next[0] | (uint32_t)next[1] << 8 | (uint32_t)next[2] << 16 | (uint32_t)next[3] << 24);
    crc = clb_crc32c_tables[7][low & 0xffu] ^ clb_crc32c_tables[6][(low >> 8) & 0xffu] ^
          clb_crc32c_tables[5][(low >> 16) & 0xffu] ^ clb_crc32c_tables[4][low >> 24] ^ clb_crc32c_tables[3][next[4]] ^
          clb_crc32c_tables[2][next[5]] ^ clb_crc32c_tables[1][next[6]] ^ clb_crc32c_tables[0][next[7]];
    next += 8;
    left -= 8u;
  }
  return ~step_bytes(crc, next, left);
}
