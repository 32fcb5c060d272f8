// random_walks on the device, bit-equal to cpu/walks.cpp: a thread per walk makes all its steps, and the host waits for
// nothing. Work: two random reads and one Philox block per step, two with restarts; 8 bytes written.
#include "common/register.h"
#include "common/tensors.h"
#include "common/walk.h"
#include "cuda/sample.cuh"

#include <algorithm>
#include <optional>
#include <vector>

namespace gnnsys::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kSteps = 32;  // of one launch: their keys are its arguments

struct StepKeys {
  uint64_t step[kSteps];
  uint64_t coin[kSteps];
  int count;
};

template <typename id_t, typename original_t>
struct Walks {
  const int64_t* indptr;
  const id_t* indices;
  int64_t num_nodes;
  int64_t num_edges;
  const int64_t* roots;
  int64_t num_walks;
  const original_t* original;  // original ids of the nodes; the nodes themselves when null
  uint64_t coin;
  int64_t* out;  // [num_walks, length + 1]
  int64_t length;

  __device__ int64_t checked(int64_t node, const char* what) const {
    if (node < 0 || node >= num_nodes) {
      fault(what, node, num_nodes);
    }
    return node;
  }

  // Where a walk is after a step; -1 where it has ended.
  __device__ int64_t next(uint64_t step_key, uint64_t coin_key, int64_t walk, int64_t node, int64_t root) const {
    const auto number = static_cast<uint32_t>(walk);
    const int64_t back = coin > 0 ? root : -1;
    if (node < 0 || (coin > 0 && walk_restarts(coin_key, number, coin))) {
      return back;
    }
    const int64_t begin = indptr[node];
    const int64_t end = indptr[node + 1];
    if (begin < 0 || end < begin || end > num_edges || end - begin > kMaxDegree) {
      fault("in-edges of a node in indptr", end, num_edges + 1);
    }
    if (begin == end) {
      return back;
    }
    const auto id = static_cast<uint64_t>(original ? static_cast<int64_t>(original[node]) : node);
    const uint32_t rank = walk_rank(step_key, id, number, static_cast<uint32_t>(end - begin));
    return checked(static_cast<int64_t>(indices[begin + rank]), "indices");
  }
};

// Steps first + 1 to first + keys.count; the walk's place after step `first` is in `out`, or is its root.
template <typename id_t, typename original_t>
__global__ void __launch_bounds__(kThreads) walk_steps(Walks<id_t, original_t> walks, StepKeys keys, int64_t first) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= walks.num_walks) {
    return;
  }
  const int64_t root = walks.checked(walks.roots[i], "roots");
  int64_t* const mine = walks.out + i * (walks.length + 1) + first;
  int64_t node = first == 0 ? root : *mine;
  if (first == 0) {
    *mine = root;
  }
  for (int step = 0; step < keys.count; ++step) {
    node = walks.next(keys.step[step], keys.coin[step], i, node, root);
    mine[step + 1] = node;
  }
}

Tensor random_walks(const Tensor& indptr, const Tensor& indices, const Tensor& roots, std::vector<int64_t> step_keys,
                    std::vector<int64_t> coin_keys, int64_t coin, std::optional<Tensor> original) {
  CHECK_ARG(roots.is_cuda(), "roots must be on the device, like the other tensors");
  const Device device(roots);
  check_csc(indptr, indices, device);
  check_vector(roots, device, "roots");
  check_dtype(roots, ScalarType::Long, "roots");
  const int64_t num_nodes = indptr.numel() - 1;
  const int64_t num_walks = roots.numel();
  const auto length = static_cast<int64_t>(step_keys.size());
  CHECK_ARG(num_walks <= kMaxWalks, "roots must be at most ", kMaxWalks, ", got ", num_walks);
  CHECK_ARG(coin >= 0 && coin <= static_cast<int64_t>(kCoinSides), "coin must be in [0, 2^53], got ", coin);
  CHECK_ARG(coin == 0 || coin_keys.size() == step_keys.size(), "coin_keys must be as many as step_keys, ", length,
            ", got ", static_cast<int64_t>(coin_keys.size()));
  if (original) {
    check_readable(*original, device, "original");
    check_index_dtype(*original, "original");
    CHECK_ARG(original->numel() == num_nodes, "original must have an id for each of ", num_nodes, " nodes, got ",
              original->numel());
  }
  const Tensor out = device.empty({num_walks, length + 1}, ScalarType::Long);
  dispatch_ids(indices, [&](auto id) {
    using id_t = decltype(id);
    dispatch_ids(original ? *original : indices, [&](auto of) {
      using original_t = decltype(of);
      const Walks<id_t, original_t> walks{const_data<int64_t>(indptr),
                                          const_data<id_t>(indices),
                                          num_nodes,
                                          indices.numel(),
                                          const_data<int64_t>(roots),
                                          num_walks,
                                          original ? const_data<original_t>(*original) : nullptr,
                                          static_cast<uint64_t>(coin),
                                          mutable_data<int64_t>(out),
                                          length};
      int64_t first = 0;
      do {  // once for walks of no steps too: column 0 are the roots
        StepKeys keys{};
        keys.count = static_cast<int>(std::min<int64_t>(kSteps, length - first));
        for (int s = 0; s < keys.count; ++s) {
          keys.step[s] = static_cast<uint64_t>(step_keys[static_cast<size_t>(first + s)]);
          keys.coin[s] = coin > 0 ? static_cast<uint64_t>(coin_keys[static_cast<size_t>(first + s)]) : 0;
        }
        walk_steps<<<num_blocks(num_walks, kThreads), kThreads, 0, device.stream()>>>(walks, keys, first);
        CUDA_CHECK_LAUNCH();
        first += kSteps;
      } while (first < length);
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "random_walks", &random_walks); }

}  // namespace gnnsys::cuda
