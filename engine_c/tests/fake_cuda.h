/*
 * fake_cuda.h: libcuda as far as driver_cuda.c calls it, on the host. Streams run at once, in order; a captured
 * launch becomes a node with a copy of its arguments; "device memory" is host memory.
 *
 * A kernel handle is a fake_kernel: a C function over the argument struct. `fail_at` = n makes the n-th counted call
 * fail (destroys are not counted: they cannot be handled); `live` counts handles that were created and not destroyed.
 * With `lazy` set, graph launches wait until fake_run_pending or the next other work of the stream, as on a device.
 * Calls of several threads are counted right, but only what they do to memory of their own is safe. One state per
 * program. Include it in exactly one file of a program.
 */
#ifndef CLB_FAKE_CUDA_H
#define CLB_FAKE_CUDA_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../src/driver.h"
#include "../src/driver_cuda_types.h"

#define FAKE_ERROR 719 /* CUDA_ERROR_LAUNCH_FAILED */
#define FAKE_MAX_NODES 256u
#define FAKE_MAX_ARGS 256u
#define FAKE_MAX_PENDING 8u

/* Runs a kernel block by block, for kernels that are more than a function of their arguments. */
typedef void (*fake_launcher)(void (*run)(const void* args), const void* args, const uint32_t grid[3],
                              const uint32_t block[3], uint32_t shared_bytes);

typedef struct fake_kernel {
  void (*run)(const void* args);
  fake_launcher launcher; /* NULL: run is called once */
  uint32_t args_bytes;
  uint32_t launches; /* runs so far */
} fake_kernel;

typedef enum fake_node_kind { FAKE_KERNEL, FAKE_COPY, FAKE_FILL } fake_node_kind;

typedef struct fake_node {
  fake_node_kind kind;
  fake_kernel* kernel;
  uint32_t programmatic;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  unsigned char args[FAKE_MAX_ARGS];
  void* to;
  const void* from;
  size_t bytes;
  unsigned char value;
} fake_node;

typedef struct fake_graph {
  fake_node nodes[FAKE_MAX_NODES];
  uint32_t count;
} fake_graph;

typedef struct fake_cuda_state {
  _Atomic uint32_t calls;
  uint32_t fail_at;   /* 0 = never */
  uint32_t not_ready; /* the next this many queries answer "not ready" */
  _Atomic int32_t live;
  uint32_t lazy;
  uint32_t pending_count;
  fake_graph* pending[FAKE_MAX_PENDING + 1u]; /* launched and not run, oldest first */
  fake_graph* capturing;
  void* _Atomic captured_stream; /* of it */
  void* current_context;
  uint32_t last_attributes;
  clb_cu_launch_config last_config;
} fake_cuda_state;

static fake_cuda_state fake_cuda;

static int fake_context_object;

static inline clb_cu_result fake_call(void) {
  return (atomic_fetch_add(&fake_cuda.calls, 1u) + 1u == fake_cuda.fail_at) ? FAKE_ERROR : CLB_CU_SUCCESS;
}

static inline void fake_run(fake_node* node) {
  if (node->kind == FAKE_KERNEL) {
    node->kernel->launches++;
    if (node->kernel->launcher != NULL) {
      node->kernel->launcher(node->kernel->run, node->args, node->grid, node->block, node->shared_bytes);
    } else {
      node->kernel->run(node->args);
    }
  } else if (node->kind == FAKE_COPY) {
    (void)memcpy(node->to, node->from, node->bytes);
  } else {
    (void)memset(node->to, node->value, node->bytes);
  }
}

/* Run up to `count` pending graph launches, oldest first. */
static inline void fake_run_pending(uint32_t count) {
  for (; count > 0u && fake_cuda.pending_count > 0u; count--) {
    fake_graph* graph = fake_cuda.pending[0];
    fake_cuda.pending_count--;
    for (uint32_t i = 0u; i < fake_cuda.pending_count; i++) {
      fake_cuda.pending[i] = fake_cuda.pending[i + 1u];
    }
    for (uint32_t i = 0u; i < graph->count; i++) {
      fake_run(&graph->nodes[i]);
    }
  }
}

static inline clb_cu_result fake_submit(fake_node* node, void* stream) {
  fake_graph* graph = (stream == atomic_load(&fake_cuda.captured_stream)) ? fake_cuda.capturing : NULL;
  if (graph == NULL) {
    fake_run_pending(FAKE_MAX_PENDING);
    fake_run(node);
  } else if (graph->count < FAKE_MAX_NODES) {
    graph->nodes[graph->count++] = *node;
  } else {
    return FAKE_ERROR;
  }
  return CLB_CU_SUCCESS;
}

static inline clb_cu_result fake_set_current(void* context) {
  const clb_cu_result code = fake_call();
  if (code == CLB_CU_SUCCESS) fake_cuda.current_context = context;
  return code;
}

static inline clb_cu_result fake_launch(const clb_cu_launch_config* config, void* function, void** parameters,
                                        void** extra) {
  fake_node node = {.kind = FAKE_KERNEL,
                    .kernel = function,
                    .programmatic = config->attribute_count,
                    .grid = {config->grid_x, config->grid_y, config->grid_z},
                    .block = {config->block_x, config->block_y, config->block_z},
                    .shared_bytes = config->shared_bytes};
  const clb_cu_result code = fake_call();
  if (code != CLB_CU_SUCCESS) return code;
  if (extra != NULL || node.kernel->args_bytes > FAKE_MAX_ARGS) return FAKE_ERROR;
  fake_cuda.last_config = *config;
  fake_cuda.last_attributes = config->attribute_count;
  (void)memcpy(node.args, parameters[0], node.kernel->args_bytes);
  return fake_submit(&node, config->stream);
}

static inline void* fake_pointer(clb_cu_deviceptr address) { return (void*)(uintptr_t)address; }

static inline clb_cu_result fake_copy_in(clb_cu_deviceptr to, const void* from, size_t bytes, void* stream) {
  fake_node node = {.kind = FAKE_COPY, .to = fake_pointer(to), .from = from, .bytes = bytes};
  const clb_cu_result code = fake_call();
  return (code != CLB_CU_SUCCESS) ? code : fake_submit(&node, stream);
}

static inline clb_cu_result fake_copy_out(void* to, clb_cu_deviceptr from, size_t bytes, void* stream) {
  fake_node node = {.kind = FAKE_COPY, .to = to, .from = fake_pointer(from), .bytes = bytes};
  const clb_cu_result code = fake_call();
  return (code != CLB_CU_SUCCESS) ? code : fake_submit(&node, stream);
}

/* Not while capturing. */
static inline clb_cu_result fake_copy_rows(const clb_cu_memcpy2d* copy, void* stream) {
  const clb_cu_result code = fake_call();
  (void)stream;
  if (code != CLB_CU_SUCCESS) return code;
  if (fake_cuda.capturing != NULL || copy->from_type != CLB_CU_MEMORYTYPE_DEVICE ||
      copy->to_type != CLB_CU_MEMORYTYPE_DEVICE || copy->width_bytes > copy->from_pitch ||
      copy->width_bytes > copy->to_pitch)
    return FAKE_ERROR;
  fake_run_pending(FAKE_MAX_PENDING);
  for (size_t row = 0u; row < copy->height; row++) {
    (void)memcpy(fake_pointer(copy->to + row * copy->to_pitch), fake_pointer(copy->from + row * copy->from_pitch),
                 copy->width_bytes);
  }
  return CLB_CU_SUCCESS;
}

static inline clb_cu_result fake_fill(clb_cu_deviceptr to, unsigned char value, size_t bytes, void* stream) {
  fake_node node = {.kind = FAKE_FILL, .to = fake_pointer(to), .value = value, .bytes = bytes};
  const clb_cu_result code = fake_call();
  return (code != CLB_CU_SUCCESS) ? code : fake_submit(&node, stream);
}

static inline clb_cu_result fake_wait(void* handle) {
  const clb_cu_result code = fake_call();
  (void)handle;
  fake_run_pending(FAKE_MAX_PENDING);
  return code;
}

static inline clb_cu_result fake_query(void* handle) {
  const clb_cu_result code = fake_call();
  (void)handle;
  if (code == CLB_CU_SUCCESS && fake_cuda.pending_count > 0u) {
    fake_run_pending(1u); /* asking takes time, in which a device gets on */
    return CLB_CU_NOT_READY;
  }
  if (code == CLB_CU_SUCCESS && fake_cuda.not_ready > 0u) {
    fake_cuda.not_ready--;
    return CLB_CU_NOT_READY;
  }
  return code;
}

static inline clb_cu_result fake_create(void** handle, size_t bytes) {
  const clb_cu_result code = fake_call();
  if (code != CLB_CU_SUCCESS) return code;
  *handle = calloc(1u, bytes);
  fake_cuda.live++;
  return CLB_CU_SUCCESS;
}

static inline clb_cu_result fake_destroy(void* handle) {
  fake_run_pending(FAKE_MAX_PENDING);
  fake_cuda.live--;
  free(handle);
  return CLB_CU_SUCCESS;
}

static inline clb_cu_result fake_event_create(void** event, unsigned int flags) {
  (void)flags;
  return fake_create(event, 1u);
}

static inline clb_cu_result fake_event_record(void* event, void* stream) {
  (void)event;
  (void)stream;
  return fake_call();
}

static inline clb_cu_result fake_event_elapsed(float* ms, void* begin, void* end) {
  const clb_cu_result code = fake_query(begin);
  (void)end;
  if (code == CLB_CU_SUCCESS) *ms = 1.0f;
  return code;
}

static inline clb_cu_result fake_begin_capture(void* stream, int32_t mode) {
  void* graph = NULL;
  clb_cu_result code;
  if (fake_cuda.capturing != NULL || mode != CLB_CU_CAPTURE_THREAD_LOCAL) return FAKE_ERROR;
  code = fake_create(&graph, sizeof(fake_graph));
  if (code == CLB_CU_SUCCESS) {
    fake_cuda.capturing = graph;
    atomic_store(&fake_cuda.captured_stream, stream);
  }
  return code;
}

/* Like libcuda: the capture ends also when the call fails, and what was captured is gone. */
static inline clb_cu_result fake_end_capture(void* stream, void** graph) {
  fake_graph* captured = fake_cuda.capturing;
  const clb_cu_result code = fake_call();
  (void)stream;
  fake_cuda.capturing = NULL;
  atomic_store(&fake_cuda.captured_stream, NULL);
  if (captured == NULL) return FAKE_ERROR;
  if (code != CLB_CU_SUCCESS) {
    (void)fake_destroy(captured);
    return code;
  }
  *graph = captured;
  return CLB_CU_SUCCESS;
}

static inline clb_cu_result fake_instantiate(void** executable, void* graph, unsigned long long flags) {
  const clb_cu_result code = fake_create(executable, sizeof(fake_graph));
  (void)flags;
  if (code == CLB_CU_SUCCESS) (void)memcpy(*executable, graph, sizeof(fake_graph));
  return code;
}

static inline clb_cu_result fake_upload(void* executable, void* stream) {
  (void)executable;
  (void)stream;
  return fake_call();
}

static inline clb_cu_result fake_graph_launch(void* executable, void* stream) {
  const clb_cu_result code = fake_call();
  (void)stream;
  if (code != CLB_CU_SUCCESS) return code;
  if (fake_cuda.pending_count == FAKE_MAX_PENDING) fake_run_pending(1u);
  fake_cuda.pending[fake_cuda.pending_count++] = executable;
  if (fake_cuda.lazy == 0u) fake_run_pending(1u);
  return CLB_CU_SUCCESS;
}

static inline clb_cu_result fake_error_name(clb_cu_result code, const char** name) {
  if (code != FAKE_ERROR) return FAKE_ERROR;
  *name = "CUDA_ERROR_LAUNCH_FAILED";
  return CLB_CU_SUCCESS;
}

#define FAKE_ENTRY(table, name, function)                                   \
  do {                                                                      \
    clb_cu_result (*const address)() = (clb_cu_result(*const)())(function); \
    (void)memcpy(&(table)->name, &address, sizeof address);                 \
  } while (0)

static inline void fake_cuda_entries(clb_cuda_entries* table) {
  (void)memset(table, 0, sizeof *table);
  table->abi_version = CLB_ABI_VERSION;
  table->struct_bytes = (uint32_t)sizeof *table;
  table->context = &fake_context_object;
  FAKE_ENTRY(table, cuCtxSetCurrent, fake_set_current);
  FAKE_ENTRY(table, cuLaunchKernelEx, fake_launch);
  FAKE_ENTRY(table, cuMemcpyHtoDAsync, fake_copy_in);
  FAKE_ENTRY(table, cuMemcpyDtoHAsync, fake_copy_out);
  FAKE_ENTRY(table, cuMemcpy2DAsync, fake_copy_rows);
  FAKE_ENTRY(table, cuMemsetD8Async, fake_fill);
  FAKE_ENTRY(table, cuStreamSynchronize, fake_wait);
  FAKE_ENTRY(table, cuStreamQuery, fake_query);
  FAKE_ENTRY(table, cuEventCreate, fake_event_create);
  FAKE_ENTRY(table, cuEventRecord, fake_event_record);
  FAKE_ENTRY(table, cuEventQuery, fake_query);
  FAKE_ENTRY(table, cuEventElapsedTime, fake_event_elapsed);
  FAKE_ENTRY(table, cuEventDestroy, fake_destroy);
  FAKE_ENTRY(table, cuStreamBeginCapture, fake_begin_capture);
  FAKE_ENTRY(table, cuStreamEndCapture, fake_end_capture);
  FAKE_ENTRY(table, cuGraphInstantiate, fake_instantiate);
  FAKE_ENTRY(table, cuGraphUpload, fake_upload);
  FAKE_ENTRY(table, cuGraphLaunch, fake_graph_launch);
  FAKE_ENTRY(table, cuGraphDestroy, fake_destroy);
  FAKE_ENTRY(table, cuGraphExecDestroy, fake_destroy);
  FAKE_ENTRY(table, cuGetErrorName, fake_error_name);
}

#endif /* CLB_FAKE_CUDA_H */
