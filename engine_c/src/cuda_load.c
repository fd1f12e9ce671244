/*
 * cuda_load.c: weights into the arena: where each will lie, and who brings it. Files are read by cuda_read.c.
 *
 * Dummy weights are written by a kernel, so that models of any size are there in seconds. They have the values of
 * dummy.c, wherever the description says that a section lies.
 */
#include <string.h>

#include "cuda_internal.h"
#include "invariant.h"

#define DUMMY_BLOCKS_MAX 65535u
#define BLOCK_ALIGNMENT 256u

typedef struct loader {
  clb_engine* engine;
  struct clb_cuda* cuda;
  const clb_engine_config* config;
  clb_placement placement;
} loader;

static clb_driver* driver_of(const loader* state) { return &state->cuda->driver; }

/* -------------------------------------------------------------- the table */

static void set_tensor(const loader* state, clb_weight_table* table, clb_place place, uint32_t precision,
                       uint64_t offset) {
  const clb_demand demand = clb_demand_of(state->config->model, place.role, place.layer, place.expert);
  clb_tensor* const tensor = &table->tensors[clb_weight_index(table, place.role, place.layer, place.expert)];
  /* Never dereferenced here: the table of a device holds its addresses. */
  tensor->data = (const void*)(uintptr_t)clb_cuda_at(state->cuda, state->cuda->at.weights + offset);
  tensor->precision = precision;
  tensor->layout = demand.narrow != 0u ? CLB_LAYOUT_MMA : CLB_LAYOUT_FLAT;
  tensor->rows = demand.rows;
  tensor->cols = demand.cols;
}

static int32_t fill_dummy(const loader* state, clb_place place, const clb_tensor* tensor) {
  clb_driver* const d = driver_of(state);
  const clb_dummy_args args = {.output = (uint64_t)(uintptr_t)tensor->data,
                               .key = clb_dummy_key(state->config->dummy_seed, place),
                               .rows = tensor->rows,
                               .cols = tensor->cols,
                               .half_width = clb_dummy_half_width(place.role, tensor->cols),
                               .precision = tensor->precision,
                               .tiled = tensor->layout == CLB_LAYOUT_MMA ? 1u : 0u,
                               .by_column = place.role == CLB_ROLE_DOWN ? 1u : 0u};
  const uint64_t values = (uint64_t)tensor->rows * tensor->cols;
  const uint64_t blocks = (values + CLB_DUMMY_VALUES - 1u) / CLB_DUMMY_VALUES;
  const clb_launch launch = {.function = state->cuda->functions[CLB_CUDA_DUMMY],
                             .args = &args,
                             .grid = {blocks < DUMMY_BLOCKS_MAX ? (uint32_t)blocks : DUMMY_BLOCKS_MAX, 1u, 1u},
                             .block = {CLB_MATMUL_THREADS, 1u, 1u},
                             .shared_bytes = 0u,
                             .edge = CLB_EDGE_FULL};
  return d->launch(d, state->cuda->device.copy_stream, &launch);
}

/* ------------------------------------------------------------ laying out */

static bool has_section(const clb_model_desc* model, clb_place place) {
  for (uint32_t i = 0; i < model->section_count; ++i) {
    const clb_section_desc* const section = &model->section_table[i];
    if (section->role == place.role && section->layer == place.layer && section->expert == place.expert) {
      return true;
    }
  }
  return false;
}

/* Calls of this function, in the order of clb_place_next, lay dummy weights one after the other; optional ones are
   there iff the description has them. Returns false for a place that stays empty. */
static bool lay_out_tiles(const clb_model_desc* model, clb_place place, uint64_t* end, uint64_t* offset) {
  const clb_demand demand = clb_demand_of(model, place.role, place.layer, place.expert);
  if (demand.rows == 0u || (demand.optional != 0u && !has_section(model, place))) {
    return false;
  }
  const bool narrow = demand.narrow != 0u;
  *offset = *end;
  *end = clb_align_up(*end + clb_layout_bytes(narrow ? CLB_LAYOUT_MMA : CLB_LAYOUT_FLAT,
                                              narrow ? clb_cuda_precision(model) : CLB_FP32, demand.rows, demand.cols),
                      BLOCK_ALIGNMENT);
  return true;
}

int32_t clb_cuda_weights_bytes(const clb_engine_config* config, uint64_t* bytes, clb_error* error) {
  uint64_t end = 0;
  uint64_t offset;
  clb_place place = {0, -1, -1};
  if (config->weights == CLB_WEIGHTS_FILES) {
    clb_placement placement;
    const int32_t status = clb_placement_make(config->model, CLB_LAYOUT_MMA, &placement, error);
    if (status == CLB_OK) {
      *bytes = placement.bytes;
      clb_placement_free(&placement);
    }
    return status;
  }
  do {
    (void)lay_out_tiles(config->model, place, &end, &offset);
  } while (clb_place_next(config->model, &place));
  *bytes = end;
  return CLB_OK;
}

uint32_t clb_cuda_precision(const clb_model_desc* model) {
  for (uint32_t i = 0; i < model->section_count; ++i) {
    if (model->section_table[i].role == CLB_ROLE_EMBEDDING) {
      return model->section_table[i].precision;
    }
  }
  return CLB_BF16;
}

/* --------------------------------------------------------------- loading */

static int32_t load_dummy(const loader* state, clb_weight_table* table) {
  const clb_model_desc* const model = state->config->model;
  uint64_t end = 0;
  uint64_t offset;
  clb_place place = {0, -1, -1};
  int32_t status = CLB_OK;
  do {
    if (lay_out_tiles(model, place, &end, &offset)) {
      const clb_demand demand = clb_demand_of(model, place.role, place.layer, place.expert);
      set_tensor(state, table, place, demand.narrow != 0u ? clb_cuda_precision(model) : CLB_FP32, offset);
      status = fill_dummy(state, place, clb_weight(table, place.role, place.layer, place.expert));
    }
  } while (status == CLB_OK && clb_place_next(model, &place));
  return status;
}

/* Where every section will lie; nothing is read. */
static int32_t place_pack(loader* state, clb_weight_table* table, clb_error* error) {
  const clb_model_desc* const model = state->config->model;
  const int32_t status = clb_placement_make(model, CLB_LAYOUT_MMA, &state->placement, error);
  for (uint32_t i = 0; status == CLB_OK && i < model->section_count; ++i) {
    const clb_section_desc* const section = &model->section_table[i];
    const clb_place place = {section->role, section->layer, section->expert};
    set_tensor(state, table, place, section->precision, state->placement.sections[i]);
  }
  return status;
}

clb_expert_weights clb_cuda_expert(const clb_tensor parts[3]) {
  return (clb_expert_weights){.gate = (uint64_t)(uintptr_t)parts[0].data,
                              .up = (uint64_t)(uintptr_t)parts[1].data,
                              .down = (uint64_t)(uintptr_t)parts[2].data};
}

/* gate, up and down lie side by side in the table. */
static clb_expert_weights expert_of(const clb_weight_table* table, uint32_t layer, int32_t expert) {
  return clb_cuda_expert(clb_weight(table, CLB_ROLE_GATE, (int32_t)layer, expert));
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

/* Files are read by threads while this one does something else, and then joins them. */
static int32_t load_pack(loader* state, clb_weight_table* table, clb_cuda_meanwhile meanwhile, clb_error* error) {
  clb_cuda_readers readers;
  int32_t status = place_pack(state, table, error);
  if (status != CLB_OK) {
    return status;
  }
  clb_cuda_read_begin(&readers, state->engine, state->config, &state->placement);
  status = clb_cuda_read_end(&readers, meanwhile(state->engine, error), error);
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
    status = status != CLB_OK ? status : meanwhile(engine, error);
  } else {
    status = load_pack(&state, table, meanwhile, error);
  }
  const int32_t waited = d->stream_wait(d, engine->cuda->device.copy_stream);
  status = status != CLB_OK ? status : waited;
  status = status != CLB_OK ? status : copy_tables(&state, table);
  return status == CLB_ERR_DEVICE ? clb_cuda_fail(engine, error, "loading the weights or building graphs") : status;
}
