// sample_hops: all hops around a batch's seeds in one call, for plain sampling of one edge type.
//
// The graph is one CSC, or lies in parts as they are stored: the sources of edges are then read part by part, in local
// ids, and get their global ids as they are read (one read of a halo for those that are not core nodes).
//
// A hop is a count (sample_contiguous.cuh), a choice (choose.cuh), or both by LABOR (sample_labor.cuh), which gives edges
// a weight; and three steps that number what was found
// (id_table.cuh); the new ids are the next hop's seeds. The host has to know how many edges a hop takes and how many
// ids were new. The next hop's count is queued before the second is known and takes it from the device, so that both
// are read together: one wait per hop, and one for the new ids of the last.
//
// Bytes per edge with 32-bit ids: 16 to choose it, 16 to number it (id and slot, each written or read twice), 12 for
// its local id, 40 to write row, column and edge id from what was kept; and random sectors, one in the graph and two or
// three in the table.
#include "common/register.h"
#include "common/sample_arguments.h"
#include "common/tensors.h"
#include "cuda/choose.cuh"
#include "cuda/hops.cuh"
#include "cuda/id_table.cuh"

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

namespace gnnsys::cuda {
namespace {

constexpr int64_t kMaxParts = 64;  // looked through one after the other for every edge
constexpr int64_t kExpectedRoom = int64_t{1} << 22;  // ids that a table is made for ahead of need: 64 MiB

template <typename id_t>
class Walk {
 public:
  Walk(const Device& device, const Request<id_t>& request, const std::vector<PartEdges>& parts,
       const std::vector<int64_t>& fanouts, const std::vector<int64_t>& keys, bool labor)
      : device_(device),
        request_(request),
        parts_(parts),
        fanouts_(fanouts),
        keys_(keys),
        labor_(labor),
        hops_(fanouts.size() + 1),  // the last one has seeds alone: the nodes that the last hop found
        is_wide_(request.num_rows > int64_t{1} << 32) {}

  // From seeds on the host, which are checked, to the last hop, or to one that finds nothing.
  void run(const Tensor& seeds) {
    start(seeds);
    size_t hop = 0;
    while (hop < num_hops() && step(hop)) {
      ++hop;
    }
    ended_early_ = hop < num_hops();
  }

  // Both ends, edge ids and weights; of the last none where draws are uniform.
  std::tuple<Tensor, Tensor, Tensor> edges(const std::optional<Tensor>& edge_ids) const {
    if (edge_ids.has_value()) {
      return dispatch_ids(*edge_ids, [&](auto id) { return join_edges(const_data<decltype(id)>(*edge_ids)); });
    }
    return join_edges<int64_t>(nullptr);
  }

  // Waits for the last hop, so it comes last.
  Tensor nodes() {
    if (!ended_early_) {
      learn(num_hops());
    }
    const Tensor out = device_.empty({num_nodes()}, ScalarType::Long);
    auto* to = mutable_data<int64_t>(out);
    for (size_t hop = 0; hop < hops_.size();) {
      Pieces<id_t> pieces{};
      int64_t size = 0;
      for (; hop < hops_.size() && pieces.count < Pieces<id_t>::kMost; ++hop, ++pieces.count) {
        size += hops_[hop].num_seeds;
        pieces.ids[pieces.count] = hops_[hop].seeds;
        pieces.ends[pieces.count] = size;
      }
      if (size > 0) {
        join_nodes_kernel<<<num_blocks(size, kGroupThreads), kGroupThreads, 0, device_.stream()>>>(pieces, to);
        CUDA_CHECK_LAUNCH();
        to += size;
      }
    }
    return out;
  }

  // Nodes per hop, the seeds first, then edges per hop.
  Tensor counts() const {
    const Tensor out = empty_cpu({static_cast<int64_t>(2 * num_hops() + 1)}, ScalarType::Long);
    auto* to = mutable_data<int64_t>(out);
    for (const auto& hop : hops_) {
      *to++ = hop.num_seeds;
    }
    for (size_t hop = 0; hop < num_hops(); ++hop) {
      *to++ = hops_[hop].total;
    }
    return out;
  }

 private:
  size_t num_hops() const { return fanouts_.size(); }

  int64_t num_nodes() const {
    int64_t sum = 0;
    for (const auto& hop : hops_) {
      sum += hop.num_seeds;
    }
    return sum;
  }

  Request<id_t> request(size_t hop) const {
    Request<id_t> q = request_;
    q.seeds = hops_[hop].seeds;
    q.num_seeds = hops_[hop].num_seeds;
    q.fanout = fanouts_[hop];
    q.key = static_cast<uint64_t>(keys_[hop]);
    return q;
  }

  // Memory for what `place` takes from `places`; it returns how many bytes at the beginning are to have all bits set.
  template <typename Place>
  void allocate(const Place& place) {
    Places measure{nullptr};
    place(measure);
    memory_.push_back(device_.template workspace<char>(measure.size));
    Places places{mutable_data<char>(memory_.back())};
    const int64_t cleared = place(places);
    CUDA_CHECK(cudaMemsetAsync(places.memory, 0xFF, static_cast<size_t>(cleared), device_.stream()));
  }

  int64_t num_count_words(int64_t num_seeds) const {
    return num_scan_words(num_blocks(num_seeds + 1, labor_ ? kScanTile : kCountThreads));
  }

  void take_rows(Places& places, Hop<id_t>& hop, int64_t num_seeds) const {
    hop.rows = places.take<Row>(labor_ ? 0 : num_seeds);
    hop.labor_rows = places.take<LaborRow>(labor_ ? num_seeds : 0);
    hop.offsets = places.take<int64_t>(num_seeds + 1);
  }

  Labor<id_t> labor(size_t hop, const word_t* num_found) const {
    const Request<id_t> q = request(hop);
    return {q, &told_[hop].report, hops_[hop].labor_rows, q.original, q.wide_original, q.num_rows, num_found};
  }

  void start(const Tensor& seeds) {
    const int64_t count = seeds.numel();
    const auto* const given = const_data<int64_t>(seeds);
    if (count > 0) {
      const auto [low, high] = std::minmax_element(given, given + count);
      CHECK_ARG(*low >= 0 && *high < request_.num_rows, "seeds must be in [0, ", request_.num_rows, "), got ", *low,
                " to ", *high);
    }
    Hop<id_t>& hop = hops_[0];
    id_t* ids = nullptr;
    PartEdges* parts = nullptr;
    allocate([&](Places& places) {
      told_ = places.take<Told>(static_cast<int64_t>(hops_.size()));
      hop.count_words = places.take<word_t>(num_count_words(count));
      const int64_t cleared = places.size;
      take_rows(places, hop, count);
      ids = places.take<id_t>(count);
      parts = places.take<PartEdges>(static_cast<int64_t>(parts_.size()));
      return cleared;
    });
    const std::vector<id_t> narrowed(given, given + count);
    upload(narrowed, ids);
    upload(parts_, parts);
    if (!parts_.empty()) {
      request_.indices.parts = parts;
      request_.indices.num_parts = static_cast<int>(parts_.size());
    }
    hop.seeds = ids;
    hop.num_seeds = count;
    queue_count(0, nullptr);
  }

  // From pageable memory: it is taken before the call returns.
  template <typename T>
  void upload(const std::vector<T>& values, T* to) const {
    if (!values.empty()) {
      CUDA_CHECK(
          cudaMemcpyAsync(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, device_.stream()));
    }
  }

  // `hop`'s edges per seed; its num_seeds is a bound where the number is still only on the device.
  void queue_count(size_t hop, const word_t* num_found) {
    const Hop<id_t>& at = hops_[hop];
    if (labor_) {
      count_labor(device_, labor(hop, num_found), at.offsets);
      exclusive_sum_kernel<<<num_blocks(at.num_seeds + 1, kScanTile), kScanThreads, 0, device_.stream()>>>(
          at.num_seeds, CountsAt<int64_t>{at.offsets}, at.offsets,
          reinterpret_cast<int64_t*>(&told_[hop].report.total), at.count_words);
      CUDA_CHECK_LAUNCH();
      return;
    }
    count_contiguous<<<num_blocks(at.num_seeds + 1, kCountThreads), kCountThreads, 0, device_.stream()>>>(
        request(hop), num_found, at.rows, nullptr, at.offsets, &told_[hop].report, at.count_words);
    CUDA_CHECK_LAUNCH();
  }

  // Waits for a hop's sizes: its seeds (which the hop before found) and its edges.
  void learn(size_t hop) {
    Told told;
    device_.read(reinterpret_cast<word_t*>(&told), reinterpret_cast<const word_t*>(told_ + hop),
                 static_cast<int64_t>(sizeof(Told) / sizeof(word_t)));
    Hop<id_t>& at = hops_[hop];
    if (hop > 0) {
      check_id_fault(told.fault, is_wide_);
      at.num_seeds = static_cast<int64_t>(told.fresh);
    }
    if (hop < num_hops()) {
      check_report(device_, request(hop), told.report);
      check_labor_sources(told.report, request_.num_rows);
      at.total = static_cast<int64_t>(told.report.total);
    }
  }

  // Takes a hop's edges and queues the count of the next; false where there are none, and then no hop has any more.
  bool step(size_t hop) {
    learn(hop);
    Hop<id_t>& at = hops_[hop];
    Hop<id_t>& next = hops_[hop + 1];
    const int64_t total = at.total;
    if (total == 0) {
      return false;
    }
    const int64_t known = num_nodes();
    CHECK_ARG(known + total < kMaxPositions, "a sample may have up to ", kMaxPositions - 1, " nodes and edges, got ",
              known + total);
    const bool is_last = hop + 1 == num_hops();
    id_t* fresh = nullptr;
    allocate([&](Places& places) {
      at.number_words = places.take<word_t>(num_scan_words(num_tiles(total)));
      if (!is_last) {
        next.count_words = places.take<word_t>(num_count_words(total));
      }
      const int64_t cleared = places.size;
      at.neighbors = places.take<id_t>(total);
      at.positions = places.take<int64_t>(total);
      at.local = places.take<int64_t>(total);
      at.slot_of = places.take<uint32_t>(total);
      fresh = places.take<id_t>(total);
      if (!is_last) {
        take_rows(places, next, total);
      }
      return cleared;
    });
    if (labor_) {
      take_labor(device_, labor(hop, nullptr), at.offsets, at.neighbors, at.positions, nullptr);
    } else {
      choose(device_, request(hop), Contiguous<false>{at.rows, nullptr, nullptr}, at.offsets, total, at.neighbors,
             at.positions);
    }
    make_room(hop, known + total);
    number(hop, known, fresh);
    next.seeds = fresh;
    next.first = known;
    if (!is_last) {
      next.num_seeds = total;
      queue_count(hop + 1, &told_[hop + 1].fresh);
    }
    return true;
  }

  IdList list_of(const id_t* ids, int64_t size, int64_t base) const {
    IdList list{};
    list.ids = ids;
    list.size = size;
    list.slots = slots_.mutable_data_ptr();
    list.num_slots = static_cast<uint32_t>(2 * room_);
    list.base = static_cast<uint32_t>(base);
    list.type_end = static_cast<uint32_t>(num_tiles(size));
    list.wide_ids = sizeof(id_t) == sizeof(int64_t);
    list.wide_slots = is_wide_;
    return list;
  }

  // A table that is at most half full with `needed` ids, made anew where the last one is too small. It is made for as
  // many as the hops to come may bring, within reason.
  void make_room(size_t hop, int64_t needed) {
    if (needed <= room_) {
      return;
    }
    int64_t frontier = hops_[hop].total;
    int64_t expected = needed;
    for (size_t later = hop + 1; later < num_hops() && fanouts_[later] >= 0 && expected < kExpectedRoom; ++later) {
      frontier *= fanouts_[later];  // at most 2^22 * 2^28
      expected += frontier;
    }
    room_ = std::max(needed, std::min(expected, kExpectedRoom));
    const int64_t words = 2 * room_ * (is_wide_ ? 2 : 1);
    slots_ = device_.template workspace<word_t>(words);
    CUDA_CHECK(cudaMemsetAsync(slots_.mutable_data_ptr(), 0xFF, static_cast<size_t>(words) * sizeof(word_t),
                               device_.stream()));
    std::vector<IdList> known;
    uint32_t tile = 0;
    for (size_t earlier = 0; earlier <= hop; ++earlier) {
      const Hop<id_t>& at = hops_[earlier];
      if (at.num_seeds > 0) {
        known.push_back(list_of(at.seeds, at.num_seeds, at.first));
        known.back().first_tile = tile;
        tile += static_cast<uint32_t>(num_tiles(at.num_seeds));
      }
    }
    IdBatch(device_, Control{&told_[hop + 1].fault, nullptr, nullptr, nullptr}, known, 0).insert_ids();
  }

  // Local ids of a hop's neighbours; new ones go to `fresh`, the first of them with local id `known`.
  void number(size_t hop, int64_t known, id_t* fresh) const {
    const Hop<id_t>& at = hops_[hop];
    Told& told = told_[hop + 1];
    IdList list = list_of(at.neighbors, at.total, known);
    list.slot_of = at.slot_of;
    list.local = at.local;
    list.fresh = fresh;
    list.fresh_base = known;
    IdBatch batch(device_, Control{&told.fault, at.number_words, &told.fresh, at.number_words + 1}, {list},
                  num_tiles(at.total));
    batch.insert_ids();
    batch.number_ids();
    batch.write_ids({list});
  }

  template <typename edge_t>
  std::tuple<Tensor, Tensor, Tensor> join_edges(const edge_t* edge_ids) const {
    int64_t num_edges = 0;
    for (const auto& hop : hops_) {
      num_edges += hop.total;
    }
    const Tensor edge_index = device_.empty({2, num_edges}, ScalarType::Long);
    const Tensor edge = device_.empty({num_edges}, ScalarType::Long);
    const Tensor weights = device_.empty({labor_ ? num_edges : 0}, ScalarType::Float);
    auto* row = mutable_data<int64_t>(edge_index);
    auto* to = mutable_data<int64_t>(edge);
    auto* weight = mutable_data<float>(weights);
    for (const auto& hop : hops_) {
      if (hop.total > 0) {
        join_edges_kernel<<<num_blocks(hop.total, kEdgeTile), kGroupThreads, 0, device_.stream()>>>(
            hop.offsets, hop.num_seeds, hop.total, hop.first, hop.local, hop.positions, labor_ ? hop.labor_rows : nullptr,
            edge_ids, row, row + num_edges, to, weight);
        CUDA_CHECK_LAUNCH();
        row += hop.total;
        to += hop.total;
        weight += labor_ ? hop.total : 0;
      }
    }
    return {edge_index, edge, weights};
  }

  const Device& device_;
  Request<id_t> request_;
  const std::vector<PartEdges>& parts_;
  const std::vector<int64_t>& fanouts_;
  const std::vector<int64_t>& keys_;
  bool labor_;
  std::vector<Hop<id_t>> hops_;
  std::vector<Tensor> memory_;
  Told* told_ = nullptr;  // [num_hops + 1]
  Tensor slots_;
  int64_t room_ = 0;  // ids that the table may hold
  bool is_wide_;
  bool ended_early_ = false;
};

// Parts as they are stored. `bounds` is on the host: of sources, then of edges, one entry more than there are parts each.
std::vector<PartEdges> check_parts(const Device& device, const std::vector<Tensor>& indices,
                                   const std::vector<Tensor>& halo, const std::optional<Tensor>& bounds) {
  const auto num_parts = static_cast<int64_t>(indices.size());
  CHECK_ARG(num_parts <= kMaxParts, "there may be up to ", kMaxParts, " parts, got ", num_parts);
  CHECK_ARG(halo.size() == indices.size(), "halo must have one entry for each of ", num_parts, " parts, got ",
            halo.size());
  CHECK_ARG(bounds.has_value() && bounds->is_cpu() && bounds->is_contiguous() && bounds->dim() == 2 &&
                bounds->size(0) == 2 && bounds->size(1) == num_parts + 1,
            "bounds must be [2, num_parts + 1] on the host: of sources and of edges");
  check_dtype(*bounds, ScalarType::Long, "bounds");
  const auto* const first = const_data<int64_t>(*bounds);
  const auto* const first_edge = first + num_parts + 1;
  std::vector<PartEdges> parts;
  for (int64_t p = 0; p < num_parts; ++p) {
    const Tensor& of_edges = indices[static_cast<size_t>(p)];
    const Tensor& listed = halo[static_cast<size_t>(p)];
    check_readable(of_edges, device, "indices");
    check_readable(listed, device, "halo");
    check_dtype(of_edges, ScalarType::Int, "indices");
    check_index_dtype(listed, "halo");
    const int64_t num_core = first[p + 1] - first[p];
    CHECK_ARG(num_core >= 0 && first[p] >= 0, "bounds of sources must ascend from 0");
    CHECK_ARG(of_edges.dim() == 1 && first_edge[0] == 0 && first_edge[p + 1] - first_edge[p] == of_edges.numel(), "part ",
              p, " must have ", first_edge[p + 1] - first_edge[p], " edges, got ", of_edges.numel());
    parts.push_back({const_data<int32_t>(of_edges), listed.const_data_ptr(), first_edge[p], first[p], num_core,
                     num_core + listed.numel(), listed.scalar_type() == ScalarType::Long});
  }
  return parts;
}

using HopsResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

HopsResult sample_hops(const Tensor& indptr, std::vector<Tensor> indices, std::vector<Tensor> halo,
                       std::optional<Tensor> bounds, std::optional<Tensor> edge_ids, std::optional<Tensor> original,
                       const Tensor& seeds, std::vector<int64_t> fanouts, std::vector<int64_t> keys, bool replace,
                       bool labor, bool wide, const Tensor& on) {
  CHECK_ARG(!(labor && replace), "LABOR draws without replacement: leave one of labor and replace away");
  CHECK_ARG(on.is_cuda(), "on must be a tensor on the device that samples");
  const Device device(on);
  CHECK_ARG(!indices.empty(), "indices must be one array, or one for each part");
  const bool in_parts = !halo.empty();
  CHECK_ARG(in_parts || indices.size() == 1, "several parts must each have a halo");
  int64_t num_edges = 0;
  for (const Tensor& of_edges : indices) {
    check_csc(indptr, of_edges, device);
    num_edges += of_edges.numel();
  }
  const std::vector<PartEdges> parts =
      in_parts ? check_parts(device, indices, halo, bounds) : std::vector<PartEdges>{};
  ::gnnsys::check_vector(seeds, "seeds");  // on the host
  check_dtype(seeds, ScalarType::Long, "seeds");
  CHECK_ARG(!fanouts.empty() && fanouts.size() == keys.size(), "there must be one key per hop, and a hop, got ",
            fanouts.size(), " fanouts and ", keys.size(), " keys");
  for (const int64_t fanout : fanouts) {
    check_fanout(fanout);
  }
  if (edge_ids.has_value()) {
    check_readable(*edge_ids, device, "edge_ids");
    check_index_dtype(*edge_ids, "edge_ids");
    CHECK_ARG(edge_ids->dim() == 1 && edge_ids->numel() == num_edges, "edge_ids must have one entry per edge, ",
              num_edges, ", got ", edge_ids->numel());
  }
  if (original.has_value()) {
    check_readable(*original, device, "original");
    check_index_dtype(*original, "original");
    CHECK_ARG(original->dim() == 1 && original->numel() == indptr.numel() - 1,
              "original must have one id per row, ", indptr.numel() - 1, ", got ", original->numel());
  }
  const auto run = [&](auto id) -> HopsResult {
    using id_t = decltype(id);
    Request<id_t> q{};
    q.indptr = const_data<int64_t>(indptr);
    q.indices.ids = in_parts ? nullptr : const_data<id_t>(indices[0]);
    q.num_rows = indptr.numel() - 1;
    q.num_edges = num_edges;
    q.replace = replace;
    if (original.has_value()) {
      q.original = original->const_data_ptr();
      q.wide_original = original->scalar_type() == ScalarType::Long;
    }
    Walk<id_t> walk(device, q, parts, fanouts, keys, labor);
    walk.run(seeds);
    const auto [edge_index, edge, weight] = walk.edges(edge_ids);
    const Tensor nodes = walk.nodes();
    return {nodes, edge_index, edge, walk.counts(), weight};
  };
  if (in_parts) {
    return wide ? run(int64_t{}) : run(int32_t{});
  }
  return dispatch_ids(indices[0], run);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "sample_hops", &sample_hops); }

}  // namespace gnnsys::cuda
