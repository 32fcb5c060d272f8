// Localised k-way Fiduccia-Mattheyses: searches that start at one boundary node, follow the best move even where it
// costs, and keep the best point they passed (multi-try FM: Sanders and Schulz, ESA 2011).
//
// Small searches climb out of small holes, which passes of improving moves cannot; a node is touched by one search per
// round. Sequential, since each search sees the moves of those before it.
#include "cpu/partition/state.h"

#include <numeric>
#include <queue>

namespace gnnsys::partition {
namespace {

constexpr int64_t kPatience = 30;        // moves without a new best before a search gives up
constexpr int64_t kMostDegree = 4096;    // moving a hub touches too many nodes to be worth a try

struct Entry {
  int64_t gain;
  uint32_t tie;
  int32_t node;

  bool operator<(const Entry& other) const { return gain != other.gain ? gain < other.gain : tie < other.tie; }
};

class Search {
 public:
  Search(State& state, uint64_t key) : state_(state), key_(key), taken_(state.graph.num_nodes(), 0) {}

  void new_round() { std::fill(taken_.begin(), taken_.end(), 0); }
  bool is_taken(int32_t v) const { return taken_[v] != 0; }
  int64_t work() const { return work_; }

  // From `seed`; returns by how much the cut fell.
  int64_t run(int32_t seed) {
    heap_.clear();
    moves_.clear();
    push(seed);
    int64_t gain = 0;
    int64_t best = 0;
    size_t best_length = 0;
    while (!heap_.empty() && static_cast<int64_t>(moves_.size() - best_length) < kPatience) {
      const Entry top = pop();
      if (taken_[top.node] == kMoved) {
        continue;
      }
      const Move move = best_move(state_, top.node);
      if (move.to < 0) {
        continue;
      }
      if (move.gain < top.gain) {  // out of date: back into the heap at its true place
        heap_.push_back({move.gain, top.tie, top.node});
        std::push_heap(heap_.begin(), heap_.end());
        continue;
      }
      moves_.push_back({top.node, state_.part(top.node)});
      taken_[top.node] = kMoved;
      work_ += state_.graph.degree(top.node);
      gain += move.gain;
      state_.move(top.node, move.to, [&](int32_t u) { push(u); });
      if (gain > best) {
        best = gain;
        best_length = moves_.size();
      }
    }
    while (moves_.size() > best_length) {
      const Step step = moves_.back();
      moves_.pop_back();
      work_ += state_.graph.degree(step.node);
      state_.move(step.node, step.from);
    }
    for (const Entry& entry : heap_) {  // what was only looked at may be looked at again
      if (taken_[entry.node] == kSeen) {
        taken_[entry.node] = 0;
      }
    }
    return best;
  }

 private:
  static constexpr uint8_t kSeen = 1;
  static constexpr uint8_t kMoved = 2;

  struct Step {
    int32_t node;
    int32_t from;
  };

  void push(int32_t v) {
    if (taken_[v] == kMoved || state_.graph.degree(v) > kMostDegree) {
      return;
    }
    const Move move = best_move(state_, v);
    work_ += state_.price(v);
    if (move.to < 0) {
      return;
    }
    taken_[v] = kSeen;
    heap_.push_back({move.gain, static_cast<uint32_t>(mix(v, key_)), v});
    std::push_heap(heap_.begin(), heap_.end());
  }

  Entry pop() {
    std::pop_heap(heap_.begin(), heap_.end());
    const Entry top = heap_.back();
    heap_.pop_back();
    return top;
  }

  State& state_;
  const uint64_t key_;
  std::vector<uint8_t> taken_;
  std::vector<Entry> heap_;
  std::vector<Step> moves_;
  int64_t work_ = 0;
};

// Whether searching still pays: it has to lower the cut by a percent for every look at all edges. On power-law graphs,
// where every node is at the boundary and hardly any search finds something, this is what ends it.
class Yield {
 public:
  Yield(const State& state, const Search& search)
      : search_(search), step_(std::max<int64_t>(state.graph.num_entries() / 20, 200'000)), least_(state.cut() / 2000) {}

  bool is_poor(int64_t gained) {
    if (search_.work() < checked_ + step_) {
      return false;
    }
    const bool poor = gained - gained_ <= least_;
    checked_ = search_.work();
    gained_ = gained;
    return poor;
  }

 private:
  const Search& search_;
  const int64_t step_;   // a twentieth of all edges, more in small graphs
  const int64_t least_;  // a twentieth of a percent
  int64_t checked_ = 0;
  int64_t gained_ = 0;
};

std::vector<int32_t> boundary(const State& state, uint64_t key) {
  std::vector<int32_t> nodes;
  for (int32_t v = 0; v < state.graph.num_nodes(); ++v) {
    if (state.cut_of(v) > 0) {
      nodes.push_back(v);
    }
  }
  std::sort(nodes.begin(), nodes.end(), [&](int32_t a, int32_t b) { return mix(a, key) < mix(b, key); });
  return nodes;
}

}  // namespace

int64_t search(State& state, int64_t work, uint64_t key) {
  constexpr int kRounds = 8;
  Search search(state, key);
  Yield yield(state, search);
  int64_t total = 0;
  for (int round = 0; round < kRounds && search.work() < work; ++round) {
    search.new_round();
    int64_t gained = 0;
    for (const int32_t v : boundary(state, key + round)) {
      if (search.work() >= work || yield.is_poor(total + gained)) {
        return total + gained;
      }
      if (!search.is_taken(v) && state.cut_of(v) > 0) {
        gained += search.run(v);
      }
    }
    total += gained;
    if (gained * 1000 < state.cut()) {
      break;
    }
  }
  return total;
}

}  // namespace gnnsys::partition
