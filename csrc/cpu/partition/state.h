// A partition while it is being improved: who is where, how heavy every part is, and how strongly every node is tied to
// every part. All of it is kept up to date move by move.
#pragma once

#include "common/parallel.h"
#include "cpu/partition/adjacency.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace gnnsys::partition {

// The weight of every part in every constraint, and the most that it may be.
class Loads {
 public:
  Loads(NodeWeights weights, const int32_t* part, int32_t num_nodes, int32_t num_parts, const int64_t* limits)
      : weights_(weights),
        limits_(limits, limits + weights.num_constraints),
        scale_(weights.num_constraints),
        over_(weights.num_constraints, 0),
        load_(static_cast<int64_t>(num_parts) * weights.num_constraints, 0) {
    for (int32_t v = 0; v < num_nodes; ++v) {
      add(part[v], v, 1);
    }
    for (int32_t c = 0; c < num_constraints(); ++c) {
      int64_t total = 0;
      for (int32_t p = 0; p < num_parts; ++p) {
        total += of(p)[c];
      }
      scale_[c] = total > 0 ? static_cast<double>(num_parts) / total : 0;
    }
  }

  int32_t num_constraints() const { return weights_.num_constraints; }
  const int64_t* of(int32_t p) const { return load_.data() + static_cast<int64_t>(p) * num_constraints(); }

  // Whether q stays within its limits when v comes.
  bool has_room(int32_t q, int32_t v) const {
    const int64_t* const load = of(q);
    const int64_t* const mine = weights_.of(v);
    for (int32_t c = 0; c < num_constraints(); ++c) {
      if (mine[c] > 0 && load[c] + mine[c] > limits_[c]) {
        return false;
      }
    }
    return true;
  }

  bool over(int32_t p) const {
    const int64_t* const load = of(p);
    for (int32_t c = 0; c < num_constraints(); ++c) {
      if (load[c] > limits_[c]) {
        return true;
      }
    }
    return false;
  }

  // The same, or over by at most a tenth of an average part where it is not over yet.
  bool nearly_has_room(int32_t q, int32_t v) const {
    const int64_t* const load = of(q);
    const int64_t* const mine = weights_.of(v);
    for (int32_t c = 0; c < num_constraints(); ++c) {
      if (mine[c] > 0 && load[c] + mine[c] > limits_[c] && (load[c] > limits_[c] || mine[c] * scale_[c] > 0.1)) {
        return false;
      }
    }
    return true;
  }

  // The part and constraint that exceed their limit most; false when none does.
  bool worst(int32_t* part, int32_t* constraint) const {
    double most = 0;
    if (excess() == 0) {
      return false;
    }
    for (size_t i = 0; i < load_.size(); ++i) {
      const int32_t c = static_cast<int32_t>(i % num_constraints());
      const double excess = (load_[i] - limits_[c]) * scale_[c];
      if (load_[i] > limits_[c] && excess > most) {
        most = excess;
        *part = static_cast<int32_t>(i / num_constraints());
        *constraint = c;
      }
    }
    return most > 0;
  }

  int64_t weight(int32_t v, int32_t constraint) const { return weights_.of(v)[constraint]; }
  bool is_over(int32_t part, int32_t constraint) const { return of(part)[constraint] > limits_[constraint]; }

  // The part that has least of a constraint.
  int32_t lightest(int32_t constraint) const {
    int32_t best = 0;
    for (int32_t p = 1; p < static_cast<int32_t>(load_.size()) / num_constraints(); ++p) {
      best = of(p)[constraint] < of(best)[constraint] ? p : best;
    }
    return best;
  }

  // The constraint in which v weighs most, in parts' average loads.
  int32_t heaviest(int32_t v) const {
    const int64_t* const mine = weights_.of(v);
    int32_t best = 0;
    for (int32_t c = 1; c < num_constraints(); ++c) {
      best = mine[c] * scale_[c] > mine[best] * scale_[best] ? c : best;
    }
    return best;
  }

  // By how much the sum of all excess (in parts' average loads) falls when v goes from p to q.
  double relief(int32_t v, int32_t p, int32_t q) const {
    double sum = 0;
    const int64_t* const mine = weights_.of(v);
    for (int32_t c = 0; c < num_constraints(); ++c) {
      if (mine[c] != 0) {
        const int64_t leaves = std::min(mine[c], std::max<int64_t>(0, of(p)[c] - limits_[c]));
        const int64_t arrives = std::min(mine[c], std::max<int64_t>(0, of(q)[c] + mine[c] - limits_[c]));
        sum += (leaves - arrives) * scale_[c];
      }
    }
    return sum;
  }

  // By how much the sum of squared loads (in parts' average loads) falls: relief that looks past the limits.
  double evening(int32_t v, int32_t p, int32_t q) const {
    double sum = 0;
    const int64_t* const mine = weights_.of(v);
    for (int32_t c = 0; c < num_constraints(); ++c) {
      const double weight = mine[c] * scale_[c];
      sum += weight * ((of(p)[c] - of(q)[c]) * scale_[c] - weight);
    }
    return 2 * sum;
  }

  // Whether v would weigh on part a less than on b: a is the emptier one in what v is heavy in.
  bool lighter(int32_t v, int32_t a, int32_t b) const {
    double sum = 0;
    const int64_t* const mine = weights_.of(v);
    for (int32_t c = 0; c < num_constraints(); ++c) {
      sum += mine[c] * scale_[c] * ((of(b)[c] - of(a)[c]) * scale_[c]);
    }
    return sum > 0;
  }

  // The sum of all that is over a limit, in parts' average loads. Counted in whole weights, so that none is exactly 0.
  double excess() const {
    double sum = 0;
    for (int32_t c = 0; c < num_constraints(); ++c) {
      sum += over_[c] * scale_[c];
    }
    return sum;
  }

  void move(int32_t v, int32_t p, int32_t q) {
    add(p, v, -1);
    add(q, v, 1);
  }

 private:
  void add(int32_t p, int32_t v, int64_t sign) {
    int64_t* const load = load_.data() + static_cast<int64_t>(p) * num_constraints();
    const int64_t* const mine = weights_.of(v);
    for (int32_t c = 0; c < num_constraints(); ++c) {
      over_[c] -= std::max<int64_t>(0, load[c] - limits_[c]);
      load[c] += sign * mine[c];
      over_[c] += std::max<int64_t>(0, load[c] - limits_[c]);
    }
  }

  const NodeWeights weights_;
  const std::vector<int64_t> limits_;
  std::vector<double> scale_;
  std::vector<int64_t> over_;  // by constraint, what all parts have over its limit
  std::vector<int64_t> load_;  // [part, constraint]
};

// The partition and each node's ties: ties(v)[q] is the weight of v's edges into part q, a row of num_parts numbers.
//
// Rows are kept for all nodes where that takes no more memory than the graph, and computed when asked for otherwise.
class State {
 public:
  State(const Adjacency& graph, NodeWeights weights, int32_t* part, int32_t num_parts, const int64_t* limits)
      : graph(graph),
        num_parts(num_parts),
        loads(weights, part, graph.num_nodes(), num_parts, limits),
        part_(part),
        kept_(num_parts <= kAlwaysKept || static_cast<int64_t>(graph.num_nodes()) * num_parts <= 2 * graph.num_entries()) {
    if (!kept_) {
      return;
    }
    ties_.assign(static_cast<int64_t>(graph.num_nodes()) * num_parts, 0);
    parallel_for_dynamic(graph.num_nodes(), 1024, [&](int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; ++v) {
        add_ties(static_cast<int32_t>(v), ties_.data() + v * num_parts);
      }
    });
  }

  int32_t part(int32_t v) const { return part_[v]; }

  // Valid until this thread asks for another node's.
  const int32_t* ties(int32_t v) const {
    if (kept_) {
      return ties_.data() + static_cast<int64_t>(v) * num_parts;
    }
    static thread_local std::vector<int32_t> row;
    row.assign(num_parts, 0);
    add_ties(v, row.data());
    return row.data();
  }

  // What asking for v's ties costs, in edges.
  int64_t price(int32_t v) const { return kept_ ? 2 : graph.degree(v) + num_parts / 8; }

  // Weight of v's edges that leave its part.
  int64_t cut_of(int32_t v) const {
    const int32_t* const row = ties(v);
    int64_t total = 0;
    for (int32_t q = 0; q < num_parts; ++q) {
      total += row[q];
    }
    return total - row[part(v)];
  }

  int64_t cut() const {
    int64_t total = 0;
    for (int32_t v = 0; v < graph.num_nodes(); ++v) {
      total += cut_of(v);
    }
    return total / 2;
  }

  void move(int32_t v, int32_t q) {
    if (kept_) {
      move(v, q, [](int32_t) {});
    } else {
      loads.move(v, part_[v], q);
      part_[v] = q;
    }
  }

  // Moves v to q; after_tie(u) is called for every neighbour once its ties have changed.
  template <typename AfterTie>
  void move(int32_t v, int32_t q, const AfterTie& after_tie) {
    const int32_t p = part_[v];
    loads.move(v, p, q);
    part_[v] = q;
    graph.for_each(v, [&](int32_t u, int32_t weight) {
      if (kept_) {
        int32_t* const row = ties_.data() + static_cast<int64_t>(u) * num_parts;
        row[p] -= weight;
        row[q] += weight;
      }
      after_tie(u);
    });
  }

  const Adjacency& graph;
  const int32_t num_parts;
  Loads loads;

 private:
  static constexpr int32_t kAlwaysKept = 16;

  void add_ties(int32_t v, int32_t* row) const {
    graph.for_each_label(v, part_, std::numeric_limits<int32_t>::max(),
                         [&](int32_t part, int32_t weight) { row[part] += weight; });
  }

  int32_t* const part_;
  const bool kept_;
  std::vector<int32_t> ties_;  // [node, part]
};

struct Move {
  int32_t to;
  int64_t gain;  // by how much the cut falls
};

// Where v would best go: the part with room that it is tied to most. to = -1 when there is none.
// Between equal ones the emptier part, by the load a node's presence changes most.
Move best_move(const State& state, int32_t v);

// Parts that are over a limit give nodes away until none is, at the least cost in cut.
void balance(State& state);

// Passes of moves that lower the cut, steepest first, until a pass gains next to nothing.
void improve(State& state, int64_t passes);

// Local searches that may climb: chains of moves from one node on, undone back to the best point (Fiduccia-Mattheyses).
// `work` bounds the edges looked at. Returns by how much the cut fell.
int64_t search(State& state, int64_t work, uint64_t key);

// Passes that may step over a limit and back, for partitions whose parts are full. Returns by how much the cut fell.
int64_t exchange(State& state, int64_t work);

}  // namespace gnnsys::partition
