#include "matmul.h"

#include <algorithm>
#include <cstring>

namespace llamaherd {

namespace {

// up to so many activations every thread prepares all rows for itself: cheaper than waiting for each other
constexpr int64_t alone = 24 * 1024;

int64_t rows_of(const Tensor * t) { return t->ne[1] * t->ne[2] * t->ne[3]; }

size_t aligned(size_t n) { return (n + 63) & ~size_t{63}; }

uint8_t * aligned(void * p) { return reinterpret_cast<uint8_t *>(aligned(reinterpret_cast<size_t>(p))); }

const uint8_t * row_at(const Tensor * x, int64_t r) {
    const int64_t i1 = r % x->ne[1], i2 = r / x->ne[1] % x->ne[2], i3 = r / x->ne[1] / x->ne[2];
    return static_cast<const uint8_t *>(x->data) + static_cast<size_t>(i1) * x->nb[1] +
           static_cast<size_t>(i2) * x->nb[2] + static_cast<size_t>(i3) * x->nb[3];
}

float * result_at(Tensor * y, int64_t r) {
    return reinterpret_cast<float *>(const_cast<uint8_t *>(row_at(y, r)));
}

bool prepares_alone(const Tensor * x) { return rows_of(x) * x->ne[0] <= alone; }

// rows [first, last) of x into prepared; floats that need no preparation stay where they are
void prepare(const Kernel & kernel, const Tensor * x, int64_t first, int64_t last, uint8_t * prepared) {
    const size_t bytes = kernel.row_bytes(x->ne[0]);
    if (!bytes) return;
    for (int64_t r = first; r < last; ++r)
        kernel.prepare(reinterpret_cast<const float *>(row_at(x, r)), x->ne[0], prepared + static_cast<size_t>(r) * bytes);
}

const uint8_t * prepared_row(const Kernel & kernel, const Tensor * x, int64_t r, const uint8_t * prepared) {
    const size_t bytes = kernel.row_bytes(x->ne[0]);
    return bytes ? prepared + static_cast<size_t>(r) * bytes : row_at(x, r);
}

// strips [first, last) of a part of parts
void part_of(int64_t strips, int64_t part, int64_t parts, int64_t & first, int64_t & last) {
    first = strips * part / parts;
    last = strips * (part + 1) / parts;
}

// one matrix, or one expert, with its rows; dynamic: threads take chunks as they get free
void multiply(const Level & level, const Kernel & kernel, const ComputeParams & params, const uint8_t * weights,
              const Tensor * w, const Row * rows, int64_t count, bool dynamic) {
    const int64_t K = w->ne[0], N = w->ne[1], strips = (N + level.columns - 1) / level.columns;
    const int64_t parts = dynamic ? std::min<int64_t>(strips, params.nth * 4) : params.nth;
    for (int64_t part = params.ith; part < parts; part = dynamic ? ggml.chunk_add(params.threadpool, 1) : parts) {
        int64_t first, last;
        part_of(strips, part, parts, first, last);
        kernel.multiply(weights, K, N, first, last, rows, count);
    }
}

struct Work {
    uint8_t * prepared;
    Row * rows;
};

size_t prepared_bytes(const Kernel & kernel, const Tensor * x) {
    return aligned(static_cast<size_t>(rows_of(x)) * kernel.row_bytes(x->ne[0]));
}

size_t one_work(const Kernel & kernel, const Tensor * op) {
    // results of MUL_MAT_ID: one row for each token and expert used
    return prepared_bytes(kernel, op->src[1]) + aligned(static_cast<size_t>(rows_of(op)) * sizeof(Row));
}

Work work_of(const Kernel & kernel, const ComputeParams & params, const Tensor * op, bool own) {
    uint8_t * at = aligned(params.wdata) + (own ? static_cast<size_t>(params.ith) * one_work(kernel, op) : 0);
    return {at, reinterpret_cast<Row *>(at + prepared_bytes(kernel, op->src[1]))};
}

void dense(const Level & level, const Kernel & kernel, const ComputeParams & params, Tensor * op) {
    const Tensor *w = op->src[0], *x = op->src[1];
    const int64_t count = rows_of(x);
    const bool own = prepares_alone(x);
    const Work work = work_of(kernel, params, op, own);
    if (own) {
        prepare(kernel, x, 0, count, work.prepared);
        for (int64_t r = 0; r < count; ++r)
            work.rows[r] = {prepared_row(kernel, x, r, work.prepared), result_at(op, r)};
    } else {
        int64_t first, last;
        part_of(count, params.ith, params.nth, first, last);
        prepare(kernel, x, first, last, work.prepared);
        for (int64_t r = first; r < last; ++r)
            work.rows[r] = {prepared_row(kernel, x, r, work.prepared), result_at(op, r)};
        if (params.ith == 0) ggml.chunk_set(params.threadpool, params.nth);
        ggml.barrier(params.threadpool);
    }
    multiply(level, kernel, params, static_cast<const uint8_t *>(w->data), w, work.rows, count, !own);
}

// x: [K, 1 or used, tokens], ids: [used, tokens], result: [N, used, tokens]
void experts(const Level & level, const Kernel & kernel, const ComputeParams & params, Tensor * op) {
    const Tensor *w = op->src[0], *x = op->src[1], *ids = op->src[2];
    const int64_t used = ids->ne[0], tokens = ids->ne[1];
    const bool own = prepares_alone(x);
    const Work work = work_of(kernel, params, op, own);
    if (own) {
        prepare(kernel, x, 0, rows_of(x), work.prepared);
    } else {
        int64_t first, last;
        part_of(rows_of(x), params.ith, params.nth, first, last);
        prepare(kernel, x, first, last, work.prepared);
        ggml.barrier(params.threadpool);
    }
    const size_t expert_bytes = kernel.packed_bytes(w->ne[0], w->ne[1]);
    const auto expert_of = [&](int64_t token, int64_t slot) {
        int32_t id;
        std::memcpy(&id, static_cast<const char *>(ids->data) + token * static_cast<int64_t>(ids->nb[1]) +
                             slot * static_cast<int64_t>(ids->nb[0]), 4);
        return static_cast<int64_t>(id);
    };
    // every thread lists an expert's rows for itself, in its own place
    Row * rows = own ? work.rows
                     : reinterpret_cast<Row *>(aligned(params.wdata) + prepared_bytes(kernel, x) +
                                               static_cast<size_t>(params.ith) *
                                                   aligned(static_cast<size_t>(rows_of(op)) * sizeof(Row)));
    for (int64_t expert = 0; expert < w->ne[2]; ++expert) {
        int64_t count = 0;
        for (int64_t token = 0; token < tokens; ++token)
            for (int64_t slot = 0; slot < used; ++slot)
                if (expert_of(token, slot) == expert) {
                    const int64_t from = token * x->ne[1] + slot % x->ne[1];
                    rows[count++] = {prepared_row(kernel, x, from, work.prepared), result_at(op, token * used + slot)};
                }
        if (count)
            multiply(level, kernel, params,
                     static_cast<const uint8_t *>(w->data) + static_cast<size_t>(expert) * expert_bytes, w, rows, count,
                     false);
    }
}

}  // namespace

const Kernel * find_kernel(const Level & level, int type) {
    for (int i = 0; i < level.count; ++i)
        if (level.kernels[i].type == type) return &level.kernels[i];
    return nullptr;
}

size_t matmul_work_size(const Kernel & kernel, int threads, const Tensor * op) {
    const size_t rows = aligned(static_cast<size_t>(rows_of(op)) * sizeof(Row));
    const size_t all = static_cast<size_t>(threads);
    if (prepares_alone(op->src[1])) return 64 + all * one_work(kernel, op);
    return 64 + prepared_bytes(kernel, op->src[1]) + (op->op == operations.mul_mat_id ? all : 1) * rows;
}

void matmul(const Level & level, const Kernel & kernel, const ComputeParams & params, Tensor * op) {
    if (op->op == operations.mul_mat_id)
        experts(level, kernel, params, op);
    else
        dense(level, kernel, params, op);
}

}  // namespace llamaherd
