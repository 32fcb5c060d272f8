// Coarsening, second half: clusters become nodes, edges between them are added up, and only the heaviest are kept.
//
// Power-law graphs get denser as they get coarser. DistDGLv2 §5.3.1: a coarse node keeps so many of its heaviest edges
// that its degree is the average degree of its members, so edges shrink as fast as nodes. An edge stays when either end
// keeps it, which keeps the graph symmetric; between equal weights a random word of the pair decides. Graphs that do
// not get denser (paths, trees, grids, the web) keep all their edges: they hang by single ones.
//
// One pass over the finer edges finds what each coarse node keeps; that is transposed, and both are merged.
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/partition/adjacency.h"
#include "cpu/partition/small_map.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

namespace gnnsys::partition {
namespace {

constexpr int64_t kChunk = 512;  // coarse nodes that are contracted at a time by one thread

struct Members {
  std::vector<int64_t> start;
  std::vector<int32_t> nodes;

  Members(const int32_t* cluster, int32_t num_nodes, int64_t num_clusters) : start(num_clusters + 2, 0), nodes(num_nodes) {
    for (int32_t v = 0; v < num_nodes; ++v) {
      ++start[cluster[v] + 2];
    }
    std::partial_sum(start.begin(), start.end(), start.begin());
    for (int32_t v = 0; v < num_nodes; ++v) {
      nodes[start[cluster[v] + 1]++] = v;
    }
  }
};

struct Edge {
  int32_t to;
  int32_t weight;
};

// Heavier first, then a random word of the unordered pair: the same from either end.
uint64_t rank_of(int32_t weight, int32_t a, int32_t b) {
  const uint64_t pair = static_cast<uint64_t>(std::min(a, b)) << 32 | static_cast<uint32_t>(std::max(a, b));
  return static_cast<uint64_t>(weight) << 32 | mix(pair, 0) >> 32;
}

// Lists of edges by node, in pieces that are freed one by one.
struct Pieces {
  std::vector<std::vector<Edge>> edges;  // by chunk of kChunk nodes
  std::vector<int64_t> start;            // [num_nodes + 1]

  explicit Pieces(int64_t num_nodes) : edges((num_nodes + kChunk - 1) / kChunk), start(num_nodes + 1, 0) {}

  void sum_up() { std::partial_sum(start.begin(), start.end(), start.begin()); }
  const Edge* begin(int64_t node) const { return edges[node / kChunk].data() + start[node] - start[node / kChunk * kChunk]; }
  int64_t count(int64_t node) const { return start[node + 1] - start[node]; }
};

// fill(node, edges): appends the node's edges.
template <typename Fill>
Pieces pieces_of(int64_t num_nodes, const Fill& fill) {
  Pieces out(num_nodes);
  parallel_for_dynamic(static_cast<int64_t>(out.edges.size()), 1, [&](int64_t first, int64_t last) {
    SmallMap map;
    std::vector<Edge> edges;
    for (int64_t chunk = first; chunk < last; ++chunk) {
      edges.clear();
      for (int64_t node = chunk * kChunk; node < std::min(num_nodes, (chunk + 1) * kChunk); ++node) {
        const size_t before = edges.size();
        fill(node, map, edges);
        out.start[node + 1] = static_cast<int64_t>(edges.size() - before);
      }
      out.edges[chunk].assign(edges.begin(), edges.end());
    }
  });
  out.sum_up();
  return out;
}

class Contraction {
 public:
  Contraction(const Adjacency& graph, const int32_t* cluster, int64_t num_clusters)
      : graph_(graph), cluster_(cluster), members_(cluster, graph.num_nodes(), num_clusters), size_(num_clusters) {}

  // All edges of every coarse node, or those it keeps.
  Pieces kept(bool heaviest) const {
    return pieces_of(size_, [&](int64_t c, SmallMap& map, std::vector<Edge>& edges) {
      const int64_t total = gather(c, map);
      const int64_t members = members_.start[c + 1] - members_.start[c];
      const int64_t keep = heaviest ? std::max<int64_t>(1, (total + members - 1) / members) : total;
      const size_t before = edges.size();
      map.for_each([&](int32_t other, int32_t weight) { edges.push_back({other, weight}); });
      if (map.size() > keep) {
        const auto rank = [&](const Edge& e) { return rank_of(e.weight, static_cast<int32_t>(c), e.to); };
        std::nth_element(edges.begin() + before, edges.begin() + before + keep, edges.end(),
                         [&](const Edge& a, const Edge& b) { return rank(a) > rank(b); });
        edges.resize(before + keep);
      }
    });
  }

  // Whether coarse nodes have more edges than their members had on average; judged by a sixteenth of them.
  bool gets_denser() const {
    constexpr int64_t kSample = 16;
    SmallMap map;
    double edges = 0;
    double average = 0;
    for (int64_t c = 0; c < size_; c += kSample) {
      const int64_t members = members_.start[c + 1] - members_.start[c];
      average += static_cast<double>(gather(c, map)) / members;
      edges += map.size();
    }
    return edges > 1.25 * average;
  }

 private:
  // The coarse neighbours of c with their weights; returns the sum of its members' degrees.
  int64_t gather(int64_t c, SmallMap& map) const {
    map.clear();
    int64_t total = 0;
    for (int64_t i = members_.start[c]; i < members_.start[c + 1]; ++i) {
      const int32_t v = members_.nodes[i];
      total += graph_.degree(v);
      graph_.for_each_label(v, cluster_, std::numeric_limits<int32_t>::max(), [&](int32_t label, int32_t weight) {
        if (label != c) {
          map.add(label, weight);
        }
      });
    }
    return total;
  }

  const Adjacency& graph_;
  const int32_t* const cluster_;
  const Members members_;
  const int64_t size_;
};

// Every edge of `kept` from its other end.
Pieces transposed(const Pieces& kept, int64_t size) {
  Pieces out(size);
  for (const auto& chunk : kept.edges) {
    for (const Edge& edge : chunk) {
      ++out.start[edge.to + 1];
    }
  }
  out.sum_up();
  for (size_t chunk = 0; chunk < out.edges.size(); ++chunk) {
    const int64_t last = std::min<int64_t>(size, (chunk + 1) * kChunk);
    out.edges[chunk].resize(out.start[last] - out.start[chunk * kChunk]);
  }
  std::vector<int64_t> next(out.start.begin(), out.start.end() - 1);
  for (int64_t c = 0; c < size; ++c) {
    const Edge* const edges = kept.begin(c);
    for (int64_t i = 0; i < kept.count(c); ++i) {
      const int32_t to = edges[i].to;
      out.edges[to / kChunk][next[to]++ - out.start[to / kChunk * kChunk]] = {static_cast<int32_t>(c), edges[i].weight};
    }
  }
  return out;
}

// The union of both: an edge that both ends keep is one edge.
Pieces merged(const Pieces& kept, const Pieces& other, int64_t size) {
  return pieces_of(size, [&](int64_t c, SmallMap& map, std::vector<Edge>& edges) {
    map.clear();
    const Edge* const mine = kept.begin(c);
    for (int64_t i = 0; i < kept.count(c); ++i) {
      map.add(mine[i].to, 0);
      edges.push_back(mine[i]);
    }
    const Edge* const theirs = other.begin(c);
    for (int64_t i = 0; i < other.count(c); ++i) {
      if (!map.contains(theirs[i].to)) {
        edges.push_back(theirs[i]);
      }
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> to_tensors(Pieces pieces, int64_t size) {
  const Tensor indptr = empty_cpu({size + 1}, ScalarType::Long);
  std::copy(pieces.start.begin(), pieces.start.end(), mutable_data<int64_t>(indptr));
  const Tensor indices = empty_cpu({pieces.start[size]}, ScalarType::Int);
  const Tensor weights = empty_cpu({pieces.start[size]}, ScalarType::Int);
  auto* to = mutable_data<int32_t>(indices);
  auto* weight = mutable_data<int32_t>(weights);
  for (auto& chunk : pieces.edges) {
    for (const Edge& edge : chunk) {
      *to++ = edge.to;
      *weight++ = edge.weight;
    }
    std::vector<Edge>().swap(chunk);  // freed as it goes: never both copies whole
  }
  return {indptr, indices, weights};
}

std::tuple<Tensor, Tensor, Tensor> contract(std::vector<Tensor> indptr, std::vector<Tensor> indices,
                                            std::vector<Tensor> weight, std::vector<int64_t> offsets,
                                            const Tensor& cluster, int64_t num_clusters, bool heaviest) {
  check_vector(cluster, "cluster");
  check_dtype(cluster, ScalarType::Int, "cluster");
  CHECK_ARG(num_clusters >= 0 && num_clusters <= cluster.numel(), "num_clusters must be in [0, num_nodes], got ",
            num_clusters);
  check_id_range(cluster, num_clusters, "cluster");
  const Adjacency graph(indptr, indices, weight, offsets, cluster.numel());
  const Contraction contraction(graph, const_data<int32_t>(cluster), num_clusters);
  const bool drops = heaviest && contraction.gets_denser();
  Pieces kept = contraction.kept(drops);
  if (!drops) {
    return to_tensors(std::move(kept), num_clusters);
  }
  return to_tensors(merged(kept, transposed(kept, num_clusters), num_clusters), num_clusters);
}

}  // namespace
}  // namespace gnnsys::partition

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "partition_contract", &gnnsys::partition::contract); }
