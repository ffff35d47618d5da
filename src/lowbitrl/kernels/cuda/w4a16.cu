// out[m, n] = alpha[m] * sum_k x[m, k] * w[n, k] (+ bias[n]): BF16 activations, 4-bit weights as published.
//
// Weights are the rows of the tensor core's m16n8k16 product, tokens its columns: one token wastes nothing of a
// tile of weights. Each thread of a quad owns 16 bytes (32 columns) of a row per chunk of 128, so the codes go
// from memory to registers in 16-byte loads, with no trip through shared memory and no repacking; which column
// sits where in the product is free as long as activations are laid out alike, and they are, once, on the way
// into shared memory.
//
//   codes -> BF16   NVFP4: code bits into a BF16's sign, exponent and mantissa (E2M1 * 2^-126), times
//                   scale * 2^119: exact. INT4: 128 + (code + 8) as bits, minus 136 (exact), times the BF16 scale
//                   (rounded once: the value `dequantize(bfloat16)` has).
//   sums            fp32 in the tensor core over a CTA's share of K; the shares of a cluster are added in rank
//                   order, in fp32, through distributed shared memory: bits do not depend on timing.
//   out             bf16(fp32(acc * fp32(global * token_scale)) + bias)
//
// A CTA does WARPS * ROWS * 16 weight rows, TILES * 8 tokens and one of `splits` shares of K. From some tens of tokens
// on, four warps multiply as a group (wgmma) with their decoded weights in registers: GROUP.

#ifndef LOWBITRL_EMULATE
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdint>
#define SHARED(type, name) extern __shared__ __align__(16) type name[]
#include "wgmma.h"
#endif

namespace {

enum Format { NVFP4 = 0, INT4 = 1 };

constexpr int CHUNK = 128;           // columns a quad takes at a time
constexpr int SEGMENT = CHUNK / 4;   // columns a thread owns of it
constexpr int UNIT = 8;              // columns of one 32-bit word of codes

struct Problem {
    const uint16_t* x;          // (rows, K) bf16
    const uint8_t* codes;       // ([E,] N, K/2)
    const uint8_t* scale;       // ([E,] N, K/group): E4M3 or bf16
    const float* global_scale;  // ([E]) or null
    const float* token_scale;   // (rows) or null
    const uint16_t* bias;       // ([E,] N) bf16 or null
    uint16_t* out;              // (slots, N) bf16
    const int* slots;           // grouped: (blocks, TILES * 8) output rows, `m` where there is none
    const int* experts;         // grouped: (blocks,) expert, negative past the last block
    int m, n, k, group;
    int x_stride, slots_per_row;
};

#ifndef LOWBITRL_EMULATE
__device__ __forceinline__ uint4 load_codes(const uint8_t* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    return __byte_perm(a, b, selector);
}

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}

__device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x3F803F80u), "r"(b));
    return d;
}

__device__ __forceinline__ void product(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Sixteen bytes to shared memory without a stop in registers; zeros where not `live`. Past a multiprocessor's own cache,
// as all that the grid before may have written: where grids overlap, that cache may hold what was there before.
__device__ __forceinline__ void copy_async(uint4* shared, const uint4* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
                 "l"(from), "r"(live ? 16 : 0) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Where grids overlap, this one begins while the one before it still runs, and until here has read nothing.
__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ uint16_t round_bf16(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
__device__ __forceinline__ int cluster_rank() { return cooperative_groups::this_cluster().block_rank(); }
__device__ __forceinline__ void cluster_barrier() { cooperative_groups::this_cluster().sync(); }
__device__ __forceinline__ const float* peer(float* mine, int rank) {
    return cooperative_groups::this_cluster().map_shared_rank(mine, rank);
}
#endif

__device__ __forceinline__ float from_bf16(uint16_t v) { return __uint_as_float(uint32_t(v) << 16); }

// Scales of the two halves (16 columns each) of a thread's 32 columns, as BF16 pairs of equal values.
struct Scales {
    uint32_t low, high;
};

template <Format F>
__device__ __forceinline__ Scales decode_scales(uint32_t raw) {
    if constexpr (F == NVFP4) {
        // E4M3 bits in a BF16's place are scale * 2^-120, subnormals too; two exact steps reach scale * 2^119.
        uint32_t both = ((raw & 0x7Fu) << 4) | ((raw & 0x7F00u) << 12);
        both = multiply(multiply(both, 0x7F007F00u), 0x77807780u);
        return {permute(both, both, 0x1010), permute(both, both, 0x3232)};
    } else {
        return {permute(raw, raw, 0x1010), permute(raw, raw, 0x1010)};
    }
}

// Eight codes of a word to four BF16 pairs: columns (0, 4), (1, 5), (2, 6), (3, 7).
template <Format F>
__device__ __forceinline__ void decode(uint32_t word, uint32_t scale, uint32_t (&v)[4]) {
    if constexpr (F == NVFP4) {
        // A nibble s e e m at bits 12 and 6 of its half: s is then a BF16's sign, e e m its exponent and mantissa.
        const uint32_t upper = word >> 8;
        v[0] = ((word & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
        v[1] = ((word & 0x00F000F0u) * 0x0104u) & 0x81C081C0u;
        v[2] = ((upper & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
        v[3] = ((upper & 0x00F000F0u) * 0x0104u) & 0x81C081C0u;
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = add(((word >> (4 * j)) & 0x000F000Fu) ^ 0x43084308u, 0xC308C308u);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = multiply(v[j], scale);
}

// What a thread has in flight for one chunk: its columns of two rows of each of its row tiles.
template <int ROWS>
struct Stage {
    uint4 codes[ROWS][2];
    uint32_t scales[ROWS][2];
};

// Where a thread's next columns lie.
template <int ROWS>
struct Cursor {
    const uint8_t *codes[ROWS][2], *scales[ROWS][2];
};

// Bytes of scales from one chunk of a row to the next.
template <Format F>
__device__ __forceinline__ int scale_step(const Problem& p) {
    return F == NVFP4 ? CHUNK / 16 : CHUNK / p.group * 2;
}

template <Format F, int ROWS, int STEP>
__device__ __forceinline__ Cursor<ROWS> point(const Problem& p, const uint8_t* codes, const uint8_t* scale, int first_row,
                                              int column) {
    Cursor<ROWS> at;
    const int group = F == NVFP4 ? 16 : p.group, bytes = F == NVFP4 ? 1 : 2;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Past the last row the last one is read again: its sums go nowhere, and loads need no condition.
            const size_t row = min(first_row + r * STEP + half * 8, p.n - 1);
            at.codes[r][half] = codes + row * (p.k / 2) + column / 2;
            at.scales[r][half] = scale + (row * (p.k / group) + column / group) * bytes;
        }
    return at;
}

// Loads the chunk `ahead` of the cursor; where `live` is false the stage keeps what it held, which is finite.
template <int ROWS>
__device__ __forceinline__ void fetch(Stage<ROWS>& s, const Cursor<ROWS>& at, int ahead, int step, bool live) {
    if (!live) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            s.codes[r][half] = load_codes(at.codes[r][half] + ahead * (CHUNK / 2));
            s.scales[r][half] = __ldg(reinterpret_cast<const uint16_t*>(at.scales[r][half] + ahead * step));
        }
}

template <int ROWS>
__device__ __forceinline__ void advance(Cursor<ROWS>& at, int chunks, int step) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            at.codes[r][half] += chunks * (CHUNK / 2);
            at.scales[r][half] += chunks * step;
        }
}

template <Format F, int ROWS>
__device__ __forceinline__ void decode_scales(const Stage<ROWS>& s, Scales (&scales)[ROWS][2]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) scales[r][half] = decode_scales<F>(s.scales[r][half]);
}

// Word i (of four) of a row tile: the weights of two products, 16 columns each.
template <Format F, int ROWS>
__device__ __forceinline__ void fragment(const Stage<ROWS>& s, const Scales (&scales)[ROWS][2], int r, int i,
                                         uint32_t (&a)[2][4]) {
    uint32_t v[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4& q = s.codes[r][half];
        const uint32_t word = i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w;
        decode<F>(word, i < 2 ? scales[r][half].low : scales[r][half].high, v[half]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 4; ++j) a[h][j] = v[j % 2][h * 2 + j / 2];
}

template <Format F, int TILES, int ROWS>
__device__ __forceinline__ void consume(const Stage<ROWS>& s, const uint4* x, float (&acc)[ROWS][TILES][4], int lane) {
    Scales scales[ROWS][2];
    decode_scales<F, ROWS>(s, scales);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint4 b[TILES];
#pragma unroll
        for (int t = 0; t < TILES; ++t) b[t] = x[(i * TILES + t) * 32 + lane];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            uint32_t a[2][4];
            fragment<F, ROWS>(s, scales, r, i, a);
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                product(acc[r][t], a[0], b[t].x, b[t].y);
                product(acc[r][t], a[1], b[t].z, b[t].w);
            }
        }
    }
}

// The same by groups of four warps: two products in flight, decoding of the next overlaps them.
template <Format F, int TILES, int ROWS>
__device__ __forceinline__ void consume_group(const Stage<ROWS>& s, const uint4* x, float (&acc)[ROWS][TILES][4]) {
    Scales scales[ROWS][2];
    decode_scales<F, ROWS>(s, scales);
    const auto b = describe(x, TILES);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            uint32_t a[2][4];
            fragment<F, ROWS>(s, scales, r, i, a);
            group_fence();
#pragma unroll
            for (int h = 0; h < 2; ++h) Group<TILES>::product(acc[r], a[h], past(b, (i * 2 + h) * TILES * 256));
            group_commit();
            group_wait<1>();  // the registers of the products before these are free again
        }
}

// Where eight columns of activations, unit `u` of those from `chunk` on, come from: (chunk, word, tile, lane), the
// order `consume` reads. Null where there is no such token or column.
template <int TILES>
__device__ __forceinline__ const uint4* unit_of(const Problem& p, const int* source, int chunk, int u) {
    const int token = source[u / 32 % TILES * 8 + u % 32 / 4];
    const int column = (chunk + u / (TILES * 128)) * CHUNK + u % 4 * SEGMENT + u / (TILES * 32) % 4 * UNIT;
    return column < p.k && token >= 0 ? reinterpret_cast<const uint4*>(p.x + size_t(token) * p.x_stride + column) : nullptr;
}

// The pairs of columns that `decode` makes.
__device__ __forceinline__ uint4 pair_up(const uint4& v) {
    return make_uint4(permute(v.x, v.z, 0x5410), permute(v.x, v.z, 0x7632), permute(v.y, v.w, 0x5410),
                      permute(v.y, v.w, 0x7632));
}

// Activations of chunks [first, last) into shared memory, all on their way at once.
template <int TILES, int THREADS>
__device__ __forceinline__ void stage_x(const Problem& p, const int* source, uint4* shared, int first, int last) {
    const int total = (last - first) * TILES * 128;
    for (int u = threadIdx.x; u < total; u += THREADS) {
        const uint4* from = unit_of<TILES>(p, source, first, u);
        copy_async(shared + u, from ? from : reinterpret_cast<const uint4*>(p.x), from != nullptr);
    }
    wait_for_copies();  // a thread's own, the only ones it rewrites
    for (int u = threadIdx.x; u < total; u += THREADS) shared[u] = pair_up(shared[u]);
}

// A chunk of activations on its way through a thread's registers to a group's products.
template <int TILES, int THREADS>
struct Ahead {
    static constexpr int TOTAL = TILES * 128, COUNT = (TOTAL + THREADS - 1) / THREADS;
    uint4 v[COUNT];
    uint32_t at[COUNT];  // of a unit in chunk 0, in units
    int chunks[COUNT];   // in which its columns exist

    __device__ __forceinline__ void point(const Problem& p, const int* source) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int u = threadIdx.x + i * THREADS, column = u % 4 * SEGMENT + u / (TILES * 32) * UNIT;
            const int token = u < TOTAL ? source[u / 32 % TILES * 8 + u % 32 / 4] : -1;
            at[i] = (size_t(max(token, 0)) * p.x_stride + column) / UNIT;
            chunks[i] = token < 0 ? 0 : (p.k - column + CHUNK - 1) / CHUNK;
        }
    }

    __device__ __forceinline__ void load(const Problem& p, int chunk, int last) {
        const uint4* x = reinterpret_cast<const uint4*>(p.x) + chunk * (CHUNK / UNIT);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            v[i] = chunk < min(chunks[i], last) ? __ldcg(x + at[i]) : make_uint4(0, 0, 0, 0);
    }

    // The four pairs of a unit lie apart: B's core matrices hold eight columns, two of each thread of a quad.
    __device__ __forceinline__ void store(uint4* shared) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int u = threadIdx.x + i * THREADS;
            if (TOTAL % THREADS && u >= TOTAL) continue;
            const uint4 pairs = pair_up(v[i]);
            uint32_t* apart = reinterpret_cast<uint32_t*>(shared) + u / (TILES * 32) * TILES * 128 + u % (TILES * 32);
            apart[0] = pairs.x, apart[TILES * 32] = pairs.y, apart[TILES * 64] = pairs.z, apart[TILES * 96] = pairs.w;
        }
    }
};

template <Format F, int TILES, int ROWS, int WARPS, int STAGES, bool GROUP, int SHARES>
__global__ void __launch_bounds__(WARPS * 32) w4a16_kernel(const Problem p, int splits, int phase,
                                                           int overlap) {
    constexpr int TOKENS = TILES * 8, HEIGHT = WARPS / SHARES * ROWS * 16, PITCH = HEIGHT + 4, STEP = GROUP ? 64 : 16;
    SHARED(uint4, base);
    int *source = reinterpret_cast<int*>(base), *target = source + TOKENS;
    uint4* memory = base + TOKENS / 2;  // past both lists
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, member = lane % 4;
    const int rank = splits > 1 ? cluster_rank() : 0;
    const int chunks = (p.k + CHUNK - 1) / CHUNK;
    const int begin = chunks * rank / splits, end = chunks * (rank + 1) / splits;
    const int tile_row = blockIdx.x / splits * HEIGHT;
    wait_for_inputs();
    if (overlap == 2) let_next_begin();
    const int expert = p.experts ? __ldcg(p.experts + blockIdx.y) : 0;
    if (expert < 0) return;  // a whole cluster leaves together: its CTAs share blockIdx.y

    if (threadIdx.x < TOKENS) {
        const int token = blockIdx.y * TOKENS + threadIdx.x, slot = p.slots ? __ldcg(p.slots + token) : token;
        target[threadIdx.x] = slot < p.m ? slot : -1;
        source[threadIdx.x] = slot < p.m ? slot / p.slots_per_row : -1;
    }
    const int own_row = (GROUP ? warp / 4 * ROWS * 64 + warp % 4 * 16 : warp / SHARES * ROWS * 16) + quad;
    const int own_chunk = warp % SHARES;  // SHARES warps take turns at the chunks of the same rows
    const uint8_t* codes = p.codes + size_t(expert) * p.n * (p.k / 2);
    const uint8_t* scale = p.scale + size_t(expert) * p.n * (F == NVFP4 ? p.k / 16 : p.k / p.group * 2);

    Stage<ROWS> stages[STAGES] = {};
    Cursor<ROWS> at = point<F, ROWS, STEP>(p, codes, scale, tile_row + own_row,
                                                 (begin + own_chunk) * CHUNK + member * SEGMENT);
    const int step = scale_step<F>(p);
    // Chunks that hold columns of this thread: only the last one may not.
    const int full = min(end, (p.k - member * SEGMENT + CHUNK - 1) / CHUNK);
#pragma unroll
    for (int s = 0; s < STAGES; ++s) fetch<ROWS>(stages[s], at, s * SHARES, step, begin + own_chunk + s * SHARES < full);
    advance<ROWS>(at, STAGES * SHARES, step);
    float acc[ROWS][TILES][4] = {};
    __syncthreads();
    if constexpr (GROUP) {
        // Two chunks of activations in shared memory, a third on its way in registers.
        constexpr int UNITS = TILES * 128;
        Ahead<TILES, WARPS * 32> ahead;
        ahead.point(p, source);
        ahead.load(p, begin, end);
        ahead.store(memory);
        ahead.load(p, begin + 1, end);
        shared_fence();
        __syncthreads();
        for (int c = begin; c < end; c += STAGES) {
#pragma unroll
            for (int s = 0; s < STAGES; ++s) {
                if (c + s >= end) break;
                uint4 *x = memory + (c + s - begin) % 2 * UNITS, *next = memory + (c + s - begin + 1) % 2 * UNITS;
                ahead.store(next);
                ahead.load(p, c + s + 2, end);
                consume_group<F, TILES, ROWS>(stages[s], x, acc);
                fetch<ROWS>(stages[s], at, s, step, c + s + STAGES < full);
                group_wait<0>();
                shared_fence();
                __syncthreads();
            }
            advance<ROWS>(at, STAGES, step);
        }
    } else {
        for (int start = begin; start < end; start += phase) {
            const int stop = min(start + phase, end);
            if (start > begin) __syncthreads();
            stage_x<TILES, WARPS * 32>(p, source, memory, start, stop);
            __syncthreads();
            for (int round = start + own_chunk; round < stop; round += STAGES * SHARES) {
#pragma unroll
                for (int s = 0; s < STAGES; ++s) {
                    const int c = round + s * SHARES;
                    if (c < stop) consume<F, TILES, ROWS>(stages[s], memory + (c - start) * 4 * TILES * 32, acc, lane);
                    fetch<ROWS>(stages[s], at, s * SHARES, step, c + STAGES * SHARES < full);
                }
                advance<ROWS>(at, STAGES * SHARES, step);
            }
        }
    }

    if (overlap == 1) let_next_begin();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = own_row + r * STEP + e / 2 * 8, token = t * 8 + member * 2 + e % 2;
                sums[(own_chunk * TOKENS + token) * PITCH + row] = acc[r][t][e];
            }
    if (splits > 1) cluster_barrier();
    else __syncthreads();

    const float weight_scale = (p.global_scale ? p.global_scale[expert] : 1.0f) * (F == NVFP4 ? 128.0f : 1.0f);
    const uint16_t* bias = p.bias ? p.bias + size_t(expert) * p.n : nullptr;
    for (int u = threadIdx.x + rank * blockDim.x; u < TOKENS * HEIGHT / 4; u += blockDim.x * splits) {
        const int token = u / (HEIGHT / 4), row = u % (HEIGHT / 4) * 4;
        if (target[token] < 0) continue;
        float4 total = make_float4(0, 0, 0, 0);
        for (int j = 0; j < splits * SHARES; ++j) {
            const float* from = splits > 1 ? peer(sums, j / SHARES) : sums;
            const float4 part = *reinterpret_cast<const float4*>(from + (j % SHARES * TOKENS + token) * PITCH + row);
            total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
        }
        const float alpha = p.token_scale ? weight_scale * __ldcg(p.token_scale + source[token]) : weight_scale;
        const float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int n = tile_row + row + e;
            if (n >= p.n) break;
            const float scaled = values[e] * alpha;
            p.out[size_t(target[token]) * p.n + n] = round_bf16(bias ? scaled + from_bf16(bias[n]) : scaled);
        }
    }
    if (splits > 1) cluster_barrier();  // until every peer has read this CTA's sums
}

// Rows sorted by expert into blocks of `block` output rows, one expert a block, padded with `total`.
__global__ void moe_align_kernel(const int* ids, int total, int experts, int block, int blocks, int* slots,
                                 int* block_expert) {
    SHARED(int, counts);
    int *starts = counts + experts, *scanned = starts + experts;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    for (int i = threadIdx.x; i < blocks * block; i += blockDim.x) slots[i] = total;
    for (int i = threadIdx.x; i < blocks; i += blockDim.x) block_expert[i] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < total; i += blockDim.x) atomicAdd(&counts[ids[i]], 1);
    __syncthreads();
    // Running sums of blocks by doubling: `starts` and `scanned` take turns.
    for (int e = threadIdx.x; e < experts; e += blockDim.x) starts[e] = (counts[e] + block - 1) / block;
    __syncthreads();
    int *from = starts, *to = scanned;
    for (int step = 1; step < experts; step *= 2) {
        for (int e = threadIdx.x; e < experts; e += blockDim.x) to[e] = from[e] + (e >= step ? from[e - step] : 0);
        __syncthreads();
        int* done = to;
        to = from, from = done;
    }
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        const int taken = (counts[e] + block - 1) / block, before = from[e] - taken;
        to[e] = before * block;
        for (int b = 0; b < taken; ++b) block_expert[before + b] = e;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < total; i += blockDim.x) slots[atomicAdd(&to[ids[i]], 1)] = i;
}

// out (rows, n) = bf16(bf16(silu(gate)) * value) of `up` (rows, 2 n), gates first: torch's roundings. n is a multiple of 8.
__global__ void gate_kernel(const uint16_t* up, uint16_t* out, int rows, int n) {
    const int wide = n / 8, at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * wide) return;
    const uint4* row = reinterpret_cast<const uint4*>(up + size_t(at / wide) * 2 * n);
    const uint4 gate = row[at % wide], value = row[at % wide + wide];
    uint4 result;
    const auto *g = reinterpret_cast<const uint16_t*>(&gate), *v = reinterpret_cast<const uint16_t*>(&value);
    auto* r = reinterpret_cast<uint16_t*>(&result);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float x = from_bf16(g[j]), silu = from_bf16(round_bf16(x / (1.0f + expf(-x))));
        r[j] = round_bf16(silu * from_bf16(v[j]));
    }
    reinterpret_cast<uint4*>(out)[at] = result;
}

// out (tokens, n) = bf16(sum over choices of bf16(y * weight)), summed in fp32 in order. n is a multiple of 8.
__global__ void weighted_sum_kernel(const uint16_t* y, const uint16_t* weights, uint16_t* out, int tokens, int choices,
                                    int n) {
    const int wide = n / 8, at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= tokens * wide) return;
    const int token = at / wide;
    float sums[8] = {};
#pragma unroll 8
    for (int c = 0; c < choices; ++c) {
        const size_t row = size_t(token) * choices + c;
        const uint4 values = reinterpret_cast<const uint4*>(y + row * n)[at % wide];
        const auto* v = reinterpret_cast<const uint16_t*>(&values);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[j] += from_bf16(round_bf16(from_bf16(v[j]) * from_bf16(weights[row])));
    }
    uint4 result;
    auto* r = reinterpret_cast<uint16_t*>(&result);
#pragma unroll
    for (int j = 0; j < 8; ++j) r[j] = round_bf16(sums[j]);
    reinterpret_cast<uint4*>(out)[at] = result;
}

}  // namespace

#ifndef LOWBITRL_EMULATE
namespace {

// In clusters of `cluster`; `overlap`: may begin before the kernel before it has ended.
template <class... Parameters, class... Arguments>
int launch_grid(void (*kernel)(Parameters...), dim3 grid, int threads, size_t bytes, int cluster, int overlap,
                 cudaStream_t stream, Arguments... arguments) {
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = overlap > 0;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

template <Format F, int TILES, int ROWS, int WARPS, int STAGES, bool GROUP, int SHARES>
int launch(const Problem& p, int token_blocks, int splits, int phase, int overlap, cudaStream_t stream) {
    constexpr int HEIGHT = WARPS / SHARES * ROWS * 16;
    const int chunks = (p.k + CHUNK - 1) / CHUNK, share = (chunks + splits - 1) / splits;
    phase = GROUP ? 2 : phase < share ? phase : share;
    const size_t staged = size_t(phase) * CHUNK * TILES * 8 * 2, sums = size_t(SHARES) * TILES * 8 * (HEIGHT + 4) * 4;
    const size_t bytes = (staged > sums ? staged : sums) + TILES * 8 * 2 * sizeof(int);
    auto kernel = w4a16_kernel<F, TILES, ROWS, WARPS, STAGES, GROUP, SHARES>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    return launch_grid(kernel, dim3((p.n + HEIGHT - 1) / HEIGHT * splits, token_blocks), WARPS * 32, bytes, splits, overlap,
                        stream, p, splits, phase, overlap);
}

template <Format F>
int dispatch(const Problem& p, int tiles, int rows, int warps, int stages, int group, int shares, int token_blocks, int splits,
             int phase, int overlap, cudaStream_t stream) {
#define VARIANT(T, R, W, S, G, K)                                                          \
    if (tiles == T && rows == R && warps == W && stages == S && group == G && shares == K) \
        return launch<F, T, R, W, S, G, K>(p, token_blocks, splits, phase, overlap, stream);
#include "w4a16_variants.h"
#undef VARIANT
    return -1;
}

}  // namespace

// 0, a cudaError_t, or -1 for a variant that was not built.
extern "C" int lowbitrl_w4a16(int format, const void* x, const void* codes, const void* scale,
                              const void* global_scale, const void* token_scale, const void* bias, void* out,
                              const void* slots, const void* experts, int m, int n, int k, int group, int x_stride,
                              int slots_per_row, int token_blocks, int tiles, int rows, int warps, int stages,
                              int warp_groups, int shares, int splits, int phase, int overlap, void* stream) {
    const Problem p = {static_cast<const uint16_t*>(x), static_cast<const uint8_t*>(codes),
                       static_cast<const uint8_t*>(scale), static_cast<const float*>(global_scale),
                       static_cast<const float*>(token_scale), static_cast<const uint16_t*>(bias),
                       static_cast<uint16_t*>(out), static_cast<const int*>(slots), static_cast<const int*>(experts),
                       m, n, k, group, x_stride, slots_per_row};
    auto on = static_cast<cudaStream_t>(stream);
    return format == NVFP4 ? dispatch<NVFP4>(p, tiles, rows, warps, stages, warp_groups, shares, token_blocks, splits, phase, overlap, on)
                           : dispatch<INT4>(p, tiles, rows, warps, stages, warp_groups, shares, token_blocks, splits, phase, overlap, on);
}

extern "C" int lowbitrl_moe_align(const void* ids, int total, int experts, int block, int blocks, void* slots,
                                  void* block_expert, void* stream) {
    return launch_grid(moe_align_kernel, dim3(1), 1024, experts * 3 * sizeof(int), 1, 0, static_cast<cudaStream_t>(stream),
                        static_cast<const int*>(ids), total, experts, block, blocks, static_cast<int*>(slots),
                        static_cast<int*>(block_expert));
}

extern "C" int lowbitrl_gate(const void* up, void* out, int rows, int n, void* stream) {
    return launch_grid(gate_kernel, dim3((rows * (n / 8) + 255) / 256), 256, 0, 1, 0, static_cast<cudaStream_t>(stream),
                        static_cast<const uint16_t*>(up), static_cast<uint16_t*>(out), rows, n);
}

extern "C" int lowbitrl_weighted_sum(const void* y, const void* weights, void* out, int tokens, int choices, int n,
                                     void* stream) {
    return launch_grid(weighted_sum_kernel, dim3((tokens * (n / 8) + 127) / 128), 128, 0, 1, 0,
                        static_cast<cudaStream_t>(stream), static_cast<const uint16_t*>(y),
                        static_cast<const uint16_t*>(weights), static_cast<uint16_t*>(out), tokens, choices, n);
}
#endif
