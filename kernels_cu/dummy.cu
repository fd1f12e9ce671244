/*
 * dummy.cu: seeded random weights on the device, with the values of engine_c/src/dummy.c; and bf16 weights made fp16.
 *
 * Operation  clb_dummy: fills one matrix, in mma tiles or row-major; see clb_dummy_args in abi.h. Padding becomes 0.
 *            clb_to_fp16: see abi.h.
 * Reference  tests/cuda/test_dummy.py (engine_c/src/dummy.c).
 * Grid       any number of blocks of 256 threads; each takes CLB_DUMMY_VALUES elements in turn.
 * Needs      sm_80. Runs while weights load, never in a step.
 * Roofline   bytes written: 60 GB of bf16 take 15 ms at 4 TB/s. Two 64-bit hashes an element bind it; target 1 s.
 */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../engine_c/include/colibri.h"
#include "device.cuh"

CLB_DEVICE uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

CLB_DEVICE float value_at(const clb_dummy_args& a, uint64_t number) {
  if (a.half_width == 0.0f) return 1.0f;
  const uint64_t bits = mix(a.key + (number + 1u) * 0x9e3779b97f4a7c15ull) >> 40;
  return __fmul_rn(__fsub_rn(__fmul_rn((float)bits, 1.0f / 8388608.0f), 1.0f), a.half_width);
}

/* Value `number` of a quantised matrix, as its bits. */
CLB_DEVICE uint32_t bits_at(const clb_dummy_args& a, uint32_t row, uint32_t col) {
  const uint64_t number = (a.by_column != 0u) ? (uint64_t)col * a.rows + row : (uint64_t)row * a.cols + col;
  const uint32_t byte = (uint32_t)(mix(a.key + (number + 1u) * 0x9e3779b97f4a7c15ull) >> 56);
  if (a.precision == CLB_INT8) return (byte == 0x80u) ? 0x81u : byte;
  if (a.precision == CLB_INT4) return byte >> 4;
  return ((byte & 0x7fu) == 0x7fu) ? byte ^ 1u : byte;
}

/* A word of the values of a quantised matrix ("formats" in abi.h). */
CLB_DEVICE uint32_t quantised_word(const clb_dummy_args& a, uint64_t index) {
  const bool int4 = a.precision == CLB_INT4;
  const uint32_t width = int4 ? 64u : 32u;
  const uint32_t pieces = (a.cols + width - 1u) / width;
  const uint32_t lane = (uint32_t)(index % 128u) / 4u;
  const uint32_t part = (uint32_t)(index % 4u); /* int4: tile; else 2 t + e */
  const uint32_t row = (uint32_t)(index / 128u / pieces) * CLB_TILE + lane / 4u;
  const uint32_t col = (uint32_t)(index / 128u % pieces) * width + lane % 4u * 2u + part * (int4 ? 16u : 8u);
  uint32_t word = 0u;
  for (uint32_t i = 0u; i < (int4 ? 8u : 4u); i++) {
    const uint32_t half = int4 ? i % 2u : i / 2u; /* of rows */
    const uint32_t r = row + half * 8u;
    const uint32_t c = col + (int4 ? i / 4u + i / 2u % 2u * 8u : i % 2u);
    const bool there = r < a.rows && c < a.cols;
    const uint32_t bits = there ? bits_at(a, r, c) : int4 ? 8u : 0u;
    if (int4) {
      word |= bits << (4u * i);
    } else if (a.precision == CLB_INT8) {
      word |= (bits ^ 0x80u) << (8u * i);
    } else if (half == 0u) {
      word |= ((bits & 0x80u) << 8 | (bits & 0x7fu) << 7) << (16u * (i % 2u));
    } else {
      word |= ((bits & 0x80u) << 7 | (bits & 0x7fu)) << (16u * (i % 2u));
    }
  }
  return word;
}

CLB_DEVICE void quantised(const clb_dummy_args& a) {
  const uint32_t width = (a.precision == CLB_INT4) ? 64u : 32u;
  const uint64_t pieces = (uint64_t)((a.rows + CLB_TILE - 1u) / CLB_TILE) * ((a.cols + width - 1u) / width);
  uint32_t* const values = reinterpret_cast<uint32_t*>(a.output);
  uint32_t* const scales = reinterpret_cast<uint32_t*>(a.output + a.scales_at);
  const uint64_t first = (uint64_t)blockIdx.x * CLB_MATMUL_THREADS + threadIdx.x;
  const uint64_t step = (uint64_t)gridDim.x * CLB_MATMUL_THREADS;
  for (uint64_t i = first; i < pieces * 128u; i += step)
    values[i] = quantised_word(a, i);
  for (uint64_t i = first; i < a.scale_words; i += step)
    scales[i] = a.scale;
}

/* Element `index` of the output: its row and column. */
CLB_DEVICE void place_of(const clb_dummy_args& a, uint64_t index, uint32_t across, uint32_t* row, uint32_t* col) {
  if (a.tiled == 0u) {
    *row = (uint32_t)(index / a.cols);
    *col = (uint32_t)(index % a.cols);
    return;
  }
  const uint64_t tile = index / (CLB_TILE * CLB_TILE);
  const uint32_t lane = (uint32_t)(index % (CLB_TILE * CLB_TILE)) / 8u;
  const uint32_t element = (uint32_t)(index % 8u);
  *row = (uint32_t)(tile / across) * CLB_TILE + lane / 4u + element / 2u % 2u * 8u;
  *col = (uint32_t)(tile % across) * CLB_TILE + lane % 4u * 2u + element % 2u + element / 4u * 8u;
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS) clb_dummy(const __grid_constant__ clb_dummy_args a) {
  const uint32_t across = (a.cols + CLB_TILE - 1u) / CLB_TILE;
  const uint64_t padded = (uint64_t)((a.rows + CLB_TILE - 1u) / CLB_TILE) * across * CLB_TILE * CLB_TILE;
  const uint64_t count = (a.tiled != 0u) ? padded : (uint64_t)a.rows * a.cols;
  clb_wait_for_inputs();
  clb_release_dependents();
  if (a.precision >= CLB_INT8) {
    quantised(a);
    return;
  }
  for (uint64_t begin = (uint64_t)blockIdx.x * CLB_DUMMY_VALUES; begin < count;
       begin += (uint64_t)gridDim.x * CLB_DUMMY_VALUES) {
    for (uint64_t i = begin + threadIdx.x; i < min(begin + CLB_DUMMY_VALUES, count); i += CLB_MATMUL_THREADS) {
      uint32_t row;
      uint32_t col;
      place_of(a, i, across, &row, &col);
      const uint64_t number = (a.by_column != 0u) ? (uint64_t)col * a.rows + row : (uint64_t)row * a.cols + col;
      const float value = (row < a.rows && col < a.cols) ? value_at(a, number) : 0.0f;
      if (a.precision == CLB_FP32) {
        reinterpret_cast<float*>(a.output)[i] = value;
      } else if (a.precision == CLB_FP16) {
        reinterpret_cast<__half*>(a.output)[i] = __float2half_rn(value);
      } else {
        reinterpret_cast<__nv_bfloat16*>(a.output)[i] = __float2bfloat16_rn(value);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS)
    clb_to_fp16(const __grid_constant__ clb_to_fp16_args a) {
  clb_wait_for_inputs();
  clb_release_dependents();
  const uint64_t step = (uint64_t)gridDim.x * CLB_MATMUL_THREADS;
  for (uint64_t i = (uint64_t)blockIdx.x * CLB_MATMUL_THREADS + threadIdx.x; i < a.vectors; i += step) {
    const uint4 v = a.data[i];
    a.data[i] =
        make_uint4(clb_bf16::to_fp16(v.x), clb_bf16::to_fp16(v.y), clb_bf16::to_fp16(v.z), clb_bf16::to_fp16(v.w));
  }
}
