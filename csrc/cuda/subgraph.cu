// Parts of a CSC on the device: all in-edges of some nodes, all edges among some nodes; bit-equal to cpu/subgraph.cpp.
// Work in proportion to the columns of the nodes, not to the whole graph; the host waits once, for the size.
#include "common/register.h"
#include "cuda/choose.cuh"
#include "cuda/columns.cuh"
#include "cuda/first_place.cuh"
#include "cuda/sample_filter.cuh"

#include <limits>
#include <optional>
#include <tuple>

namespace gnnsys::cuda {
namespace {

constexpr int kThreads = 256;

// A position in a graph of num_edges edges has the dtype of the indices, or int64 where it must.
ScalarType position_type(const Tensor& indices) {
  return indices.numel() <= std::numeric_limits<int32_t>::max() ? indices.scalar_type() : ScalarType::Long;
}

Tensor clear_report(const Device& device) {
  const Tensor report = device.workspace<ColumnReport>(1);
  CUDA_CHECK(cudaMemsetAsync(report.mutable_data_ptr(), 0xFF, sizeof(ColumnReport), device.stream()));
  return report;
}

// -- all in-edges -------------------------------------------------------------------------------------------------------

// A column's degree; where it begins is kept, so that indptr, which may be in host memory, is read once.
template <typename node_t>
struct Degree {
  Columns<node_t> columns;
  int64_t* begins;

  __device__ int64_t operator()(int64_t i) const {
    int64_t end;
    columns.row(i, begins + i, &end);
    return end - begins[i];
  }
};

struct FromBegins {
  const int64_t* begins;
  __device__ int64_t position(int64_t i, int64_t rank) const { return begins[i] + rank; }
};

template <typename node_t>
Result in_columns(const Device& device, const Tensor& indptr, const Tensor& indices, const Tensor& nodes) {
  const int64_t num_nodes = nodes.numel();
  const Tensor report = clear_report(device);
  const auto columns = make_columns<node_t>(indptr, indices, nodes, mutable_data<ColumnReport>(report));
  const Tensor begins = device.workspace<int64_t>(num_nodes);
  const Tensor offsets = device.empty({num_nodes + 1}, ScalarType::Long);
  exclusive_sum(device, num_nodes, Degree<node_t>{columns, mutable_data<int64_t>(begins)},
                mutable_data<int64_t>(offsets), mutable_data<int64_t>(report));
  const auto total = static_cast<int64_t>(read_columns(device, columns, "nodes").total);
  const Tensor neighbors = device.empty({total}, indices.scalar_type());
  const Tensor positions = device.empty({total}, position_type(indices));
  if (total > 0) {
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      dispatch_ids(positions, [&](auto pos) {
        take_all<<<num_blocks(total, kChooseThreads), kChooseThreads, 0, device.stream()>>>(
            num_nodes, total, const_data<id_t>(indices), FromBegins{const_data<int64_t>(begins)},
            const_data<int64_t>(offsets), mutable_data<id_t>(neighbors), mutable_data<decltype(pos)>(positions));
        CUDA_CHECK_LAUNCH();
      });
    });
  }
  return {offsets, neighbors, positions};
}

Result in_subgraph(const Tensor& indptr, const Tensor& indices, const Tensor& nodes) {
  CHECK_ARG(nodes.is_cuda(), "nodes must be on the device, like the other tensors");
  const Device device(nodes);
  check_csc(indptr, indices, device);
  check_ids(nodes, device, "nodes");
  return dispatch_ids(
      nodes, [&](auto node) { return in_columns<decltype(node)>(device, indptr, indices, nodes); });
}

// -- edges among nodes --------------------------------------------------------------------------------------------------

template <typename id_t>
__global__ void __launch_bounds__(kThreads)
    insert_sources(const id_t* sources, int64_t size, FirstPlace table, ColumnReport* report) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size) {
    return;
  }
  const auto node = static_cast<int64_t>(sources[i]);
  if (node < 0 || node == std::numeric_limits<int64_t>::max()) {
    atomicMin(&report->bad_source, static_cast<word_t>(i));
  } else {
    table.insert(node, i);
  }
}

template <typename node_t, typename id_t>
struct FromListed {
  static constexpr bool kSums = false;
  Columns<node_t> columns;
  const id_t* indices;
  FirstPlace place;
  int64_t num_rows;

  __device__ void row(int64_t i, int64_t* begin, int64_t* end) const { columns.row(i, begin, end); }
  __device__ bool keep(int64_t, int64_t p) const { return place(static_cast<int64_t>(indices[p])) >= 0; }
  __device__ double quantity(int64_t, int64_t) const { return 0; }
};

template <typename id_t, typename pos_t>
struct EmitLocal {
  FirstPlace place;
  const id_t* indices;
  id_t* local;
  pos_t* positions;

  __device__ void operator()(int64_t, int64_t p, int64_t slot, int64_t) const {
    local[slot] = static_cast<id_t>(place(static_cast<int64_t>(indices[p])));
    positions[slot] = static_cast<pos_t>(p);
  }
};

template <typename node_t, typename id_t>
Result induce(const Device& device, const Tensor& indptr, const Tensor& indices, const Tensor& nodes,
              const Tensor& sources) {
  const Tensor report = clear_report(device);
  const auto columns = make_columns<node_t>(indptr, indices, nodes, mutable_data<ColumnReport>(report));
  const int bits = FirstPlace::bits_for(sources.numel());
  const Tensor slots = device.workspace<Slot>(int64_t{1} << bits);
  const FirstPlace place = FirstPlace::clear(device, slots, bits);
  dispatch_ids(sources, [&](auto source) {
    insert_sources<<<num_blocks(sources.numel(), kThreads), kThreads, 0, device.stream()>>>(
        const_data<decltype(source)>(sources), sources.numel(), place, columns.report);
    CUDA_CHECK_LAUNCH();
  });
  const auto* const ids = const_data<id_t>(indices);
  const FromListed<node_t, id_t> filter{columns, ids, place, nodes.numel()};
  const Tensor offsets = device.empty({nodes.numel() + 1}, ScalarType::Long);
  auto* const offset = mutable_data<int64_t>(offsets);
  count_rows(device, filter, offset, nullptr);
  exclusive_sum(device, nodes.numel(), CountsAt<int64_t>{offset}, offset, mutable_data<int64_t>(report));
  const ColumnReport read = read_columns(device, columns, "nodes");
  if (const auto bad = static_cast<int64_t>(read.bad_source); bad >= 0) {
    dispatch_ids(sources, [&](auto source) {
      CHECK_ARG(false, "src_nodes must be in [0, ", std::numeric_limits<int64_t>::max(), "), got ",
                read_one(device, const_data<decltype(source)>(sources) + bad), " at position ", bad);
    });
  }
  const auto total = static_cast<int64_t>(read.total);
  const Tensor local = device.empty({total}, indices.scalar_type());
  const Tensor positions = device.empty({total}, position_type(indices));
  if (total > 0) {
    dispatch_ids(positions, [&](auto pos) {
      using pos_t = decltype(pos);
      collect_rows(device, filter, offset,
                   EmitLocal<id_t, pos_t>{place, ids, mutable_data<id_t>(local), mutable_data<pos_t>(positions)});
    });
  }
  return {offsets, local, positions};
}

// src_nodes: the list that sources are looked up in, nodes itself when it is not given.
Result induced_subgraph(const Tensor& indptr, const Tensor& indices, const Tensor& nodes,
                        std::optional<Tensor> src_nodes) {
  CHECK_ARG(nodes.is_cuda(), "nodes must be on the device, like the other tensors");
  const Device device(nodes);
  check_csc(indptr, indices, device);
  check_ids(nodes, device, "nodes");
  const Tensor& sources = src_nodes.has_value() ? *src_nodes : nodes;
  check_ids(sources, device, "src_nodes");
  return dispatch_ids(nodes, [&](auto node) {
    using node_t = decltype(node);
    return dispatch_ids(
        indices, [&](auto id) { return induce<node_t, decltype(id)>(device, indptr, indices, nodes, sources); });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "in_subgraph", &in_subgraph);
  REGISTER_OP(m, "induced_subgraph", &induced_subgraph);
}

}  // namespace gnnsys::cuda
