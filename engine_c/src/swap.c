/* swap.c: see swap.h. */
#include "swap.h"

#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "engine_internal.h"
#include "invariant.h"

#define PART_ALIGNMENT 256u
#define FILE_ALIGNMENT 4096u
#define LOOK_AGAIN_US 200u /* between two looks at what the loop has done */

static const uint32_t part_roles[CLB_EXPERT_PARTS] = {CLB_ROLE_GATE, CLB_ROLE_UP, CLB_ROLE_DOWN};

uint64_t clb_swap_expert_index(const clb_model_desc* model, uint32_t layer, uint32_t expert) {
  uint64_t index = expert;
  for (uint32_t l = 0; l < layer; ++l) {
    index += model->layer_table[l].experts;
  }
  return index;
}

uint64_t clb_swap_expert_count(const clb_model_desc* model) { return clb_swap_expert_index(model, model->layers, 0); }

void clb_swap_open(clb_swap* swap, uint64_t address, uint64_t block_bytes, uint32_t blocks, uint64_t weights_end) {
  CLB_ASSERT(blocks <= CLB_MAX_SWAP_SLOTS);
  swap->weights_end = weights_end;
  for (uint32_t i = 0; i < blocks; ++i) {
    swap->free[i] = (clb_swap_block){.address = address + i * block_bytes, .bytes = block_bytes};
  }
  swap->free_count = block_bytes == 0u ? 0u : blocks;
}

/* ------------------------------------------------------------ free blocks */

/* The smallest free block of at least so many bytes; none: bytes is 0. */
static clb_swap_block take_block(clb_swap* swap, uint64_t bytes) {
  uint32_t best = swap->free_count;
  for (uint32_t i = 0; i < swap->free_count; ++i) {
    const bool fits = swap->free[i].bytes >= bytes;
    if (fits && (best == swap->free_count || swap->free[i].bytes < swap->free[best].bytes)) {
      best = i;
    }
  }
  if (best == swap->free_count) {
    return (clb_swap_block){0, 0};
  }
  const clb_swap_block taken = swap->free[best];
  --swap->free_count;
  swap->free[best] = swap->free[swap->free_count];
  return taken;
}

static void free_block(clb_swap* swap, clb_swap_block block) {
  if (block.bytes != 0u) {
    CLB_ASSERT(swap->free_count < CLB_MAX_SWAP_SLOTS);
    swap->free[swap->free_count] = block;
    ++swap->free_count;
  }
}

static uint64_t tensor_address(const clb_tensor* tensor) { return (uint64_t)(uintptr_t)tensor->data; }

static uint64_t tensor_end(const clb_tensor* tensor) {
  const clb_section_desc section = {.precision = tensor->precision,
                                    .layout = tensor->layout,
                                    .rows = tensor->rows,
                                    .cols = tensor->cols,
                                    .group_rows = tensor->group_rows,
                                    .group_cols = tensor->group_cols,
                                    .zeros_offset = tensor->zeros != NULL ? 1u : 0u};
  return tensor_address(tensor) + clb_parts_of(&section).bytes;
}

/* Is there, beside the expert whose gate is tensor `gate`, no weight in [begin, end)? */
static bool lies_alone(const clb_weight_table* table, uint32_t gate, uint64_t begin, uint64_t end) {
  for (uint32_t i = 0; i < table->tensor_count; ++i) {
    const clb_tensor* const other = &table->tensors[i];
    const bool own = i >= gate && i < gate + CLB_EXPERT_PARTS;
    if (!own && other->data != NULL && tensor_address(other) < end && tensor_end(other) > begin) {
      return false;
    }
  }
  return true;
}

/* Where the expert lies that is to be replaced, with the gap behind it, if nothing else lies there. */
static clb_swap_block block_of(const clb_engine* engine, uint32_t layer, uint32_t expert) {
  static const uint64_t borders[] = {FILE_ALIGNMENT, PART_ALIGNMENT, 1u}; /* at which the next weight may begin */
  const clb_weight_table* const table = engine->weights;
  const clb_swap* const swap = &engine->swap;
  const uint32_t gate = clb_weight_index(table, CLB_ROLE_GATE, (int32_t)layer, (int32_t)expert);
  const uint64_t own = swap->own_bytes[clb_swap_expert_index(&engine->model, layer, expert)];
  uint64_t begin = tensor_address(&table->tensors[gate]);
  uint64_t end = tensor_end(&table->tensors[gate]);
  if (own != 0u) {
    return (clb_swap_block){begin, own};
  }
  for (uint32_t i = gate + 1u; i < gate + CLB_EXPERT_PARTS; ++i) {
    const clb_tensor* const part = &table->tensors[i];
    begin = tensor_address(part) < begin ? tensor_address(part) : begin;
    end = tensor_end(part) > end ? tensor_end(part) : end;
  }
  begin = clb_align_up(begin, PART_ALIGNMENT);
  for (uint32_t i = 0; i < sizeof borders / sizeof borders[0]; ++i) {
    const uint64_t border = clb_align_up(end, borders[i]);
    if (begin < end && border <= swap->weights_end && lies_alone(table, gate, begin, border)) {
      return (clb_swap_block){begin, border - begin};
    }
  }
  return (clb_swap_block){0, 0};
}

/* ---------------------------------------------------------------- staging */

typedef struct staging {
  clb_engine* engine;
  const clb_swap_desc* desc;
  uint64_t places[CLB_EXPERT_PARTS]; /* of the sections: bytes from the start of the block */
} staging;

/* Where the parts will lie in a block. Returns the bytes that they take. */
static uint64_t place_parts(staging* state) {
  const clb_engine* const engine = state->engine;
  uint64_t end = 0;
  for (uint32_t i = 0; i < CLB_EXPERT_PARTS; ++i) {
    const clb_section_desc* const section = &state->desc->sections[i];
    const clb_demand demand = clb_demand_of(&engine->model, section->role, section->layer, section->expert);
    const bool repacked = clb_is_repacked(section, &demand);
    const uint32_t layout = repacked ? CLB_LAYOUT_ROWS16 : section->layout;
    state->places[i] = clb_align_up(end, PART_ALIGNMENT);
    end = state->places[i] +
          (repacked ? clb_layout_bytes(layout, section->precision, demand.rows, demand.cols) : section->bytes);
  }
  return end;
}

static unsigned char* staging_memory(void* context, uint64_t offset, int32_t* status) {
  const staging* const state = context;
  (void)offset;
  *status = atomic_load_explicit(&state->engine->swap.ended, memory_order_acquire) != 0u ? CLB_ERR_STATE : CLB_OK;
  return state->engine->swap.piece;
}

/* A checked piece of the file: its part of each section goes to its place. */
static int32_t place_piece(void* context, uint64_t begin, const unsigned char* data, uint64_t bytes, clb_error* error) {
  const staging* const state = context;
  clb_engine* const engine = state->engine;
  int32_t status = CLB_OK;
  for (uint32_t i = 0; i < CLB_EXPERT_PARTS && status == CLB_OK; ++i) {
    const clb_section_desc* const section = &state->desc->sections[i];
    const uint64_t end = section->offset + section->bytes;
    const uint64_t from = section->offset > begin ? section->offset : begin;
    const uint64_t to = end < begin + bytes ? end : begin + bytes;
    if (from >= to) {
      continue;
    }
    const clb_swap_part part = {.section = section,
                                .offset = from - section->offset,
                                .data = data + (from - begin),
                                .bytes = to - from,
                                .address = engine->swap.staged.address + state->places[i]};
    status =
        clb_section_piece_check(section, state->desc->file, part.offset, part.offset + part.bytes, part.data, error);
    status = status != CLB_OK ? status : engine->backend->swap->put(engine, &part);
  }
  return status != CLB_OK ? status : engine->backend->swap->wait(engine);
}

static void set_parts(staging* state) {
  clb_engine* const engine = state->engine;
  for (uint32_t i = 0; i < CLB_EXPERT_PARTS; ++i) {
    const clb_section_desc* const section = &state->desc->sections[i];
    const clb_demand demand = clb_demand_of(&engine->model, section->role, section->layer, section->expert);
    const uint64_t address = engine->swap.staged.address + state->places[i];
    engine->swap.parts[i] = clb_tensor_of(section, &demand, (const void*)(uintptr_t)address);
  }
}

/* The file's bytes, checked, into a free block. After a failure the block is free again. */
static int32_t stage_file(clb_engine* engine, const clb_swap_desc* desc, clb_error* error) {
  clb_swap* const swap = &engine->swap;
  staging state = {.engine = engine, .desc = desc};
  const clb_file_sink sink = {&state, staging_memory, place_piece};
  int32_t status = clb_expert_check(&engine->model, desc, error);
  status = status != CLB_OK ? status : engine->backend->swap->check(engine, desc, error);
  if (status != CLB_OK) {
    return status;
  }
  const uint64_t bytes = place_parts(&state);
  swap->staged = take_block(swap, bytes);
  if (swap->staged.bytes == 0u) {
    return clb_fail(error, CLB_ERR_FULL,
                    "no swap slot of %" PRIu64 " bytes is free (%u smaller are free); raise experts.swap_slots", bytes,
                    swap->free_count);
  }
  status = engine->backend->swap->begin(engine);
  status = status != CLB_OK ? status : clb_file_read_fd(desc->fd, desc->file, &sink, error);
  set_parts(&state);
  status = status != CLB_OK ? status : engine->backend->swap->staged(engine);
  if (status == CLB_ERR_DEVICE) {
    return clb_fail(error, status, "file %s: copying to the device failed", desc->file->name);
  }
  return status;
}

/* The weights stay: only the kernel changes. */
static void keep_parts(clb_engine* engine) {
  clb_swap* const swap = &engine->swap;
  for (uint32_t i = 0; i < CLB_EXPERT_PARTS; ++i) {
    swap->parts[i] = *clb_weight(engine->weights, part_roles[i], (int32_t)swap->layer, (int32_t)swap->expert);
  }
  swap->old = (clb_swap_block){0, 0};
}

static int32_t check_desc(const clb_engine* engine, const clb_swap_desc* desc, clb_error* error) {
  if (desc->abi_version != CLB_ABI_VERSION || desc->struct_bytes != sizeof *desc) {
    return clb_fail(error, CLB_ERR_VERSION, "swap: version %u with %u bytes, expected %u with %zu", desc->abi_version,
                    desc->struct_bytes, CLB_ABI_VERSION, sizeof *desc);
  }
  if (desc->layer >= engine->model.layers) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "layer is %u, the model has layers 0 to %u", desc->layer,
                    engine->model.layers - 1u);
  }
  const uint32_t experts = engine->model.layer_table[desc->layer].experts;
  if (desc->expert >= experts) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "expert is %u, but layer %u has %u experts", desc->expert, desc->layer,
                    experts);
  }
  return CLB_OK;
}

static int32_t prepare(clb_engine* engine, const clb_swap_desc* desc, clb_error* error) {
  clb_swap* const swap = &engine->swap;
  int32_t status = check_desc(engine, desc, error);
  if (status != CLB_OK) {
    return status;
  }
  swap->layer = desc->layer;
  swap->expert = desc->expert;
  swap->staged = (clb_swap_block){0, 0};
  if (desc->fd < 0) {
    keep_parts(engine);
  } else {
    swap->old = block_of(engine, desc->layer, desc->expert);
    status = stage_file(engine, desc, error);
  }
  return status != CLB_OK ? status : engine->backend->swap->bind(engine, desc->module, error);
}

static void wake(const clb_engine* engine) {
  const uint64_t one = 1;
  if (engine->config.command_fd >= 0 && write(engine->config.command_fd, &one, sizeof one) < 0) {
    return; /* the counter is full, so the loop is being woken anyway */
  }
}

/* Nothing was switched, or will be: the block is free again. The state is STAGING. */
static void give_up(clb_swap* swap) {
  free_block(swap, swap->staged);
  swap->staged = (clb_swap_block){0, 0};
  atomic_store_explicit(&swap->state, CLB_SWAP_IDLE, memory_order_release);
}

int32_t clb_engine_swap_stage(clb_engine* engine, const clb_swap_desc* desc, clb_error* error) {
  clb_swap* const swap = &engine->swap;
  uint32_t state = CLB_SWAP_IDLE;
  if (!atomic_compare_exchange_strong(&swap->state, &state, CLB_SWAP_STAGING)) {
    return clb_fail(error, CLB_ERR_STATE, "another swap is under way; wait for its end");
  }
  const int32_t status = prepare(engine, desc, error);
  if (status != CLB_OK) {
    give_up(swap);
    return status;
  }
  atomic_store_explicit(&swap->state, CLB_SWAP_STAGED, memory_order_release);
  return CLB_OK;
}

int32_t clb_engine_swap_post(clb_engine* engine, uint64_t weights_generation) {
  if (atomic_load_explicit(&engine->swap.state, memory_order_acquire) != CLB_SWAP_STAGED) {
    return CLB_ERR_STATE;
  }
  engine->swap.report.weights_generation = weights_generation;
  atomic_store_explicit(&engine->swap.state, CLB_SWAP_POSTED, memory_order_release);
  wake(engine);
  return CLB_OK;
}

/* ------------------------------------------------------------- its end */

void clb_engine_swap_cancel(clb_engine* engine) {
  uint32_t state = CLB_SWAP_STAGED;
  const bool taken = atomic_compare_exchange_strong(&engine->swap.state, &state, CLB_SWAP_STAGING);
  if (taken) {
    give_up(&engine->swap);
  }
}

static void end_swap(clb_engine* engine, clb_swap_report* report) {
  clb_swap* const swap = &engine->swap;
  if (swap->staged.bytes != 0u) {
    free_block(swap, swap->old);
    swap->own_bytes[clb_swap_expert_index(&engine->model, swap->layer, swap->expert)] = swap->staged.bytes;
  }
  swap->report.free_blocks = swap->free_count;
  *report = swap->report;
  atomic_store_explicit(&swap->state, CLB_SWAP_IDLE, memory_order_release);
}

int32_t clb_engine_swap_wait(clb_engine* engine, uint32_t timeout_ms, clb_swap_report* report, clb_error* error) {
  clb_swap* const swap = &engine->swap;
  const uint64_t start = clb_clock_ns();
  uint32_t state = atomic_load_explicit(&swap->state, memory_order_acquire);
  if (state < CLB_SWAP_POSTED) {
    return clb_fail(error, CLB_ERR_STATE, "no swap is under way");
  }
  while (state != CLB_SWAP_DONE) {
    const bool ended = atomic_load_explicit(&swap->ended, memory_order_acquire) != 0u;
    const bool late = clb_clock_ns() - start >= (uint64_t)timeout_ms * 1000000u;
    if (state == CLB_SWAP_POSTED && (ended || late)) {
      const bool taken = atomic_compare_exchange_strong(&swap->state, &state, CLB_SWAP_STAGING);
      if (taken) {
        give_up(swap);
        return clb_fail(error, CLB_ERR_STATE, "the expert was not replaced: %s",
                        ended ? "the engine has ended" : "no step boundary came in time; try again");
      }
    } else if (ended) {
      return clb_fail(error, CLB_ERR_STATE, "the engine ended while the expert was replaced");
    } else {
      (void)usleep(LOOK_AGAIN_US);
      state = atomic_load_explicit(&swap->state, memory_order_acquire);
    }
  }
  end_swap(engine, report);
  return CLB_OK;
}

/* --------------------------------------------------------------- the loop */

bool clb_swap_waits(const clb_engine* engine) {
  return atomic_load_explicit(&engine->swap.state, memory_order_acquire) == CLB_SWAP_POSTED;
}

/* Positions of the slot that are computed, or on their way on a device, by the experts up to now. */
static uint32_t computed_positions(const clb_slot* slot) {
  const uint32_t outputs = slot->launched > slot->generated ? slot->launched : slot->generated;
  return outputs == 0u ? slot->computed : slot->request.prompt_tokens + outputs - 1u;
}

/* Everybody who has computed something is told where the switch was; nobody sees runs from before it. */
static void tell(clb_engine* engine) {
  clb_swap* const swap = &engine->swap;
  clb_event event = {.kind = CLB_EVENT_SWITCHED, .slot = CLB_NO_SLOT, .record = swap->report.weights_generation};
  swap->report.streams = 0;
  clb_push_event(engine, &event);
  for (uint32_t i = 0; i < engine->order_count; ++i) {
    const uint32_t index = engine->order[i];
    const clb_slot* const slot = &engine->slots[index];
    event.slot = index;
    event.generation = slot->request.generation;
    event.position = computed_positions(slot);
    if (slot->state == CLB_SLOT_WAITING || event.position == 0u) {
      clb_channel_result(&engine->channel, index)->weights_generation = swap->report.weights_generation;
    } else {
      clb_push_event(engine, &event);
      ++swap->report.streams;
    }
  }
  swap->events_until = engine->channel.event_head;
}

static void switch_expert(clb_engine* engine) {
  clb_swap* const swap = &engine->swap;
  const int32_t status = engine->backend->swap->put_in_place(engine);
  if (status != CLB_OK) {
    engine->fault = status;
    return;
  }
  engine->stats.weights_generation = swap->report.weights_generation;
  clb_cache_forget(&engine->cache);
  tell(engine);
  atomic_store_explicit(&swap->state, CLB_SWAP_SWITCHED, memory_order_release);
}

void clb_swap_before_steps(clb_engine* engine) {
  clb_swap* const swap = &engine->swap;
  uint32_t state = CLB_SWAP_POSTED;
  /* The event ring has room for one switch that the daemon has not seen yet. */
  if (clb_swap_waits(engine) && clb_channel_events_taken(&engine->channel, swap->events_until) &&
      atomic_compare_exchange_strong(&swap->state, &state, CLB_SWAP_SWITCHING)) {
    for (uint32_t i = 0; i < CLB_EXPERT_PARTS; ++i) {
      engine->weights
          ->tensors[clb_weight_index(engine->weights, part_roles[i], (int32_t)swap->layer, (int32_t)swap->expert)] =
          swap->parts[i];
    }
    switch_expert(engine);
  }
}

void clb_swap_after_steps(clb_engine* engine) {
  clb_swap* const swap = &engine->swap;
  if (atomic_load_explicit(&swap->state, memory_order_relaxed) == CLB_SWAP_SWITCHED &&
      engine->backend->swap->served(engine)) {
    atomic_store_explicit(&swap->state, CLB_SWAP_DONE, memory_order_release);
  }
}
