// relation_conv: out[v] = own[v] @ root + sum over relations r of (scale * sum over u -r-> v of x[u]) @ W_r, and its
// gradients. The same on every device; what a device does by kernels of its own is its `Backend`.
//
// In-edges come by (relation, destination): such a group is summed into a row of a tile, a tile's rows of a relation
// are multiplied by W_r, and the products are added to the rows of their destinations, of which a relation has each but
// once, in ascending order. So no message is stored, and no relations x nodes x features: beside its outputs the op has tiles.
//
// The gradient takes the same edges by (relation, source): with B[r, u] = sum over u -r-> v of weight[e] * grad[v],
//   grad_x[u] = own part + sum over r of B[r, u] @ W_r^T,    grad W_r = sum over u of x[u]^T B[r, u],
// so grad is gathered once for both, and the sums of the forward pass are neither kept nor made again.
#pragma once

#include "common/dense.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace gnnsys {

using OptionalTensor = std::optional<Tensor>;

// Which rows a relation reads, which it adds to, and which weight it has.
struct Relation {
  int64_t x;
  int64_t out;
  int64_t weight;
  int64_t row;
};

// Edges by group, relation by relation. The members of group g are indices[indptr[g] .. indptr[g + 1]).
struct RelationGroups {
  const std::vector<int64_t>& ends;  // [relations + 1]: groups of each relation
  const OptionalTensor& owner;       // [groups], the row that a group adds to, ascending; none: group g has row g
  const OptionalTensor& indptr;      // [groups + 1]; none: group g has member g
  const OptionalTensor& indices;     // [edges]; none: member e is row e
  const OptionalTensor& scale;       // [groups], in the type of sums; none: ones
  const OptionalTensor& weight;      // [edges], in the type of sums; none: ones

  int64_t num_groups() const { return ends.back(); }
  bool is_identity() const { return !indptr.has_value() && !indices.has_value(); }
};

constexpr int64_t kMostGroups = int64_t{1} << 62;  // one more is a number, too

// A weight by relation: [relations, in, out], or [relations, blocks, in / blocks, out / blocks].
struct WeightShape {
  int64_t relations;
  int64_t blocks;  // 0: dense
  int64_t in;
  int64_t out;

  static WeightShape of(const Tensor& w) {
    CHECK_ARG(w.dim() == 3 || w.dim() == 4, "weight must be [relations, in, out] or [relations, blocks, in / blocks, ",
              "out / blocks], got ", w.dim(), " dimensions");
    if (w.dim() == 3) {
      return {w.size(0), 0, w.size(1), w.size(2)};
    }
    return {w.size(0), w.size(1), w.size(1) * w.size(2), w.size(1) * w.size(3)};
  }
};

// One relation's weight, of the shape that `like` has, at `row` of `w`.
inline Tensor weight_at(const Tensor& w, const Tensor& like, int64_t row) {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t stride = 1;
  for (int64_t d = like.dim() - 1; d > 0; --d) {
    sizes.insert(sizes.begin(), like.size(d));
    strides.insert(strides.begin(), stride);
    stride *= like.size(d);
  }
  return strided(w, row * stride, sizes, strides);
}

inline Tensor weight_of(const Tensor& w, int64_t row) { return weight_at(w, w, row); }

// Rows [first, first + count) of a contiguous matrix, as a product with `weight` takes them: by block where it has some.
inline Tensor factor_rows(const Tensor& t, int64_t first, int64_t count, int64_t blocks) {
  if (blocks == 0) {
    return rows_of(t, first, count);
  }
  const int64_t width = t.size(1);
  return strided(t, first * width, {blocks, count, width / blocks}, {width / blocks, width, 1});
}

// `count` rows of a product, contiguous: [count, width], or [blocks, count, width / blocks].
inline Tensor product_rows(const Tensor& t, int64_t count, int64_t width, int64_t blocks) {
  if (blocks == 0) {
    return strided(t, 0, {count, width}, {width, 1});
  }
  return strided(t, 0, {blocks, count, width / blocks}, {count * (width / blocks), width / blocks, 1});
}

inline std::vector<Relation> read_relations(const std::vector<int64_t>& flat) {
  CHECK_ARG(flat.size() % 4 == 0, "relations must have four numbers each, got ", flat.size(), " in all");
  std::vector<Relation> found;
  for (size_t i = 0; i < flat.size(); i += 4) {
    found.push_back({flat[i], flat[i + 1], flat[i + 2], flat[i + 3]});
  }
  return found;
}

inline void check_ends(const std::vector<int64_t>& ends, size_t num_relations, const char* name) {
  CHECK_ARG(ends.size() == num_relations + 1, name, " must have ", num_relations + 1, " entries, got ", ends.size());
  CHECK_ARG(ends.back() < kMostGroups, name, " must be below 2^62, got ", ends.back());
  CHECK_ARG(ends[0] == 0 && std::is_sorted(ends.begin(), ends.end()), name, " must rise from 0");
}

inline void check_slot(int64_t slot, size_t count, const char* name) {
  CHECK_ARG(slot >= 0 && slot < static_cast<int64_t>(count), "relations: ", name, " must be in [0, ",
            static_cast<int64_t>(count), "), got ", slot);
}

// Everything but the structure's entries. The width of each output is told: -1 where nothing says it.
template <typename Check>
std::vector<int64_t> check_relation_shapes(const std::vector<Tensor>& x, const std::vector<Tensor>& weight,
                                           const std::vector<Tensor>& root, const std::vector<int64_t>& own,
                                           const std::vector<Relation>& relations, const std::vector<int64_t>& num_dst,
                                           const Check& check_tensor) {
  CHECK_ARG(!x.empty() && !weight.empty() && !num_dst.empty(), "x, weight and num_dst must not be empty");
  const auto check_rows = [&](const Tensor& t, const char* name, int64_t dims) {
    check_tensor(t, name);
    CHECK_ARG(dims == 0 || t.dim() == dims, name, " must have ", dims, " dimensions, got ", t.dim());
    check_same_dtype(t, name, x[0], "x");
  };
  for (const Tensor& t : x) {
    check_rows(t, "x", 2);
  }
  for (const Tensor& t : weight) {
    check_rows(t, "weight", 0);
    (void)WeightShape::of(t);
  }
  CHECK_ARG(root.empty() || (root.size() == num_dst.size() && own.size() == num_dst.size()),
            "root and own must be empty or have an entry per output, ", num_dst.size());
  std::vector<int64_t> widths(num_dst.size(), -1);
  for (size_t d = 0; d < num_dst.size(); ++d) {
    CHECK_ARG(num_dst[d] >= 0, "num_dst must not be negative, got ", num_dst[d]);
    if (!root.empty()) {
      check_slot(own[d], x.size(), "own");
      check_rows(root[d], "root", 2);
      CHECK_ARG(x[own[d]].size(0) >= num_dst[d], "x must have the rows of ", num_dst[d], " destinations, got ",
                x[own[d]].size(0));
      CHECK_ARG(x[own[d]].size(1) == root[d].size(0), "root must have ", x[own[d]].size(1), " rows, got ",
                root[d].size(0));
      widths[d] = root[d].size(1);
    }
  }
  for (const Relation& r : relations) {
    check_slot(r.x, x.size(), "x");
    check_slot(r.out, num_dst.size(), "out");
    check_slot(r.weight, weight.size(), "weight");
    const WeightShape shape = WeightShape::of(weight[r.weight]);
    check_slot(r.row, static_cast<size_t>(shape.relations), "row");
    CHECK_ARG(shape.in == x[r.x].size(1), "weight must have ", x[r.x].size(1), " inputs, as x has columns, got ",
              shape.in);
    CHECK_ARG(widths[r.out] < 0 || widths[r.out] == shape.out, "weights of one output must have one width, got ",
              widths[r.out], " and ", shape.out);
    widths[r.out] = shape.out;
  }
  for (const int64_t width : widths) {
    CHECK_ARG(width >= 0, "every output needs a relation or a root, else it has no width");
  }
  return widths;
}

// What the gradient is given, but for the structure's entries: `grad` is as the outputs are.
template <typename Check>
void check_relation_gradient(const std::vector<Tensor>& grad, const std::vector<Tensor>& x,
                             const std::vector<Tensor>& weight, const std::vector<Tensor>& root,
                             const std::vector<int64_t>& own, const std::vector<Relation>& relations,
                             const std::vector<int64_t>& wants_x, const std::vector<int64_t>& t_ends,
                             const Check& check_tensor) {
  CHECK_ARG(!grad.empty(), "grad must not be empty");
  std::vector<int64_t> num_dst;
  for (const Tensor& t : grad) {
    check_tensor(t, "grad");
    CHECK_ARG(t.dim() == 2, "grad must have 2 dimensions, got ", t.dim());
    num_dst.push_back(t.size(0));
  }
  const std::vector<int64_t> widths = check_relation_shapes(x, weight, root, own, relations, num_dst, check_tensor);
  for (size_t d = 0; d < grad.size(); ++d) {
    check_same_dtype(grad[d], "grad", x[0], "x");
    CHECK_ARG(grad[d].size(1) == widths[d], "grad must have ", widths[d], " columns, got ", grad[d].size(1));
  }
  CHECK_ARG(wants_x.size() == x.size(), "wants_x must have an entry per x, ", x.size(), ", got ", wants_x.size());
  check_ends(t_ends, relations.size(), "t_ends");
}

// Runs body(r, first, count) for the groups of each relation, in tiles of at most `rows` groups; before the first of a
// tile begin(r, first, count) for all of its groups, which have one slot `slot_of(relation)`. Not for relations
// that `is_done`; where it is empty none is.
template <typename SlotOf, typename Begin, typename Body>
void for_tiles(const std::vector<Relation>& relations, const std::vector<int64_t>& ends, int64_t rows,
               const std::vector<bool>& is_done, const SlotOf& slot_of, const Begin& begin, const Body& body) {
  const auto skips = [&](size_t r) { return !is_done.empty() && is_done[r]; };
  size_t r = 0;
  int64_t first = 0;
  while (first < ends.back()) {
    while (ends[r + 1] <= first) {
      ++r;
    }
    if (skips(r)) {
      first = ends[r + 1];
      continue;
    }
    size_t last = r;
    int64_t end = std::min(ends[r + 1], first + rows);
    while (end == ends[last + 1] && last + 1 < relations.size() && end - first < rows &&
           !skips(last + 1) && slot_of(relations[last + 1]) == slot_of(relations[r])) {
      ++last;
      end = std::min(ends[last + 1], first + rows);
    }
    begin(relations[r], first, end - first);
    for (size_t each = r; each <= last; ++each) {
      const int64_t from = std::max(first, ends[each]);
      const int64_t to = std::min(end, ends[each + 1]);
      if (from < to) {
        body(relations[each], from, to - from, from - first);
      }
    }
    first = end;
  }
}

// Whether no relation with edges is left.
inline bool all_done(const std::vector<bool>& is_done, const std::vector<int64_t>& ends) {
  for (size_t r = 0; r + 1 < ends.size(); ++r) {
    if (ends[r] < ends[r + 1] && (is_done.empty() || !is_done[r])) {
      return false;
    }
  }
  return true;
}

inline int64_t widest(const std::vector<Tensor>& rows) {
  int64_t width = 1;
  for (const Tensor& t : rows) {
    width = std::max(width, t.size(1));
  }
  return width;
}

// Results in the type of sums, to be rounded when they are whole.
template <typename Backend>
std::vector<Tensor> rounded(const Backend& backend, std::vector<Tensor>& sums, ScalarType type) {
  for (Tensor& t : sums) {
    if (t.scalar_type() != type) {
      Tensor out = backend.empty_like(t, type);
      torch::stable::copy_(out, t);
      t = out;
    }
  }
  return sums;
}

// The first rows of `sums` = a @ b; `product` is a scratch where they are summed in another type.
template <typename Backend>
void own_product(const Backend& backend, const Tensor& a, const Tensor& b, const Tensor& sums, const Tensor& product) {
  if (a.size(0) == 0) {
    return;
  }
  if (sums.scalar_type() == a.scalar_type()) {
    product_into(a, b, rows_of(sums, 0, a.size(0)));
    return;
  }
  const int64_t rows = std::max<int64_t>(product.numel() / std::max<int64_t>(b.size(1), 1), 1);
  for (int64_t first = 0; first < a.size(0); first += rows) {
    const int64_t count = std::min(rows, a.size(0) - first);
    const Tensor made = product_rows(product, count, b.size(1), 0);
    product_into(rows_of(a, first, count), b, made);
    backend.add(std::nullopt, first, count, made, 0, sums, true);
  }
}

template <typename Backend>
std::vector<Tensor> relation_conv_forward(const Backend& backend, const std::vector<Tensor>& x,
                                          const std::vector<Tensor>& weight, const std::vector<Tensor>& root,
                                          const std::vector<int64_t>& own, const std::vector<Relation>& relations,
                                          const std::vector<int64_t>& num_dst, const std::vector<int64_t>& widths,
                                          const RelationGroups& groups) {
  const ScalarType type = x[0].scalar_type();
  std::vector<Tensor> out;
  for (size_t d = 0; d < num_dst.size(); ++d) {
    out.push_back(backend.empty(num_dst[d], widths[d], backend.sum_type(type)));
  }
  const int64_t widest_out = *std::max_element(widths.begin(), widths.end());
  const int64_t rows = backend.tile_rows(widest(x), widest_out, groups.num_groups(), x, out);
  const bool is_rounded = backend.sum_type(type) != type;
  Tensor product = backend.empty(is_rounded ? rows : 0, widest_out, type);
  for (size_t d = 0; d < out.size(); ++d) {
    if (root.empty()) {
      if (groups.owner.has_value()) {  // else every row is written
        torch::stable::zero_(out[d]);
      }
    } else {
      own_product(backend, rows_of(x[own[d]], 0, num_dst[d]), root[d], out[d], product);
    }
  }
  const int64_t tile_size = rows * (widest(x) + (is_rounded ? 0 : widest_out));
  const std::vector<bool> is_done = backend.forward_together(x, weight, relations, groups, tile_size, out);
  if (all_done(is_done, groups.ends)) {
    return rounded(backend, out, type);
  }
  const Tensor sums = backend.empty(rows, widest(x), type);
  product = is_rounded ? product : backend.empty(rows, widest_out, type);
  for_tiles(
      relations, groups.ends, rows, is_done, [](const Relation& r) { return r.x; },
      [&](const Relation& r, int64_t first, int64_t count) { backend.sum(groups, first, count, x[r.x], sums); },
      [&](const Relation& r, int64_t first, int64_t count, int64_t at) {
        const Tensor& w = weight[r.weight];
        const WeightShape shape = WeightShape::of(w);
        const Tensor summed = strided(sums, at * shape.in, {count, shape.in}, {shape.in, 1});
        const Tensor made = product_rows(product, count, shape.out, shape.blocks);
        product_into(factor_rows(summed, 0, count, shape.blocks), weight_of(w, r.row), made);
        backend.add(groups.owner, first, count, made, shape.blocks, out[r.out], !groups.owner.has_value());
      });
  return rounded(backend, out, type);
}

struct RelationGradients {
  std::vector<Tensor> x;  // none of what was not wanted: an empty tensor
  std::vector<Tensor> weight;
  std::vector<Tensor> root;
};

// `groups` by (relation, source), whose members are rows of `grad`.
template <typename Backend>
RelationGradients relation_conv_backward(const Backend& backend, const std::vector<Tensor>& grad,
                                         const std::vector<Tensor>& x, const std::vector<Tensor>& weight,
                                         const std::vector<Tensor>& root, const std::vector<int64_t>& own,
                                         const std::vector<Relation>& relations, const std::vector<bool>& wants_x,
                                         const RelationGroups& groups) {
  const ScalarType type = x[0].scalar_type();
  RelationGradients found;
  for (size_t s = 0; s < x.size(); ++s) {
    found.x.push_back(backend.empty(wants_x[s] ? x[s].size(0) : 0, x[s].size(1), backend.sum_type(type)));
    torch::stable::zero_(found.x[s]);
  }
  int64_t largest = 1;
  for (const Tensor& w : weight) {
    found.weight.push_back(backend.empty_like(w, backend.sum_type(type)));
    torch::stable::zero_(found.weight.back());
    largest = std::max(largest, w.numel() / std::max<int64_t>(w.size(0), 1));
  }
  const int64_t rows = backend.tile_rows(widest(x) * 2, widest(grad), groups.num_groups(), x, grad);
  const bool is_rounded = backend.sum_type(type) != type;
  Tensor product = backend.empty(is_rounded ? rows : 0, widest(x), type);
  for (size_t d = 0; d < root.size(); ++d) {
    const int64_t s = own[d];
    const int64_t count = grad[d].size(0);
    found.root.push_back(backend.empty_like(root[d], type));
    product_into(transposed(rows_of(x[s], 0, count)), grad[d], found.root[d]);
    if (wants_x[s]) {
      own_product(backend, grad[d], transposed(root[d]), found.x[s], product);
    }
  }
  const int64_t tile_size = rows * ((is_rounded ? 1 : 2) * widest(x) + (groups.is_identity() ? 0 : widest(grad)));
  const std::vector<bool> is_done = backend.backward_together(grad, x, weight, relations, wants_x, groups, tile_size,
                                                              found.x, found.weight);
  if (all_done(is_done, groups.ends)) {
    found.x = rounded(backend, found.x, type);
    found.weight = rounded(backend, found.weight, type);
    return found;
  }
  const Tensor weight_product = backend.empty(1, largest, type);
  const Tensor sums = backend.empty(groups.is_identity() ? 0 : rows, widest(grad), type);
  const Tensor sources = backend.empty(rows, widest(x), type);
  product = is_rounded ? product : backend.empty(rows, widest(x), type);
  const auto tile_slot = [](const Relation& r) { return r.out; };
  for_tiles(
      relations, groups.ends, rows, is_done, tile_slot,
      [&](const Relation& r, int64_t first, int64_t count) {
        if (!groups.is_identity()) {
          backend.sum(groups, first, count, grad[r.out], sums);
        }
      },
      [&](const Relation& r, int64_t first, int64_t count, int64_t at) {
        const Tensor& w = weight[r.weight];
        const WeightShape shape = WeightShape::of(w);
        const Tensor summed = groups.is_identity() ? rows_of(grad[r.out], first, count)
                                                   : strided(sums, at * shape.out, {count, shape.out}, {shape.out, 1});
        const Tensor b = factor_rows(summed, 0, count, shape.blocks);
        backend.gather(*groups.owner, first, count, x[r.x], sources);
        const Tensor read = strided(sources, 0, {count, shape.in}, {shape.in, 1});
        const Tensor part = weight_at(weight_product, w, 0);
        product_into(transposed(factor_rows(read, 0, count, shape.blocks)), b, part);
        const int64_t width = w.size(w.dim() - 1);
        const int64_t num_rows = w.numel() / std::max<int64_t>(shape.relations * width, 1);
        const Tensor flat = strided(found.weight[r.weight], 0, {shape.relations * num_rows, width}, {width, 1});
        backend.add(std::nullopt, r.row * num_rows, num_rows, part, 0, flat, false);
        if (wants_x[r.x]) {
          const Tensor made = product_rows(product, count, shape.in, shape.blocks);
          product_into(b, transposed(weight_of(w, r.row)), made);
          backend.add(groups.owner, first, count, made, shape.blocks, found.x[r.x], false);
        }
      });
  found.x = rounded(backend, found.x, type);
  found.weight = rounded(backend, found.weight, type);
  return found;
}

}  // namespace gnnsys
