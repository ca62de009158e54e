// What attention is made of: exp, keys and values unpacked to 32-bit floats, and register tiles of products.
#pragma once
#include "attention_cells.h"
#include "half.h"

namespace llamaherd {
namespace {

constexpr int key_stride = shared_cells + 16;  // floats; an odd number of cache lines

template <class V>
struct AttentionTiles {
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
};

}  // namespace
}  // namespace llamaherd
