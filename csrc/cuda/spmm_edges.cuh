// The edge kernel: out[e, h] = scale(e) * sum over the features f of head h of dst_rows[v, f] * src_rows[u, f], for
// every edge e = (u, v); of spmm_extreme's gradient, over those features alone that took their value through e.
//
// Bytes: one gathered row of src_rows per edge; dst_rows, read again for each edge, comes from the cache, since a row's
// edges follow each other. A warp takes kEdgesPerWarp edges wherever rows begin and end, so heavy rows need no care:
// its lanes look up the destination of an edge each, between those of the first and the last, and groups of lanes take
// a head of an edge in turn.
#pragma once

#include "cuda/features.cuh"

#include <algorithm>

namespace gnnsys::cuda {

constexpr int kEdgeThreads = 256;
constexpr int kEdgesPerWarp = 128;
constexpr int kEdgesAhead = 4;  // rows of a group on their way

template <typename T, typename O, typename id_t>
struct EdgeProducts {
  using A = acc_t<T>;
  const int64_t* indptr;
  const id_t* indices;
  Positions positions;  // of an edge in out
  int64_t num_dst;
  int64_t num_edges;
  int64_t num_src;
  uint32_t heads;
  uint32_t width;
  const T* dst_rows;
  const T* src_rows;
  const A* src_scale;     // null: ones
  const A* dst_scale;     // null: ones
  const int32_t* picked;  // [num_dst, heads * width]: which in-edge; null: every feature counts
  O* out;                 // [num_edges, heads]
};

// The last row in [low, high) that begins at or before edge e; rows without edges are passed over.
__device__ inline int64_t row_of_edge(const int64_t* indptr, int64_t low, int64_t high, int64_t e) {
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (__ldg(indptr + middle) <= e) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <int kBytes, bool kPicked, typename T, typename O, typename id_t>
__global__ void __launch_bounds__(kEdgeThreads) multiply_edges(const EdgeProducts<T, O, id_t> p, int log2_lanes) {
  using A = acc_t<T>;
  constexpr int kValues = Pack<T, kBytes>::kValues;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t warp = int64_t{blockIdx.x} * (kEdgeThreads / kWarp) + threadIdx.x / kWarp;
  const int64_t first = warp * kEdgesPerWarp;
  if (first >= p.num_edges) {
    return;
  }
  const int64_t last = min(first + kEdgesPerWarp, p.num_edges) - 1;
  const int64_t first_row = row_of_edge(p.indptr, 0, p.num_dst, first);
  const int64_t row_bound = row_of_edge(p.indptr, first_row, p.num_dst, last) + 1;
  const int group_lanes = 1 << log2_lanes;
  const int num_groups = kWarp >> log2_lanes;
  const int group = lane >> log2_lanes;
  const uint32_t first_feature = static_cast<uint32_t>(lane & (group_lanes - 1)) * kValues;
  const uint32_t size = p.heads * p.width;

  for (int64_t base = first; base <= last; base += kWarp) {
    const int here = static_cast<int>(min(int64_t{kWarp}, last + 1 - base));
    id_t my_source = 0;
    int64_t my_row = 0;
    int64_t my_position = 0;
    A my_scale{1};
    int32_t my_pick = 0;
    if (lane < here) {
      const int64_t e = base + lane;
      my_source = __ldcs(p.indices + e);
      my_row = row_of_edge(p.indptr, first_row, row_bound, e);
      my_position = p.positions(e);
      if (!is_inside(my_source, p.num_src)) {
        fault("indices", my_source, p.num_src);
      }
      if (!is_inside(my_position, p.num_edges)) {
        fault("positions", my_position, p.num_edges);
      }
      my_scale = p.dst_scale != nullptr ? p.dst_scale[my_row] : A{1};
      my_scale *= p.src_scale != nullptr ? p.src_scale[my_source] : A{1};
      my_pick = static_cast<int32_t>(e - p.indptr[my_row]);
    }
    const int num_items = here * static_cast<int>(p.heads);
    for (int item0 = 0; item0 < num_items; item0 += kEdgesAhead * num_groups) {  // the warp together, for shuffles
      uint64_t at_src[kEdgesAhead];
      uint64_t at_dst[kEdgesAhead];
      int32_t pick[kEdgesAhead];
      A sum[kEdgesAhead];
#pragma unroll
      for (int j = 0; j < kEdgesAhead; ++j) {
        const int item = min(item0 + j * num_groups + group, num_items - 1);  // past the end: once more, unwritten
        const int k = item / static_cast<int>(p.heads);
        const uint32_t start = static_cast<uint32_t>(item - k * static_cast<int>(p.heads)) * p.width;
        at_src[j] = static_cast<uint64_t>(__shfl_sync(kAllLanes, my_source, k)) * size + start;
        at_dst[j] = static_cast<uint64_t>(__shfl_sync(kAllLanes, my_row, k)) * size + start;
        pick[j] = __shfl_sync(kAllLanes, my_pick, k);
        sum[j] = A{0};
      }
      for (uint32_t f = first_feature; f < p.width; f += group_lanes * kValues) {
        Pack<T, kBytes> src[kEdgesAhead];
        Pack<T, kBytes> dst[kEdgesAhead];
#pragma unroll
        for (int j = 0; j < kEdgesAhead; ++j) {
          load(src[j], p.src_rows + at_src[j] + f);
          load(dst[j], p.dst_rows + at_dst[j] + f);
        }
#pragma unroll
        for (int j = 0; j < kEdgesAhead; ++j) {
#pragma unroll
          for (int i = 0; i < kValues; ++i) {
            const A product = to_sum<A>(dst[j].value[i]) * to_sum<A>(src[j].value[i]);
            if constexpr (kPicked) {
              sum[j] += __ldg(p.picked + at_dst[j] + f + i) == pick[j] ? product : A{0};
            } else {
              sum[j] += product;
            }
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kEdgesAhead; ++j) {
        for (int distance = group_lanes / 2; distance > 0; distance /= 2) {
          sum[j] += __shfl_xor_sync(kAllLanes, sum[j], distance);
        }
        const int item = item0 + j * num_groups + group;
        const int k = item / static_cast<int>(p.heads);
        const int64_t position = __shfl_sync(kAllLanes, my_position, k % kWarp);
        const A scale = __shfl_sync(kAllLanes, my_scale, k % kWarp);
        if (item < num_items && (lane & (group_lanes - 1)) == 0) {
          p.out[position * p.heads + static_cast<uint32_t>(item - k * static_cast<int>(p.heads))] =
              from_sum<O>(scale * sum[j]);
        }
      }
    }
  }
}

template <int kBytes, bool kPicked, typename T, typename O, typename id_t>
void launch_edge_vectors(const Device& device, const EdgeProducts<T, O, id_t>& p) {
  const int64_t num_vectors = p.width / Pack<T, kBytes>::kValues;
  int log2_lanes = 0;
  while (log2_lanes < 5 && (int64_t{1} << log2_lanes) < num_vectors) {
    ++log2_lanes;
  }
  const unsigned blocks = num_blocks(p.num_edges, int64_t{kEdgesPerWarp} * (kEdgeThreads / kWarp));
  multiply_edges<kBytes, kPicked><<<blocks, kEdgeThreads, 0, device.stream()>>>(p, log2_lanes);
  CUDA_CHECK_LAUNCH();
}

// There are edges, heads and destinations; a width of 0 gives zeros.
template <bool kPicked, typename T, typename O, typename id_t>
void multiply(const Device& device, const EdgeProducts<T, O, id_t>& p) {
  constexpr int kOne = sizeof(T);
  const int bytes = vector_bytes(int64_t{p.width} * kOne, {p.dst_rows, p.src_rows});
  if (bytes == 16) {
    return launch_edge_vectors<16, kPicked>(device, p);
  }
  if constexpr (!kPicked && kOne < 8) {
    if (bytes == 8) {
      return launch_edge_vectors<8, kPicked>(device, p);
    }
    if (kOne < 4 && bytes == 4) {
      return launch_edge_vectors<4, kPicked>(device, p);
    }
  }
  launch_edge_vectors<kOne, kPicked>(device, p);
}

}  // namespace gnnsys::cuda
