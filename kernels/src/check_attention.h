// kernels_check's cases of attention: the result against that of float64, and whether a token is bitwise the same on
// any threads, alone and in parts, and with its cells elsewhere in a cache, among what is not a number.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <istream>
#include <string>
#include <vector>

#include "capi.h"

namespace llamaherd {

template <class T>
void read(std::istream & file, std::vector<T> & to, int64_t count) {
    to.resize(static_cast<size_t>(count));
    file.read(reinterpret_cast<char *>(to.data()), static_cast<std::streamsize>(to.size() * sizeof(T)));
}

struct Summary {
    double worst = 0;                       // errors, in bounds
    uint64_t bits = 14695981039346656037u;  // of all results (FNV-1a): equal where two levels give the same ones

    void add(const std::vector<float> & results) {
        for (const float f : results) {
            uint32_t v;
            std::memcpy(&v, &f, 4);
            bits = (bits ^ v) * 1099511628211u;
        }
    }
};

class AttentionCase {
public:
    // masks: how many there are for the heads (0: none); sinks: 0 or 1
    struct Head {
        int32_t streams, tokens, heads, kv_heads, cells, DK, DV, k_type, v_type, masks, sinks;
        float scale, max_bias, cap, bound;
    };

    explicit AttentionCase(std::istream & file) {
        file.read(reinterpret_cast<char *>(&c_), sizeof c_);
        const int64_t rows = int64_t{c_.streams} * c_.tokens * c_.heads;
        read(file, q_, rows * c_.DK);
        read(file, k_, c_.streams * c_.cells * cell_bytes(c_.k_type, c_.DK));
        read(file, v_, c_.streams * c_.cells * cell_bytes(c_.v_type, c_.DV));
        read(file, mask_, int64_t{c_.masks ? c_.streams : 0} * c_.masks * c_.tokens * c_.cells);
        read(file, sinks_, c_.sinks ? c_.heads : 0);
        read(file, expected_, rows * c_.DV);
    }

    std::string name() const {
        return "attention, types " + std::to_string(c_.k_type) + " " + std::to_string(c_.v_type) + ", tokens " +
               std::to_string(c_.tokens) + ", cells " + std::to_string(c_.cells);
    }

    std::string run(Summary & summary, const char * level, int threads) const {
        const std::vector<float> whole = attend(level, 0, c_.tokens, 1);
        if (whole.empty()) return "refused";
        for (size_t i = 0; i < whole.size(); ++i) {
            const double error = std::fabs(whole[i] - expected_[i]) / static_cast<double>(c_.bound);
            if (!(error <= 1)) return "a number is wrong by " + std::to_string(error) + " bounds";
            summary.worst = std::max(summary.worst, error);
        }
        summary.add(whole);
        for (int n = 2; n <= threads; ++n)
            if (attend(level, 0, c_.tokens, n) != whole) return "it differs on " + std::to_string(n) + " threads";
        for (const int count : {1, 2, 5, 16})
            for (const int start : {0, (c_.tokens - count) / 2, c_.tokens - count})
                if (count < c_.tokens && attend(level, start, count, 1 + count % 3) != part(whole, start, count))
                    return std::to_string(count) + " tokens differ from the same among " + std::to_string(c_.tokens);
        if (c_.masks && elsewhere().attend(level, 0, c_.tokens, 2) != whole) return "cells elsewhere give other bits";
        return "";
    }

private:
    static int64_t number_bytes(int32_t type) { return type == kv_f32 ? 4 : type == kv_q8_0 ? 34 : 2; }
    static int64_t row_bytes(int32_t type, int64_t columns) {
        return (type == kv_q8_0 ? columns / 32 : columns) * number_bytes(type);
    }
    int64_t cell_bytes(int32_t type, int64_t columns) const { return c_.kv_heads * row_bytes(type, columns); }

    // tokens [start, start + count) of all streams
    std::vector<float> part(const std::vector<float> & all, int64_t start, int64_t count) const {
        std::vector<float> r;
        const int64_t token = static_cast<int64_t>(all.size()) / c_.streams / c_.tokens;
        for (int64_t s = 0; s < c_.streams; ++s) {
            const auto from = all.begin() + (s * c_.tokens + start) * token;
            r.insert(r.end(), from, from + count * token);
        }
        return r;
    }

    static void shape(int64_t * ne, int64_t * nb, const int64_t (&n)[4], const int64_t (&bytes)[4]) {
        std::memcpy(ne, n, sizeof n);
        std::memcpy(nb, bytes, sizeof bytes);
    }

    std::vector<float> attend(const char * level, int64_t start, int64_t count, int threads) const {
        const std::vector<float> q = part(q_, start, count);
        std::vector<float> out(static_cast<size_t>(c_.streams * count * c_.heads * c_.DV), 7);
        AttentionOperation op = {};
        op.q = q.data(), op.k = k_.data(), op.v = v_.data(), op.out = out.data();
        op.mask = c_.masks ? mask_.data() + start * c_.cells : nullptr;
        op.sinks = c_.sinks ? sinks_.data() : nullptr;
        const int64_t q_row = 4 * c_.DK, k_row = row_bytes(c_.k_type, c_.DK), v_row = row_bytes(c_.v_type, c_.DV);
        shape(op.q_ne, op.q_nb, {c_.DK, count, c_.heads, c_.streams},
              {4, q_row * c_.heads, q_row, q_row * c_.heads * count});
        shape(op.k_ne, op.k_nb, {c_.DK, c_.cells, c_.kv_heads, c_.streams},
              {number_bytes(c_.k_type), k_row * c_.kv_heads, k_row, k_row * c_.kv_heads * c_.cells});
        shape(op.v_ne, op.v_nb, {c_.DV, c_.cells, c_.kv_heads, c_.streams},
              {number_bytes(c_.v_type), v_row * c_.kv_heads, v_row, v_row * c_.kv_heads * c_.cells});
        const int64_t mask_row = 2 * c_.cells;
        shape(op.mask_ne, op.mask_nb, {c_.cells, count, c_.masks, c_.streams},
              {2, mask_row, mask_row * c_.tokens, mask_row * c_.tokens * c_.masks});
        op.k_type = c_.k_type, op.v_type = c_.v_type;
        op.scale = c_.scale, op.max_bias = c_.max_bias, op.cap = c_.cap;
        if (!llamaherd_kernels_attend(level, &op, threads)) out.clear();
        return out;
    }

    // the same cells further back, and apart, in a cache of twice as many, among others that are shut and hold NaN
    AttentionCase elsewhere() const {
        AttentionCase r = *this;
        r.c_.cells = 2 * c_.cells;
        const auto place = [&](int64_t cell) { return cell < c_.cells / 2 ? cell + 5 : 2 * cell + 1; };
        const auto move = [&](const std::vector<uint8_t> & from, std::vector<uint8_t> & to, int64_t bytes) {
            to.assign(2 * from.size(), 0xff);
            for (int64_t s = 0; s < c_.streams; ++s)
                for (int64_t i = 0; i < c_.cells; ++i)
                    std::memcpy(to.data() + (s * r.c_.cells + place(i)) * bytes,
                                from.data() + (s * c_.cells + i) * bytes, static_cast<size_t>(bytes));
        };
        move(k_, r.k_, cell_bytes(c_.k_type, c_.DK));
        move(v_, r.v_, cell_bytes(c_.v_type, c_.DV));
        r.mask_.assign(2 * mask_.size(), 0xfc00);
        for (size_t i = 0; i < mask_.size(); ++i) {
            const int64_t row = static_cast<int64_t>(i) / c_.cells, cell = static_cast<int64_t>(i) % c_.cells;
            r.mask_[static_cast<size_t>(row * r.c_.cells + place(cell))] = mask_[i];
        }
        return r;
    }

    Head c_;
    std::vector<float> q_, sinks_;
    std::vector<uint8_t> k_, v_;
    std::vector<uint16_t> mask_;
    std::vector<double> expected_;  // [streams, tokens, heads, DV]
};

}  // namespace llamaherd
