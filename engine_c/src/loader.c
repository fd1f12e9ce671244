/*
 * loader.c: reads the files of a checked description into the caller's memory and builds the weight table.
 * Contract and drawing of the memory: loader.h. Files are opened one at a time and closed before the next.
 */
#define _POSIX_C_SOURCE 200809L

#include "loader.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "assert.h"
#include "loader_internal.h"

#define DUMMY_ALIGNMENT 256u /* of sections that the loader lays out itself */
#define SCAN_VALUES 4096u    /* values of one look for NaN: stays in the first-level cache */

/* Dummy weights without a section table: the loader chooses places and precisions. */
static int lays_out_itself(const clb_model_desc* model, uint32_t weights) {
  return weights == CLB_WEIGHTS_DUMMY && model->section_count == 0 && model->file_count == 0;
}

/* Calls of this function, in the order of clb_place_next, lay sections one after the other; *end is the first free
   byte. Returns 0 for a place that stays empty. */
static int lay_out(const clb_model_desc* model, clb_place place, uint64_t* end, clb_tensor* tensor, uint64_t* offset) {
  const clb_demand demand = clb_demand_of(model, place.role, place.layer, place.expert);
  if (demand.rows == 0 || demand.optional != 0) {
    return 0;
  }
  tensor->precision = demand.narrow != 0 ? CLB_BF16 : CLB_FP32;
  tensor->layout = CLB_LAYOUT_FLAT;
  tensor->rows = demand.rows;
  tensor->cols = demand.cols;
  *offset = clb_align_up(*end, DUMMY_ALIGNMENT);
  *end = *offset + (uint64_t)demand.rows * demand.cols * clb_element_bytes(tensor->precision);
  return 1;
}

static void plan_files(const clb_model_desc* model, clb_loader_sizes* sizes) {
  sizes->weights_alignment = 4096;
  sizes->weights_bytes = 0;
  sizes->read_bytes = 0;
  for (uint32_t i = 0; i < model->file_count; ++i) {
    const clb_file_desc* file = &model->file_table[i];
    /* At most 2^17 files of 2^46 bytes: no overflow. */
    sizes->weights_bytes = clb_align_up(sizes->weights_bytes, file->alignment) + file->bytes;
    sizes->read_bytes += file->bytes;
    if (file->alignment > sizes->weights_alignment) {
      sizes->weights_alignment = file->alignment;
    }
  }
}

static void plan_dummy(const clb_model_desc* model, clb_loader_sizes* sizes) {
  uint64_t end = 0;
  clb_place place = {0, -1, -1};
  do {
    clb_tensor tensor;
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
    if (status != CLB_OK) {
      return status;
    }
    plan_files(model, &found);
  }
  *sizes = found;
  return CLB_OK;
}

static int32_t read_piece(int fd, const clb_file_desc* file, uint64_t offset, uint64_t bytes, void* memory,
                          clb_error* error) {
  uint64_t done = 0;
  while (done < bytes) {
    const ssize_t got = read(fd, (char*)memory + done, (size_t)(bytes - done));
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

static int32_t read_open_file(const clb_loader_config* config, int fd, const clb_file_desc* file, char* memory,
                              uint64_t* loaded, clb_error* error) {
  struct stat found;
  if (fstat(fd, &found) != 0 || !S_ISREG(found.st_mode)) {
    return clb_fail(error, CLB_ERR_IO, "file %s: is not a regular file", file->name);
  }
  if ((uint64_t)found.st_size != file->bytes) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: found %" PRIu64 " bytes, expected %" PRIu64, file->name,
                    (uint64_t)found.st_size, file->bytes);
  }
  for (uint64_t offset = 0; offset < file->bytes; offset += CLB_LOADER_PIECE_BYTES) {
    const uint64_t rest = file->bytes - offset;
    const uint64_t bytes = rest < CLB_LOADER_PIECE_BYTES ? rest : CLB_LOADER_PIECE_BYTES;
    const int32_t status = read_piece(fd, file, offset, bytes, memory + offset, error);
    if (status != CLB_OK) {
      return status;
    }
    if (file->crc_count != 0) {
      const uint32_t expected = file->crc32c[offset / CLB_LOADER_PIECE_BYTES];
      const uint32_t actual = clb_crc32c(0, memory + offset, (size_t)bytes);
      if (actual != expected) {
        return clb_fail(error, CLB_ERR_CHECKSUM,
                        "file %s: bytes %" PRIu64 " to %" PRIu64 ": crc32c is %08x, expected %08x", file->name, offset,
                        offset + bytes, actual, expected);
      }
    }
    *loaded += bytes;
    if (config->progress != NULL) {
      config->progress(config->progress_context, *loaded);
    }
  }
  return CLB_OK;
}

static int32_t read_file(const clb_loader_config* config, const clb_file_desc* file, char* memory, uint64_t* loaded,
                         clb_error* error) {
  /* O_NONBLOCK: a named pipe in the folder must not hold up the open; it has no effect on regular files. */
  const int fd = openat(config->dir_fd, file->name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) {
    return clb_fail(error, CLB_ERR_IO, "file %s: cannot be opened: %s", file->name, strerror(errno));
  }
  const int32_t status = read_open_file(config, fd, file, memory, loaded, error);
  (void)close(fd);
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
        found |= (values[i] & exponent) == exponent;
      }
    } else {
      const uint16_t* values = data;
      for (uint64_t i = begin; i < end; ++i) {
        found |= (values[i] & exponent) == exponent;
      }
    }
    for (uint64_t i = begin; found != 0 && i < end; ++i) {
      const uint32_t value = precision == CLB_FP32 ? ((const uint32_t*)data)[i] : ((const uint16_t*)data)[i];
      if ((value & exponent) == exponent) {
        return i;
      }
    }
  }
  return count;
}

static int32_t check_finite(const clb_section_desc* section, const clb_file_desc* file, const void* data,
                            clb_error* error) {
  const uint64_t count = (uint64_t)section->rows * section->cols;
  const uint64_t index = clb_first_not_finite(data, section->precision, count);
  if (index == count) {
    return CLB_OK;
  }
  char text[CLB_PLACE_BYTES];
  const clb_place place = {section->role, section->layer, section->expert};
  return clb_fail(error, CLB_ERR_NOT_FINITE,
                  "file %s: %s: value %" PRIu64 " (row %" PRIu64 ", column %" PRIu64 ") is NaN or infinite", file->name,
                  clb_place_text(place, text), index, index / section->cols, index % section->cols);
}

/* Points the table at every section; fills it (dummy) or checks its values (files). bases: first byte of each file. */
static int32_t place_sections(const clb_loader_config* config, const uint64_t* bases, clb_weight_table* table,
                              clb_error* error) {
  const clb_model_desc* model = config->model;
  for (uint32_t i = 0; i < model->section_count; ++i) {
    const clb_section_desc* section = &model->section_table[i];
    const clb_place place = {section->role, section->layer, section->expert};
    void* data = (char*)config->memory + bases[section->file] + section->offset;
    clb_tensor* tensor = &table->tensors[clb_weight_index(table, place.role, place.layer, place.expert)];
    *tensor = (clb_tensor){data, section->precision, section->layout, section->rows, section->cols};
    if (config->weights == CLB_WEIGHTS_DUMMY) {
      clb_dummy_fill(config->dummy_seed, place, section->precision, section->rows, section->cols, data);
    } else {
      const int32_t status = check_finite(section, &model->file_table[section->file], data, error);
      if (status != CLB_OK) {
        return status;
      }
    }
  }
  return CLB_OK;
}

static int32_t load_described(const clb_loader_config* config, clb_weight_table* table, clb_error* error) {
  const clb_model_desc* model = config->model;
  uint64_t* bases = malloc(((size_t)model->file_count + 1u) * sizeof *bases);
  if (bases == NULL) {
    return clb_fail(error, CLB_ERR_MEMORY, "no memory for the places of %u files", model->file_count);
  }
  int32_t status = CLB_OK;
  uint64_t end = 0;
  uint64_t loaded = 0;
  for (uint32_t i = 0; status == CLB_OK && i < model->file_count; ++i) {
    const clb_file_desc* file = &model->file_table[i];
    bases[i] = clb_align_up(end, file->alignment);
    end = bases[i] + file->bytes;
    CLB_ASSERT(end <= config->memory_bytes);
    if (config->weights == CLB_WEIGHTS_FILES) {
      status = read_file(config, file, (char*)config->memory + bases[i], &loaded, error);
    }
  }
  if (status == CLB_OK) {
    status = place_sections(config, bases, table, error);
  }
  free(bases);
  return status;
}

static void fill_own_layout(const clb_loader_config* config, clb_weight_table* table) {
  uint64_t end = 0;
  clb_place place = {0, -1, -1};
  do {
    clb_tensor tensor;
    uint64_t offset = 0;
    if (lay_out(config->model, place, &end, &tensor, &offset)) {
      CLB_ASSERT(end <= config->memory_bytes);
      void* data = (char*)config->memory + offset;
      clb_dummy_fill(config->dummy_seed, place, tensor.precision, tensor.rows, tensor.cols, data);
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
      (uintptr_t)config->memory % sizes.weights_alignment != 0 || (uintptr_t)config->host % 64u != 0) {
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
