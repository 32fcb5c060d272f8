// gather_rows and scatter_rows on the device: the CPU's semantics (cpu/rows.cpp), with `src` on the device or in pinned
// host memory, which is read through unified addressing: no staging buffer and no copy by the host.
#include "common/register.h"
#include "cuda/row_order.cuh"

#include <optional>
#include <vector>

namespace gnnsys::cuda {
namespace {

void gather_rows_out(const Tensor& src, const Tensor& index, Tensor out) {
  const Device device = device_of_index(index);
  check_ids(index, device, "index");
  check_rows_from(src, device, "src");
  check_rows_to(out, device, "out");
  CHECK_ARG(out.size(0) == index.numel(), "out must have len(index) = ", index.numel(), " rows, got ", out.size(0));
  CHECK_ARG(same_row_shape(src, out), "out must have rows of the same shape as src");
  CHECK_ARG(!overlap(src, out), "out must not share memory with src");
  if (out.numel() == 0) {
    return;
  }
  const bool from_host = !src.is_cuda();
  const RowOrder order(device, index, src, src.size(0));
  dispatch_units(out, "out", src, "src", address(src), [&](auto unit, int64_t row_values) {
    using Unit = decltype(unit);
    const Gather<Unit> route{mutable_data<typename Unit::To>(out), const_data<typename Unit::From>(src), order.ids(),
                             order.positions(), src.size(0)};
    launch_rows<Unit>(device, route, index.numel(), row_values, from_host, from_host ? kHostBlocks : 0);
  });
}

Tensor gather_rows(const Tensor& src, const Tensor& index, std::optional<ScalarType> dtype) {
  const Device device = device_of_index(index);
  check_ids(index, device, "index");
  check_rows_from(src, device, "src");
  std::vector<int64_t> shape{index.numel()};
  for (int64_t d = 1; d < src.dim(); ++d) {
    shape.push_back(src.size(d));
  }
  Tensor out = device.empty(shape, dtype.value_or(src.scalar_type()));
  gather_rows_out(src, index, out);
  return out;
}

// The last one wins: `last` holds, of every row of dst that is named, the largest position that names it, and only
// that position moves its row. A maximum does not depend on the order in which it is taken. Only rows that are named
// are ever touched, so the cost is that of the index, not of the table.
__global__ void __launch_bounds__(kRowThreads) forget_writers(Ids index, int64_t size, int64_t bound, long long* last) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (i < size) {
    const int64_t id = index[i];
    check_id(id, bound, "index");
    last[id] = -1;
  }
}

__global__ void __launch_bounds__(kRowThreads) find_last_writers(Ids index, int64_t size, long long* last) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (i < size) {
    atomicMax(last + index[i], static_cast<long long>(i));
  }
}

template <typename Unit>
struct Scatter {
  typename Unit::To* dst;
  const typename Unit::From* src;
  Ids index;
  const long long* last;

  __device__ void locate(const int64_t (&row)[kRows], int64_t num_rows, int64_t num_units, bool,
                         const typename Unit::From* (&from)[kRows], typename Unit::To* (&to)[kRows]) const {
    int64_t id[kRows];
    int64_t writer[kRows];
    index.load(row, num_rows, id);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      writer[r] = __ldg(last + id[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      from[r] = writer[r] == row[r] ? src + row[r] * num_units : nullptr;  // never beyond the end: no such writer
      to[r] = dst + id[r] * num_units;
    }
  }
  __device__ void finish() const {}
};

void scatter_rows(Tensor dst, const Tensor& index, const Tensor& src) {
  const Device device = device_of_index(index);
  check_ids(index, device, "index");
  check_rows_to(dst, device, "dst");
  check_rows_from(src, device, "src");
  CHECK_ARG(src.size(0) == index.numel(), "src must have len(index) = ", index.numel(), " rows, got ", src.size(0));
  CHECK_ARG(same_row_shape(src, dst), "src must have rows of the same shape as dst");
  CHECK_ARG(!overlap(src, dst), "src must not share memory with dst");
  if (src.numel() == 0) {
    return;
  }
  const int64_t size = index.numel();
  const Tensor workspace = device.workspace<long long>(dst.size(0));
  auto* const last = mutable_data<long long>(workspace);
  const bool from_host = !src.is_cuda();
  dispatch_units(dst, "dst", src, "src", address(src), [&](auto unit, int64_t row_values) {
    using Unit = decltype(unit);
    forget_writers<<<num_blocks(size, kRowThreads), kRowThreads, 0, device.stream()>>>(Ids(index), size, dst.size(0),
                                                                                       last);
    CUDA_CHECK_LAUNCH();
    find_last_writers<<<num_blocks(size, kRowThreads), kRowThreads, 0, device.stream()>>>(Ids(index), size, last);
    CUDA_CHECK_LAUNCH();
    const Scatter<Unit> route{mutable_data<typename Unit::To>(dst), const_data<typename Unit::From>(src), Ids(index),
                              last};
    launch_rows<Unit>(device, route, size, row_values, from_host, from_host ? kHostBlocks : 0);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "gather_rows", &gather_rows);
  REGISTER_OP(m, "gather_rows_out", &gather_rows_out);
  REGISTER_OP(m, "scatter_rows", &scatter_rows);
}

}  // namespace gnnsys::cuda
