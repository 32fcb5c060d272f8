// What a call of sample_neighbors asks for, as raw pointers, and what can go wrong while it runs.
#pragma once

#include "common/check.h"
#include "common/draw.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

namespace gnnsys {

constexpr int64_t kSeedsPerThread = 256;  // fewer are not worth waking a thread for
constexpr int64_t kMaxDegree = std::numeric_limits<uint32_t>::max() - 1;

template <typename id_t>
struct Request {
  const int64_t* indptr;
  const id_t* indices;
  int64_t num_rows;
  int64_t num_edges;
  const id_t* seeds;
  int64_t num_seeds;
  int64_t fanout;
  bool replace;
  uint64_t key;
  const id_t* rng_ids;    // original ids of the seeds; the seeds themselves when null
  const int64_t* wide_rng_ids;  // the same where they need 64 bits and local ids do not
  const int64_t* tree;    // null: tree 0
  bool timed;
  const int64_t* time;    // per position, or per node id when node_time
  int64_t num_times;
  bool node_time;
  bool time_sorted;
  const int64_t* seed_time;
  bool last;
  const int64_t* exclude;  // ascending positions
  int64_t num_exclude;

  Stream stream(int64_t i) const {
    const uint64_t node = static_cast<uint64_t>(wide_rng_ids ? wide_rng_ids[i] : rng_ids ? rng_ids[i] : seeds[i]);
    return {key, node, tree ? static_cast<uint32_t>(tree[i]) : 0u};
  }

  // How many of n candidates are taken.
  int64_t count(int64_t n) const {
    if (fanout < 0 || n == 0) {
      return n;
    }
    return replace ? fanout : std::min(fanout, n);
  }
};

// What can go wrong inside a parallel loop, told after it.
struct Faults {
  std::atomic<int64_t> bad_row{-1};
  std::atomic<int64_t> bad_weight{-1};
  std::atomic<int64_t> huge_degree{-1};
  std::atomic<int64_t> no_time{-1};

  void raise() const {
    CHECK_ARG(bad_row < 0, "indptr must ascend from 0 to len(indices), it does not at node ", bad_row.load());
    CHECK_ARG(bad_weight < 0, "weight must be finite and not negative, it is not at edge position ",
              bad_weight.load());
    CHECK_ARG(no_time < 0, "time must have an entry for every source node, it has none for node ", no_time.load());
    CHECK_ARG(huge_degree < 0, "seeds: node ", huge_degree.load(), " has more than 2^32 - 2 in-edges");
  }
};

// Whether positions [begin, end) exist and a rank among them fits 32 bits; what is wrong is noted.
inline bool check_row(int64_t begin, int64_t end, int64_t num_edges, int64_t row, Faults* faults) {
  if (begin < 0 || end < begin || end > num_edges) {
    faults->bad_row = row;
    return false;
  }
  if (end - begin > kMaxDegree) {
    faults->huge_degree = row;
    return false;
  }
  return true;
}

}  // namespace gnnsys
