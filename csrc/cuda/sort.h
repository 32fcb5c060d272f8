// A stable radix sort of pairs, in workspace from torch's allocator; compiled once, in sort.cu.
#pragma once

#include "cuda/device.h"

#include <cstdint>

namespace gnnsys::cuda {

// Sorts by the lowest `bits` bits of the keys, eight of them a pass; a pass reads and writes every pair once. Stable.
// T is uint32_t (for sizes below 2^31) or uint64_t. Inputs are left as they are.
template <typename T>
void sort_pairs(const Device& device, const T* keys, T* sorted_keys, const T* values, T* sorted_values, int64_t size,
                int bits);

// Bits that keys of type T below `bound` need; at least one, which the sort wants.
template <typename T>
int num_key_bits(int64_t bound) {
  int bits = 1;
  while (bits < static_cast<int>(8 * sizeof(T)) - (sizeof(T) == 8) && (bound - 1) >> bits > 0) {
    ++bits;
  }
  return bits;
}

}  // namespace gnnsys::cuda
