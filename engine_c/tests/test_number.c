/* test_number.c: 16-bit numbers, all of them. Sixteen at once: test_lanes.c. */
#include "number.h"

#include "float_mode.h"
#include "test.h"

static double half_value(uint32_t half) {
  const double sign = (half & 0x8000u) != 0 ? -1.0 : 1.0;
  const int exponent = (int)((half >> 10) & 31u);
  const double fraction = (double)(half & 1023u);
  return exponent == 0 ? sign * ldexp(fraction, -24) : sign * ldexp(1024.0 + fraction, exponent - 25);
}

/* Every finite half widens to its exact value, also while the engine's float mode is on. */
static void halves_widen_exactly(void) {
  const clb_float_mode mode = clb_float_mode_enter();
  for (uint32_t half = 0; half < 65536; ++half) {
    if ((half & 0x7c00u) != 0x7c00u) {
      CHECK((double)clb_float_of_half((uint16_t)half) == half_value(half));
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
  for (uint32_t value = 0; value < 65536; ++value) {
    CHECK_EQ(clb_bits_of_float(clb_float_of_bf16((uint16_t)value)), value << 16);
  }
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(halves_widen_exactly), TEST(halves_round_to_nearest_even),
                                   TEST(halves_saturate), TEST(bf16_widens_exactly)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
