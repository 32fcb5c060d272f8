// Rows of a CSC filtered edge by edge: how many edges of each row pass, and those that pass, in order.
//
// A warp has a row; rows longer than kHeavy are left to the whole block once its warps are done, so one giant row costs
// its block degree / kFilterThreads steps and nobody else waits. Bytes: what the filter reads, once per pass.
//
// A Filter has: num_rows; `row(i, &begin, &end)`; `keep(i, p)`, whether edge p of row i passes; and `quantity(i, p)`, an
// amount of every edge that passes, whose largest (`heaviest`) is found while counting.
#pragma once

#include "cuda/scan.cuh"

namespace gnnsys::cuda {

constexpr int kFilterThreads = 256;
constexpr int kFilterWarps = kFilterThreads / kWarp;
constexpr int64_t kHeavy = 2048;

// The rows of a block: its warps' own and the heavy ones among them.
struct BlockRows {
  int64_t begin[kFilterWarps];
  int64_t end[kFilterWarps];
};

__device__ inline double warp_max(double value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = fmax(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// Calls body(i, begin, end, std::integral_constant threads) with a warp, or for heavy rows a block, for each row.
template <typename Filter, typename ByWarp, typename ByBlock>
__device__ void for_rows(const Filter& filter, const ByWarp& by_warp, const ByBlock& by_block) {
  __shared__ BlockRows rows;
  const int warp = threadIdx.x / kWarp;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kFilterWarps;
  const int64_t i = first + warp;
  int64_t begin = 0;
  int64_t end = 0;
  if (i < filter.num_rows) {
    filter.row(i, &begin, &end);
    if (end - begin <= kHeavy) {
      by_warp(i, begin, end);
    }
  }
  if (threadIdx.x % kWarp == 0) {
    rows.begin[warp] = begin;
    rows.end[warp] = end;
  }
  __syncthreads();
  for (int w = 0; w < kFilterWarps; ++w) {
    if (rows.end[w] - rows.begin[w] > kHeavy) {
      by_block(first + w, rows.begin[w], rows.end[w]);
    }
  }
}

// counts[i] of the edges that pass, and with `heaviest` not null their largest quantity (0 when there is none).
template <typename Filter>
__global__ void __launch_bounds__(kFilterThreads) count_rows(Filter filter, int64_t* counts, double* heaviest) {
  __shared__ int64_t block_counts[kFilterWarps];
  __shared__ double block_heaviest[kFilterWarps];
  const int lane = threadIdx.x % kWarp;
  const auto tally = [&](int64_t i, int64_t begin, int64_t end, int first, int step, int64_t* count, double* largest) {
    for (int64_t p = begin + first; p < end; p += step) {
      if (filter.keep(i, p)) {
        *count += 1;
        if (heaviest) {
          *largest = fmax(*largest, filter.quantity(i, p));
        }
      }
    }
    *count = warp_sum(*count);
    *largest = warp_max(*largest);
  };
  const auto write = [&](int64_t i, int64_t count, double largest) {
    counts[i] = count;
    if (heaviest) {
      heaviest[i] = largest;
    }
  };
  for_rows(
      filter,
      [&](int64_t i, int64_t begin, int64_t end) {
        int64_t count = 0;
        double largest = 0;
        tally(i, begin, end, lane, kWarp, &count, &largest);
        if (lane == 0) {
          write(i, count, largest);
        }
      },
      [&](int64_t i, int64_t begin, int64_t end) {
        int64_t count = 0;
        double largest = 0;
        tally(i, begin, end, threadIdx.x, kFilterThreads, &count, &largest);
        if (lane == 0) {
          block_counts[threadIdx.x / kWarp] = count;
          block_heaviest[threadIdx.x / kWarp] = largest;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
          for (int w = 1; w < kFilterWarps; ++w) {
            count += block_counts[w];
            largest = fmax(largest, block_heaviest[w]);
          }
          write(i, count, largest);
        }
        __syncthreads();
      });
}

// emit(i, p, slot, sum) for every edge p that passes: slot = starts[i] + how many pass before it; with Filter::kSums, sum
// is the total of `weight(i, p)`, an integer, over the row up to and including it.
template <typename Filter, typename Emit>
__global__ void __launch_bounds__(kFilterThreads) collect_rows(Filter filter, const int64_t* starts, Emit emit) {
  const int lane = threadIdx.x % kWarp;
  for_rows(
      filter,
      [&](int64_t i, int64_t begin, int64_t end) {
        int64_t slot = starts[i];
        int64_t sum = 0;
        for (int64_t base = begin; base < end; base += kWarp) {
          const int64_t p = base + lane;
          const bool keep = p < end && filter.keep(i, p);
          const unsigned kept = __ballot_sync(kAllLanes, keep);
          int64_t mine = 0;
          if constexpr (Filter::kSums) {
            mine = sum + warp_inclusive_sum(keep ? filter.weight(i, p) : int64_t{0});
            sum = __shfl_sync(kAllLanes, mine, kWarp - 1);
          }
          if (keep) {
            emit(i, p, slot + __popc(kept & ((1u << lane) - 1)), mine);
          }
          slot += __popc(kept);
        }
      },
      [&](int64_t i, int64_t begin, int64_t end) {
        int64_t slot = starts[i];
        int64_t sum = 0;
        for (int64_t base = begin; base < end; base += kFilterThreads) {
          const int64_t p = base + threadIdx.x;
          const bool keep = p < end && filter.keep(i, p);
          int kept;
          const int before = block_exclusive_sum<kFilterThreads>(static_cast<int>(keep), &kept);
          int64_t mine = 0;
          if constexpr (Filter::kSums) {
            const int64_t weight = keep ? filter.weight(i, p) : int64_t{0};
            int64_t total;
            mine = sum + block_exclusive_sum<kFilterThreads>(weight, &total) + weight;
            sum += total;
          }
          if (keep) {
            emit(i, p, slot + before, mine);
          }
          slot += kept;
        }
      });
}

template <typename Filter>
void count_rows(const Device& device, const Filter& filter, int64_t* counts, double* heaviest) {
  count_rows<<<num_blocks(filter.num_rows, kFilterWarps), kFilterThreads, 0, device.stream()>>>(filter, counts,
                                                                                                heaviest);
  CUDA_CHECK_LAUNCH();
}

template <typename Filter, typename Emit>
void collect_rows(const Device& device, const Filter& filter, const int64_t* starts, const Emit& emit) {
  collect_rows<<<num_blocks(filter.num_rows, kFilterWarps), kFilterThreads, 0, device.stream()>>>(filter, starts, emit);
  CUDA_CHECK_LAUNCH();
}

}  // namespace gnnsys::cuda
