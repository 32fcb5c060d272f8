// An op that throws what csrc/cuda throws where a device has no memory left, registered through torch's C shim alone, so
// that it compiles in a second and runs without a GPU.
#include "cuda/out_of_memory.h"

#include <torch/csrc/stable/c/shim.h>

namespace {

void run_out(StableIValue*, uint64_t, uint64_t) {
  try {
    throw gnnsys::cuda::OutOfDeviceMemory(int64_t{3} << 30, 1, 1000, 2000, "words of torch");
  } catch (gnnsys::MemoryRequest& request) {
    request.set_op("gnnsys::spmm");
    throw;
  }
}

[[maybe_unused]] const bool registered = [] {
  TorchLibraryHandle library = nullptr;
  aoti_torch_library_init_fragment("gnnsys_thrown", __FILE__, __LINE__, &library);
  aoti_torch_library_def(library, "run_out(Tensor x) -> ()");
  TorchLibraryHandle kernels = nullptr;
  aoti_torch_library_init_impl("gnnsys_thrown", "CPU", __FILE__, __LINE__, &kernels);
  return torch_library_impl(kernels, "run_out", &run_out, TORCH_ABI_VERSION) == 0;
}();

}  // namespace
