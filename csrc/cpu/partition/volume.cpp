// communication_volume: how many rows each part needs of each other part. volume_changes: what any one move would do.
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/partition/volume_arguments.h"

#include <algorithm>
#include <vector>

namespace gnnsys {
namespace {

// One bit per (node, part) that holds an out-neighbour of the node, set from all threads; then the bits of every part's
// nodes are counted. Work: edges + nodes * parts / 64; bytes: nodes * parts / 8.
Tensor communication_volume(const Tensor& indptr, const Tensor& indices, const Tensor& part, int64_t num_parts) {
  check_assignment(indptr, indices, part, num_parts);
  const int64_t num_nodes = indptr.numel() - 1;
  const int64_t num_words = (num_parts + 63) / 64;
  const auto* const column = const_data<int64_t>(indptr);
  const auto* const part_of = const_data<int32_t>(part);
  std::vector<uint64_t> wanted(num_nodes * num_words, 0);
  dispatch_ids(indices, [&](auto id) {
    const auto* const source = const_data<decltype(id)>(indices);
    parallel_for_dynamic(num_nodes, 1 << 12, [&](int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; ++v) {
        const int32_t q = part_of[v];
        const uint64_t bit = uint64_t{1} << (q & 63);
        for (int64_t e = column[v]; e < column[v + 1]; ++e) {
          uint64_t* const word = wanted.data() + source[e] * num_words + (q >> 6);
          if ((__atomic_load_n(word, __ATOMIC_RELAXED) & bit) == 0) {
            __atomic_fetch_or(word, bit, __ATOMIC_RELAXED);
          }
        }
      }
    });
  });

  const Tensor out = empty_cpu({num_parts, num_parts}, ScalarType::Long);
  auto* const matrix = mutable_data<int64_t>(out);
  std::fill_n(matrix, num_parts * num_parts, 0);
  const int threads = num_threads_for(num_nodes, std::max<int64_t>(1 << 14, num_parts * num_parts));
  std::vector<int64_t> others((threads - 1) * num_parts * num_parts, 0);
  for_shares(threads, [&](int t, int n) {
    const Range r = share_of(num_nodes, t, n);
    int64_t* const mine = t == 0 ? matrix : others.data() + (t - 1) * num_parts * num_parts;
    for (int64_t u = r.begin; u < r.end; ++u) {
      int64_t* const row = mine + part_of[u] * num_parts;
      for (int64_t word = 0; word < num_words; ++word) {
        for (uint64_t rest = wanted[u * num_words + word]; rest != 0; rest &= rest - 1) {
          ++row[word * 64 + __builtin_ctzll(rest)];
        }
      }
    }
  });
  for (size_t i = 0; i < others.size(); ++i) {
    matrix[i % (num_parts * num_parts)] += others[i];
  }
  for (int64_t p = 0; p < num_parts; ++p) {
    matrix[p * num_parts + p] = 0;  // what a part needs of itself does not travel
  }
  return out;
}

// What the searches go by, for all nodes and parts at once.
Tensor volume_changes(const Tensor& indptr, const Tensor& indices, const Tensor& part, int64_t num_parts) {
  check_assignment(indptr, indices, part, num_parts);
  const int64_t num_nodes = indptr.numel() - 1;
  const VolumeGraph graph = dispatch_ids(indices, [&](auto id) {
    return make_volume_graph(const_data<int64_t>(indptr), const_data<decltype(id)>(indices), num_nodes);
  });
  const VolumeState state(graph, const_data<int32_t>(part), static_cast<int>(num_parts));
  const Tensor out = empty_cpu({num_nodes, num_parts}, ScalarType::Long);
  auto* const change = mutable_data<int64_t>(out);
  parallel_for_dynamic(num_nodes, 1 << 8, [&](int64_t begin, int64_t end) {
    MoveCost cost{0, std::vector<int32_t>(num_parts)};
    for (int64_t v = begin; v < end; ++v) {
      state.cost(v, &cost);
      for (int64_t q = 0; q < num_parts; ++q) {
        change[v * num_parts + q] = q == state.part(v) ? 0 : cost.need[q] - cost.release;
      }
    }
  });
  return out;
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "communication_volume", &gnnsys::communication_volume);
  REGISTER_OP(m, "volume_changes", &gnnsys::volume_changes);
}
