/*
 * cuda_read.c: files of a pack from the page cache into the arena, by several threads.
 *
 *   reader:  next file ▸ piece into one of its two page-locked buffers ▸ crc32c, finite? ▸ copy queued ▸ next piece ...
 *
 * Reading, checking and copying a piece take about the same time, and the copy runs beside the other two; one thread
 * reaches some 3 GB/s, so that several are what a device's link wants. All copies go through one stream of their own:
 * the main one may be captured into graphs meanwhile. The bytes of a file are what the kernels read; nothing is
 * repacked.
 *
 * Every reader has a driver table of its own; nothing but three counters is shared. The first failure stops all.
 */
#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "cuda_internal.h"
#include "invariant.h"

static void* copy_stream_of(const clb_cuda_reader* state) { return state->all->engine->cuda->device.copy_stream; }

static uint64_t buffer_index(const clb_cuda_reader* state) { return state->pieces % CLB_CUDA_LOAD_BUFFERS; }

static unsigned char* free_buffer(void* context, uint64_t offset, int32_t* status) {
  clb_cuda_reader* const state = context;
  const struct clb_cuda* const cuda = state->all->engine->cuda;
  const uint64_t buffer = state->number * CLB_CUDA_LOAD_BUFFERS + buffer_index(state);
  (void)offset;
  *status = CLB_ERR_STATE;
  while (*status == CLB_ERR_STATE) { /* of a copy that is on its way */
    *status = state->driver.event_done(&state->driver, state->copied[buffer_index(state)]);
  }
  return clb_cuda_host(cuda, cuda->at.load + buffer * CLB_LOADER_PIECE_BYTES);
}

/* The part of each section that lies in the piece has finite values only. */
static int32_t check_piece_values(const clb_cuda_reader* state, uint64_t begin, const unsigned char* data,
                                  uint64_t bytes, clb_error* error) {
  const clb_model_desc* const model = state->all->config->model;
  const clb_section_desc* const* const sorted = (const clb_section_desc* const*)state->all->placement->sorted;
  for (uint32_t i = state->first; i < model->section_count && sorted[i]->file == state->file; ++i) {
    const clb_section_desc* const section = sorted[i];
    const uint64_t end = section->offset + section->bytes;
    const uint64_t from = section->offset > begin ? section->offset : begin;
    const uint64_t to = end < begin + bytes ? end : begin + bytes;
    if (from >= to) {
      continue;
    }
    const int32_t status = clb_section_piece_check(section, &model->file_table[state->file], from - section->offset,
                                                   to - section->offset, data + (from - begin), error);
    if (status != CLB_OK) {
      return status;
    }
  }
  return CLB_OK;
}

static int32_t copy_piece(void* context, uint64_t offset, const unsigned char* data, uint64_t bytes, clb_error* error) {
  clb_cuda_reader* const state = context;
  clb_cuda_readers* const all = state->all;
  const struct clb_cuda* const cuda = all->engine->cuda;
  clb_driver* const d = &state->driver;
  const uint64_t place = cuda->at.weights + all->placement->files[state->file] + offset;
  int32_t status = check_piece_values(state, offset, data, bytes, error);
  status = status != CLB_OK ? status : d->copy_in(d, copy_stream_of(state), clb_cuda_at(cuda, place), data, bytes);
  status = status != CLB_OK ? status : d->event_record(d, state->copied[buffer_index(state)], copy_stream_of(state));
  ++state->pieces;
  clb_channel_set_loaded(&all->engine->channel, atomic_fetch_add(&all->loaded, bytes) + bytes);
  return status;
}

static int32_t copy_files(clb_cuda_reader* state) {
  clb_cuda_readers* const all = state->all;
  const clb_model_desc* const model = all->config->model;
  const clb_file_sink sink = {state, free_buffer, copy_piece};
  int32_t status = CLB_OK;
  while (status == CLB_OK && atomic_load(&all->failed) == 0u) {
    state->file = atomic_fetch_add(&all->next_file, 1u); /* a reader's files come in rising order */
    if (state->file >= model->file_count) {
      break;
    }
    while (state->first < model->section_count && all->placement->sorted[state->first]->file < state->file) {
      ++state->first;
    }
    status = clb_file_read(all->config->dir_fd, &model->file_table[state->file], &sink, &state->error);
  }
  return status;
}

static void read_share(clb_cuda_reader* state) {
  clb_driver* const d = &state->driver;
  int32_t status = CLB_OK;
  for (uint32_t i = 0; status == CLB_OK && i < CLB_CUDA_LOAD_BUFFERS; ++i) {
    status = d->event_create(d, &state->copied[i]);
    status = status != CLB_OK ? status : d->event_record(d, state->copied[i], copy_stream_of(state));
  }
  status = status != CLB_OK ? status : copy_files(state);
  const int32_t waited =
      d->stream_wait(d, copy_stream_of(state)); /* also after a failure: the buffers are the worker's */
  for (uint32_t i = 0; i < CLB_CUDA_LOAD_BUFFERS; ++i) {
    if (state->copied[i] != NULL) {
      d->event_destroy(d, state->copied[i]);
    }
  }
  state->status = status != CLB_OK ? status : waited;
  if (state->status != CLB_OK) {
    atomic_store(&state->all->failed, 1u);
  }
}

static void* reader_main(void* context) {
  clb_cuda_reader* const state = context;
  state->status = state->driver.bind(&state->driver);
  if (state->status == CLB_OK) {
    read_share(state);
  } else {
    atomic_store(&state->all->failed, 1u);
  }
  return NULL;
}

void clb_cuda_read_begin(clb_cuda_readers* all, clb_engine* engine, const clb_engine_config* config,
                         const clb_placement* placement) {
  sigset_t blocked;
  sigset_t before;
  (void)memset(all, 0, sizeof *all);
  all->engine = engine;
  all->config = config;
  all->placement = placement;
  (void)sigfillset(&blocked);
  (void)pthread_sigmask(SIG_SETMASK, &blocked, &before); /* readers inherit it */
  for (uint32_t i = 0; i < clb_cuda_reader_count(config); ++i) {
    clb_cuda_reader* const state = &all->each[i];
    state->all = all;
    state->number = i;
    state->driver = engine->cuda->driver;
    /* The first one is this thread. A thread that the system does not give is not missed: the others take its files. */
    if (i > 0u && pthread_create(&state->thread, NULL, reader_main, state) == 0) {
      state->started = 1;
    }
  }
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
}

int32_t clb_cuda_read_end(clb_cuda_readers* all, int32_t before, clb_error* error) {
  clb_driver* const d = &all->engine->cuda->driver;
  int32_t status = before;
  if (before != CLB_OK) {
    atomic_store(&all->failed, 1u);
  } else {
    read_share(&all->each[0]);
  }
  for (uint32_t i = 0; i < CLB_CUDA_READERS; ++i) {
    clb_cuda_reader* const state = &all->each[i];
    if (state->started != 0u) {
      const int joined = pthread_join(state->thread, NULL);
      CLB_ASSERT(joined == 0);
    }
    if (status == CLB_OK && state->status != CLB_OK) {
      status = state->status;
      d->last_code = state->driver.last_code;
      d->last_name = state->driver.last_name;
      if (error != NULL) {
        *error = state->error;
      }
    }
  }
  all->engine->stats.loaded_bytes = atomic_load(&all->loaded);
  return status;
}
