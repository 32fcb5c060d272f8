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

// Keys are ids; that of a row which has a slot (a copy in device memory) is `bound`, behind all of them. The others are
// counted, if `num_left` is there: one addition to global memory per block, in any order.
static __global__ void __launch_bounds__(kRowThreads)
    note_positions(Ids index, int64_t size, int64_t bound, const int* slots, uint32_t* keys, uint32_t* positions,
                   unsigned* num_left) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  bool is_left = i < size;
  if (i < size) {
    const int64_t id = index[i];
    check_id(id, bound, "index");
    is_left = slots == nullptr || __ldg(slots + id) < 0;
    keys[i] = static_cast<uint32_t>(is_left ? id : bound);
    positions[i] = static_cast<uint32_t>(i);
  }
  if (num_left != nullptr) {  // every thread of the grid agrees
    const int in_block = __syncthreads_count(is_left);
    if (threadIdx.x == 0 && in_block > 0) {
      atomicAdd(num_left, static_cast<unsigned>(in_block));
    }
  }
}

// Ids by size with the positions they came from; or, where that is not worth it, the ids as they are. With `slots`, ids
// that have one come last, and num_left() says on the device how many have none.
class RowOrder {
 public:
  // `like` is a piece of the table, which has `num_src` rows.
  RowOrder(const Device& device, const Tensor& index, const Tensor& like, int64_t num_src, const Tensor* slots = nullptr)
      : ids_(index) {
    const int64_t size = index.numel();
    const int64_t bytes = size * std::max(row_size(like) * static_cast<int64_t>(like.element_size()), kSector);
    if (like.is_cuda() || bytes < kOrderBytes || num_src >= int64_t{1} << 31 || size > int64_t{1} << 30) {
      return;
    }
    const Tensor unsorted = device.workspace<uint32_t>(2 * size);
    sorted_ = device.workspace<uint32_t>(2 * size + 1);
    auto* const from = reinterpret_cast<uint32_t*>(mutable_data<uint8_t>(unsorted));
    auto* const to = reinterpret_cast<uint32_t*>(mutable_data<uint8_t>(sorted_));
    if (slots != nullptr) {
      num_left_ = to + 2 * size;
      CUDA_CHECK(cudaMemsetAsync(num_left_, 0, sizeof(*num_left_), device.stream()));
    }
    note_positions<<<num_blocks(size, kRowThreads), kRowThreads, 0, device.stream()>>>(
        Ids(index), size, num_src, slots == nullptr ? nullptr : const_data<int>(*slots), from, from + size, num_left_);
    CUDA_CHECK_LAUNCH();
    sort_pairs(device, from, to, from + size, to + size, size, num_key_bits<uint32_t>(num_src + 1));
    ids_ = Ids(reinterpret_cast<const int32_t*>(to));
    positions_ = to + size;
  }

  Ids ids() const { return ids_; }
  const uint32_t* positions() const { return positions_; }  // null: each id's own
  const unsigned* num_left() const { return num_left_; }    // null: ids are as they are, or have no slots

 private:
  Tensor sorted_;
  Ids ids_;
  const uint32_t* positions_ = nullptr;
  unsigned* num_left_ = nullptr;
};

// Where the rows that a group has on their way go to: all asked for together, as the ids are.
__device__ inline void load_positions(const uint32_t* positions, const int64_t (&row)[kRows], int64_t num_rows,
                                      int64_t (&at)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    at[r] = positions == nullptr ? row[r] : __ldg(positions + min(row[r], num_rows - 1));
  }
}

// out[positions[i]] = src[index[i]].
template <typename Unit>
struct Gather {
  typename Unit::To* out;
  const typename Unit::From* src;
  Ids index;
  const uint32_t* positions;  // of the ids among the rows of out; null: their own
  int64_t num_src;

  __device__ void locate(const int64_t (&row)[kRows], int64_t num_rows, int64_t num_units, bool,
                         const typename Unit::From* (&from)[kRows], typename Unit::To* (&to)[kRows]) const {
    int64_t id[kRows];
    int64_t at[kRows];
    index.load(row, num_rows, id);
    load_positions(positions, row, num_rows, at);
    check_ids(id, num_src, "index");
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      from[r] = row[r] < num_rows ? src + id[r] * num_units : nullptr;
      to[r] = out + at[r] * num_units;
    }
  }
  __device__ void finish() const {}
};

}  // namespace gnnsys::cuda
