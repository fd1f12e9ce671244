/*
 * lanes16.h: sixteen fp32 numbers, one per row of a tile, in the registers of the instruction set that a file is
 * compiled for. Every lanes16_*.h has the same functions; they differ in speed, and in the last bits where
 * multiplication and addition are fused.
 */
#ifndef CLB_CPU_LANES16_H
#define CLB_CPU_LANES16_H

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "lanes16_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "lanes16_avx2.h"
#else
#include "lanes16_generic.h"
#endif

#define CLB_LANES16 16u

#endif /* CLB_CPU_LANES16_H */
