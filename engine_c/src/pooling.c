/*
 * pooling.c: the prompt's hidden state after the final norm as one vector, for embeddings.
 *
 * Owns nothing; writes the slot's result_pooled. There the sum of a mean grows chunk by chunk, each column by itself in
 * rising position, so that neither chunk borders nor company nor threads change a bit. The mean's division is left out:
 * the vector gets length 1 at the end. On CUDA kernels_cu/pool.cu does the first half.
 */
#include <math.h>
#include <string.h>

#include "engine_internal.h"
#include "invariant.h"

enum { COLUMNS = 256, ROWS = 8 /* of an item */ };

/* Rows of one slot in the step at work. */
typedef struct pooled_rows {
  clb_engine* engine;
  float* sum; /* (hidden) */
  uint32_t first;
  uint32_t count;
} pooled_rows;

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

static void norm_rows(void* context, uint32_t first, uint32_t end, uint32_t thread) {
  const pooled_rows* const work = context;
  clb_engine* const engine = work->engine;
  const size_t hidden = engine->model.hidden;
  (void)thread;
  for (uint32_t item = first; item < end; ++item) {
    const uint32_t begin = item * (uint32_t)ROWS;
    const size_t at = (work->first + begin) * hidden;
    engine->ops->rms_norm(engine->buffers.residual + at, engine->kernels.final_norm, engine->model.rms_norm_eps,
                          least((uint32_t)ROWS, work->count - begin), engine->model.hidden,
                          engine->buffers.normed + at);
  }
}

static void add_columns(void* context, uint32_t first, uint32_t end, uint32_t thread) {
  const pooled_rows* const work = context;
  clb_engine* const engine = work->engine;
  const size_t hidden = engine->model.hidden;
  (void)thread;
  for (uint32_t item = first; item < end; ++item) {
    const uint32_t begin = item * (uint32_t)COLUMNS;
    const uint32_t columns = least((uint32_t)COLUMNS, engine->model.hidden - begin);
    for (uint32_t i = 0; i < work->count; ++i) {
      engine->ops->add(engine->buffers.normed + (work->first + i) * hidden + begin, columns, work->sum + begin);
    }
  }
}

void clb_pool_rows(clb_engine* engine, uint32_t slot, uint32_t first, uint32_t end) {
  const clb_slot* const s = &engine->slots[slot];
  const uint32_t hidden = engine->model.hidden;
  pooled_rows work = {engine, clb_channel_pooled(&engine->channel, slot), first, end - first};
  if ((s->request.flags & CLB_REQ_POOL_LAST) != 0u) {
    if (engine->buffers.rows[end - 1u].position + 1u < s->request.prompt_tokens) {
      return;
    }
    work.first = end - 1u;
    work.count = 1u;
  }
  if ((s->request.flags & CLB_REQ_POOL_LAST) != 0u || engine->buffers.rows[first].position == 0u) {
    (void)memset(work.sum, 0, hidden * sizeof work.sum[0]);
  }
  clb_threads_run(&engine->threads, (work.count + (uint32_t)ROWS - 1u) / (uint32_t)ROWS, norm_rows, &work);
  clb_threads_run(&engine->threads, (hidden + (uint32_t)COLUMNS - 1u) / (uint32_t)COLUMNS, add_columns, &work);
}

int32_t clb_pool_finish(clb_engine* engine, uint32_t slot) {
  float* const vector = clb_channel_pooled(&engine->channel, slot);
  const uint32_t hidden = engine->model.hidden;
  double squares = 0.0;
  for (uint32_t i = 0; i < hidden; ++i) {
    squares += (double)vector[i] * (double)vector[i];
  }
  if (!isfinite(squares)) {
    return CLB_ERR_NOT_FINITE;
  }
  const double scale = squares > 0.0 ? 1.0 / sqrt(squares) : 0.0;
  for (uint32_t i = 0; i < hidden; ++i) {
    vector[i] = (float)((double)vector[i] * scale);
  }
  return CLB_OK;
}
