// A level: the kernels of all formats, compiled for one instruction set. Chosen at run time.
#pragma once
#include <cstddef>
#include <cstdint>

namespace llamaherd {

// A row of activations, prepared by Kernel::prepare (or plain floats where row_bytes is 0), and its row of results.
struct Row {
    const uint8_t * activations;
    float * out;
};

// One format's kernel. K: columns of the weights (and of the activations), N: rows of the weights = results a row.
struct Kernel {
    int type;        // ggml_type
    int block;       // K must be a multiple of it
    int block_bytes; // of the file's layout
    size_t (*packed_bytes)(int64_t K, int64_t N);
    // strips [first, last) of the weights in ggml's layout, rows row_bytes apart, into the packed layout
    void (*pack)(const uint8_t * weights, size_t row_bytes, int64_t K, int64_t N, int64_t first, int64_t last,
                 uint8_t * packed);
    size_t (*row_bytes)(int64_t K);
    void (*prepare)(const float * x, int64_t K, uint8_t * activations);
    // results of strips [first, last) for M rows
    void (*multiply)(const uint8_t * packed, int64_t K, int64_t N, int64_t first, int64_t last, const Row * rows,
                     int64_t M);
};

struct AttentionKernel;  // attention.h

struct Level {
    const char * name;
    int columns;  // weight rows in a strip
    int count;
    const Kernel * kernels;
    const AttentionKernel * attention;
};

extern const Level level_emulated8;   // what AVX2 does, in plain C++
extern const Level level_emulated16;  // what AVX512-VNNI does, in plain C++
extern const Level level_avx2;
extern const Level level_avxvnni;
extern const Level level_avx512vnni;
extern const Level level_avx512bf16;  // and its products of 16-bit floats
extern const Level level_dotprod;  // arm64
extern const Level level_i8mm;     // arm64

}  // namespace llamaherd
