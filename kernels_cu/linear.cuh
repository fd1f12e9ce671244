/*
 * linear.cuh: what linear.cu and linear_wide.cu share: what becomes of a result. Device code only.
 *
 * The sum of one result, whichever kernel makes it, is that of few.cuh: the column tiles are cut into 8 slices; tiles
 * of a slice in rising order, each high half of the input, then its low half; then the slices in order.
 */
#ifndef CLB_LINEAR_CUH
#define CLB_LINEAR_CUH

#include "few.cuh"

CLB_DEVICE uint32_t clb_row_tiles(const clb_matmul_args& a) { return (a.rows + CLB_TILE - 1u) / CLB_TILE; }

/* Where row t of the product lies in the input and its sums of squares. */
CLB_DEVICE uint32_t clb_input_row(const clb_matmul_args& a, uint32_t t) {
  return (a.input_rows != nullptr) ? a.input_rows[t] : t;
}

/* This lane's part of the sums of squares of row t; norm(t) from all lanes' parts. */
CLB_DEVICE float clb_input_squares(const clb_matmul_args& a, uint32_t t) {
  if (a.sumsq == nullptr) return 0.0f;
  return clb_row_squares(a.sumsq + (uint64_t)clb_input_row(a, t) * a.sumsq_count, a.sumsq_count);
}
CLB_DEVICE float clb_input_scale(const clb_matmul_args& a, float squares) {
  return (a.sumsq != nullptr) ? clb_scale_of(squares, a.cols, a.epsilon) : 1.0f;
}

/* What finishing two results needs, loaded before the sums are there. */
struct clb_finish_inputs {
  float2 bias;
  float2 norm;
  float2 residual;
};

CLB_DEVICE clb_finish_inputs clb_finish_weights(const clb_matmul_args& a, uint32_t col) {
  clb_finish_inputs in = {};
  if (a.bias != nullptr) {
    in.bias.x = (col < a.rows) ? a.bias[col] : 0.0f;
    in.bias.y = (col + 1u < a.rows) ? a.bias[col + 1u] : 0.0f;
  }
  if (a.residual != nullptr) in.norm = clb_read_pair(a.next_norm + col, col < a.rows);
  return in;
}

CLB_DEVICE void clb_finish_residual(const clb_matmul_args& a, uint32_t row, uint32_t col, bool valid,
                                    clb_finish_inputs& in) {
  if (a.residual != nullptr) in.residual = clb_read_pair(a.residual + (uint64_t)row * a.rows + col, valid);
}

/* The largest of the tile's 16 results of one row, held by 8 lanes in order; the lowest place of equal ones. */
CLB_DEVICE void clb_store_candidate(const clb_matmul_args& a, uint32_t row, uint32_t col, float2 y, bool valid) {
  const float none = __int_as_float((int32_t)0xff800000u);
  const float first = (col < a.rows) ? y.x : none;
  const float second = (col + 1u < a.rows) ? y.y : none;
  bool bad = (col < a.rows && !isfinite(y.x)) || (col + 1u < a.rows && !isfinite(y.y));
  float value = (second > first) ? second : first;
  uint32_t place = (second > first) ? col + 1u : col;
#pragma unroll
  for (uint32_t step = 1u; step < 8u; step *= 2u) {
    const float other = __shfl_xor_sync(CLB_FULL_WARP, value, step);
    const uint32_t where = __shfl_xor_sync(CLB_FULL_WARP, place, step);
    bad = (__shfl_xor_sync(CLB_FULL_WARP, (uint32_t)bad, step) != 0u) || bad;
    if (other > value || (other == value && where < place)) {
      value = other;
      place = where;
    }
  }
  if (valid && threadIdx.x % 8u == 0u) {
    const uint32_t tiles = (a.rows + CLB_TILE - 1u) / CLB_TILE;
    a.candidates[(uint64_t)row * tiles + col / CLB_TILE] = {(int32_t)place, bad ? __int_as_float(0x7fffffff) : value};
  }
}

template <class P>
CLB_DEVICE void clb_finish(const clb_matmul_args& a, uint32_t row, uint32_t col, float2 y, const clb_finish_inputs& in,
                           bool valid) {
  y.x += in.bias.x;
  y.y += in.bias.y;
  if (a.residual != nullptr) {
    const clb_stream stream = {a.residual, a.next_norm, a.next_input, nullptr, a.next_sumsq, a.rows};
    clb_store_residual<P>(stream, row, col, make_float2(in.residual.x + y.x, in.residual.y + y.y), in.norm, valid);
    return;
  }
  if (a.candidates != nullptr) clb_store_candidate(a, row, col, y, valid);
  if (!valid) return;
  float* to = a.output + row * a.output_stride + col;
  if (col < a.rows) to[0] = y.x;
  if (col + 1u < a.rows) to[1] = y.y;
}

#endif /* CLB_LINEAR_CUH */
