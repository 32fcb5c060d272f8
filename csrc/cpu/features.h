// The shapes and types that aggregations agree on: rows [num_rows, heads, width], floats of four kinds.
#pragma once

#include "common/check.h"
#include "common/id_range.h"
#include "common/row_types.h"
#include "common/tensors.h"

#include <optional>
#include <vector>

namespace gnnsys {

// A feature matrix as the kernels see it: [num_rows, width] has one head.
struct Shape {
  int64_t num_rows;
  int64_t heads;
  int64_t width;
  int64_t size() const { return heads * width; }
};

inline Shape check_features(const Tensor& x, const char* name) {
  check_contiguous(x, name);
  CHECK_ARG(x.dim() == 2 || x.dim() == 3, name, " must be [num_rows, width] or [num_rows, heads, width], got ",
            x.dim(), " dimensions");
  return x.dim() == 2 ? Shape{x.size(0), 1, x.size(1)} : Shape{x.size(0), x.size(1), x.size(2)};
}

// Values by row and head: [num_rows] beside features without heads, [num_rows, heads] beside features with heads.
inline void check_head_values(const Tensor& t, const char* name, int64_t num_rows, const Tensor& x, const char* x_name) {
  check_contiguous(t, name);
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
inline void check_scale(const std::optional<Tensor>& scale, const char* name, const Tensor& x, int64_t num_rows) {
  if (scale.has_value()) {
    check_vector(*scale, name);
    check_dtype(*scale, sum_type(x), name);
    CHECK_ARG(scale->numel() == num_rows, name, " must have ", num_rows, " entries, got ", scale->numel());
  }
}

// Where the value of an edge is in an edge tensor: int32 or int64 positions; none: at the edge itself.
struct Positions {
  const int32_t* narrow = nullptr;
  const int64_t* wide = nullptr;
  int64_t operator()(int64_t e) const { return wide != nullptr ? wide[e] : narrow != nullptr ? narrow[e] : e; }
};

inline Positions check_positions(const std::optional<Tensor>& positions, int64_t num_edges) {
  if (!positions.has_value()) {
    return {};
  }
  check_ids(*positions, "positions");
  CHECK_ARG(positions->numel() == num_edges, "positions must have an entry per edge, ", num_edges, ", got ",
            positions->numel());
  check_id_range(*positions, num_edges, "positions");
  if (positions->scalar_type() == ScalarType::Int) {
    return {const_data<int32_t>(*positions), nullptr};
  }
  return {nullptr, const_data<int64_t>(*positions)};
}

template <typename T>
const T* data_or_null(const std::optional<Tensor>& t) {
  return t.has_value() ? const_data<T>(*t) : nullptr;
}

// [num_rows, width] or [num_rows, heads, width], as x has it.
inline Tensor new_features(const Tensor& x, int64_t num_rows) {
  std::vector<int64_t> sizes{num_rows, x.size(1)};
  if (x.dim() == 3) {
    sizes.push_back(x.size(2));
  }
  return empty_cpu(sizes, x.scalar_type());
}

// [num_rows] beside features without heads, [num_rows, heads] beside features with heads.
inline Tensor new_head_values(const Tensor& x, int64_t num_rows) {
  std::vector<int64_t> sizes{num_rows};
  if (x.dim() == 3) {
    sizes.push_back(x.size(1));
  }
  return empty_cpu(sizes, x.scalar_type());
}

// Calls body with a value of the feature type.
template <typename Body>
decltype(auto) dispatch_features(const Tensor& x, const char* name, Body&& body) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Double:
      return body(double{});
    case ScalarType::BFloat16:
      return body(BFloat16{});
    case ScalarType::Half:
      return body(Half{});
    default:
      throw_argument(name, " must be float32, float64, bfloat16 or float16, got ", dtype_name(x.scalar_type()));
  }
}

}  // namespace gnnsys
