// Dense products inside an op, by torch's own: views of raw memory, and calls through the dispatcher, which every torch
// from 2.10 on has (not for ops with a Scalar, such as addmm). Variants that write to `out` are called: autocast leaves those alone, and nothing is allocated here.
//
// To be called where the op was: worker threads of a parallel loop have not torch's state of the caller.
#pragma once

#include "common/check.h"

#include <array>
#include <vector>

namespace gnnsys {

// Rows [first, first + count) of a contiguous matrix.
inline Tensor rows_of(const Tensor& t, int64_t first, int64_t count) {
  const int64_t width = t.size(1);
  auto* const data = static_cast<char*>(const_cast<void*>(t.const_data_ptr()));
  const std::array<int64_t, 2> sizes{count, width};
  const std::array<int64_t, 2> strides{width, 1};
  return torch::stable::from_blob(data + first * width * static_cast<int64_t>(t.element_size()), sizes, strides,
                                  t.device(), t.scalar_type());
}

// A view of a contiguous tensor from element `first` on.
inline Tensor strided(const Tensor& t, int64_t first, const std::vector<int64_t>& sizes,
                      const std::vector<int64_t>& strides) {
  auto* const data = static_cast<char*>(const_cast<void*>(t.const_data_ptr()));
  return torch::stable::from_blob(data + first * static_cast<int64_t>(t.element_size()), sizes, strides, t.device(),
                                  t.scalar_type());
}

inline Tensor transposed(const Tensor& t) { return torch::stable::transpose(t, t.dim() - 2, t.dim() - 1); }

// out = a @ b, of matrices or of as many matrices each.
inline void product_into(const Tensor& a, const Tensor& b, const Tensor& out) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(a), from(b), from(out)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(a.dim() == 2 ? "aten::mm" : "aten::bmm", "out", stack.data(), TORCH_ABI_VERSION));
  (void)torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace gnnsys
