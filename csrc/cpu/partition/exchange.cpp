// Global k-way Fiduccia-Mattheyses that may step over a limit and back: what finds its way when every part is full.
//
// With tight limits in several constraints nearly every single move is forbidden, while exchanges are not. Here a node may
// go to a part that it overfills; then the next moves are taken from that part, from among the nodes heavy in the very
// constraint that is exceeded (Karypis and Kumar, SC'98: a queue per part and constraint). A pass moves a node once and is
// undone back to the best point, least excess before least cut.
#include "cpu/partition/node_heap.h"
#include "cpu/partition/state.h"

#include <limits>

namespace gnnsys::partition {
namespace {

class Exchange {
 public:
  explicit Exchange(State& state)
      : state_(state),
        num_constraints_(state.loads.num_constraints()),
        heaps_(static_cast<int64_t>(state.num_parts) * num_constraints_, state.graph.num_nodes()),
        moved_(state.graph.num_nodes(), 0) {}

  int64_t work() const { return work_; }

  // Returns by how much the cut fell; negative where that was the price of lowering the excess, which never rises.
  int64_t pass(int64_t work) {
    heaps_.clear();
    std::fill(moved_.begin(), moved_.end(), 0);
    for (int32_t v = 0; v < state_.graph.num_nodes(); ++v) {
      offer(v);
    }
    steps_.clear();
    const int64_t patience = std::min<int64_t>(state_.graph.num_nodes() / 20 + 100, 1000);
    int64_t gain = 0;
    int64_t best = 0;
    double least_excess = state_.loads.excess();
    size_t best_length = 0;
    while (static_cast<int64_t>(steps_.size() - best_length) < patience && work_ < work) {
      int64_t step_gain = 0;
      if (!step(&step_gain)) {
        break;
      }
      gain += step_gain;
      const double excess = state_.loads.excess();
      if (excess < least_excess || (excess == least_excess && gain > best)) {
        best = gain;
        least_excess = excess;
        best_length = steps_.size();
      }
    }
    while (steps_.size() > best_length) {
      const Step last = steps_.back();
      steps_.pop_back();
      work_ += state_.graph.degree(last.node);
      state_.move(last.node, last.from);
    }
    return best;
  }

 private:
  struct Step {
    int32_t node;
    int32_t from;
  };

  // Puts v where it belongs among the heaps, or takes it out when it has no edge that leaves its part.
  void offer(int32_t v) {
    if (moved_[v]) {
      return;
    }
    work_ += state_.price(v);
    const int32_t from = state_.part(v);
    const int32_t* const ties = state_.ties(v);
    int32_t most = 0;
    for (int32_t q = 0; q < state_.num_parts; ++q) {
      most = q != from && ties[q] > most ? ties[q] : most;
    }
    if (most == 0) {
      heaps_.remove(v);
    } else {
      heaps_.set(v, from * num_constraints_ + state_.loads.heaviest(v), static_cast<int64_t>(most) - ties[from]);
    }
  }

  bool step(int64_t* gain) {
    work_ += heaps_.num_heaps() / 4;  // looking at the top of each
    int32_t over_part = -1;
    int32_t over_constraint = -1;
    if (state_.loads.worst(&over_part, &over_constraint)) {
      return relieve(over_part, over_constraint, gain);
    }
    return advance(gain);
  }

  // The best move out of an overfull part that lowers the excess.
  bool relieve(int32_t part, int32_t constraint, int64_t* gain) {
    for (int32_t i = 0; i < num_constraints_; ++i) {
      const int32_t heap = part * num_constraints_ + (constraint + i) % num_constraints_;
      while (!heaps_.empty(heap)) {
        const int32_t v = heaps_.top(heap);
        const Move move = cheapest(v, [&](int32_t q) { return state_.loads.relief(v, part, q) > 1e-12; });
        if (move.to < 0) {
          heaps_.remove(v);
          moved_[v] = 1;
        } else if (move.gain < heaps_.key(v)) {
          heaps_.set(v, heap, move.gain);
        } else {
          carry_out(v, move);
          *gain = move.gain;
          return true;
        }
      }
    }
    return false;
  }

  // The best move of all, over a limit if need be.
  bool advance(int64_t* gain) {
    while (true) {
      int32_t best = -1;
      for (int32_t heap = 0; heap < heaps_.num_heaps(); ++heap) {
        if (!heaps_.empty(heap) && (best < 0 || heaps_.key(heaps_.top(heap)) > heaps_.key(heaps_.top(best)))) {
          best = heap;
        }
      }
      if (best < 0) {
        return false;
      }
      const int32_t v = heaps_.top(best);
      const Move move = cheapest(v, [&](int32_t q) { return state_.loads.nearly_has_room(q, v); });
      if (move.to < 0) {
        heaps_.remove(v);
        moved_[v] = 1;
      } else if (move.gain < heaps_.key(v)) {
        heaps_.set(v, best, move.gain);
      } else {
        carry_out(v, move);
        *gain = move.gain;
        return true;
      }
    }
  }

  template <typename Allowed>
  Move cheapest(int32_t v, const Allowed& allowed) const {
    const int32_t from = state_.part(v);
    const int32_t* const ties = state_.ties(v);
    Move best{-1, std::numeric_limits<int64_t>::min()};
    for (int32_t q = 0; q < state_.num_parts; ++q) {
      const int64_t gain = static_cast<int64_t>(ties[q]) - ties[from];
      if (q != from && gain > best.gain && allowed(q)) {
        best = {q, gain};
      }
    }
    return best;
  }

  void carry_out(int32_t v, const Move& move) {
    heaps_.remove(v);
    moved_[v] = 1;
    steps_.push_back({v, state_.part(v)});
    state_.move(v, move.to, [&](int32_t u) { offer(u); });
  }

  State& state_;
  const int32_t num_constraints_;
  NodeHeaps heaps_;
  std::vector<uint8_t> moved_;
  std::vector<Step> steps_;
  int64_t work_ = 0;
};

}  // namespace

int64_t exchange(State& state, int64_t work) {
  constexpr int kPasses = 10;
  Exchange exchange(state);
  int64_t total = 0;
  for (int pass = 0; pass < kPasses && exchange.work() < work; ++pass) {
    const int64_t gained = exchange.pass(work);
    total += gained;
    if (gained >= 0 && gained * 1000 < state.cut()) {
      break;
    }
  }
  return total;
}

}  // namespace gnnsys::partition
