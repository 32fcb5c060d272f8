// The reductions of the row kernel. An element is what is known of one feature of a row so far.
#pragma once

#include "cuda/device.h"

namespace gnnsys::cuda {

template <typename A>
struct Sum {
  struct Element {
    A value;
  };
  static constexpr bool kExtreme = false;
  static constexpr bool kAllVectors = true;

  __device__ static Element none() { return {A{0}}; }
  __device__ void add(Element& e, A value, int) const { e.value += value; }
  __device__ void merge(Element& e, const Element& other) const { e.value += other.value; }
  __device__ static Element exchange(unsigned mask, const Element& e, int distance) {
    return {__shfl_xor_sync(mask, e.value, distance)};
  }
};

// The largest (smallest); a NaN wins against everything; the first of equals. In which order elements meet does not
// matter, so neither does how a row is cut.
template <typename A>
struct Extreme {
  struct Element {
    A value;
    int32_t arg;  // -1: no edge yet
  };
  static constexpr bool kExtreme = true;
  static constexpr bool kAllVectors = false;
  bool minimum;

  __device__ static Element none() { return {A{0}, -1}; }
  // A lane meets the edges of a row in ascending order: a later one never wins against its equal, which saves half of the
  // comparisons. What is not at most the value so far is beyond it, a NaN too.
  __device__ void add(Element& e, A value, int at) const {
    const bool beyond = minimum ? !(value >= e.value) : !(value <= e.value);
    if (e.arg < 0 || (beyond && e.value == e.value)) {
      e = {value, at};
    }
  }
  __device__ void merge(Element& e, const Element& other) const {
    const bool nan = e.value != e.value;
    const bool other_nan = other.value != other.value;
    const bool beyond = minimum ? other.value < e.value : other.value > e.value;
    const bool equal = other.value == e.value || (nan && other_nan);
    const bool wins = beyond || (other_nan && !nan) || (equal && other.arg < e.arg) || e.arg < 0;
    if (other.arg >= 0 && wins) {
      e = other;
    }
  }
  __device__ static Element exchange(unsigned mask, const Element& e, int distance) {
    return {__shfl_xor_sync(mask, e.value, distance), __shfl_xor_sync(mask, e.arg, distance)};
  }
};

}  // namespace gnnsys::cuda
