/*
 * loader_quant.c: quantised sections: what lies where in them, whether a description says so, and whether their numbers
 * are numbers. Contract: loader_internal.h. Pure.
 */
#include "loader_internal.h"

#define PART_ALIGNMENT 256u
#define FP8_BLOCK 128u
#define MMA_COLS 32u /* of a piece: kernels_cu/abi.h */
#define MMA_INT4_COLS 64u

static uint64_t pieces_of(uint64_t whole, uint64_t part) { return (whole + part - 1u) / part; }

/* Columns with those of padding. */
static uint64_t padded_cols(const clb_section_desc* section) {
  const bool int4 = section->precision == CLB_INT4;
  if (section->layout == CLB_LAYOUT_MMA) {
    return clb_align_up(section->cols, int4 ? MMA_INT4_COLS : MMA_COLS);
  }
  return section->precision == CLB_INT8 ? clb_align_up(section->cols, 4) : section->cols;
}

/* Groups of a row, or of a row of blocks. */
static uint64_t groups_across(const clb_section_desc* section) {
  const bool padded = section->layout == CLB_LAYOUT_MMA && section->precision == CLB_INT4;
  return pieces_of(padded ? padded_cols(section) : section->cols, section->group_cols);
}

clb_parts clb_parts_of(const clb_section_desc* section) {
  clb_parts parts = {0, 0, 0, 0, 0, 0};
  if (!clb_is_quantised(section->precision)) {
    parts.values = clb_layout_bytes(section->layout, section->precision, section->rows, section->cols);
    parts.bytes = parts.values;
    return parts;
  }
  const uint64_t rows = clb_align_up(section->rows, CLB_TILE_ROWS);
  const uint64_t group_rows = section->group_rows == 1u ? rows : pieces_of(section->rows, section->group_rows);
  const uint64_t groups = group_rows * groups_across(section);
  parts.values = rows * padded_cols(section) / (section->precision == CLB_INT4 ? 2u : 1u);
  parts.scales_at = clb_align_up(parts.values, PART_ALIGNMENT);
  parts.scales = groups * (section->precision == CLB_FP8 ? 4u : 2u);
  parts.bytes = parts.scales_at + parts.scales;
  if (section->zeros_offset != 0u) {
    parts.zeros_at = clb_align_up(parts.bytes, PART_ALIGNMENT);
    parts.zeros = groups;
    parts.bytes = parts.zeros_at + parts.zeros;
  }
  return parts;
}

/* What the CUDA kernels do not know; NULL: they know the groups. */
static const char* wrong_mma_groups(const clb_section_desc* section) {
  const uint32_t cols = section->group_cols;
  const bool known = cols == 128u || (section->precision == CLB_INT4 && (cols == 32u || cols == 64u)) ||
                     (section->precision != CLB_INT4 && cols == section->cols);
  return known ? NULL : "the CUDA kernels take groups of 128 columns, of int4 also 32 and 64, of int8 and fp8 a row";
}

/* Why the groups of a section do not fit its precision and shape; NULL: they do. */
static const char* wrong_groups(const clb_section_desc* section) {
  const bool whole_row = section->group_rows == 1u && section->group_cols == section->cols;
  const bool of_columns = section->group_rows == 1u && section->group_cols % CLB_CODE_BLOCK == 0u &&
                          section->group_cols != 0u && section->group_cols < section->cols;
  switch (section->precision) {
    case CLB_INT8:
      return whole_row || of_columns ? NULL : "a group of int8 is a row, or a multiple of 32 columns of one";
    case CLB_INT4:
      return (whole_row || of_columns) && section->group_cols % CLB_CODE_BLOCK == 0u &&
                     section->cols % section->group_cols == 0u
                 ? NULL
                 : "a group of int4 is a multiple of 32 columns of a row and divides them";
    default:
      return whole_row || (section->group_rows == FP8_BLOCK && section->group_cols == FP8_BLOCK)
                 ? NULL
                 : "a group of fp8 is a row, or 128 x 128";
  }
}

int32_t clb_quantised_check(const clb_section_desc* section, const char* file, const char* place, clb_error* error) {
  if (!clb_is_quantised(section->precision)) {
    const bool none = section->group_rows == 0u && section->group_cols == 0u && section->scales_offset == 0u &&
                      section->zeros_offset == 0u;
    return none
               ? CLB_OK
               : clb_fail(error, CLB_ERR_FORMAT, "file %s: %s has groups or scales, but is not quantised", file, place);
  }
  if (section->layout == CLB_LAYOUT_FLAT) {
    return clb_fail(error, CLB_ERR_UNSUPPORTED,
                    "file %s: %s is quantised, but flat; convert it for the cpu or the cuda backend", file, place);
  }
  const char* wrong = wrong_groups(section);
  if (wrong == NULL && section->layout == CLB_LAYOUT_MMA) {
    wrong = wrong_mma_groups(section);
  }
  if (wrong != NULL) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: %s: groups of %u x %u in %u x %u: %s", file, place,
                    section->group_rows, section->group_cols, section->rows, section->cols, wrong);
  }
  if (section->zeros_offset != 0u && section->precision != CLB_INT4) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: %s has zero points, which are for int4", file, place);
  }
  const clb_parts parts = clb_parts_of(section);
  const uint64_t zeros_at = section->zeros_offset == 0u ? 0u : section->offset + parts.zeros_at;
  if (section->offset % PART_ALIGNMENT != 0u || section->scales_offset != section->offset + parts.scales_at ||
      section->zeros_offset != zeros_at) {
    return clb_fail(error, CLB_ERR_FORMAT,
                    "file %s: %s: values at %" PRIu64 ", scales at %" PRIu64 ", zero points at %" PRIu64
                    "; they must follow each other at multiples of %u",
                    file, place, section->offset, section->scales_offset, section->zeros_offset, PART_ALIGNMENT);
  }
  return CLB_OK;
}

static uint64_t first_above(const unsigned char* data, uint64_t bytes, uint32_t mask, uint32_t limit) {
  uint64_t i = 0;
  while (i < bytes && (data[i] & mask) <= limit) {
    ++i;
  }
  return i;
}

/* The first of two bytes that share two e4m3 numbers of mma (kernels_cu/abi.h), one of them a NaN, or `bytes`. */
static uint64_t first_nan_pair(const unsigned char* data, uint64_t bytes) {
  uint64_t i = 0;
  while (i < bytes) {
    const uint32_t both = data[i] | (uint32_t)data[i + 1u] << 8;
    if ((both & 0x7fu) == 0x7fu || (both >> 7 & 0x7fu) == 0x7fu) {
      break;
    }
    i += 2u;
  }
  return i;
}

/* The first byte of `data` (`bytes` of one part) that is not part of a number, or `bytes`. */
static uint64_t first_bad(const clb_section_desc* section, bool scales, bool zeros, const unsigned char* data,
                          uint64_t bytes) {
  if (scales) {
    const uint32_t precision = section->precision == CLB_FP8 ? CLB_FP32 : CLB_FP16;
    const uint64_t element = clb_element_bytes(precision);
    return clb_first_not_finite(data, precision, bytes / element) * element;
  }
  if (zeros) {
    return first_above(data, bytes, 0xffu, 15u);
  }
  if (section->precision != CLB_FP8) {
    return bytes;
  }
  return section->layout == CLB_LAYOUT_MMA ? first_nan_pair(data, bytes) : first_above(data, bytes, 0x7fu, 0x7eu);
}

uint64_t clb_first_bad_byte(const clb_section_desc* section, uint64_t begin, uint64_t end, const unsigned char* data) {
  const clb_parts parts = clb_parts_of(section);
  if (!clb_is_quantised(section->precision)) {
    const uint64_t element = clb_element_bytes(section->precision);
    return begin + clb_first_not_finite(data, section->precision, (end - begin) / element) * element;
  }
  const uint64_t begins[] = {0, parts.scales_at, parts.zeros_at};
  const uint64_t sizes[] = {parts.values, parts.scales, parts.zeros};
  for (uint32_t part = 0; part < 3u; ++part) {
    const uint64_t part_end = begins[part] + sizes[part];
    const uint64_t from = begins[part] > begin ? begins[part] : begin;
    const uint64_t to = part_end < end ? part_end : end;
    if (from < to) {
      const uint64_t found = from + first_bad(section, part == 1u, part == 2u, data + (from - begin), to - from);
      if (found < to) {
        return found;
      }
    }
  }
  return end;
}
