// What rows are, for every op that moves them, on any device: everything behind a tensor's first dimension.
#pragma once

#include "common/check.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <type_traits>

namespace gnnsys {

inline int64_t row_size(const Tensor& t) {
  int64_t size = 1;
  for (int64_t d = 1; d < t.dim(); ++d) {
    size *= t.size(d);
  }
  return size;
}

inline bool same_row_shape(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim()) {
    return false;
  }
  for (int64_t d = 1; d < a.dim(); ++d) {
    if (a.size(d) != b.size(d)) {
      return false;
    }
  }
  return true;
}

inline bool overlap(const Tensor& a, const Tensor& b) {
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); };
  const auto end = [&](const Tensor& t) { return begin(t) + static_cast<uintptr_t>(t.numel()) * t.element_size(); };
  return a.numel() > 0 && b.numel() > 0 && begin(a) < end(b) && begin(b) < end(a);
}

// Calls body with a value of the type: rows are cast between these alone.
template <typename Body>
void dispatch_float(ScalarType type, const char* name, Body&& body) {
  switch (type) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Double:
      return body(double{});
    case ScalarType::BFloat16:
      return body(torch::headeronly::BFloat16{});
    case ScalarType::Half:
      return body(torch::headeronly::Half{});
    default:
      throw_argument(name, " must have a floating dtype to be cast, got ", dtype_name(type));
  }
}

// Calls body with a value of each of two types that differ. The same type twice is no cast: body is not made for it.
template <typename Body>
void dispatch_cast(ScalarType to, const char* to_name, ScalarType from, const char* from_name, Body&& body) {
  dispatch_float(to, to_name, [&](auto to_value) {
    dispatch_float(from, from_name, [&](auto from_value) {
      if constexpr (!std::is_same_v<decltype(to_value), decltype(from_value)>) {
        body(to_value, from_value);
      }
    });
  });
}

// How a value is cast, on every device alike: through double where one of the two is, else through float.
template <typename To, typename From>
#ifdef __CUDACC__
__host__ __device__
#endif
inline To cast_value(From value) {
  if constexpr (std::is_same_v<To, double> || std::is_same_v<From, double>) {
    return static_cast<To>(static_cast<double>(value));
  } else {
    return static_cast<To>(static_cast<float>(value));
  }
}

}  // namespace gnnsys
