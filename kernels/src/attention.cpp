#include "attention.h"

#include <algorithm>
#include <cmath>

#include "level.h"

namespace llamaherd {

namespace {

constexpr int64_t fewest_rows = 8;                       // smaller tiles than this unpack too much for each row
constexpr int64_t most_partial_bytes = int64_t{64} << 20;  // of segments whose threads are not one
constexpr int64_t shares = 4;                            // a thread should find so many pieces of work

size_t aligned(size_t n) { return (n + 63) & ~size_t{63}; }

// How the work is divided. Nothing of it changes a result.
struct Plan {
    int64_t streams, kv_heads, heads, tokens;
    bool head_masks;         // each head has a mask of its own
    int64_t together;        // heads in a query
    int64_t parts;           // queries that a token has with one head of keys
    int64_t tile, tiles;     // tokens
    bool split;              // segments apart
    int64_t segments;        // if split: of all cells
    int64_t alike;           // pieces one after the other that differ in their heads alone, and share masks
    int64_t joined;          // of these, computed together; parts of a group of heads may differ in size
    size_t scratch, partial_bytes;  // bytes: of a thread, of all

    int64_t units() const { return streams * kv_heads * parts * tiles; }
};

Plan make_plan(const Level & level, int64_t threads, const AttentionOperation & op) {
    Plan p = {};
    p.streams = op.q_ne[3];
    p.heads = op.q_ne[2];
    p.kv_heads = op.k_ne[2];
    p.tokens = op.q_ne[1];
    p.head_masks = op.mask && op.mask_ne[2] > 1;
    const int64_t group = p.heads / p.kv_heads;
    p.together = p.head_masks ? 1 : std::min<int64_t>(group, max_attention_rows / 3);
    p.parts = (group + p.together - 1) / p.together;
    p.tile = std::min(p.tokens, std::max<int64_t>(1, max_attention_rows / p.together));
    const auto divide = [&] { p.tiles = (p.tokens + p.tile - 1) / p.tile; };
    divide();
    const int64_t segments = (op.k_ne[1] + attention_segment - 1) / attention_segment;
    const int64_t bytes = p.streams * p.heads * p.tokens * segments * level.attention->partial_floats(op.v_ne[0]) * 4;
    p.split = segments > 1 && (p.tiles == 1 || p.units() < shares * threads) && bytes <= most_partial_bytes;
    p.segments = p.split ? segments : 1;
    while (threads > 1 && p.units() * p.segments < shares * threads && p.tile * p.together >= 2 * fewest_rows) {
        p.tile = (p.tile + 1) / 2;
        divide();
    }
    p.alike = p.head_masks ? 1 : p.kv_heads * p.parts;
    p.joined = p.split && p.parts == 1 ? std::min<int64_t>(p.alike, max_attention_heads) : 1;
    p.scratch = aligned(level.attention->scratch_bytes(op.k_ne[0], op.v_ne[0], p.joined * p.tile * p.together) + 64);
    p.partial_bytes = p.split ? static_cast<size_t>(bytes) : 0;
    return p;
}

size_t bytes_of(const Plan & p, int64_t threads) {
    return 64 + static_cast<size_t>(threads) * p.scratch + aligned(p.partial_bytes);
}

template <class T>
const T * at(const void * data, int64_t offset) {
    return reinterpret_cast<const T *>(static_cast<const char *>(data) + offset);
}

// the heads of keys and values, and the queries and rows of one piece of work
struct Piece {
    AttentionKeys keys;
    AttentionQuery queries[max_attention_rows];
    AttentionRow rows[max_attention_rows];
    int query_count, row_count;
    int64_t first_row;  // among all rows: [stream][head][token], so that a piece's lie in one part of the partials

    void make(const AttentionOperation & op, const Plan & p, int64_t unit) {
        int64_t part, kv_head, stream, tile;
        if (p.split) {  // heads side by side
            part = unit % p.parts, kv_head = unit / p.parts % p.kv_heads, unit /= p.parts * p.kv_heads;
            tile = unit % p.tiles, stream = unit / p.tiles;
        } else {  // a head's tokens one after the other, the last, which see most, first
            tile = p.tiles - 1 - unit % p.tiles, unit /= p.tiles;
            part = unit % p.parts, kv_head = unit / p.parts % p.kv_heads, stream = unit / p.parts / p.kv_heads;
        }
        const int64_t group = p.heads / p.kv_heads;
        const int64_t head = kv_head * group + part * p.together, heads = std::min(p.together, group - part * p.together);
        const int64_t first = tile * p.tile, last = std::min(p.tokens, first + p.tile);
        keys.k = at<uint8_t>(op.k, kv_head * op.k_nb[2] + stream * op.k_nb[3]);
        keys.v = at<uint8_t>(op.v, kv_head * op.v_nb[2] + stream * op.v_nb[3]);
        keys.k_stride = op.k_nb[1];
        keys.v_stride = op.v_nb[1];
        keys.DK = op.k_ne[0];
        keys.DV = op.v_ne[0];
        keys.cells = op.k_ne[1];
        keys.k_type = op.k_type;
        keys.v_type = op.v_type;
        keys.scale = op.cap != 0.0f ? op.scale / op.cap : op.scale;
        keys.cap = op.cap;
        query_count = row_count = 0;
        for (int64_t token = first; token < last; ++token) {
            const int64_t mask = op.mask ? token * op.mask_nb[1] + head % op.mask_ne[2] * op.mask_nb[2] +
                                               stream % op.mask_ne[3] * op.mask_nb[3]
                                         : 0;
            queries[query_count++] = {op.mask ? at<uint16_t>(op.mask, mask) : nullptr, row_count, static_cast<int>(heads)};
            for (int64_t h = head; h < head + heads; ++h)
                rows[row_count++] = {at<float>(op.q, token * op.q_nb[1] + h * op.q_nb[2] + stream * op.q_nb[3]),
                                     static_cast<float *>(op.out) + ((stream * p.tokens + token) * p.heads + h) * keys.DV,
                                     slope(op, h), op.sinks ? static_cast<const float *>(op.sinks) + h : nullptr};
        }
        first_row = (stream * p.heads + head) * p.tokens + first * heads;
    }

    static float slope(const AttentionOperation & op, int64_t head) {
        if (op.max_bias <= 0.0f) return 1.0f;
        const int64_t even = int64_t{1} << static_cast<int>(std::floor(std::log2(static_cast<double>(op.q_ne[2]))));
        const float m0 = std::pow(2.0f, -op.max_bias / static_cast<float>(even));
        const float m1 = std::pow(2.0f, -op.max_bias / 2.0f / static_cast<float>(even));
        return head < even ? std::pow(m0, static_cast<float>(head + 1))
                           : std::pow(m1, static_cast<float>(2 * (head - even) + 1));
    }
};

void whole(const Level & level, const AttentionTeam & team, const AttentionOperation & op, const Plan & p,
           uint8_t * scratch) {
    const int64_t units = p.units();
    const bool dynamic = team.nth > 1 && units > team.nth;
    if (dynamic) {
        if (team.ith == 0) team.chunk_set(team.pool, team.nth);
        team.barrier(team.pool);
    }
    for (int64_t unit = team.ith; unit < units; unit = dynamic ? team.chunk_add(team.pool, 1) : unit + team.nth) {
        Piece piece;
        piece.make(op, p, unit);
        const AttentionHead head = {piece.keys, piece.rows, nullptr};
        level.attention->run(&head, 1, piece.queries, piece.query_count, 0, -1, scratch, 0);
    }
}

// Few rows and many cells: each thread has a stretch of the cells, with all heads of one segment before the next, since
// the heads of a cell lie side by side in memory.
void split(const Level & level, const AttentionTeam & team, const AttentionOperation & op, const Plan & p,
           uint8_t * scratch, float * partials) {
    const AttentionKernel & kernel = *level.attention;
    const int64_t units = p.units(), one = p.segments * kernel.partial_floats(op.v_ne[0]);
    Piece pieces[max_attention_heads];
    // every thread counts the segments of all pieces for itself
    const auto segments_of = [&](int64_t unit) {
        Piece & piece = pieces[0];
        piece.make(op, p, unit);
        int64_t most = 1;
        for (int i = 0; i < piece.query_count; ++i)
            most = std::max(most, kernel.open_cells(piece.queries[i].mask, piece.keys.cells));
        return (most + attention_segment - 1) / attention_segment;
    };
    int64_t all = 0;
    for (int64_t unit = 0; unit < units; unit += p.alike) all += p.alike * segments_of(unit);
    const int64_t from = all * team.ith / team.nth, to = all * (team.ith + 1) / team.nth;
    int64_t begin = 0;
    for (int64_t unit = 0; unit < units && begin < to; unit += p.alike) {
        const int64_t end = begin + p.alike * segments_of(unit), last = std::min(end, to);
        int64_t made = -1;
        for (int64_t i = std::max(begin, from); i < last;) {
            const int64_t segment = (i - begin) / p.alike, at = (i - begin) % p.alike;
            const int64_t chunk = at / p.joined * p.joined, chunk_end = std::min(chunk + p.joined, p.alike);
            if (made != chunk)
                for (int64_t h = chunk; h < chunk_end; ++h) pieces[h - chunk].make(op, p, unit + h);
            made = chunk;
            const int64_t count = std::min(chunk_end - at, last - i);
            AttentionHead heads[max_attention_heads];
            for (int64_t h = 0; h < count; ++h) {
                const Piece & piece = pieces[at - chunk + h];
                heads[h] = {piece.keys, piece.rows, partials + piece.first_row * one};
            }
            const Piece & piece = pieces[at - chunk];
            kernel.run(heads, static_cast<int>(count), piece.queries, piece.query_count, segment, segment + 1, scratch,
                       p.segments);
            i += count;
        }
        begin = end;
    }
    team.barrier(team.pool);
    int64_t turn = 0, known = 0;
    for (int64_t unit = 0; unit < units; ++unit) {
        if (unit % p.alike == 0) known = segments_of(unit);
        Piece & piece = pieces[0];
        piece.make(op, p, unit);
        for (int r = 0; r < piece.row_count; ++r)
            if (turn++ % team.nth == team.ith)
                kernel.merge(piece.keys, piece.rows[r], partials + (piece.first_row + r) * one, known, scratch);
    }
}

}  // namespace

bool attention_fits(const AttentionOperation & op) {
    const auto good = [](int32_t type, int64_t columns, const int64_t * nb) {
        const int64_t size = type == kv_f32 ? 4 : type == kv_q8_0 ? 34 : 2;
        const bool known = type == kv_f32 || type == kv_f16 || type == kv_bf16 || type == kv_q8_0;
        return known && columns > 0 && columns <= 1024 && columns % (type == kv_q8_0 ? 32 : 8) == 0 && nb[0] == size;
    };
    return good(op.k_type, op.k_ne[0], op.k_nb) && good(op.v_type, op.v_ne[0], op.v_nb) && op.q_nb[0] == 4 &&
           op.q_ne[0] == op.k_ne[0] && op.k_ne[1] == op.v_ne[1] && op.k_ne[2] == op.v_ne[2] && op.k_ne[3] == op.v_ne[3] &&
           op.k_ne[3] == op.q_ne[3] && op.k_ne[2] > 0 && op.q_ne[2] % op.k_ne[2] == 0 && op.k_ne[1] > 0 &&
           op.k_ne[1] < INT32_MAX && op.q_ne[1] > 0 &&
           (!op.mask || (op.mask_nb[0] == 2 && op.mask_ne[0] >= op.k_ne[1] && op.mask_ne[1] >= op.q_ne[1] &&
                         op.mask_ne[2] > 0 && op.mask_ne[3] > 0));
}

size_t attention_work_size(const Level & level, int threads, const AttentionOperation & op) {
    // fewer threads may come than were planned for, and find their pieces otherwise
    return std::max(bytes_of(make_plan(level, threads, op), threads), bytes_of(make_plan(level, 2, op), threads));
}

void attention(const Level & level, const AttentionTeam & team, const AttentionOperation & op, void * work,
               size_t work_size) {
    Plan p = make_plan(level, team.nth, op);
    if (p.split && bytes_of(p, team.nth) > work_size) p.split = false, p.segments = 1, p.partial_bytes = 0;
    uint8_t * start = reinterpret_cast<uint8_t *>(aligned(reinterpret_cast<size_t>(work)));
    uint8_t * scratch = start + static_cast<size_t>(team.ith) * p.scratch;
    if (p.split)
        split(level, team, op, p, scratch, reinterpret_cast<float *>(start + static_cast<size_t>(team.nth) * p.scratch));
    else
        whole(level, team, op, p, scratch);
}

}  // namespace llamaherd
