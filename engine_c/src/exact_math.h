/*
 * exact_math.h: exp and sigmoid whose fp32 bits are the same on every CPU and on CUDA.
 *
 * The router drops experts whose score is below a share of the best one. If host and device computed that
 * score with their own libraries, a borderline expert would be kept by one and dropped by the other. Here
 * every operation is one IEEE-rounded fp32 multiply, add or divide, never contracted into a fused one
 * (C: -std=c11 turns contraction off and no flag of ours turns it on; CUDA: the __f*_rn intrinsics).
 * Pure; error of exp below 2 ulp on [-87, 87]; below -87 the result is 0, above 87 it is exp(87), so that nothing is
 * subnormal; NaN stays NaN.
 */
#ifndef CLB_EXACT_MATH_H
#define CLB_EXACT_MATH_H

#include <stdint.h>
#ifdef __CUDACC__
#define CLB_EXACT static __device__ __forceinline__
#else
#include "../cpu/number.h"
#define CLB_EXACT static inline
#endif

CLB_EXACT float clb_exact_mul(float a, float b) {
#ifdef __CUDACC__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

CLB_EXACT float clb_exact_add(float a, float b) {
#ifdef __CUDACC__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

CLB_EXACT float clb_exact_div(float a, float b) {
#ifdef __CUDACC__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

/* 2^n for n in [-126, 127]. */
CLB_EXACT float clb_exact_pow2(int32_t n) {
#ifdef __CUDACC__
  return __int_as_float((n + 127) * 8388608);
#else
  return clb_float_of_bits(((uint32_t)n + 127u) << 23);
#endif
}

CLB_EXACT float clb_exact_exp(float value) {
  const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to the nearest integer */
  const float x = value > 87.0f ? 87.0f : value;
  float n;
  float r;
  float p;
  if (value < -87.0f) {
    return 0.0f;
  }
  if (value != value) {
    return value;
  }
  n = clb_exact_add(clb_exact_add(clb_exact_mul(x, 1.44269504f), round), -round);
  /* r = x - n ln 2 in two steps: the high part has few bits, so its product with n is exact */
  r = clb_exact_add(x, clb_exact_mul(n, -0.693359375f));
  r = clb_exact_add(r, clb_exact_mul(n, 2.12194440e-4f));
  /* exp(r) on |r| <= ln 2 / 2: Taylor to r^7, whose remainder is below 2^-27 */
  p = 1.98412698e-4f;
  p = clb_exact_add(clb_exact_mul(p, r), 1.38888889e-3f);
  p = clb_exact_add(clb_exact_mul(p, r), 8.33333333e-3f);
  p = clb_exact_add(clb_exact_mul(p, r), 4.16666667e-2f);
  p = clb_exact_add(clb_exact_mul(p, r), 1.66666667e-1f);
  p = clb_exact_add(clb_exact_mul(p, r), 0.5f);
  p = clb_exact_add(clb_exact_mul(p, r), 1.0f);
  p = clb_exact_add(clb_exact_mul(p, r), 1.0f);
  return clb_exact_mul(p, clb_exact_pow2((int32_t)n));
}

CLB_EXACT float clb_exact_sigmoid(float x) { return clb_exact_div(1.0f, clb_exact_add(1.0f, clb_exact_exp(-x))); }

#endif /* CLB_EXACT_MATH_H */
