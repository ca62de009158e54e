// kernels_check LEVELS... : which of them this CPU runs; kernels_check --cases FILE LEVELS... : products of cases from a
// file against their float64 results, and whether a row is bitwise the same in any batch, on any threads, as an
// expert's; attention likewise (check_attention.h). Without llama.cpp: its thread pool is played here. Exit status 1:
// something is wrong.
#include <pthread.h>

#include <atomic>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "check_attention.h"
#include "matmul.h"

using namespace llamaherd;

namespace {

struct Pool {
    pthread_barrier_t barrier;
    std::atomic<int> chunk{0};
};

void play_llama_cpp() {
    ggml.barrier = [](void * p) { pthread_barrier_wait(&static_cast<Pool *>(p)->barrier); };
    ggml.chunk_set = [](void * p, int n) { static_cast<Pool *>(p)->chunk.store(n, std::memory_order_relaxed); };
    ggml.chunk_add = [](void * p, int n) { return static_cast<Pool *>(p)->chunk.fetch_add(n, std::memory_order_relaxed); };
    operations.none = 0, operations.mul_mat = 1, operations.mul_mat_id = 2;
}

struct Case {
    int32_t type, K, N, M;
    std::vector<uint8_t> weights;
    std::vector<float> x;
    std::vector<double> expected, bound;  // [M, N]
};

Case read_case(std::istream & file, int32_t type) {
    int32_t head[4] = {};  // K, N, M, bytes of the weights
    file.read(reinterpret_cast<char *>(head), sizeof head);
    Case c = {type, head[0], head[1], head[2], {}, {}, {}, {}};
    const int64_t all = int64_t{c.M} * c.N;
    read(file, c.weights, head[3]);
    read(file, c.x, int64_t{c.M} * c.K);
    read(file, c.expected, all);
    read(file, c.bound, all);
    return c;
}

struct Bytes {  // aligned, as ggml's buffers are, and none too many
    explicit Bytes(size_t n) {
        void * memory = nullptr;
        if (posix_memalign(&memory, 64, n)) std::abort();
        data = static_cast<uint8_t *>(memory);
    }
    ~Bytes() { std::free(data); }
    Bytes(const Bytes &) = delete;
    Bytes & operator=(const Bytes &) = delete;
    uint8_t * data;
};

class Check {
public:
    Check(const Level & level, const Case & c) : level_(level), c_(c), kernel_(*find_kernel(level, c.type)),
          packed_(kernel_.packed_bytes(c.K, c.N)) {
        llamaherd_kernels_pack(level.name, c.type, c.K, c.N, c.weights.data(), packed_.data);
    }

    std::string name() const {
        return "type " + std::to_string(c_.type) + ", K " + std::to_string(c_.K) + ", N " + std::to_string(c_.N) + ", M " +
               std::to_string(c_.M);
    }

    std::string run(Summary & summary, int repeats) const {
        const std::vector<float> whole = multiply(c_.x, c_.M, 1);
        for (size_t i = 0; i < whole.size(); ++i) {
            const double error = std::fabs(whole[i] - c_.expected[i]);
            if (!(error <= c_.bound[i])) return "a product is wrong by " + std::to_string(error / c_.bound[i]) + " bounds";
            if (c_.bound[i] > 0) summary.worst = std::max(summary.worst, error / c_.bound[i]);
        }
        summary.add(whole);
        for (int m = 1; m <= c_.M; ++m)
            for (const int start : {(c_.M - m) / 2, c_.M - m})
                if (!same(multiply(rows(start, m), m, 1 + m % 3), whole, start))
                    return std::to_string(m) + " rows differ from the same among " + std::to_string(c_.M);
        for (int repeat = 0; repeat < repeats; ++repeat)
            for (int threads = 1; threads <= (repeats > 1 ? 8 : 3); ++threads)
                for (const int m : {1, 7, c_.M}) {
                    if (m > c_.M) continue;
                    if (!same(dense(m, threads), whole, 0))
                        return "MUL_MAT of " + std::to_string(m) + " rows on " + std::to_string(threads) + " threads differs";
                    if (c_.N >= 24 && !experts(m, threads, whole))
                        return "MUL_MAT_ID of " + std::to_string(m) + " rows on " + std::to_string(threads) + " threads differs";
                }
        return not_finite(whole);
    }

private:
    size_t size(int64_t a, int64_t b) const { return static_cast<size_t>(a) * static_cast<size_t>(b); }

    std::vector<float> rows(int start, int m) const {
        return {c_.x.begin() + static_cast<std::ptrdiff_t>(size(start, c_.K)),
                c_.x.begin() + static_cast<std::ptrdiff_t>(size(start + m, c_.K))};
    }

    std::vector<float> multiply(const std::vector<float> & x, int m, int threads) const {
        std::vector<float> out(size(m, c_.N), 7);
        llamaherd_kernels_multiply(level_.name, c_.type, c_.K, c_.N, m, packed_.data, x.data(), out.data(), threads, 1);
        return out;
    }

    bool same(const std::vector<float> & part, const std::vector<float> & whole, int start) const {
        return std::memcmp(part.data(), whole.data() + size(start, c_.N), part.size() * 4) == 0;
    }

    // row m among finite ones must become NaN or infinite, the others must not change
    std::string not_finite(const std::vector<float> & whole) const {
        if (c_.M < 3) return "";
        for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                                  -std::numeric_limits<float>::infinity()}) {
            std::vector<float> x = rows(0, 3);
            x[size(1, c_.K) + 5] = value;
            const std::vector<float> out = multiply(x, 3, 1);
            for (int n = 0; n < c_.N; ++n)
                if (std::isfinite(out[size(1, c_.N) + static_cast<size_t>(n)])) return "a NaN or an infinity is lost";
            for (const int m : {0, 2})
                if (std::memcmp(out.data() + size(m, c_.N), whole.data() + size(m, c_.N), size(c_.N, 4)) != 0)
                    return "a NaN or an infinity reaches another row";
        }
        return "";
    }

    static Tensor tensor(int type, size_t element, int64_t a, int64_t b, int64_t c, void * data) {
        Tensor t{};
        t.type = type;
        t.ne[0] = a, t.ne[1] = b, t.ne[2] = c, t.ne[3] = 1;
        t.nb[0] = element;
        for (int i = 1; i < 4; ++i) t.nb[i] = t.nb[i - 1] * static_cast<size_t>(t.ne[i - 1]);
        t.data = data;
        return t;
    }

    void compute(Tensor & op, int threads) const {
        Pool pool;
        pthread_barrier_init(&pool.barrier, nullptr, static_cast<unsigned>(threads));
        const size_t bytes = matmul_work_size(kernel_, threads, &op);
        Bytes work(bytes);
        const auto one = [&](int i) {
            const ComputeParams params = {i, threads, bytes, work.data, &pool, false};
            matmul(level_, kernel_, params, &op);
        };
        std::vector<std::thread> others;
        for (int i = 1; i < threads; ++i) others.emplace_back(one, i);
        one(0);
        for (std::thread & other : others) other.join();
        pthread_barrier_destroy(&pool.barrier);
    }

    std::vector<float> dense(int m, int threads) const {
        std::vector<float> out(size(m, c_.N), 7);
        Tensor w = tensor(c_.type, 0, c_.K, c_.N, 1, packed_.data);
        Tensor x = tensor(type_f32, 4, c_.K, m, 1, const_cast<float *>(c_.x.data()));
        Tensor op = tensor(type_f32, 4, c_.N, m, 1, out.data());
        op.op = operations.mul_mat;
        op.src[0] = &w, op.src[1] = &x;
        compute(op, threads);
        return out;
    }

    // a third of the weights' rows to each of three experts, two of them for each row of activations
    bool experts(int m, int threads, const std::vector<float> & whole) const {
        constexpr int count = 3, used = 2;
        const int64_t n = c_.N / count;
        const size_t one = kernel_.packed_bytes(c_.K, n), row = c_.weights.size() / static_cast<size_t>(c_.N);
        Bytes packed(one * count);
        for (int e = 0; e < count; ++e)
            llamaherd_kernels_pack(level_.name, c_.type, c_.K, n, c_.weights.data() + size(e, n) * row,
                                   packed.data + static_cast<size_t>(e) * one);
        std::vector<int32_t> ids;
        for (int i = 0; i < m; ++i) ids.insert(ids.end(), {i % count, (i + 1 + i / 3 % 2) % count});
        std::vector<float> out(size(m * used, n), 7);
        Tensor w = tensor(c_.type, 0, c_.K, n, count, packed.data);
        Tensor x = tensor(type_f32, 4, c_.K, 1, m, const_cast<float *>(c_.x.data()));
        Tensor i = tensor(type_i32, 4, used, m, 1, ids.data());
        Tensor op = tensor(type_f32, 4, n, used, m, out.data());
        op.op = operations.mul_mat_id;
        op.src[0] = &w, op.src[1] = &x, op.src[2] = &i;
        compute(op, threads);
        for (int r = 0; r < m * used; ++r)
            if (std::memcmp(out.data() + size(r, n),
                            whole.data() + size(r / used, c_.N) + size(ids[static_cast<size_t>(r)], n), size(n, 4)) != 0)
                return false;
        return true;
    }

    const Level & level_;
    const Case & c_;
    const Kernel & kernel_;
    Bytes packed_;
};

int check(const char * path, const char * name, int repeats) {
    const Level * level = find_level(name);
    if (!level || !llamaherd_kernels_runs(name)) return std::printf("%s: does not run here\n", name), 1;
    std::ifstream file(path, std::ios::binary);
    if (!file) return std::printf("no file %s\n", path), 2;
    int cases = 0, wrong = 0;
    Summary summary;
    const auto report = [&](const auto & one, const auto &... arguments) {
        if (!file) std::fprintf(stderr, "the file of cases is cut off\n"), std::exit(2);
        const std::string problem = one.run(summary, arguments...);
        if (!problem.empty()) std::printf("%s, %s: %s\n", name, one.name().c_str(), problem.c_str()), ++wrong;
        ++cases;
    };
    for (int32_t type; file.read(reinterpret_cast<char *>(&type), sizeof type);) {
        if (type < 0) {
            report(AttentionCase(file), name, repeats > 1 ? 8 : 3);
        } else {
            const Case c = read_case(file, type);
            report(Check(*level, c), repeats);
        }
    }
    std::printf("%s: %d cases, %d wrong, largest error %.3f of its bound, bits %016" PRIx64 "\n", name, cases, wrong,
                summary.worst, summary.bits);
    return wrong || !cases;
}

}  // namespace

int main(int count, char ** arguments) {
    if (count == 1) return std::printf("kernels_check LEVEL... | --cases FILE REPEATS LEVEL...\n"), 2;
    int bad = 0;
    if (std::strcmp(arguments[1], "--cases") != 0) {
        for (int i = 1; i < count; ++i)
            std::printf("%s: %s\n", arguments[i], llamaherd_kernels_runs(arguments[i]) ? "runs" : "does not run here");
        return 0;
    }
    if (count < 5) return 2;
    play_llama_cpp();
    for (int i = 4; i < count; ++i) bad |= check(arguments[2], arguments[i], std::atoi(arguments[3]));
    return bad;
}
