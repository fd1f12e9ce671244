/*
 * norm.h: RMSNorm in fp32. Pure; one order of additions per token (8 partial sums).
 */
#ifndef CLB_CPU_NORM_H
#define CLB_CPU_NORM_H

#include <stdint.h>

/* output[i][c] = input[i][c] / sqrt(mean_c(input[i][c]^2) + epsilon) * weight[c].
   input, output: (tokens, cols), dense, may be the same memory. weight: (cols). */
void clb_rms_norm(const float* input, const float* weight, float epsilon, uint32_t tokens, uint32_t cols,
                  float* output);

#endif /* CLB_CPU_NORM_H */
