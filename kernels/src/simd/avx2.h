// Vectors of eight 32-bit lanes: AVX2, FMA and F16C. With AVX-VNNI the dot product is fused (avxvnni.h).
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace llamaherd {
namespace {

struct Avx2 {
    using Int = __m256i;
    using Float = __m256;
    static constexpr int lanes = 8;
    static constexpr int max_rows = 4;
    static constexpr int attention_rows = 6;
    // without a fused u8 x s8 -> s32 dot product, products are summed in 16 bits and widened now and then
    static constexpr bool fused = false;
    static constexpr bool float_sums = false;    // a product of 32-bit integers is slower than two of floats
    static constexpr bool paired = false;
    static constexpr bool bf16_pairs = false;
    static constexpr bool signed_bytes = false;  // of weights in the fused product

    static Int load(const void * p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
    static Int zero() { return _mm256_setzero_si256(); }
    static Int set1(int32_t v) { return _mm256_set1_epi32(v); }
    static Int broadcast(const void * p) {
        int32_t v;
        std::memcpy(&v, p, 4);
        return _mm256_set1_epi32(v);
    }
    static Int bytes(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }
    static Int bit_and(Int a, Int b) { return _mm256_and_si256(a, b); }
    static Int bit_or(Int a, Int b) { return _mm256_or_si256(a, b); }
    static Int bit_xor(Int a, Int b) { return _mm256_xor_si256(a, b); }
    // shifts within 16-bit lanes; callers mask what crosses from byte to byte
    static Int right(Int a, int n) { return _mm256_srli_epi16(a, n); }
    static Int left(Int a, int n) { return _mm256_slli_epi16(a, n); }
    // shift within 32-bit lanes
    static Int right32(Int a, int n) { return _mm256_srli_epi32(a, n); }
    static Int table(const int8_t * t) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(t)));
    }
    static Int lookup(Int t, Int index) { return _mm256_shuffle_epi8(t, index); }
    static Int add(Int a, Int b) { return _mm256_add_epi32(a, b); }
    static Int multiply(Int a, Int b) { return _mm256_mullo_epi32(a, b); }
    // sum16 + pairs of unsigned w times signed a, modulo 2^16 (a pair must not exceed 32767)
    static Int dot_pairs(Int sum16, Int w, Int a) {
        return in_order(_mm256_add_epi16(sum16, _mm256_maddubs_epi16(w, a)));
    }
    // keeps the compiler from computing all products first and adding them up later: there are no registers for that
    static Int in_order(Int v) {
        asm volatile("" : "+x"(v));
        return v;
    }
    // sum of four signed w times signed a in each 32-bit lane; |a| <= 127
    static Int dot_signed(Int sum, Int w, Int a) {
        const Int products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
        return in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1))));
    }
    static Int dot_fused(Int sum, Int, Int) { return sum; }  // not reached
    static Int madd16(Int a, Int b) { return _mm256_madd_epi16(a, b); }
    static Int add_madd16(Int sum, Int a, Int b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
    static Int ones16() { return _mm256_set1_epi16(1); }
    static Int load_i8(const void * p) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p)));
    }
    static Int load_u16(const void * p) {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    }
    // 2 x lanes bytes -> 16-bit lanes
    static Int load_u8_pairs(const void * p) {
        return _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    }
    // the low 16 bits of each 32-bit lane, twice
    static Int twice16(Int a) {
        const Int order = _mm256_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13,  //
                                           0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
        return _mm256_shuffle_epi8(a, order);
    }
    static Float zero_float() { return _mm256_setzero_ps(); }
    static Float set1_float(float v) { return _mm256_set1_ps(v); }
    static Float to_float(Int a) { return _mm256_cvtepi32_ps(a); }
    static Float multiply_float(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    static Float load_f16(const void * p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    }
    static Float load_bf16(const void * p) { return _mm256_castsi256_ps(_mm256_slli_epi32(load_u16(p), 16)); }
    static void store(float * p, Float v) { _mm256_storeu_ps(p, v); }

    // the bits of the largest |x|, as an integer: NaN and infinity are seen too. n: a multiple of 32
    static uint32_t max_abs_bits(const float * x, int n) {
        const Int mask = _mm256_set1_epi32(0x7fffffff);
        Int m = zero();
        for (int i = 0; i < n; i += 8) m = _mm256_max_epi32(m, _mm256_and_si256(load(x + i), mask));
        __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
        h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
        h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(h));
    }
    // q = round(x * inverse), to nearest even, 32 values
    static void quantise32(const float * x, float inverse, int8_t * q) {
        const Float f = _mm256_set1_ps(inverse);
        const Int a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), f));
        const Int b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), f));
        const Int c = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16), f));
        const Int d = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 24), f));
        const Int bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        const Int order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(q), _mm256_permutevar8x32_epi32(bytes, order));
    }
    // for each of 8 groups of four: (q0 + q1) in the low and (q2 + q3) in the high 16 bits
    static void pair_sums(const int8_t * q, int32_t * sums) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(sums), _mm256_maddubs_epi16(bytes(1), load(q)));
    }

    // ---- floats, for attention
    static Float load_float(const float * p) { return _mm256_loadu_ps(p); }
    static Float add_float(Float a, Float b) { return _mm256_add_ps(a, b); }
    static Float subtract(Float a, Float b) { return _mm256_sub_ps(a, b); }
    static Float divide(Float a, Float b) { return _mm256_div_ps(a, b); }
    static Float maximum(Float a, Float b) { return _mm256_max_ps(a, b); }  // b where one is NaN
    static Float nearest(Float a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // a * 2^n for whole n, where neither a nor the result is subnormal
    static Float scale(Float a, Float n) {
        const Int shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shifted));
    }
    static Float zero_below(Float a, Float x, Float bound) {  // 0 where x < bound, else a
        return _mm256_andnot_ps(_mm256_cmp_ps(x, bound, _CMP_LT_OQ), a);
    }
    static Float choose_below(Float x, Float bound, Float a, Float b) {  // a where x < bound, else b
        return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, bound, _CMP_LT_OQ));
    }
    static Float absolute(Float a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    static Float with_sign(Float a, Float sign) {  // a >= 0
        return _mm256_or_ps(a, _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
    }
    static Float first(Float a, Float other, int n) {  // the first n lanes of a
        const Int at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), at)));
    }
    static float max_of(Float a) {
        __m128 h = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        h = _mm_max_ps(h, _mm_movehl_ps(h, h));
        return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
    }
    static float sum_of(Float a) {
        __m128 h = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        h = _mm_add_ps(h, _mm_movehl_ps(h, h));
        return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
    }
    static float lowest_lane(Float a) { return _mm256_cvtss_f32(a); }

    // eight floats, whatever the level's lanes
    using Eight = __m256;
    static Eight load8_f32(const void * p) { return _mm256_loadu_ps(static_cast<const float *>(p)); }
    static Eight load8_f16(const void * p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(p))); }
    static Eight load8_bf16(const void * p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    static Eight load8_i8(const void * p, float d) {
        const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p)));
        return _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(d));
    }
    static void store8(float * p, Eight v) { _mm256_storeu_ps(p, v); }
    // to[i * stride + j] = r[j][i]
    static void store8_transposed(const Eight * r, float * to, int64_t stride) {
        Eight a[8], b[8];
        for (int i = 0; i < 4; ++i) {
            a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        for (int i = 0; i < 2; ++i) {
            b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
            b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
            b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
            b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            store8(to + i * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
            store8(to + (i + 4) * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
        }
    }
    // sixteen 16-bit floats of each of eight rows: to[i * stride + j] = rows[j][at + i]
    static void store16_transposed_f16(const uint8_t * const * rows, int64_t at, float * to, int64_t stride) {
        Int r[8], a[8], b[8];
        for (int i = 0; i < 8; ++i) r[i] = load(rows[i] + 2 * at);
        for (int i = 0; i < 4; ++i) {
            a[2 * i] = _mm256_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
            a[2 * i + 1] = _mm256_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
        }
        for (int i = 0; i < 2; ++i) {
            b[4 * i] = _mm256_unpacklo_epi32(a[4 * i], a[4 * i + 2]);
            b[4 * i + 1] = _mm256_unpackhi_epi32(a[4 * i], a[4 * i + 2]);
            b[4 * i + 2] = _mm256_unpacklo_epi32(a[4 * i + 1], a[4 * i + 3]);
            b[4 * i + 3] = _mm256_unpackhi_epi32(a[4 * i + 1], a[4 * i + 3]);
        }
        for (int i = 0; i < 8; ++i) {
            const Int v = i % 2 ? _mm256_unpackhi_epi64(b[i / 2], b[i / 2 + 4])
                                : _mm256_unpacklo_epi64(b[i / 2], b[i / 2 + 4]);
            store8(to + i * stride, _mm256_cvtph_ps(_mm256_castsi256_si128(v)));
            store8(to + (i + 8) * stride, _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
        }
    }
    // 64 cells of a mask of 16-bit floats: a bit for each that is not -infinity; are all others zero?
    static uint64_t open_cells(const uint16_t * mask, bool & plain) {
        const Int shut = _mm256_set1_epi16(static_cast<int16_t>(0xfc00));
        Int is_shut[4], other = _mm256_set1_epi8(-1);
        for (int i = 0; i < 4; ++i) {
            const Int m = load(mask + 16 * i);
            is_shut[i] = _mm256_cmpeq_epi16(m, shut);
            other = _mm256_and_si256(other, _mm256_or_si256(is_shut[i], _mm256_cmpeq_epi16(m, zero())));
        }
        plain = _mm256_movemask_epi8(other) == -1;
        uint64_t bits = 0;
        for (int i = 0; i < 2; ++i) {
            const Int bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(is_shut[2 * i], is_shut[2 * i + 1]), 0xd8);
            bits |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(bytes))) << (32 * i);
        }
        return ~bits;
    }
};

}  // namespace
}  // namespace llamaherd
