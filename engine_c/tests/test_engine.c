/* test_engine.c: the engine as its two neighbours see it: commands and blocks in, events and records out. */
#include "engine_rig.h"
#include "test.h"

static rig shared_rig; /* large: not on the stack */
static rig second_rig;

static void open_rig(rig* r, uint32_t slots) {
  rig_init(r, slots);
  const int32_t status = rig_open(r);
  if (status != CLB_OK) {
    (void)fprintf(stderr, "%s\n", r->error.message);
  }
  CHECK_EQ(status, CLB_OK);
}

static void check_same(const rig_output* actual, const rig_output* expected) {
  CHECK_EQ(actual->ended, expected->ended);
  CHECK_EQ(actual->flags, expected->flags);
  CHECK_EQ(actual->count, expected->count);
  for (uint32_t i = 0; i < actual->count; ++i) {
    CHECK_EQ(actual->records[i].token, expected->records[i].token);
    CHECK(memcmp(&actual->records[i], &expected->records[i], sizeof actual->records[i]) == 0);
  }
  CHECK_EQ(actual->usage.assignments, expected->usage.assignments);
}

/* A greedy request gives the number of tokens it asked for, and the same ones again, also from another engine. */
static void greedy_is_deterministic(void) {
  const clb_request request = rig_request(1, 13, 20);
  open_rig(&shared_rig, 2);
  rig_run_alone(&shared_rig, 0, &request, 1);
  const rig_output first = shared_rig.outputs[0];
  CHECK_EQ(first.ended, CLB_EVENT_TOKEN);
  CHECK_EQ(first.flags, CLB_FINISH_LENGTH);
  CHECK_EQ(first.count, 20);
  CHECK_EQ(first.usage.assignments, (13 + 19) * 2 * 2);
  rig_run_alone(&shared_rig, 1, &request, 1);
  check_same(&shared_rig.outputs[1], &first);
  rig_close(&shared_rig);
  open_rig(&shared_rig, 5);
  rig_run_alone(&shared_rig, 4, &request, 1);
  check_same(&shared_rig.outputs[4], &first);
  rig_close(&shared_rig);
}

int main(int argc, char** argv) {
  (void)second_rig;
  static const clb_test tests[] = {TEST(greedy_is_deterministic)};
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
