/*
 * dots16.h: exact sums of products of 8-bit integers, sixteen at once, one for each row of a tile: four columns of 16
 * rows of weights with four codes of a token. Every dots16_*.h has the same functions:
 *
 *   clb_ints16    16 int32
 *   clb_dots16    sums of one block (32 columns) while they are made
 *   clb_bytes64   the weights of four columns: byte 4 r + c is row r, column c
 *
 *   begin(precision, correction) ── add, at most eight times ── end(precision, sums, correction)
 *
 * Weights are moved by a constant where an instruction wants them unsigned: the correction, minus this constant
 * (CLB_DOTS16_MOVED: of INT8) times the sum of the codes, or minus the zero point times it (INT4), is added by begin or
 * by end.
 */
#ifndef CLB_CPU_DOTS16_H
#define CLB_CPU_DOTS16_H

#if defined(__AVX512VNNI__)
#include "dots16_vnni.h"
#elif defined(__AVX2__)
#include "dots16_avx2.h"
#else
#include "dots16_generic.h"
#endif

#endif /* CLB_CPU_DOTS16_H */
