#include "cuda/sort.h"

#include <cub/device/device_radix_sort.cuh>

#include <type_traits>

namespace gnnsys::cuda {

template <typename T>
void sort_pairs(const Device& device, const T* keys, T* sorted_keys, const T* values, T* sorted_values, int64_t size,
                int bits) {
  if (size == 0) {
    return;
  }
  using size_type = std::conditional_t<sizeof(T) == 4, int, int64_t>;
  const auto n = static_cast<size_type>(size);
  size_t bytes = 0;
  CUDA_CHECK(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, sorted_keys, values, sorted_values, n, 0, bits,
                                             device.stream()));
  const Tensor workspace = device.workspace<char>(static_cast<int64_t>(bytes));
  CUDA_CHECK(cub::DeviceRadixSort::SortPairs(workspace.mutable_data_ptr(), bytes, keys, sorted_keys, values,
                                             sorted_values, n, 0, bits, device.stream()));
}

template void sort_pairs(const Device&, const uint32_t*, uint32_t*, const uint32_t*, uint32_t*, int64_t, int);
template void sort_pairs(const Device&, const uint64_t*, uint64_t*, const uint64_t*, uint64_t*, int64_t, int);

}  // namespace gnnsys::cuda
