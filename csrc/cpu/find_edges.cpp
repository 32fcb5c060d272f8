// find_edges: from pairs of nodes to positions in a CSC.
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"

#include <algorithm>
#include <vector>

namespace gnnsys {
namespace {

// Positions of all edges src[i] -> dst[i], ascending and without repeats. Work: the in-degree of each dst.
Tensor find_edges(const Tensor& indptr, const Tensor& indices, const Tensor& src, const Tensor& dst) {
  check_csc(indptr, indices);
  check_ids(src, "src");
  check_ids(dst, "dst");
  CHECK_ARG(src.numel() == dst.numel(), "src and dst must have equal lengths, got ", src.numel(), " and ", dst.numel());
  CHECK_ARG(src.scalar_type() == indices.scalar_type() && dst.scalar_type() == indices.scalar_type(),
            "src and dst must have the dtype of indices, ", dtype_name(indices.scalar_type()));
  return dispatch_ids(indices, [&](auto id) {
    using id_t = decltype(id);
    const auto* row = const_data<int64_t>(indptr);
    const auto* neighbor = const_data<id_t>(indices);
    const auto* from = const_data<id_t>(src);
    const auto* to = const_data<id_t>(dst);
    const int64_t size = src.numel();
    check_id_range(dst, indptr.numel() - 1, "dst");
    check_columns(indptr, dst, indices.numel());
    const int shares = num_shares_for(size, 64);
    std::vector<std::vector<int64_t>> found(static_cast<size_t>(shares));
    for_shares(shares, [&](int s, int n) {
      const Range r = share_of(size, s, n);
      auto& mine = found[static_cast<size_t>(s)];
      for (int64_t i = r.begin; i < r.end; ++i) {
        for (int64_t p = row[to[i]]; p < row[to[i] + 1]; ++p) {
          if (neighbor[p] == from[i]) {
            mine.push_back(p);
          }
        }
      }
    });
    std::vector<int64_t> all;
    for (const auto& part : found) {
      all.insert(all.end(), part.begin(), part.end());
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    Tensor out = empty_cpu({static_cast<int64_t>(all.size())}, ScalarType::Long);
    std::copy(all.begin(), all.end(), mutable_data<int64_t>(out));
    return out;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "find_edges", &find_edges); }

}  // namespace gnnsys
