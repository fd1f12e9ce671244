/* test_vector.c: row operations. */
#include "vector.h"

#include "test.h"

/* Each element is added, plain or times a factor, and nothing beyond `count` is touched. */
static void elements_are_added(void) {
  const float input[3] = {1.0f, -2.0f, 0.5f};
  float output[4] = {10.0f, 20.0f, 30.0f, 40.0f};
  clb_vector_add(input, 3, output);
  CHECK(output[0] == 11.0f && output[1] == 18.0f && output[2] == 30.5f && output[3] == 40.0f);
  clb_vector_add_scaled(input, -2.0f, 3, output);
  CHECK(output[0] == 9.0f && output[1] == 22.0f && output[2] == 29.5f && output[3] == 40.0f);
  clb_vector_add(input, 0, output);
  CHECK(output[0] == 9.0f);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(elements_are_added)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
