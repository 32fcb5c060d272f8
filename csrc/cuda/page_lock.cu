// lock_pages and unlock_pages: host memory that a device may read where it is, such as a file that is mapped.
//
// CUDA refuses some memory (a file system, a limit, a map that may be written): what it says is returned, not thrown,
// and taken back, so that the next call of whoever else is not told of it.
#include "common/register.h"
#include "cuda/device.h"

namespace gnnsys::cuda {
namespace {

int64_t without_error(cudaError_t status) {
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
  }
  return static_cast<int64_t>(status);
}

int64_t lock_pages(const Tensor& on, int64_t address, int64_t bytes, bool read_only) {
  CHECK_ARG(on.is_cuda(), "on must be a tensor on the device that is to read the memory");
  CHECK_ARG(address != 0 && bytes > 0, "there must be memory to lock, got ", bytes, " bytes");
  const Device device(on);
  const unsigned flags = cudaHostRegisterPortable | (read_only ? cudaHostRegisterReadOnly : 0u);
  return without_error(cudaHostRegister(reinterpret_cast<void*>(address), static_cast<size_t>(bytes), flags));
}

int64_t unlock_pages(const Tensor& on, int64_t address) {
  const Device device(on);
  return without_error(cudaHostUnregister(reinterpret_cast<void*>(address)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "lock_pages", &lock_pages);
  REGISTER_OP(m, "unlock_pages", &unlock_pages);
}

}  // namespace gnnsys::cuda
