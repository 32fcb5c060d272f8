// Choosing k of n: the combinatorial core of sampling, on ranks. Work is O(k log k) whatever n is.
//
// Both choosers take the stream's first-attempt words, ready made (draw i uses words[i]), so that a caller with many
// nodes can make them with SIMD; rejected draws, which are rare, go back to the stream.
#pragma once

#include "common/draw.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gnnsys {

constexpr uint32_t kNoRank = 0xFFFFFFFFu;
constexpr uint32_t kSmall = 16;  // up to here everything is done in a few vector registers, without branches

inline void make_words(const Stream& stream, uint32_t k, uint32_t* words) {
  for (uint32_t block = 0; 4 * block < k; ++block) {
    const Words r = stream.words(block, 0);
    std::copy_n(r.w, std::min(4u, k - 4 * block), words + 4 * block);
  }
}

// Ascending. Small arrays are sorted by counting, for each entry, the entries before it: no branch to mispredict.
inline void sort_ranks(uint32_t* ranks, uint32_t k) {
  if (k > kSmall) {
    std::sort(ranks, ranks + k);
    return;
  }
  uint32_t padded[kSmall];
  for (uint32_t i = 0; i < kSmall; ++i) {
    padded[i] = i < k ? ranks[i] : kNoRank;
  }
  for (uint32_t j = 0; j < k; ++j) {
    const uint32_t value = padded[j];
    uint32_t before = 0;
    for (uint32_t i = 0; i < kSmall; ++i) {
      before += static_cast<uint32_t>(padded[i] < value) + static_cast<uint32_t>(padded[i] == value && i < j);
    }
    ranks[before] = value;
  }
}

// Reused between the nodes that one thread samples.
class RankChooser {
 public:
  // k draws of [0, n) with replacement, ascending.
  void with_replacement(const Stream& stream, const uint32_t* words, uint32_t n, uint32_t k, uint32_t* ranks) const {
    for (uint32_t j = 0; j < k; ++j) {
      ranks[j] = bounded(stream, j, words[j], n);
    }
    sort_ranks(ranks, k);
  }

  // A uniform k-subset of [0, n), k <= n, ascending. Floyd: draw j is from [0, n - k + j]; when it hits a rank that is
  // already in, the rank n - k + j itself goes in.
  void without_replacement(const Stream& stream, const uint32_t* words, uint32_t n, uint32_t k, uint32_t* ranks) {
    if (k <= kSmall) {
      small_subset(stream, words, n, k, ranks);
      return;
    }
    reset_set(k);
    for (uint32_t j = 0; j < k; ++j) {
      const uint32_t last = n - k + j;
      const uint32_t drawn = bounded(stream, j, words[j], last + 1);
      const bool taken = !insert(drawn);
      ranks[j] = taken ? last : drawn;
      if (taken) {
        insert(last);
      }
    }
    std::sort(ranks, ranks + k);
  }

 private:
  static void small_subset(const Stream& stream, const uint32_t* words, uint32_t n, uint32_t k, uint32_t* ranks) {
    uint32_t chosen[kSmall];
    std::fill_n(chosen, kSmall, kNoRank);
    for (uint32_t j = 0; j < k; ++j) {
      const uint32_t last = n - k + j;
      const uint32_t drawn = bounded(stream, j, words[j], last + 1);
      uint32_t taken = 0;
      for (uint32_t i = 0; i < kSmall; ++i) {
        taken |= static_cast<uint32_t>(chosen[i] == drawn);
      }
      chosen[j] = taken ? last : drawn;
    }
    for (uint32_t j = 0; j < k; ++j) {
      uint32_t before = 0;
      for (uint32_t i = 0; i < kSmall; ++i) {
        before += static_cast<uint32_t>(chosen[i] < chosen[j]);
      }
      ranks[before] = chosen[j];
    }
  }

  void reset_set(uint32_t k) {
    size_t capacity = 128;
    while (capacity < 2 * static_cast<size_t>(k)) {
      capacity *= 2;
    }
    set_.assign(capacity, kNoRank);
  }

  bool insert(uint32_t value) {
    const size_t mask = set_.size() - 1;
    size_t slot = (value * 0x9E3779B97F4A7C15ull >> 32) & mask;
    for (; set_[slot] != kNoRank; slot = (slot + 1) & mask) {
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
