// The inner product of two rows, in an order of additions that depends on the width alone.
#pragma once

#include "cpu/accumulate.h"

namespace gnnsys {

template <typename T>
inline acc_t<T> dot(const T* a, const T* b, int64_t width) {
  using A = acc_t<T>;
  constexpr int kLanes = Simd<A>::lanes;
  constexpr int kVectors = 4;
  vec_t<A> sum[kVectors] = {};
  int64_t f = 0;
  for (; f + kVectors * kLanes <= width; f += kVectors * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      sum[i] += load(a + f + i * kLanes) * load(b + f + i * kLanes);
    }
  }
  for (; f + kLanes <= width; f += kLanes) {
    sum[0] += load(a + f) * load(b + f);
  }
  A rest{0};
  for (; f < width; ++f) {
    rest += static_cast<A>(a[f]) * static_cast<A>(b[f]);
  }
  return sum_lanes<A>((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest;
}

}  // namespace gnnsys
