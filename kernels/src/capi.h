// What Python calls, by ctypes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "level.h"

namespace llamaherd {
const Level * find_level(const char * name);  // or null
const char * install(void * handle, const Level & level, uint64_t types, bool with_attention);
bool take_attention(bool wanted);
void counts(int64_t * out);
}  // namespace llamaherd

#define LLAMAHERD_API extern "C" __attribute__((visibility("default")))

// names of the levels that are built in, best first, separated by spaces
LLAMAHERD_API const char * llamaherd_kernels_levels();
// 1 if this CPU has the level's instructions
LLAMAHERD_API int llamaherd_kernels_runs(const char * level);
// "" or why not. handle: dlopen's, of libllama; types: one bit for each ggml_type
LLAMAHERD_API const char * llamaherd_kernels_install(void * handle, const char * level, uint64_t types, int attention);
// after install: take attention (1) or leave it to llama.cpp (0), between two computations; what it was before
LLAMAHERD_API int llamaherd_kernels_take_attention(int wanted);
// attention on threads of its own; 0 if it is not of a kind that the kernels compute
LLAMAHERD_API int llamaherd_kernels_attend(const char * level, const llamaherd::AttentionOperation * operation,
                                           int threads);
// tensors packed, products computed, attention computed
LLAMAHERD_API void llamaherd_kernels_counts(int64_t * out);
// bytes of packed weights, or 0: the level has no such kernel, or K is no multiple of its block
LLAMAHERD_API size_t llamaherd_kernels_packed_bytes(const char * level, int type, int64_t K, int64_t N);
LLAMAHERD_API void llamaherd_kernels_pack(const char * level, int type, int64_t K, int64_t N, const void * weights,
                                          void * packed);
// out[M, N] = x[M, K] times packed weights; strips [first, last) of each repetition's matrix
LLAMAHERD_API void llamaherd_kernels_multiply(const char * level, int type, int64_t K, int64_t N, int64_t M,
                                              const void * packed, const float * x, float * out, int threads,
                                              int repeat);
// rounds of the level's product of bytes, from registers; returns multiplications and additions done (0: unknown level)
LLAMAHERD_API int64_t llamaherd_kernels_peak(const char * level, int64_t rounds);
// load every byte once
LLAMAHERD_API void llamaherd_kernels_read(const void * data, int64_t bytes);
