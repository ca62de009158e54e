// AVX512-VNNI's vectors with the products of pairs of AVX512-BF16.
#pragma once
#include "avx512vnni.h"

namespace llamaherd {
namespace {

struct Avx512Bf16 : Avx512Vnni {
    static constexpr bool bf16_pairs = true;
    // sum + two products of 16-bit floats; subnormal ones count as zero
    static Float dot_bf16(Float sum, Int w, Int a) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(a));
    }
    // to nearest even; n values of two bytes
    static void round_bf16(const float * x, int64_t n, uint8_t * to) {
        for (int64_t i = 0; i < n; i += 16) {
            const __mmask16 mask = static_cast<__mmask16>(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1);
            const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + i));
            _mm256_mask_storeu_epi16(to + 2 * i, mask, reinterpret_cast<__m256i>(rounded));
        }
    }
};

}  // namespace
}  // namespace llamaherd
