// sample_neighbors: for each seed, some of its in-edges.
//
// Two ways to the same definition. The plain way (uniform, nothing filtered) knows each seed's count from its degree,
// writes straight into exact outputs and keeps its random reads in tight loops. The general way (weights, times,
// exclusions) lets every thread collect its own seeds' positions, then joins them. Within a seed, positions come out
// in the order of its candidates: the input's edge order, or by time where times are given.
#include "common/check.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "cpu/choose.h"
#include "cpu/philox_lanes.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kSeedsPerThread = 256;  // fewer are not worth waking a thread for
constexpr int64_t kMaxDegree = std::numeric_limits<uint32_t>::max() - 1;

template <typename id_t>
struct Request {
  const int64_t* indptr;
  const id_t* indices;
  int64_t num_rows;
  const id_t* seeds;
  int64_t num_seeds;
  int64_t fanout;
  bool replace;
  uint64_t key;
  const id_t* rng_ids;    // original ids of the seeds; the seeds themselves when null
  const int64_t* tree;    // null: tree 0
  bool timed;
  const int64_t* time;    // per position, or per node id when node_time
  int64_t num_times;
  bool node_time;
  bool time_sorted;
  const int64_t* seed_time;
  bool last;
  const int64_t* exclude;  // ascending positions
  int64_t num_exclude;

  Stream stream(int64_t i) const {
    const uint64_t node = static_cast<uint64_t>(rng_ids ? rng_ids[i] : seeds[i]);
    return {key, node, tree ? static_cast<uint32_t>(tree[i]) : 0u};
  }

  // How many of n candidates are taken.
  int64_t count(int64_t n) const {
    if (fanout < 0 || n == 0) {
      return n;
    }
    return replace ? fanout : std::min(fanout, n);
  }
};

// What can go wrong inside a parallel loop, told after it.
struct Faults {
  std::atomic<int64_t> bad_weight{-1};
  std::atomic<int64_t> huge_degree{-1};
  std::atomic<int64_t> no_time{-1};

  void raise() const {
    CHECK_ARG(bad_weight < 0, "weight must be finite and not negative, it is not at edge position ",
              bad_weight.load());
    CHECK_ARG(no_time < 0, "time must have an entry for every source node, it has none for node ", no_time.load());
    CHECK_ARG(huge_degree < 0, "seeds: node ", huge_degree.load(), " has more than 2^32 - 2 in-edges");
  }
};

// -- the plain way -----------------------------------------------------------------------------------------------------

struct Row {
  int64_t begin;
  int64_t degree;
};

// Fills rows[i] and offsets[i + 1], seed i's count. Work: one random 16-byte read per seed, in a loop without branches
// on what is read, so that reads overlap.
template <typename id_t>
void count_plain(const Request<id_t>& q, Row* rows, int64_t* offsets, Faults* faults) {
  parallel_for(q.num_seeds, kSeedsPerThread, [&](int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; ++i) {
      const int64_t* row = q.indptr + q.seeds[i];
      rows[i] = {row[0], row[1] - row[0]};
    }
    for (int64_t i = lo; i < hi; ++i) {
      if (rows[i].degree > kMaxDegree) {
        faults->huge_degree = q.seeds[i];
      }
      offsets[i + 1] = q.count(rows[i].degree);
    }
  });
}

// The random words of kLanes streams: draw j of lane l at words[l * stride + j], padded to whole blocks of four.
template <typename id_t>
void make_words_lanes(const Request<id_t>& q, const int64_t* seeds, int lanes, uint32_t stride, uint32_t* words) {
  uint32_t counters[3][kLanes] = {};
  for (int l = 0; l < lanes; ++l) {
    const Stream stream = q.stream(seeds[l]);
    counters[0][l] = static_cast<uint32_t>(stream.node);
    counters[1][l] = static_cast<uint32_t>(stream.node >> 32);
    counters[2][l] = stream.tree;
  }
  for (uint32_t block = 0; 4 * block < stride; ++block) {
    u32x4 state[kChains][4];
    for (int v = 0; v < kChains; ++v) {
      for (int c = 0; c < 3; ++c) {
        state[v][c] = load4(counters[c] + 4 * v);
      }
      state[v][3] = splat(block);
    }
    philox4x32_lanes(state, q.key);
    for (int l = 0; l < kLanes; ++l) {
      const u32x4* s = state[l / 4];
      store4(words + static_cast<uint32_t>(l) * stride + 4 * block,
             u32x4{s[0][l % 4], s[1][l % 4], s[2][l % 4], s[3][l % 4]});
    }
  }
}

// One thread's writer of positions. Seeds whose whole neighbourhood is taken are written at once; the others wait until
// kLanes of them can have their random words made together.
template <typename id_t>
class PlainWriter {
 public:
  PlainWriter(const Request<id_t>& q, const Row* rows, const int64_t* offsets, int64_t* positions)
      : q_(q), rows_(rows), offsets_(offsets), positions_(positions) {}

  void write(int64_t i) {
    const int64_t k = offsets_[i + 1] - offsets_[i];
    if (k == 0 || (k == rows_[i].degree && (!q_.replace || q_.fanout < 0))) {
      std::iota(positions_ + offsets_[i], positions_ + offsets_[i + 1], rows_[i].begin);
      return;
    }
    waiting_[num_waiting_++] = i;
    if (num_waiting_ == kLanes) {
      flush();
    }
  }

  void flush() {
    if (num_waiting_ == 0) {
      return;
    }
    const auto k = static_cast<uint32_t>(q_.fanout);  // every waiting seed takes exactly the fanout
    const uint32_t padded = (k + 3) / 4 * 4;
    words_.resize(size_t{padded} * kLanes);
    ranks_.resize(k);
    make_words_lanes(q_, waiting_, num_waiting_, padded, words_.data());
    for (int l = 0; l < num_waiting_; ++l) {
      const int64_t i = waiting_[l];
      const uint32_t* words = words_.data() + static_cast<uint32_t>(l) * padded;
      const auto n = static_cast<uint32_t>(rows_[i].degree);
      if (q_.replace) {
        chooser_.with_replacement(q_.stream(i), words, n, k, ranks_.data());
      } else {
        chooser_.without_replacement(q_.stream(i), words, n, k, ranks_.data());
      }
      for (uint32_t j = 0; j < k; ++j) {
        positions_[offsets_[i] + j] = rows_[i].begin + ranks_[j];
      }
    }
    num_waiting_ = 0;
  }

 private:
  const Request<id_t>& q_;
  const Row* rows_;
  const int64_t* offsets_;
  int64_t* positions_;
  int64_t waiting_[kLanes];
  int num_waiting_ = 0;
  RankChooser chooser_;
  std::vector<uint32_t> words_, ranks_;
};

// Seeds are taken in groups: first all positions of the group, then all reads. The reads are independent of each other
// and of any branch, so the processor keeps as many in flight as it can (faster here than prefetch instructions).
template <typename id_t>
void fill_plain(const Request<id_t>& q, const Row* rows, const int64_t* offsets, id_t* neighbors, int64_t* positions) {
  constexpr int64_t kGroup = 256;
  parallel_for(q.num_seeds, kSeedsPerThread, [&](int64_t lo, int64_t hi) {
    PlainWriter<id_t> writer(q, rows, offsets, positions);
    for (int64_t group = lo; group < hi; group += kGroup) {
      const int64_t group_end = std::min(group + kGroup, hi);
      for (int64_t i = group; i < group_end; ++i) {
        writer.write(i);
      }
      writer.flush();
      for (int64_t e = offsets[group]; e < offsets[group_end]; ++e) {
        neighbors[e] = q.indices[positions[e]];
      }
    }
  });
}

// -- the general way -----------------------------------------------------------------------------------------------------

// One thread's collector: appends each seed's chosen positions and keeps its scratch between seeds.
template <typename id_t, typename weight_t>
class Collector {
 public:
  Collector(const Request<id_t>& q, const weight_t* weight, Faults* faults) : q_(q), weight_(weight), faults_(faults) {}

  std::vector<int64_t> positions;

  int64_t collect(int64_t i) {
    const size_t before = positions.size();
    const int64_t row = q_.seeds[i];
    begin_ = q_.indptr[row];
    end_ = q_.indptr[row + 1];
    if (end_ - begin_ > kMaxDegree) {
      faults_->huge_degree = row;
      return 0;
    }
    if (weight_ != nullptr) {
      weighted(i);
    } else if (q_.timed && !q_.time_sorted) {
      unsorted_time(i);
    } else {
      contiguous(i);
    }
    return static_cast<int64_t>(positions.size() - before);
  }

 private:
  int64_t time_at(int64_t position) const {
    const int64_t index = q_.node_time ? static_cast<int64_t>(q_.indices[position]) : position;
    if (index >= q_.num_times) {
      faults_->no_time = index;
      return std::numeric_limits<int64_t>::max();
    }
    return q_.time[index];
  }

  // The excluded positions inside [begin_, end).
  std::pair<const int64_t*, const int64_t*> excluded(int64_t end) const {
    const int64_t* all_end = q_.exclude + q_.num_exclude;
    const int64_t* first = std::lower_bound(q_.exclude, all_end, begin_);
    return {first, std::lower_bound(first, all_end, end)};
  }

  // Ranks of n candidates: all, the last k, or k at random; ascending.
  void choose_ranks(int64_t i, int64_t n) {
    const int64_t k = q_.count(n);
    ranks_.resize(static_cast<size_t>(k));
    const bool all = k == n && (!q_.replace || q_.fanout < 0);
    if (all || q_.last) {
      // "last" takes the most recent; asked for more than there are (with replacement), the latest is repeated.
      for (int64_t j = 0; j < k; ++j) {
        ranks_[static_cast<size_t>(j)] = static_cast<uint32_t>(std::clamp<int64_t>(n - k + j, 0, n - 1));
      }
      return;
    }
    const Stream stream = q_.stream(i);
    words_.resize(static_cast<size_t>(k));
    make_words(stream, static_cast<uint32_t>(k), words_.data());
    if (q_.replace) {
      chooser_.with_replacement(stream, words_.data(), static_cast<uint32_t>(n), static_cast<uint32_t>(k), ranks_.data());
    } else {
      chooser_.without_replacement(stream, words_.data(), static_cast<uint32_t>(n), static_cast<uint32_t>(k),
                                   ranks_.data());
    }
  }

  // Candidates are [begin_, end) less the excluded ones: ranks are mapped past the gaps. O(k + gaps + log degree).
  void contiguous(int64_t i) {
    int64_t end = end_;
    if (q_.timed) {
      const int64_t limit = q_.seed_time[i];
      int64_t lo = begin_;
      while (lo < end) {
        const int64_t middle = lo + (end - lo) / 2;
        if (time_at(middle) <= limit) {
          lo = middle + 1;
        } else {
          end = middle;
        }
      }
    }
    const auto [first, last] = excluded(end);
    choose_ranks(i, end - begin_ - (last - first));
    const int64_t* gap = first;
    for (const uint32_t rank : ranks_) {
      while (gap != last && *gap - begin_ - (gap - first) <= rank) {
        ++gap;
      }
      positions.push_back(begin_ + rank + (gap - first));
    }
  }

  // Candidates in (time, position) order, as if the neighbourhood were stored sorted. O(degree log degree).
  void unsorted_time(int64_t i) {
    const auto [first, last] = excluded(end_);
    const int64_t* gap = first;
    timed_.clear();
    for (int64_t p = begin_; p < end_; ++p) {
      if (gap != last && *gap == p) {
        ++gap;
        continue;
      }
      const int64_t t = time_at(p);
      if (t <= q_.seed_time[i]) {
        timed_.emplace_back(t, p);
      }
    }
    std::sort(timed_.begin(), timed_.end());
    choose_ranks(i, static_cast<int64_t>(timed_.size()));
    for (const uint32_t rank : ranks_) {
      positions.push_back(timed_[rank].second);
    }
  }

  // Candidates of positive weight, in the input's order. O(degree).
  void weighted(int64_t i) {
    const auto [first, last] = excluded(end_);
    const int64_t* gap = first;
    candidates_.clear();
    double heaviest = 0;
    for (int64_t p = begin_; p < end_; ++p) {
      const auto w = static_cast<double>(weight_[p]);
      if (!(w >= 0) || std::isinf(w)) {
        faults_->bad_weight = p;
        return;
      }
      if (gap != last && *gap == p) {
        ++gap;
      } else if (w > 0) {
        heaviest = std::max(heaviest, w);
        candidates_.push_back(p);
      }
    }
    const auto n = static_cast<int64_t>(candidates_.size());
    const int64_t k = q_.count(n);
    if (k == n && (!q_.replace || q_.fanout < 0)) {
      positions.insert(positions.end(), candidates_.begin(), candidates_.end());
    } else if (q_.replace) {
      weighted_with_replacement(i, k, heaviest);
    } else {
      weighted_without_replacement(i, k);
    }
  }

  // Efraimidis and Spirakis: the k smallest of -ln(u_e) / w_e, u_e addressed by the edge's place in its list.
  void weighted_without_replacement(int64_t i, int64_t k) {
    const Stream stream = q_.stream(i);
    keyed_.clear();
    for (const int64_t p : candidates_) {
      const double u = open_unit(stream.word64(static_cast<uint64_t>(p - begin_), 0));
      keyed_.emplace_back(negative_log(u) / static_cast<double>(weight_[p]), p);
    }
    std::nth_element(keyed_.begin(), keyed_.begin() + k, keyed_.end());
    const size_t start = positions.size();
    for (int64_t j = 0; j < k; ++j) {
      positions.push_back(keyed_[static_cast<size_t>(j)].second);
    }
    std::sort(positions.begin() + static_cast<int64_t>(start), positions.end());
  }

  // Weights become integers of up to 62 - log2(n) bits relative to the heaviest; their sums are exact in any order.
  void weighted_with_replacement(int64_t i, int64_t k, double heaviest) {
    const Stream stream = q_.stream(i);
    int bits = 62;
    while (bits > 0 && (static_cast<int64_t>(candidates_.size()) >> (62 - bits)) > 1) {
      --bits;
    }
    const double scale = std::ldexp(1.0, bits);
    sums_.clear();
    uint64_t total = 0;
    for (const int64_t p : candidates_) {
      total += static_cast<uint64_t>(static_cast<double>(weight_[p]) / heaviest * scale);
      sums_.push_back(total);
    }
    const size_t start = positions.size();
    for (int64_t j = 0; j < k; ++j) {
      const uint64_t r = bounded64(stream, static_cast<uint64_t>(j), total);
      const auto found = std::upper_bound(sums_.begin(), sums_.end(), r) - sums_.begin();
      positions.push_back(candidates_[static_cast<size_t>(found)]);
    }
    std::sort(positions.begin() + static_cast<int64_t>(start), positions.end());
  }

  const Request<id_t>& q_;
  const weight_t* weight_;
  Faults* faults_;
  int64_t begin_ = 0;
  int64_t end_ = 0;
  RankChooser chooser_;
  std::vector<uint32_t> words_;
  std::vector<uint32_t> ranks_;
  std::vector<int64_t> candidates_;
  std::vector<uint64_t> sums_;
  std::vector<std::pair<double, int64_t>> keyed_;
  std::vector<std::pair<int64_t, int64_t>> timed_;
};

// -- joining -----------------------------------------------------------------------------------------------------------

// counts -> offsets, in place: offsets[0] = 0, offsets[i + 1] holds the count of seed i.
int64_t prefix_sum(int64_t* offsets, int64_t size) {
  offsets[0] = 0;
  for (int64_t i = 0; i < size; ++i) {
    offsets[i + 1] += offsets[i];
  }
  return offsets[size];
}

using Result = std::tuple<Tensor, Tensor, Tensor>;

template <typename id_t>
Result sample_plain(const Request<id_t>& q) {
  Tensor offsets = empty_cpu({q.num_seeds + 1}, ScalarType::Long);
  auto* offset = mutable_data<int64_t>(offsets);
  std::vector<Row> rows(static_cast<size_t>(q.num_seeds));
  Faults faults;
  count_plain(q, rows.data(), offset, &faults);
  faults.raise();
  const int64_t total = prefix_sum(offset, q.num_seeds);
  Tensor neighbors = empty_cpu({total}, id_type<id_t>());
  Tensor positions = empty_cpu({total}, ScalarType::Long);
  fill_plain(q, rows.data(), offset, mutable_data<id_t>(neighbors), mutable_data<int64_t>(positions));
  return {offsets, neighbors, positions};
}

template <typename id_t, typename weight_t>
Result sample_general(const Request<id_t>& q, const weight_t* weight) {
  Tensor offsets = empty_cpu({q.num_seeds + 1}, ScalarType::Long);
  auto* offset = mutable_data<int64_t>(offsets);
  const int threads = num_threads_for(q.num_seeds, kSeedsPerThread);
  Faults faults;
  std::vector<Collector<id_t, weight_t>> collectors(static_cast<size_t>(threads), {q, weight, &faults});
  on_threads(threads, [&](int t, int n) {
    const Range r = share_of(q.num_seeds, t, n);
    for (int64_t i = r.begin; i < r.end; ++i) {
      offset[i + 1] = collectors[static_cast<size_t>(t)].collect(i);
    }
  });
  faults.raise();
  const int64_t total = prefix_sum(offset, q.num_seeds);
  Tensor neighbors = empty_cpu({total}, id_type<id_t>());
  Tensor positions = empty_cpu({total}, ScalarType::Long);
  auto* neighbor = mutable_data<id_t>(neighbors);
  auto* position = mutable_data<int64_t>(positions);
  on_threads(threads, [&](int t, int n) {
    int64_t out = offset[share_of(q.num_seeds, t, n).begin];
    for (const int64_t p : collectors[static_cast<size_t>(t)].positions) {
      position[out] = p;
      neighbor[out++] = q.indices[p];
    }
  });
  return {offsets, neighbors, positions};
}

// -- the boundary --------------------------------------------------------------------------------------------------------

template <typename id_t>
void check_range(const id_t* ids, int64_t size, int64_t bound, const char* name) {
  for (int64_t i = 0; i < size; ++i) {
    CHECK_ARG(ids[i] >= 0 && ids[i] < bound, name, " must be in [0, ", bound, "), got ", ids[i], " at index ", i);
  }
}

const int64_t* optional_int64(const std::optional<Tensor>& t, int64_t size, const char* name) {
  if (!t.has_value()) {
    return nullptr;
  }
  check_vector(*t, name);
  check_dtype(*t, ScalarType::Long, name);
  CHECK_ARG(size < 0 || t->numel() == size, name, " must have ", size, " entries, got ", t->numel());
  return const_data<int64_t>(*t);
}

Result sample_neighbors(const Tensor& indptr, const Tensor& indices, const Tensor& seeds, int64_t fanout, bool replace,
                        int64_t key, std::optional<Tensor> weight, std::optional<Tensor> time, bool node_time,
                        bool time_sorted, std::optional<Tensor> seed_time, bool last, std::optional<Tensor> exclude,
                        std::optional<Tensor> tree, std::optional<Tensor> rng_ids) {
  check_csc(indptr, indices);
  check_ids(seeds, "seeds");
  CHECK_ARG(seeds.scalar_type() == indices.scalar_type(), "seeds must have the dtype of indices, ",
            dtype_name(indices.scalar_type()), ", got ", dtype_name(seeds.scalar_type()));
  CHECK_ARG(fanout >= -1 && fanout <= kMaxDegree, "fanout must be -1 (all) or 0 to 2^32 - 2, got ", fanout);
  CHECK_ARG(time.has_value() == seed_time.has_value(), "time and seed_time go together, got only one of them");
  CHECK_ARG(!last || time, "last needs time: the most recent edges are asked for, but no time is given");
  CHECK_ARG(!weight || !time, "weight and time cannot be combined: sample by one of them");
  CHECK_ARG(time.has_value() == seed_time.has_value(), "time and seed_time go together, got only one of them");
  CHECK_ARG(!last || time, "last needs time: the most recent edges are asked for, but no time is given");
  if (rng_ids) {
    check_ids(*rng_ids, "rng_ids");
    CHECK_ARG(rng_ids->scalar_type() == seeds.scalar_type() && rng_ids->numel() == seeds.numel(),
              "rng_ids must be like seeds, one original id per seed");
  }
  return dispatch_ids(indices, [&](auto id) -> Result {
    using id_t = decltype(id);
    Request<id_t> q{};
    q.indptr = const_data<int64_t>(indptr);
    q.indices = const_data<id_t>(indices);
    q.num_rows = indptr.numel() - 1;
    q.seeds = const_data<id_t>(seeds);
    q.num_seeds = seeds.numel();
    q.fanout = fanout;
    q.replace = replace;
    q.key = static_cast<uint64_t>(key);
    q.rng_ids = rng_ids ? const_data<id_t>(*rng_ids) : nullptr;
    q.tree = optional_int64(tree, q.num_seeds, "tree");
    q.timed = time.has_value();
    q.time = optional_int64(time, node_time ? -1 : indices.numel(), "time");
    q.num_times = time ? time->numel() : 0;
    q.node_time = node_time;
    q.time_sorted = time_sorted;
    q.seed_time = optional_int64(seed_time, q.num_seeds, "seed_time");
    q.last = last;
    q.exclude = optional_int64(exclude, -1, "exclude");
    q.num_exclude = exclude ? exclude->numel() : 0;
    check_range(q.seeds, q.num_seeds, q.num_rows, "seeds");
    if (q.tree) {
      check_range(q.tree, q.num_seeds, static_cast<int64_t>(kMaxTree) + 1, "tree");
    }
    CHECK_ARG(std::is_sorted(q.exclude, q.exclude + q.num_exclude), "exclude must be ascending edge positions");
    if (weight) {
      check_vector(*weight, "weight");
      CHECK_ARG(weight->numel() == indices.numel(), "weight must have one entry per edge, ", indices.numel(),
                ", got ", weight->numel());
      if (weight->scalar_type() == ScalarType::Float) {
        return sample_general<id_t, float>(q, const_data<float>(*weight));
      }
      check_dtype(*weight, ScalarType::Double, "weight (float32 or float64)");
      return sample_general<id_t, double>(q, const_data<double>(*weight));
    }
    if (q.timed || q.num_exclude > 0) {
      return sample_general<id_t, float>(q, nullptr);
    }
    return sample_plain(q);
  });
}

// find_edges: positions of all edges src[i] -> dst[i], ascending and without repeats. Work: the in-degree of each dst.
Tensor find_edges(const Tensor& indptr, const Tensor& indices, const Tensor& src, const Tensor& dst) {
  check_csc(indptr, indices);
  check_ids(src, "src");
  check_ids(dst, "dst");
  CHECK_ARG(src.numel() == dst.numel(), "src and dst must have equal lengths, got ", src.numel(), " and ", dst.numel());
  CHECK_ARG(src.scalar_type() == indices.scalar_type() && dst.scalar_type() == indices.scalar_type(),
            "src and dst must have the dtype of indices, ", dtype_name(indices.scalar_type()));
  return dispatch_ids(indices, [&](auto id) {
    using id_t = decltype(id);
    const auto* row = const_data<int64_t>(indptr);
    const auto* neighbor = const_data<id_t>(indices);
    const auto* from = const_data<id_t>(src);
    const auto* to = const_data<id_t>(dst);
    const int64_t size = src.numel();
    check_range(to, size, indptr.numel() - 1, "dst");
    const int threads = num_threads_for(size, 64);
    std::vector<std::vector<int64_t>> found(static_cast<size_t>(threads));
    on_threads(threads, [&](int t, int n) {
      const Range r = share_of(size, t, n);
      auto& mine = found[static_cast<size_t>(t)];
      for (int64_t i = r.begin; i < r.end; ++i) {
        for (int64_t p = row[to[i]]; p < row[to[i] + 1]; ++p) {
          if (neighbor[p] == from[i]) {
            mine.push_back(p);
          }
        }
      }
    });
    std::vector<int64_t> all;
    for (const auto& part : found) {
      all.insert(all.end(), part.begin(), part.end());
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    Tensor out = empty_cpu({static_cast<int64_t>(all.size())}, ScalarType::Long);
    std::copy(all.begin(), all.end(), mutable_data<int64_t>(out));
    return out;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  m.impl("sample_neighbors", TORCH_BOX(&sample_neighbors));
  m.impl("find_edges", TORCH_BOX(&find_edges));
}

}  // namespace gnnsys
