// Only in builds with a sanitizer: memory of CPU tensors comes from malloc, one block per tensor and no larger than it.
//
// Where torch carries an allocator of its own (mimalloc), a sanitizer sees neither where a tensor ends nor that it was
// freed. Not part of the stable ABI: such a build is for the torch it was made with.
#undef TORCH_TARGET_VERSION
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <new>

namespace {

constexpr size_t kAlignment = 64;

class PlainAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes > 0 && posix_memalign(&data, kAlignment, bytes) != 0) {
      throw std::bad_alloc();
    }
    return {data, data, &std::free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

PlainAllocator plain;

struct Install {
  Install() { c10::SetCPUAllocator(&plain, /*priority=*/100); }
} install;

}  // namespace
