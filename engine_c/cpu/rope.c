/* rope.c: see rope.h. */
#include "rope.h"

#include <math.h>
#include <stddef.h>

void clb_rope_table(uint32_t position, const float* inv_freq, uint32_t half, float scale, float* table) {
  for (size_t i = 0; i < half; ++i) {
    const float angle = (float)position * inv_freq[i];
    table[i] = cosf(angle) * scale;
    table[half + i] = sinf(angle) * scale;
  }
}
