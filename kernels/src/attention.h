// Attention (FLASH_ATTN_EXT) over a level's kernel.
//
// A query's result depends on its own numbers and on those of the cells that its mask leaves open, in the order of the
// cells: open cells are counted off in blocks and segments, so that neither the batch, nor the threads, nor what else
// lies in the cache, nor where in the cache they lie, changes a bit of it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace llamaherd {

struct Level;

enum { kv_f32 = 0, kv_f16 = 1, kv_q8_0 = 8, kv_bf16 = 30 };  // ggml types

constexpr int attention_block = 64;     // open cells of a query that are computed together
constexpr int attention_segment = 256;  // open cells that are summed up before they join the others

// one head of keys and values
struct AttentionKeys {
    const uint8_t *k, *v;
    int64_t k_stride, v_stride;  // bytes from cell to cell
    int64_t DK, DV;              // columns
    int64_t cells;
    int32_t k_type, v_type;
    float scale, cap;  // a score is dot * scale, then cap * tanh(it) if cap is not 0
};

// heads of a token that share a mask
struct AttentionQuery {
    const uint16_t * mask;  // 16-bit floats, one for each cell; or null: all are open
    int first, count;       // of its rows
};

struct AttentionRow {
    const float * q;
    float * out;
    float slope;         // of the mask's numbers
    const float * sink;  // or null
};

constexpr int max_attention_rows = 192;  // of a head
constexpr int max_attention_heads = 8;   // computed together, since a cell's heads lie side by side in memory

struct AttentionHead {
    AttentionKeys keys;
    const AttentionRow * rows;
    float * partials;  // or null
};

struct AttentionKernel {
    size_t (*scratch_bytes)(int64_t DK, int64_t DV, int64_t rows);  // rows: of all heads
    int64_t (*partial_floats)(int64_t DV);
    // Heads of one shape, whose queries are the same but for their rows. Segments [first, last) of each query's open
    // cells; last < 0: all of them. With partials, each segment's sums go to partials[row][segment], of segments in
    // all; without, results are complete.
    void (*run)(const AttentionHead * heads, int head_count, const AttentionQuery * queries, int query_count,
                int64_t first, int64_t last, uint8_t * scratch, int64_t segments);
    // a row's result from its segments' sums
    void (*merge)(const AttentionKeys & keys, const AttentionRow & row, const float * partials, int64_t segments,
                  uint8_t * scratch);
    int64_t (*open_cells)(const uint16_t * mask, int64_t cells);
};

// the operation as ggml describes it; tests fill it by themselves
struct AttentionOperation {
    const void *q, *k, *v, *mask, *sinks;  // mask and sinks: or null
    void * out;
    int64_t q_ne[4], k_ne[4], v_ne[4], mask_ne[4];  // columns, rows, heads, streams
    int64_t q_nb[4], k_nb[4], v_nb[4], mask_nb[4];  // bytes
    int32_t k_type, v_type;
    float scale, max_bias, cap;
};

// the threads that compute it together, ggml's or a test's
struct AttentionTeam {
    int32_t ith, nth;
    void * pool;
    void (*barrier)(void * pool);
    void (*chunk_set)(void * pool, int);
    int (*chunk_add)(void * pool, int);
};

// can it be computed here?
bool attention_fits(const AttentionOperation & op);

// bytes that all threads need together
size_t attention_work_size(const Level & level, int threads, const AttentionOperation & op);

void attention(const Level & level, const AttentionTeam & team, const AttentionOperation & op, void * work,
               size_t work_size);

}  // namespace llamaherd
