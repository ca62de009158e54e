// Attention, written once over the vector wrappers V (simd/*.h).
//
// Queries go through their open cells in step, 64 at a time. Those that see the same cells (or windows of the same
// stretch) share the keys and values of the step, unpacked once to 32-bit floats: keys transposed, so that a lane is a
// key and no sum crosses lanes. Products are made of register tiles: rows of queries times vectors of keys, then of
// values. Each element of each product is summed in one order, whatever tile it falls into; scores beyond a row's own
// cells do not touch its sums.
#pragma once
#include <cmath>

#include "attention_tiles.h"

namespace llamaherd {
namespace {

template <class V>
struct Attention : AttentionTiles<V> {
    using T = AttentionTiles<V>;
    using Float = typename V::Float;
    using Tile = typename T::Tile;
    using T::W, T::tallest, T::exponential, T::exponential1, T::tangent, T::padded_columns, T::value_stride;

    // ---- softmax

    struct Sums {  // of a row: exp(score - top) times values, and its total
        float top, total;
    };
    static float finite(float top) { return top == -INFINITY ? 0.0f : top; }  // -inf - -inf is not a number

    // dots -> exp(score - top), top after this block; sums of earlier blocks are brought to it
    template <bool bare>
    static void softmax(const AttentionKeys & keys, float slope, const float * bias, float * p, int count, float & top,
                        float * total, float * out, int64_t columns, bool fresh) {
        if (bare && count == attention_block) return softmax_block(keys.scale, p, top, total, out, columns, fresh);
        const Float scale = V::set1_float(keys.scale), none = V::set1_float(-INFINITY);
        Float most = none;
        for (int j = 0; j < count; j += W) {
            Float s = V::multiply_float(V::load_float(p + j), scale);
            if (!bare && keys.cap != 0.0f) s = V::multiply_float(tangent(s), V::set1_float(keys.cap));
            if (!bare && bias) s = V::fma(V::set1_float(slope), V::load_float(bias + j), s);
            if (j + W > count) s = V::first(s, none, count - j);
            V::store(p + j, s);
            most = V::maximum(s, most);
        }
        Float sum = raise_top(V::max_of(most), top, total, out, columns, fresh);
        const Float zero = V::set1_float(finite(top));
        for (int j = 0; j < count; j += W) {
            const Float e = exponential(V::subtract(V::load_float(p + j), zero));
            V::store(p + j, e);
            sum = V::add_float(sum, e);
        }
        V::store(total, sum);
    }
    // the same of a whole block, in registers
    static void softmax_block(float factor, float * p, float & top, float * total, float * out, int64_t columns,
                              bool fresh) {
        constexpr int n = attention_block / W;
        const Float scale = V::set1_float(factor);
        Float s[n], most = V::set1_float(-INFINITY);
#pragma GCC unroll 8
        for (int j = 0; j < n; ++j) {
            s[j] = V::multiply_float(V::load_float(p + j * W), scale);
            most = V::maximum(s[j], most);
        }
        Float sum = raise_top(V::max_of(most), top, total, out, columns, fresh);
        const Float zero = V::set1_float(finite(top));
#pragma GCC unroll 8
        for (int j = 0; j < n; ++j) {
            const Float e = exponential(V::subtract(s[j], zero));
            V::store(p + j * W, e);
            sum = V::add_float(sum, e);
        }
        V::store(total, sum);
    }
    // returns the total of earlier blocks, which is brought to the new top as their sums are
    static inline __attribute__((always_inline)) Float raise_top(float found, float & top, const float * total,
                                                                 float * out, int64_t columns, bool fresh) {
        const float before = top;
        if (found > top) top = found;
        if (fresh) {
            for (int64_t c = 0; c < columns; c += W) V::store(out + c, V::zero_float());
            return V::zero_float();
        }
        const Float sum = V::load_float(total);
        if (!(top > before)) return sum;
        const Float down = exponential(V::set1_float(before - finite(top)));
        for (int64_t c = 0; c < columns; c += W) V::store(out + c, V::multiply_float(V::load_float(out + c), down));
        return V::multiply_float(sum, down);
    }

    // sums of earlier segments += those of one more
    static __attribute__((noinline)) void join(Sums & all, float * out, const Sums & more, const float * add, int64_t columns) {
        const float top = more.top > all.top ? more.top : all.top;
        const float a = exponential1(all.top - finite(top)), b = exponential1(more.top - finite(top));
        all.total = all.total * a + more.total * b;
        all.top = top;
        for (int64_t c = 0; c < columns; c += W)
            V::store(out + c, V::fma(V::load_float(add + c), V::set1_float(b),
                                     V::multiply_float(V::load_float(out + c), V::set1_float(a))));
    }

    static void finish(const AttentionRow & row, Sums all, float * sums, int64_t DV) {
        float down = 1.0f;
        if (row.sink) {
            const float top = *row.sink > all.top ? *row.sink : all.top;
            down = exponential1(all.top - finite(top));
            all.total = all.total * down + exponential1(*row.sink - finite(top));
        }
        const Float factor = V::set1_float(all.total == 0.0f ? 0.0f : down / all.total);
        // + 0: which zero a sum came to may depend on what it was computed beside
        for (int64_t c = 0; c < DV; c += W) {
            const Float v = V::fma(V::load_float(sums + c), factor, V::zero_float());
            if (c + W <= DV) {
                V::store(row.out + c, v);
            } else {
                V::store(sums + c, v);
                std::memcpy(row.out + c, sums + c, static_cast<size_t>(DV - c) * 4);
            }
        }
    }

    // ---- the whole

    struct Scratch {
        float *keys, *values, *p, *sums, *all, *totals, *bias;
        static size_t floats(int64_t DK, int64_t DV, int64_t rows) {
            const int64_t columns = padded_columns(DV);
            return static_cast<size_t>(DK * key_stride + shared_cells * value_stride(DV) + max_attention_rows * key_stride +
                                       2 * rows * columns + rows * W + key_stride + 64);
        }
        Scratch(uint8_t * at, int64_t DK, int64_t DV, int64_t rows) {
            const int64_t columns = padded_columns(DV);
            keys = reinterpret_cast<float *>((reinterpret_cast<size_t>(at) + 63) & ~size_t{63});
            values = keys + DK * key_stride;
            p = values + shared_cells * value_stride(DV);
            sums = p + max_attention_rows * key_stride;
            all = sums + rows * columns;
            totals = all + rows * columns;
            bias = totals + rows * W;
        }
    };
    static size_t scratch_bytes(int64_t DK, int64_t DV, int64_t rows) { return Scratch::floats(DK, DV, rows) * 4; }
    static int64_t partial_floats(int64_t DV) { return padded_columns(DV) + 16; }

    static void run(const AttentionHead * heads, int head_count, const AttentionQuery * queries, int query_count,
                    int64_t first, int64_t last, uint8_t * memory, int64_t segments) {
        const AttentionKeys & keys = heads[0].keys;  // their shape
        const int64_t columns = padded_columns(keys.DV);
        const bool parts = heads[0].partials != nullptr;
        Cursor<V> cursors[max_attention_rows];
        Slice slices[max_attention_rows];
        Group groups[max_attention_rows];
        int group_of[max_attention_rows];
        Sums all[max_attention_heads * max_attention_rows];
        float tops[max_attention_heads * max_attention_rows];
        int row_count = 0;  // of a head
        for (int i = 0; i < query_count; ++i) {
            cursors[i].begin(queries[i].mask, keys.cells);
            cursors[i].skip(first * attention_segment);
            row_count += queries[i].count;
        }
        const int row_total = head_count * row_count;
        const Scratch scratch(memory, keys.DK, keys.DV, row_total);
        for (int r = 0; r < row_total; ++r) {
            all[r] = {-INFINITY, 0.0f};
            tops[r] = -INFINITY;
        }
        if (!parts) std::memset(scratch.all, 0, static_cast<size_t>(row_total * columns) * 4);
        if (columns != keys.DV)  // what pads a row to whole vectors
            std::memset(scratch.values, 0, static_cast<size_t>(shared_cells * value_stride(keys.DV)) * 4);

        for (int64_t segment = first; last < 0 || segment < last; ++segment) {
            bool any = false, seen[max_attention_rows] = {};
            for (int part = 0; part < attention_segment / attention_block; ++part) {
                bool open = false;
                for (int i = 0; i < query_count; ++i) {
                    cursors[i].take(slices[i]);
                    open = open || slices[i].count;
                }
                if (!open) break;
                any = true;
                const int group_count = form_groups(slices, query_count, groups, group_of);
                for (int g = 0; g < group_count; ++g)
                    for (int h = 0; h < head_count; ++h) {
                        Scratch own = scratch;
                        own.sums += h * row_count * columns;
                        own.totals += h * row_count * W;
                        step(heads[h], queries, query_count, own, slices, groups, group_count, group_of, g,
                             tops + h * row_count, seen);
                    }
                for (int i = 0; i < query_count; ++i)
                    if (slices[i].count)
                        for (int r = queries[i].first; r < queries[i].first + queries[i].count; ++r) seen[r] = true;
            }
            for (int r = 0; r < row_total; ++r) {
                const int head = r / row_count, row = r % row_count;
                const Sums found = {tops[r], seen[row] ? V::sum_of(V::load_float(scratch.totals + r * W)) : 0.0f};
                if (parts) {
                    float * to = heads[head].partials + (row * segments + segment) * partial_floats(keys.DV);
                    to[0] = seen[row] ? 1.0f : 0.0f;
                    if (!seen[row]) continue;
                    to[1] = found.top;
                    to[2] = found.total;
                    std::memcpy(to + 16, scratch.sums + r * columns, static_cast<size_t>(columns) * 4);
                } else if (seen[row]) {
                    join(all[r], scratch.all + r * columns, found, scratch.sums + r * columns, columns);
                }
            }
            if (last < 0 && !any) break;
        }
        if (!parts)
            for (int r = 0; r < row_total; ++r)
                finish(heads[r / row_count].rows[r % row_count], all[r], scratch.all + r * columns, keys.DV);
    }

    // one block of a group's queries and a head
    static void step(const AttentionHead & head, const AttentionQuery * queries, int query_count, const Scratch & scratch,
                     const Slice * slices, const Group * groups, int group_count,
                     const int * group_of, int g, float * tops, const bool * seen) {
        const AttentionKeys & keys = head.keys;
        const AttentionRow * rows = head.rows;
        const Group & group = groups[g];
        const int64_t columns = padded_columns(keys.DV), stride = value_stride(keys.DV);
        const uint8_t * at[shared_cells + 8];
        for (int j = 0; j < group.count; ++j) at[j] = keys.k + group.cell(j) * keys.k_stride;
        for (int j = group.count; j % 8; ++j) at[j] = at[group.count - 1];
        for (int j = 0; j < group.count; ++j) T::fetch(keys.v + group.cell(j) * keys.v_stride, keys.DV, keys.v_type);
        T::unpack_keys(at, group.count, keys.DK, keys.k_type, scratch.keys);
        // of keys that were not rounded to 16 bits, dots are summed with more care, as stock does
        const int64_t together = keys.k_type == kv_f32 && keys.DK > 16 ? 16 : keys.DK;
        each_tile(queries, query_count, rows, scratch, slices, group, group_of, g, columns, [&](const Tile & t, int offset) {
            int most = 0;
            for (int i = 0; i < t.rows; ++i) most = t.count[i] > most ? t.count[i] : most;
            T::template dots_of<tallest>(t, scratch.keys + offset, keys.DK, together, most);
        });
        for (int i = 0; i < query_count; ++i) {
            if (group_of[i] != g) continue;
            const Slice & s = slices[i];
            if (!s.plain)
                for (int j = 0; j < s.count; ++j)
                    scratch.bias[j] = f16_to_float(queries[i].mask[s.run ? s.start + j : s.cells[j]]);
            for (int r = queries[i].first; r < queries[i].first + queries[i].count; ++r) {
                float * p = scratch.p + r * key_stride;
                if (!seen[r]) tops[r] = -INFINITY;
                (s.plain && keys.cap == 0.0f ? softmax<true> : softmax<false>)(
                    keys, rows[r].slope, s.plain ? nullptr : scratch.bias, p, s.count, tops[r], scratch.totals + r * W,
                    scratch.sums + r * columns, columns, !seen[r]);
            }
        }
        if (g + 1 < group_count) {
            for (int j = 0; j < groups[g + 1].count; ++j)
                T::fetch(keys.k + groups[g + 1].cell(j) * keys.k_stride, keys.DK, keys.k_type);
        } else if (!group.listed) {  // what comes next, most likely
            for (int64_t c = group.start + group.count; c < group.start + group.count + attention_block && c < keys.cells; ++c)
                T::fetch(keys.k + c * keys.k_stride, keys.DK, keys.k_type);
        }
        for (int j = 0; j < group.count; ++j) at[j] = keys.v + group.cell(j) * keys.v_stride;
        T::unpack_values(at, group.count, keys.DV, keys.v_type, scratch.values);
        each_tile(queries, query_count, rows, scratch, slices, group, group_of, g, columns, [&](const Tile & t, int offset) {
            T::add_values(t, scratch.values + offset * stride, stride, columns);
        });
    }

    template <class Function>
    static void each_tile(const AttentionQuery * queries, int query_count, const AttentionRow * rows,
                          const Scratch & scratch, const Slice * slices, const Group & group, const int * group_of, int g,
                          int64_t columns, Function use) {
        Tile t;
        int offset = 0;
        for (int i = 0; i < query_count; ++i) {
            if (group_of[i] != g) continue;
            const int shift = group.listed ? 0 : static_cast<int>(slices[i].start - group.start);
            for (int r = queries[i].first; r < queries[i].first + queries[i].count; ++r) {
                if (t.rows == tallest || (t.rows && shift != offset)) {
                    use(t, offset);
                    t.rows = 0;
                }
                offset = shift;
                t.q[t.rows] = rows[r].q;
                t.p[t.rows] = scratch.p + r * key_stride;
                t.out[t.rows] = scratch.sums + r * columns;
                t.count[t.rows++] = slices[i].count;
            }
        }
        if (t.rows) use(t, offset);
    }

    static void merge(const AttentionKeys & keys, const AttentionRow & row, const float * partials, int64_t segments,
                      uint8_t * memory) {
        const Scratch scratch(memory, keys.DK, keys.DV, 1);
        const int64_t columns = padded_columns(keys.DV);
        Sums all = {-INFINITY, 0.0f};
        std::memset(scratch.all, 0, static_cast<size_t>(columns) * 4);
        for (int64_t s = 0; s < segments; ++s, partials += partial_floats(keys.DV))
            if (partials[0] != 0.0f) join(all, scratch.all, {partials[1], partials[2]}, partials + 16, columns);
        finish(row, all, scratch.all, keys.DV);
    }

    static int64_t open_cells(const uint16_t * mask, int64_t cells) {
        if (!mask) return cells;
        Cursor<V> cursor;
        int64_t n = 0;
        cursor.begin(mask, cells);
        while (cursor.more()) {
            n += __builtin_popcountll(cursor.open);
            cursor.open = 0;
        }
        return n;
    }

    static constexpr AttentionKernel kernel = {scratch_bytes, partial_floats, run, merge, open_cells};
};

}  // namespace
}  // namespace llamaherd
