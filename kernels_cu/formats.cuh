/*
 * formats.cuh: how quantised weights are written ("formats" in abi.h): their widening to fp16 in registers, and where
 * the parts of a matrix lie. Device code only.
 */
#ifndef CLB_FORMATS_CUH
#define CLB_FORMATS_CUH

#include "device.cuh"

#define CLB_FORMAT_PIECE 512u /* bytes */

/* The kinds: TILES of 16 columns in a piece; GROUPED: sums are multiplied by scales. widen: operand A of tile i, from
   the lane's 16 bytes; low and high: what int4 adds for the zeros of rows g and g + 8. */
struct clb_half_kind {
  static constexpr uint32_t KIND = CLB_KIND_HALF;
  static constexpr uint32_t TILES = 1u;
  static constexpr bool GROUPED = false;
  static __device__ __forceinline__ uint4 widen(const uint4& raw, uint32_t, uint32_t, uint32_t) { return raw; }
};

/* Bytes 0, 1 and 2, 3 as fp16 1024 + byte, less 1152. */
CLB_DEVICE uint32_t clb_widen_int8(uint32_t word, uint32_t bytes) {
  return clb_half_add(__byte_perm(word, 0x64646464u, bytes), 0xe480e480u);
}

struct clb_int8_kind {
  static constexpr uint32_t KIND = CLB_KIND_INT8;
  static constexpr uint32_t TILES = 2u;
  static constexpr bool GROUPED = true;
  static __device__ __forceinline__ uint4 widen(const uint4& raw, uint32_t i, uint32_t, uint32_t) {
    const uint32_t first = (i == 0u) ? raw.x : raw.z;
    const uint32_t second = (i == 0u) ? raw.y : raw.w;
    return make_uint4(clb_widen_int8(first, 0x4140u), clb_widen_int8(first, 0x4342u), clb_widen_int8(second, 0x4140u),
                      clb_widen_int8(second, 0x4342u));
  }
};

/* A nibble under the bits of 1024 is 1024 + nibble, or, 4 bits higher, 1024 + 16 nibble. */
struct clb_int4_kind {
  static constexpr uint32_t KIND = CLB_KIND_INT4;
  static constexpr uint32_t TILES = 4u;
  static constexpr bool GROUPED = true;
  static constexpr uint32_t LOW = 0xe400e400u;  /* -1024 */
  static constexpr uint32_t HIGH = 0xd400d400u; /* -64 */
  static __device__ __forceinline__ uint32_t low_of(uint32_t word, uint32_t low) {
    return clb_half_add(clb_and_or(word, 0x000f000fu, 0x64006400u), low);
  }
  static __device__ __forceinline__ uint32_t high_of(uint32_t word, uint32_t high) {
    return clb_half_fma(clb_and_or(word, 0x00f000f0u, 0x64006400u), 0x2c002c00u, high);
  }
  static __device__ __forceinline__ uint4 widen(const uint4& raw, uint32_t i, uint32_t low, uint32_t high) {
    const uint32_t word = (i == 0u) ? raw.x : (i == 1u) ? raw.y : (i == 2u) ? raw.z : raw.w;
    return make_uint4(low_of(word, low), high_of(word, high), low_of(word >> 8, low), high_of(word >> 8, high));
  }
};

/* The bits of an e4m3 number are those of an fp16 number 2^-8 times it; CLB_FP8_SCALE makes up for that. */
#define CLB_FP8_SCALE 256.0f
struct clb_fp8_kind {
  static constexpr uint32_t KIND = CLB_KIND_FP8;
  static constexpr uint32_t TILES = 2u;
  static constexpr bool GROUPED = true;
  static __device__ __forceinline__ uint32_t low_of(uint32_t word) { return word & 0xbf80bf80u; }
  static __device__ __forceinline__ uint32_t high_of(uint32_t word) {
    return ((word & 0x007f007fu) << 7) | ((word & 0x40004000u) << 1);
  }
  static __device__ __forceinline__ uint4 widen(const uint4& raw, uint32_t i, uint32_t, uint32_t) {
    const uint32_t first = (i == 0u) ? raw.x : raw.z;
    const uint32_t second = (i == 0u) ? raw.y : raw.w;
    return make_uint4(low_of(first), high_of(first), low_of(second), high_of(second));
  }
};

/* The word of a slot's zeros that has those of this lane's rows. */
CLB_DEVICE uint32_t clb_own_zeros(bool paired) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  return paired ? lane / 4u * 4u : lane / 8u * 4u;
}

/* Where the parts of a matrix lie, from its format and size. */
struct clb_packing {
  uint32_t pieces;      /* across */
  uint32_t shift;       /* piece >> shift is its slot */
  uint32_t slots;       /* of scales, across */
  uint32_t scale_bytes; /* of a lane in a slot */
  uint32_t zero_bytes;  /* of a tile in a slot; 0: no zeros */
  bool paired;          /* two groups of 32 columns in a slot */
  bool blocks;

  __device__ __forceinline__ clb_packing(uint32_t format, uint32_t cols) {
    const uint32_t kind = CLB_FORMAT_KIND(format);
    const uint32_t log = (kind == CLB_KIND_HALF) ? 4u : (kind == CLB_KIND_INT4) ? 6u : 5u;
    const uint32_t group = CLB_FORMAT_GROUP(format);
    paired = group == 5u;
    pieces = (cols + (1u << log) - 1u) >> log;
    shift = (group == 0u) ? 31u : (group > log) ? group - log : 0u;
    slots = (group == 0u) ? 1u : (pieces + (1u << shift) - 1u) >> shift;
    blocks = (format & CLB_FORMAT_BLOCKS) != 0u;
    scale_bytes = (kind == CLB_KIND_HALF) ? 0u : (paired || (kind == CLB_KIND_FP8 && !blocks)) ? 8u : 4u;
    zero_bytes = ((format & CLB_FORMAT_ZEROS) == 0u) ? 0u : paired ? 32u : 16u;
  }

  /* Scales and zeros of slot 0 of a row tile of the matrix at `base`, which has `tiles` row tiles. */
  __device__ __forceinline__ const unsigned char* scales(const unsigned char* base, uint32_t tiles,
                                                         uint32_t row_tile) const {
    const uint32_t in_order = blocks ? row_tile / 8u * 4u : row_tile * 8u * scale_bytes;
    return base + (uint64_t)tiles * pieces * CLB_FORMAT_PIECE + (uint64_t)in_order * slots;
  }
  __device__ __forceinline__ const unsigned char* zeros(const unsigned char* base, uint32_t tiles,
                                                        uint32_t row_tile) const {
    const uint64_t end = (uint64_t)tiles * slots * 8u * scale_bytes;
    return base + (uint64_t)tiles * pieces * CLB_FORMAT_PIECE +
           (end + CLB_FORMAT_PART - 1u) / CLB_FORMAT_PART * CLB_FORMAT_PART + (uint64_t)row_tile * slots * zero_bytes;
  }
  /* Those of this lane's rows within a slot. */
  __device__ __forceinline__ uint32_t own_scales() const {
    return blocks ? 0u : threadIdx.x % CLB_WARP / 4u * scale_bytes;
  }
  __device__ __forceinline__ uint32_t own_zeros() const { return clb_own_zeros(paired); }
  /* Bytes from a slot to the next. */
  __device__ __forceinline__ uint32_t scale_step() const { return blocks ? 4u : 8u * scale_bytes; }
};

/* What int4 adds for the zeros of rows g and g + 8, of the first or, paired, the second group of a slot; `word`: what
   lies at zeros(). */
struct clb_int4_zeros {
  uint32_t low;
  uint32_t high;

  __device__ __forceinline__ clb_int4_zeros() : low(0xe408e408u), high(0xd480d480u) {} /* 8 */
  __device__ __forceinline__ clb_int4_zeros(uint32_t word, bool paired, uint32_t group) {
    const bool upper = paired ? group != 0u : threadIdx.x / 4u % 2u != 0u;
    const uint32_t mine = upper ? word >> 16 : word;
    low = clb_int4_kind::LOW + (mine & 15u) * 0x00010001u;
    high = clb_int4_kind::HIGH + (mine >> 8 & 15u) * 0x00100010u;
  }
};

#endif /* CLB_FORMATS_CUH */
