/*
 * engine_fake.c: a device for the whole engine without a GPU: libcuda as fake_cuda.h has it, kernels as the emulator
 * runs them. Test-only; one state per library.
 */
#include "../../engine_c/tests/fake_cuda.h"

#define MAX_KERNELS 128u

static fake_kernel kernels[MAX_KERNELS];
static uint32_t kernel_count;

/* Forgets everything; the fail_at-th call from now on fails, 0: none. */
void engine_fake_reset(uint32_t fail_at) {
  (void)memset(&fake_cuda, 0, sizeof fake_cuda);
  fake_cuda.fail_at = fail_at;
}

void engine_fake_entries(clb_cuda_entries* entries) { fake_cuda_entries(entries); }

int32_t engine_fake_live(void) { return fake_cuda.live; }

/* A kernel handle; the caller keeps `run` and `launcher` loaded. NULL: there are too many. */
void* engine_fake_kernel(void (*run)(const void* args), fake_launcher launcher, uint32_t args_bytes) {
  if (kernel_count == MAX_KERNELS) {
    return NULL;
  }
  fake_kernel* const made = &kernels[kernel_count++];
  *made = (fake_kernel){.run = run, .launcher = launcher, .args_bytes = args_bytes};
  return made;
}
