#include "emulate_warp.h"

template <class T> inline T load_shared_by_grid(const T* p) { return *p; }
inline void publish() {}
inline void wait_for(int*, int) {}
inline void let_next_start() {}
inline void wait_for_previous() {}
inline void forget_cached() {}

#include "residual.cu"

template <class F> static int launch(int grid_x, int grid_y, int threads, int shared, F body) {
    const dim3 grid = {unsigned(grid_x), unsigned(grid_y)};
    for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) run_cluster(threads, 1, shared, {x, y}, grid, body);
    return 0;
}

extern "C" int lowbitrl_residual(int kernel, int variant, int grid_x, int grid_y, int threads, int shared, int a, int b, int c,
                                 const void* x, void* out, const void* real, void* globals, void* keys, void* mask,
                                 void* partial, void* counter, int rows, int blocks, int count, int64_t x_stride, int early, void*) {
    const Problem p = {(const uint16_t*)x, (uint16_t*)out, (const uint8_t*)real, (float*)globals, (uint32_t*)keys,
                       (uint16_t*)mask, (float*)partial, (int*)counter, rows, blocks, count, x_stride, early};
    const auto start = [&](auto body) { return launch(grid_x, grid_y, threads, shared, body); };
    const auto is = [&](int k, int v) { return kernel == k && variant == v; };
    if (kernel == 0) return a ? start([&] { token_kernel<1024, true>(p); }) : start([&] { token_kernel<1024, false>(p); });
    if (kernel == 1) return start([&] { row_kernel(p); });
    // CTAs run one after the other: none could wait for the next, so scores and repair are two rounds.
    if (is(2, 1)) return start([&] { slab_kernel<1, 1024>(p, a, b, 1); }) || start([&] { slab_kernel<1, 1024>(p, a, b, 2); });
    if (is(2, 2)) return start([&] { slab_kernel<2, 1024>(p, a, b, 1); }) || start([&] { slab_kernel<2, 1024>(p, a, b, 2); });
    if (is(3, 4)) return start([&] { scores_kernel<4, 512, 1>(p, a); });
    if (is(3, 1)) return start([&] { scores_kernel<1, 1024, 1>(p, a); });
    if (kernel == 4) return start([&] { choose_kernel(p, a, b, c); });
    if (kernel == 5) return start([&] { repair_kernel(p); });
    return -1;
}
