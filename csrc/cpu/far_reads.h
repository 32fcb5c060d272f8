// Many reads of memory that is far away and lies anywhere.
//
// A processor has as many of them in flight as fit its window of a hundred or two instructions, so a loop is the faster
// the fewer instructions there are to a read: eight reads at a time, and nothing else in the loop. On Neoverse N1 that is
// a quarter faster than one at a time. Prefetch instructions are no way around the window there: many are dropped, and
// the others take the time of a read.
#pragma once

#include <cstdint>

namespace gnnsys {

constexpr int kReadsTogether = 8;

// out[i] = read(i) for i in [0, size).
template <typename T, typename Read>
void read_far(int64_t size, T* out, const Read& read) {
  int64_t i = 0;
  for (; i + kReadsTogether <= size; i += kReadsTogether) {
    T found[kReadsTogether];
    for (int j = 0; j < kReadsTogether; ++j) {
      found[j] = read(i + j);
    }
    for (int j = 0; j < kReadsTogether; ++j) {
      out[i + j] = found[j];
    }
  }
  for (; i < size; ++i) {
    out[i] = read(i);
  }
}

// Brings what read(i) returns, a 64-bit word, into the cache, for i in [0, size).
template <typename Read>
void touch_far(int64_t size, const Read& read) {
  uint64_t seen = 0;
  int64_t i = 0;
  for (; i + kReadsTogether <= size; i += kReadsTogether) {
    for (int j = 0; j < kReadsTogether; ++j) {
      seen |= read(i + j);
    }
  }
  for (; i < size; ++i) {
    seen |= read(i);
  }
  asm volatile("" : : "r"(seen));  // the compiler believes that it is used
}

}  // namespace gnnsys
