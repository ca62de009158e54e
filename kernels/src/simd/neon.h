// Vectors of eight 32-bit lanes, two registers each: NEON with the dot product of signed bytes (FEAT_DotProd).
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace llamaherd {
namespace {

struct Neon {
    struct Int {
        int32x4_t v[2];
    };
    struct Float {
        float32x4_t v[2];
    };
    static constexpr int lanes = 8;
    static constexpr int max_rows = 4;
    static constexpr int attention_rows = 6;
    static constexpr bool fused = true;
    static constexpr bool float_sums = false;
    static constexpr bool paired = false;
    static constexpr bool bf16_pairs = false;
    static constexpr bool signed_bytes = true;  // unsigned weights are below 128

    static const uint8_t * at(const void * p) { return static_cast<const uint8_t *>(p); }
    static uint8x16_t b(int32x4_t a) { return vreinterpretq_u8_s32(a); }
    static int32x4_t i(uint8x16_t a) { return vreinterpretq_s32_u8(a); }

    static Int load(const void * p) { return {{i(vld1q_u8(at(p))), i(vld1q_u8(at(p) + 16))}}; }
    static Int zero() { return set1(0); }
    static Int set1(int32_t v) { return {{vdupq_n_s32(v), vdupq_n_s32(v)}}; }
    static Int broadcast(const void * p) {  // p: aligned to four bytes
        const int32x4_t v = vld1q_dup_s32(static_cast<const int32_t *>(p));
        return {{v, v}};
    }
    static Int bytes(int v) {
        const int32x4_t r = i(vdupq_n_u8(static_cast<uint8_t>(v)));
        return {{r, r}};
    }
    static Int bit_and(Int x, Int y) { return {{vandq_s32(x.v[0], y.v[0]), vandq_s32(x.v[1], y.v[1])}}; }
    static Int bit_or(Int x, Int y) { return {{vorrq_s32(x.v[0], y.v[0]), vorrq_s32(x.v[1], y.v[1])}}; }
    static Int bit_xor(Int x, Int y) { return {{veorq_s32(x.v[0], y.v[0]), veorq_s32(x.v[1], y.v[1])}}; }
    // within 16-bit lanes; the operators become immediate shifts, which the intrinsics take from constants only
    static Int right(Int x, int n) {
        for (int32x4_t & v : x.v) v = vreinterpretq_s32_u16(vreinterpretq_u16_s32(v) >> static_cast<uint16_t>(n));
        return x;
    }
    static Int left(Int x, int n) {
        for (int32x4_t & v : x.v) v = vreinterpretq_s32_u16(vreinterpretq_u16_s32(v) << static_cast<uint16_t>(n));
        return x;
    }
    static Int right32(Int x, int n) {
        for (int32x4_t & v : x.v) v = vreinterpretq_s32_u32(vreinterpretq_u32_s32(v) >> static_cast<uint32_t>(n));
        return x;
    }
    static Int table(const int8_t * t) {
        const int32x4_t v = vreinterpretq_s32_s8(vld1q_s8(t));
        return {{v, v}};
    }
    static Int lookup(Int t, Int index) {
        return {{i(vqtbl1q_u8(b(t.v[0]), b(index.v[0]))), i(vqtbl1q_u8(b(t.v[1]), b(index.v[1])))}};
    }
    static Int add(Int x, Int y) { return {{vaddq_s32(x.v[0], y.v[0]), vaddq_s32(x.v[1], y.v[1])}}; }
    static Int multiply(Int x, Int y) { return {{vmulq_s32(x.v[0], y.v[0]), vmulq_s32(x.v[1], y.v[1])}}; }
    static Int dot_fused(Int sum, Int w, Int a) {
        for (int h = 0; h < 2; ++h)
            sum.v[h] = vdotq_s32(sum.v[h], vreinterpretq_s8_s32(w.v[h]), vreinterpretq_s8_s32(a.v[h]));
        return sum;
    }
    static Int dot_pairs(Int sum, Int, Int) { return sum; }   // not reached
    static Int dot_signed(Int sum, Int, Int) { return sum; }  // not reached
    static Int twice16(Int x) { return x; }                   // not reached
    static Int madd16(Int x, Int y) {
        for (int h = 0; h < 2; ++h) {
            const int16x8_t p = vreinterpretq_s16_s32(x.v[h]), q = vreinterpretq_s16_s32(y.v[h]);
            x.v[h] = vpaddq_s32(vmull_s16(vget_low_s16(p), vget_low_s16(q)), vmull_high_s16(p, q));
        }
        return x;
    }
    static Int add_madd16(Int sum, Int a, Int b) { return add(sum, madd16(a, b)); }
    static Int ones16() { return set1(0x00010001); }
    static Int load_i8(const void * p) {
        const int16x8_t v = vmovl_s8(vld1_s8(static_cast<const int8_t *>(p)));
        return {{vmovl_s16(vget_low_s16(v)), vmovl_high_s16(v)}};
    }
    static Int load_u16(const void * p) {
        const uint16x8_t v = vreinterpretq_u16_u8(vld1q_u8(at(p)));
        return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(v))), vreinterpretq_s32_u32(vmovl_high_u16(v))}};
    }
    static Int load_u8_pairs(const void * p) {
        const uint8x16_t v = vld1q_u8(at(p));
        return {{vreinterpretq_s32_u16(vmovl_u8(vget_low_u8(v))), vreinterpretq_s32_u16(vmovl_high_u8(v))}};
    }
    static Float zero_float() { return set1_float(0); }
    static Float set1_float(float v) { return {{vdupq_n_f32(v), vdupq_n_f32(v)}}; }
    static Float to_float(Int x) { return {{vcvtq_f32_s32(x.v[0]), vcvtq_f32_s32(x.v[1])}}; }
    static Float multiply_float(Float x, Float y) {
        return {{vmulq_f32(x.v[0], y.v[0]), vmulq_f32(x.v[1], y.v[1])}};
    }
    static Float fma(Float x, Float y, Float sum) {
        return {{vfmaq_f32(sum.v[0], x.v[0], y.v[0]), vfmaq_f32(sum.v[1], x.v[1], y.v[1])}};
    }
    static Float load_f16(const void * p) {
        const float16x8_t v = vreinterpretq_f16_u8(vld1q_u8(at(p)));
        return {{vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)}};
    }
    static Float load_bf16(const void * p) {
        const Int v = load_u16(p);
        return {{vreinterpretq_f32_s32(vshlq_n_s32(v.v[0], 16)), vreinterpretq_f32_s32(vshlq_n_s32(v.v[1], 16))}};
    }
    static void store(float * p, Float x) {
        vst1q_f32(p, x.v[0]);
        vst1q_f32(p + 4, x.v[1]);
    }

    // the bits of the largest |x|, as an integer: NaN and infinity are seen too. n: a multiple of 32
    static uint32_t max_abs_bits(const float * x, int n) {
        uint32x4_t m = vdupq_n_u32(0);
        for (int k = 0; k < n; k += 4)
            m = vmaxq_u32(m, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + k)), vdupq_n_u32(0x7fffffff)));
        return vmaxvq_u32(m);
    }
    // q = round(x * inverse), to nearest even, 32 values
    static void quantise32(const float * x, float inverse, int8_t * q) {
        for (int k = 0; k < 32; k += 8) {
            const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + k), inverse));
            const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + k + 4), inverse));
            vst1_s8(q + k, vqmovn_s16(vcombine_s16(vqmovn_s32(low), vqmovn_s32(high))));
        }
    }
    // for each of 8 groups of four: (q0 + q1) in the low and (q2 + q3) in the high 16 bits
    static void pair_sums(const int8_t * q, int32_t * sums) {
        vst1q_s32(sums, vreinterpretq_s32_s16(vpaddlq_s8(vld1q_s8(q))));
        vst1q_s32(sums + 4, vreinterpretq_s32_s16(vpaddlq_s8(vld1q_s8(q + 16))));
    }

    // ---- floats, for attention
    template <class Function>
    static Float each(Function f) {
        return {{f(0), f(1)}};
    }
    static uint32x4_t bits(float32x4_t a) { return vreinterpretq_u32_f32(a); }
    static float32x4_t from_bits(uint32x4_t a) { return vreinterpretq_f32_u32(a); }

    static Float load_float(const float * p) { return {{vld1q_f32(p), vld1q_f32(p + 4)}}; }
    static Float add_float(Float a, Float b) {
        return each([&](int h) { return vaddq_f32(a.v[h], b.v[h]); });
    }
    static Float subtract(Float a, Float b) {
        return each([&](int h) { return vsubq_f32(a.v[h], b.v[h]); });
    }
    static Float divide(Float a, Float b) {
        return each([&](int h) { return vdivq_f32(a.v[h], b.v[h]); });
    }
    static Float maximum(Float a, Float b) {  // b where one is not a number
        return each([&](int h) { return vbslq_f32(vcgtq_f32(a.v[h], b.v[h]), a.v[h], b.v[h]); });
    }
    static Float nearest(Float a) {
        return each([&](int h) { return vrndnq_f32(a.v[h]); });
    }
    // a * 2^n for whole n, where neither a nor the result is subnormal
    static Float scale(Float a, Float n) {
        return each([&](int h) {
            const int32x4_t shifted = vshlq_n_s32(vcvtnq_s32_f32(n.v[h]), 23);
            return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v[h]), shifted));
        });
    }
    static Float zero_below(Float a, Float x, Float bound) {  // 0 where x < bound, else a
        return each([&](int h) { return from_bits(vbicq_u32(bits(a.v[h]), vcltq_f32(x.v[h], bound.v[h]))); });
    }
    static Float choose_below(Float x, Float bound, Float a, Float b) {  // a where x < bound, else b
        return each([&](int h) { return vbslq_f32(vcltq_f32(x.v[h], bound.v[h]), a.v[h], b.v[h]); });
    }
    static Float absolute(Float a) {
        return each([&](int h) { return vabsq_f32(a.v[h]); });
    }
    static Float with_sign(Float a, Float sign) {
        return each([&](int h) { return vbslq_f32(vdupq_n_u32(0x80000000), sign.v[h], a.v[h]); });
    }
    static Float first(Float a, Float other, int n) {  // the first n lanes of a
        static constexpr int32_t lane[lanes] = {0, 1, 2, 3, 4, 5, 6, 7};
        return each([&](int h) {
            return vbslq_f32(vcgtq_s32(vdupq_n_s32(n), vld1q_s32(lane + 4 * h)), a.v[h], other.v[h]);
        });
    }
    static float max_of(Float a) { return vmaxvq_f32(vmaxq_f32(a.v[0], a.v[1])); }
    static float sum_of(Float a) {
        const float32x4_t h = vaddq_f32(a.v[0], a.v[1]);
        return vaddv_f32(vadd_f32(vget_low_f32(h), vget_high_f32(h)));
    }
    static float lowest_lane(Float a) { return vgetq_lane_f32(a.v[0], 0); }

    using Eight = Float;
    static Eight load8_f32(const void * p) { return load_float(static_cast<const float *>(p)); }
    static Eight load8_f16(const void * p) { return load_f16(p); }
    static Eight load8_bf16(const void * p) { return load_bf16(p); }
    static Eight load8_i8(const void * p, float d) { return multiply_float(to_float(load_i8(p)), set1_float(d)); }
    static void store8(float * p, Eight v) { store(p, v); }
    // to[i * stride + j] = r[j][i]
    static void store8_transposed(const Eight * r, float * to, int64_t stride) {
        for (int half = 0; half < 2; ++half)  // four columns ...
            for (int j = 0; j < 8; j += 4) {  // ... of four rows
                const float32x4_t a = r[j].v[half], b = r[j + 1].v[half], c = r[j + 2].v[half], d = r[j + 3].v[half];
                const float32x4_t ac0 = vzip1q_f32(a, c), ac1 = vzip2q_f32(a, c);
                const float32x4_t bd0 = vzip1q_f32(b, d), bd1 = vzip2q_f32(b, d);
                float * at = to + 4 * half * stride + j;
                vst1q_f32(at, vzip1q_f32(ac0, bd0));
                vst1q_f32(at + stride, vzip2q_f32(ac0, bd0));
                vst1q_f32(at + 2 * stride, vzip1q_f32(ac1, bd1));
                vst1q_f32(at + 3 * stride, vzip2q_f32(ac1, bd1));
            }
    }
    // sixteen 16-bit floats of each of eight rows: to[i * stride + j] = rows[j][at + i]
    static void store16_transposed_f16(const uint8_t * const * rows, int64_t at, float * to, int64_t stride) {
        for (int i = 0; i < 16; i += 8) {
            Eight r[8];
            for (int j = 0; j < 8; ++j) r[j] = load_f16(rows[j] + 2 * (at + i));
            store8_transposed(r, to + i * stride, stride);
        }
    }
    // 64 cells of a mask of 16-bit floats: a bit for each that is not -infinity; are all others zero?
    static uint64_t open_cells(const uint16_t * mask, bool & plain) {
        static constexpr uint8_t places[8] = {1, 2, 4, 8, 16, 32, 64, 128};
        const uint8x8_t place = vld1_u8(places);
        uint16x8_t known = vdupq_n_u16(0xffff);
        uint64_t open = 0;
        for (int i = 0; i < 8; ++i) {
            const uint16x8_t m = vld1q_u16(mask + 8 * i), shut = vceqq_u16(m, vdupq_n_u16(0xfc00));
            known = vandq_u16(known, vorrq_u16(shut, vceqzq_u16(m)));
            open |= static_cast<uint64_t>(vaddv_u8(vbic_u8(place, vmovn_u16(shut)))) << (8 * i);
        }
        plain = vminvq_u16(known) == 0xffff;
        return open;
    }
};

}  // namespace
}  // namespace llamaherd
