/*
 * lanes16.h: sixteen fp32 numbers, one per row of a tile, in the registers of the instruction set that a file is
 * compiled for. Every lanes16_*.h has the same functions; they differ in speed, and in the last bits where
 * multiplication and addition are fused.
 */
#ifndef CLB_CPU_LANES16_H
#define CLB_CPU_LANES16_H

#include "lanes16_generic.h"

#define CLB_LANES16 16u

#endif /* CLB_CPU_LANES16_H */
