// edge_softmax: alpha[e, h] = exp(score[e, h]) / the sum of it over the in-edges of the same destination.
//
// Work: one exp per edge and head. Bytes: each score read and each alpha written once (rows stay in the cache between
// their passes). The backward pass is grad_score = alpha * (grad - sum of alpha * grad over the row).
#include "common/register.h"
#include "cpu/features.h"
#include "cpu/row_work.h"
#include "cpu/softmax.h"

namespace gnnsys {
namespace {

int64_t check_scores(const Tensor& indptr, const Tensor& scores, const char* name) {
  check_contiguous(scores, name);
  CHECK_ARG(scores.dim() == 1 || scores.dim() == 2, name, " must be [num_edges] or [num_edges, heads], got ",
            scores.dim(), " dimensions");
  check_indptr(indptr, scores.size(0));
  return scores.dim() == 1 ? 1 : scores.size(1);
}

template <typename T>
void softmax_rows(const int64_t* indptr, int64_t num_dst, int64_t heads, const T* scores, T* alpha) {
  using A = acc_t<T>;
  parallel_for_rows(indptr, num_dst, [&](int64_t begin, int64_t end) {
    RowSoftmax<A> softmax(heads);
    std::vector<A> row;
    for (int64_t v = begin; v < end; ++v) {
      const int64_t first = indptr[v] * heads;
      const int64_t last = indptr[v + 1] * heads;
      row.assign(scores + first, scores + last);
      softmax(row.data(), indptr[v + 1] - indptr[v]);
      std::copy(row.begin(), row.end(), alpha + first);
    }
  });
}

template <typename T>
void softmax_grad_rows(const int64_t* indptr, int64_t num_dst, int64_t heads, const T* alpha, const T* grad,
                       T* grad_scores) {
  using A = acc_t<T>;
  parallel_for_rows(indptr, num_dst, [&](int64_t begin, int64_t end) {
    std::vector<A> total(heads);
    BlockSum<A> blocks;
    for (int64_t v = begin; v < end; ++v) {
      const int64_t first = indptr[v] * heads;
      sum_terms(blocks, total.data(), heads, indptr[v + 1] - indptr[v], [=](int64_t k, int64_t h) {
        return static_cast<A>(alpha[first + k * heads + h]) * static_cast<A>(grad[first + k * heads + h]);
      });
      for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t i = e * heads + h;
          grad_scores[i] = static_cast<T>(static_cast<A>(alpha[i]) * (static_cast<A>(grad[i]) - total[h]));
        }
      }
    }
  });
}

Tensor edge_softmax(const Tensor& indptr, const Tensor& scores) {
  const int64_t heads = check_scores(indptr, scores, "scores");
  Tensor alpha = empty_cpu(shape_of(scores), scores.scalar_type());
  dispatch_features(scores, "scores", [&](auto value) {
    using T = decltype(value);
    softmax_rows(const_data<int64_t>(indptr), indptr.numel() - 1, heads, const_data<T>(scores), mutable_data<T>(alpha));
  });
  return alpha;
}

Tensor edge_softmax_grad(const Tensor& indptr, const Tensor& alpha, const Tensor& grad) {
  const int64_t heads = check_scores(indptr, alpha, "alpha");
  check_contiguous(grad, "grad");
  check_same_dtype(grad, "grad", alpha, "alpha");
  CHECK_ARG(grad.numel() == alpha.numel(), "grad must have the shape of alpha");
  Tensor grad_scores = empty_cpu(shape_of(alpha), alpha.scalar_type());
  dispatch_features(alpha, "alpha", [&](auto value) {
    using T = decltype(value);
    softmax_grad_rows(const_data<int64_t>(indptr), indptr.numel() - 1, heads, const_data<T>(alpha),
                      const_data<T>(grad), mutable_data<T>(grad_scores));
  });
  return grad_scores;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "edge_softmax", &edge_softmax);
  REGISTER_OP(m, "edge_softmax_grad", &edge_softmax_grad);
}

}  // namespace gnnsys
