// How a neighbour is drawn: the part of sampling that must come out bit-equal on every thread, part and device.
//
// A Stream addresses the random words of one (seed, epoch, batch, hop, edge type), folded into `key` by the caller,
// of one node (its original id) and one tree. Philox counter: {node low, node high, tree | attempt << 24, block}.
// Bounded draws are Lemire's multiply-and-reject, so they are unbiased; a rejected word is drawn again at the next
// attempt, which leaves every other draw where it is. Floating point is restricted to IEEE + - * / without
// contraction, which CPUs and GPUs round alike.
#pragma once

#include "common/philox.h"

#include <cstring>

namespace gnnsys {

constexpr uint32_t kMaxTree = (1u << 24) - 1;
constexpr uint32_t kMaxAttempt = 255;

struct Stream {
  uint64_t key;
  uint64_t node;
  uint32_t tree;

  GNNSYS_HD Words words(uint32_t block, uint32_t attempt) const {
    return philox4x32(static_cast<uint32_t>(node), static_cast<uint32_t>(node >> 32), tree | (attempt << 24), block,
                      key);
  }
  // The 64-bit word at index i: two to a block.
  GNNSYS_HD uint64_t word64(uint64_t i, uint32_t attempt) const {
    const Words r = words(static_cast<uint32_t>(i >> 1), attempt);
    const int half = static_cast<int>(i & 1) * 2;
    return (static_cast<uint64_t>(r.w[half + 1]) << 32) | r.w[half];
  }
};

// Draw `index` of a stream, uniform in [0, bound), from its first word; further attempts are fetched when rejected.
GNNSYS_HD uint32_t bounded(const Stream& stream, uint32_t index, uint32_t word, uint32_t bound) {
  uint64_t product = static_cast<uint64_t>(word) * bound;
  if (__builtin_expect(static_cast<uint32_t>(product) < bound, 0)) {
    const uint32_t threshold = (0u - bound) % bound;
    for (uint32_t attempt = 1; static_cast<uint32_t>(product) < threshold && attempt <= kMaxAttempt; ++attempt) {
      product = static_cast<uint64_t>(stream.words(index >> 2, attempt).w[index & 3]) * bound;
    }
  }
  return static_cast<uint32_t>(product >> 32);
}

GNNSYS_HD uint64_t mul_high64(uint64_t a, uint64_t b, uint64_t* low) {
#ifdef __CUDA_ARCH__
  *low = a * b;
  return __umul64hi(a, b);
#else
  const auto product = static_cast<unsigned __int128>(a) * b;
  *low = static_cast<uint64_t>(product);
  return static_cast<uint64_t>(product >> 64);
#endif
}

// The same in 64 bits, for weighted draws with replacement.
GNNSYS_HD uint64_t bounded64(const Stream& stream, uint64_t index, uint64_t bound) {
  uint64_t low;
  uint64_t high = mul_high64(stream.word64(index, 0), bound, &low);
  if (low < bound) {
    const uint64_t threshold = (0ull - bound) % bound;
    for (uint32_t attempt = 1; low < threshold && attempt <= kMaxAttempt; ++attempt) {
      high = mul_high64(stream.word64(index, attempt), bound, &low);
    }
  }
  return high;
}

// Products and sums that are never contracted into one rounding: the host's compiler is told so by a flag, the device's
// by these.
GNNSYS_HD double mul_rn(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

GNNSYS_HD double add_rn(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

// -ln(u) for u in (0, 1), from basic operations only: u = m * 2^e with m in [sqrt(1/2), sqrt(2)), and
// ln m = 2 atanh(s) with s = (m - 1) / (m + 1), |s| <= 0.172: ten terms leave an error below 1e-16.
GNNSYS_HD double negative_log(double u) {
  uint64_t bits;
  memcpy(&bits, &u, sizeof(bits));
  int exponent = static_cast<int>((bits >> 52) & 0x7FF) - 1023;
  uint64_t mantissa_bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  double m;
  memcpy(&m, &mantissa_bits, sizeof(m));
  if (m > 1.4142135623730951) {
    m = mul_rn(m, 0.5);
    exponent += 1;
  }
  const double s = add_rn(m, -1.0) / add_rn(m, 1.0);
  const double z = mul_rn(s, s);
  double p = 1.0 / 19.0;
  p = add_rn(mul_rn(p, z), 1.0 / 17.0);
  p = add_rn(mul_rn(p, z), 1.0 / 15.0);
  p = add_rn(mul_rn(p, z), 1.0 / 13.0);
  p = add_rn(mul_rn(p, z), 1.0 / 11.0);
  p = add_rn(mul_rn(p, z), 1.0 / 9.0);
  p = add_rn(mul_rn(p, z), 1.0 / 7.0);
  p = add_rn(mul_rn(p, z), 1.0 / 5.0);
  p = add_rn(mul_rn(p, z), 1.0 / 3.0);
  p = add_rn(mul_rn(p, z), 1.0);
  return -add_rn(mul_rn(static_cast<double>(exponent), 0.6931471805599453), mul_rn(mul_rn(2.0, s), p));
}

}  // namespace gnnsys
