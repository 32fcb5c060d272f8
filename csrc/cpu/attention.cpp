// gat_aggregate: out[v, h] = sum over in-edges e = (u, v) of keep[e, h] * alpha[e, h] * x[u, h], with
//   score[e, h] = leaky_relu(score_src[u, h] + score_dst[v, h] + edge_score[e, h])
//   alpha = softmax of score over the in-edges of v, keep = 0 or 1 / (1 - dropout), drawn at (key, edge, head).
//
// One pass: the scores of a row live in a scratch of its degree, nothing of size E x width is ever made. The backward
// pass recomputes alpha from log_total[v, h] = log of the sum of exp(score), draws keep again, and walks the transposed
// structure once: with d_alpha = <grad[v, h], x[u, h]> the gradient of a score is
//   alpha * (keep * d_alpha - <grad[v, h], out[v, h]>)
// because the sum of keep * alpha * d_alpha over a row is <grad, out> (as in FlashAttention, Dao et al. 2022, 3.1).
#include "common/philox.h"
#include "common/register.h"
#include "cpu/block_sum.h"
#include "cpu/features.h"
#include "cpu/row_sum.h"
#include "cpu/row_work.h"
#include "cpu/softmax.h"

#include <optional>
#include <tuple>

namespace gnnsys {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kScoresAhead = 16;           // rows of scores are short: more of them fit on the way
constexpr uint32_t kDropoutStream = 0x647270;  // keeps these draws apart from others under the same key

// Attention dropout: the factor of (edge, head), the same wherever and whenever it is asked for.
template <typename A>
struct Dropout {
  double probability;
  uint64_t key;

  bool active() const { return probability > 0; }

  // factors[h] for the heads of one edge.
  void operator()(int64_t edge, int64_t heads, A* factors) const {
    const auto threshold = static_cast<uint64_t>(probability * 4294967296.0);
    const A kept = static_cast<A>(1.0 / (1.0 - probability));
    for (int64_t h = 0; h < heads; h += 4) {
      const Words words = philox4x32(static_cast<uint32_t>(edge), static_cast<uint32_t>(edge >> 32),
                                     static_cast<uint32_t>(h / 4), kDropoutStream, key);
      for (int64_t i = h; i < std::min(h + 4, heads); ++i) {
        factors[i] = words.w[i - h] >= threshold ? kept : A{0};
      }
    }
  }
};

template <typename T>
struct Scores {
  Shape shape;
  const T* src;   // [num_src, heads]
  const T* dst;   // [num_dst, heads]
  const T* edge;  // [num_edges, heads]; null: zeros
  acc_t<T> slope;

  // Before the leaky relu.
  acc_t<T> raw(int64_t u, int64_t v, int64_t e, int64_t h) const {
    using A = acc_t<T>;
    const A sum = static_cast<A>(src[u * shape.heads + h]) + static_cast<A>(dst[v * shape.heads + h]);
    return edge != nullptr ? sum + static_cast<A>(edge[e * shape.heads + h]) : sum;
  }
  acc_t<T> relu(acc_t<T> value) const { return value > 0 ? value : slope * value; }
  acc_t<T> relu_grad(acc_t<T> value) const { return value > 0 ? acc_t<T>{1} : slope; }
};

template <typename T, typename id_t>
struct Forward {
  const int64_t* indptr;
  const id_t* indices;
  int64_t num_dst;
  Scores<T> scores;
  Dropout<acc_t<T>> dropout;
  const T* x;
  T* out;
  acc_t<T>* log_total;  // [num_dst, heads]
};

// row = keep * alpha of the in-edges of v, [degree, heads]; log_total as a by-product.
template <typename T, typename id_t>
void attend(const Forward<T, id_t>& p, int64_t v, RowSoftmax<acc_t<T>>& softmax, std::vector<acc_t<T>>& row) {
  using A = acc_t<T>;
  const int64_t heads = p.scores.shape.heads;
  const int64_t first = p.indptr[v];
  const int64_t count = p.indptr[v + 1] - first;
  const int64_t ahead = p.indptr[p.num_dst] - first - kScoresAhead;
  row.resize(count * heads);
  for (int64_t k = 0; k < count; ++k) {
    if (k < ahead) {
      prefetch_row(p.scores.src, p.indices[first + k + kScoresAhead], heads);
    }
    for (int64_t h = 0; h < heads; ++h) {
      row[k * heads + h] = p.scores.relu(p.scores.raw(p.indices[first + k], v, first + k, h));
    }
  }
  softmax(row.data(), count);
  for (int64_t h = 0; h < heads; ++h) {
    p.log_total[v * heads + h] = softmax.shift[h] + std::log(softmax.total[h]);
  }
  if (p.dropout.active()) {
    std::vector<A>& factors = softmax.total;  // has been read: now a scratch of `heads` numbers
    for (int64_t k = 0; k < count; ++k) {
      p.dropout(first + k, heads, factors.data());
      for (int64_t h = 0; h < heads; ++h) {
        row[k * heads + h] *= factors[h];
      }
    }
  }
}

// sum[h] += coefficient[k, h] * rows[ids[k], h] over the neighbours of a chunk, for all heads.
template <typename T, typename id_t>
void accumulate_heads(acc_t<T>* sum, const T* rows, const Shape& shape, const Neighbors<id_t>& near,
                      const acc_t<T>* coefficients, bool fresh, bool prefetch) {
  acc_t<T> coefficient[kChunk];
  for (int64_t h = 0; h < shape.heads; ++h) {
    for (int64_t k = 0; k < near.count; ++k) {
      coefficient[k] = coefficients[k * shape.heads + h];
    }
    neighbor_kernels<T, id_t>().sum(
        sum + h * shape.width,
        {rows + h * shape.width, shape.width, shape.size(), prefetch && h == 0 ? rows : nullptr}, near, coefficient,
        fresh);
  }
}

template <typename T, typename id_t>
void forward_rows(const Forward<T, id_t>& p) {
  using A = acc_t<T>;
  const Shape& shape = p.scores.shape;
  const int64_t num_edges = p.indptr[p.num_dst];
  parallel_for_rows(p.indptr, p.num_dst, [&](int64_t begin, int64_t end) {
    RowSoftmax<A> softmax(shape.heads);
    RowSum<T> output(shape.size());
    BlockSum<A> blocks;
    std::vector<A> row;
    for (int64_t v = begin; v < end; ++v) {
      T* const out = p.out + v * shape.size();
      if (p.indptr[v] == p.indptr[v + 1]) {
        std::fill(out, out + shape.size(), T{0});
        std::fill_n(p.log_total + v * shape.heads, shape.heads, A{0});
        continue;
      }
      attend(p, v, softmax, row);
      A* const sum = output.begin(out);
      const int64_t first = p.indptr[v];
      const int64_t count = p.indptr[v + 1] - first;
      for (int64_t k = 0; k < count; k += kChunk) {
        const Neighbors<id_t> near{p.indices + first + k, std::min(kChunk, count - k), num_edges - first - k};
        accumulate_heads(sum, p.x, shape, near, row.data() + k * shape.heads, begins_block(k), true);
        blocks.after(sum, shape.size(), k + near.count, count);
      }
      output.finish(out, sum, shape.size(), A{1});
    }
  });
}

template <typename T, typename id_t>
struct Backward {
  const int64_t* indptr;  // of the transposed structure: the out-edges (u, v) of every u
  const id_t* indices;
  Positions positions;
  int64_t num_src;
  Scores<T> scores;
  Dropout<acc_t<T>> dropout;
  const T* x;
  const T* grad;                 // [num_dst, heads, width]
  const acc_t<T>* log_total;     // [num_dst, heads]
  const acc_t<T>* grad_dot_out;  // [num_dst, heads]
  T* grad_x;
  acc_t<T>* grad_src;   // [num_src, heads]
  acc_t<T>* grad_edge;  // [num_edges, heads]
};

// Scratch for the out-edges of u in one chunk, [kChunk, heads] each.
template <typename A>
struct OutEdges {
  std::vector<A> alpha;  // then keep * alpha
  std::vector<A> slope;  // of the leaky relu
  std::vector<A> dots;   // of the gradients with x
  std::vector<A> keep;   // [heads], of one edge

  explicit OutEdges(int64_t heads)
      : alpha(kChunk * heads), slope(kChunk * heads), dots(kChunk * heads), keep(heads, A{1}) {}
};

// alpha and slope of the out-edges of u that start at j.
template <typename T, typename id_t>
void recompute_alpha(const Backward<T, id_t>& p, int64_t u, int64_t j, const Neighbors<id_t>& near,
                     OutEdges<acc_t<T>>& edges) {
  using A = acc_t<T>;
  const int64_t heads = p.scores.shape.heads;
  for (int64_t k = 0; k < near.count; ++k) {
    if (k + kScoresAhead < near.readable) {
      const int64_t next = near.ids[k + kScoresAhead];
      prefetch_row(p.scores.dst, next, heads);
      prefetch_row(p.log_total, next, heads);
      prefetch_row(p.grad_dot_out, next, heads);
      __builtin_prefetch(p.grad_edge + p.positions(j + k + kScoresAhead) * heads, 1);
    }
    const int64_t v = near.ids[k];
    const int64_t e = p.positions(j + k);
    for (int64_t h = 0; h < heads; ++h) {
      const A raw = p.scores.raw(u, v, e, h);
      edges.alpha[k * heads + h] = p.scores.relu(raw) - p.log_total[v * heads + h];
      edges.slope[k * heads + h] = p.scores.relu_grad(raw);
    }
  }
  exp_all(edges.alpha.data(), near.count * heads);
}

// The gradients of the scores of the same edges: written, and added to grad_src[u]. alpha becomes keep * alpha.
template <typename T, typename id_t>
void score_gradients(const Backward<T, id_t>& p, int64_t u, int64_t j, const Neighbors<id_t>& near,
                     OutEdges<acc_t<T>>& edges) {
  using A = acc_t<T>;
  const Shape& shape = p.scores.shape;
  A* const keep = edges.keep.data();
  neighbor_kernels<T, id_t>().dots(edges.dots.data(), p.x + u * shape.size(),
                                   {p.grad, shape.width, shape.size(), p.grad}, shape.heads, near);
  for (int64_t k = 0; k < near.count; ++k) {
    const int64_t v = near.ids[k];
    const int64_t e = p.positions(j + k);
    if (p.dropout.active()) {
      p.dropout(e, shape.heads, keep);
    }
    for (int64_t h = 0; h < shape.heads; ++h) {
      const int64_t i = k * shape.heads + h;
      const A d_score = edges.alpha[i] * (keep[h] * edges.dots[i] - p.grad_dot_out[v * shape.heads + h]);
      const A d_raw = d_score * edges.slope[i];
      p.grad_edge[e * shape.heads + h] = d_raw;
      p.grad_src[u * shape.heads + h] += d_raw;
      edges.alpha[i] *= keep[h];
    }
  }
}

template <typename T, typename id_t>
void backward_rows(const Backward<T, id_t>& p) {
  using A = acc_t<T>;
  const Shape& shape = p.scores.shape;
  const int64_t num_edges = p.indptr[p.num_src];
  parallel_for_rows(p.indptr, p.num_src, [&](int64_t begin, int64_t end) {
    RowSum<T> output(shape.size());
    OutEdges<A> edges(shape.heads);
    BlockSum<A> blocks, score_blocks;
    for (int64_t u = begin; u < end; ++u) {
      T* const grad_x = p.grad_x + u * shape.size();
      A* const grad_src = p.grad_src + u * shape.heads;
      const int64_t first = p.indptr[u];
      const int64_t count = p.indptr[u + 1] - first;
      if (count == 0) {
        std::fill(grad_x, grad_x + shape.size(), T{0});
        std::fill_n(grad_src, shape.heads, A{0});
        continue;
      }
      A* const sum = output.begin(grad_x);
      for (int64_t k = 0; k < count; k += kChunk) {
        const Neighbors<id_t> near{p.indices + first + k, std::min(kChunk, count - k), num_edges - first - k};
        if (begins_block(k)) {
          std::fill_n(grad_src, shape.heads, A{0});
        }
        recompute_alpha(p, u, first + k, near, edges);
        score_gradients(p, u, first + k, near, edges);
        score_blocks.after(grad_src, shape.heads, k + near.count, count);
        accumulate_heads(sum, p.grad, shape, near, edges.alpha.data(), begins_block(k), false);
        blocks.after(sum, shape.size(), k + near.count, count);
      }
      output.finish(grad_x, sum, shape.size(), A{1});
    }
  });
}

// sums[v, h] = sum of values[e, h] over the in-edges of v.
template <typename A>
void sum_edges(const int64_t* indptr, int64_t num_dst, int64_t heads, const A* values, A* sums) {
  parallel_for_rows(indptr, num_dst, [&](int64_t begin, int64_t end) {
    BlockSum<A> blocks;
    for (int64_t v = begin; v < end; ++v) {
      const A* const row = values + indptr[v] * heads;
      sum_terms(blocks, sums + v * heads, heads, indptr[v + 1] - indptr[v],
                [=](int64_t k, int64_t h) { return row[k * heads + h]; });
    }
  });
}

// dots[v, h] = <a[v, h], b[v, h]>
template <typename T>
void dot_rows(const Shape& shape, int64_t num_rows, const T* a, const T* b, acc_t<T>* dots) {
  parallel_for(num_rows * shape.heads, 1 << 10, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      dots[i] = row_kernels<T>().dot(a + i * shape.width, b + i * shape.width, shape.width);
    }
  });
}

Shape check_attention(const Tensor& x, const Tensor& score_src, const Tensor& score_dst,
                      const OptionalTensor& edge_score, int64_t num_dst, int64_t num_edges, double dropout) {
  const Shape shape = check_features(x, "x");
  CHECK_ARG(x.dim() == 3, "x must be [num_src, heads, width], got ", x.dim(), " dimensions");
  check_head_values(score_src, "score_src", shape.num_rows, x, "x");
  check_head_values(score_dst, "score_dst", num_dst, x, "x");
  if (edge_score.has_value()) {
    check_head_values(*edge_score, "edge_score", num_edges, x, "x");
  }
  CHECK_ARG(dropout >= 0 && dropout < 1, "dropout must be in [0, 1), got ", dropout);
  return shape;
}

template <typename T>
Scores<T> scores_of(const Shape& shape, const Tensor& score_src, const Tensor& score_dst,
                    const OptionalTensor& edge_score, double slope) {
  return {shape, const_data<T>(score_src), const_data<T>(score_dst), data_or_null<T>(edge_score),
          static_cast<acc_t<T>>(slope)};
}

// The transposed structure is for autograd alone.
std::tuple<Tensor, Tensor> gat_aggregate(const Tensor& indptr, const Tensor& indices, const Tensor& x,
                                         const Tensor& score_src, const Tensor& score_dst,
                                         const OptionalTensor& edge_score, double negative_slope, double dropout,
                                         int64_t key, const OptionalTensor&, const OptionalTensor&,
                                         const OptionalTensor&) {
  const int64_t num_dst = indptr.numel() - 1;
  const Shape shape = check_attention(x, score_src, score_dst, edge_score, num_dst, indices.numel(), dropout);
  check_structure(indptr, indices, shape.num_rows);
  Tensor out = new_features(x, num_dst);
  Tensor log_total = empty_cpu({num_dst, shape.heads}, sum_type(x));
  dispatch_features(x, "x", [&](auto value) {
    using T = decltype(value);
    using A = acc_t<T>;
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      forward_rows(Forward<T, id_t>{const_data<int64_t>(indptr), const_data<id_t>(indices), num_dst,
                                    scores_of<T>(shape, score_src, score_dst, edge_score, negative_slope),
                                    Dropout<A>{dropout, static_cast<uint64_t>(key)}, const_data<T>(x),
                                    mutable_data<T>(out), mutable_data<A>(log_total)});
    });
  });
  return {out, log_total};
}

// Gradients of x (its dtype) and of score_src, score_dst and edge_score (in the type that sums are made in).
std::tuple<Tensor, Tensor, Tensor, Tensor> gat_aggregate_grad(
    const Tensor& indptr, const Tensor& t_indptr, const Tensor& t_indices, const Tensor& t_positions, const Tensor& x,
    const Tensor& score_src, const Tensor& score_dst, const OptionalTensor& edge_score, double negative_slope,
    double dropout, int64_t key, const Tensor& out, const Tensor& log_total, const Tensor& grad) {
  const int64_t num_dst = indptr.numel() - 1;
  const int64_t num_edges = t_indices.numel();
  const Shape shape = check_attention(x, score_src, score_dst, edge_score, num_dst, num_edges, dropout);
  check_indptr(indptr, num_edges);
  check_structure(t_indptr, t_indices, num_dst);
  CHECK_ARG(t_indptr.numel() - 1 == shape.num_rows, "t_indptr must have ", shape.num_rows + 1, " entries");
  const Positions positions = check_positions(t_positions, num_edges);
  check_same_dtype(grad, "grad", x, "x");
  check_contiguous(grad, "grad");
  check_contiguous(out, "out");
  CHECK_ARG(grad.numel() == num_dst * shape.size() && out.numel() == grad.numel(), "grad must have the shape of out");
  CHECK_ARG(log_total.numel() == num_dst * shape.heads, "log_total must be [num_dst, heads]");
  check_contiguous(log_total, "log_total");
  check_contiguous(out, "out");
  check_dtype(out, x.scalar_type(), "out");
  check_dtype(log_total, x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float, "log_total");
  Tensor grad_x = new_features(x, shape.num_rows);
  Tensor grad_src = empty_cpu({shape.num_rows, shape.heads}, sum_type(x));
  Tensor grad_dst = empty_cpu({num_dst, shape.heads}, sum_type(x));
  Tensor grad_edge = empty_cpu({num_edges, shape.heads}, sum_type(x));
  Tensor grad_dot_out = empty_cpu({num_dst, shape.heads}, sum_type(x));
  dispatch_features(x, "x", [&](auto value) {
    using T = decltype(value);
    using A = acc_t<T>;
    dot_rows(shape, num_dst, const_data<T>(grad), const_data<T>(out), mutable_data<A>(grad_dot_out));
    dispatch_ids(t_indices, [&](auto id) {
      using id_t = decltype(id);
      backward_rows(Backward<T, id_t>{
          const_data<int64_t>(t_indptr), const_data<id_t>(t_indices), positions, shape.num_rows,
          scores_of<T>(shape, score_src, score_dst, edge_score, negative_slope),
          Dropout<A>{dropout, static_cast<uint64_t>(key)}, const_data<T>(x), const_data<T>(grad),
          const_data<A>(log_total), const_data<A>(grad_dot_out), mutable_data<T>(grad_x), mutable_data<A>(grad_src),
          mutable_data<A>(grad_edge)});
    });
    sum_edges(const_data<int64_t>(indptr), num_dst, shape.heads, const_data<A>(grad_edge), mutable_data<A>(grad_dst));
  });
  return {grad_x, grad_src, grad_dst, grad_edge};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "gat_aggregate", &gat_aggregate);
  REGISTER_OP(m, "gat_aggregate_grad", &gat_aggregate_grad);
}

}  // namespace gnnsys
