// A hop over several parts: what a part sampled in local ids put into global ids, and the answers of all parts put
// together in the order of the seeds. Nothing is sorted: where a seed's neighbours go follows from its place alone.
#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/stitch_segments.h"
#include "common/tensors.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kSeedGrain = 1 << 12;
constexpr int64_t kEdgeGrain = 1 << 14;
constexpr int64_t kMostIds = int64_t{1} << 62;  // sums of two fit

// What a part's local ids stand for: core nodes follow `first`, halo nodes are listed.
template <typename halo_t>
struct LocalNames {
  int64_t first;
  int64_t num_core;
  const halo_t* halo;

  int64_t operator()(int64_t local) const { return local < num_core ? local + first : halo[local - num_core]; }
};

template <typename id_t>
Tensor differences(const Tensor& indptr) {
  const int64_t size = indptr.numel() - 1;
  Tensor out = empty_cpu({size}, id_type<id_t>());
  const auto* from = const_data<int64_t>(indptr);
  auto* const to = mutable_data<id_t>(out);
  for (int64_t i = 0; i < size; ++i) {
    to[i] = static_cast<id_t>(static_cast<uint64_t>(from[i + 1]) - static_cast<uint64_t>(from[i]));
  }
  return out;
}

// Work and bytes: one read of what was sampled, one random read of the halo per remote neighbour, one write.
std::tuple<Tensor, Tensor, Tensor> name_neighbors(const Tensor& indptr, const Tensor& neighbors,
                                                  const Tensor& positions, int64_t first, int64_t num_core,
                                                  const Tensor& halo, int64_t first_edge, std::optional<Tensor> order,
                                                  bool wide_ids, bool wide_edges) {
  check_csc(indptr, neighbors);
  check_dtype(neighbors, ScalarType::Int, "neighbors");
  check_vector(positions, "positions");
  check_dtype(positions, ScalarType::Long, "positions");
  check_ids(halo, "halo");
  CHECK_ARG(positions.numel() == neighbors.numel(), "positions must be as many as neighbors, ", neighbors.numel(),
            ", got ", positions.numel());
  CHECK_ARG(neighbors.numel() <= std::numeric_limits<int32_t>::max(),
            "a hop must take fewer than 2^31 edges of a part at once: use smaller batches");
  const auto is_count = [](int64_t value) { return value >= 0 && value <= kMostIds; };
  CHECK_ARG(is_count(first) && is_count(num_core) && is_count(first_edge),
            "first, num_core and first_edge must be in [0, 2^62], got ", first, ", ", num_core, " and ", first_edge);
  check_id_range(neighbors, num_core + halo.numel(), "neighbors");
  if (order) {
    check_ids(*order, "order");
    check_id_range(positions, order->numel(), "positions");
  }
  const int64_t size = neighbors.numel();
  Tensor ids = empty_cpu({size}, wide_ids ? ScalarType::Long : ScalarType::Int);
  Tensor edges = empty_cpu({size}, wide_edges ? ScalarType::Long : ScalarType::Int);
  const auto* local = const_data<int32_t>(neighbors);
  const auto* position = const_data<int64_t>(positions);
  dispatch_ids(halo, [&](auto halo_id) {
    const LocalNames<decltype(halo_id)> name{first, num_core, const_data<decltype(halo_id)>(halo)};
    dispatch_ids(ids, [&](auto id) {
      using id_t = decltype(id);
      auto* const out = mutable_data<id_t>(ids);
      parallel_for(size, kEdgeGrain, [&](int64_t begin, int64_t end) {
        for (int64_t e = begin; e < end; ++e) {
          out[e] = static_cast<id_t>(name(local[e]));
        }
      });
    });
  });
  dispatch_ids(edges, [&](auto edge) {
    using edge_t = decltype(edge);
    auto* const out = mutable_data<edge_t>(edges);
    const auto fill = [&](const auto& place) {
      parallel_for(size, kEdgeGrain, [&](int64_t begin, int64_t end) {
        for (int64_t e = begin; e < end; ++e) {
          out[e] = static_cast<edge_t>(static_cast<uint64_t>(first_edge) + static_cast<uint64_t>(place(position[e])));
        }
      });
    };
    if (!order) {
      fill([](int64_t p) { return p; });
      return;
    }
    dispatch_ids(*order, [&](auto stored) {
      const auto* place = const_data<decltype(stored)>(*order);
      fill([place](int64_t p) { return static_cast<int64_t>(place[p]); });
    });
  });
  return {differences<int32_t>(indptr), ids, edges};
}

// One answer: counts of its seeds, then their neighbours and edges, one after the other.
struct Piece {
  const Tensor& counts;
  const Tensor& ids;
  const Tensor& edges;

  void check(ScalarType id_dtype) const {
    check_vector(counts, "counts");
    check_dtype(counts, ScalarType::Int, "counts");
    check_ids(ids, "ids");
    check_dtype(ids, id_dtype, "ids");
    check_ids(edges, "edges");
    const auto* count = const_data<int32_t>(counts);
    int64_t total = 0;
    for (int64_t i = 0; i < counts.numel(); ++i) {
      CHECK_ARG(count[i] >= 0, "counts must not be negative, got ", count[i]);
      total += count[i];
    }
    CHECK_ARG(total == ids.numel() && total == edges.numel(), "counts add up to ", total, ", but there are ",
              ids.numel(), " ids and ", edges.numel(), " edges");
  }
};

// Offsets of a piece's seeds among its neighbours.
std::vector<int64_t> offsets_of(const Tensor& counts) {
  std::vector<int64_t> offsets(static_cast<size_t>(counts.numel()) + 1, 0);
  const auto* count = const_data<int32_t>(counts);
  for (int64_t i = 0; i < counts.numel(); ++i) {
    offsets[static_cast<size_t>(i) + 1] = offsets[static_cast<size_t>(i)] + count[i];
  }
  return offsets;
}

// indptr in the order of the seeds. ValueError unless order names every seed once.
Tensor stitched_indptr(const std::vector<Segment>& segments, const std::vector<Tensor>& counts, const Tensor& order) {
  const int64_t num_seeds = order.numel();
  Tensor out = empty_cpu({num_seeds + 1}, ScalarType::Long);
  auto* const indptr = mutable_data<int64_t>(out);
  std::fill_n(indptr, num_seeds + 1, int64_t{-1});
  const auto* place = const_data<int64_t>(order);
  int64_t twice = -1;
  for (const Segment& segment : segments) {
    const auto* count = const_data<int32_t>(counts[static_cast<size_t>(segment.piece)]) + segment.first_seed;
    const auto* to = place + segment.first;
    for (int64_t j = 0; j < segment.size; ++j) {
      int64_t& entry = indptr[to[j] + 1];
      twice = entry < 0 ? twice : to[j];
      entry = count[j];
    }
  }
  CHECK_ARG(twice < 0, "order must name every seed once, it names ", twice, " twice");
  indptr[0] = 0;
  for (int64_t i = 0; i < num_seeds; ++i) {
    indptr[i + 1] += indptr[i];
  }
  return out;
}

// Copies a segment's neighbours and edges to their places. Most seeds have few: a plain loop beats a call of memcpy.
template <typename id_t, typename edge_t>
void copy_segment(const Segment& segment, const int64_t* offsets, const int64_t* order, const int64_t* indptr,
                  const id_t* ids, const edge_t* edges, id_t* out_ids, int64_t* out_edges) {
  parallel_for(segment.size, kSeedGrain, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const int64_t from = offsets[segment.first_seed + j];
      const int64_t size = offsets[segment.first_seed + j + 1] - from;
      const int64_t to = indptr[order[segment.first + j]];
      for (int64_t e = 0; e < size; ++e) {
        out_ids[to + e] = ids[from + e];
        out_edges[to + e] = edges[from + e];
      }
    }
  });
}

// Work and bytes: two passes over the seeds, then every neighbour and edge read and written once.
std::tuple<Tensor, Tensor, Tensor> stitch(const Tensor& order, std::vector<Tensor> counts, std::vector<Tensor> ids,
                                          std::vector<Tensor> edges, std::vector<int64_t> flat_segments, bool wide) {
  check_vector(order, "order");
  check_dtype(order, ScalarType::Long, "order");
  check_id_range(order, order.numel(), "order");
  CHECK_ARG(counts.size() == ids.size() && counts.size() == edges.size(), "counts, ids and edges must be equally many");
  const ScalarType id_dtype = wide ? ScalarType::Long : ScalarType::Int;
  std::vector<std::vector<int64_t>> offsets;
  for (size_t k = 0; k < counts.size(); ++k) {
    Piece{counts[k], ids[k], edges[k]}.check(id_dtype);
    offsets.push_back(offsets_of(counts[k]));
  }
  const std::vector<Segment> segments = read_segments(flat_segments, counts, order.numel());
  const Tensor indptr = stitched_indptr(segments, counts, order);
  const auto* offset = const_data<int64_t>(indptr);
  const int64_t total = offset[order.numel()];
  Tensor out_ids = empty_cpu({total}, id_dtype);
  Tensor out_edges = empty_cpu({total}, ScalarType::Long);
  const auto* place = const_data<int64_t>(order);
  dispatch_ids(out_ids, [&](auto id) {
    using id_t = decltype(id);
    for (const Segment& segment : segments) {
      const auto k = static_cast<size_t>(segment.piece);
      dispatch_ids(edges[k], [&](auto edge) {
        copy_segment(segment, offsets[k].data(), place, offset, const_data<id_t>(ids[k]),
                     const_data<decltype(edge)>(edges[k]), mutable_data<id_t>(out_ids),
                     mutable_data<int64_t>(out_edges));
      });
    }
  });
  return {indptr, out_ids, out_edges};
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "name_neighbors", &gnnsys::name_neighbors);
  REGISTER_OP(m, "stitch", &gnnsys::stitch);
}
