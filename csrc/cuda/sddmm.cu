// sddmm: out[e, h] = src_scale[u] * dst_scale[v] * <dst_rows[v, h], src_rows[u, h]> for every edge e = (u, v). What the
// op means is in cpu/sddmm.cpp, the kernel in spmm_edges.cuh.
#include "common/register.h"
#include "cuda/spmm_edges.cuh"

namespace gnnsys::cuda {
namespace {

// As in spmm, the transposed structure is for autograd alone.
Tensor sddmm(const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions, const Tensor& dst_rows,
             const Tensor& src_rows, const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&) {
  check_on_device(dst_rows, "dst_rows");
  const Device device(dst_rows);
  const Shape shape = check_features(dst_rows, device, "dst_rows");
  const Shape src_shape = check_features(src_rows, device, "src_rows");
  check_same_dtype(src_rows, "src_rows", dst_rows, "dst_rows");
  CHECK_ARG(src_rows.dim() == dst_rows.dim() && src_shape.heads == shape.heads && src_shape.width == shape.width,
            "src_rows must have rows of the same shape as dst_rows");
  check_csc(indptr, indices, device);
  const int64_t num_dst = indptr.numel() - 1;
  CHECK_ARG(shape.num_rows == num_dst, "dst_rows must have ", num_dst, " rows, got ", shape.num_rows);
  check_edges(num_dst, src_shape.num_rows, indices.numel());
  const Positions at = check_positions(positions, device, indices.numel());
  check_scale(src_scale, device, "src_scale", src_rows, src_shape.num_rows);
  check_scale(dst_scale, device, "dst_scale", dst_rows, num_dst);
  Tensor out = new_head_values(dst_rows, device, indices.numel());
  dispatch_features(dst_rows, "dst_rows", [&](auto value) {
    using T = decltype(value);
    if (out.numel() == 0) {
      return;
    }
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      EdgeProducts<T, T, id_t> p{};
      p.indptr = const_data<int64_t>(indptr);
      p.indices = const_data<id_t>(indices);
      p.positions = at;
      p.num_dst = num_dst;
      p.num_edges = indices.numel();
      p.num_src = src_shape.num_rows;
      p.heads = static_cast<uint32_t>(shape.heads);
      p.width = static_cast<uint32_t>(shape.width);
      p.dst_rows = const_data<T>(dst_rows);
      p.src_rows = const_data<T>(src_rows);
      p.src_scale = data_or_null<acc_t<T>>(src_scale);
      p.dst_scale = data_or_null<acc_t<T>>(dst_scale);
      p.out = mutable_data<T>(out);
      multiply<false>(device, p);
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "sddmm", &sddmm); }

}  // namespace gnnsys::cuda
