// The undirected graph that a partitioner works on, as a view over the lists it is stored in.
//
// The finest level is the user's graph itself, not a symmetrised copy: two lists per edge type, its CSC (in-neighbours)
// and the transpose (out-neighbours), each covering the range of nodes of its type. Coarser levels are one symmetric
// list with edge weights. A node's neighbours are those of all its lists; an edge listed twice counts twice, loops are
// skipped.
#pragma once

#include "common/check.h"
#include "common/id_range.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gnnsys::partition {

struct NeighborList {
  const int64_t* indptr;
  const int32_t* indices;
  const int32_t* weight;  // null: every edge weighs 1
  int32_t row_begin;      // the nodes whose neighbours are listed: [row_begin, row_end)
  int32_t row_end;
  int32_t column_begin;   // what is added to an index to make it a node
};

class Adjacency {
 public:
  Adjacency(const std::vector<Tensor>& indptr, const std::vector<Tensor>& indices, const std::vector<Tensor>& weight,
            const std::vector<int64_t>& offsets, int64_t num_nodes);

  int32_t num_nodes() const { return num_nodes_; }

  // Entries of all lists: every edge twice.
  int64_t num_entries() const {
    int64_t total = 0;
    for (const NeighborList& list : lists_) {
      total += list.indptr[list.row_end - list.row_begin];
    }
    return total;
  }

  // Calls body(neighbour, weight) for every edge of v but its loops.
  template <typename Body>
  void for_each(int32_t v, const Body& body) const {
    for (const NeighborList& list : lists_) {
      if (v < list.row_begin || v >= list.row_end) {
        continue;
      }
      const int64_t begin = list.indptr[v - list.row_begin];
      const int64_t end = list.indptr[v - list.row_begin + 1];
      for (int64_t e = begin; e < end; ++e) {
        const int32_t u = list.indices[e] + list.column_begin;
        if (u != v) {
          body(u, list.weight ? list.weight[e] : 1);
        }
      }
    }
  }

  // Whether is(neighbour) for any of v's neighbours.
  template <typename Is>
  bool any(int32_t v, const Is& is) const {
    for (const NeighborList& list : lists_) {
      if (v < list.row_begin || v >= list.row_end) {
        continue;
      }
      const int64_t end = list.indptr[v - list.row_begin + 1];
      for (int64_t e = list.indptr[v - list.row_begin]; e < end; ++e) {
        const int32_t u = list.indices[e] + list.column_begin;
        if (u != v && is(u)) {
          return true;
        }
      }
    }
    return false;
  }

  // Calls body(label[neighbour], weight) for v's edges, or for about `most` of them, evenly spread: all that a hub's
  // choice needs. Labels are read a block ahead of their use: a branch that waits for one would stop all the others.
  template <typename Body>
  void for_each_label(int32_t v, const int32_t* label, int64_t most, const Body& body) const {
    constexpr int64_t kBlock = 128;
    int32_t labels[kBlock];
    const int64_t stride = std::max<int64_t>(1, (degree(v) + most - 1) / most);
    for (const NeighborList& list : lists_) {
      if (v < list.row_begin || v >= list.row_end) {
        continue;
      }
      const int64_t end = list.indptr[v - list.row_begin + 1];
      const int32_t self = v - list.column_begin;
      for (int64_t e = list.indptr[v - list.row_begin]; e < end; e += kBlock * stride) {
        const int64_t count = std::min(kBlock, (end - e + stride - 1) / stride);
        for (int64_t i = 0; i < count; ++i) {
          labels[i] = label[list.indices[e + i * stride] + list.column_begin];
        }
        for (int64_t i = 0; i < count; ++i) {
          if (list.indices[e + i * stride] != self) {
            body(labels[i], list.weight ? list.weight[e + i * stride] : 1);
          }
        }
      }
    }
  }

  // Entries in v's lists, loops included.
  int64_t degree(int32_t v) const {
    int64_t total = 0;
    for (const NeighborList& list : lists_) {
      if (v >= list.row_begin && v < list.row_end) {
        total += list.indptr[v - list.row_begin + 1] - list.indptr[v - list.row_begin];
      }
    }
    return total;
  }

 private:
  std::vector<NeighborList> lists_;
  int32_t num_nodes_;
};

// Weights of nodes, one column per constraint: int64 [num_nodes, num_constraints].
struct NodeWeights {
  const int64_t* data;
  int32_t num_constraints;

  const int64_t* of(int32_t v) const { return data + static_cast<int64_t>(v) * num_constraints; }
};

// Weights are not negative and a constraint's add up to at most kMostWeight, so that no sum of them overflows.
constexpr int64_t kMostWeight = int64_t{1} << 62;
NodeWeights node_weights_of(const Tensor& weights, int64_t num_nodes);

// One limit per constraint, none of them negative.
const int64_t* limits_of(const Tensor& limits, const NodeWeights& weights);

// A well-mixed 64-bit word of (value, key): order and ties are random, and the same everywhere.
inline uint64_t mix(uint64_t value, uint64_t key) {
  uint64_t x = value + key * 0x9E3779B97F4A7C15ull + 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace gnnsys::partition
