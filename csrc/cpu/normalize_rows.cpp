// normalize_rows: weights of each row divided by their sum, which is made in float32 in the order of the row. Rows are
// short, so blocks of float64 (block_sum.h) are not needed, and every device can add in this order.
#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"

namespace gnnsys {
namespace {

constexpr int64_t kRowsPerThread = 1 << 12;

// 8 bytes per weight, twice read.
Tensor normalize_rows(const Tensor& indptr, const Tensor& weight) {
  check_vector(indptr, "indptr");
  check_dtype(indptr, ScalarType::Long, "indptr");
  check_vector(weight, "weight");
  check_dtype(weight, ScalarType::Float, "weight");
  const auto* const ends = const_data<int64_t>(indptr);
  CHECK_ARG(indptr.numel() >= 1 && ends[0] == 0 && ends[indptr.numel() - 1] == weight.numel(),
            "indptr must run from 0 to the number of weights, ", weight.numel());
  check_monotone(indptr);
  const Tensor out = empty_cpu({weight.numel()}, ScalarType::Float);
  const auto* const from = const_data<float>(weight);
  auto* const to = mutable_data<float>(out);
  parallel_for(indptr.numel() - 1, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float sum = 0;
      for (int64_t p = ends[row]; p < ends[row + 1]; ++p) {
        sum += from[p];
      }
      for (int64_t p = ends[row]; p < ends[row + 1]; ++p) {
        to[p] = from[p] / sum;
      }
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "normalize_rows", &normalize_rows); }

}  // namespace gnnsys
