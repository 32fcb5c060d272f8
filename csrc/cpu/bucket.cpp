// bucket_ids: groups ids by the range they fall into (the part that owns them), keeping their order.
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/owners.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kGrain = 1 << 14;

// Work: two passes over the ids. Bytes: ids read twice; 8 (order), 4 (bucket) and one id (local) written per id.
std::tuple<Tensor, Tensor, Tensor> bucket_ids(const Tensor& ids, const Tensor& bounds) {
  check_ids(ids, "ids");
  const int64_t num_buckets = check_bounds(bounds, "bounds");
  const auto* bound = const_data<int64_t>(bounds);
  check_id_range(ids, bound[num_buckets], "ids");
  const int64_t size = ids.numel();
  const int shares = num_shares_for(size, kGrain);
  Tensor counts = empty_cpu({num_buckets}, ScalarType::Long);
  Tensor order = empty_cpu({size}, ScalarType::Long);
  Tensor local = empty_cpu({size}, ids.scalar_type());
  auto* count = mutable_data<int64_t>(counts);
  auto* place = mutable_data<int64_t>(order);
  std::vector<int32_t> bucket(static_cast<size_t>(size));
  std::vector<int64_t> next(static_cast<size_t>(shares * num_buckets), 0);  // [share][bucket]
  dispatch_ids(ids, [&](auto id) {
    using id_t = decltype(id);
    const auto* in = const_data<id_t>(ids);
    auto* out = mutable_data<id_t>(local);
    for_shares(shares, [&](int s, int n) {
      const Range r = share_of(size, s, n);
      int64_t* mine = next.data() + s * num_buckets;
      for (int64_t begin = r.begin; begin < r.end; begin += kOwnerBlock) {
        const int64_t end = std::min(begin + kOwnerBlock, r.end);
        find_owners(in + begin, end - begin, bound, num_buckets, bucket.data() + begin);
        for (int64_t i = begin; i < end; ++i) {
          ++mine[bucket[static_cast<size_t>(i)]];
        }
      }
    });
    int64_t first = 0;
    for (int64_t b = 0; b < num_buckets; ++b) {
      const int64_t begin = first;
      for (int s = 0; s < shares; ++s) {
        const int64_t found = next[static_cast<size_t>(s * num_buckets + b)];
        next[static_cast<size_t>(s * num_buckets + b)] = first;
        first += found;
      }
      count[b] = first - begin;
    }
    for_shares(shares, [&](int s, int n) {
      const Range r = share_of(size, s, n);
      int64_t* mine = next.data() + s * num_buckets;
      for (int64_t i = r.begin; i < r.end; ++i) {
        const int64_t b = bucket[static_cast<size_t>(i)];
        const int64_t at = mine[b]++;
        place[at] = i;
        out[at] = static_cast<id_t>(in[i] - bound[b]);
      }
    });
  });
  return {counts, order, local};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "bucket_ids", &bucket_ids); }

}  // namespace gnnsys
