// Telling the hardware which memory is wanted soon: rows of a table lie far apart, and no machine guesses the next one.
#pragma once

#include <cstdint>

namespace gnnsys {

constexpr int64_t kCacheLine = 64;

// Asks for a line in every `stride` bytes of [data, data + bytes). Running over the end of an array is harmless.
inline void prefetch_read(const void* data, int64_t bytes, int64_t stride = kCacheLine) {
  const char* p = static_cast<const char*>(data);
  for (int64_t offset = 0; offset < bytes; offset += stride) {
    __builtin_prefetch(p + offset, 0, 3);
  }
}

}  // namespace gnnsys
