/*
 * cuda_swap.c: experts that replace others in the arena.
 *
 *   helper     piece of the file ▸ page-locked ▸ copy stream ▸ block of the arena           (its own driver table)
 *   loop       ... step n launched | row of the expert table copied in the main stream | step n + 1 launched ...
 *
 * The stream orders the copy of the row between two steps, so a step sees one expert or the other, never parts of both.
 * The row's source is not written again before the copy is done: it is done when the next step is.
 */
#include "cuda_internal.h"
#include "invariant.h"

/* Are there kernels, in the graphs that were built at open, for a matrix of an expert? */
static bool is_computed(const struct clb_cuda* cuda, const clb_section_desc* section) {
  const uint32_t format = clb_cuda_section_format(section);
  const uint32_t kind = CLB_FORMAT_KIND(format);
  const bool is_wide = section->precision == CLB_FP32; /* and fp16 where all else is bf16 */
  if (is_wide || (kind == CLB_KIND_HALF && section->precision != cuda->precision && cuda->precision != CLB_FP16)) {
    return false;
  }
  return (cuda->kinds & clb_cuda_kind(kind)) != 0u && CLB_FORMAT_META(format) <= cuda->meta;
}

static int32_t check_format(const clb_engine* engine, const clb_swap_desc* desc, clb_error* error) {
  for (uint32_t i = 0; i < CLB_EXPERT_PARTS; ++i) {
    if (desc->sections[i].layout != CLB_LAYOUT_MMA) {
      return clb_fail(error, CLB_ERR_UNSUPPORTED,
                      "file %s: is not laid out for CUDA; take it from a pack of `colibrid convert --backend cuda`",
                      desc->file->name);
    }
    if (!is_computed(engine->cuda, &desc->sections[i])) {
      return clb_fail(
          error, CLB_ERR_UNSUPPORTED,
          "file %s: precision %u in groups of %u columns is in no expert that the engine was opened with, so "
          "its steps have no kernels for it; convert it to a format in use, or name its own in experts.swap_formats",
          desc->file->name, desc->sections[i].precision, desc->sections[i].group_cols);
    }
  }
  if (clb_cuda_section_format(&desc->sections[0]) != clb_cuda_section_format(&desc->sections[1])) {
    return clb_fail(error, CLB_ERR_UNSUPPORTED, "file %s: gate and up must have one format; convert it again",
                    desc->file->name);
  }
  return CLB_OK;
}

static int32_t begin_copies(clb_engine* engine) {
  struct clb_cuda* const cuda = engine->cuda;
  cuda->helper = cuda->driver;
  return cuda->helper.bind(&cuda->helper);
}

static int32_t put_part(clb_engine* engine, const clb_swap_part* part) {
  clb_driver* const d = &engine->cuda->helper;
  return d->copy_in(d, engine->cuda->device.copy_stream, part->address + part->offset, part->data, part->bytes);
}

static int32_t wait_copies(clb_engine* engine) {
  clb_driver* const d = &engine->cuda->helper;
  return d->stream_wait(d, engine->cuda->device.copy_stream);
}

/* As all 16-bit matrices of this engine. */
static int32_t make_alike(clb_engine* engine) {
  clb_driver* const d = &engine->cuda->helper;
  int32_t status = CLB_OK;
  for (uint32_t i = 0; status == CLB_OK && i < CLB_EXPERT_PARTS; ++i) {
    clb_tensor* const part = &engine->swap.parts[i];
    status = clb_cuda_make_fp16(engine->cuda, d, part);
    part->precision = part->precision == CLB_BF16 ? engine->cuda->precision : part->precision;
  }
  const int32_t waited = d->stream_wait(d, engine->cuda->device.copy_stream);
  return status != CLB_OK ? status : waited;
}

static int32_t bind_row(clb_engine* engine, uint32_t module, clb_error* error) {
  struct clb_cuda* const cuda = engine->cuda;
  if (module != 0u) {
    return clb_fail(error, CLB_ERR_UNSUPPORTED,
                    "on a GPU all experts are computed by the engine's own kernels; leave the kernel module out");
  }
  *cuda->swap_row = clb_cuda_expert(engine->swap.parts);
  return CLB_OK;
}

static int32_t put_in_place(clb_engine* engine) {
  struct clb_cuda* const cuda = engine->cuda;
  clb_swap* const swap = &engine->swap;
  swap->switched_at = cuda->launched;
  return cuda->driver.copy_in(&cuda->driver, cuda->device.stream,
                              cuda->layer_tables[swap->layer] + swap->expert * sizeof(clb_expert_weights),
                              cuda->swap_row, sizeof *cuda->swap_row);
}

static bool row_served(const clb_engine* engine) {
  struct clb_cuda* const cuda = engine->cuda;
  if (cuda->seen > engine->swap.switched_at) {
    return true;
  }
  return cuda->seen == cuda->launched && cuda->driver.stream_done(&cuda->driver, cuda->device.stream) == CLB_OK;
}

const clb_swap_backend clb_swap_cuda = {
    .check = check_format,
    .begin = begin_copies,
    .put = put_part,
    .wait = wait_copies,
    .staged = make_alike,
    .bind = bind_row,
    .put_in_place = put_in_place,
    .served = row_served,
};
