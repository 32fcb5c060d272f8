// sample_parts: some in-edges of each seed of a parted graph whose parts are all at hand, drawn uniformly.
//
// Seeds and answers are in global ids and stay in their order: a seed's part is looked up, its columns are read there,
// and neighbours get their global ids as they are read. What is drawn is what sample_neighbors draws for the original
// id. Work: as sample_neighbors, and one read of a part's halo per neighbour that lies there.
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "cpu/owners.h"
#include "cpu/sample_plain.h"

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kGroup = 256;  // seeds whose positions are all there before neighbours are read

// One part: local ids below num_core are core nodes, which follow `first`; the others are listed in `halo`.
template <typename original_t, typename halo_t>
struct Part {
  const int64_t* indptr;
  const int32_t* indices;
  const original_t* original;
  const halo_t* halo;
  int64_t first_row;
  int64_t first_edge;
  int64_t num_edges;
  int64_t first;
  uint32_t num_core;
  uint32_t num_local;
};

struct Bounds {
  const Tensor& dst;
  const Tensor& src;
  const Tensor& edge;

  static int64_t size(const Tensor& bounds, size_t p) { return first(bounds, p + 1) - first(bounds, p); }
  static int64_t first(const Tensor& bounds, size_t p) { return const_data<int64_t>(bounds)[p]; }
};

void check_part(const Bounds& bounds, size_t p, const Tensor& indptr, const Tensor& indices, const Tensor& original,
                const Tensor& halo) {
  check_csc(indptr, indices);
  check_dtype(indices, ScalarType::Int, "indices");
  check_ids(original, "original");
  check_ids(halo, "halo");
  CHECK_ARG(indptr.numel() - 1 == Bounds::size(bounds.dst, p), "part ", p, " must have ", Bounds::size(bounds.dst, p),
            " columns, got ", indptr.numel() - 1);
  CHECK_ARG(indices.numel() == Bounds::size(bounds.edge, p), "part ", p, " must have ", Bounds::size(bounds.edge, p),
            " edges, got ", indices.numel());
  CHECK_ARG(original.numel() >= Bounds::size(bounds.dst, p), "original must have an id for each of the ",
            Bounds::size(bounds.dst, p), " columns of part ", p, ", got ", original.numel());
  CHECK_ARG(Bounds::size(bounds.src, p) + halo.numel() <= std::numeric_limits<int32_t>::max(), "part ", p,
            " must have fewer than 2^31 local nodes");
}

// Seeds as rows of their parts. Random reads stand in a loop without branches on what is read, so that they overlap.
template <typename id_t, typename part_t>
void count_parts(const id_t* seeds, int64_t num_seeds, const int64_t* bound, const std::vector<part_t>& parts,
                 const Request<int64_t>& q, int32_t* owner, int64_t* rng_ids, Row* rows, int64_t* offsets,
                 Faults* faults) {
  parallel_for(num_seeds, kSeedsPerThread, [&](int64_t lo, int64_t hi) {
    for (int64_t begin = lo; begin < hi; begin += kOwnerBlock) {
      find_owners(seeds + begin, std::min(kOwnerBlock, hi - begin), bound, static_cast<int64_t>(parts.size()),
                  owner + begin);
    }
    const part_t* const part = parts.data();
    for (int64_t i = lo; i < hi; ++i) {
      const part_t& own = part[owner[i]];
      const int64_t row = seeds[i] - own.first_row;
      rows[i] = {own.indptr[row], own.indptr[row + 1] - own.indptr[row]};
      rng_ids[i] = own.original[row];
    }
    for (int64_t i = lo; i < hi; ++i) {
      const part_t& own = part[owner[i]];
      Row& row = rows[i];
      if (row.begin < 0 || row.degree < 0 || row.begin + row.degree > own.num_edges) {
        faults->bad_row = seeds[i];
        row = {0, 0};
      } else if (row.degree > kMaxDegree) {
        faults->huge_degree = seeds[i];
      }
      row.begin += own.first_edge;
      offsets[i + 1] = q.count(row.degree);
    }
  });
}

// Global ids of one seed's neighbours. Whether one is of the core is no branch: it would often be mispredicted.
template <typename id_t, typename part_t>
bool name_row(const part_t own, const int64_t* edges, int64_t size, id_t* out) {
  bool whole = true;
  for (int64_t e = 0; e < size; ++e) {
    const auto local = static_cast<uint32_t>(own.indices[edges[e] - own.first_edge]);
    const bool is_known = local < own.num_local;
    const bool is_halo = is_known && local >= own.num_core;
    const auto listed = static_cast<int64_t>(own.halo[is_halo ? local - own.num_core : 0]);
    out[e] = static_cast<id_t>(is_halo ? listed : own.first + local);
    whole &= is_known;
  }
  return whole;
}

template <typename id_t, typename part_t>
bool fill_parts(const Request<int64_t>& q, const std::vector<part_t>& parts, const int32_t* owner, const Row* rows,
                const int64_t* offsets, id_t* neighbors, int64_t* edges) {
  std::atomic<bool> whole{true};
  parallel_for(q.num_seeds, kSeedsPerThread, [&](int64_t lo, int64_t hi) {
    PlainWriter<int64_t> writer(q, rows, offsets, edges);
    for (int64_t group = lo; group < hi; group += kGroup) {
      const int64_t group_end = std::min(group + kGroup, hi);
      for (int64_t i = group; i < group_end; ++i) {
        writer.write(i);
      }
      writer.flush();
      bool known = true;
      for (int64_t i = group; i < group_end; ++i) {
        known &= name_row(parts[static_cast<size_t>(owner[i])], edges + offsets[i], offsets[i + 1] - offsets[i],
                          neighbors + offsets[i]);
      }
      if (!known) {
        whole = false;
      }
    }
  });
  return whole;
}

using Tensors = const std::vector<Tensor>&;

template <typename original_t, typename halo_t>
std::vector<Part<original_t, halo_t>> make_parts(const Bounds& bounds, Tensors indptr, Tensors indices,
                                                 Tensors original, Tensors halo) {
  static const halo_t none = 0;  // an empty halo has no address to read from
  std::vector<Part<original_t, halo_t>> parts;
  for (size_t p = 0; p < indptr.size(); ++p) {
    const int64_t num_core = Bounds::size(bounds.src, p);
    parts.push_back({const_data<int64_t>(indptr[p]), const_data<int32_t>(indices[p]),
                     const_data<original_t>(original[p]), halo[p].numel() ? const_data<halo_t>(halo[p]) : &none,
                     Bounds::first(bounds.dst, p), Bounds::first(bounds.edge, p), indices[p].numel(),
                     Bounds::first(bounds.src, p), static_cast<uint32_t>(num_core),
                     static_cast<uint32_t>(num_core + halo[p].numel())});
  }
  return parts;
}

std::tuple<Tensor, Tensor, Tensor> sample_parts(std::vector<Tensor> indptr, std::vector<Tensor> indices,
                                                std::vector<Tensor> original, std::vector<Tensor> halo,
                                                const Tensor& dst_bounds, const Tensor& src_bounds,
                                                const Tensor& edge_bounds, const Tensor& seeds, int64_t fanout,
                                                bool replace, int64_t key, std::optional<Tensor> tree, bool wide) {
  const auto num_parts = static_cast<size_t>(check_bounds(dst_bounds, "dst_bounds"));
  const Bounds bounds{dst_bounds, src_bounds, edge_bounds};
  CHECK_ARG(check_bounds(src_bounds, "src_bounds") == dst_bounds.numel() - 1 &&
                check_bounds(edge_bounds, "edge_bounds") == dst_bounds.numel() - 1,
            "src_bounds and edge_bounds must have as many entries as dst_bounds, ", dst_bounds.numel());
  CHECK_ARG(indptr.size() == num_parts && indices.size() == num_parts && original.size() == num_parts &&
                halo.size() == num_parts,
            "indptr, indices, original and halo must have one entry for each of ", num_parts, " parts");
  for (size_t p = 0; p < num_parts; ++p) {
    check_part(bounds, p, indptr[p], indices[p], original[p], halo[p]);
    check_dtype(original[p], original[0].scalar_type(), "original");
    check_dtype(halo[p], halo[0].scalar_type(), "halo");
  }
  CHECK_ARG(wide || Bounds::first(src_bounds, num_parts) <= std::numeric_limits<int32_t>::max(),
            "neighbours' ids need 64 bits: pass wide");
  check_ids(seeds, "seeds");
  check_id_range(seeds, Bounds::first(dst_bounds, num_parts), "seeds");
  CHECK_ARG(fanout >= -1 && fanout < (int64_t{1} << 28), "fanout must be -1 (all) or 0 to 2^28 - 1, got ", fanout);
  const int64_t num_seeds = seeds.numel();
  std::vector<int64_t> rng_ids(static_cast<size_t>(num_seeds));
  std::vector<int32_t> owner(static_cast<size_t>(num_seeds));
  std::vector<Row> rows(static_cast<size_t>(num_seeds));
  Request<int64_t> q{};
  q.num_seeds = num_seeds;
  q.fanout = fanout;
  q.replace = replace;
  q.key = static_cast<uint64_t>(key);
  q.wide_rng_ids = rng_ids.data();
  if (tree) {
    check_vector(*tree, "tree");
    check_dtype(*tree, ScalarType::Long, "tree");
    CHECK_ARG(tree->numel() == num_seeds, "tree must have ", num_seeds, " entries, got ", tree->numel());
    check_id_range(*tree, static_cast<int64_t>(kMaxTree) + 1, "tree");
    q.tree = const_data<int64_t>(*tree);
  }
  Tensor offsets = empty_cpu({num_seeds + 1}, ScalarType::Long);
  auto* const offset = mutable_data<int64_t>(offsets);
  Tensor neighbors, edges;
  bool whole = true;
  dispatch_ids(original[0], [&](auto original_id) {
    dispatch_ids(halo[0], [&](auto halo_id) {
      const auto parts = make_parts<decltype(original_id), decltype(halo_id)>(bounds, indptr, indices, original, halo);
      Faults faults;
      dispatch_ids(seeds, [&](auto id) {
        count_parts(const_data<decltype(id)>(seeds), num_seeds, const_data<int64_t>(dst_bounds), parts, q,
                    owner.data(), rng_ids.data(), rows.data(), offset, &faults);
      });
      faults.raise();
      offset[0] = 0;
      for (int64_t i = 0; i < num_seeds; ++i) {
        offset[i + 1] += offset[i];
      }
      neighbors = empty_cpu({offset[num_seeds]}, wide ? ScalarType::Long : ScalarType::Int);
      edges = empty_cpu({offset[num_seeds]}, ScalarType::Long);
      dispatch_ids(neighbors, [&](auto id) {
        whole = fill_parts(q, parts, owner.data(), rows.data(), offset, mutable_data<decltype(id)>(neighbors),
                           mutable_data<int64_t>(edges));
      });
    });
  });
  CHECK_ARG(whole, "indices must name core and halo nodes of their part, some name neither");
  return {offsets, neighbors, edges};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { m.impl("sample_parts", TORCH_BOX(&sample_parts)); }

}  // namespace gnnsys
