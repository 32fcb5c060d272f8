// Arguments that several ops that draw in-edges take, checked; what cuda/arguments.h is for a device.
#pragma once

#include "common/draw.h"
#include "common/id_range.h"
#include "common/sample_arguments.h"

#include <algorithm>
#include <functional>
#include <optional>

namespace gnnsys {

inline void check_seeds(const Tensor& indptr, const Tensor& indices, const Tensor& seeds) {
  check_csc(indptr, indices);
  check_ids(seeds, "seeds");
  check_seed_dtype(seeds, indices);
  check_id_range(seeds, indptr.numel() - 1, "seeds");
}

// Null where it is not given; of any size where `size` is negative.
inline const int64_t* optional_int64(const std::optional<Tensor>& t, int64_t size, const char* name) {
  if (!t.has_value()) {
    return nullptr;
  }
  check_vector(*t, name);
  check_dtype(*t, ScalarType::Long, name);
  CHECK_ARG(size < 0 || t->numel() == size, name, " must have ", size, " entries, got ", t->numel());
  return const_data<int64_t>(*t);
}

// The tree of each seed.
inline const int64_t* optional_tree(const std::optional<Tensor>& tree, int64_t num_seeds) {
  const int64_t* const trees = optional_int64(tree, num_seeds, "tree");
  if (tree.has_value()) {
    check_id_range(*tree, static_cast<int64_t>(kMaxTree) + 1, "tree");
  }
  return trees;
}

// Positions that are never taken.
inline const int64_t* optional_exclude(const std::optional<Tensor>& exclude) {
  const int64_t* const excluded = optional_int64(exclude, -1, "exclude");
  const int64_t* const end = excluded + (exclude.has_value() ? exclude->numel() : 0);
  CHECK_ARG(std::adjacent_find(excluded, end, std::greater_equal<>()) == end,
            "exclude must be edge positions in ascending order, each once");
  return excluded;
}

}  // namespace gnnsys
