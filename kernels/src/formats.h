// The weight formats of ggml: what the micro-kernel must know of each, and how a block of it is taken apart.
//
//   block      values under one floating-point scale, and under one scale of the activations
//   sub        values under one integer scale (block where there is none)
//   low, high  bits of a value kept in the low and in the high plane of the packed layout
//   maximum    largest unsigned value; zero: what is subtracted from it
//   is_signed  values are signed bytes (Q8_0 and the look-up tables), else unsigned
#pragma once
#include <cstdint>
#include <cstring>

namespace llamaherd {
namespace {

struct Decoded {
    uint8_t q[256];     // values, unsigned (or signed bytes, or indices into the format's table)
    int8_t scale[16];   // integer scale of each sub-block
    uint8_t min[16];    // integer minimum of each sub-block
    uint16_t d, m;      // scale and minimum, f16 (bf16: d where bf16_scale)
};

static inline uint16_t read16(const uint8_t * p) {
    uint16_t v;
    std::memcpy(&v, p, 2);
    return v;
}

struct FormatDefaults {
    static constexpr int high = 0, zero = 0;
    static constexpr bool is_signed = false, float_min = false, int_scale = false, int_min = false;
    static constexpr bool bf16_scale = false, has_table = false;
    static constexpr int8_t values[16] = {};
};

struct Simple : FormatDefaults {
    static constexpr int block = 32, sub = 32, low = 4, maximum = 15;
    static void nibbles(const uint8_t * q, Decoded & out) {
        for (int i = 0; i < 16; ++i) {
            out.q[i] = q[i] & 15;
            out.q[i + 16] = q[i] >> 4;
        }
    }
    static void fifth_bits(const uint8_t * h, Decoded & out) {
        uint32_t bits;
        std::memcpy(&bits, h, 4);
        for (int i = 0; i < 32; ++i) out.q[i] |= (bits >> i & 1) << 4;
    }
};

struct Q4_0 : Simple {
    static constexpr int type = 2, bytes = 18, zero = 8;
    static void decode(const uint8_t * p, Decoded & out) {
        out.d = read16(p);
        nibbles(p + 2, out);
    }
};

struct Q4_1 : Simple {
    static constexpr int type = 3, bytes = 20;
    static constexpr bool float_min = true;
    static void decode(const uint8_t * p, Decoded & out) {
        out.d = read16(p);
        out.m = read16(p + 2);
        nibbles(p + 4, out);
    }
};

struct Q5_0 : Simple {
    static constexpr int type = 6, bytes = 22, high = 1, zero = 16, maximum = 31;
    static void decode(const uint8_t * p, Decoded & out) {
        out.d = read16(p);
        nibbles(p + 6, out);
        fifth_bits(p + 2, out);
    }
};

struct Q5_1 : Simple {
    static constexpr int type = 7, bytes = 24, high = 1, maximum = 31;
    static constexpr bool float_min = true;
    static void decode(const uint8_t * p, Decoded & out) {
        out.d = read16(p);
        out.m = read16(p + 2);
        nibbles(p + 8, out);
        fifth_bits(p + 4, out);
    }
};

struct Q8_0 : Simple {
    static constexpr int type = 8, bytes = 34, low = 8, maximum = 255;
    static constexpr bool is_signed = true;
    static void decode(const uint8_t * p, Decoded & out) {
        out.d = read16(p);
        std::memcpy(out.q, p + 2, 32);
    }
};

struct IQ4_NL : Simple {
    static constexpr int type = 20, bytes = 18;
    static constexpr bool is_signed = true, has_table = true;
    static constexpr int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static void decode(const uint8_t * p, Decoded & out) {
        out.d = read16(p);
        nibbles(p + 2, out);
    }
};

struct MXFP4 : Simple {
    static constexpr int type = 39, bytes = 17, zero = 12, maximum = 24;
    static constexpr bool has_table = true, bf16_scale = true;
    static constexpr int8_t values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    static void decode(const uint8_t * p, Decoded & out) {
        // half of 2^(e - 127), exact in bfloat16 (the table holds doubled values)
        out.d = p[0] < 2 ? static_cast<uint16_t>(0x0020 << p[0]) : static_cast<uint16_t>((p[0] - 1) << 7);
        nibbles(p + 1, out);
    }
};

struct Super : FormatDefaults {
    static constexpr int block = 256, low = 4, maximum = 15;
    static constexpr bool int_scale = true;
    // eight scales and eight minimums of six bits in twelve bytes (Q4_K, Q5_K)
    static void six_bits(const uint8_t * p, Decoded & out) {
        for (int i = 0; i < 4; ++i) {
            out.scale[i] = p[i] & 63;
            out.min[i] = p[i + 4] & 63;
            out.scale[i + 4] = static_cast<int8_t>((p[i + 8] & 15) | (p[i] >> 6) << 4);
            out.min[i + 4] = static_cast<uint8_t>((p[i + 8] >> 4) | (p[i + 4] >> 6) << 4);
        }
    }
    static void two_bits(const uint8_t * q, Decoded & out) {
        for (int j = 0; j < 8; ++j)
            for (int i = 0; i < 32; ++i) out.q[32 * j + i] = q[j / 4 * 32 + i] >> (j % 4 * 2) & 3;
    }
    static void nibbles64(const uint8_t * q, Decoded & out) {
        for (int j = 0; j < 4; ++j)
            for (int i = 0; i < 32; ++i) {
                out.q[64 * j + i] = q[32 * j + i] & 15;
                out.q[64 * j + 32 + i] = q[32 * j + i] >> 4;
            }
    }
};

struct Q4_K : Super {
    static constexpr int type = 12, bytes = 144, sub = 32;
    static constexpr bool int_min = true;
    static void decode(const uint8_t * p, Decoded & out) {
        out.d = read16(p);
        out.m = read16(p + 2);
        six_bits(p + 4, out);
        nibbles64(p + 16, out);
    }
};

struct Q5_K : Super {
    static constexpr int type = 13, bytes = 176, sub = 32, high = 1, maximum = 31;
    static constexpr bool int_min = true;
    static void decode(const uint8_t * p, Decoded & out) {
        out.d = read16(p);
        out.m = read16(p + 2);
        six_bits(p + 4, out);
        nibbles64(p + 48, out);
        for (int j = 0; j < 8; ++j)
            for (int i = 0; i < 32; ++i) out.q[32 * j + i] |= (p[16 + i] >> j & 1) << 4;
    }
};

struct Q6_K : Super {
    static constexpr int type = 14, bytes = 210, sub = 16, high = 2, maximum = 63, zero = 32;
    static void decode(const uint8_t * p, Decoded & out) {
        for (int n = 0; n < 2; ++n) {
            const uint8_t *l = p + 64 * n, *h = p + 128 + 32 * n;
            uint8_t * q = out.q + 128 * n;
            for (int i = 0; i < 32; ++i) {
                q[i] = static_cast<uint8_t>((l[i] & 15) | (h[i] & 3) << 4);
                q[i + 32] = static_cast<uint8_t>((l[i + 32] & 15) | (h[i] >> 2 & 3) << 4);
                q[i + 64] = static_cast<uint8_t>((l[i] >> 4) | (h[i] >> 4 & 3) << 4);
                q[i + 96] = static_cast<uint8_t>((l[i + 32] >> 4) | (h[i] >> 6) << 4);
            }
        }
        std::memcpy(out.scale, p + 192, 16);
        out.d = read16(p + 208);
    }
};

struct Q2_K : Super {
    static constexpr int type = 10, bytes = 84, sub = 16, low = 2, maximum = 3;
    static constexpr bool int_min = true;
    static void decode(const uint8_t * p, Decoded & out) {
        for (int i = 0; i < 16; ++i) {
            out.scale[i] = p[i] & 15;
            out.min[i] = p[i] >> 4;
        }
        two_bits(p + 16, out);
        out.d = read16(p + 80);
        out.m = read16(p + 82);
    }
};

struct Q3_K : Super {
    static constexpr int type = 11, bytes = 110, sub = 16, low = 2, high = 1, maximum = 7, zero = 4;
    static void decode(const uint8_t * p, Decoded & out) {
        const uint8_t * s = p + 96;
        for (int i = 0; i < 16; ++i) {
            const int lower = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
            out.scale[i] = static_cast<int8_t>((lower | (s[8 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32);
        }
        two_bits(p + 32, out);
        for (int j = 0; j < 8; ++j)
            for (int i = 0; i < 32; ++i) out.q[32 * j + i] |= (p[i] >> j & 1) << 2;
        out.d = read16(p + 108);
    }
};

struct IQ4_XS : Super {
    static constexpr int type = 23, bytes = 136, sub = 32;
    static constexpr bool is_signed = true, has_table = true;
    static constexpr const int8_t (&values)[16] = IQ4_NL::values;
    static void decode(const uint8_t * p, Decoded & out) {
        out.d = read16(p);
        const uint16_t high = read16(p + 2);
        for (int j = 0; j < 8; ++j) {
            const int lower = p[4 + j / 2] >> (4 * (j % 2)) & 15;
            out.scale[j] = static_cast<int8_t>((lower | (high >> (2 * j) & 3) << 4) - 32);
            for (int i = 0; i < 16; ++i) {
                out.q[32 * j + i] = p[8 + 16 * j + i] & 15;
                out.q[32 * j + 16 + i] = p[8 + 16 * j + i] >> 4;
            }
        }
    }
};

// 16-bit floats are not quantised, and neither are the activations that meet them
struct F16 {
    static constexpr int type = 1;
    static constexpr bool bf16 = false;
};

struct BF16 {
    static constexpr int type = 30;
    static constexpr bool bf16 = true;
};

}  // namespace
}  // namespace llamaherd
