/*
 * cuda_graph.c: kernels by name, and steps captured into graphs: one a bucket, built at open, never updated.
 */
#include <stdio.h>

#include "cuda_internal.h"
#include "invariant.h"

#define NAME_BYTES 48u

/* %s becomes the weights' precision, %k that of K and V. */
typedef struct kernel_name {
  const char* stem;
  uint32_t args_bytes;
  uint32_t by_kv;      /* 1: a part for the precision of K and V */
  uint32_t by_weights; /* 1: a part for that of the weights */
} kernel_name;

/* Three each. */
static int32_t find_quantised(struct clb_cuda* cuda, clb_error* error) {
  static const kernel_name names[] = {
      {"clb_linear_quant", sizeof(clb_matmul_args), 0, 0},
      {"clb_linear_quant_8", sizeof(clb_matmul_args), 0, 0},
      {"clb_linear_many", sizeof(clb_matmul_many_args), 0, 0},
      {"clb_expert_gate_up_many", sizeof(clb_expert_many_args), 0, 0},
      {"clb_expert_down_many", sizeof(clb_expert_many_args), 0, 0},
  };
  static const char* const kinds[] = {"int8", "int4", "fp8"};
  int32_t status = CLB_OK;
  for (uint32_t i = 0; i < CLB_CUDA_KERNELS - CLB_CUDA_LINEAR_QUANT && status == CLB_OK; ++i) {
    char name[NAME_BYTES];
    (void)snprintf(name, sizeof name, "%s_%s", names[i / 3u].stem, kinds[i % 3u]);
    status = clb_device_find(&cuda->device, name, names[i / 3u].args_bytes, &cuda->functions[CLB_CUDA_LINEAR_QUANT + i],
                             error);
  }
  return status;
}

int32_t clb_cuda_find_kernels(clb_engine* engine, uint32_t precision, clb_error* error) {
  static const kernel_name names[CLB_CUDA_LINEAR_QUANT] = {
      [CLB_CUDA_EMBED] = {"clb_embed", sizeof(clb_embed_args), 0, 1},
      [CLB_CUDA_LINEAR] = {"clb_linear", sizeof(clb_matmul_args), 0, 1},
      [CLB_CUDA_LINEAR_8] = {"clb_linear_8", sizeof(clb_matmul_args), 0, 1},
      [CLB_CUDA_LINEAR_WIDE] = {"clb_linear_wide", sizeof(clb_matmul_args), 0, 1},
      [CLB_CUDA_LINEAR_MANY] = {"clb_linear_many", sizeof(clb_matmul_many_args), 0, 1},
      [CLB_CUDA_ROUTER_LOGITS] = {"clb_router_logits", sizeof(clb_router_logits_args), 0, 0},
      [CLB_CUDA_ROUTER] = {"clb_router_fp32", sizeof(clb_router_args), 0, 0},
      [CLB_CUDA_ROUTE] = {"clb_route", sizeof(clb_route_args), 0, 0},
      [CLB_CUDA_BUCKET] = {"clb_bucket", sizeof(clb_bucket_args), 0, 0},
      [CLB_CUDA_CAPACITY] = {"clb_capacity", sizeof(clb_capacity_args), 0, 0},
      [CLB_CUDA_GATE_UP] = {"clb_expert_gate_up", sizeof(clb_expert_gate_up_args), 0, 1},
      [CLB_CUDA_DOWN] = {"clb_expert_down", sizeof(clb_expert_down_args), 0, 1},
      [CLB_CUDA_GATE_UP_8] = {"clb_expert_gate_up_8", sizeof(clb_expert_gate_up_args), 0, 1},
      [CLB_CUDA_DOWN_8] = {"clb_expert_down_8", sizeof(clb_expert_down_args), 0, 1},
      [CLB_CUDA_GATE_UP_MANY] = {"clb_expert_gate_up_many", sizeof(clb_expert_many_args), 0, 1},
      [CLB_CUDA_DOWN_MANY] = {"clb_expert_down_many", sizeof(clb_expert_many_args), 0, 1},
      [CLB_CUDA_COMBINE] = {"clb_combine", sizeof(clb_combine_args), 0, 1},
      [CLB_CUDA_ATTEND] = {"clb_attend", sizeof(clb_attend_args), 1, 1},
      [CLB_CUDA_APPEND] = {"clb_append", sizeof(clb_prefill_attention_args), 1, 0},
      [CLB_CUDA_ATTEND_MANY] = {"clb_attend_many", sizeof(clb_prefill_attention_args), 1, 0},
      [CLB_CUDA_SAMPLE] = {"clb_sample", sizeof(clb_sample_args), 0, 0},
      [CLB_CUDA_PUBLISH] = {"clb_publish", sizeof(clb_publish_args), 0, 0},
      [CLB_CUDA_PROMPT_LOGPROBS] = {"clb_prompt_logprobs", sizeof(clb_prompt_logprobs_args), 0, 0},
      [CLB_CUDA_POOL] = {"clb_pool", sizeof(clb_pool_args), 0, 0},
      [CLB_CUDA_DUMMY] = {"clb_dummy", sizeof(clb_dummy_args), 0, 0},
      [CLB_CUDA_TO_FP16] = {"clb_to_fp16", sizeof(clb_to_fp16_args), 0, 0},
      [CLB_CUDA_GATE_UP_MIXED] = {"clb_expert_gate_up_mixed", sizeof(clb_expert_gate_up_args), 0, 0},
      [CLB_CUDA_DOWN_MIXED] = {"clb_expert_down_mixed", sizeof(clb_expert_down_args), 0, 0},
      [CLB_CUDA_GATE_UP_MIXED_8] = {"clb_expert_gate_up_mixed_8", sizeof(clb_expert_gate_up_args), 0, 0},
      [CLB_CUDA_DOWN_MIXED_8] = {"clb_expert_down_mixed_8", sizeof(clb_expert_down_args), 0, 0},
  };
  static const char* const precisions[] = {"_fp32", "_fp16", "_bf16"};
  struct clb_cuda* const cuda = engine->cuda;
  int32_t status = CLB_OK;
  for (uint32_t i = 0; i < CLB_CUDA_LINEAR_QUANT && status == CLB_OK; ++i) {
    char name[NAME_BYTES];
    (void)snprintf(name, sizeof name, "%s%s%s", names[i].stem,
                   names[i].by_kv != 0u ? precisions[engine->config.kv_precision] : "",
                   names[i].by_weights != 0u ? precisions[precision] : "");
    status = clb_device_find(&cuda->device, name, names[i].args_bytes, &cuda->functions[i], error);
  }
  return status != CLB_OK ? status : find_quantised(cuda, error);
}

typedef int32_t (*step_fn)(clb_engine* engine, uint32_t rows);

static int32_t build_graph(clb_engine* engine, step_fn launch, uint32_t rows, void** executable) {
  clb_driver* const d = &engine->cuda->driver;
  void* const stream = engine->cuda->device.stream;
  void* graph = NULL;
  int32_t status = d->capture_begin(d, stream);
  if (status != CLB_OK) {
    return status;
  }
  status = launch(engine, rows);
  const int32_t ended = d->capture_end(d, stream, &graph);
  status = status != CLB_OK ? status : ended;
  status = status != CLB_OK ? status : d->graph_instantiate(d, graph, stream, executable);
  if (graph != NULL) {
    d->graph_destroy(d, graph);
  }
  return status;
}

int32_t clb_cuda_build_graphs(clb_engine* engine, clb_error* error) {
  struct clb_cuda* const cuda = engine->cuda;
  const uint32_t slots = engine->config.channel.slots;
  int32_t status = CLB_OK;
  for (uint32_t i = 0; status == CLB_OK && i <= clb_cuda_decode_bucket(slots); ++i) {
    status = build_graph(engine, clb_cuda_launch_decode, clb_cuda_decode_rows(i), &cuda->decode[i]);
  }
  const uint32_t most = cuda->at.max_rows;
  for (uint32_t i = 0; status == CLB_OK && clb_cuda_prefill_rows(i, most) != 0u; ++i) {
    status = build_graph(engine, clb_cuda_launch_prefill, clb_cuda_prefill_rows(i, most), &cuda->prefill[i]);
  }
  return status == CLB_ERR_DEVICE ? clb_cuda_fail(engine, error, "building the graphs of steps") : status;
}

static void destroy(struct clb_cuda* cuda, void** executables, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    if (executables[i] != NULL) {
      cuda->driver.executable_destroy(&cuda->driver, executables[i]);
      executables[i] = NULL;
    }
  }
}

void clb_cuda_destroy_graphs(struct clb_cuda* cuda) {
  destroy(cuda, cuda->decode, CLB_CUDA_DECODE_BUCKETS);
  destroy(cuda, cuda->prefill, CLB_CUDA_PREFILL_BUCKETS);
}
