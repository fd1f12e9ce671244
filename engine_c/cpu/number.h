/*
 * number.h: 16-bit floating-point numbers to and from fp32, bit by bit, so that every machine gets the
 * same bits and loops over them vectorise without special instructions. Pure functions.
 *
 * Weights are finite (the loader checks), so the widening functions need not treat NaN and infinity.
 */
#ifndef CLB_CPU_NUMBER_H
#define CLB_CPU_NUMBER_H

#include <stdint.h>

static inline float clb_float_of_bits(uint32_t bits) {
  const union {
    uint32_t bits;
    float value;
  } same = {.bits = bits};
  return same.value;
}

static inline uint32_t clb_bits_of_float(float value) {
  const union {
    float value;
    uint32_t bits;
  } same = {.value = value};
  return same.bits;
}

static inline float clb_float_of_bf16(uint16_t value) { return clb_float_of_bits((uint32_t)value << 16); }

/* e4m3 as the half of a 256th of its value: exponents are biased by 7 there and by 15 here. */
static inline uint16_t clb_half_of_fp8(uint8_t value) {
  return (uint16_t)(((uint32_t)value & 0x80u) << 8 | ((uint32_t)value & 0x7fu) << 7);
}

/* Exact also under flush-to-zero: a subnormal half is made from an integer, never from a subnormal float. */
static inline float clb_float_of_half(uint16_t value) {
  const uint32_t sign = ((uint32_t)value & 0x8000u) << 16;
  const uint32_t magnitude = (uint32_t)value & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + 0x38000000u;
  const uint32_t subnormal = clb_bits_of_float((float)(int32_t)magnitude * 0x1p-24f);
  return clb_float_of_bits(sign | (magnitude < 0x0400u ? subnormal : normal));
}

/* Round to nearest even; magnitudes above the largest half become the largest half, NaN too. */
static inline uint16_t clb_half_of_float(float value) {
  const uint32_t bits = clb_bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x477ff000u) { /* rounds to 65520 or more */
    return (uint16_t)(sign | 0x7bffu);
  }
  if (magnitude < 0x38800000u) { /* below 2^-14: the half is subnormal, a multiple of 2^-24 */
    const float scaled = clb_float_of_bits(magnitude) * 0x1p24f + 0x1p23f; /* the addition rounds */
    return (uint16_t)(sign | (clb_bits_of_float(scaled) - 0x4b000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

#endif /* CLB_CPU_NUMBER_H */
