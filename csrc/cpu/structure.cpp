// Making and turning CSC: coo -> csc, transpose, degrees, and the check that a CSC is one.
#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/group.h"

#include <limits>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

// Calls body(id_t{}, pos_t{}): ids as asked for, positions no narrower than num_edges needs.
template <typename Body>
void dispatch_output(bool narrow_ids, int64_t num_edges, const Body& body) {
  if (!narrow_ids) {
    body(int64_t{}, int64_t{});
  } else if (num_edges <= kInt32Max) {
    body(int32_t{}, int32_t{});
  } else {
    body(int32_t{}, int64_t{});
  }
}

struct Grouped {
  Tensor indptr;
  Tensor values;
  Tensor positions;
};

template <typename Edges>
Grouped group(const Edges& edges, int64_t num_edges, int64_t num_groups, bool narrow) {
  Grouped out{empty_cpu({num_groups + 1}, ScalarType::Long), Tensor{}, Tensor{}};
  dispatch_output(narrow, num_edges, [&](auto id, auto pos) {
    using id_t = decltype(id);
    using pos_t = decltype(pos);
    out.values = empty_cpu({num_edges}, id_type<id_t>());
    out.positions = empty_cpu({num_edges}, id_type<pos_t>());
    group_edges(edges, num_edges,
                Groups<id_t, pos_t>{num_groups, mutable_data<int64_t>(out.indptr), mutable_data<id_t>(out.values),
                                    mutable_data<pos_t>(out.positions)});
  });
  return out;
}

// Edges that come sorted by destination need no permutation: edge_ids stays empty, indices are a copy of src.
template <typename in_t>
Grouped from_sorted(const in_t* src, const in_t* dst, int64_t num_edges, int64_t num_dst, bool narrow) {
  const ScalarType type = narrow ? ScalarType::Int : ScalarType::Long;
  Grouped out{empty_cpu({num_dst + 1}, ScalarType::Long), empty_cpu({num_edges}, type), empty_cpu({0}, type)};
  auto* const indptr = mutable_data<int64_t>(out.indptr);
  parallel_for(num_dst + 1, 1 << 12, [&](int64_t begin, int64_t end) {
    const in_t* at = std::lower_bound(dst, dst + num_edges, begin);
    for (int64_t v = begin; v < end; ++v) {
      while (at != dst + num_edges && static_cast<int64_t>(*at) < v) {
        ++at;
      }
      indptr[v] = at - dst;
    }
  });
  dispatch_output(narrow, 0, [&](auto id, auto) {
    auto* const indices = mutable_data<decltype(id)>(out.values);
    parallel_for(num_edges, kIdGrain, [&](int64_t begin, int64_t end) {
      std::copy(src + begin, src + end, indices + begin);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> coo_to_csc(const Tensor& src, const Tensor& dst, int64_t num_src, int64_t num_dst,
                                              bool narrow) {
  check_ids(src, "src");
  check_ids(dst, "dst");
  CHECK_ARG(src.scalar_type() == dst.scalar_type(), "src and dst must have one dtype, got ",
            dtype_name(src.scalar_type()), " and ", dtype_name(dst.scalar_type()));
  CHECK_ARG(src.numel() == dst.numel(), "src and dst must be equally long, got ", src.numel(), " and ", dst.numel());
  CHECK_ARG(num_src >= 0 && num_dst >= 0, "num_src and num_dst must be >= 0, got ", num_src, " and ", num_dst);
  check_id_range(src, num_src, "src");
  check_id_range(dst, num_dst, "dst");
  const int64_t num_edges = src.numel();
  narrow = src.scalar_type() == ScalarType::Int || (narrow && num_src <= kInt32Max && num_edges <= kInt32Max);
  const Grouped out = dispatch_ids(src, [&](auto id) {
    using in_t = decltype(id);
    const auto* from = const_data<in_t>(src);
    const auto* to = const_data<in_t>(dst);
    if (std::is_sorted(to, to + num_edges)) {
      return from_sorted(from, to, num_edges, num_dst, narrow);
    }
    return group(CooEdges<in_t>{to, from}, num_edges, num_dst, narrow);
  });
  return {out.indptr, out.values, out.positions};
}

void validate_csc(const Tensor& indptr, const Tensor& indices, int64_t num_src) {
  check_csc(indptr, indices);
  check_monotone(indptr);
  check_id_range(indices, num_src, "indices");
}

std::tuple<Tensor, Tensor, Tensor> transpose(const Tensor& indptr, const Tensor& indices, int64_t num_src) {
  CHECK_ARG(num_src >= 0, "num_src must be >= 0, got ", num_src);
  validate_csc(indptr, indices, num_src);
  const int64_t num_dst = indptr.numel() - 1;
  // The values of the result are columns: they may need more than the 32 bits that held the row indices.
  const bool narrow = indices.scalar_type() == ScalarType::Int && num_dst <= kInt32Max;
  const Grouped out = dispatch_ids(indices, [&](auto id) {
    using in_t = decltype(id);
    return group(CscEdges<in_t>{const_data<int64_t>(indptr), num_dst, const_data<in_t>(indices)}, indices.numel(),
                 num_src, narrow);
  });
  return {out.indptr, out.values, out.positions};
}

// Counts per id. Threads count into arrays of their own, as many as the ids pay for, and add them up.
Tensor degrees(const Tensor& ids, int64_t num_nodes) {
  check_ids(ids, "ids");
  CHECK_ARG(num_nodes >= 0, "num_nodes must be >= 0, got ", num_nodes);
  check_id_range(ids, num_nodes, "ids");
  const Tensor out = empty_cpu({num_nodes}, ScalarType::Long);
  auto* const counts = mutable_data<int64_t>(out);
  std::fill_n(counts, num_nodes, 0);
  const int threads = num_threads_for(ids.numel(), std::max(kIdGrain, num_nodes));
  std::vector<int64_t> others((threads - 1) * num_nodes, 0);
  dispatch_ids(ids, [&](auto id) {
    const auto* data = const_data<decltype(id)>(ids);
    for_shares(threads, [&](int t, int n) {
      const Range r = share_of(ids.numel(), t, n);
      int64_t* const mine = t == 0 ? counts : others.data() + (t - 1) * num_nodes;
      for (int64_t i = r.begin; i < r.end; ++i) {
        ++mine[data[i]];
      }
    });
  });
  for (int t = 1; t < threads; ++t) {
    const int64_t* const other = others.data() + (t - 1) * num_nodes;
    parallel_for(num_nodes, kIdGrain, [&](int64_t begin, int64_t end) {
      std::transform(counts + begin, counts + end, other + begin, counts + begin, std::plus<>{});
    });
  }
  return out;
}

// The column of each edge, from `first` on: out[e] = first + c for indptr[c] <= e < indptr[c + 1].
void expand_indptr(const Tensor& indptr, int64_t first, Tensor out) {
  check_vector(indptr, "indptr");
  check_dtype(indptr, ScalarType::Long, "indptr");
  check_vector(out, "out");
  check_dtype(out, ScalarType::Long, "out");
  CHECK_ARG(indptr.numel() >= 1, "indptr must have at least one entry");
  check_monotone(indptr);
  const auto* begin = const_data<int64_t>(indptr);
  const int64_t num_columns = indptr.numel() - 1;
  CHECK_ARG(begin[0] == 0 && begin[num_columns] == out.numel(), "indptr must go from 0 to len(out) = ", out.numel());
  CHECK_ARG(first <= std::numeric_limits<int64_t>::max() - num_columns, "first must leave room for ", num_columns,
            " columns, got ", first);
  auto* const to = mutable_data<int64_t>(out);
  parallel_for(num_columns, 1 << 12, [=](int64_t lo, int64_t hi) {
    for (int64_t c = lo; c < hi; ++c) {
      const int64_t end = begin[c + 1];
      for (int64_t e = begin[c]; e < end; ++e) {
        to[e] = first + c;
      }
    }
  });
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "coo_to_csc", &gnnsys::coo_to_csc);
  REGISTER_OP(m, "transpose", &gnnsys::transpose);
  REGISTER_OP(m, "degrees", &gnnsys::degrees);
  REGISTER_OP(m, "expand_indptr", &gnnsys::expand_indptr);
  REGISTER_OP(m, "validate_csc", &gnnsys::validate_csc);
}
