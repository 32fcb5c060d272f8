// find_edges on the device: from pairs of nodes to positions in a CSC. Work: the in-degree of each dst, twice, and a sort
// of what is found. The host waits twice: how many are found, and how many of them are different.
#include "common/register.h"
#include "cuda/columns.cuh"
#include "cuda/sample_filter.cuh"

#include <cub/device/device_radix_sort.cuh>
namespace gnnsys::cuda {
namespace {

constexpr int kThreads = 256;

template <typename id_t>
struct FromSource {
  static constexpr bool kSums = false;
  Columns<id_t> columns;
  const id_t* indices;
  const id_t* src;
  int64_t num_rows;

  __device__ void row(int64_t i, int64_t* begin, int64_t* end) const { columns.row(i, begin, end); }
  __device__ bool keep(int64_t i, int64_t p) const { return indices[p] == src[i]; }
  __device__ double quantity(int64_t, int64_t) const { return 0; }
};

struct EmitPosition {
  int64_t* positions;
  __device__ void operator()(int64_t, int64_t p, int64_t slot, int64_t) const { positions[slot] = p; }
};

// 1 where a sorted value is the first of its kind.
struct IsFirst {
  const int64_t* sorted;
  __device__ int64_t operator()(int64_t i) const { return i == 0 || sorted[i] != sorted[i - 1]; }
};

__global__ void __launch_bounds__(kThreads)
    write_first(int64_t size, const int64_t* sorted, const int64_t* places, int64_t* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < size && places[i + 1] != places[i]) {
    out[places[i]] = sorted[i];
  }
}

Tensor sort_positions(const Device& device, const Tensor& positions, int64_t size, int64_t limit) {
  int bits = 1;
  while (bits < 63 && limit >> bits != 0) {
    ++bits;
  }
  const Tensor sorted = device.workspace<int64_t>(size);
  const auto* const in = const_data<int64_t>(positions);
  auto* const out = mutable_data<int64_t>(sorted);
  size_t bytes = 0;
  CUDA_CHECK(cub::DeviceRadixSort::SortKeys(nullptr, bytes, in, out, size, 0, bits, device.stream()));
  const Tensor temporary = device.workspace<char>(static_cast<int64_t>(bytes));
  CUDA_CHECK(cub::DeviceRadixSort::SortKeys(temporary.mutable_data_ptr(), bytes, in, out, size, 0, bits,
                                            device.stream()));
  return sorted;
}

Tensor find_edges(const Tensor& indptr, const Tensor& indices, const Tensor& src, const Tensor& dst) {
  CHECK_ARG(dst.is_cuda(), "dst must be on the device, like the other tensors");
  const Device device(dst);
  check_csc(indptr, indices, device);
  check_ids(src, device, "src");
  check_ids(dst, device, "dst");
  CHECK_ARG(src.numel() == dst.numel(), "src and dst must have equal lengths, got ", src.numel(), " and ", dst.numel());
  CHECK_ARG(src.scalar_type() == indices.scalar_type() && dst.scalar_type() == indices.scalar_type(),
            "src and dst must have the dtype of indices, ", dtype_name(indices.scalar_type()));
  return dispatch_ids(indices, [&](auto id) -> Tensor {
    using id_t = decltype(id);
    const int64_t num_pairs = dst.numel();
    const Tensor report = device.workspace<ColumnReport>(1);
    CUDA_CHECK(cudaMemsetAsync(report.mutable_data_ptr(), 0xFF, sizeof(ColumnReport), device.stream()));
    auto* const total = mutable_data<int64_t>(report);  // first in the report
    const auto columns = make_columns<id_t>(indptr, indices, dst, mutable_data<ColumnReport>(report));
    const FromSource<id_t> filter{columns, const_data<id_t>(indices), const_data<id_t>(src), num_pairs};
    const Tensor starts = device.workspace<int64_t>(num_pairs + 1);
    auto* const start = mutable_data<int64_t>(starts);
    count_rows(device, filter, start, nullptr);
    exclusive_sum(device, num_pairs, CountsAt<int64_t>{start}, start, total);
    const auto size = static_cast<int64_t>(read_columns(device, columns, "dst").total);
    if (size == 0) {
      return device.empty({0}, ScalarType::Long);
    }
    const Tensor found = device.workspace<int64_t>(size);
    collect_rows(device, filter, start, EmitPosition{mutable_data<int64_t>(found)});
    const Tensor sorted = sort_positions(device, found, size, indices.numel());
    const Tensor places = device.workspace<int64_t>(size + 1);
    exclusive_sum(device, size, IsFirst{const_data<int64_t>(sorted)}, mutable_data<int64_t>(places));
    int64_t num_different = 0;
    device.read(&num_different, const_data<int64_t>(places) + size, 1);
    const Tensor out = device.empty({num_different}, ScalarType::Long);
    write_first<<<num_blocks(size, kThreads), kThreads, 0, device.stream()>>>(
        size, const_data<int64_t>(sorted), const_data<int64_t>(places), mutable_data<int64_t>(out));
    CUDA_CHECK_LAUNCH();
    return out;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "find_edges", &find_edges); }

}  // namespace gnnsys::cuda
