/*
 * seam_measure.c: what a step costs and when the host knows of it; called by bench/gpu_bench.py. Test-only.
 */
#include <string.h>
#include <time.h>

#include "seam_trial.h"

static double now_us(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

typedef enum seam_mode {
  SEAM_GRAPH_MAILBOX = 0, /* one graph launch, done when the mailbox shows it */
  SEAM_GRAPH_WAIT = 1,    /* ... when cuStreamSynchronize returns */
  SEAM_EAGER_MAILBOX = 2, /* four launches */
  SEAM_COPY_MAILBOX = 3   /* a copy of the stage before the graph */
} seam_mode;

/* Per step: microseconds of the launching call(s), and from their start until the result is known. Full rows. */
int32_t seam_measure(seam_trial* trial, uint32_t mode, uint32_t count, double* launch_us, double* done_us) {
  clb_driver* d = &trial->driver;
  seam_pinned* pinned = seam_pinned_of(trial);
  void* stream = trial->config.device->stream;
  int32_t status;
  pinned->stages[0].token_count = SEAM_ROWS;
  for (uint32_t i = 0u; i < SEAM_ROWS; i++)
    pinned->stages[0].row_slots[i] = i;
  status = d->copy_in(d, stream, trial->config.device->arena + trial->at.stage, &pinned->stages[0], sizeof(seam_stage));
  if (status == CLB_OK) status = d->stream_wait(d, stream);
  for (uint32_t i = 0u; i < count && status == CLB_OK; i++) {
    const uint64_t before = __atomic_load_n(&pinned->sequence, __ATOMIC_ACQUIRE);
    const double begin = now_us();
    if (mode == (uint32_t)SEAM_COPY_MAILBOX) {
      status =
          d->copy_in(d, stream, trial->config.device->arena + trial->at.stage, &pinned->stages[0], sizeof(seam_stage));
    }
    if (status == CLB_OK) {
      status = (mode == (uint32_t)SEAM_EAGER_MAILBOX) ? seam_launch_step(trial)
                                                      : d->graph_launch(d, trial->executable, stream);
    }
    launch_us[i] = now_us() - begin;
    if (status == CLB_OK && mode == (uint32_t)SEAM_GRAPH_WAIT) status = d->stream_wait(d, stream);
    while (status == CLB_OK && __atomic_load_n(&pinned->sequence, __ATOMIC_ACQUIRE) == before) {
      if (now_us() - begin > 2e6) status = d->stream_wait(d, stream); /* surfaces a device fault instead of hanging */
    }
    done_us[i] = now_us() - begin;
  }
  trial->launched = trial->seen = pinned->sequence;
  (void)memset(&trial->sent, 0, sizeof trial->sent);
  return status;
}

/* Back to back: microseconds a step of the host's calls and of the device. */
int32_t seam_period(seam_trial* trial, uint32_t eager, uint32_t count, double* cpu_us, double* device_us) {
  clb_driver* d = &trial->driver;
  void* stream = trial->config.device->stream;
  void* events[2] = {NULL, NULL};
  float ms = 0.0f;
  int32_t status = d->event_create(d, &events[0]);
  if (status == CLB_OK) status = d->event_create(d, &events[1]);
  if (status == CLB_OK) status = d->event_record(d, events[0], stream);
  const double begin = now_us();
  for (uint32_t i = 0u; i < count && status == CLB_OK; i++) {
    status = (eager != 0u) ? seam_launch_step(trial) : d->graph_launch(d, trial->executable, stream);
  }
  *cpu_us = (now_us() - begin) / (double)count;
  if (status == CLB_OK) status = d->event_record(d, events[1], stream);
  if (status == CLB_OK) status = d->stream_wait(d, stream);
  if (status == CLB_OK) status = d->event_ms(d, events[0], events[1], &ms);
  *device_us = (double)ms * 1e3 / (double)count;
  if (events[1] != NULL) d->event_destroy(d, events[1]);
  if (events[0] != NULL) d->event_destroy(d, events[0]);
  trial->launched = trial->seen = seam_pinned_of(trial)->sequence;
  return status;
}

/* One graph of `launches`, replayed: ms[i] of each replay after one that is not counted. */
int32_t seam_time(clb_driver* d, void* stream, const clb_launch* launches, uint32_t count, uint32_t repeats,
                  float* ms) {
  void* graph = NULL;
  void* executable = NULL;
  void* events[2] = {NULL, NULL};
  int32_t status = d->capture_begin(d, stream);
  if (status != CLB_OK) return status;
  for (uint32_t i = 0u; i < count && status == CLB_OK; i++)
    status = d->launch(d, stream, &launches[i]);
  const int32_t ended = d->capture_end(d, stream, &graph);
  if (status == CLB_OK) status = ended;
  if (status == CLB_OK) status = d->graph_instantiate(d, graph, stream, &executable);
  for (uint32_t i = 0u; i < 2u && status == CLB_OK; i++)
    status = d->event_create(d, &events[i]);
  if (status == CLB_OK) status = d->graph_launch(d, executable, stream);
  for (uint32_t i = 0u; i < repeats && status == CLB_OK; i++) {
    status = d->event_record(d, events[0], stream);
    if (status == CLB_OK) status = d->graph_launch(d, executable, stream);
    if (status == CLB_OK) status = d->event_record(d, events[1], stream);
    if (status == CLB_OK) status = d->stream_wait(d, stream);
    if (status == CLB_OK) status = d->event_ms(d, events[0], events[1], &ms[i]);
  }
  for (uint32_t i = 0u; i < 2u; i++) {
    if (events[i] != NULL) d->event_destroy(d, events[i]);
  }
  if (executable != NULL) d->executable_destroy(d, executable);
  if (graph != NULL) d->graph_destroy(d, graph);
  return status;
}
