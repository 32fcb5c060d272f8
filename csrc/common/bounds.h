// Are all indices in range? One pass without branches, so that a check at the boundary costs a fraction of the
// gather it protects.
#pragma once

#include "common/check.h"
#include "common/parallel.h"

#include <atomic>
#include <cstdint>
#include <type_traits>

namespace gnnsys {

// ValueError naming the first index outside [0, bound). An index is in range exactly when neither it nor
// bound - 1 - index has its sign bit set; the loop only ORs, which every compiler vectorises.
template <typename id_t>
void check_bounds(const id_t* index, int64_t size, int64_t bound, const char* name) {
  using word = std::make_unsigned_t<id_t>;
  constexpr word kSign = word{1} << (8 * sizeof(word) - 1);
  const int64_t largest = std::min<int64_t>(bound - 1, std::numeric_limits<id_t>::max());
  std::atomic<bool> ok{true};
  parallel_for(size, 1 << 15, [&](int64_t begin, int64_t end) {
    word seen = 0;
    for (int64_t i = begin; i < end; ++i) {
      const word value = static_cast<word>(index[i]);
      seen |= value | (static_cast<word>(largest) - value);
    }
    if (seen & kSign) {
      ok.store(false, std::memory_order_relaxed);
    }
  });
  if (ok.load()) {
    return;
  }
  for (int64_t i = 0; i < size; ++i) {
    CHECK_ARG(index[i] >= 0 && index[i] < bound, name, "[", i, "] = ", index[i], " is out of range: must be in [0, ",
              bound, ")");
  }
}

inline void check_bounds(const Tensor& index, int64_t bound, const char* name) {
  dispatch_ids(index, [&](auto id) {
    check_bounds(const_data<decltype(id)>(index), index.numel(), bound, name);
  });
}

}  // namespace gnnsys
