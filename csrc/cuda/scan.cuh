// Exclusive sums over a grid in one pass (Merrill and Garland's decoupled look-back): a kernel that makes counts can sum
// them in the same launch.
//
// A block takes a tile's number from a ticket, so tiles before its own have started and waiting for them ends. A tile's
// state is one 64-bit word, two bits of status over 62 of value: value and status are written and read together and no
// fence is needed. Sums are integers, so the result does not depend on who comes first.
//
// The words of a scan (ticket, then one per tile) start as all ones: cudaMemsetAsync(words, 0xFF, ...).
#pragma once

#include "cuda/device.h"

namespace gnnsys::cuda {

using word_t = unsigned long long;

constexpr word_t kNoFault = ~word_t{0};  // faults are told in such words too

constexpr word_t kTileStatus = word_t{3} << 62;
constexpr word_t kTileNothing = ~word_t{0};
constexpr word_t kTileSum = word_t{1} << 62;     // the value is the tile's own sum
constexpr word_t kTilePrefix = word_t{2} << 62;  // the value is the sum of all tiles up to this one

inline int64_t num_scan_words(int64_t num_tiles) { return 1 + num_tiles; }

// -- within a block: every thread takes part, and all may use the result at once --------------------------------------

template <typename T>
__device__ T warp_sum(T value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

template <typename T>
__device__ T warp_inclusive_sum(T value) {
  const int lane = threadIdx.x % kWarp;
  for (int step = 1; step < kWarp; step *= 2) {
    const T below = __shfl_up_sync(kAllLanes, value, step);
    value += lane >= step ? below : T{0};
  }
  return value;
}

// The sum over the threads before this one; *total over all of them.
template <int kThreads, typename T>
__device__ T block_exclusive_sum(T value, T* total) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp);
  __shared__ T sums[kWarps];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const T inclusive = warp_inclusive_sum(value);
  __syncthreads();  // sums of an earlier call have been read
  if (lane == kWarp - 1) {
    sums[warp] = inclusive;
  }
  __syncthreads();
  const T other = lane < kWarps ? sums[lane] : T{0};
  *total = warp_sum(other);
  return warp_sum(lane < warp ? other : T{0}) + inclusive - value;
}

// -- over the grid ----------------------------------------------------------------------------------------------------

// The block's tile; every thread takes part.
__device__ inline int64_t take_tile(word_t* words) {
  __shared__ int64_t tile;
  __syncthreads();
  if (threadIdx.x == 0) {
    tile = static_cast<int64_t>(atomicAdd(words, 1ull) + 1);  // starts as all ones
  }
  __syncthreads();
  return tile;
}

// The sum of the tiles before `tile`, whose own is `sum` (the same in all threads); every thread takes part. Values stay
// below 2^62.
__device__ inline int64_t sum_of_tiles_before(word_t* words, int64_t tile, int64_t sum) {
  __shared__ int64_t before;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    volatile word_t* const states = words + 1;
    const int lane = threadIdx.x;
    if (lane == 0 && tile > 0) {
      states[tile] = kTileSum | static_cast<word_t>(sum);
    }
    int64_t total = 0;
    bool done = tile == 0;
    for (int64_t nearest = tile - 1; !done; nearest -= kWarp) {
      word_t word = kTilePrefix;  // before the first tile: zero
      if (nearest - lane >= 0) {
        do {
          word = states[nearest - lane];
        } while (word == kTileNothing);
      }
      __syncwarp();
      const unsigned prefixes = __ballot_sync(kAllLanes, (word & kTileStatus) == kTilePrefix);
      done = prefixes != 0;
      const bool counts = !done || lane < __ffs(static_cast<int>(prefixes));
      total += warp_sum(counts ? static_cast<int64_t>(word & ~kTileStatus) : int64_t{0});
    }
    if (lane == 0) {
      states[tile] = kTilePrefix | static_cast<word_t>(total + sum);
      before = total;
    }
  }
  __syncthreads();
  return before;
}

// -- as a launch of its own ---------------------------------------------------------------------------------------------

constexpr int kScanThreads = 512;
constexpr int kScanItems = 4;  // per thread, side by side
constexpr int64_t kScanTile = kScanThreads * kScanItems;

// count(i) for i in [0, n) -> sums[0..n], exclusive, sums[n] the total. Work: n counts read, n + 1 sums written. `count`
// may read where sums are written (in place): a tile reads its own before it writes.
template <typename Count>
__global__ void __launch_bounds__(kScanThreads) exclusive_sum_kernel(int64_t n, Count count, int64_t* sums,
                                                                             int64_t* total_out, word_t* words) {
  const int64_t tile = take_tile(words);
  const int64_t first = tile * kScanTile + threadIdx.x * kScanItems;
  int64_t items[kScanItems];
  int64_t mine = 0;
  for (int j = 0; j < kScanItems; ++j) {
    items[j] = first + j < n ? static_cast<int64_t>(count(first + j)) : 0;
    mine += items[j];
  }
  int64_t total;
  int64_t sum = block_exclusive_sum<kScanThreads>(mine, &total);
  sum += sum_of_tiles_before(words, tile, total);
  for (int j = 0; j < kScanItems; ++j) {
    if (first + j <= n) {
      sums[first + j] = sum;
    }
    if (first + j == n && total_out) {
      *total_out = sum;
    }
    sum += items[j];
  }
}

template <typename T>
struct CountsAt {
  const T* counts;
  __device__ T operator()(int64_t i) const { return counts[i]; }
};

// Two launches (a clearing of the words, the sum); `count` is a copyable device function of an index. The total is also
// written to total_out where that is given: among what the host reads.
template <typename Count>
void exclusive_sum(const Device& device, int64_t n, const Count& count, int64_t* sums,
                   int64_t* total_out = nullptr) {
  const unsigned tiles = num_blocks(n + 1, kScanTile);
  const int64_t num_words = num_scan_words(tiles);
  const Tensor words = device.workspace<word_t>(num_words);
  CUDA_CHECK(cudaMemsetAsync(words.mutable_data_ptr(), 0xFF, num_words * sizeof(word_t), device.stream()));
  exclusive_sum_kernel<<<tiles, kScanThreads, 0, device.stream()>>>(n, count, sums, total_out,
                                                                            mutable_data<word_t>(words));
  CUDA_CHECK_LAUNCH();
}

}  // namespace gnnsys::cuda
