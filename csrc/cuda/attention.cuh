// What the attention kernels share: arithmetic by type, lanes in groups, scores and dropout of an edge and head.
#pragma once

#include "common/philox.h"
#include "cuda/features.cuh"

namespace gnnsys::cuda {

__device__ inline int64_t checked_id(int64_t id, int64_t bound) {
  if (!is_inside(id, bound)) {
    fault("indices", id, bound);
  }
  return id;
}

__device__ inline int64_t checked_position(const Positions& positions, int64_t e) {
  const int64_t position = positions(e);
  if (!is_inside(position, positions.num_edges)) {
    fault("positions", position, positions.num_edges);
  }
  return position;
}

// The other ends of the edges of a structure.
template <typename id_t>
struct Edges {
  const id_t* indices;
  Positions positions;
  int64_t num_ids;  // what indices are below

  __device__ int64_t operator()(int64_t e) const { return checked_id(indices[e], num_ids); }
  __device__ int64_t position(int64_t e) const { return checked_position(positions, e); }
};

constexpr uint32_t kDropoutStream = 0x647270;  // as on the CPU: the same mask under the same key

__device__ inline float exp_of(float value) { return expf(value); }
__device__ inline double exp_of(double value) { return exp(value); }
__device__ inline float log_of(float value) { return logf(value); }
__device__ inline double log_of(double value) { return log(value); }
__device__ inline float max_of(float a, float b) { return fmaxf(a, b); }
__device__ inline double max_of(double a, double b) { return fmax(a, b); }

// The lanes of this thread's group of kGroup.
template <int kGroup>
__device__ unsigned group_mask() {
  if constexpr (kGroup == kWarp) {
    return kAllLanes;
  } else {
    return ((1u << kGroup) - 1) << (threadIdx.x % kWarp / kGroup * kGroup);
  }
}

// Attention dropout: the factor of (edge, head), the same wherever and whenever it is asked for.
template <typename A>
struct Dropout {
  uint64_t threshold;  // of a 32-bit word; 0: nothing is dropped
  A kept;
  uint64_t key;

  Dropout(double probability, int64_t of)
      : threshold(static_cast<uint64_t>(probability * 4294967296.0)),
        kept(static_cast<A>(1.0 / (1.0 - probability))),
        key(static_cast<uint64_t>(of)) {}

  __device__ A operator()(int64_t edge, int64_t head) const {
    if (threshold == 0) {
      return kept;
    }
    const Words words = philox4x32(static_cast<uint32_t>(edge), static_cast<uint32_t>(edge >> 32),
                                   static_cast<uint32_t>(head / 4), kDropoutStream, key);
    const int at = static_cast<int>(head % 4);
    const uint32_t word = at == 0 ? words.w[0] : at == 1 ? words.w[1] : at == 2 ? words.w[2] : words.w[3];
    return word >= threshold ? kept : A{0};
  }
};

template <typename T>
struct Scores {
  using A = acc_t<T>;
  const T* src;   // [num_src, heads]
  const T* dst;   // [num_dst, heads]
  const T* edge;  // [num_edges, heads]; null: zeros
  int64_t heads;
  A slope;

  // Before the leaky relu.
  __device__ A raw(int64_t u, int64_t v, int64_t e, int64_t h) const {
    const A sum = to_sum<A>(src[u * heads + h]) + to_sum<A>(dst[v * heads + h]);
    return edge != nullptr ? sum + to_sum<A>(edge[e * heads + h]) : sum;
  }
  __device__ A relu(A value) const { return value > 0 ? value : slope * value; }
  __device__ A relu_grad(A value) const { return value > 0 ? A{1} : slope; }
};

template <typename T>
Scores<T> scores_of(int64_t heads, const Tensor& score_src, const Tensor& score_dst, const OptionalTensor& edge_score,
                    double slope) {
  return {const_data<T>(score_src), const_data<T>(score_dst), data_or_null<T>(edge_score), heads,
          static_cast<acc_t<T>>(slope)};
}

inline Shape check_attention(const Device& device, const Tensor& x, const Tensor& score_src, const Tensor& score_dst,
                      const OptionalTensor& edge_score, int64_t num_dst, int64_t num_edges, double dropout) {
  const Shape shape = check_features(x, device, "x");
  CHECK_ARG(x.dim() == 3, "x must be [num_src, heads, width], got ", x.dim(), " dimensions");
  check_head_values(score_src, device, "score_src", shape.num_rows, x, "x");
  check_head_values(score_dst, device, "score_dst", num_dst, x, "x");
  if (edge_score.has_value()) {
    check_head_values(*edge_score, device, "edge_score", num_edges, x, "x");
  }
  CHECK_ARG(dropout >= 0 && dropout < 1, "dropout must be in [0, 1), got ", dropout);
  return shape;
}

}  // namespace gnnsys::cuda
