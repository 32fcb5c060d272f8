// sample_parts: some in-edges of each seed of a parted graph whose parts are all at hand, drawn uniformly.
//
// Seeds and answers are in global ids and stay in their order: a seed's part is looked up, its columns are read there,
// and neighbours get their global ids as they are read. What is drawn is what sample_neighbors draws for the original
// id. Work: as sample_neighbors, and one read of a part's halo per neighbour that lies there.
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/sample_arguments.h"
#include "common/tensors.h"
#include "cpu/far_reads.h"
#include "cpu/owners.h"
#include "cpu/sample_plain.h"

#include <atomic>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kEdgeBlock = 512;  // edges that are read at once: all about them stays in the first cache
constexpr int64_t kGroup = 256;  // seeds whose positions are all there before neighbours are read

// The columns of one part, which seeds are.
template <typename original_t>
struct Columns {
  const int64_t* indptr;
  const original_t* original;
  int64_t first_row;
  int64_t first_edge;
  int64_t num_edges;
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
template <typename id_t, typename columns_t>
void count_parts(const id_t* seeds, int64_t num_seeds, const int64_t* bound, const std::vector<columns_t>& parts,
                 const Request<int64_t>& q, int64_t* rng_ids, Row* rows, int64_t* offsets, Faults* faults) {
  parallel_for(num_seeds, kSeedsPerThread, [&](int64_t lo, int64_t hi) {
    const columns_t* const part = parts.data();
    int32_t owner[kOwnerBlock];
    for (int64_t block = lo; block < hi; block += kOwnerBlock) {
      const int64_t size = std::min(kOwnerBlock, hi - block);
      find_owners(seeds + block, size, bound, static_cast<int64_t>(parts.size()), owner);
      for (int64_t i = 0; i < size; ++i) {
        const columns_t& own = part[owner[i]];
        const int64_t row = seeds[block + i] - own.first_row;
        __builtin_prefetch(own.indptr + row);
        __builtin_prefetch(own.original + row);
      }
      for (int64_t i = 0; i < size; ++i) {
        const columns_t own = part[owner[i]];
        const int64_t row = seeds[block + i] - own.first_row;
        rows[block + i] = {own.indptr[row], own.indptr[row + 1]};
        rng_ids[block + i] = own.original[row];
      }
      for (int64_t i = 0; i < size; ++i) {
        const columns_t own = part[owner[i]];
        Row& row = rows[block + i];
        const bool good = check_row(row.begin, row.end, own.num_edges, seeds[block + i], faults);
        row = good ? Row{row.begin + own.first_edge, row.end + own.first_edge} : Row{0, 0};
        offsets[block + i + 1] = q.count(row.degree());
      }
    }
  });
}

// What reading a neighbour needs of its part: addresses as if indices were numbered by global edge and halo by local id.
struct Names {
  uintptr_t indices;
  uintptr_t halo;
  int64_t first;
  uint32_t num_core;
  uint32_t num_local;
};

template <typename T>
const T* address(uintptr_t base, uint64_t at) {
  return reinterpret_cast<const T*>(base + at * sizeof(T));
}

// Global ids of the sources of edges, at most kEdgeBlock of them; false where a local id is neither core nor halo.
// Nothing branches on what was read: the part follows from the edge, and a core neighbour reads the first entry of the
// halo in vain.
template <typename halo_t, typename id_t>
bool name_sources(const Names* names, const int64_t* bounds, int64_t num_parts, const int64_t* edges, int64_t size,
                  id_t* out) {
  int32_t owner[kEdgeBlock];
  const uint32_t* index_at[kEdgeBlock];
  uint32_t local[kEdgeBlock];
  const halo_t* halo_at[kEdgeBlock];
  halo_t listed[kEdgeBlock];
  find_owners(edges, size, bounds, num_parts, owner);
  for (int64_t e = 0; e < size; ++e) {
    index_at[e] = address<uint32_t>(names[owner[e]].indices, static_cast<uint64_t>(edges[e]));
  }
  read_far(size, local, [&](int64_t e) { return *index_at[e]; });
  uint32_t outside = 0;
  for (int64_t e = 0; e < size; ++e) {
    const Names& own = names[owner[e]];
    const uint32_t is_listed = static_cast<uint32_t>(local[e] >= own.num_core) & (local[e] < own.num_local);
    outside |= static_cast<uint32_t>(local[e] >= own.num_local);
    halo_at[e] = address<halo_t>(own.halo, own.num_core + (local[e] - own.num_core) * is_listed);
  }
  read_far(size, listed, [&](int64_t e) { return *halo_at[e]; });
  for (int64_t e = 0; e < size; ++e) {
    const Names& own = names[owner[e]];
    const auto core = static_cast<id_t>(own.first + local[e]);
    out[e] = local[e] < own.num_core ? core : static_cast<id_t>(listed[e]);
  }
  return outside == 0;
}

template <typename halo_t, typename id_t>
bool fill_parts(const Request<int64_t>& q, const std::vector<Names>& names, const int64_t* edge_bounds, const Row* rows,
                const int64_t* offsets, id_t* neighbors, int64_t* edges) {
  std::atomic<bool> whole{true};
  parallel_for(q.num_seeds, kSeedsPerThread, [&](int64_t lo, int64_t hi) {
    PlainWriter<int64_t> writer(q, rows, offsets, edges);
    bool known = true;
    for (int64_t group = lo; group < hi; group += kGroup) {
      const int64_t group_end = std::min(group + kGroup, hi);
      for (int64_t i = group; i < group_end; ++i) {
        writer.write(i);
      }
      writer.flush();
      for (int64_t e = offsets[group]; e < offsets[group_end]; e += kEdgeBlock) {
        known &= name_sources<halo_t>(names.data(), edge_bounds, static_cast<int64_t>(names.size()), edges + e,
                                      std::min(kEdgeBlock, offsets[group_end] - e), neighbors + e);
      }
    }
    if (!known) {
      whole = false;
    }
  });
  return whole;
}

using Tensors = const std::vector<Tensor>&;

template <typename original_t>
std::vector<Columns<original_t>> make_columns(const Bounds& bounds, Tensors indptr, Tensors indices,
                                              Tensors original) {
  std::vector<Columns<original_t>> columns;
  for (size_t p = 0; p < indptr.size(); ++p) {
    columns.push_back({const_data<int64_t>(indptr[p]), const_data<original_t>(original[p]),
                       Bounds::first(bounds.dst, p), Bounds::first(bounds.edge, p), indices[p].numel()});
  }
  return columns;
}

template <typename halo_t>
std::vector<Names> make_names(const Bounds& bounds, Tensors indices, Tensors halo) {
  static const halo_t none = 0;  // an empty halo has no address to read from
  const auto shifted = [](const auto* data, int64_t first) {
    return reinterpret_cast<uintptr_t>(data) - static_cast<uintptr_t>(first) * sizeof(*data);
  };
  std::vector<Names> names;
  for (size_t p = 0; p < indices.size(); ++p) {
    const int64_t num_core = Bounds::size(bounds.src, p);
    const auto* listed = halo[p].numel() ? const_data<halo_t>(halo[p]) : &none;
    names.push_back({shifted(const_data<int32_t>(indices[p]), Bounds::first(bounds.edge, p)), shifted(listed, num_core),
                     Bounds::first(bounds.src, p), static_cast<uint32_t>(num_core),
                     static_cast<uint32_t>(num_core + halo[p].numel())});
  }
  return names;
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
  check_fanout(fanout);
  const int64_t num_seeds = seeds.numel();
  std::vector<int64_t> rng_ids(static_cast<size_t>(num_seeds));
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
  Faults faults;
  dispatch_ids(original[0], [&](auto original_id) {
    const auto columns = make_columns<decltype(original_id)>(bounds, indptr, indices, original);
    dispatch_ids(seeds, [&](auto id) {
      count_parts(const_data<decltype(id)>(seeds), num_seeds, const_data<int64_t>(dst_bounds), columns, q,
                  rng_ids.data(), rows.data(), offset, &faults);
    });
  });
  faults.raise();
  const int64_t total = prefix_sum(offset, num_seeds);
  Tensor neighbors = empty_cpu({total}, wide ? ScalarType::Long : ScalarType::Int);
  Tensor edges = empty_cpu({total}, ScalarType::Long);
  bool whole = true;
  dispatch_ids(halo[0], [&](auto halo_id) {
    const auto names = make_names<decltype(halo_id)>(bounds, indices, halo);
    dispatch_ids(neighbors, [&](auto id) {
      whole = fill_parts<decltype(halo_id)>(q, names, const_data<int64_t>(edge_bounds), rows.data(), offset,
                                            mutable_data<decltype(id)>(neighbors), mutable_data<int64_t>(edges));
    });
  });
  CHECK_ARG(whole, "indices must name core and halo nodes of their part, some name neither");
  return {offsets, neighbors, edges};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "sample_parts", &sample_parts); }

}  // namespace gnnsys
