/*
 * loader_internal.h: what the files of the loader share: error messages, what a model demands of each section, and
 * the walk over all of them. Included by loader*.c, model_check.c, dummy.c and their tests only.
 */
#ifndef CLB_LOADER_INTERNAL_H
#define CLB_LOADER_INTERNAL_H

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>

#include "loader.h"

/* Writes status and message (cut at CLB_ERROR_BYTES) unless error is NULL; returns status. */
__attribute__((format(printf, 3, 4))) int32_t clb_fail(clb_error* error, int32_t status, const char* format, ...);

/* What the model wants in one place. rows == 0: nothing may lie there. */
typedef struct clb_demand {
  uint32_t rows; /* of the matrix; a flat `down` is stored transposed */
  uint32_t cols;
  uint32_t optional; /* may be absent */
  uint32_t narrow;   /* any precision; else fp32 only */
  uint32_t matrix;   /* rows16 in memory; else a vector, flat */
} clb_demand;

/* role, layer and expert may be any numbers: what no model has gets rows == 0. */
clb_demand clb_demand_of(const clb_model_desc* model, uint32_t role, int32_t layer, int32_t expert);

typedef struct clb_place {
  uint32_t role;
  int32_t layer;
  int32_t expert;
} clb_place;

/* Steps through all places of the table in order: globals, then per layer its own, its shared and its routed ones.
   Start with {0, -1, -1}; returns false when there is no next. */
bool clb_place_next(const clb_model_desc* model, clb_place* place);

/* "qkv of layer 3", "gate of layer 3, expert 7", "embedding": fills and returns text. */
#define CLB_PLACE_BYTES 64u
const char* clb_place_text(clb_place place, char text[CLB_PLACE_BYTES]);

static inline bool clb_is_quantised(uint32_t precision) { return precision >= CLB_INT8; }

/* Precisions whose kernels may read their inputs as codes; the buffers for these are there iff a model has one. */
static inline bool clb_wants_codes(uint32_t precision) { return precision == CLB_INT8 || precision == CLB_INT4; }

/* Of a number that is not quantised. */
static inline uint64_t clb_element_bytes(uint32_t precision) { return precision == CLB_FP32 ? 4u : 2u; }

static inline uint64_t clb_align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1u) / alignment * alignment;
}

/* Bytes of the table for a checked model, and its set-up at the start of `host`, all tensors empty. */
uint64_t clb_table_bytes(const clb_model_desc* model);
clb_weight_table* clb_table_init(const clb_model_desc* model, void* host);

/* Sections and files against the model: all that can be known before a byte is read. For a model that passed
   clb_model_check. FORMAT, UNSUPPORTED or MEMORY. */
int32_t clb_sections_check(const clb_model_desc* model, clb_error* error);

/* A block of `layout` for a (rows, cols) matrix that is not quantised: bytes with its padding, and the index of an
   element. */
static inline uint64_t clb_layout_bytes(uint32_t layout, uint32_t precision, uint32_t rows, uint32_t cols) {
  const uint64_t padded_rows = layout == CLB_LAYOUT_FLAT ? rows : clb_align_up(rows, CLB_TILE_ROWS);
  const uint64_t padded_cols = layout == CLB_LAYOUT_MMA ? clb_align_up(cols, CLB_TILE_ROWS) : cols;
  return padded_rows * padded_cols * clb_element_bytes(precision);
}

static inline uint64_t clb_rows16_index(uint64_t row, uint64_t col, uint64_t cols) {
  return (row / CLB_TILE_ROWS * cols + col) * CLB_TILE_ROWS + row % CLB_TILE_ROWS;
}

/* What a section holds, from its first byte on; zeros: 0 bytes if there are none. Not quantised: only values. */
typedef struct clb_parts {
  uint64_t values; /* bytes */
  uint64_t scales_at;
  uint64_t scales;
  uint64_t zeros_at;
  uint64_t zeros;
  uint64_t bytes; /* of all */
} clb_parts;

/* For a section whose groups, if it has any, are not 0. */
clb_parts clb_parts_of(const clb_section_desc* section);

/* Groups, scales and zero points of a section of a matrix. FORMAT or UNSUPPORTED; file and place are for messages. */
int32_t clb_quantised_check(const clb_section_desc* section, const char* file, const char* place, clb_error* error);

/* The first byte in [begin, end) of a section, counted from its start, that is part of a NaN, an infinity or a zero
   point above 15; else end. Both are multiples of 256 or the section's own ends; data: the byte at begin. */
uint64_t clb_first_bad_byte(const clb_section_desc* section, uint64_t begin, uint64_t end, const unsigned char* data);

/* Does a section lie in its file otherwise than it must in memory? */
static inline bool clb_is_repacked(const clb_section_desc* section, const clb_demand* demand) {
  return demand->matrix != 0u && section->layout == CLB_LAYOUT_FLAT;
}

/* Bytes of the largest routed expert that the model has or, in its widest precision, may get: gate, up and down one
   after the other as `layout`, each at a multiple of 256. 0: no layer has experts. For a checked model. */
uint64_t clb_largest_expert_bytes(const clb_model_desc* model, uint32_t layout);

/* Where every section of a description comes to lie. Owns `sorted` (and what it is part of) until clb_placement_free.
   A file without flat matrices lies in memory as it is; of another file each section gets a 256-aligned block:
     file    | flat gate | pad | flat up | pad | ...      memory    | rows16 gate | pad | rows16 up | pad | ... */
typedef struct clb_placement {
  const clb_section_desc** sorted; /* (section_count) by file and offset; equal bytes side by side */
  uint64_t* sections;              /* (section_count), as in the section table: bytes from the start of the memory */
  uint64_t* files;                 /* (file_count): first byte of each file that lies as it is; else UINT64_MAX */
  uint64_t bytes;                  /* of the memory */
  uint64_t alignment;              /* of the memory */
} clb_placement;

/* For a description that passed clb_sections_check. layout: of the matrices in memory; with MMA every file lies as it
   is, so all sections must have the layout that they need. MEMORY: no scratch memory; nothing is held then. */
int32_t clb_placement_make(const clb_model_desc* model, uint32_t layout, clb_placement* placement, clb_error* error);
void clb_placement_free(clb_placement* placement);
int clb_section_order(const void* left, const void* right); /* for qsort over section pointers: by file and offset */

/* The flat matrix of `section` becomes rows16 at `memory`, some of its bytes at a time: `bytes` from `offset`, both
   multiples of the element size. Padding is written with the first bytes. */
void clb_repack(const clb_section_desc* section, uint64_t offset, const void* source, uint64_t bytes, void* memory);

/* Fills a block for a (rows, cols) matrix that is not quantised with values that depend on seed, place, row and column
   only; padding with zeros. */
void clb_dummy_fill(uint64_t seed, clb_place place, uint32_t precision, uint32_t layout, uint32_t rows, uint32_t cols,
                    void* data);

/* The same for a quantised section; one scale for all groups. */
void clb_dummy_quantised(uint64_t seed, const clb_section_desc* section, void* data);

/* What clb_dummy_fill makes of a place: the key of its values, and half the width of their distribution (0: all are 1)
   for a matrix with `inputs` columns as the model means it. */
uint64_t clb_dummy_key(uint64_t seed, clb_place place);
float clb_dummy_half_width(uint32_t role, uint32_t inputs);

/* Who takes the bytes of a file. Both are called for each piece in turn, of CLB_LOADER_PIECE_BYTES but the last. */
typedef struct clb_file_sink {
  void* context;
  /* Memory for the piece that begins at `offset`; *status says why there is none. */
  unsigned char* (*where)(void* context, uint64_t offset, int32_t* status);
  /* The piece is read and its checksum is right. */
  int32_t (*take)(void* context, uint64_t offset, const unsigned char* data, uint64_t bytes, clb_error* error);
} clb_file_sink;

/* Reads a whole file. IO, FORMAT (its size), CHECKSUM, or what the sink says. */
int32_t clb_file_read(int32_t dir_fd, const clb_file_desc* file, const clb_file_sink* sink, clb_error* error);
/* The same of a file that is open already; its offset stays. */
int32_t clb_file_read_fd(int32_t fd, const clb_file_desc* file, const clb_file_sink* sink, clb_error* error);

/* May the bytes [begin, end) of a section be computed with? As clb_first_bad_byte. NOT_FINITE. */
int32_t clb_section_piece_check(const clb_section_desc* section, const clb_file_desc* file, uint64_t begin,
                                uint64_t end, const unsigned char* data, clb_error* error);

/* The table's row of a section that lies at `data` as it must in memory. */
clb_tensor clb_tensor_of(const clb_section_desc* section, const clb_demand* demand, const void* data);

/* One expert's file against the model: what clb_sections_check demands of a whole description. */
int32_t clb_expert_check(const clb_model_desc* model, const clb_swap_desc* desc, clb_error* error);

/* clb_crc32c without the processor's own instruction, for its test. */
uint32_t clb_crc32c_tabled(uint32_t before, const void* data, size_t bytes);

/* Index of the first value that is NaN or infinite, or count. */
uint64_t clb_first_not_finite(const void* data, uint32_t precision, uint64_t count);

#endif /* CLB_LOADER_INTERNAL_H */
