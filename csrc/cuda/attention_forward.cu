// gat_aggregate on the device: what csrc/cpu/attention.cpp computes, by rows cut into segments.
//
// The softmax's totals per row and head (edge_softmax.cuh), then out = sum of keep * alpha * x[u], the coefficient
// computed again by every lane that needs it: nothing of the size of the edges is stored.
#include "common/register.h"
#include "cuda/attention_sum.cuh"
#include "cuda/edge_softmax.cuh"

#include <tuple>

namespace gnnsys::cuda {
namespace {

template <typename T, typename id_t>
struct EdgeScore {
  Scores<T> scores;
  const id_t* indices;
  int64_t num_src;
  __device__ acc_t<T> operator()(int64_t e, int64_t v, int64_t h) const {
    return scores.relu(scores.raw(checked_id(indices[e], num_src), v, e, h));
  }
};

// keep * alpha of edge e = (u, v), seen from v.
template <typename T>
struct ForwardCoefficient {
  Scores<T> scores;
  const Total<acc_t<T>>* totals;
  Dropout<acc_t<T>> dropout;
  __device__ acc_t<T> operator()(int64_t v, int64_t u, int64_t e, int64_t h) const {
    return dropout(e, h) * totals[v * scores.heads + h].alpha(scores.relu(scores.raw(u, v, e, h)));
  }
};

// 0 for rows without edges.
template <typename A>
__global__ void write_log_totals(int64_t count, int64_t heads, const int64_t* indptr, const Total<A>* totals, A* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) {
    const bool is_empty = indptr[i / heads] == indptr[i / heads + 1];
    out[i] = is_empty ? A{0} : totals[i].largest + log_of(totals[i].total);
  }
}

// The transposed structure is for autograd alone.
std::tuple<Tensor, Tensor> gat_aggregate(const Tensor& indptr, const Tensor& indices, const Tensor& x,
                                         const Tensor& score_src, const Tensor& score_dst,
                                         const OptionalTensor& edge_score, double negative_slope, double dropout,
                                         int64_t key, const OptionalTensor&, const OptionalTensor&,
                                         const OptionalTensor&) {
  check_on_device(x, "x");
  const Device device(x);
  check_csc(indptr, indices, device);
  const int64_t num_dst = indptr.numel() - 1;
  const Shape shape = check_attention(device, x, score_src, score_dst, edge_score, num_dst, indices.numel(), dropout);
  check_edges(num_dst, shape.num_rows, indices.numel());
  const Segments segments{const_data<int64_t>(indptr), num_dst, indices.numel()};
  Tensor out = device.empty({num_dst, shape.heads, shape.width}, x.scalar_type());
  Tensor log_total = device.empty({num_dst, shape.heads}, sum_type(x));
  dispatch_features(x, "x", [&](auto value) {
    using T = decltype(value);
    using A = acc_t<T>;
    const Scores<T> scores = scores_of<T>(shape.heads, score_src, score_dst, edge_score, negative_slope);
    const int64_t count = num_dst * shape.heads;
    Tensor totals = device.workspace<Total<A>>(count);
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      const auto* ids = const_data<id_t>(indices);
      softmax_totals(device, segments, EdgeScore<T, id_t>{scores, ids, shape.num_rows}, shape.heads,
                     mutable_data<Total<A>>(totals));
      const ForwardCoefficient<T> coefficient{scores, const_data<Total<A>>(totals), Dropout<A>(dropout, key)};
      sum_rows<T, id_t>(device, segments, Edges<id_t>{ids, {nullptr, nullptr, segments.num_edges}, shape.num_rows}, shape, coefficient, const_data<T>(x),
                        mutable_data<T>(out));
    });
    if (count > 0) {
      write_log_totals<<<num_blocks(count, 256), 256, 0, device.stream()>>>(
          count, shape.heads, segments.indptr, const_data<Total<A>>(totals), mutable_data<A>(log_total));
      CUDA_CHECK_LAUNCH();
    }
  });
  return {out, log_total};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "gat_aggregate", &gat_aggregate); }

}  // namespace gnnsys::cuda
