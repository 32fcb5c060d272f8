// sample_labor: LABOR-0 (Balin and Catalyurek 2023, section 3.2): edge u -> v is taken where r_u < k / degree(v).
//
// r_u is one 64-bit word per source: seeds that share a neighbour take it together, so a batch sees fewer nodes. The word
// is Philox's at (key, original id of u, tree), and it is compared as an integer: word * degree < k * 2^64. Work: a
// word for each in-edge of the seeds that have more than k, made for sixteen edges at a time, whatever seed they are of;
// or, where these edges are more than the sources, the high halves of all sources' words once, and a read per edge.
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/arguments.h"
#include "cpu/philox_words.h"
#include "cpu/sample.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

template <typename id_t, typename source_t>
struct LaborRequest {
  const int64_t* indptr;
  const id_t* indices;
  int64_t num_edges;
  const id_t* seeds;
  int64_t num_seeds;
  int64_t fanout;
  uint64_t key;
  const source_t* source_ids;  // original ids of the sources; the sources themselves when null
  int64_t num_src;
  const uint32_t* high_words;  // of all sources; null where words are made edge by edge
  const int64_t* tree;      // null: tree 0
  const int64_t* exclude;  // ascending positions
  int64_t num_exclude;
};

// One thread's collector: appends each seed's taken positions, seed after seed.
template <typename id_t, typename source_t>
class LaborCollector {
 public:
  LaborCollector(const LaborRequest<id_t, source_t>& q, int64_t* counts, float* weights, Faults* faults)
      : q_(q), counts_(counts), weights_(weights), faults_(faults) {}

  std::vector<int64_t> positions;
  int64_t bad_position = -1;  // of an edge whose source has no original id

  void collect(int64_t i) {
    const int64_t row = q_.seeds[i];
    const int64_t begin = q_.indptr[row];
    const int64_t end = q_.indptr[row + 1];
    counts_[i] = 0;
    weights_[i] = 0;
    if (!check_row(begin, end, q_.num_edges, row, faults_) || q_.fanout == 0) {
      return;
    }
    const int64_t* all_end = q_.exclude + q_.num_exclude;
    const int64_t* first = std::lower_bound(q_.exclude, all_end, begin);
    const int64_t* last = std::lower_bound(first, all_end, end);
    const int64_t degree = end - begin - (last - first);
    if (degree == 0) {
      return;
    }
    const bool all = q_.fanout < 0 || degree <= q_.fanout;
    weights_[i] = 1.0f / static_cast<float>(all ? degree : q_.fanout);  // 1 / (degree * probability)
    const uint64_t limit = all ? 0 : limit_of(degree);
    if (first != last) {
      flush();
      one_by_one(i, begin, end, first, last, all, limit);
    } else if (!all && q_.high_words != nullptr) {
      flush();
      look_up(i, begin, end, limit);
    } else if (all) {
      segments_.push_back({i, begin, degree, 0});
    } else {
      append(i, begin, end, limit);
    }
  }

  // What waits in the block is decided.
  void flush() {
    make_words64(&block_, num_waiting_, q_.key);
    const uint64_t* word = block_.word;
    for (const Segment& s : segments_) {
      if (s.limit == 0) {
        for (int64_t e = 0; e < s.size; ++e) {
          positions.push_back(s.begin + e);
        }
        counts_[s.seed] += s.size;
        continue;
      }
      int64_t taken = 0;
      for (int64_t e = 0; e < s.size; ++e) {  // nothing branches on a word
        taken_[taken] = s.begin + e;
        taken += word[e] < s.limit;
      }
      word += s.size;
      positions.insert(positions.end(), taken_, taken_ + taken);
      counts_[s.seed] += taken;
    }
    segments_.clear();
    num_waiting_ = 0;
  }

 private:
  struct Segment {
    int64_t seed;
    int64_t begin;
    int64_t size;
    uint64_t limit;  // words below it are taken; 0: all, without a word
  };

  // The number of words w with w * degree < fanout * 2^64; degree > fanout.
  uint64_t limit_of(int64_t degree) const {
    const auto wanted = static_cast<unsigned __int128>(q_.fanout) << 64;
    const auto divisor = static_cast<unsigned __int128>(degree);
    return static_cast<uint64_t>((wanted + divisor - 1) / divisor);
  }

  uint64_t original(int64_t position) {
    const auto source = static_cast<uint64_t>(q_.indices[position]);
    if (q_.source_ids == nullptr) {
      return source;
    }
    if (source >= static_cast<uint64_t>(q_.num_src)) {
      bad_position = position;
      return 0;
    }
    return static_cast<uint64_t>(q_.source_ids[source]);
  }

  // By the table. Halves that are equal, one in 2^32, say nothing: then the whole word is made.
  void look_up(int64_t i, int64_t begin, int64_t end, uint64_t limit) {
    const auto high_limit = static_cast<uint32_t>(limit >> 32);
    const auto num_src = static_cast<uint64_t>(q_.num_src);
    for (; begin < end; begin += kWordBlock) {
      int64_t taken = 0;
      const int64_t size = std::min(end - begin, kWordBlock);
      for (int64_t e = 0; e < size; ++e) {
        const auto source = static_cast<uint64_t>(q_.indices[begin + e]);
        if (__builtin_expect(source >= num_src, 0)) {
          bad_position = begin + e;
          return;
        }
        const uint32_t high = q_.high_words[source];
        taken_[taken] = begin + e;
        taken += high < high_limit;
        if (__builtin_expect(high == high_limit, 0)) {
          taken += Stream{q_.key, original(begin + e), 0}.word64(0, 0) < limit;
        }
      }
      positions.insert(positions.end(), taken_, taken_ + taken);
      counts_[i] += taken;
    }
  }

  void append(int64_t i, int64_t begin, int64_t end, uint64_t limit) {
    const uint32_t tree = q_.tree ? static_cast<uint32_t>(q_.tree[i]) : 0u;
    while (begin < end) {
      const int64_t size = std::min(end - begin, kWordBlock - num_waiting_);
      uint32_t* const low = block_.low + num_waiting_;
      uint32_t* const high = block_.high + num_waiting_;
      if (q_.source_ids == nullptr) {
        for (int64_t e = 0; e < size; ++e) {
          const auto node = static_cast<uint64_t>(q_.indices[begin + e]);
          low[e] = static_cast<uint32_t>(node);
          high[e] = static_cast<uint32_t>(node >> 32);
        }
      } else {
        for (int64_t e = 0; e < size; ++e) {
          const uint64_t node = original(begin + e);
          low[e] = static_cast<uint32_t>(node);
          high[e] = static_cast<uint32_t>(node >> 32);
        }
      }
      std::fill_n(block_.tree + num_waiting_, size, tree);
      segments_.push_back({i, begin, size, limit});
      num_waiting_ += size;
      begin += size;
      if (num_waiting_ == kWordBlock) {
        flush();
      }
    }
  }

  // A row with gaps: few have any.
  void one_by_one(int64_t i, int64_t begin, int64_t end, const int64_t* gap, const int64_t* last, bool all,
                  uint64_t limit) {
    const uint32_t tree = q_.tree ? static_cast<uint32_t>(q_.tree[i]) : 0u;
    for (int64_t p = begin; p < end; ++p) {
      if (gap != last && *gap == p) {
        ++gap;
      } else if (all || Stream{q_.key, original(p), tree}.word64(0, 0) < limit) {
        positions.push_back(p);
        ++counts_[i];
      }
    }
  }

  const LaborRequest<id_t, source_t>& q_;
  int64_t* counts_;
  float* weights_;
  Faults* faults_;
  std::vector<Segment> segments_;
  int64_t num_waiting_ = 0;
  WordBlock block_;
  int64_t taken_[kWordBlock] = {};
};

using LaborResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Whether the seeds that have more than the fanout have more in-edges than there are sources. Bad rows are told later.
template <typename id_t, typename source_t>
bool is_table_worth(const LaborRequest<id_t, source_t>& q) {
  if (q.fanout <= 0 || q.tree != nullptr) {
    return false;
  }
  int64_t edges = 0;
  for (int64_t i = 0; i < q.num_seeds; ++i) {
    const int64_t begin = q.indptr[q.seeds[i]];
    const int64_t end = q.indptr[q.seeds[i] + 1];
    const bool is_row = 0 <= begin && begin <= end && end <= q.num_edges;
    edges += is_row && end - begin > q.fanout ? end - begin : 0;
  }
  return edges > q.num_src;
}

// 4 bytes per source.
template <typename id_t, typename source_t>
Tensor make_high_words(const LaborRequest<id_t, source_t>& q) {
  Tensor words = empty_cpu({q.num_src}, ScalarType::Int);
  auto* const high = reinterpret_cast<uint32_t*>(mutable_data<int32_t>(words));
  parallel_for(q.num_src, 1 << 14, [&](int64_t lo, int64_t hi) {
    WordBlock block;
    for (int64_t first = lo; first < hi; first += kWordBlock) {
      const int64_t size = std::min(kWordBlock, hi - first);
      for (int64_t u = 0; u < size; ++u) {
        const auto node = static_cast<uint64_t>(q.source_ids ? static_cast<int64_t>(q.source_ids[first + u]) : first + u);
        block.low[u] = static_cast<uint32_t>(node);
        block.high[u] = static_cast<uint32_t>(node >> 32);
      }
      make_words64(&block, size, q.key);
      for (int64_t u = 0; u < size; ++u) {
        high[first + u] = static_cast<uint32_t>(block.word[u] >> 32);
      }
    }
  });
  return words;
}

template <typename id_t, typename source_t>
LaborResult collect_labor(LaborRequest<id_t, source_t> q) {
  std::optional<Tensor> table;
  if (is_table_worth(q)) {
    table = make_high_words(q);
    q.high_words = reinterpret_cast<const uint32_t*>(const_data<int32_t>(*table));
  }
  Tensor offsets = empty_cpu({q.num_seeds + 1}, ScalarType::Long);
  auto* const offset = mutable_data<int64_t>(offsets);
  std::vector<float> weights(static_cast<size_t>(q.num_seeds));  // those of a seed's edges are all the same
  const int shares = num_shares_for(q.num_seeds, kSeedsPerThread);
  Faults faults;
  std::vector<LaborCollector<id_t, source_t>> collectors(static_cast<size_t>(shares),
                                                         {q, offset + 1, weights.data(), &faults});
  for_shares(shares, [&](int s, int n) {
    auto& collector = collectors[static_cast<size_t>(s)];
    const Range r = share_of(q.num_seeds, s, n);
    for (int64_t i = r.begin; i < r.end; ++i) {
      collector.collect(i);
    }
    collector.flush();
  });
  faults.raise();
  for (const auto& collector : collectors) {
    CHECK_ARG(collector.bad_position < 0, "sources must be in [0, ", q.num_src, "), got ",
              static_cast<int64_t>(q.indices[collector.bad_position]));
  }
  offset[0] = 0;
  for (int64_t i = 0; i < q.num_seeds; ++i) {
    offset[i + 1] += offset[i];
  }
  const int64_t total = offset[q.num_seeds];
  Tensor neighbors = empty_cpu({total}, id_type<id_t>());
  Tensor positions = empty_cpu({total}, ScalarType::Long);
  Tensor weight = empty_cpu({total}, ScalarType::Float);
  auto* const neighbor = mutable_data<id_t>(neighbors);
  auto* const position = mutable_data<int64_t>(positions);
  auto* const edge_weight = mutable_data<float>(weight);
  for_shares(shares, [&](int s, int n) {
    const Range r = share_of(q.num_seeds, s, n);
    const auto& taken = collectors[static_cast<size_t>(s)].positions;
    const int64_t first = offset[r.begin];
    for (size_t e = 0; e < taken.size(); ++e) {
      position[first + static_cast<int64_t>(e)] = taken[e];
      neighbor[first + static_cast<int64_t>(e)] = q.indices[taken[e]];
    }
    for (int64_t i = r.begin; i < r.end; ++i) {
      std::fill(edge_weight + offset[i], edge_weight + offset[i + 1], weights[static_cast<size_t>(i)]);
    }
  });
  return {offsets, neighbors, positions, weight};
}

LaborResult sample_labor(const Tensor& indptr, const Tensor& indices, const Tensor& seeds, int64_t num_src, int64_t fanout,
                         int64_t key, std::optional<Tensor> source_ids, std::optional<Tensor> exclude, std::optional<Tensor> tree) {
  check_seeds(indptr, indices, seeds);
  check_fanout(fanout);
  const int64_t* const trees = optional_tree(tree, seeds.numel());
  const int64_t* const excluded = optional_exclude(exclude);
  if (source_ids) {
    check_ids(*source_ids, "source_ids");
    check_source_ids(*source_ids, num_src);
  }
  return dispatch_ids(indices, [&](auto id) -> LaborResult {
    using id_t = decltype(id);
    return dispatch_ids(source_ids ? *source_ids : indices, [&](auto source) -> LaborResult {
      using source_t = decltype(source);
      LaborRequest<id_t, source_t> q{};
      q.indptr = const_data<int64_t>(indptr);
      q.indices = const_data<id_t>(indices);
      q.num_edges = indices.numel();
      q.seeds = const_data<id_t>(seeds);
      q.num_seeds = seeds.numel();
      q.fanout = fanout;
      q.key = static_cast<uint64_t>(key);
      q.source_ids = source_ids ? const_data<source_t>(*source_ids) : nullptr;
      q.num_src = num_src;
      q.tree = trees;
      q.exclude = excluded;
      q.num_exclude = exclude ? exclude->numel() : 0;
      return collect_labor(q);
    });
  });
}

// The words themselves, for rules that compare them with probabilities of their own: the 63 high bits of each.
Tensor source_words(const Tensor& ids, int64_t key) {
  check_ids(ids, "ids");
  Tensor words = empty_cpu({ids.numel()}, ScalarType::Long);
  auto* const out = mutable_data<int64_t>(words);
  dispatch_ids(ids, [&](auto id) {
    const auto* const nodes = const_data<decltype(id)>(ids);
    parallel_for(ids.numel(), 1 << 14, [&](int64_t lo, int64_t hi) {
      WordBlock block;
      for (int64_t first = lo; first < hi; first += kWordBlock) {
        const int64_t size = std::min(kWordBlock, hi - first);
        for (int64_t u = 0; u < size; ++u) {
          const auto node = static_cast<uint64_t>(nodes[first + u]);
          block.low[u] = static_cast<uint32_t>(node);
          block.high[u] = static_cast<uint32_t>(node >> 32);
        }
        make_words64(&block, size, static_cast<uint64_t>(key));
        for (int64_t u = 0; u < size; ++u) {
          out[first + u] = static_cast<int64_t>(block.word[u] >> 1);
        }
      }
    });
  });
  return words;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "sample_labor", &sample_labor);
  REGISTER_OP(m, "source_words", &source_words);
}

}  // namespace gnnsys
