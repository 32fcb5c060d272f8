// spmm's kernels for rows of bfloat16.
#include "cuda/spmm_launch.cuh"

namespace gnnsys::cuda {

template <typename T, typename id_t>
void sum_rows(const Device& device, const Aggregation<T, T, id_t>& a) {
  aggregate(device, a, Sum<acc_t<T>>{});
}

template void sum_rows(const Device&, const Aggregation<__nv_bfloat16, __nv_bfloat16, int32_t>&);
template void sum_rows(const Device&, const Aggregation<__nv_bfloat16, __nv_bfloat16, int64_t>&);

}  // namespace gnnsys::cuda
