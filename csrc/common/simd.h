// Sixteen-byte vectors that compile to NEON and to SSE2 alike: loads and stores with conversion.
//
// Half-precision rows are computed in float. Products and sums are separate roundings (no fused multiply-add), so a
// result has the same bits on every machine.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace gnnsys {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// What rows of T are computed in.
template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename A>
struct Simd;

template <>
struct Simd<float> {
  typedef float vec __attribute__((vector_size(16)));
  typedef int32_t mask __attribute__((vector_size(16)));  // 0 or -1 per lane, what comparisons give
  static constexpr int lanes = 4;
};

template <>
struct Simd<double> {
  typedef double vec __attribute__((vector_size(16)));
  typedef int64_t mask __attribute__((vector_size(16)));
  static constexpr int lanes = 2;
};

template <typename A>
using vec_t = typename Simd<A>::vec;
template <typename A>
using mask_t = typename Simd<A>::mask;

// The next `lanes` values at p, in the type they are computed in.
template <typename T>
inline vec_t<acc_t<T>> load(const T* p) {
  vec_t<acc_t<T>> v;
  if constexpr (std::is_same_v<T, BFloat16>) {
    typedef uint16_t halves __attribute__((vector_size(8)));
    typedef uint32_t words __attribute__((vector_size(16)));
    halves bits;
    std::memcpy(&bits, p, sizeof(bits));
    const words wide = __builtin_convertvector(bits, words) << 16;
    std::memcpy(&v, &wide, sizeof(v));
  } else if constexpr (std::is_same_v<T, Half>) {
#ifdef __aarch64__
    typedef __fp16 halves __attribute__((vector_size(8)));
    halves bits;
    std::memcpy(&bits, p, sizeof(bits));
    v = __builtin_convertvector(bits, vec_t<float>);
#else
    v = vec_t<float>{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
                     static_cast<float>(p[3])};
#endif
  } else {
    std::memcpy(&v, p, sizeof(v));
  }
  return v;
}

template <typename T>
inline void store(T* p, vec_t<acc_t<T>> v) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    std::memcpy(p, &v, sizeof(v));
  } else {
    for (int i = 0; i < Simd<float>::lanes; ++i) {
      p[i] = static_cast<T>(v[i]);
    }
  }
}

template <typename A>
inline vec_t<A> broadcast(A value) {
  return vec_t<A>{} + value;
}

template <typename A>
inline A sum_lanes(vec_t<A> v) {
  if constexpr (Simd<A>::lanes == 4) {
    return (v[0] + v[1]) + (v[2] + v[3]);
  } else {
    return v[0] + v[1];
  }
}

}  // namespace gnnsys
