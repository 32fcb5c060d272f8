// Making tensors: the one way to torch's allocators, on every device.
//
// Straight to the C shim, whose error code says that memory is missing: the stable ABI's own `empty` has but one error for
// everything, and builds a stream for it (shim.h).
#pragma once

#include "common/check.h"
#include "common/huge_pages.h"
#include "common/out_of_memory.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <vector>

namespace gnnsys {

constexpr size_t kMostDims = 64;  // torch's own limit

// Bytes of a contiguous tensor; kBytesOverflow where they cannot be counted.
inline int64_t num_bytes(const int64_t* sizes, size_t num_dims, int64_t element_size) {
  int64_t bytes = element_size;
  bool empty = false;
  bool overflow = false;
  for (size_t d = 0; d < num_dims; ++d) {
    CHECK_ARG(sizes[d] >= 0, "a tensor cannot have ", sizes[d], " entries in a dimension");
    empty |= sizes[d] == 0;
    overflow |= __builtin_mul_overflow(bytes, sizes[d], &bytes);
  }
  return empty ? 0 : overflow ? kBytesOverflow : bytes;
}

// A contiguous tensor, nothing written to it. refused(bytes) throws where there is no memory for it.
template <typename Refused>
Tensor new_tensor(const int64_t* sizes, size_t num_dims, ScalarType type, int32_t device_type, int32_t device_index,
                  const Refused& refused) {
  CHECK_ARG(num_dims <= kMostDims, "a tensor has at most ", kMostDims, " dimensions, got ", num_dims);
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  const int64_t bytes = num_bytes(sizes, num_dims, static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)));
  std::array<int64_t, kMostDims> strides;
  int64_t stride = 1;
  for (size_t d = num_dims; d-- > 0;) {
    strides[d] = stride;
    stride = bytes == kBytesOverflow ? 1 : stride * std::max<int64_t>(sizes[d], 1);
  }
  AtenTensorHandle made = nullptr;
  if (bytes == kBytesOverflow ||
      aoti_torch_empty_strided(static_cast<int64_t>(num_dims), sizes, strides.data(), dtype, device_type,
                               device_index, &made) != TORCH_SUCCESS) {
    refused(bytes);
  }
  return Tensor(made);
}

inline Tensor empty_cpu(const int64_t* sizes, size_t num_dims, ScalarType type) {
  const Tensor made = new_tensor(sizes, num_dims, type, aoti_torch_device_type_cpu(), 0,
                                 [](int64_t bytes) { throw OutOfHostMemory(bytes); });
  ask_for_huge_pages(made.mutable_data_ptr(), made.numel() * static_cast<int64_t>(made.element_size()));
  return made;
}

inline Tensor empty_cpu(const std::vector<int64_t>& shape, ScalarType type) {
  return empty_cpu(shape.data(), shape.size(), type);
}

inline Tensor empty_cpu(std::initializer_list<int64_t> shape, ScalarType type) {
  return empty_cpu(shape.begin(), shape.size(), type);
}

inline Tensor zeros_cpu(std::initializer_list<int64_t> shape, ScalarType type) {
  Tensor zeros = empty_cpu(shape, type);
  return torch::stable::zero_(zeros);
}

inline std::vector<int64_t> shape_of(const Tensor& t) {
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < t.dim(); ++d) {
    shape.push_back(t.size(d));
  }
  return shape;
}

template <typename T>
constexpr ScalarType id_type() {
  static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t>);
  return std::is_same_v<T, int32_t> ? ScalarType::Int : ScalarType::Long;
}

}  // namespace gnnsys
