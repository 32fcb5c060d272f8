// relation_conv and relation_conv_grad on the CPU; what they compute is in common/relation_conv.h.
//
// Work: a gathered row per edge, and in x out multiply-adds per group, once forward and twice backward, by torch's BLAS.
#include "common/relation_conv.h"

#include "common/register.h"
#include "cpu/block_sum.h"
#include "cpu/features.h"
#include "cpu/row_sum.h"
#include "cpu/row_work.h"

#include <tuple>

namespace gnnsys {
namespace {

constexpr int64_t kTileBytes = 1 << 19;  // of a thread: sums and products stay in its second-level cache
constexpr int64_t kLeastRows = 64;
constexpr int64_t kRowGrain = 1 << 14;  // values that are worth a thread

template <typename T, typename id_t>
void sum_groups(const RelationGroups& groups, int64_t first, int64_t count, const Tensor& x, T* out) {
  using A = acc_t<T>;
  const int64_t* const indptr = data_or_null<int64_t>(groups.indptr);
  const id_t* const indices = data_or_null<id_t>(groups.indices);
  const A* const scale = data_or_null<A>(groups.scale);
  const A* const weight = data_or_null<A>(groups.weight);
  const T* const rows = const_data<T>(x);
  const int64_t width = x.size(1);
  const int64_t num_members = groups.indices->numel();
  parallel_for(count, std::max<int64_t>(kRowGrain / std::max<int64_t>(width, 1), 1), [&](int64_t begin, int64_t end) {
    RowSum<T> row(width);
    BlockSum<A> blocks;
    const int64_t ahead = neighbors_ahead(width * static_cast<int64_t>(sizeof(T)));
    for (int64_t k = begin; k < end; ++k) {
      const int64_t g = first + k;
      const int64_t member = indptr == nullptr ? g : indptr[g];
      const int64_t size = indptr == nullptr ? 1 : indptr[g + 1] - member;
      T* const to = out + k * width;
      if (size == 1 && scale == nullptr && weight == nullptr) {
        if (member + ahead < num_members) {
          prefetch_row(rows, indices[member + ahead], width);
        }
        std::copy_n(rows + indices[member] * width, width, to);
        continue;
      }
      A* const sum = row.begin(to);
      if (size == 0) {
        std::fill_n(sum, width, A{0});
      }
      for (int64_t done = 0; done < size; done += kChunk) {
        const int64_t e = member + done;
        const Neighbors<id_t> near{indices + e, std::min(kChunk, size - done), num_members - e};
        neighbor_kernels<T, id_t>().sum(sum, {rows, width, width, rows}, near,
                                        weight != nullptr ? weight + e : nullptr, begins_block(done));
        blocks.after(sum, width, done + near.count, size);
      }
      row.finish(to, sum, width, scale == nullptr ? A{1} : scale[g]);
    }
  });
}

// sums[owner of group] (+)= made, whose rows come whole or by block.
template <typename T, typename id_t>
void add_rows(const id_t* owner, int64_t first, int64_t count, const T* made, int64_t blocks, int64_t width,
              acc_t<T>* sums, bool writes) {
  using A = acc_t<T>;
  const int64_t part = blocks == 0 ? width : width / blocks;
  const int64_t num_parts = blocks == 0 ? 1 : blocks;
  parallel_for(count, std::max<int64_t>(kRowGrain / std::max<int64_t>(width, 1), 1), [&](int64_t begin, int64_t end) {
    const int64_t ahead = neighbors_ahead(width * static_cast<int64_t>(sizeof(A)));
    for (int64_t b = 0; b < num_parts; ++b) {
      for (int64_t k = begin; k < end; ++k) {
        const T* const from = made + (b * count + k) * part;
        A* const to = sums + (owner == nullptr ? first + k : static_cast<int64_t>(owner[first + k])) * width + b * part;
        if (owner != nullptr && k + ahead < end) {
          prefetch_row(sums + b * part, owner[first + k + ahead], width);
        }
        for (int64_t f = 0; f < part; ++f) {
          to[f] = writes ? static_cast<A>(from[f]) : to[f] + static_cast<A>(from[f]);
        }
      }
    }
  });
}

struct OnHost {
  Tensor empty(int64_t rows, int64_t width, ScalarType type) const { return empty_cpu({rows, width}, type); }
  Tensor empty_like(const Tensor& t, ScalarType type) const { return empty_cpu(shape_of(t), type); }
  static ScalarType sum_type(ScalarType type) {
    return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }

  static int64_t tile_rows(int64_t in, int64_t out, int64_t num_groups, const std::vector<Tensor>& x,
                           const std::vector<Tensor>&) {
    const int64_t row_bytes = (in + out) * static_cast<int64_t>(x[0].element_size());
    const int64_t rows = std::max(kTileBytes * max_threads() / row_bytes, kLeastRows);
    return std::max<int64_t>(std::min(rows, num_groups), 1);
  }

  void sum(const RelationGroups& groups, int64_t first, int64_t count, const Tensor& x, const Tensor& out) const {
    dispatch_features(x, "x", [&](auto value) {
      using T = decltype(value);
      dispatch_ids(*groups.indices, [&](auto id) {
        sum_groups<T, decltype(id)>(groups, first, count, x, mutable_data<T>(out));
      });
    });
  }

  void gather(const Tensor& ids, int64_t first, int64_t count, const Tensor& x, const Tensor& out) const {
    const int64_t bytes = x.size(1) * static_cast<int64_t>(x.element_size());
    const auto* const from = static_cast<const char*>(x.const_data_ptr());
    auto* const to = static_cast<char*>(out.mutable_data_ptr());
    dispatch_ids(ids, [&](auto id) {
      const auto* const rows = const_data<decltype(id)>(ids) + first;
      parallel_for(count, std::max<int64_t>(kRowGrain / std::max<int64_t>(x.size(1), 1), 1),
                   [&](int64_t begin, int64_t end) {
                     const int64_t ahead = neighbors_ahead(bytes);
                     for (int64_t k = begin; k < end; ++k) {
                       if (k + ahead < end) {
                         prefetch_read(from + rows[k + ahead] * bytes, bytes);
                       }
                       std::copy_n(from + rows[k] * bytes, bytes, to + k * bytes);
                     }
                   });
    });
  }

  void add(const OptionalTensor& owner, int64_t first, int64_t count, const Tensor& made, int64_t blocks,
           const Tensor& sums, bool writes) const {
    dispatch_features(made, "made", [&](auto value) {
      using T = decltype(value);
      auto* const to = mutable_data<acc_t<T>>(sums);
      if (!owner.has_value()) {
        add_rows<T, int64_t>(nullptr, first, count, const_data<T>(made), blocks, sums.size(1), to, writes);
        return;
      }
      dispatch_ids(*owner, [&](auto id) {
        using id_t = decltype(id);
        add_rows<T, id_t>(const_data<id_t>(*owner), first, count, const_data<T>(made), blocks, sums.size(1), to, writes);
      });
    });
  }

  // Relation by relation, always: a call of BLAS takes no time to speak of.
  template <typename... Arguments>
  static std::vector<bool> forward_together(const Arguments&...) {
    return {};
  }
  template <typename... Arguments>
  static std::vector<bool> backward_together(const Arguments&...) {
    return {};
  }
};

// Every entry of a structure: owners are rows of tensors with `num_owners`, members of those with `num_members`.
template <typename Owners, typename Members>
void check_groups(const RelationGroups& groups, const std::vector<Relation>& relations, const char* owner_name,
                  ScalarType sum_type, const Owners& num_owners, const Members& num_members) {
  const int64_t num_groups = groups.num_groups();
  const int64_t num_edges = groups.indices.has_value() ? groups.indices->numel() : num_groups;
  if (groups.indptr.has_value()) {
    CHECK_ARG(groups.indices.has_value(), "indices must be given beside indptr");
    CHECK_ARG(groups.indptr->numel() == num_groups + 1, "indptr must have ", num_groups + 1, " entries, got ",
              groups.indptr->numel());
    check_indptr(*groups.indptr, num_edges);
  } else {
    CHECK_ARG(num_edges == num_groups, "without indptr there is a member per group, ", num_groups, ", got ", num_edges);
  }
  const auto check_values = [&](const OptionalTensor& t, int64_t size, const char* name) {
    if (t.has_value()) {
      check_vector(*t, name);
      check_dtype(*t, sum_type, name);
      CHECK_ARG(t->numel() == size, name, " must have ", size, " entries, got ", t->numel());
    }
  };
  check_values(groups.scale, num_groups, "scale");
  check_values(groups.weight, num_edges, "weight of edges");
  if (groups.owner.has_value()) {
    check_ids(*groups.owner, owner_name);
    CHECK_ARG(groups.owner->numel() == num_groups, owner_name, " must have ", num_groups, " entries, got ",
              groups.owner->numel());
  }
  if (groups.indices.has_value()) {
    check_ids(*groups.indices, "indices");
  }
  const int64_t* const indptr = data_or_null<int64_t>(groups.indptr);
  const auto check_range = [](const Tensor& ids, int64_t begin, int64_t end, int64_t limit, const char* name) {
    dispatch_ids(ids, [&](auto id) {
      const auto* const data = const_data<decltype(id)>(ids) + begin;
      const int64_t bad = first_outside(data, end - begin, limit);
      CHECK_ARG(bad < 0, name, " must be in [0, ", limit, "), got ", data[bad], " at position ", begin + bad);
    });
  };
  for (size_t r = 0; r < relations.size(); ++r) {
    const int64_t begin = groups.ends[r];
    const int64_t end = groups.ends[r + 1];
    const auto edge_of = [&](int64_t g) { return indptr == nullptr ? g : indptr[g]; };
    if (groups.owner.has_value()) {
      check_range(*groups.owner, begin, end, num_owners(relations[r]), owner_name);
    } else {
      CHECK_ARG(end <= num_owners(relations[r]), owner_name, " must be given where groups are not the rows");
    }
    if (groups.indices.has_value()) {
      check_range(*groups.indices, edge_of(begin), edge_of(end), num_members(relations[r]), "indices");
    } else {
      CHECK_ARG(end <= num_members(relations[r]), "indices must be given where members are not the rows");
    }
  }
}

void check_on_host(const Tensor& t, const char* name) { check_contiguous(t, name); }

// The last five arguments, the structure by source, are for autograd alone.
std::vector<Tensor> relation_conv(std::vector<Tensor> x, std::vector<Tensor> weight, std::vector<Tensor> root,
                                  std::vector<int64_t> own, std::vector<int64_t> relations,
                                  std::vector<int64_t> num_dst, std::vector<int64_t> ends, const OptionalTensor& dst,
                                  const OptionalTensor& indptr, const Tensor& indices, const OptionalTensor& scale,
                                  std::vector<int64_t>, const OptionalTensor&, const OptionalTensor&,
                                  const OptionalTensor&, const OptionalTensor&) {
  const std::vector<Relation> read = read_relations(relations);
  const std::vector<int64_t> widths = check_relation_shapes(x, weight, root, own, read, num_dst, check_on_host);
  check_ends(ends, read.size(), "ends");
  const OptionalTensor members = indices;
  const OptionalTensor none;
  const RelationGroups groups{ends, dst, indptr, members, scale, none};
  check_groups(
      groups, read, "dst", sum_type(x[0]), [&](const Relation& r) { return num_dst[r.out]; },
      [&](const Relation& r) { return x[r.x].size(0); });
  CHECK_ARG(dst.has_value() || (root.empty() && num_dst.size() == 1 && num_dst[0] == groups.num_groups()),
            "without dst there is one output, of a row per group, and no root");
  return relation_conv_forward(OnHost{}, x, weight, root, own, read, num_dst, widths, groups);
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>> relation_conv_grad(
    std::vector<Tensor> grad, std::vector<Tensor> x, std::vector<Tensor> weight, std::vector<Tensor> root,
    std::vector<int64_t> own, std::vector<int64_t> relations, std::vector<int64_t> wants_x,
    std::vector<int64_t> t_ends, const Tensor& t_src, const OptionalTensor& t_indptr, const OptionalTensor& t_indices,
    const OptionalTensor& t_weight) {
  const std::vector<Relation> read = read_relations(relations);
  check_relation_gradient(grad, x, weight, root, own, read, wants_x, t_ends, check_on_host);
  const OptionalTensor owner = t_src;
  const OptionalTensor none;
  const RelationGroups groups{t_ends, owner, t_indptr, t_indices, none, t_weight};
  check_groups(
      groups, read, "t_src", sum_type(x[0]), [&](const Relation& r) { return x[r.x].size(0); },
      [&](const Relation& r) { return grad[r.out].size(0); });
  CHECK_ARG(!groups.is_identity() || !t_weight.has_value(), "t_weight needs t_indices");
  RelationGradients found = relation_conv_backward(OnHost{}, grad, x, weight, root, own, read,
                                                   {wants_x.begin(), wants_x.end()}, groups);
  return {found.x, found.weight, found.root};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "relation_conv", &relation_conv);
  REGISTER_OP(m, "relation_conv_grad", &relation_conv_grad);
}

}  // namespace gnnsys
