// random_walks: all steps of walks along in-edges, on one CSC. A walk's next step is drawn by (key of the step, walk,
// original id of the node): see common/walk.h.
//
// Walks are made a block at a time, step by step: where the in-edges of all begin is asked for before any is drawn, and
// the drawn edges before any is read. Work: two random reads and one Philox block per step, two with restarts.
#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/prefetch.h"
#include "common/register.h"
#include "common/tensors.h"
#include "common/walk.h"
#include "cpu/sample.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kWalksPerThread = 256;

template <typename id_t, typename original_t>
struct Walks {
  const int64_t* indptr;
  const id_t* indices;
  int64_t num_nodes;
  int64_t num_edges;
  const int64_t* roots;
  const original_t* original;  // original ids of the nodes; the nodes themselves when null
  const std::vector<int64_t>& step_keys;
  const std::vector<int64_t>& coin_keys;
  uint64_t coin;
  int64_t* out;  // [num_walks, number of steps + 1]
  Faults* faults;
  std::atomic<int64_t>* bad_source;

  // Walks [first, end), at most kBlock of them.
  void run(int64_t first, int64_t end) const {
    const auto num_steps = static_cast<int64_t>(step_keys.size());
    int64_t at[kBlock];
    int64_t taken[kBlock];
    for (int64_t i = first; i < end; ++i) {
      at[i - first] = out[i * (num_steps + 1)] = roots[i];
    }
    for (int64_t step = 0; step < num_steps; ++step) {
      for (int64_t i = first; i < end; ++i) {
        if (at[i - first] >= 0) {
          prefetch_read(indptr + at[i - first], 2 * sizeof(int64_t));
        }
      }
      for (int64_t i = first; i < end; ++i) {
        taken[i - first] = draw(step, i, at[i - first]);
        if (taken[i - first] >= 0) {
          prefetch_read(indices + taken[i - first], sizeof(id_t));
        }
      }
      for (int64_t i = first; i < end; ++i) {
        at[i - first] = taken[i - first] < 0 ? (coin > 0 ? roots[i] : -1) : source(taken[i - first]);
        out[i * (num_steps + 1) + step + 1] = at[i - first];
      }
    }
  }

  // The position of the edge that a walk takes; -1 where it takes none.
  int64_t draw(int64_t step, int64_t walk, int64_t node) const {
    const auto number = static_cast<uint32_t>(walk);
    const auto at = static_cast<size_t>(step);
    if (node < 0 || (coin > 0 && walk_restarts(static_cast<uint64_t>(coin_keys[at]), number, coin))) {
      return -1;
    }
    const int64_t begin = indptr[node];
    const int64_t end = indptr[node + 1];
    if (!check_row(begin, end, num_edges, node, faults) || begin == end) {
      return -1;
    }
    const auto id = static_cast<uint64_t>(original ? static_cast<int64_t>(original[node]) : node);
    return begin + walk_rank(static_cast<uint64_t>(step_keys[at]), id, number, static_cast<uint32_t>(end - begin));
  }

  int64_t source(int64_t position) const {
    const auto node = static_cast<int64_t>(indices[position]);
    if (node >= 0 && node < num_nodes) {
      return node;
    }
    *bad_source = position;
    return -1;
  }
};

Tensor random_walks(const Tensor& indptr, const Tensor& indices, const Tensor& roots, std::vector<int64_t> step_keys,
                    std::vector<int64_t> coin_keys, int64_t coin, std::optional<Tensor> original) {
  check_csc(indptr, indices);
  check_vector(roots, "roots");
  check_dtype(roots, ScalarType::Long, "roots");
  const int64_t num_nodes = indptr.numel() - 1;
  const int64_t num_walks = roots.numel();
  CHECK_ARG(num_walks <= kMaxWalks, "roots must be at most ", kMaxWalks, ", got ", num_walks);
  CHECK_ARG(coin >= 0 && coin <= static_cast<int64_t>(kCoinSides), "coin must be in [0, 2^53], got ", coin);
  CHECK_ARG(coin == 0 || coin_keys.size() == step_keys.size(), "coin_keys must be as many as step_keys, ",
            static_cast<int64_t>(step_keys.size()), ", got ", static_cast<int64_t>(coin_keys.size()));
  check_id_range(roots, num_nodes, "roots");
  if (original) {
    check_ids(*original, "original");
    CHECK_ARG(original->numel() == num_nodes, "original must have an id for each of ", num_nodes, " nodes, got ",
              original->numel());
  }
  const Tensor out = empty_cpu({num_walks, static_cast<int64_t>(step_keys.size()) + 1}, ScalarType::Long);
  Faults faults;
  std::atomic<int64_t> bad_source{-1};
  dispatch_ids(indices, [&](auto id) {
    dispatch_ids(original ? *original : indices, [&](auto of) {
      using original_t = decltype(of);
      const Walks<decltype(id), original_t> walks{const_data<int64_t>(indptr),
                                                  const_data<decltype(id)>(indices),
                                                  num_nodes,
                                                  indices.numel(),
                                                  const_data<int64_t>(roots),
                                                  original ? const_data<original_t>(*original) : nullptr,
                                                  step_keys,
                                                  coin_keys,
                                                  static_cast<uint64_t>(coin),
                                                  mutable_data<int64_t>(out),
                                                  &faults,
                                                  &bad_source};
      parallel_for(num_walks, kWalksPerThread, [&](int64_t begin, int64_t end) {
        for (int64_t first = begin; first < end; first += kBlock) {
          walks.run(first, std::min(first + kBlock, end));
        }
      });
    });
  });
  faults.raise();
  CHECK_ARG(bad_source < 0, "indices must be in [0, ", num_nodes, "), they are not at position ", bad_source.load());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "random_walks", &random_walks); }

}  // namespace gnnsys
