// Looks ggml's functions up and checks every layout that the plug-in relies on, by what ggml itself says.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "ggml_abi.h"

namespace llamaherd {

Ggml ggml;
Operations operations;

namespace {

char problem[160];

const char * fail(const char * what, const char * detail = "") {
    std::snprintf(problem, sizeof problem, "%s%s", what, detail);
    return problem;
}

template <class F>
bool look_up(void * handle, const char * name, F & function) {
    void * address = dlsym(handle, name);
    std::memcpy(&function, &address, sizeof function);
    if (!address) fail("llama.cpp has no function ", name);
    return address != nullptr;
}

bool functions(void * h) {
    return look_up(h, "_Z39ggml_backend_cpu_get_extra_buffer_typesv", ggml.extra_buffer_types) &&
           look_up(h, "ggml_barrier", ggml.barrier) && look_up(h, "ggml_threadpool_chunk_set", ggml.chunk_set) &&
           look_up(h, "ggml_threadpool_chunk_add", ggml.chunk_add) &&
           look_up(h, "ggml_backend_cpu_buffer_type", ggml.cpu_buffer_type) &&
           look_up(h, "ggml_backend_cpu_reg", ggml.cpu_reg) &&
           look_up(h, "ggml_backend_reg_dev_get", ggml.reg_dev_get) &&
           look_up(h, "ggml_backend_reg_get_proc_address", ggml.reg_get_proc_address) &&
           look_up(h, "ggml_backend_buft_alloc_buffer", ggml.alloc_buffer) &&
           look_up(h, "ggml_backend_buffer_free", ggml.buffer_free) &&
           look_up(h, "ggml_backend_buffer_get_base", ggml.buffer_get_base) &&
           look_up(h, "ggml_backend_buffer_get_size", ggml.buffer_get_size) &&
           look_up(h, "ggml_backend_buffer_set_usage", ggml.buffer_set_usage) &&
           look_up(h, "ggml_backend_buft_name", ggml.buft_name) &&
           look_up(h, "ggml_backend_buft_get_device", ggml.buft_get_device) &&
           look_up(h, "ggml_backend_buft_is_host", ggml.buft_is_host) && look_up(h, "ggml_init", ggml.init) &&
           look_up(h, "ggml_free", ggml.free) && look_up(h, "ggml_new_tensor_2d", ggml.new_tensor_2d) &&
           look_up(h, "ggml_new_tensor_3d", ggml.new_tensor_3d) && look_up(h, "ggml_view_2d", ggml.view_2d) &&
           look_up(h, "ggml_mul_mat", ggml.mul_mat) && look_up(h, "ggml_mul_mat_id", ggml.mul_mat_id) &&
           look_up(h, "ggml_tensor_overhead", ggml.tensor_overhead) && look_up(h, "ggml_nbytes", ggml.nbytes) &&
           look_up(h, "ggml_op_name", ggml.op_name) && look_up(h, "ggml_type_name", ggml.type_name) &&
           look_up(h, "ggml_blck_size", ggml.blck_size) && look_up(h, "ggml_type_size", ggml.type_size);
}

bool is(const Tensor * t, int type, int64_t a, int64_t b, int64_t c) {
    return t->type == type && t->ne[0] == a && t->ne[1] == b && t->ne[2] == c && t->ne[3] == 1;
}

const char * tensors(void * context) {
    constexpr size_t object_bytes = 32;  // ggml_object, before each tensor
    if (ggml.tensor_overhead() != object_bytes + sizeof(Tensor)) return fail("ggml_tensor has another size");
    Tensor * w = ggml.new_tensor_3d(context, type_f32, 64, 16, 3);
    Tensor * x = ggml.new_tensor_2d(context, type_f32, 64, 5);
    Tensor * ids = ggml.new_tensor_2d(context, type_i32, 2, 5);
    Tensor * part = ggml.view_2d(context, x, 32, 4, x->nb[1], 128);
    Tensor * x3 = ggml.new_tensor_3d(context, type_f32, 64, 1, 5);
    Tensor * dense = ggml.mul_mat(context, x, x);
    Tensor * sparse = ggml.mul_mat_id(context, w, x3, ids);
    if (!is(w, type_f32, 64, 16, 3) || w->nb[0] != 4 || w->nb[1] != 256 || w->nb[2] != 4096 || w->nb[3] != 12288)
        return fail("ggml_tensor's shape lies elsewhere");
    if (w->data || w->buffer || w->view_src || w->extra) return fail("ggml_tensor's pointers lie elsewhere");
    if (part->view_src != x || part->view_offs != 128) return fail("ggml_tensor's view lies elsewhere");
    if (dense->src[0] != x || dense->src[1] != x || dense->src[2]) return fail("ggml_tensor's sources lie elsewhere");
    if (sparse->src[0] != w || sparse->src[1] != x3 || sparse->src[2] != ids || sparse->src[3])
        return fail("MUL_MAT_ID's sources are in another order");
    if (!is(dense, type_f32, 5, 5, 1) || !is(sparse, type_f32, 16, 2, 5)) return fail("a product has another shape");
    operations = {w->op, dense->op, sparse->op, -1};
    if (std::strcmp(ggml.op_name(w->op), "NONE") != 0 || std::strcmp(ggml.op_name(dense->op), "MUL_MAT") != 0 ||
        std::strcmp(ggml.op_name(sparse->op), "MUL_MAT_ID") != 0)
        return fail("ggml_tensor's operation lies elsewhere");
    return "";
}

const char * attention_tensors(void * context) {
    Tensor * q = ggml.new_tensor_4d(context, type_f32, 64, 5, 6, 2);
    Tensor * k = ggml.new_tensor_4d(context, type_f16, 64, 16, 3, 2);
    Tensor * v = ggml.new_tensor_4d(context, type_f16, 32, 16, 3, 2);
    Tensor * mask = ggml.new_tensor_4d(context, type_f16, 16, 5, 1, 1);
    Tensor * sinks = ggml.new_tensor_2d(context, type_f32, 6, 1);
    Tensor * op = ggml.flash_attn_ext(context, q, k, v, mask, 0.5f, 2.0f, 3.0f);
    ggml.flash_attn_ext_add_sinks(op, sinks);
    if (std::strcmp(ggml.op_name(op->op), "FLASH_ATTN_EXT") != 0) return fail("attention is another operation");
    if (op->src[0] != q || op->src[1] != k || op->src[2] != v || op->src[3] != mask || op->src[4] != sinks || op->src[5])
        return fail("attention's sources are in another order");
    const float expected[3] = {0.5f, 2.0f, 3.0f};
    if (std::memcmp(op->op_params, expected, sizeof expected) != 0) return fail("attention's numbers lie elsewhere");
    if (op->type != type_f32 || op->ne[0] != 32 || op->ne[1] != 6 || op->ne[2] != 5 || op->ne[3] != 2)
        return fail("attention's result has another shape");
    operations.attention = op->op;
    return "";
}

const char * buffers() {
    BufferType * cpu = ggml.cpu_buffer_type();
    if (std::strcmp(cpu->get_name(cpu), ggml.buft_name(cpu)) != 0 || cpu->device != ggml.buft_get_device(cpu) ||
        !cpu->is_host || !cpu->is_host(cpu) || !ggml.buft_is_host(cpu))
        return fail("ggml_backend_buffer_type has another layout");
    Buffer * b = ggml.alloc_buffer(cpu, 1000);
    if (!b) return fail("no memory");
    ggml.buffer_set_usage(b, usage_weights);
    const bool good = b->type == cpu && b->size == ggml.buffer_get_size(b) && b->usage == usage_weights &&
                      b->get_base && b->get_base(b) == ggml.buffer_get_base(b) && b->set_tensor;
    ggml.buffer_free(b);
    if (!good) return fail("ggml_backend_buffer has another layout");
    for (BufferType * extra : ggml.extra_buffer_types())
        if (!extra || std::strcmp(extra->get_name(extra), ggml.buft_name(extra)) != 0)
            return fail("the list of extra buffer types has another layout");
    return "";
}

}  // namespace

const char * bind(void * handle) {
    if (!functions(handle)) return problem;
    void * context = ggml.init({1 << 16, nullptr, true});
    const char * wrong = tensors(context);
    ggml.free(context);
    return *wrong ? wrong : buffers();
}

const char * bind_attention(void * handle) {
    if (!look_up(handle, "ggml_new_tensor_4d", ggml.new_tensor_4d) ||
        !look_up(handle, "ggml_flash_attn_ext", ggml.flash_attn_ext) ||
        !look_up(handle, "ggml_flash_attn_ext_add_sinks", ggml.flash_attn_ext_add_sinks))
        return problem;
    void * context = ggml.init({1 << 16, nullptr, true});
    const char * wrong = attention_tensors(context);
    ggml.free(context);
    return wrong;
}

}  // namespace llamaherd
