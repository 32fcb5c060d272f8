// A run of neighbouring nodes of a symmetric adjacency that is too large for memory: what every streaming op visits.
//
// Ops take one run at a time and keep what they know of nodes outside it in arrays of one entry per node. They are
// sequential, node after node, so that a result never depends on the number of threads or on how runs were cut.
#pragma once

#include "common/check.h"
#include "common/id_range.h"

#include <cstdint>
#include <vector>

namespace gnnsys {

template <typename id_t>
struct NodeRun {
  int64_t first;
  int64_t size;
  const int64_t* indptr;  // [size + 1], positions in the whole adjacency
  const id_t* indices;    // of this run alone

  // body(neighbour), loops left out.
  template <typename Body>
  void for_each_neighbor(int64_t i, const Body& body) const {
    const int64_t v = first + i;
    for (int64_t e = indptr[i] - indptr[0]; e < indptr[i + 1] - indptr[0]; ++e) {
      if (indices[e] != v) {
        body(static_cast<int64_t>(indices[e]));
      }
    }
  }

  int64_t degree(int64_t i) const { return indptr[i + 1] - indptr[i]; }
};

// indptr int64 [size + 1], a slice of the adjacency's; indices those of the run; ids checked against num_nodes.
inline void check_run(const Tensor& indptr, const Tensor& indices, int64_t first, int64_t num_nodes) {
  check_vector(indptr, "indptr");
  check_dtype(indptr, ScalarType::Long, "indptr");
  check_ids(indices, "indices");
  CHECK_ARG(indptr.numel() >= 1, "indptr must have an entry more than the run has nodes, got none");
  check_monotone(indptr);
  const auto* p = const_data<int64_t>(indptr);
  const int64_t size = indptr.numel() - 1;
  CHECK_ARG(p[0] >= 0 && p[size] - p[0] == indices.numel(), "indptr runs from ", p[0], " to ", p[size],
            ", indices has ", indices.numel(), " neighbours");
  CHECK_ARG(first >= 0 && first <= num_nodes - size, size, " nodes from ", first, " on are not in [0, ", num_nodes, ")");
  check_id_range(indices, num_nodes, "indices");
}

template <typename id_t>
NodeRun<id_t> run_of(const Tensor& indptr, const Tensor& indices, int64_t first) {
  return {first, indptr.numel() - 1, const_data<int64_t>(indptr), const_data<id_t>(indices)};
}

// How often each label occurs among a node's neighbours: counts in an array of one zero per label, and which of them
// are not zero. clear() restores the zeros.
class LabelCounts {
 public:
  explicit LabelCounts(int32_t* counts) : counts_(counts) {}

  void add(int32_t label) {
    if (counts_[label] == 0) {
      seen_.push_back(label);
    }
    // Unsigned: the array is the caller's, and what it held before must not make an overflow.
    counts_[label] = static_cast<int32_t>(static_cast<uint32_t>(counts_[label]) + 1);
  }
  int32_t operator[](int32_t label) const { return counts_[label]; }
  const std::vector<int32_t>& seen() const { return seen_; }
  void clear() {
    for (const int32_t label : seen_) {
      counts_[label] = 0;
    }
    seen_.clear();
  }

 private:
  int32_t* counts_;
  std::vector<int32_t> seen_;
};

}  // namespace gnnsys
