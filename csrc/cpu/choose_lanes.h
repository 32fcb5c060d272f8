// Choosing k of n for kLanes nodes side by side, bit-equal to RankChooser (choose.h).
//
// Draw j of lane l stands at [j * kLanes + l], so that four lanes are one vector and nothing branches on what was drawn.
// Work per lane: k^2 / 2 comparisons for repeats and about k (log k)^2 / 4 exchanges to sort, a quarter of an instruction
// each, which for k up to kMostLaneDraws is less than a set of what was drawn.
#pragma once

#include "common/u32x4.h"
#include "cpu/philox_lanes.h"

#include <cstdint>

namespace gnnsys {

constexpr uint32_t kMostLaneDraws = 64;

// A row of the layout: one draw of every lane.
struct LaneRow {
  u32x4 part[kChains];

  static LaneRow load(const uint32_t* from) {
    LaneRow row;
    for (int v = 0; v < kChains; ++v) {
      row.part[v] = load4(from + 4 * v);
    }
    return row;
  }
  void store(uint32_t* to) const {
    for (int v = 0; v < kChains; ++v) {
      store4(to + 4 * v, part[v]);
    }
  }
};

// Sorts k rows, each lane on its own: Batcher's merge exchange (Knuth 5.2.2, Algorithm M), for any k.
inline void sort_lanes(uint32_t* ranks, uint32_t k) {
  uint32_t top = 1;
  while (2 * top < k) {
    top *= 2;
  }
  for (uint32_t p = k < 2 ? 0 : top; p > 0; p /= 2) {
    uint32_t r = 0;
    uint32_t d = p;
    for (uint32_t q = top;; q /= 2) {
      for (uint32_t i = 0; i + d < k; ++i) {
        if ((i & p) != r) {
          continue;
        }
        LaneRow low = LaneRow::load(ranks + i * kLanes);
        LaneRow high = LaneRow::load(ranks + (i + d) * kLanes);
        for (int v = 0; v < kChains; ++v) {
          order(&low.part[v], &high.part[v]);
        }
        low.store(ranks + i * kLanes);
        high.store(ranks + (i + d) * kLanes);
      }
      if (q == p) {
        break;
      }
      d = q - p;
      r = p;
    }
  }
}

// Ranks of k draws of [0, sizes[l]) in each lane, ascending, all different unless they may `repeat`; without repeats
// k <= sizes[l]. Returns the lanes, a bit each, in which Lemire's test may have rejected a word: their ranks are void.
inline uint32_t choose_lanes(const uint32_t* words, const uint32_t* sizes, uint32_t k, bool repeat, uint32_t* ranks) {
  const LaneRow size = LaneRow::load(sizes);
  LaneRow doubtful = {};
  for (uint32_t j = 0; j < k; ++j) {
    const LaneRow word = LaneRow::load(words + j * kLanes);
    LaneRow bound = size;
    LaneRow drawn;
    LaneRow taken = {};
    for (int v = 0; v < kChains; ++v) {
      u32x4 low;
      bound.part[v] -= splat(repeat ? 0 : k - 1 - j);
      multiply(word.part[v], bound.part[v], &drawn.part[v], &low);
      doubtful.part[v] |= static_cast<u32x4>(low < bound.part[v]);
    }
    for (uint32_t i = 0; i < (repeat ? 0 : j); ++i) {
      const LaneRow before = LaneRow::load(ranks + i * kLanes);
      for (int v = 0; v < kChains; ++v) {
        taken.part[v] |= static_cast<u32x4>(before.part[v] == drawn.part[v]);
      }
    }
    for (int v = 0; v < kChains; ++v) {  // Floyd: the last rank in place of one that is in
      drawn.part[v] = (drawn.part[v] & ~taken.part[v]) | ((bound.part[v] - splat(1)) & taken.part[v]);
    }
    drawn.store(ranks + j * kLanes);
  }
  sort_lanes(ranks, k);
  uint32_t lanes = 0;
  for (int l = 0; l < kLanes; ++l) {
    lanes |= (doubtful.part[l / 4][l % 4] & 1u) << l;
  }
  return lanes;
}

}  // namespace gnnsys
