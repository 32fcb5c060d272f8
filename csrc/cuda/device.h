// What every CUDA kernel's host side needs: the tensors' device and stream, checks, memory, launches.
//
// Order and lifetime: all work of an op goes to torch's current stream of the tensors' device, and all memory comes from
// torch's allocator (a Tensor), so it may be dropped as soon as the last kernel that uses it is queued. Not so pinned
// host memory that kernels read: torch does not know of it, and its owner must keep it until the stream is done. Nothing
// here waits for the device but Device::read.
//
// Faults: an op that has to tell the host a size anyway carries its faults back with it and throws (ValueError). One
// that does not calls `fault` in the kernel, which ends it with a message as torch's own index kernels do.
#pragma once

#include "common/check.h"
#include "common/tensors.h"
#include "cuda/out_of_memory.h"

#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

// torch's words for the last error, where torch has them: from 2.13 on.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace gnnsys::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The driver itself may be out of memory: where a kernel is loaded, for one, which is when it is first launched.
[[noreturn]] inline void throw_cuda(cudaError_t status, const char* call) {
  (void)cudaGetLastError();  // told here: not once more by the next op
  if (status == cudaErrorMemoryAllocation) {
    int device = -1;
    (void)cudaGetDevice(&device);
    throw OutOfDeviceMemory(kBytesUnknown, device, -1, -1, call);
  }
  throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status) + " in " + call);
}

#define CUDA_CHECK(call)                            \
  do {                                              \
    const cudaError_t status_ = (call);             \
    if (status_ != cudaSuccess) {                   \
      ::gnnsys::cuda::throw_cuda(status_, #call);   \
    }                                               \
  } while (0)

// After every launch: kernel<<<...>>>(...); CUDA_CHECK_LAUNCH();
#define CUDA_CHECK_LAUNCH() CUDA_CHECK(cudaGetLastError())

// Ends the kernel where an argument turns out to be bad and nobody waits to be told.
__device__ inline void fault(const char* what, long long value, long long bound) {
  printf("gnnsys: %s must be in [0, %lld), got %lld\n", what, bound, value);
  __trap();
}

// torch's allocator has given back what it could and found no memory; or the device is broken, which is said instead.
[[noreturn]] inline void throw_no_memory(int64_t bytes, int device) {
  size_t free = 0;
  size_t total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const bool was_asked = bytes != kBytesOverflow && torch_exception_get_what_without_backtrace != nullptr;
  const char* const said = was_asked ? torch_exception_get_what_without_backtrace() : nullptr;
  if (said != nullptr && std::strstr(said, "memory") == nullptr) {
    throw std::runtime_error(said);
  }
  throw OutOfDeviceMemory(bytes, device, static_cast<int64_t>(free), static_cast<int64_t>(total), said);
}

// Pinned memory of this thread that small results land in: the driver would take pageable memory through its own, and
// that takes longer than the copy.
class Landing {
 public:
  static constexpr size_t kBytes = 4096;

  Landing() { CUDA_CHECK(cudaHostAlloc(&memory_, kBytes, cudaHostAllocPortable)); }
  ~Landing() { cudaFreeHost(memory_); }  // at the thread's end, when nobody can be told what went wrong
  Landing(const Landing&) = delete;
  Landing& operator=(const Landing&) = delete;

  static void* memory() {
    static thread_local const Landing landing;
    return landing.memory_;
  }

 private:
  void* memory_ = nullptr;
};

// The device of an op's tensors, made current, and torch's current stream on it.
class Device {
 public:
  explicit Device(const Tensor& on) : index_(on.get_device_index()), guard_(on.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }
  int index() const { return index_; }

  int num_processors() const {
    int count = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index_));
    return count;
  }

  Tensor empty(std::initializer_list<int64_t> shape, ScalarType type) const {
    return empty(shape.begin(), shape.size(), type);
  }

  Tensor empty(const std::vector<int64_t>& shape, ScalarType type) const {
    return empty(shape.data(), shape.size(), type);
  }

  // Workspace of `count` values of T, alive as long as the tensor.
  template <typename T>
  Tensor workspace(int64_t count) const {
    return empty({count, static_cast<int64_t>(sizeof(T))}, ScalarType::Byte);
  }

  // Copies `count` values to the host and waits for everything queued before: the one synchronisation there is.
  template <typename T>
  void read(T* host, const T* device, int64_t count) const {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    void* const landing = bytes <= Landing::kBytes ? Landing::memory() : host;
    CUDA_CHECK(cudaMemcpyAsync(landing, device, bytes, cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    if (landing != host) {
      std::memcpy(host, landing, bytes);
    }
  }

 private:
  Tensor empty(const int64_t* sizes, size_t num_dims, ScalarType type) const {
    return new_tensor(sizes, num_dims, type, aoti_torch_device_type_cuda(), index_,
                      [this](int64_t bytes) { throw_no_memory(bytes, index_); });
  }

  int index_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// Blocks for `count` items of `per_block` each; never 0, so that empty work needs no branch at the launch.
inline unsigned num_blocks(int64_t count, int64_t per_block) {
  return static_cast<unsigned>(count <= 0 ? 1 : (count + per_block - 1) / per_block);
}

// -- checks ----------------------------------------------------------------------------------------------------------

inline void check_contiguous(const Tensor& t, const Device& device, const char* name) {
  CHECK_ARG(t.is_cuda() && t.get_device_index() == device.index(), name, " must be on cuda:", device.index(),
            " like the other tensors");
  CHECK_ARG(t.is_contiguous(), name, " must be contiguous: pass ", name, ".contiguous()");
}

inline void check_vector(const Tensor& t, const Device& device, const char* name) {
  check_contiguous(t, device, name);
  CHECK_ARG(t.dim() == 1, name, " must have one dimension, got ", t.dim());
}

inline void check_ids(const Tensor& t, const Device& device, const char* name) {
  check_vector(t, device, name);
  check_index_dtype(t, name);
}

// A tensor that kernels read where it is: on the device, or in pinned host memory through unified addressing.
inline bool is_readable(const Tensor& t, const Device& device) {
  if (t.is_cuda()) {
    return t.get_device_index() == device.index();
  }
  if (t.numel() == 0) {
    return true;
  }
  cudaPointerAttributes attributes{};
  CUDA_CHECK(cudaPointerGetAttributes(&attributes, t.const_data_ptr()));
  return attributes.type == cudaMemoryTypeHost;
}

inline void check_readable(const Tensor& t, const Device& device, const char* name) {
  CHECK_ARG(is_readable(t, device), name, " must be on cuda:", device.index(), " or in pinned host memory");
  CHECK_ARG(t.is_contiguous(), name, " must be contiguous: pass ", name, ".contiguous()");
}

// indptr int64 [num_rows + 1], indices int32 or int64, each on the device or pinned. Its two ends cannot be looked at
// without waiting for the device: a CSC is validated where it is made, and kernels check what they read.
inline void check_csc(const Tensor& indptr, const Tensor& indices, const Device& device) {
  check_readable(indptr, device, "indptr");
  check_readable(indices, device, "indices");
  CHECK_ARG(indptr.dim() == 1 && indices.dim() == 1, "indptr and indices must have one dimension");
  check_dtype(indptr, ScalarType::Long, "indptr");
  check_index_dtype(indices, "indices");
  CHECK_ARG(indptr.numel() >= 1, "indptr must have num_rows + 1 entries, got none");
}

}  // namespace gnnsys::cuda
