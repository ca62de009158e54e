// The few declarations of ggml (0.25) that the plug-in needs and no header of llama-cpp-python offers. Nothing is
// linked: functions are looked up in the library that is already loaded, and layouts are checked (abi.cpp).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

struct ggml_backend_buffer_type;
struct ggml_backend_buffer;

namespace llamaherd {

enum { type_f32 = 0, type_f16 = 1, type_i32 = 26 };
enum { usage_weights = 1 };

struct Tensor {
    int32_t type;
    struct Buffer * buffer;
    int64_t ne[4];  // elements
    size_t nb[4];   // strides, bytes
    int32_t op;
    int32_t op_params[16];
    int32_t flags;
    Tensor * src[10];
    Tensor * view_src;
    size_t view_offs;
    void * data;
    char name[64];
    void * extra;
    char padding[8];
};

struct BufferType {
    const char * (*get_name)(BufferType *);
    struct Buffer * (*alloc_buffer)(BufferType *, size_t);
    size_t (*get_alignment)(BufferType *);
    size_t (*get_max_size)(BufferType *);
    size_t (*get_alloc_size)(BufferType *, const Tensor *);
    bool (*is_host)(BufferType *);
    void * device;
    void * context;
};

struct Buffer {
    void (*free_buffer)(Buffer *);
    void * (*get_base)(Buffer *);
    int (*init_tensor)(Buffer *, Tensor *);
    void (*memset_tensor)(Buffer *, Tensor *, uint8_t, size_t, size_t);
    void (*set_tensor)(Buffer *, Tensor *, const void *, size_t, size_t);
    void (*get_tensor)(Buffer *, const Tensor *, void *, size_t, size_t);
    void (*set_tensor_2d)(Buffer *, Tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(Buffer *, const Tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(Buffer *, const Tensor *, Tensor *);
    void (*clear)(Buffer *, uint8_t);
    void (*reset)(Buffer *);
    BufferType * type;
    void * context;
    size_t size;
    int32_t usage;
};

struct ComputeParams {
    int32_t ith, nth;
    size_t wsize;
    void * wdata;
    void * threadpool;
    bool use_ref;
};

// same tables of virtual functions as ggml::cpu::tensor_traits and ggml::cpu::extra_buffer_type (Itanium ABI)
struct TensorTraits {
    virtual ~TensorTraits() = default;
    virtual bool work_size(int threads, const Tensor * op, size_t & size) = 0;
    virtual bool compute_forward(ComputeParams * params, Tensor * op) = 0;
};

struct ExtraBufferType {
    virtual ~ExtraBufferType() = default;
    virtual bool supports_op(void * device, const Tensor * op) = 0;
    virtual TensorTraits * get_tensor_traits(const Tensor * op) = 0;
};

struct InitParams {
    size_t mem_size;
    void * mem_buffer;
    bool no_alloc;
};

// functions of the loaded ggml
struct Ggml {
    std::vector<BufferType *> & (*extra_buffer_types)();
    void (*barrier)(void * threadpool);
    void (*chunk_set)(void * threadpool, int);
    int (*chunk_add)(void * threadpool, int);
    BufferType * (*cpu_buffer_type)();
    void * (*cpu_reg)();
    void * (*reg_dev_get)(void * reg, size_t index);
    void * (*reg_get_proc_address)(void * reg, const char * name);
    Buffer * (*alloc_buffer)(BufferType *, size_t);
    void (*buffer_free)(Buffer *);
    void * (*buffer_get_base)(Buffer *);
    size_t (*buffer_get_size)(Buffer *);
    void (*buffer_set_usage)(Buffer *, int);
    const char * (*buft_name)(BufferType *);
    void * (*buft_get_device)(BufferType *);
    bool (*buft_is_host)(BufferType *);
    void * (*init)(InitParams);
    void (*free)(void * context);
    Tensor * (*new_tensor_2d)(void * context, int type, int64_t, int64_t);
    Tensor * (*new_tensor_3d)(void * context, int type, int64_t, int64_t, int64_t);
    Tensor * (*view_2d)(void * context, Tensor *, int64_t, int64_t, size_t, size_t);
    Tensor * (*mul_mat)(void * context, Tensor *, Tensor *);
    Tensor * (*mul_mat_id)(void * context, Tensor *, Tensor *, Tensor *);
    Tensor * (*new_tensor_4d)(void * context, int type, int64_t, int64_t, int64_t, int64_t);
    Tensor * (*flash_attn_ext)(void * context, Tensor * q, Tensor * k, Tensor * v, Tensor * mask, float scale,
                               float max_bias, float cap);
    void (*flash_attn_ext_add_sinks)(Tensor *, Tensor * sinks);
    size_t (*tensor_overhead)();
    size_t (*nbytes)(const Tensor *);
    const char * (*op_name)(int op);
    const char * (*type_name)(int type);
    int64_t (*blck_size)(int type);
    size_t (*type_size)(int type);
};

// numbers of operations, read from the library
struct Operations {
    int none, mul_mat, mul_mat_id, attention;
};

extern Ggml ggml;
extern Operations operations;

// fill ggml and operations from the library behind handle; "" or what is not as expected
const char * bind(void * handle);
// the same for attention, after bind
const char * bind_attention(void * handle);

}  // namespace llamaherd
