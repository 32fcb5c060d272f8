// Sums over long rows. A float that has gathered a hundred thousand terms is so much larger than the next that most of
// its digits are lost: so floats sum blocks of kBlock terms, and doubles the blocks. A row of one block has the bits of
// a plain sum; a longer one costs an addition per kBlock more. Neither depends on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace gnnsys {

constexpr int64_t kBlock = 256;  // terms; a multiple of kChunk (vectors/kernels.h)

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

// sums[h] = sum of term(k, h) over k in [begin, end): four heads at a time, which fit a vector, then one.
template <typename A, typename Term>
inline __attribute__((always_inline)) void sum_block(A* sums, int64_t heads, int64_t begin, int64_t end, Term term) {
  int64_t first = 0;
  const auto add = [&](auto width) {
    constexpr int64_t kHeads = decltype(width)::value;
    for (; first + kHeads <= heads; first += kHeads) {
      A sum[kHeads] = {};
      for (int64_t k = begin; k < end; ++k) {
        for (int64_t h = 0; h < kHeads; ++h) {
          sum[h] += term(k, first + h);
        }
      }
      std::copy_n(sum, kHeads, sums + first);
    }
  };
  add(std::integral_constant<int64_t, 4>{});
  add(std::integral_constant<int64_t, 1>{});
}

// The same over a row of `count` terms, however many.
template <typename A, typename Term>
inline __attribute__((always_inline)) void sum_terms(BlockSum<A>& blocks, A* sums, int64_t heads, int64_t count,
                                                     Term term) {
  sum_block(sums, heads, 0, std::min(kBlock, count), term);
  if (count > kBlock) {
    blocks.after(sums, heads, kBlock, count);
    for (int64_t begin = kBlock; begin < count; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, count);
      sum_block(sums, heads, begin, end, term);
      blocks.after(sums, heads, end, count);
    }
  }
}

}  // namespace gnnsys
