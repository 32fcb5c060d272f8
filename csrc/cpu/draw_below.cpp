// draw_below: one keyed number per id, which samplers use for roots, coins and budgets.
#include "common/draw.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"

namespace gnnsys {
namespace {

constexpr int64_t kIdsPerThread = 1 << 12;

// Uniform in [0, bound), by (key, id) alone. Work: a Philox block per id.
Tensor draw_below(const Tensor& ids, int64_t bound, int64_t key) {
  check_ids(ids, "ids");
  CHECK_ARG(bound >= 1, "bound must be at least 1, got ", bound);
  Tensor out = empty_cpu({ids.numel()}, ScalarType::Long);
  auto* const drawn = mutable_data<int64_t>(out);
  dispatch_ids(ids, [&](auto id) {
    const auto* const of = const_data<decltype(id)>(ids);
    parallel_for(ids.numel(), kIdsPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Stream stream{static_cast<uint64_t>(key), static_cast<uint64_t>(static_cast<int64_t>(of[i])), 0u};
        drawn[i] = static_cast<int64_t>(bounded64(stream, 0, static_cast<uint64_t>(bound)));
      }
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "draw_below", &draw_below); }

}  // namespace gnnsys
