// sorted_structures: edges of many relations that come by destination, each as indptr and indices, in one launch. A
// typed batch has a dozen of them, and to make one after the other takes the host longer than the device.
//
// Bytes per edge: 8 read and 4 written; per destination 8 written and a binary search.
#include "common/register.h"
#include "cuda/group.cuh"

#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

namespace gnnsys::cuda {
namespace {

constexpr int64_t kMostRelations = 96;  // of a launch: they travel as its arguments, of which there may be 4 KiB

struct SortedEdges {
  int count;
  const int64_t* src[kMostRelations];
  const int64_t* dst[kMostRelations];
  int64_t entry[kMostRelations + 1];  // where the indptr of each begins among all
  int64_t edge[kMostRelations + 1];   // where its edges do
};

// A thread per entry of all indptrs, and then per edge.
__global__ void __launch_bounds__(kGroupThreads)
    sorted_kernel(const __grid_constant__ SortedEdges edges, int64_t* __restrict__ indptr,
                  int32_t* __restrict__ indices) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  const int64_t num_entries = edges.entry[edges.count] - edges.entry[0];
  if (at < num_entries) {
    const int64_t entry = edges.entry[0] + at;
    const int64_t relation = column_of(edges.entry, 0, edges.count - 1, entry);
    const int64_t num_edges = edges.edge[relation + 1] - edges.edge[relation];
    indptr[entry] = lower_bound(edges.dst[relation], 0, num_edges, entry - edges.entry[relation]);
  } else if (at < num_entries + edges.edge[edges.count] - edges.edge[0]) {
    const int64_t edge = edges.edge[0] + at - num_entries;
    const int64_t relation = column_of(edges.edge, 0, edges.count - 1, edge);
    indices[edge] = static_cast<int32_t>(edges.src[relation][edge - edges.edge[relation]]);
  }
}

std::tuple<Tensor, Tensor> sorted_structures(std::vector<Tensor> edge_index, std::vector<int64_t> num_dst) {
  CHECK_ARG(!edge_index.empty() && edge_index.size() == num_dst.size(),
            "edge_index and num_dst must have an entry per relation");
  CHECK_ARG(edge_index[0].is_cuda(), "edge_index must be on a GPU");
  const Device device(edge_index[0]);
  int64_t num_entries = 0;
  int64_t num_edges = 0;
  for (size_t r = 0; r < edge_index.size(); ++r) {
    const Tensor& each = edge_index[r];
    check_dtype(each, ScalarType::Long, "edge_index");
    CHECK_ARG(each.is_cuda() && each.get_device_index() == edge_index[0].get_device_index(),
              "edge_index must be on one device");
    CHECK_ARG(each.dim() == 2 && each.size(0) == 2 && (each.size(1) < 2 || each.stride(1) == 1),
              "edge_index must be [2, num_edges], the ends of edges one behind the other");
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    CHECK_ARG(num_dst[r] >= 0 && num_dst[r] <= most && each.size(1) <= most,
              "a relation must have fewer than 2^31 destinations and edges, got ", num_dst[r], " and ", each.size(1));
    num_entries += num_dst[r] + 1;
    num_edges += each.size(1);
  }
  Tensor indptr = device.empty({num_entries}, ScalarType::Long);
  Tensor indices = device.empty({num_edges}, ScalarType::Int);
  SortedEdges some{};
  for (size_t r = 0; r < edge_index.size(); ++r) {
    const Tensor& each = edge_index[r];
    some.src[some.count] = const_data<int64_t>(each);
    some.dst[some.count] = const_data<int64_t>(each) + each.stride(0);
    some.entry[some.count + 1] = some.entry[some.count] + num_dst[r] + 1;
    some.edge[some.count + 1] = some.edge[some.count] + each.size(1);
    ++some.count;
    if (some.count == kMostRelations || r + 1 == edge_index.size()) {
      const int64_t size = some.entry[some.count] - some.entry[0] + some.edge[some.count] - some.edge[0];
      sorted_kernel<<<num_blocks(size, kGroupThreads), kGroupThreads, 0, device.stream()>>>(
          some, mutable_data<int64_t>(indptr), mutable_data<int32_t>(indices));
      CUDA_CHECK_LAUNCH();
      some.entry[0] = some.entry[some.count];
      some.edge[0] = some.edge[some.count];
      some.count = 0;
    }
  }
  return {indptr, indices};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "sorted_structures", &sorted_structures); }

}  // namespace gnnsys::cuda
