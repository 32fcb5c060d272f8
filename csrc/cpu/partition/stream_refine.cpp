// Parts from a stream of nodes: each node is placed, or moved, where most of its neighbours are and every constraint
// has room. A first pass over unplaced nodes is linear deterministic greedy (Stanton and Kliot, KDD 2012); further
// passes are its restreaming (Nishimura and Ugander, KDD 2013), with all neighbours known.
//
// Work: one visit per neighbour, and per node the parts it sees. Bytes: a part per node.
#include "common/register.h"
#include "cpu/partition/adjacency.h"
#include "cpu/partition/stream.h"

#include <algorithm>
#include <tuple>

namespace gnnsys {
namespace {

// What parts carry, [num_constraints, num_parts], and what they may.
struct Loads {
  int64_t num_constraints;
  int64_t num_parts;
  int64_t* load;
  const int64_t* limit;

  int64_t at(int64_t c, int32_t p) const { return c * num_parts + p; }

  void add(int32_t p, const int64_t* weight, int64_t stride, int64_t sign) {
    for (int64_t c = 0; c < num_constraints; ++c) {
      load[at(c, p)] += sign * weight[c * stride];
    }
  }

  bool fits(int32_t p, const int64_t* weight, int64_t stride) const {
    for (int64_t c = 0; c < num_constraints; ++c) {
      const int64_t w = weight[c * stride];
      if (w > 0 && load[at(c, p)] + w > limit[at(c, p)]) {
        return false;
      }
    }
    return true;
  }

  // Whether taking the node away would bring some constraint of p closer to its limit.
  bool burdens(int32_t p, const int64_t* weight, int64_t stride) const {
    for (int64_t c = 0; c < num_constraints; ++c) {
      if (weight[c * stride] > 0 && load[at(c, p)] > limit[at(c, p)]) {
        return true;
      }
    }
    return false;
  }

  // How full p is in its fullest constraint among those the node adds to.
  double fill(int32_t p, const int64_t* weight, int64_t stride) const {
    double fullest = 0;
    for (int64_t c = 0; c < num_constraints; ++c) {
      if (weight[c * stride] > 0 || num_constraints == 1) {
        fullest = std::max(fullest, ratio(load[at(c, p)], limit[at(c, p)]));
      }
    }
    return fullest;
  }

  // Sum over constraints of what p carries beyond its limits, in units of the limit, after `sign` times the node.
  double excess(int32_t p, const int64_t* weight, int64_t stride, int64_t sign) const {
    double sum = 0;
    for (int64_t c = 0; c < num_constraints; ++c) {
      const int64_t carried = load[at(c, p)] + sign * weight[c * stride];
      if (carried > limit[at(c, p)]) {
        sum += ratio(carried - limit[at(c, p)], limit[at(c, p)]);
      }
    }
    return sum;
  }

  static double ratio(int64_t a, int64_t b) { return static_cast<double>(a) / static_cast<double>(std::max<int64_t>(b, 1)); }
};

// One node's choice; near[p] is how many of its neighbours part p has.
class Choice {
 public:
  Choice(const Loads& loads, const LabelCounts& near, const int64_t* weight, int64_t stride)
      : loads_(loads), near_(near), weight_(weight), stride_(stride) {}

  // LDG: neighbours weighted by the room left; the emptiest part where none has room.
  int32_t place() const {
    int32_t best = -1, emptiest = 0;
    double best_score = -1, least = 0;
    for (int32_t p = 0; p < loads_.num_parts; ++p) {
      const double fill = loads_.fill(p, weight_, stride_);
      if (p == 0 || fill < least) {
        emptiest = p;
        least = fill;
      }
      // Half a neighbour for everyone: a node without placed neighbours goes where there is room.
      const double score = (near_[p] + 0.5) * (1 - fill);
      if (loads_.fits(p, weight_, stride_) && score > best_score) {
        best = p;
        best_score = score;
      }
    }
    return best >= 0 ? best : emptiest;
  }

  // A part with more of the neighbours, or as many and emptier; `own` where there is none.
  int32_t improve(int32_t own) const {
    int32_t best = own;
    double best_fill = loads_.fill(own, weight_, stride_);
    for (const int32_t p : near_.seen()) {
      if (p == own || near_[p] < near_[best] || !loads_.fits(p, weight_, stride_)) {
        continue;
      }
      const double fill = loads_.fill(p, weight_, stride_);
      if (near_[p] > near_[best] || fill < best_fill) {
        best = p;
        best_fill = fill;
      }
    }
    return best;
  }

  // Out of an overloaded part, for at most `price` neighbours lost per unit of excess that goes: the cheapest part
  // that lessens the excess.
  int32_t relieve(int32_t own, double price) const {
    int32_t best = own;
    double best_excess = 0;
    const double relief = loads_.excess(own, weight_, stride_, 0) - loads_.excess(own, weight_, stride_, -1);
    for (int32_t p = 0; p < loads_.num_parts; ++p) {
      if (p == own || near_[own] - near_[p] > price * relief) {
        continue;
      }
      const double added = loads_.excess(p, weight_, stride_, 1) - loads_.excess(p, weight_, stride_, 0);
      if (added >= relief) {
        continue;
      }
      if (best == own || near_[p] > near_[best] || (near_[p] == near_[best] && added < best_excess)) {
        best = p;
        best_excess = added;
      }
    }
    return best;
  }

 private:
  const Loads& loads_;
  const LabelCounts& near_;
  const int64_t* weight_;  // weight_[c * stride_]
  int64_t stride_;
};

// -> nodes moved, and by how much the number of cut edges changed, exactly.
// Nothing negative, and of each constraint so little together that no sum of it overflows.
void check_amounts(const Tensor& weights, const Tensor& load, const Tensor& limit) {
  for (int64_t c = 0; c < load.size(0); ++c) {
    int64_t left = partition::kMostWeight;
    for (const auto& [t, name] : {std::pair{&weights, "weights"}, {&load, "load"}}) {
      const int64_t* const row = const_data<int64_t>(*t) + c * t->size(1);
      for (int64_t i = 0; i < t->size(1); ++i) {
        CHECK_ARG(row[i] >= 0 && row[i] <= left, name,
                  " must not be negative, and weights and load of a constraint add up to at most 2^62, got ", row[i]);
        left -= row[i];
      }
    }
  }
  const auto* const limits = const_data<int64_t>(limit);
  for (int64_t i = 0; i < limit.numel(); ++i) {
    CHECK_ARG(limits[i] >= 0, "limit must not be negative, got ", limits[i]);
  }
}

std::tuple<int64_t, int64_t> stream_refine(const Tensor& indptr, const Tensor& indices, int64_t first,
                                           const Tensor& weights, const Tensor& part, const Tensor& load,
                                           const Tensor& limit, double price) {
  check_vector(part, "part");
  check_dtype(part, ScalarType::Int, "part");
  check_run(indptr, indices, first, part.numel());
  for (const auto& [t, name] : {std::pair{&weights, "weights"}, {&load, "load"}, {&limit, "limit"}}) {
    check_contiguous(*t, name);
    check_dtype(*t, ScalarType::Long, name);
    CHECK_ARG(t->dim() == 2 && t->size(0) == load.size(0), name, " must have a row per constraint");
  }
  const int64_t size = indptr.numel() - 1, num_parts = load.size(1);
  CHECK_ARG(weights.size(1) == size, "weights must have a column per node of the run, ", size, ", got ",
            weights.size(1));
  CHECK_ARG(num_parts >= 1 && limit.size(1) == num_parts, "load and limit must have a column per part");
  check_amounts(weights, load, limit);
  auto* const parts = mutable_data<int32_t>(part);
  Loads loads{load.size(0), num_parts, mutable_data<int64_t>(load), const_data<int64_t>(limit)};
  const auto exists = [&](int32_t p) { return p >= 0 && p < num_parts; };  // anything else is a node without a part
  std::vector<int32_t> counts(num_parts, 0);
  LabelCounts near(counts.data());
  int64_t num_moved = 0, cut_change = 0;
  dispatch_ids(indices, [&](auto id) {
    const auto run = run_of<decltype(id)>(indptr, indices, first);
    for (int64_t i = 0; i < size; ++i) {
      const int32_t own = exists(parts[first + i]) ? parts[first + i] : -1;
      int64_t placed = 0;
      run.for_each_neighbor(i, [&](int64_t u) {
        if (exists(parts[u])) {
          near.add(parts[u]);
          ++placed;
        }
      });
      const int64_t* const weight = const_data<int64_t>(weights) + i;
      const Choice choice(loads, near, weight, size);
      int32_t chosen = own;
      if (own < 0) {
        chosen = choice.place();
      } else {
        chosen = choice.improve(own);
        if (chosen == own && loads.burdens(own, weight, size)) {
          chosen = choice.relieve(own, price);
        }
      }
      // An edge is seen once from each end; from here that is every edge whose state the move may change.
      cut_change += (own < 0 ? placed : near[own]) - near[chosen];
      near.clear();
      if (chosen != own) {
        if (own >= 0) {
          loads.add(own, weight, size, -1);
        }
        loads.add(chosen, weight, size, 1);
        parts[first + i] = chosen;
        ++num_moved;
      }
    }
  });
  return {num_moved, cut_change};
}

// Neighbours in other parts, over the run: over all nodes, twice the number of cut edges.
int64_t stream_cut(const Tensor& indptr, const Tensor& indices, int64_t first, const Tensor& part) {
  check_vector(part, "part");
  check_dtype(part, ScalarType::Int, "part");
  check_run(indptr, indices, first, part.numel());
  const auto* parts = const_data<int32_t>(part);
  int64_t num_cut = 0;
  dispatch_ids(indices, [&](auto id) {
    const auto run = run_of<decltype(id)>(indptr, indices, first);
    for (int64_t i = 0; i < run.size; ++i) {
      run.for_each_neighbor(i, [&](int64_t u) { num_cut += parts[u] != parts[first + i]; });
    }
  });
  return num_cut;
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "stream_refine", &gnnsys::stream_refine);
  REGISTER_OP(m, "stream_cut", &gnnsys::stream_cut);
}
