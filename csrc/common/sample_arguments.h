// Checks that every op that draws in-edges begins with, on the host and on a device.
#pragma once

#include "common/check.h"

#include <cstdint>

namespace gnnsys {

inline void check_fanout(int64_t fanout) {
  CHECK_ARG(fanout >= -1 && fanout < (int64_t{1} << 28), "fanout must be -1 (all) or 0 to 2^28 - 1, got ", fanout);
}

inline void check_seed_dtype(const Tensor& seeds, const Tensor& indices) {
  CHECK_ARG(seeds.scalar_type() == indices.scalar_type(), "seeds must have the dtype of indices, ",
            dtype_name(indices.scalar_type()), ", got ", dtype_name(seeds.scalar_type()));
}

// Of ids that are known to be ids.
inline void check_rng_ids(const Tensor& rng_ids, const Tensor& seeds) {
  CHECK_ARG(rng_ids.numel() == seeds.numel(), "rng_ids must be one original id per seed, ", seeds.numel(), ", got ",
            rng_ids.numel());
  CHECK_ARG(rng_ids.scalar_type() == seeds.scalar_type() || rng_ids.scalar_type() == ScalarType::Long,
            "rng_ids must have the dtype of seeds, or be int64");
}

inline void check_source_ids(const Tensor& source_ids, int64_t num_src) {
  CHECK_ARG(source_ids.dim() == 1 && source_ids.numel() >= num_src, "source_ids must have an id for each of ", num_src,
            " sources, got ", source_ids.numel());
}

}  // namespace gnnsys
