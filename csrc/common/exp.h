// exp of whole arrays, for softmax.
#pragma once

#include "common/simd.h"

#include <algorithm>
#include <cmath>

namespace gnnsys {

// e^x = 2^n * e^r with n = round(x / ln 2) and |r| <= ln 2 / 2. ln 2 is split in two so that r keeps its last bits;
// e^r is its Taylor series, whose eighth term is below half a unit in the last place. Relative error about 1e-7. Below
// -87 the result is 0 (softmax never asks above 0, but the upper end is kept finite), and NaN stays NaN.
inline vec_t<float> exp_lanes(vec_t<float> x) {
  const mask_t<float> tiny = x < -87.0f;
  const mask_t<float> nan = x != x;
  vec_t<float> y = tiny | nan ? vec_t<float>{} : x;
  y = y > 88.0f ? broadcast(88.0f) : y;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a number of this size has no room for a fraction
  const vec_t<float> n = (y * 1.44269504f + kRound) - kRound;
  const vec_t<float> r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  vec_t<float> p = broadcast(1.0f / 5040.0f);
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const mask_t<float> bits = (__builtin_convertvector(n, mask_t<float>) + 127) << 23;
  vec_t<float> power;
  std::memcpy(&power, &bits, sizeof(power));
  const vec_t<float> result = tiny ? vec_t<float>{} : p * power;
  return nan ? x : result;
}

inline vec_t<double> exp_lanes(vec_t<double> x) { return vec_t<double>{std::exp(x[0]), std::exp(x[1])}; }

// values[i] = exp(values[i])
template <typename A>
void exp_all(A* values, int64_t size) {
  constexpr int kLanes = Simd<A>::lanes;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    store(values + i, exp_lanes(load(values + i)));
  }
  if (i < size) {
    A rest[kLanes] = {};
    std::copy(values + i, values + size, rest);
    store(rest, exp_lanes(load(rest)));
    std::copy(rest, rest + (size - i), values + i);
  }
}

}  // namespace gnnsys
