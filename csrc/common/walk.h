// One step of a random walk along in-edges, the same on every device: what cpu/walks.cpp and cuda/walks.cu share.
//
// A step is the draw of `sample_neighbors` with a fanout of 1 whose tree is the walk's number, so walks can also be made
// step by step, as they are on parts. A restart is `draw_below`'s coin of the walk's number.
#pragma once

#include "common/draw.h"

namespace gnnsys {

constexpr int64_t kMaxWalks = static_cast<int64_t>(kMaxTree) + 1;
constexpr int kCoinBits = 53;
constexpr uint64_t kCoinSides = uint64_t{1} << kCoinBits;

// Which of n >= 1 in-edges is taken from a node, given by its original id.
GNNSYS_HD uint32_t walk_rank(uint64_t key, uint64_t node, uint32_t walk, uint32_t n) {
  const Stream stream{key, node, walk};
  return n == 1 ? 0u : bounded(stream, 0, stream.words(0, 0).w[0], n);
}

// Whether a walk goes back to its root instead of a step, with probability coin / 2^53. By the first word of its stream:
// `bounded64` makes the same of it, as a bound that is a power of two rejects no word.
GNNSYS_HD bool walk_restarts(uint64_t word, uint64_t coin) { return word >> (64 - kCoinBits) < coin; }

GNNSYS_HD bool walk_restarts(uint64_t key, uint32_t walk, uint64_t coin) {
  return walk_restarts(Stream{key, walk, 0u}.word64(0, 0), coin);
}

}  // namespace gnnsys
