// Choosing k of n: the combinatorial core of sampling, on ranks. Work is O(k log k) whatever n is.
#pragma once

#include "common/draw.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gnnsys {

// Small arrays are the common case (fanouts of 5 to 32).
inline void sort_ranks(uint32_t* ranks, uint32_t k) {
  if (k > 32) {
    std::sort(ranks, ranks + k);
    return;
  }
  for (uint32_t i = 1; i < k; ++i) {
    const uint32_t value = ranks[i];
    uint32_t j = i;
    for (; j > 0 && ranks[j - 1] > value; --j) {
      ranks[j] = ranks[j - 1];
    }
    ranks[j] = value;
  }
}

// Reused between the nodes that one thread samples.
class RankChooser {
 public:
  // k draws of [0, n) with replacement, ascending.
  void with_replacement(const Stream& stream, uint32_t n, uint32_t k, uint32_t* ranks) const {
    for (uint32_t i = 0; i < k; i += 4) {
      const Words r = stream.words(i >> 2, 0);
      for (uint32_t j = i; j < std::min(i + 4, k); ++j) {
        ranks[j] = bounded(stream, j, r.w[j & 3], n);
      }
    }
    sort_ranks(ranks, k);
  }

  // A uniform k-subset of [0, n), k <= n, ascending. Floyd: the i-th draw is from [0, n - k + i]; when it hits a rank
  // that is already in, the rank n - k + i itself goes in.
  void without_replacement(const Stream& stream, uint32_t n, uint32_t k, uint32_t* ranks) {
    if (k > kLinear) {
      reset_set(k);
    }
    for (uint32_t i = 0; i < k; i += 4) {
      const Words r = stream.words(i >> 2, 0);
      for (uint32_t j = i; j < std::min(i + 4, k); ++j) {
        const uint32_t last = n - k + j;
        const uint32_t drawn = bounded(stream, j, r.w[j & 3], last + 1);
        const bool taken = k > kLinear ? !insert(drawn) : contains(ranks, j, drawn);
        ranks[j] = taken ? last : drawn;
        if (taken && k > kLinear) {
          insert(last);
        }
      }
    }
    sort_ranks(ranks, k);
  }

 private:
  static constexpr uint32_t kLinear = 48;  // up to here a scan beats a hash set
  static constexpr uint32_t kEmpty = 0xFFFFFFFFu;

  static bool contains(const uint32_t* ranks, uint32_t size, uint32_t value) {
    bool found = false;
    for (uint32_t i = 0; i < size; ++i) {
      found |= ranks[i] == value;
    }
    return found;
  }

  void reset_set(uint32_t k) {
    size_t capacity = 128;
    while (capacity < 2 * static_cast<size_t>(k)) {
      capacity *= 2;
    }
    set_.assign(capacity, kEmpty);
  }

  bool insert(uint32_t value) {
    const size_t mask = set_.size() - 1;
    size_t slot = (value * 0x9E3779B97F4A7C15ull >> 32) & mask;
    for (; set_[slot] != kEmpty; slot = (slot + 1) & mask) {
      if (set_[slot] == value) {
        return false;
      }
    }
    set_[slot] = value;
    return true;
  }

  std::vector<uint32_t> set_;
};

}  // namespace gnnsys
