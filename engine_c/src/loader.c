/*
 * loader.c: reads the files of a checked description into the caller's memory and builds the weight table.
 * Contract and drawing of the memory: loader.h. Files are opened one at a time and closed before the next.
 */
#include "loader.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "invariant.h"
#include "loader_internal.h"

#define DUMMY_ALIGNMENT 256u /* of sections that the loader lays out itself */
#define SCAN_VALUES 4096u    /* values of one look for NaN: stays in the first-level cache */

/* Dummy weights without a section table: the loader chooses places and precisions. */
static bool lays_out_itself(const clb_model_desc* model, uint32_t weights) {
  return weights == CLB_WEIGHTS_DUMMY && model->section_count == 0u && model->file_count == 0u;
}

/* Calls of this function, in the order of clb_place_next, lay sections one after the other; *end is the first free
   byte. Returns false for a place that stays empty. */
static bool lay_out(const clb_model_desc* model, clb_place place, uint64_t* end, clb_tensor* tensor, uint64_t* offset) {
  const clb_demand demand = clb_demand_of(model, place.role, place.layer, place.expert);
  if (demand.rows == 0u || demand.optional != 0u) {
    return false;
  }
  tensor->precision = demand.narrow != 0u ? CLB_BF16 : CLB_FP32;
  tensor->layout = demand.matrix != 0u ? CLB_LAYOUT_ROWS16 : CLB_LAYOUT_FLAT;
  tensor->rows = demand.rows;
  tensor->cols = demand.cols;
  *offset = clb_align_up(*end, DUMMY_ALIGNMENT);
  *end = *offset + clb_layout_bytes(tensor->layout, tensor->precision, tensor->rows, tensor->cols);
  return true;
}

static int32_t plan_files(const clb_model_desc* model, clb_loader_sizes* sizes, clb_error* error) {
  clb_placement placement;
  for (uint32_t i = 0; i < model->section_count; ++i) {
    if (model->section_table[i].layout == CLB_LAYOUT_MMA) {
      return clb_fail(error, CLB_ERR_UNSUPPORTED,
                      "the pack is laid out for CUDA; make another with `colibrid convert --backend cpu`");
    }
  }
  const int32_t status = clb_placement_make(model, CLB_LAYOUT_ROWS16, &placement, error);
  if (status != CLB_OK) {
    return status;
  }
  sizes->weights_alignment = placement.alignment;
  sizes->weights_bytes = placement.bytes;
  sizes->read_bytes = 0;
  for (uint32_t i = 0; i < model->file_count; ++i) {
    sizes->read_bytes += model->file_table[i].bytes;
  }
  clb_placement_free(&placement);
  return CLB_OK;
}

static void plan_dummy(const clb_model_desc* model, clb_loader_sizes* sizes) {
  uint64_t end = 0;
  clb_place place = {0, -1, -1};
  do {
    clb_tensor tensor = {0};
    uint64_t offset = 0;
    (void)lay_out(model, place, &end, &tensor, &offset);
  } while (clb_place_next(model, &place));
  sizes->weights_alignment = 4096;
  sizes->weights_bytes = end;
  sizes->read_bytes = end;
}

int32_t clb_loader_plan(const clb_model_desc* model, uint32_t weights, clb_loader_sizes* sizes, clb_error* error) {
  int32_t status = clb_model_check(model, error);
  if (status == CLB_OK && weights > CLB_WEIGHTS_DUMMY) {
    status = clb_fail(error, CLB_ERR_ARGUMENT, "weights is %u, must be 0 (files) or 1 (dummy)", weights);
  }
  if (status != CLB_OK) {
    return status;
  }
  clb_loader_sizes found;
  found.host_bytes = clb_table_bytes(model);
  if (lays_out_itself(model, weights)) {
    plan_dummy(model, &found);
  } else {
    status = clb_sections_check(model, error);
    status = status != CLB_OK ? status : plan_files(model, &found, error);
  }
  if (status == CLB_OK) {
    *sizes = found;
  }
  return status;
}

static int32_t read_piece(int fd, const clb_file_desc* file, uint64_t offset, uint64_t bytes, void* memory,
                          clb_error* error) {
  uint64_t done = 0;
  while (done < bytes) {
    const ssize_t got = pread(fd, (char*)memory + done, (size_t)(bytes - done), (off_t)(offset + done));
    /* cppcheck-suppress misra-c2012-22.10 ; POSIX: a read that fails has set errno */
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      return clb_fail(error, CLB_ERR_IO, "file %s: reading at byte %" PRIu64 " failed: %s", file->name, offset + done,
                      strerror(errno));
    }
    if (got == 0) {
      return clb_fail(error, CLB_ERR_IO, "file %s: ended at byte %" PRIu64 ", expected %" PRIu64, file->name,
                      offset + done, file->bytes);
    }
    done += (uint64_t)got;
  }
  return CLB_OK;
}

static int32_t check_piece(const clb_file_desc* file, uint64_t offset, const void* data, uint64_t bytes,
                           clb_error* error) {
  if (file->crc_count == 0u) {
    return CLB_OK;
  }
  const uint32_t expected = file->crc32c[offset / CLB_LOADER_PIECE_BYTES];
  const uint32_t actual = clb_crc32c(0, data, (size_t)bytes);
  if (actual != expected) {
    return clb_fail(error, CLB_ERR_CHECKSUM, "file %s: bytes %" PRIu64 " to %" PRIu64 ": crc32c is %08x, expected %08x",
                    file->name, offset, offset + bytes, actual, expected);
  }
  return CLB_OK;
}

int32_t clb_file_read_fd(int32_t fd, const clb_file_desc* file, const clb_file_sink* sink, clb_error* error) {
  struct stat found;
  if (fstat(fd, &found) != 0 || !S_ISREG(found.st_mode)) {
    return clb_fail(error, CLB_ERR_IO, "file %s: is not a regular file", file->name);
  }
  if ((uint64_t)found.st_size != file->bytes) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: found %" PRIu64 " bytes, expected %" PRIu64, file->name,
                    (uint64_t)found.st_size, file->bytes);
  }
  int32_t status = CLB_OK;
  for (uint64_t offset = 0; status == CLB_OK && offset < file->bytes; offset += CLB_LOADER_PIECE_BYTES) {
    const uint64_t rest = file->bytes - offset;
    const uint64_t bytes = rest < CLB_LOADER_PIECE_BYTES ? rest : CLB_LOADER_PIECE_BYTES;
    unsigned char* const data = sink->where(sink->context, offset, &status);
    status = status != CLB_OK ? status : read_piece(fd, file, offset, bytes, data, error);
    status = status != CLB_OK ? status : check_piece(file, offset, data, bytes, error);
    status = status != CLB_OK ? status : sink->take(sink->context, offset, data, bytes, error);
  }
  return status;
}

int32_t clb_file_read(int32_t dir_fd, const clb_file_desc* file, const clb_file_sink* sink, clb_error* error) {
  /* O_NONBLOCK: a named pipe in the folder must not hold up the open; it has no effect on regular files. */
  const int fd = openat(dir_fd, file->name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) {
    return clb_fail(error, CLB_ERR_IO, "file %s: cannot be opened: %s", file->name, strerror(errno));
  }
  const int32_t status = clb_file_read_fd(fd, file, sink, error);
  (void)close(fd);
  return status;
}

/* Files are read in order; this is how far one of them is. */
typedef struct reader {
  const clb_loader_config* config;
  const clb_placement* placement;
  unsigned char* piece; /* CLB_LOADER_PIECE_BYTES for files that are repacked; NULL if there are none */
  uint64_t loaded;      /* bytes of all files so far */
  uint32_t file;        /* being read */
  uint32_t first;       /* its first sorted section */
} reader;

/* Piece [begin, begin + bytes) of a file goes to its sections' blocks. */
static void scatter(const reader* state, uint64_t begin, uint64_t bytes) {
  const uint32_t first = state->first;
  const clb_model_desc* const model = state->config->model;
  for (uint32_t i = first; i < model->section_count && state->placement->sorted[i]->file == state->file; ++i) {
    const clb_section_desc* const section = state->placement->sorted[i];
    const bool again = i > first && state->placement->sorted[i - 1u]->offset == section->offset;
    const uint64_t from = section->offset > begin ? section->offset : begin;
    const uint64_t section_end = section->offset + section->bytes;
    const uint64_t to = section_end < begin + bytes ? section_end : begin + bytes;
    if (again || from >= to) {
      continue;
    }
    const clb_demand demand = clb_demand_of(model, section->role, section->layer, section->expert);
    unsigned char* const target =
        (unsigned char*)state->config->memory + state->placement->sections[section - model->section_table];
    if (clb_is_repacked(section, &demand)) {
      clb_repack(section, from - section->offset, state->piece + (from - begin), to - from, target);
    } else {
      (void)memcpy(target + (from - section->offset), state->piece + (from - begin), (size_t)(to - from));
    }
  }
}

static bool lies_as_it_is(const reader* state) { return state->placement->files[state->file] != UINT64_MAX; }

static unsigned char* piece_memory(void* context, uint64_t offset, int32_t* status) {
  const reader* const state = context;
  *status = CLB_OK;
  return lies_as_it_is(state) ? (unsigned char*)state->config->memory + state->placement->files[state->file] + offset
                              : state->piece;
}

static int32_t take_piece(void* context, uint64_t offset, const unsigned char* data, uint64_t bytes, clb_error* error) {
  reader* const state = context;
  (void)data;
  (void)error;
  if (!lies_as_it_is(state)) {
    scatter(state, offset, bytes);
  }
  state->loaded += bytes;
  if (state->config->progress != NULL) {
    state->config->progress(state->config->progress_context, state->loaded);
  }
  return CLB_OK;
}

static int32_t read_files(const clb_loader_config* config, const clb_placement* placement, clb_error* error) {
  const clb_model_desc* const model = config->model;
  reader state = {.config = config, .placement = placement};
  const clb_file_sink sink = {&state, piece_memory, take_piece};
  int32_t status = CLB_OK;
  for (uint32_t i = 0; status == CLB_OK && i < model->file_count; ++i) {
    state.file = i;
    while (state.first < model->section_count && placement->sorted[state.first]->file < i) {
      ++state.first;
    }
    if (placement->files[i] == UINT64_MAX && state.piece == NULL) {
      state.piece = malloc(CLB_LOADER_PIECE_BYTES);
      if (state.piece == NULL) {
        return clb_fail(error, CLB_ERR_MEMORY, "no memory for a piece of %u bytes of a file", CLB_LOADER_PIECE_BYTES);
      }
    }
    status = clb_file_read(config->dir_fd, &model->file_table[i], &sink, error);
  }
  free(state.piece);
  return status;
}

uint64_t clb_first_not_finite(const void* data, uint32_t precision, uint64_t count) {
  const uint32_t exponent = precision == CLB_FP32 ? 0x7f800000u : precision == CLB_FP16 ? 0x7c00u : 0x7f80u;
  for (uint64_t begin = 0; begin < count; begin += SCAN_VALUES) {
    const uint64_t end = count - begin < SCAN_VALUES ? count : begin + SCAN_VALUES;
    uint32_t found = 0; /* without a branch per value, so that the loops vectorise */
    if (precision == CLB_FP32) {
      const uint32_t* values = data;
      for (uint64_t i = begin; i < end; ++i) {
        found |= (values[i] & exponent) == exponent ? 1u : 0u;
      }
    } else {
      const uint16_t* values = data;
      for (uint64_t i = begin; i < end; ++i) {
        found |= (values[i] & exponent) == exponent ? 1u : 0u;
      }
    }
    for (uint64_t i = begin; found != 0u && i < end; ++i) {
      const uint32_t value = precision == CLB_FP32 ? ((const uint32_t*)data)[i] : ((const uint16_t*)data)[i];
      if ((value & exponent) == exponent) {
        return i;
      }
    }
  }
  return count;
}

static int32_t not_finite(const clb_section_desc* section, const clb_file_desc* file, uint64_t value, uint64_t row,
                          uint64_t col, clb_error* error) {
  char text[CLB_PLACE_BYTES];
  const clb_place place = {section->role, section->layer, section->expert};
  return clb_fail(error, CLB_ERR_NOT_FINITE,
                  "file %s: %s: value %" PRIu64 " (row %" PRIu64 ", column %" PRIu64 ") is NaN or infinite", file->name,
                  clb_place_text(place, text), value, row, col);
}

static int32_t check_quantised(const clb_section_desc* section, const clb_file_desc* file, const unsigned char* data,
                               clb_error* error) {
  const uint64_t bad = clb_first_bad_byte(section, 0, section->bytes, data);
  if (bad == section->bytes) {
    return CLB_OK;
  }
  const clb_parts parts = clb_parts_of(section);
  const char* const what = bad < parts.scales_at                       ? "a value"
                           : parts.zeros == 0u || bad < parts.zeros_at ? "a scale"
                                                                       : "";
  char text[CLB_PLACE_BYTES];
  const clb_place place = {section->role, section->layer, section->expert};
  (void)clb_place_text(place, text);
  if (what[0] != '\0') {
    return clb_fail(error, CLB_ERR_NOT_FINITE, "file %s: %s: %s, at byte %" PRIu64 ", is NaN or infinite", file->name,
                    text, what, section->offset + bad);
  }
  return clb_fail(error, CLB_ERR_FORMAT, "file %s: %s: the zero point at byte %" PRIu64 " is above 15", file->name,
                  text, section->offset + bad);
}

int32_t clb_section_piece_check(const clb_section_desc* section, const clb_file_desc* file, uint64_t begin,
                                uint64_t end, const unsigned char* data, clb_error* error) {
  const uint64_t bad = clb_first_bad_byte(section, begin, end, data);
  if (bad == end) {
    return CLB_OK;
  }
  char text[CLB_PLACE_BYTES];
  const clb_place place = {section->role, section->layer, section->expert};
  return clb_fail(error, CLB_ERR_NOT_FINITE, "file %s: %s: the value at byte %" PRIu64 " is NaN or infinite",
                  file->name, clb_place_text(place, text), section->offset + bad);
}

/* data: the section in memory. The message counts its values as the file does. */
static int32_t check_finite(const clb_section_desc* section, const clb_file_desc* file, const clb_tensor* tensor,
                            clb_error* error) {
  if (clb_is_quantised(section->precision)) {
    return check_quantised(section, file, tensor->data, error);
  }
  const uint64_t padded =
      tensor->layout == CLB_LAYOUT_ROWS16 ? clb_align_up(tensor->rows, CLB_TILE_ROWS) : tensor->rows;
  const uint64_t count = padded * tensor->cols;
  const uint64_t index = clb_first_not_finite(tensor->data, tensor->precision, count);
  if (index == count) {
    return CLB_OK;
  }
  const uint64_t tile = CLB_TILE_ROWS * (uint64_t)tensor->cols;
  const bool tiled = tensor->layout == CLB_LAYOUT_ROWS16;
  uint64_t row = tiled ? index / tile * CLB_TILE_ROWS + index % CLB_TILE_ROWS : index / tensor->cols;
  uint64_t col = tiled ? index % tile / CLB_TILE_ROWS : index % tensor->cols;
  if (tiled && section->layout == CLB_LAYOUT_FLAT && section->role == CLB_ROLE_DOWN) {
    const uint64_t swapped = row;
    row = col;
    col = swapped;
  }
  return not_finite(section, file, section->layout == CLB_LAYOUT_FLAT ? row * section->cols + col : index, row, col,
                    error);
}

clb_tensor clb_tensor_of(const clb_section_desc* section, const clb_demand* demand, const void* data) {
  clb_tensor tensor = {.data = data,
                       .precision = section->precision,
                       .layout = clb_is_repacked(section, demand) ? CLB_LAYOUT_ROWS16 : section->layout,
                       .rows = demand->rows,
                       .cols = demand->cols};
  if (clb_is_quantised(section->precision)) {
    const clb_parts parts = clb_parts_of(section);
    const unsigned char* const bytes = data;
    tensor.scales = bytes + parts.scales_at;
    tensor.zeros = parts.zeros != 0u ? bytes + parts.zeros_at : NULL;
    tensor.group_rows = section->group_rows;
    tensor.group_cols = section->group_cols;
  }
  return tensor;
}

/* Points the table at every section; fills it (dummy) or checks its values (files). */
static int32_t place_sections(const clb_loader_config* config, const clb_placement* placement, clb_weight_table* table,
                              clb_error* error) {
  const clb_model_desc* model = config->model;
  for (uint32_t i = 0; i < model->section_count; ++i) {
    const clb_section_desc* section = &model->section_table[i];
    const clb_place place = {section->role, section->layer, section->expert};
    const clb_demand demand = clb_demand_of(model, place.role, place.layer, place.expert);
    unsigned char* data = (unsigned char*)config->memory + placement->sections[i];
    clb_tensor* tensor = &table->tensors[clb_weight_index(table, place.role, place.layer, place.expert)];
    *tensor = clb_tensor_of(section, &demand, data);
    if (config->weights == CLB_WEIGHTS_DUMMY && clb_is_quantised(section->precision)) {
      clb_dummy_quantised(config->dummy_seed, section, data);
    } else if (config->weights == CLB_WEIGHTS_DUMMY) {
      clb_dummy_fill(config->dummy_seed, place, section->precision, tensor->layout, demand.rows, demand.cols, data);
    } else {
      const int32_t status = check_finite(section, &model->file_table[section->file], tensor, error);
      if (status != CLB_OK) {
        return status;
      }
    }
  }
  return CLB_OK;
}

static int32_t load_described(const clb_loader_config* config, clb_weight_table* table, clb_error* error) {
  clb_placement placement;
  int32_t status = clb_placement_make(config->model, CLB_LAYOUT_ROWS16, &placement, error);
  if (status != CLB_OK) {
    return status;
  }
  CLB_ASSERT(placement.bytes <= config->memory_bytes);
  if (config->weights == CLB_WEIGHTS_FILES) {
    status = read_files(config, &placement, error);
  }
  if (status == CLB_OK) {
    status = place_sections(config, &placement, table, error);
  }
  clb_placement_free(&placement);
  return status;
}

static void fill_own_layout(const clb_loader_config* config, clb_weight_table* table) {
  uint64_t end = 0;
  clb_place place = {0, -1, -1};
  do {
    clb_tensor tensor = {0};
    uint64_t offset = 0;
    if (lay_out(config->model, place, &end, &tensor, &offset)) {
      CLB_ASSERT(end <= config->memory_bytes);
      void* data = (char*)config->memory + offset;
      clb_dummy_fill(config->dummy_seed, place, tensor.precision, tensor.layout, tensor.rows, tensor.cols, data);
      tensor.data = data;
      table->tensors[clb_weight_index(table, place.role, place.layer, place.expert)] = tensor;
    }
  } while (clb_place_next(config->model, &place));
}

int32_t clb_loader_load(const clb_loader_config* config, const clb_weight_table** table, clb_error* error) {
  clb_loader_sizes sizes;
  int32_t status = clb_loader_plan(config->model, config->weights, &sizes, error);
  if (status != CLB_OK) {
    return status;
  }
  if (config->memory_bytes < sizes.weights_bytes || config->host_bytes < sizes.host_bytes ||
      (uintptr_t)config->memory % sizes.weights_alignment != 0u || (uintptr_t)config->host % 64u != 0u) {
    return clb_fail(error, CLB_ERR_ARGUMENT,
                    "loader: needs %" PRIu64 " bytes at a multiple of %" PRIu64 " for weights and %" PRIu64
                    " bytes at a multiple of 64 for the table",
                    sizes.weights_bytes, sizes.weights_alignment, sizes.host_bytes);
  }
  clb_weight_table* filled = clb_table_init(config->model, config->host);
  if (lays_out_itself(config->model, config->weights)) {
    fill_own_layout(config, filled);
  } else {
    status = load_described(config, filled, error);
  }
  if (status == CLB_OK) {
    if (config->weights == CLB_WEIGHTS_DUMMY && config->progress != NULL) {
      config->progress(config->progress_context, sizes.read_bytes);
    }
    *table = filled;
  }
  return status;
}
