/*
 * rope.h: rotary position embedding, the half-split form: dimension i of a head turns with dimension
 * i + head_dim / 2. Angles are computed once per step and token, and shared by all layers and heads.
 */
#ifndef CLB_CPU_ROPE_H
#define CLB_CPU_ROPE_H

#include <stdint.h>

/* table[0 .. half) = cos(position * inv_freq[i]) * scale, table[half .. 2 half) = sin(...) * scale. */
void clb_rope_table(uint32_t position, const float* inv_freq, uint32_t half, float scale, float* table);

/* Turns `heads` heads of 2 * half floats in place by one token's table. */
void clb_rope_apply(const float* table, uint32_t half, uint32_t heads, float* values);

#endif /* CLB_CPU_ROPE_H */
