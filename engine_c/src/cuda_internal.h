/*
 * cuda_internal.h: the CUDA half of the engine, shared by cuda_*.c and by nobody else. The rest of the engine sees
 * clb_backend_cuda (backend.h) only.
 *
 *   cuda_plan.c    where everything lies                       cuda_step.c     a step as launches
 *   cuda_load.c    weights into the arena                      cuda_graph.c    the same, captured into graphs
 *   cuda_read.c    files of a pack, by several threads         cuda_loop.c     steps in flight, events one step behind
 *   cuda_slots.c   a request's state onto the device           cuda_open.c     open and close
 *   cuda_prompt.c  the layers of a prefill step           cuda_swap.c     experts that replace others
 *
 * clb_cuda owns the graphs and nothing else; arena, page-locked memory, stream and kernels are the worker's
 * (clb_device_desc). Every driver call after open is made by the engine's own thread. A failing one is final: the
 * status goes to engine->fault, the loop ends, and with it the process.
 */
#ifndef CLB_CUDA_INTERNAL_H
#define CLB_CUDA_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "cuda_plan.h"
#include "driver.h"
#include "engine_internal.h"

enum {
  CLB_CUDA_EMBED = 0,
  CLB_CUDA_LINEAR,
  CLB_CUDA_LINEAR_8,    /* for at most 8 rows */
  CLB_CUDA_LINEAR_WIDE, /* for more, of many row tiles */
  CLB_CUDA_LINEAR_MANY,
  CLB_CUDA_ROUTER_LOGITS,
  CLB_CUDA_ROUTER,
  CLB_CUDA_ROUTE, /* both, for decode */
  CLB_CUDA_BUCKET,
  CLB_CUDA_CAPACITY,
  CLB_CUDA_GATE_UP,
  CLB_CUDA_DOWN,
  CLB_CUDA_GATE_UP_8,
  CLB_CUDA_DOWN_8,
  CLB_CUDA_GATE_UP_MANY,
  CLB_CUDA_DOWN_MANY,
  CLB_CUDA_COMBINE,
  CLB_CUDA_ATTEND,
  CLB_CUDA_APPEND,
  CLB_CUDA_ATTEND_MANY,
  CLB_CUDA_SAMPLE,
  CLB_CUDA_PUBLISH,
  CLB_CUDA_PROMPT_LOGPROBS,
  CLB_CUDA_POOL,
  CLB_CUDA_DUMMY,
  CLB_CUDA_TO_FP16,
  CLB_CUDA_GATE_UP_MIXED, /* of experts each in its own format */
  CLB_CUDA_DOWN_MIXED,
  CLB_CUDA_GATE_UP_MIXED_8,
  CLB_CUDA_DOWN_MIXED_8,
  CLB_CUDA_LINEAR_QUANT, /* from here on three each: of int8, int4, fp8 */
  CLB_CUDA_LINEAR_QUANT_8 = CLB_CUDA_LINEAR_QUANT + 3,
  CLB_CUDA_LINEAR_QUANT_MANY = CLB_CUDA_LINEAR_QUANT_8 + 3,
  CLB_CUDA_GATE_UP_QUANT_MANY = CLB_CUDA_LINEAR_QUANT_MANY + 3,
  CLB_CUDA_DOWN_QUANT_MANY = CLB_CUDA_GATE_UP_QUANT_MANY + 3,
  CLB_CUDA_KERNELS = CLB_CUDA_DOWN_QUANT_MANY + 3
}; /* clb_cuda_kernel */

/* A step that was launched and not seen yet. */
typedef struct clb_cuda_flight {
  uint32_t prefill; /* 1: a prefill step; 0: decode */
  uint32_t tokens;  /* rows computed */
  uint32_t count;   /* rows sampled: events to look at */
  uint32_t reserved;
  uint32_t slots[CLB_FEW_ROWS];       /* (count) */
  uint64_t generations[CLB_FEW_ROWS]; /* (count) */
} clb_cuda_flight;

struct clb_cuda {
  clb_device_desc device; /* private copy */
  clb_driver driver;
  clb_cuda_layout at;
  void* functions[CLB_CUDA_KERNELS];
  void* decode[CLB_CUDA_DECODE_BUCKETS]; /* executable graphs; NULL: not built */
  void* prefill[CLB_CUDA_PREFILL_BUCKETS];
  const clb_weight_table* weights; /* data is a device address */
  uint64_t made_at_open;           /* driver.made */
  uint64_t launched;               /* steps since open */
  uint64_t seen;                   /* of them, finished and their events forwarded */
  clb_cuda_flight flights[CLB_CUDA_STAGES];
  clb_slot_list list;                    /* what the device has */
  uint64_t layer_values[CLB_MAX_LAYERS]; /* K and V values a token in the layers below */
  uint64_t layer_tables[CLB_MAX_LAYERS]; /* device address of a layer's expert table */
  clb_driver helper;                     /* of the thread that stages experts */
  clb_expert_weights* swap_row;          /* page-locked: the row that the next switch copies */
  uint32_t precision;                    /* clb_cuda_precision */
  uint32_t kinds;                        /* of experts' weights: clb_cuda_kind of each */
  uint32_t meta;                         /* CLB_FORMAT_META of experts, the largest */
};

/* The bit of a clb_format_kind among `kinds`. */
static inline uint32_t clb_cuda_kind(uint32_t kind) { return UINT32_C(1) << kind; }
static inline uint32_t clb_cuda_meta(uint32_t format) { return CLB_FORMAT_META(format); }

/* Any expert quantised: then all layers take the kernels of mixed formats. */
static inline bool clb_cuda_mixed(const struct clb_cuda* cuda) {
  return (cuda->kinds & ~clb_cuda_kind(CLB_KIND_HALF)) != 0u;
}

static inline clb_device_addr clb_cuda_at(const struct clb_cuda* cuda, uint64_t offset) {
  return cuda->device.arena + offset;
}

/* Page-locked memory at `offset`. */
static inline void* clb_cuda_host(const struct clb_cuda* cuda, uint64_t offset) {
  return (unsigned char*)cuda->device.pinned + offset;
}

/* DEVICE, with what was being done and the driver's own words. */
static inline int32_t clb_cuda_fail(const clb_engine* engine, clb_error* error, const char* doing) {
  const clb_driver* const d = &engine->cuda->driver;
  return clb_fail(error, CLB_ERR_DEVICE, "%s: the driver says %s (%d)", doing, d->last_name, (int)d->last_code);
}

/* ---------------------------------------------------------- cuda_load.c */

/* What is done while weights are on their way; it may use their addresses. */
typedef int32_t (*clb_cuda_meanwhile)(clb_engine* engine, clb_error* error);
/* Fills the arena's weights and expert tables. Fails like clb_loader_load, like `meanwhile`, and with DEVICE. */
int32_t clb_cuda_load(clb_engine* engine, const clb_engine_config* config, void* host, clb_cuda_meanwhile meanwhile,
                      clb_error* error);
/* The row of an expert with these tensors: gate, up, down. */
clb_expert_weights clb_cuda_expert(const clb_tensor parts[3]);
/* The format of a matrix as kernels_cu/abi.h writes it. */
uint32_t clb_cuda_format(const clb_tensor* tensor);
uint32_t clb_cuda_section_format(const clb_section_desc* section);
/* In the stream of copies: a bf16 matrix in the arena becomes fp16, if those of its model are. */
int32_t clb_cuda_make_fp16(const struct clb_cuda* cuda, clb_driver* driver, const clb_tensor* tensor);
/* Bytes that the weights take in the arena. MEMORY: no scratch memory. */
int32_t clb_cuda_weights_bytes(const clb_engine_config* config, uint64_t* bytes, clb_error* error);
/* clb_precision of all 16-bit matrices in device memory, of a model that clb_cuda_model_check accepts, and so of the
   halves of split rows: BF16 if all matrices, and those that swaps may bring, are bf16, else FP16. */
uint32_t clb_cuda_precision(const clb_engine_config* config);

/* ---------------------------------------------------------- cuda_read.c */

typedef struct clb_cuda_readers clb_cuda_readers;

typedef struct clb_cuda_reader {
  clb_cuda_readers* all;
  clb_driver driver;                   /* a copy: `last_code` is this reader's */
  void* copied[CLB_CUDA_LOAD_BUFFERS]; /* events: the buffer may be written again */
  uint64_t pieces;                     /* read so far */
  uint32_t number;
  uint32_t file;
  uint32_t first; /* sorted section of the file */
  int32_t status;
  uint32_t started; /* 1: `thread` runs */
  pthread_t thread;
  clb_error error;
} clb_cuda_reader;

struct clb_cuda_readers {
  clb_engine* engine;
  const clb_engine_config* config;
  const clb_placement* placement;
  _Atomic uint32_t next_file;
  _Atomic uint32_t failed;
  _Atomic uint64_t loaded; /* bytes of all files so far */
  clb_cuda_reader each[CLB_CUDA_READERS];
};

/* Starts threads that read the files of the pack into the places of `placement`; all three outlive the end. */
void clb_cuda_read_begin(clb_cuda_readers* all, clb_engine* engine, const clb_engine_config* config,
                         const clb_placement* placement);
/* Reads along until all is there, or, if something `before` failed, stops. The first failure. */
int32_t clb_cuda_read_end(clb_cuda_readers* all, int32_t before, clb_error* error);

/* ---------------------------------------------------------- cuda_step.c */

/* Launches one step of at most `rows` rows; under capture the launches become a graph. DEVICE. */
int32_t clb_cuda_launch_decode(clb_engine* engine, uint32_t rows);
int32_t clb_cuda_launch_prefill(clb_engine* engine, uint32_t rows);
/* Log-probabilities of the wanted rows' next tokens, for the prompt items on the device. */
int32_t clb_cuda_launch_prompt(clb_engine* engine);
/* What the first `count` pool items on the device say, behind the step that computed their rows. */
int32_t clb_cuda_launch_pool(clb_engine* engine, uint32_t count);

/* --------------------------------------------------------- cuda_graph.c */

/* Looks every kernel up, by name and size of its arguments. MODULE. */
int32_t clb_cuda_find_kernels(clb_engine* engine, uint32_t precision, clb_error* error);
/* Captures a graph a bucket. DEVICE; what was built is in cuda->decode and cuda->prefill. */
int32_t clb_cuda_build_graphs(clb_engine* engine, clb_error* error);
void clb_cuda_destroy_graphs(struct clb_cuda* cuda);

/* --------------------------------------------------------- cuda_slots.c */

/* Copies what the device must know of a slot whose runs are reserved. Fails with DEVICE, or UNSUPPORTED. */
int32_t clb_cuda_slot_opened(clb_engine* engine, uint32_t slot);
int32_t clb_cuda_mask_set(clb_engine* engine, uint32_t slot, uint32_t position);

/* ---------------------------------------------------------- cuda_loop.c */

/* At most one prefill and one decode step; waits until at most one step is in flight. *worked: 1 if one was launched
   or seen. */
int32_t clb_cuda_steps(clb_engine* engine, uint32_t* worked);
/* Counts of all open slots, and waits for them. */
int32_t clb_cuda_count_experts(clb_engine* engine);

#endif /* CLB_CUDA_INTERNAL_H */
