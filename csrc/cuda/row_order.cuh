// The order in which rows of host memory are asked for: by id. The bus carries a row in any order; what finds the row's
// page for the bus does not, and rows that lie close together are asked for at close to the speed of a copy.
//
// Work and bytes: an id read, then a sort of pairs of 4 bytes, a few passes in device memory: next to nothing beside the
// rows, where these are many. Who comes first does not matter to the result.
#pragma once

#include "cuda/rows.cuh"
#include "cuda/sort.h"

namespace gnnsys::cuda {

// Below this many bytes on the bus the launches take longer than what they save. A request is for a sector at least,
// and of short rows that are asked for in order several lie in one.
constexpr int64_t kOrderBytes = int64_t{8} << 20;
constexpr int64_t kSector = 32;

static __global__ void __launch_bounds__(kRowThreads)
    note_positions(Ids index, int64_t size, int64_t bound, uint32_t* ids, uint32_t* positions) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (i < size) {
    const int64_t id = index[i];
    check_id(id, bound, "index");
    ids[i] = static_cast<uint32_t>(id);
    positions[i] = static_cast<uint32_t>(i);
  }
}

// Ids by size with the positions they came from; or, where that is not worth it, the ids as they are.
class RowOrder {
 public:
  RowOrder(const Device& device, const Tensor& index, const Tensor& src) : ids_(index) {
    const int64_t size = index.numel();
    const int64_t num_src = src.size(0);
    const int64_t bytes = size * std::max(row_size(src) * static_cast<int64_t>(src.element_size()), kSector);
    if (src.is_cuda() || bytes < kOrderBytes || num_src > int64_t{1} << 31 || size > int64_t{1} << 30) {
      return;
    }
    const Tensor unsorted = device.workspace<uint32_t>(2 * size);
    sorted_ = device.workspace<uint32_t>(2 * size);
    auto* const from = reinterpret_cast<uint32_t*>(mutable_data<uint8_t>(unsorted));
    auto* const to = reinterpret_cast<uint32_t*>(mutable_data<uint8_t>(sorted_));
    note_positions<<<num_blocks(size, kRowThreads), kRowThreads, 0, device.stream()>>>(Ids(index), size, num_src, from,
                                                                                       from + size);
    CUDA_CHECK_LAUNCH();
    sort_pairs(device, from, to, from + size, to + size, size, num_key_bits<uint32_t>(num_src));
    ids_ = Ids(reinterpret_cast<const int32_t*>(to));
    positions_ = to + size;
  }

  Ids ids() const { return ids_; }
  const uint32_t* positions() const { return positions_; }  // null: each id's own

 private:
  Tensor sorted_;
  Ids ids_;
  const uint32_t* positions_ = nullptr;
};

// Where the rows that a group has on their way go to: all asked for together, as the ids are.
__device__ inline void load_positions(const uint32_t* positions, const int64_t (&row)[kRows], int64_t num_rows,
                                      int64_t (&at)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    at[r] = positions == nullptr ? row[r] : __ldg(positions + min(row[r], num_rows - 1));
  }
}

}  // namespace gnnsys::cuda
