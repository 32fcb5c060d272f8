// How many edges run between which parts: the matrix that subparts are grouped by and cuts are counted from.
#include "common/parallel.h"
#include "common/tensors.h"
#include "cpu/partition/adjacency.h"

#include <torch/csrc/stable/library.h>

#include <limits>
#include <vector>

namespace gnnsys::partition {
namespace {

// Weight of edges from p to q, each edge from both ends, loops not: a symmetric matrix. One read of the edges.
Tensor ties(std::vector<Tensor> indptr, std::vector<Tensor> indices, std::vector<Tensor> weight,
            std::vector<int64_t> offsets, const Tensor& part, int64_t num_parts) {
  check_vector(part, "part");
  check_dtype(part, ScalarType::Int, "part");
  CHECK_ARG(num_parts >= 1 && num_parts < 1 << 15, "num_parts must be in [1, 2^15), got ", num_parts);
  check_id_range(part, num_parts, "part");
  const Adjacency graph(indptr, indices, weight, offsets, part.numel());
  const auto* const parts = const_data<int32_t>(part);
  const int threads = num_threads_for(graph.num_entries(), std::max<int64_t>(1 << 16, num_parts * num_parts));
  std::vector<std::vector<int64_t>> counts(threads);
  on_threads(threads, [&](int t, int n) {
    std::vector<int64_t> mine(num_parts * num_parts, 0);
    const Range range = share_of(graph.num_nodes(), t, n);
    for (int64_t v = range.begin; v < range.end; ++v) {
      int64_t* const row = mine.data() + parts[v] * num_parts;
      graph.for_each_label(static_cast<int32_t>(v), parts, std::numeric_limits<int32_t>::max(),
                           [&](int32_t other, int32_t weight) { row[other] += weight; });
    }
    counts[t] = std::move(mine);
  });
  const Tensor out = empty_cpu({num_parts, num_parts}, ScalarType::Long);
  auto* const total = mutable_data<int64_t>(out);
  std::fill_n(total, num_parts * num_parts, 0);
  for (const auto& mine : counts) {
    for (size_t i = 0; i < mine.size(); ++i) {
      total[i] += mine[i];
    }
  }
  return out;
}

}  // namespace
}  // namespace gnnsys::partition

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { m.impl("partition_ties", TORCH_BOX(&gnnsys::partition::ties)); }
