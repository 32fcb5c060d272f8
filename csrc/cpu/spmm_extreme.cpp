// spmm with max or min: out[v, f] = the largest (smallest) of weight[e] * x[u, f] over the in-edges e = (u, v), and
// arg[v, f], which in-edge that was, counted from the row's first; the first of equals. A row without edges: 0, -1.
// A NaN wins against everything, as in torch.
//
// Forward: the work and bytes of spmm, and four bytes more per output. Backward: O(output), never O(E x size).
#include "common/register.h"
#include "cpu/features.h"
#include "cpu/row_work.h"
#include "cpu/vectors/kernels.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>

namespace gnnsys {
namespace {

using OptionalTensor = std::optional<Tensor>;

template <typename T, typename id_t>
struct Problem {
  const int64_t* indptr;
  const id_t* indices;
  int64_t num_dst;
  Shape shape;
  const T* x;
  const T* weight;  // [num_edges, heads]; null: ones
  T* out;
  int32_t* arg;
};

// What a row has found so far, [size] each.
template <typename A>
struct Found {
  std::vector<A> best;
  std::vector<lane_t<A>> arg;
};

template <bool kMin, typename T, typename id_t>
void extreme_row(const Problem<T, id_t>& p, int64_t v, Found<acc_t<T>>& found) {
  using A = acc_t<T>;
  A coefficient[kChunk];
  const int64_t num_edges = p.indptr[p.num_dst];
  for (int64_t e = p.indptr[v]; e < p.indptr[v + 1]; e += kChunk) {
    const Neighbors<id_t> near{p.indices + e, std::min(kChunk, p.indptr[v + 1] - e), num_edges - e};
    for (int64_t h = 0; h < p.shape.heads; ++h) {
      for (int64_t k = 0; k < near.count; ++k) {
        coefficient[k] = p.weight != nullptr ? static_cast<A>(p.weight[(e + k) * p.shape.heads + h]) : A{1};
      }
      const int64_t f = h * p.shape.width;
      const auto& kernels = neighbor_kernels<T, id_t>();
      (kMin ? kernels.smallest : kernels.largest)(&found.best[f], &found.arg[f],
                                                  {p.x + f, p.shape.width, p.shape.size(), h == 0 ? p.x : nullptr},
                                                  near, coefficient, e - p.indptr[v]);
    }
  }
}

template <bool kMin, typename T, typename id_t>
void extreme_rows(const Problem<T, id_t>& p) {
  using A = acc_t<T>;
  const int64_t size = p.shape.size();
  parallel_for_rows(p.indptr, p.num_dst, [&](int64_t begin, int64_t end) {
    Found<A> found{std::vector<A>(size), std::vector<lane_t<A>>(size)};
    for (int64_t v = begin; v < end; ++v) {
      std::fill(found.best.begin(), found.best.end(), A{0});
      std::fill(found.arg.begin(), found.arg.end(), lane_t<A>{-1});
      extreme_row<kMin>(p, v, found);
      for (int64_t f = 0; f < size; ++f) {
        p.out[v * size + f] = static_cast<T>(found.best[f]);
        p.arg[v * size + f] = static_cast<int32_t>(found.arg[f]);
      }
    }
  });
}

// The transposed structure is for the gradient on other devices: here that scatters, and needs none.
std::tuple<Tensor, Tensor> spmm_extreme(const Tensor& indptr, const Tensor& indices, const Tensor& x,
                                        const OptionalTensor& weight, bool minimum, const OptionalTensor&,
                                        const OptionalTensor&, const OptionalTensor&) {
  const Shape shape = check_features(x, "x");
  check_structure(indptr, indices, shape.num_rows);
  if (weight.has_value()) {
    check_head_values(*weight, "weight", indices.numel(), x, "x");
  }
  const int64_t num_dst = indptr.numel() - 1;
  Tensor out = new_features(x, num_dst);
  Tensor arg = empty_cpu({num_dst, shape.size()}, ScalarType::Int);
  dispatch_features(x, "x", [&](auto value) {
    using T = decltype(value);
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      const Problem<T, id_t> p{const_data<int64_t>(indptr), const_data<id_t>(indices), num_dst,  shape,
                               const_data<T>(x),            data_or_null<T>(weight),   mutable_data<T>(out),
                               mutable_data<int32_t>(arg)};
      minimum ? extreme_rows<true>(p) : extreme_rows<false>(p);
    });
  });
  return {out, arg};
}

// Whether every arg names an edge of its row, or none: forward's do, and what they say is written to. One pass.
bool names_edges(const int64_t* indptr, const int32_t* arg, int64_t num_rows, int64_t size) {
  std::atomic<bool> good{true};
  parallel_for(num_rows, (1 << 15) / std::max<int64_t>(size, 1), [&](int64_t begin, int64_t end) {
    bool outside = false;
    for (int64_t v = begin; v < end; ++v) {
      const int64_t degree = indptr[v + 1] - indptr[v];
      for (int64_t f = 0; f < size; ++f) {
        outside |= arg[v * size + f] >= degree;
      }
    }
    if (outside) {
      good = false;
    }
  });
  return good;
}

// What both gradients check.
Shape check_gradient(const Tensor& indptr, const Tensor& indices, const Tensor& arg, const Tensor& grad) {
  const Shape shape = check_features(grad, "grad");
  check_ids(indices, "indices");
  check_indptr(indptr, indices.numel());
  CHECK_ARG(shape.num_rows == indptr.numel() - 1, "grad must have ", indptr.numel() - 1, " rows");
  check_contiguous(arg, "arg");
  check_dtype(arg, ScalarType::Int, "arg");
  CHECK_ARG(arg.numel() == grad.numel(), "arg must have as many entries as grad");
  CHECK_ARG(names_edges(const_data<int64_t>(indptr), const_data<int32_t>(arg), shape.num_rows, shape.size()),
            "arg must name an in-edge of its row, or none by -1: pass what spmm_extreme returned");
  return shape;
}

// grad_x[u, f] = sum of weight * grad[v, f] over the outputs that took their value from u, in the order of v. Threads
// own features, a cache line's worth at least, so no two add to the same place.
template <typename T, typename id_t>
void add_to_sources(const int64_t* indptr, const id_t* indices, const int32_t* arg, const T* grad, const T* weight,
                    const Shape& shape, acc_t<T>* grad_x) {
  using A = acc_t<T>;
  const int64_t size = shape.size();
  parallel_for(size, kCacheLine / static_cast<int64_t>(sizeof(A)), [&](int64_t begin, int64_t end) {
    for (int64_t v = 0; v < shape.num_rows; ++v) {
      for (int64_t f = begin; f < end; ++f) {
        const int64_t offset = arg[v * size + f];
        if (offset >= 0) {
          const int64_t e = indptr[v] + offset;
          const A factor = weight != nullptr ? static_cast<A>(weight[e * shape.heads + f / shape.width]) : A{1};
          grad_x[indices[e] * size + f] += factor * static_cast<A>(grad[v * size + f]);
        }
      }
    }
  });
}

Tensor spmm_extreme_grad_x(const Tensor& indptr, const Tensor& indices, const Tensor& arg, const Tensor& grad,
                           const OptionalTensor& weight, int64_t num_src, const OptionalTensor&, const OptionalTensor&,
                           const OptionalTensor&) {
  const Shape shape = check_gradient(indptr, indices, arg, grad);
  if (weight.has_value()) {
    check_head_values(*weight, "weight", indices.numel(), grad, "grad");
  }
  check_id_range(indices, num_src, "indices");
  // In the type of sums, whatever grad is: many small terms meet in one place.
  Tensor grad_x = zeros_cpu({num_src, shape.size()}, sum_type(grad));
  dispatch_features(grad, "grad", [&](auto value) {
    using T = decltype(value);
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      add_to_sources(const_data<int64_t>(indptr), const_data<id_t>(indices), const_data<int32_t>(arg),
                     const_data<T>(grad), data_or_null<T>(weight), shape, mutable_data<acc_t<T>>(grad_x));
    });
  });
  return grad_x;
}

// grad_weight[e, h] = sum of x[u, f] * grad[v, f] over the features f of head h that took their value through e.
template <typename T, typename id_t>
void add_to_edges(const int64_t* indptr, const id_t* indices, const int32_t* arg, const T* grad, const T* x,
                  const Shape& shape, acc_t<T>* grad_weight) {
  using A = acc_t<T>;
  const int64_t size = shape.size();
  parallel_for_rows(indptr, shape.num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      for (int64_t f = 0; f < size; ++f) {
        const int64_t offset = arg[v * size + f];
        if (offset >= 0) {
          const int64_t e = indptr[v] + offset;
          grad_weight[e * shape.heads + f / shape.width] +=
              static_cast<A>(x[indices[e] * size + f]) * static_cast<A>(grad[v * size + f]);
        }
      }
    }
  });
}

Tensor spmm_extreme_grad_weight(const Tensor& indptr, const Tensor& indices, const Tensor& arg, const Tensor& grad,
                                const Tensor& x) {
  const Shape shape = check_gradient(indptr, indices, arg, grad);
  const Shape x_shape = check_features(x, "x");
  check_same_dtype(x, "x", grad, "grad");
  CHECK_ARG(x_shape.heads == shape.heads && x_shape.width == shape.width, "x must have rows of the shape of grad's");
  check_id_range(indices, x_shape.num_rows, "indices");
  Tensor grad_weight = zeros_cpu({indices.numel(), shape.heads}, sum_type(grad));
  dispatch_features(grad, "grad", [&](auto value) {
    using T = decltype(value);
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      add_to_edges(const_data<int64_t>(indptr), const_data<id_t>(indices), const_data<int32_t>(arg),
                   const_data<T>(grad), const_data<T>(x), shape, mutable_data<acc_t<T>>(grad_weight));
    });
  });
  return grad_weight;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "spmm_extreme", &spmm_extreme);
  REGISTER_OP(m, "spmm_extreme_grad_x", &spmm_extreme_grad_x);
  REGISTER_OP(m, "spmm_extreme_grad_weight", &spmm_extreme_grad_weight);
}

}  // namespace gnnsys
