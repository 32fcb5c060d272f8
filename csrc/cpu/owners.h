// Which of several ranges an id falls into: the part that owns it.
#pragma once

#include "common/check.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace gnnsys {

constexpr int64_t kOwnerBlock = 2048;  // ids whose owners are found at once, in the first cache
constexpr int64_t kFewOwners = 32;

// The owner of an id is the last one whose bound is not above it, so empty ranges are never chosen. With few owners
// it is a count of comparisons: the owners of a batch's ids alternate, and a search would mispredict at every step.
template <typename id_t>
void find_owners(const id_t* ids, int64_t size, const int64_t* bounds, int64_t num_owners, int32_t* out) {
  if (num_owners <= kFewOwners) {
    std::fill(out, out + size, 0);
    for (int64_t b = 1; b < num_owners; ++b) {
      // A bound that no id of this width reaches counts nothing.
      if (bounds[b] > std::numeric_limits<id_t>::max()) {
        break;
      }
      const auto bound = static_cast<id_t>(bounds[b]);
      for (int64_t i = 0; i < size; ++i) {
        out[i] += ids[i] >= bound;
      }
    }
    return;
  }
  int64_t last = 0;  // ids often come in runs of one owner
  for (int64_t i = 0; i < size; ++i) {
    const int64_t id = ids[i];
    if (id < bounds[last] || id >= bounds[last + 1]) {
      last = std::upper_bound(bounds, bounds + num_owners + 1, id) - bounds - 1;
    }
    out[i] = static_cast<int32_t>(last);
  }
}

// How many ranges `bounds` separates; ValueError unless it is [0, ..., end] and never decreases.
inline int64_t check_bounds(const Tensor& bounds, const char* name) {
  check_vector(bounds, name);
  check_dtype(bounds, ScalarType::Long, name);
  CHECK_ARG(bounds.numel() >= 2, name, " must have one entry more than there are ranges, got ", bounds.numel());
  const auto* bound = const_data<int64_t>(bounds);
  CHECK_ARG(bound[0] == 0 && std::is_sorted(bound, bound + bounds.numel()), name,
            " must start at 0 and never decrease");
  return bounds.numel() - 1;
}

}  // namespace gnnsys
