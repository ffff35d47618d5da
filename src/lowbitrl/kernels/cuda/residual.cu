// X~ = Q(X) - M Q(Q(X) - X), NVFP4 with a scale a row, for BF16 rows: formats/residual.py bit for bit.
//
// A thread holds blocks of 16 columns, so a block's scale costs one division and no shuffle.
//
//   token_kernel     a row a CTA: both passes; with SELECT the row chooses its own channels
//   row_kernel       decode sizes, 1 of 2: row scales of both passes
//   slab_kernel      decode sizes, 2 of 2: a slab of columns a CTA; scores, a barrier over the grid, choice, repair
//   scores_kernel    long batches, 1 of 3: 16 rows at a time; row scales, column sums of squared errors
//   choose_kernel    long batches, 2 of 3: sums over runs; the last CTA to finish chooses
//   repair_kernel    long batches, 3 of 3: x again, from its end, which the cache still holds
//
// Started early, a kernel that follows another begins while that one runs, loads its x, and then waits for what the other
// writes. Nothing seems to clear a multiprocessor's own cache then: such a kernel clears it, and reads what it waited for past it.

#ifndef LOWBITRL_EMULATE
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <type_traits>
#define SHARED(type, name) extern __shared__ __align__(16) uint8_t shared_[]; type* name = reinterpret_cast<type*>(shared_)
#endif

namespace {

#ifndef LOWBITRL_EMULATE
__device__ __forceinline__ int lane_below(int v, int by) { return __shfl_up_sync(0xFFFFFFFF, v, by); }
template <class T> __device__ __forceinline__ T load_shared_by_grid(const T* p) { return __ldcg(p); }
__device__ __forceinline__ void publish() { __threadfence(); }
__device__ __forceinline__ void wait_for(int* counter, int all) {
    while (*reinterpret_cast<volatile int*>(counter) < all) {}
    __threadfence();
}
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void forget_cached() { __threadfence(); }
#endif

#include "nvfp4_block.h"
#include "select.h"

constexpr int RUN = 16;        // rows whose squares are added one after the other
constexpr int MAX_WARPS = 32;

struct Problem {
    const uint16_t* x;     // (rows, K), rows x_stride apart
    uint16_t* out;         // (rows, K)
    const uint8_t* real;   // (rows) or null: which rows count in the scores
    float* globals;        // (4, rows): S and 1 / S of the first pass, of the second
    uint32_t* keys;        // (K) scores
    uint16_t* mask;        // (K / 16) chosen columns, a bit each
    float* partial;        // (runs, K)
    int* counter;
    int rows, blocks, count;
    int64_t x_stride;
    int early;             // whether kernels that follow others start while those run
};

__device__ __forceinline__ const uint16_t* block_at(const Problem& p, int row, int block) {
    return p.x + row * p.x_stride + block * BLOCK;
}

__device__ __forceinline__ bool counts(const Problem& p, int row) { return row < p.rows && (!p.real || p.real[row]); }

__device__ __forceinline__ void store_globals(const Problem& p, int row, Globals one, Globals two) {
    p.globals[row] = one.encode, p.globals[p.rows + row] = one.decode;
    p.globals[2 * p.rows + row] = two.encode, p.globals[3 * p.rows + row] = two.decode;
}

__device__ __forceinline__ Globals globals_at(const Problem& p, int pass, int row) {
    const float* at = p.globals + 2 * pass * p.rows + row;
    return {load_shared_by_grid(at), load_shared_by_grid(at + p.rows)};
}

// The keys of all columns, from the CTAs that scored them into shared memory.
__device__ __forceinline__ void gather_keys(const Problem& p, uint32_t* keys) {
    for (int c = threadIdx.x; c < p.blocks * BLOCK / 4; c += blockDim.x)
        reinterpret_cast<uint4*>(keys)[c] = load_shared_by_grid(reinterpret_cast<const uint4*>(p.keys) + c);
    __syncthreads();
}

// With SELECT first passes wait in shared memory while bins are counted.
template <int THREADS, bool SELECT> __global__ void __launch_bounds__(THREADS) token_kernel(Problem p) {
    SHARED(Tally, tally);
    float4* kept = reinterpret_cast<float4*>(tally + 1) + threadIdx.x;
    const int row = blockIdx.x, block = threadIdx.x;
    const bool inside = block < p.blocks;
    const Packed x = load_block(block_at(p, row, block), inside);
    uint32_t peak = peak_of(x);
    const Globals one = globals_of(block_max(peak, tally->peaks[0]));
    float first[BLOCK], error[BLOCK], out[BLOCK];
    unpack(x, error);
    quantize_block(error, step_of(peak, one), first);
    subtract(first, error, error);
    peak = peak_of(error);
    const uint32_t best = block_max(peak, tally->peaks[1]);
    Cut cut = {0, LAST_INDEX};
    if (SELECT) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            kept[i * blockDim.x] = make_float4(first[4 * i], first[4 * i + 1], first[4 * i + 2], first[4 * i + 3]);
        const uint32_t high = min(best, NAN_KEY);
        cut = find_cut(*tally, high > OCTAVES ? high - OCTAVES : 0, high, p.count, [&](auto f) {
            if (!inside) return;
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) f(score_key(error[i]), block * BLOCK + i);
        });
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 v = kept[i * blockDim.x];
            first[4 * i] = v.x, first[4 * i + 1] = v.y, first[4 * i + 2] = v.z, first[4 * i + 3] = v.w;
        }
    }
    quantize_block(error, step_of(peak, globals_of(best)), out);
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        const bool taken = !SELECT || cut.takes(score_key(error[i]), block * BLOCK + i);
        out[i] = __fsub_rn(first[i], taken ? out[i] : 0.0f);
    }
    if (inside) store_block(p.out + (int64_t(row) * p.blocks + block) * BLOCK, out);
}

__global__ void __launch_bounds__(1024) row_kernel(Problem p) {
    SHARED(Tally, tally);
    const int row = blockIdx.x, block = threadIdx.x;
    let_next_start();
    const Packed packed = load_block(block_at(p, row, block), block < p.blocks);
    const uint32_t peak = peak_of(packed);
    const Globals one = globals_of(block_max(peak, tally->peaks[0]));
    float x[BLOCK], first[BLOCK];
    unpack(packed, x);
    quantize_block(x, step_of(peak, one), first);
    subtract(first, x, x);
    const Globals two = globals_of(block_max(peak_of(x), tally->peaks[1]));
    if (threadIdx.x == 0) store_globals(p, row, one, two);
    if (row == 0 && threadIdx.x == 0) *p.counter = 0;
}

// slab * (rows a step) threads at least; PER steps. phase: 1 scores, 2 repair, 3 both, with a barrier over the grid.
template <int PER, int THREADS>
__global__ void __launch_bounds__(THREADS) slab_kernel(Problem p, int slab, int runs, int phase) {
    SHARED(Tally, tally);
    float* squares = reinterpret_cast<float*>(tally + 1);
    const int columns = slab * BLOCK, step = blockDim.x / slab;
    const int block = blockIdx.x * slab + threadIdx.x % slab;
    if (p.early) forget_cached();
    Packed x[PER];
#pragma unroll
    for (int j = 0; j < PER; ++j) {
        const int row = j * step + threadIdx.x / slab;
        x[j] = load_block(block_at(p, row, block), row < p.rows && block < p.blocks);
    }
    wait_for_previous();
    if (phase & 1) {
#pragma unroll
        for (int j = 0; j < PER; ++j) {
            const int row = j * step + threadIdx.x / slab;
            float exact[BLOCK], first[BLOCK];
            unpack(x[j], exact);
            const Globals one = row < p.rows ? globals_at(p, 0, row) : Globals{1.0f, 1.0f};
            quantize_block(exact, step_of(peak_of(x[j]), one), first);
            subtract(first, exact, exact);
            const bool real = counts(p, row);
            float4* at = reinterpret_cast<float4*>(squares + row * columns + threadIdx.x % slab * BLOCK);
            auto squared = [&](int i) { return real ? __fmul_rn(exact[i], exact[i]) : 0.0f; };
            if (row < runs * RUN)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    at[i] = make_float4(squared(4 * i), squared(4 * i + 1), squared(4 * i + 2), squared(4 * i + 3));
        }
        __syncthreads();
        // Rows of a run in order, into the run's first row; then runs in halves.
        for (int t = threadIdx.x; t < columns * runs; t += blockDim.x) {
            float* own = squares + t / columns * RUN * columns + t % columns;
            float sum = own[0];
#pragma unroll
            for (int i = 1; i < RUN; ++i) sum = __fadd_rn(sum, own[i * columns]);
            own[0] = sum;
        }
        for (int half = runs / 2; half; half /= 2) {
            __syncthreads();
            for (int t = threadIdx.x; t < columns * half; t += blockDim.x) {
                float* own = squares + t / columns * RUN * columns + t % columns;
                own[0] = __fadd_rn(own[0], own[half * RUN * columns]);
            }
        }
        __syncthreads();
        for (int c = threadIdx.x; c < columns; c += blockDim.x)
            if (blockIdx.x * columns + c < p.blocks * BLOCK)
                p.keys[blockIdx.x * columns + c] = score_key(__fsqrt_rn(squares[c]));
    }
    if (phase == 3) {
        publish();
        __syncthreads();
        if (threadIdx.x == 0) {
            atomicAdd(p.counter, 1);
            wait_for(p.counter, gridDim.x);
        }
        __syncthreads();
    }
    if (!(phase & 2)) return;
    uint32_t* keys = reinterpret_cast<uint32_t*>(squares);
    gather_keys(p, keys);
    const Cut cut = cut_of(*tally, keys, p.blocks * BLOCK, p.count);
    const uint32_t mask = block < p.blocks ? mask_of(keys, block, cut) : 0;
#pragma unroll
    for (int j = 0; j < PER; ++j) {
        const int row = j * step + threadIdx.x / slab;
        const bool there = row < p.rows && block < p.blocks;
        const Globals none = {1.0f, 1.0f};
        float out[BLOCK];
        repair_block(x[j], there ? globals_at(p, 0, row) : none, there ? globals_at(p, 1, row) : none, mask, out);
        if (there) store_block(p.out + (int64_t(row) * p.blocks + block) * BLOCK, out);
    }
}

// The next BATCH rows are on their way while as many are worked on.
template <int BATCH, int THREADS, int CTAS>
__global__ void __launch_bounds__(THREADS, CTAS) scores_kernel(Problem p, int runs) {
    struct Peaks {
        uint32_t of[2][RUN][MAX_WARPS];
    };
    SHARED(Peaks, two_peaks);
    const int block = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    Packed next[BATCH];
    const auto fetch = [&](int row) {
#pragma unroll
        for (int r = 0; r < BATCH; ++r)
            next[r] = load_block(block_at(p, row + r, block), block < p.blocks && row + r < p.rows);
    };
    let_next_start();
    fetch(blockIdx.x * RUN);
    for (int run = blockIdx.x, turn = 0; run < runs; run += gridDim.x, turn ^= 1) {
        Peaks* peaks = two_peaks + turn;  // the other's may still be read
        const auto row_peak = [&](int pass, int row) {
            uint32_t best = 0;
            for (int w = 0; w < warps; ++w) best = max(best, peaks->of[pass][row][w]);
            return best;
        };
        float sums[BLOCK] = {};
#pragma unroll 1
        for (int begin = 0; begin < RUN; begin += BATCH) {
            const int row = run * RUN + begin;
            Packed x[BATCH];
            uint32_t peak[BATCH], own = 0;
#pragma unroll
            for (int r = 0; r < BATCH; ++r) x[r] = next[r];
            fetch(begin + BATCH < RUN ? row + BATCH : (run + gridDim.x) * RUN);
#pragma unroll
            for (int r = 0; r < BATCH; ++r) {
                peak[r] = peak_of(x[r]);
                const uint32_t best = warp_max(peak[r]);
                if (lane == r) own = best;
            }
            if (lane < BATCH) peaks->of[0][begin + lane][warp] = own;
            __syncthreads();
            const Globals lanes = globals_of(row_peak(0, begin + lane % BATCH));
            Step step[BATCH];
            bool plain = true;
#pragma unroll
            for (int r = 0; r < BATCH; ++r) {
                step[r] = step_of(peak[r], {lane_value(lanes.encode, r), lane_value(lanes.decode, r)});
                plain = plain && step[r].plain;
            }
            // One vote for all rows: without branches between them they overlap.
            const auto score = [&](auto is_plain) {
#pragma unroll
                for (int r = 0; r < BATCH; ++r) {
                    float exact[BLOCK], first[BLOCK];
                    unpack(x[r], exact);
                    quantize_as<decltype(is_plain)::value>(exact, step[r], first);
                    subtract(first, exact, exact);
                    const uint32_t best = warp_max(peak_of(exact));
                    if (lane == r) own = best;
                    const bool real = counts(p, row + r);
#pragma unroll
                    for (int i = 0; i < BLOCK; ++i)
                        sums[i] = __fadd_rn(sums[i], real ? __fmul_rn(exact[i], exact[i]) : 0.0f);
                }
            };
            if (warp_all(plain)) score(std::true_type());
            else score(std::false_type());
            if (lane < BATCH) peaks->of[1][begin + lane][warp] = own;
        }
        __syncthreads();
        const int row = run * RUN + threadIdx.x;
        if (threadIdx.x < RUN && row < p.rows)
            store_globals(p, row, globals_of(row_peak(0, threadIdx.x)), globals_of(row_peak(1, threadIdx.x)));
        if (run == 0 && threadIdx.x == 0) *p.counter = 0;
        float4* at = reinterpret_cast<float4*>(p.partial + (int64_t(run) * p.blocks + block) * BLOCK);
        if (block < p.blocks)
#pragma unroll
            for (int i = 0; i < 4; ++i) at[i] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
}

// `columns` columns a CTA; runs a power of two, those from `there` on are zeros. Shared: runs / 4 * columns sums, or K keys.
__global__ void __launch_bounds__(512) choose_kernel(Problem p, int columns, int runs, int there) {
    SHARED(Tally, tally);
    float* sums = reinterpret_cast<float*>(tally + 1);
    const int width = p.blocks * BLOCK, first = blockIdx.x * columns, quarter = max(1, runs / 4);
    wait_for_previous();
    let_next_start();
    for (int t = threadIdx.x; t < quarter * columns; t += blockDim.x) {
        const int run = t / columns, column = first + t % columns;
        const auto at = [&](int r) { return r < there && r < runs ? load_shared_by_grid(p.partial + int64_t(r) * width + column) : 0.0f; };
        // Two foldings while loading; a sum with the zeros past the end changes nothing.
        sums[t] = __fadd_rn(__fadd_rn(at(run), at(run + 2 * quarter)), __fadd_rn(at(run + quarter), at(run + 3 * quarter)));
    }
    for (int half = quarter / 2; half; half /= 2) {
        __syncthreads();
        for (int t = threadIdx.x; t < half * columns; t += blockDim.x) sums[t] = __fadd_rn(sums[t], sums[t + half * columns]);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < columns; c += blockDim.x) p.keys[first + c] = score_key(__fsqrt_rn(sums[c]));
    publish();
    __syncthreads();
    if (threadIdx.x == 0) tally->bin = atomicAdd(p.counter, 1);
    __syncthreads();
    if (tally->bin != gridDim.x - 1) return;
    publish();
    uint32_t* keys = reinterpret_cast<uint32_t*>(sums);
    gather_keys(p, keys);
    const Cut cut = cut_of(*tally, keys, width, p.count);
    for (int b = threadIdx.x; b < p.blocks; b += blockDim.x) p.mask[b] = mask_of(keys, b, cut);
}

__global__ void __launch_bounds__(256, 4) repair_kernel(Problem p) {
    constexpr int ROWS = 2;
    const int block = blockIdx.x * blockDim.x + threadIdx.x, from = (gridDim.y - 1 - blockIdx.y) * ROWS;
    const bool inside = block < p.blocks;
    if (p.early) forget_cached();
    Packed x[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) x[r] = load_block(block_at(p, from + r, block), inside && from + r < p.rows);
    wait_for_previous();
    const uint32_t mask = inside ? load_shared_by_grid(p.mask + block) : 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = min(from + r, p.rows - 1);
        float out[BLOCK];
        repair_block(x[r], globals_at(p, 0, row), globals_at(p, 1, row), mask, out);
        if (inside && from + r < p.rows) store_block(p.out + (int64_t(row) * p.blocks + block) * BLOCK, out);
    }
}

}  // namespace

#ifndef LOWBITRL_EMULATE
namespace {

struct How {
    dim3 grid;
    int threads, shared;
    bool early;  // may start before the kernel before it is done
    cudaStream_t stream;
};

template <class... A, class... B> int start(void (*kernel)(A...), How how, B... arguments) {
    if (how.shared > 48 << 10)
        if (auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared)) return error;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = how.grid, config.blockDim = how.threads, config.dynamicSmemBytes = how.shared, config.stream = how.stream;
    config.attrs = &early, config.numAttrs = how.early;
    return cudaLaunchKernelEx(&config, kernel, A(arguments)...);
}

}  // namespace

extern "C" int lowbitrl_residual(int kernel, int variant, int grid_x, int grid_y, int threads, int shared, int a, int b, int c,
                                 const void* x, void* out, const void* real, void* globals, void* keys, void* mask,
                                 void* partial, void* counter, int rows, int blocks, int count, int64_t x_stride, int early, void* stream) {
    const Problem p = {(const uint16_t*)x, (uint16_t*)out, (const uint8_t*)real, (float*)globals, (uint32_t*)keys,
                       (uint16_t*)mask, (float*)partial, (int*)counter, rows, blocks, count, x_stride, early};
    const bool follows = kernel == 2 || kernel == 4 || kernel == 5;
    const How how = {dim3(grid_x, grid_y), threads, shared, early && follows, (cudaStream_t)stream};
    const auto is = [&](int k, int v) { return kernel == k && variant == v; };
#define TOKEN(T) \
    if (kernel == 0 && threads <= T) return a ? start(token_kernel<T, true>, how, p) : start(token_kernel<T, false>, how, p);
    TOKEN(256) TOKEN(1024)
    if (kernel == 1) return start(row_kernel, how, p);
    if (is(2, 1)) return start(slab_kernel<1, 1024>, how, p, a, b, c);
    if (is(2, 2)) return start(slab_kernel<2, 1024>, how, p, a, b, c);
    if (is(3, 4) && threads <= 128) return start(scores_kernel<4, 128, 4>, how, p, a);
    if (is(3, 4)) return start(scores_kernel<4, 512, 1>, how, p, a);
    if (is(3, 1)) return start(scores_kernel<1, 1024, 1>, how, p, a);
    if (kernel == 4) return start(choose_kernel, how, p, a, b, c);
    if (kernel == 5) return start(repair_kernel, how, p);
    return -1;
}
#endif
