/* kernel_dispatch.c: see kernel_dispatch.h. */
#include "kernel_dispatch.h"

#include <dlfcn.h>
#include <string.h>

#include "invariant.h"
#include "loader_internal.h" /* clb_fail */

static uint64_t round_up(uint64_t bytes) { return (bytes + 63u) & ~UINT64_C(63); }

uint64_t clb_kernels_bytes(const clb_model_desc* model) {
  uint64_t bytes = round_up(model->layers * sizeof(clb_layer_kernels));
  for (uint32_t l = 0; l < model->layers; ++l) {
    bytes += round_up(model->layer_table[l].experts * sizeof(clb_expert_entry));
  }
  return bytes;
}

static int32_t fail(clb_error* error, const char* name, const char* what) {
  return clb_fail(error, CLB_ERR_MODULE, "kernel module %s %s", name, what);
}

/* The loader's own text may name a folder, so only the module's name is passed on. */
static int32_t load_module(clb_kernels* kernels, const clb_module_ref* ref, clb_error* error) {
  void* const handle = dlopen(ref->path, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    return fail(error, ref->name, "cannot be loaded; reinstall colibrid for this machine");
  }
  const uint32_t index = kernels->module_count;
  ++kernels->module_count;
  kernels->handles[index] = handle;
  kernels->modules[index] = NULL;
  kernels->by_name[index] = ref->by_name;
  clb_module_entry_fn entry = NULL;
  void* const symbol = dlsym(handle, CLB_MODULE_ENTRY);
  (void)memcpy(&entry, &symbol, sizeof entry); /* ISO C has no cast from object to function pointer */
  if (entry == NULL) {
    return fail(error, ref->name, "does not export " CLB_MODULE_ENTRY);
  }
  const clb_module* const module = entry();
  if (module == NULL || module->abi_version != CLB_ABI_VERSION || module->struct_bytes != sizeof(clb_module)) {
    return fail(error, ref->name, "was built for another version of colibrid; reinstall both together");
  }
  if (module->linear == NULL || module->gate_up == NULL || module->row == NULL || module->supported == NULL) {
    return fail(error, ref->name, "has an incomplete table of kernels");
  }
  if (module->reads_codes > 1u || (module->reads_codes == 1u && !clb_wants_codes(module->precision))) {
    return fail(error, ref->name, "reads codes, which are made for int8 and int4 only");
  }
  if (module->supported() == 1) {
    kernels->modules[index] = module;
  }
  return CLB_OK;
}

static const clb_module* find_module(const clb_kernels* kernels, const clb_tensor* tensor) {
  const clb_module* best = NULL;
  for (uint32_t i = 0; i < kernels->module_count; ++i) {
    const clb_module* const module = kernels->modules[i];
    if (module == NULL || kernels->by_name[i] != 0u || module->precision != tensor->precision ||
        module->layout != tensor->layout) {
      continue;
    }
    if (best == NULL || module->rank > best->rank) {
      best = module;
    }
  }
  return best;
}

static clb_operand operand_of(const clb_tensor* tensor) {
  return (clb_operand){tensor->data, tensor->scales, tensor->zeros, tensor->group_rows, tensor->group_cols};
}

/* A tensor with its kernel; all zero if the model has none. */
static int32_t bind_matrix(const clb_kernels* kernels, const clb_tensor* tensor, clb_matrix* matrix, clb_error* error) {
  static const char* const precision_names[] = {"fp32", "fp16", "bf16", "int8", "int4", "fp8"};
  (void)memset(matrix, 0, sizeof *matrix);
  if (tensor->data == NULL) {
    return CLB_OK;
  }
  CLB_ASSERT(tensor->precision <= CLB_FP8);
  *matrix = (clb_matrix){operand_of(tensor), find_module(kernels, tensor), tensor->rows, tensor->cols};
  if (matrix->kernel == NULL) {
    return fail(error, precision_names[tensor->precision], "is needed by the model, but none runs on this machine");
  }
  return CLB_OK;
}

/* The module that was named, for these tensors; NULL if it does not fit. */
static const clb_module* named_module(const clb_kernels* kernels, const clb_tensor* tensor, uint32_t index) {
  const clb_module* const module = index < kernels->module_count ? kernels->modules[index] : NULL;
  const bool fits = module != NULL && module->precision == tensor->precision && module->layout == tensor->layout;
  return fits ? module : NULL;
}

int32_t clb_kernels_bind(const clb_kernels* kernels, const clb_tensor parts[3], clb_place place, uint32_t module,
                         clb_expert_entry* entry, clb_error* error) {
  const clb_tensor* const gate = &parts[0];
  const clb_tensor* const up = &parts[1];
  const clb_tensor* const down = &parts[2];
  clb_matrix matrix;
  const int32_t status = bind_matrix(kernels, gate, &matrix, error);
  (void)memset(entry, 0, sizeof *entry);
  if (status != CLB_OK || gate->data == NULL) {
    return status;
  }
  if (up->precision != gate->precision || down->precision != gate->precision || up->layout != gate->layout ||
      down->layout != gate->layout || up->group_rows != gate->group_rows || up->group_cols != gate->group_cols ||
      (up->zeros == NULL) != (gate->zeros == NULL)) {
    return clb_fail(
        error, CLB_ERR_UNSUPPORTED,
        "layer %d expert %d: gate, up and down must have one precision and layout, gate and up also one kind "
        "of groups",
        (int)place.layer, (int)place.expert);
  }
  if (module != 0u) {
    matrix.kernel = named_module(kernels, gate, module - 1u);
  }
  if (matrix.kernel == NULL) {
    return clb_fail(error, CLB_ERR_MODULE,
                    "layer %d expert %d: the kernel module that is named is for another precision than the expert's "
                    "weights, or does not run on this machine; take one for them, or leave it out",
                    (int)place.layer, (int)place.expert);
  }
  entry->gate = operand_of(gate);
  entry->up = operand_of(up);
  entry->down = operand_of(down);
  entry->kernel = matrix.kernel;
  entry->width = gate->rows;
  return CLB_OK;
}

/* gate, up and down lie side by side in the table. */
static int32_t bind_expert(const clb_kernels* kernels, const clb_weight_table* weights, int32_t layer, int32_t expert,
                           clb_expert_entry* entry, clb_error* error) {
  const clb_place place = {CLB_ROLE_GATE, layer, expert};
  return clb_kernels_bind(kernels, clb_weight(weights, CLB_ROLE_GATE, layer, expert), place, 0, entry, error);
}

static int32_t bind_layer(const clb_kernels* kernels, const clb_weight_table* weights, int32_t l, uint32_t experts,
                          clb_layer_kernels* layer, clb_error* error) {
  const struct {
    uint32_t role;
    clb_matrix* matrix;
  } matrices[] = {{CLB_ROLE_QKV, &layer->qkv}, {CLB_ROLE_OUT, &layer->out}, {CLB_ROLE_ROUTER, &layer->router}};
  int32_t status = CLB_OK;
  for (size_t i = 0; i < sizeof matrices / sizeof matrices[0] && status == CLB_OK; ++i) {
    status = bind_matrix(kernels, clb_weight(weights, matrices[i].role, l, -1), matrices[i].matrix, error);
  }
  layer->attn_norm = clb_weight(weights, CLB_ROLE_ATTN_NORM, l, -1)->data;
  layer->ffn_norm = clb_weight(weights, CLB_ROLE_FFN_NORM, l, -1)->data;
  layer->qkv_bias = clb_weight(weights, CLB_ROLE_QKV_BIAS, l, -1)->data;
  layer->out_bias = clb_weight(weights, CLB_ROLE_OUT_BIAS, l, -1)->data;
  layer->q_norm = clb_weight(weights, CLB_ROLE_Q_NORM, l, -1)->data;
  layer->shared_gate = clb_weight(weights, CLB_ROLE_SHARED_GATE, l, -1)->data;
  layer->k_norm = clb_weight(weights, CLB_ROLE_K_NORM, l, -1)->data;
  if (status == CLB_OK) {
    status = bind_expert(kernels, weights, l, -1, &layer->shared, error);
  }
  for (uint32_t e = 0; e < experts && status == CLB_OK; ++e) {
    status = bind_expert(kernels, weights, l, (int32_t)e, &layer->experts[e], error);
  }
  return status;
}

static void place_map(clb_kernels* kernels, const clb_model_desc* model, void* memory) {
  unsigned char* next = memory;
  (void)memset(memory, 0, clb_kernels_bytes(model));
  kernels->layers = (clb_layer_kernels*)(void*)next;
  next += round_up(model->layers * sizeof(clb_layer_kernels));
  for (uint32_t l = 0; l < model->layers; ++l) {
    kernels->layers[l].experts = (clb_expert_entry*)(void*)next;
    next += round_up(model->layer_table[l].experts * sizeof(clb_expert_entry));
  }
}

static int32_t bind_model(clb_kernels* kernels, const clb_model_desc* model, const clb_weight_table* weights,
                          clb_error* error) {
  int32_t status = bind_matrix(kernels, clb_weight(weights, CLB_ROLE_EMBEDDING, -1, -1), &kernels->embedding, error);
  if (status == CLB_OK) {
    status = bind_matrix(kernels, clb_weight(weights, CLB_ROLE_HEAD, -1, -1), &kernels->head, error);
  }
  if (kernels->head.weights.values == NULL) {
    kernels->head = kernels->embedding;
  }
  kernels->final_norm = clb_weight(weights, CLB_ROLE_FINAL_NORM, -1, -1)->data;
  for (uint32_t l = 0; l < model->layers && status == CLB_OK; ++l) {
    status = bind_layer(kernels, weights, (int32_t)l, model->layer_table[l].experts, &kernels->layers[l], error);
  }
  return status;
}

int32_t clb_kernels_open(clb_kernels* kernels, const clb_module_ref* refs, uint32_t ref_count,
                         const clb_model_desc* model, const clb_weight_table* weights, void* memory, clb_error* error) {
  CLB_ASSERT(ref_count <= CLB_MAX_MODULES);
  (void)memset(kernels, 0, sizeof *kernels);
  int32_t status = CLB_OK;
  for (uint32_t i = 0; i < ref_count && status == CLB_OK; ++i) {
    status = load_module(kernels, &refs[i], error);
  }
  if (status == CLB_OK) {
    place_map(kernels, model, memory);
    status = bind_model(kernels, model, weights, error);
  }
  if (status != CLB_OK) {
    clb_kernels_close(kernels);
  }
  return status;
}

void clb_kernels_close(clb_kernels* kernels) {
  for (uint32_t i = kernels->module_count; i > 0u; i--) {
    (void)dlclose(kernels->handles[i - 1u]);
  }
  (void)memset(kernels, 0, sizeof *kernels);
}
