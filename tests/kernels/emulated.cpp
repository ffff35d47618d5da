#define LOWBITRL_GROUPS
#include "emulate.h"
#include "w4a16.cu"

template <Format F, int TILES, int ROWS, int WARPS, int STAGES, bool GROUP, int SHARES>
static void launch(const Problem& p, int token_blocks, int splits, int phase, int overlap) {
    constexpr int HEIGHT = WARPS / SHARES * ROWS * 16;
    const int chunks = (p.k + CHUNK - 1) / CHUNK, share = (chunks + splits - 1) / splits;
    phase = GROUP ? 2 : std::min(phase, share);
    const size_t bytes = std::max<size_t>(size_t(phase) * CHUNK * TILES * 16, size_t(SHARES) * TILES * 8 * (HEIGHT + 4) * 4) + TILES * 64;
    const unsigned tiles = (p.n + HEIGHT - 1) / HEIGHT;
    const dim3 grid = {tiles * splits, unsigned(token_blocks)};
    for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; x += splits)
            run_cluster(WARPS * 32, splits, bytes, {x, y}, grid,
                        [&] { w4a16_kernel<F, TILES, ROWS, WARPS, STAGES, GROUP, SHARES>(p, splits, phase, overlap); });
}

extern "C" int lowbitrl_w4a16(int format, const void* x, const void* codes, const void* scale,
                              const void* global_scale, const void* token_scale, const void* bias, void* out,
                              const void* slots, const void* experts, int m, int n, int k, int group, int x_stride,
                              int slots_per_row, int token_blocks, int tiles, int rows, int warps, int stages,
                              int warp_groups, int shares, int splits, int phase, int overlap, void*) {
    const Problem p = {(const uint16_t*)x, (const uint8_t*)codes, (const uint8_t*)scale, (const float*)global_scale,
                       (const float*)token_scale, (const uint16_t*)bias, (uint16_t*)out, (const int*)slots,
                       (const int*)experts, m, n, k, group, x_stride, slots_per_row};
#define VARIANT(T, R, W, S, G, K)                                                             \
    if (tiles == T && rows == R && warps == W && stages == S && warp_groups == G && shares == K) { \
        if (format == 0) launch<NVFP4, T, R, W, S, G, K>(p, token_blocks, splits, phase, overlap);        \
        else launch<INT4, T, R, W, S, G, K>(p, token_blocks, splits, phase, overlap);                     \
        return 0;                                                                             \
    }
#include "w4a16_variants.h"
    return -1;
}

extern "C" int lowbitrl_moe_align(const void* ids, int total, int experts, int block, int blocks, void* slots,
                                  void* block_expert, void*) {
    run_cluster(64, 1, experts * 12, {}, {}, [&] {
        moe_align_kernel((const int*)ids, total, experts, block, blocks, (int*)slots, (int*)block_expert);
    });
    return 0;
}

extern "C" int lowbitrl_gate(const void* up, void* out, int rows, int n, void*) {
    const unsigned blocks = (rows * (n / 8) + 31) / 32;
    for (unsigned b = 0; b < blocks; ++b)
        run_cluster(32, 1, 16, {b}, {blocks}, [&] { gate_kernel((const uint16_t*)up, (uint16_t*)out, rows, n); });
    return 0;
}

extern "C" int lowbitrl_weighted_sum(const void* y, const void* weights, void* out, int tokens, int choices, int n, void*) {
    const unsigned blocks = (tokens * (n / 8) + 31) / 32;
    for (unsigned b = 0; b < blocks; ++b)
        run_cluster(32, 1, 16, {b}, {blocks}, [&] {
            weighted_sum_kernel((const uint16_t*)y, (const uint16_t*)weights, (uint16_t*)out, tokens, choices, n);
        });
    return 0;
}
