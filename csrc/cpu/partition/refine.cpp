// Refinement of a k-way partition under any number of constraints: balance, then improve, then search.
//
// Every move is made with exact, current gains, so the cut never rises but to restore balance. Candidates are found in
// parallel, moves are carried out in order: the result is the same on any number of threads.
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/partition/state.h"

#include <tuple>

namespace gnnsys::partition {

Move best_move(const State& state, int32_t v) {
  const int32_t* const ties = state.ties(v);
  const int32_t from = state.part(v);
  Move best{-1, 0};
  for (int32_t q = 0; q < state.num_parts; ++q) {
    if (q == from || ties[q] == 0) {
      continue;
    }
    const int64_t gain = static_cast<int64_t>(ties[q]) - ties[from];
    if (best.to >= 0 && gain < best.gain) {
      continue;
    }
    if (!state.loads.has_room(q, v)) {
      continue;
    }
    if (best.to < 0 || gain > best.gain || state.loads.lighter(v, q, best.to)) {
      best = {q, gain};
    }
  }
  return best;
}

namespace {

// A smaller cut, or the same and better balance.
bool is_better(const State& state, int32_t v, const Move& move) {
  return move.to >= 0 && (move.gain > 0 || (move.gain == 0 && state.loads.evening(v, state.part(v), move.to) > 0));
}

struct Candidate {
  int32_t node;
  int64_t gain;
};

// Nodes that would gain by moving, steepest first.
std::vector<Candidate> candidates(const State& state) {
  constexpr int64_t kChunk = 4096;
  const int64_t n = state.graph.num_nodes();
  const int64_t num_chunks = (n + kChunk - 1) / kChunk;
  std::vector<std::vector<Candidate>> found(num_chunks);
  parallel_for_dynamic(num_chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      for (int64_t v = chunk * kChunk; v < std::min(n, (chunk + 1) * kChunk); ++v) {
        const Move move = best_move(state, static_cast<int32_t>(v));
        if (is_better(state, static_cast<int32_t>(v), move)) {
          found[chunk].push_back({static_cast<int32_t>(v), move.gain});
        }
      }
    }
  });
  std::vector<Candidate> all;
  for (const auto& chunk : found) {
    all.insert(all.end(), chunk.begin(), chunk.end());
  }
  std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.gain > b.gain; });
  return all;
}

}  // namespace

void improve(State& state, int64_t passes) {
  for (int64_t pass = 0; pass < passes; ++pass) {
    int64_t gained = 0;
    int64_t moves = 0;
    for (const Candidate& candidate : candidates(state)) {
      const int32_t v = candidate.node;
      const Move move = best_move(state, v);
      if (is_better(state, v, move)) {
        state.move(v, move.to);
        gained += move.gain;
        ++moves;
      }
    }
    if (gained == 0 || moves * 1000 < state.graph.num_nodes()) {
      break;
    }
  }
}

namespace {

std::tuple<int64_t, double> refine(std::vector<Tensor> indptr, std::vector<Tensor> indices, std::vector<Tensor> weight,
                                   std::vector<int64_t> offsets, const Tensor& node_weights, const Tensor& part,
                                   int64_t num_parts, const Tensor& limits, int64_t passes, int64_t work, int64_t key) {
  const Adjacency graph(indptr, indices, weight, offsets, node_weights.size(0));
  const NodeWeights weights = node_weights_of(node_weights, graph.num_nodes());
  CHECK_ARG(num_parts >= 1 && num_parts < 1 << 20, "num_parts must be in [1, 2^20), got ", num_parts);
  check_vector(part, "part");
  check_dtype(part, ScalarType::Int, "part");
  CHECK_ARG(part.numel() == graph.num_nodes(), "part must have one entry per node");
  check_id_range(part, num_parts, "part");
  State state(graph, weights, mutable_data<int32_t>(part), static_cast<int32_t>(num_parts), limits_of(limits, weights));
  balance(state);
  improve(state, passes);
  if (work > 0) {
    exchange(state, work);
    search(state, work, static_cast<uint64_t>(key));
  }
  return {state.cut(), state.loads.excess()};
}

}  // namespace
}  // namespace gnnsys::partition

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "partition_refine", &gnnsys::partition::refine); }
