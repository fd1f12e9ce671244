/*
 * fuzz.h: what fuzz targets share: edits of words, and a main for compilers without libFuzzer.
 *
 * A target defines LLVMFuzzerTestOneInput and ends with CLB_FUZZ_MAIN(longest input). With clang, -DCLB_LIBFUZZER and
 * -fsanitize=fuzzer it is a libFuzzer program; else the main here runs random inputs, the same ones for the same seed.
 * Both understand
 *   -runs=N  -seed=N  -max_total_time=SECONDS   and the names of files, which are inputs to run again;
 * what else begins with '-' is for libFuzzer alone.
 */
#ifndef CLB_FUZZ_H
#define CLB_FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "invariant.h"
#include "test.h"

#define CLB_FUZZ_LONGEST 4096u

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

/* Changes the `which`-th word of target: to value, to a number near which arithmetic goes wrong, by a little, or in one
   bit, as `how` says. */
static inline void clb_fuzz_edit(void* target, size_t bytes, uint32_t which, uint32_t how, uint32_t value) {
  static const uint32_t sharp[] = {0u,     1u,          2u,          255u,        4096u,      65535u,
                                   65536u, 0x7fffffffu, 0x80000000u, 0xfffffffeu, 0xffffffffu};
  char* const place = (char*)target + (which % (bytes / 4)) * 4;
  uint32_t word;
  memcpy(&word, place, sizeof word);
  switch (how % 4) {
    case 0:
      word = value;
      break;
    case 1:
      word = sharp[value % (sizeof sharp / sizeof sharp[0])];
      break;
    case 2:
      word += value % 5 - 2;
      break;
    default:
      word ^= 1u << (value % 32);
  }
  memcpy(place, &word, sizeof word);
}

/* Runs the input in one file again. */
static inline void clb_fuzz_file(const char* path, size_t longest) {
  uint8_t input[CLB_FUZZ_LONGEST];
  FILE* const file = fopen(path, "rb");
  CLB_ASSERT(file != NULL);
  const size_t bytes = fread(input, 1, longest, file);
  (void)fclose(file);
  (void)LLVMFuzzerTestOneInput(input, bytes);
}

static inline int clb_fuzz_main(int argc, char** argv, size_t longest) {
  unsigned long runs = getenv("CLB_TEST_SHORT") != NULL ? 300 : 3000;
  unsigned long seconds = 0;
  uint64_t seed = 11;
  int files = 0;
  CLB_ASSERT(longest <= CLB_FUZZ_LONGEST);
  for (int i = 1; i < argc; ++i) {
    if (strncmp(argv[i], "-runs=", 6) == 0) {
      runs = strtoul(argv[i] + 6, NULL, 10);
    } else if (strncmp(argv[i], "-seed=", 6) == 0) {
      seed = strtoul(argv[i] + 6, NULL, 10);
    } else if (strncmp(argv[i], "-max_total_time=", 16) == 0) {
      seconds = strtoul(argv[i] + 16, NULL, 10);
    } else if (argv[i][0] != '-') {
      clb_fuzz_file(argv[i], longest);
      files = 1;
    }
  }
  if (files != 0) {
    return 0;
  }
  (void)printf("seed %llu\n", (unsigned long long)seed);
  const time_t end = time(NULL) + (time_t)seconds;
  unsigned long run = 0;
  for (; seconds > 0 ? time(NULL) < end : run < runs; ++run) {
    uint8_t input[CLB_FUZZ_LONGEST];
    const size_t bytes = clb_test_random(&seed) % (longest + 1);
    for (size_t i = 0; i < bytes; ++i) {
      input[i] = (uint8_t)clb_test_random(&seed);
    }
    (void)LLVMFuzzerTestOneInput(input, bytes);
  }
  (void)printf("%lu inputs: 0 crashes\n", run);
  return 0;
}

#ifdef CLB_LIBFUZZER
#define CLB_FUZZ_MAIN(longest) _Static_assert((longest) <= CLB_FUZZ_LONGEST, "one limit for both mains");
#else
#define CLB_FUZZ_MAIN(longest) \
  int main(int argc, char** argv) { return clb_fuzz_main(argc, argv, longest); }
#endif

#endif /* CLB_FUZZ_H */
