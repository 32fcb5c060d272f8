// sample_neighbors: for each seed, some of its in-edges.
//
// Two ways to the same definition. The plain way (uniform, nothing filtered) writes straight into exact outputs. The
// general way (weights, times, exclusions) lets every thread collect its own seeds' positions, then joins them. Within a
// seed, positions come out in the order of its candidates: the input's edge order, or by time where times are given.
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/arguments.h"
#include "cpu/sample_general.h"
#include "cpu/sample_plain.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kGroup = 256;  // seeds whose positions are all there before neighbours are read

using Result = std::tuple<Tensor, Tensor, Tensor>;

template <typename id_t>
Result sample_plain(const Request<id_t>& q) {
  Tensor offsets = empty_cpu({q.num_seeds + 1}, ScalarType::Long);
  auto* const offset = mutable_data<int64_t>(offsets);
  std::vector<Row> rows(static_cast<size_t>(q.num_seeds));
  const int64_t total = count_rows(q, rows.data(), offset);
  Tensor neighbors = empty_cpu({total}, id_type<id_t>());
  Tensor positions = empty_cpu({total}, ScalarType::Long);
  auto* const neighbor = mutable_data<id_t>(neighbors);
  auto* const position = mutable_data<int64_t>(positions);
  parallel_for(q.num_seeds, kSeedsPerThread, [&](int64_t lo, int64_t hi) {
    PlainWriter<id_t> writer(q, rows.data(), offset, position);
    for (int64_t group = lo; group < hi; group += kGroup) {
      fill_seeds(q, offset, group, std::min(group + kGroup, hi), &writer, position, neighbor + offset[group]);
    }
  });
  return {offsets, neighbors, positions};
}

template <typename id_t, typename weight_t>
Result sample_general(const Request<id_t>& q, const weight_t* weight) {
  Tensor offsets = empty_cpu({q.num_seeds + 1}, ScalarType::Long);
  auto* offset = mutable_data<int64_t>(offsets);
  const int shares = num_shares_for(q.num_seeds, kSeedsPerThread);
  Faults faults;
  std::vector<std::vector<int64_t>> found(static_cast<size_t>(shares));
  for_shares(shares, [&](int s, int n) {
    const Range r = share_of(q.num_seeds, s, n);
    Collector<id_t, weight_t> collector{q, weight, &faults};
    for (int64_t i = r.begin; i < r.end; ++i) {
      offset[i + 1] = collector.collect(i);
    }
    found[static_cast<size_t>(s)] = std::move(collector.positions);
  });
  faults.raise();
  const int64_t total = prefix_sum(offset, q.num_seeds);
  Tensor neighbors = empty_cpu({total}, id_type<id_t>());
  Tensor positions = empty_cpu({total}, ScalarType::Long);
  auto* neighbor = mutable_data<id_t>(neighbors);
  auto* position = mutable_data<int64_t>(positions);
  for_shares(shares, [&](int s, int n) {
    int64_t out = offset[share_of(q.num_seeds, s, n).begin];
    for (const int64_t p : found[static_cast<size_t>(s)]) {
      position[out] = p;
      neighbor[out++] = q.indices[p];
    }
  });
  return {offsets, neighbors, positions};
}

Result sample_neighbors(const Tensor& indptr, const Tensor& indices, const Tensor& seeds, int64_t fanout, bool replace,
                        int64_t key, std::optional<Tensor> weight, std::optional<Tensor> time, bool node_time,
                        bool time_sorted, std::optional<Tensor> seed_time, bool last, std::optional<Tensor> exclude,
                        std::optional<Tensor> tree, std::optional<Tensor> rng_ids) {
  check_seeds(indptr, indices, seeds);
  check_fanout(fanout);
  CHECK_ARG(time.has_value() == seed_time.has_value(), "time and seed_time go together, got only one of them");
  CHECK_ARG(!last || time, "last needs time: the most recent edges are asked for, but no time is given");
  CHECK_ARG(!weight || !time, "weight and time cannot be combined: sample by one of them");
  if (rng_ids) {
    check_ids(*rng_ids, "rng_ids");
    check_rng_ids(*rng_ids, seeds);
  }
  return dispatch_ids(indices, [&](auto id) -> Result {
    using id_t = decltype(id);
    Request<id_t> q{};
    q.indptr = const_data<int64_t>(indptr);
    q.indices = const_data<id_t>(indices);
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
    q.tree = optional_tree(tree, q.num_seeds);
    q.timed = time.has_value();
    q.time = optional_int64(time, node_time ? -1 : indices.numel(), "time");
    q.num_times = time ? time->numel() : 0;
    q.node_time = node_time;
    q.time_sorted = time_sorted;
    q.seed_time = optional_int64(seed_time, q.num_seeds, "seed_time");
    q.last = last;
    q.exclude = optional_exclude(exclude);
    q.num_exclude = exclude ? exclude->numel() : 0;
    if (weight) {
      check_vector(*weight, "weight");
      CHECK_ARG(weight->numel() == indices.numel(), "weight must have one entry per edge, ", indices.numel(),
                ", got ", weight->numel());
      if (weight->scalar_type() == ScalarType::Float) {
        return sample_general<id_t, float>(q, const_data<float>(*weight));
      }
      check_dtype(*weight, ScalarType::Double, "weight (float32 or float64)");
      return sample_general<id_t, double>(q, const_data<double>(*weight));
    }
    if (q.timed || q.num_exclude > 0) {
      return sample_general<id_t, float>(q, nullptr);
    }
    return sample_plain(q);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "sample_neighbors", &sample_neighbors); }

}  // namespace gnnsys
