// Rows scaled, dropped, cast, copied and raised to powers of e. Part of level.h, once per level.

// Calls each(i) for the beginnings of whole vectors, and one(i) for what is left.
template <int kStep, typename Each, typename One>
inline void by_vectors(int64_t size, const Each& each, const One& one) {
  int64_t i = 0;
  for (; i + kStep <= size; i += kStep) {
    each(i);
  }
  for (; i < size; ++i) {
    one(i);
  }
}

template <typename T>
void scale(T* out, const acc_t<T>* sum, int64_t size, acc_t<T> factor) {
  constexpr int kBytes = GNNSYS_VECTOR_BYTES;
  by_vectors<kLanes<acc_t<T>, kBytes>>(
      size, [=](int64_t i) { store<kBytes>(out + i, load<kBytes>(sum + i) * factor); },
      [=](int64_t i) { out[i] = static_cast<T>(sum[i] * factor); });
}

template <typename T>
void drop(T* out, const T* x, const uint32_t* words, int64_t size, uint32_t threshold, acc_t<T> factor) {
  constexpr int kBytes = GNNSYS_VECTOR_BYTES;
  const auto one = [=](int64_t i) {
    out[i] = static_cast<T>(words[i] < threshold ? acc_t<T>{0} : static_cast<acc_t<T>>(x[i]) * factor);
  };
  if constexpr (std::is_same_v<T, double>) {
    by_vectors<1>(size, one, one);
  } else {
    using mask = mask_t<float, kBytes>;
    const auto each = [=](int64_t i) {
      typename Convert<kBytes>::words drawn;
      std::memcpy(&drawn, words + i, sizeof(drawn));
      const mask scaled = (mask)(load<kBytes>(x + i) * factor);
      store<kBytes>(out + i, (vec_t<float, kBytes>)(scaled & (mask)(drawn >= threshold)));
    };
    by_vectors<kLanes<float, kBytes>>(size, each, one);
  }
}

template <typename To, typename From>
void cast(To* out, const From* in, int64_t size) {
  constexpr int kBytes = GNNSYS_VECTOR_BYTES;
  by_vectors<kLanes<float, kBytes>>(
      size, [=](int64_t i) { store<kBytes>(out + i, load<kBytes>(in + i)); },
      [=](int64_t i) { out[i] = static_cast<To>(static_cast<float>(in[i])); });
}

inline void stream(char* out, const char* in, int64_t bytes) {
#if defined(__x86_64__)
  for (int64_t i = 0; i < bytes; i += GNNSYS_VECTOR_BYTES) {
#if GNNSYS_VECTOR_BYTES == 64
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_loadu_si512(in + i));
#elif GNNSYS_VECTOR_BYTES == 32
    const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), part);
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
#endif
  }
#else
  std::memcpy(out, in, static_cast<size_t>(bytes));
#endif
}

// e^x = 2^n * e^r with n = round(x / ln 2) and |r| <= ln 2 / 2. ln 2 is split in two so that r keeps its last bits;
// e^r is its Taylor series, whose eighth term is below half a unit in the last place. Relative error about 1e-7. Below
// -87 the result is 0 (softmax never asks above 0, but the upper end is kept finite), and NaN stays NaN.
template <int kBytes>
inline vec_t<float, kBytes> exp_lanes(vec_t<float, kBytes> x) {
  using vec = vec_t<float, kBytes>;
  using mask = mask_t<float, kBytes>;
  const mask tiny = x < -87.0f;
  const mask nan = x != x;
  vec y = tiny | nan ? vec{} : x;
  y = y > 88.0f ? vec{} + 88.0f : y;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a number of this size has no room for a fraction
  const vec n = (y * 1.44269504f + kRound) - kRound;
  const vec r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  vec p = vec{} + 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const mask bits = (Convert<kBytes>::round(n) + 127) << 23;
  vec power;
  std::memcpy(&power, &bits, sizeof(power));
  const vec result = tiny ? vec{} : p * power;
  return nan ? x : result;
}

inline void exp_floats(float* values, int64_t size) {
  constexpr int kBytes = GNNSYS_VECTOR_BYTES;
  constexpr int kStep = kLanes<float, kBytes>;
  by_vectors<kStep>(
      size, [=](int64_t i) { store<kBytes>(values + i, exp_lanes<kBytes>(load<kBytes>(values + i))); },
      [=](int64_t i) { values[i] = exp_lanes<16>(broadcast<16>(values[i]))[0]; });
}

inline void exp_doubles(double* values, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    values[i] = std::exp(values[i]);
  }
}
