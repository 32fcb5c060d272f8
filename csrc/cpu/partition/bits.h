// One bit per id, in 64-bit words held by an int64 tensor: sets of nodes at an eighth of a byte each, with the rank of
// a member found by a count of bits.
#pragma once

#include "common/check.h"

#include <cstdint>

namespace gnnsys {

constexpr int64_t kBitsPerWord = 64;

inline int64_t words_for(int64_t num_bits) { return (num_bits + kBitsPerWord - 1) / kBitsPerWord; }

inline uint64_t bit_of(int64_t id) { return uint64_t{1} << (id & (kBitsPerWord - 1)); }

// Sets a bit that other threads may set too; whether it was this call that did. A set bit is not written again, so
// that the lines of hubs are shared by all cores.
inline bool set_bit(uint64_t* words, int64_t id) {
  uint64_t* const word = words + id / kBitsPerWord;
  const uint64_t bit = bit_of(id);
  if (__atomic_load_n(word, __ATOMIC_RELAXED) & bit) {
    return false;
  }
  return (__atomic_fetch_or(word, bit, __ATOMIC_RELAXED) & bit) == 0;
}

// A set and, per word, the number of members before it.
struct RankedBits {
  const uint64_t* words;
  const int32_t* ranks;

  bool has(int64_t id) const { return (words[id / kBitsPerWord] & bit_of(id)) != 0; }

  int64_t rank(int64_t id) const {
    const int64_t word = id / kBitsPerWord;
    return int64_t{ranks[word]} + __builtin_popcountll(words[word] & (bit_of(id) - 1));
  }
};

inline void check_bits(const Tensor& mask, int64_t num_bits, const char* name) {
  check_vector(mask, name);
  check_dtype(mask, ScalarType::Long, name);
  CHECK_ARG(mask.numel() == words_for(num_bits), name, " must have ", words_for(num_bits), " words for ", num_bits,
            " ids, got ", mask.numel());
}

}  // namespace gnnsys
