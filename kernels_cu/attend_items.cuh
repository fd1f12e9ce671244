/*
 * attend_items.cuh: the work of a decode step's attention in items, which follow from the rows' lengths alone, and
 * where an item's K and V lie. Device code only; only attend.cu uses it.
 */
#ifndef CLB_ATTEND_ITEMS_CUH
#define CLB_ATTEND_ITEMS_CUH

#include "attention.cuh"

#define QUERIES CLB_ATTEND_HEADS /* heads of an item */
#define POSITIONS 16u            /* of a warp at a time */
#define ROUND (CLB_ATTEND_WARPS * POSITIONS)

/* Which items there are: everything that follows from the rows alone. */
struct plan {
  uint32_t first[CLB_FEW_ROWS + 1u]; /* items of earlier rows; rows beyond the last have none */
  uint32_t slot[CLB_FEW_ROWS];
  uint32_t position[CLB_FEW_ROWS];
};

/* K of a kv head in one run: position p lies at keys + p * head_dim elements, its V `to_values` bytes later. */
struct run {
  unsigned char* keys;
  uint64_t to_values;
};

struct item {
  run prefix; /* positions below prefix_tokens */
  run rest;
  uint32_t prefix_tokens;
  uint32_t row;
  uint32_t kv_head;
  uint32_t head; /* the first query head */
  uint32_t count;
  uint32_t split;
  uint32_t splits;
  uint32_t begin; /* positions */
  uint32_t end;
  uint32_t own; /* the row's position; NONE: an idle row, which has one split without positions */
};

template <class KV>
CLB_DEVICE run run_of(const clb_attention_dims& shape, uint64_t base, uint32_t capacity, uint32_t kv_head,
                      uint32_t first) {
  const uint64_t size = (uint64_t)shape.head_dim * KV::bytes;
  run made;
  made.keys = reinterpret_cast<unsigned char*>(base) + shape.layer_values * KV::bytes * capacity +
              (uint64_t)kv_head * capacity * size - first * size;
  made.to_values = shape.kv_heads * capacity * size;
  return made;
}

/* How many positions a split of `seen` positions takes: from the length alone. */
CLB_DEVICE uint32_t split_length(uint32_t seen) {
  return max((seen + CLB_ATTENTION_SPLITS - 1u) / CLB_ATTENTION_SPLITS, CLB_ATTENTION_SPLIT);
}

CLB_DEVICE uint32_t split_count(uint32_t seen) {
  const uint32_t length = split_length(seen);
  return (seen + length - 1u) / length;
}

/* Items of one split of one row. */
CLB_DEVICE uint32_t head_blocks(const clb_attention_dims& shape) {
  return shape.kv_heads * ((shape.heads / shape.kv_heads + QUERIES - 1u) / QUERIES);
}

CLB_DEVICE void make_plan(const clb_attend_args& a, plan& to) {
  const uint32_t count = min(__ldcg(a.row_count), CLB_FEW_ROWS);
  const uint32_t lane = threadIdx.x % CLB_WARP;
  if (threadIdx.x >= CLB_WARP) return;
  uint32_t before = 0u;
#pragma unroll
  for (uint32_t half = 0u; half < CLB_FEW_ROWS; half += CLB_WARP) {
    const uint32_t t = half + lane;
    uint32_t items = 0u;
    if (t < count) {
      const uint4 row = __ldcg(reinterpret_cast<const uint4*>(a.rows + t));
      to.slot[t] = row.x;
      to.position[t] = row.y;
      const uint32_t seen = row.y + 1u - clb_first_seen(a.shape, row.y);
      items = ((row.x == CLB_NONE) ? 1u : split_count(seen)) * head_blocks(a.shape);
    }
    const uint32_t sum = clb_warp_prefix(items, lane);
    to.first[t] = before + sum - items;
    before += __shfl_sync(CLB_FULL_WARP, sum, CLB_WARP - 1u);
  }
  if (lane == 0u) to.first[CLB_FEW_ROWS] = before;
}

/* Item `number`; false: there are no more. */
template <class KV>
CLB_DEVICE bool find_item(const clb_attend_args& a, const plan& from, uint32_t number, item& to) {
  if (number >= from.first[CLB_FEW_ROWS]) return false;
  const clb_attention_dims& shape = a.shape;
  const uint32_t lane = threadIdx.x % CLB_WARP;
  const uint32_t t = (uint32_t)(__popc(__ballot_sync(CLB_FULL_WARP, from.first[lane + 1u] <= number)) +
                                __popc(__ballot_sync(CLB_FULL_WARP, from.first[lane + CLB_WARP + 1u] <= number)));
  const uint32_t blocks = head_blocks(shape);
  const uint32_t groups = blocks / shape.kv_heads;
  const uint32_t each = shape.heads / shape.kv_heads;
  const uint32_t block = (number - from.first[t]) % blocks;
  const uint32_t slot = from.slot[t];
  const uint32_t position = from.position[t];
  to.row = t;
  to.kv_head = block / groups;
  to.head = to.kv_head * each + block % groups * QUERIES;
  to.count = min(QUERIES, each - block % groups * QUERIES);
  to.split = (number - from.first[t]) / blocks;
  to.splits = 1u;
  to.begin = 0u;
  to.end = 0u;
  to.own = CLB_NONE;
  if (slot == CLB_NONE) return true;
  const uint32_t first = clb_first_seen(shape, position);
  const uint32_t length = split_length(position + 1u - first);
  to.splits = split_count(position + 1u - first);
  to.begin = first + to.split * length;
  to.end = min(to.begin + length, position + 1u);
  to.own = position;
  const clb_device_slot& held = a.slots[slot];
  to.prefix_tokens = held.prefix_tokens;
  to.prefix = run_of<KV>(shape, held.prefix_run, held.prefix_capacity, to.kv_head, 0u);
  to.rest = run_of<KV>(shape, held.own_run, held.own_capacity, to.kv_head, to.prefix_tokens);
  return true;
}

/* K, or V, of a position. */
template <class KV, uint32_t HEAD_DIM>
CLB_DEVICE unsigned char* place(const item& it, uint32_t position, bool values) {
  const bool shared = position < it.prefix_tokens;
  unsigned char* const at = (shared ? it.prefix.keys : it.rest.keys) + (uint64_t)position * (HEAD_DIM * KV::bytes);
  return values ? at + (shared ? it.prefix.to_values : it.rest.to_values) : at;
}

#endif /* CLB_ATTEND_ITEMS_CUH */
