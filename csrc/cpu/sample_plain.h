// Uniform sampling with nothing filtered: each seed's count follows from its degree, so outputs are exact from the start,
// random words are made with SIMD, and random reads stand in loops of their own.
#pragma once

#include "common/parallel.h"
#include "cpu/choose.h"
#include "cpu/philox_lanes.h"
#include "cpu/sample.h"

#include <numeric>
#include <vector>

namespace gnnsys {

// A seed's positions [begin, end), as indptr has them: a degree may be asked for once they were checked.
struct Row {
  int64_t begin;
  int64_t end;
  int64_t degree() const { return end - begin; }
};

// Fills rows[i] and offsets[i + 1], seed i's count. Work: one random 16-byte read per seed, in a loop without branches
// on what is read, so that reads overlap.
template <typename id_t>
void count_plain(const Request<id_t>& q, Row* rows, int64_t* offsets, Faults* faults) {
  parallel_for(q.num_seeds, kSeedsPerThread, [&](int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; ++i) {
      const int64_t* row = q.indptr + q.seeds[i];
      rows[i] = {row[0], row[1]};
    }
    for (int64_t i = lo; i < hi; ++i) {
      const bool good = check_row(rows[i].begin, rows[i].end, q.num_edges, q.seeds[i], faults);
      offsets[i + 1] = good ? q.count(rows[i].degree()) : 0;
    }
  });
}

// The random words of kLanes streams: draw j of lane l at words[l * stride + j], padded to whole blocks of four.
template <typename id_t>
void make_words_lanes(const Request<id_t>& q, const int64_t* seeds, int lanes, uint32_t stride, uint32_t* words) {
  uint32_t counters[3][kLanes] = {};
  for (int l = 0; l < lanes; ++l) {
    const Stream stream = q.stream(seeds[l]);
    counters[0][l] = static_cast<uint32_t>(stream.node);
    counters[1][l] = static_cast<uint32_t>(stream.node >> 32);
    counters[2][l] = stream.tree;
  }
  for (uint32_t block = 0; 4 * block < stride; ++block) {
    u32x4 state[kChains][4];
    for (int v = 0; v < kChains; ++v) {
      for (int c = 0; c < 3; ++c) {
        state[v][c] = load4(counters[c] + 4 * v);
      }
      state[v][3] = splat(block);
    }
    philox4x32_lanes(state, q.key);
    for (int l = 0; l < kLanes; ++l) {
      const u32x4* s = state[l / 4];
      store4(words + static_cast<uint32_t>(l) * stride + 4 * block,
             u32x4{s[0][l % 4], s[1][l % 4], s[2][l % 4], s[3][l % 4]});
    }
  }
}

// One thread's writer of positions. Seeds whose whole neighbourhood is taken are written at once; the others wait until
// kLanes of them can have their random words made together.
template <typename id_t>
class PlainWriter {
 public:
  PlainWriter(const Request<id_t>& q, const Row* rows, const int64_t* offsets, int64_t* positions)
      : q_(q), rows_(rows), offsets_(offsets), positions_(positions) {}

  void write(int64_t i) {
    const int64_t k = offsets_[i + 1] - offsets_[i];
    if (k == 0 || (k == rows_[i].degree() && (!q_.replace || q_.fanout < 0))) {
      std::iota(positions_ + offsets_[i], positions_ + offsets_[i + 1], rows_[i].begin);
      return;
    }
    waiting_[num_waiting_++] = i;
    if (num_waiting_ == kLanes) {
      flush();
    }
  }

  void flush() {
    if (num_waiting_ == 0) {
      return;
    }
    const auto k = static_cast<uint32_t>(q_.fanout);  // every waiting seed takes exactly the fanout
    const uint32_t padded = (k + 3) / 4 * 4;
    words_.resize(size_t{padded} * kLanes);
    ranks_.resize(k);
    make_words_lanes(q_, waiting_, num_waiting_, padded, words_.data());
    for (int l = 0; l < num_waiting_; ++l) {
      const int64_t i = waiting_[l];
      const uint32_t* words = words_.data() + static_cast<uint32_t>(l) * padded;
      const auto n = static_cast<uint32_t>(rows_[i].degree());
      if (q_.replace) {
        chooser_.with_replacement(q_.stream(i), words, n, k, ranks_.data());
      } else {
        chooser_.without_replacement(q_.stream(i), words, n, k, ranks_.data());
      }
      for (uint32_t j = 0; j < k; ++j) {
        positions_[offsets_[i] + j] = rows_[i].begin + ranks_[j];
      }
    }
    num_waiting_ = 0;
  }

 private:
  const Request<id_t>& q_;
  const Row* rows_;
  const int64_t* offsets_;
  int64_t* positions_;
  int64_t waiting_[kLanes];
  int num_waiting_ = 0;
  RankChooser chooser_;
  std::vector<uint32_t> words_, ranks_;
};

// Seeds are taken in groups: first all positions of the group, then all reads. The reads are independent of each other
// and of any branch, so the processor keeps as many in flight as it can (faster here than prefetch instructions).
template <typename id_t>
void fill_plain(const Request<id_t>& q, const Row* rows, const int64_t* offsets, id_t* neighbors, int64_t* positions) {
  constexpr int64_t kGroup = 256;
  parallel_for(q.num_seeds, kSeedsPerThread, [&](int64_t lo, int64_t hi) {
    PlainWriter<id_t> writer(q, rows, offsets, positions);
    for (int64_t group = lo; group < hi; group += kGroup) {
      const int64_t group_end = std::min(group + kGroup, hi);
      for (int64_t i = group; i < group_end; ++i) {
        writer.write(i);
      }
      writer.flush();
      for (int64_t e = offsets[group]; e < offsets[group_end]; ++e) {
        neighbors[e] = q.indices[positions[e]];
      }
    }
  });
}

}  // namespace gnnsys
