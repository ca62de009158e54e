// Products of packed weights with rows of activations, written once over the vector wrappers V (simd/*.h).
//
// Each lane of a vector is a row of the weights (a column of the result): four consecutive values of each of V::lanes
// rows lie in one vector, so that a dot product needs no sum across lanes. Two vectors wide, a strip holds all blocks
// of 2 x lanes weight rows, one after the other: one stream for the prefetcher.
//
// Every element of the result is summed in one order, block by block, whatever M, the strip or the thread: results
// are bitwise the same alone and in any batch.
#pragma once
#include "attention_kernel.h"
#include "formats.h"
#include "level.h"

namespace llamaherd {
namespace {

constexpr int panels = 2;
constexpr int64_t row_block_bytes = 128 * 1024;  // activations that stay in the L2 cache while strips pass by

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// where the parts of a block lie in a strip, and of a prepared row
template <class V, class F>
struct Layout {
    static constexpr int columns = V::lanes * panels;
    static constexpr int units = F::block / 32, subs = F::block / F::sub;
    static constexpr int vector = V::lanes * 4;
    static constexpr int unit_bytes = (F::low + F::high) * panels * vector;
    // A strip lies in the order in which it is read: the CPU's prefetchers follow what goes forwards only. Scales
    // at a block's end, and upper bits before all lower ones, cost up to two thirds of the speed of one row.
    static constexpr int in_low = 8 / F::low, in_high = F::high ? 8 / F::high : 8;
    static constexpr int low_at(int g) {
        return (g / in_low + (F::high ? 1 + g / in_low * in_low / in_high : 0)) * panels * vector;
    }
    static constexpr int high_at(int g) { return (g / in_high + g / in_high * in_high / in_low) * panels * vector; }
    // scale and minimum of two bits or four in one byte (Q2_K), else a byte each
    static constexpr bool nibble_scales = F::int_scale && F::int_min && F::low == 2;
    // scales lie before the unit that needs them, or before two units, so that vectors stay aligned
    static constexpr int together = F::sub == 32 ? 2 : 1;
    static constexpr int header = F::int_scale ? together * 32 / F::sub * columns : 0;
    static constexpr int unit_at(int u) { return u * unit_bytes + (u / together + 1) * header; }
    static constexpr int scale_at(int s) {
        const int u = s * F::sub / 32 / together * together;
        return unit_at(u) - header + (s - u * 32 / F::sub) * columns;
    }
    static constexpr int mins = units * unit_bytes + units / together * header;
    // minimums of sub-blocks s and s + 1 (s even), side by side
    static constexpr int mins_at(int s) { return nibble_scales ? scale_at(s) : mins + s * columns; }
    static constexpr int d = mins + (F::int_min && !nibble_scales ? subs * columns : 0);
    static constexpr int m = d + 2 * columns;
    static constexpr int bytes = m + (F::float_min || F::int_min ? 2 * columns : 0);

    // signed weights become unsigned ones + 128 where the product takes those
    static constexpr bool fused_sign = F::is_signed && V::fused && !V::signed_bytes;
    static constexpr bool biased = fused_sign || (!F::is_signed && F::zero != 0);
    static constexpr int bias = fused_sign ? 128 : F::zero;
    // groups of four values that may be summed in 16 bits, within a sub-block
    static constexpr int limit = V::fused || F::is_signed                ? 8
                                 : 32767 / (2 * 127 * F::maximum) >= 8 ? 8
                                 : 32767 / (2 * 127 * F::maximum) >= 4 ? 4
                                                                       : 2;
    static constexpr int period = limit < F::sub / 4 ? limit : F::sub / 4;

    // a prepared row: q[K], d[K / block], then what the format needs
    static int64_t row_sums(int64_t K) { return K + K / F::block * 4; }                    // float[K / 32]
    static int64_t row_bias(int64_t K) { return row_sums(K) + (F::float_min ? K / 8 : 0); }  // int32[K / (4 period)]
    static int64_t row_subs(int64_t K) { return row_bias(K) + (biased ? K / period : 0); }   // int16[K / sub]
    static int64_t row_bytes(int64_t K) { return padded(row_subs(K) + (F::int_min ? K / F::sub * 2 : 0), 64); }
};

template <class V, bool floats>
struct SumUnder {
    using type = typename V::Int;
};
template <class V>
struct SumUnder<V, true> {
    using type = typename V::Float;
};

template <class V, class F>
struct Quantised {
    using L = Layout<V, F>;
    using Int = typename V::Int;
    using Float = typename V::Float;
    // sums under integer scales are added up as floats where a product of 32-bit integers is slow
    static constexpr bool float_sums = F::int_scale && V::float_sums;
    using Sum = typename SumUnder<V, float_sums>::type;
    static Float to_float(Int sum) { return V::to_float(sum); }
    static Float to_float(Float sum) { return sum; }

    static void prepare(const float * x, int64_t K, uint8_t * row) {
        int8_t * q = reinterpret_cast<int8_t *>(row);
        float * d = reinterpret_cast<float *>(row + K);
        float * sums = reinterpret_cast<float *>(row + L::row_sums(K));
        int32_t * bias = reinterpret_cast<int32_t *>(row + L::row_bias(K));
        int16_t * subs = reinterpret_cast<int16_t *>(row + L::row_subs(K));
        for (int64_t b = 0; b < K / F::block; ++b) {
            const uint32_t bits = V::max_abs_bits(x + b * F::block, F::block);
            const float largest = float_from_bits(bits);
            // a scale below 2^-126 x 127 would make its inverse infinite: such a block is zero
            const bool zero = largest < 0x1p-118f;
            const bool finite = bits < 0x7f800000;
            d[b] = finite ? (zero ? 0.0f : largest / 127.0f) : float_from_bits(0x7fc00000);
            const float inverse = finite && !zero ? 127.0f / largest : 0.0f;
            for (int u = 0; u < L::units; ++u) {
                const int64_t k = b * F::block + u * 32;
                int32_t pairs[8];
                if (finite)
                    V::quantise32(x + k, inverse, q + k);
                else
                    std::memset(q + k, 0, 32);
                if (!L::biased && !F::float_min && !F::int_min) continue;
                V::pair_sums(q + k, pairs);
                if (F::float_min) sums[k / 32] = d[b] * static_cast<float>(total(pairs, 8));
                if (F::int_min)
                    for (int s = 0; s < 32 / F::sub; ++s)
                        subs[k / F::sub + s] = static_cast<int16_t>(total(pairs + s * (F::sub / 4), F::sub / 4));
                if (L::biased)
                    for (int g = 0; g < 8; g += L::period) bias[(k / 4 + g) / L::period] = bias_of(pairs + g);
            }
        }
    }

    static int total(const int32_t * pairs, int n) {
        int sum = 0;
        for (int i = 0; i < n; ++i) sum += static_cast<int16_t>(pairs[i]) + (pairs[i] >> 16);
        return sum;
    }
    // what the sum starts from, so that it ends as if the bias had been subtracted from each weight
    static int32_t bias_of(const int32_t * pairs) {
        if (V::fused) return -L::bias * total(pairs, L::period);
        int even = 0, odd = 0;
        for (int i = 0; i < L::period; ++i) {
            even += static_cast<int16_t>(pairs[i]);
            odd += pairs[i] >> 16;
        }
        return static_cast<int32_t>((static_cast<uint32_t>(-L::bias * even) & 0xffff) |
                                    static_cast<uint32_t>(-L::bias * odd) << 16);
    }

    static void pack(const uint8_t * weights, size_t row_bytes, int64_t K, int64_t N, int64_t first, int64_t last,
                     uint8_t * packed) {
        const int64_t blocks = K / F::block;
        for (int64_t strip = first; strip < last; ++strip) {
            uint8_t * to = packed + strip * blocks * L::bytes;
            std::memset(to, 0, static_cast<size_t>(blocks * L::bytes));
            for (int c = 0; c < L::columns && strip * L::columns + c < N; ++c) {
                const uint8_t * from = weights + static_cast<size_t>(strip * L::columns + c) * row_bytes;
                for (int64_t b = 0; b < blocks; ++b) pack_block(from + b * F::bytes, c, to + b * L::bytes);
            }
        }
    }

    static void pack_block(const uint8_t * from, int c, uint8_t * to) {
        Decoded block;
        F::decode(from, block);
        const int panel = c / V::lanes, lane = c % V::lanes;
        for (int u = 0; u < L::units; ++u) {
            for (int i = 0; i < 8; ++i) {
                uint32_t v;
                std::memcpy(&v, block.q + u * 32 + i * 4, 4);
                if (L::fused_sign && F::low == 8) v ^= 0x80808080u;
                // in pairs: groups i and i + 1 of two rows side by side, the next two rows where i + 1 would be
                const int g = V::paired ? (i & ~1) | (lane >> 1 & 1) : i;
                const int place = V::paired ? (lane & ~3) | (lane & 1) << 1 | (i & 1) : lane;
                uint8_t * unit = to + L::unit_at(u) + panel * L::vector + place * 4;
                constexpr int in_low = L::in_low, in_high = L::in_high;
                constexpr uint32_t low_mask = 0x01010101u * ((1 << F::low) - 1);
                put(unit + L::low_at(g), (v & low_mask) << (F::low * (g % in_low)));
                if (F::high) {
                    const uint32_t h = v >> F::low & 0x01010101u * ((1 << F::high) - 1);
                    put(unit + L::high_at(g), h << (F::high * (g % in_high)));
                }
            }
        }
        for (int s = 0; s < L::subs; ++s) {
            uint8_t * min = to + L::mins_at(s / 2 * 2) + 2 * c + s % 2;
            if (L::nibble_scales) {
                *min = static_cast<uint8_t>(block.scale[s] | block.min[s] << 4);
            } else {
                if (F::int_scale) to[L::scale_at(s) + c] = static_cast<uint8_t>(block.scale[s]);
                if (F::int_min) *min = block.min[s];
            }
        }
        std::memcpy(to + L::d + 2 * c, &block.d, 2);
        if (F::float_min || F::int_min) std::memcpy(to + L::m + 2 * c, &block.m, 2);
    }
    static void put(uint8_t * at, uint32_t bits) {
        uint32_t v;
        std::memcpy(&v, at, 4);
        v |= bits;
        std::memcpy(at, &v, 4);
    }

    static Int table_of() {
        if (!F::has_table) return V::zero();
        const Int values = V::table(F::values);
        return L::fused_sign ? V::bit_xor(values, V::bytes(0x80)) : values;
    }

    // group g (four values of each lane) of a unit
    static inline __attribute__((always_inline)) Int unpack(const uint8_t * unit, int g, int p, Int table) {
        const Int raw = V::load(unit + L::low_at(g) + p * L::vector);
        if (F::low == 8) return raw;
        const int low_shift = F::low * (g % L::in_low);
        Int w = V::bit_and(low_shift ? V::right(raw, low_shift) : raw, V::bytes((1 << F::low) - 1));
        if (F::high) {
            const Int h = V::load(unit + L::high_at(g) + p * L::vector);
            const int shift = F::high * (g % L::in_high) - F::low;
            const Int moved = shift > 0 ? V::right(h, shift) : shift < 0 ? V::left(h, -shift) : h;
            w = V::bit_or(w, V::bit_and(moved, V::bytes(((1 << F::high) - 1) << F::low)));
        }
        return F::has_table ? V::lookup(table, w) : w;
    }

    static inline __attribute__((always_inline)) Int scale_of(const uint8_t * block, int s, int p) {
        if (!L::nibble_scales) return V::load_i8(block + L::scale_at(s) + p * V::lanes);
        const Int both = V::load_u16(block + L::mins_at(s / 2 * 2) + p * 2 * V::lanes);
        return V::bit_and(s % 2 ? V::right32(both, 8) : both, V::set1(15));
    }

    // what the sums of a row, or of a pair of rows, start from. The last row of an odd number is its own other.
    template <int M>
    static inline __attribute__((always_inline)) Int first(const uint8_t * const (&act)[M], int m, int64_t at) {
        if constexpr (V::paired)
            return V::broadcast2(act[m / 2 * 2] + at, act[other<M>(m)] + at);
        else
            return V::broadcast(act[m] + at);
    }
    template <int M>
    static constexpr int other(int m) {
        return m / 2 * 2 + 1 < M ? m / 2 * 2 + 1 : M - 1;
    }

    template <int M>
    static void tile(const uint8_t * strip, int64_t K, const Row * rows, float (*results)[L::columns]) {
        const uint8_t * act[M];
        for (int m = 0; m < M; ++m) act[m] = rows[m].activations;
        // where a product takes two rows of activations, the sums of both lie in both their parts until a period ends
        constexpr int parts = V::paired ? (M + 1) / 2 * 2 : M;
        const int64_t blocks = K / F::block;
        const int64_t at_sums = L::row_sums(K), at_bias = L::row_bias(K), at_subs = L::row_subs(K);
        const Int table = table_of();
        Float total[panels][M];
#pragma GCC unroll 16
        for (int p = 0; p < panels; ++p)
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) total[p][m] = V::zero_float();

        for (int64_t b = 0; b < blocks; ++b, strip += L::bytes) {
            Sum sum[panels][M];
#pragma GCC unroll 16
            for (int p = 0; p < panels; ++p)
#pragma GCC unroll 16
                for (int m = 0; m < M; ++m) sum[p][m] = Sum{};
            for (int u = 0; u < L::units; ++u) {
                const uint8_t * unit = strip + L::unit_at(u);
                const int64_t k = b * F::block + u * 32;
                Int part[panels][parts];
#pragma GCC unroll 8
                for (int g = 0; g < 8; ++g) {
                    if (g % L::period == 0) {
#pragma GCC unroll 16
                        for (int m = 0; m < parts; ++m) {
                            const Int start = L::biased ? first(act, m, at_bias + (k / 4 + g) / L::period * 4) : V::zero();
#pragma GCC unroll 16
                            for (int p = 0; p < panels; ++p) part[p][m] = start;
                        }
                    }
                    Int w[panels];
#pragma GCC unroll 16
                    for (int p = 0; p < panels; ++p) w[p] = unpack(unit, g, p, table);
                    if constexpr (V::paired) {
#pragma GCC unroll 16
                        for (int m = g % 2; m < parts; m += 2) {
                            const int64_t at = k + 4 * (g & ~1);
                            const Int a = V::load_pair(act[m / 2 * 2] + at, act[other<M>(m)] + at);
#pragma GCC unroll 16
                            for (int p = 0; p < panels; ++p) part[p][m] = V::dot_paired(part[p][m], w[p], a);
                        }
                        if ((g + 1) % L::period == 0)
#pragma GCC unroll 16
                            for (int m = 0; m < parts; m += 2)
#pragma GCC unroll 16
                                for (int p = 0; p < panels; ++p) V::part_pair(part[p][m], part[p][m + 1]);
                    } else {
#pragma GCC unroll 16
                        for (int m = 0; m < M; ++m) {
                            const Int a = V::broadcast(act[m] + k + 4 * g);
#pragma GCC unroll 16
                            for (int p = 0; p < panels; ++p) {
                                if (V::fused)
                                    part[p][m] = V::dot_fused(part[p][m], w[p], a);
                                else if (F::is_signed)
                                    part[p][m] = V::dot_signed(part[p][m], w[p], a);
                                else
                                    part[p][m] = V::dot_pairs(part[p][m], w[p], a);
                            }
                        }
                    }
                    if ((g + 1) % L::period == 0) {
#pragma GCC unroll 16
                        for (int p = 0; p < panels; ++p) {
                            Int scale = V::ones16();
                            constexpr bool wide = V::fused || F::is_signed;
                            if (F::int_scale) {
                                scale = scale_of(strip, (u * 32 + 4 * g) / F::sub, p);
                                if (!wide) scale = V::twice16(scale);
                            }
                            if constexpr (float_sums) {
                                const Float factor = V::to_float(scale);
#pragma GCC unroll 16
                                for (int m = 0; m < M; ++m)
                                    sum[p][m] = V::fma(V::to_float(part[p][m]), factor, sum[p][m]);
                            } else {
#pragma GCC unroll 16
                                for (int m = 0; m < M; ++m) {
                                    Int v = part[p][m];
                                    if (!wide)
                                        v = V::madd16(v, scale);
                                    else if (F::int_scale)
                                        v = V::multiply(v, scale);
                                    sum[p][m] = V::add(sum[p][m], v);
                                }
                            }
                        }
                    }
                }
            }
            Int low[panels][M];
            if (F::int_min) {
#pragma GCC unroll 16
                for (int p = 0; p < panels; ++p)
#pragma GCC unroll 16
                    for (int m = 0; m < M; ++m) low[p][m] = V::zero();
                for (int s = 0; s < L::subs; s += 2)
#pragma GCC unroll 16
                    for (int p = 0; p < panels; ++p) {
                        Int mins = V::load_u8_pairs(strip + L::mins_at(s) + p * 2 * V::lanes);
                        if (L::nibble_scales) mins = V::right(mins, 4);
#pragma GCC unroll 16
                        for (int m = 0; m < M; ++m) {
                            const Int a = V::broadcast(act[m] + at_subs + (b * L::subs + s) * 2);
                            low[p][m] = V::add_madd16(low[p][m], mins, a);
                        }
                    }
            }
#pragma GCC unroll 16
            for (int p = 0; p < panels; ++p) {
                const uint8_t * at = strip + L::d + p * 2 * V::lanes;
                const Float d = F::bf16_scale ? V::load_bf16(at) : V::load_f16(at);
                Float least = d;
                if (F::float_min || F::int_min) least = V::load_f16(strip + L::m + p * 2 * V::lanes);
#pragma GCC unroll 16
                for (int m = 0; m < M; ++m) {
                    const float a = read_float(act[m] + K + b * 4);
                    total[p][m] = V::fma(to_float(sum[p][m]), V::multiply_float(d, V::set1_float(a)), total[p][m]);
                    if (F::float_min)
                        total[p][m] = V::fma(least, V::set1_float(read_float(act[m] + at_sums + b * 4)), total[p][m]);
                    if (F::int_min)
                        total[p][m] = V::fma(V::to_float(low[p][m]), V::multiply_float(least, V::set1_float(-a)),
                                             total[p][m]);
                }
            }
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
            for (int p = 0; p < panels; ++p) V::store(results[m] + p * V::lanes, total[p][m]);
    }
    static float read_float(const uint8_t * p) {
        float f;
        std::memcpy(&f, p, 4);
        return f;
    }
    static constexpr int64_t strip_bytes(int64_t K) { return K / F::block * L::bytes; }
    static size_t row_bytes(int64_t K) { return static_cast<size_t>(L::row_bytes(K)); }
    static constexpr int block = F::block, block_bytes = F::bytes, max_rows = V::max_rows;
    static constexpr int row_step = V::paired ? 2 : 1;
};

// weights of 16-bit floats with activations of 32 bits: no rounding but that of the weights
template <class V, class F>
struct Plain {
    struct L {
        static constexpr int columns = V::lanes * panels;
    };
    using Float = typename V::Float;
    static constexpr int block = 1, block_bytes = 2, max_rows = V::max_rows == 4 ? 6 : V::max_rows;
    static constexpr int row_step = 1;
    static constexpr int together = 4;
    static constexpr int64_t strip_bytes(int64_t K) { return K * L::columns * 2; }
    static size_t row_bytes(int64_t) { return 0; }
    static void prepare(const float *, int64_t, uint8_t *) {}

    static void pack(const uint8_t * weights, size_t row_bytes, int64_t K, int64_t N, int64_t first, int64_t last,
                     uint8_t * packed) {
        for (int64_t strip = first; strip < last; ++strip) {
            uint8_t * to = packed + strip * strip_bytes(K);
            const int64_t rows = smaller(L::columns, N - strip * L::columns);
            if (rows < L::columns) std::memset(to, 0, static_cast<size_t>(strip_bytes(K)));
            // sixteen columns at a time: the writes stay in the cache
            for (int64_t k0 = 0; k0 < K; k0 += 16)
                for (int64_t c = 0; c < rows; ++c) {
                    const uint8_t * from = weights + static_cast<size_t>(strip * L::columns + c) * row_bytes;
                    for (int64_t k = k0; k < smaller(K, k0 + 16); ++k)
                        std::memcpy(to + (k * L::columns + c) * 2, from + 2 * k, 2);
                }
        }
    }

    template <int M>
    static void tile(const uint8_t * strip, int64_t K, const Row * rows, float (*results)[L::columns]) {
        const float * x[M];
        for (int m = 0; m < M; ++m) x[m] = reinterpret_cast<const float *>(rows[m].activations);
        Float total[panels][M];
#pragma GCC unroll 16
        for (int p = 0; p < panels; ++p)
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) total[p][m] = V::zero_float();
        for (int64_t k = 0; k < K; ++k, strip += L::columns * 2) {
            Float w[panels];
#pragma GCC unroll 16
            for (int p = 0; p < panels; ++p) {
                const uint8_t * at = strip + p * 2 * V::lanes;
                w[p] = F::bf16 ? V::load_bf16(at) : V::load_f16(at);
            }
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                const Float a = V::set1_float(x[m][k]);
#pragma GCC unroll 16
                for (int p = 0; p < panels; ++p) total[p][m] = V::fma(w[p], a, total[p][m]);
            }
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
            for (int p = 0; p < panels; ++p) V::store(results[m] + p * V::lanes, total[p][m]);
    }
};

// One row alone with several strips of 16-bit floats: each element's sum is a chain of additions that wait for each
// other, so that one strip would leave the CPU idle. The order of each sum is the tile's.
template <class V, class F>
static __attribute__((noinline)) void run_row(const uint8_t * strips, int64_t K, const Row & row, int64_t column) {
    using Q = Plain<V, F>;
    const float * x = reinterpret_cast<const float *>(row.activations);
    typename V::Float total[Q::together][panels];
#pragma GCC unroll 8
    for (int s = 0; s < Q::together; ++s)
#pragma GCC unroll 8
        for (int p = 0; p < panels; ++p) total[s][p] = V::zero_float();
    for (int64_t k = 0; k < K; ++k, strips += Q::L::columns * 2) {
        const typename V::Float a = V::set1_float(x[k]);
#pragma GCC unroll 8
        for (int s = 0; s < Q::together; ++s)
#pragma GCC unroll 8
            for (int p = 0; p < panels; ++p) {
                const uint8_t * at = strips + s * Q::strip_bytes(K) + p * 2 * V::lanes;
                total[s][p] = V::fma(F::bf16 ? V::load_bf16(at) : V::load_f16(at), a, total[s][p]);
            }
    }
#pragma GCC unroll 8
    for (int s = 0; s < Q::together; ++s)
#pragma GCC unroll 8
        for (int p = 0; p < panels; ++p)
            V::store(row.out + column + s * Q::L::columns + p * V::lanes, total[s][p]);
}

// BF16 weights with activations rounded to BF16, where the CPU multiplies pairs of them (as llama.cpp does there)
template <class V, class F>
struct Pairs {
    struct L {
        static constexpr int columns = V::lanes * panels;
    };
    using Float = typename V::Float;
    static constexpr int block = 1, block_bytes = 2, max_rows = V::max_rows;
    static constexpr int row_step = 1;
    static constexpr int pair_bytes = L::columns * 4;
    // an odd last column meets a zero
    static constexpr int64_t strip_bytes(int64_t K) { return (K + 1) / 2 * pair_bytes; }
    static size_t row_bytes(int64_t K) { return static_cast<size_t>(padded((K + 1) / 2 * 4, 64)); }
    static void prepare(const float * x, int64_t K, uint8_t * row) {
        std::memset(row + K / 2 * 4, 0, row_bytes(K) - static_cast<size_t>(K / 2 * 4));
        V::round_bf16(x, K, row);
    }

    static void pack(const uint8_t * weights, size_t row_bytes, int64_t K, int64_t N, int64_t first, int64_t last,
                     uint8_t * packed) {
        for (int64_t strip = first; strip < last; ++strip) {
            uint8_t * to = packed + strip * strip_bytes(K);
            const int64_t rows = smaller(L::columns, N - strip * L::columns);
            if (rows < L::columns || K % 2) std::memset(to, 0, static_cast<size_t>(strip_bytes(K)));
            // sixteen pairs at a time: the writes stay in the cache
            for (int64_t k0 = 0; k0 < K; k0 += 32)
                for (int64_t c = 0; c < rows; ++c) {
                    const uint8_t * from = weights + static_cast<size_t>(strip * L::columns + c) * row_bytes;
                    for (int64_t k = k0; k < smaller(K, k0 + 32); k += 2)
                        std::memcpy(to + k / 2 * pair_bytes + c * 4, from + 2 * k, k + 1 < K ? 4 : 2);
                }
        }
    }

    template <int M>
    static void tile(const uint8_t * strip, int64_t K, const Row * rows, float (*results)[L::columns]) {
        const uint8_t * act[M];
        for (int m = 0; m < M; ++m) act[m] = rows[m].activations;
        Float total[panels][M];
#pragma GCC unroll 16
        for (int p = 0; p < panels; ++p)
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) total[p][m] = V::zero_float();
        for (int64_t i = 0; i < (K + 1) / 2; ++i, strip += pair_bytes) {
            typename V::Int w[panels];
#pragma GCC unroll 16
            for (int p = 0; p < panels; ++p) w[p] = V::load(strip + p * 4 * V::lanes);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                const typename V::Int a = V::broadcast(act[m] + 4 * i);
#pragma GCC unroll 16
                for (int p = 0; p < panels; ++p) total[p][m] = V::dot_bf16(total[p][m], w[p], a);
            }
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
            for (int p = 0; p < panels; ++p) V::store(results[m] + p * V::lanes, total[p][m]);
    }
};

template <class Q, int M>
static __attribute__((noinline)) void run_tile(const uint8_t * strip, int64_t K, const Row * rows, int64_t column,
                                               int64_t width) {
    alignas(64) float results[M][Q::L::columns];
    Q::template tile<M>(strip, K, rows, results);
    for (int m = 0; m < M; ++m)
        std::memcpy(rows[m].out + column, results[m], static_cast<size_t>(width) * sizeof(float));
}

template <class Q>
static void multiply(const uint8_t * packed, int64_t K, int64_t N, int64_t first, int64_t last, const Row * rows,
                     int64_t M) {
    const int64_t bytes = Q::row_bytes(K) ? static_cast<int64_t>(Q::row_bytes(K)) : K * 4;
    int64_t many = row_block_bytes / bytes / Q::max_rows * Q::max_rows;
    if (many < 4 * Q::max_rows) many = 4 * Q::max_rows;
    for (int64_t begin = 0; begin < M; begin += many) {
        const int64_t end = smaller(begin + many, M);
        for (int64_t strip = first; strip < last; ++strip) {
            const uint8_t * at = packed + strip * Q::strip_bytes(K);
            const int64_t column = strip * Q::L::columns, width = smaller(Q::L::columns, N - column);
            for (int64_t m = begin; m < end;) {
                // tiles of nearly equal heights
                const int64_t left = end - m, tiles = (left + Q::max_rows - 1) / Q::max_rows;
                const int64_t height = smaller(left, padded((left + tiles - 1) / tiles, Q::row_step));
                switch (height) {
                    case 1: run_tile<Q, 1>(at, K, rows + m, column, width); break;
                    case 2: run_tile<Q, 2>(at, K, rows + m, column, width); break;
                    default:
                        if constexpr (Q::max_rows >= 4) {
                            if (height == 3) run_tile<Q, 3>(at, K, rows + m, column, width);
                            if (height == 4) run_tile<Q, 4>(at, K, rows + m, column, width);
                        }
                        if constexpr (Q::max_rows >= 6) {
                            if (height == 5) run_tile<Q, 5>(at, K, rows + m, column, width);
                            if (height == 6) run_tile<Q, 6>(at, K, rows + m, column, width);
                        }
                        if constexpr (Q::max_rows >= 8) {
                            if (height == 7) run_tile<Q, 7>(at, K, rows + m, column, width);
                            if (height == 8) run_tile<Q, 8>(at, K, rows + m, column, width);
                        }
                }
                m += height;
            }
        }
    }
}

template <class V, class F>
static void multiply_plain(const uint8_t * packed, int64_t K, int64_t N, int64_t first, int64_t last, const Row * rows,
                           int64_t M) {
    using Q = Plain<V, F>;
    if (M == 1)
        for (; first + Q::together <= last && (first + Q::together) * Q::L::columns <= N; first += Q::together)
            run_row<V, F>(packed + first * Q::strip_bytes(K), K, rows[0], first * Q::L::columns);
    multiply<Q>(packed, K, N, first, last, rows, M);
}

template <class Q>
static size_t packed_bytes(int64_t K, int64_t N) {
    return static_cast<size_t>((N + Q::L::columns - 1) / Q::L::columns * Q::strip_bytes(K));
}

template <class Q, class F>
static constexpr Kernel kernel() {
    return {F::type,       Q::block,     Q::block_bytes, packed_bytes<Q>, Q::pack,
            Q::row_bytes,  Q::prepare,   multiply<Q>};
}

template <class V, class F>
static constexpr Kernel plain() {
    Kernel k = kernel<Plain<V, F>, F>();
    k.multiply = multiply_plain<V, F>;
    return k;
}

template <class V>
static constexpr Kernel bf16() {
    if constexpr (V::bf16_pairs)
        return kernel<Pairs<V, BF16>, BF16>();
    else
        return plain<V, BF16>();
}

template <class V>
struct Kernels {
    static constexpr Kernel all[] = {
        kernel<Quantised<V, Q4_0>, Q4_0>(),     kernel<Quantised<V, Q4_1>, Q4_1>(),
        kernel<Quantised<V, Q5_0>, Q5_0>(),     kernel<Quantised<V, Q5_1>, Q5_1>(),
        kernel<Quantised<V, Q8_0>, Q8_0>(),     kernel<Quantised<V, IQ4_NL>, IQ4_NL>(),
        kernel<Quantised<V, MXFP4>, MXFP4>(),   kernel<Quantised<V, Q4_K>, Q4_K>(),
        kernel<Quantised<V, Q5_K>, Q5_K>(),     kernel<Quantised<V, Q6_K>, Q6_K>(),
        kernel<Quantised<V, Q2_K>, Q2_K>(),     kernel<Quantised<V, Q3_K>, Q3_K>(),
        kernel<Quantised<V, IQ4_XS>, IQ4_XS>(), plain<V, F16>(),
        bf16<V>(),
    };
};

}  // namespace
}  // namespace llamaherd

// defines the Level of one file
#define LLAMAHERD_LEVEL(NAME, SIMD)                                                                     \
    const llamaherd::Level llamaherd::level_##NAME = {                                                   \
        #NAME, SIMD::lanes * llamaherd::panels,                                                          \
        static_cast<int>(sizeof(llamaherd::Kernels<SIMD>::all) / sizeof(llamaherd::Kernel)),             \
        llamaherd::Kernels<SIMD>::all, &llamaherd::Attention<SIMD>::kernel}
