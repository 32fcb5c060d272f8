// spmm_extreme (max, min) and its gradients. What the ops mean is in cpu/spmm_extreme.cpp, the kernels in spmm_rows.cuh
// and spmm_edges.cuh.
//
// grad_x gathers, as every sum does, so that it is the same on every run: over the transposed structure, each source
// adds up the gradients of those destinations that took their value from it. O(E x size) where the CPU scatters
// O(output).
#include "common/register.h"
#include "cuda/spmm_edges.cuh"
#include "cuda/spmm_launch.cuh"

#include <tuple>

namespace gnnsys::cuda {
namespace {

std::tuple<Tensor, Tensor> spmm_extreme(const Tensor& indptr, const Tensor& indices, const Tensor& x,
                                        const OptionalTensor& weight, bool minimum, const OptionalTensor&,
                                        const OptionalTensor&, const OptionalTensor&) {
  check_on_device(x, "x");
  const Device device(x);
  const Shape shape = check_features(x, device, "x");
  check_csc(indptr, indices, device);
  const int64_t num_dst = indptr.numel() - 1;
  check_edges(num_dst, shape.num_rows, indices.numel());
  if (weight.has_value()) {
    check_head_values(*weight, device, "weight", indices.numel(), x, "x");
  }
  Tensor out = new_features(x, device, num_dst);
  Tensor arg = device.empty({num_dst, shape.size()}, ScalarType::Int);
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
      a.positions.num_edges = indices.numel();
      a.num_rows = num_dst;
      a.num_edges = indices.numel();
      a.num_cols = shape.num_rows;
      a.size = static_cast<uint32_t>(shape.size());
      a.width = static_cast<uint32_t>(shape.width);
      a.x = const_data<T>(x);
      a.weight = data_or_null<T>(weight);
      a.out = mutable_data<T>(out);
      a.arg = mutable_data<int32_t>(arg);
      aggregate(device, a, Extreme<acc_t<T>>{minimum});
    });
  });
  return {out, arg};
}

// What both gradients check. That arg names an in-edge of its row is not: one that does not meets no edge, and counts
// for none.
Shape check_gradient(const Device& device, const Tensor& indptr, const Tensor& indices, const Tensor& arg,
                     const Tensor& grad) {
  const Shape shape = check_features(grad, device, "grad");
  check_csc(indptr, indices, device);
  CHECK_ARG(shape.num_rows == indptr.numel() - 1, "grad must have ", indptr.numel() - 1, " rows");
  check_contiguous(arg, device, "arg");
  check_dtype(arg, ScalarType::Int, "arg");
  CHECK_ARG(arg.numel() == grad.numel(), "arg must have as many entries as grad");
  return shape;
}

Tensor spmm_extreme_grad_x(const Tensor& indptr, const Tensor& indices, const Tensor& arg, const Tensor& grad,
                           const OptionalTensor& weight, int64_t num_src, const OptionalTensor& t_indptr,
                           const OptionalTensor& t_indices, const OptionalTensor& t_positions) {
  check_on_device(grad, "grad");
  const Device device(grad);
  const Shape shape = check_gradient(device, indptr, indices, arg, grad);
  if (weight.has_value()) {
    check_head_values(*weight, device, "weight", indices.numel(), grad, "grad");
  }
  CHECK_ARG(t_indptr.has_value() && t_indices.has_value() && t_positions.has_value(),
            "t_indptr, t_indices and t_positions must be given on a CUDA device: call through gnnsys.ops, which passes "
            "the transposed structure");
  check_csc(*t_indptr, *t_indices, device);
  CHECK_ARG(t_indptr->numel() - 1 == num_src && t_indices->numel() == indices.numel(),
            "t_indptr and t_indices must be the transpose of indptr and indices: ", num_src, " rows, ",
            indices.numel(), " edges");
  check_edges(num_src, shape.num_rows, indices.numel());
  const Positions at = check_positions(t_positions, device, indices.numel());
  Tensor grad_x = device.empty({num_src, shape.size()}, sum_type(grad));
  dispatch_features(grad, "grad", [&](auto value) {
    using T = decltype(value);
    using A = acc_t<T>;
    if (grad_x.numel() == 0) {
      return;
    }
    dispatch_ids(*t_indices, [&](auto id) {
      using id_t = decltype(id);
      Aggregation<T, A, id_t> a{};
      a.indptr = const_data<int64_t>(*t_indptr);
      a.indices = const_data<id_t>(*t_indices);
      a.positions = at;
      a.num_rows = num_src;
      a.num_edges = indices.numel();
      a.num_cols = shape.num_rows;
      a.size = static_cast<uint32_t>(shape.size());
      a.width = static_cast<uint32_t>(shape.width);
      a.x = const_data<T>(grad);
      a.weight = data_or_null<T>(weight);
      a.picked = const_data<int32_t>(arg);
      a.picked_indptr = const_data<int64_t>(indptr);
      a.out = mutable_data<A>(grad_x);
      aggregate_picked(device, a, Sum<A>{});
    });
  });
  return grad_x;
}

Tensor spmm_extreme_grad_weight(const Tensor& indptr, const Tensor& indices, const Tensor& arg, const Tensor& grad,
                                const Tensor& x) {
  check_on_device(grad, "grad");
  const Device device(grad);
  const Shape shape = check_gradient(device, indptr, indices, arg, grad);
  const Shape x_shape = check_features(x, device, "x");
  check_same_dtype(x, "x", grad, "grad");
  CHECK_ARG(x_shape.heads == shape.heads && x_shape.width == shape.width, "x must have rows of the shape of grad's");
  check_edges(shape.num_rows, x_shape.num_rows, indices.numel());
  Tensor grad_weight = device.empty({indices.numel(), shape.heads}, sum_type(grad));
  dispatch_features(grad, "grad", [&](auto value) {
    using T = decltype(value);
    using A = acc_t<T>;
    if (grad_weight.numel() == 0) {
      return;
    }
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      EdgeProducts<T, A, id_t> p{};
      p.indptr = const_data<int64_t>(indptr);
      p.indices = const_data<id_t>(indices);
      p.positions.num_edges = indices.numel();
      p.num_dst = shape.num_rows;
      p.num_edges = indices.numel();
      p.num_src = x_shape.num_rows;
      p.heads = static_cast<uint32_t>(shape.heads);
      p.width = static_cast<uint32_t>(shape.width);
      p.dst_rows = const_data<T>(grad);
      p.src_rows = const_data<T>(x);
      p.picked = const_data<int32_t>(arg);
      p.out = mutable_data<A>(grad_weight);
      multiply<true>(device, p);
    });
  });
  return grad_weight;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "spmm_extreme", &spmm_extreme);
  REGISTER_OP(m, "spmm_extreme_grad_x", &spmm_extreme_grad_x);
  REGISTER_OP(m, "spmm_extreme_grad_weight", &spmm_extreme_grad_weight);
}

}  // namespace gnnsys::cuda
