/*
 * step_internal.h: what the parts of a step (step.c, step_attention.c, step_ffn.c) use of each other.
 */
#ifndef CLB_STEP_INTERNAL_H
#define CLB_STEP_INTERNAL_H

#include "engine_internal.h"
#include "stage.h"

/* Rows [first, end) of the step; writes nothing that another row's call reads or writes. */
typedef void (*clb_rows_fn)(clb_engine* engine, uint32_t layer, uint32_t first, uint32_t end);

/* ---------------------------------------------------------------- step.c */

/* run over [0, count), in blocks that are worth an item each; `operations` of one of them, about. */
void clb_step_rows(clb_engine* engine, uint32_t layer, uint32_t count, uint64_t operations, clb_rows_fn run);
/* An empty stage with room for a product of every expert and the shared one. One at a time. */
clb_stage clb_step_stage(clb_engine* engine);
/* Codes of `count` rows of `cols` numbers, one behind the other, for a stage whose kernels read them. */
void clb_step_encode(clb_engine* engine, const float* input, uint32_t count, uint32_t cols, unsigned char* codes);
/* A stage of one product over `tokens` dense rows. */
void clb_step_linear(clb_engine* engine, const clb_matrix* matrix, const float* bias, const float* input,
                     uint32_t tokens, float* output);
/* normed[row] = RMSNorm of residual[row] */
void clb_step_norm(clb_engine* engine, const float* weight, uint32_t row);

/* ------------------------------------------------------ step_attention.c */

/* From normed to what the FFN takes: residual, normed again, and the rows' expert policies. */
void clb_step_attention(clb_engine* engine, uint32_t layer, uint32_t count);

/* ------------------------------------------------------------ step_ffn.c */

/* From normed to the experts' outputs; clb_step_combine sums them up. */
void clb_step_moe(clb_engine* engine, uint32_t layer, uint32_t count);
/* update[row] = the kept experts' outputs times their weights, in rank order, then the shared expert's. */
void clb_step_combine(clb_engine* engine, uint32_t layer, uint32_t row);
/* The FFN of a dense layer, one expert over all rows: from normed to update. */
void clb_step_dense(clb_engine* engine, uint32_t layer, uint32_t count);

#endif /* CLB_STEP_INTERNAL_H */
