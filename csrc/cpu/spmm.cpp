// spmm: out[v] = dst_scale[v] * sum over in-edges e = (u, v) of src_scale[u] * weight[e] * x[u].
//
// Work: E x size multiply-adds. Bytes: one gathered row of x per edge, one written row per destination, the structure
// once; no message is ever stored. Mean is dst_scale = 1 / degree; a transposed mean is src_scale = 1 / degree.
#include "common/register.h"
#include "cpu/block_sum.h"
#include "cpu/features.h"
#include "cpu/row_sum.h"
#include "cpu/row_work.h"

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
  bool add;  // to what out holds

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
void sum_row(const Problem<T, id_t>& p, int64_t v, acc_t<T>* sum, BlockSum<acc_t<T>>& blocks) {
  acc_t<T> coefficient[kChunk];
  const int64_t width = p.shape.width;
  const int64_t count = p.indptr[v + 1] - p.indptr[v];
  for (int64_t done = 0; done < count; done += kChunk) {
    const int64_t e = p.indptr[v] + done;
    const Neighbors<id_t> near{p.indices + e, std::min(kChunk, count - done), p.num_edges() - e};
    for (int64_t h = 0; h < p.shape.heads; ++h) {
      if constexpr (kWeighted) {
        load_coefficients(p, e, near.count, h, coefficient);
      }
      neighbor_kernels<T, id_t>().sum(sum + h * width, {p.x + h * width, width, p.shape.size(), h == 0 ? p.x : nullptr},
                                      near, kWeighted ? coefficient : nullptr, begins_block(done));
    }
    blocks.after(sum, p.shape.size(), done + near.count, count);
  }
}

template <typename T, typename id_t>
void spmm_rows(const Problem<T, id_t>& p) {
  const int64_t size = p.shape.size();
  const PlainSums<T, id_t> plain{p.indptr,    p.indices,   p.num_edges(), kBlock, p.x, size,
                                 p.src_scale, p.dst_scale, p.out};
  parallel_for_rows(p.indptr, p.num_dst, [&](int64_t begin, int64_t end) {
    RowSum<T> row(size);
    BlockSum<acc_t<T>> blocks;
    std::vector<acc_t<T>> scratch(p.add ? static_cast<size_t>(size) : 0);
    bool whole = !p.add && p.weight == nullptr;
    for (int64_t v = begin; v < end; ++v) {
      if (whole) {
        const int64_t next = neighbor_kernels<T, id_t>().sum_rows(plain, v, end);
        whole = next >= 0;
        v = std::max(v, next);
        if (v == end) {
          return;
        }
      }
      T* const out = p.out + v * size;
      if (p.indptr[v] == p.indptr[v + 1]) {
        if (!p.add) {
          std::fill(out, out + size, T{0});
        }
        continue;
      }
      if (p.add) {
        const acc_t<T> scale = p.dst_scale != nullptr ? p.dst_scale[v] : acc_t<T>{1};
        p.weighted() ? sum_row<true>(p, v, scratch.data(), blocks) : sum_row<false>(p, v, scratch.data(), blocks);
        for (int64_t f = 0; f < size; ++f) {
          out[f] = static_cast<T>(static_cast<acc_t<T>>(out[f]) + scratch[f] * scale);
        }
        continue;
      }
      acc_t<T>* const sum = row.begin(out);
      p.weighted() ? sum_row<true>(p, v, sum, blocks) : sum_row<false>(p, v, sum, blocks);
      row.finish(out, sum, size, p.dst_scale != nullptr ? p.dst_scale[v] : acc_t<T>{1});
    }
  });
}

// x's shape, when the arguments agree with it.
Shape check_spmm(const Tensor& indptr, const Tensor& indices, const Tensor& x, const OptionalTensor& weight,
                 const OptionalTensor& src_scale, const OptionalTensor& dst_scale) {
  const Shape shape = check_features(x, "x");
  check_structure(indptr, indices, shape.num_rows);
  if (weight.has_value()) {
    check_head_values(*weight, "weight", indices.numel(), x, "x");
  }
  check_scale(src_scale, "src_scale", x, shape.num_rows);
  check_scale(dst_scale, "dst_scale", x, indptr.numel() - 1);
  return shape;
}

void spmm_into(const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions, const Tensor& x,
               const OptionalTensor& weight, const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
               const Shape& shape, const Tensor& out, bool add) {
  const Positions at = check_positions(positions, indices.numel());
  if (out.numel() == 0) {
    return;
  }
  dispatch_features(x, "x", [&](auto value) {
    using T = decltype(value);
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      spmm_rows(Problem<T, id_t>{const_data<int64_t>(indptr), const_data<id_t>(indices), at, indptr.numel() - 1, shape,
                                 const_data<T>(x), data_or_null<T>(weight), data_or_null<acc_t<T>>(src_scale),
                                 data_or_null<acc_t<T>>(dst_scale), mutable_data<T>(out), add});
    });
  });
}

// The last three arguments, the transposed structure, are not for this kernel: autograd keeps them for the backward
// pass, which is this op again with the two structures exchanged.
Tensor spmm(const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions, const Tensor& x,
            const OptionalTensor& weight, const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
            const OptionalTensor&, const OptionalTensor&, const OptionalTensor&) {
  const Shape shape = check_spmm(indptr, indices, x, weight, src_scale, dst_scale);
  Tensor out = new_features(x, indptr.numel() - 1);
  spmm_into(indptr, indices, positions, x, weight, src_scale, dst_scale, shape, out, false);
  return out;
}

void into_given(const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions, const Tensor& x,
                const OptionalTensor& weight, const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
                const Tensor& out, bool add) {
  const Shape shape = check_spmm(indptr, indices, x, weight, src_scale, dst_scale);
  const Shape out_shape = check_features(out, "out");
  check_same_dtype(out, "out", x, "x");
  CHECK_ARG(out.dim() == x.dim() && out_shape.num_rows == indptr.numel() - 1 && out_shape.heads == shape.heads &&
                out_shape.width == shape.width,
            "out must have ", indptr.numel() - 1, " rows of the shape of x's");
  spmm_into(indptr, indices, positions, x, weight, src_scale, dst_scale, shape, out, add);
}

// out += the same: each row is summed first, then added to what out holds.
void spmm_add(const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions, const Tensor& x,
              const OptionalTensor& weight, const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
              Tensor out) {
  into_given(indptr, indices, positions, x, weight, src_scale, dst_scale, out, true);
}

// out = the same.
void spmm_out(const Tensor& indptr, const Tensor& indices, const OptionalTensor& positions, const Tensor& x,
              const OptionalTensor& weight, const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
              Tensor out) {
  into_given(indptr, indices, positions, x, weight, src_scale, dst_scale, out, false);
}

// 1 / in-degree, 1 where there is no in-edge: dst_scale of a mean.
Tensor inverse_degrees(const Tensor& indptr, ScalarType dtype) {
  check_vector(indptr, "indptr");
  check_dtype(indptr, ScalarType::Long, "indptr");
  CHECK_ARG(indptr.numel() >= 1, "indptr must have num_dst + 1 entries, got none");
  CHECK_ARG(dtype == ScalarType::Float || dtype == ScalarType::Double, "dtype must be float32 or float64, got ",
            dtype_name(dtype));
  Tensor out = empty_cpu({indptr.numel() - 1}, dtype);
  const int64_t* const p = const_data<int64_t>(indptr);
  const auto invert = [&](auto* scale) {
    using A = std::remove_pointer_t<decltype(scale)>;
    parallel_for(out.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; ++v) {
        // Without a sign: whoever looks at an indptr that is none is not to overflow.
        const uint64_t degree = static_cast<uint64_t>(p[v + 1]) - static_cast<uint64_t>(p[v]);
        scale[v] = A{1} / static_cast<A>(p[v + 1] > p[v] ? degree : 1);
      }
    });
  };
  dtype == ScalarType::Float ? invert(mutable_data<float>(out)) : invert(mutable_data<double>(out));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "spmm", &spmm);
  REGISTER_OP(m, "spmm_add", &spmm_add);
  REGISTER_OP(m, "spmm_out", &spmm_out);
  REGISTER_OP(m, "inverse_degrees", &inverse_degrees);
}

}  // namespace gnnsys
