// NEON with products of 2 x 8 by 8 x 2 signed bytes (FEAT_I8MM): two rows of weights by two rows of activations.
#pragma once
#include "neon.h"

namespace llamaherd {
namespace {

struct NeonI8mm : Neon {
    static constexpr bool paired = true;

    // eight values of each of two rows of activations
    static Int load_pair(const uint8_t * first, const uint8_t * second) {
        const int32x4_t v = i(vcombine_u8(vld1_u8(first), vld1_u8(second)));
        return {{v, v}};
    }
    // a number of each row, as they lie in the sums
    static Int broadcast2(const uint8_t * first, const uint8_t * second) {
        const int32x2_t a = vld1_dup_s32(reinterpret_cast<const int32_t *>(first));
        const int32x2_t v = vld1_lane_s32(reinterpret_cast<const int32_t *>(second), a, 1);
        return {{vcombine_s32(v, v), vcombine_s32(v, v)}};
    }
    // w: eight values of two rows of weights in each register; sums: (row 0, row 1) of activations by the first, then
    // by the second row of weights
    static Int dot_paired(Int sum, Int w, Int a) {
        for (int h = 0; h < 2; ++h)
            sum.v[h] = vmmlaq_s32(sum.v[h], vreinterpretq_s8_s32(w.v[h]), vreinterpretq_s8_s32(a.v[h]));
        return sum;
    }
    // from both parts of a pair to its rows' sums, a lane for each row of weights
    static void part_pair(Int & x, Int & y) {
        for (int h = 0; h < 2; ++h) {
            const int32x4_t first = vuzp1q_s32(x.v[h], y.v[h]);
            y.v[h] = vuzp2q_s32(x.v[h], y.v[h]);
            x.v[h] = first;
        }
    }
};

}  // namespace
}  // namespace llamaherd
