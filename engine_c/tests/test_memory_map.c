/* Mapping: alignment, policies, refusals. */
#include "memory_map.h"

#include "test.h"

/* Mapped memory is zero, aligned, writable to its end, and says which pages it got. */
static void mapping_gives_aligned_zeroed_memory(void) {
  const uint32_t policies[] = {CLB_HUGE_OFF, CLB_HUGE_TRY};
  for (unsigned i = 0; i < 2; ++i) {
    clb_map map;
    CHECK_EQ(clb_map_open(&map, 5000000, 4194304, policies[i]), CLB_OK);
    CHECK_EQ((uintptr_t)map.base % 4194304, 0);
    CHECK(map.bytes >= 5000000);
    CHECK(policies[i] == CLB_HUGE_OFF ? map.kind == CLB_MAP_SMALL : map.kind != CLB_MAP_HUGE);
    unsigned char* bytes = map.base;
    CHECK_EQ(bytes[0] | bytes[map.bytes - 1u], 0);
    bytes[0] = bytes[map.bytes - 1u] = 1;
    clb_map_close(&map);
    CHECK(map.base == NULL);
    clb_map_close(&map);
  }
}

/* REQUIRE either gives huge pages or fails with MEMORY; wrong arguments and absurd sizes fail and hold nothing. */
static void mapping_fails_cleanly(void) {
  clb_map map;
  const int32_t status = clb_map_open(&map, 1, 4096, CLB_HUGE_REQUIRE);
  CHECK(status == CLB_OK ? map.kind == CLB_MAP_HUGE : status == CLB_ERR_MEMORY && map.base == NULL);
  clb_map_close(&map);
  CHECK_EQ(clb_map_open(&map, 0, 4096, CLB_HUGE_OFF), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_map_open(&map, 1, 4095, CLB_HUGE_OFF), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_map_open(&map, 1, 2048, CLB_HUGE_OFF), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_map_open(&map, 1, 4096, 3), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_map_open(&map, UINT64_MAX, 4096, CLB_HUGE_OFF), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_map_open(&map, (uint64_t)1 << 60, 4096, CLB_HUGE_OFF), CLB_ERR_MEMORY);
  CHECK(map.base == NULL);
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(mapping_gives_aligned_zeroed_memory), TEST(mapping_fails_cleanly)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
