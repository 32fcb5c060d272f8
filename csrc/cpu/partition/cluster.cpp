// Coarsening, first half: heavy-edge clustering. Every node joins the cluster it shares the heaviest edges with.
//
// Matching pairs nodes, and on power-law graphs most leaves of a hub stay alone; a cluster takes several nodes, up to
// a limit in every constraint (size-constrained label propagation, Meyerhenke, Sanders and Schulz, SEA 2014; a limit
// of two nodes is heavy-edge matching). Nodes that stay alone join others with the same favourite (two-hop).
//
// Nodes are visited in blocks of increasing degree: a block's choices are made in parallel from the state before it, then
// carried out in order, each if it still makes sense. Hence the same clusters on any number of threads. Nodes with
// neighbouring ids, which are often neighbours, are kept out of one block. Work O(rounds * edges), memory O(nodes).
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/partition/adjacency.h"
#include "cpu/partition/small_map.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

namespace gnnsys::partition {
namespace {

constexpr int64_t kMostNeighbors = 128;  // a hub chooses by so many of its edges
constexpr int kTries = 4;                // clusters asked for room before a node stays where it is
constexpr int32_t kNone = -1;

class Clustering {
 public:
  Clustering(const Adjacency& graph, NodeWeights weights, const int64_t* limits, const int32_t* part, uint64_t key)
      : graph_(graph),
        weights_(weights),
        limits_(limits),
        part_(part),
        key_(key),
        label_(graph.num_nodes()),
        favorite_(graph.num_nodes(), kNone),
        size_(graph.num_nodes(), 1),
        total_(weights.data, weights.data + static_cast<int64_t>(graph.num_nodes()) * weights.num_constraints) {
    std::iota(label_.begin(), label_.end(), 0);
  }

  void run(int64_t rounds) {
    const std::vector<int32_t> order = by_degree();
    for (int64_t round = 0; round < rounds; ++round) {
      int64_t moves = 0;
      const int64_t n = order.size();
      const int64_t block = std::clamp<int64_t>(n / 256, 64, 4096);
      for (int64_t begin = 0; begin < n; begin += block) {
        moves += visit(order.data() + begin, std::min(block, n - begin), round);
      }
      if (moves * 50 < n) {
        break;
      }
    }
    join_favorites(order);
  }

  // Cluster ids from 0 on, numbered by their first node, which keeps what locality the ids have.
  int32_t number(int32_t* out) {
    std::vector<int32_t> id(graph_.num_nodes(), kNone);
    int32_t next = 0;
    for (int32_t v = 0; v < graph_.num_nodes(); ++v) {
      int32_t& of_label = id[label_[v]];
      if (of_label == kNone) {
        of_label = next++;
      }
      out[v] = of_label;
    }
    return next;
  }

 private:
  std::vector<int32_t> by_degree() const {
    const int32_t n = graph_.num_nodes();
    std::vector<int64_t> start(66, 0);
    std::vector<uint8_t> bucket(n);
    for (int32_t v = 0; v < n; ++v) {
      const int64_t degree = graph_.degree(v);
      bucket[v] = degree == 0 ? 0 : 64 - __builtin_clzll(degree);
      ++start[bucket[v] + 1];
    }
    std::partial_sum(start.begin(), start.end(), start.begin());
    const std::vector<int64_t> begin(start.begin(), start.end() - 1);
    std::vector<int32_t> sorted(n);
    for (int32_t v = 0; v < n; ++v) {
      sorted[start[bucket[v]]++] = v;
    }
    std::vector<int32_t> order(n);
    for (size_t b = 0; b < begin.size(); ++b) {
      spread(sorted.data() + begin[b], order.data() + begin[b], start[b] - begin[b]);
    }
    return order;
  }

  // The same nodes in strides of the golden section: neighbours in `from` end up far apart.
  static void spread(const int32_t* from, int32_t* to, int64_t count) {
    int64_t stride = std::max<int64_t>(1, static_cast<int64_t>(count * 0.6180339887));
    while (std::gcd(stride, count) > 1) {
      ++stride;
    }
    int64_t at = 0;
    for (int64_t i = 0; i < count; ++i) {
      to[i] = from[at];
      at += stride;
      at -= at >= count ? count : 0;
    }
  }

  int64_t visit(const int32_t* nodes, int64_t count, int64_t round) {
    choice_.resize(count);
    parallel_for(count, 64, [&](int64_t begin, int64_t end) {
      SmallMap map;
      for (int64_t i = begin; i < end; ++i) {
        choice_[i] = choose(nodes[i], round, map);
      }
    });
    int64_t moves = 0;
    for (int64_t i = 0; i < count; ++i) {
      moves += choice_[i] != label_[nodes[i]] && is_tied(nodes[i], choice_[i]) && join(nodes[i], choice_[i]);
    }
    return moves;
  }

  // The cluster that v is tied to most and that has room for it; ties are broken at random.
  int32_t choose(int32_t v, int64_t round, SmallMap& map) {
    map.clear();
    if (part_ == nullptr) {
      graph_.for_each_label(v, label_.data(), kMostNeighbors,
                            [&](int32_t label, int32_t weight) { map.add(label, weight); });
    } else {  // a cluster lies in one part: its label is a node, and that node's part is the cluster's
      graph_.for_each_label(v, label_.data(), kMostNeighbors, [&](int32_t label, int32_t weight) {
        if (part_[label] == part_[v]) {
          map.add(label, weight);
        }
      });
    }
    const uint32_t salt = static_cast<uint32_t>(mix(v, key_ + round)) | 1;
    uint64_t below = ~uint64_t{0};
    favorite_[v] = kNone;
    for (int i = 0; i < kTries; ++i) {
      uint64_t best_rank = 0;
      int32_t best = kNone;
      map.for_each([&](int32_t cluster, int32_t weight) {
        const uint64_t rank = static_cast<uint64_t>(weight) << 32 | static_cast<uint32_t>((cluster + 1) * salt);
        if (rank > best_rank && rank < below) {
          best_rank = rank;
          best = cluster;
        }
      });
      if (best == kNone) {
        break;
      }
      if (favorite_[v] == kNone) {
        favorite_[v] = best;
      }
      if (best == label_[v] || has_room(best, v)) {
        return best;
      }
      below = best_rank;
    }
    return label_[v];
  }

  // Whether a neighbour of v is in the cluster, now: the one it was chosen for may have left in the same block, and two
  // nodes that choose each other would change places.
  bool is_tied(int32_t v, int32_t cluster) const {
    return graph_.any(v, [&](int32_t u) { return label_[u] == cluster; });
  }

  bool has_room(int32_t cluster, int32_t v) const {
    const int64_t* const mine = weights_.of(v);
    const int64_t* const theirs = total_.data() + static_cast<int64_t>(cluster) * weights_.num_constraints;
    for (int32_t c = 0; c < weights_.num_constraints; ++c) {
      if (mine[c] > 0 && mine[c] + theirs[c] > limits_[c]) {
        return false;
      }
    }
    return true;
  }

  bool join(int32_t v, int32_t cluster) {
    if (cluster == label_[v] || !has_room(cluster, v)) {
      return false;
    }
    const int64_t* const mine = weights_.of(v);
    for (int32_t c = 0; c < weights_.num_constraints; ++c) {
      total_[static_cast<int64_t>(label_[v]) * weights_.num_constraints + c] -= mine[c];
      total_[static_cast<int64_t>(cluster) * weights_.num_constraints + c] += mine[c];
    }
    --size_[label_[v]];
    ++size_[cluster];
    label_[v] = cluster;
    return true;
  }

  // Nodes alone in their cluster join one that has the same favourite: leaves of one hub end up together, and so do
  // nodes without any edge. Never across parts: there, a favourite is of the node's own part.
  void join_favorites(const std::vector<int32_t>& order) {
    std::vector<int32_t> waiting(graph_.num_nodes() + 1, kNone);
    for (const int32_t v : order) {
      if (size_[label_[v]] != 1 || (favorite_[v] == kNone && part_ != nullptr)) {
        continue;
      }
      int32_t& slot = waiting[favorite_[v] == kNone ? graph_.num_nodes() : favorite_[v]];
      if (slot == kNone || slot == label_[v] || !join(v, slot)) {
        slot = label_[v];
      }
    }
  }

  const Adjacency& graph_;
  const NodeWeights weights_;
  const int64_t* const limits_;
  const int32_t* const part_;
  const uint64_t key_;
  std::vector<int32_t> label_;
  std::vector<int32_t> favorite_;
  std::vector<int32_t> size_;
  std::vector<int64_t> total_;  // [cluster, constraint]
  std::vector<int32_t> choice_;
};

std::tuple<Tensor, int64_t> cluster(std::vector<Tensor> indptr, std::vector<Tensor> indices, std::vector<Tensor> weight,
                                    std::vector<int64_t> offsets, const Tensor& node_weights, const Tensor& limits,
                                    const std::optional<Tensor>& part, int64_t rounds, int64_t key) {
  const Adjacency graph(indptr, indices, weight, offsets, node_weights.size(0));
  const NodeWeights weights = node_weights_of(node_weights, graph.num_nodes());
  if (part) {
    check_vector(*part, "part");
    check_dtype(*part, ScalarType::Int, "part");
    CHECK_ARG(part->numel() == graph.num_nodes(), "part must have one entry per node");
  }
  const Tensor out = empty_cpu({graph.num_nodes()}, ScalarType::Int);
  Clustering clustering(graph, weights, limits_of(limits, weights), part ? const_data<int32_t>(*part) : nullptr,
                        static_cast<uint64_t>(key));
  clustering.run(rounds);
  return {out, clustering.number(mutable_data<int32_t>(out))};
}

}  // namespace
}  // namespace gnnsys::partition

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "partition_cluster", &gnnsys::partition::cluster); }
