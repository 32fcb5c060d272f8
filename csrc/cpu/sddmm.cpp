// sddmm: out[e, h] = src_scale[u] * dst_scale[v] * <dst_rows[v, h], src_rows[u, h]> for every edge e = (u, v).
//
// Work: E x size multiply-adds. Bytes: one gathered row of src_rows per edge, one of dst_rows per destination, one
// number per edge and head written. The gradient of an edge weight, and dot-product attention.
#include "common/register.h"
#include "cpu/features.h"
#include "cpu/row_work.h"
#include "cpu/vectors/kernels.h"

#include <optional>

namespace gnnsys {
namespace {

using OptionalTensor = std::optional<Tensor>;

template <typename T, typename id_t>
struct Problem {
  const int64_t* indptr;
  const id_t* indices;
  Positions positions;  // of an edge in out
  int64_t num_dst;
  Shape shape;
  const T* dst_rows;
  const T* src_rows;
  const acc_t<T>* src_scale;  // null: ones
  const acc_t<T>* dst_scale;  // null: ones
  T* out;                     // [num_edges, heads]
};

template <typename T, typename id_t>
void sddmm_rows(const Problem<T, id_t>& p) {
  using A = acc_t<T>;
  const int64_t heads = p.shape.heads;
  const int64_t width = p.shape.width;
  const int64_t size = p.shape.size();
  const int64_t num_edges = p.indptr[p.num_dst];
  parallel_for_rows(p.indptr, p.num_dst, [&](int64_t begin, int64_t end) {
    std::vector<A> dots(static_cast<size_t>(kChunk * heads));
    for (int64_t v = begin; v < end; ++v) {
      const A dst_scale = p.dst_scale != nullptr ? p.dst_scale[v] : A{1};
      for (int64_t first = p.indptr[v]; first < p.indptr[v + 1]; first += kChunk) {
        const Neighbors<id_t> near{p.indices + first, std::min(kChunk, p.indptr[v + 1] - first), num_edges - first};
        neighbor_kernels<T, id_t>().dots(dots.data(), p.dst_rows + v * size, {p.src_rows, width, size, p.src_rows},
                                         heads, near);
        for (int64_t k = 0; k < near.count; ++k) {
          const A scale = p.src_scale != nullptr ? dst_scale * p.src_scale[near.ids[k]] : dst_scale;
          T* const out = p.out + p.positions(first + k) * heads;
          for (int64_t h = 0; h < heads; ++h) {
            out[h] = static_cast<T>(scale * dots[k * heads + h]);
          }
        }
      }
    }
  });
}

// As in spmm, the transposed structure is for autograd alone.
Tensor sddmm(const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions, const Tensor& dst_rows,
             const Tensor& src_rows, const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&) {
  const Shape shape = check_features(dst_rows, "dst_rows");
  const Shape src_shape = check_features(src_rows, "src_rows");
  check_same_dtype(src_rows, "src_rows", dst_rows, "dst_rows");
  CHECK_ARG(src_rows.dim() == dst_rows.dim() && src_shape.heads == shape.heads && src_shape.width == shape.width,
            "src_rows must have rows of the same shape as dst_rows");
  check_structure(indptr, indices, src_shape.num_rows);
  const int64_t num_dst = indptr.numel() - 1;
  CHECK_ARG(shape.num_rows == num_dst, "dst_rows must have ", num_dst, " rows, got ", shape.num_rows);
  const Positions at = check_positions(positions, indices.numel());
  check_scale(src_scale, "src_scale", src_rows, src_shape.num_rows);
  check_scale(dst_scale, "dst_scale", dst_rows, num_dst);
  Tensor out = new_head_values(dst_rows, indices.numel());
  dispatch_features(dst_rows, "dst_rows", [&](auto value) {
    using T = decltype(value);
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      sddmm_rows(Problem<T, id_t>{const_data<int64_t>(indptr), const_data<id_t>(indices), at, num_dst, shape,
                                  const_data<T>(dst_rows), const_data<T>(src_rows),
                                  data_or_null<acc_t<T>>(src_scale), data_or_null<acc_t<T>>(dst_scale),
                                  mutable_data<T>(out)});
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "sddmm", &sddmm); }

}  // namespace gnnsys
