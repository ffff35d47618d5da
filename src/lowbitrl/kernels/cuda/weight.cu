// NVFP4 of tensors with one scale each, the maximum measured: the values, or codes and block scales, in one launch.
//
// A group of CTAs takes a tensor at a time: its maximum, a barrier over the group, then the blocks again, from the
// last: those that fit are still in shared memory, then come those that the cache holds, then the rest.

#ifndef LOWBITRL_EMULATE
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#define SHARED(type, name) extern __shared__ __align__(16) uint8_t shared_[]; type* name = reinterpret_cast<type*>(shared_)
#endif

namespace {

#ifndef LOWBITRL_EMULATE
__device__ __forceinline__ uint4 load_once(const uint4* p) { return __ldcs(p); }
__device__ __forceinline__ void store_once(uint4* p, uint4 v) { __stcs(p, v); }
__device__ __forceinline__ void store_once(uint2* p, uint2 v) { __stcs(p, v); }
__device__ __forceinline__ void store_once(uint8_t* p, uint8_t v) { __stcs(p, v); }
__device__ __forceinline__ void wait_for(int* counter, int all) {
    while (*reinterpret_cast<volatile int*>(counter) < all) {}
    __threadfence();
}
__device__ __forceinline__ void publish() { __threadfence(); }
__device__ __forceinline__ uint32_t load_shared_by_grid(const uint32_t* p) { return __ldcg(p); }
#endif

#include "nvfp4_block.h"

constexpr int THREADS = 512;
constexpr int UNROLL = 4;

struct Weights {
    const uint4* x;      // (parts, blocks, 2): 16 BF16 a block
    uint4* out;          // the same, or null: then codes and scales
    uint2* codes;        // (parts, blocks)
    uint8_t* scales;     // (parts, blocks) E4M3
    uint32_t* peaks;     // (parts) zero at first, then max |x|
    int* counters;       // (parts) zero at first
    int64_t blocks;      // a part
    int parts, group;    // CTAs a part
    int kept;            // rounds of blocks that stay in shared memory
    int64_t cached;      // blocks from here on are worth keeping in the cache
};

__device__ __forceinline__ uint32_t nibble_of(float value) {
    return (__float_as_uint(__fmul_rn(value, 0x1p-126f)) & MAGNITUDE) >> 22 | (__float_as_uint(value) >> 28 & 8);
}

__device__ __forceinline__ uint8_t e4m3_byte(float v) {
    if (v != v) return 0x7F;
    return (__float_as_uint(__fmul_rn(v, 0x1p-120f)) & MAGNITUDE) >> 20 | (__float_as_uint(v) >> 24 & 0x80);
}

template <bool PLAIN> __device__ __forceinline__ void write_as(const Weights& w, int64_t at, bool there, const float (&x)[BLOCK], Step step) {
    float code[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) code[i] = round_e2m1<PLAIN>(__fmul_rn(x[i], step.inverse));
    if (!there) return;
    if (w.out) {
        uint32_t v[BLOCK / 2];
#pragma unroll
        for (int i = 0; i < BLOCK / 2; ++i) v[i] = pair_of(__fmul_rn(code[2 * i], step.value), __fmul_rn(code[2 * i + 1], step.value));
        store_once(w.out + 2 * at, make_uint4(v[0], v[1], v[2], v[3]));
        store_once(w.out + 2 * at + 1, make_uint4(v[4], v[5], v[6], v[7]));
        return;
    }
    uint2 packed = {0, 0};
#pragma unroll
    for (int i = 0; i < BLOCK / 2; ++i) {
        packed.x |= nibble_of(code[i]) << 4 * i;
        packed.y |= nibble_of(code[i + 8]) << 4 * i;
    }
    store_once(w.codes + at, packed);
    store_once(w.scales + at, e4m3_byte(step.scale));
}

// FLOOR as in step_of.
template <bool FLOOR> __global__ void __launch_bounds__(THREADS, 2) weight_kernel(Weights w) {
    SHARED(uint4, memory);
    uint32_t* peaks = reinterpret_cast<uint32_t*>(memory);
    uint4* kept = memory + 4;
    const int rank = blockIdx.x % w.group, lane = threadIdx.x % 32;
    const int64_t stride = int64_t(w.group) * THREADS, begin = int64_t(rank) * THREADS + threadIdx.x;
    const int rounds = (w.blocks + stride - 1) / stride;
    for (int part = blockIdx.x / w.group; part < w.parts; part += gridDim.x / w.group) {
        const int64_t offset = part * w.blocks;
        uint32_t best = 0;
        for (int i = 0; i < rounds; i += UNROLL) {
            Packed x[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int64_t at = begin + (i + u) * stride;
                const bool there = i + u < rounds && at < w.blocks;
                const uint4* from = w.x + 2 * (offset + at);
                for (int h = 0; h < 2; ++h)
                    x[u].half[h] = !there ? make_uint4(0, 0, 0, 0) : at < w.cached ? load_once(from + h) : from[h];
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                best = max(best, peak_of(x[u]));
                const int slot = rounds - 1 - (i + u);
                if (slot >= 0 && slot < w.kept)
                    for (int h = 0; h < 2; ++h) kept[(2 * slot + h) * THREADS + threadIdx.x] = x[u].half[h];
            }
        }
        best = warp_max(best);
        __syncthreads();
        if (lane == 0) peaks[threadIdx.x / 32] = best;
        __syncthreads();
        if (threadIdx.x < 32) {
            best = warp_max(lane < THREADS / 32 ? peaks[lane] : 0);
            if (lane == 0) {
                atomicMax(w.peaks + part, best);
                publish();
                atomicAdd(w.counters + part, 1);
                wait_for(w.counters + part, w.group);
                peaks[0] = load_shared_by_grid(w.peaks + part);
            }
        }
        __syncthreads();
        const Globals whole = globals_of(peaks[0]);
        Packed next = {};
        const auto fetch = [&](int i) {
            Packed p = {{make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}};
            const int slot = rounds - 1 - i;
            const int64_t at = begin + i * stride;
            for (int h = 0; h < 2; ++h)
                if (i >= 0 && slot < w.kept) p.half[h] = kept[(2 * slot + h) * THREADS + threadIdx.x];
                else if (i >= 0 && at < w.blocks) p.half[h] = load_once(w.x + 2 * (offset + at) + h);
            return p;
        };
        next = fetch(rounds - 1);
        for (int i = rounds - 1; i >= 0; --i) {
            const Packed now = next;
            next = fetch(i - 1);
            float x[BLOCK];
            unpack(now, x);
            const Step step = step_of<FLOOR>(peak_of(now), whole);
            const int64_t at = begin + i * stride;
            if (warp_all(step.plain)) write_as<true>(w, offset + at, at < w.blocks, x, step);
            else write_as<false>(w, offset + at, at < w.blocks, x, step);
        }
    }
}

}  // namespace

#ifndef LOWBITRL_EMULATE
extern "C" int lowbitrl_weight(int floor, int grid, int shared, const void* x, void* out, void* codes, void* scales, void* peaks,
                               void* counters, int64_t blocks, int parts, int group, int kept, int64_t cached, void* stream) {
    const Weights w = {(const uint4*)x, (uint4*)out, (uint2*)codes, (uint8_t*)scales, (uint32_t*)peaks, (int*)counters,
                       blocks, parts, group, kept, cached};
    auto kernel = floor ? weight_kernel<true> : weight_kernel<false>;
    if (auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)) return error;
    kernel<<<grid, THREADS, shared, (cudaStream_t)stream>>>(w);
    return cudaGetLastError();
}
#endif
