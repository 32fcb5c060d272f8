// Products of the rows of many relations with a weight each, in one launch: where relations are small, launches take
// longer than products. Sums are made in one fixed order, so that every result is the same on every run.
#pragma once

#include "cuda/features.cuh"
#include "cuda/group.cuh"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gnnsys::cuda {

constexpr int kMostSegments = 64;  // of a launch: they travel as its arguments
constexpr int kProductTile = 64;   // rows and columns of a product that a block makes
constexpr int kProductDepth = 16;
constexpr int kProductThreads = 256;  // 4 x 4 values each
constexpr int kAddRows = 32;          // destinations of a block
constexpr int kWeightRows = 1024;     // rows whose share in the gradient of a weight a block makes

// Rows of relations, in a buffer and among all groups, and which weight they have.
struct Segments {
  int count = 0;
  int tile[kMostSegments + 1] = {};  // the first tile of each, kProductTile rows per tile
  int share[kMostSegments + 1] = {};  // the first share of each, kWeightRows rows per share
  int64_t row[kMostSegments] = {};   // where its rows begin in a buffer
  int64_t group[kMostSegments] = {};  // where its groups begin
  int64_t size[kMostSegments] = {};
  int64_t weight[kMostSegments] = {};

  void add(int64_t first_row, int64_t first_group, int64_t rows, int64_t weight_row) {
    row[count] = first_row;
    group[count] = first_group;
    size[count] = rows;
    weight[count] = weight_row;
    tile[count + 1] = tile[count] + static_cast<int>((rows + kProductTile - 1) / kProductTile);
    share[count + 1] = share[count] + static_cast<int>((rows + kWeightRows - 1) / kWeightRows);
    ++count;
  }
};

// One step of a product: 4 x 4 values of a thread from a slice of both factors.
template <typename A>
__device__ inline void multiply(const A (&left)[kProductDepth][kProductTile + 4],
                                const A (&right)[kProductDepth][kProductTile + 4], A (&sum)[4][4]) {
  const int down = static_cast<int>(threadIdx.x) / 16 * 4;
  const int across = static_cast<int>(threadIdx.x) % 16 * 4;
#pragma unroll
  for (int k = 0; k < kProductDepth; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[i][j] += left[k][down + i] * right[k][across + j];
      }
    }
  }
}

// out[k] = a[k] @ w[weight], [depth] x [depth, width]; or @ w[weight]^T, whose weights are [width, depth].
template <typename T, bool kTransposed>
__global__ void __launch_bounds__(kProductThreads)
    product_kernel(const __grid_constant__ Segments segments, const T* __restrict__ a, int64_t depth,
                   const T* __restrict__ w, int64_t width, T* __restrict__ out) {
  using A = acc_t<T>;
  __shared__ A left[kProductDepth][kProductTile + 4];
  __shared__ A right[kProductDepth][kProductTile + 4];
  const int64_t segment = column_of(segments.tile, 0, segments.count - 1, blockIdx.x);
  const int64_t first = static_cast<int64_t>(static_cast<int>(blockIdx.x) - segments.tile[segment]) * kProductTile;
  const int64_t rows = min(static_cast<int64_t>(kProductTile), segments.size[segment] - first);
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kProductTile;
  const T* const from = a + (segments.row[segment] + first) * depth;
  const T* const weight = w + segments.weight[segment] * depth * width;
  A sum[4][4] = {};
  for (int64_t k0 = 0; k0 < depth; k0 += kProductDepth) {
    for (int at = static_cast<int>(threadIdx.x); at < kProductTile * kProductDepth; at += kProductThreads) {
      const int k = at % kProductDepth;
      const int r = at / kProductDepth;
      left[k][r] = r < rows && k0 + k < depth ? to_sum<A>(from[r * depth + k0 + k]) : A{0};
      if constexpr (kTransposed) {
        const bool is_there = column + r < width && k0 + k < depth;
        right[k][r] = is_there ? to_sum<A>(weight[(column + r) * depth + k0 + k]) : A{0};
      } else {
        const int c = at % kProductTile;
        const int deep = at / kProductTile;
        const bool is_there = column + c < width && k0 + deep < depth;
        right[deep][c] = is_there ? to_sum<A>(weight[(k0 + deep) * width + column + c]) : A{0};
      }
    }
    __syncthreads();
    multiply(left, right, sum);
    __syncthreads();
  }
  T* const to = out + (segments.row[segment] + first) * width;
  const int down = static_cast<int>(threadIdx.x) / 16 * 4;
  const int64_t across = column + static_cast<int>(threadIdx.x) % 16 * 4;
  for (int i = 0; i < 4 && down + i < rows; ++i) {
    for (int j = 0; j < 4 && across + j < width; ++j) {
      to[(down + i) * width + across + j] = from_sum<T>(sum[i][j]);
    }
  }
}

// shares[s] = sum over the rows k of share s of a[k]^T b[k], [depth, width]. A block has a tile of it.
template <typename T>
__global__ void __launch_bounds__(kProductThreads)
    share_kernel(const __grid_constant__ Segments segments, const T* __restrict__ a, int64_t depth,
                 const T* __restrict__ b, int64_t width, acc_t<T>* __restrict__ shares) {
  using A = acc_t<T>;
  __shared__ A left[kProductDepth][kProductTile + 4];
  __shared__ A right[kProductDepth][kProductTile + 4];
  const int64_t segment = column_of(segments.share, 0, segments.count - 1, blockIdx.x);
  const int64_t first = static_cast<int64_t>(static_cast<int>(blockIdx.x) - segments.share[segment]) * kWeightRows;
  const int64_t size = min(static_cast<int64_t>(kWeightRows), segments.size[segment] - first);
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kProductTile;
  const int64_t column = static_cast<int64_t>(blockIdx.z) * kProductTile;
  const T* const from = a + (segments.row[segment] + first) * depth;
  const T* const other = b + (segments.row[segment] + first) * width;
  A sum[4][4] = {};
  for (int64_t k0 = 0; k0 < size; k0 += kProductDepth) {
    for (int at = static_cast<int>(threadIdx.x); at < kProductTile * kProductDepth; at += kProductThreads) {
      const int c = at % kProductTile;
      const int64_t k = k0 + at / kProductTile;
      left[at / kProductTile][c] = row + c < depth && k < size ? to_sum<A>(from[k * depth + row + c]) : A{0};
      right[at / kProductTile][c] = column + c < width && k < size ? to_sum<A>(other[k * width + column + c]) : A{0};
    }
    __syncthreads();
    multiply(left, right, sum);
    __syncthreads();
  }
  A* const to = shares + static_cast<int64_t>(blockIdx.x) * depth * width;
  const int64_t down = row + static_cast<int>(threadIdx.x) / 16 * 4;
  const int64_t across = column + static_cast<int>(threadIdx.x) % 16 * 4;
  for (int i = 0; i < 4 && down + i < depth; ++i) {
    for (int j = 0; j < 4 && across + j < width; ++j) {
      to[(down + i) * width + across + j] = sum[i][j];
    }
  }
}

// out[weight] = its shares, summed in their order; `size` values each.
template <typename A>
__global__ void __launch_bounds__(kProductThreads)
    sum_shares_kernel(const __grid_constant__ Segments segments, const A* __restrict__ shares, int64_t size,
                      A* __restrict__ out) {
  const int segment = static_cast<int>(blockIdx.y);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kProductThreads + threadIdx.x;
  if (at >= size) {
    return;
  }
  A sum{0};
  for (int64_t share = segments.share[segment]; share < segments.share[segment + 1]; ++share) {
    sum += shares[share * size + at];
  }
  out[segments.weight[segment] * size + at] = sum;
}

// sums[owner[group]] += made[row], segment by segment; owners of a segment ascend and are different ones.
template <typename T, typename id_t>
__global__ void __launch_bounds__(kProductThreads)
    add_in_turn_kernel(const __grid_constant__ Segments segments, const id_t* __restrict__ owner,
                       const T* __restrict__ made, int64_t width, acc_t<T>* __restrict__ sums, int64_t num_rows) {
  __shared__ int64_t begin[kMostSegments];
  __shared__ int64_t end[kMostSegments];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kAddRows;
  const int mine = static_cast<int>(threadIdx.x);
  if (mine < 2 * segments.count) {
    const int segment = mine / 2;
    const int64_t wanted = first + mine % 2 * kAddRows;
    const id_t* const owners = owner + segments.group[segment];
    int64_t low = 0;
    int64_t high = segments.size[segment];
    if (blockIdx.x == 0 && high > 0 && (owners[0] < 0 || owners[high - 1] >= num_rows)) {
      fault("owners of a relation", owners[0] < 0 ? owners[0] : owners[high - 1], num_rows);
    }
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (static_cast<int64_t>(owners[middle]) < wanted) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    (mine % 2 == 0 ? begin : end)[segment] = low;
  }
  __syncthreads();
  for (int segment = 0; segment < segments.count; ++segment) {
    const int64_t from = begin[segment];
    const int64_t count = (end[segment] - from) * width;
    if (count == 0) {
      continue;  // the same for all threads
    }
    const id_t* const owners = owner + segments.group[segment] + from;
    const T* const rows = made + (segments.row[segment] + from) * width;
    for (int64_t at = threadIdx.x; at < count; at += kProductThreads) {
      sums[static_cast<int64_t>(owners[at / width]) * width + at % width] += to_sum<acc_t<T>>(rows[at]);
    }
    __syncthreads();
  }
}

}  // namespace gnnsys::cuda
