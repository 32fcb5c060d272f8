// draw_below on the device: one keyed number per id, bit-equal to cpu/draw_below.cpp. A Philox block and 16 bytes per id.
#include "common/draw.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cuda/device.h"

namespace gnnsys::cuda {
namespace {

constexpr int kThreads = 256;

template <typename id_t>
__global__ void __launch_bounds__(kThreads)
    write_draws(const id_t* ids, int64_t size, uint64_t bound, uint64_t key, int64_t* drawn) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < size) {
    const Stream stream{key, static_cast<uint64_t>(static_cast<int64_t>(ids[i])), 0u};
    drawn[i] = static_cast<int64_t>(bounded64(stream, 0, bound));
  }
}

Tensor draw_below(const Tensor& ids, int64_t bound, int64_t key) {
  CHECK_ARG(ids.is_cuda(), "ids must be on the device");
  const Device device(ids);
  check_ids(ids, device, "ids");
  CHECK_ARG(bound >= 1, "bound must be at least 1, got ", bound);
  const Tensor drawn = device.empty({ids.numel()}, ScalarType::Long);
  dispatch_ids(ids, [&](auto id) {
    write_draws<<<num_blocks(ids.numel(), kThreads), kThreads, 0, device.stream()>>>(
        const_data<decltype(id)>(ids), ids.numel(), static_cast<uint64_t>(bound), static_cast<uint64_t>(key),
        mutable_data<int64_t>(drawn));
    CUDA_CHECK_LAUNCH();
  });
  return drawn;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "draw_below", &draw_below); }

}  // namespace gnnsys::cuda
