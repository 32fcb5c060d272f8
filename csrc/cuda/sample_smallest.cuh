// Weighted sampling of up to 32 without replacement: each seed's k smallest keys, found in one pass over its row.
//
// A warp keeps the 32 smallest (key, rank) pairs it has seen, one per lane, ascending. 32 more edges are sorted and
// merged in only if one of them is smaller than the k-th, which after the first few steps is rare: of a row's degree d,
// about k ln(d / k) edges ever get in. Work: one weight read and one key made per edge; nothing written but the sample.
#pragma once

#include "cuda/choose.cuh"
#include "cuda/sample_filter.cuh"

namespace gnnsys::cuda {

// A key, as the bits of a double that is not negative (they order like the double), and an edge's place in its row.
struct Keyed {
  word_t key;
  uint32_t rank;

  __device__ bool operator<(const Keyed& other) const {
    return key < other.key || (key == other.key && rank < other.rank);
  }
};

constexpr uint32_t kNoRank = 0xFFFFFFFFu;

__device__ inline Keyed from_lane(const Keyed& mine, int lane) {
  return {__shfl_sync(kAllLanes, mine.key, lane), __shfl_sync(kAllLanes, mine.rank, lane)};
}

// Keeps the smaller of two lanes' pairs, or the larger.
__device__ inline Keyed compare_with(const Keyed& mine, int partner, bool smaller) {
  const Keyed other = from_lane(mine, partner);
  return (other < mine) == smaller ? other : mine;
}

__device__ inline Keyed sort_lanes(Keyed mine) {
  const int lane = threadIdx.x % kWarp;
  for (int width = 2; width <= kWarp; width *= 2) {
    for (int step = width / 2; step > 0; step /= 2) {
      const bool up = (lane & width) == 0;
      mine = compare_with(mine, lane ^ step, ((lane & step) == 0) == up);
    }
  }
  return mine;
}

// The 32 smallest of two ascending lists, ascending: against the second list reversed, the smaller ones are bitonic.
__device__ inline Keyed merge_lanes(const Keyed& mine, const Keyed& sorted) {
  const int lane = threadIdx.x % kWarp;
  const Keyed other = from_lane(sorted, kWarp - 1 - lane);
  Keyed best = other < mine ? other : mine;
  for (int step = kWarp / 2; step > 0; step /= 2) {
    best = compare_with(best, lane ^ step, (lane & step) == 0);
  }
  return best;
}

// The smallest pairs of edges first, first + step, ... of a row, 32 at a time; k of them matter. Filter as in
// sample_filter.cuh, with `key(stream, begin, p)`.
template <typename Filter>
__device__ Keyed smallest_of(const Filter& filter, const Stream& stream, int64_t i, int64_t begin, int64_t end,
                             int64_t first, int64_t step, int k) {
  const int lane = threadIdx.x % kWarp;
  Keyed best{kNoKey, kNoRank};
  Keyed limit = best;
  for (int64_t base = begin + first; base < end; base += step) {
    const int64_t p = base + lane;
    Keyed fresh{kNoKey, kNoRank};
    if (p < end && filter.keep(i, p)) {
      fresh = {filter.key(stream, begin, p), static_cast<uint32_t>(p - begin)};
    }
    if (__any_sync(kAllLanes, fresh < limit)) {
      best = merge_lanes(best, sort_lanes(fresh));
      limit = from_lane(best, k - 1);
    }
  }
  return best;
}

template <typename Filter, typename id_t>
__global__ void __launch_bounds__(kFilterThreads)
    choose_smallest(Filter filter, Request<id_t> q, const int64_t* offsets, id_t* neighbors, int64_t* positions) {
  __shared__ Keyed lists[kFilterWarps][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const auto write = [&](int64_t i, int64_t begin, const Keyed& best) {
    const int64_t out = offsets[i];
    const auto k = static_cast<uint32_t>(offsets[i + 1] - out);
    const uint32_t place = ascending_place<kWarp>(best.rank, k);
    if (static_cast<uint32_t>(lane) < k) {
      positions[out + place] = begin + best.rank;
      neighbors[out + place] = q.indices[begin + best.rank];
    }
  };
  const auto fanout = static_cast<int>(q.fanout);
  for_rows(
      filter,
      [&](int64_t i, int64_t begin, int64_t end) {
        write(i, begin, smallest_of(filter, q.stream(i), i, begin, end, 0, kWarp, fanout));
      },
      [&](int64_t i, int64_t begin, int64_t end) {
        Keyed best = smallest_of(filter, q.stream(i), i, begin, end, warp * kWarp, kFilterThreads, fanout);
        lists[warp][lane] = best;
        __syncthreads();
        if (warp == 0) {
          for (int w = 1; w < kFilterWarps; ++w) {
            best = merge_lanes(best, lists[w][lane]);
          }
          write(i, begin, best);
        }
        __syncthreads();
      });
}

}  // namespace gnnsys::cuda
