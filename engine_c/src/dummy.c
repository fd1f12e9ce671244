/*
 * dummy.c: seeded random weights, for measuring and testing any configuration without its files.
 *
 * Value i of a section, counted as in the flat layout, is uniform with mean 0, from a hash of (seed, role, layer,
 * expert) stepped i times, so it depends on nothing else: not on precision, layout or order of filling. The spread
 * keeps activations near 1: a matrix with n inputs has standard deviation 1 / sqrt(n), the embedding 1, biases 0.1;
 * norms are exactly 1. Pure functions; no state.
 */
#include <math.h>
#include <string.h>

#include "invariant.h"
#include "loader_internal.h"
#include "number.h"

static uint64_t mix(uint64_t value) {
  const uint64_t once = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  const uint64_t twice = (once ^ (once >> 27)) * 0x94d049bb133111ebu;
  return twice ^ (twice >> 31);
}

uint64_t clb_dummy_key(uint64_t seed, clb_place place) {
  uint64_t key = mix(seed + 0x9e3779b97f4a7c15u);
  key = mix(key ^ place.role);
  key = mix(key ^ (uint32_t)place.layer);
  return mix(key ^ (uint32_t)place.expert);
}

float clb_dummy_half_width(uint32_t role, uint32_t inputs) {
  const float root3 = 1.7320508f;
  switch (role) {
    case CLB_ROLE_FINAL_NORM:
    case CLB_ROLE_ATTN_NORM:
    case CLB_ROLE_FFN_NORM:
    case CLB_ROLE_Q_NORM:
    case CLB_ROLE_K_NORM:
      return 0.0f;
    case CLB_ROLE_EMBEDDING:
      return root3;
    case CLB_ROLE_QKV_BIAS:
    case CLB_ROLE_OUT_BIAS:
      return 0.1f * root3;
    default:
      return root3 / sqrtf((float)inputs);
  }
}

static uint16_t bf16_of_float(float value) {
  const uint32_t bits = clb_bits_of_float(value);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static float value_at(uint64_t key, uint64_t index, float half) {
  if (half == 0.0f) {
    return 1.0f;
  }
  const uint64_t bits = mix(key + (index + 1u) * 0x9e3779b97f4a7c15u) >> 40; /* 24 bits */
  return ((float)bits * 0x1p-23f - 1.0f) * half;
}

static void store(void* data, uint32_t precision, uint64_t index, float value) {
  if (precision == CLB_FP32) {
    ((float*)data)[index] = value;
  } else {
    ((uint16_t*)data)[index] = precision == CLB_FP16 ? clb_half_of_float(value) : bf16_of_float(value);
  }
}

void clb_dummy_fill(uint64_t seed, clb_place place, uint32_t precision, uint32_t layout, uint32_t rows, uint32_t cols,
                    void* data) {
  CLB_ASSERT(rows > 0u && cols > 0u);
  CLB_ASSERT(precision <= CLB_BF16);
  const uint64_t key = clb_dummy_key(seed, place);
  const bool transposed = place.role == CLB_ROLE_DOWN;
  const bool tiled = layout == CLB_LAYOUT_ROWS16;
  const float half = clb_dummy_half_width(place.role, transposed && !tiled ? rows : cols);
  for (uint64_t row = 0; row < rows; ++row) {
    for (uint64_t col = 0; col < cols; ++col) {
      const uint64_t number = transposed && tiled ? col * rows + row : row * cols + col;
      store(data, precision, tiled ? clb_rows16_index(row, col, cols) : number, value_at(key, number, half));
    }
  }
  for (uint64_t row = rows; tiled && row % CLB_TILE_ROWS != 0u; ++row) {
    for (uint64_t col = 0; col < cols; ++col) {
      store(data, precision, clb_rows16_index(row, col, cols), 0.0f);
    }
  }
}
