/*
 * loader_place.c: where sections come to lie in memory, and the way from flat to rows16. Contract: loader_internal.h.
 */
#include <stdlib.h>
#include <string.h>

#include "invariant.h"
#include "loader_internal.h"

#define BLOCK_ALIGNMENT 256u /* of a repacked section */

static clb_demand demand_of(const clb_model_desc* model, const clb_section_desc* section) {
  return clb_demand_of(model, section->role, section->layer, section->expert);
}

/* Sections [first, end) of the sorted list lie in one file: gives each its block and returns the end of the last. */
static uint64_t place_blocks(const clb_model_desc* model, clb_placement* at, uint32_t first, uint32_t end,
                             uint64_t base) {
  uint64_t next = base;
  for (uint32_t i = first; i < end; ++i) {
    const clb_section_desc* const section = at->sorted[i];
    uint64_t* const place = &at->sections[section - model->section_table];
    if (i > first && at->sorted[i - 1u]->offset == section->offset) { /* the same bytes, used by two layers */
      *place = at->sections[at->sorted[i - 1u] - model->section_table];
      continue;
    }
    const clb_demand demand = demand_of(model, section);
    *place = clb_align_up(next, BLOCK_ALIGNMENT);
    next = *place + (clb_is_repacked(section, &demand)
                         ? clb_layout_bytes(CLB_LAYOUT_ROWS16, section->precision, demand.rows, demand.cols)
                         : section->bytes);
  }
  return next;
}

static uint64_t place_file(const clb_model_desc* model, clb_placement* at, uint32_t layout, uint32_t file,
                           uint32_t first, uint32_t end, uint64_t base) {
  bool repacked = false;
  for (uint32_t i = first; i < end && layout == CLB_LAYOUT_ROWS16; ++i) {
    const clb_demand demand = demand_of(model, at->sorted[i]);
    repacked = repacked || clb_is_repacked(at->sorted[i], &demand);
  }
  if (repacked) {
    at->files[file] = UINT64_MAX;
    return place_blocks(model, at, first, end, base);
  }
  at->files[file] = base;
  for (uint32_t i = first; i < end; ++i) {
    at->sections[at->sorted[i] - model->section_table] = base + at->sorted[i]->offset;
  }
  return base + model->file_table[file].bytes;
}

uint64_t clb_largest_expert_bytes(const clb_model_desc* model, uint32_t layout) {
  uint64_t largest = 0;
  uint32_t precision = CLB_BF16;
  for (uint32_t i = 0; i < model->section_count; ++i) {
    const clb_section_desc* const section = &model->section_table[i];
    if (section->expert >= 0 && section->precision == CLB_FP32) {
      precision = CLB_FP32;
    }
  }
  for (uint32_t l = 0; l < model->layers; ++l) {
    const clb_layer_desc* const layer = &model->layer_table[l];
    const uint64_t half =
        clb_align_up(clb_layout_bytes(layout, precision, layer->expert_width, model->hidden), BLOCK_ALIGNMENT);
    const uint64_t down =
        clb_align_up(clb_layout_bytes(layout, precision, model->hidden, layer->expert_width), BLOCK_ALIGNMENT);
    largest = 2u * half + down > largest ? 2u * half + down : largest;
  }
  return largest;
}

int32_t clb_placement_make(const clb_model_desc* model, uint32_t layout, clb_placement* placement, clb_error* error) {
  const size_t sections = model->section_count;
  const size_t files = model->file_count;
  (void)memset(placement, 0, sizeof *placement);
  void* const memory = malloc(sections * sizeof(clb_section_desc*) + (sections + files + 1u) * sizeof(uint64_t));
  if (memory == NULL) {
    return clb_fail(error, CLB_ERR_MEMORY, "no memory for the places of %u sections", model->section_count);
  }
  placement->sections = memory;
  placement->files = placement->sections + sections;
  placement->sorted = (const clb_section_desc**)(void*)(placement->files + files + 1u);
  placement->alignment = 4096;
  for (uint32_t i = 0; i < model->section_count; ++i) {
    placement->sorted[i] = &model->section_table[i];
  }
  if (sections != 0u) {
    qsort(placement->sorted, sections, sizeof placement->sorted[0], clb_section_order);
  }
  uint32_t next = 0;
  for (uint32_t file = 0; file < model->file_count; ++file) {
    const uint32_t first = next;
    const uint32_t alignment = model->file_table[file].alignment;
    while (next < model->section_count && placement->sorted[next]->file == file) {
      ++next;
    }
    /* At most 2^17 files of 2^46 bytes, each section padded to at most 16 times its size: no overflow. */
    placement->bytes =
        place_file(model, placement, layout, file, first, next, clb_align_up(placement->bytes, alignment));
    placement->alignment = alignment > placement->alignment ? alignment : placement->alignment;
  }
  return CLB_OK;
}

void clb_placement_free(clb_placement* placement) {
  free(placement->sections);
  (void)memset(placement, 0, sizeof *placement);
}

/* `count` elements, `step` apart in the target. */
static void copy_elements(const unsigned char* source, uint64_t count, uint64_t element, uint64_t step,
                          unsigned char* target) {
  if (step == 1u) {
    (void)memcpy(target, source, (size_t)(count * element));
  } else if (element == 4u) {
    for (uint64_t i = 0; i < count; ++i) {
      (void)memcpy(target + i * step * 4u, source + i * 4u, 4);
    }
  } else {
    for (uint64_t i = 0; i < count; ++i) {
      (void)memcpy(target + i * step * 2u, source + i * 2u, 2);
    }
  }
}

/* The last tile has rows that no byte of the file fills. */
static void clear_last_tile(uint64_t rows, uint64_t cols, uint64_t element, unsigned char* memory) {
  if (rows % CLB_TILE_ROWS != 0u) {
    const uint64_t tile = CLB_TILE_ROWS * cols * element;
    (void)memset(memory + rows / CLB_TILE_ROWS * tile, 0, (size_t)tile);
  }
}

void clb_repack(const clb_section_desc* section, uint64_t offset, const void* source, uint64_t bytes, void* memory) {
  const uint64_t element = clb_element_bytes(section->precision);
  const bool transposed = section->role == CLB_ROLE_DOWN;
  const uint64_t rows = transposed ? section->cols : section->rows; /* of the matrix */
  const uint64_t cols = transposed ? section->rows : section->cols;
  const uint64_t end = (offset + bytes) / element;
  const unsigned char* from = source;
  CLB_ASSERT(offset % element == 0u && bytes % element == 0u);
  if (offset == 0u) {
    clear_last_tile(rows, cols, element, memory);
  }
  uint64_t at = offset / element;
  while (at < end) {
    /* flat: along a row, elements lie 16 apart. Transposed: along a column, 16 rows lie side by side. */
    const uint64_t row = transposed ? at % rows : at / cols;
    const uint64_t col = transposed ? at / rows : at % cols;
    const uint64_t in_tile = CLB_TILE_ROWS - row % CLB_TILE_ROWS;
    const uint64_t run = transposed ? (rows - row < in_tile ? rows - row : in_tile) : cols - col;
    const uint64_t count = end - at < run ? end - at : run;
    copy_elements(from, count, element, transposed ? 1u : CLB_TILE_ROWS,
                  (unsigned char*)memory + clb_rows16_index(row, col, cols) * element);
    from = &from[count * element];
    at += count;
  }
}
