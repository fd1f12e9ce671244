/* tiny_model.c: see tiny_model.h. */
#define _XOPEN_SOURCE 700

#include "tiny_model.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "loader_internal.h"

enum { HIDDEN = 16, HEADS = 2, KV_HEADS = 1, HEAD_DIM = 8, WIDTH = 8, SHARED = 6, DENSE = 10 };

static void require(int condition, const char* what) {
  if (!condition) {
    perror(what);
    exit(1);
  }
}

static clb_layer_desc moe_layer(void) {
  return (clb_layer_desc){.ffn_kind = CLB_FFN_MOE,
                          .kv_values_per_token = 2 * KV_HEADS * HEAD_DIM,
                          .experts = TINY_EXPERTS,
                          .experts_per_token = 2,
                          .expert_width = WIDTH,
                          .shared_width = SHARED,
                          .shared_gated = 1,
                          .qk_norm = CLB_QK_NORM_HEAD,
                          .routed_scale = 1.0f};
}

static void make_model(tiny_model* tiny, int shared, uint32_t vocab) {
  tiny->layers[0] = moe_layer();
  tiny->layers[1] = moe_layer();
  if (!shared) {
    tiny->layers[1] = (clb_layer_desc){.ffn_kind = CLB_FFN_DENSE,
                                       .kv_values_per_token = 2 * KV_HEADS * HEAD_DIM,
                                       .shared_width = DENSE,
                                       .routed_scale = 1.0f};
  }
  tiny->layers[1].qk_norm = CLB_QK_NORM_ROW;
  for (uint32_t i = 0; i < HEAD_DIM / 2; ++i) {
    tiny->inv_freq[i] = 1.0f / (float)(1u << i);
  }
  tiny->model = (clb_model_desc){.abi_version = CLB_ABI_VERSION,
                                 .struct_bytes = sizeof(clb_model_desc),
                                 .vocab_size = vocab,
                                 .layers = 2,
                                 .hidden = HIDDEN,
                                 .heads = HEADS,
                                 .kv_heads = KV_HEADS,
                                 .head_dim = HEAD_DIM,
                                 .max_positions = 64,
                                 .rms_norm_eps = 1e-6f,
                                 .attention_scale = 0.35f,
                                 .rope_scale = 1.0f,
                                 .file_count = TINY_FILES,
                                 .rope_inv_freq = tiny->inv_freq,
                                 .layer_table = tiny->layers,
                                 .section_table = tiny->sections,
                                 .file_table = tiny->files};
}

/* Appends a section to its file: routed experts to their own (layer 1 names those of layer 0), the rest to dense.bin.
 */
static void add_section(tiny_model* tiny, clb_place place, uint32_t precision, uint32_t layout) {
  const clb_demand demand = clb_demand_of(&tiny->model, place.role, place.layer, place.expert);
  clb_section_desc* section = &tiny->sections[tiny->model.section_count++];
  section->role = place.role;
  section->layer = place.layer;
  section->expert = place.expert;
  section->file = place.expert < 0 ? 0u : (uint32_t)place.expert + 1u;
  section->precision = demand.narrow != 0 ? precision : CLB_FP32;
  section->layout = demand.narrow != 0 || (demand.matrix != 0 && layout != CLB_LAYOUT_MMA) ? layout : CLB_LAYOUT_FLAT;
  const int transposed = place.role == CLB_ROLE_DOWN && layout == CLB_LAYOUT_FLAT;
  section->rows = transposed ? demand.cols : demand.rows;
  section->cols = transposed ? demand.rows : demand.cols;
  if (place.layer == 1 && place.expert >= 0) {
    *section = *tiny_section(tiny, place.role, 0, place.expert);
    section->layer = 1;
    return;
  }
  clb_file_desc* file = &tiny->files[section->file];
  section->offset = clb_align_up(file->bytes, 256);
  if (clb_is_quantised(section->precision)) {
    section->group_rows = 1;
    section->group_cols = section->cols;
    section->zeros_offset = section->precision == CLB_INT4 ? 1 : 0; /* there are some */
    const clb_parts parts = clb_parts_of(section);
    section->scales_offset = section->offset + parts.scales_at;
    section->zeros_offset = parts.zeros == 0 ? 0 : section->offset + parts.zeros_at;
  }
  section->bytes = clb_parts_of(section).bytes;
  file->bytes = section->offset + section->bytes;
}

void tiny_make(tiny_model* tiny, int shared, uint32_t precision, uint32_t layout, uint32_t vocab) {
  memset(tiny, 0, sizeof *tiny);
  tiny->dir_fd = -1;
  make_model(tiny, shared, vocab);
  for (uint32_t i = 0; i < TINY_FILES; ++i) {
    (void)snprintf(tiny->names[i], sizeof tiny->names[i], i == 0 ? "dense.bin" : "expert_0_%u.bin", i - 1u);
    tiny->files[i] = (clb_file_desc){.name = tiny->names[i], .alignment = i == 0 ? 2097152u : 4096u};
  }
  clb_place place = {0, -1, -1};
  do {
    if (clb_demand_of(&tiny->model, place.role, place.layer, place.expert).rows != 0) {
      add_section(tiny, place, precision, layout);
    }
  } while (clb_place_next(&tiny->model, &place));
  for (uint32_t i = 0; i < TINY_FILES; ++i) {
    tiny->bytes[i] = calloc(1, (size_t)tiny->files[i].bytes);
    require(tiny->bytes[i] != NULL, "calloc");
  }
  for (uint32_t i = 0; i < tiny->model.section_count; ++i) {
    const clb_section_desc* section = &tiny->sections[i];
    if (clb_is_quantised(section->precision)) {
      clb_dummy_quantised(7, section, tiny->bytes[section->file] + section->offset);
    } else if (section->layer != 1 || section->expert < 0) {
      clb_dummy_fill(7, (clb_place){section->role, section->layer, section->expert}, section->precision,
                     section->layout, section->rows, section->cols, tiny->bytes[section->file] + section->offset);
    }
  }
  tiny_sum(tiny);
}

void tiny_sum(tiny_model* tiny) {
  for (uint32_t i = 0; i < TINY_FILES; ++i) {
    clb_file_desc* file = &tiny->files[i];
    file->crc32c = tiny->crc[i];
    file->crc_count = 0;
    for (uint64_t offset = 0; offset < file->bytes; offset += CLB_LOADER_PIECE_BYTES) {
      const uint64_t rest = file->bytes - offset;
      require(file->crc_count < TINY_PIECES, "too many pieces");
      tiny->crc[i][file->crc_count++] = clb_crc32c(
          0, tiny->bytes[i] + offset, (size_t)(rest < CLB_LOADER_PIECE_BYTES ? rest : CLB_LOADER_PIECE_BYTES));
    }
  }
}

void tiny_write_file(const tiny_model* tiny, uint32_t file) {
  const int fd = openat(tiny->dir_fd, tiny->names[file], O_WRONLY | O_CREAT | O_TRUNC, 0600);
  const size_t bytes = (size_t)tiny->files[file].bytes;
  require(fd >= 0, "openat");
  require(write(fd, tiny->bytes[file], bytes) == (ssize_t)bytes, "write");
  require(close(fd) == 0, "close");
}

void tiny_cut_file(const tiny_model* tiny, uint32_t file, uint64_t bytes) {
  const int fd = openat(tiny->dir_fd, tiny->names[file], O_WRONLY);
  require(fd >= 0, "openat");
  require(ftruncate(fd, (off_t)bytes) == 0, "ftruncate");
  require(close(fd) == 0, "close");
}

void tiny_poke(const tiny_model* tiny, uint32_t file, uint64_t offset, uint8_t value) {
  const int fd = openat(tiny->dir_fd, tiny->names[file], O_WRONLY);
  require(fd >= 0, "openat");
  require(pwrite(fd, &value, 1, (off_t)offset) == 1, "pwrite");
  require(close(fd) == 0, "close");
}

void tiny_write(tiny_model* tiny) {
  (void)snprintf(tiny->folder, sizeof tiny->folder, "/tmp/colibrid-test-XXXXXX");
  require(mkdtemp(tiny->folder) != NULL, "mkdtemp");
  tiny->dir_fd = open(tiny->folder, O_RDONLY | O_DIRECTORY);
  require(tiny->dir_fd >= 0, "open");
  for (uint32_t i = 0; i < TINY_FILES; ++i) {
    tiny_write_file(tiny, i);
  }
}

void tiny_free(tiny_model* tiny) {
  for (uint32_t i = 0; i < TINY_FILES; ++i) {
    free(tiny->bytes[i]);
    if (tiny->dir_fd >= 0) {
      (void)unlinkat(tiny->dir_fd, tiny->names[i], 0);
    }
  }
  if (tiny->dir_fd >= 0) {
    (void)close(tiny->dir_fd);
    (void)rmdir(tiny->folder);
  }
}

clb_section_desc* tiny_section(tiny_model* tiny, uint32_t role, int32_t layer, int32_t expert) {
  for (uint32_t i = 0; i < tiny->model.section_count; ++i) {
    clb_section_desc* section = &tiny->sections[i];
    if (section->role == role && section->layer == layer && section->expert == expert) {
      return section;
    }
  }
  (void)fprintf(stderr, "no section of role %u, layer %d, expert %d\n", role, layer, expert);
  exit(1);
}
