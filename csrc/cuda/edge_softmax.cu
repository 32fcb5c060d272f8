// edge_softmax on the device: the rows' totals, then alpha for every edge and head.
//
// Bytes: scores are read three times (the last two from a cache for all but long rows) and written once.
#include "common/register.h"
#include "cuda/edge_softmax.cuh"

namespace gnnsys::cuda {
namespace {

template <typename T>
struct GivenScores {
  const T* scores;
  int64_t heads;
  __device__ acc_t<T> operator()(int64_t e, int64_t, int64_t head) const {
    return to_sum<acc_t<T>>(scores[e * heads + head]);
  }
};

// Segments are runs of (edge, head): a warp per segment walks them in order.
template <typename T, typename Value>
__global__ void for_each_value(Segments segments, int64_t heads, Value value, T* out) {
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (unit >= segments.count()) {
    return;
  }
  const Segment segment = segments.at(unit);
  if (segment.row < 0) {
    return;
  }
  for (int64_t i = segment.begin * heads + threadIdx.x % kWarp; i < segment.end * heads; i += kWarp) {
    out[i] = from_sum<T>(value(i, segment.row * heads + i % heads));
  }
}

template <typename T>
struct Alpha {
  const T* scores;
  const Total<acc_t<T>>* totals;
  __device__ acc_t<T> operator()(int64_t i, int64_t row_head) const {
    return totals[row_head].alpha(to_sum<acc_t<T>>(scores[i]));
  }
};

template <typename T>
struct AlphaGrad {
  const T* alpha;
  const T* grad;
  const acc_t<T>* total;  // of alpha * grad
  __device__ acc_t<T> operator()(int64_t i, int64_t row_head) const {
    return to_sum<acc_t<T>>(alpha[i]) * (to_sum<acc_t<T>>(grad[i]) - total[row_head]);
  }
};

template <typename T>
struct Product {
  const T* a;
  const T* b;
  __device__ acc_t<T> operator()(int64_t i) const { return to_sum<acc_t<T>>(a[i]) * to_sum<acc_t<T>>(b[i]); }
};

template <typename T, typename Value>
void write_values(const Device& device, const Segments& segments, int64_t heads, const Value& value, T* out) {
  if (segments.num_edges > 0 && heads > 0) {
    for_each_value<<<num_blocks(segments.count() * kWarp, 256), 256, 0, device.stream()>>>(segments, heads, value, out);
    CUDA_CHECK_LAUNCH();
  }
}

int64_t check_scores(const Device& device, const Tensor& indptr, const Tensor& scores, const char* name) {
  check_contiguous(scores, device, name);
  CHECK_ARG(scores.dim() == 1 || scores.dim() == 2, name, " must be [num_edges] or [num_edges, heads], got ",
            scores.dim(), " dimensions");
  check_readable(indptr, device, "indptr");
  check_dtype(indptr, ScalarType::Long, "indptr");
  CHECK_ARG(indptr.dim() == 1 && indptr.numel() >= 1, "indptr must have num_rows + 1 entries");
  check_edges(indptr.numel() - 1, 1, scores.size(0));
  return scores.dim() == 1 ? 1 : scores.size(1);
}

Tensor edge_softmax(const Tensor& indptr, const Tensor& scores) {
  check_on_device(scores, "scores");
  const Device device(scores);
  const int64_t heads = check_scores(device, indptr, scores, "scores");
  Tensor alpha = device.empty(shape_of(scores), scores.scalar_type());
  const Segments segments{const_data<int64_t>(indptr), indptr.numel() - 1, scores.size(0)};
  dispatch_features(scores, "scores", [&](auto value) {
    using T = decltype(value);
    using A = acc_t<T>;
    Tensor totals = device.workspace<Total<A>>(segments.num_rows * heads);
    softmax_totals(device, segments, GivenScores<T>{const_data<T>(scores), heads}, heads,
                   mutable_data<Total<A>>(totals));
    write_values(device, segments, heads, Alpha<T>{const_data<T>(scores), const_data<Total<A>>(totals)},
                 mutable_data<T>(alpha));
  });
  return alpha;
}

Tensor edge_softmax_grad(const Tensor& indptr, const Tensor& alpha, const Tensor& grad) {
  check_on_device(alpha, "alpha");
  const Device device(alpha);
  const int64_t heads = check_scores(device, indptr, alpha, "alpha");
  check_contiguous(grad, device, "grad");
  check_dtype(grad, alpha.scalar_type(), "grad");
  CHECK_ARG(grad.numel() == alpha.numel(), "grad must have the shape of alpha");
  Tensor grad_scores = device.empty(shape_of(alpha), alpha.scalar_type());
  const Segments segments{const_data<int64_t>(indptr), indptr.numel() - 1, alpha.size(0)};
  dispatch_features(alpha, "alpha", [&](auto value) {
    using T = decltype(value);
    using A = acc_t<T>;
    Tensor total = device.workspace<A>(segments.num_rows * heads);
    sum_values(device, segments, heads, Product<T>{const_data<T>(alpha), const_data<T>(grad)}, mutable_data<A>(total));
    write_values(device, segments, heads,
                 AlphaGrad<T>{const_data<T>(alpha), const_data<T>(grad), const_data<A>(total)},
                 mutable_data<T>(grad_scores));
  });
  return grad_scores;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "edge_softmax", &edge_softmax);
  REGISTER_OP(m, "edge_softmax_grad", &edge_softmax_grad);
}

}  // namespace gnnsys::cuda
