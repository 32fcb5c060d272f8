// What refine_volume and even_out take and give back.
#pragma once

#include "common/id_range.h"
#include "common/tensors.h"
#include "cpu/partition/volume_search.h"

#include <limits>
#include <tuple>

namespace gnnsys {

// The assignment; rows sent and received by part [2, num_parts], as kept move by move; moves, swaps and why it stopped.
using SearchResult = std::tuple<Tensor, Tensor, Tensor>;

inline void check_assignment(const Tensor& indptr, const Tensor& indices, const Tensor& part, int64_t num_parts) {
  check_csc(indptr, indices);
  check_monotone(indptr);
  const int64_t num_nodes = indptr.numel() - 1;
  CHECK_ARG(num_nodes <= std::numeric_limits<int32_t>::max(), "at most 2^31 - 1 nodes, got ", num_nodes);
  check_id_range(indices, num_nodes, "indices");
  check_vector(part, "part");
  check_dtype(part, ScalarType::Int, "part");
  CHECK_ARG(part.numel() == num_nodes, "part must have one entry per node, ", num_nodes, ", got ", part.numel());
  CHECK_ARG(num_parts >= 1 && num_parts <= kMaxVolumeParts, "num_parts must be in [1, ", kMaxVolumeParts, "], got ",
            num_parts);
  check_id_range(part, num_parts, "part");
}

inline void check_limits(const Tensor& weights, const Tensor& limits, int64_t num_nodes, int64_t num_parts) {
  check_contiguous(weights, "weights");
  check_contiguous(limits, "limits");
  check_dtype(weights, ScalarType::Long, "weights");
  check_dtype(limits, ScalarType::Long, "limits");
  CHECK_ARG(weights.dim() == 2 && weights.size(1) == num_nodes, "weights must be [num_constraints, ", num_nodes, "]");
  CHECK_ARG(limits.dim() == 2 && limits.size(0) == weights.size(0) && limits.size(1) == num_parts, "limits must be [",
            weights.size(0), ", ", num_parts, "]");
  const auto* const w = const_data<int64_t>(weights);
  const int64_t bad = std::find_if(w, w + weights.numel(), [](int64_t x) { return x < 0; }) - w;
  CHECK_ARG(bad == weights.numel(), "weights must be >= 0, got ", w[bad], " for node ", bad % num_nodes);
}

// Checks, builds the search, runs body(search), which returns why it stopped, and collects the result.
template <typename Body>
SearchResult run_search(const Tensor& indptr, const Tensor& indices, const Tensor& part, int64_t num_parts,
                        const Tensor& weights, const Tensor& limits, int64_t key, const Body& body) {
  check_assignment(indptr, indices, part, num_parts);
  const int64_t num_nodes = indptr.numel() - 1;
  check_limits(weights, limits, num_nodes, num_parts);
  const auto* const start = const_data<int32_t>(part);
  const VolumeGraph graph = dispatch_ids(indices, [&](auto id) {
    return make_volume_graph(const_data<int64_t>(indptr), const_data<decltype(id)>(indices), num_nodes);
  });
  VolumeState state(graph, start, static_cast<int>(num_parts));
  Limits bounds(const_data<int64_t>(weights), const_data<int64_t>(limits), weights.size(0), num_nodes,
                static_cast<int>(num_parts), start);
  VolumeSearch search(&state, &bounds, static_cast<uint64_t>(key));
  const int64_t stopped = body(search);

  const Tensor out = empty_cpu({num_nodes}, ScalarType::Int);
  std::copy(state.parts().begin(), state.parts().end(), mutable_data<int32_t>(out));
  const Tensor loads = empty_cpu({2, num_parts}, ScalarType::Long);
  std::copy(state.loads().sent.begin(), state.loads().sent.end(), mutable_data<int64_t>(loads));
  std::copy(state.loads().received.begin(), state.loads().received.end(), mutable_data<int64_t>(loads) + num_parts);
  const Tensor stats = empty_cpu({3}, ScalarType::Long);
  auto* const s = mutable_data<int64_t>(stats);
  s[0] = search.num_moves();
  s[1] = search.num_swaps();
  s[2] = stopped;
  return {out, loads, stats};
}

}  // namespace gnnsys
