// Making tensors: thin names over the stable ABI's allocation.
#pragma once

#include "common/check.h"

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>

#include <initializer_list>
#include <vector>

namespace gnnsys {

inline Tensor empty_cpu(std::initializer_list<int64_t> shape, ScalarType type) {
  const std::vector<int64_t> sizes(shape);
  return torch::stable::empty(sizes, type, std::nullopt,
                              torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

template <typename T>
constexpr ScalarType id_type() {
  static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t>);
  return std::is_same_v<T, int32_t> ? ScalarType::Int : ScalarType::Long;
}

}  // namespace gnnsys
