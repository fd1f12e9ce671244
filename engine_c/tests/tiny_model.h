/*
 * tiny_model.h: a two-layer model description that tests may bend, and its files in a temporary folder.
 *
 *   layer 0: MoE, 3 experts of width 8, gated shared expert of width 6     dense.bin, expert_0_0.bin ...
 *   layer 1: dense, width 10; or MoE like layer 0, its experts in the same files (shared = 1)
 *
 * Every optional section is there; q and k are normed per head in layer 0, over the row in layer 1.
 */
#ifndef CLB_TINY_MODEL_H
#define CLB_TINY_MODEL_H

#define TINY_EXPERTS 3u
#define TINY_FILES (1u + TINY_EXPERTS)
#define TINY_SECTIONS 64u
#define TINY_PIECES 8u /* MiB of the largest file */
#define TINY_VOCAB 20u

#include <stdint.h>

#include "colibri.h"

typedef struct tiny_model {
  clb_model_desc model;
  clb_layer_desc layers[2];
  clb_section_desc sections[TINY_SECTIONS];
  clb_file_desc files[TINY_FILES];
  char names[TINY_FILES][32];
  uint32_t crc[TINY_FILES][TINY_PIECES];
  float inv_freq[4];
  uint8_t* bytes[TINY_FILES]; /* contents, from malloc */
  char folder[64];
  int dir_fd;
} tiny_model;

/* Description and contents; matrices in `precision` and `layout`. The values depend on neither but for rounding. */
void tiny_make(tiny_model* tiny, int shared, uint32_t precision, uint32_t layout, uint32_t vocab);
/* Recomputes the checksums after contents were changed. */
void tiny_sum(tiny_model* tiny);
/* Writes all files into a new folder and opens it. */
void tiny_write(tiny_model* tiny);
/* Writes one file whole, from `bytes`. */
void tiny_write_file(const tiny_model* tiny, uint32_t file);
/* Cuts one written file to its first `bytes` bytes. */
void tiny_cut_file(const tiny_model* tiny, uint32_t file, uint64_t bytes);
/* Writes one byte of one written file. */
void tiny_poke(const tiny_model* tiny, uint32_t file, uint64_t offset, uint8_t value);
/* Removes folder and contents. */
void tiny_free(tiny_model* tiny);
/* The section of a place; exits if there is none. */
clb_section_desc* tiny_section(tiny_model* tiny, uint32_t role, int32_t layer, int32_t expert);

#endif /* CLB_TINY_MODEL_H */
