// spmm: out[v] = dst_scale[v] * sum over in-edges e = (u, v) of src_scale[u] * weight[e] * x[u].
//
// Work: E x size multiply-adds. Bytes: one gathered row of x per edge, one written row per destination, the structure
// once; no message is ever stored. Mean is dst_scale = 1 / degree; a transposed mean is src_scale = 1 / degree.
#include "cpu/accumulate.h"
#include "cpu/features.h"
#include "cpu/row_work.h"

#include <torch/csrc/stable/library.h>

#include <optional>

namespace gnnsys {
namespace {

using OptionalTensor = std::optional<Tensor>;

template <typename T, typename id_t>
struct Problem {
  const int64_t* indptr;
  const id_t* indices;
  Positions positions;  // of an edge in weight
  int64_t num_dst;
  Shape shape;
  const T* x;
  const T* weight;             // [num_edges, heads]; null: ones
  const acc_t<T>* src_scale;   // null: ones
  const acc_t<T>* dst_scale;   // null: ones
  T* out;

  int64_t num_edges() const { return indptr[num_dst]; }
  bool weighted() const { return weight != nullptr || src_scale != nullptr; }
};

// coefficient[k] = weight * src_scale of the edges that start at `first`, for one head.
template <typename T, typename id_t>
void load_coefficients(const Problem<T, id_t>& p, int64_t first, int64_t count, int64_t head, acc_t<T>* coefficient) {
  using A = acc_t<T>;
  const int64_t heads = p.shape.heads;
  for (int64_t k = 0; k < count; ++k) {
    const int64_t e = first + k;
    A value{1};
    if (p.weight != nullptr) {
      value = static_cast<A>(p.weight[p.positions(e) * heads + head]);
    }
    if (p.src_scale != nullptr) {
      value *= p.src_scale[p.indices[e]];
    }
    coefficient[k] = value;
  }
}

template <bool kWeighted, typename T, typename id_t>
void sum_row(const Problem<T, id_t>& p, int64_t v, acc_t<T>* sum) {
  acc_t<T> coefficient[kChunk];
  const int64_t width = p.shape.width;
  for (int64_t e = p.indptr[v]; e < p.indptr[v + 1]; e += kChunk) {
    const Neighbors<id_t> near{p.indices + e, std::min(kChunk, p.indptr[v + 1] - e), p.num_edges() - e};
    for (int64_t h = 0; h < p.shape.heads; ++h) {
      if constexpr (kWeighted) {
        load_coefficients(p, e, near.count, h, coefficient);
      }
      accumulate_chunk<kWeighted>(sum + h * width, p.x + h * width, width, p.shape.size(), near,
                                  kWeighted ? coefficient : nullptr, e == p.indptr[v], h == 0 ? p.x : nullptr);
    }
  }
}

template <typename T, typename id_t>
void spmm_rows(const Problem<T, id_t>& p) {
  const int64_t size = p.shape.size();
  parallel_for_rows(p.indptr, p.num_dst, [&](int64_t begin, int64_t end) {
    RowSum<T> row(size);
    for (int64_t v = begin; v < end; ++v) {
      T* const out = p.out + v * size;
      if (p.indptr[v] == p.indptr[v + 1]) {
        std::fill(out, out + size, T{0});
        continue;
      }
      acc_t<T>* const sum = row.begin(out);
      p.weighted() ? sum_row<true>(p, v, sum) : sum_row<false>(p, v, sum);
      row.finish(out, sum, size, p.dst_scale != nullptr ? p.dst_scale[v] : acc_t<T>{1});
    }
  });
}

// The last three arguments, the transposed structure, are not for this kernel: autograd keeps them for the backward
// pass, which is this op again with the two structures exchanged.
Tensor spmm(const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions, const Tensor& x,
            const OptionalTensor& weight, const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
            const OptionalTensor&, const OptionalTensor&, const OptionalTensor&) {
  const Shape shape = check_features(x, "x");
  check_structure(indptr, indices, shape.num_rows);
  const int64_t num_dst = indptr.numel() - 1;
  const int64_t num_edges = indices.numel();
  const Positions at = check_positions(positions, num_edges);
  if (weight.has_value()) {
    check_head_values(*weight, "weight", num_edges, x, "x");
  }
  check_scale(src_scale, "src_scale", x, shape.num_rows);
  check_scale(dst_scale, "dst_scale", x, num_dst);
  Tensor out = new_features(x, num_dst);
  if (out.numel() == 0) {
    return out;
  }
  dispatch_features(x, "x", [&](auto value) {
    using T = decltype(value);
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      spmm_rows(Problem<T, id_t>{const_data<int64_t>(indptr), const_data<id_t>(indices), at, num_dst, shape,
                                 const_data<T>(x), data_or_null<T>(weight), data_or_null<acc_t<T>>(src_scale),
                                 data_or_null<acc_t<T>>(dst_scale), mutable_data<T>(out)});
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { m.impl("spmm", TORCH_BOX(&spmm)); }

}  // namespace gnnsys
