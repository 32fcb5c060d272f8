// Clusters for the streaming partitioner: label propagation under a size limit, one run of nodes after the other, and
// the graph between the clusters (Akhremtsev, Sanders and Schulz, ESA 2015: semi-external clustering).
//
// Work: one visit per neighbour. Bytes: per node a label, a size and a count; the graph between clusters is a hash
// table of fixed size that forgets its lightest edges when it is full.
#include "common/register.h"
#include "cpu/partition/stream.h"

#include <algorithm>
#include <utility>

namespace gnnsys {
namespace {

void check_labels(const Tensor& label, const Tensor& counts) {
  check_vector(label, "label");
  check_dtype(label, ScalarType::Int, "label");
  check_vector(counts, "counts");
  check_dtype(counts, ScalarType::Int, "counts");
  CHECK_ARG(counts.numel() == label.numel(), "counts must have an entry per node, ", label.numel(), ", got ",
            counts.numel());
}

// Order among equals that favours no id: a multiplicative hash of the pair.
uint32_t mix(int64_t node, int32_t label) {
  uint64_t h = (static_cast<uint64_t>(node) * 0x9E3779B97F4A7C15u) ^ (static_cast<uint64_t>(label) * 0xC2B2AE3D27D4EB4Fu);
  h ^= h >> 29;
  return static_cast<uint32_t>((h * 0xBF58476D1CE4E5B9u) >> 32);
}

// Sums in arrays of the caller's: whatever those held before must not make an overflow.
void add_to(int64_t& sum, int64_t amount) {
  sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(amount));
}

struct Clusters {
  int32_t* label;
  int64_t* size;
  int64_t limit;
  int32_t* orphans;  // nullptr, or per cluster: where nodes gather that it has no room for (-1: nowhere yet)

  bool fits(int32_t cluster, int64_t weight) const { return size[cluster] <= limit - weight; }

  void move(int64_t v, int64_t weight, int32_t to) {
    add_to(size[label[v]], -weight);
    add_to(size[to], weight);
    label[v] = to;
  }

  // The neighbours' most frequent cluster with room; a node alone whose favourite has none joins others like it.
  int32_t choose(int64_t v, int64_t weight, const LabelCounts& counts) {
    const int32_t own = label[v];
    int32_t best = own, favourite = -1;
    for (const int32_t c : counts.seen()) {
      if (favourite < 0 || counts[c] > counts[favourite]) {
        favourite = c;
      }
      if (c == own || counts[c] < counts[best] || !fits(c, weight)) {
        continue;
      }
      if (counts[c] > counts[best] || mix(v, c) > mix(v, best)) {
        best = c;
      }
    }
    if (best == own && orphans != nullptr && size[own] == weight && favourite >= 0) {
      int32_t& gathering = orphans[favourite];
      if (gathering >= 0 && gathering != own && fits(gathering, weight)) {
        return gathering;
      }
      gathering = own;
    }
    return best;
  }
};

int64_t stream_cluster(const Tensor& indptr, const Tensor& indices, int64_t first, const Tensor& weight,
                       const Tensor& label, const Tensor& size, const Tensor& counts,
                       const std::optional<Tensor>& orphans, int64_t limit) {
  check_labels(label, counts);
  const int64_t num_nodes = label.numel();
  check_run(indptr, indices, first, num_nodes);
  check_vector(weight, "weight");
  check_dtype(weight, ScalarType::Long, "weight");
  check_vector(size, "size");
  check_dtype(size, ScalarType::Long, "size");
  CHECK_ARG(weight.numel() == indptr.numel() - 1, "weight must have an entry per node of the run");
  CHECK_ARG(limit >= 0, "limit must not be negative, got ", limit);
  CHECK_ARG(size.numel() == num_nodes, "size must have an entry per node, ", num_nodes, ", got ", size.numel());
  if (orphans) {
    check_vector(*orphans, "orphans");
    check_dtype(*orphans, ScalarType::Int, "orphans");
    CHECK_ARG(orphans->numel() == num_nodes, "orphans must have an entry per node");
  }
  Clusters clusters{mutable_data<int32_t>(label), mutable_data<int64_t>(size), limit,
                    orphans ? mutable_data<int32_t>(*orphans) : nullptr};
  const auto* weights = const_data<int64_t>(weight);
  for (int64_t i = 0; i < weight.numel(); ++i) {
    CHECK_ARG(weights[i] >= 0, "weight must not be negative, node ", first + i, " has ", weights[i]);
  }
  const int64_t outside = first_outside(clusters.label + first, weight.numel(), num_nodes);
  CHECK_ARG(outside < 0, "label must be in [0, ", num_nodes, "), node ", first + outside, " is not");
  LabelCounts near(mutable_data<int32_t>(counts));
  int64_t num_moved = 0;
  dispatch_ids(indices, [&](auto id) {
    const auto run = run_of<decltype(id)>(indptr, indices, first);
    for (int64_t i = 0; i < run.size; ++i) {
      const int64_t v = first + i;
      run.for_each_neighbor(i, [&](int64_t u) {
        if (static_cast<uint32_t>(clusters.label[u]) < num_nodes) {  // another run's labels are checked as they are met
          near.add(clusters.label[u]);
        }
      });
      const int32_t chosen = clusters.choose(v, weights[i], near);
      near.clear();
      if (chosen != clusters.label[v]) {
        clusters.move(v, weights[i], chosen);
        ++num_moved;
      }
    }
  });
  return num_moved;
}

// Pairs of clusters and the edges between them, linear probing. state = {pairs held, weight forgotten}.
class PairTable {
 public:
  static constexpr int64_t kEmpty = -1;

  PairTable(int64_t* keys, int64_t* counts, int64_t slots, int64_t* state)
      : keys_(keys), counts_(counts), slots_(slots), state_(state) {}

  void add(int32_t a, int32_t b, int64_t count) {
    if (state_[0] >= slots_ / 8 * 5) {
      forget_lightest();
    }
    insert((static_cast<int64_t>(a) << 32) | static_cast<uint32_t>(b), count);
  }

 private:
  void insert(int64_t key, int64_t count) {
    uint64_t at = (static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15u) >> 20 & static_cast<uint64_t>(slots_ - 1);
    for (int64_t tried = 1; keys_[at] != kEmpty && keys_[at] != key; ++tried) {
      CHECK_ARG(tried < slots_, "keys has no room left, and state says that it has");
      at = (at + 1) & static_cast<uint64_t>(slots_ - 1);
    }
    add_to(state_[0], keys_[at] == kEmpty);
    keys_[at] = key;
    add_to(counts_[at], count);
  }

  // Keeps the heavier half; of pairs as heavy as the median none.
  void forget_lightest() {
    std::vector<int64_t> weights;
    for (int64_t i = 0; i < slots_; ++i) {
      if (keys_[i] != kEmpty) {
        weights.push_back(counts_[i]);
      }
    }
    CHECK_ARG(!weights.empty(), "state says that keys has ", state_[0], " pairs, and it has none");
    const auto middle = weights.begin() + static_cast<int64_t>(weights.size()) / 2;
    std::nth_element(weights.begin(), middle, weights.end());
    const int64_t threshold = *middle;
    weights = {};
    std::vector<std::pair<int64_t, int64_t>> kept;
    for (int64_t i = 0; i < slots_; ++i) {
      if (keys_[i] != kEmpty && counts_[i] > threshold) {
        kept.emplace_back(keys_[i], counts_[i]);
      } else if (keys_[i] != kEmpty) {
        add_to(state_[1], counts_[i]);
      }
    }
    std::fill_n(keys_, slots_, kEmpty);
    std::fill_n(counts_, slots_, 0);
    state_[0] = 0;
    for (const auto& [key, count] : kept) {
      insert(key, count);
    }
  }

  int64_t* keys_;
  int64_t* counts_;
  int64_t slots_;
  int64_t* state_;
};

// Adds the edges between the run's clusters and those of a larger number to the table. label [N], clusters numbered
// from 0; nodes of cluster -1 (or any other that does not exist) are left out.
void stream_contract(const Tensor& indptr, const Tensor& indices, int64_t first, const Tensor& label,
                     const Tensor& counts, const Tensor& keys, const Tensor& pair_counts, const Tensor& state) {
  check_labels(label, counts);
  check_run(indptr, indices, first, label.numel());
  for (const auto& [t, name] : {std::pair{&keys, "keys"}, {&pair_counts, "pair_counts"}, {&state, "state"}}) {
    check_vector(*t, name);
    check_dtype(*t, ScalarType::Long, name);
  }
  const int64_t slots = keys.numel();
  CHECK_ARG(slots >= 64 && (slots & (slots - 1)) == 0 && pair_counts.numel() == slots && state.numel() == 2,
            "keys and pair_counts must have one power of two of entries, at least 64, and state two");
  const auto* labels = const_data<int32_t>(label);
  PairTable table(mutable_data<int64_t>(keys), mutable_data<int64_t>(pair_counts), slots, mutable_data<int64_t>(state));
  LabelCounts near(mutable_data<int32_t>(counts));
  dispatch_ids(indices, [&](auto id) {
    const auto run = run_of<decltype(id)>(indptr, indices, first);
    for (int64_t i = 0; i < run.size; ++i) {
      const int32_t own = labels[first + i];
      if (own < 0 || own >= counts.numel()) {
        continue;
      }
      run.for_each_neighbor(i, [&](int64_t u) {
        if (labels[u] > own && labels[u] < counts.numel()) {
          near.add(labels[u]);
        }
      });
      for (const int32_t c : near.seen()) {
        table.add(own, c, near[c]);
      }
      near.clear();
    }
  });
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "stream_cluster", &gnnsys::stream_cluster);
  REGISTER_OP(m, "stream_contract", &gnnsys::stream_contract);
}
