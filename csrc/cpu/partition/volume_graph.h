// The graph as communication sees it: distinct in-neighbours without loops, 32-bit ids.
//
// Whether a row is sent depends neither on how often an edge is repeated nor on loops, and without them "the last node
// of part p that needs u" is a count of one. Built in parallel; order inside a column is that of the input.
#pragma once

#include "common/check.h"
#include "common/parallel.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gnnsys {

struct VolumeGraph {
  const int64_t* begin;        // [num_nodes]: column v is sources[begin[v]] .. sources[begin[v] + degree[v]]
  std::vector<int32_t> degree;
  std::vector<int32_t> sources;

  int64_t num_nodes() const { return static_cast<int64_t>(degree.size()); }
  const int32_t* in(int64_t v) const { return sources.data() + begin[v]; }
};

// Bytes: 4 per edge, 4 per node, and while it runs 4 per node and thread. `indptr` must outlive the result.
template <typename id_t>
VolumeGraph make_volume_graph(const int64_t* indptr, const id_t* indices, int64_t num_nodes) {
  VolumeGraph graph{indptr, std::vector<int32_t>(num_nodes), std::vector<int32_t>(indptr[num_nodes])};
  constexpr int64_t kNodesPerThread = 1 << 14;
  parallel_for(num_nodes, kNodesPerThread, [&](int64_t first, int64_t last) {
    std::vector<int32_t> seen_by(num_nodes, -1);
    for (int64_t v = first; v < last; ++v) {
      int32_t* out = graph.sources.data() + indptr[v];
      const auto self = static_cast<int32_t>(v);
      for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
        const auto u = static_cast<int32_t>(indices[e]);
        if (u != self && seen_by[u] != self) {
          seen_by[u] = self;
          *out++ = u;
        }
      }
      graph.degree[v] = static_cast<int32_t>(out - graph.in(v));
    }
  });
  return graph;
}

}  // namespace gnnsys
