// normalize_rows on the device, bit-equal to cpu/normalize_rows.cpp: a warp reads 32 weights of a row side by side, and
// all its lanes add them one after the other. 12 bytes per weight.
#include "common/register.h"
#include "common/tensors.h"
#include "cuda/device.h"

namespace gnnsys::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    divide_by_sums(const int64_t* indptr, int64_t num_rows, const float* weight, int64_t size, float* out) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (row >= num_rows) {
    return;
  }
  const int64_t begin = indptr[row];
  const int64_t end = indptr[row + 1];
  if (begin < 0 || end < begin || end > size) {
    fault("rows of indptr", end, size + 1);
  }
  float sum = 0;
  for (int64_t base = begin; base < end; base += kWarp) {
    const float mine = base + lane < end ? weight[base + lane] : 0.0f;
    const auto count = static_cast<int>(min(end - base, int64_t{kWarp}));
    for (int i = 0; i < count; ++i) {
      sum = __fadd_rn(sum, __shfl_sync(kAllLanes, mine, i));
    }
  }
  for (int64_t p = begin + lane; p < end; p += kWarp) {
    out[p] = __fdiv_rn(weight[p], sum);
  }
}

Tensor normalize_rows(const Tensor& indptr, const Tensor& weight) {
  CHECK_ARG(weight.is_cuda(), "weight must be on the device, like the other tensors");
  const Device device(weight);
  check_vector(indptr, device, "indptr");
  check_dtype(indptr, ScalarType::Long, "indptr");
  check_vector(weight, device, "weight");
  check_dtype(weight, ScalarType::Float, "weight");
  CHECK_ARG(indptr.numel() >= 1, "indptr must have num_rows + 1 entries, got none");
  const Tensor out = device.empty({weight.numel()}, ScalarType::Float);
  const int64_t num_rows = indptr.numel() - 1;
  divide_by_sums<<<num_blocks(num_rows * kWarp, kThreads), kThreads, 0, device.stream()>>>(
      const_data<int64_t>(indptr), num_rows, const_data<float>(weight), weight.numel(), mutable_data<float>(out));
  CUDA_CHECK_LAUNCH();
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "normalize_rows", &normalize_rows); }

}  // namespace gnnsys::cuda
