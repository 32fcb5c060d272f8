// Range check of a whole array of ids, once, before a loop trusts them. One read of the array.
#pragma once

#include "common/check.h"
#include "common/parallel.h"
#include "common/prefetch.h"

#include <algorithm>
#include <atomic>

namespace gnnsys {

constexpr int64_t kIdGrain = 1 << 16;
constexpr int64_t kColumnsAhead = 16;

// The position of the first id outside [0, limit), or -1. As unsigned, a negative id is a huge one: above every id of
// its own width, though not above a limit that is wider.
template <typename id_t>
int64_t first_outside(const id_t* ids, int64_t size, int64_t limit) {
  using unsigned_t = std::make_unsigned_t<id_t>;
  const uint64_t beyond_width = uint64_t{1} << (8 * sizeof(id_t) - 1);
  const uint64_t bound = limit < 0 ? 0 : std::min(static_cast<uint64_t>(limit), beyond_width);
  std::atomic<bool> outside{false};
  parallel_for(size, kIdGrain, [&](int64_t begin, int64_t end) {
    unsigned_t largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      largest = std::max(largest, static_cast<unsigned_t>(ids[i]));
    }
    if (begin < end && static_cast<uint64_t>(largest) >= bound) {
      outside = true;
    }
  });
  if (!outside) {
    return -1;
  }
  int64_t i = 0;
  while (static_cast<uint64_t>(static_cast<unsigned_t>(ids[i])) < bound) {
    ++i;
  }
  return i;
}

// ValueError unless every id is in [0, limit): "dst must be in [0, 10), got 12 at position 3".
inline void check_id_range(const Tensor& ids, int64_t limit, const char* name) {
  dispatch_ids(ids, [&](auto id) {
    using id_t = decltype(id);
    const auto* data = const_data<id_t>(ids);
    const int64_t bad = first_outside(data, ids.numel(), limit);
    CHECK_ARG(bad < 0, name, " must be in [0, ", limit, "), got ", data[bad], " at position ", bad);
  });
}

// ValueError unless indptr ascends. One read of it.
inline void check_monotone(const Tensor& indptr) {
  const auto* p = const_data<int64_t>(indptr);
  const int64_t bad = std::is_sorted_until(p, p + indptr.numel()) - p;
  CHECK_ARG(bad == indptr.numel(), "indptr must never decrease, got ", p[bad - 1], " then ", p[bad], " at position ",
            bad);
}

// The same for the columns of `nodes` alone: what a loop over them trusts, at the price of visiting them.
inline void check_columns(const Tensor& indptr, const Tensor& nodes, int64_t num_edges) {
  const auto* p = const_data<int64_t>(indptr);
  dispatch_ids(nodes, [&](auto id) {
    const auto* column = const_data<decltype(id)>(nodes);
    const int64_t size = nodes.numel();
    for (int64_t i = 0; i < size; ++i) {
      prefetch_read(p + column[std::min(i + kColumnsAhead, size - 1)], 2 * sizeof(int64_t));
      const int64_t begin = p[column[i]];
      const int64_t end = p[column[i] + 1];
      CHECK_ARG(begin >= 0 && begin <= end && end <= num_edges, "indptr must ascend from 0 to len(indices) = ",
                num_edges, ", at node ", static_cast<int64_t>(column[i]), " it goes from ", begin, " to ", end);
    }
  });
}

}  // namespace gnnsys
