// The gradient of gat_aggregate on the device, as csrc/cpu/attention.cpp derives it.
//
// One number per edge and head, the gradient of its score, is made from log_total; rows, and those numbers, are then
// summed by the transposed structure and by the structure itself.
#include "common/register.h"
#include "cuda/attention_sum.cuh"
#include "cuda/edge_softmax.cuh"

#include <tuple>
#include <utility>

namespace gnnsys::cuda {
namespace {

// keep * alpha of edge e = (u, v), seen from u.
template <typename T>
struct BackwardCoefficient {
  Scores<T> scores;
  const acc_t<T>* log_total;
  Dropout<acc_t<T>> dropout;
  __device__ acc_t<T> operator()(int64_t u, int64_t v, int64_t e, int64_t h) const {
    return dropout(e, h) * exp_of(scores.relu(scores.raw(u, v, e, h)) - log_total[v * scores.heads + h]);
  }
};

// The gradient of the score of e = (u, v) before the leaky relu, by that of alpha.
template <typename T>
struct ScoreGradient {
  using A = acc_t<T>;
  BackwardCoefficient<T> forward;
  const A* grad_dot_out;  // [num_dst, heads]
  __device__ A operator()(int64_t u, int64_t v, int64_t e, int64_t h, A d_alpha) const {
    const Scores<T>& scores = forward.scores;
    const A raw = scores.raw(u, v, e, h);
    const A alpha = exp_of(scores.relu(raw) - forward.log_total[v * scores.heads + h]);
    const A less = grad_dot_out[v * scores.heads + h];
    return alpha * (forward.dropout(e, h) * d_alpha - less) * scores.relu_grad(raw);
  }
};

// Gradients of x (its dtype) and of score_src, score_dst and edge_score (in the type that sums are made in).
std::tuple<Tensor, Tensor, Tensor, Tensor> gat_aggregate_grad(
    const Tensor& indptr, const Tensor& t_indptr, const Tensor& t_indices, const Tensor& t_positions, const Tensor& x,
    const Tensor& score_src, const Tensor& score_dst, const OptionalTensor& edge_score, double negative_slope,
    double dropout, int64_t key, const Tensor& out, const Tensor& log_total, const Tensor& grad) {
  check_on_device(x, "x");
  const Device device(x);
  check_csc(t_indptr, t_indices, device);
  check_readable(indptr, device, "indptr");
  check_dtype(indptr, ScalarType::Long, "indptr");
  CHECK_ARG(indptr.dim() == 1 && indptr.numel() >= 1, "indptr must have num_rows + 1 entries");
  const int64_t num_dst = indptr.numel() - 1;
  const int64_t num_edges = t_indices.numel();
  const Shape shape = check_attention(device, x, score_src, score_dst, edge_score, num_dst, num_edges, dropout);
  CHECK_ARG(t_indptr.numel() - 1 == shape.num_rows, "t_indptr must have ", shape.num_rows + 1, " entries");
  const Positions positions = check_positions(t_positions, device, num_edges);
  for (const auto& [tensor, name] : {std::pair{&grad, "grad"}, std::pair{&out, "out"}}) {
    check_contiguous(*tensor, device, name);
    check_dtype(*tensor, x.scalar_type(), name);
    CHECK_ARG(tensor->numel() == num_dst * shape.size(), name, " must be [num_dst, heads, width]");
  }
  check_contiguous(log_total, device, "log_total");
  check_dtype(log_total, sum_type(x), "log_total");
  CHECK_ARG(log_total.numel() == num_dst * shape.heads, "log_total must be [num_dst, heads]");
  check_edges(num_dst, shape.num_rows, num_edges);
  const Segments rows{const_data<int64_t>(indptr), num_dst, num_edges};
  const Segments columns{const_data<int64_t>(t_indptr), shape.num_rows, num_edges};
  Tensor grad_x = device.empty(shape_of(x), x.scalar_type());
  Tensor grad_src = device.empty({shape.num_rows, shape.heads}, sum_type(x));
  Tensor grad_dst = device.empty({num_dst, shape.heads}, sum_type(x));
  Tensor grad_edge = device.empty({num_edges, shape.heads}, sum_type(x));
  Tensor grad_dot_out = device.empty({num_dst, shape.heads}, sum_type(x));
  dispatch_features(x, "x", [&](auto value) {
    using T = decltype(value);
    using A = acc_t<T>;
    const Scores<T> scores = scores_of<T>(shape.heads, score_src, score_dst, edge_score, negative_slope);
    const BackwardCoefficient<T> coefficient{scores, const_data<A>(log_total), Dropout<A>(dropout, key)};
    dot_rows(device, num_dst * shape.heads, shape.width, const_data<T>(grad), const_data<T>(out),
             mutable_data<A>(grad_dot_out));
    dispatch_ids(t_indices, [&](auto id) {
      using id_t = decltype(id);
      const Edges<id_t> edges{const_data<id_t>(t_indices), positions, num_dst};
      const ScoreGradient<T> gradient{coefficient, const_data<A>(grad_dot_out)};
      edge_gradients<T, id_t>(device, columns, edges, shape, gradient, const_data<T>(x), const_data<T>(grad),
                              mutable_data<A>(grad_edge));
      sum_rows<T, id_t>(device, columns, edges, shape, coefficient, const_data<T>(grad),
                        mutable_data<T>(grad_x));
      sum_values(device, columns, shape.heads,
                 EdgeValue<A>{const_data<A>(grad_edge), edges.positions, shape.heads}, mutable_data<A>(grad_src));
    });
    sum_values(device, rows, shape.heads, EdgeValue<A>{const_data<A>(grad_edge), {nullptr, nullptr, num_edges}, shape.heads},
               mutable_data<A>(grad_dst));
  });
  return {grad_x, grad_src, grad_dst, grad_edge};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "gat_aggregate_grad", &gat_aggregate_grad); }

}  // namespace gnnsys::cuda
