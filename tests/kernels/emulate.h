// The CUDA the kernels use, on CPU threads: one std::thread a CUDA thread, one cluster at a time.
#pragma once
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define LOWBITRL_EMULATE
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
using std::max;
using std::min;

struct uint4 { uint32_t x, y, z, w; };
struct float4 { float x, y, z, w; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
inline uint4 make_uint4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return {a, b, c, d}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }

struct Block {
    std::unique_ptr<std::barrier<>> barrier;
    std::vector<std::unique_ptr<std::barrier<>>> warps;
    std::vector<uint8_t> memory;
    std::vector<uint32_t> exchange;
};
struct Cluster {
    std::vector<Block> blocks;
    std::unique_ptr<std::barrier<>> barrier;
};
inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
inline thread_local Cluster* cluster;
inline thread_local int rank_;

inline Block& mine_() { return cluster->blocks[rank_]; }
inline void __syncthreads() { mine_().barrier->arrive_and_wait(); }
inline int cluster_rank() { return rank_; }
inline void cluster_barrier() { cluster->barrier->arrive_and_wait(); }
inline const float* peer(float* mine, int rank) {
    auto offset = reinterpret_cast<uint8_t*>(mine) - mine_().memory.data();
    return reinterpret_cast<const float*>(cluster->blocks[rank].memory.data() + offset);
}
#define SHARED(type, name) type* name = reinterpret_cast<type*>(mine_().memory.data())

template <class T> inline T __ldg(const T* p) { T v; std::memcpy(&v, p, sizeof v); return v; }
template <class T> inline T __ldcg(const T* p) { return __ldg(p); }
inline uint4 load_codes(const uint8_t* p) { uint4 v; std::memcpy(&v, p, 16); return v; }
inline void copy_async(uint4* shared, const uint4* from, bool live) {
    if (live) std::memcpy(shared, from, 16);
    else *shared = {};
}
inline void wait_for_copies() {}
inline void wait_for_inputs() {}
inline void let_next_begin() {}
inline float __uint_as_float(uint32_t v) { float f; std::memcpy(&f, &v, 4); return f; }
inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }

inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t pool = uint64_t(b) << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= uint32_t(pool >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
}
inline uint16_t round_bf16(float v) {
    uint32_t u;
    std::memcpy(&u, &v, 4);
    return uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
template <class Op> inline uint32_t halves(uint32_t a, uint32_t b, Op op) {
    auto f = [](uint32_t h) { return __uint_as_float(h << 16); };
    return uint32_t(round_bf16(op(f(a & 0xFFFF), f(b & 0xFFFF)))) | uint32_t(round_bf16(op(f(a >> 16), f(b >> 16)))) << 16;
}
inline uint32_t multiply(uint32_t a, uint32_t b) { return halves(a, b, [](float p, float q) { return p * q; }); }
inline uint32_t add(uint32_t a, uint32_t b) { return halves(a, b, [](float p, float q) { return p + q; }); }

inline void warp_barrier() { mine_().warps[threadIdx.x / 32]->arrive_and_wait(); }
inline void product(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t* all = mine_().exchange.data() + warp * 192;
    for (int i = 0; i < 4; ++i) all[lane * 6 + i] = a[i];
    all[lane * 6 + 4] = b0, all[lane * 6 + 5] = b1;
    warp_barrier();
    auto half = [&](int from, int reg, int odd) { return __uint_as_float((all[from * 6 + reg] >> (16 * odd) & 0xFFFF) << 16); };
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4, upper = e / 2, column = lane % 4 * 2 + e % 2;
        double sum = c[e];
        for (int k = 0; k < 16; ++k)
            sum += double(half(row * 4 + k % 8 / 2, upper + (k / 8) * 2, k % 2)) *
                   double(half(column * 4 + k % 8 / 2, 4 + k / 8, k % 2));
        c[e] = float(sum);
    }
    warp_barrier();
}

inline const uint8_t* describe(const void* shared, int) { return static_cast<const uint8_t*>(shared); }
inline const uint8_t* past(const uint8_t* described, int bytes) { return described + bytes; }
inline void group_fence() {}
inline void group_commit() {}
template <int PENDING> inline void group_wait() {}
inline void shared_fence() {}
template <int TILES> struct Group {
    static void product(float (&d)[TILES][4], const uint32_t (&a)[4], const uint8_t* b) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        uint32_t* all = mine_().exchange.data() + warp * 192;
        for (int i = 0; i < 4; ++i) all[lane * 6 + i] = a[i];
        warp_barrier();
        for (int t = 0; t < TILES; ++t)
            for (int e = 0; e < 4; ++e) {
                const int token = lane % 4 * 2 + e % 2;
                double sum = d[t][e];
                for (int k = 0; k < 16; ++k) {
                    const uint32_t pair = all[(lane / 4 * 4 + k % 8 / 2) * 6 + e / 2 + k / 8 * 2];
                    uint16_t x;
                    std::memcpy(&x, b + k / 8 * TILES * 128 + t * 128 + token * 16 + k % 8 * 2, 2);
                    sum += double(__uint_as_float((pair >> (16 * (k % 2)) & 0xFFFF) << 16)) *
                           double(__uint_as_float(uint32_t(x) << 16));
                }
                d[t][e] = float(sum);
            }
        warp_barrier();
    }
};

template <class F> void run_cluster(int threads, int size, size_t bytes, dim3 first, dim3 grid, F body) {
    Cluster shared;
    shared.barrier = std::make_unique<std::barrier<>>(threads * size);
    for (int r = 0; r < size; ++r) {
        Block b;
        b.barrier = std::make_unique<std::barrier<>>(threads);
        for (int w = 0; w < (threads + 31) / 32; ++w) b.warps.push_back(std::make_unique<std::barrier<>>(32));
        b.memory.assign(bytes, 0xFF);
        b.exchange.resize(threads * 6);
        shared.blocks.push_back(std::move(b));
    }
    std::vector<std::thread> all;
    for (int r = 0; r < size; ++r)
        for (int t = 0; t < threads; ++t)
            all.emplace_back([&, r, t] {
                threadIdx.x = t, blockIdx = {first.x + r, first.y}, blockDim.x = threads, gridDim = grid;
                cluster = &shared, rank_ = r;
                body();
            });
    for (auto& t : all) t.join();
}
