/*
 * loader_check.c: what a model demands of its sections, and whether a description delivers it. Reads no file.
 *
 * One file of a checked description, by offset:
 *
 *   | gap | section | gap | section (named by two layers: same bytes, same shape) | gap |
 *
 * Gaps are padding and shorter than the file's alignment; sections never overlap except by being the same bytes for
 * the same role and shape; so the sections add up to the file.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "invariant.h"
#include "loader_internal.h"

int32_t clb_fail(clb_error* error, int32_t status, const char* format, ...) {
  if (error != NULL) {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    error->status = status;
  }
  return status;
}

const char* clb_place_text(clb_place place, char text[CLB_PLACE_BYTES]) {
  static const char* const names[] = {"embedding", "head",     "final_norm", "attn_norm",   "qkv",      "qkv_bias",
                                      "out",       "ffn_norm", "router",     "shared_gate", "out_bias", "q_norm",
                                      "k_norm",    "gate",     "up",         "down"};
  const char* role = place.role < sizeof names / sizeof names[0] ? names[place.role] : "unknown role";
  if (place.layer < 0) {
    (void)snprintf(text, CLB_PLACE_BYTES, "%s", role);
  } else if (place.expert < 0) {
    (void)snprintf(text, CLB_PLACE_BYTES, "%s of layer %d", role, place.layer);
  } else {
    (void)snprintf(text, CLB_PLACE_BYTES, "%s of layer %d, expert %d", role, place.layer, place.expert);
  }
  return text;
}

static clb_demand nothing(void) {
  const clb_demand demand = {0, 0, 0, 0, 0};
  return demand;
}

static clb_demand matrix_of(uint32_t rows, uint32_t cols) {
  const clb_demand demand = {.rows = rows, .cols = cols, .narrow = 1, .matrix = 1};
  return demand;
}

static clb_demand vector_of(uint32_t cols) {
  const clb_demand demand = {.rows = 1, .cols = cols};
  return demand;
}

static clb_demand bias_of(uint32_t cols) {
  const clb_demand demand = {.rows = 1, .cols = cols, .optional = 1};
  return demand;
}

static clb_demand demand_of_global(const clb_model_desc* model, uint32_t role) {
  switch (role) {
    case CLB_ROLE_EMBEDDING:
      return matrix_of(model->vocab_size, model->hidden);
    case CLB_ROLE_HEAD:
      return model->tied_head != 0u ? nothing() : matrix_of(model->vocab_size, model->hidden);
    case CLB_ROLE_FINAL_NORM:
      return vector_of(model->hidden);
    default:
      return nothing();
  }
}

static clb_demand demand_of_qk_norm(const clb_model_desc* model, const clb_layer_desc* row, uint32_t heads) {
  if (row->qk_norm == CLB_QK_NORM_NONE) {
    return nothing();
  }
  return vector_of(row->qk_norm == CLB_QK_NORM_HEAD ? model->head_dim : heads * model->head_dim);
}

static clb_demand demand_of_expert(const clb_model_desc* model, uint32_t role, uint32_t width) {
  if (width == 0u) {
    return nothing();
  }
  return role == CLB_ROLE_DOWN ? matrix_of(model->hidden, width) : matrix_of(width, model->hidden);
}

static clb_demand demand_of_layer(const clb_model_desc* model, const clb_layer_desc* row, uint32_t role) {
  const uint32_t query = model->heads * model->head_dim;
  const uint32_t qkv = query + 2u * model->kv_heads * model->head_dim;
  clb_demand router = matrix_of(row->experts, model->hidden);
  router.narrow = 0;
  switch (role) {
    case CLB_ROLE_ATTN_NORM:
    case CLB_ROLE_FFN_NORM:
      return vector_of(model->hidden);
    case CLB_ROLE_QKV:
      return matrix_of(qkv, model->hidden);
    case CLB_ROLE_QKV_BIAS:
      return bias_of(qkv);
    case CLB_ROLE_OUT:
      return matrix_of(model->hidden, query);
    case CLB_ROLE_OUT_BIAS:
      return bias_of(model->hidden);
    case CLB_ROLE_Q_NORM:
      return demand_of_qk_norm(model, row, model->heads);
    case CLB_ROLE_K_NORM:
      return demand_of_qk_norm(model, row, model->kv_heads);
    case CLB_ROLE_ROUTER:
      return row->ffn_kind == CLB_FFN_MOE ? router : nothing();
    case CLB_ROLE_SHARED_GATE:
      return row->shared_gated != 0u ? vector_of(model->hidden) : nothing();
    case CLB_ROLE_GATE:
    case CLB_ROLE_UP:
    case CLB_ROLE_DOWN:
      return demand_of_expert(model, role, row->shared_width);
    default:
      return nothing();
  }
}

clb_demand clb_demand_of(const clb_model_desc* model, uint32_t role, int32_t layer, int32_t expert) {
  if (layer < -1 || layer >= (int32_t)model->layers || expert < -1) {
    return nothing();
  }
  if (layer == -1) {
    return expert == -1 ? demand_of_global(model, role) : nothing();
  }
  const clb_layer_desc* row = &model->layer_table[layer];
  if (expert == -1) {
    return demand_of_layer(model, row, role);
  }
  if (role < CLB_ROLE_GATE || role > CLB_ROLE_DOWN || expert >= (int32_t)row->experts) {
    return nothing();
  }
  return demand_of_expert(model, role, row->expert_width);
}

bool clb_place_next(const clb_model_desc* model, clb_place* place) {
  const uint32_t last = place->layer < 0 ? CLB_ROLE_FINAL_NORM : CLB_ROLE_DOWN;
  if (place->role < last) {
    ++place->role;
    return true;
  }
  if (place->layer >= 0 && place->expert + 1 < (int32_t)model->layer_table[place->layer].experts) {
    place->role = CLB_ROLE_GATE;
    ++place->expert;
    return true;
  }
  place->role = CLB_ROLE_ATTN_NORM;
  place->expert = -1;
  ++place->layer;
  return place->layer < (int32_t)model->layers;
}

static uint64_t tensor_count(const clb_model_desc* model) {
  uint64_t count = CLB_ROLE_FINAL_NORM + 1u;
  for (uint32_t layer = 0; layer < model->layers; ++layer) {
    count += CLB_LAYER_TENSORS(model->layer_table[layer].experts);
  }
  return count;
}

uint64_t clb_table_bytes(const clb_model_desc* model) {
  return clb_align_up(sizeof(clb_weight_table), 64) + tensor_count(model) * sizeof(clb_tensor);
}

clb_weight_table* clb_table_init(const clb_model_desc* model, void* host) {
  (void)memset(host, 0, (size_t)clb_table_bytes(model));
  clb_weight_table* table = host;
  table->layers = model->layers;
  table->tensor_count = (uint32_t)tensor_count(model);
  table->tensors = (clb_tensor*)(void*)((char*)host + clb_align_up(sizeof *table, 64));
  uint32_t first = CLB_ROLE_FINAL_NORM + 1u;
  for (uint32_t layer = 0; layer < model->layers; ++layer) {
    table->layer_first[layer] = first;
    table->layer_experts[layer] = model->layer_table[layer].experts;
    first += CLB_LAYER_TENSORS(table->layer_experts[layer]);
  }
  CLB_ASSERT(first == table->tensor_count);
  return table;
}

#define EXPERT_SECTIONS 3u /* gate, up, down */

static int32_t check_file(const clb_file_desc* file, uint32_t index, clb_error* error) {
  const size_t length = file->name != NULL ? strlen(file->name) : 0u;
  if (length == 0u || length > 255u || strchr(file->name, '/') != NULL || strcmp(file->name, ".") == 0 ||
      strcmp(file->name, "..") == 0) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %u: its name must be a plain file name without '/'", index);
  }
  if (file->alignment != 4096u && file->alignment != 2097152u) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: alignment is %u, must be 4096 or 2097152", file->name,
                    file->alignment);
  }
  if (file->bytes == 0u || file->bytes > UINT64_C(1) << 46) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: size is %" PRIu64 " bytes, must be 1 to 2^46", file->name,
                    file->bytes);
  }
  const uint64_t pieces = (file->bytes + CLB_LOADER_PIECE_BYTES - 1u) / CLB_LOADER_PIECE_BYTES;
  if (file->crc_count != 0u && (file->crc_count != pieces || file->crc32c == NULL)) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: %u checksums, but %" PRIu64 " bytes need %" PRIu64, file->name,
                    file->crc_count, file->bytes, pieces);
  }
  return CLB_OK;
}

/* One section against the model and its file; no other section is looked at. */
static int32_t check_section(const clb_model_desc* model, const clb_section_desc* section, uint32_t index,
                             clb_error* error) {
  char text[CLB_PLACE_BYTES];
  const clb_place place = {section->role, section->layer, section->expert};
  const clb_demand demand = clb_demand_of(model, section->role, section->layer, section->expert);
  if (section->file >= model->file_count) {
    return clb_fail(error, CLB_ERR_FORMAT, "section %u: file index is %u, but there are %u files", index, section->file,
                    model->file_count);
  }
  const clb_file_desc* file = &model->file_table[section->file];
  (void)clb_place_text(place, text);
  if (demand.rows == 0u) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: section %u (role %u: %s) is not part of this model", file->name,
                    index, section->role, text);
  }
  const uint32_t last_layout = demand.narrow != 0u   ? CLB_LAYOUT_MMA
                               : demand.matrix != 0u ? CLB_LAYOUT_ROWS16
                                                     : CLB_LAYOUT_FLAT;
  if (section->layout > last_layout || section->precision > CLB_FP8) {
    return clb_fail(error, CLB_ERR_UNSUPPORTED, "file %s: %s: layout %u and precision %u are not built in", file->name,
                    text, section->layout, section->precision);
  }
  if (demand.narrow == 0u && section->precision != CLB_FP32) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: %s must be fp32", file->name, text);
  }
  const bool transposed = section->role == CLB_ROLE_DOWN && section->layout == CLB_LAYOUT_FLAT;
  const uint32_t rows = transposed ? demand.cols : demand.rows;
  const uint32_t cols = transposed ? demand.rows : demand.cols;
  if (section->rows != rows || section->cols != cols) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: %s: shape is (%u, %u), must be (%u, %u)", file->name, text,
                    section->rows, section->cols, rows, cols);
  }
  const int32_t status = clb_quantised_check(section, file->name, text, error);
  if (status != CLB_OK) {
    return status;
  }
  const uint64_t element = clb_is_quantised(section->precision) ? 1u : clb_element_bytes(section->precision);
  const uint64_t bytes = clb_parts_of(section).bytes;
  if (section->bytes != bytes) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: %s: %" PRIu64 " bytes, but its shape takes %" PRIu64, file->name,
                    text, section->bytes, bytes);
  }
  if (section->offset % element != 0u) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: %s: offset %" PRIu64 " is not a multiple of %" PRIu64, file->name,
                    text, section->offset, element);
  }
  if (section->offset > file->bytes || bytes > file->bytes - section->offset) {
    return clb_fail(error, CLB_ERR_FORMAT,
                    "file %s: %s: bytes %" PRIu64 " + %" PRIu64 " lie beyond the file's %" PRIu64, file->name, text,
                    section->offset, bytes, file->bytes);
  }
  return CLB_OK;
}

/* Every place has its section once; `seen` holds one byte per tensor of the table, zeroed. */
static int32_t check_complete(const clb_model_desc* model, const clb_weight_table* table, uint8_t* seen,
                              clb_error* error) {
  char text[CLB_PLACE_BYTES];
  for (uint32_t i = 0; i < model->section_count; ++i) {
    const clb_section_desc* section = &model->section_table[i];
    const uint32_t index = clb_weight_index(table, section->role, section->layer, section->expert);
    if (seen[index] != 0u) {
      const clb_place place = {section->role, section->layer, section->expert};
      return clb_fail(error, CLB_ERR_FORMAT, "file %s: %s is there twice", model->file_table[section->file].name,
                      clb_place_text(place, text));
    }
    seen[index] = 1;
  }
  clb_place place = {0, -1, -1};
  do {
    const clb_demand demand = clb_demand_of(model, place.role, place.layer, place.expert);
    if (demand.rows != 0u && demand.optional == 0u &&
        seen[clb_weight_index(table, place.role, place.layer, place.expert)] == 0u) {
      return clb_fail(error, CLB_ERR_FORMAT, "%s is missing from the model folder", clb_place_text(place, text));
    }
  } while (clb_place_next(model, &place));
  return CLB_OK;
}

int clb_section_order(const void* left, const void* right) {
  const clb_section_desc* a = *(const clb_section_desc* const*)left;
  const clb_section_desc* b = *(const clb_section_desc* const*)right;
  if (a->file != b->file) {
    return a->file < b->file ? -1 : 1;
  }
  if (a->offset != b->offset) {
    return a->offset < b->offset ? -1 : 1;
  }
  return 0;
}

static bool same_bytes(const clb_section_desc* a, const clb_section_desc* b) {
  return a->offset == b->offset && a->bytes == b->bytes && a->role == b->role && a->precision == b->precision &&
         a->layout == b->layout && a->rows == b->rows && a->cols == b->cols && a->group_rows == b->group_rows &&
         a->group_cols == b->group_cols && a->zeros_offset == b->zeros_offset && (a->expert < 0) == (b->expert < 0);
}

static int32_t check_gap(const clb_file_desc* file, uint64_t begin, uint64_t end, clb_error* error) {
  if (end - begin < file->alignment) {
    return CLB_OK;
  }
  return clb_fail(error, CLB_ERR_FORMAT, "file %s: bytes %" PRIu64 " to %" PRIu64 " belong to no section", file->name,
                  begin, end);
}

/* Walks each file's sections by offset. `sorted` holds every section, ordered by file and offset. */
static int32_t check_overlaps(const clb_model_desc* model, const clb_section_desc* const* sorted, clb_error* error) {
  char texts[2][CLB_PLACE_BYTES];
  uint32_t next = 0;
  for (uint32_t index = 0; index < model->file_count; ++index) {
    const clb_file_desc* file = &model->file_table[index];
    uint64_t end = 0; /* of the sections so far */
    const uint32_t first = next;
    for (; next < model->section_count && sorted[next]->file == index; ++next) {
      const clb_section_desc* section = sorted[next];
      if (next > first && same_bytes(sorted[next - 1u], section)) {
        continue;
      }
      if (section->offset < end) {
        const clb_place here = {section->role, section->layer, section->expert};
        const clb_place before = {sorted[next - 1u]->role, sorted[next - 1u]->layer, sorted[next - 1u]->expert};
        return clb_fail(error, CLB_ERR_FORMAT, "file %s: %s overlaps %s", file->name, clb_place_text(here, texts[0]),
                        clb_place_text(before, texts[1]));
      }
      const int32_t status = check_gap(file, end, section->offset, error);
      if (status != CLB_OK) {
        return status;
      }
      end = section->offset + section->bytes;
    }
    const int32_t status = check_gap(file, end, file->bytes, error);
    if (status != CLB_OK) {
      return status;
    }
  }
  return CLB_OK;
}

static int32_t check_together(const clb_model_desc* model, clb_error* error) {
  const size_t table_bytes = (size_t)clb_table_bytes(model);
  const size_t list_bytes = model->section_count * sizeof(clb_section_desc*);
  const size_t count = (size_t)tensor_count(model);
  char* scratch = malloc(table_bytes + list_bytes + count);
  if (scratch == NULL) {
    return clb_fail(error, CLB_ERR_MEMORY, "no memory for the check of %u sections", model->section_count);
  }
  /* clb_table_bytes is a multiple of 8, so the pointers after the table are aligned. */
  const clb_section_desc** sorted = (const clb_section_desc**)(void*)(scratch + table_bytes);
  uint8_t* seen = (uint8_t*)scratch + table_bytes + list_bytes;
  (void)memset(seen, 0, count);
  for (uint32_t i = 0; i < model->section_count; ++i) {
    sorted[i] = &model->section_table[i];
  }
  int32_t status = check_complete(model, clb_table_init(model, scratch), seen, error);
  if (status == CLB_OK) {
    qsort(sorted, model->section_count, sizeof sorted[0], clb_section_order);
    status = check_overlaps(model, sorted, error);
  }
  free(scratch);
  return status;
}

int32_t clb_sections_check(const clb_model_desc* model, clb_error* error) {
  if ((model->file_count != 0u && model->file_table == NULL) ||
      (model->section_count != 0u && model->section_table == NULL)) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "model: a table has rows but no address");
  }
  int32_t status = CLB_OK;
  for (uint32_t i = 0; status == CLB_OK && i < model->file_count; ++i) {
    status = check_file(&model->file_table[i], i, error);
  }
  for (uint32_t i = 0; status == CLB_OK && i < model->section_count; ++i) {
    status = check_section(model, &model->section_table[i], i, error);
  }
  return status != CLB_OK ? status : check_together(model, error);
}

int32_t clb_expert_check(const clb_model_desc* model, const clb_swap_desc* desc, clb_error* error) {
  const clb_section_desc* sorted[EXPERT_SECTIONS];
  clb_model_desc alone = *model; /* nothing of it is looked at but shapes */
  alone.section_table = desc->sections;
  alone.section_count = EXPERT_SECTIONS;
  alone.file_table = desc->file;
  alone.file_count = 1;
  int32_t status = check_file(desc->file, 0, error);
  if (status == CLB_OK && desc->file->crc_count == 0u) {
    return clb_fail(error, CLB_ERR_FORMAT, "file %s: has no checksums", desc->file->name);
  }
  for (uint32_t i = 0; status == CLB_OK && i < EXPERT_SECTIONS; ++i) {
    const clb_section_desc* const section = &desc->sections[i];
    sorted[i] = section;
    if (section->role != CLB_ROLE_GATE + i || section->layer != (int32_t)desc->layer ||
        section->expert != (int32_t)desc->expert) {
      return clb_fail(error, CLB_ERR_FORMAT, "file %s: its sections must be gate, up and down of layer %u, expert %u",
                      desc->file->name, desc->layer, desc->expert);
    }
    status = check_section(&alone, section, i, error);
  }
  if (status == CLB_OK) {
    qsort(sorted, EXPERT_SECTIONS, sizeof sorted[0], clb_section_order);
    status = check_overlaps(&alone, sorted, error);
  }
  return status;
}
