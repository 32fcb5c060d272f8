// spmm's kernels for rows of float16.
#include "cuda/spmm_launch.cuh"

namespace gnnsys::cuda {

template <typename T, typename id_t>
void sum_rows(const Device& device, const Aggregation<T, T, id_t>& a) {
  aggregate(device, a, Sum<acc_t<T>>{});
}

template void sum_rows(const Device&, const Aggregation<__half, __half, int32_t>&);
template void sum_rows(const Device&, const Aggregation<__half, __half, int64_t>&);

}  // namespace gnnsys::cuda
