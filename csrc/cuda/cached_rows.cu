// gather_cached: rows of which some have a copy in device memory, the others in a slower place, in one kernel.
//
// Where the others come over the bus and are many, they are asked for by a few blocks in the order of their ids, as
// gather_rows does, while all other blocks copy what is cached and leave: so a miss takes nothing of the device from
// whatever else runs there.
//
// Work and bytes: one read and one write of every row, of which the misses come over the bus where `src` is in host
// memory, plus an id and a slot per row.
#include "common/register.h"
#include "cuda/row_order.cuh"

#include <optional>

namespace gnnsys::cuda {
namespace {

template <typename Unit>
struct GatherCached {
  typename Unit::To* out;
  const typename Unit::From* cache;
  const typename Unit::From* src;
  Ids index;
  const int* slots;
  int64_t num_cached;
  int64_t num_src;
  unsigned long long* hits;
  bool leaves_misses;  // to somebody else
  unsigned found;      // by this thread; a thread sees far fewer than 2^32 rows

  __device__ void locate(const int64_t (&row)[kRows], int64_t num_rows, int64_t num_units, bool counts,
                         const typename Unit::From* (&from)[kRows], typename Unit::To* (&to)[kRows]) {
    int64_t id[kRows];
    int slot[kRows];
    index.load(row, num_rows, id);
    check_ids(id, num_src, "index");
    int largest = -1;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      slot[r] = __ldg(slots + id[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      largest = max(largest, slot[r]);
    }
    if (largest >= num_cached) {
      fault("slots", largest, num_cached);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool hit = slot[r] >= 0;
      found += hit && counts && row[r] < num_rows;
      from[r] = hit ? cache + slot[r] * num_units : src + id[r] * num_units;
      from[r] = row[r] < num_rows && (hit || !leaves_misses) ? from[r] : nullptr;
      to[r] = out + row[r] * num_units;
    }
  }

  // One addition to global memory per block. Whole numbers: the order does not matter.
  __device__ void finish() const {
    if (hits == nullptr) {
      return;  // every thread of the grid agrees
    }
    __shared__ unsigned of_warp[kRowThreads / kWarp];
    const unsigned sum = __reduce_add_sync(kAllLanes, found);
    if (threadIdx.x % kWarp == 0) {
      of_warp[threadIdx.x / kWarp] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned long long total = 0;
      for (const unsigned part : of_warp) {
        total += part;
      }
      atomicAdd(hits, total);
    }
  }
};

void gather_cached(const Tensor& cache, const Tensor& slots, const Tensor& src, const Tensor& index, Tensor out,
                   std::optional<Tensor> hits) {
  const Device device = device_of_index(index);
  check_ids(index, device, "index");
  check_rows_to(cache, device, "cache");
  check_rows_from(src, device, "src");
  check_rows_to(out, device, "out");
  check_vector(slots, device, "slots");
  check_dtype(slots, ScalarType::Int, "slots");
  CHECK_ARG(slots.numel() == src.size(0), "slots must have an entry for each of the ", src.size(0), " rows of src, got ",
            slots.numel());
  check_dtype(cache, src.scalar_type(), "cache");
  CHECK_ARG(same_row_shape(src, cache), "cache must have rows of the same shape as src");
  CHECK_ARG(out.size(0) == index.numel(), "out must have len(index) = ", index.numel(), " rows, got ", out.size(0));
  CHECK_ARG(same_row_shape(src, out), "out must have rows of the same shape as src");
  CHECK_ARG(!overlap(src, out) && !overlap(cache, out), "out must not share memory with src or cache");
  if (hits) {
    check_vector(*hits, device, "hits");
    check_dtype(*hits, ScalarType::Long, "hits");
    CHECK_ARG(hits->numel() == 1, "hits must have one entry, got ", hits->numel());
  }
  if (out.size(0) == 0) {
    return;
  }
  const bool from_host = !src.is_cuda();
  // A table that has no rows has no address to speak of.
  const uintptr_t from_bits = address(src) | (cache.numel() > 0 ? address(cache) : 0);
  const RowOrder misses(device, index, src, src.size(0), &slots);
  dispatch_units(out, "out", src, "src", from_bits, [&](auto unit, int64_t row_values) {
    using Unit = decltype(unit);
    using From = typename Unit::From;
    const GatherCached<Unit> all{mutable_data<typename Unit::To>(out),
                                 const_data<From>(cache),
                                 const_data<From>(src),
                                 Ids(index),
                                 const_data<int>(slots),
                                 cache.size(0),
                                 src.size(0),
                                 hits ? mutable_data<unsigned long long>(*hits) : nullptr,
                                 misses.num_left() != nullptr,
                                 0};
    if (misses.num_left() == nullptr) {
      return launch_rows<Unit>(device, all, index.numel(), row_values, from_host, 0);
    }
    const Gather<Unit> left{all.out, all.src, misses.ids(), misses.positions(), all.num_src};
    const RowShape here = row_shape<Unit>(row_values, false);
    const unsigned blocks = kHostBlocks + num_blocks(index.numel(), here.rows_per_block());
    move_both<Unit><<<blocks, kRowThreads, 0, device.stream()>>>(
        left, misses.num_left(), kHostBlocks, row_shape<Unit>(row_values, from_host), all, index.numel(), here);
    CUDA_CHECK_LAUNCH();
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "gather_cached", &gather_cached); }

}  // namespace gnnsys::cuda
