// most_visited: the nodes that walks from each root visit most.
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kRootsPerThread = 16;

// A node that was seen, and how often; in a table by hash, and in the order they were first seen.
struct Visit {
  int64_t id;
  int64_t count;
};

// Counts one root's visits and leaves the most visited first, earlier ones before later ones.
class VisitCounter {
 public:
  explicit VisitCounter(int64_t most_visits) {
    while ((int64_t{1} << bits_) < 2 * most_visits) {
      ++bits_;
    }
    slots_.assign(size_t{1} << bits_, -1);
    seen_.reserve(static_cast<size_t>(most_visits));
    touched_.reserve(static_cast<size_t>(most_visits));
    ranks_.reserve(static_cast<size_t>(most_visits));
  }

  std::vector<Visit>& count(const int64_t* visits, int64_t size, int64_t without, int64_t most) {
    seen_.clear();
    touched_.clear();
    const size_t mask = slots_.size() - 1;
    for (int64_t v = 0; v < size; ++v) {
      const int64_t id = visits[v];
      if (id < 0 || id == without) {
        continue;
      }
      size_t slot = static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull >> (64 - bits_);
      while (slots_[slot] >= 0 && seen_[static_cast<size_t>(slots_[slot])].id != id) {
        slot = (slot + 1) & mask;
      }
      if (slots_[slot] < 0) {
        slots_[slot] = static_cast<int32_t>(seen_.size());
        touched_.push_back(static_cast<uint32_t>(slot));
        seen_.push_back({id, 0});
      }
      ++seen_[static_cast<size_t>(slots_[slot])].count;
    }
    for (const uint32_t slot : touched_) {
      slots_[slot] = -1;
    }
    return best(most);
  }

 private:
  // Sorts one number per node, its count above its place: places break ties, and none are equal.
  std::vector<Visit>& best(int64_t most) {
    ranks_.clear();
    for (size_t place = 0; place < seen_.size(); ++place) {
      ranks_.push_back(static_cast<uint64_t>(seen_[place].count) << 32 | (~static_cast<uint32_t>(place)));
    }
    const auto size = std::min(static_cast<int64_t>(ranks_.size()), most);
    const auto end = ranks_.begin() + size;
    if (end != ranks_.end()) {
      std::nth_element(ranks_.begin(), end, ranks_.end(), std::greater<>());
    }
    std::sort(ranks_.begin(), end, std::greater<>());
    best_.clear();
    for (auto rank = ranks_.begin(); rank != end; ++rank) {
      best_.push_back(seen_[~static_cast<uint32_t>(*rank)]);
    }
    return best_;
  }

  int bits_ = 4;
  std::vector<int32_t> slots_;  // -1: empty, else a place in seen_
  std::vector<Visit> seen_;
  std::vector<Visit> best_;
  std::vector<uint64_t> ranks_;
  std::vector<uint32_t> touched_;
};

// Of each row of visits [num_roots, num_visits] the ids that are there most often. Work: a hash per visit.
std::tuple<Tensor, Tensor, Tensor> most_visited(const Tensor& visits, int64_t most, const std::optional<Tensor>& without) {
  CHECK_ARG(visits.dim() == 2 && visits.scalar_type() == ScalarType::Long && visits.is_contiguous(),
            "visits must be contiguous int64 [num_roots, num_visits]");
  CHECK_ARG(most >= 1, "most must be at least 1, got ", most);
  const int64_t num_roots = visits.size(0);
  const int64_t num_visits = visits.size(1);
  CHECK_ARG(num_visits < (int64_t{1} << 30), "visits must have fewer than 2^30 columns, got ", num_visits);
  if (without.has_value()) {
    check_vector(*without, "without");
    check_dtype(*without, ScalarType::Long, "without");
    CHECK_ARG(without->numel() == num_roots, "without must have an id per root, ", num_roots, ", got ", without->numel());
  }
  const auto* const visited = const_data<int64_t>(visits);
  const auto* const skipped = without.has_value() ? const_data<int64_t>(*without) : nullptr;
  const int shares = num_shares_for(num_roots, kRootsPerThread);
  std::vector<std::vector<Visit>> found(static_cast<size_t>(shares));
  std::vector<int64_t> counts(static_cast<size_t>(num_roots));
  for_shares(shares, [&](int s, int n) {
    const Range share = share_of(num_roots, s, n);
    VisitCounter counter(num_visits);
    auto& mine = found[static_cast<size_t>(s)];
    for (int64_t r = share.begin; r < share.end; ++r) {
      const auto& best = counter.count(visited + r * num_visits, num_visits, skipped ? skipped[r] : -1, most);
      mine.insert(mine.end(), best.begin(), best.end());
      counts[static_cast<size_t>(r)] = static_cast<int64_t>(best.size());
    }
  });
  int64_t total = 0;
  for (const int64_t size : counts) {
    total += size;
  }
  const Tensor root = empty_cpu({total}, ScalarType::Long);
  const Tensor ids = empty_cpu({total}, ScalarType::Long);
  const Tensor number = empty_cpu({total}, ScalarType::Long);
  int64_t at = 0;
  for (int64_t r = 0; r < num_roots; ++r) {
    std::fill_n(mutable_data<int64_t>(root) + at, counts[static_cast<size_t>(r)], r);
    at += counts[static_cast<size_t>(r)];
  }
  at = 0;
  for (const auto& mine : found) {
    for (const Visit& visit : mine) {
      mutable_data<int64_t>(ids)[at] = visit.id;
      mutable_data<int64_t>(number)[at++] = visit.count;
    }
  }
  return {root, ids, number};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "most_visited", &most_visited); }

}  // namespace gnnsys
