// Gives back the memory that a mapped file's pages hold once they were read.
#include "common/check.h"
#include "common/register.h"

#include <sys/mman.h>
#include <unistd.h>

namespace gnnsys {
namespace {

// Whole pages inside the tensor's bytes. MADV_PAGEOUT never loses content, whatever the memory is: pages of a file
// are dropped, anything else goes to swap where there is some. A kernel without it (before 5.4) leaves them resident.
void drop_pages(const Tensor& rows) {
  check_contiguous(rows, "rows");
#ifdef MADV_PAGEOUT
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(rows.const_data_ptr());
  const uintptr_t end = begin + static_cast<uintptr_t>(rows.numel()) * rows.element_size();
  const uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
  if (first < last) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_PAGEOUT);
  }
#endif
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "drop_pages", &gnnsys::drop_pages); }
