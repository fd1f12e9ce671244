/* ops_choose.c: which tables there are, and which one this machine takes. See ops.h. */
#include "ops.h"

extern const clb_ops clb_ops_generic;
#if defined(__x86_64__)
extern const clb_ops clb_ops_avx2;
extern const clb_ops clb_ops_avx512;
#endif

const clb_ops* clb_ops_table(uint32_t index) {
  /* cppcheck-suppress misra-c2012-9.3 ; every element has its value */
  static const clb_ops* const tables[] = {
      &clb_ops_generic,
#if defined(__x86_64__)
      &clb_ops_avx2,
      &clb_ops_avx512,
#endif
  };
  return index < sizeof tables / sizeof tables[0] ? tables[index] : NULL;
}

const clb_ops* clb_ops_choose(void) {
  const clb_ops* best = clb_ops_table(0);
  for (uint32_t i = 1; clb_ops_table(i) != NULL; ++i) {
    const clb_ops* const table = clb_ops_table(i);
    if (table->rank > best->rank && table->supported() == 1) {
      best = table;
    }
  }
  return best;
}
