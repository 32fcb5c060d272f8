// Random walks along in-edges of one CSC, and the nodes that they visit most.
//
// A step draws what sample_neighbors draws for a fanout of one at (key of the step, node, tree = walk), a coin what
// draw_below draws at (key of the coins, walk): walks that are made step by step, on parts, are the same ones. Walks go
// in blocks: reads of a block's rows overlap, and its random words are made with SIMD. Work: a word and two random reads
// per step.
#include "common/draw.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/philox_words.h"

#include <algorithm>
#include <atomic>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kWalksPerThread = 256;
constexpr int64_t kRootsPerThread = 16;

template <typename id_t>
struct Walks {
  const int64_t* indptr;
  const id_t* indices;
  int64_t num_rows;
  int64_t num_edges;
  const int64_t* roots;
  const std::vector<int64_t>& keys;
  const std::vector<int64_t>& coin_keys;
  uint64_t coin;        // a walk goes back where its number is below; 0: never
  uint64_t coin_bound;  // numbers are below it
  int64_t* out;         // [num_roots, length + 1]
};

// Walks [first, first + size), at most kWordBlock of them.
template <typename id_t>
bool walk_block(const Walks<id_t>& q, int64_t first, int64_t size, WordBlock* block) {
  const auto length = static_cast<int64_t>(q.keys.size());
  const int64_t stride = length + 1;
  int64_t at[kWordBlock];
  int64_t begin[kWordBlock];
  int64_t degree[kWordBlock];
  uint64_t coins[kWordBlock];
  for (int64_t w = 0; w < size; ++w) {
    at[w] = q.roots[first + w];
    q.out[(first + w) * stride] = at[w];
  }
  for (int64_t step = 0; step < length; ++step) {
    if (q.coin) {
      const auto key = static_cast<uint64_t>(q.coin_keys[static_cast<size_t>(step)]);
      for (int64_t w = 0; w < size; ++w) {
        const auto walk = static_cast<uint64_t>(first + w);
        block->low[w] = static_cast<uint32_t>(walk);
        block->high[w] = static_cast<uint32_t>(walk >> 32);
        block->tree[w] = 0;
      }
      make_words64(block, size, key);
      for (int64_t w = 0; w < size; ++w) {
        uint64_t low;
        coins[w] = mul_high64(block->word[w], q.coin_bound, &low);
        if (__builtin_expect(low < q.coin_bound, 0)) {
          coins[w] = bounded64(Stream{key, static_cast<uint64_t>(first + w), 0u}, 0, q.coin_bound);
        }
      }
    }
    const auto key = static_cast<uint64_t>(q.keys[static_cast<size_t>(step)]);
    for (int64_t w = 0; w < size; ++w) {  // an ended walk reads row 0
      const int64_t* const row = q.indptr + std::max<int64_t>(at[w], 0);
      begin[w] = row[0];
      degree[w] = at[w] < 0 ? 0 : row[1] - row[0];
      block->low[w] = static_cast<uint32_t>(at[w]);
      block->high[w] = static_cast<uint32_t>(static_cast<uint64_t>(at[w]) >> 32);
      block->tree[w] = static_cast<uint32_t>(first + w);
    }
    make_words64(block, size, key);
    for (int64_t w = 0; w < size; ++w) {
      if (degree[w] < 0 || begin[w] < 0 || begin[w] + degree[w] > q.num_edges || degree[w] >= int64_t{0xFFFFFFFF}) {
        return false;
      }
      const bool goes_back = q.coin && coins[w] < q.coin;
      if (degree[w] > 1 && !goes_back) {
        const Stream stream{key, static_cast<uint64_t>(at[w]), static_cast<uint32_t>(first + w)};
        begin[w] += bounded(stream, 0, static_cast<uint32_t>(block->word[w]), static_cast<uint32_t>(degree[w]));
      }
      degree[w] = goes_back ? 0 : degree[w];
    }
    for (int64_t w = 0; w < size; ++w) {
      const int64_t stuck = q.coin ? q.roots[first + w] : -1;
      at[w] = degree[w] > 0 ? static_cast<int64_t>(q.indices[begin[w]]) : stuck;
      if (at[w] >= q.num_rows) {
        return false;
      }
    }
    for (int64_t w = 0; w < size; ++w) {
      q.out[(first + w) * stride + step + 1] = at[w];
    }
  }
  return true;
}

Tensor random_walks(const Tensor& indptr, const Tensor& indices, const Tensor& roots, std::vector<int64_t> keys,
                    std::vector<int64_t> coin_keys, int64_t coin, int64_t coin_bound) {
  check_csc(indptr, indices);
  check_ids(roots, "roots");
  check_dtype(roots, ScalarType::Long, "roots");
  check_id_range(roots, indptr.numel() - 1, "roots");
  CHECK_ARG(roots.numel() <= static_cast<int64_t>(kMaxTree) + 1, "at most 2^24 walks at once, got ", roots.numel());
  CHECK_ARG(coin >= 0 && coin <= coin_bound && coin_bound >= 1, "coin must be in [0, coin_bound], got ", coin, " and ", coin_bound);
  CHECK_ARG(coin == 0 || coin_keys.size() == keys.size(), "coin_keys must have a key per step, ", keys.size(), ", got ", coin_keys.size());
  const Tensor out = empty_cpu({roots.numel(), static_cast<int64_t>(keys.size()) + 1}, ScalarType::Long);
  std::atomic<bool> is_damaged{false};
  dispatch_ids(indices, [&](auto id) {
    const Walks<decltype(id)> q{const_data<int64_t>(indptr), const_data<decltype(id)>(indices), indptr.numel() - 1, indices.numel(),
                                const_data<int64_t>(roots), keys, coin_keys, static_cast<uint64_t>(coin),
                                static_cast<uint64_t>(coin_bound), mutable_data<int64_t>(out)};
    parallel_for(roots.numel(), kWalksPerThread, [&](int64_t begin, int64_t end) {
      WordBlock block;
      for (int64_t first = begin; first < end; first += kWordBlock) {
        if (!walk_block(q, first, std::min(kWordBlock, end - first), &block)) {
          is_damaged = true;
          return;
        }
      }
    });
  });
  CHECK_ARG(!is_damaged, "indptr must ascend from 0 to len(indices), and indices be nodes: a walk left the graph");
  return out;
}

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
    std::stable_sort(seen_.begin(), seen_.end(), [](const Visit& a, const Visit& b) { return a.count > b.count; });
    if (static_cast<int64_t>(seen_.size()) > most) {
      seen_.resize(static_cast<size_t>(most));
    }
    return seen_;
  }

 private:
  int bits_ = 4;
  std::vector<int32_t> slots_;  // -1: empty, else a place in seen_
  std::vector<Visit> seen_;
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
  const int threads = num_threads_for(num_roots, kRootsPerThread);
  std::vector<std::vector<Visit>> found(static_cast<size_t>(threads));
  std::vector<int64_t> counts(static_cast<size_t>(num_roots));
  on_threads(threads, [&](int t, int n) {
    const Range share = share_of(num_roots, t, n);
    VisitCounter counter(num_visits);
    auto& mine = found[static_cast<size_t>(t)];
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

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "random_walks", &random_walks);
  REGISTER_OP(m, "most_visited", &most_visited);
}

}  // namespace gnnsys
