// random_walks: all steps of walks along in-edges, on one CSC. A walk's next step is drawn by (key of the step, walk,
// original id of the node): see common/walk.h.
//
// Walks are made a block at a time, step by step: where the in-edges of all begin is asked for before any is drawn, and
// the drawn edges before any is read. Random words are made for a block together. Work: two random reads and one Philox
// block per step, two with restarts.
#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/prefetch.h"
#include "common/register.h"
#include "common/tensors.h"
#include "common/walk.h"
#include "cpu/philox_words.h"
#include "cpu/sample.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kBlock = 128;
static_assert(kBlock <= kWordBlock);
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
  void run(int64_t first, int64_t end, WordBlock* words) const {
    const auto num_steps = static_cast<int64_t>(step_keys.size());
    int64_t at[kBlock];
    int64_t taken[kBlock];
    int32_t stepping[kBlock];
    for (int64_t i = 0; i < end - first; ++i) {
      at[i] = out[(first + i) * (num_steps + 1)] = roots[first + i];
    }
    for (int64_t step = 0; step < num_steps; ++step) {
      const int64_t count = choose(step, first, end - first, at, stepping, words);
      for (int64_t j = 0; j < count; ++j) {
        prefetch_read(indptr + at[stepping[j]], 2 * sizeof(int64_t));
        const int64_t node = at[stepping[j]];
        const auto id = static_cast<uint64_t>(original ? static_cast<int64_t>(original[node]) : node);
        words->low[j] = static_cast<uint32_t>(id);
        words->high[j] = static_cast<uint32_t>(id >> 32);
        words->tree[j] = static_cast<uint32_t>(first + stepping[j]);
      }
      const auto key = static_cast<uint64_t>(step_keys[static_cast<size_t>(step)]);
      make_words64(words, count, key);
      std::fill_n(taken, end - first, -1);
      for (int64_t j = 0; j < count; ++j) {
        taken[stepping[j]] = draw(key, at[stepping[j]], j, *words);
        prefetch_read(indices + std::max<int64_t>(taken[stepping[j]], 0), sizeof(id_t));
      }
      for (int64_t i = 0; i < end - first; ++i) {
        at[i] = taken[i] < 0 ? (coin > 0 ? roots[first + i] : -1) : source(taken[i]);
        out[(first + i) * (num_steps + 1) + step + 1] = at[i];
      }
    }
  }

  // Which of `size` walks take a step, by their places in the block: those that have not ended and do not restart.
  int64_t choose(int64_t step, int64_t first, int64_t size, const int64_t* at, int32_t* stepping, WordBlock* words) const {
    if (coin > 0) {
      for (int64_t i = 0; i < size; ++i) {
        words->low[i] = static_cast<uint32_t>(first + i);
      }
      std::fill_n(words->high, size, 0u);
      std::fill_n(words->tree, size, 0u);
      make_words64(words, size, static_cast<uint64_t>(coin_keys[static_cast<size_t>(step)]));
    }
    int64_t count = 0;
    for (int64_t i = 0; i < size; ++i) {
      stepping[count] = static_cast<int32_t>(i);
      count += at[i] >= 0 && !(coin > 0 && walk_restarts(words->word[i], coin));
    }
    return count;
  }

  // The position of the edge that a walk takes by word j; -1 where there is none.
  int64_t draw(uint64_t key, int64_t node, int64_t j, const WordBlock& words) const {
    const int64_t begin = indptr[node];
    const int64_t end = indptr[node + 1];
    if (!check_row(begin, end, num_edges, node, faults) || begin == end) {
      return -1;
    }
    const Stream stream{key, static_cast<uint64_t>(words.high[j]) << 32 | words.low[j], words.tree[j]};
    return begin + bounded(stream, 0, static_cast<uint32_t>(words.word[j]), static_cast<uint32_t>(end - begin));
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
        WordBlock words;
        for (int64_t first = begin; first < end; first += kBlock) {
          walks.run(first, std::min(first + kBlock, end), &words);
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
