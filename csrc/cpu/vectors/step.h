// One row of a sparse optimizer's step. Part of level.h, once per level.
//
// A square root and a division are rounded as in one lane, whatever the vector: so rows have the same bits at every
// level. They are what takes the time: all of a row is computed in one pass.

template <int kBytes>
inline vec_t<float, kBytes> square_root(vec_t<float, kBytes> v) {
#if defined(__aarch64__)
  return (vec_t<float, kBytes>)vsqrtq_f32((float32x4_t)v);
#elif defined(__x86_64__)
  if constexpr (kBytes == 16) {
    return (vec_t<float, kBytes>)_mm_sqrt_ps((__m128)v);
#if GNNSYS_VECTOR_BYTES >= 32
  } else if constexpr (kBytes == 32) {
    return (vec_t<float, kBytes>)_mm256_sqrt_ps((__m256)v);
#endif
#if GNNSYS_VECTOR_BYTES >= 64
  } else {
    return (vec_t<float, kBytes>)_mm512_maskz_sqrt_ps(0xFFFF, (__m512)v);  // GCC 12 warns of the one without a mask
#endif
  }
#else
  for (int i = 0; i < kLanes<float, kBytes>; ++i) {
    v[i] = std::sqrt(v[i]);
  }
  return v;
#endif
}

// Calls each(i) for the beginnings of whole vectors, one(i) for what is left, and ask(i) for each cache line on the way.
template <typename Ask, typename Each, typename One>
inline void by_lines(int64_t size, const Ask& ask, const Each& each, const One& one) {
  constexpr int kLine = static_cast<int>(kCacheLine / sizeof(float));
  constexpr int kStep = kLanes<float, GNNSYS_VECTOR_BYTES>;
  int64_t i = 0;
  for (; i + kLine <= size; i += kLine) {
    ask(i);
#pragma GCC unroll 4
    for (int k = 0; k < kLine; k += kStep) {
      each(i + k);
    }
  }
  for (; i < size; ++i) {
    one(i);
  }
}

inline void adam(const AdamRow& row, const AdamRow& next, int64_t size, const AdamRates& rates) {
  constexpr int kBytes = GNNSYS_VECTOR_BYTES;
  const auto [rest1, rest2, eps, negative] = rates;
  float* const __restrict x = row.x;
  float* const __restrict first = row.first;
  float* const __restrict second = row.second;
  const float* const __restrict grad = row.grad;
  const auto ask = [=](int64_t i) {
    __builtin_prefetch(next.grad + i);
    __builtin_prefetch(next.second + i);
    __builtin_prefetch(next.first + i);
    __builtin_prefetch(next.x + i);
  };
  const auto each = [=](int64_t i) {
    const auto g = load<kBytes>(grad + i);
    auto m = load<kBytes>(first + i);
    auto v = load<kBytes>(second + i);
    m = (g - m) * rest1 + m;
    v = (g * g - v) * rest2 + v;
    store<kBytes>(first + i, m);
    store<kBytes>(second + i, v);
    store<kBytes>(x + i, load<kBytes>(x + i) + negative * (m / (square_root<kBytes>(v) + eps)));
  };
  const auto one = [=](int64_t i) {
    const float m = (grad[i] - first[i]) * rest1 + first[i];
    const float v = (grad[i] * grad[i] - second[i]) * rest2 + second[i];
    first[i] = m;
    second[i] = v;
    x[i] += negative * (m / (std::sqrt(v) + eps));
  };
  by_lines(size, ask, each, one);
}

inline void adagrad(const AdagradRow& row, const AdagradRow& next, int64_t size, const AdagradRates& rates) {
  constexpr int kBytes = GNNSYS_VECTOR_BYTES;
  const auto [eps, negative] = rates;
  float* const __restrict x = row.x;
  float* const __restrict squares = row.squares;
  const float* const __restrict grad = row.grad;
  const auto ask = [=](int64_t i) {
    __builtin_prefetch(next.grad + i);
    __builtin_prefetch(next.squares + i);
    __builtin_prefetch(next.x + i);
  };
  const auto each = [=](int64_t i) {
    const auto g = load<kBytes>(grad + i);
    const auto s = load<kBytes>(squares + i) + g * g;
    store<kBytes>(squares + i, s);
    store<kBytes>(x + i, load<kBytes>(x + i) + negative * (g / (square_root<kBytes>(s) + eps)));
  };
  const auto one = [=](int64_t i) {
    squares[i] += grad[i] * grad[i];
    x[i] += negative * (grad[i] / (std::sqrt(squares[i]) + eps));
  };
  by_lines(size, ask, each, one);
}
