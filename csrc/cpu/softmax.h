// Softmax over the in-edges of one row, all heads at once: scores [count, heads], contiguous.
#pragma once

#include "cpu/block_sum.h"
#include "cpu/vectors/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace gnnsys {

// What a row is shifted by and divided by, per head: alpha = exp(score - shift) / total.
template <typename A>
struct RowSoftmax {
  std::vector<A> shift;
  std::vector<A> total;
  BlockSum<A> blocks;

  explicit RowSoftmax(int64_t heads) : shift(heads), total(heads) {}

  // scores become alpha, in place. The shift is the largest score, so that nothing overflows.
  void operator()(A* scores, int64_t count) {
    const int64_t heads = static_cast<int64_t>(shift.size());
    std::fill(shift.begin(), shift.end(), -std::numeric_limits<A>::infinity());
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t h = 0; h < heads; ++h) {
        shift[h] = std::max(shift[h], scores[k * heads + h]);
      }
    }
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t h = 0; h < heads; ++h) {
        scores[k * heads + h] -= shift[h];
      }
    }
    exp_all(scores, count * heads);
    sum_terms(blocks, total.data(), heads, count, [=](int64_t k, int64_t h) { return scores[k * heads + h]; });
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t h = 0; h < heads; ++h) {
        scores[k * heads + h] /= total[h];
      }
    }
  }
};

}  // namespace gnnsys
