/*
 * vector.h: small fp32 operations on whole rows. Pure; element by element, so no order of additions.
 */
#ifndef CLB_CPU_VECTOR_H
#define CLB_CPU_VECTOR_H

#include <stddef.h>

/* output[i] += input[i] */
void clb_vector_add(const float* input, size_t count, float* output);
/* output[i] += factor * input[i] */
void clb_vector_add_scaled(const float* input, float factor, size_t count, float* output);

#endif /* CLB_CPU_VECTOR_H */
