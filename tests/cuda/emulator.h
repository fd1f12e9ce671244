/*
 * emulator.h: CUDA C++ as far as kernels_cu/ uses it, on the CPU: the kernels' own source, compiled for the host with
 * this file included first (g++ -x c++ -include emulator.h), runs without a GPU. Test-only; for correctness, not speed.
 *
 * Blocks run one after another. A block's threads are fibers that run until they meet: at a barrier, or at an operation
 * of a warp, which the last lane to arrive carries out for all. Asynchronous copies are made as late as a kernel
 * allows. emulator_order picks who runs first, so that results which depend on it (a missing barrier) show as
 * differences. Deadlocks and operations with lanes that have returned end the program with a message.
 */
#ifndef CLB_EMULATOR_H
#define CLB_EMULATOR_H

#include <cmath>
#include <cstdint>
#include <cstring>

#define __CUDACC__ 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(n)
#define __shared__ thread_local
#define __align__(n) alignas(n)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct uint3 {
  uint32_t x, y, z;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

extern uint3 threadIdx, blockIdx, blockDim, gridDim;
extern thread_local uint4 memory[]; /* dynamic shared memory, by the name that all kernels give it */

/* ------------------------------------------------------------ the machine below */

extern uint32_t emulator_shared_bytes;                     /* of the launch */
extern "C" uint32_t emulator_order;                        /* 0: threads in order, 1: the last first */
void emulator_barrier(uint32_t barrier, uint32_t threads); /* threads 0: all that live */
/* The lanes of the calling warp meet; work(in, out) runs once with what every lane brought. */
struct emulator_words {
  uint32_t word[8];
};
emulator_words emulator_meet(const emulator_words& own,
                             void (*work)(const emulator_words* in, emulator_words* out, uint32_t argument),
                             uint32_t argument);
void emulator_copy_later(void* to, const void* from, uint32_t bytes);
void emulator_end_group();
void emulator_wait_groups(uint32_t pending);

/* ----------------------------------------------------------------- warp operations */

template <class T>
static inline emulator_words emulator_pack(T value) {
  emulator_words words = {};
  static_assert(sizeof value <= sizeof words, "too large");
  std::memcpy(&words, &value, sizeof value);
  return words;
}
template <class T>
static inline T emulator_unpack(const emulator_words& words) {
  T value;
  std::memcpy(&value, &words, sizeof value);
  return value;
}

static inline void emulator_xor(const emulator_words* in, emulator_words* out, uint32_t mask) {
  for (uint32_t lane = 0; lane < 32; lane++)
    out[lane] = in[lane ^ mask];
}
static inline void emulator_up(const emulator_words* in, emulator_words* out, uint32_t by) {
  for (uint32_t lane = 0; lane < 32; lane++)
    out[lane] = in[lane < by ? lane : lane - by];
}
static inline void emulator_down(const emulator_words* in, emulator_words* out, uint32_t by) {
  for (uint32_t lane = 0; lane < 32; lane++)
    out[lane] = in[lane + by > 31 ? lane : lane + by];
}
static inline void emulator_from(const emulator_words* in, emulator_words* out, uint32_t) {
  for (uint32_t lane = 0; lane < 32; lane++) { /* word 7 of each lane says from where */
    out[lane] = in[in[lane].word[7] % 32];
  }
}
static inline void emulator_votes(const emulator_words* in, emulator_words* out, uint32_t) {
  uint32_t votes = 0;
  for (uint32_t lane = 0; lane < 32; lane++)
    votes |= (in[lane].word[0] != 0 ? 1u : 0u) << lane;
  for (uint32_t lane = 0; lane < 32; lane++)
    out[lane].word[0] = votes;
}
static inline void emulator_reduce(const emulator_words* in, emulator_words* out, uint32_t kind) {
  uint32_t all = in[0].word[0];
  for (uint32_t lane = 1; lane < 32; lane++) {
    const uint32_t one = in[lane].word[0];
    all = kind == 0 ? (one > all ? one : all) : kind == 1 ? (one < all ? one : all) : all + one;
  }
  for (uint32_t lane = 0; lane < 32; lane++)
    out[lane].word[0] = all;
}

#define EMULATOR_FULL(mask) ((mask) == 0xffffffffu ? (void)0 : __builtin_trap())
template <class T>
static inline T __shfl_xor_sync(uint32_t mask, T value, uint32_t with) {
  EMULATOR_FULL(mask);
  return emulator_unpack<T>(emulator_meet(emulator_pack(value), emulator_xor, with));
}
template <class T>
static inline T __shfl_up_sync(uint32_t mask, T value, uint32_t by) {
  EMULATOR_FULL(mask);
  return emulator_unpack<T>(emulator_meet(emulator_pack(value), emulator_up, by));
}
template <class T>
static inline T __shfl_down_sync(uint32_t mask, T value, uint32_t by) {
  EMULATOR_FULL(mask);
  return emulator_unpack<T>(emulator_meet(emulator_pack(value), emulator_down, by));
}
template <class T>
static inline T __shfl_sync(uint32_t mask, T value, uint32_t from) {
  emulator_words words = emulator_pack(value);
  EMULATOR_FULL(mask);
  words.word[7] = from;
  return emulator_unpack<T>(emulator_meet(words, emulator_from, 0));
}
static inline uint32_t __ballot_sync(uint32_t mask, bool vote) {
  EMULATOR_FULL(mask);
  return emulator_meet(emulator_pack((uint32_t)vote), emulator_votes, 0).word[0];
}
static inline bool __all_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }
static inline bool __any_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
static inline void __syncwarp(uint32_t mask = 0xffffffffu) { (void)__ballot_sync(mask, true); }
static inline uint32_t emulator_reduction(uint32_t mask, uint32_t value, uint32_t kind) {
  EMULATOR_FULL(mask);
  return emulator_meet(emulator_pack(value), emulator_reduce, kind).word[0];
}
static inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value) { return emulator_reduction(mask, value, 0); }
static inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t value) { return emulator_reduction(mask, value, 1); }
static inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t value) { return emulator_reduction(mask, value, 2); }

/* --------------------------------------------------------------- other functions */

static inline void __syncthreads() { emulator_barrier(0, 0); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
template <class T>
static inline T __ldcg(const T* at) {
  return *at;
}
template <class T>
static inline T __ldcs(const T* at) {
  return *at;
}
template <class T>
struct emulator_same {
  using type = T;
}; /* not deduced */
template <class T>
static inline T atomicAdd(T* at, typename emulator_same<T>::type by) {
  const T old = *at;
  *at = old + by;
  return old;
}
template <class T>
static inline T atomicOr(T* at, typename emulator_same<T>::type by) {
  const T old = *at;
  *at = old | by;
  return old;
}
template <class T>
static inline T atomicMax(T* at, typename emulator_same<T>::type by) {
  const T old = *at;
  *at = old > by ? old : by;
  return old;
}
template <class T>
static inline T atomicMin(T* at, typename emulator_same<T>::type by) {
  const T old = *at;
  *at = old < by ? old : by;
  return old;
}
template <class T>
static inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
static inline T max(T a, T b) {
  return a < b ? b : a;
}
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
static inline uint32_t __float_as_uint(float x) { return emulator_pack(x).word[0]; }
static inline int __float_as_int(float x) { return (int)emulator_pack(x).word[0]; }
static inline float __uint_as_float(uint32_t x) { return emulator_unpack<float>(emulator_pack(x)); }
static inline float __int_as_float(int x) { return __uint_as_float((uint32_t)x); }
static inline float __fmul_rn(float a, float b) { return a * b; } /* compiled without contraction */
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline void sincospif(float x, float* sine, float* cosine) {
  *sine = (float)sin((double)x * 3.14159265358979323846);
  *cosine = (float)cos((double)x * 3.14159265358979323846);
}
/* Byte i of the result is byte `order >> 4 i` of the eight of y, x. */
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t order) {
  const uint64_t both = (uint64_t)y << 32 | x;
  uint32_t made = 0;
  for (uint32_t i = 0; i < 4; i++)
    made |= (uint32_t)(both >> ((order >> (4 * i) & 7u) * 8) & 0xffu) << (8 * i);
  return made;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
using std::isfinite;
using std::isinf;
using std::isnan;

/* ------------------------------------------------------------------- half types */

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __half {
  _Float16 value;
};
struct __half2 {
  __half x, y;
};
static inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (std::isnan(value)) return {0x7fff};
  return {(uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
static inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float((uint32_t)value.bits << 16); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
static inline __half __float2half_rn(float value) { return {(_Float16)value}; }
static inline float __half2float(__half value) { return (float)value.value; }
static inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
static inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }

/* ---------------------------------------------------- instead of kernels_cu/ptx.cuh */

#define CLB_PTX_CUH
#include "../../kernels_cu/abi.h"
#define CLB_WARP 32u
#define CLB_DEVICE static inline

CLB_DEVICE void clb_wait_for_inputs() {}
CLB_DEVICE void clb_release_dependents() {}

CLB_DEVICE uint32_t clb_take_ticket(uint32_t* at) { return (*at)++; }
CLB_DEVICE void clb_acquire_tickets() {}

/* Lane 4 g + q brings a, b and c of its places; products are exact in float, sums in double, rounded once. */
template <float (*WIDEN)(uint32_t)>
static inline void emulator_mma(const emulator_words* in, emulator_words* out, uint32_t) {
  float a[16][16];
  float b[16][8];
  for (uint32_t lane = 0; lane < 32; lane++) {
    const uint32_t g = lane / 4, q = lane % 4;
    for (uint32_t i = 0; i < 8; i++) {
      const uint32_t half = in[lane].word[i / 2] >> (i % 2 * 16) & 0xffffu;
      a[g + (i / 2 % 2) * 8][q * 2 + i % 2 + (i / 4) * 8] = WIDEN(half);
    }
    for (uint32_t i = 0; i < 4; i++)
      b[q * 2 + i % 2 + (i / 2) * 8][g] = WIDEN(in[lane].word[4 + i / 2] >> (i % 2 * 16) & 0xffffu);
  }
  for (uint32_t lane = 0; lane < 32; lane++) {
    for (uint32_t i = 0; i < 4; i++) {
      double sum = 0.0;
      for (uint32_t k = 0; k < 16; k++)
        sum += (double)a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
      out[lane].word[i] = emulator_pack((float)sum).word[0];
    }
  }
}
static inline float emulator_bf16(uint32_t bits) { return __bfloat162float({(uint16_t)bits}); }
static inline float emulator_fp16(uint32_t bits) {
  const uint16_t half = (uint16_t)bits;
  __half value;
  std::memcpy(&value, &half, sizeof half);
  return __half2float(value);
}
template <float (*WIDEN)(uint32_t)>
static inline void emulator_product(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  const emulator_words own = {{a.x, a.y, a.z, a.w, b0, b1, 0, 0}};
  const emulator_words all = emulator_meet(own, emulator_mma<WIDEN>, 0);
  for (uint32_t i = 0; i < 4; i++)
    c[i] += __uint_as_float(all.word[i]);
}
CLB_DEVICE void clb_mma_bf16(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  emulator_product<emulator_bf16>(c, a, b0, b1);
}
CLB_DEVICE void clb_mma_fp16(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  emulator_product<emulator_fp16>(c, a, b0, b1);
}

/* Shared memory lies within 2 GiB of the dynamic part. */
CLB_DEVICE uint32_t clb_shared_address(const void* at) {
  return (uint32_t)(reinterpret_cast<const char*>(at) - reinterpret_cast<const char*>(memory));
}
static inline char* emulator_shared(uint32_t at) { return reinterpret_cast<char*>(memory) + (int32_t)at; }
CLB_DEVICE uint32_t clb_dynamic_shared_bytes() { return emulator_shared_bytes; }
CLB_DEVICE void clb_copy_async(uint32_t to, const void* from) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) __builtin_trap();
  emulator_copy_later(emulator_shared(to), from, 16);
}
template <uint32_t BYTES>
CLB_DEVICE void clb_copy_async_few(uint32_t to, const void* from) {
  if (to % BYTES != 0 || reinterpret_cast<uintptr_t>(from) % BYTES != 0) __builtin_trap();
  emulator_copy_later(emulator_shared(to), from, BYTES);
}
CLB_DEVICE void clb_copies_end_group() { emulator_end_group(); }
template <uint32_t PENDING>
CLB_DEVICE void clb_copies_wait() {
  emulator_wait_groups(PENDING);
}
CLB_DEVICE uint4 clb_read_shared(uint32_t at) {
  uint4 value;
  std::memcpy(&value, emulator_shared(at), sizeof value);
  return value;
}
CLB_DEVICE uint32_t clb_read_shared_word(uint32_t at) {
  uint32_t value;
  std::memcpy(&value, emulator_shared(at), sizeof value);
  return value;
}
CLB_DEVICE uint2 clb_read_shared_pair(uint32_t at) {
  uint2 value;
  std::memcpy(&value, emulator_shared(at), sizeof value);
  return value;
}
/* Of products and sums of two fp16 numbers each; a double holds all of them. */
template <class Work>
static inline uint32_t emulator_halves(uint32_t a, uint32_t b, uint32_t c, Work work) {
  uint32_t made = 0;
  for (uint32_t shift = 0; shift < 32; shift += 16) {
    const _Float16 half = (_Float16)work((double)emulator_fp16(a >> shift), (double)emulator_fp16(b >> shift),
                                         (double)emulator_fp16(c >> shift));
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    made |= (uint32_t)bits << shift;
  }
  return made;
}
CLB_DEVICE uint32_t clb_half_add(uint32_t a, uint32_t b) {
  return emulator_halves(a, b, 0, [](double x, double y, double) { return x + y; });
}
CLB_DEVICE uint32_t clb_half_multiply(uint32_t a, uint32_t b) {
  return emulator_halves(a, b, 0, [](double x, double y, double) { return x * y; });
}
CLB_DEVICE uint32_t clb_half_fma(uint32_t a, uint32_t b, uint32_t c) {
  return emulator_halves(a, b, c, [](double x, double y, double z) { return x * y + z; });
}
CLB_DEVICE void clb_write_shared(uint32_t at, const uint4& value) {
  std::memcpy(emulator_shared(at), &value, sizeof value);
}
template <bool TRANSPOSED>
static inline void emulator_matrices(const emulator_words* in, emulator_words* out, uint32_t) {
  for (uint32_t lane = 0; lane < 32; lane++)
    for (uint32_t m = 0; m < 4; m++)
      for (uint32_t i = 0; i < 2; i++) {
        const uint32_t row = TRANSPOSED ? lane % 4 * 2 + i : lane / 4;
        const uint32_t col = TRANSPOSED ? lane / 4 : lane % 4 * 2 + i;
        const uint32_t at = in[m * 8 + row].word[0];
        if (at % 16 != 0) __builtin_trap();
        std::memcpy(reinterpret_cast<char*>(&out[lane].word[m]) + i * 2, emulator_shared(at) + col * 2, 2);
      }
}
CLB_DEVICE uint4 clb_load_matrices(uint32_t row) {
  return emulator_unpack<uint4>(emulator_meet(emulator_pack(row), emulator_matrices<false>, 0));
}
CLB_DEVICE uint4 clb_load_matrices_transposed(uint32_t row) {
  return emulator_unpack<uint4>(emulator_meet(emulator_pack(row), emulator_matrices<true>, 0));
}
CLB_DEVICE uint32_t clb_and_or(uint32_t value, uint32_t mask, uint32_t bits) { return (value & mask) | bits; }
CLB_DEVICE uint32_t clb_not_ahead(uint32_t value) { return value; }
CLB_DEVICE void clb_barrier(uint32_t barrier, uint32_t threads) { emulator_barrier(barrier, threads); }
CLB_DEVICE void clb_zero_shared(uint32_t at) { std::memset(emulator_shared(at), 0, 16); }

#endif /* CLB_EMULATOR_H */
