// The `count` largest of a block of threads' keys, by counting keys in ever narrower bins: exact, ties by index.
#pragma once

constexpr int BINS = 256, BIN_BITS = 8;
constexpr uint32_t NAN_KEY = 0x7F800001;   // every NaN is this one key, above the rest
constexpr uint32_t OCTAVES = 8u << 23;     // keys further below the largest than this wait for a second look
constexpr int LAST_INDEX = 0xFFFF;

struct Cut {
    uint32_t key;
    int index;
    __device__ bool takes(uint32_t k, int i) const { return k > key || (k == key && i <= index); }
};

struct alignas(16) Tally {
    uint32_t bins[BINS];
    int bin, above, inside;
    uint32_t peaks[2][32];
};

__device__ __forceinline__ uint32_t score_key(float v) { return min(__float_as_uint(v) & MAGNITUDE, NAN_KEY); }

__device__ __forceinline__ int shift_for(uint32_t span) { return max(0, 32 - BIN_BITS - __clz(span)); }

// One warp looks for the bin that holds the wanted-th largest; -1 and how many there are if they are too few.
__device__ __forceinline__ void find_bin(Tally& t, int wanted) {
    constexpr int EACH = BINS / 32;
    const int lane = threadIdx.x, top = BINS - 1 - lane * EACH;
    int own = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) own += t.bins[top - i];
    int upto = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int lower = lane_below(upto, d);
        if (lane >= d) upto += lower;
    }
    int above = upto - own;
    if (lane == 31 && upto < wanted) t.bin = -1, t.above = upto;
    if (above < wanted && upto >= wanted)
        for (int i = 0; i < EACH; ++i) {
            const int inside = t.bins[top - i];
            if (above + inside >= wanted) {
                t.bin = top - i, t.above = above, t.inside = inside;
                break;
            }
            above += inside;
        }
}

struct Descent {
    uint32_t key;
    int wanted, inside;  // of `inside` keys equal to or above `key` within its bin, `wanted` are wanted
};

// each(f) calls f(key, index) for a thread's own keys. Keys lie in [0, high], at least `wanted` of them.
template <class Each> __device__ Descent descend(Tally& t, uint32_t low, uint32_t high, int wanted, Each each) {
    uint32_t base = low, ceiling = high;
    int shift = shift_for(ceiling - base);
    while (true) {
        for (int i = threadIdx.x; i < BINS; i += blockDim.x) t.bins[i] = 0;
        __syncthreads();
        each([&](uint32_t key, int) {
            if (key - base <= ceiling - base) atomicAdd(&t.bins[(key - base) >> shift], 1u);
        });
        __syncthreads();
        if (threadIdx.x < 32) find_bin(t, wanted);
        __syncthreads();
        const int bin = t.bin;
        wanted -= t.above;
        if (bin < 0) {
            ceiling = base - 1, base = 0, shift = shift_for(ceiling);
            continue;
        }
        base += uint32_t(bin) << shift;
        ceiling = min(ceiling, base + (1u << shift) - 1);
        if (t.inside == wanted || !shift) return {base, wanted, t.inside};
        shift = max(0, shift - BIN_BITS);
    }
}

template <class Each> __device__ Cut find_cut(Tally& t, uint32_t low, uint32_t high, int count, Each each) {
    const Descent found = descend(t, low, high, count, each);
    if (found.inside == found.wanted) return {found.key, LAST_INDEX};
    const Descent tie = descend(t, 0, LAST_INDEX, found.wanted, [&](auto f) {
        each([&](uint32_t key, int index) {
            if (key == found.key) f(uint32_t(LAST_INDEX - index), index);
        });
    });
    return {found.key, LAST_INDEX - int(tie.key)};
}

// The largest over all threads, and with LEAST the smallest too; every thread gets them. Uses barriers.
__device__ __forceinline__ uint32_t block_max(uint32_t v, uint32_t* peaks) {
    v = warp_max(v);
    if (blockDim.x == 32) return v;
    if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = v;
    __syncthreads();
    for (int w = 0; w < blockDim.x / 32; ++w) v = max(v, peaks[w]);
    return v;
}

// The cut among `width` keys in memory that all threads see.
__device__ __forceinline__ Cut cut_of(Tally& t, const uint32_t* keys, int width, int count) {
    uint32_t high = 0, low = MAGNITUDE;
    for (int c = threadIdx.x; c < width; c += blockDim.x) high = max(high, keys[c]), low = min(low, keys[c]);
    high = block_max(high, t.peaks[0]);
    low = MAGNITUDE - block_max(MAGNITUDE - low, t.peaks[1]);
    low = max(low, high > OCTAVES ? high - OCTAVES : 0u);
    return find_cut(t, low, high, count, [&](auto f) {
        for (int c = threadIdx.x; c < width; c += blockDim.x) f(keys[c], c);
    });
}

__device__ __forceinline__ uint32_t mask_of(const uint32_t* keys, int block, Cut cut) {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) mask |= uint32_t(cut.takes(keys[block * BLOCK + i], block * BLOCK + i)) << i;
    return mask;
}
