// Local search over assignments: every node in turn is offered the part where it costs least.
//
// The cost of an assignment is its volume (Eq. 4.3 of G3) plus, to even it out (Eq. 4.4),
//     sum over parts of price * (max(0, sent - level) + max(0, received - level)).
// A node without room in the part it wants is swapped with one that weighs about the same and would go the other way.
// At temperature t a change that costs d is made with probability exp(-d / t), so that a search leaves local optima.
// Nodes propose block by block, in parallel, from the state at the block's start; proposals are weighed again and made
// in order. Draws are addressed by node and pass: the result is the same for any number of threads.
#pragma once

#include "common/philox.h"
#include "cpu/partition/volume_limits.h"
#include "cpu/partition/volume_state.h"
#include "cpu/partition/volume_waiting.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace gnnsys {

struct SearchGoal {
  double temperature = 0;
  double level = 0;
  std::vector<double> price = {};  // [num_parts], or empty: the volume alone
  int64_t most_volume = std::numeric_limits<int64_t>::max();  // above it no change may add to the volume

  bool priced() const { return !price.empty(); }
};

class VolumeSearch {
 public:
  VolumeSearch(VolumeState* state, Limits* limits, uint64_t key)
      : state_(*state),
        limits_(*limits),
        key_(key),
        cost_(make_cost()),
        waiting_(state->num_parts()),
        settled_(state->graph().num_nodes(), 0) {}

  const VolumeState& state() const { return state_; }
  const Limits& limits() const { return limits_; }
  int64_t num_moves() const { return num_moves_; }
  int64_t num_swaps() const { return num_swaps_; }

  // Offers every node a change, once.
  void pass(const SearchGoal& goal) {
    ++num_passes_;
    waiting_.clear();
    const int64_t num_nodes = state_.graph().num_nodes();
    std::vector<Choice> choices(std::min(kBlock, num_nodes));
    for (int64_t first = 0; first < num_nodes; first += kBlock) {
      const int64_t size = std::min(kBlock, num_nodes - first);
      parallel_for_dynamic(size, kBlock / 16, [&](int64_t begin, int64_t end) {
        MoveCost cost = make_cost();
        for (int64_t i = begin; i < end; ++i) {
          const int64_t v = first + i;
          choices[i] = {};
          if (!settled_[v] || (v + num_passes_) % kLookAgain == 0) {
            choices[i] = choose(v, goal, &cost);
            settled_[v] = choices[i].cost > std::max(kSettled, kHopeless * goal.temperature);
          }
        }
      });
      for (int64_t i = 0; i < size; ++i) {
        offer(first + i, choices[i], goal);
      }
    }
  }

  // Moves every node back to where `part` has it.
  void restore(const std::vector<int32_t>& part) {
    for (int64_t v = 0; v < state_.graph().num_nodes(); ++v) {
      if (state_.part(v) != part[v]) {
        shift(v, part[v]);
      }
    }
  }

  // For nodes in parts above their limit: whatever reduces the excess at an acceptable price, within `room` of all
  // limits where that is possible. A part may exceed one limit for another's sake as long as the sum falls, which is
  // how many light nodes get exchanged for few heavy ones. Returns how many nodes moved.
  int64_t relieve(double room, double rows_per_excess) {
    int64_t moved = 0;
    for (int64_t v = 0; v < state_.graph().num_nodes(); ++v) {
      const int p = state_.part(v);
      if (!limits_.relieves(v, p)) {
        continue;
      }
      state_.cost(v, &cost_);
      int to = -1;
      double least = 0;
      for (int q = 0; q < state_.num_parts(); ++q) {
        const double change = q == p ? 0 : limits_.excess_change(v, p, q, room);
        const double cost = volume_change(cost_, q) + rows_per_excess * change;
        if (change < -kRounding && cost < least) {
          least = cost;
          to = q;
        }
      }
      if (to >= 0) {
        shift(v, to);
        ++moved;
      }
    }
    num_moves_ += moved;
    return moved;
  }

 private:
  static constexpr int64_t kBlock = 1 << 12;
  static constexpr double kHopeless = 12;  // no draw is made at odds below exp(-12)
  static constexpr double kSettled = 2;    // rows; a node that loses more by any change is looked at
  static constexpr int64_t kLookAgain = 4;  // in every fourth pass only
  static constexpr double kSlip = 4;       // by how many rows a waiting node's cost may have fallen meanwhile
  static constexpr double kRounding = 1e-12;

  struct Choice {
    int cheapest = -1;
    int cheapest_with_room = -1;
    int in_exchange = -1;  // where it would go as the other half of a swap
    double cost = INFINITY;
    double cost_with_room = INFINITY;
    double cost_in_exchange = INFINITY;
    bool worth_it = false;
  };

  MoveCost make_cost() const { return {0, std::vector<int32_t>(state_.num_parts())}; }

  static double volume_change(const MoveCost& cost, int q) {
    return static_cast<double>(cost.need[q]) - static_cast<double>(cost.release);
  }

  // What `rows` above the level cost a part.
  static double dues(int p, int64_t rows, const SearchGoal& goal) {
    return goal.price[p] * std::max(static_cast<double>(rows) - goal.level, 0.0);
  }

  // What the move does to the loads of p and q, without what other parts send: near enough to choose a part by.
  double change_of_dues(int p, int q, const MoveCost& cost, int64_t rows_sent, const SearchGoal& goal) const {
    const auto& [sent, received] = state_.loads();
    return dues(p, sent[p] - rows_sent, goal) - dues(p, sent[p], goal) +              //
           dues(p, received[p] - cost.release, goal) - dues(p, received[p], goal) +  //
           dues(q, sent[q] + rows_sent, goal) - dues(q, sent[q], goal) +              //
           dues(q, received[q] + cost.need[q], goal) - dues(q, received[q], goal);
  }

  double most_it_may_cost(int64_t v, const SearchGoal& goal) const {
    if (goal.temperature <= 0) {
      return 0;
    }
    return -goal.temperature * std::log(open_unit(philox_u64(v, num_passes_, key_)));
  }

  Choice choose(int64_t v, const SearchGoal& goal, MoveCost* cost) const {
    const int p = state_.part(v);
    state_.cost(v, cost);
    const int64_t rows_sent = goal.priced() ? state_.num_receivers(v) : 0;
    Choice best;
    for (int q = 0; q < state_.num_parts(); ++q) {
      if (q == p) {
        continue;
      }
      const double rows = volume_change(*cost, q);
      const double all = goal.priced() ? rows + change_of_dues(p, q, *cost, rows_sent, goal) : rows;
      if (all < best.cost) {
        best.cost = all;
        best.cheapest = q;
      }
      if (all < best.cost_with_room && limits_.may_enter(v, q)) {
        best.cost_with_room = all;
        best.cheapest_with_room = q;
      }
      if (goal.priced() && rows < best.cost_in_exchange && dues(q, state_.loads().of(q), goal) > 0) {
        best.cost_in_exchange = rows;  // G3's v_min: what an overloaded part takes back for a node it gives away
        best.in_exchange = q;
      }
    }
    best.worth_it = best.cost <= kHopeless * goal.temperature && best.cost < most_it_may_cost(v, goal);
    if (best.in_exchange < 0 && (best.worth_it || goal.temperature <= 0)) {
      best.cost_in_exchange = best.cost;
      best.in_exchange = best.cheapest;
    }
    return best;
  }

  void offer(int64_t v, const Choice& proposed, const SearchGoal& goal) {
    if (proposed.worth_it) {
      const Choice now = choose(v, goal, &cost_);
      if (now.worth_it && (swap(v, now, goal) || move(v, now, goal))) {
        return;
      }
    }
    if (proposed.in_exchange >= 0 && proposed.in_exchange != state_.part(v)) {
      waiting_.add(v, state_.part(v), proposed.in_exchange, limits_.weight_class(v), proposed.cost_in_exchange);
    }
  }

  // v goes where it wants most, for one that goes the other way, if there is no room.
  bool swap(int64_t v, const Choice& choice, const SearchGoal& goal) {
    const int p = state_.part(v);
    const int q = choice.cheapest;
    if (q == choice.cheapest_with_room) {
      return false;
    }
    const double before = total_cost(goal);
    const int64_t rows = state_.volume();
    const double most = most_it_may_cost(v, goal);
    for (Waiting& other : waiting_.at(q, p, limits_.weight_class(v))) {
      const int64_t w = other.node;
      if (w < 0 || other.to != p || state_.part(w) != q || choice.cost + other.cost > most + kSlip ||
          !limits_.may_swap(v, p, w, q)) {
        continue;
      }
      shift(v, q);
      shift(w, p);
      if (total_cost(goal) - before < most && affordable(rows, goal)) {
        other = {};
        ++num_swaps_;
        num_moves_ += 2;
        return true;
      }
      shift(w, q);
      shift(v, p);
    }
    return false;
  }

  bool move(int64_t v, const Choice& choice, const SearchGoal& goal) {
    const double most = most_it_may_cost(v, goal);
    if (choice.cheapest_with_room < 0 || choice.cost_with_room >= most) {
      return false;
    }
    const int p = state_.part(v);
    const double before = total_cost(goal);
    const int64_t rows = state_.volume();
    shift(v, choice.cheapest_with_room);
    if (total_cost(goal) - before >= most || !affordable(rows, goal)) {
      shift(v, p);
      return false;
    }
    ++num_moves_;
    return true;
  }

  bool affordable(int64_t rows_before, const SearchGoal& goal) const {
    return state_.volume() <= std::max(goal.most_volume, rows_before);
  }

  double total_cost(const SearchGoal& goal) const {
    auto sum = static_cast<double>(state_.volume());
    for (int p = 0; p < state_.num_parts() && goal.priced(); ++p) {
      sum += dues(p, state_.loads().sent[p], goal) + dues(p, state_.loads().received[p], goal);
    }
    return sum;
  }

  void shift(int64_t v, int to) {
    limits_.move(v, state_.part(v), to);
    state_.move(v, to);
  }

  VolumeState& state_;
  Limits& limits_;
  uint64_t key_;
  MoveCost cost_;
  WaitingNodes waiting_;
  std::vector<uint8_t> settled_;
  int64_t num_passes_ = 0;
  int64_t num_moves_ = 0;
  int64_t num_swaps_ = 0;
};

// A cycle cools from its hottest pass to kCold, in as many passes as the graph's size affords, then rests at zero.
// Graphs that afford few passes get a single cycle for their volume: the first one, the coolest, saves most.
constexpr double kCold = 0.1;
constexpr int kRestPasses = 3;
constexpr int kFewPasses = 16;
constexpr int kMaxCycles = 4;

inline int passes_per_cycle(const VolumeGraph& graph) {
  constexpr int64_t kCycleWork = 48'000'000;  // edges visited; a node costs as much as four
  const int64_t work = static_cast<int64_t>(graph.sources.size()) + 4 * graph.num_nodes() + 1;
  return static_cast<int>(std::clamp<int64_t>(kCycleWork / work, 10, 64));
}

inline double temperature_at(int pass, int num_passes, double hottest) {
  return hottest * std::pow(kCold / hottest, static_cast<double>(pass) / std::max(num_passes - 1, 1));
}

}  // namespace gnnsys
