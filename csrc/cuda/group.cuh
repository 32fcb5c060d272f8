// What turning edges around needs on the device: searches in sorted arrays, a tile at a time.
//
// A block that handles consecutive entries searches the whole array for its two ends only; its threads then search
// between them, a few steps in the first cache.
#pragma once

#include "cuda/device.h"

#include <cstdint>

namespace gnnsys::cuda {

constexpr int kGroupThreads = 256;
constexpr int kEdgesPerThread = 4;
constexpr int kEdgeTile = kGroupThreads * kEdgesPerThread;

// The first position in [low, high) whose entry is not below `key`; high where there is none.
template <typename T>
__device__ int64_t lower_bound(const T* sorted, int64_t low, int64_t high, T key) {
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (sorted[middle] < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The last column in [low, high] that begins at or before the edge; low where there is none. Of columns that begin
// together this is the one that has edges.
template <typename T>
__device__ int64_t column_of(const T* indptr, int64_t low, int64_t high, int64_t edge) {
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (indptr[middle] <= edge) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// body(edge, column) for the edges of a tile. All threads of the block must call it.
template <typename Body>
__device__ void for_each_edge_of_tile(int64_t tile, const int64_t* indptr, int64_t num_columns, int64_t num_edges,
                                      const Body& body) {
  __shared__ int64_t ends[2];
  const int64_t begin = tile * kEdgeTile;
  const int64_t end = begin + kEdgeTile < num_edges ? begin + kEdgeTile : num_edges;
  const int64_t last_column = num_columns > 0 ? num_columns - 1 : 0;
  if (threadIdx.x == 0) {
    ends[0] = column_of(indptr, 0, last_column, begin);
  } else if (threadIdx.x == kWarp) {
    ends[1] = column_of(indptr, 0, last_column, end - 1);
  }
  __syncthreads();
  for (int64_t edge = begin + threadIdx.x; edge < end; edge += kGroupThreads) {
    body(edge, column_of(indptr, ends[0], ends[1], edge));
  }
}

// The same for the block's own tile.
template <typename Body>
__device__ void for_each_edge(const int64_t* indptr, int64_t num_columns, int64_t num_edges, const Body& body) {
  for_each_edge_of_tile(static_cast<int64_t>(blockIdx.x), indptr, num_columns, num_edges, body);
}

// indptr[g] = how many sorted keys are below g, for the block's groups [begin, begin + kGroupThreads) of
// [0, num_groups]. All threads of the block must call it.
template <typename T>
__device__ void find_bounds(const T* sorted, int64_t num_keys, int64_t num_groups, int64_t begin, int64_t* indptr) {
  __shared__ int64_t ends[2];
  const int64_t last = begin + kGroupThreads - 1 < num_groups ? begin + kGroupThreads - 1 : num_groups;
  // As key types go: num_groups may be one more than the widest key, and then no key is as large.
  const auto position = [&](int64_t low, int64_t high, int64_t group) {
    const auto key = static_cast<T>(group);
    return static_cast<int64_t>(key) == group ? lower_bound(sorted, low, high, key) : high;
  };
  if (threadIdx.x == 0) {
    ends[0] = position(0, num_keys, begin);
  } else if (threadIdx.x == kWarp) {
    ends[1] = position(0, num_keys, last);
  }
  __syncthreads();
  const int64_t group = begin + threadIdx.x;
  if (group <= last) {
    indptr[group] = position(ends[0], ends[1], group);
  }
}

}  // namespace gnnsys::cuda
