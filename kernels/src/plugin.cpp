// The buffer type that holds packed weights, and the traits by which llama.cpp's CPU backend calls our products.
//
// llama.cpp asks the CPU's extra buffer types, first come first served, which of them wants a weight. Ours stands at
// the front of that list; what it does not want goes to llama.cpp's own.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "attention.h"
#include "capi.h"
#include "ggml_abi.h"
#include "matmul.h"

namespace llamaherd {
namespace {

const Level * level = nullptr;
uint64_t types = 0;  // one bit a ggml_type
std::atomic<int64_t> packed_tensors{0}, products{0}, attentions{0};
std::atomic<bool> takes_attention{false};

const Kernel * kernel_of(const Tensor * w) {
    if (w->type < 0 || w->type >= 64 || !(types >> w->type & 1)) return nullptr;
    const Kernel * kernel = find_kernel(*level, w->type);
    if (!kernel || w->ne[0] % kernel->block || w->ne[3] != 1 || w->view_src) return nullptr;
    const size_t row = static_cast<size_t>(w->ne[0] / kernel->block) * static_cast<size_t>(kernel->block_bytes);
    const bool contiguous = w->nb[1] == row && w->nb[2] == row * static_cast<size_t>(w->ne[1]);
    return contiguous && w->ne[0] > 0 && w->ne[1] >= 8 ? kernel : nullptr;
}

size_t packed_size(const Kernel & kernel, const Tensor * w) {
    return kernel.packed_bytes(w->ne[0], w->ne[1]) * static_cast<size_t>(w->ne[2]);
}

// ---- buffer type

const char * type_title(BufferType *) { return "LLAMAHERD"; }

size_t alignment(BufferType *) { return 64; }

size_t alloc_size(BufferType *, const Tensor * t) {
    const Kernel * kernel = t->op == operations.none ? kernel_of(t) : nullptr;
    return std::max(ggml.nbytes(t), kernel ? packed_size(*kernel, t) : 0);
}

void set_tensor(Buffer *, Tensor * t, const void * data, size_t offset, size_t size) {
    const Kernel * kernel = kernel_of(t);
    if (!kernel || offset != 0 || size != ggml.nbytes(t)) {
        std::memcpy(static_cast<char *>(t->data) + offset, data, size);
        return;
    }
    const int64_t K = t->ne[0], N = t->ne[1];
    const int64_t strips = (N + level->columns - 1) / level->columns, all = strips * t->ne[2];
    const size_t one = kernel->packed_bytes(K, N);
    const auto pack = [&](int64_t first, int64_t last) {
        for (int64_t s = first; s < last; ++s) {
            const int64_t matrix = s / strips, strip = s % strips;
            kernel->pack(static_cast<const uint8_t *>(data) + static_cast<size_t>(matrix) * t->nb[2], t->nb[1], K, N, strip,
                         strip + 1, static_cast<uint8_t *>(t->data) + static_cast<size_t>(matrix) * one);
        }
    };
    const int64_t threads = std::min<int64_t>({4, std::max(1u, std::thread::hardware_concurrency()),
                                               1 + static_cast<int64_t>(size >> 20)});
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(pack, all * i / threads, all * (i + 1) / threads);
    pack(0, all / threads);
    for (std::thread & other : others) other.join();
    packed_tensors++;
}

Buffer * alloc_buffer(BufferType * type, size_t size) {
    Buffer * buffer = ggml.alloc_buffer(ggml.cpu_buffer_type(), size);
    if (!buffer) return nullptr;
    constexpr size_t huge = size_t{2} << 20;
    const size_t begin = (reinterpret_cast<size_t>(buffer->get_base(buffer)) + huge - 1) & ~(huge - 1);
    const size_t end = (reinterpret_cast<size_t>(buffer->get_base(buffer)) + size) & ~(huge - 1);
    if (size > 2 * huge) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
    buffer->type = type;
    buffer->set_tensor = set_tensor;
    // the layout is ours: nobody may read it, or write parts of it
    buffer->get_tensor = nullptr;
    buffer->cpy_tensor = nullptr;
    buffer->set_tensor_2d = nullptr;
    buffer->get_tensor_2d = nullptr;
    return buffer;
}

// ---- operations

struct Extra;
BufferType * buffer_type();

bool ours(const Tensor * op) {
    if (op->op != operations.mul_mat && op->op != operations.mul_mat_id) return false;
    const Tensor * w = op->src[0];
    return w && w->buffer && w->buffer->type == buffer_type();
}

// llama.cpp asks with tensors that have no data, some without a shape
bool supported(const Tensor * op) {
    if (!ours(op)) return false;
    const Tensor *w = op->src[0], *x = op->src[1];
    if (!kernel_of(w) || x->type != type_f32 || op->type != type_f32) return false;
    if (x->buffer && !ggml.buft_is_host(x->buffer->type)) return false;
    if (op->op == operations.mul_mat) return w->ne[2] == 1;
    return op->src[2] && op->src[2]->type == type_i32;
}

struct Traits final : TensorTraits {
    bool work_size(int threads, const Tensor * op, size_t & size) override {
        const Kernel * kernel = kernel_of(op->src[0]);
        if (!kernel) return false;
        size = matmul_work_size(*kernel, threads, op);
        return true;
    }
    bool compute_forward(ComputeParams * params, Tensor * op) override {
        const Kernel * kernel = kernel_of(op->src[0]);
        if (!kernel) return false;
        if (params->ith == 0) products.fetch_add(1, std::memory_order_relaxed);
        matmul(*level, *kernel, *params, op);
        return true;
    }
};

AttentionOperation operation_of(const Tensor * t) {
    AttentionOperation op = {};
    const Tensor *q = t->src[0], *k = t->src[1], *v = t->src[2], *mask = t->src[3];
    const auto shape = [](const Tensor * from, int64_t * ne, int64_t * nb) {
        for (int i = 0; i < 4; ++i) ne[i] = from->ne[i], nb[i] = static_cast<int64_t>(from->nb[i]);
    };
    shape(q, op.q_ne, op.q_nb);
    shape(k, op.k_ne, op.k_nb);
    shape(v, op.v_ne, op.v_nb);
    if (mask) shape(mask, op.mask_ne, op.mask_nb);
    op.q = q->data;
    op.k = k->data;
    op.v = v->data;
    // while it is planned there may be no data yet, but there is a mask
    op.mask = mask ? (mask->data ? mask->data : mask) : nullptr;
    op.sinks = t->src[4] ? t->src[4]->data : nullptr;
    op.out = t->data;
    op.k_type = k->type;
    op.v_type = v->type;
    std::memcpy(&op.scale, t->op_params, 4);
    std::memcpy(&op.max_bias, t->op_params + 1, 4);
    std::memcpy(&op.cap, t->op_params + 2, 4);
    return op;
}

bool ours_to_attend(const Tensor * op) {
    if (op->op != operations.attention || !takes_attention.load(std::memory_order_relaxed)) return false;
    const Tensor *q = op->src[0], *mask = op->src[3], *sinks = op->src[4];
    return q && op->src[1] && op->src[2] && q->type == type_f32 && op->type == type_f32 &&
           (!mask || mask->type == type_f16) && (!sinks || (sinks->type == type_f32 && sinks->ne[0] == q->ne[2])) &&
           !op->src[5] && attention_fits(operation_of(op));
}

struct AttentionTraits final : TensorTraits {
    bool work_size(int threads, const Tensor * op, size_t & size) override {
        size = attention_work_size(*level, threads, operation_of(op));
        return true;
    }
    bool compute_forward(ComputeParams * params, Tensor * op) override {
        if (params->ith == 0) attentions.fetch_add(1, std::memory_order_relaxed);
        const AttentionTeam team = {params->ith, params->nth, params->threadpool, ggml.barrier, ggml.chunk_set,
                                    ggml.chunk_add};
        attention(*level, team, operation_of(op), params->wdata, params->wsize);
        return true;
    }
};

struct Extra final : ExtraBufferType {
    Traits traits;
    AttentionTraits attention_traits;
    bool supports_op(void *, const Tensor * op) override { return supported(op); }
    // llama.cpp asks this for every operation, wherever its sources lie
    TensorTraits * get_tensor_traits(const Tensor * op) override {
        if (ours(op)) return &traits;
        return ours_to_attend(op) ? &attention_traits : nullptr;
    }
};

BufferType * buffer_type() {
    static Extra extra;
    static BufferType type = {type_title, alloc_buffer, alignment, nullptr, alloc_size, nullptr,
                              ggml.reg_dev_get(ggml.cpu_reg(), 0), &extra};
    return &type;
}

// does llama.cpp ask us first?
bool is_first() {
    using List = BufferType ** (*)(void * device);
    void * address = ggml.reg_get_proc_address(ggml.cpu_reg(), "ggml_backend_dev_get_extra_bufts");
    List list;
    std::memcpy(&list, &address, sizeof list);
    if (!list) return false;
    BufferType ** extras = list(ggml.reg_dev_get(ggml.cpu_reg(), 0));
    return extras && extras[0] == buffer_type();
}

}  // namespace

const char * install(void * handle, const Level & wanted, uint64_t enabled, bool with_attention) {
    if (level) return level == &wanted ? "" : "another level is already installed in this process";
    const char * wrong = bind(handle);
    if (*wrong) return wrong;
    for (int i = 0; i < wanted.count; ++i) {
        const Kernel & k = wanted.kernels[i];
        if (ggml.type_size(k.type) != static_cast<size_t>(k.block_bytes) || ggml.blck_size(k.type) != k.block)
            enabled &= ~(uint64_t{1} << k.type);
    }
    level = &wanted;
    types = enabled;
    std::vector<BufferType *> & list = ggml.extra_buffer_types();
    list.insert(list.begin(), buffer_type());
    if (is_first()) {
        // not an error: the products do without
        if (with_attention && *bind_attention(handle) == 0) takes_attention = true;
        return "";
    }
    types = 0;  // in the list or not, nothing is taken
    return "a model was loaded before: llama.cpp made its list of buffer types, and ours cannot join it any more";
}

bool take_attention(bool wanted) {
    return takes_attention.exchange(wanted && operations.attention >= 0 && level);
}

void counts(int64_t * out) {
    out[0] = packed_tensors;
    out[1] = products;
    out[2] = attentions;
}

}  // namespace llamaherd
