/*
 * driver.h: what the engine asks of an accelerator's driver, as one table of function pointers.
 *
 * Who fills it: driver_cuda.c over libcuda (entry points are handed over by Python as addresses, so this
 * library links no libcuda and needs no cuda.h), and tests/fake_driver.c, which fails the n-th call.
 *
 * Owns nothing. Handles (streams, functions, graphs, events) are opaque; whoever creates one destroys it.
 * Device addresses are 64-bit numbers and are never dereferenced by C.
 *
 * Threads: one thread drives one table; `bind` makes the device's context current in that thread first.
 * Errors: every function returns CLB_OK or CLB_ERR_DEVICE and then sets last_code and last_name; on
 * failure no handle is written. `event_done` and `stream_done` also return CLB_ERR_STATE: not finished yet.
 * An asynchronous fault of a kernel surfaces in any later call; the context is then lost for good
 * (the process must end), so callers never retry.
 *
 * Life of a step:  capture_begin ▸ launch ... launch ▸ capture_end ▸ instantiate      once, at open
 *                  copy_in (changed rows) ▸ graph_launch                              every step
 * The same launch() serves eager runs and graph nodes: what is captured is what was tested.
 */
#ifndef CLB_DRIVER_H
#define CLB_DRIVER_H

#include <stdint.h>

#include "colibri.h"

typedef uint64_t clb_device_addr; /* address in device memory, or of mapped host memory as the device sees it */

/* A launch follows its predecessor in the stream. PROGRAMMATIC: it may begin before the predecessor ended;
   its kernel must execute griddepcontrol.wait before it touches anything that the predecessor writes. */
enum { CLB_EDGE_FULL = 0, CLB_EDGE_PROGRAMMATIC = 1 }; /* clb_edge */

typedef struct clb_launch {
  void* function;        /* a kernel with exactly one parameter, an argument struct of abi.h */
  const void* args;      /* the struct; copied by the call */
  uint32_t grid[3];      /* blocks, each >= 1 */
  uint32_t block[3];     /* threads, each >= 1 */
  uint32_t shared_bytes; /* dynamic shared memory of one block */
  uint32_t edge;         /* clb_edge */
} clb_launch;

/* Rows of device memory, each row_bytes long, from one pitch to another. The two do not overlap. */
typedef struct clb_copy_rows {
  clb_device_addr to;
  clb_device_addr from;
  uint64_t to_pitch; /* bytes from one row to the next, at least row_bytes, below 2^31 */
  uint64_t from_pitch;
  uint64_t row_bytes; /* at least 1 */
  uint64_t rows;      /* at least 1 */
} clb_copy_rows;

typedef struct clb_driver clb_driver;

struct clb_driver {
  void* self;            /* state of the implementation */
  int32_t last_code;     /* the driver's own code of the last failure; 0 = none yet */
  const char* last_name; /* its name, "CUDA_ERROR_ILLEGAL_ADDRESS"; static; never NULL */
  uint64_t made;         /* events, graphs and executables created so far: the calls that may take memory */

  int32_t (*bind)(clb_driver* driver);
  int32_t (*launch)(clb_driver* driver, void* stream, const clb_launch* launch);

  /* Ordered in the stream; host memory must be pinned and stay untouched until the copy is done. */
  int32_t (*copy_in)(clb_driver* driver, void* stream, clb_device_addr to, const void* from, uint64_t bytes);
  int32_t (*copy_out)(clb_driver* driver, void* stream, void* to, clb_device_addr from, uint64_t bytes);
  int32_t (*copy_rows)(clb_driver* driver, void* stream, const clb_copy_rows* copy);
  int32_t (*fill)(clb_driver* driver, void* stream, clb_device_addr to, uint8_t value, uint64_t bytes);

  int32_t (*stream_wait)(clb_driver* driver, void* stream); /* blocks until all work is done */
  int32_t (*stream_done)(clb_driver* driver, void* stream); /* never blocks */

  int32_t (*event_create)(clb_driver* driver, void** event); /* with timing */
  int32_t (*event_record)(clb_driver* driver, void* event, void* stream);
  int32_t (*event_done)(clb_driver* driver, void* event);
  int32_t (*event_ms)(clb_driver* driver, void* begin, void* end, float* ms);
  void (*event_destroy)(clb_driver* driver, void* event);

  /* Between begin and end nothing runs: launches, copies and fills of this stream become nodes of a graph.
     capture_end ends the capture also when it fails. */
  int32_t (*capture_begin)(clb_driver* driver, void* stream);
  int32_t (*capture_end)(clb_driver* driver, void* stream, void** graph);
  int32_t (*graph_instantiate)(clb_driver* driver, void* graph, void* stream, void** executable);
  int32_t (*graph_launch)(clb_driver* driver, void* executable, void* stream);
  void (*graph_destroy)(clb_driver* driver, void* graph);
  void (*executable_destroy)(clb_driver* driver, void* executable);
};

/* ------------------------------------------------------------------- CUDA */

/* Addresses of libcuda's functions in their CUDA 13.0 form, as cuGetProcAddress(name, 13000) gives them.
   Python fills it by member name; a NULL is CLB_ERR_ARGUMENT. */
typedef struct clb_cuda_entries {
  uint32_t abi_version;
  uint32_t struct_bytes;
  void* context; /* CUcontext that bind makes current */
  void* cuCtxSetCurrent;
  void* cuLaunchKernelEx;
  void* cuMemcpyHtoDAsync;
  void* cuMemcpyDtoHAsync;
  void* cuMemcpy2DAsync;
  void* cuMemsetD8Async;
  void* cuStreamSynchronize;
  void* cuStreamQuery;
  void* cuEventCreate;
  void* cuEventRecord;
  void* cuEventQuery;
  void* cuEventElapsedTime;
  void* cuEventDestroy;
  void* cuStreamBeginCapture;
  void* cuStreamEndCapture;
  void* cuGraphInstantiate;
  void* cuGraphUpload;
  void* cuGraphLaunch;
  void* cuGraphDestroy;
  void* cuGraphExecDestroy;
  void* cuGetErrorName;
} clb_cuda_entries;

/* Fills `driver` over `entries`, which the caller keeps alive as long as the driver is used.
   VERSION: abi_version or struct_bytes differ. ARGUMENT: an entry or the context is NULL. */
CLB_API int32_t clb_driver_cuda_init(clb_driver* driver, const clb_cuda_entries* entries);

/* Check a description and fill `driver` over it. VERSION: abi_version, struct_bytes or kernels_abi differ. ARGUMENT: a
   member is 0, or as clb_driver_cuda_init. `error` may be NULL. */
CLB_API int32_t clb_device_attach(const clb_device_desc* device, clb_driver* driver, clb_error* error);

/* The function of the kernel `name`, whose argument struct has `args_bytes` here. MODULE, with both numbers in
   `error`: no such kernel, or its cubin was compiled with another struct. */
CLB_API int32_t clb_device_find(const clb_device_desc* device, const char* name, uint64_t args_bytes, void** function,
                                clb_error* error);

#endif /* CLB_DRIVER_H */
