// First 64-bit words of many Philox streams, bit-equal to Stream::word64(0, 0) of common/draw.h.
//
// On x86 a counter word stands in the low half of a 64-bit lane, where the processor multiplies it without a shuffle,
// and what is left in the high half is never looked at: 8 instructions per round and vector. Elsewhere philox_lanes.h.
#pragma once

#include "cpu/philox_lanes.h"

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gnnsys {

constexpr int64_t kWordBlock = 512;  // sources whose words are made together: all about them stays in the first cache

// low and high halves of the sources' ids, and their trees; then their words. Padded to kLanes.
struct WordBlock {
  alignas(64) uint32_t low[kWordBlock] = {};
  alignas(64) uint32_t high[kWordBlock] = {};
  alignas(64) uint32_t tree[kWordBlock] = {};
  alignas(64) uint64_t word[kWordBlock] = {};
};

#if defined(__x86_64__)
// 16 counters from e on, as four vectors of four: their chains of dependent steps overlap.
__attribute__((target("avx2"))) inline void make_words_avx2(WordBlock* block, int64_t size, uint64_t key) {
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  for (int64_t e = 0; e < size; e += kLanes) {
    __m256i c0[4], c1[4], c2[4], c3[4];
    for (int v = 0; v < 4; ++v) {
      const int64_t at = e + 4 * v;
      c0[v] = _mm256_cvtepu32_epi64(_mm_load_si128(reinterpret_cast<const __m128i*>(block->low + at)));
      c1[v] = _mm256_cvtepu32_epi64(_mm_load_si128(reinterpret_cast<const __m128i*>(block->high + at)));
      c2[v] = _mm256_cvtepu32_epi64(_mm_load_si128(reinterpret_cast<const __m128i*>(block->tree + at)));
      c3[v] = _mm256_setzero_si256();
    }
    auto k0 = static_cast<uint32_t>(key);
    auto k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      const __m256i key0 = _mm256_set1_epi64x(k0), key1 = _mm256_set1_epi64x(k1);
      for (int v = 0; v < 4; ++v) {
        const __m256i a = _mm256_mul_epu32(c0[v], m0), b = _mm256_mul_epu32(c2[v], m1);
        c0[v] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(b, 32), c1[v]), key0);
        c1[v] = b;
        c2[v] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(a, 32), c3[v]), key1);
        c3[v] = a;
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int v = 0; v < 4; ++v) {
      const __m256i word = _mm256_blend_epi32(c0[v], _mm256_slli_epi64(c1[v], 32), 0xAA);
      _mm256_store_si256(reinterpret_cast<__m256i*>(block->word + e + 4 * v), word);
    }
  }
}
#endif

inline void make_words_lanes4(WordBlock* block, int64_t size, uint64_t key) {
  for (int64_t e = 0; e < size; e += kLanes) {
    u32x4 state[kChains][4];
    for (int v = 0; v < kChains; ++v) {
      state[v][0] = load4(block->low + e + 4 * v);
      state[v][1] = load4(block->high + e + 4 * v);
      state[v][2] = load4(block->tree + e + 4 * v);
      state[v][3] = splat(0);
    }
    philox4x32_lanes(state, key);
    for (int l = 0; l < kLanes; ++l) {
      block->word[e + l] = (static_cast<uint64_t>(state[l / 4][1][l % 4]) << 32) | state[l / 4][0][l % 4];
    }
  }
}

// block->word[i] for i < size.
inline void make_words64(WordBlock* block, int64_t size, uint64_t key) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) {
    make_words_avx2(block, size, key);
    return;
  }
#endif
  make_words_lanes4(block, size, key);
}

}  // namespace gnnsys
