// MUL_MAT and MUL_MAT_ID of ggml over a level's kernels, on llama.cpp's threads.
#pragma once
#include "ggml_abi.h"
#include "level.h"

namespace llamaherd {

const Kernel * find_kernel(const Level & level, int type);

// bytes that all threads of an operation need together
size_t matmul_work_size(const Kernel & kernel, int threads, const Tensor * op);

void matmul(const Level & level, const Kernel & kernel, const ComputeParams & params, Tensor * op);

}  // namespace llamaherd
