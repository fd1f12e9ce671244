/*
 * cuda_load.c: weights into the arena: where each will lie, and who brings it. Files are read by cuda_read.c.
 *
 * Dummy weights are written by a kernel, so that models of any size are there in seconds. They have the values of
 * dummy.c, wherever the description says that a section lies.
 */
#include <string.h>

#include "cuda_internal.h"
#include "invariant.h"
#include "number.h"

#define BLOCKS_MAX 65535u
#define BLOCK_ALIGNMENT 256u
#define INT4_MIDDLE 8u

typedef struct loader {
  clb_engine* engine;
  struct clb_cuda* cuda;
  const clb_engine_config* config;
  clb_placement placement;
} loader;

static clb_driver* driver_of(const loader* state) { return &state->cuda->driver; }

/* -------------------------------------------------------------- the table */

/* Not quantised, or as `section` says. */
static void set_tensor(const loader* state, clb_weight_table* table, clb_place place, uint32_t precision,
                       const clb_section_desc* section, uint64_t offset) {
  const clb_demand demand = clb_demand_of(state->config->model, place.role, place.layer, place.expert);
  clb_tensor* const tensor = &table->tensors[clb_weight_index(table, place.role, place.layer, place.expert)];
  /* Never dereferenced here: the table of a device holds its addresses. */
  tensor->data = (const void*)(uintptr_t)clb_cuda_at(state->cuda, state->cuda->at.weights + offset);
  tensor->precision = precision;
  tensor->layout = demand.narrow != 0u ? CLB_LAYOUT_MMA : CLB_LAYOUT_FLAT;
  tensor->rows = demand.rows;
  tensor->cols = demand.cols;
  if (section != NULL && clb_is_quantised(section->precision)) {
    const clb_parts parts = clb_parts_of(section);
    const unsigned char* const data = tensor->data;
    tensor->scales = data + parts.scales_at;
    tensor->zeros = parts.zeros != 0u ? data + parts.zeros_at : NULL;
    tensor->group_rows = section->group_rows;
    tensor->group_cols = section->group_cols;
  }
}

static uint32_t log2_of(uint32_t value) {
  uint32_t log = 0;
  while (value >> log > 1u) {
    ++log;
  }
  return log;
}

static uint32_t format_word(uint32_t precision, uint32_t group_rows, uint32_t group_cols, uint32_t cols, bool zeros) {
  if (!clb_is_quantised(precision)) {
    return CLB_KIND_HALF;
  }
  const uint32_t kind = precision == CLB_INT8 ? CLB_KIND_INT8 : precision == CLB_INT4 ? CLB_KIND_INT4 : CLB_KIND_FP8;
  const bool whole_row = precision != CLB_INT4 && group_rows == 1u && group_cols == cols;
  return kind | (whole_row ? 0u : log2_of(group_cols) << 4) | (zeros ? CLB_FORMAT_ZEROS : 0u) |
         (group_rows > 1u ? CLB_FORMAT_BLOCKS : 0u);
}

uint32_t clb_cuda_format(const clb_tensor* tensor) {
  return format_word(tensor->precision, tensor->group_rows, tensor->group_cols, tensor->cols, tensor->zeros != NULL);
}

uint32_t clb_cuda_section_format(const clb_section_desc* section) {
  return format_word(section->precision, section->group_rows, section->group_cols, section->cols,
                     section->zeros_offset != 0u);
}

int32_t clb_cuda_make_fp16(const struct clb_cuda* cuda, clb_driver* driver, const clb_tensor* tensor) {
  if (tensor->precision != CLB_BF16 || cuda->precision != CLB_FP16) {
    return CLB_OK;
  }
  const uint64_t bytes = clb_layout_bytes(CLB_LAYOUT_MMA, CLB_BF16, tensor->rows, tensor->cols);
  const clb_to_fp16_args args = {.data = (uint64_t)(uintptr_t)tensor->data, .vectors = bytes / 16u};
  const uint64_t blocks = (args.vectors + CLB_MATMUL_THREADS - 1u) / CLB_MATMUL_THREADS;
  const clb_launch launch = {.function = cuda->functions[CLB_CUDA_TO_FP16],
                             .args = &args,
                             .grid = {blocks < BLOCKS_MAX ? (uint32_t)blocks : BLOCKS_MAX, 1u, 1u},
                             .block = {CLB_MATMUL_THREADS, 1u, 1u},
                             .shared_bytes = 0u,
                             .edge = CLB_EDGE_FULL};
  return driver->launch(driver, cuda->device.copy_stream, &launch);
}

/* Two fp16 scales, or one of fp32. */
static uint32_t dummy_scale(const clb_tensor* tensor, float half_width) {
  if (tensor->precision == CLB_FP8) {
    return clb_bits_of_float(half_width / 194.0f);
  }
  const uint32_t scale = clb_half_of_float(half_width / (tensor->precision == CLB_INT8 ? 127.0f : 8.0f));
  return scale << 16 | scale;
}

/* parts: of a quantised matrix. */
static int32_t fill_dummy(const loader* state, clb_place place, const clb_tensor* tensor, const clb_parts* parts) {
  clb_driver* const d = driver_of(state);
  const float half_width = clb_dummy_half_width(place.role, tensor->cols);
  const clb_dummy_args args = {.output = (uint64_t)(uintptr_t)tensor->data,
                               .key = clb_dummy_key(state->config->dummy_seed, place),
                               .scales_at = parts->scales_at,
                               .scale_words = (parts->scales + 3u) / 4u,
                               .rows = tensor->rows,
                               .cols = tensor->cols,
                               .half_width = half_width,
                               .precision = tensor->precision,
                               .tiled = tensor->layout == CLB_LAYOUT_MMA ? 1u : 0u,
                               .by_column = place.role == CLB_ROLE_DOWN ? 1u : 0u,
                               .scale = clb_is_quantised(tensor->precision) ? dummy_scale(tensor, half_width) : 0u};
  const uint64_t values = (uint64_t)tensor->rows * tensor->cols;
  const uint64_t blocks = (values + CLB_DUMMY_VALUES - 1u) / CLB_DUMMY_VALUES;
  const clb_launch launch = {.function = state->cuda->functions[CLB_CUDA_DUMMY],
                             .args = &args,
                             .grid = {blocks < BLOCKS_MAX ? (uint32_t)blocks : BLOCKS_MAX, 1u, 1u},
                             .block = {CLB_MATMUL_THREADS, 1u, 1u},
                             .shared_bytes = 0u,
                             .edge = CLB_EDGE_FULL};
  const int32_t status = d->launch(d, state->cuda->device.copy_stream, &launch);
  if (status != CLB_OK || parts->zeros == 0u) {
    return status;
  }
  return d->fill(d, state->cuda->device.copy_stream, args.output + parts->zeros_at, INT4_MIDDLE, parts->zeros);
}

/* ------------------------------------------------------------ laying out */

/* Dummy weights: the sections of a description one after the other, or without sections what the model needs: a walk
   over all of them. */
typedef struct dummy_walk {
  clb_section_desc section; /* the next one */
  uint64_t offset;          /* where it lies */
  clb_parts parts;
  clb_place place;
  uint32_t index;
} dummy_walk;

static dummy_walk dummy_begin(void) {
  return (dummy_walk){.place = {0u, -1, -1}, .parts = {0, 0, 0, 0, 0, 0}, .offset = 0u, .index = 0u};
}

/* The section of a place of a model without a description: bf16 and fp32; false: it has none. */
static bool default_section(const clb_model_desc* model, clb_place place, clb_section_desc* section) {
  const clb_demand demand = clb_demand_of(model, place.role, place.layer, place.expert);
  *section = (clb_section_desc){.role = place.role,
                                .layer = place.layer,
                                .expert = place.expert,
                                .precision = demand.narrow != 0u ? CLB_BF16 : CLB_FP32,
                                .layout = demand.narrow != 0u ? CLB_LAYOUT_MMA : CLB_LAYOUT_FLAT,
                                .rows = demand.rows,
                                .cols = demand.cols};
  return demand.rows != 0u && demand.optional == 0u;
}

/* The next section, behind the one before; false: there is none. */
static bool dummy_next(const clb_model_desc* model, dummy_walk* walk) {
  walk->offset = clb_align_up(walk->offset + walk->parts.bytes, BLOCK_ALIGNMENT);
  walk->parts.bytes = 0u;
  if (model->section_count != 0u) {
    if (walk->index == model->section_count) {
      return false;
    }
    walk->section = model->section_table[walk->index];
  } else {
    bool found = false;
    while (!found) {
      if (walk->index != 0u && !clb_place_next(model, &walk->place)) {
        return false;
      }
      ++walk->index;
      found = default_section(model, walk->place, &walk->section);
    }
  }
  ++walk->index;
  walk->parts = clb_parts_of(&walk->section);
  return true;
}

int32_t clb_cuda_weights_bytes(const clb_engine_config* config, uint64_t* bytes, clb_error* error) {
  if (config->weights == CLB_WEIGHTS_FILES) {
    clb_placement placement;
    const int32_t status = clb_placement_make(config->model, CLB_LAYOUT_MMA, &placement, error);
    if (status == CLB_OK) {
      *bytes = placement.bytes;
      clb_placement_free(&placement);
    }
    return status;
  }
  dummy_walk walk = dummy_begin();
  while (dummy_next(config->model, &walk)) {
  }
  *bytes = walk.offset;
  return CLB_OK;
}

uint32_t clb_cuda_precision(const clb_engine_config* config) {
  const clb_model_desc* const model = config->model;
  for (uint64_t i = 0; i < config->swap_format_count; ++i) {
    if (config->swap_formats[i].precision != CLB_BF16) {
      return CLB_FP16;
    }
  }
  for (uint32_t i = 0; i < model->section_count; ++i) {
    const clb_section_desc* const section = &model->section_table[i];
    if (section->precision != CLB_BF16 &&
        clb_demand_of(model, section->role, section->layer, section->expert).narrow != 0u) {
      return CLB_FP16;
    }
  }
  return CLB_BF16;
}

/* --------------------------------------------------------------- loading */

static int32_t load_dummy(const loader* state, clb_weight_table* table) {
  const clb_model_desc* const model = state->config->model;
  dummy_walk walk = dummy_begin();
  int32_t status = CLB_OK;
  while (status == CLB_OK && dummy_next(model, &walk)) {
    const clb_section_desc* const section = &walk.section;
    const clb_place place = {section->role, section->layer, section->expert};
    const uint32_t precision = section->precision == CLB_BF16 ? state->cuda->precision : section->precision;
    set_tensor(state, table, place, precision, section, walk.offset);
    status = fill_dummy(state, place, clb_weight(table, place.role, place.layer, place.expert), &walk.parts);
  }
  return status;
}

/* Where every section will lie; nothing is read. */
static int32_t place_pack(loader* state, clb_weight_table* table, clb_error* error) {
  const clb_model_desc* const model = state->config->model;
  const int32_t status = clb_placement_make(model, CLB_LAYOUT_MMA, &state->placement, error);
  for (uint32_t i = 0; status == CLB_OK && i < model->section_count; ++i) {
    const clb_section_desc* const section = &model->section_table[i];
    const clb_place place = {section->role, section->layer, section->expert};
    set_tensor(state, table, place, section->precision, section, state->placement.sections[i]);
  }
  return status;
}

clb_expert_weights clb_cuda_expert(const clb_tensor parts[3]) {
  return (clb_expert_weights){.gate = (uint64_t)(uintptr_t)parts[0].data,
                              .up = (uint64_t)(uintptr_t)parts[1].data,
                              .down = (uint64_t)(uintptr_t)parts[2].data,
                              .format = clb_cuda_format(&parts[0]),
                              .down_format = clb_cuda_format(&parts[2])};
}

/* gate, up and down lie side by side in the table. */
static clb_expert_weights expert_of(const clb_weight_table* table, uint32_t layer, int32_t expert) {
  return clb_cuda_expert(clb_weight(table, CLB_ROLE_GATE, (int32_t)layer, expert));
}

static void want_format(struct clb_cuda* cuda, uint32_t format) {
  cuda->kinds |= clb_cuda_kind(CLB_FORMAT_KIND(format));
  cuda->meta = clb_cuda_meta(format) > cuda->meta ? clb_cuda_meta(format) : cuda->meta;
}

/* Which kernels the experts need that swaps may bring. */
static void want_swap_formats(struct clb_cuda* cuda, const clb_engine_config* config) {
  for (uint64_t i = 0; i < config->swap_format_count; ++i) {
    const clb_weight_format* const each = &config->swap_formats[i];
    want_format(cuda, format_word(each->precision, each->group_rows, each->group_cols, 0u, each->zeros != 0u));
  }
}

/* Which kernels the experts need; gate and up must be alike. */
static int32_t find_formats(const loader* state, const clb_weight_table* table, clb_error* error) {
  struct clb_cuda* const cuda = state->cuda;
  const clb_model_desc* const model = state->config->model;
  for (uint32_t layer = 0; layer < model->layers; ++layer) {
    const int32_t experts = (int32_t)model->layer_table[layer].experts;
    for (int32_t expert = -1; expert < experts; ++expert) { /* -1: the shared one */
      const clb_tensor* const parts = clb_weight(table, CLB_ROLE_GATE, (int32_t)layer, expert);
      if (parts[0].data == NULL) {
        continue;
      }
      if (clb_cuda_format(&parts[0]) != clb_cuda_format(&parts[1])) {
        char text[CLB_PLACE_BYTES];
        const clb_place place = {CLB_ROLE_GATE, (int32_t)layer, expert};
        return clb_fail(error, CLB_ERR_UNSUPPORTED,
                        "%s: gate and up have two formats; the CUDA kernels take one, so convert the model again",
                        clb_place_text(place, text));
      }
      for (uint32_t part = 0; part < 3u; part += 2u) {
        want_format(cuda, clb_cuda_format(&parts[part]));
      }
    }
  }
  want_swap_formats(cuda, state->config);
  return CLB_OK;
}

static uint64_t table_row(const clb_model_desc* model, uint32_t layer) {
  uint64_t row = 0;
  for (uint32_t l = 0; l < layer; ++l) {
    row += (uint64_t)model->layer_table[l].experts + 1u;
  }
  return row;
}

static void place_tables(const loader* state) {
  struct clb_cuda* const cuda = state->cuda;
  const clb_model_desc* const model = state->config->model;
  for (uint32_t layer = 0; layer < model->layers; ++layer) {
    cuda->layer_tables[layer] =
        clb_cuda_at(cuda, cuda->at.expert_tables) + table_row(model, layer) * sizeof(clb_expert_weights);
  }
  CLB_ASSERT(table_row(model, model->layers) * sizeof(clb_expert_weights) == cuda->at.table_bytes);
}

/* Expert tables and frequencies, through the load buffers, which nobody needs any more. */
static int32_t copy_tables(const loader* state, const clb_weight_table* table) {
  struct clb_cuda* const cuda = state->cuda;
  clb_driver* const d = driver_of(state);
  void* const stream = cuda->device.stream;
  const clb_model_desc* const model = state->config->model;
  clb_expert_weights* const rows = clb_cuda_host(cuda, cuda->at.load);
  float* const inv_freq = clb_cuda_host(cuda, cuda->at.load + cuda->at.table_bytes);
  const uint64_t inv_freq_bytes = model->head_dim / 2u * sizeof(float);
  for (uint32_t layer = 0; layer < model->layers; ++layer) {
    clb_expert_weights* const first = &rows[table_row(model, layer)];
    const uint32_t experts = model->layer_table[layer].experts;
    for (uint32_t expert = 0; expert < experts; ++expert) {
      first[expert] = expert_of(table, layer, (int32_t)expert);
    }
    first[experts] = expert_of(table, layer, -1);
  }
  (void)memcpy(inv_freq, model->rope_inv_freq, (size_t)inv_freq_bytes);
  int32_t status = d->copy_in(d, stream, clb_cuda_at(cuda, cuda->at.expert_tables), rows, cuda->at.table_bytes);
  status =
      status != CLB_OK ? status : d->copy_in(d, stream, clb_cuda_at(cuda, cuda->at.inv_freq), inv_freq, inv_freq_bytes);
  return status != CLB_OK ? status : d->stream_wait(d, stream);
}

/* Bytes that two layers share are converted once. */
static int32_t make_all_fp16(const loader* state, clb_weight_table* table) {
  const clb_model_desc* const model = state->config->model;
  const clb_section_desc* const* const sorted = (const clb_section_desc* const*)state->placement.sorted;
  int32_t status = CLB_OK;
  for (uint32_t i = 0; status == CLB_OK && i < model->section_count; ++i) {
    const clb_section_desc* const section = sorted[i];
    const bool again = i > 0u && sorted[i - 1u]->file == section->file && sorted[i - 1u]->offset == section->offset;
    const uint32_t index = clb_weight_index(table, section->role, section->layer, section->expert);
    clb_tensor* const tensor = &table->tensors[index];
    status = again ? CLB_OK : clb_cuda_make_fp16(state->cuda, driver_of(state), tensor);
    tensor->precision = tensor->precision == CLB_BF16 ? state->cuda->precision : tensor->precision;
  }
  return status;
}

/* Files are read by threads while this one does something else, and then joins them. */
static int32_t load_pack(loader* state, clb_weight_table* table, clb_cuda_meanwhile meanwhile, clb_error* error) {
  clb_cuda_readers readers;
  int32_t status = place_pack(state, table, error);
  if (status != CLB_OK) {
    return status;
  }
  status = find_formats(state, table, error);
  if (status == CLB_OK) {
    clb_cuda_read_begin(&readers, state->engine, state->config, &state->placement);
    status = clb_cuda_read_end(&readers, meanwhile(state->engine, error), error);
    status = status != CLB_OK ? status : make_all_fp16(state, table);
  }
  clb_placement_free(&state->placement);
  return status;
}

int32_t clb_cuda_load(clb_engine* engine, const clb_engine_config* config, void* host, clb_cuda_meanwhile meanwhile,
                      clb_error* error) {
  loader state = {.engine = engine, .cuda = engine->cuda, .config = config};
  clb_driver* const d = driver_of(&state);
  clb_weight_table* const table = clb_table_init(config->model, host);
  int32_t status;
  engine->cuda->weights = table;
  place_tables(&state);
  if (config->weights == CLB_WEIGHTS_DUMMY) {
    status = load_dummy(&state, table);
    status = status != CLB_OK ? status : find_formats(&state, table, error);
    status = status != CLB_OK ? status : meanwhile(engine, error);
  } else {
    status = load_pack(&state, table, meanwhile, error);
  }
  const int32_t waited = d->stream_wait(d, engine->cuda->device.copy_stream);
  status = status != CLB_OK ? status : waited;
  status = status != CLB_OK ? status : copy_tables(&state, table);
  return status == CLB_ERR_DEVICE ? clb_cuda_fail(engine, error, "loading the weights or building graphs") : status;
}
