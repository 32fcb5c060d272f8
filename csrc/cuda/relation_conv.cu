// relation_conv and relation_conv_grad on the device; what they compute is in common/relation_conv.h.
//
// Sums of groups are spmm's (spmm_rows.cuh), products cuBLAS's, relation by relation, or of all small relations together
// (grouped_products.cuh); a relation has each destination once, so products are added without atomics, and every result
// is the same on every run. Offsets are the host's: nothing is waited for.
#include "common/relation_conv.h"

#include "common/register.h"
#include "cuda/relations_together.cuh"
#include "cuda/spmm_rows.cuh"

#include <tuple>

namespace gnnsys::cuda {

// Instantiated in spmm_sums_*.cu, which take long to compile.
template <typename T, typename id_t>
void sum_rows(const Device& device, const Aggregation<T, T, id_t>& a);

namespace {

constexpr int kThreads = 256;
constexpr int64_t kTileShare = 8;          // of what the op reads and writes
constexpr int64_t kLeastTile = 32 << 20;  // bytes: fewer tiles, fewer launches

// out[k] = x[ids[k]], a thread per word.
template <typename word, typename id_t>
__global__ void __launch_bounds__(kThreads)
    gather_words(const id_t* __restrict__ ids, int64_t count, int64_t words, const word* __restrict__ x,
                 int64_t num_rows, word* __restrict__ out) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= count * words) {
    return;
  }
  const id_t row = ids[at / words];
  if (!is_inside(row, num_rows)) {
    fault("rows of a relation", row, num_rows);
  }
  out[at] = x[static_cast<int64_t>(row) * words + at % words];
}

// sums[owner[k]] (+)= made[k], whose rows come whole or by block; a thread per value.
template <typename T, typename id_t>
__global__ void __launch_bounds__(kThreads)
    add_values(const id_t* __restrict__ owner, int64_t first, int64_t count, const T* __restrict__ made, int64_t part,
               int64_t width, acc_t<T>* __restrict__ sums, int64_t num_rows, bool writes) {
  using A = acc_t<T>;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= count * width) {
    return;
  }
  const int64_t k = at / width;
  const int64_t f = at % width;
  const int64_t row = owner == nullptr ? first + k : static_cast<int64_t>(owner[k]);
  if (!is_inside(row, num_rows)) {
    fault("owners of a relation", row, num_rows);
  }
  const A value = to_sum<A>(made[(f / part * count + k) * part + f % part]);
  A* const to = sums + row * width + f;
  *to = writes ? value : *to + value;
}

class OnDevice {
 public:
  explicit OnDevice(const Device& device) : device_(device) {}

  Tensor empty(int64_t rows, int64_t width, ScalarType type) const { return device_.empty({rows, width}, type); }
  Tensor empty_like(const Tensor& t, ScalarType type) const { return device_.empty(shape_of(t), type); }
  static ScalarType sum_type(ScalarType type) {
    return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }

  static int64_t tile_rows(int64_t in, int64_t out, int64_t num_groups, const std::vector<Tensor>& x,
                           const std::vector<Tensor>& others) {
    int64_t held = 0;
    for (const std::vector<Tensor>* const list : {&x, &others}) {
      for (const Tensor& t : *list) {
        held += t.numel() * static_cast<int64_t>(t.element_size());
      }
    }
    const int64_t row_bytes = (in + out) * static_cast<int64_t>(x[0].element_size());
    return std::max<int64_t>(std::min(std::max(held / kTileShare, kLeastTile) / row_bytes, num_groups), 1);
  }

  // The weight of edges has the type of x here.
  void sum(const RelationGroups& groups, int64_t first, int64_t count, const Tensor& x, const Tensor& out) const {
    if (!groups.indptr.has_value()) {
      gather(*groups.indices, first, count, x, out);
      return;
    }
    if (x.size(1) == 0) {
      return;
    }
    dispatch_features(x, "x", [&](auto value) {
      using T = decltype(value);
      dispatch_ids(*groups.indices, [&](auto id) {
        using id_t = decltype(id);
        Aggregation<T, T, id_t> a{};
        a.indptr = const_data<int64_t>(*groups.indptr) + first;
        a.indices = const_data<id_t>(*groups.indices);
        a.num_rows = count;
        a.num_edges = groups.indices->numel();
        a.num_cols = x.size(0);
        a.size = a.width = static_cast<uint32_t>(x.size(1));
        a.x = const_data<T>(x);
        a.weight = data_or_null<T>(groups.weight);
        a.dst_scale = groups.scale.has_value() ? const_data<acc_t<T>>(*groups.scale) + first : nullptr;
        a.out = mutable_data<T>(out);
        sum_rows(device_, a);
      });
    });
  }

  void gather(const Tensor& ids, int64_t first, int64_t count, const Tensor& x, const Tensor& out) const {
    const int64_t bytes = x.size(1) * static_cast<int64_t>(x.element_size());
    if (count == 0 || bytes == 0) {
      return;
    }
    dispatch_ids(ids, [&](auto id) {
      using id_t = decltype(id);
      const auto launch = [&](auto word) {
        using word_type = decltype(word);
        const int64_t words = bytes / static_cast<int64_t>(sizeof(word_type));
        gather_words<<<num_blocks(count * words, kThreads), kThreads, 0, device_.stream()>>>(
            const_data<id_t>(ids) + first, count, words, const_data<word_type>(x), x.size(0),
            mutable_data<word_type>(out));
        CUDA_CHECK_LAUNCH();
      };
      switch (vector_bytes(bytes, {x.const_data_ptr(), out.const_data_ptr()})) {
        case 16:
          return launch(uint4{});
        case 8:
          return launch(uint2{});
        case 4:
          return launch(uint32_t{});
        default:
          return launch(uint16_t{});
      }
    });
  }

  void add(const OptionalTensor& owner, int64_t first, int64_t count, const Tensor& made, int64_t blocks,
           const Tensor& sums, bool writes) const {
    const int64_t width = sums.size(1);
    if (count * width == 0) {
      return;
    }
    dispatch_features(made, "made", [&](auto value) {
      using T = decltype(value);
      const auto launch = [&](const auto* ids) {
        add_values<<<num_blocks(count * width, kThreads), kThreads, 0, device_.stream()>>>(
            ids, first, count, const_data<T>(made), blocks == 0 ? width : width / blocks, width,
            mutable_data<acc_t<T>>(sums), sums.size(0), writes);
        CUDA_CHECK_LAUNCH();
      };
      if (!owner.has_value()) {
        return launch(static_cast<const int64_t*>(nullptr));
      }
      dispatch_ids(*owner, [&](auto id) { launch(const_data<decltype(id)>(*owner) + first); });
    });
  }

  // Relations that have one weight tensor, in a few launches, where they are so small that it pays: of which relations
  // they are done. What they take beside `out` is no more than `tile_size` values.
  std::vector<bool> forward_together(const std::vector<Tensor>& x, const std::vector<Tensor>& weight,
                                     const std::vector<Relation>& relations, const RelationGroups& groups,
                                     int64_t tile_size, const std::vector<Tensor>& out) const {
    std::vector<bool> is_done(relations.size());
    for (size_t slot = 0; slot < weight.size(); ++slot) {
      const WeightShape shape = WeightShape::of(weight[slot]);
      const int64_t most = tile_size / std::max<int64_t>(shape.in + shape.out, 1);
      for (const RelationBatch& some : small_relations(slot, weight[slot], relations, groups, most)) {
        const Tensor sums = empty(some.num_rows, shape.in, weight[slot].scalar_type());
        const Tensor product = empty(some.num_rows, shape.out, weight[slot].scalar_type());
        for_same(some, relations, [](const Relation& r) { return r.x; }, groups, [&](size_t from, int64_t count) {
          const size_t r = some.relations[from];
          sum(groups, groups.ends[r], count, x[relations[r].x], rows_of(sums, some.rows[from], count));
        });
        products<false>(segments(some, relations, groups), sums, shape.in, weight[slot], shape.out, product);
        if (groups.owner.has_value()) {
          add_in_turn(some, relations, groups, [](const Relation& r) { return r.out; }, product, out);
        } else {
          for_same(some, relations, [](const Relation&) { return 0; }, groups, [&](size_t from, int64_t count) {
            add(groups.owner, groups.ends[some.relations[from]], count, rows_of(product, some.rows[from], count), 0,
                out[0], true);
          });
        }
        mark_done(some, is_done);
      }
    }
    return is_done;
  }

  std::vector<bool> backward_together(const std::vector<Tensor>& grad, const std::vector<Tensor>& x,
                                      const std::vector<Tensor>& weight, const std::vector<Relation>& relations,
                                      const std::vector<bool>& wants_x, const RelationGroups& groups,
                                      int64_t tile_size, const std::vector<Tensor>& grad_x,
                                      const std::vector<Tensor>& grad_weight) const {
    std::vector<bool> is_done(relations.size());
    for (size_t slot = 0; slot < weight.size(); ++slot) {
      const WeightShape shape = WeightShape::of(weight[slot]);
      const ScalarType type = weight[slot].scalar_type();
      const bool sums_up = !groups.is_identity();
      const int64_t most = tile_size / std::max<int64_t>(2 * shape.in + (sums_up ? shape.out : 0), 1);
      const std::vector<RelationBatch> all = small_relations(slot, weight[slot], relations, groups, most);
      if (!sums_up && (all.size() != 1 || all[0].num_rows != groups.num_groups())) {
        continue;  // rows of grad are those of all groups
      }
      for (const RelationBatch& some : all) {
        const Tensor sums = empty(sums_up ? some.num_rows : 0, shape.out, type);
        const Tensor sources = empty(some.num_rows, shape.in, type);
        if (sums_up) {
          for_same(some, relations, [](const Relation& r) { return r.out; }, groups, [&](size_t from, int64_t count) {
            const size_t r = some.relations[from];
            sum(groups, groups.ends[r], count, grad[relations[r].out], rows_of(sums, some.rows[from], count));
          });
        }
        for_same(some, relations, [](const Relation& r) { return r.x; }, groups, [&](size_t from, int64_t count) {
          const size_t r = some.relations[from];
          gather(*groups.owner, groups.ends[r], count, x[relations[r].x], rows_of(sources, some.rows[from], count));
        });
        const Tensor& summed = sums_up ? sums : grad[0];
        weights(segments(some, relations, groups), sources, shape.in, summed, shape.out, grad_weight[slot]);
        const RelationBatch wanted = some.subset([&](size_t r) { return wants_x[relations[r].x]; });
        const Tensor product = empty(wanted.relations.empty() ? 0 : some.num_rows, shape.in, type);
        products<true>(segments(wanted, relations, groups), summed, shape.out, weight[slot], shape.in, product);
        add_in_turn(wanted, relations, groups, [](const Relation& r) { return r.x; }, product, grad_x);
        mark_done(some, is_done);
      }
    }
    return is_done;
  }

 private:
  template <bool kTransposed>
  void products(const std::vector<Segments>& all, const Tensor& a, int64_t depth, const Tensor& w, int64_t width,
                const Tensor& out) const {
    if (width == 0) {
      return;
    }
    dispatch_features(w, "weight", [&](auto value) {
      using T = decltype(value);
      for (const Segments& some : all) {
        const dim3 blocks(static_cast<unsigned>(some.tile[some.count]), num_blocks(width, kProductTile));
        product_kernel<T, kTransposed><<<blocks, kProductThreads, 0, device_.stream()>>>(
            some, const_data<T>(a), depth, const_data<T>(w), width, mutable_data<T>(out));
        CUDA_CHECK_LAUNCH();
      }
    });
  }

  void weights(const std::vector<Segments>& all, const Tensor& a, int64_t depth, const Tensor& b, int64_t width,
               const Tensor& out) const {
    if (depth == 0 || width == 0) {
      return;
    }
    dispatch_features(a, "x", [&](auto value) {
      using T = decltype(value);
      using A = acc_t<T>;
      for (const Segments& some : all) {
        const auto num_shares = static_cast<unsigned>(some.share[some.count]);
        const Tensor shares = device_.empty({int64_t{num_shares}, depth * width}, out.scalar_type());
        const dim3 blocks(num_shares, num_blocks(depth, kProductTile), num_blocks(width, kProductTile));
        share_kernel<T><<<blocks, kProductThreads, 0, device_.stream()>>>(some, const_data<T>(a), depth,
                                                                          const_data<T>(b), width,
                                                                          mutable_data<A>(shares));
        CUDA_CHECK_LAUNCH();
        const dim3 sums(num_blocks(depth * width, kProductThreads), static_cast<unsigned>(some.count));
        sum_shares_kernel<A><<<sums, kProductThreads, 0, device_.stream()>>>(some, const_data<A>(shares),
                                                                             depth * width, mutable_data<A>(out));
        CUDA_CHECK_LAUNCH();
      }
    });
  }

  // Adds products to the rows of each slot, relation by relation.
  template <typename SlotOf>
  void add_in_turn(const RelationBatch& all, const std::vector<Relation>& relations, const RelationGroups& groups,
                   const SlotOf& slot_of, const Tensor& made, const std::vector<Tensor>& sums) const {
    for (size_t slot = 0; slot < sums.size(); ++slot) {
      const auto is_mine = [&](size_t r) { return slot_of(relations[r]) == static_cast<int64_t>(slot); };
      const RelationBatch some = all.subset(is_mine);
      const int64_t width = sums[slot].size(1);
      if (some.relations.empty() || width == 0) {
        continue;
      }
      dispatch_features(made, "made", [&](auto value) {
        using T = decltype(value);
        dispatch_ids(*groups.owner, [&](auto id) {
          using id_t = decltype(id);
          for (const Segments& each : segments(some, relations, groups)) {
            add_in_turn_kernel<<<num_blocks(sums[slot].size(0), kAddRows), kProductThreads, 0, device_.stream()>>>(
                each, const_data<id_t>(*groups.owner), const_data<T>(made), width, mutable_data<acc_t<T>>(sums[slot]),
                sums[slot].size(0));
            CUDA_CHECK_LAUNCH();
          }
        });
      });
    }
  }

  const Device& device_;
};

// Sizes and types; kernels check what they read.
void check_groups(const Device& device, const RelationGroups& groups, const char* owner_name, ScalarType sum_type,
                  ScalarType weight_type) {
  const int64_t num_groups = groups.num_groups();
  const int64_t num_edges = groups.indices.has_value() ? groups.indices->numel() : num_groups;
  const auto check_values = [&](const OptionalTensor& t, int64_t size, ScalarType type, const char* name) {
    if (t.has_value()) {
      check_vector(*t, device, name);
      check_dtype(*t, type, name);
      CHECK_ARG(t->numel() == size, name, " must have ", size, " entries, got ", t->numel());
    }
  };
  if (groups.indptr.has_value()) {
    CHECK_ARG(groups.indices.has_value(), "indices must be given beside indptr");
    check_values(groups.indptr, num_groups + 1, ScalarType::Long, "indptr");
  } else {
    CHECK_ARG(num_edges == num_groups, "without indptr there is a member per group, ", num_groups, ", got ", num_edges);
  }
  check_values(groups.scale, num_groups, sum_type, "scale");
  check_values(groups.weight, num_edges, weight_type, "weight of edges");
  if (groups.indices.has_value()) {
    check_ids(*groups.indices, device, "indices");
  }
  if (groups.owner.has_value()) {
    check_ids(*groups.owner, device, owner_name);
    CHECK_ARG(groups.owner->numel() == num_groups, owner_name, " must have ", num_groups, " entries, got ",
              groups.owner->numel());
  }
}

// Relations with edges need rows at both ends: then an id that points outside has another to be replaced by.
template <typename Rows>
void check_not_empty(const std::vector<Relation>& relations, const std::vector<int64_t>& ends, const Rows& num_rows) {
  for (size_t r = 0; r < relations.size(); ++r) {
    CHECK_ARG(ends[r] == ends[r + 1] || num_rows(relations[r]) > 0, "a relation with edges has no rows to read");
  }
}

std::vector<Tensor> relation_conv(std::vector<Tensor> x, std::vector<Tensor> weight, std::vector<Tensor> root,
                                  std::vector<int64_t> own, std::vector<int64_t> relations,
                                  std::vector<int64_t> num_dst, std::vector<int64_t> ends, const OptionalTensor& dst,
                                  const OptionalTensor& indptr, const Tensor& indices, const OptionalTensor& scale,
                                  std::vector<int64_t>, const OptionalTensor&, const OptionalTensor&,
                                  const OptionalTensor&, const OptionalTensor&) {
  check_on_device(indices, "indices");
  const Device device(indices);
  const std::vector<Relation> read = read_relations(relations);
  const std::vector<int64_t> widths =
      check_relation_shapes(x, weight, root, own, read, num_dst,
                            [&](const Tensor& t, const char* name) { check_contiguous(t, device, name); });
  check_ends(ends, read.size(), "ends");
  const OptionalTensor members = indices;
  const OptionalTensor none;
  const RelationGroups groups{ends, dst, indptr, members, scale, none};
  check_groups(device, groups, "dst", sum_type(x[0]), x[0].scalar_type());
  check_not_empty(read, ends, [&](const Relation& r) { return x[r.x].size(0); });
  CHECK_ARG(dst.has_value() || (root.empty() && num_dst.size() == 1 && num_dst[0] == groups.num_groups()),
            "without dst there is one output, of a row per group, and no root");
  return relation_conv_forward(OnDevice(device), x, weight, root, own, read, num_dst, widths, groups);
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>> relation_conv_grad(
    std::vector<Tensor> grad, std::vector<Tensor> x, std::vector<Tensor> weight, std::vector<Tensor> root,
    std::vector<int64_t> own, std::vector<int64_t> relations, std::vector<int64_t> wants_x,
    std::vector<int64_t> t_ends, const Tensor& t_src, const OptionalTensor& t_indptr, const OptionalTensor& t_indices,
    const OptionalTensor& t_weight) {
  check_on_device(t_src, "t_src");
  const Device device(t_src);
  const std::vector<Relation> read = read_relations(relations);
  check_relation_gradient(grad, x, weight, root, own, read, wants_x, t_ends,
                          [&](const Tensor& t, const char* name) { check_contiguous(t, device, name); });
  CHECK_ARG(t_indices.has_value() || !t_weight.has_value(), "t_weight needs t_indices");
  OptionalTensor edge_weight = t_weight;
  if (t_weight.has_value() && t_weight->scalar_type() != x[0].scalar_type()) {
    Tensor narrow = device.empty({t_weight->numel()}, x[0].scalar_type());
    torch::stable::copy_(narrow, *t_weight);
    edge_weight = narrow;
  }
  const OptionalTensor owner = t_src;
  const OptionalTensor none;
  const RelationGroups groups{t_ends, owner, t_indptr, t_indices, none, edge_weight};
  check_groups(device, groups, "t_src", sum_type(x[0]), x[0].scalar_type());
  check_not_empty(read, t_ends, [&](const Relation& r) { return std::min(x[r.x].size(0), grad[r.out].size(0)); });
  if (groups.is_identity()) {
    for (size_t r = 0; r < read.size(); ++r) {
      CHECK_ARG(t_ends[r + 1] <= grad[read[r].out].size(0), "t_indices must be given where members are not the rows");
    }
  }
  RelationGradients found = relation_conv_backward(OnDevice(device), grad, x, weight, root, own, read,
                                                   {wants_x.begin(), wants_x.end()}, groups);
  return {found.x, found.weight, found.root};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "relation_conv", &relation_conv);
  REGISTER_OP(m, "relation_conv_grad", &relation_conv_grad);
}

}  // namespace gnnsys::cuda
