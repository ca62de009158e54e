// Vectors of sixteen 32-bit lanes: AVX-512 F, BW, DQ, VL and VNNI. What concerns one row is AVX2's.
#pragma once
#include "avx2.h"

namespace llamaherd {
namespace {

struct Avx512Vnni {
    using Int = __m512i;
    using Float = __m512;
    static constexpr int lanes = 16;
    static constexpr int max_rows = 8;
    static constexpr int attention_rows = 8;
    static constexpr bool fused = true;
    static constexpr bool paired = false;
    static constexpr bool signed_bytes = false;
    static constexpr bool float_sums = true;
    static constexpr bool bf16_pairs = false;

    static Int load(const void * p) { return _mm512_loadu_si512(p); }
    static Int zero() { return _mm512_setzero_si512(); }
    static Int set1(int32_t v) { return _mm512_set1_epi32(v); }
    static Int broadcast(const void * p) {
        int32_t v;
        std::memcpy(&v, p, 4);
        return _mm512_set1_epi32(v);
    }
    static Int bytes(int v) { return _mm512_set1_epi8(static_cast<char>(v)); }
    static Int bit_and(Int a, Int b) { return _mm512_and_si512(a, b); }
    static Int bit_or(Int a, Int b) { return _mm512_or_si512(a, b); }
    static Int bit_xor(Int a, Int b) { return _mm512_xor_si512(a, b); }
    static Int right(Int a, int n) { return _mm512_srli_epi16(a, n); }
    static Int left(Int a, int n) { return _mm512_slli_epi16(a, n); }
    static Int right32(Int a, int n) { return _mm512_srli_epi32(a, n); }
    static Int table(const int8_t * t) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(t)));
    }
    static Int lookup(Int t, Int index) { return _mm512_shuffle_epi8(t, index); }
    static Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
    static Int multiply(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
    static Int dot_pairs(Int sum16, Int w, Int a) { return _mm512_add_epi16(sum16, _mm512_maddubs_epi16(w, a)); }
    static Int dot_signed(Int sum, Int, Int) { return sum; }  // not reached
    static Int dot_fused(Int sum, Int w, Int a) { return _mm512_dpbusd_epi32(sum, w, a); }
    static Int madd16(Int a, Int b) { return _mm512_madd_epi16(a, b); }
    static Int add_madd16(Int sum, Int a, Int b) { return _mm512_dpwssd_epi32(sum, a, b); }
    static Int ones16() { return _mm512_set1_epi16(1); }
    static Int load_i8(const void * p) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    }
    static Int load_u16(const void * p) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
    }
    static Int load_u8_pairs(const void * p) {
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
    }
    static Int twice16(Int a) {
        const __m128i order = _mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
        return _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(order));
    }
    static Float zero_float() { return _mm512_setzero_ps(); }
    static Float set1_float(float v) { return _mm512_set1_ps(v); }
    static Float to_float(Int a) { return _mm512_cvtepi32_ps(a); }
    static Float multiply_float(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    static Float load_f16(const void * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
    }
    static Float load_bf16(const void * p) { return _mm512_castsi512_ps(_mm512_slli_epi32(load_u16(p), 16)); }
    static void store(float * p, Float v) { _mm512_storeu_ps(p, v); }

    static uint32_t max_abs_bits(const float * x, int n) { return Avx2::max_abs_bits(x, n); }
    static void quantise32(const float * x, float inverse, int8_t * q) { Avx2::quantise32(x, inverse, q); }
    static void pair_sums(const int8_t * q, int32_t * sums) { Avx2::pair_sums(q, sums); }

    // ---- floats, for attention
    static Float load_float(const float * p) { return _mm512_loadu_ps(p); }
    static Float add_float(Float a, Float b) { return _mm512_add_ps(a, b); }
    static Float subtract(Float a, Float b) { return _mm512_sub_ps(a, b); }
    static Float divide(Float a, Float b) { return _mm512_div_ps(a, b); }
    static Float maximum(Float a, Float b) { return _mm512_max_ps(a, b); }
    static Float nearest(Float a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Float scale(Float a, Float n) {
        const Int shifted = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), shifted));
    }
    static Float zero_below(Float a, Float x, Float bound) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), a);
    }
    static Float choose_below(Float x, Float bound, Float a, Float b) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), b, a);
    }
    static Float absolute(Float a) { return _mm512_abs_ps(a); }
    static Float with_sign(Float a, Float sign) {
        return _mm512_or_ps(a, _mm512_and_ps(_mm512_set1_ps(-0.0f), sign));
    }
    static Float first(Float a, Float other, int n) {
        return _mm512_mask_blend_ps(static_cast<__mmask16>(n >= 16 ? 0xffff : (1 << n) - 1), other, a);
    }
    static float max_of(Float a) {
        return Avx2::max_of(_mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
    }
    static float sum_of(Float a) {
        return Avx2::sum_of(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
    }
    static float lowest_lane(Float a) { return _mm512_cvtss_f32(a); }

    using Eight = Avx2::Eight;
    static Eight load8_f32(const void * p) { return Avx2::load8_f32(p); }
    static Eight load8_f16(const void * p) { return Avx2::load8_f16(p); }
    static Eight load8_bf16(const void * p) { return Avx2::load8_bf16(p); }
    static Eight load8_i8(const void * p, float d) { return Avx2::load8_i8(p, d); }
    static void store8(float * p, Eight v) { Avx2::store8(p, v); }
    static void store8_transposed(const Eight * r, float * to, int64_t stride) {
        Avx2::store8_transposed(r, to, stride);
    }
    static void store16_transposed_f16(const uint8_t * const * rows, int64_t at, float * to, int64_t stride) {
        Avx2::store16_transposed_f16(rows, at, to, stride);
    }
    static uint64_t open_cells(const uint16_t * mask, bool & plain) {
        const Int shut = _mm512_set1_epi16(static_cast<int16_t>(0xfc00));
        uint64_t bits = 0, other = 0;
        for (int i = 0; i < 2; ++i) {
            const Int m = load(mask + 32 * i);
            const __mmask32 open = _mm512_cmpneq_epi16_mask(m, shut);
            bits |= static_cast<uint64_t>(open) << (32 * i);
            other |= _mm512_mask_cmpneq_epi16_mask(open, m, zero());
        }
        plain = other == 0;
        return bits;
    }
};

}  // namespace
}  // namespace llamaherd
