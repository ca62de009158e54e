// Which cells a query of attention sees: open cells of its mask, counted off in blocks; and which queries share them.
#pragma once
#include <cstring>

#include "attention.h"

namespace llamaherd {
namespace {

constexpr int window_shift = 32;  // windows that begin so many cells apart still share their keys
constexpr int shared_cells = attention_block + window_shift;

struct Slice {  // its next cells, up to a block
    int64_t start;
    int count;
    bool run;    // start, start + 1, ...; else as listed
    bool plain;  // the mask is zero there
    int32_t cells[attention_block];
};

template <class V>
struct Cursor {
    const uint16_t * mask;
    int64_t cells, base, next;  // open: of the 64 cells from base on
    uint64_t open;
    bool plain;

    void begin(const uint16_t * m, int64_t n) { mask = m, cells = n, base = next = 0, open = 0, plain = true; }

    bool more() {
        while (!open && next < cells) {
            base = next;
            next += 64;
            const int64_t n = cells - base;
            if (!mask) {
                open = ~uint64_t{0};
                if (n < 64) open = (uint64_t{1} << n) - 1;
            } else if (n >= 64) {
                for (int i = 64; i < 128; i += 32) __builtin_prefetch(mask + base + i);
                open = V::open_cells(mask + base, plain);
            } else {
                uint16_t part[64];
                std::memset(part, 0, sizeof part);
                for (int i = 0; i < 64; ++i) part[i] = i < n ? mask[base + i] : 0xfc00;
                open = V::open_cells(part, plain);
            }
        }
        return open != 0;
    }
    void close(int from, int count) {
        open = count == 64 ? 0 : open & ~(((uint64_t{1} << count) - 1) << from);
    }
    void skip(int64_t count) {
        while (count && more()) {
            const int n = __builtin_popcountll(open);
            if (n <= count) {
                open = 0;
                count -= n;
            } else {
                for (; count; --count) open &= open - 1;
            }
        }
    }
    __attribute__((noinline)) void take(Slice & s) {
        s.count = 0;
        s.run = s.plain = true;
        while (s.count < attention_block && more()) {
            const int from = __builtin_ctzll(open);
            const uint64_t rest = ~(open >> from);
            int n = rest ? __builtin_ctzll(rest) : 64;
            if (n > attention_block - s.count) n = attention_block - s.count;
            const int64_t cell = base + from;
            if (!s.count) s.start = cell;
            if (s.run && cell != s.start + s.count) {
                s.run = false;
                for (int i = 0; i < s.count; ++i) s.cells[i] = static_cast<int32_t>(s.start) + i;
            }
            if (!s.run)
                for (int i = 0; i < n; ++i) s.cells[s.count + i] = static_cast<int32_t>(cell) + i;
            s.count += n;
            s.plain = s.plain && plain;
            close(from, n);
        }
    }
};

// queries whose cells are unpacked together
struct Group {
    int64_t start;  // of a run
    int count;
    const Slice * listed;  // or the longest list, which the others' begin

    int64_t cell(int i) const { return listed ? listed->cells[i] : start + i; }
};

static inline int form_groups(const Slice * slices, int queries, Group * groups, int * group_of) {
    int n = 0;
    for (int i = 0; i < queries; ++i) {
        const Slice & s = slices[i];
        group_of[i] = -1;
        if (!s.count) continue;
        int g = 0;
        for (; g < n; ++g) {
            Group & group = groups[g];
            if (s.run != !group.listed) continue;
            if (s.run) {
                const int64_t shift = s.start - group.start;
                if (shift < 0 || shift > window_shift) continue;
                if (shift + s.count > group.count) group.count = static_cast<int>(shift) + s.count;
                break;
            }
            const int both = s.count < group.count ? s.count : group.count;
            if (std::memcmp(s.cells, group.listed->cells, static_cast<size_t>(both) * 4)) continue;
            if (s.count > group.count) group.count = s.count, group.listed = &s;
            break;
        }
        if (g == n) groups[n++] = {s.start, s.count, s.run ? nullptr : &s};
        group_of[i] = g;
    }
    return n;
}

}  // namespace
}  // namespace llamaherd
