// What the machine could do: the fastest products of bytes, from registers, and the fastest way to read memory.
#include <cstring>

#include "capi.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace {

constexpr int chains = 8;  // independent sums, more than the latency of an instruction needs

// a product of bytes and an addition of 16-bit sums: what the AVX2 level's fastest tiles are made of
__attribute__((target("avx2"))) int64_t bytes_avx2(int64_t rounds) {
    __m256i sum[chains], a = _mm256_set1_epi8(1), b = _mm256_set1_epi8(2);
    for (__m256i & s : sum) s = _mm256_setzero_si256();
    for (int64_t i = 0; i < rounds; ++i)
        for (__m256i & s : sum) {
            asm volatile("" : "+x"(a));  // or the compiler multiplies once
            s = _mm256_add_epi16(s, _mm256_maddubs_epi16(a, b));
        }
    for (__m256i & s : sum) asm volatile("" : "+x"(s));
    return rounds * chains * 64;
}

__attribute__((target("avx2,avxvnni"))) int64_t bytes_avxvnni(int64_t rounds) {
    __m256i sum[chains], a = _mm256_set1_epi8(1), b = _mm256_set1_epi8(2);
    for (__m256i & s : sum) s = _mm256_setzero_si256();
    for (int64_t i = 0; i < rounds; ++i)
        for (__m256i & s : sum) s = _mm256_dpbusd_avx_epi32(s, a, b);
    for (__m256i & s : sum) asm volatile("" : "+x"(s));
    return rounds * chains * 64;
}

__attribute__((target("avx512f,avx512vnni"))) int64_t bytes_avx512vnni(int64_t rounds) {
    __m512i sum[chains], a = _mm512_set1_epi32(0x01010101), b = _mm512_set1_epi32(0x02020202);
    for (__m512i & s : sum) s = _mm512_setzero_si512();
    for (int64_t i = 0; i < rounds; ++i)
        for (__m512i & s : sum) s = _mm512_dpbusd_epi32(s, a, b);
    for (__m512i & s : sum) asm volatile("" : "+v"(s));
    return rounds * chains * 128;
}

__attribute__((target("avx2"))) void read_avx2(const char * p, size_t bytes) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i + 128 <= bytes; i += 128) {
        const __m256i * v = reinterpret_cast<const __m256i *>(p + i);
        a = _mm256_or_si256(a, _mm256_loadu_si256(v));
        b = _mm256_or_si256(b, _mm256_loadu_si256(v + 1));
        c = _mm256_or_si256(c, _mm256_loadu_si256(v + 2));
        d = _mm256_or_si256(d, _mm256_loadu_si256(v + 3));
    }
    asm volatile("" ::"x"(_mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d))));
}

}  // namespace

int64_t llamaherd_kernels_peak(const char * level, int64_t rounds) {
    if (!llamaherd_kernels_runs(level)) return 0;
    if (!std::strcmp(level, "avx2")) return bytes_avx2(rounds);
    if (!std::strcmp(level, "avxvnni")) return bytes_avxvnni(rounds);
    if (!std::strcmp(level, "avx512vnni") || !std::strcmp(level, "avx512bf16")) return bytes_avx512vnni(rounds);
    return 0;
}

void llamaherd_kernels_read(const void * data, int64_t bytes) {
    if (llamaherd_kernels_runs("avx2")) read_avx2(static_cast<const char *>(data), static_cast<size_t>(bytes));
}

#elif defined(__aarch64__)
#include <arm_neon.h>

namespace {

constexpr int chains = 16;  // independent sums, more than the latency of an instruction needs

__attribute__((target("arch=armv8.2-a+dotprod"))) int64_t bytes_dotprod(int64_t rounds) {
    int32x4_t sum[chains];
    const int8x16_t a = vdupq_n_s8(1), b = vdupq_n_s8(2);
    for (int32x4_t & s : sum) s = vdupq_n_s32(0);
    for (int64_t i = 0; i < rounds; ++i)
        for (int32x4_t & s : sum) s = vdotq_s32(s, a, b);
    for (int32x4_t & s : sum) asm volatile("" : "+w"(s));
    return rounds * chains * 32;
}

__attribute__((target("arch=armv8.2-a+i8mm"))) int64_t bytes_i8mm(int64_t rounds) {
    int32x4_t sum[chains];
    const int8x16_t a = vdupq_n_s8(1), b = vdupq_n_s8(2);
    for (int32x4_t & s : sum) s = vdupq_n_s32(0);
    for (int64_t i = 0; i < rounds; ++i)
        for (int32x4_t & s : sum) s = vmmlaq_s32(s, a, b);
    for (int32x4_t & s : sum) asm volatile("" : "+w"(s));
    return rounds * chains * 64;
}

}  // namespace

int64_t llamaherd_kernels_peak(const char * level, int64_t rounds) {
    if (!llamaherd_kernels_runs(level)) return 0;
    if (!std::strcmp(level, "i8mm")) return bytes_i8mm(rounds);
    if (!std::strcmp(level, "dotprod")) return bytes_dotprod(rounds);
    return 0;
}

void llamaherd_kernels_read(const void * data, int64_t bytes) {
    const uint8_t * p = static_cast<const uint8_t *>(data);
    uint8x16_t a = vdupq_n_u8(0), b = a, c = a, d = a;
    for (int64_t i = 0; i + 64 <= bytes; i += 64) {
        a = vorrq_u8(a, vld1q_u8(p + i));
        b = vorrq_u8(b, vld1q_u8(p + i + 16));
        c = vorrq_u8(c, vld1q_u8(p + i + 32));
        d = vorrq_u8(d, vld1q_u8(p + i + 48));
    }
    asm volatile("" ::"w"(vorrq_u8(vorrq_u8(a, b), vorrq_u8(c, d))));
}

#else

int64_t llamaherd_kernels_peak(const char *, int64_t) { return 0; }
void llamaherd_kernels_read(const void *, int64_t) {}

#endif
