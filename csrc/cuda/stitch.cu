// The answers of several parts to a hop, put together in the order of the seeds: bit-equal to cpu/stitch.cpp.
//
// A piece may still be on the host, as it came from another machine: its copy is part of the call. Nobody waits for a
// size, as the host knows how many edges there are. Work: the seeds twice, every neighbour and edge read and written once.
#include "common/register.h"
#include "common/stitch_segments.h"
#include "cuda/group.cuh"
#include "cuda/scan.cuh"

#include <tuple>
#include <vector>

namespace gnnsys::cuda {
namespace {

// The tensor where kernels read it. CUDA takes pageable memory before the call returns; page-locked memory it reads
// later, and somebody may have let go of it by then.
class Pieces {
 public:
  explicit Pieces(const Device& device) : device_(device) {}

  Tensor on_device(const Tensor& t, const char* name) {
    CHECK_ARG(t.dim() == 1, name, " must have one dimension, got ", t.dim());
    check_index_dtype(t, name);
    if (t.is_cuda() || t.numel() == 0) {
      if (t.is_cuda()) {
        check_contiguous(t, device_, name);
      }
      return t;
    }
    CHECK_ARG(t.is_contiguous(), name, " must be contiguous: pass ", name, ".contiguous()");
    const Tensor copy = device_.empty({t.numel()}, t.scalar_type());
    const size_t bytes = static_cast<size_t>(t.numel()) * (t.scalar_type() == ScalarType::Long ? 8 : 4);
    is_read_later_ = is_read_later_ || is_readable(t, device_);
    CUDA_CHECK(cudaMemcpyAsync(copy.mutable_data_ptr(), t.const_data_ptr(), bytes, cudaMemcpyHostToDevice,
                               device_.stream()));
    return copy;
  }

  void finish() const {
    if (is_read_later_) {
      CUDA_CHECK(cudaStreamSynchronize(device_.stream()));
    }
  }

 private:
  const Device& device_;
  bool is_read_later_ = false;
};

// What is on the host can be looked at before it is used.
template <typename count_t>
void check_counts(const Tensor& counts, int64_t num_edges) {
  const auto* count = const_data<count_t>(counts);
  int64_t total = 0;
  for (int64_t i = 0; i < counts.numel(); ++i) {
    CHECK_ARG(count[i] >= 0 && count[i] <= num_edges - total, "counts must not be negative and add up to the ids, ",
              num_edges, ", got ", count[i], " behind ", total);
    total += count[i];
  }
  CHECK_ARG(total == num_edges, "counts add up to ", total, ", but there are ", num_edges, " ids");
}

template <typename count_t>
__global__ void __launch_bounds__(kGroupThreads)
    place_counts(const count_t* counts, int64_t size, const int64_t* order, int64_t num_seeds, int64_t* of_seeds) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  if (i >= size) {
    return;
  }
  const int64_t seed = order[i];
  if (seed < 0 || seed >= num_seeds) {
    fault("order", seed, num_seeds);
  }
  of_seeds[seed] = counts[i];
}

template <typename in_t, typename edge_t, typename id_t>
__global__ void __launch_bounds__(kGroupThreads)
    place_edges(const int64_t* begins, int64_t size, int64_t num_edges, const int64_t* order, const int64_t* indptr,
                int64_t total, const in_t* ids, const edge_t* edges, id_t* out_ids, int64_t* out_edges) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && begins[size] != num_edges) {
    fault("the sum of counts less the number of ids", begins[size] - num_edges, 1);
  }
  for_each_edge(begins, size, num_edges, [&](int64_t edge, int64_t column) {
    const int64_t to = indptr[order[column]] + edge - begins[column];
    if (to < 0 || to >= total) {
      fault("where an edge goes", to, total);
    }
    out_ids[to] = static_cast<id_t>(ids[edge]);
    out_edges[to] = static_cast<int64_t>(edges[edge]);
  });
}

std::tuple<Tensor, Tensor, Tensor> stitch(const Tensor& order, std::vector<Tensor> counts, std::vector<Tensor> ids,
                                          std::vector<Tensor> edges, std::vector<int64_t> flat_segments, bool wide) {
  CHECK_ARG(order.is_cuda(), "order must be on the device where the answers are put together");
  const Device device(order);
  check_vector(order, device, "order");
  check_dtype(order, ScalarType::Long, "order");
  CHECK_ARG(counts.size() == ids.size() && counts.size() == edges.size(), "counts, ids and edges must be equally many");
  const int64_t num_seeds = order.numel();
  const std::vector<Segment> segments = read_segments(flat_segments, counts, num_seeds);
  int64_t total = 0;
  Pieces pieces(device);
  for (size_t k = 0; k < counts.size(); ++k) {
    CHECK_ARG(ids[k].numel() == edges[k].numel(), "piece ", k, " has ", ids[k].numel(), " ids and ", edges[k].numel(),
              " edges");
    total += ids[k].numel();
    check_index_dtype(counts[k], "counts");
    if (!counts[k].is_cuda()) {
      dispatch_ids(counts[k], [&](auto count) { check_counts<decltype(count)>(counts[k], ids[k].numel()); });
    }
    counts[k] = pieces.on_device(counts[k], "counts");
    ids[k] = pieces.on_device(ids[k], "ids");
    edges[k] = pieces.on_device(edges[k], "edges");
  }
  const Tensor indptr = device.empty({num_seeds + 1}, ScalarType::Long);
  CUDA_CHECK(cudaMemsetAsync(indptr.mutable_data_ptr(), 0, static_cast<size_t>(num_seeds + 1) * sizeof(int64_t),
                             device.stream()));
  const auto* place = const_data<int64_t>(order);
  for (const Segment& segment : segments) {
    const Tensor& count = counts[static_cast<size_t>(segment.piece)];
    CHECK_ARG(segment.size == count.numel(), "on a device a piece must answer seeds that follow each other, piece ",
              segment.piece, " does not");
    dispatch_ids(count, [&](auto of) {
      using count_t = decltype(of);
      place_counts<count_t><<<num_blocks(segment.size, kGroupThreads), kGroupThreads, 0, device.stream()>>>(
          const_data<count_t>(count), segment.size, place + segment.first, num_seeds, mutable_data<int64_t>(indptr));
      CUDA_CHECK_LAUNCH();
    });
  }
  exclusive_sum(device, num_seeds, CountsAt<int64_t>{const_data<int64_t>(indptr)}, mutable_data<int64_t>(indptr));
  const Tensor out_ids = device.empty({total}, wide ? ScalarType::Long : ScalarType::Int);
  const Tensor out_edges = device.empty({total}, ScalarType::Long);
  for (const Segment& segment : segments) {
    const auto k = static_cast<size_t>(segment.piece);
    const int64_t num_edges = ids[k].numel();
    if (num_edges == 0) {
      continue;
    }
    const Tensor begins = device.workspace<int64_t>(segment.size + 1);
    auto* const begin = static_cast<int64_t*>(begins.mutable_data_ptr());
    dispatch_ids(counts[k], [&](auto of) {
      exclusive_sum(device, segment.size, CountsAt<decltype(of)>{const_data<decltype(of)>(counts[k])}, begin);
    });
    dispatch_ids(ids[k], [&](auto in) {
      dispatch_ids(edges[k], [&](auto edge) {
        dispatch_ids(out_ids, [&](auto out) {
          place_edges<<<num_blocks(num_edges, kEdgeTile), kGroupThreads, 0, device.stream()>>>(
              begin, segment.size, num_edges, place + segment.first, const_data<int64_t>(indptr), total,
              const_data<decltype(in)>(ids[k]), const_data<decltype(edge)>(edges[k]),
              mutable_data<decltype(out)>(out_ids), mutable_data<int64_t>(out_edges));
          CUDA_CHECK_LAUNCH();
        });
      });
    });
  }
  pieces.finish();
  return {indptr, out_ids, out_edges};
}

}  // namespace
}  // namespace gnnsys::cuda

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "stitch", &gnnsys::cuda::stitch); }
