#include "capi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "matmul.h"

using namespace llamaherd;

namespace {

const Level * const all[] = {
// best first
#ifdef LLAMAHERD_LEVEL_AVX512BF16
    &level_avx512bf16,
#endif
#ifdef LLAMAHERD_LEVEL_AVX512VNNI
    &level_avx512vnni,
#endif
#ifdef LLAMAHERD_LEVEL_AVXVNNI
    &level_avxvnni,
#endif
#ifdef LLAMAHERD_LEVEL_AVX2
    &level_avx2,
#endif
#ifdef LLAMAHERD_LEVEL_I8MM
    &level_i8mm,
#endif
#ifdef LLAMAHERD_LEVEL_DOTPROD
    &level_dotprod,
#endif
#ifdef LLAMAHERD_LEVEL_EMULATED16
    &level_emulated16,
#endif
#ifdef LLAMAHERD_LEVEL_EMULATED8
    &level_emulated8,
#endif
};

const Kernel * find(const char * name, int type) {
    const Level * level = find_level(name);
    return level ? find_kernel(*level, type) : nullptr;
}

#if defined(__x86_64__)
// CPUID 7.1 EAX: bit 4 AVX-VNNI, bit 5 AVX512-BF16; compilers learnt the names late
bool cpuid_7_1(int bit) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> bit & 1);
}
#endif

}  // namespace

const Level * llamaherd::find_level(const char * name) {
    for (const Level * level : all)
        if (std::strcmp(level->name, name) == 0) return level;
    return nullptr;
}

const char * llamaherd_kernels_levels() {
    static const std::string names = [] {
        std::string joined;
        for (const Level * level : all) joined += std::string(joined.empty() ? "" : " ") + level->name;
#if defined(__x86_64__)
        // Intel multiplies pairs of BF16 more slowly than it widens and multiplies each (Sapphire Rapids: 0.7 times)
        const std::string pairs_first = "avx512bf16 avx512vnni";
        __builtin_cpu_init();
        if (__builtin_cpu_is("intel") && joined.compare(0, pairs_first.size(), pairs_first) == 0)
            joined.replace(0, pairs_first.size(), "avx512vnni avx512bf16");
#endif
        return joined;
    }();
    return names.c_str();
}

int llamaherd_kernels_runs(const char * name) {
    if (!find_level(name)) return 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (!std::strcmp(name, "avx2")) return avx2;
    if (!std::strcmp(name, "avxvnni")) return avx2 && cpuid_7_1(4);
    const bool avx512vnni = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512vnni");
    if (!std::strcmp(name, "avx512vnni")) return avx512vnni;
    if (!std::strcmp(name, "avx512bf16")) return avx512vnni && cpuid_7_1(5);
#elif defined(__aarch64__) && defined(__linux__)
    // HWCAP_ASIMDDP and HWCAP2_I8MM; headers learnt the names late
    const bool dotprod = getauxval(AT_HWCAP) >> 20 & 1, i8mm = getauxval(AT_HWCAP2) >> 13 & 1;
    if (!std::strcmp(name, "dotprod")) return dotprod;
    if (!std::strcmp(name, "i8mm")) return dotprod && i8mm;
#endif
    return !std::strncmp(name, "emulated", 8);
}

const char * llamaherd_kernels_install(void * handle, const char * name, uint64_t types, int attention) {
    const Level * level = find_level(name);
    return level ? install(handle, *level, types, attention != 0) : "no such level";
}

int llamaherd_kernels_take_attention(int wanted) { return take_attention(wanted != 0); }

int llamaherd_kernels_attend(const char * name, const AttentionOperation * operation, int threads) {
    const Level * level = find_level(name);
    if (!level || threads < 1 || !attention_fits(*operation)) return 0;
    struct Pool {
        pthread_barrier_t barrier;
        std::atomic<int> chunk{0};
    } pool;
    pthread_barrier_init(&pool.barrier, nullptr, static_cast<unsigned>(threads));
    const size_t size = attention_work_size(*level, threads, *operation);
    std::vector<uint8_t> memory(size);
    const auto work = [&](int i) {
        const AttentionTeam team = {i, threads, &pool,
                                    [](void * p) { pthread_barrier_wait(&static_cast<Pool *>(p)->barrier); },
                                    [](void * p, int value) { static_cast<Pool *>(p)->chunk = value; },
                                    [](void * p, int value) { return static_cast<Pool *>(p)->chunk.fetch_add(value); }};
        attention(*level, team, *operation, memory.data(), size);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(work, i);
    work(0);
    for (std::thread & other : others) other.join();
    pthread_barrier_destroy(&pool.barrier);
    return 1;
}

void llamaherd_kernels_counts(int64_t * out) { counts(out); }

size_t llamaherd_kernels_packed_bytes(const char * level, int type, int64_t K, int64_t N) {
    const Kernel * kernel = find(level, type);
    return kernel && K > 0 && N > 0 && K % kernel->block == 0 ? kernel->packed_bytes(K, N) : 0;
}

void llamaherd_kernels_pack(const char * level, int type, int64_t K, int64_t N, const void * weights, void * packed) {
    const Kernel * kernel = find(level, type);
    const int columns = find_level(level)->columns;
    kernel->pack(static_cast<const uint8_t *>(weights),
                 static_cast<size_t>(K / kernel->block) * static_cast<size_t>(kernel->block_bytes), K, N, 0,
                 (N + columns - 1) / columns, static_cast<uint8_t *>(packed));
}

void llamaherd_kernels_multiply(const char * level, int type, int64_t K, int64_t N, int64_t M, const void * packed,
                                const float * x, float * out, int threads, int repeat) {
    const Kernel * kernel = find(level, type);
    const int columns = find_level(level)->columns;
    const size_t bytes = kernel->row_bytes(K);
    const int64_t strips = (N + columns - 1) / columns;
    const auto work = [&](int i) {
        // prepared rows are whole lines of 64 bytes; none too many, so that sanitizers see what reads beyond them
        uint8_t * prepared = static_cast<uint8_t *>(std::aligned_alloc(64, static_cast<size_t>(M) * bytes));
        std::vector<Row> rows(static_cast<size_t>(M));
        for (int r = 0; r < repeat; ++r) {
            for (int64_t m = 0; m < M; ++m) {
                const float * from = x + m * K;
                if (bytes) kernel->prepare(from, K, prepared + static_cast<size_t>(m) * bytes);
                rows[static_cast<size_t>(m)] = {bytes ? prepared + static_cast<size_t>(m) * bytes
                                                      : reinterpret_cast<const uint8_t *>(from),
                                                out + m * N};
            }
            kernel->multiply(static_cast<const uint8_t *>(packed), K, N, strips * i / threads,
                             strips * (i + 1) / threads, rows.data(), M);
        }
        std::free(prepared);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(work, i);
    work(0);
    for (std::thread & other : others) other.join();
}
