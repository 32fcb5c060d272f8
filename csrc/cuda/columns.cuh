// Columns of a CSC asked for by node: their bounds checked on the way, what is wrong told with the size of the result.
#pragma once

#include "cuda/scan.cuh"

namespace gnnsys::cuda {

// Read by the host once; all ones at the start. The smallest place that is wrong is kept.
struct ColumnReport {
  word_t total;
  word_t bad_node;    // place of a node that is no column
  word_t bad_column;  // place of a node whose column indptr does not have in order
  word_t bad_source;  // place of a source that is no id
};

template <typename node_t>
struct Columns {
  const int64_t* indptr;  // on the device or pinned
  const node_t* nodes;
  int64_t num_nodes;
  int64_t num_columns;
  int64_t num_edges;
  ColumnReport* report;

  // Bounds of nodes[i]'s column, [0, 0) when it has none; what is wrong is noted.
  __device__ void row(int64_t i, int64_t* begin, int64_t* end) const {
    *begin = *end = 0;
    const auto node = static_cast<int64_t>(nodes[i]);
    if (node < 0 || node >= num_columns) {
      atomicMin(&report->bad_node, static_cast<word_t>(i));
      return;
    }
    const int64_t first = indptr[node];
    const int64_t last_end = indptr[node + 1];
    if (first < 0 || first > last_end || last_end > num_edges) {
      atomicMin(&report->bad_column, static_cast<word_t>(i));
      return;
    }
    *begin = first;
    *end = last_end;
  }
};

template <typename node_t>
Columns<node_t> make_columns(const Tensor& indptr, const Tensor& indices, const Tensor& nodes, ColumnReport* report) {
  return {const_data<int64_t>(indptr), const_data<node_t>(nodes), nodes.numel(),
          indptr.numel() - 1,          indices.numel(),           report};
}

// From wherever it is, pinned memory too.
template <typename T>
T read_one(const Device& device, const T* from) {
  T value;
  CUDA_CHECK(cudaMemcpyAsync(&value, from, sizeof(T), cudaMemcpyDefault, device.stream()));
  CUDA_CHECK(cudaStreamSynchronize(device.stream()));
  return value;
}

// Throws what is wrong with `nodes`, in the CPU's words.
template <typename node_t>
void check_columns(const Device& device, const Columns<node_t>& columns, const ColumnReport& r, const char* name) {
  constexpr word_t kNothing = ~word_t{0};
  if (r.bad_node != kNothing) {
    const auto place = static_cast<int64_t>(r.bad_node);
    CHECK_ARG(false, name, " must be in [0, ", columns.num_columns, "), got ", read_one(device, columns.nodes + place),
              " at position ", place);
  }
  if (r.bad_column != kNothing) {
    const auto node = static_cast<int64_t>(read_one(device, columns.nodes + r.bad_column));
    CHECK_ARG(false, "indptr must ascend from 0 to len(indices) = ", columns.num_edges, ", at node ", node,
              " it goes from ", read_one(device, columns.indptr + node), " to ",
              read_one(device, columns.indptr + node + 1));
  }
}

// The result's size, waited for; throws what is wrong with `nodes`.
template <typename node_t>
ColumnReport read_columns(const Device& device, const Columns<node_t>& columns, const char* name) {
  ColumnReport r;
  device.read(reinterpret_cast<word_t*>(&r), reinterpret_cast<const word_t*>(columns.report), sizeof(r) / sizeof(word_t));
  check_columns(device, columns, r, name);
  return r;
}

}  // namespace gnnsys::cuda
