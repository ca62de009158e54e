// 16-bit floats in plain C++ (no library: the file is compiled for several instruction sets).
#pragma once
#include <cstdint>
#include <cstring>

namespace llamaherd {
namespace {

static inline float float_from_bits(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

static inline float bf16_to_float(uint16_t h) { return float_from_bits(static_cast<uint32_t>(h) << 16); }

static inline float f16_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 31) return float_from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -subnormal : subnormal;
}

}  // namespace
}  // namespace llamaherd
