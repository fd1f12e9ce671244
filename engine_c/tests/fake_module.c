/*
 * fake_module.c: kernel modules that a test may plant. Compiled once per kind with -DFAKE_KIND=:
 *   1 of rank 5, runs everywhere      2 of rank 9, runs nowhere
 *   3 of another ABI version          4 without gate_up      5 without the entry symbol
 *   6 that reads codes
 * All claim bf16, rows16.
 */
#include "colibri.h"

static int32_t supported(void) { return FAKE_KIND == 2 ? 0 : 1; }

static void linear(const clb_linear_args* args) { (void)args; }

static void gate_up(const clb_gated_linear_args* args) { (void)args; }

static void row(const clb_operand* weights, uint32_t index, uint32_t cols, float* output) {
  (void)weights;
  (void)index;
  (void)cols;
  (void)output;
}

static const clb_module fake = {
    .abi_version = FAKE_KIND == 3 ? CLB_ABI_VERSION + 1u : CLB_ABI_VERSION,
    .struct_bytes = sizeof(clb_module),
    .name = "fake",
    .precision = CLB_BF16,
    .layout = CLB_LAYOUT_ROWS16,
    .rank = FAKE_KIND == 2 ? 9 : 5,
    .reads_codes = FAKE_KIND == 6 ? 1 : 0,
    .supported = supported,
    .linear = linear,
    .gate_up = FAKE_KIND == 4 ? NULL : gate_up,
    .row = row,
};

#if FAKE_KIND == 5
CLB_API const clb_module* clb_other_entry(void);
CLB_API const clb_module* clb_other_entry(void) { return &fake; }
#else
CLB_API const clb_module* clb_module_entry(void);
CLB_API const clb_module* clb_module_entry(void) { return &fake; }
#endif
