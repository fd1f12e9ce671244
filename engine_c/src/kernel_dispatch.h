/*
 * kernel_dispatch.h: which kernel reads which weights.
 *
 * Owns the loaded kernel modules and the kernel map: for every (layer, role, expert) the address of the
 * weights and the kernel of their own precision and layout. Filled once by clb_kernels_open; a step
 * follows pointers and never branches on precision, layout or machine. Replacing one expert's weights or
 * kernel is one assignment to its clb_expert_entry between two steps.
 *
 *   kernels.layers[l].experts[e] -> { gate, up, down, kernel, width }   routed expert e
 *   kernels.layers[l].shared     -> the same for the shared expert, or for the whole FFN of a dense layer
 *
 * Modules are shared objects that export clb_module_entry; of several that fit a precision and layout
 * the supported one of the highest rank is taken. They are loaded here, never inside a step.
 *
 * Does not: read files, own weight memory, allocate (the map lies in memory given by the caller; dlopen
 * allocates inside the C library, at open only). Thread: that of the engine's owner.
 */
#ifndef CLB_KERNEL_DISPATCH_H
#define CLB_KERNEL_DISPATCH_H

#include <stddef.h>
#include <stdint.h>

#include "../include/colibri.h"
#include "loader_internal.h" /* clb_place */

#define CLB_MAX_MODULES 32u

/* A weight matrix (rows, cols) and its kernels. weights.values NULL: the model has none. */
typedef struct clb_matrix {
  clb_operand weights;
  const clb_module* kernel;
  uint32_t rows;
  uint32_t cols;
} clb_matrix;

typedef struct clb_expert_entry {
  clb_operand gate; /* (width, hidden); values NULL: the layer has no such expert */
  clb_operand up;   /* (width, hidden) */
  clb_operand down; /* (hidden, width) */
  const clb_module* kernel;
  uint32_t width;
  uint32_t reserved;
} clb_expert_entry;

typedef struct clb_layer_kernels {
  const float* attn_norm;   /* (hidden) */
  const float* ffn_norm;    /* (hidden) */
  const float* qkv_bias;    /* (q + 2 kv) or NULL */
  const float* out_bias;    /* (hidden) or NULL */
  const float* q_norm;      /* (head_dim) or (q), by the layer's qk_norm; NULL without */
  const float* k_norm;      /* (head_dim) or (kv); NULL without */
  const float* shared_gate; /* (hidden); NULL unless the shared expert is gated */
  clb_matrix qkv;           /* (q + 2 kv, hidden) */
  clb_matrix out;           /* (hidden, q) */
  clb_matrix router;        /* (experts, hidden); MoE layers */
  clb_expert_entry shared;
  clb_expert_entry* experts; /* (experts) */
} clb_layer_kernels;

typedef struct clb_kernels {
  void* handles[CLB_MAX_MODULES];
  const clb_module* modules[CLB_MAX_MODULES]; /* NULL where this machine cannot run it */
  uint32_t by_name[CLB_MAX_MODULES];          /* 1: not looked at unless it is named */
  uint32_t module_count;
  uint32_t reserved;
  clb_matrix embedding;      /* (vocab, hidden) */
  clb_matrix head;           /* (vocab, hidden); the embedding's when tied */
  const float* final_norm;   /* (hidden) */
  clb_layer_kernels* layers; /* (layers) */
} clb_kernels;

/* Bytes that clb_kernels_open needs for the map of this model, at a 64-byte boundary. */
uint64_t clb_kernels_bytes(const clb_model_desc* model);

/* Loads the modules and fills the map from loaded weights. `memory` has clb_kernels_bytes(model) bytes;
   it and the weights outlive the map. ref_count <= CLB_MAX_MODULES (asserted).
   MODULE iff a module does not load, has another ABI version or an incomplete table, or none fits a
   tensor. On failure nothing is held. */
int32_t clb_kernels_open(clb_kernels* kernels, const clb_module_ref* refs, uint32_t ref_count,
                         const clb_model_desc* model, const clb_weight_table* weights, void* memory, clb_error* error);
/* The entry of an expert with these three tensors, which is to lie at `place`. module: 1 + index of the one to take, or
   0: the best. MODULE iff none fits, UNSUPPORTED iff the three are of several formats; *entry is then undefined. */
int32_t clb_kernels_bind(const clb_kernels* kernels, const clb_tensor parts[3], clb_place place, uint32_t module,
                         clb_expert_entry* entry, clb_error* error);
/* Unloads the modules. Harmless on zeroed memory and when repeated. */
void clb_kernels_close(clb_kernels* kernels);

#endif /* CLB_KERNEL_DISPATCH_H */
