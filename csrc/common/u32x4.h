// Four 32-bit words in a register, and the operations on them that compilers do not find by themselves: the full 64-bit
// product, the sum over lanes and two vectors in order.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace gnnsys {

typedef uint32_t u32x4 __attribute__((vector_size(16)));

inline u32x4 splat(uint32_t value) { return u32x4{value, value, value, value}; }

inline u32x4 load4(const uint32_t* p) {
  u32x4 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void store4(uint32_t* p, u32x4 v) { std::memcpy(p, &v, sizeof(v)); }

// high and low halves of v * w, lane by lane.
inline void multiply(u32x4 v, u32x4 w, u32x4* high, u32x4* low) {
#if defined(__aarch64__)
  const auto a = (uint32x4_t)v, b = (uint32x4_t)w;
  const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a), vget_low_u32(b)));
  const uint32x4_t second = vreinterpretq_u32_u64(vmull_high_u32(a, b));
  *low = (u32x4)vuzp1q_u32(first, second);
  *high = (u32x4)vuzp2q_u32(first, second);
#elif defined(__SSE2__)
  const __m128i even = _mm_mul_epu32((__m128i)v, (__m128i)w);
  const __m128i odd = _mm_mul_epu32(_mm_srli_epi64((__m128i)v, 32), _mm_srli_epi64((__m128i)w, 32));
  const __m128i low_even = _mm_shuffle_epi32(even, _MM_SHUFFLE(0, 0, 2, 0));
  const __m128i low_odd = _mm_shuffle_epi32(odd, _MM_SHUFFLE(0, 0, 2, 0));
  const __m128i high_even = _mm_shuffle_epi32(even, _MM_SHUFFLE(0, 0, 3, 1));
  const __m128i high_odd = _mm_shuffle_epi32(odd, _MM_SHUFFLE(0, 0, 3, 1));
  *low = (u32x4)_mm_unpacklo_epi32(low_even, low_odd);
  *high = (u32x4)_mm_unpacklo_epi32(high_even, high_odd);
#else
  for (int l = 0; l < 4; ++l) {
    const uint64_t product = static_cast<uint64_t>(v[l]) * w[l];
    (*low)[l] = static_cast<uint32_t>(product);
    (*high)[l] = static_cast<uint32_t>(product >> 32);
  }
#endif
}

inline void multiply(u32x4 v, uint32_t factor, u32x4* high, u32x4* low) { multiply(v, splat(factor), high, low); }

// Exchanges lanes of which the first is larger.
inline void order(u32x4* first, u32x4* second) {
#if defined(__aarch64__)
  const auto a = (uint32x4_t)*first, b = (uint32x4_t)*second;
  *first = (u32x4)vminq_u32(a, b);
  *second = (u32x4)vmaxq_u32(a, b);
#else
  const u32x4 exchanged = (*first ^ *second) & static_cast<u32x4>(*first > *second);
  *first ^= exchanged;
  *second ^= exchanged;
#endif
}

inline uint32_t sum_lanes(u32x4 v) {
#if defined(__aarch64__)
  return vaddvq_u32((uint32x4_t)v);
#else
  return v[0] + v[1] + v[2] + v[3];
#endif
}

}  // namespace gnnsys
