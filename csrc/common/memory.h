// What the hardware is told about memory: lines wanted soon, and large outputs that should sit on huge pages.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace gnnsys {

constexpr int64_t kCacheLine = 64;

// Asks for a line in every `stride` bytes of [data, data + bytes). Running over the end of an array is harmless.
inline void prefetch_read(const void* data, int64_t bytes, int64_t stride = kCacheLine) {
  const char* p = static_cast<const char*>(data);
  for (int64_t offset = 0; offset < bytes; offset += stride) {
    __builtin_prefetch(p + offset, 0, 3);
  }
}

// Backs a fresh output with huge pages where the system leaves the choice to the program: a page fault per 2 MiB
// instead of one per 4 KiB. No effect on memory that has been touched already, nor on its contents.
inline void advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  const auto start = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const auto end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) & ~(kHugePage - 1);
  if (start < end) {
    (void)madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
  }
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace gnnsys
