// One NVFP4 block of 16 elements in one thread's registers: the sequences of rounding_triton.py, bit for bit.
//
// Every product and sum is a rounded intrinsic, so nothing fuses that the reference rounds. Maxima keep NaN.
#pragma once

constexpr int BLOCK = 16;
constexpr uint32_t MAGNITUDE = 0x7FFFFFFF;
constexpr float E2M1_ROUNDER = 0x1.8p22f;

#ifndef LOWBITRL_EMULATE
__device__ __forceinline__ float larger_magnitude(float a, float b) {
    float d;
    asm("{.reg .f32 m; abs.f32 m, %2; max.NaN.f32 %0, %1, m;}" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) {  // of BF16 pairs; a has no signs
    uint32_t d;
    asm("{.reg .b32 m; abs.bf16x2 m, %2; max.NaN.bf16x2 %0, %1, m;}" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ uint32_t pair_of(float low, float high) {  // to BF16, ties to even
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ uint32_t warp_max(uint32_t v) { return __reduce_max_sync(0xFFFFFFFF, v); }
__device__ __forceinline__ uint32_t warp_min(uint32_t v) { return __reduce_min_sync(0xFFFFFFFF, v); }
__device__ __forceinline__ bool warp_all(bool v) { return __all_sync(0xFFFFFFFF, v); }
template <class T> __device__ __forceinline__ T lane_value(T v, int lane) { return __shfl_sync(0xFFFFFFFF, v, lane); }
#endif

struct Globals {
    float encode, decode;  // S and 1 / S
};

__device__ __forceinline__ Globals globals_of(uint32_t peak) {
    float encode = __fdiv_rn(2688.0f, __uint_as_float(peak));
    if (encode == INFINITY) encode = 1.0f;
    return {encode, __fdiv_rn(1.0f, encode)};
}

__device__ __forceinline__ float round_e4m3(float x) {
    x = fminf(fmaxf(x, -448.0f), 448.0f);
    const float power = fmaxf(__uint_as_float(__float_as_uint(x) & 0x7F800000), 0x1p-6f);
    return __fmaf_rn(power, -0x1.8p20f, __fmaf_rn(power, 0x1.8p20f, x));
}

struct Step {
    float scale, value, inverse;
    bool plain;  // every |x * inverse| is under 7, the midpoint to the grid's next value, so none saturates
};

// A block's step from the bits of its max |x|. A normal E4M3 scale is off by 1/16 at most: 6 * 17/16 < 7.
// FLOOR: scales of blocks that are not all zero are normal.
template <bool FLOOR = false> __device__ __forceinline__ Step step_of(uint32_t peak, Globals row) {
    const float b = __uint_as_float(peak);
    float wanted = __fmul_rn(row.encode, __fmul_rn(b, 1.0f / 6.0f));
    if (FLOOR) wanted = b > 0.0f ? fmaxf(wanted, 0x1p-6f) : 0.0f;
    // Minimum and maximum drop NaN, so what is not finite is kept from them: Inf - Inf is NaN too.
    const float scale = b < INFINITY ? round_e4m3(wanted) : __fsub_rn(b, b);
    const float step = __fmul_rn(scale, row.decode);
    const float inverse = __frcp_rn(step);
    return {scale, step, inverse == INFINITY ? 0.0f : inverse, scale >= 0x1p-6f || peak == 0};
}

// fp32 to the nearest E2M1 value, ties to even, never -0. PLAIN: |v| < 7. Else saturating.
template <bool PLAIN> __device__ __forceinline__ float round_e2m1(float v) {
    if (PLAIN) {
        // Spacing 1/2, 1, 2 below 2, 4, 8: the two exponent bits that tell them apart make the constant whose
        // last place is the spacing, 1.5, 3.5 or 5.5 * 2^22.
        const float rounder = __fmaf_rn(__uint_as_float(__float_as_uint(v) & 0x40800000), 0x1p22f, E2M1_ROUNDER);
        return __fsub_rn(__fadd_rn(v, rounder), rounder);
    }
    v = fminf(fmaxf(v, -6.0f), 6.0f);
    const float power = fmaxf(__uint_as_float(__float_as_uint(v) & 0x7F800000), 1.0f);
    return __fmaf_rn(power, -E2M1_ROUNDER, __fmaf_rn(power, E2M1_ROUNDER, v));
}

template <bool PLAIN> __device__ __forceinline__ void quantize_as(const float (&x)[BLOCK], Step step, float (&q)[BLOCK]) {
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) q[i] = __fmul_rn(round_e2m1<PLAIN>(__fmul_rn(x[i], step.inverse)), step.value);
}

// NVFP4 values of a block. Warps go together: all lanes call.
__device__ __forceinline__ void quantize_block(const float (&x)[BLOCK], Step step, float (&q)[BLOCK]) {
    if (warp_all(step.plain)) quantize_as<true>(x, step, q);
    else quantize_as<false>(x, step, q);
}

struct Packed {
    uint4 half[2];  // 16 BF16
};

__device__ __forceinline__ uint32_t word_of(const Packed& p, int i) {
    const uint4& h = p.half[i / 4];
    return i % 4 == 0 ? h.x : i % 4 == 1 ? h.y : i % 4 == 2 ? h.z : h.w;
}

__device__ __forceinline__ Packed load_block(const uint16_t* at, bool there) {
    Packed p = {{make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}};
    if (there) {
        p.half[0] = *reinterpret_cast<const uint4*>(at);
        p.half[1] = *reinterpret_cast<const uint4*>(at + 8);
    }
    return p;
}

__device__ __forceinline__ void store_block(uint16_t* at, const float (&v)[BLOCK]) {
    uint32_t w[BLOCK / 2];
#pragma unroll
    for (int i = 0; i < BLOCK / 2; ++i) w[i] = pair_of(v[2 * i], v[2 * i + 1]);
    *reinterpret_cast<uint4*>(at) = make_uint4(w[0], w[1], w[2], w[3]);
    *reinterpret_cast<uint4*>(at + 8) = make_uint4(w[4], w[5], w[6], w[7]);
}

__device__ __forceinline__ void unpack(const Packed& p, float (&x)[BLOCK]) {
#pragma unroll
    for (int i = 0; i < BLOCK / 2; ++i) {
        x[2 * i] = __uint_as_float(word_of(p, i) << 16);
        x[2 * i + 1] = __uint_as_float(word_of(p, i) & 0xFFFF0000);
    }
}

// Bits of max |x|, NaN above everything.
__device__ __forceinline__ uint32_t peak_of(const Packed& p) {
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < BLOCK / 2; ++i) best = larger_magnitudes(best, word_of(p, i));
    return max(best << 16, best & 0xFFFF0000);
}

__device__ __forceinline__ uint32_t peak_of(const float (&x)[BLOCK]) {
    float best = 0.0f;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) best = larger_magnitude(best, x[i]);
    return __float_as_uint(best);
}

__device__ __forceinline__ void subtract(const float (&a)[BLOCK], const float (&b)[BLOCK], float (&d)[BLOCK]) {
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) d[i] = __fsub_rn(a[i], b[i]);
}

// first - mask * Q(first - x), from the two passes' row scales; bit i of `mask` is column i.
__device__ __forceinline__ void repair_block(const Packed& packed, Globals one, Globals two, uint32_t mask, float (&out)[BLOCK]) {
    float x[BLOCK], first[BLOCK], second[BLOCK];
    unpack(packed, x);
    quantize_block(x, step_of(peak_of(packed), one), first);
    subtract(first, x, x);
    quantize_block(x, step_of(peak_of(x), two), second);
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) out[i] = __fsub_rn(first[i], mask >> i & 1 ? second[i] : 0.0f);
}
