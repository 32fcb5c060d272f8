// What dropout_rows is, on every device: value (row, column c) is dropped where word c % 4 at Philox counter
// {id low, id high, c / 4, kRowDropoutStream} is below `threshold`. Nothing else of the call enters, so a node's mask
// is the same on any number of ranks, bins and threads, for every dtype, on CPU and GPU.
//
// What is kept is multiplied by 1 / (1 - p): rounded to double, then to the type that rows are computed in (double for
// double, else float), in which the product is made. What is dropped is +0, whatever it was.
#pragma once

#include "common/philox.h"
#include "common/row_shape.h"

namespace gnnsys {

// Keeps these draws apart from others under the same key. Sampling and generation count up from 0 in this place and
// never get to the upper half of its values; attention's dropout has a constant of its own, in the lower half.
constexpr uint32_t kRowDropoutStream = 0x80726F77u;

struct RowDropout {
  uint32_t threshold;  // floor(p * 2^32): below 2^32, since p is below 1
  double scale;
  uint64_t key;
};

inline RowDropout row_dropout(double p, int64_t key) {
  CHECK_ARG(p >= 0 && p < 1, "p must be in [0, 1), got ", p);
  return {static_cast<uint32_t>(p * 4294967296.0), 1.0 / (1.0 - p), static_cast<uint64_t>(key)};
}

// The same on every device, which checks dtype, place and contiguity itself.
inline void check_dropout_shapes(const Tensor& x, const Tensor& ids) {
  CHECK_ARG(x.dim() >= 1, "x must have a row per id, got a scalar");
  CHECK_ARG(x.size(0) == ids.numel(), "x must have a row per id, ", ids.numel(), ", got ", x.size(0));
  CHECK_ARG(row_size(x) <= (int64_t{1} << 34), "x must have at most 2^34 values in a row, got ", row_size(x));
}

}  // namespace gnnsys
