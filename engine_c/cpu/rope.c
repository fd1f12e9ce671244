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

void clb_rope_apply(const float* table, uint32_t half, uint32_t heads, float* values) {
  const float* const cosines = table;
  const float* const sines = table + half;
  for (size_t h = 0; h < heads; ++h) {
    float* const low = values + h * 2 * half;
    float* const high = low + half;
    for (size_t i = 0; i < half; ++i) {
      const float a = low[i];
      const float b = high[i];
      low[i] = a * cosines[i] - b * sines[i];
      high[i] = b * cosines[i] + a * sines[i];
    }
  }
}
