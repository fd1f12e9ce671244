/* CRC-32C: published check values, and the fast form against one bit at a time at every length and alignment. */
#include "loader_internal.h"
#include "test.h"

static uint32_t bitwise(const uint8_t* data, size_t bytes) {
  uint32_t crc = 0xffffffffu;
  for (size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82f63b78u : 0u);
    }
  }
  return ~crc;
}

/* The check value of the CRC catalogues, and the iSCSI examples of RFC 3720 (32 bytes of zeros, ones, 0..31). */
static void known_values(void) {
  uint8_t data[32];
  CHECK_EQ(clb_crc32c(0, "123456789", 9), 0xe3069283u);
  memset(data, 0, sizeof data);
  CHECK_EQ(clb_crc32c(0, data, 32), 0x8a9136aau);
  memset(data, 0xff, sizeof data);
  CHECK_EQ(clb_crc32c(0, data, 32), 0x62a8ab43u);
  for (uint8_t i = 0; i < 32; ++i) {
    data[i] = i;
  }
  CHECK_EQ(clb_crc32c(0, data, 32), 0x46dd794eu);
}

static void every_length_and_alignment(void) {
  uint8_t data[96];
  uint64_t seed = 1;
  for (size_t i = 0; i < sizeof data; ++i) {
    data[i] = (uint8_t)clb_test_random(&seed);
  }
  for (size_t start = 0; start < 9; ++start) {
    for (size_t bytes = 0; bytes + start <= sizeof data; ++bytes) {
      CHECK_EQ(clb_crc32c(0, data + start, bytes), bitwise(data + start, bytes));
      CHECK_EQ(clb_crc32c_tabled(0, data + start, bytes), bitwise(data + start, bytes));
    }
  }
}

/* A stream checked in pieces gives the checksum of the whole. */
static void pieces_continue(void) {
  const char* text = "one expert is gate, up and transposed down";
  const size_t bytes = strlen(text);
  for (size_t cut = 0; cut <= bytes; ++cut) {
    CHECK_EQ(clb_crc32c(clb_crc32c(0, text, cut), text + cut, bytes - cut), clb_crc32c(0, text, bytes));
  }
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {TEST(known_values), TEST(every_length_and_alignment), TEST(pieces_continue)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
