// Uniform sampling with nothing filtered: each seed's count follows from its degree, so outputs are exact from the start,
// random words are made with SIMD, and random reads stand in loops of their own.
#pragma once

#include "common/parallel.h"
#include "cpu/choose.h"
#include "cpu/choose_lanes.h"
#include "cpu/far_reads.h"
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
    read_far(hi - lo, rows + lo, [&](int64_t i) {
      const int64_t* row = q.indptr + q.seeds[lo + i];
      return Row{row[0], row[1]};
    });
    for (int64_t i = lo; i < hi; ++i) {
      const bool good = check_row(rows[i].begin, rows[i].end, q.num_edges, q.seeds[i], faults);
      offsets[i + 1] = good ? q.count(rows[i].degree()) : 0;
    }
  });
}

// counts -> offsets, in place: offsets[0] = 0, offsets[i + 1] holds the count of seed i. Returns the sum.
inline int64_t prefix_sum(int64_t* offsets, int64_t size) {
  int64_t sum = 0;
  offsets[0] = 0;
  for (int64_t i = 1; i <= size; ++i) {
    sum += offsets[i];
    offsets[i] = sum;
  }
  return sum;
}

// The random words of kLanes streams, in whole blocks of four: draw j of lane l at words[j * kLanes + l].
template <typename id_t>
void make_words_lanes(const Request<id_t>& q, const int64_t* seeds, int lanes, uint32_t k, uint32_t* words) {
  uint32_t counters[3][kLanes] = {};
  for (int l = 0; l < lanes; ++l) {
    const Stream stream = q.stream(seeds[l]);
    counters[0][l] = static_cast<uint32_t>(stream.node);
    counters[1][l] = static_cast<uint32_t>(stream.node >> 32);
    counters[2][l] = stream.tree;
  }
  for (uint32_t block = 0; 4 * block < k; ++block) {
    u32x4 state[kChains][4];
    for (int v = 0; v < kChains; ++v) {
      for (int c = 0; c < 3; ++c) {
        state[v][c] = load4(counters[c] + 4 * v);
      }
      state[v][3] = splat(block);
    }
    philox4x32_lanes(state, q.key);
    for (uint32_t c = 0; c < 4; ++c) {
      for (int v = 0; v < kChains; ++v) {
        store4(words + (4 * block + c) * kLanes + 4 * v, state[v][c]);
      }
    }
  }
}

// One thread's writer of positions. Seeds whose whole neighbourhood is taken are written at once; the others wait until
// kLanes of them can be drawn for together.
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
    words_.resize(size_t{(k + 3) / 4 * 4} * kLanes);
    make_words_lanes(q_, waiting_, num_waiting_, k, words_.data());
    const uint32_t left = k <= kMostLaneDraws ? choose_together(k) : ~0u;
    for (int l = 0; l < num_waiting_; ++l) {
      if (left >> l & 1) {
        choose_alone(l, k);
      }
    }
    num_waiting_ = 0;
  }

 private:
  // Returns the lanes that are left to do, a bit each.
  uint32_t choose_together(uint32_t k) {
    uint32_t sizes[kLanes];
    for (int l = 0; l < kLanes; ++l) {  // lanes without a seed draw as the last one
      sizes[l] = static_cast<uint32_t>(rows_[waiting_[std::min(l, num_waiting_ - 1)]].degree());
    }
    ranks_.resize(size_t{k} * kLanes);
    const uint32_t left = choose_lanes(words_.data(), sizes, k, q_.replace, ranks_.data());
    for (int l = 0; l < num_waiting_; ++l) {
      write_ranks<kLanes>(waiting_[l], k, ranks_.data() + l);
    }
    return left;
  }

  void choose_alone(int l, uint32_t k) {
    const int64_t i = waiting_[l];
    const auto n = static_cast<uint32_t>(rows_[i].degree());
    lane_words_.resize(k);
    lane_ranks_.resize(k);
    for (uint32_t j = 0; j < k; ++j) {
      lane_words_[j] = words_[j * kLanes + static_cast<uint32_t>(l)];
    }
    if (q_.replace) {
      chooser_.with_replacement(q_.stream(i), lane_words_.data(), n, k, lane_ranks_.data());
    } else {
      chooser_.without_replacement(q_.stream(i), lane_words_.data(), n, k, lane_ranks_.data());
    }
    write_ranks<1>(i, k, lane_ranks_.data());
  }

  template <uint32_t kStride>
  void write_ranks(int64_t i, uint32_t k, const uint32_t* ranks) {
    int64_t* const to = positions_ + offsets_[i];
    const int64_t begin = rows_[i].begin;
    for (uint32_t j = 0; j < k; ++j) {
      to[j] = begin + ranks[j * kStride];
    }
  }

  const Request<id_t>& q_;
  const Row* rows_;
  const int64_t* offsets_;
  int64_t* positions_;
  int64_t waiting_[kLanes];
  int num_waiting_ = 0;
  RankChooser chooser_;
  std::vector<uint32_t> words_, ranks_, lane_words_, lane_ranks_;
};

// Edges of seeds [begin, end): first all positions, then all sources, into neighbors[0..]. All of it stays in a cache
// where seeds are a few hundred.
template <typename id_t>
void fill_seeds(const Request<id_t>& q, const int64_t* offsets, int64_t begin, int64_t end, PlainWriter<id_t>* writer,
                int64_t* positions, id_t* neighbors) {
  for (int64_t i = begin; i < end; ++i) {
    writer->write(i);
  }
  writer->flush();
  const int64_t* const at = positions + offsets[begin];
  read_far(offsets[end] - offsets[begin], neighbors, [&](int64_t e) { return q.indices[at[e]]; });
}

// Fills rows and offsets, every seed's place among all edges. Returns how many edges there are. ValueError where a row
// is none.
template <typename id_t>
int64_t count_rows(const Request<id_t>& q, Row* rows, int64_t* offsets) {
  Faults faults;
  count_plain(q, rows, offsets, &faults);
  faults.raise();
  return prefix_sum(offsets, q.num_seeds);
}

}  // namespace gnnsys
