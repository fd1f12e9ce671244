/*
 * Sections and files against the model: every number that does not fit is refused before a byte is read, by name.
 */
#include "loader_internal.h"
#include "test.h"
#include "tiny_load.h"

static void absent_sections_have_no_data(void) {
  tiny_model tiny;
  loaded out;
  tiny_make(&tiny, 0, CLB_BF16, CLB_LAYOUT_FLAT, TINY_VOCAB);
  tiny_write(&tiny);
  /* The bias is optional: without its sections the layer has none, if the gap that it leaves is padding-sized. */
  *tiny_section(&tiny, CLB_ROLE_QKV_BIAS, 0, -1) = tiny.sections[--tiny.model.section_count];
  CHECK_EQ(load_as(&tiny, CLB_WEIGHTS_FILES, 0, &out), CLB_OK);
  CHECK(clb_weight(out.table, CLB_ROLE_QKV_BIAS, 0, -1)->data == NULL);
  CHECK(clb_weight(out.table, CLB_ROLE_QKV_BIAS, 1, -1)->data != NULL);
  CHECK(clb_weight(out.table, CLB_ROLE_ROUTER, 1, -1)->data == NULL);
  unload(&out);
  tiny_free(&tiny);
}

static void hostile_names_and_files(void) {
  static const char* const names[] = {"", ".", "..", "../x", "/etc/passwd", "a/b"};
  tiny_model tiny;
  tiny_make(&tiny, 0, CLB_BF16, CLB_LAYOUT_FLAT, TINY_VOCAB);
  for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
    tiny.files[1].name = names[i];
    expect_refusal(&tiny, CLB_ERR_FORMAT, "file 1", "name");
  }
  tiny.files[1].name = NULL;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "file 1", "name");
  tiny.files[1].name = tiny.names[1];
  tiny.files[1].alignment = 3;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "alignment is 3", "4096");
  tiny.files[1].alignment = 4096;
  tiny.files[1].crc_count = 2;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "2 checksums", "need 1");
  tiny.files[1].crc_count = 1;
  tiny.files[1].crc32c = NULL;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "checksums", "need 1");
  tiny.files[1].crc_count = 0;
  tiny.files[1].bytes = UINT64_MAX;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "size is", "2^46");
  tiny.files[1].bytes = 0;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "size is 0", "2^46");
  tiny_free(&tiny);
}

/* The gate of layer 0, expert 1, with other numbers; no groups. */
#define BENT(role, layer, expert, file, offset, bytes, precision, layout, rows, cols) \
  {role, layer, expert, file, offset, bytes, precision, layout, rows, cols, 0, 0, 0, 0}

/* One number of one section is bent; the message names section and value. */
static void hostile_sections(void) {
  enum { GATE = CLB_ROLE_GATE };
  tiny_model tiny;
  tiny_make(&tiny, 0, CLB_BF16, CLB_LAYOUT_FLAT, TINY_VOCAB);
  clb_section_desc* gate = tiny_section(&tiny, CLB_ROLE_GATE, 0, 1);
  clb_section_desc* router = tiny_section(&tiny, CLB_ROLE_ROUTER, 0, -1);
  const clb_section_desc good = *gate;
  const struct {
    clb_section_desc bent;
    int32_t status;
    const char* word;
  } cases[] = {
      {BENT(16, 0, 1, good.file, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT,
       "role 16"},
      {BENT(GATE, 2, 1, good.file, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT,
       "layer 2"},
      {BENT(GATE, -7, 1, good.file, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT,
       "not part"},
      {BENT(GATE, 0, 3, good.file, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT,
       "expert 3"},
      {BENT(GATE, 0, -2, good.file, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT,
       "not part"},
      {BENT(GATE, 0, 1, 4, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT,
       "file index is 4"},
      {BENT(GATE, 0, 1, good.file, 1, good.bytes, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT, "offset 1"},
      {BENT(GATE, 0, 1, good.file, UINT64_MAX - 1, good.bytes, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT,
       "beyond"},
      {BENT(GATE, 0, 1, good.file, good.offset, UINT64_MAX, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT,
       "its shape"},
      {BENT(GATE, 0, 1, good.file, good.offset, 0, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT, "its shape"},
      {BENT(GATE, 0, 1, good.file, good.offset, good.bytes, 6, 0, good.rows, good.cols), CLB_ERR_UNSUPPORTED,
       "precision 6"},
      {BENT(GATE, 0, 1, good.file, good.offset, good.bytes, CLB_BF16, 3, good.rows, good.cols), CLB_ERR_UNSUPPORTED,
       "layout 3"},
      {BENT(GATE, 0, 1, good.file, good.offset, good.bytes, CLB_BF16, 1, good.rows, good.cols), CLB_ERR_FORMAT,
       "its shape takes 512"},
      {BENT(GATE, 0, 1, good.file, good.offset, good.bytes, CLB_BF16, 0, good.cols, good.rows), CLB_ERR_FORMAT,
       "(16, 8)"},
      {BENT(GATE, 0, 1, good.file, good.offset, good.bytes, CLB_BF16, 0, 65536, 65536), CLB_ERR_FORMAT,
       "(65536, 65536)"},
      {BENT(GATE, 0, 2, good.file, good.offset, good.bytes, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT,
       "twice"},
      {BENT(GATE, 0, 1, good.file, good.bytes, good.bytes, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT,
       "overlaps"},
      {BENT(GATE, 0, 1, good.file, good.offset + 2, good.bytes, CLB_BF16, 0, good.rows, good.cols), CLB_ERR_FORMAT,
       "overlaps"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    *gate = cases[i].bent;
    if (strcmp(cases[i].word, "overlaps") == 0 && gate->offset == gate->bytes) {
      gate->offset = tiny_section(&tiny, CLB_ROLE_UP, 0, 1)->offset; /* exactly on another role's bytes */
    }
    expect_refusal(&tiny, cases[i].status, cases[i].word, "");
  }
  *gate = good;
  router->precision = CLB_BF16;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "router of layer 0", "fp32");
  router->precision = CLB_FP32;
  tiny_section(&tiny, CLB_ROLE_ATTN_NORM, 0, -1)->layout = CLB_LAYOUT_ROWS16; /* of matrices only */
  expect_refusal(&tiny, CLB_ERR_UNSUPPORTED, "attn_norm of layer 0", "layout 1");
  tiny_free(&tiny);
}

static void missing_sections_and_gaps(void) {
  tiny_model tiny;
  tiny_make(&tiny, 0, CLB_BF16, CLB_LAYOUT_FLAT, TINY_VOCAB);
  clb_section_desc* last = &tiny.sections[--tiny.model.section_count];
  CHECK_EQ(last->role, CLB_ROLE_DOWN);
  expect_refusal(&tiny, CLB_ERR_FORMAT, "down of layer 1", "missing");
  ++tiny.model.section_count;
  tiny.files[1].bytes += 4096;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "expert_0_0.bin", "belong to no section");
  tiny.files[1].bytes -= 4096;
  tiny.model.tied_head = 1;
  expect_refusal(&tiny, CLB_ERR_FORMAT, "head", "not part of this model");
  tiny_free(&tiny);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(absent_sections_have_no_data), TEST(hostile_names_and_files),
                                   TEST(hostile_sections), TEST(missing_sections_and_gaps)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
