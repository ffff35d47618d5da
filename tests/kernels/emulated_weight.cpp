#include "emulate_warp.h"
struct uint2 { uint32_t x, y; };
inline uint4 load_once(const uint4* p) { return *p; }
template <class T> inline void store_once(T* p, T v) { *p = v; }
inline void wait_for(int* c, int all) { while (__atomic_load_n(c, __ATOMIC_SEQ_CST) < all) std::this_thread::yield(); }
inline void publish() {}
inline uint32_t load_shared_by_grid(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
inline void atomicMax(uint32_t* p, uint32_t v) { uint32_t o = *p; while (o < v && !__atomic_compare_exchange_n(p, &o, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {} }
#include "weight.cu"
extern "C" int lowbitrl_weight(int floor, int grid, int shared, const void* x, void* out, void* codes, void* scales, void* peaks,
                               void* counters, int64_t blocks, int parts, int group, int kept, int64_t cached, void*) {
    const Weights w = {(const uint4*)x, (uint4*)out, (uint2*)codes, (uint8_t*)scales, (uint32_t*)peaks, (int*)counters,
                       blocks, parts, group, kept, cached};
    const dim3 g = {unsigned(grid)};
    for (unsigned b = 0; b < unsigned(grid); b += group)
        run_cluster(THREADS, group, shared, {b, 0}, g, [&] { floor ? weight_kernel<true>(w) : weight_kernel<false>(w); });
    return 0;
}
