// AVX2 with the fused dot product of AVX-VNNI.
#pragma once
#include "avx2.h"

namespace llamaherd {
namespace {

struct AvxVnni : Avx2 {
    static constexpr bool fused = true;
    static constexpr bool float_sums = true;
    // sum + four products of unsigned w and signed a
    static Int dot_fused(Int sum, Int w, Int a) { return _mm256_dpbusd_avx_epi32(sum, w, a); }
    static Int add_madd16(Int sum, Int a, Int b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
};

}  // namespace
}  // namespace llamaherd
