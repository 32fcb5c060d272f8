// The shapes and types that the aggregations agree on, as cpu/features.h has them, and rows as lanes read them: in
// vectors of 16 bytes where a row's length and address allow it, else of 8, 4 or 2.
#pragma once

#include "cuda/device.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

namespace gnnsys::cuda {

using OptionalTensor = std::optional<Tensor>;

// What rows of T are computed in.
template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// -- vectors ---------------------------------------------------------------------------------------------------------

template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <int kBytes>
using word_t = typename WordOf<kBytes>::type;

// kBytes of a row in registers.
template <typename T, int kBytes>
union Pack {
  static constexpr int kValues = kBytes / static_cast<int>(sizeof(T));
  word_t<kBytes> word;
  T value[kValues];
  __device__ Pack() : word{} {}
};

// For rows that are gathered: through the read-only path.
template <typename T, int kBytes>
__device__ inline void load(Pack<T, kBytes>& pack, const T* from) {
  pack.word = __ldg(reinterpret_cast<const word_t<kBytes>*>(from));
}

template <typename A, typename T>
__device__ inline A to_sum(T value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(value);
  } else {
    return value;
  }
}

template <typename T, typename A>
__device__ inline T from_sum(A value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// kValues results to `to`, which is aligned to as many bytes (at most 16). Written around the cache: nobody reads them
// before the kernel ends, while rows that are gathered come back.
template <int kValues, typename O>
__device__ inline void store_stream(O* to, const O (&values)[kValues]) {
  constexpr int kBytes = kValues * static_cast<int>(sizeof(O)) < 16 ? kValues * static_cast<int>(sizeof(O)) : 16;
  constexpr int kEach = kBytes / static_cast<int>(sizeof(O));
#pragma unroll
  for (int i = 0; i < kValues; i += kEach) {
    Pack<O, kBytes> pack;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      pack.value[j] = values[i + j];
    }
    __stcs(reinterpret_cast<word_t<kBytes>*>(to + i), pack.word);
  }
}

template <typename id_t>
__device__ inline bool is_inside(id_t id, int64_t limit) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(limit);
}

// The widest vector, in bytes, that `row_bytes` is a multiple of and that every address allows.
inline int vector_bytes(int64_t row_bytes, std::initializer_list<const void*> addresses) {
  uint64_t bits = static_cast<uint64_t>(row_bytes);
  for (const void* const address : addresses) {
    bits |= reinterpret_cast<uint64_t>(address);
  }
  return bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : 2;
}

// -- shapes ----------------------------------------------------------------------------------------------------------

// A feature matrix as the kernels see it: [num_rows, width] has one head.
struct Shape {
  int64_t num_rows;
  int64_t heads;
  int64_t width;
  __host__ __device__ int64_t size() const { return heads * width; }
};

// Before a Device is made of it: another argument may have brought the call here.
inline void check_on_device(const Tensor& t, const char* name) {
  CHECK_ARG(t.is_cuda(), name, " must be on the device of the other tensors");
}

inline Shape check_features(const Tensor& x, const Device& device, const char* name) {
  check_contiguous(x, device, name);
  CHECK_ARG(x.dim() == 2 || x.dim() == 3, name, " must be [num_rows, width] or [num_rows, heads, width], got ",
            x.dim(), " dimensions");
  const Shape shape = x.dim() == 2 ? Shape{x.size(0), 1, x.size(1)} : Shape{x.size(0), x.size(1), x.size(2)};
  CHECK_ARG(shape.size() <= (1 << 20), name, " must have at most 2^20 values in a row, got ", shape.size());
  return shape;
}

// Values by row and head: [num_rows] beside features without heads, [num_rows, heads] beside features with heads.
inline void check_head_values(const Tensor& t, const Device& device, const char* name, int64_t num_rows,
                              const Tensor& x, const char* x_name) {
  check_contiguous(t, device, name);
  check_same_dtype(t, name, x, x_name);
  CHECK_ARG(t.dim() == x.dim() - 1, name, " must have ", x.dim() - 1, " dimensions beside ", x_name, " with ", x.dim(),
            ", got ", t.dim());
  CHECK_ARG(t.size(0) == num_rows, name, " must have ", num_rows, " rows, got ", t.size(0));
  CHECK_ARG(t.dim() == 1 || t.size(1) == x.size(1), name, " must have ", x.size(1), " heads, got ", t.size(1));
}

// The type that sums of x are made in.
inline ScalarType sum_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A factor per row in the type that sums are made in; none: ones.
inline void check_scale(const OptionalTensor& scale, const Device& device, const char* name, const Tensor& x,
                        int64_t num_rows) {
  if (scale.has_value()) {
    check_vector(*scale, device, name);
    check_dtype(*scale, sum_type(x), name);
    CHECK_ARG(scale->numel() == num_rows, name, " must have ", num_rows, " entries, got ", scale->numel());
  }
}

// Edges need nodes at both ends: then an id that points outside has another to be replaced by.
inline void check_edges(int64_t num_dst, int64_t num_src, int64_t num_edges) {
  CHECK_ARG(num_edges == 0 || num_dst > 0, "indptr must rise from 0 to the number of edges, ", num_edges,
            "; it has no rows");
  CHECK_ARG(num_edges == 0 || num_src > 0, "indices must be in [0, 0), got ", num_edges, " of them");
}

// Where the value of an edge is in an edge tensor: int32 or int64 positions; none: at the edge itself.
struct Positions {
  const int32_t* narrow = nullptr;
  const int64_t* wide = nullptr;
  int64_t num_edges = 0;

  __device__ int64_t operator()(int64_t e) const {
    return wide != nullptr ? __ldcs(wide + e) : narrow != nullptr ? __ldcs(narrow + e) : e;
  }
};

inline Positions check_positions(const OptionalTensor& positions, const Device& device, int64_t num_edges) {
  if (!positions.has_value()) {
    return {nullptr, nullptr, num_edges};
  }
  check_readable(*positions, device, "positions");
  CHECK_ARG(positions->dim() == 1, "positions must have one dimension, got ", positions->dim());
  check_index_dtype(*positions, "positions");
  CHECK_ARG(positions->numel() == num_edges, "positions must have an entry per edge, ", num_edges, ", got ",
            positions->numel());
  if (positions->scalar_type() == ScalarType::Int) {
    return {const_data<int32_t>(*positions), nullptr, num_edges};
  }
  return {nullptr, const_data<int64_t>(*positions), num_edges};
}

template <typename T>
const T* data_or_null(const OptionalTensor& t) {
  return t.has_value() ? const_data<T>(*t) : nullptr;
}

// [num_rows, width] or [num_rows, heads, width], as x has it.
inline Tensor new_features(const Tensor& x, const Device& device, int64_t num_rows) {
  std::vector<int64_t> sizes{num_rows, x.size(1)};
  if (x.dim() == 3) {
    sizes.push_back(x.size(2));
  }
  return device.empty(sizes, x.scalar_type());
}

// [num_rows] beside features without heads, [num_rows, heads] beside features with heads.
inline Tensor new_head_values(const Tensor& x, const Device& device, int64_t num_rows) {
  std::vector<int64_t> sizes{num_rows};
  if (x.dim() == 3) {
    sizes.push_back(x.size(1));
  }
  return device.empty(sizes, x.scalar_type());
}

// Calls body with a value of the feature type, as device code names it.
template <typename Body>
decltype(auto) dispatch_features(const Tensor& x, const char* name, Body&& body) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Double:
      return body(double{});
    case ScalarType::BFloat16:
      return body(__nv_bfloat16{});
    case ScalarType::Half:
      return body(__half{});
    default:
      throw_argument(name, " must be float32, float64, bfloat16 or float16, got ", dtype_name(x.scalar_type()));
  }
}

}  // namespace gnnsys::cuda
