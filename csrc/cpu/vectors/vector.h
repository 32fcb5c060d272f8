// Vectors of GNNSYS_VECTOR_BYTES and less: loads and stores with conversion. Part of level.h, once per level.

template <typename A, int kBytes>
struct Vector;

// Conversions are written for each size: GCC 12 has none between vectors whose size is a template's.
template <int kBytes>
struct Convert;

#define GNNSYS_VECTORS(bytes)                                                                                     \
  template <>                                                                                                     \
  struct Vector<float, bytes> {                                                                                   \
    typedef float vec __attribute__((vector_size(bytes)));                                                        \
    typedef int32_t mask __attribute__((vector_size(bytes))); /* 0 or -1 per lane, what comparisons give */      \
  };                                                                                                              \
  template <>                                                                                                     \
  struct Vector<double, bytes> {                                                                                  \
    typedef double vec __attribute__((vector_size(bytes)));                                                       \
    typedef int64_t mask __attribute__((vector_size(bytes)));                                                     \
  };                                                                                                              \
  template <>                                                                                                     \
  struct Convert<bytes> {                                                                                         \
    typedef uint16_t halves __attribute__((vector_size(bytes / 2)));                                              \
    typedef uint32_t words __attribute__((vector_size(bytes)));                                                   \
    static inline words widen(const halves& narrow) { return __builtin_convertvector(narrow, words); }           \
    static inline halves narrow(const words& wide) { return __builtin_convertvector(wide, halves); }             \
    static inline Vector<float, bytes>::mask round(const Vector<float, bytes>::vec& whole) {                     \
      return __builtin_convertvector(whole, Vector<float, bytes>::mask);                                          \
    }                                                                                                             \
  };

GNNSYS_VECTORS(16)
#if GNNSYS_VECTOR_BYTES >= 32
GNNSYS_VECTORS(32)
#endif
#if GNNSYS_VECTOR_BYTES >= 64
GNNSYS_VECTORS(64)
#endif
#undef GNNSYS_VECTORS

template <typename A, int kBytes>
using vec_t = typename Vector<A, kBytes>::vec;
template <typename A, int kBytes>
using mask_t = typename Vector<A, kBytes>::mask;
template <typename A, int kBytes>
constexpr int kLanes = kBytes / static_cast<int>(sizeof(A));

// The next lanes at p, in the type they are computed in.
template <int kBytes, typename T>
inline vec_t<acc_t<T>, kBytes> load(const T* p) {
  vec_t<acc_t<T>, kBytes> v;
  if constexpr (std::is_same_v<T, BFloat16>) {
#if defined(__aarch64__)  // GCC 12 converts lane by lane, in five times as many instructions
    static_assert(kBytes == 16);
    v = (vec_t<float, kBytes>)vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16);
#else
    typename Convert<kBytes>::halves bits;
    std::memcpy(&bits, p, sizeof(bits));
    const auto wide = Convert<kBytes>::widen(bits) << 16;
    std::memcpy(&v, &wide, sizeof(v));
#endif
  } else if constexpr (std::is_same_v<T, Half>) {
#if defined(__aarch64__)
    static_assert(kBytes == 16);
    v = (vec_t<float, kBytes>)vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(p)));
#elif defined(GNNSYS_F16C)
    if constexpr (kBytes == 16) {
      v = (vec_t<float, kBytes>)_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    } else if constexpr (kBytes == 32) {
      v = (vec_t<float, kBytes>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    } else {
      const auto low = load<kBytes / 2>(p);
      const auto high = load<kBytes / 2>(p + kLanes<float, kBytes / 2>);
      std::memcpy(&v, &low, sizeof(low));
      std::memcpy(reinterpret_cast<char*>(&v) + sizeof(low), &high, sizeof(high));
    }
#else
    for (int i = 0; i < kLanes<float, kBytes>; ++i) {
      v[i] = static_cast<float>(p[i]);
    }
#endif
  } else {
    std::memcpy(&v, p, sizeof(v));
  }
  return v;
}

template <int kBytes, typename T>
inline void store(T* p, vec_t<acc_t<T>, kBytes> v) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    std::memcpy(p, &v, sizeof(v));
  } else if constexpr (std::is_same_v<T, BFloat16>) {  // to the nearest, of two the even one, as BFloat16 itself does
    using words = typename Convert<kBytes>::words;
    words bits;
    std::memcpy(&bits, &v, sizeof(v));
    const words rounded = (bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16;
    const words chosen = v != v ? words{} + 0x7FC0 : rounded;
#if defined(__aarch64__)
    vst1_u16(reinterpret_cast<uint16_t*>(p), vmovn_u32((uint32x4_t)chosen));
#else
    const auto narrow = Convert<kBytes>::narrow(chosen);
    std::memcpy(p, &narrow, sizeof(narrow));
#endif
  } else {
#if defined(__aarch64__)
    vst1_f16(reinterpret_cast<float16_t*>(p), vcvt_f16_f32((float32x4_t)v));
#elif defined(GNNSYS_F16C)
    if constexpr (kBytes == 16) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_cvtps_ph((__m128)v, _MM_FROUND_TO_NEAREST_INT));
    } else {
      vec_t<float, kBytes / 2> half[2];
      std::memcpy(half, &v, sizeof(v));
      store<kBytes / 2>(p, half[0]);
      store<kBytes / 2>(p + kLanes<float, kBytes / 2>, half[1]);
    }
#else
    for (int i = 0; i < kLanes<float, kBytes>; ++i) {
      p[i] = static_cast<T>(v[i]);
    }
#endif
  }
}

// The last `count` lanes alone.
template <typename V, typename L>
inline void store_last(L* p, V v, int64_t count) {
  L lanes[sizeof(V) / sizeof(L)];
  std::memcpy(lanes, &v, sizeof(v));
  std::copy_n(lanes + sizeof(V) / sizeof(L) - count, count, p);
}

template <int kBytes, typename A>
inline vec_t<A, kBytes> broadcast(A value) {
  return vec_t<A, kBytes>{} + value;
}
