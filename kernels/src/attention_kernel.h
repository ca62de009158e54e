// Attention, written once over the vector wrappers V (simd/*.h).
//
// Queries go through their open cells in step, 64 at a time. Those that see the same cells (or windows of the same
// stretch) share the keys and values of the step, unpacked once to 32-bit floats: keys transposed, so that a lane is a
// key and no sum crosses lanes. Products are made of register tiles: rows of queries times vectors of keys, then of
// values. Each element of each product is summed in one order, whatever tile it falls into; scores beyond a row's own
// cells do not touch its sums.
#pragma once
#include <cmath>
#include <cstring>

#include "attention.h"
#include "half.h"

namespace llamaherd {
namespace {

constexpr int window_shift = 32;  // windows that begin so many cells apart still share their keys
constexpr int shared_cells = attention_block + window_shift;
constexpr int key_stride = shared_cells + 16;  // floats; an odd number of cache lines

// ---- which cells a query sees

struct Slice {  // its next cells, up to a block
    int64_t start;
    int count;
    bool run;    // start, start + 1, ...; else as listed
    bool plain;  // the mask is zero there
    int32_t cells[attention_block];
};

template <class V>
struct Cursor {
    const uint16_t * mask;
    int64_t cells, base, next;  // open: of the 64 cells from base on
    uint64_t open;
    bool plain;

    void begin(const uint16_t * m, int64_t n) { mask = m, cells = n, base = next = 0, open = 0, plain = true; }

    bool more() {
        while (!open && next < cells) {
            base = next;
            next += 64;
            const int64_t n = cells - base;
            if (!mask) {
                open = ~uint64_t{0};
                if (n < 64) open = (uint64_t{1} << n) - 1;
            } else if (n >= 64) {
                for (int i = 64; i < 128; i += 32) __builtin_prefetch(mask + base + i);
                open = V::open_cells(mask + base, plain);
            } else {
                uint16_t part[64];
                std::memset(part, 0, sizeof part);
                for (int i = 0; i < 64; ++i) part[i] = i < n ? mask[base + i] : 0xfc00;
                open = V::open_cells(part, plain);
            }
        }
        return open != 0;
    }
    void close(int from, int count) {
        open = count == 64 ? 0 : open & ~(((uint64_t{1} << count) - 1) << from);
    }
    void skip(int64_t count) {
        while (count && more()) {
            const int n = __builtin_popcountll(open);
            if (n <= count) {
                open = 0;
                count -= n;
            } else {
                for (; count; --count) open &= open - 1;
            }
        }
    }
    __attribute__((noinline)) void take(Slice & s) {
        s.count = 0;
        s.run = s.plain = true;
        while (s.count < attention_block && more()) {
            const int from = __builtin_ctzll(open);
            const uint64_t rest = ~(open >> from);
            int n = rest ? __builtin_ctzll(rest) : 64;
            if (n > attention_block - s.count) n = attention_block - s.count;
            const int64_t cell = base + from;
            if (!s.count) s.start = cell;
            if (s.run && cell != s.start + s.count) {
                s.run = false;
                for (int i = 0; i < s.count; ++i) s.cells[i] = static_cast<int32_t>(s.start) + i;
            }
            if (!s.run)
                for (int i = 0; i < n; ++i) s.cells[s.count + i] = static_cast<int32_t>(cell) + i;
            s.count += n;
            s.plain = s.plain && plain;
            close(from, n);
        }
    }
};

// queries whose cells are unpacked together
struct Group {
    int64_t start;  // of a run
    int count;
    const Slice * listed;  // or the longest list, which the others' begin

    int64_t cell(int i) const { return listed ? listed->cells[i] : start + i; }
};

template <class V>
struct Attention {
    using Float = typename V::Float;
    static constexpr int W = V::lanes, tallest = V::attention_rows;
    static_assert(attention_block % W == 0 && window_shift % 8 == 0, "");

    static int64_t padded_columns(int64_t n) { return (n + W - 1) / W * W; }
    static int64_t value_stride(int64_t DV) { return padded_columns(DV) + 16; }

    // ---- exp and tanh

    // of x <= 0 (Cephes' polynomial): 0 below -87; NaN stays
    static inline __attribute__((always_inline)) Float exponential(Float x) {
        const Float bound = V::set1_float(-87.0f);
        const Float y = V::maximum(V::set1_float(-88.0f), x);
        const Float n = V::nearest(V::multiply_float(y, V::set1_float(1.44269504088896341f)));
        Float r = V::fma(n, V::set1_float(-0.693359375f), y);
        r = V::fma(n, V::set1_float(2.12194440e-4f), r);
        Float p = V::set1_float(1.9875691500e-4f);
        p = V::fma(p, r, V::set1_float(1.3981999507e-3f));
        p = V::fma(p, r, V::set1_float(8.3334519073e-3f));
        p = V::fma(p, r, V::set1_float(4.1665795894e-2f));
        p = V::fma(p, r, V::set1_float(1.6666665459e-1f));
        p = V::fma(p, r, V::set1_float(5.0000001201e-1f));
        p = V::fma(p, V::multiply_float(r, r), r);
        return V::zero_below(V::scale(V::add_float(p, V::set1_float(1.0f)), n), x, bound);
    }
    static float exponential1(float x) { return V::lowest_lane(exponential(V::set1_float(x))); }

    static Float tangent(Float x) {
        const Float a = V::absolute(x), one = V::set1_float(1.0f);
        const Float e = exponential(V::multiply_float(a, V::set1_float(-2.0f)));
        const Float large = V::divide(V::subtract(one, e), V::add_float(one, e));
        const Float z = V::multiply_float(a, a);
        Float p = V::set1_float(-5.70498872745e-3f);
        p = V::fma(p, z, V::set1_float(2.06390887954e-2f));
        p = V::fma(p, z, V::set1_float(-5.37397155531e-2f));
        p = V::fma(p, z, V::set1_float(1.33314422036e-1f));
        p = V::fma(p, z, V::set1_float(-3.33332819422e-1f));
        const Float small = V::fma(V::multiply_float(p, z), a, a);
        return V::with_sign(V::choose_below(a, V::set1_float(0.625f), small, large), x);
    }

    // ---- keys and values as 32-bit floats

    static typename V::Eight load8(const uint8_t * row, int64_t at, int type) {
        if (type == kv_f16) return V::load8_f16(row + 2 * at);
        if (type == kv_bf16) return V::load8_bf16(row + 2 * at);
        if (type == kv_f32) return V::load8_f32(row + 4 * at);
        const uint8_t * block = row + at / 32 * 34;
        uint16_t d;
        std::memcpy(&d, block, 2);
        return V::load8_i8(block + 2 + at % 32, f16_to_float(d));
    }

    static __attribute__((noinline)) void fetch(const uint8_t * row, int64_t columns, int type) {
        const int64_t bytes = type == kv_f32 ? 4 * columns : type == kv_q8_0 ? columns / 32 * 34 : 2 * columns;
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
    }

    // to[column][key]; count is rounded up to 8, the last key repeated
    template <int type>
    static void unpack_keys_of(const uint8_t * const * keys, int count, int64_t DK, float * to) {
        for (int j = 0; j < count; j += 8) {
            int64_t c = 0;
            if (type == kv_f16)
                for (; c + 16 <= DK; c += 16) V::store16_transposed_f16(keys + j, c, to + c * key_stride + j, key_stride);
            for (; c < DK; c += 8) {
                typename V::Eight r[8];
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) r[i] = load8(keys[j + i], c, type);
                V::store8_transposed(r, to + c * key_stride + j, key_stride);
            }
        }
    }
    static __attribute__((noinline)) void unpack_keys(const uint8_t * const * keys, int count, int64_t DK, int type, float * to) {
        switch (type) {
            case kv_f16: return unpack_keys_of<kv_f16>(keys, count, DK, to);
            case kv_bf16: return unpack_keys_of<kv_bf16>(keys, count, DK, to);
            case kv_f32: return unpack_keys_of<kv_f32>(keys, count, DK, to);
            default: return unpack_keys_of<kv_q8_0>(keys, count, DK, to);
        }
    }
    template <int type>
    static void unpack_values_of(const uint8_t * const * values, int count, int64_t DV, float * to) {
        for (int j = 0; j < count; ++j, to += value_stride(DV))
            for (int64_t c = 0; c < DV; c += 8) V::store8(to + c, load8(values[j], c, type));
    }
    static __attribute__((noinline)) void unpack_values(const uint8_t * const * values, int count, int64_t DV, int type, float * to) {
        switch (type) {
            case kv_f16: return unpack_values_of<kv_f16>(values, count, DV, to);
            case kv_bf16: return unpack_values_of<kv_bf16>(values, count, DV, to);
            case kv_f32: return unpack_values_of<kv_f32>(values, count, DV, to);
            default: return unpack_values_of<kv_q8_0>(values, count, DV, to);
        }
    }

    // ---- register tiles: M rows times P vectors

    // out[m][key] = dot of columns [from, to) of q[m] and key, or that more
    template <int M, int P, bool more>
    static inline __attribute__((always_inline)) void dots(const float * const * q, const float * keys, int64_t from,
                                                           int64_t to, float * const * out, int at) {
        Float sum[M][P];
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p) sum[m][p] = V::zero_float();
        const float * row[M];
        for (int m = 0; m < M; ++m) row[m] = q[m];
        keys += from * key_stride;
        for (int64_t c = from; c < to; ++c, keys += key_stride) {
            Float key[P];
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p) key[p] = V::load_float(keys + p * W);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                const Float a = V::set1_float(row[m][c]);
#pragma GCC unroll 16
                for (int p = 0; p < P; ++p) sum[m][p] = V::fma(a, key[p], sum[m][p]);
            }
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p) {
                float * to_here = out[m] + at + p * W;
                V::store(to_here, more ? V::add_float(V::load_float(to_here), sum[m][p]) : sum[m][p]);
            }
    }
    // out[m] += sum over keys [from, to) of p[m][key] * value[key]
    template <int M, int P>
    static inline __attribute__((always_inline)) void sums(const float * const * weights, const float * values,
                                                           int64_t stride, int from, int to, float * const * out,
                                                           int64_t at) {
        Float sum[M][P];
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p) sum[m][p] = V::load_float(out[m] + at + p * W);
        const float * row[M];
        for (int m = 0; m < M; ++m) row[m] = weights[m];
        values += from * stride + at;
        for (int j = from; j < to; ++j, values += stride) {
            Float value[P];
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p) value[p] = V::load_float(values + p * W);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                const Float a = V::set1_float(row[m][j]);
#pragma GCC unroll 16
                for (int p = 0; p < P; ++p) sum[m][p] = V::fma(a, value[p], sum[m][p]);
            }
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p) V::store(out[m] + at + p * W, sum[m][p]);
    }
    // as many vectors as leave the registers room
    static constexpr int wide(int M) {
        const int room = tallest == 8 ? 24 : tallest == 6 ? 12 : 4;
        return room / M >= 8 ? 8 : room / M >= 4 ? 4 : room / M >= 2 ? 2 : 1;
    }
    template <int M, bool more>
    static __attribute__((noinline)) void all_dots(const float * const * q, const float * keys, int64_t from, int64_t to,
                                                   int count, float * const * out) {
        constexpr int P = wide(M);
        int at = 0;
        for (; at + (P - 1) * W < count; at += P * W) dots<M, P, more>(q, keys + at, from, to, out, at);
        if (P > 2)
            for (; at + W < count; at += 2 * W) dots<M, P / 2 < 2 ? 1 : 2, more>(q, keys + at, from, to, out, at);
        for (; at < count; at += W) dots<M, 1, more>(q, keys + at, from, to, out, at);
    }
    template <int M>
    static __attribute__((noinline)) void all_sums(const float * const * weights, const float * values, int64_t stride,
                                                   int from, int to, float * const * out, int64_t columns) {
        constexpr int P = wide(M);
        int64_t at = 0;
        for (; at + P * W <= columns; at += P * W) sums<M, P>(weights, values, stride, from, to, out, at);
        if (P > 2)
            for (; at + 2 * W <= columns; at += 2 * W)
                sums<M, P / 2 < 2 ? 1 : 2>(weights, values, stride, from, to, out, at);
        for (; at < columns; at += W) sums<M, 1>(weights, values, stride, from, to, out, at);
    }

    // rows whose cells begin at one place of what is unpacked
    struct Tile {
        const float * q[tallest];
        float *p[tallest], *out[tallest];
        int count[tallest], rows = 0;
    };
    template <int M>
    static void dots_of(const Tile & t, const float * keys, int64_t DK, int64_t together, int count) {
        if (t.rows != M) {
            if constexpr (M > 1) dots_of<M - 1>(t, keys, DK, together, count);
            return;
        }
        all_dots<M, false>(t.q, keys, 0, together, count, t.p);
        for (int64_t c = together; c < DK; c += together)
            all_dots<M, true>(t.q, keys, c, c + together < DK ? c + together : DK, count, t.p);
    }
    template <int M>
    static void sums_of(int rows, const float * const * weights, const float * values, int64_t stride, int from, int to,
                        float * const * out, int64_t columns) {
        if (rows == M) return all_sums<M>(weights, values, stride, from, to, out, columns);
        if constexpr (M > 1) sums_of<M - 1>(rows, weights, values, stride, from, to, out, columns);
    }
    // no row's sums see a value beyond its own cells: it might be infinite
    static void add_values(const Tile & t, const float * values, int64_t stride, int64_t columns) {
        for (int from = 0;;) {
            const float * p[tallest];
            float * out[tallest];
            int rows = 0, to = attention_block + 1;
            for (int i = 0; i < t.rows; ++i)
                if (t.count[i] > from) {
                    p[rows] = t.p[i];
                    out[rows++] = t.out[i];
                    if (t.count[i] < to) to = t.count[i];
                }
            if (!rows) return;
            sums_of<tallest>(rows, p, values, stride, from, to, out, columns);
            from = to;
        }
    }

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

    static __attribute__((noinline)) int form_groups(const Slice * slices, int queries, Group * groups, int * group_of) {
        int n = 0;
        for (int i = 0; i < queries; ++i) {
            const Slice & s = slices[i];
            group_of[i] = -1;
            if (!s.count) continue;
            int g = 0;
            for (; g < n; ++g) {
                Group & group = groups[g];
                if (s.run != !group.listed) continue;
                if (s.run) {
                    const int64_t shift = s.start - group.start;
                    if (shift < 0 || shift > window_shift) continue;
                    if (shift + s.count > group.count) group.count = static_cast<int>(shift) + s.count;
                    break;
                }
                const int both = s.count < group.count ? s.count : group.count;
                if (std::memcmp(s.cells, group.listed->cells, static_cast<size_t>(both) * 4)) continue;
                if (s.count > group.count) group.count = s.count, group.listed = &s;
                break;
            }
            if (g == n) groups[n++] = {s.start, s.count, s.run ? nullptr : &s};
            group_of[i] = g;
        }
        return n;
    }

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
        for (int j = 0; j < group.count; ++j) fetch(keys.v + group.cell(j) * keys.v_stride, keys.DV, keys.v_type);
        unpack_keys(at, group.count, keys.DK, keys.k_type, scratch.keys);
        // of keys that were not rounded to 16 bits, dots are summed with more care, as stock does
        const int64_t together = keys.k_type == kv_f32 && keys.DK > 16 ? 16 : keys.DK;
        each_tile(queries, query_count, rows, scratch, slices, group, group_of, g, columns, [&](const Tile & t, int offset) {
            int most = 0;
            for (int i = 0; i < t.rows; ++i) most = t.count[i] > most ? t.count[i] : most;
            dots_of<tallest>(t, scratch.keys + offset, keys.DK, together, most);
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
                fetch(keys.k + groups[g + 1].cell(j) * keys.k_stride, keys.DK, keys.k_type);
        } else if (!group.listed) {  // what comes next, most likely
            for (int64_t c = group.start + group.count; c < group.start + group.count + attention_block && c < keys.cells; ++c)
                fetch(keys.k + c * keys.k_stride, keys.DK, keys.k_type);
        }
        for (int j = 0; j < group.count; ++j) at[j] = keys.v + group.cell(j) * keys.v_stride;
        unpack_values(at, group.count, keys.DV, keys.v_type, scratch.values);
        each_tile(queries, query_count, rows, scratch, slices, group, group_of, g, columns, [&](const Tile & t, int offset) {
            add_values(t, scratch.values + offset * stride, stride, columns);
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
