/*
 * check_types.c: our restated driver types against the real cuda.h. Compiled (never run) where a toolkit is installed:
 *   cc -std=c11 -fsyntax-only -Iengine_c/include -I/path/to/cuda/include tests/cuda/check_types.c
 */
#include <cuda.h>
#include <stddef.h>

#include "../../engine_c/src/driver_cuda_types.h"

#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #ours)
#define SAME_PLACE(ours, a, theirs, b) _Static_assert(offsetof(ours, a) == offsetof(theirs, b), #ours "." #a)

SAME_SIZE(clb_cu_result, CUresult);
SAME_SIZE(clb_cu_deviceptr, CUdeviceptr);
SAME_SIZE(clb_cu_launch_attribute, CUlaunchAttribute);
SAME_PLACE(clb_cu_launch_attribute, value, CUlaunchAttribute, value);
SAME_PLACE(clb_cu_launch_attribute, value.number, CUlaunchAttribute, value.programmaticStreamSerializationAllowed);
SAME_SIZE(clb_cu_launch_config, CUlaunchConfig);
SAME_PLACE(clb_cu_launch_config, block_x, CUlaunchConfig, blockDimX);
SAME_PLACE(clb_cu_launch_config, shared_bytes, CUlaunchConfig, sharedMemBytes);
SAME_PLACE(clb_cu_launch_config, stream, CUlaunchConfig, hStream);
SAME_PLACE(clb_cu_launch_config, attributes, CUlaunchConfig, attrs);
SAME_PLACE(clb_cu_launch_config, attribute_count, CUlaunchConfig, numAttrs);
SAME_SIZE(clb_cu_memcpy2d, CUDA_MEMCPY2D);
SAME_PLACE(clb_cu_memcpy2d, from_type, CUDA_MEMCPY2D, srcMemoryType);
SAME_PLACE(clb_cu_memcpy2d, from, CUDA_MEMCPY2D, srcDevice);
SAME_PLACE(clb_cu_memcpy2d, from_pitch, CUDA_MEMCPY2D, srcPitch);
SAME_PLACE(clb_cu_memcpy2d, to_type, CUDA_MEMCPY2D, dstMemoryType);
SAME_PLACE(clb_cu_memcpy2d, to, CUDA_MEMCPY2D, dstDevice);
SAME_PLACE(clb_cu_memcpy2d, to_pitch, CUDA_MEMCPY2D, dstPitch);
SAME_PLACE(clb_cu_memcpy2d, width_bytes, CUDA_MEMCPY2D, WidthInBytes);
SAME_PLACE(clb_cu_memcpy2d, height, CUDA_MEMCPY2D, Height);
_Static_assert(CLB_CU_MEMORYTYPE_DEVICE == CU_MEMORYTYPE_DEVICE, "memory type");
_Static_assert(CLB_CU_SUCCESS == CUDA_SUCCESS, "success");
_Static_assert(CLB_CU_NOT_READY == CUDA_ERROR_NOT_READY, "not ready");
_Static_assert(CLB_CU_EVENT_DEFAULT == CU_EVENT_DEFAULT, "event flags");
_Static_assert(CLB_CU_CAPTURE_THREAD_LOCAL == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, "capture mode");
_Static_assert(CLB_CU_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ==
                   CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
               "attribute id");
