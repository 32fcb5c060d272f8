// Large new memory by huge pages, where the system gives them to those who ask: the first write to each page is a fault,
// and half a gigabyte has 131,072 small pages, which take as long as a quarter of the product that is written to them.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace gnnsys {

constexpr uintptr_t kHugePage = 1 << 21;
constexpr int64_t kLeastHuge = 1 << 25;  // bytes: the C library has smaller blocks that were written before

inline void ask_for_huge_pages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes >= kLeastHuge) {
    const auto begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
    const auto end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // if not, pages are small
  }
#endif
}

}  // namespace gnnsys
