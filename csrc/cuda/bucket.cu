// bucket_ids on the device: groups ids by the range they fall into, keeping their order. No wait; a bad id ends the
// kernel.
//
// A stable sort of (owner, position) by the few bits that owners need: one pass for up to 256 of them. Bytes per int64
// id: 8 + 8 to find its owner, 20 a pass, and 8 + 24 for what is returned.
#include "common/register.h"
#include "cuda/group.cuh"
#include "cuda/sort.h"

#include "common/tensors.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

namespace gnnsys::cuda {
namespace {

// The owner of an id is the last one whose bound is not above it, so empty ranges are never chosen.
template <typename T, typename id_t>
__global__ void __launch_bounds__(kGroupThreads)
    owners_kernel(const id_t* ids, int64_t size, const int64_t* bounds, int64_t num_buckets, T* owners, T* positions) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  if (at < size) {
    const int64_t id = ids[at];
    if (id < 0 || id >= bounds[num_buckets]) {
      fault("ids", id, bounds[num_buckets]);
    }
    owners[at] = static_cast<T>(column_of(bounds, 0, num_buckets - 1, id));
    positions[at] = static_cast<T>(at);
  }
}

// The first blocks count the buckets, the others write what is in them.
template <typename T, typename id_t>
__global__ void __launch_bounds__(kGroupThreads)
    buckets_kernel(const T* owners, const T* sorted, int64_t size, int64_t num_buckets, int64_t num_count_blocks,
                   const id_t* ids, const int64_t* bounds, int64_t* counts, int64_t* order, id_t* local) {
  const int64_t block = blockIdx.x;
  if (block < num_count_blocks) {
    const int64_t bucket = block * kGroupThreads + threadIdx.x;
    if (bucket < num_buckets) {
      const int64_t begin = lower_bound(owners, 0, size, static_cast<T>(bucket));
      counts[bucket] = lower_bound(owners, begin, size, static_cast<T>(bucket + 1)) - begin;
    }
    return;
  }
  const int64_t at = (block - num_count_blocks) * kGroupThreads + threadIdx.x;
  if (at < size) {
    const T from = sorted[at];
    order[at] = static_cast<int64_t>(from);
    local[at] = static_cast<id_t>(ids[from] - bounds[owners[at]]);
  }
}

// On the host they are looked at and copied; on the device they are trusted, as there is nobody to tell.
Tensor bounds_on_device(const Tensor& bounds, const Device& device) {
  CHECK_ARG(bounds.is_contiguous(), "bounds must be contiguous: pass bounds.contiguous()");
  CHECK_ARG(bounds.dim() == 1, "bounds must have one dimension, got ", bounds.dim());
  check_dtype(bounds, ScalarType::Long, "bounds");
  CHECK_ARG(bounds.numel() >= 2, "bounds must have one entry more than there are ranges, got ", bounds.numel());
  CHECK_ARG(bounds.numel() <= std::numeric_limits<int32_t>::max(), "bounds must have fewer than 2^31 entries, got ",
            bounds.numel());
  if (bounds.is_cuda()) {
    check_vector(bounds, device, "bounds");
    return bounds;
  }
  const auto* bound = const_data<int64_t>(bounds);
  CHECK_ARG(bound[0] == 0 && std::is_sorted(bound, bound + bounds.numel()),
            "bounds must start at 0 and never decrease");
  Tensor copy = device.empty({bounds.numel()}, ScalarType::Long);
  const std::vector<int64_t> pageable(bound, bound + bounds.numel());  // is taken before the call returns; pinned is not
  CUDA_CHECK(cudaMemcpyAsync(copy.mutable_data_ptr(), pageable.data(), pageable.size() * sizeof(int64_t),
                             cudaMemcpyHostToDevice, device.stream()));
  return copy;
}

template <typename T, typename id_t>
void bucket(const Device& device, const Tensor& ids, const Tensor& bounds, const Tensor& counts, const Tensor& order,
            const Tensor& local) {
  const int64_t size = ids.numel();
  const int64_t num_buckets = counts.numel();
  const Tensor words = device.workspace<T>(4 * size);
  T* const owners = static_cast<T*>(words.mutable_data_ptr());
  T* const positions = owners + size;
  T* const sorted_owners = positions + size;
  T* const sorted = sorted_owners + size;
  owners_kernel<<<num_blocks(size, kGroupThreads), kGroupThreads, 0, device.stream()>>>(
      const_data<id_t>(ids), size, const_data<int64_t>(bounds), num_buckets, owners, positions);
  CUDA_CHECK_LAUNCH();
  sort_pairs<T>(device, owners, sorted_owners, positions, sorted, size, num_key_bits<T>(num_buckets));
  const int64_t count_blocks = num_blocks(num_buckets, kGroupThreads);
  const int64_t blocks = count_blocks + (size + kGroupThreads - 1) / kGroupThreads;
  buckets_kernel<<<static_cast<unsigned>(blocks), kGroupThreads, 0, device.stream()>>>(
      sorted_owners, sorted, size, num_buckets, count_blocks, const_data<id_t>(ids), const_data<int64_t>(bounds),
      mutable_data<int64_t>(counts), mutable_data<int64_t>(order), mutable_data<id_t>(local));
  CUDA_CHECK_LAUNCH();
}

std::tuple<Tensor, Tensor, Tensor> bucket_ids(const Tensor& ids, const Tensor& bounds) {
  const Device device(ids.is_cuda() ? ids : bounds);
  check_ids(ids, device, "ids");
  const Tensor bound = bounds_on_device(bounds, device);
  const Tensor counts = device.empty({bounds.numel() - 1}, ScalarType::Long);
  const Tensor order = device.empty({ids.numel()}, ScalarType::Long);
  const Tensor local = device.empty({ids.numel()}, ids.scalar_type());
  dispatch_ids(ids, [&](auto id) {
    using id_t = decltype(id);
    if (ids.numel() <= std::numeric_limits<int32_t>::max()) {
      bucket<uint32_t, id_t>(device, ids, bound, counts, order, local);
    } else {
      bucket<uint64_t, id_t>(device, ids, bound, counts, order, local);
    }
  });
  return {counts, order, local};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "bucket_ids", &bucket_ids); }

}  // namespace gnnsys::cuda
