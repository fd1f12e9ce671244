/*
 * loader.h: from a model folder to checked weights in memory.
 *
 * The loader owns nothing: the caller gives two blocks (sizes from clb_loader_plan) and keeps them.
 *
 *   weights memory (tier "weights")                            host memory
 *   | file 0 | pad | file 1 | pad | ...                         | clb_weight_table | clb_tensor ... |
 *     ^ each at its file's alignment, bytes as on disk            ^ pointers into the weights memory
 *
 * A file with flat matrices is not kept as it is: its sections are repacked into rows16 while it is read, each into a
 * 256-aligned block of its padded size (loader_internal.h).
 *
 * Every file is read once, however many sections, of whichever layers, lie in it. Before a byte is read, all numbers
 * of the description are checked (limits, ranges, overflow, shapes, duplicates, gaps, overlaps, completeness); while
 * reading, size and crc32c; after it, that every weight is finite.
 *
 * With CLB_WEIGHTS_DUMMY nothing is read: the same sections are filled with seeded random values. If the description
 * then has no sections and no files, the loader lays them out itself: matrices bf16, the rest fp32, no biases.
 *
 * Call from the thread that opens the engine. load and plan take scratch memory from malloc and free it.
 */
#ifndef CLB_LOADER_H
#define CLB_LOADER_H

#include <stdint.h>

#include "colibri.h"

#define CLB_LOADER_PIECE_BYTES 1048576u /* one read, and one crc32c */
#define CLB_MAX_HIDDEN 65536u
#define CLB_MAX_HEADS 1024u
#define CLB_MAX_WIDTH 1048576u /* rows of gate and up */
/* Tensors of a layer: its own, then gate, up and down of the shared expert, then of each routed one. */
#define CLB_LAYER_OWN ((uint32_t)CLB_ROLE_GATE - (uint32_t)CLB_ROLE_ATTN_NORM)
#define CLB_LAYER_TENSORS(experts) (CLB_LAYER_OWN + 3u * (1u + (experts)))
#define CLB_MAX_SECTIONS (16u + CLB_MAX_LAYERS * CLB_LAYER_TENSORS(CLB_MAX_EXPERTS))
#define CLB_MAX_FILES (1u + CLB_MAX_LAYERS * CLB_MAX_EXPERTS)

/* One loaded section. data == NULL: the model has none (head when tied, bias, shared expert). */
typedef struct clb_tensor {
  const void* data;   /* (rows, cols); rows16 if a matrix, flat if a vector; at a multiple of the element size */
  uint32_t precision; /* clb_precision */
  uint32_t layout;    /* clb_layout, in memory */
  uint32_t rows;      /* without padding; `down` is (hidden, width) */
  uint32_t cols;
  const void* scales; /* these are 0 unless it is quantised: as in clb_section_desc */
  const void* zeros;
  uint32_t group_rows;
  uint32_t group_cols;
} clb_tensor;

typedef struct clb_weight_table {
  uint32_t layers;
  uint32_t tensor_count;
  uint32_t layer_first[CLB_MAX_LAYERS]; /* index of a layer's ATTN_NORM in tensors */
  uint32_t layer_experts[CLB_MAX_LAYERS];
  clb_tensor* tensors;
} clb_weight_table;

typedef struct clb_loader_sizes {
  uint64_t weights_bytes;     /* exactly what load writes into `memory`, padding between files included */
  uint64_t weights_alignment; /* of `memory`: 4096 or 2097152 */
  uint64_t host_bytes;        /* of `host`, 64-aligned */
  uint64_t read_bytes;        /* sum of the files: progress ends here */
} clb_loader_sizes;

typedef struct clb_loader_config {
  const clb_model_desc* model;
  uint32_t weights; /* clb_weights */
  int32_t dir_fd;   /* unused with CLB_WEIGHTS_DUMMY */
  uint64_t dummy_seed;
  void* memory;
  uint64_t memory_bytes; /* >= weights_bytes */
  void* host;
  uint64_t host_bytes;                                    /* >= host_bytes of the plan */
  void (*progress)(void* context, uint64_t loaded_bytes); /* after each piece; may be NULL */
  void* progress_context;
} clb_loader_config;

/* Index of (role, layer, expert) in table->tensors. layer and expert are -1 where colibri.h says so. All in range. */
static inline uint32_t clb_weight_index(const clb_weight_table* table, uint32_t role, int32_t layer, int32_t expert) {
  if (role <= CLB_ROLE_FINAL_NORM) {
    return role;
  }
  const uint32_t first = table->layer_first[layer];
  return role < CLB_ROLE_GATE ? first + (role - CLB_ROLE_ATTN_NORM)
                              : first + CLB_LAYER_OWN + 3u * ((uint32_t)expert + 1u) + (role - CLB_ROLE_GATE);
}

/* The section of (role, layer, expert); its data is NULL if the model has none. Never returns NULL. */
static inline const clb_tensor* clb_weight(const clb_weight_table* table, uint32_t role, int32_t layer,
                                           int32_t expert) {
  return &table->tensors[clb_weight_index(table, role, layer, expert)];
}

/* Checks everything in the description but sections and files: versions, limits, divisibility, the layer table.
   Pure. VERSION, ARGUMENT or UNSUPPORTED with a message iff something is wrong. */
int32_t clb_model_check(const clb_model_desc* model, clb_error* error);

/* Checks the whole description (clb_model_check included) and computes what load needs. Reads no file.
   FORMAT: sections or files do not fit the model; MEMORY: no scratch memory. */
int32_t clb_loader_plan(const clb_model_desc* model, uint32_t weights, clb_loader_sizes* sizes, clb_error* error);

/* Fills `memory` and `host`; *table then lies at the start of `host` and is valid as long as both blocks.
   What clb_loader_plan returns, and IO: a file is missing, unreadable or of another size; CHECKSUM; NOT_FINITE.
   After a failure the blocks' contents are undefined and *table is unchanged. */
int32_t clb_loader_load(const clb_loader_config* config, const clb_weight_table** table, clb_error* error);

#endif /* CLB_LOADER_H */
