/* test_number.c: 16-bit numbers, all of them, one by one and eight at once; exp in lanes; one order of additions. */
#include "number.h"

#include "exact_math.h"
#include "float_mode.h"
#include "lanes.h"
#include "test.h"

static double half_value(uint32_t half) {
  const double sign = (half & 0x8000u) != 0 ? -1.0 : 1.0;
  const int exponent = (int)((half >> 10) & 31u);
  const double fraction = (double)(half & 1023u);
  return exponent == 0 ? sign * ldexp(fraction, -24) : sign * ldexp(1024.0 + fraction, exponent - 25);
}

/* Every finite half widens to its exact value, alone and in lanes, also while the engine's float mode is on. */
static void halves_widen_exactly(void) {
  const clb_float_mode mode = clb_float_mode_enter();
  for (uint32_t half = 0; half < 65536; half += 8) {
    uint16_t eight[CLB_LANES];
    float wide[CLB_LANES];
    for (uint32_t l = 0; l < CLB_LANES; ++l) {
      eight[l] = (uint16_t)(half + l);
    }
    clb_lanes_store(clb_lanes_load_half(eight), wide);
    for (uint32_t l = 0; l < CLB_LANES && (eight[l] & 0x7c00u) != 0x7c00u; ++l) {
      CHECK((double)clb_float_of_half(eight[l]) == half_value(eight[l]));
      CHECK((double)wide[l] == half_value(eight[l]));
    }
  }
  clb_float_mode_leave(mode);
}

/* Every finite half comes back from fp32; what lies between two goes to the nearer one, ties to even. */
static void halves_round_to_nearest_even(void) {
  for (uint32_t half = 0; half + 1 < 0x7c00u; ++half) {
    const float low = clb_float_of_half((uint16_t)half);
    const float high = clb_float_of_half((uint16_t)(half + 1));
    const float middle = (low + high) / 2;
    CHECK_EQ(clb_half_of_float(low), half);
    CHECK_EQ(clb_half_of_float(-low), half | 0x8000u);
    CHECK_EQ(clb_half_of_float(middle), (half & 1u) == 0 ? half : half + 1);
    CHECK_EQ(clb_half_of_float(nextafterf(middle, 0.0f)), half);
    CHECK_EQ(clb_half_of_float(nextafterf(middle, INFINITY)), half + 1);
  }
}

/* What is too large for a half becomes the largest one. */
static void halves_saturate(void) {
  const float large[] = {65504.0f, 65519.0f, 65520.0f, 1e30f, INFINITY};
  for (uint32_t i = 0; i < 5; ++i) {
    CHECK_EQ(clb_half_of_float(large[i]), 0x7bff);
    CHECK_EQ(clb_half_of_float(-large[i]), 0xfbff);
  }
}

/* Every bf16 number widens to the float whose upper half it is. */
static void bf16_widens_exactly(void) {
  for (uint32_t value = 0; value < 65536; value += 8) {
    uint16_t eight[CLB_LANES];
    float wide[CLB_LANES];
    for (uint32_t l = 0; l < CLB_LANES; ++l) {
      eight[l] = (uint16_t)(value + l);
    }
    clb_lanes_store(clb_lanes_load_bf16(eight), wide);
    for (uint32_t l = 0; l < CLB_LANES; ++l) {
      CHECK_EQ(clb_bits_of_float(wide[l]), (value + l) << 16);
      CHECK_EQ(clb_bits_of_float(clb_float_of_bf16(eight[l])), (value + l) << 16);
    }
  }
}

/* exp in lanes has the bits of clb_exact_exp and is right to 3e-7; far below zero it is zero. */
static void exp_in_lanes_is_exact_exp(void) {
  for (int32_t i = -2000; i <= 1740; ++i) {
    const float x = (float)i * 0.05f;
    const clb_float4 result = clb_float4_exp((clb_float4){x, x - 0.01f, -INFINITY, -1e9f});
    CHECK(result[0] == clb_exact_exp(x));
    CHECK(result[1] == clb_exact_exp(x - 0.01f));
    CHECK(result[2] == 0.0f && result[3] == 0.0f);
    if (x >= -87.0f) {
      CHECK_NEAR((double)result[0] / exp((double)x), 1.0, 3e-7);
    }
  }
}

/* A dot product adds lane by lane and the lanes as a tree, the tail in the first lanes. */
static void dot_has_the_documented_order(void) {
  float a[61];
  float b[61];
  uint64_t state = 3;
  for (uint32_t i = 0; i < 61; ++i) {
    a[i] = (float)(clb_test_random(&state) >> 40) * 0x1p-23f - 1.0f;
    b[i] = (float)(clb_test_random(&state) >> 40) * 0x1p-20f;
  }
  for (size_t count = 0; count <= 61; ++count) {
    volatile float s[8] = {0};
    for (size_t i = 0; i < count; ++i) {
      s[i % 8] += a[i] * b[i];
    }
    CHECK(clb_lanes_dot(a, b, count) == ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7])));
  }
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(halves_widen_exactly),      TEST(halves_round_to_nearest_even),
                                   TEST(halves_saturate),           TEST(bf16_widens_exactly),
                                   TEST(exp_in_lanes_is_exact_exp), TEST(dot_has_the_documented_order)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
