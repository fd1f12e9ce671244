/*
 * driver_cuda_types.h: the types of CUDA 13's driver interface that driver_cuda.c uses, restated so that the
 * engine compiles on a machine without a CUDA toolkit. Internal to driver_cuda.c and to the tests that
 * compare it with the real cuda.h (tests/cuda/check_types.c) or stand in for libcuda.
 */
#ifndef CLB_DRIVER_CUDA_TYPES_H
#define CLB_DRIVER_CUDA_TYPES_H

#include <stddef.h>
#include <stdint.h>

typedef int32_t clb_cu_result;     /* CUresult */
typedef uint64_t clb_cu_deviceptr; /* CUdeviceptr */

#define CLB_CU_SUCCESS 0
#define CLB_CU_NOT_READY 600
#define CLB_CU_EVENT_DEFAULT 0u
#define CLB_CU_CAPTURE_THREAD_LOCAL 1
#define CLB_CU_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION 6

typedef struct clb_cu_launch_attribute { /* CUlaunchAttribute */
  int32_t id;
  char pad[4];
  union {
    char pad[64];
    int32_t number;
  } value;
} clb_cu_launch_attribute;

typedef struct clb_cu_launch_config { /* CUlaunchConfig */
  uint32_t grid_x;
  uint32_t grid_y;
  uint32_t grid_z;
  uint32_t block_x;
  uint32_t block_y;
  uint32_t block_z;
  uint32_t shared_bytes;
  void* stream;
  clb_cu_launch_attribute* attributes;
  uint32_t attribute_count;
} clb_cu_launch_config;

#define CLB_CU_MEMORYTYPE_DEVICE 2

typedef struct clb_cu_memcpy2d { /* CUDA_MEMCPY2D */
  size_t from_x;
  size_t from_y;
  int32_t from_type;
  char pad0[4];
  const void* from_host;
  clb_cu_deviceptr from;
  void* from_array;
  size_t from_pitch;
  size_t to_x;
  size_t to_y;
  int32_t to_type;
  char pad1[4];
  void* to_host;
  clb_cu_deviceptr to;
  void* to_array;
  size_t to_pitch;
  size_t width_bytes;
  size_t height;
} clb_cu_memcpy2d;

typedef clb_cu_result (*clb_cu_get_error_name)(clb_cu_result code, const char** name);
typedef clb_cu_result (*clb_cu_ctx_set_current)(void* context);
typedef clb_cu_result (*clb_cu_launch_kernel_ex)(const clb_cu_launch_config* config, void* function, void** parameters,
                                                 void** extra);
typedef clb_cu_result (*clb_cu_memcpy_in)(clb_cu_deviceptr to, const void* from, size_t bytes, void* stream);
typedef clb_cu_result (*clb_cu_memcpy_out)(void* to, clb_cu_deviceptr from, size_t bytes, void* stream);
typedef clb_cu_result (*clb_cu_memcpy_rows)(const clb_cu_memcpy2d* copy, void* stream);
typedef clb_cu_result (*clb_cu_memset)(clb_cu_deviceptr to, unsigned char value, size_t bytes, void* stream);
typedef clb_cu_result (*clb_cu_on_handle)(void* handle);
typedef clb_cu_result (*clb_cu_on_two_handles)(void* first, void* second);
typedef clb_cu_result (*clb_cu_event_create)(void** event, unsigned int flags);
typedef clb_cu_result (*clb_cu_event_elapsed)(float* ms, void* begin, void* end);
typedef clb_cu_result (*clb_cu_begin_capture)(void* stream, int32_t mode);
typedef clb_cu_result (*clb_cu_end_capture)(void* stream, void** graph);
typedef clb_cu_result (*clb_cu_graph_instantiate)(void** executable, void* graph, unsigned long long flags);

#endif /* CLB_DRIVER_CUDA_TYPES_H */
