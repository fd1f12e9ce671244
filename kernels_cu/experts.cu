/*
 * experts.cu: the FFN of a layer for at most 64 rows: routed experts and the shared one, each once.
 *
 * Operation  clb_expert_gate_up_{bf16,fp16}, then clb_expert_down_{bf16,fp16}: see abi.h. No permutation pass: every
 *            block finds the rows of each expert from the (T, K) indices and works on (expert, row tile) pairs. The
 *            kernels with _8 are for at most 8 rows: the same bits, fewer registers, so that more runs beside them.
 * Reference  tests/cuda/test_experts.py (numpy, float64).
 * Grid       gate_up: blocks of 256 threads, CLB_GATE_UP_BLOCKS a multiprocessor; block b takes pairs b, + gridDim.x,
 *            ..., the shared expert's first. down: hidden / 16 blocks of 512 threads, each owning 16 rows of the result
 *            for all experts, so that ranks are summed in order where they are; its two groups of 8 warps share the
 *            experts. Dynamic shared memory: CLB_GATE_UP_SHARED; CLB_DOWN_RING and the results.
 * Needs      sm_80; sm_90 for programmatic edges.
 * Roofline   bytes of the experts in use; at up to 8 rows an expert 8 flops a byte: memory-bound. Qwen3-30B at one row:
 *            gate_up 8 x 6.3 MB = 11.7 us, down 8 x 3.1 MB = 5.9 us at 4.3 TB/s. Target: 95 %.
 *            Measured (H200, 2026-11-29): 19.4 and 12.7 us at one row, 83 and 62 us at 8, 174 and 132 us at 32.
 */
#include "few.cuh"

#define GATE_UP_STAGES 8u
#define DOWN_STAGES 8u
#define DOWN_GROUPS (CLB_DOWN_THREADS / CLB_MATMUL_THREADS)
#define PASS_STEPS 4u /* steps of 8 rows that are held at once; more rows take the weights again, out of L2 */
#define PASS_ROWS (PASS_STEPS * CLB_STEP)
static_assert(clb_ring<2u, GATE_UP_STAGES>::bytes == CLB_GATE_UP_SHARED, "abi.h says what the host reserves");
static_assert(DOWN_GROUPS * clb_ring<1u, DOWN_STAGES>::bytes == CLB_DOWN_RING, "abi.h says what the host reserves");

#define MAX_PLACES (CLB_FEW_ROWS * CLB_ROUTER_MAX_K)

/* Which rows each expert has, for all experts that have any. Item 0 is the lowest of them. */
struct buckets {
  uint32_t rows[CLB_ROUTER_MAX_EXPERTS][2]; /* bit t: row t chose the expert */
  uint16_t first[CLB_ROUTER_MAX_EXPERTS];   /* of its places */
  uint16_t item_expert[CLB_ROUTER_MAX_EXPERTS];
  uint16_t places[MAX_PLACES]; /* t * K + rank: by expert, then row */
  uint32_t items;
};

CLB_DEVICE void clear_buckets(buckets& b, uint32_t experts) {
  for (uint32_t i = threadIdx.x; i < experts; i += blockDim.x)
    b.rows[i][0] = b.rows[i][1] = 0u;
}

CLB_DEVICE uint32_t rows_of(const buckets& b, uint32_t expert) {
  return (uint32_t)(__popc(b.rows[expert][0]) + __popc(b.rows[expert][1]));
}

/* Numbers the experts in use and gives each its part of `places`; by one warp, a lane a range of experts. */
CLB_DEVICE void number_items(buckets& b, uint32_t experts) {
  const uint32_t lane = threadIdx.x;
  const uint32_t each = (experts + CLB_WARP - 1u) / CLB_WARP;
  const uint32_t begin = min(lane * each, experts);
  const uint32_t end = min(begin + each, experts);
  uint32_t own = 0u; /* experts in use above bit 16, assignments below: at most 1,024 */
  for (uint32_t e = begin; e < end; e++) {
    const uint32_t count = rows_of(b, e);
    own += count + ((count > 0u) ? 65536u : 0u);
  }
  uint32_t sum = own;
#pragma unroll
  for (uint32_t step = 1u; step < CLB_WARP; step *= 2u) {
    const uint32_t before = __shfl_up_sync(CLB_FULL_WARP, sum, step);
    sum += (lane >= step) ? before : 0u;
  }
  uint32_t at = sum - own;
  for (uint32_t e = begin; e < end; e++) {
    const uint32_t count = rows_of(b, e);
    b.first[e] = (uint16_t)at;
    if (count > 0u) b.item_expert[at >> 16] = (uint16_t)e;
    at += count + ((count > 0u) ? 65536u : 0u);
  }
  if (lane == CLB_WARP - 1u) b.items = sum >> 16;
}

/* `count` places; those of this thread, kept in registers between the two passes over them. */
struct own_choices {
  static constexpr uint32_t MOST = MAX_PLACES / CLB_MATMUL_THREADS;
  uint32_t expert[MOST];

  /* Past L1: they may come from before the predecessor. */
  __device__ __forceinline__ own_choices(const uint32_t* indices, uint32_t count) {
#pragma unroll
    for (uint32_t i = 0u; i < MOST; i++) {
      const uint32_t place = threadIdx.x + i * blockDim.x;
      expert[i] = (place < count) ? __ldcg(indices + place) : CLB_NONE;
    }
  }
};

/* After clear_buckets and a barrier; ends with a barrier. */
CLB_DEVICE void fill_buckets(buckets& b, const own_choices& own, uint32_t k_max, uint32_t experts) {
#pragma unroll
  for (uint32_t i = 0u; i < own_choices::MOST; i++) {
    if (own.expert[i] == CLB_NONE) continue;
    const uint32_t row = (threadIdx.x + i * blockDim.x) / k_max;
    atomicOr(&b.rows[own.expert[i]][row / 32u], 1u << row % 32u);
  }
  __syncthreads();
  if (threadIdx.x < CLB_WARP) number_items(b, experts);
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0u; i < own_choices::MOST; i++) {
    const uint32_t expert = own.expert[i];
    if (expert == CLB_NONE) continue;
    const uint32_t place = threadIdx.x + i * blockDim.x;
    const uint32_t row = place / k_max;
    const uint32_t low = b.rows[expert][0];
    const uint32_t below = (1u << row % 32u) - 1u;
    const uint32_t earlier = (row < 32u) ? __popc(low & below) : __popc(low) + __popc(b.rows[expert][1] & below);
    b.places[b.first[expert] + earlier] = (uint16_t)place;
  }
  __syncthreads();
}

CLB_DEVICE uint32_t passes_of(uint32_t rows, uint32_t pass_rows) { return (rows + pass_rows - 1u) / pass_rows; }

CLB_DEVICE const unsigned char* lane_bytes(uint64_t weights, uint32_t row_tile, uint32_t across, uint32_t piece) {
  return reinterpret_cast<const unsigned char*>(weights) + ((uint64_t)row_tile * across + piece) * CLB_PIECE +
         threadIdx.x % CLB_WARP * 16u;
}

/* ------------------------------------------------------------------ gate and up */

struct gate_up_shared {
  clb_sums<2> sums;
  buckets choice;
  uint64_t gate[CLB_ROUTER_MAX_EXPERTS + 1u]; /* weights of each expert, then of the shared one */
  uint64_t up[CLB_ROUTER_MAX_EXPERTS + 1u];
  float scale[CLB_FEW_ROWS];
};

/* What pair `unit` is: a row tile of the shared expert, or of an expert in use. */
struct gate_up_unit {
  uint32_t expert; /* expert_count: the shared one */
  uint32_t row_tile;
  uint32_t rows;
  uint32_t first; /* of its places; NONE: the shared expert, whose places are the rows */

  __device__ __forceinline__ gate_up_unit(const clb_expert_gate_up_args& a, const buckets& b, uint32_t unit,
                                          uint32_t row_count) {
    const uint32_t shared_tiles = a.shared_width / CLB_TILE;
    if (unit < shared_tiles) {
      expert = a.expert_count;
      row_tile = unit;
      rows = row_count;
      first = CLB_NONE;
      return;
    }
    const uint32_t tiles = a.width / CLB_TILE;
    expert = b.item_expert[(unit - shared_tiles) / tiles];
    row_tile = (unit - shared_tiles) % tiles;
    rows = rows_of(b, expert);
    first = b.first[expert];
  }
};

struct gate_up_source {
  const clb_expert_gate_up_args& a;
  const gate_up_shared& shared;
  const clb_slice& slice;
  const unsigned char* at[2];
  uint32_t unit;
  uint32_t units; /* known so far */
  uint32_t row_count;
  uint32_t pass_rows;
  uint32_t passes; /* left of this unit, this one included; 0: not opened yet */
  uint32_t piece;

  __device__ __forceinline__ gate_up_source(const clb_expert_gate_up_args& args, const gate_up_shared& memory,
                                            const clb_slice& part, uint32_t rows, uint32_t rows_of_pass)
      : a(args),
        shared(memory),
        slice(part),
        unit(blockIdx.x),
        units(0u),
        row_count(rows),
        pass_rows(rows_of_pass),
        passes(0u),
        piece(0u) {}

  __device__ __forceinline__ void rewind(const gate_up_unit& now) {
    const uint32_t across = a.hidden / CLB_TILE;
    at[0] = lane_bytes(shared.gate[now.expert], now.row_tile, across, slice.begin);
    at[1] = lane_bytes(shared.up[now.expert], now.row_tile, across, slice.begin);
    piece = slice.begin;
  }

  __device__ __forceinline__ bool take(const unsigned char* (&next)[2]) {
    if (unit >= units || slice.begin == slice.end) return false;
    if (passes == 0u) {
      const gate_up_unit now(a, shared.choice, unit, row_count);
      passes = max(passes_of(now.rows, pass_rows), 1u);
      rewind(now);
    }
    next[0] = at[0];
    next[1] = at[1];
    at[0] += CLB_PIECE;
    at[1] += CLB_PIECE;
    piece++;
    if (piece < slice.end) return true;
    /* The slice is through: again for the next rows, or on to the next pair. */
    passes--;
    if (passes > 0u) {
      rewind(gate_up_unit(a, shared.choice, unit, row_count));
    } else {
      unit += gridDim.x;
    }
    return true;
  }
};

CLB_DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

template <class P, uint32_t STEPS>
CLB_DEVICE void gate_up_pass(const clb_expert_gate_up_args& a, clb_ring<2, GATE_UP_STAGES>& ring,
                             gate_up_source& source, const clb_slice& slice, gate_up_shared& shared,
                             const gate_up_unit& unit, uint32_t begin, uint32_t& parity) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const bool routed = unit.first != CLB_NONE;
  uint32_t offsets[STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint32_t i = begin + s * CLB_STEP + lane / 4u;
    uint32_t row = i;
    if (i < unit.rows && routed) row = shared.choice.places[unit.first + i] / a.k_max;
    offsets[s] = (i < unit.rows) ? row * a.hidden + lane % 4u * 4u : CLB_NONE;
  }
  clb_chunk<STEPS> chunk;
  chunk.read(a.input, offsets, slice.begin, slice.end);
  float sum[2][STEPS][4];
  clb_multiply<P, 2, STEPS>(ring, source, slice, a.input, offsets, chunk, sum);
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    shared.sums.put(parity, 0u, sum[0][s]);
    shared.sums.put(parity, 1u, sum[1][s]);
    __syncthreads();
    const uint32_t i = begin + s * CLB_STEP + threadIdx.x % 64u / 8u;
    if (clb_finisher() == s && i < unit.rows) {
      const uint32_t place = routed ? shared.choice.places[unit.first + i] : i;
      const float scale = shared.scale[routed ? place / a.k_max : i];
      const float2 gate = shared.sums.template take<P>(parity, 0u);
      const float2 up = shared.sums.template take<P>(parity, 1u);
      uint32_t* to =
          routed ? a.activation + (uint64_t)place * a.width : a.shared_activation + (uint64_t)place * a.shared_width;
      clb_split_store<P>(to, unit.row_tile * CLB_TILE + threadIdx.x % 8u * 2u, silu(gate.x * scale) * (up.x * scale),
                         silu(gate.y * scale) * (up.y * scale));
    }
    parity ^= 1u;
  }
}

/* MOST_STEPS: of 8 rows, that any expert has: 1, or PASS_STEPS in passes. Before the wait: tables of weights, and the
   first weights of the shared expert. */
template <class P, uint32_t MOST_STEPS>
CLB_DEVICE void gate_up(const clb_expert_gate_up_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ gate_up_shared shared;
  const uint32_t count = min(__ldcg(a.row_count), MOST_STEPS == 1u ? CLB_STEP : CLB_FEW_ROWS);
  const clb_slice slice(a.hidden / CLB_TILE);
  const uint32_t shared_tiles = a.shared_width / CLB_TILE;
  for (uint32_t e = threadIdx.x; e < a.expert_count; e += CLB_MATMUL_THREADS) {
    shared.gate[e] = a.experts[e].gate;
    shared.up[e] = a.experts[e].up;
  }
  if (threadIdx.x == 0u && shared_tiles > 0u) {
    shared.gate[a.expert_count] = a.shared->gate;
    shared.up[a.expert_count] = a.shared->up;
  }
  clear_buckets(shared.choice, a.expert_count);
  __syncthreads();
  gate_up_source source(a, shared, slice, count, MOST_STEPS * CLB_STEP);
  clb_ring<2, GATE_UP_STAGES> ring(memory);
  uint32_t started = 0u;
  source.units = shared_tiles;
  ring.start(source, started);
  clb_wait_for_inputs();
  clb_release_dependents();
  const own_choices own(a.indices, (a.expert_count > 0u) ? count * a.k_max : 0u);
  for (uint32_t row = clb_group_warp(); row < count; row += CLB_WARPS) {
    const uint32_t tiles = a.hidden / CLB_TILE;
    const float scale = clb_row_scale(a.sumsq + (uint64_t)row * tiles, tiles, a.hidden, a.epsilon);
    if (threadIdx.x % CLB_WARP == 0u) shared.scale[row] = scale;
  }
  fill_buckets(shared.choice, own, a.k_max, a.expert_count);
  source.units = shared_tiles + shared.choice.items * (a.width / CLB_TILE);
  ring.start(source, started);
  ring.complete_start(started);
  uint32_t parity = 0u;
#pragma unroll 1
  for (uint32_t u = blockIdx.x; u < source.units; u += gridDim.x) {
    const gate_up_unit unit(a, shared.choice, u, count);
#pragma unroll 1
    for (uint32_t begin = 0u; begin < unit.rows; begin += MOST_STEPS * CLB_STEP) {
      const uint32_t rows = unit.rows - begin;
      if (MOST_STEPS == 1u || rows <= 8u) {
        gate_up_pass<P, 1>(a, ring, source, slice, shared, unit, begin, parity);
      } else if (rows <= 16u) {
        gate_up_pass<P, 2>(a, ring, source, slice, shared, unit, begin, parity);
      } else {
        gate_up_pass<P, MOST_STEPS>(a, ring, source, slice, shared, unit, begin, parity);
      }
    }
  }
  clb_copies_wait<0>();
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_GATE_UP_BLOCKS)
    clb_expert_gate_up_bf16(const __grid_constant__ clb_expert_gate_up_args a) {
  gate_up<clb_bf16, PASS_STEPS>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_MATMUL_THREADS, CLB_GATE_UP_BLOCKS)
    clb_expert_gate_up_fp16(const __grid_constant__ clb_expert_gate_up_args a) {
  gate_up<clb_fp16, PASS_STEPS>(a);
}

extern "C" __global__ void __maxnreg__(88)
    clb_expert_gate_up_8_bf16(const __grid_constant__ clb_expert_gate_up_args a) {
  gate_up<clb_bf16, 1>(a);
}

extern "C" __global__ void __maxnreg__(88)
    clb_expert_gate_up_8_fp16(const __grid_constant__ clb_expert_gate_up_args a) {
  gate_up<clb_fp16, 1>(a);
}

/* ------------------------------------------------------------------------- down */

struct down_shared {
  clb_sums<1> sums[DOWN_GROUPS];
  buckets choice;
  uint64_t weights[CLB_ROUTER_MAX_EXPERTS + 1u]; /* of each expert, then of the shared one */
};

/* One expert of a block's list: item 0 is the shared expert where there is one. */
struct down_item {
  uint32_t expert; /* expert_count: the shared one */
  uint32_t width;
  uint32_t rows;
  uint32_t first; /* as in gate_up_unit */

  __device__ __forceinline__ down_item(const clb_expert_down_args& a, const buckets& b, uint32_t item,
                                       uint32_t row_count) {
    const uint32_t shared_items = (a.shared_width > 0u) ? 1u : 0u;
    if (item < shared_items) {
      expert = a.expert_count;
      width = a.shared_width;
      rows = row_count;
      first = CLB_NONE;
      return;
    }
    expert = b.item_expert[item - shared_items];
    width = a.width;
    rows = rows_of(b, expert);
    first = b.first[expert];
  }
};

/* Which items a group takes: the first takes the shared expert, the second as many others as weigh as much, the rest by
   turns. Who computes a result changes no bit of it. */
struct down_share {
  uint32_t group;
  uint32_t shared_items;
  uint32_t lead; /* routed items that the second group takes first */

  __device__ __forceinline__ explicit down_share(const clb_expert_down_args& a) {
    group = threadIdx.x / CLB_MATMUL_THREADS;
    shared_items = (a.shared_width > 0u) ? 1u : 0u;
    lead = (shared_items > 0u && a.width > 0u) ? a.shared_width / a.width : 0u;
  }

  __device__ __forceinline__ bool takes(uint32_t item) const {
    if (item < shared_items) return group == 0u;
    const uint32_t routed = item - shared_items;
    return group == ((routed < lead) ? 1u : (routed - lead) % DOWN_GROUPS);
  }
};

struct down_source {
  const clb_expert_down_args& a;
  const down_shared& shared;
  const down_share& share;
  const unsigned char* at;
  uint32_t row_tile;
  uint32_t items;
  uint32_t row_count;
  uint32_t pass_rows;
  uint32_t item;
  uint32_t passes; /* left of this item, without the current one */
  uint32_t left;   /* pieces of this pass */
  bool open;       /* the item is begun */

  __device__ __forceinline__ down_source(const clb_expert_down_args& args, const down_shared& memory,
                                         const down_share& part, uint32_t rows, uint32_t rows_of_pass)
      : a(args),
        shared(memory),
        share(part),
        row_tile(blockIdx.x),
        items(memory.choice.items + part.shared_items),
        row_count(rows),
        pass_rows(rows_of_pass),
        item(0u),
        passes(0u),
        left(0u),
        open(false) {}

  __device__ __forceinline__ bool take(const unsigned char* (&next)[1]) {
    while (left == 0u) {
      if (row_tile >= a.hidden / CLB_TILE || items == 0u) return false;
      if (!open || passes == 0u) {
        if (open) item++;
        while (item < items && !share.takes(item))
          item++;
        open = item < items;
        if (!open) {
          item = 0u;
          row_tile += gridDim.x;
          continue;
        }
      }
      const down_item now(a, shared.choice, item, row_count);
      if (passes == 0u) passes = max(passes_of(now.rows, pass_rows), 1u);
      passes--;
      const uint32_t across = now.width / CLB_TILE;
      const clb_slice slice(across);
      left = slice.end - slice.begin;
      at = lane_bytes(shared.weights[now.expert], row_tile, across, slice.begin);
    }
    next[0] = at;
    at += CLB_PIECE;
    left--;
    return true;
  }
};

/* results: (T * K + T, 16): the tile's rows of every (row, rank), then of the shared expert of every row. */
template <class P, uint32_t STEPS>
CLB_DEVICE void down_pass(const clb_expert_down_args& a, clb_ring<1, DOWN_STAGES>& ring, down_source& source,
                          down_shared& shared, const down_item& item, uint32_t begin, float* results,
                          uint32_t& parity) {
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t group = threadIdx.x / CLB_MATMUL_THREADS;
  const bool routed = item.first != CLB_NONE;
  const uint32_t* input = routed ? a.activation : a.shared_activation;
  uint32_t offsets[STEPS];
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    const uint32_t i = begin + s * CLB_STEP + lane / 4u;
    uint32_t place = i;
    if (i < item.rows && routed) place = shared.choice.places[item.first + i];
    offsets[s] = (i < item.rows) ? place * item.width + lane % 4u * 4u : CLB_NONE;
  }
  const clb_slice slice(item.width / CLB_TILE);
  clb_chunk<STEPS> chunk;
  chunk.read(input, offsets, slice.begin, slice.end);
  float sum[1][STEPS][4];
  clb_multiply<P, 1, STEPS>(ring, source, slice, input, offsets, chunk, sum);
#pragma unroll
  for (uint32_t s = 0u; s < STEPS; s++) {
    shared.sums[group].put(parity, 0u, sum[0][s]);
    clb_barrier(1u + group, CLB_MATMUL_THREADS);
    const uint32_t i = begin + s * CLB_STEP + threadIdx.x % 64u / 8u;
    if (clb_finisher() == s && i < item.rows) {
      const uint32_t at = routed ? shared.choice.places[item.first + i] : source.row_count * a.k_max + i;
      const float2 y = shared.sums[group].template take<P>(parity, 0u);
      *reinterpret_cast<float2*>(results + at * CLB_TILE + threadIdx.x % 8u * 2u) = y;
    }
    parity ^= 1u;
  }
}

/* Weighted ranks in order, then the shared expert, for one row and two columns. */
CLB_DEVICE float2 sum_ranks(const clb_expert_down_args& a, const float* results, const float* weights, uint32_t row,
                            uint32_t count, uint32_t col, float shared_scale) {
  float2 y = make_float2(0.0f, 0.0f);
  const uint32_t ranks = (a.expert_count > 0u) ? a.k_max : 0u;
  for (uint32_t r = 0u; r < ranks; r++) {
    const float weight = weights[row * a.k_max + r];
    if (weight == 0.0f) continue; /* no expert in this rank */
    const float2 part = *reinterpret_cast<const float2*>(results + (row * a.k_max + r) * CLB_TILE + col);
    y.x = fmaf(weight, part.x, y.x);
    y.y = fmaf(weight, part.y, y.y);
  }
  if (a.shared_width > 0u) {
    const float2 part = *reinterpret_cast<const float2*>(results + (count * a.k_max + row) * CLB_TILE + col);
    y.x = fmaf(shared_scale, part.x, y.x);
    y.y = fmaf(shared_scale, part.y, y.y);
  }
  return y;
}

template <class P, uint32_t MOST_STEPS>
CLB_DEVICE void all_items(const clb_expert_down_args& a, clb_ring<1, DOWN_STAGES>& ring, down_source& source,
                          down_shared& shared, const down_share& share, uint32_t items, float* results,
                          uint32_t& parity) {
#pragma unroll 1
  for (uint32_t i = 0u; i < items; i++) {
    if (!share.takes(i)) continue;
    const down_item item(a, shared.choice, i, source.row_count);
#pragma unroll 1
    for (uint32_t begin = 0u; begin < item.rows; begin += MOST_STEPS * CLB_STEP) {
      const uint32_t rows = item.rows - begin;
      if (MOST_STEPS == 1u || rows <= 8u) {
        down_pass<P, 1>(a, ring, source, shared, item, begin, results, parity);
      } else if (rows <= 16u) {
        down_pass<P, 2>(a, ring, source, shared, item, begin, results, parity);
      } else {
        down_pass<P, MOST_STEPS>(a, ring, source, shared, item, begin, results, parity);
      }
    }
  }
}

/* Before the wait: everything that says which weights, and the first of them. A block has 64 rows of 8 threads to
   finish a tile: one pair of columns a thread. */
template <class P, uint32_t MOST_STEPS>
CLB_DEVICE void down(const clb_expert_down_args& a) {
  extern __shared__ uint4 memory[];
  __shared__ down_shared shared;
  const uint32_t count = min(__ldcg(a.row_count), MOST_STEPS == 1u ? CLB_STEP : CLB_FEW_ROWS);
  const uint32_t choices = (a.expert_count > 0u) ? count * a.k_max : 0u;
  float* results = reinterpret_cast<float*>(memory + CLB_DOWN_RING / sizeof(uint4));
  float* weights = results + (count * a.k_max + count) * CLB_TILE;
  const own_choices own(a.indices, choices);
  for (uint32_t i = threadIdx.x; i < choices; i += CLB_DOWN_THREADS)
    weights[i] = __ldcg(a.weights + i);
  for (uint32_t e = threadIdx.x; e < a.expert_count; e += CLB_DOWN_THREADS)
    shared.weights[e] = a.experts[e].down;
  if (threadIdx.x == 0u && a.shared_width > 0u) shared.weights[a.expert_count] = a.shared->down;
  clear_buckets(shared.choice, a.expert_count);
  __syncthreads();
  fill_buckets(shared.choice, own, a.k_max, a.expert_count);
  const down_share share(a);
  down_source source(a, shared, share, count, MOST_STEPS * CLB_STEP);
  clb_ring<1, DOWN_STAGES> ring(memory);
  uint32_t started = 0u;
  ring.start(source, started);
  ring.complete_start(started);
  const uint32_t row = threadIdx.x / 8u;
  const uint32_t pair = threadIdx.x % 8u * 2u;
  const bool valid = row < count;
  const clb_stream stream = {a.residual, a.next_norm, a.next_input, a.next_sumsq, a.hidden};
  clb_wait_for_inputs();
  clb_release_dependents();
  const float shared_scale = (a.shared_scale != nullptr && valid) ? a.shared_scale[row] : 1.0f;
  const uint32_t items = (count > 0u) ? source.items : 0u;
  uint32_t parity = 0u;
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < a.hidden / CLB_TILE; tile += gridDim.x) {
    const uint32_t col = tile * CLB_TILE + pair;
    const float2 norm = clb_read_pair(a.next_norm + col, true);
    const float2 x = clb_read_pair(a.residual + (uint64_t)row * a.hidden + col, valid);
    all_items<P, MOST_STEPS>(a, ring, source, shared, share, items, results, parity);
    __syncthreads();
    float2 y = make_float2(0.0f, 0.0f);
    if (valid) y = sum_ranks(a, results, weights, row, count, pair, shared_scale);
    clb_store_residual<P>(stream, row, col, make_float2(x.x + y.x, x.y + y.y), norm, valid);
    __syncthreads();
  }
  clb_copies_wait<0>();
}

extern "C" __global__ void __launch_bounds__(CLB_DOWN_THREADS, 1)
    clb_expert_down_bf16(const __grid_constant__ clb_expert_down_args a) {
  down<clb_bf16, PASS_STEPS>(a);
}

extern "C" __global__ void __launch_bounds__(CLB_DOWN_THREADS, 1)
    clb_expert_down_fp16(const __grid_constant__ clb_expert_down_args a) {
  down<clb_fp16, PASS_STEPS>(a);
}

extern "C" __global__ void __maxnreg__(84) clb_expert_down_8_bf16(const __grid_constant__ clb_expert_down_args a) {
  down<clb_bf16, 1>(a);
}

extern "C" __global__ void __maxnreg__(84) clb_expert_down_8_fp16(const __grid_constant__ clb_expert_down_args a) {
  down<clb_fp16, 1>(a);
}
