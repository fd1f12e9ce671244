/*
 * seam_fake.c: the trial's four kernels on the host, over the fake libcuda: the same trial without a GPU. Test-only.
 * The router and bucket kernels are the host twin in engine_c/src/routing.c.
 */
#include "../../engine_c/src/channel.h"
#include "../../engine_c/src/routing.h"
#include "../../engine_c/tests/fake_cuda.h"
#include "seam_abi.h"

static void run_gather(const void* args) {
  seam_gather_args a;
  (void)memcpy(&a, args, sizeof a);
  const seam_slot* slots = fake_pointer(a.slots);
  const uint32_t* row_slots = fake_pointer(a.row_slots);
  const uint32_t count = *(const uint32_t*)fake_pointer(a.token_count);
  for (uint32_t row = 0u; row < count; row++) {
    const uint32_t token = (uint32_t)slots[row_slots[row]].token % a.rows;
    (void)memcpy((float*)fake_pointer(a.logits) + (size_t)row * a.experts,
                 (const float*)fake_pointer(a.table) + (size_t)token * a.experts, a.experts * sizeof(float));
  }
}

#define MAX_TOKENS 64u

/* Only what select and bucket share; the pointers that the kernels lack go to scratch. */
typedef struct scratch {
  clb_layer_desc layer;
  clb_expert_policy policies[MAX_TOKENS];
  uint32_t trimmed[MAX_TOKENS];
  uint32_t dropped[MAX_TOKENS];
  uint32_t kept[MAX_TOKENS];
  int32_t status[MAX_TOKENS];
} scratch;

static void run_router(const void* args) {
  static scratch s;
  clb_router_args a;
  (void)memcpy(&a, args, sizeof a);
  const uint32_t count = *(const uint32_t*)fake_pointer(a.token_count);
  const clb_row* rows = fake_pointer(a.rows);
  const clb_router_policy* policy = fake_pointer(a.policy);
  s.layer = (clb_layer_desc){.experts = a.experts,
                             .experts_per_token = a.k,
                             .score = a.score,
                             .renormalise = a.renormalise,
                             .routed_scale = a.routed_scale};
  for (uint32_t t = 0u; t < count; t++) {
    const clb_router_policy p = policy[(size_t)((rows != NULL) ? rows[t].slot : t) * a.policy_stride];
    s.policies[t] = (clb_expert_policy){.k = p.k, .threshold = p.threshold};
  }
  const clb_routing_args host = {.logits = fake_pointer(a.logits),
                                 .layer = &s.layer,
                                 .policies = s.policies,
                                 .indices = fake_pointer(a.indices),
                                 .weights = fake_pointer(a.weights),
                                 .kept = fake_pointer(a.kept),
                                 .trimmed = s.trimmed,
                                 .dropped = s.dropped,
                                 .status = s.status,
                                 .logits_stride = a.logits_stride,
                                 .tokens = count,
                                 .k_max = a.k_max};
  clb_routing_select(&host);
}

static void run_bucket(const void* args) {
  static scratch s;
  clb_bucket_args a;
  (void)memcpy(&a, args, sizeof a);
  s.layer = (clb_layer_desc){.experts = a.experts, .experts_per_token = 1u};
  for (uint32_t t = 0u; t < MAX_TOKENS; t++)
    s.kept[t] = a.k_max; /* NONE marks the ranks that are not in use */
  const clb_routing_args host = {.layer = &s.layer,
                                 .indices = fake_pointer(a.indices),
                                 .kept = s.kept,
                                 .counts = fake_pointer(a.counts),
                                 .offsets = fake_pointer(a.offsets),
                                 .token_list = fake_pointer(a.tokens),
                                 .place_list = fake_pointer(a.places),
                                 .logits_stride = a.experts,
                                 .tokens = *(const uint32_t*)fake_pointer(a.token_count),
                                 .k_max = a.k_max};
  clb_routing_bucket(&host);
}

static void publish_row(const seam_publish_args* a, uint32_t row, seam_event* event) {
  const uint32_t which = ((const uint32_t*)fake_pointer(a->row_slots))[row];
  const uint32_t kept = ((const uint32_t*)fake_pointer(a->kept))[row];
  const uint32_t* indices = (const uint32_t*)fake_pointer(a->indices) + (size_t)row * a->k_max;
  const float weight = ((const float*)fake_pointer(a->weights))[(size_t)row * a->k_max];
  seam_slot* slot = (seam_slot*)fake_pointer(a->slots) + which;
  *event = (seam_event){.slot = which, .generation = slot->generation};
  if (slot->active == 0u) return;
  uint32_t sum = (uint32_t)slot->token;
  for (uint32_t r = 0u; r < kept; r++)
    sum += (r + 1u) * (indices[r] + 1u);
  slot->token = (int32_t)(sum % a->rows);
  event->flags = SEAM_TOKEN;
  for (uint32_t i = 0u; i < slot->stop_count; i++) {
    if (slot->stops[i] == slot->token) event->flags |= SEAM_STOP;
  }
  if (slot->position + 1u == slot->max_tokens) event->flags |= SEAM_LENGTH;
  event->position = slot->position;
  event->token = slot->token;
  event->kept = kept;
  event->weight = weight;
  clb_record* record = (clb_record*)fake_pointer(slot->records) + (slot->position & slot->record_mask);
  record->position = slot->position;
  record->token = slot->token;
  record->logprob = weight;
  record->top_count = 0u;
  slot->position++;
  if (event->flags != SEAM_TOKEN) slot->active = 0u;
}

static void run_publish(const void* args) {
  seam_publish_args a;
  (void)memcpy(&a, args, sizeof a);
  uint64_t* step = fake_pointer(a.step);
  unsigned char* mailbox = fake_pointer(a.mailbox);
  seam_event* events = (seam_event*)(void*)(mailbox + 64) + (size_t)(*step % SEAM_RING) * SEAM_ROWS;
  const uint32_t count = *(const uint32_t*)fake_pointer(a.token_count);
  for (uint32_t row = 0u; row < count; row++)
    publish_row(&a, row, &events[row]);
  ++*step;
  __atomic_store_n((uint64_t*)(void*)mailbox, *step, __ATOMIC_RELEASE);
}

static fake_kernel kernels[4] = {{.run = run_gather, .args_bytes = sizeof(seam_gather_args)},
                                 {.run = run_router, .args_bytes = sizeof(clb_router_args)},
                                 {.run = run_bucket, .args_bytes = sizeof(clb_bucket_args)},
                                 {.run = run_publish, .args_bytes = sizeof(seam_publish_args)}};

void seam_fake_entries(clb_cuda_entries* table);
void* seam_fake_kernel(uint32_t which);
void seam_fake_reset(uint32_t fail_at);
void seam_fake_lazy(uint32_t lazy);
void seam_fake_tick(void);
int32_t seam_fake_live(void);
uint32_t seam_fake_calls(void);

void seam_fake_entries(clb_cuda_entries* table) { fake_cuda_entries(table); }

void* seam_fake_kernel(uint32_t which) { return &kernels[which]; }

void seam_fake_reset(uint32_t fail_at) {
  (void)memset(&fake_cuda, 0, sizeof fake_cuda);
  fake_cuda.fail_at = fail_at;
}

void seam_fake_lazy(uint32_t lazy) { fake_cuda.lazy = lazy; }

/* The device finishes its oldest step. */
void seam_fake_tick(void) { fake_run_pending(1u); }

int32_t seam_fake_live(void) { return fake_cuda.live; }

uint32_t seam_fake_calls(void) { return fake_cuda.calls; }
