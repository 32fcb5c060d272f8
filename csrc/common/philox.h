// Philox4x32-10 (Salmon et al., SC'11): a random word is a pure function of (key, counter).
//
// Every draw in gnnsys is addressed, never taken from a sequence, so it is the same on any thread, part, rank or
// device. The layout of a counter for sampling is in cpu/sample.cpp.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define GNNSYS_HD __host__ __device__ inline
#else
#define GNNSYS_HD inline
#endif

namespace gnnsys {

struct Words {
  uint32_t w[4];
};

GNNSYS_HD uint32_t mul_high(uint32_t a, uint32_t b, uint32_t* low) {
  const uint64_t product = static_cast<uint64_t>(a) * b;
  *low = static_cast<uint32_t>(product);
  return static_cast<uint32_t>(product >> 32);
}

GNNSYS_HD Words philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    uint32_t low0, low1;
    const uint32_t high0 = mul_high(0xD2511F53u, c0, &low0);
    const uint32_t high1 = mul_high(0xCD9E8D57u, c2, &low1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// 64 random bits at (a, b): two 64-bit coordinates.
GNNSYS_HD uint64_t philox_u64(uint64_t a, uint64_t b, uint64_t key) {
  const Words r = philox4x32(static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b),
                             static_cast<uint32_t>(b >> 32), key);
  return (static_cast<uint64_t>(r.w[1]) << 32) | r.w[0];
}

// Uniform in (0, 1): never 0, never 1, exact in double.
GNNSYS_HD double open_unit(uint64_t word) { return (static_cast<double>(word >> 12) + 0.5) * 0x1p-52; }

}  // namespace gnnsys
