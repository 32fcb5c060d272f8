// sample_hops: all hops around a batch's seeds in one call, for plain sampling of any number of node and edge types.
//
// A relation is the in-edges of one edge type: a CSC, or parts as they are stored, whose sources are then read part by
// part, in local ids, and get their global ids as they are read (one read of a halo for those that are not core nodes).
//
// A hop asks every relation for in-edges of what the hop before found of its destination type. That is a count
// (sample_contiguous.cuh), a choice (choose.cuh), or both by LABOR (sample_labor.cuh), which gives edges a weight; and
// three steps for all relations together that number what was found (hop_numbering.cuh): per node type, in the order of
// the relations. The new ids are the next hop's seeds. Relations that have nothing to take are left out.
//
// The host has to know how many edges each relation takes and how many ids of each type were new. The next hop's counts
// are queued before the second is known and take it from the device, so that all of it is read together: one wait per
// hop, and one for the new ids of the last.
//
// Bytes per edge with 32-bit ids: 16 to choose it, 16 to number it (id and slot, each written or read twice), 12 for
// its local id, 40 to write row, column and edge id from what was kept; and random sectors, one in the graph and two or
// three in the table.
#include "common/register.h"
#include "cuda/choose.cuh"
#include "cuda/hop_numbering.cuh"
#include "cuda/hop_relations.cuh"
#include "cuda/hops.cuh"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

namespace gnnsys::cuda {
namespace {

struct SampledEdges {
  std::vector<Tensor> edge_index;
  std::vector<Tensor> edge_ids;
  std::vector<Tensor> weights;  // none where draws are uniform
};

template <typename id_t>
class Walk {
 public:
  Walk(const Device& device, const HopArguments& given)
      : device_(device),
        num_hops_(given.num_hops()),
        num_types_(given.num_types()),
        labor_(given.labor),
        num_nodes_(given.num_nodes),
        relations_(hop_relations<id_t>(given, device, parts_)),
        told_words_(Told::num_words(static_cast<int64_t>(num_types_), static_cast<int64_t>(relations_.size()))),
        numbering_(device, relations_, num_nodes_, num_hops_) {
    Hop<id_t> empty;
    empty.frontiers.resize(num_types_);
    empty.edges.resize(relations_.size());
    hops_.assign(num_hops_ + 1, empty);  // the last one has frontiers alone: the nodes that the last hop found
  }

  // From seeds on the host, which are checked, to the last hop, or to one that finds nothing.
  void run(const std::vector<Tensor>& seeds) {
    start(seeds);
    size_t hop = 0;
    while (hop < num_hops_ && step(hop)) {
      ++hop;
    }
    ended_early_ = hop < num_hops_;
  }

  // Both ends, edge ids and weights of each relation's edges.
  SampledEdges edges() const {
    SampledEdges out;
    EdgePieces all{};
    for (size_t r = 0; r < relations_.size(); ++r) {
      const int64_t num_edges = edges_of(r);
      out.edge_index.push_back(device_.empty({2, num_edges}, ScalarType::Long));
      out.edge_ids.push_back(device_.empty({num_edges}, ScalarType::Long));
      auto* row = mutable_data<int64_t>(out.edge_index.back());
      auto* edge = mutable_data<int64_t>(out.edge_ids.back());
      float* weight = nullptr;
      if (labor_) {
        out.weights.push_back(device_.empty({num_edges}, ScalarType::Float));
        weight = mutable_data<float>(out.weights.back());
      }
      for (const Hop<id_t>& hop : hops_) {
        const HopEdges<id_t>& at = hop.edges[r];
        if (at.total == 0) {
          continue;
        }
        const Frontier<id_t>& seeds = hop.frontiers[relations_[r].dst];
        const uint32_t end_tile = (all.count == 0 ? 0 : all.pieces[all.count - 1].end_tile) +
                                  num_blocks(at.total, kEdgeTile);
        all.pieces[all.count++] = {at.offsets,
                                   seeds.size,
                                   at.total,
                                   seeds.first,
                                   at.local,
                                   at.positions,
                                   labor_ ? at.labor_rows : nullptr,
                                   relations_[r].edge_ids.ids,
                                   row,
                                   row + num_edges,
                                   edge,
                                   weight,
                                   end_tile,
                                   relations_[r].edge_ids.wide};
        row += at.total;
        edge += at.total;
        weight += labor_ ? at.total : 0;
        if (all.count == kMostPieces) {
          launch_join(device_, all);
        }
      }
    }
    launch_join(device_, all);
    return out;
  }

  // Ids of each type's nodes. Waits for the last hop, so it comes last.
  std::vector<Tensor> nodes() {
    if (!ended_early_) {
      learn(num_hops_);
    }
    std::vector<Tensor> out;
    NodePieces<id_t> all{};
    for (size_t t = 0; t < num_types_; ++t) {
      out.push_back(device_.empty({nodes_of(t)}, ScalarType::Long));
      auto* to = mutable_data<int64_t>(out.back());
      for (const Hop<id_t>& hop : hops_) {
        const Frontier<id_t>& found = hop.frontiers[t];
        if (found.size == 0) {
          continue;
        }
        all.ids[all.count] = found.ids;
        all.to[all.count] = to;
        all.ends[all.count] = (all.count == 0 ? 0 : all.ends[all.count - 1]) + found.size;
        to += found.size;
        if (++all.count == kMostPieces) {
          launch_join(device_, all);
        }
      }
    }
    launch_join(device_, all);
    return out;
  }

  // Nodes per type and hop, the seeds first; then edges per relation and hop.
  Tensor counts() const {
    const size_t size = num_types_ * (num_hops_ + 1) + relations_.size() * num_hops_;
    const Tensor out = empty_cpu({static_cast<int64_t>(size)}, ScalarType::Long);
    auto* to = mutable_data<int64_t>(out);
    for (size_t t = 0; t < num_types_; ++t) {
      for (const Hop<id_t>& hop : hops_) {
        *to++ = hop.frontiers[t].size;
      }
    }
    for (size_t r = 0; r < relations_.size(); ++r) {
      for (size_t hop = 0; hop < num_hops_; ++hop) {
        *to++ = hops_[hop].edges[r].total;
      }
    }
    return out;
  }

 private:
  Told told(size_t hop) const {
    return {told_ + static_cast<int64_t>(hop) * told_words_, static_cast<int64_t>(num_types_)};
  }

  int64_t nodes_of(size_t type) const {
    int64_t sum = 0;
    for (const Hop<id_t>& hop : hops_) {
      sum += hop.frontiers[type].size;
    }
    return sum;
  }

  int64_t edges_of(size_t relation) const {
    int64_t sum = 0;
    for (const Hop<id_t>& hop : hops_) {
      sum += hop.edges[relation].total;
    }
    return sum;
  }

  Request<id_t> request(size_t hop, size_t r) const {
    const HopRelation<id_t>& relation = relations_[r];
    Request<id_t> q = relation.request;
    q.seeds = hops_[hop].frontiers[relation.dst].ids;
    q.num_seeds = hops_[hop].frontiers[relation.dst].size;
    q.fanout = relation.fanouts[hop];
    q.key = static_cast<uint64_t>(relation.keys[hop]);
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

  // Relations that have something to take in a hop, as far as the host knows: its frontiers may be bounds.
  void choose_relations(size_t hop) {
    for (size_t r = 0; r < relations_.size(); ++r) {
      const Request<id_t> q = request(hop, r);
      hops_[hop].edges[r].is_counted = q.num_seeds > 0 && q.num_edges > 0 && q.fanout != 0;
    }
  }

  // relation(r, its edges, its seeds) for those that are counted in a hop.
  template <typename Body>
  void for_counted(size_t hop, const Body& body) {
    for (size_t r = 0; r < relations_.size(); ++r) {
      HopEdges<id_t>& at = hops_[hop].edges[r];
      if (at.is_counted) {
        body(r, at, hops_[hop].frontiers[relations_[r].dst].size);
      }
    }
  }

  void take_count_words(Places& places, size_t hop) {
    for_counted(hop, [&](size_t, HopEdges<id_t>& at, int64_t num_seeds) {
      at.count_words =
          places.take<word_t>(num_scan_words(num_blocks(num_seeds + 1, labor_ ? kScanTile : kCountThreads)));
    });
  }

  void take_rows(Places& places, size_t hop) {
    for_counted(hop, [&](size_t, HopEdges<id_t>& at, int64_t num_seeds) {
      at.rows = places.take<Row>(labor_ ? 0 : num_seeds);
      at.labor_rows = places.take<LaborRow>(labor_ ? num_seeds : 0);
      at.offsets = places.take<int64_t>(num_seeds + 1);
    });
  }

  Labor<id_t> labor(size_t hop, size_t r, const word_t* num_found) const {
    const HopRelation<id_t>& relation = relations_[r];
    return {request(hop, r),
            told(hop).report(r),
            hops_[hop].edges[r].labor_rows,
            relation.source_ids.ids,
            relation.source_ids.wide,
            relation.num_src,
            num_found};
  }

  void start(const std::vector<Tensor>& seeds) {
    std::vector<id_t> narrowed;
    for (size_t t = 0; t < num_types_; ++t) {
      const int64_t count = seeds[t].numel();
      const auto* const given = const_data<int64_t>(seeds[t]);
      if (count > 0) {
        const auto [low, high] = std::minmax_element(given, given + count);
        CHECK_ARG(*low >= 0 && *high < num_nodes_[t], "seeds must be in [0, ", num_nodes_[t], "), got ", *low, " to ",
                  *high);
      }
      hops_[0].frontiers[t].size = count;
      narrowed.insert(narrowed.end(), given, given + count);
    }
    choose_relations(0);
    id_t* ids = nullptr;
    PartEdges* parts = nullptr;
    allocate([&](Places& places) {
      told_ = places.take<word_t>(static_cast<int64_t>(hops_.size()) * told_words_);
      take_count_words(places, 0);
      const int64_t cleared = places.size;
      take_rows(places, 0);
      ids = places.take<id_t>(static_cast<int64_t>(narrowed.size()));
      parts = places.take<PartEdges>(static_cast<int64_t>(parts_.size()));
      return cleared;
    });
    upload(narrowed, ids);
    upload(parts_, parts);
    for (HopRelation<id_t>& relation : relations_) {
      if (relation.request.indices.num_parts > 0) {
        relation.request.indices.parts = parts + relation.first_part;
      }
    }
    for (Frontier<id_t>& frontier : hops_[0].frontiers) {
      frontier.ids = ids;
      ids += frontier.size;
    }
    queue_counts(0);
  }

  // From pageable memory: it is taken before the call returns.
  template <typename T>
  void upload(const std::vector<T>& values, T* to) const {
    if (!values.empty()) {
      CUDA_CHECK(
          cudaMemcpyAsync(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, device_.stream()));
    }
  }

  // A hop's edges per seed; behind the first hop, how many seeds there are is still only on the device.
  void queue_counts(size_t hop) {
    for_counted(hop, [&](size_t r, const HopEdges<id_t>& at, int64_t num_seeds) {
      const word_t* const num_found = hop == 0 ? nullptr : told(hop).fresh() + relations_[r].dst;
      Report* const report = told(hop).report(r);
      if (labor_) {
        count_labor(device_, labor(hop, r, num_found), at.offsets);
        exclusive_sum_kernel<<<num_blocks(num_seeds + 1, kScanTile), kScanThreads, 0, device_.stream()>>>(
            num_seeds, CountsAt<int64_t>{at.offsets}, at.offsets, reinterpret_cast<int64_t*>(&report->total),
            at.count_words);
      } else {
        count_contiguous<<<num_blocks(num_seeds + 1, kCountThreads), kCountThreads, 0, device_.stream()>>>(
            request(hop, r), num_found, at.rows, nullptr, at.offsets, report, at.count_words);
      }
      CUDA_CHECK_LAUNCH();
    });
  }

  // Waits for a hop's sizes: its seeds (which the hop before found) and its edges.
  void learn(size_t hop) {
    std::vector<word_t> words(static_cast<size_t>(told_words_));
    device_.read(words.data(), told(hop).words, told_words_);
    const Told said{words.data(), static_cast<int64_t>(num_types_)};
    if (hop > 0) {
      check_id_fault(*said.fault(), numbering_.is_wide());
      for (size_t t = 0; t < num_types_; ++t) {
        const word_t count = said.fresh()[t];
        hops_[hop].frontiers[t].size = count == kEmpty ? 0 : static_cast<int64_t>(count);
      }
    }
    for_counted(hop, [&](size_t r, HopEdges<id_t>& at, int64_t) {
      const Report& report = *said.report(r);
      check_report(device_, request(hop, r), report);
      check_labor_sources(report, relations_[r].num_src);
      at.total = static_cast<int64_t>(report.total);
    });
  }

  // Takes a hop's edges and queues the counts of the next; false where there are none, and then no hop has any more.
  bool step(size_t hop) {
    learn(hop);
    Hop<id_t>& at = hops_[hop];
    Hop<id_t>& next = hops_[hop + 1];
    std::vector<int64_t> found(num_types_, 0);
    int64_t tiles = 0;
    for (size_t r = 0; r < relations_.size(); ++r) {
      found[relations_[r].src] += at.edges[r].total;
      tiles += num_tiles(at.edges[r].total);
    }
    if (tiles == 0) {
      return false;
    }
    for (size_t t = 0; t < num_types_; ++t) {
      const int64_t known = nodes_of(t);
      CHECK_ARG(known + found[t] < kMaxPositions, "a sample may have up to ", kMaxPositions - 1,
                " nodes and edges of a type, got ", known + found[t]);
      next.frontiers[t].first = known;
    }
    for (size_t t = 0; t < num_types_; ++t) {
      next.frontiers[t].size = found[t];  // a bound
    }
    const bool is_last = hop + 1 == num_hops_;
    if (!is_last) {
      choose_relations(hop + 1);
    }
    word_t* number_words = nullptr;
    std::vector<id_t*> fresh(num_types_);
    allocate([&](Places& places) {
      number_words = places.take<word_t>(num_scan_words(tiles));
      take_count_words(places, hop + 1);
      const int64_t cleared = places.size;
      for (HopEdges<id_t>& edges : at.edges) {
        edges.neighbors = places.take<id_t>(edges.total);
        edges.positions = places.take<int64_t>(edges.total);
        edges.local = places.take<int64_t>(edges.total);
        edges.slot_of = places.take<uint32_t>(edges.total);
      }
      for (size_t t = 0; t < num_types_; ++t) {
        fresh[t] = places.take<id_t>(found[t]);
      }
      take_rows(places, hop + 1);
      return cleared;
    });
    for (size_t r = 0; r < relations_.size(); ++r) {
      take_edges(hop, r);
    }
    numbering_.make_room(hops_, hop, found, told(hop + 1).fault());
    numbering_.number(hops_, hop, told(hop + 1), number_words, tiles, fresh);
    for (size_t t = 0; t < num_types_; ++t) {
      next.frontiers[t].ids = fresh[t];
    }
    queue_counts(hop + 1);
    return true;
  }

  void take_edges(size_t hop, size_t r) const {
    const HopEdges<id_t>& at = hops_[hop].edges[r];
    if (at.total == 0) {
      return;
    }
    if (labor_) {
      take_labor(device_, labor(hop, r, nullptr), at.offsets, at.neighbors, at.positions, nullptr);
    } else {
      choose(device_, request(hop, r), Contiguous<false>{at.rows, nullptr, nullptr}, at.offsets, at.total,
             at.neighbors, at.positions);
    }
  }

  const Device& device_;
  size_t num_hops_;
  size_t num_types_;
  bool labor_;
  const std::vector<int64_t>& num_nodes_;
  std::vector<PartEdges> parts_;  // of all relations
  std::vector<HopRelation<id_t>> relations_;
  int64_t told_words_;
  HopNumbering<id_t> numbering_;
  std::vector<Hop<id_t>> hops_;
  std::vector<Tensor> memory_;
  word_t* told_ = nullptr;  // [num_hops + 1, told_words]
  bool ended_early_ = false;
};

using HopsResult =
    std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>, Tensor, std::vector<Tensor>>;

HopsResult sample_hops(std::vector<Tensor> indptr, std::vector<Tensor> indices, std::vector<int64_t> num_parts,
                       std::vector<Tensor> halo, std::vector<Tensor> bounds, std::vector<Tensor> edge_ids,
                       std::vector<Tensor> original, std::vector<int64_t> ends, std::vector<int64_t> num_nodes,
                       std::vector<Tensor> seeds, std::vector<int64_t> fanouts, std::vector<int64_t> keys,
                       bool replace, bool labor, const Tensor& on) {
  CHECK_ARG(!(labor && replace), "LABOR draws without replacement: leave one of labor and replace away");
  CHECK_ARG(on.is_cuda(), "on must be a tensor on the device that samples");
  const Device device(on);
  const HopArguments given{std::move(indptr), std::move(indices),  std::move(num_parts), std::move(halo),
                           std::move(bounds), std::move(edge_ids), std::move(original),  std::move(ends),
                           std::move(num_nodes), std::move(seeds), std::move(fanouts),   std::move(keys),
                           replace,           labor};
  check_hops(given, device);
  const auto run = [&](auto id) -> HopsResult {
    Walk<decltype(id)> walk(device, given);
    walk.run(given.seeds);
    SampledEdges edges = walk.edges();
    std::vector<Tensor> nodes = walk.nodes();
    return {std::move(nodes), std::move(edges.edge_index), std::move(edges.edge_ids), walk.counts(),
            std::move(edges.weights)};
  };
  return has_wide_ids(given) ? run(int64_t{}) : run(int32_t{});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "sample_hops", &sample_hops); }

}  // namespace gnnsys::cuda
