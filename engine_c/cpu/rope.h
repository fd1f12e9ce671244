/*
 * rope.h: rotary position embedding, the half-split form: dimension i of a head turns with dimension
 * i + head_dim / 2. Angles are computed once per step and token, and shared by all layers and heads
 * (clb_ops.rope turns them).
 */
#ifndef CLB_CPU_ROPE_H
#define CLB_CPU_ROPE_H

#include <stdint.h>

/* table[0 .. half) = cos(position * inv_freq[i]) * scale, table[half .. 2 half) = sin(...) * scale. */
void clb_rope_table(uint32_t position, const float* inv_freq, uint32_t half, float scale, float* table);

#endif /* CLB_CPU_ROPE_H */
