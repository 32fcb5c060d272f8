// spmm and spmm_add: out[v] = dst_scale[v] * sum over in-edges e = (u, v) of src_scale[u] * weight[e] * x[u]. What the
// ops mean is in cpu/spmm.cpp, the kernel in spmm_rows.cuh; inverse_degrees makes a sum a mean.
#include "common/register.h"
#include "cuda/padding.cuh"
#include "cuda/spmm_rows.cuh"

namespace gnnsys::cuda {

// Instantiated in spmm_sums_*.cu, which take long to compile.
template <typename T, typename id_t>
void sum_rows(const Device& device, const Aggregation<T, T, id_t>& a);

namespace {

constexpr int kThreads = 256;

void check_spmm(const Device& device, const Tensor& indptr, const Tensor& indices, const Tensor& x,
                const OptionalTensor& weight, const OptionalTensor& src_scale, const OptionalTensor& dst_scale) {
  const Shape shape = check_features(x, device, "x");
  check_csc(indptr, indices, device);
  check_edges(indptr.numel() - 1, shape.num_rows, indices.numel());
  if (weight.has_value()) {
    check_head_values(*weight, device, "weight", indices.numel(), x, "x");
  }
  check_scale(src_scale, device, "src_scale", x, shape.num_rows);
  check_scale(dst_scale, device, "dst_scale", x, indptr.numel() - 1);
}

void spmm_into(const Device& device, const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions,
               const Tensor& x, const OptionalTensor& weight, const OptionalTensor& src_scale,
               const OptionalTensor& dst_scale, const Tensor& out, bool add) {
  const Positions at = check_positions(positions, device, indices.numel());
  const Shape shape = check_features(x, device, "x");
  dispatch_features(x, "x", [&](auto value) {
    using T = decltype(value);
    if (out.numel() == 0) {
      return;
    }
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      Aggregation<T, T, id_t> a{};
      a.indptr = const_data<int64_t>(indptr);
      a.indices = const_data<id_t>(indices);
      a.positions = at;
      a.num_rows = indptr.numel() - 1;
      a.num_edges = indices.numel();
      a.num_cols = shape.num_rows;
      a.size = static_cast<uint32_t>(shape.size());
      a.width = static_cast<uint32_t>(shape.width);
      a.x = const_data<T>(x);
      a.weight = data_or_null<T>(weight);
      a.src_scale = data_or_null<acc_t<T>>(src_scale);
      a.dst_scale = data_or_null<acc_t<T>>(dst_scale);
      a.out = mutable_data<T>(out);
      a.add = add;
      // What is added to is often a piece of something large, with a budget: there is no room for copies.
      const int64_t num_nodes = std::max(shape.num_rows, a.num_rows);
      const int64_t size = add || x.dim() == 3 ? a.size : padded_size(a.size, sizeof(T), num_nodes, a.num_edges);
      if (size == a.size) {
        return sum_rows(device, a);
      }
      const int64_t from = a.size * static_cast<int64_t>(sizeof(T));
      const int64_t to = size * static_cast<int64_t>(sizeof(T));
      const Tensor padded_x = device.workspace<T>(shape.num_rows * size);
      const Tensor padded_out = device.workspace<T>(a.num_rows * size);
      copy_columns(device, a.x, from, padded_x.mutable_data_ptr(), to, shape.num_rows);
      a.x = static_cast<const T*>(padded_x.const_data_ptr());
      a.out = static_cast<T*>(padded_out.mutable_data_ptr());
      a.size = a.width = static_cast<uint32_t>(size);
      sum_rows(device, a);
      copy_columns(device, a.out, to, out.mutable_data_ptr(), from, a.num_rows);
    });
  });
}

// As on the CPU, the last three arguments are for autograd alone.
Tensor spmm(const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions, const Tensor& x,
            const OptionalTensor& weight, const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
            const OptionalTensor&, const OptionalTensor&, const OptionalTensor&) {
  check_on_device(x, "x");
  const Device device(x);
  check_spmm(device, indptr, indices, x, weight, src_scale, dst_scale);
  Tensor out = new_features(x, device, indptr.numel() - 1);
  spmm_into(device, indptr, indices, positions, x, weight, src_scale, dst_scale, out, false);
  return out;
}

void into_given(const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions, const Tensor& x,
                const OptionalTensor& weight, const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
                const Tensor& out, bool add) {
  check_on_device(x, "x");
  const Device device(x);
  check_spmm(device, indptr, indices, x, weight, src_scale, dst_scale);
  const Shape shape = check_features(out, device, "out");
  check_same_dtype(out, "out", x, "x");
  CHECK_ARG(out.dim() == x.dim() && shape.num_rows == indptr.numel() - 1 && out.size(1) == x.size(1) &&
                (x.dim() == 2 || out.size(2) == x.size(2)),
            "out must have ", indptr.numel() - 1, " rows of the shape of x's");
  spmm_into(device, indptr, indices, positions, x, weight, src_scale, dst_scale, out, add);
}

void spmm_add(const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions, const Tensor& x,
              const OptionalTensor& weight, const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
              const Tensor& out) {
  into_given(indptr, indices, positions, x, weight, src_scale, dst_scale, out, true);
}

void spmm_out(const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions, const Tensor& x,
              const OptionalTensor& weight, const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
              const Tensor& out) {
  into_given(indptr, indices, positions, x, weight, src_scale, dst_scale, out, false);
}

template <typename A>
__global__ void invert_degrees(const int64_t* __restrict__ indptr, int64_t num_rows, A* __restrict__ out) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row < num_rows) {
    const int64_t degree = indptr[row + 1] - indptr[row];
    out[row] = A{1} / static_cast<A>(degree > 1 ? degree : 1);
  }
}

Tensor inverse_degrees(const Tensor& indptr, ScalarType dtype) {
  const Device device(indptr);
  check_vector(indptr, device, "indptr");
  check_dtype(indptr, ScalarType::Long, "indptr");
  CHECK_ARG(indptr.numel() >= 1, "indptr must have num_dst + 1 entries, got none");
  CHECK_ARG(dtype == ScalarType::Float || dtype == ScalarType::Double, "dtype must be float32 or float64, got ",
            dtype_name(dtype));
  const int64_t num_rows = indptr.numel() - 1;
  Tensor out = device.empty({num_rows}, dtype);
  const unsigned blocks = num_blocks(num_rows, kThreads);
  if (dtype == ScalarType::Float) {
    invert_degrees<<<blocks, kThreads, 0, device.stream()>>>(const_data<int64_t>(indptr), num_rows,
                                                             mutable_data<float>(out));
  } else {
    invert_degrees<<<blocks, kThreads, 0, device.stream()>>>(const_data<int64_t>(indptr), num_rows,
                                                             mutable_data<double>(out));
  }
  CUDA_CHECK_LAUNCH();
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "spmm", &spmm);
  REGISTER_OP(m, "spmm_add", &spmm_add);
  REGISTER_OP(m, "spmm_out", &spmm_out);
  REGISTER_OP(m, "inverse_degrees", &inverse_degrees);
}

}  // namespace gnnsys::cuda
