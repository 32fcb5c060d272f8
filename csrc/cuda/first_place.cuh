// Node -> the first place it has in a list, by open addressing at most half full: what edges among nodes are found by.
#pragma once

#include "cuda/scan.cuh"

namespace gnnsys::cuda {

// All ones: empty.
struct alignas(16) Slot {
  word_t node;
  word_t place;
};

struct FirstPlace {
  Slot* slots;
  int shift;  // 64 - log2(number of slots)

  static int bits_for(int64_t num_listed) {
    int bits = 1;
    while ((int64_t{1} << bits) < 2 * num_listed) {
      ++bits;
    }
    return bits;
  }

  static FirstPlace clear(const Device& device, const Tensor& slots, int bits) {
    CUDA_CHECK(cudaMemsetAsync(slots.mutable_data_ptr(), 0xFF, sizeof(Slot) << bits, device.stream()));
    return {mutable_data<Slot>(slots), 64 - bits};
  }

  __device__ word_t hash(int64_t node) const {
    return static_cast<word_t>(node) * 0x9E3779B97F4A7C15ull >> shift;
  }
  __device__ word_t mask() const { return ~word_t{0} >> shift; }

  // Whoever comes first takes the slot, the smallest place stays: the same table for every order of threads, but for
  // where in a run of slots a node is.
  __device__ void insert(int64_t node, int64_t place) const {
    const auto wanted = static_cast<word_t>(node);
    for (word_t at = hash(node);; at = (at + 1) & mask()) {
      const word_t found = atomicCAS(&slots[at].node, ~word_t{0}, wanted);
      if (found == ~word_t{0} || found == wanted) {
        atomicMin(&slots[at].place, static_cast<word_t>(place));
        return;
      }
    }
  }

  // -1 when the node is not in the list.
  __device__ int64_t operator()(int64_t node) const {
    for (word_t at = hash(node);; at = (at + 1) & mask()) {
      const Slot slot = slots[at];
      if (slot.node == ~word_t{0} || slot.node == static_cast<word_t>(node)) {
        return static_cast<int64_t>(slot.place);
      }
    }
  }
};

}  // namespace gnnsys::cuda
