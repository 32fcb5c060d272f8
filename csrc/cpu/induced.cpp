// Edges among chosen nodes: the in-edges of some columns whose source is in a list, in the order of the columns.
//
// With trees, a node is known by (tree, id), and an edge counts where both ends are of one tree. One pass over the
// columns' in-edges: 8 bytes per 8 to 16 listed sources are read before the table is, and tell most strangers.
#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/prefetch.h"
#include "common/register.h"
#include "common/tensors.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int kIdBits = 40;
constexpr int64_t kMostTrees = int64_t{1} << 23;
constexpr int64_t kColumnsPerShare = 64;
constexpr int64_t kAhead = 12;  // columns whose ids are asked for before they are needed; twice as many for their bounds

// (tree, id) -> its first place in a list. Open addressing, at most half full, behind a bitmap of 8 to 16 bits per entry.
class Members {
 public:
  template <typename id_t>
  Members(const id_t* ids, const int64_t* trees, int64_t size) {
    int bits = 6;
    while ((int64_t{1} << bits) < 2 * size) {
      ++bits;
    }
    shift_ = 64 - bits;
    slots_.assign(size_t{1} << bits, Slot{kEmpty, -1});
    filter_shift_ = shift_ - 2;
    filter_.assign(size_t{1} << (bits + 2 - 6), 0);
    for (int64_t i = 0; i < size; ++i) {
      if (ids[i] >= 0) {  // a negative id is a place that nobody has
        add(key(trees ? trees[i] : 0, ids[i]), i);
      }
    }
  }

  static uint64_t key(int64_t tree, int64_t id) { return static_cast<uint64_t>(tree) << kIdBits | static_cast<uint64_t>(id); }

  // 0 for what is surely not in the list, else 1: eight of nine strangers are told by a bit.
  int64_t maybe(uint64_t wanted) const {
    const uint64_t bit = wanted * kMultiplier >> filter_shift_;
    return static_cast<int64_t>(filter_[bit >> 6] >> (bit & 63) & 1);
  }

  // -1 for what is not in the list.
  int64_t operator()(uint64_t wanted) const {
    size_t at = wanted * kMultiplier >> shift_;
    while (slots_[at].key != wanted && slots_[at].key != kEmpty) {
      at = (at + 1) & (slots_.size() - 1);
    }
    return slots_[at].place;
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  static constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15ull;
  struct Slot {
    uint64_t key;
    int64_t place;
  };

  void add(uint64_t wanted, int64_t place) {
    const uint64_t hash = wanted * kMultiplier;
    const uint64_t bit = hash >> filter_shift_;
    filter_[bit >> 6] |= uint64_t{1} << (bit & 63);
    size_t at = hash >> shift_;
    while (slots_[at].key != wanted && slots_[at].key != kEmpty) {
      at = (at + 1) & (slots_.size() - 1);
    }
    if (slots_[at].key == kEmpty) {
      slots_[at] = {wanted, place};
    }
  }

  int shift_;
  int filter_shift_;
  std::vector<Slot> slots_;
  std::vector<uint64_t> filter_;
};

// What one thread has found in its share of the columns.
struct Found {
  std::vector<int64_t> places;
  std::vector<int64_t> positions;
};

template <typename id_t, typename node_t>
std::tuple<Tensor, Tensor, Tensor> collect(const Tensor& indptr, const Tensor& indices, const node_t* columns,
                                           const int64_t* trees, int64_t num_columns, const Members& members,
                                           const int64_t* exclude, int64_t num_exclude) {
  const auto* from = const_data<int64_t>(indptr);
  const auto* neighbor = const_data<id_t>(indices);
  const Tensor out_indptr = empty_cpu({num_columns + 1}, ScalarType::Long);
  auto* const ends = mutable_data<int64_t>(out_indptr);
  const int threads = num_threads_for(num_columns, kColumnsPerShare);
  std::vector<Found> found(static_cast<size_t>(threads));
  on_threads(threads, [&](int t, int n) {
    Found& mine = found[static_cast<size_t>(t)];
    std::vector<int64_t> candidates;
    const Range share = share_of(num_columns, t, n);
    for (int64_t i = share.begin; i < share.end; ++i) {
      if (i + 2 * kAhead < share.end) {
        prefetch_read(from + columns[i + 2 * kAhead], sizeof(int64_t));
      }
      if (i + kAhead < share.end) {
        const int64_t soon = from[columns[i + kAhead]];
        const int64_t size = from[columns[i + kAhead] + 1] - soon;
        prefetch_read(neighbor + soon, std::min<int64_t>(size * static_cast<int64_t>(sizeof(id_t)), 4 * kCacheLine));
      }
      const int64_t end = from[columns[i] + 1];
      int64_t p = from[columns[i]];
      const uint64_t tree = Members::key(trees ? trees[i] : 0, 0);
      const int64_t* gap = num_exclude ? std::lower_bound(exclude, exclude + num_exclude, p) : exclude;
      if (static_cast<int64_t>(candidates.size()) < end - p) {
        candidates.resize(static_cast<size_t>(end - p));
      }
      int64_t num_candidates = 0;
      for (; p < end; ++p) {  // without a branch: which neighbours are members nobody can guess
        candidates[static_cast<size_t>(num_candidates)] = p;
        num_candidates += members.maybe(tree | static_cast<uint64_t>(neighbor[p]));
      }
      for (int64_t c = 0; c < num_candidates; ++c) {
        const int64_t position = candidates[static_cast<size_t>(c)];
        while (gap != exclude + num_exclude && *gap < position) {
          ++gap;
        }
        if (gap != exclude + num_exclude && *gap == position) {
          continue;
        }
        if (const int64_t place = members(tree | static_cast<uint64_t>(neighbor[position])); place >= 0) {
          mine.places.push_back(place);
          mine.positions.push_back(position);
        }
      }
      ends[i + 1] = static_cast<int64_t>(mine.places.size());
    }
  });
  ends[0] = 0;
  int64_t total = 0;
  std::vector<int64_t> first(static_cast<size_t>(threads));
  for (int t = 0; t < threads; ++t) {
    first[static_cast<size_t>(t)] = total;
    total += static_cast<int64_t>(found[static_cast<size_t>(t)].places.size());
  }
  const Tensor places = empty_cpu({total}, ScalarType::Long);
  const Tensor positions = empty_cpu({total}, ScalarType::Long);
  on_threads(threads, [&](int t, int n) {
    const Found& mine = found[static_cast<size_t>(t)];
    const int64_t at = first[static_cast<size_t>(t)];
    const Range share = share_of(num_columns, t, n);
    for (int64_t i = share.begin; i < share.end; ++i) {
      ends[i + 1] += at;
    }
    std::copy(mine.places.begin(), mine.places.end(), mutable_data<int64_t>(places) + at);
    std::copy(mine.positions.begin(), mine.positions.end(), mutable_data<int64_t>(positions) + at);
  });
  return {out_indptr, places, positions};
}

void check_trees(const std::optional<Tensor>& trees, const Tensor& nodes, const char* name) {
  if (!trees.has_value()) {
    return;
  }
  CHECK_ARG(trees->scalar_type() == ScalarType::Long && trees->numel() == nodes.numel() && trees->is_contiguous(), name,
            " must be int64 with an entry per node, ", nodes.numel());
  check_id_range(*trees, kMostTrees, name);
}

std::tuple<Tensor, Tensor, Tensor> edges_within(const Tensor& indptr, const Tensor& indices, const Tensor& dst,
                                                const std::optional<Tensor>& dst_tree, const Tensor& src,
                                                const std::optional<Tensor>& src_tree,
                                                const std::optional<Tensor>& exclude) {
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
  const auto* const excluded = exclude.has_value() ? const_data<int64_t>(*exclude) : nullptr;
  const int64_t num_excluded = exclude.has_value() ? exclude->numel() : 0;
  CHECK_ARG(std::is_sorted(excluded, excluded + num_excluded), "exclude must ascend");
  const Members members = dispatch_ids(src, [&](auto node) {
    const auto* const ids = const_data<decltype(node)>(src);
    for (int64_t i = 0; i < src.numel(); ++i) {
      CHECK_ARG(ids[i] < (int64_t{1} << kIdBits), "src must be below 2^", kIdBits, ", got ", static_cast<int64_t>(ids[i]));
    }
    return Members(ids, src_tree.has_value() ? const_data<int64_t>(*src_tree) : nullptr, src.numel());
  });
  const auto* const trees = dst_tree.has_value() ? const_data<int64_t>(*dst_tree) : nullptr;
  return dispatch_ids(dst, [&](auto node) {
    const auto* const columns = const_data<decltype(node)>(dst);
    return dispatch_ids(indices, [&](auto id) {
      return collect<decltype(id)>(indptr, indices, columns, trees, dst.numel(), members, excluded, num_excluded);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "edges_within", &edges_within); }

}  // namespace gnnsys
