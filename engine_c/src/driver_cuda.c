/*
 * driver_cuda.c: clb_driver over libcuda.
 *
 * libcuda is neither linked nor included: the few types below restate the layout of CUDA 13's cuda.h
 * (tests/cuda/check_types.c compares them with the real header where there is one), and every function is
 * called through an address that Python fetched. All state is the table of addresses, which the caller owns.
 */
#include "driver.h"

#include <stddef.h>
#include <string.h>

#include "../../kernels_cu/abi.h"
#include "driver_cuda_types.h"
#include "invariant.h"
#include "loader_internal.h" /* clb_fail */

static const clb_cuda_entries* entries_of(const clb_driver* driver) {
  CLB_ASSERT(driver != NULL);
  CLB_ASSERT(driver->self != NULL);
  return (const clb_cuda_entries*)driver->self;
}

/* ISO C has no cast from a data pointer to a function pointer; POSIX promises that the bits are the same. */
#define CLB_ENTRY(driver, type, name, function) \
  type function;                                \
  (void)memcpy(&function, &entries_of(driver)->name, sizeof function)

static int32_t report(clb_driver* driver, clb_cu_result code) {
  const char* name = NULL;
  if (code == CLB_CU_SUCCESS) {
    return CLB_OK;
  }
  CLB_ENTRY(driver, clb_cu_get_error_name, cuGetErrorName, get_name);
  if ((get_name(code, &name) != CLB_CU_SUCCESS) || (name == NULL)) {
    name = "CUDA_ERROR_UNKNOWN";
  }
  driver->last_code = code;
  driver->last_name = name;
  return CLB_ERR_DEVICE;
}

/* For queries: "not ready" is an answer, not a failure. */
static int32_t report_query(clb_driver* driver, clb_cu_result code) {
  return (code == CLB_CU_NOT_READY) ? CLB_ERR_STATE : report(driver, code);
}

static int32_t cuda_bind(clb_driver* driver) {
  CLB_ENTRY(driver, clb_cu_ctx_set_current, cuCtxSetCurrent, set_current);
  return report(driver, set_current(entries_of(driver)->context));
}

static int32_t cuda_launch(clb_driver* driver, void* stream, const clb_launch* launch) {
  clb_cu_launch_attribute attribute;
  clb_cu_launch_config config;
  void* parameters[1];
  CLB_ASSERT(launch != NULL);
  CLB_ASSERT(launch->function != NULL);
  CLB_ASSERT(launch->args != NULL);
  CLB_ASSERT((launch->grid[0] >= 1u) && (launch->grid[1] >= 1u) && (launch->grid[2] >= 1u));
  CLB_ASSERT((launch->block[0] >= 1u) && (launch->block[1] >= 1u) && (launch->block[2] >= 1u));
  (void)memset(&attribute, 0, sizeof attribute);
  (void)memset(&config, 0, sizeof config);
  attribute.id = CLB_CU_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.number = 1;
  config.grid_x = launch->grid[0];
  config.grid_y = launch->grid[1];
  config.grid_z = launch->grid[2];
  config.block_x = launch->block[0];
  config.block_y = launch->block[1];
  config.block_z = launch->block[2];
  config.shared_bytes = launch->shared_bytes;
  config.stream = stream;
  config.attributes = &attribute;
  if (launch->edge == CLB_EDGE_PROGRAMMATIC) {
    config.attribute_count = 1;
  }
  /* libcuda takes void*; it copies cuFuncGetParamInfo's size and writes nothing. */
  (void)memcpy(&parameters[0], &launch->args, sizeof parameters[0]);
  CLB_ENTRY(driver, clb_cu_launch_kernel_ex, cuLaunchKernelEx, launch_kernel);
  return report(driver, launch_kernel(&config, launch->function, parameters, NULL));
}

static int32_t cuda_copy_in(clb_driver* driver, void* stream, clb_device_addr to, const void* from, uint64_t bytes) {
  CLB_ENTRY(driver, clb_cu_memcpy_in, cuMemcpyHtoDAsync, copy);
  return report(driver, copy(to, from, (size_t)bytes, stream));
}

static int32_t cuda_copy_out(clb_driver* driver, void* stream, void* to, clb_device_addr from, uint64_t bytes) {
  CLB_ENTRY(driver, clb_cu_memcpy_out, cuMemcpyDtoHAsync, copy);
  return report(driver, copy(to, from, (size_t)bytes, stream));
}

static int32_t cuda_copy_rows(clb_driver* driver, void* stream, const clb_copy_rows* copy) {
  const clb_cu_memcpy2d rows = {.from_type = CLB_CU_MEMORYTYPE_DEVICE,
                                .from = copy->from,
                                .from_pitch = (size_t)copy->from_pitch,
                                .to_type = CLB_CU_MEMORYTYPE_DEVICE,
                                .to = copy->to,
                                .to_pitch = (size_t)copy->to_pitch,
                                .width_bytes = (size_t)copy->row_bytes,
                                .height = (size_t)copy->rows};
  CLB_ENTRY(driver, clb_cu_memcpy_rows, cuMemcpy2DAsync, copy_rows);
  return report(driver, copy_rows(&rows, stream));
}

static int32_t cuda_fill(clb_driver* driver, void* stream, clb_device_addr to, uint8_t value, uint64_t bytes) {
  CLB_ENTRY(driver, clb_cu_memset, cuMemsetD8Async, fill);
  return report(driver, fill(to, value, (size_t)bytes, stream));
}

static int32_t cuda_stream_wait(clb_driver* driver, void* stream) {
  CLB_ENTRY(driver, clb_cu_on_handle, cuStreamSynchronize, wait);
  return report(driver, wait(stream));
}

static int32_t cuda_stream_done(clb_driver* driver, void* stream) {
  CLB_ENTRY(driver, clb_cu_on_handle, cuStreamQuery, query);
  return report_query(driver, query(stream));
}

static int32_t cuda_event_create(clb_driver* driver, void** event) {
  void* created = NULL;
  int32_t status;
  CLB_ENTRY(driver, clb_cu_event_create, cuEventCreate, create);
  status = report(driver, create(&created, CLB_CU_EVENT_DEFAULT));
  if (status == CLB_OK) {
    *event = created;
    ++driver->made;
  }
  return status;
}

static int32_t cuda_event_record(clb_driver* driver, void* event, void* stream) {
  CLB_ENTRY(driver, clb_cu_on_two_handles, cuEventRecord, record);
  return report(driver, record(event, stream));
}

static int32_t cuda_event_done(clb_driver* driver, void* event) {
  CLB_ENTRY(driver, clb_cu_on_handle, cuEventQuery, query);
  return report_query(driver, query(event));
}

static int32_t cuda_event_ms(clb_driver* driver, void* begin, void* end, float* ms) {
  float elapsed = 0.0f;
  int32_t status;
  CLB_ENTRY(driver, clb_cu_event_elapsed, cuEventElapsedTime, elapsed_time);
  status = report_query(driver, elapsed_time(&elapsed, begin, end));
  if (status == CLB_OK) {
    *ms = elapsed;
  }
  return status;
}

static void cuda_event_destroy(clb_driver* driver, void* event) {
  CLB_ENTRY(driver, clb_cu_on_handle, cuEventDestroy, destroy);
  (void)destroy(event);
}

static int32_t cuda_capture_begin(clb_driver* driver, void* stream) {
  CLB_ENTRY(driver, clb_cu_begin_capture, cuStreamBeginCapture, begin);
  return report(driver, begin(stream, CLB_CU_CAPTURE_THREAD_LOCAL));
}

static int32_t cuda_capture_end(clb_driver* driver, void* stream, void** graph) {
  void* captured = NULL;
  int32_t status;
  CLB_ENTRY(driver, clb_cu_end_capture, cuStreamEndCapture, end);
  status = report(driver, end(stream, &captured));
  if (status == CLB_OK) {
    *graph = captured;
    ++driver->made;
  }
  return status;
}

/* The upload moves the graph to the device, so that the first launch is not slower than the others. */
static int32_t cuda_graph_instantiate(clb_driver* driver, void* graph, void* stream, void** executable) {
  void* created = NULL;
  int32_t status;
  CLB_ENTRY(driver, clb_cu_graph_instantiate, cuGraphInstantiate, instantiate);
  CLB_ENTRY(driver, clb_cu_on_two_handles, cuGraphUpload, upload);
  CLB_ENTRY(driver, clb_cu_on_handle, cuGraphExecDestroy, destroy);
  status = report(driver, instantiate(&created, graph, 0u));
  if (status != CLB_OK) {
    return status;
  }
  status = report(driver, upload(created, stream));
  if (status != CLB_OK) {
    (void)destroy(created);
    return status;
  }
  *executable = created;
  ++driver->made;
  return CLB_OK;
}

static int32_t cuda_graph_launch(clb_driver* driver, void* executable, void* stream) {
  CLB_ENTRY(driver, clb_cu_on_two_handles, cuGraphLaunch, launch);
  return report(driver, launch(executable, stream));
}

static void cuda_graph_destroy(clb_driver* driver, void* graph) {
  CLB_ENTRY(driver, clb_cu_on_handle, cuGraphDestroy, destroy);
  (void)destroy(graph);
}

static void cuda_executable_destroy(clb_driver* driver, void* executable) {
  CLB_ENTRY(driver, clb_cu_on_handle, cuGraphExecDestroy, destroy);
  (void)destroy(executable);
}

/* All members from `context` to the end are pointers without padding, so "no NULL" is one loop. */
static int32_t entries_complete(const clb_cuda_entries* entries) {
  const size_t first = offsetof(clb_cuda_entries, context);
  const size_t count = (sizeof *entries - first) / sizeof(void*);
  const unsigned char* bytes = (const unsigned char*)entries;
  for (size_t i = 0u; i < count; i++) {
    void* address = NULL;
    (void)memcpy(&address, &bytes[first + (i * sizeof address)], sizeof address);
    if (address == NULL) {
      return CLB_ERR_ARGUMENT;
    }
  }
  return CLB_OK;
}

int32_t clb_driver_cuda_init(clb_driver* driver, const clb_cuda_entries* entries) {
  if ((driver == NULL) || (entries == NULL)) {
    return CLB_ERR_ARGUMENT;
  }
  if ((entries->abi_version != CLB_ABI_VERSION) || (entries->struct_bytes != sizeof *entries)) {
    return CLB_ERR_VERSION;
  }
  if (entries_complete(entries) != CLB_OK) {
    return CLB_ERR_ARGUMENT;
  }
  (void)memset(driver, 0, sizeof *driver);
  (void)memcpy(&driver->self, &entries, sizeof driver->self);
  driver->last_name = "";
  driver->bind = cuda_bind;
  driver->launch = cuda_launch;
  driver->copy_in = cuda_copy_in;
  driver->copy_out = cuda_copy_out;
  driver->copy_rows = cuda_copy_rows;
  driver->fill = cuda_fill;
  driver->stream_wait = cuda_stream_wait;
  driver->stream_done = cuda_stream_done;
  driver->event_create = cuda_event_create;
  driver->event_record = cuda_event_record;
  driver->event_done = cuda_event_done;
  driver->event_ms = cuda_event_ms;
  driver->event_destroy = cuda_event_destroy;
  driver->capture_begin = cuda_capture_begin;
  driver->capture_end = cuda_capture_end;
  driver->graph_instantiate = cuda_graph_instantiate;
  driver->graph_launch = cuda_graph_launch;
  driver->graph_destroy = cuda_graph_destroy;
  driver->executable_destroy = cuda_executable_destroy;
  return CLB_OK;
}

int32_t clb_device_attach(const clb_device_desc* device, clb_driver* driver, clb_error* error) {
  if ((device == NULL) || (driver == NULL)) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "device: no description");
  }
  if ((device->abi_version != CLB_ABI_VERSION) || (device->struct_bytes != sizeof *device)) {
    return clb_fail(error, CLB_ERR_VERSION, "device: version %u with %u bytes, expected %u with %zu",
                    device->abi_version, device->struct_bytes, CLB_ABI_VERSION, sizeof *device);
  }
  if (device->kernels_abi != CLB_KERNELS_ABI) {
    return clb_fail(error, CLB_ERR_VERSION, "kernels: ABI %u, this engine has %u; rebuild them with `make cubins`",
                    device->kernels_abi, CLB_KERNELS_ABI);
  }
  if ((device->kernels == NULL) || (device->pinned == NULL) || (device->pinned_device == 0u) || (device->arena == 0u) ||
      (device->channel_device == 0u)) {
    return clb_fail(error, CLB_ERR_ARGUMENT, "device: kernels, pinned memory, arena or channel mapping is missing");
  }
  const int32_t status = clb_driver_cuda_init(driver, (const clb_cuda_entries*)device->entries);
  return (status == CLB_OK) ? CLB_OK
                            : clb_fail(error, status, "device: the table of driver entry points is incomplete");
}

int32_t clb_device_find(const clb_device_desc* device, const char* name, uint64_t args_bytes, void** function,
                        clb_error* error) {
  CLB_ASSERT(device != NULL);
  CLB_ASSERT(name != NULL);
  CLB_ASSERT(function != NULL);
  for (uint32_t i = 0u; i < device->kernel_count; i++) {
    const clb_device_kernel* kernel = &device->kernels[i];
    if (strcmp(kernel->name, name) != 0) {
      continue;
    }
    if (kernel->parameter_bytes != args_bytes) {
      return clb_fail(error, CLB_ERR_MODULE,
                      "kernel %s takes a struct of %llu bytes, this engine passes %llu; rebuild with `make cubins`",
                      name, (unsigned long long)kernel->parameter_bytes, (unsigned long long)args_bytes);
    }
    *function = kernel->function;
    return CLB_OK;
  }
  return clb_fail(error, CLB_ERR_MODULE, "no cubin has the kernel %s; rebuild with `make cubins`", name);
}

uint32_t clb_kernels_abi(void) { return CLB_KERNELS_ABI; }
