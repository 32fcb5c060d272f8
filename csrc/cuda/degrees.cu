// Counting ids, and the column of every edge: one kernel each, and no wait. A bad argument ends the kernel.
#include "common/register.h"
#include "cuda/group.cuh"

#include "common/tensors.h"

#include <limits>

namespace gnnsys::cuda {
namespace {

using word_t = unsigned long long;  // the type that CUDA's 64-bit atomics take

template <typename id_t>
__global__ void __launch_bounds__(kGroupThreads)
    degrees_kernel(const id_t* ids, int64_t size, int64_t num_nodes, word_t* counts) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  if (at < size) {
    const int64_t id = ids[at];
    if (id < 0 || id >= num_nodes) {
      fault("ids", id, num_nodes);
    }
    atomicAdd(counts + id, word_t{1});  // whole numbers: any order gives the same sum
  }
}

Tensor degrees(const Tensor& ids, int64_t num_nodes) {
  const Device device(ids);
  check_ids(ids, device, "ids");
  CHECK_ARG(num_nodes >= 0, "num_nodes must be >= 0, got ", num_nodes);
  const Tensor out = device.empty({num_nodes}, ScalarType::Long);
  if (num_nodes > 0) {
    CUDA_CHECK(cudaMemsetAsync(out.mutable_data_ptr(), 0, static_cast<size_t>(num_nodes) * sizeof(int64_t),
                               device.stream()));
  }
  dispatch_ids(ids, [&](auto id) {
    using id_t = decltype(id);
    degrees_kernel<id_t><<<num_blocks(ids.numel(), kGroupThreads), kGroupThreads, 0, device.stream()>>>(
        const_data<id_t>(ids), ids.numel(), num_nodes, reinterpret_cast<word_t*>(mutable_data<int64_t>(out)));
    CUDA_CHECK_LAUNCH();
  });
  return out;
}

__global__ void __launch_bounds__(kGroupThreads)
    expand_kernel(const int64_t* indptr, int64_t num_columns, int64_t first, int64_t num_edges, int64_t* out) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && (indptr[0] != 0 || indptr[num_columns] != num_edges)) {
    printf("gnnsys: indptr must go from 0 to len(out) = %lld, got %lld to %lld\n", static_cast<long long>(num_edges),
           static_cast<long long>(indptr[0]), static_cast<long long>(indptr[num_columns]));
    __trap();
  }
  for_each_edge(indptr, num_columns, num_edges, [&](int64_t edge, int64_t column) { out[edge] = first + column; });
}

// The column of each edge, from `first` on: out[e] = first + c for indptr[c] <= e < indptr[c + 1].
void expand_indptr(const Tensor& indptr, int64_t first, Tensor out) {
  const Device device(out.is_cuda() ? out : indptr);
  check_readable(indptr, device, "indptr");
  CHECK_ARG(indptr.dim() == 1, "indptr must have one dimension, got ", indptr.dim());
  check_dtype(indptr, ScalarType::Long, "indptr");
  check_vector(out, device, "out");
  check_dtype(out, ScalarType::Long, "out");
  CHECK_ARG(indptr.numel() >= 1, "indptr must have at least one entry");
  CHECK_ARG(first <= std::numeric_limits<int64_t>::max() - indptr.numel(), "first must leave room for ",
            indptr.numel() - 1, " columns, got ", first);
  expand_kernel<<<num_blocks(out.numel(), kEdgeTile), kGroupThreads, 0, device.stream()>>>(
      const_data<int64_t>(indptr), indptr.numel() - 1, first, out.numel(), mutable_data<int64_t>(out));
  CUDA_CHECK_LAUNCH();
}

}  // namespace
}  // namespace gnnsys::cuda

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "degrees", &gnnsys::cuda::degrees);
  REGISTER_OP(m, "expand_indptr", &gnnsys::cuda::expand_indptr);
}
