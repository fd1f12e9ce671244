/*
 * test_loader_quant.c: quantised sections: where their parts lie, descriptions that do not fit, and numbers that are
 * none.
 */
#include "tiny_load.h"

enum { CONTENT = CLB_LAYOUT_ROWS16 };

static clb_section_desc section_of(uint32_t precision, uint32_t rows, uint32_t cols, uint32_t group_rows,
                                   uint32_t group_cols) {
  clb_section_desc section = {.role = CLB_ROLE_UP,
                              .offset = 512,
                              .precision = precision,
                              .layout = CONTENT,
                              .rows = rows,
                              .cols = cols,
                              .group_rows = group_rows,
                              .group_cols = group_cols};
  section.scales_offset = section.offset + clb_parts_of(&section).scales_at;
  return section;
}

/* Values, scales and zeros follow each other at multiples of 256; rows are padded to 16, columns of int8 to 4. */
static void parts_of_each_precision(void) {
  const clb_section_desc int8 = section_of(CLB_INT8, 20, 50, 1, 50);
  const clb_parts a = clb_parts_of(&int8);
  CHECK_EQ(a.values, 32 * 52);
  CHECK_EQ(a.scales_at, 1792);
  CHECK_EQ(a.scales, 32 * 2);
  CHECK_EQ(a.bytes, 1792 + 64);
  clb_section_desc int4 = section_of(CLB_INT4, 20, 64, 1, 32);
  int4.zeros_offset = 1;
  const clb_parts b = clb_parts_of(&int4);
  CHECK_EQ(b.values, 32 * 32);
  CHECK_EQ(b.scales, 32 * 2 * 2);
  CHECK_EQ(b.zeros_at, 1280);
  CHECK_EQ(b.bytes, 1280 + 64);
  const clb_section_desc fp8 = section_of(CLB_FP8, 300, 200, 128, 128);
  const clb_parts c = clb_parts_of(&fp8);
  CHECK_EQ(c.values, 304 * 200);
  CHECK_EQ(c.scales, 3 * 2 * 4);
  clb_section_desc pieces = section_of(CLB_INT8, 20, 144, 1, 128); /* of mma: 160 columns */
  pieces.layout = CLB_LAYOUT_MMA;
  CHECK_EQ(clb_parts_of(&pieces).values, 32 * 160);
  CHECK_EQ(clb_parts_of(&pieces).scales, 32 * 2 * 2);
  pieces = section_of(CLB_INT4, 20, 96, 1, 32); /* 128 columns, and so four groups */
  pieces.layout = CLB_LAYOUT_MMA;
  CHECK_EQ(clb_parts_of(&pieces).values, 32 * 64);
  CHECK_EQ(clb_parts_of(&pieces).scales, 32 * 4 * 2);
}

static void expect(clb_section_desc section, int32_t status, const char* word) {
  clb_error error = {0};
  CHECK_EQ(clb_quantised_check(&section, "f.bin", "up of layer 0", &error), status);
  if (status != CLB_OK) {
    CHECK_CONTAINS(error.message, "file f.bin: up of layer 0");
    CHECK_CONTAINS(error.message, word);
  }
}

/* Groups that fit are taken; others, and parts that lie elsewhere, are refused with what was found. */
static void groups_that_fit_or_not(void) {
  expect(section_of(CLB_INT8, 20, 50, 1, 50), CLB_OK, "");
  expect(section_of(CLB_INT8, 20, 200, 1, 128), CLB_OK, "");
  expect(section_of(CLB_INT8, 20, 200, 1, 48), CLB_ERR_FORMAT, "groups of 1 x 48 in 20 x 200: a group of int8");
  expect(section_of(CLB_INT8, 20, 200, 2, 200), CLB_ERR_FORMAT, "groups of 2 x 200");
  expect(section_of(CLB_INT4, 20, 96, 1, 32), CLB_OK, "");
  expect(section_of(CLB_INT4, 20, 96, 1, 96), CLB_OK, "");
  expect(section_of(CLB_INT4, 20, 96, 1, 64), CLB_ERR_FORMAT, "divides them");
  expect(section_of(CLB_INT4, 20, 48, 1, 48), CLB_ERR_FORMAT, "divides them");
  expect(section_of(CLB_FP8, 20, 50, 1, 50), CLB_OK, "");
  expect(section_of(CLB_FP8, 300, 200, 128, 128), CLB_OK, "");
  expect(section_of(CLB_FP8, 20, 256, 1, 128), CLB_ERR_FORMAT, "a group of fp8 is a row, or 128 x 128");
  clb_section_desc bent = section_of(CLB_INT8, 20, 50, 1, 50);
  bent.group_rows = 0;
  expect(bent, CLB_ERR_FORMAT, "groups of 0 x 50");
  bent = section_of(CLB_INT8, 20, 50, 1, 50);
  bent.zeros_offset = 4096;
  expect(bent, CLB_ERR_FORMAT, "zero points, which are for int4");
  bent = section_of(CLB_INT8, 20, 50, 1, 50);
  bent.scales_offset += 256;
  expect(bent, CLB_ERR_FORMAT, "must follow each other");
  bent = section_of(CLB_INT4, 20, 64, 1, 32);
  bent.zeros_offset = bent.scales_offset;
  expect(bent, CLB_ERR_FORMAT, "must follow each other");
  bent = section_of(CLB_INT8, 20, 50, 1, 50);
  bent.offset += 64;
  bent.scales_offset += 64;
  expect(bent, CLB_ERR_FORMAT, "values at 576");
  bent = section_of(CLB_INT8, 20, 50, 1, 50);
  bent.layout = CLB_LAYOUT_FLAT;
  expect(bent, CLB_ERR_UNSUPPORTED, "is quantised, but flat");
  bent = section_of(CLB_INT8, 20, 200, 1, 64);
  bent.layout = CLB_LAYOUT_MMA;
  expect(bent, CLB_ERR_FORMAT, "the CUDA kernels take groups of 128 columns");
  bent = (clb_section_desc){.precision = CLB_BF16, .rows = 20, .cols = 50, .group_cols = 50};
  expect(bent, CLB_ERR_FORMAT, "is not quantised");
}

/* Padding between the parts is never looked at; NaN among values or scales and zero points above 15 are found. */
static void numbers_that_are_none(void) {
  static unsigned char data[4096];
  clb_section_desc int4 = section_of(CLB_INT4, 20, 64, 1, 32);
  int4.zeros_offset = 1;
  const clb_parts parts = clb_parts_of(&int4);
  memset(data, 0xff, sizeof data);
  memset(data + parts.scales_at, 0x3c, parts.scales);
  memset(data + parts.zeros_at, 15, parts.zeros);
  CHECK_EQ(clb_first_bad_byte(&int4, 0, parts.bytes, data), parts.bytes);
  data[parts.zeros_at + 5] = 16;
  CHECK_EQ(clb_first_bad_byte(&int4, 0, parts.bytes, data), parts.zeros_at + 5);
  data[parts.scales_at + 7] = 0x7c;
  CHECK_EQ(clb_first_bad_byte(&int4, 0, parts.bytes, data), parts.scales_at + 6);
  CHECK_EQ(clb_first_bad_byte(&int4, parts.zeros_at, parts.bytes, data + parts.zeros_at), parts.zeros_at + 5);
  const clb_section_desc fp8 = section_of(CLB_FP8, 16, 16, 1, 16);
  memset(data, 0x7e, sizeof data);
  CHECK_EQ(clb_first_bad_byte(&fp8, 0, 256, data), 256);
  data[100] = 0xff;
  CHECK_EQ(clb_first_bad_byte(&fp8, 0, 256, data), 100);
}

/* Quantised files lie in memory as they are; the table points at values and scales. */
static void a_quantised_model_is_loaded(void) {
  static const uint32_t precisions[] = {CLB_INT8, CLB_FP8};
  for (uint32_t p = 0; p < 2; ++p) {
    tiny_model tiny;
    loaded out;
    tiny_make(&tiny, 1, precisions[p], CONTENT, TINY_VOCAB);
    tiny_write(&tiny);
    CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_FILES, 0, &out), CLB_OK);
    const clb_section_desc* const section = tiny_section(&tiny, CLB_ROLE_DOWN, 0, 1);
    const clb_tensor* const tensor = clb_weight(out.table, CLB_ROLE_DOWN, 1, 1);
    const clb_parts parts = clb_parts_of(section);
    CHECK_EQ(tensor->precision, precisions[p]);
    CHECK_EQ(tensor->group_cols, tensor->cols);
    CHECK(memcmp(tensor->data, tiny.bytes[section->file] + section->offset, (size_t)parts.bytes) == 0);
    CHECK_EQ((const char*)tensor->scales - (const char*)tensor->data, (int64_t)parts.scales_at);
    CHECK(tensor->zeros == NULL);
    CHECK(clb_weight(out.table, CLB_ROLE_ROUTER, 0, -1)->scales == NULL);
    unload(&out);
    tiny_free(&tiny);
  }
}

/* An infinite scale is named with its byte. */
static void an_infinite_scale_is_refused(void) {
  tiny_model tiny;
  tiny_make(&tiny, 0, CLB_INT8, CONTENT, TINY_VOCAB);
  const clb_section_desc* const section = tiny_section(&tiny, CLB_ROLE_UP, 0, 2);
  tiny.bytes[section->file][section->scales_offset + 1] = 0x7c;
  tiny_sum(&tiny);
  tiny_write(&tiny);
  char text[64];
  (void)snprintf(text, sizeof text, "a scale, at byte %llu", (unsigned long long)section->scales_offset);
  expect_refusal(&tiny, CLB_ERR_NOT_FINITE, "up of layer 0, expert 2", text);
  tiny_free(&tiny);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(parts_of_each_precision), TEST(groups_that_fit_or_not),
                                   TEST(numbers_that_are_none), TEST(a_quantised_model_is_loaded),
                                   TEST(an_infinite_scale_is_refused)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
