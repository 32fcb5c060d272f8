// Checks at the boundary of every op, before any loop starts. A failed check is the user's ValueError.
#pragma once

#include "common/shim.h"

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace gnnsys {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Without streams: shim.h says why.
template <typename T>
void append_to(std::string& message, const T& part) {
  if constexpr (std::is_arithmetic_v<T>) {
    message += std::to_string(part);
  } else {
    message += part;
  }
}

template <typename... Args>
[[noreturn]] void throw_argument(const Args&... args) {
  std::string message;
  (append_to(message, args), ...);
  throw std::invalid_argument(message);  // Python sees ValueError
}

// CHECK_ARG(condition, "fanout must be >= -1, got ", fanout). Never inside a parallel region.
#define CHECK_ARG(condition, ...)               \
  do {                                          \
    if (!(condition)) {                         \
      ::gnnsys::throw_argument(__VA_ARGS__);    \
    }                                           \
  } while (0)

inline const char* dtype_name(ScalarType type) { return torch::headeronly::toString(type); }

inline void check_cpu(const Tensor& t, const char* name) {
  CHECK_ARG(t.is_cpu(), name, " must be a CPU tensor");
}

inline void check_contiguous(const Tensor& t, const char* name) {
  check_cpu(t, name);
  CHECK_ARG(t.is_contiguous(), name, " must be contiguous: pass ", name, ".contiguous()");
}

inline void check_vector(const Tensor& t, const char* name) {
  check_contiguous(t, name);
  CHECK_ARG(t.dim() == 1, name, " must have one dimension, got ", t.dim());
}

inline void check_dtype(const Tensor& t, ScalarType type, const char* name) {
  CHECK_ARG(t.scalar_type() == type, name, " must be ", dtype_name(type), ", got ", dtype_name(t.scalar_type()));
}

inline void check_same_dtype(const Tensor& t, const char* name, const Tensor& x, const char* x_name) {
  CHECK_ARG(t.scalar_type() == x.scalar_type(), name, " must have the dtype of ", x_name, ", ",
            dtype_name(x.scalar_type()), ", got ", dtype_name(t.scalar_type()));
}

inline void check_index_dtype(const Tensor& t, const char* name) {
  CHECK_ARG(t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long, name,
            " must be int32 or int64, got ", dtype_name(t.scalar_type()));
}

// A one-dimensional contiguous CPU tensor of node ids (int32 or int64).
inline void check_ids(const Tensor& t, const char* name) {
  check_vector(t, name);
  check_index_dtype(t, name);
}

// indptr int64 [num_rows + 1], indices int32 or int64. The two ends of indptr are checked here; that it never
// decreases is checked where a Graph is made (gnnsys.ops.CSC.validate), not per call.
inline void check_csc(const Tensor& indptr, const Tensor& indices) {
  check_vector(indptr, "indptr");
  check_dtype(indptr, ScalarType::Long, "indptr");
  check_ids(indices, "indices");
  CHECK_ARG(indptr.numel() >= 1, "indptr must have num_rows + 1 entries, got none");
  const auto* p = static_cast<const int64_t*>(indptr.const_data_ptr());
  CHECK_ARG(p[0] == 0 && p[indptr.numel() - 1] == indices.numel(), "indptr must run from 0 to len(indices) = ",
            indices.numel(), ", got ", p[0], " to ", p[indptr.numel() - 1]);
}

// Calls body with a value of the id type: dispatch_ids(t, [&](auto id) { using id_t = decltype(id); ... }).
template <typename Body>
decltype(auto) dispatch_ids(const Tensor& ids, Body&& body) {
  if (ids.scalar_type() == ScalarType::Int) {
    return body(int32_t{});
  }
  return body(int64_t{});
}

template <typename T>
const T* const_data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace gnnsys
