/* driver_cuda.c over a fake libcuda: what is passed down, what graphs keep, and that no failure leaks. */
#include "../../kernels_cu/abi.h"
#include "fake_cuda.h"
#include "test.h"

typedef struct add_args {
  uint64_t target; /* address of a uint32_t */
  uint32_t amount;
  uint32_t factor;
} add_args;

static void run_add(const void* args) {
  add_args a;
  (void)memcpy(&a, args, sizeof a);
  uint32_t* target = fake_pointer(a.target);
  *target = *target * a.factor + a.amount;
}

static fake_kernel add_kernel;
static clb_cuda_entries entries;

static clb_driver fresh_driver(void) {
  clb_driver driver;
  (void)memset(&fake_cuda, 0, sizeof fake_cuda);
  add_kernel = (fake_kernel){.run = run_add, .args_bytes = sizeof(add_args)};
  fake_cuda_entries(&entries);
  CHECK_EQ(clb_driver_cuda_init(&driver, &entries), CLB_OK);
  return driver;
}

static clb_launch launch_of(const add_args* args, uint32_t edge) {
  return (clb_launch){.function = &add_kernel,
                      .args = args,
                      .grid = {2u, 3u, 4u},
                      .block = {32u, 1u, 1u},
                      .shared_bytes = 64u,
                      .edge = edge};
}

static void refuses_other_versions_and_missing_entries(void) {
  clb_driver driver;
  fake_cuda_entries(&entries);
  CHECK_EQ(clb_driver_cuda_init(NULL, &entries), CLB_ERR_ARGUMENT);
  CHECK_EQ(clb_driver_cuda_init(&driver, NULL), CLB_ERR_ARGUMENT);
  entries.abi_version++;
  CHECK_EQ(clb_driver_cuda_init(&driver, &entries), CLB_ERR_VERSION);
  fake_cuda_entries(&entries);
  entries.struct_bytes--;
  CHECK_EQ(clb_driver_cuda_init(&driver, &entries), CLB_ERR_VERSION);
  for (size_t at = offsetof(clb_cuda_entries, context); at < sizeof entries; at += sizeof(void*)) {
    fake_cuda_entries(&entries);
    (void)memset((unsigned char*)&entries + at, 0, sizeof(void*));
    CHECK_EQ(clb_driver_cuda_init(&driver, &entries), CLB_ERR_ARGUMENT);
  }
  CHECK_EQ(clb_kernels_abi(), CLB_KERNELS_ABI);
}

static void launch_passes_shape_arguments_and_edge(void) {
  clb_driver driver = fresh_driver();
  uint32_t value = 5u;
  int stream;
  add_args args = {.target = (uint64_t)(uintptr_t)&value, .amount = 7u, .factor = 1u};
  clb_launch launch = launch_of(&args, CLB_EDGE_FULL);
  CHECK_EQ(driver.launch(&driver, &stream, &launch), CLB_OK);
  CHECK_EQ(value, 12u);
  CHECK_EQ(fake_cuda.last_attributes, 0u);
  CHECK_EQ(fake_cuda.last_config.grid_x, 2u);
  CHECK_EQ(fake_cuda.last_config.grid_y, 3u);
  CHECK_EQ(fake_cuda.last_config.grid_z, 4u);
  CHECK_EQ(fake_cuda.last_config.block_x, 32u);
  CHECK_EQ(fake_cuda.last_config.shared_bytes, 64u);
  CHECK(fake_cuda.last_config.stream == &stream);
  launch = launch_of(&args, CLB_EDGE_PROGRAMMATIC);
  CHECK_EQ(driver.launch(&driver, &stream, &launch), CLB_OK);
  CHECK_EQ(fake_cuda.last_attributes, 1u);
}

static void bind_makes_the_entries_context_current(void) {
  clb_driver driver = fresh_driver();
  CHECK_EQ(driver.bind(&driver), CLB_OK);
  CHECK(fake_cuda.current_context == &fake_context_object);
}

static void a_graph_keeps_the_arguments_of_its_capture(void) {
  clb_driver driver = fresh_driver();
  uint32_t value = 1u;
  void* graph = NULL;
  void* executable = NULL;
  add_args args = {.target = (uint64_t)(uintptr_t)&value, .amount = 2u, .factor = 10u};
  const clb_launch launch = launch_of(&args, CLB_EDGE_PROGRAMMATIC);
  CHECK_EQ(driver.capture_begin(&driver, NULL), CLB_OK);
  CHECK_EQ(driver.launch(&driver, NULL, &launch), CLB_OK);
  args.amount = 3u;
  CHECK_EQ(driver.launch(&driver, NULL, &launch), CLB_OK);
  CHECK_EQ(driver.capture_end(&driver, NULL, &graph), CLB_OK);
  CHECK_EQ(value, 1u);
  args.amount = 100u;
  CHECK_EQ(driver.graph_instantiate(&driver, graph, NULL, &executable), CLB_OK);
  CHECK_EQ(driver.graph_launch(&driver, executable, NULL), CLB_OK);
  CHECK_EQ(value, 123u);
  CHECK_EQ(driver.made, 2u);
  driver.executable_destroy(&driver, executable);
  driver.graph_destroy(&driver, graph);
  CHECK_EQ(fake_cuda.live, 0);
}

static void copies_and_fills_move_the_bytes(void) {
  clb_driver driver = fresh_driver();
  unsigned char from[4] = {1u, 2u, 3u, 4u};
  unsigned char device[4] = {0};
  unsigned char to[4] = {0};
  const clb_device_addr address = (uint64_t)(uintptr_t)device;
  CHECK_EQ(driver.copy_in(&driver, NULL, address, from, 4u), CLB_OK);
  CHECK_EQ(driver.copy_out(&driver, NULL, to, address, 4u), CLB_OK);
  CHECK_EQ(to[3], 4u);
  CHECK_EQ(driver.fill(&driver, NULL, address, 9u, 2u), CLB_OK);
  CHECK_EQ(device[1], 9u);
  CHECK_EQ(device[2], 3u);
}

/* Each row goes from its place to its place, and nothing between the rows is touched. */
static void rows_are_copied_from_pitch_to_pitch(void) {
  clb_driver driver = fresh_driver();
  unsigned char from[12];
  unsigned char to[15];
  for (unsigned char i = 0; i < 12u; ++i) {
    from[i] = i;
  }
  (void)memset(to, 99, sizeof to);
  const clb_copy_rows copy = {.to = (uint64_t)(uintptr_t)to,
                              .from = (uint64_t)(uintptr_t)from,
                              .to_pitch = 5u,
                              .from_pitch = 4u,
                              .row_bytes = 3u,
                              .rows = 3u};
  CHECK_EQ(driver.copy_rows(&driver, NULL, &copy), CLB_OK);
  for (uint32_t i = 0; i < 15u; ++i) {
    CHECK_EQ(to[i], i % 5u < 3u ? i / 5u * 4u + i % 5u : 99u);
  }
}

static void not_ready_is_an_answer_not_a_failure(void) {
  clb_driver driver = fresh_driver();
  void* event = NULL;
  float ms = 0.0f;
  CHECK_EQ(driver.event_create(&driver, &event), CLB_OK);
  fake_cuda.not_ready = 3u;
  CHECK_EQ(driver.event_done(&driver, event), CLB_ERR_STATE);
  CHECK_EQ(driver.event_ms(&driver, event, event, &ms), CLB_ERR_STATE);
  CHECK_EQ(driver.stream_done(&driver, NULL), CLB_ERR_STATE);
  CHECK_EQ(driver.stream_done(&driver, NULL), CLB_OK);
  CHECK_EQ(driver.last_code, 0);
  CHECK_EQ(driver.event_ms(&driver, event, event, &ms), CLB_OK);
  CHECK_NEAR(ms, 1.0, 0.0);
  CHECK_EQ(driver.made, 1u);
  driver.event_destroy(&driver, event);
}

/* Everything an engine does with a driver, with one error path, as its caller would write it. */
static int32_t whole_life(clb_driver* driver, uint32_t* value) {
  add_args args = {.target = (uint64_t)(uintptr_t)value, .amount = 1u, .factor = 1u};
  const clb_launch launch = launch_of(&args, CLB_EDGE_FULL);
  void* event = NULL;
  void* graph = NULL;
  void* executable = NULL;
  float ms;
  int32_t status = driver->bind(driver);
  if (status == CLB_OK) status = driver->event_create(driver, &event);
  if (status == CLB_OK) status = driver->capture_begin(driver, NULL);
  if (status == CLB_OK) {
    status = driver->launch(driver, NULL, &launch);
    if (status == CLB_OK) status = driver->fill(driver, NULL, args.target, 0u, sizeof *value);
    const int32_t ended = driver->capture_end(driver, NULL, &graph);
    if (status == CLB_OK) status = ended;
  }
  if (status == CLB_OK) status = driver->graph_instantiate(driver, graph, NULL, &executable);
  if (status == CLB_OK) status = driver->copy_in(driver, NULL, args.target, &args.amount, sizeof *value);
  const clb_copy_rows rows = {args.target, args.target, sizeof *value, sizeof *value, sizeof *value, 1u};
  if (status == CLB_OK) status = driver->copy_rows(driver, NULL, &rows);
  if (status == CLB_OK) status = driver->graph_launch(driver, executable, NULL);
  if (status == CLB_OK) status = driver->copy_out(driver, NULL, &args.amount, args.target, sizeof *value);
  if (status == CLB_OK) status = driver->event_record(driver, event, NULL);
  if (status == CLB_OK) status = driver->event_done(driver, event);
  if (status == CLB_OK) status = driver->event_ms(driver, event, event, &ms);
  if (status == CLB_OK) status = driver->stream_done(driver, NULL);
  if (status == CLB_OK) status = driver->stream_wait(driver, NULL);
  if (executable != NULL) driver->executable_destroy(driver, executable);
  if (graph != NULL) driver->graph_destroy(driver, graph);
  if (event != NULL) driver->event_destroy(driver, event);
  return status;
}

static void every_failing_call_is_reported_and_leaks_nothing(void) {
  uint32_t value = 0u;
  clb_driver driver = fresh_driver();
  CHECK_EQ(whole_life(&driver, &value), CLB_OK);
  CHECK_EQ(fake_cuda.live, 0);
  const uint32_t calls = fake_cuda.calls;
  CHECK(calls >= 15u);
  for (uint32_t n = 1u; n <= calls; n++) {
    driver = fresh_driver();
    fake_cuda.fail_at = n;
    CHECK_EQ(whole_life(&driver, &value), CLB_ERR_DEVICE);
    CHECK_EQ(driver.last_code, FAKE_ERROR);
    CHECK_CONTAINS(driver.last_name, "CUDA_ERROR_LAUNCH_FAILED");
    CHECK_EQ(fake_cuda.live, 0);
    CHECK(fake_cuda.capturing == NULL);
  }
}

static clb_device_desc good_device(const clb_device_kernel* kernels, uint32_t count) {
  static int pinned;
  fake_cuda_entries(&entries);
  return (clb_device_desc){.abi_version = CLB_ABI_VERSION,
                           .struct_bytes = sizeof(clb_device_desc),
                           .kernels_abi = CLB_KERNELS_ABI,
                           .kernel_count = count,
                           .kernels = kernels,
                           .entries = &entries,
                           .pinned = &pinned,
                           .pinned_device = 1u,
                           .arena = 1u,
                           .channel_device = 1u};
}

static void a_device_is_checked_before_it_is_used(void) {
  const clb_device_kernel kernel = {.name = "clb_bucket", .function = &add_kernel, .parameter_bytes = 64u};
  clb_driver driver;
  clb_error error;
  CHECK_EQ(clb_device_attach(NULL, &driver, &error), CLB_ERR_ARGUMENT);
  clb_device_desc device = good_device(&kernel, 1u);
  CHECK_EQ(clb_device_attach(&device, &driver, &error), CLB_OK);
  device.struct_bytes++;
  CHECK_EQ(clb_device_attach(&device, &driver, &error), CLB_ERR_VERSION);
  device = good_device(&kernel, 1u);
  device.kernels_abi++;
  CHECK_EQ(clb_device_attach(&device, &driver, &error), CLB_ERR_VERSION);
  CHECK_CONTAINS(error.message, "make cubins");
  device = good_device(&kernel, 1u);
  device.arena = 0u;
  CHECK_EQ(clb_device_attach(&device, &driver, &error), CLB_ERR_ARGUMENT);
  device = good_device(&kernel, 1u);
  entries.cuGraphLaunch = NULL;
  CHECK_EQ(clb_device_attach(&device, &driver, &error), CLB_ERR_ARGUMENT);
  CHECK_CONTAINS(error.message, "entry points");
}

static void a_kernel_is_found_by_name_and_size(void) {
  const clb_device_kernel kernels[2] = {{.name = "clb_router_fp32", .function = &entries, .parameter_bytes = 104u},
                                        {.name = "clb_bucket", .function = &add_kernel, .parameter_bytes = 64u}};
  const clb_device_desc device = good_device(kernels, 2u);
  clb_error error;
  void* function = NULL;
  CHECK_EQ(clb_device_find(&device, "clb_bucket", sizeof(clb_bucket_args), &function, &error), CLB_OK);
  CHECK(function == &add_kernel);
  CHECK_EQ(clb_device_find(&device, "clb_bucket", 72u, &function, &error), CLB_ERR_MODULE);
  CHECK_CONTAINS(error.message, "clb_bucket takes a struct of 64 bytes, this engine passes 72");
  CHECK_EQ(clb_device_find(&device, "clb_other", 64u, &function, &error), CLB_ERR_MODULE);
  CHECK_CONTAINS(error.message, "clb_other");
}

int main(int argc, char** argv) {
  static const clb_test tests[] = {
      TEST(refuses_other_versions_and_missing_entries),
      TEST(launch_passes_shape_arguments_and_edge),
      TEST(bind_makes_the_entries_context_current),
      TEST(a_graph_keeps_the_arguments_of_its_capture),
      TEST(copies_and_fills_move_the_bytes),
      TEST(rows_are_copied_from_pitch_to_pitch),
      TEST(not_ready_is_an_answer_not_a_failure),
      TEST(a_device_is_checked_before_it_is_used),
      TEST(a_kernel_is_found_by_name_and_size),
      TEST(every_failing_call_is_reported_and_leaks_nothing),
  };
  return clb_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
