// Who sends what to whom under an assignment, kept exact while nodes move: O(in-degree) per question and per move.
//
// u is sent to part q when q is not u's own and holds an out-neighbour of u. Two bit sets per node answer the questions
// of a move: have(u), the parts that hold u or receive it, and last(u), the parts that receive u for one node alone.
// Moving v from p to q
//   frees p of every in-neighbour u with p in last(u), and loads q with every one with q not in have(u);
//   makes p receive v if p holds an out-neighbour of v, and spares q from receiving it.
#pragma once

#include "cpu/partition/volume_counts.h"
#include "cpu/partition/volume_graph.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gnnsys {

// What moving one node from its part would do to the volume: to part q it changes by  need[q] - release.
struct MoveCost {
  int64_t release;            // rows that no longer travel, whatever the target
  std::vector<int32_t> need;  // [num_parts]: rows that would newly travel; may be negative
};

// Loads are the rows a part sends and receives.
struct Loads {
  std::vector<int64_t> sent;
  std::vector<int64_t> received;

  int64_t of(int p) const { return std::max(sent[p], received[p]); }
  int64_t largest() const {
    int64_t most = 0;
    for (size_t p = 0; p < sent.size(); ++p) {
      most = std::max(most, of(static_cast<int>(p)));
    }
    return most;
  }
};

class VolumeState {
 public:
  VolumeState(const VolumeGraph& graph, const int32_t* part, int num_parts)
      : graph_(graph),
        num_parts_(num_parts),
        num_words_((num_parts + 63) / 64),
        part_(part, part + graph.num_nodes()),
        counts_(out_degrees(graph), num_parts),
        bits_(2 * num_words_ * graph.num_nodes(), 0),
        loads_{std::vector<int64_t>(num_parts, 0), std::vector<int64_t>(num_parts, 0)} {
    for (int64_t u = 0; u < graph.num_nodes(); ++u) {
      set(have(u), part_[u]);
    }
    for (int64_t v = 0; v < graph.num_nodes(); ++v) {
      for (int32_t i = 0; i < graph.degree[v]; ++i) {
        add(graph.in(v)[i], part_[v]);
      }
    }
  }

  const VolumeGraph& graph() const { return graph_; }
  int num_parts() const { return num_parts_; }
  int part(int64_t v) const { return part_[v]; }
  const std::vector<int32_t>& parts() const { return part_; }
  const Loads& loads() const { return loads_; }
  int64_t volume() const { return volume_; }

  // The cost of v's leaving for any part. Counts for 64 parts at a time, one bit of each count per word: adding a set
  // of parts is a ripple of carries, two words on average.
  void cost(int64_t v, MoveCost* out) const {
    const int p = part_[v];
    const int32_t degree = graph_.degree[v];
    const int32_t* const in = graph_.in(v);
    int64_t released = 0;
    for (int64_t word = 0; word < num_words_; ++word) {
      uint64_t planes[32];
      int used = 0;
      const uint64_t* const have_word = bits_.data() + word;
      const bool holds_p = p / 64 == word;
      for (int32_t i = 0; i < degree; ++i) {
        const uint64_t* const at = have_word + 2 * num_words_ * in[i];
        released += holds_p ? at[num_words_] >> (p & 63) & 1 : 0;
        uint64_t carry = at[0];
        int b = 0;
        for (; carry != 0 && b < used; ++b) {
          const uint64_t both = planes[b] & carry;
          planes[b] ^= carry;
          carry = both;
        }
        if (carry != 0) {
          planes[used++] = carry;
        }
      }
      const int end = std::min(num_parts_ - static_cast<int>(word) * 64, 64);
      for (int q = 0; q < end; ++q) {
        int32_t having = 0;
        for (int b = 0; b < used; ++b) {
          having |= static_cast<int32_t>(planes[b] >> q & 1) << b;
        }
        out->need[word * 64 + q] = degree - having;
      }
    }
    const bool needed_here = counts_.count(v, p) > 0;
    for (int64_t word = 0; word < num_words_; ++word) {
      for (uint64_t rest = have(v)[word]; rest != 0; rest &= rest - 1) {
        --out->need[word * 64 + __builtin_ctzll(rest)];  // q is spared from receiving v; of p we ask nothing
      }
    }
    out->release = released - needed_here;
  }

  // To how many parts v is sent.
  int64_t num_receivers(int64_t v) const {
    int64_t bits = -1;  // have(v) holds v's own part
    for (int64_t word = 0; word < num_words_; ++word) {
      bits += __builtin_popcountll(have(v)[word]);
    }
    return bits;
  }

  void move(int64_t v, int to) {
    const int from = part_[v];
    const int32_t* const in = graph_.in(v);
    for (int32_t i = 0; i < graph_.degree[v]; ++i) {
      remove(in[i], from);
      add(in[i], to);
    }
    const int32_t at_from = counts_.count(v, from);
    const bool at_to = counts_.count(v, to) > 0;
    const int64_t elsewhere = num_receivers(v) - at_to;  // parts that receive v before and after
    if (at_from == 0) {
      clear(have(v), from);
    } else if (at_from == 1) {
      set(last(v), from);
    }
    set(have(v), to);
    clear(last(v), to);
    loads_.sent[from] -= elsewhere + at_to;
    loads_.sent[to] += elsewhere + (at_from > 0);
    loads_.received[from] += at_from > 0;
    loads_.received[to] -= at_to;
    volume_ += (at_from > 0) - at_to;
    part_[v] = to;
  }

 private:
  static std::vector<int32_t> out_degrees(const VolumeGraph& graph) {
    std::vector<int32_t> degree(graph.num_nodes(), 0);
    for (int64_t v = 0; v < graph.num_nodes(); ++v) {
      for (int32_t i = 0; i < graph.degree[v]; ++i) {
        ++degree[graph.in(v)[i]];
      }
    }
    return degree;
  }

  uint64_t* have(int64_t u) { return bits_.data() + 2 * num_words_ * u; }
  const uint64_t* have(int64_t u) const { return bits_.data() + 2 * num_words_ * u; }
  uint64_t* last(int64_t u) { return have(u) + num_words_; }
  static void set(uint64_t* bits, int part) { bits[part >> 6] |= uint64_t{1} << (part & 63); }
  static void clear(uint64_t* bits, int part) { bits[part >> 6] &= ~(uint64_t{1} << (part & 63)); }

  // One more out-neighbour of u in `part`, one fewer.
  void add(int32_t u, int part) {
    const int32_t count = counts_.increment(u, part);
    if (part == part_[u] || count > 2) {
      return;
    }
    if (count == 1) {
      set(have(u), part);
      set(last(u), part);
      travels(u, part, 1);
    } else {
      clear(last(u), part);
    }
  }

  void remove(int32_t u, int part) {
    const int32_t count = counts_.decrement(u, part);
    if (part == part_[u] || count > 1) {
      return;
    }
    if (count == 0) {
      clear(have(u), part);
      clear(last(u), part);
      travels(u, part, -1);
    } else {
      set(last(u), part);
    }
  }

  void travels(int32_t u, int to, int64_t rows) {
    loads_.sent[part_[u]] += rows;
    loads_.received[to] += rows;
    volume_ += rows;
  }

  const VolumeGraph& graph_;
  int num_parts_;
  int64_t num_words_;
  std::vector<int32_t> part_;
  PartCounts counts_;
  std::vector<uint64_t> bits_;  // by node: have, then last
  Loads loads_;
  int64_t volume_ = 0;
};

}  // namespace gnnsys
