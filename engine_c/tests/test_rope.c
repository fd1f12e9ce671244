/* test_rope.c: rotary embedding against double precision. */
#include "rope.h"

#include "test.h"

/* Each pair (i, i + half) turns by position * inv_freq[i], and the scale multiplies both. */
static void pairs_turn_by_their_angle(void) {
  const float inv_freq[3] = {1.0f, 0.1f, 0.01f};
  const uint32_t positions[] = {0, 1, 17, 4000};
  for (uint32_t p = 0; p < 4; ++p) {
    float table[6];
    float values[12];
    for (uint32_t i = 0; i < 12; ++i) {
      values[i] = (float)i + 1.0f;
    }
    clb_rope_table(positions[p], inv_freq, 3, 1.5f, table);
    clb_rope_apply(table, 3, 2, values);
    for (uint32_t h = 0; h < 2; ++h) {
      for (uint32_t i = 0; i < 3; ++i) {
        const double angle = (double)((float)positions[p] * inv_freq[i]);
        const double a = h * 6 + i + 1;
        const double b = h * 6 + i + 4;
        CHECK_NEAR(values[h * 6 + i], (a * cos(angle) - b * sin(angle)) * 1.5, 1e-5);
        CHECK_NEAR(values[h * 6 + i + 3], (b * cos(angle) + a * sin(angle)) * 1.5, 1e-5);
      }
    }
  }
}

/* Position 0 changes nothing, to the bit. */
static void position_zero_is_identity(void) {
  const float inv_freq[2] = {1.0f, 0.5f};
  float table[4];
  float values[4] = {0.1f, -2.0f, 3.3f, 4.0f};
  clb_rope_table(0, inv_freq, 2, 1.0f, table);
  clb_rope_apply(table, 2, 1, values);
  CHECK(values[0] == 0.1f && values[1] == -2.0f && values[2] == 3.3f && values[3] == 4.0f);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(pairs_turn_by_their_angle), TEST(position_zero_is_identity)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
