// sample_labor and source_words on the device, bit-equal to cpu/sample_labor.cpp. How it draws is in sample_labor.cuh;
// the host reads size and faults once, between counting and taking.
#include "common/register.h"
#include "common/sample_arguments.h"
#include "common/tensors.h"
#include "cuda/arguments.h"
#include "cuda/columns.cuh"
#include "cuda/sample_labor.cuh"

#include <optional>
#include <tuple>

namespace gnnsys::cuda {
namespace {

constexpr int kThreads = 256;

using LaborResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename id_t>
LaborResult collect_labor(const Device& device, const Request<id_t>& q, const std::optional<Tensor>& source_ids,
                          int64_t num_src) {
  const Tensor offsets = device.empty({q.num_seeds + 1}, ScalarType::Long);
  auto* const offset = mutable_data<int64_t>(offsets);
  const Tensor rows = device.workspace<LaborRow>(q.num_seeds);
  const Tensor reports = device.workspace<Report>(1);
  auto* const report = mutable_data<Report>(reports);
  CUDA_CHECK(cudaMemsetAsync(report, 0xFF, sizeof(Report), device.stream()));
  const Labor<id_t> labor{q,
                          report,
                          mutable_data<LaborRow>(rows),
                          source_ids ? source_ids->const_data_ptr() : nullptr,
                          source_ids && source_ids->scalar_type() == ScalarType::Long,
                          num_src,
                          nullptr};
  count_labor(device, labor, offset);
  exclusive_sum(device, q.num_seeds, CountsAt<int64_t>{offset}, offset, reinterpret_cast<int64_t*>(&report->total));
  const Report read = read_report(device, q, report);
  if (read.bad_source != kNoFault) {
    CHECK_ARG(false, "sources must be in [0, ", num_src, "), got ", read_one(device, q.indices.ids + read.bad_source));
  }
  const auto total = static_cast<int64_t>(read.total);
  const Tensor neighbors = device.empty({total}, id_type<id_t>());
  const Tensor positions = device.empty({total}, ScalarType::Long);
  const Tensor weights = device.empty({total}, ScalarType::Float);
  if (total > 0) {
    take_labor(device, labor, offset, mutable_data<id_t>(neighbors), mutable_data<int64_t>(positions),
               mutable_data<float>(weights));
  }
  return {offsets, neighbors, positions, weights};
}

LaborResult sample_labor(const Tensor& indptr, const Tensor& indices, const Tensor& seeds, int64_t num_src, int64_t fanout,
                         int64_t key, std::optional<Tensor> source_ids, std::optional<Tensor> exclude,
                         std::optional<Tensor> tree) {
  CHECK_ARG(seeds.is_cuda(), "seeds must be on the device, like the other tensors");
  const Device device(seeds);
  check_csc(indptr, indices, device);
  check_ids(seeds, device, "seeds");
  check_seed_dtype(seeds, indices);
  check_fanout(fanout);
  if (source_ids) {
    check_readable(*source_ids, device, "source_ids");
    check_index_dtype(*source_ids, "source_ids");
    check_source_ids(*source_ids, num_src);
  }
  return dispatch_ids(indices, [&](auto id) -> LaborResult {
    using id_t = decltype(id);
    Request<id_t> q{};
    q.indptr = const_data<int64_t>(indptr);
    q.indices.ids = const_data<id_t>(indices);
    q.num_rows = indptr.numel() - 1;
    q.num_edges = indices.numel();
    q.seeds = const_data<id_t>(seeds);
    q.num_seeds = seeds.numel();
    q.fanout = fanout;
    q.key = static_cast<uint64_t>(key);
    q.tree = optional_int64(tree, device, Where::kDevice, q.num_seeds, "tree");
    q.exclude = optional_int64(exclude, device, Where::kDevice, -1, "exclude");
    q.num_exclude = exclude ? exclude->numel() : 0;
    return collect_labor(device, q, source_ids, num_src);
  });
}

template <typename id_t>
__global__ void __launch_bounds__(kThreads) write_words(const id_t* ids, int64_t size, uint64_t key, int64_t* words) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < size) {
    const Stream stream{key, static_cast<uint64_t>(static_cast<int64_t>(ids[i])), 0u};
    words[i] = static_cast<int64_t>(stream.word64(0, 0) >> 1);
  }
}

Tensor source_words(const Tensor& ids, int64_t key) {
  CHECK_ARG(ids.is_cuda(), "ids must be on the device");
  const Device device(ids);
  check_ids(ids, device, "ids");
  const Tensor words = device.empty({ids.numel()}, ScalarType::Long);
  dispatch_ids(ids, [&](auto id) {
    write_words<<<num_blocks(ids.numel(), kThreads), kThreads, 0, device.stream()>>>(
        const_data<decltype(id)>(ids), ids.numel(), static_cast<uint64_t>(key), mutable_data<int64_t>(words));
    CUDA_CHECK_LAUNCH();
  });
  return words;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "sample_labor", &sample_labor);
  REGISTER_OP(m, "source_words", &source_words);
}

}  // namespace gnnsys::cuda
