// Host memory that std::vector and the like ask for: where there is none, the error says how much was asked for.
//
// The linker sends this library's calls of operator new here (--wrap, see setup.py), and leaves torch's and everyone
// else's alone. The memory is the same: only the exception is another, and still a std::bad_alloc.
#include "common/out_of_memory.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>

#ifdef GNNSYS_WRAPPED_NEW

extern "C" {

void* __real__Znwm(std::size_t bytes);

void* __wrap__Znwm(std::size_t bytes) {
  try {
    return __real__Znwm(bytes);
  } catch (const std::bad_alloc&) {
    throw gnnsys::OutOfHostMemory(static_cast<int64_t>(std::min<std::size_t>(bytes, gnnsys::kBytesOverflow)));
  }
}

}  // extern "C"

#endif
