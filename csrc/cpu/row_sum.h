// Where a row of an aggregation's output is summed.
#pragma once

#include "common/prefetch.h"
#include "cpu/vectors/kernels.h"

#include <cstdint>
#include <vector>

namespace gnnsys {

template <typename T>
inline void prefetch_row(const T* x, int64_t row, int64_t size) {
  prefetch_read(x + row * size, size * static_cast<int64_t>(sizeof(T)));
}

// In place when the output has the type of the sum, else in a scratch row of floats.
template <typename T>
class RowSum {
 public:
  explicit RowSum(int64_t width) : scratch_(kInPlace ? 0 : static_cast<size_t>(width)) {}

  acc_t<T>* begin(T* out) {
    if constexpr (kInPlace) {
      return out;
    } else {
      return scratch_.data();
    }
  }

  // out[f] = sum[f] * factor
  void finish(T* out, const acc_t<T>* sum, int64_t width, acc_t<T> factor) const {
    if (!kInPlace || factor != acc_t<T>{1}) {
      row_kernels<T>().scale(out, sum, width, factor);
    }
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<T, acc_t<T>>;
  std::vector<acc_t<T>> scratch_;
};

}  // namespace gnnsys
