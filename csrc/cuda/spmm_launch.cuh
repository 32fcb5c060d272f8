// Launching the row kernel: which vectors, how many lanes to a row, which factor. For files that instantiate kernels.
#pragma once

#include "cuda/spmm_rows.cuh"

#include <algorithm>

namespace gnnsys::cuda {

constexpr int64_t kTurns = 4;  // of blocks on the device, at least: rows are not alike, and blocks end when theirs do

inline int log2_ceil(int64_t n) {
  int log2 = 0;
  while ((int64_t{1} << log2) < n) {
    ++log2;
  }
  return log2;
}

template <int kBytes, int kTiles, Factor kFactor, typename Op, typename T, typename O, typename id_t>
void launch_vectors(const Device& device, const Aggregation<T, O, id_t>& a, const Op& op, const Split& split) {
  constexpr int kLog2Warp = 5;
  constexpr int kLog2Least = 2;  // lanes of a group: fewer would have to be merged more often
  Layout layout{};
  layout.num_vectors = static_cast<int>(a.size) / Pack<T, kBytes>::kValues;
  layout.log2_lanes = std::clamp(log2_ceil(layout.num_vectors), kLog2Least, kLog2Warp);
  layout.log2_row_lanes = std::max(layout.log2_lanes, log2_ceil(tuning().row_lanes));
  const int per_block = kRowThreads >> layout.log2_row_lanes;
  const int64_t at_once = int64_t{device.num_processors()} * kRowBlocks<Op, kTiles, kFactor>;
  const int64_t rows = a.num_rows / (per_block * at_once * kTurns);
  layout.rows_each = static_cast<int>(std::clamp<int64_t>(rows, 1, tuning().rows));
  const unsigned row_blocks = num_blocks(a.num_rows, int64_t{per_block} * layout.rows_each);
  const dim3 grid(row_blocks + static_cast<unsigned>(split.num_blocks),
                  num_blocks(layout.num_vectors, kTiles << layout.log2_lanes));
  aggregate_rows<Op, kBytes, kTiles, kFactor><<<grid, kRowThreads, 0, device.stream()>>>(a, op, split, layout);
  CUDA_CHECK_LAUNCH();
}

template <Factor kFactor, typename Op, typename T, typename O, typename id_t>
void launch_factor(const Device& device, const Aggregation<T, O, id_t>& a, const Op& op, const Split& split) {
  constexpr int kOne = sizeof(T);
  // Where heads have their own factors, a vector lies in one of them.
  const uint32_t run = kFactor == Factor::kOne || kFactor == Factor::kEdge ? a.size : a.width;
  const int bytes = vector_bytes(int64_t{run} * kOne, {a.x, a.out});
  if constexpr (kOne <= 4) {
    // Rows that a warp cannot read with one vector each take two: ids are read once then, and passed on once.
    constexpr bool kWide = Op::kAllVectors && kFactor != Factor::kPicked;
    const bool is_wide = int64_t{a.size} * kOne > int64_t{bytes} * kWarp;
    if (bytes == 16) {
      if constexpr (kWide) {
        if (is_wide) {
          return launch_vectors<16, 2, kFactor>(device, a, op, split);
        }
      }
      return launch_vectors<16, 1, kFactor>(device, a, op, split);
    }
    if constexpr (kWide) {
      if (bytes == 8) {
        return is_wide ? launch_vectors<8, 2, kFactor>(device, a, op, split)
                       : launch_vectors<8, 1, kFactor>(device, a, op, split);
      }
      if (bytes == 4) {
        return is_wide ? launch_vectors<4, 2, kFactor>(device, a, op, split)
                       : launch_vectors<4, 1, kFactor>(device, a, op, split);
      }
    }
  }
  launch_vectors<kOne, 1, kFactor>(device, a, op, split);
}

// After the row kernel: the rows that were cut.
template <typename Op, typename T, typename O, typename id_t>
void launch_merge(const Device& device, const Aggregation<T, O, id_t>& a, const Op& op, const Split& split) {
  if (split.num_blocks > 0) {
    const unsigned blocks = 2 * static_cast<unsigned>(device.num_processors());
    merge_parts<<<blocks, kMergeWarps * kWarp, 0, device.stream()>>>(a, op, split);
    CUDA_CHECK_LAUNCH();
  }
}

template <typename Op, typename T, typename O, typename id_t>
RowSplit split_rows(const Device& device, const Aggregation<T, O, id_t>& a) {
  return {device, a.indptr, a.num_rows, a.num_edges, a.size, sizeof(typename Op::Element), kRowThreads};
}

// The whole of an aggregation but its checks; out has at least one value.
template <typename Op, typename T, typename O, typename id_t>
void aggregate(const Device& device, const Aggregation<T, O, id_t>& a, const Op& op) {
  constexpr bool kByEdge = Op::kAllVectors && sizeof(T) <= 4;
  const RowSplit split = split_rows<Op>(device, a);
  if (a.weight == nullptr && a.src_scale == nullptr) {
    launch_factor<Factor::kOne>(device, a, op, split.view());
  } else if (!kByEdge || (a.weight != nullptr && a.size != a.width)) {
    launch_factor<Factor::kHead>(device, a, op, split.view());
  } else if constexpr (kByEdge) {
    launch_factor<Factor::kEdge>(device, a, op, split.view());
  }
  launch_merge(device, a, op, split.view());
}

// The same for a gradient that goes where `picked` says.
template <typename Op, typename T, typename O, typename id_t>
void aggregate_picked(const Device& device, const Aggregation<T, O, id_t>& a, const Op& op) {
  const RowSplit split = split_rows<Op>(device, a);
  launch_factor<Factor::kPicked>(device, a, op, split.view());
  launch_merge(device, a, op, split.view());
}

}  // namespace gnnsys::cuda
