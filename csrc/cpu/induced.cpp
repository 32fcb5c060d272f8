// Edges among chosen nodes: the in-edges of some columns whose source is in a list, in the order of the columns.
//
// With trees, a node is known by (tree, id), and an edge counts where both ends are of one tree. Members are told by a byte
// per id, and their places read from a table by id, where that is small beside the edges; else they are looked up in a
// hash table, before which 8 bytes per 8 to 16 listed sources are read, that tell most strangers.
#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/prefetch.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/members.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kMostTrees = int64_t{1} << 23;
constexpr int64_t kColumnsPerShare = 64;
constexpr int64_t kDenseIdsPerEdge = 4;  // a table of all ids is filled where it has at most so many per edge looked at
constexpr int64_t kAhead = 48;  // columns whose ids are asked for before they are needed; twice as many for their bounds

// The columns that are looked at.
template <typename id_t, typename node_t>
struct Columns {
  const int64_t* from;
  const id_t* neighbor;
  const node_t* nodes;
  const int64_t* trees;  // null: one for all
  int64_t size;
  const int64_t* exclude;  // ascending positions
  int64_t num_exclude;

  int64_t begin(int64_t i) const { return from[nodes[i]]; }
  int64_t end(int64_t i) const { return from[nodes[i] + 1]; }

  // What will be needed in a few columns' time is asked for.
  void look_ahead(int64_t i, int64_t last) const {
    if (i + 2 * kAhead < last) {
      prefetch_read(from + nodes[i + 2 * kAhead], sizeof(int64_t));
    }
    if (i + kAhead < last) {
      const int64_t bytes = (end(i + kAhead) - begin(i + kAhead)) * static_cast<int64_t>(sizeof(id_t));
      prefetch_read(neighbor + begin(i + kAhead), std::min<int64_t>(bytes, 4 * kCacheLine));
    }
  }
};

// Where the edges go, all int64 [num_edges]; positions become edge ids where there are any.
struct Output {
  int64_t* places;
  int64_t* positions;
  int64_t* columns;  // null: not wanted
  const int32_t* narrow_ids;  // of edges, by position; null: not these
  const int64_t* wide_ids;

  void fill_column(int64_t column, int64_t begin, int64_t end) const {
    if (columns != nullptr) {
      std::fill(columns + begin, columns + end, column);
    }
  }

  // For many columns at once: ids lie far apart, and reads of a long loop overlap.
  void name_edges(int64_t begin, int64_t end) const {
    if (narrow_ids != nullptr) {
      for (int64_t e = begin; e < end; ++e) {
        positions[e] = narrow_ids[positions[e]];
      }
    } else if (wide_ids != nullptr) {
      for (int64_t e = begin; e < end; ++e) {
        positions[e] = wide_ids[positions[e]];
      }
    }
  }
};

// Keeps what it finds, in memory that is touched only as far as it is used, until it is known where that belongs.
template <typename id_t, typename node_t>
class DenseSearch {
 public:
  DenseSearch(const Columns<id_t, node_t>& columns, const DenseMembers& members) : columns_(columns), members_(members) {}

  void count(int64_t first, int64_t last, int64_t* ends) {
    size_t most = 0;
    for (int64_t i = first; i < last; ++i) {
      most += static_cast<size_t>(columns_.end(i) - columns_.begin(i));
    }
    places_.reset(new int32_t[most + 1]);
    offsets_.reset(new uint32_t[most + 1]);
    int32_t* place = places_.get();
    uint32_t* offset = offsets_.get();
    for (int64_t i = first; i < last; ++i) {
      columns_.look_ahead(i, last);
      const int64_t begin = columns_.begin(i);
      int64_t found = members_.search(columns_.neighbor + begin, columns_.end(i) - begin, place, offset);
      if (columns_.num_exclude) {
        found = drop_excluded(i, place, offset, found);
      }
      ends[i + 1] = found;
      place += found;
      offset += found;
    }
  }

  void write(int64_t first, int64_t last, const int64_t* ends, const Output& out) const {
    const int32_t* place = places_.get();
    const uint32_t* offset = offsets_.get();
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = columns_.begin(i);
      const int64_t found = ends[i + 1] - ends[i];
      int64_t* const to_place = out.places + ends[i];
      int64_t* const to_position = out.positions + ends[i];
      for (int64_t e = 0; e < found; ++e) {
        to_place[e] = place[e];
      }
      for (int64_t e = 0; e < found; ++e) {
        to_position[e] = begin + offset[e];
      }
      out.fill_column(i, ends[i], ends[i + 1]);
      place += found;
      offset += found;
    }
    out.name_edges(ends[first], ends[last]);
  }

 private:
  int64_t drop_excluded(int64_t i, int32_t* places, uint32_t* offsets, int64_t found) const {
    const int64_t* const all = columns_.exclude + columns_.num_exclude;
    const int64_t* gap = std::lower_bound(columns_.exclude, all, columns_.begin(i));
    if (gap == all || *gap >= columns_.end(i)) {
      return found;
    }
    int64_t kept = 0;
    for (int64_t e = 0; e < found; ++e) {
      const int64_t position = columns_.begin(i) + offsets[e];
      while (gap != all && *gap < position) {
        ++gap;
      }
      places[kept] = places[e];
      offsets[kept] = offsets[e];
      kept += gap == all || *gap != position;
    }
    return kept;
  }

  const Columns<id_t, node_t>& columns_;
  const DenseMembers& members_;
  std::unique_ptr<int32_t[]> places_;
  std::unique_ptr<uint32_t[]> offsets_;  // in the column
};

// One pass through the hash table, which keeps what it finds until it is known where that belongs.
template <typename id_t, typename node_t>
class HashSearch {
 public:
  HashSearch(const Columns<id_t, node_t>& columns, const HashMembers& members) : columns_(columns), members_(members) {}

  void count(int64_t first, int64_t last, int64_t* ends) {
    for (int64_t i = first; i < last; ++i) {
      columns_.look_ahead(i, last);
      const auto before = static_cast<int64_t>(places_.size());
      search(i);
      ends[i + 1] = static_cast<int64_t>(places_.size()) - before;
    }
  }

  void write(int64_t first, int64_t last, const int64_t* ends, const Output& out) {
    std::copy(places_.begin(), places_.end(), out.places + ends[first]);
    std::copy(positions_.begin(), positions_.end(), out.positions + ends[first]);
    for (int64_t i = first; i < last; ++i) {
      out.fill_column(i, ends[i], ends[i + 1]);
    }
    out.name_edges(ends[first], ends[last]);
  }

 private:
  void search(int64_t i) {
    const int64_t end = columns_.end(i);
    int64_t p = columns_.begin(i);
    const uint64_t tree = HashMembers::key(columns_.trees ? columns_.trees[i] : 0, 0);
    const int64_t* const all = columns_.exclude + columns_.num_exclude;
    const int64_t* gap = columns_.num_exclude ? std::lower_bound(columns_.exclude, all, p) : all;
    if (static_cast<int64_t>(candidates_.size()) < end - p) {
      candidates_.resize(static_cast<size_t>(end - p));
    }
    size_t num_candidates = 0;
    for (; p < end; ++p) {  // without a branch: which neighbours are members nobody can guess
      candidates_[num_candidates] = p;
      const auto neighbor = static_cast<uint64_t>(columns_.neighbor[p]);
      num_candidates += static_cast<size_t>((neighbor >> kIdBits == 0) & members_.maybe(tree | neighbor));
    }
    for (size_t c = 0; c < num_candidates; ++c) {
      const int64_t position = candidates_[c];
      while (gap != all && *gap < position) {
        ++gap;
      }
      if (gap != all && *gap == position) {
        continue;
      }
      if (const int64_t place = members_(tree | static_cast<uint64_t>(columns_.neighbor[position])); place >= 0) {
        places_.push_back(place);
        positions_.push_back(position);
      }
    }
  }

  const Columns<id_t, node_t>& columns_;
  const HashMembers& members_;
  std::vector<int64_t> places_;
  std::vector<int64_t> positions_;
  std::vector<int64_t> candidates_;
};

struct Inner {
  Tensor indptr;
  Tensor places;
  Tensor positions;
  std::optional<Tensor> columns;
};

template <template <typename, typename> class Search, typename id_t, typename node_t, typename MembersOf>
Inner collect(const Columns<id_t, node_t>& columns, const MembersOf& members, const std::optional<Tensor>& edge_ids,
              bool with_columns) {
  Inner out{empty_cpu({columns.size + 1}, ScalarType::Long), {}, {}, {}};
  auto* const ends = mutable_data<int64_t>(out.indptr);
  const int shares = num_shares_for(columns.size, kColumnsPerShare);
  std::vector<Search<id_t, node_t>> searches;
  searches.reserve(static_cast<size_t>(shares));
  for (int s = 0; s < shares; ++s) {
    searches.emplace_back(columns, members);
  }
  for_shares(shares, [&](int s, int n) {
    const Range share = share_of(columns.size, s, n);
    searches[static_cast<size_t>(s)].count(share.begin, share.end, ends);
  });
  ends[0] = 0;
  for (int64_t i = 0; i < columns.size; ++i) {
    ends[i + 1] += ends[i];
  }
  const int64_t total = ends[columns.size];
  out.places = empty_cpu({total}, ScalarType::Long);
  out.positions = empty_cpu({total}, ScalarType::Long);
  if (with_columns) {
    out.columns = empty_cpu({total}, ScalarType::Long);
  }
  Output to{mutable_data<int64_t>(out.places), mutable_data<int64_t>(out.positions),
            with_columns ? mutable_data<int64_t>(*out.columns) : nullptr, nullptr, nullptr};
  if (edge_ids.has_value() && edge_ids->scalar_type() == ScalarType::Int) {
    to.narrow_ids = const_data<int32_t>(*edge_ids);
  } else if (edge_ids.has_value()) {
    to.wide_ids = const_data<int64_t>(*edge_ids);
  }
  for_shares(shares, [&](int s, int n) {
    const Range share = share_of(columns.size, s, n);
    searches[static_cast<size_t>(s)].write(share.begin, share.end, ends, to);
  });
  return out;
}

void check_trees(const std::optional<Tensor>& trees, const Tensor& nodes, const char* name) {
  if (!trees.has_value()) {
    return;
  }
  CHECK_ARG(trees->scalar_type() == ScalarType::Long && trees->numel() == nodes.numel() && trees->is_contiguous(), name,
            " must be int64 with an entry per node, ", nodes.numel());
  check_id_range(*trees, kMostTrees, name);
}

Inner find_inner(const Tensor& indptr, const Tensor& indices, const Tensor& dst, const std::optional<Tensor>& dst_tree,
                 const Tensor& src, const std::optional<Tensor>& src_tree, const std::optional<Tensor>& exclude,
                 const std::optional<Tensor>& edge_ids, bool with_columns) {
  check_csc(indptr, indices);
  check_ids(dst, "dst");
  check_ids(src, "src");
  check_id_range(dst, indptr.numel() - 1, "dst");
  check_columns(indptr, dst, indices.numel());
  CHECK_ARG(dst_tree.has_value() == src_tree.has_value(), "dst_tree and src_tree go together");
  check_trees(dst_tree, dst, "dst_tree");
  check_trees(src_tree, src, "src_tree");
  if (exclude.has_value()) {
    check_ids(*exclude, "exclude");
    CHECK_ARG(exclude->scalar_type() == ScalarType::Long, "exclude must be int64");
  }
  if (edge_ids.has_value()) {
    check_ids(*edge_ids, "edge_ids");
    CHECK_ARG(edge_ids->numel() == indices.numel(), "edge_ids must have an id per edge, ", indices.numel(), ", got ", edge_ids->numel());
  }
  const auto* const excluded = exclude.has_value() ? const_data<int64_t>(*exclude) : nullptr;
  const int64_t num_excluded = exclude.has_value() ? exclude->numel() : 0;
  CHECK_ARG(std::is_sorted(excluded, excluded + num_excluded), "exclude must ascend");
  CHECK_ARG(src.numel() < std::numeric_limits<int32_t>::max(), "src must have fewer than 2^31 - 1 nodes, got ", src.numel());
  const auto* const trees = dst_tree.has_value() ? const_data<int64_t>(*dst_tree) : nullptr;
  const auto* const src_trees = src_tree.has_value() ? const_data<int64_t>(*src_tree) : nullptr;
  return dispatch_ids(src, [&](auto source) {
    const auto* const ids = const_data<decltype(source)>(src);
    int64_t bound = 0;
    for (int64_t i = 0; i < src.numel(); ++i) {
      bound = std::max(bound, static_cast<int64_t>(ids[i]) + 1);
    }
    CHECK_ARG(bound <= (int64_t{1} << kIdBits), "src must be below 2^", kIdBits, ", got ", bound - 1);
    return dispatch_ids(dst, [&](auto node) {
      return dispatch_ids(indices, [&](auto id) {
        const Columns<decltype(id), decltype(node)> columns{const_data<int64_t>(indptr), const_data<decltype(id)>(indices),
                                                            const_data<decltype(node)>(dst), trees, dst.numel(), excluded, num_excluded};
        int64_t num_edges = 0;
        int64_t largest = 0;
        for (int64_t i = 0; i < columns.size; ++i) {
          num_edges += columns.end(i) - columns.begin(i);
          largest = std::max(largest, columns.end(i) - columns.begin(i));
        }
        if (src_trees == nullptr && largest < std::numeric_limits<uint32_t>::max() && bound <= kDenseIdsPerEdge * num_edges) {
          return collect<DenseSearch>(columns, DenseMembers(ids, src.numel(), bound), edge_ids, with_columns);
        }
        return collect<HashSearch>(columns, HashMembers(ids, src_trees, src.numel()), edge_ids, with_columns);
      });
    });
  });
}

std::tuple<Tensor, Tensor, Tensor> edges_within(const Tensor& indptr, const Tensor& indices, const Tensor& dst,
                                                const std::optional<Tensor>& dst_tree, const Tensor& src,
                                                const std::optional<Tensor>& src_tree,
                                                const std::optional<Tensor>& exclude) {
  const Inner found = find_inner(indptr, indices, dst, dst_tree, src, src_tree, exclude, std::nullopt, false);
  return {found.indptr, found.places, found.positions};
}

// The same as (place of the source, place of the destination, edge id).
std::tuple<Tensor, Tensor, Tensor> induced_coo(const Tensor& indptr, const Tensor& indices, const std::optional<Tensor>& edge_ids,
                                               const Tensor& dst, const std::optional<Tensor>& dst_tree, const Tensor& src,
                                               const std::optional<Tensor>& src_tree, const std::optional<Tensor>& exclude) {
  const Inner found = find_inner(indptr, indices, dst, dst_tree, src, src_tree, exclude, edge_ids, true);
  return {found.places, *found.columns, found.positions};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "edges_within", &edges_within);
  REGISTER_OP(m, "induced_coo", &induced_coo);
}

}  // namespace gnnsys
