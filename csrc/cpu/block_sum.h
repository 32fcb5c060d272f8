// Sums over long rows. A float that has gathered a hundred thousand terms is so much larger than the next that most of
// its digits are lost: so floats sum blocks of kBlock terms, and doubles the blocks. A row of one block has the bits of
// a plain sum; a longer one costs an addition per kBlock more. Neither depends on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gnnsys {

constexpr int64_t kBlock = 256;  // terms; a multiple of kChunk (accumulate.h)

// Whether the term that follows `done` others begins a block.
inline bool begins_block(int64_t done) { return done % kBlock == 0; }

// sums[i] of one row after another, in the blocks of which the caller writes them.
template <typename A>
class BlockSum {
 public:
  // After terms were added: `done` of the row's `count` are in by now. Where they end a block, sums go to the total, and
  // at the row's end the total comes back.
  void after(A* sums, int64_t size, int64_t done, int64_t count) {
    if (count > kBlock && (begins_block(done) || done == count)) {
      fold(sums, size, done, count);
    }
  }

 private:
  void fold(A* sums, int64_t size, int64_t done, int64_t count) {
    if (done <= kBlock) {
      total_.assign(static_cast<size_t>(size), 0.0);
    }
    for (int64_t i = 0; i < size; ++i) {
      total_[i] += static_cast<double>(sums[i]);
    }
    if (done == count) {
      std::transform(total_.begin(), total_.end(), sums, [](double value) { return static_cast<A>(value); });
    }
  }

  std::vector<double> total_;
};

// sums[h] = sum of term(k, h) over k in [0, count).
template <typename A, typename Term>
void sum_terms(BlockSum<A>& blocks, A* sums, int64_t heads, int64_t count, const Term& term) {
  std::fill_n(sums, heads, A{0});
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    std::fill_n(sums, heads, A{0});
    for (int64_t k = begin; k < end; ++k) {
      for (int64_t h = 0; h < heads; ++h) {
        sums[h] += term(k, h);
      }
    }
    blocks.after(sums, heads, end, count);
  }
}

}  // namespace gnnsys
