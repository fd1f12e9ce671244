/*
 * Dummy weights: what they depend on, how they are spread, and where the loader puts them by itself.
 */
#include "loader_internal.h"
#include "test.h"
#include "tiny_load.h"

/* Dummy weights: same seed same bytes, another seed others; all finite; norms 1; spread 1 / sqrt(inputs). */
static void dummy_weights(void) {
  tiny_model tiny;
  loaded first;
  loaded again;
  loaded other;
  tiny_make(&tiny, 0, CLB_FP32, CLB_LAYOUT_FLAT, 4000);
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_DUMMY, 7, &first), CLB_OK);
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_DUMMY, 7, &again), CLB_OK);
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_DUMMY, 8, &other), CLB_OK);
  CHECK_EQ(first.progress, first.sizes.read_bytes);
  for (uint32_t i = 0; i < tiny.model.section_count; ++i) {
    const clb_section_desc* section = &tiny.sections[i];
    const clb_tensor* tensor = clb_weight(first.table, section->role, section->layer, section->expert);
    const void* same = clb_weight(again.table, section->role, section->layer, section->expert)->data;
    CHECK(memcmp(tensor->data, same, (size_t)section->bytes) == 0);
    CHECK_EQ(clb_first_not_finite(tensor->data, CLB_FP32, (uint64_t)section->rows * section->cols),
             (uint64_t)section->rows * section->cols);
  }
  const float* norm = clb_weight(first.table, CLB_ROLE_FINAL_NORM, -1, -1)->data;
  CHECK_NEAR(norm[0], 1.0, 0);
  const clb_tensor* head = clb_weight(first.table, CLB_ROLE_HEAD, -1, -1);
  const float* values = head->data;
  double sum = 0;
  double squares = 0;
  const uint32_t count = head->rows * head->cols;
  for (uint32_t i = 0; i < count; ++i) {
    sum += (double)values[i];
    squares += (double)values[i] * (double)values[i];
  }
  CHECK_NEAR(sum / count, 0.0, 0.01);
  CHECK_NEAR(squares / count, 1.0 / head->cols, 0.02 / head->cols);
  CHECK(memcmp(values, clb_weight(other.table, CLB_ROLE_HEAD, -1, -1)->data, 64) != 0);
  CHECK(memcmp(values, clb_weight(first.table, CLB_ROLE_EMBEDDING, -1, -1)->data, 64) != 0);
  unload(&first);
  unload(&again);
  unload(&other);
  tiny_free(&tiny);
}

/* A description without sections and files is laid out by the loader: all places but the biases, 256-aligned. */
static void dummy_lays_out_itself(void) {
  tiny_model tiny;
  loaded out;
  tiny_make(&tiny, 0, CLB_FP32, CLB_LAYOUT_FLAT, TINY_VOCAB);
  tiny.model.section_count = 0;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "embedding", "missing");
  tiny.model.file_count = 0;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "embedding", "missing");
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_DUMMY, 1, &out), CLB_OK);
  clb_place place = {0, -1, -1};
  do {
    const clb_demand demand = clb_demand_of(&tiny.model, place.role, place.layer, place.expert);
    const clb_tensor* tensor = clb_weight(out.table, place.role, place.layer, place.expert);
    CHECK_EQ(tensor->data != NULL, demand.rows != 0 && demand.optional == 0);
    if (tensor->data != NULL) {
      CHECK_EQ(tensor->precision, demand.narrow != 0 ? CLB_BF16 : CLB_FP32);
      CHECK_EQ((uintptr_t)tensor->data % 256, 0);
    }
  } while (clb_place_next(&tiny.model, &place));
  unload(&out);
  tiny_free(&tiny);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(dummy_weights), TEST(dummy_lays_out_itself)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
