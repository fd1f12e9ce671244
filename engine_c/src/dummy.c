/*
 * dummy.c: seeded random weights, for measuring and testing any configuration without its files.
 *
 * Value i of a section, counted as in the flat layout, is uniform with mean 0, from a hash of (seed, role, layer,
 * expert) stepped i times, so it depends on nothing else: not on precision, layout or order of filling. The spread
 * keeps activations near 1: a matrix with n inputs has standard deviation 1 / sqrt(n), the embedding 1, biases 0.1;
 * norms are exactly 1.
 *
 * Of a quantised matrix the value itself is random, from the same hash, and all groups have the same scale: int8
 * -127 .. 127 with scale w / 127 (w: half the width of the distribution), int4 0 .. 15 with w / 8 and zero points 8,
 * fp8 any finite bits, whose root mean square is 112, with w / 194.
 *
 * Pure functions; no state.
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

/* Value `index` of a quantised matrix, as its bits. */
static uint8_t bits_at(uint64_t key, uint64_t index, uint32_t precision) {
  const uint8_t byte = (uint8_t)(mix(key + (index + 1u) * 0x9e3779b97f4a7c15u) >> 56);
  switch (precision) {
    case CLB_INT8:
      return byte == 0x80u ? 0x81u : byte;
    case CLB_INT4:
      return (uint8_t)(byte >> 4);
    default:
      return (byte & 0x7fu) == 0x7fu ? (uint8_t)(byte ^ 1u) : byte;
  }
}

static void store_bits(uint8_t* values, const clb_section_desc* section, uint64_t row, uint64_t col, uint8_t bits) {
  const uint64_t tile = row / CLB_TILE_ROWS;
  const uint64_t lane = row % CLB_TILE_ROWS;
  const uint64_t cols = section->cols;
  switch (section->precision) {
    case CLB_INT8:
      values[(tile * (clb_align_up(cols, 4) / 4u) + col / 4u) * 64u + lane * 4u + col % 4u] = bits;
      break;
    case CLB_INT4: {
      uint8_t* const pair = &values[(tile * (cols / 8u) + col / 8u) * 64u + lane * 4u + col % 4u];
      const uint32_t both = col / 4u % 2u == 0u ? (uint32_t)bits : (uint32_t)*pair | ((uint32_t)bits << 4);
      *pair = (uint8_t)both;
      break;
    }
    default:
      values[clb_rows16_index(row, col, cols)] = bits;
      break;
  }
}

void clb_dummy_quantised(uint64_t seed, const clb_section_desc* section, void* data) {
  CLB_ASSERT(clb_is_quantised(section->precision) && section->layout == CLB_LAYOUT_ROWS16);
  const clb_place place = {section->role, section->layer, section->expert};
  const uint64_t key = clb_dummy_key(seed, place);
  const float half = clb_dummy_half_width(section->role, section->cols);
  const clb_parts parts = clb_parts_of(section);
  uint8_t* const bytes = data;
  (void)memset(bytes, 0, (size_t)parts.values);
  for (uint64_t row = 0; row < section->rows; ++row) {
    for (uint64_t col = 0; col < section->cols; ++col) {
      const uint64_t number = section->role == CLB_ROLE_DOWN ? col * section->rows + row : row * section->cols + col;
      store_bits(bytes, section, row, col, bits_at(key, number, section->precision));
    }
  }
  const uint32_t wide = section->precision == CLB_FP8 ? CLB_FP32 : CLB_FP16;
  const float scale = section->precision == CLB_INT8   ? half / 127.0f
                      : section->precision == CLB_INT4 ? half / 8.0f
                                                       : half / 194.0f;
  for (uint64_t i = 0; i < parts.scales / clb_element_bytes(wide); ++i) {
    store(bytes + parts.scales_at, wide, i, scale);
  }
  (void)memset(bytes + parts.zeros_at, 8, (size_t)parts.zeros);
}
