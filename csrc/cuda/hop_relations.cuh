// The relations that sample_hops is given: checked on the host, and as kernels read them.
#pragma once

#include "common/sample_arguments.h"
#include "common/tensors.h"
#include "cuda/sample.cuh"

#include <limits>
#include <vector>

namespace gnnsys::cuda {

constexpr int64_t kMaxParts = 64;  // looked through one after the other for every edge

// The op's arguments: lists have an entry per relation or per node type, and those of parts an entry per part.
struct HopArguments {
  std::vector<Tensor> indptr;
  std::vector<Tensor> indices;     // of a relation one array of ids, or one of local ids for each part
  std::vector<int64_t> num_parts;  // per relation; 0: ids
  std::vector<Tensor> halo;        // for each part
  std::vector<Tensor> bounds;      // for each relation in parts, on the host
  std::vector<Tensor> edge_ids;    // per relation; an empty one: positions
  std::vector<Tensor> original;    // per node type, or none at all
  std::vector<int64_t> ends;       // node types of each relation: source, destination
  std::vector<int64_t> num_nodes;  // per node type
  std::vector<Tensor> seeds;       // per node type, on the host
  std::vector<int64_t> fanouts;    // per relation and hop, hops side by side
  std::vector<int64_t> keys;
  bool replace;
  bool labor;

  size_t num_relations() const { return indptr.size(); }
  size_t num_types() const { return num_nodes.size(); }
  size_t num_hops() const { return fanouts.size() / num_relations(); }
};

// Ids of nodes or edges, of either width; null where they are not given.
struct EitherIds {
  const void* ids = nullptr;
  bool wide = false;

  explicit EitherIds(const Tensor& t)
      : ids(t.numel() > 0 ? t.const_data_ptr() : nullptr), wide(t.scalar_type() == ScalarType::Long) {}
  EitherIds() = default;
};

template <typename id_t>
struct HopRelation {
  size_t src;
  size_t dst;
  Request<id_t> request;  // without seeds, fanout and key
  EitherIds edge_ids;
  EitherIds source_ids;  // original ids of the sources
  int64_t num_src;
  const int64_t* fanouts;  // [num_hops]
  const int64_t* keys;
  size_t first_part;  // in the list of all relations' parts
};

// Parts as they are stored. `bounds` is of sources, then of edges, one entry more than there are parts each.
inline void add_parts(const Device& device, const Tensor* indices, const Tensor* halo, int64_t num_parts,
                      const Tensor& bounds, std::vector<PartEdges>& parts) {
  CHECK_ARG(num_parts <= kMaxParts, "there may be up to ", kMaxParts, " parts, got ", num_parts);
  CHECK_ARG(bounds.is_cpu() && bounds.is_contiguous() && bounds.dim() == 2 && bounds.size(0) == 2 &&
                bounds.size(1) == num_parts + 1,
            "bounds must be [2, num_parts + 1] on the host: of sources and of edges");
  check_dtype(bounds, ScalarType::Long, "bounds");
  const auto* const first = const_data<int64_t>(bounds);
  const auto* const first_edge = first + num_parts + 1;
  for (int64_t p = 0; p < num_parts; ++p) {
    const Tensor& of_edges = indices[p];
    const Tensor& listed = halo[p];
    check_readable(listed, device, "halo");
    check_dtype(of_edges, ScalarType::Int, "indices");
    check_index_dtype(listed, "halo");
    const int64_t num_core = first[p + 1] - first[p];
    CHECK_ARG(num_core >= 0 && first[p] >= 0, "bounds of sources must ascend from 0");
    CHECK_ARG(first_edge[0] == 0 && first_edge[p + 1] - first_edge[p] == of_edges.numel(), "part ", p, " must have ",
              first_edge[p + 1] - first_edge[p], " edges, got ", of_edges.numel());
    parts.push_back({const_data<int32_t>(of_edges), listed.const_data_ptr(), first_edge[p], first[p], num_core,
                     num_core + listed.numel(), listed.scalar_type() == ScalarType::Long});
  }
}

// 32-bit ids of a relation among others with 64: a part that has all sources.
inline PartEdges narrow_edges(const Tensor& indices) {
  return {const_data<int32_t>(indices), nullptr, 0, 0, kAllSources, kAllSources, false};
}

// That lists are as long as they should be; what is in them is checked relation by relation.
inline void check_hops(const HopArguments& given, const Device& device) {
  const size_t num_relations = given.num_relations();
  const size_t num_types = given.num_types();
  CHECK_ARG(num_relations > 0 && num_types > 0, "there must be a relation and a node type, got ", num_relations,
            " and ", num_types);
  CHECK_ARG(given.num_parts.size() == num_relations && given.edge_ids.size() == num_relations &&
                given.ends.size() == 2 * num_relations,
            "num_parts and edge_ids must have an entry for each of ", num_relations, " relations, and ends two, got ",
            given.num_parts.size(), ", ", given.edge_ids.size(), " and ", given.ends.size());
  size_t num_arrays = 0;
  size_t num_halos = 0;
  size_t num_bounds = 0;
  for (const int64_t count : given.num_parts) {
    CHECK_ARG(count >= 0, "num_parts must be 0 for ids as they are, or the number of parts, got ", count);
    num_arrays += count > 0 ? static_cast<size_t>(count) : 1;
    num_halos += static_cast<size_t>(count);
    num_bounds += count > 0 ? 1 : 0;
  }
  CHECK_ARG(given.indices.size() == num_arrays && given.halo.size() == num_halos && given.bounds.size() == num_bounds,
            "indices, halo and bounds must have ", num_arrays, ", ", num_halos, " and ", num_bounds,
            " entries as num_parts says, got ", given.indices.size(), ", ", given.halo.size(), " and ",
            given.bounds.size());
  CHECK_ARG(given.seeds.size() == num_types, "seeds must have an entry for each of ", num_types, " node types, got ",
            given.seeds.size());
  CHECK_ARG(given.original.empty() || given.original.size() == num_types,
            "original must have an entry for each of ", num_types, " node types, or none, got ",
            given.original.size());
  CHECK_ARG(!given.fanouts.empty() && given.fanouts.size() % num_relations == 0 &&
                given.keys.size() == given.fanouts.size(),
            "there must be a fanout and a key per relation and hop, and a hop, got ", given.fanouts.size(),
            " fanouts and ", given.keys.size(), " keys for ", num_relations, " relations");
  for (const int64_t fanout : given.fanouts) {
    check_fanout(fanout);
  }
  for (size_t t = 0; t < num_types; ++t) {
    CHECK_ARG(given.num_nodes[t] >= 0, "num_nodes must not be negative, got ", given.num_nodes[t]);
    ::gnnsys::check_vector(given.seeds[t], "seeds");  // on the host
    check_dtype(given.seeds[t], ScalarType::Long, "seeds");
    if (!given.original.empty()) {
      const Tensor& original = given.original[t];
      check_readable(original, device, "original");
      check_index_dtype(original, "original");
      CHECK_ARG(original.dim() == 1 && original.numel() == given.num_nodes[t],
                "original must have one id per node, ", given.num_nodes[t], ", got ", original.numel());
    }
  }
}

// Whether ids are kept as 64 bits: those of all types alike.
inline bool has_wide_ids(const HopArguments& given) {
  for (const int64_t count : given.num_nodes) {
    if (count - 1 > std::numeric_limits<int32_t>::max()) {
      return true;
    }
  }
  for (const Tensor& of_edges : given.indices) {
    if (of_edges.scalar_type() == ScalarType::Long) {
      return true;
    }
  }
  return false;
}

// Checks the relations and says how kernels read them; what lies in parts is added to `parts`.
template <typename id_t>
std::vector<HopRelation<id_t>> hop_relations(const HopArguments& given, const Device& device,
                                             std::vector<PartEdges>& parts) {
  std::vector<HopRelation<id_t>> relations;
  const auto num_types = static_cast<int64_t>(given.num_types());
  const Tensor* indices = given.indices.data();
  const Tensor* halo = given.halo.data();
  const Tensor* bounds = given.bounds.data();
  for (size_t r = 0; r < given.num_relations(); ++r) {
    const int64_t src = given.ends[2 * r];
    const int64_t dst = given.ends[2 * r + 1];
    CHECK_ARG(src >= 0 && src < num_types && dst >= 0 && dst < num_types, "ends must be node types, in [0, ",
              num_types, "), got ", src, " and ", dst);
    HopRelation<id_t> relation{};
    relation.src = static_cast<size_t>(src);
    relation.dst = static_cast<size_t>(dst);
    relation.num_src = given.num_nodes[relation.src];
    relation.fanouts = given.fanouts.data() + r * given.num_hops();
    relation.keys = given.keys.data() + r * given.num_hops();
    relation.first_part = parts.size();
    const int64_t num_parts = given.num_parts[r];
    const int64_t num_arrays = num_parts > 0 ? num_parts : 1;
    Request<id_t>& q = relation.request;
    for (int64_t p = 0; p < num_arrays; ++p) {
      check_csc(given.indptr[r], indices[p], device);
      q.num_edges += indices[p].numel();
    }
    if (num_parts > 0) {
      add_parts(device, indices, halo, num_parts, *bounds++, parts);
    } else if (indices->scalar_type() == id_type<id_t>()) {
      q.indices.ids = const_data<id_t>(*indices);
    } else {
      parts.push_back(narrow_edges(*indices));  // ids are wide where any are
    }
    indices += num_arrays;
    halo += num_parts;
    q.indices.num_parts = static_cast<int>(parts.size() - relation.first_part);
    q.indptr = const_data<int64_t>(given.indptr[r]);
    q.num_rows = given.indptr[r].numel() - 1;
    q.replace = given.replace;
    CHECK_ARG(q.num_rows == given.num_nodes[relation.dst], "indptr must have ", given.num_nodes[relation.dst] + 1,
              " entries, one more than there are destinations, got ", q.num_rows + 1);
    const Tensor& edge_ids = given.edge_ids[r];
    check_readable(edge_ids, device, "edge_ids");
    check_index_dtype(edge_ids, "edge_ids");
    CHECK_ARG(edge_ids.dim() == 1 && (edge_ids.numel() == 0 || edge_ids.numel() == q.num_edges),
              "edge_ids must have one entry per edge, ", q.num_edges, ", or none, got ", edge_ids.numel());
    relation.edge_ids = EitherIds(edge_ids);
    if (!given.original.empty()) {
      const EitherIds original(given.original[relation.dst]);
      q.original = original.ids;
      q.wide_original = original.wide;
      relation.source_ids = EitherIds(given.original[relation.src]);
    }
    relations.push_back(relation);
  }
  return relations;
}

}  // namespace gnnsys::cuda
