// Optional arguments that several ops take: arrays of int64, per seed or per graph.
#pragma once

#include "cuda/device.h"

#include <optional>

namespace gnnsys::cuda {

// Whether it must be on the device itself, or may be read from pinned memory, which large per-graph arrays may.
enum class Where { kDevice, kReadable };

// Null where it is not given; of any size where `size` is negative.
inline const int64_t* optional_int64(const std::optional<Tensor>& t, const Device& device, Where where, int64_t size,
                                     const char* name) {
  if (!t.has_value()) {
    return nullptr;
  }
  if (where == Where::kDevice) {
    check_contiguous(*t, device, name);
  } else {
    check_readable(*t, device, name);
  }
  CHECK_ARG(t->dim() == 1, name, " must have one dimension, got ", t->dim());
  check_dtype(*t, ScalarType::Long, name);
  CHECK_ARG(size < 0 || t->numel() == size, name, " must have ", size, " entries, got ", t->numel());
  return const_data<int64_t>(*t);
}

}  // namespace gnnsys::cuda
