// The vector wrappers in plain C++, with the semantics of the instructions (saturation and wrap-around too): so the
// micro-kernels of a level run, and are tested, on CPUs that lack its instructions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../half.h"

namespace llamaherd {
namespace {

template <int Lanes, bool Fused>
struct Emulated {
    struct Int {
        uint8_t b[4 * Lanes];
    };
    struct Float {
        float f[Lanes];
    };
    static constexpr int lanes = Lanes;
    static constexpr int max_rows = 2;
    static constexpr int attention_rows = 2;
    static constexpr bool fused = Fused;
    static constexpr bool float_sums = Fused;
    static constexpr bool paired = false;
    static constexpr bool bf16_pairs = Fused && Lanes == 16;
    static constexpr bool signed_bytes = false;

    template <class T>
    static T get(const Int & a, int i) {
        T v;
        std::memcpy(&v, a.b + i * sizeof(T), sizeof(T));
        return v;
    }
    template <class T>
    static void put(Int & a, int i, T v) {
        std::memcpy(a.b + i * sizeof(T), &v, sizeof(T));
    }
    template <class T, class Function>
    static Int map(Function f) {
        Int r;
        for (int i = 0; i < 4 * Lanes / static_cast<int>(sizeof(T)); ++i) put<T>(r, i, static_cast<T>(f(i)));
        return r;
    }
    static int16_t saturate(int v) { return static_cast<int16_t>(v > 32767 ? 32767 : v < -32768 ? -32768 : v); }

    static Int load(const void * p) {
        Int r;
        std::memcpy(r.b, p, sizeof r.b);
        return r;
    }
    static Int zero() { return set1(0); }
    static Int set1(int32_t v) {
        return map<int32_t>([&](int) { return v; });
    }
    static Int broadcast(const void * p) {
        int32_t v;
        std::memcpy(&v, p, 4);
        return set1(v);
    }
    static Int bytes(int v) {
        return map<uint8_t>([&](int) { return v; });
    }
    static Int bit_and(Int a, Int b) {
        return map<uint8_t>([&](int i) { return a.b[i] & b.b[i]; });
    }
    static Int bit_or(Int a, Int b) {
        return map<uint8_t>([&](int i) { return a.b[i] | b.b[i]; });
    }
    static Int bit_xor(Int a, Int b) {
        return map<uint8_t>([&](int i) { return a.b[i] ^ b.b[i]; });
    }
    static Int right(Int a, int n) {
        return map<uint16_t>([&](int i) { return get<uint16_t>(a, i) >> n; });
    }
    static Int left(Int a, int n) {
        return map<uint16_t>([&](int i) { return get<uint16_t>(a, i) << n; });
    }
    static Int right32(Int a, int n) {
        return map<uint32_t>([&](int i) { return get<uint32_t>(a, i) >> n; });
    }
    static Int table(const int8_t * t) {
        return map<int8_t>([&](int i) { return t[i % 16]; });
    }
    static Int lookup(Int t, Int index) {
        return map<uint8_t>(
            [&](int i) { return index.b[i] & 0x80 ? 0 : t.b[(i & ~15) + (index.b[i] & 15)]; });
    }
    static Int add(Int a, Int b) {
        return map<uint32_t>([&](int i) { return get<uint32_t>(a, i) + get<uint32_t>(b, i); });
    }
    static Int multiply(Int a, Int b) {
        return map<uint32_t>([&](int i) { return get<uint32_t>(a, i) * get<uint32_t>(b, i); });
    }
    static int product(const Int & w, const Int & a, int i) { return w.b[i] * static_cast<int8_t>(a.b[i]); }
    static Int dot_pairs(Int sum, Int w, Int a) {
        return map<uint16_t>([&](int i) {
            return get<uint16_t>(sum, i) + saturate(product(w, a, 2 * i) + product(w, a, 2 * i + 1));
        });
    }
    static Int dot_signed(Int sum, Int w, Int a) {
        return map<int32_t>([&](int i) {
            int32_t r = get<int32_t>(sum, i);
            for (int j = 4 * i; j < 4 * i + 4; ++j) r += static_cast<int8_t>(w.b[j]) * static_cast<int8_t>(a.b[j]);
            return r;
        });
    }
    static Int dot_fused(Int sum, Int w, Int a) {
        return map<int32_t>([&](int i) {
            int32_t r = get<int32_t>(sum, i);
            for (int j = 4 * i; j < 4 * i + 4; ++j) r += product(w, a, j);
            return r;
        });
    }
    // the odd ones first, as AVX512-BF16 does
    static Float dot_bf16(Float sum, const Int & w, const Int & a) {
        for (int i = 0; i < Lanes; ++i)
            for (int j = 2 * i + 1; j >= 2 * i; --j)
                sum.f[i] = std::fma(bf16_to_float(get<uint16_t>(w, j)), bf16_to_float(get<uint16_t>(a, j)), sum.f[i]);
        return sum;
    }
    static void round_bf16(const float * x, int64_t n, uint8_t * to) {
        for (int64_t i = 0; i < n; ++i) {
            uint32_t bits;
            std::memcpy(&bits, x + i, 4);
            const bool nan = (bits & 0x7fffffff) > 0x7f800000;
            const uint16_t h = static_cast<uint16_t>(nan ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
            std::memcpy(to + 2 * i, &h, 2);
        }
    }
    static Int madd16(Int a, Int b) {
        return map<int32_t>([&](int i) {
            return get<int16_t>(a, 2 * i) * get<int16_t>(b, 2 * i) +
                   get<int16_t>(a, 2 * i + 1) * get<int16_t>(b, 2 * i + 1);
        });
    }
    static Int add_madd16(Int sum, Int a, Int b) { return add(sum, madd16(a, b)); }
    static Int ones16() {
        return map<int16_t>([](int) { return 1; });
    }
    static Int load_i8(const void * p) {
        return map<int32_t>([&](int i) { return static_cast<const int8_t *>(p)[i]; });
    }
    static Int load_u16(const void * p) {
        return map<int32_t>([&](int i) {
            uint16_t v;
            std::memcpy(&v, static_cast<const char *>(p) + 2 * i, 2);
            return v;
        });
    }
    static Int load_u8_pairs(const void * p) {
        return map<int16_t>([&](int i) { return static_cast<const uint8_t *>(p)[i]; });
    }
    static Int twice16(Int a) {
        return map<int16_t>([&](int i) { return get<int16_t>(a, i & ~1); });
    }
    static Float zero_float() { return set1_float(0); }
    static Float set1_float(float v) {
        Float r;
        for (float & x : r.f) x = v;
        return r;
    }
    static Float to_float(Int a) {
        Float r;
        for (int i = 0; i < Lanes; ++i) r.f[i] = static_cast<float>(get<int32_t>(a, i));
        return r;
    }
    static Float multiply_float(Float a, Float b) {
        for (int i = 0; i < Lanes; ++i) a.f[i] *= b.f[i];
        return a;
    }
    static Float fma(Float a, Float b, Float c) {
        for (int i = 0; i < Lanes; ++i) a.f[i] = std::fma(a.f[i], b.f[i], c.f[i]);
        return a;
    }
    static Float load_half(const void * p, float (*convert)(uint16_t)) {
        Float r;
        for (int i = 0; i < Lanes; ++i) {
            uint16_t v;
            std::memcpy(&v, static_cast<const char *>(p) + 2 * i, 2);
            r.f[i] = convert(v);
        }
        return r;
    }
    static Float load_f16(const void * p) { return load_half(p, f16_to_float); }
    static Float load_bf16(const void * p) { return load_half(p, bf16_to_float); }
    static void store(float * p, Float v) { std::memcpy(p, v.f, sizeof v.f); }

    static uint32_t max_abs_bits(const float * x, int n) {
        uint32_t m = 0;
        for (int i = 0; i < n; ++i) {
            uint32_t bits;
            std::memcpy(&bits, x + i, 4);
            bits &= 0x7fffffff;
            m = bits > m ? bits : m;
        }
        return m;
    }
    static void quantise32(const float * x, float inverse, int8_t * q) {
        for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(std::lrintf(x[i] * inverse));
    }
    static void pair_sums(const int8_t * q, int32_t * sums) {
        for (int g = 0; g < 8; ++g) {
            const int16_t pair[2] = {static_cast<int16_t>(q[4 * g] + q[4 * g + 1]),
                                     static_cast<int16_t>(q[4 * g + 2] + q[4 * g + 3])};
            std::memcpy(sums + g, pair, 4);
        }
    }

    // ---- floats, for attention
    template <class Function>
    static Float each(Function f) {
        Float r;
        for (int i = 0; i < Lanes; ++i) r.f[i] = f(i);
        return r;
    }
    static Float load_float(const float * p) {
        return each([&](int i) { return p[i]; });
    }
    static Float add_float(Float a, Float b) {
        return each([&](int i) { return a.f[i] + b.f[i]; });
    }
    static Float subtract(Float a, Float b) {
        return each([&](int i) { return a.f[i] - b.f[i]; });
    }
    static Float divide(Float a, Float b) {
        return each([&](int i) { return a.f[i] / b.f[i]; });
    }
    static Float maximum(Float a, Float b) {
        return each([&](int i) { return a.f[i] > b.f[i] ? a.f[i] : b.f[i]; });
    }
    static Float nearest(Float a) {
        return each([&](int i) { return std::nearbyint(a.f[i]); });
    }
    static Float scale(Float a, Float n) {
        return each([&](int i) { return std::isnan(n.f[i]) ? a.f[i] : std::ldexp(a.f[i], static_cast<int>(n.f[i])); });
    }
    static Float zero_below(Float a, Float x, Float bound) {
        return each([&](int i) { return x.f[i] < bound.f[i] ? 0.0f : a.f[i]; });
    }
    static Float choose_below(Float x, Float bound, Float a, Float b) {
        return each([&](int i) { return x.f[i] < bound.f[i] ? a.f[i] : b.f[i]; });
    }
    static Float absolute(Float a) {
        return each([&](int i) { return std::fabs(a.f[i]); });
    }
    static Float with_sign(Float a, Float sign) {
        return each([&](int i) { return std::copysign(a.f[i], sign.f[i]); });
    }
    static Float first(Float a, Float other, int n) {
        return each([&](int i) { return i < n ? a.f[i] : other.f[i]; });
    }
    // halves onto each other, as the instructions do
    template <class Function>
    static float halves(Float a, Function f) {
        for (int n = Lanes / 2; n; n /= 2)
            for (int i = 0; i < n; ++i) a.f[i] = f(a.f[i], a.f[i + n]);
        return a.f[0];
    }
    static float max_of(Float a) {
        return halves(a, [](float x, float y) { return x > y ? x : y; });
    }
    static float sum_of(Float a) {
        return halves(a, [](float x, float y) { return x + y; });
    }
    static float lowest_lane(Float a) { return a.f[0]; }

    struct Eight {
        float f[8];
    };
    template <class Function>
    static Eight each8(Function f) {
        Eight r;
        for (int i = 0; i < 8; ++i) r.f[i] = f(i);
        return r;
    }
    static uint16_t half_at(const void * p, int i) {
        uint16_t v;
        std::memcpy(&v, static_cast<const char *>(p) + 2 * i, 2);
        return v;
    }
    static Eight load8_f32(const void * p) {
        Eight r;
        std::memcpy(r.f, p, sizeof r.f);
        return r;
    }
    static Eight load8_f16(const void * p) {
        return each8([&](int i) { return f16_to_float(half_at(p, i)); });
    }
    static Eight load8_bf16(const void * p) {
        return each8([&](int i) { return bf16_to_float(half_at(p, i)); });
    }
    static Eight load8_i8(const void * p, float d) {
        return each8([&](int i) { return static_cast<float>(static_cast<const int8_t *>(p)[i]) * d; });
    }
    static void store8(float * p, Eight v) { std::memcpy(p, v.f, sizeof v.f); }
    static void store8_transposed(const Eight * r, float * to, int64_t stride) {
        for (int i = 0; i < 8; ++i)
            for (int j = 0; j < 8; ++j) to[i * stride + j] = r[j].f[i];
    }
    static void store16_transposed_f16(const uint8_t * const * rows, int64_t at, float * to, int64_t stride) {
        for (int i = 0; i < 16; ++i)
            for (int j = 0; j < 8; ++j) to[i * stride + j] = f16_to_float(half_at(rows[j], static_cast<int>(at) + i));
    }
    static uint64_t open_cells(const uint16_t * mask, bool & plain) {
        uint64_t bits = 0;
        plain = true;
        for (int i = 0; i < 64; ++i) {
            const uint16_t m = half_at(mask, i);
            if (m != 0xfc00) bits |= uint64_t{1} << i;
            plain = plain && (m == 0xfc00 || m == 0);
        }
        return bits;
    }
};

}  // namespace
}  // namespace llamaherd
