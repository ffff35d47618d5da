// What the quantizing kernels use beside emulate.h: rounded arithmetic and the functions of a warp.
#pragma once
#include "emulate.h"
#define __launch_bounds__(...)
#undef SHARED
#define SHARED(type, name) type* name = reinterpret_cast<type*>(mine_().memory.data())
using std::max;

inline uint32_t __float_as_uint(float v) { uint32_t u; std::memcpy(&u, &v, 4); return u; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __clz(uint32_t v) { return v ? __builtin_clz(v) : 32; }
inline uint32_t atomicAdd(uint32_t* p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }

inline float larger_magnitude(float a, float b) { return a != a || b != b ? NAN : std::max(a, std::fabs(b)); }
inline uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
    auto larger = [](uint32_t p, uint32_t q) { return std::max(p & 0x7FFF, q & 0x7FFF); };
    return larger(a & 0xFFFF, b & 0xFFFF) | larger(a >> 16, b >> 16) << 16;
}
inline uint32_t bf16_of(float v) { return v != v ? 0x7FFF : round_bf16(v); }
inline uint32_t pair_of(float low, float high) { return bf16_of(low) | bf16_of(high) << 16; }

template <class T> inline T lane_value(T v, int lane) {
    uint32_t* all = mine_().exchange.data() + threadIdx.x / 32 * 192;
    std::memcpy(all + threadIdx.x % 32, &v, 4);
    warp_barrier();
    T got;
    std::memcpy(&got, all + lane, 4);
    warp_barrier();
    return got;
}
template <class Op> inline uint32_t over_warp(uint32_t v, Op op) {
    uint32_t* all = mine_().exchange.data() + threadIdx.x / 32 * 192;
    all[threadIdx.x % 32] = v;
    warp_barrier();
    uint32_t best = all[0];
    for (int i = 1; i < 32; ++i) best = op(best, all[i]);
    warp_barrier();
    return best;
}
inline uint32_t warp_max(uint32_t v) { return over_warp(v, [](uint32_t a, uint32_t b) { return std::max(a, b); }); }
inline bool warp_all(bool v) { return over_warp(v, [](uint32_t a, uint32_t b) { return a & b; }); }
inline int lane_below(int v, int by) {
    uint32_t* all = mine_().exchange.data() + threadIdx.x / 32 * 192;
    all[threadIdx.x % 32] = v;
    warp_barrier();
    const int got = all[std::max(0, int(threadIdx.x % 32) - by)];
    warp_barrier();
    return got;
}
