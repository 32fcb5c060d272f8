// Choosing k of n: the combinatorial core of sampling, on ranks. Work is O(k log k) whatever n is.
//
// Both choosers take the stream's first-attempt words, ready made (draw i uses words[i]), so that a caller with many
// nodes can make them with SIMD; rejected draws, which are rare, go back to the stream.
#pragma once

#include "common/draw.h"
#include "common/u32x4.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gnnsys {

constexpr uint32_t kNoRank = 0xFFFFFFFFu;

inline void make_words(const Stream& stream, uint32_t k, uint32_t* words) {
  for (uint32_t block = 0; 4 * block < k; ++block) {
    const Words r = stream.words(block, 0);
    std::copy_n(r.w, std::min(4u, k - 4 * block), words + 4 * block);
  }
}

// Up to 4 * V ranks, in vector registers for comparing all of them with one and in memory for taking one out; writing a
// lane through memory would stall every comparison that follows. Unused lanes hold kNoRank.
template <int V>
class SmallRanks {
 public:
  SmallRanks() {
    for (int v = 0; v < V; ++v) {
      lanes_[v] = splat(kNoRank);
    }
  }

  bool contains(uint32_t rank) const {
    u32x4 equal = {};
    for (int v = 0; v < V; ++v) {
      equal |= static_cast<u32x4>(lanes_[v] == splat(rank));
    }
    return sum_lanes(equal) != 0;  // up to four times -1
  }

  void set(uint32_t i, uint32_t rank) {
    words_[i] = rank;
    for (int v = 0; v < V; ++v) {
      const u32x4 lane = u32x4{0, 1, 2, 3} + splat(4 * static_cast<uint32_t>(v));
      const auto here = static_cast<u32x4>(lane == splat(i));
      lanes_[v] = (lanes_[v] & ~here) | (splat(rank) & here);
    }
  }

  // Writes the first k, all different, in ascending order, each to where the count of smaller ones puts it: no branch to mispredict.
  void write_sorted(uint32_t k, uint32_t* out) const {
    for (uint32_t j = 0; j < k; ++j) {
      u32x4 smaller = {};
      for (int v = 0; v < V; ++v) {
        smaller += static_cast<u32x4>(lanes_[v] < splat(words_[j]));
      }
      out[0u - sum_lanes(smaller)] = words_[j];
    }
  }

 private:
  u32x4 lanes_[V];
  uint32_t words_[4 * V];
};

// Reused between the nodes that one thread samples.
class RankChooser {
 public:
  // k draws of [0, n) with replacement, ascending.
  void with_replacement(const Stream& stream, const uint32_t* words, uint32_t n, uint32_t k, uint32_t* ranks) const {
    for (uint32_t j = 0; j < k; ++j) {
      ranks[j] = bounded(stream, j, words[j], n);
    }
    std::sort(ranks, ranks + k);
  }

  // A uniform k-subset of [0, n), k <= n, ascending. Floyd: draw j is from [0, n - k + j]; when it hits a rank that is
  // already in, the rank n - k + j itself goes in.
  void without_replacement(const Stream& stream, const uint32_t* words, uint32_t n, uint32_t k, uint32_t* ranks) {
    switch ((k + 3) / 4) {
      case 0:
        return;
      case 1:
        return small_subset<1>(stream, words, n, k, ranks);
      case 2:
        return small_subset<2>(stream, words, n, k, ranks);
      case 3:
        return small_subset<3>(stream, words, n, k, ranks);
      case 4:
        return small_subset<4>(stream, words, n, k, ranks);
      default:
        return large_subset(stream, words, n, k, ranks);
    }
  }

 private:
  template <int V>
  static void small_subset(const Stream& stream, const uint32_t* words, uint32_t n, uint32_t k, uint32_t* ranks) {
    SmallRanks<V> chosen;
    for (uint32_t j = 0; j < k; ++j) {
      const uint32_t last = n - k + j;
      const uint32_t drawn = bounded(stream, j, words[j], last + 1);
      chosen.set(j, chosen.contains(drawn) ? last : drawn);
    }
    chosen.write_sorted(k, ranks);
  }

  void large_subset(const Stream& stream, const uint32_t* words, uint32_t n, uint32_t k, uint32_t* ranks) {
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
