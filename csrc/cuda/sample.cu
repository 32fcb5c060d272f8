// sample_neighbors on the device: for each seed, some of its in-edges; bit-equal to cpu/sample.cpp.
//
// Candidates that are contiguous (nothing filtered, times stored sorted, exclusions) are sampled here: one launch finds
// each seed's candidates and sums the counts, the host reads size and faults once, one launch chooses and writes.
// Candidates that must be listed first (weights, unsorted times) are in sample_listed.cu.
#include "common/register.h"
#include "common/sample_arguments.h"
#include "common/tensors.h"
#include "cuda/arguments.h"
#include "cuda/choose.cuh"
#include "cuda/sample_contiguous.cuh"

#include <algorithm>
#include <optional>

namespace gnnsys::cuda {
namespace {

template <typename id_t>
Result sample_contiguous(const Device& device, const Request<id_t>& q) {
  const Tensor offsets = device.empty({q.num_seeds + 1}, ScalarType::Long);
  const unsigned tiles = num_blocks(q.num_seeds + 1, kCountThreads);
  const int64_t num_words = kReportWords + num_scan_words(tiles);
  const int64_t num_gaps = q.num_exclude > 0 ? q.num_seeds : 0;
  const int64_t row_words = sizeof(Row) / sizeof(word_t) * q.num_seeds;
  const Tensor workspace = device.workspace<word_t>(row_words + num_gaps + num_words);
  auto* const rows = mutable_data<Row>(workspace);  // first: 16-byte aligned
  auto* const first_gaps = mutable_data<int64_t>(workspace) + row_words;
  auto* const report = reinterpret_cast<Report*>(first_gaps + num_gaps);
  auto* const words = reinterpret_cast<word_t*>(report + 1);
  CUDA_CHECK(cudaMemsetAsync(report, 0xFF, num_words * sizeof(word_t), device.stream()));
  count_contiguous<<<tiles, kCountThreads, 0, device.stream()>>>(q, nullptr, rows, first_gaps,
                                                                 mutable_data<int64_t>(offsets), report, words);
  CUDA_CHECK_LAUNCH();
  const auto total = static_cast<int64_t>(read_report(device, q, report).total);
  const Tensor neighbors = device.empty({total}, id_type<id_t>());
  const Tensor positions = device.empty({total}, ScalarType::Long);
  const auto write = [&](const auto& source) {
    choose(device, q, source, const_data<int64_t>(offsets), total, mutable_data<id_t>(neighbors),
           mutable_data<int64_t>(positions));
  };
  if (q.num_exclude > 0) {
    write(Contiguous<true>{rows, q.exclude, first_gaps});
  } else {
    write(Contiguous<false>{rows, nullptr, nullptr});
  }
  return {offsets, neighbors, positions};
}

Result sample_neighbors(const Tensor& indptr, const Tensor& indices, const Tensor& seeds, int64_t fanout, bool replace,
                        int64_t key, std::optional<Tensor> weight, std::optional<Tensor> time, bool node_time,
                        bool time_sorted, std::optional<Tensor> seed_time, bool last, std::optional<Tensor> exclude,
                        std::optional<Tensor> tree, std::optional<Tensor> rng_ids) {
  CHECK_ARG(seeds.is_cuda(), "seeds must be on the device, like the other tensors");
  const Device device(seeds);
  check_csc(indptr, indices, device);
  check_ids(seeds, device, "seeds");
  check_seed_dtype(seeds, indices);
  check_fanout(fanout);
  CHECK_ARG(time.has_value() == seed_time.has_value(), "time and seed_time go together, got only one of them");
  CHECK_ARG(!last || time, "last needs time: the most recent edges are asked for, but no time is given");
  CHECK_ARG(!weight || !time, "weight and time cannot be combined: sample by one of them");
  if (rng_ids) {
    check_ids(*rng_ids, device, "rng_ids");
    check_rng_ids(*rng_ids, seeds);
  }
  return dispatch_ids(indices, [&](auto id) -> Result {
    using id_t = decltype(id);
    Request<id_t> q{};
    q.indptr = const_data<int64_t>(indptr);
    q.indices.ids = const_data<id_t>(indices);
    q.num_rows = indptr.numel() - 1;
    q.num_edges = indices.numel();
    q.seeds = const_data<id_t>(seeds);
    q.num_seeds = seeds.numel();
    q.fanout = fanout;
    q.replace = replace;
    q.key = static_cast<uint64_t>(key);
    if (rng_ids && rng_ids->scalar_type() == seeds.scalar_type()) {
      q.rng_ids = const_data<id_t>(*rng_ids);
    } else if (rng_ids) {
      q.wide_rng_ids = const_data<int64_t>(*rng_ids);
    }
    q.tree = optional_int64(tree, device, Where::kDevice, q.num_seeds, "tree");
    q.timed = time.has_value();
    q.time = optional_int64(time, device, Where::kReadable, node_time ? -1 : indices.numel(), "time");
    q.num_times = time ? time->numel() : 0;
    q.node_time = node_time;
    q.time_sorted = time_sorted;
    q.seed_time = optional_int64(seed_time, device, Where::kDevice, q.num_seeds, "seed_time");
    q.last = last;
    q.exclude = optional_int64(exclude, device, Where::kDevice, -1, "exclude");
    q.num_exclude = exclude ? exclude->numel() : 0;
    if (weight) {
      check_readable(*weight, device, "weight");
      CHECK_ARG(weight->dim() == 1, "weight must have one dimension, got ", weight->dim());
      CHECK_ARG(weight->numel() == indices.numel(), "weight must have one entry per edge, ", indices.numel(),
                ", got ", weight->numel());
      if (weight->scalar_type() == ScalarType::Float) {
        return sample_by_weight(device, q, const_data<float>(*weight));
      }
      check_dtype(*weight, ScalarType::Double, "weight (float32 or float64)");
      return sample_by_weight(device, q, const_data<double>(*weight));
    }
    if (q.timed && !q.time_sorted) {
      return sample_by_time(device, q);
    }
    return sample_contiguous(device, q);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "sample_neighbors", &sample_neighbors); }

}  // namespace gnnsys::cuda
