/*
 * test_lanes.c: sixteen numbers at once. Compiled for each instruction set as what lanes16.h then is; skipped where the
 * machine cannot run it.
 */
#include "exact_math.h"
#include "float_mode.h"
#include "lanes16.h"
#include "test.h"

enum { SKIPPED = 77, LANES = CLB_LANES16 };

/* Every finite half and every bf16 number widens exactly, also while the engine's float mode is on. */
static void narrow_numbers_widen_exactly(void) {
  const clb_float_mode mode = clb_float_mode_enter();
  for (uint32_t first = 0; first < 65536; first += LANES) {
    uint16_t narrow[LANES];
    float halves[LANES];
    float bf16[LANES];
    for (uint32_t l = 0; l < LANES; ++l) {
      narrow[l] = (uint16_t)(first + l);
    }
    clb_lanes16_store(clb_lanes16_load_half(narrow), halves);
    clb_lanes16_store(clb_lanes16_load_bf16(narrow), bf16);
    for (uint32_t l = 0; l < LANES; ++l) {
      CHECK_EQ(clb_bits_of_float(bf16[l]), (first + l) << 16);
      if ((narrow[l] & 0x7c00u) != 0x7c00u) {
        CHECK_EQ(clb_bits_of_float(halves[l]), clb_bits_of_float(clb_float_of_half(narrow[l])));
      }
    }
  }
  clb_float_mode_leave(mode);
}

/* Rounding to halves is that of clb_half_of_float: to nearest even, what is too large to the largest. */
static void halves_round_and_saturate(void) {
  uint64_t state = 1;
  for (uint32_t i = 0; i < 20000; ++i) {
    float wide[LANES];
    uint16_t halves[LANES];
    for (uint32_t l = 0; l < LANES; ++l) {
      const uint32_t bits = (uint32_t)clb_test_random(&state);
      /* exponents of 2^-31 to 2^32: from below the least half to beyond the largest */
      wide[l] = clb_float_of_bits((bits & 0x807fffffu) | ((96u + bits % 64u) << 23));
    }
    wide[i % LANES] = i % 3 == 0 ? INFINITY : 65520.0f;
    clb_lanes16_store_half(clb_lanes16_load(wide), halves);
    for (uint32_t l = 0; l < LANES; ++l) {
      CHECK_EQ(halves[l], clb_half_of_float(wide[l]));
    }
  }
}

/* exp is right to 3e-7 up to 87, zero below -87 and of minus infinity, and NaN of NaN. */
static void exp_is_right(void) {
  float values[LANES] = {-87.5f, -1e9f, -INFINITY, NAN, 0.0f};
  float results[LANES];
  clb_lanes16_store(clb_lanes16_exp(clb_lanes16_load(values)), results);
  CHECK(results[0] == 0.0f && results[1] == 0.0f && results[2] == 0.0f && isnan(results[3]) && results[4] == 1.0f);
  for (int32_t i = -1740; i <= 1740; ++i) {
    for (int32_t l = 0; l < LANES; ++l) {
      values[l] = fminf((float)i * 0.05f + (float)l * 0.003f, 87.0f);
    }
    clb_lanes16_store(clb_lanes16_exp(clb_lanes16_load(values)), results);
    for (uint32_t l = 0; l < LANES; ++l) {
      CHECK_NEAR((double)results[l] / exp((double)values[l]), 1.0, 3e-7);
    }
  }
}

/* silu(g) * u = g / (1 + exp(-g)) * u. */
static void silu_is_right(void) {
  for (int32_t i = -2000; i <= 2000; ++i) {
    const float gate = (float)i * 0.05f;
    float results[LANES];
    clb_lanes16_store(clb_lanes16_silu_times(clb_lanes16_spread(gate), clb_lanes16_spread(-3.0f)), results);
    const double wanted = (double)gate / (1.0 + exp(-(double)gate)) * -3.0;
    for (uint32_t l = 0; l < LANES; ++l) {
      CHECK_NEAR(results[l], wanted, 1e-6 * fabs(wanted) + 1e-35);
    }
  }
}

/* Lanes are added as the same tree everywhere; the largest one is found in any lane; loads and stores of some lanes
   touch no others. */
static void lanes_become_one_number(void) {
  uint64_t state = 2;
  for (uint32_t i = 0; i < 200; ++i) {
    float s[LANES];
    for (uint32_t l = 0; l < LANES; ++l) {
      s[l] = (float)(clb_test_random(&state) >> 40) * 0x1p-23f - 1.0f;
    }
    float tree[LANES];
    memcpy(tree, s, sizeof tree);
    for (uint32_t width = LANES / 2; width > 0; width /= 2) {
      for (uint32_t l = 0; l < width; ++l) {
        tree[l] = tree[l] + tree[l + width];
      }
    }
    CHECK(clb_lanes16_sum(clb_lanes16_load(s)) == tree[0]);
    s[i % LANES] = 7.0f;
    CHECK(clb_lanes16_largest(clb_lanes16_load(s)) == 7.0f);
  }
  const float values[LANES] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  float results[LANES] = {0};
  clb_lanes16_store_some(clb_lanes16_load(values), 5, results);
  CHECK(results[4] == 5.0f && results[5] == 0.0f);
  clb_lanes16_store(clb_lanes16_load_some(values, 5), results);
  CHECK(results[4] == 5.0f && results[5] == 0.0f && results[15] == 0.0f);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(narrow_numbers_widen_exactly), TEST(halves_round_and_saturate),
                                   TEST(exp_is_right), TEST(silu_is_right), TEST(lanes_become_one_number)};
  return clb_isa_supported() == 1 ? clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]) : SKIPPED;
}
