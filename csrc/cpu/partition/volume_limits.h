// What every part may weigh, in any number of constraints at once, and what it weighs now.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gnnsys {

// weight [num_constraints, num_nodes], limit [num_constraints, num_parts]. A change is allowed if no part ends above
// its limit in a constraint in which it grew: what was in excess may shrink and may stay, never grow.
class Limits {
 public:
  Limits(const int64_t* weight, const int64_t* limit, int64_t num_constraints, int64_t num_nodes, int num_parts,
         const int32_t* part)
      : num_constraints_(num_constraints),
        weight_(num_constraints * num_nodes),
        limit_(num_constraints * num_parts),
        total_(num_constraints * num_parts, 0) {
    for (int64_t c = 0; c < num_constraints; ++c) {
      for (int64_t v = 0; v < num_nodes; ++v) {
        weight_[v * num_constraints + c] = weight[c * num_nodes + v];
        total_[part[v] * num_constraints + c] += weight[c * num_nodes + v];
      }
      for (int p = 0; p < num_parts; ++p) {
        limit_[p * num_constraints + c] = limit[c * num_parts + p];
      }
    }
  }

  bool may_enter(int64_t v, int part) const {
    const int64_t* const w = weight_of(v);
    const int64_t first = part * num_constraints_;
    for (int64_t c = 0; c < num_constraints_; ++c) {
      if (w[c] > 0 && total_[first + c] + w[c] > limit_[first + c]) {
        return false;
      }
    }
    return true;
  }

  // v goes from p to q while w goes from q to p.
  bool may_swap(int64_t v, int p, int64_t w, int q) const {
    for (int64_t c = 0; c < num_constraints_; ++c) {
      const int64_t growth = weight_of(v)[c] - weight_of(w)[c];  // of q; p grows by its negative
      const int64_t at = (growth > 0 ? q : p) * num_constraints_ + c;
      if (growth != 0 && total_[at] + std::abs(growth) > limit_[at]) {
        return false;
      }
    }
    return true;
  }

  bool any_excess() const {
    return !std::equal(total_.begin(), total_.end(), limit_.begin(), [](int64_t t, int64_t l) { return t <= l; });
  }

  // Whether v's leaving p would reduce an excess.
  bool relieves(int64_t v, int p) const {
    const int64_t* const w = weight_of(v);
    for (int64_t c = 0; c < num_constraints_; ++c) {
      if (w[c] > 0 && total_[p * num_constraints_ + c] > limit_[p * num_constraints_ + c]) {
        return true;
      }
    }
    return false;
  }

  // How the sum over parts and constraints of max(0, total / limit - room) changes if v goes from p to q.
  double excess_change(int64_t v, int p, int q, double room) const {
    const int64_t* const w = weight_of(v);
    double change = 0;
    for (int64_t c = 0; c < num_constraints_; ++c) {
      const int64_t from = p * num_constraints_ + c;
      const int64_t to = q * num_constraints_ + c;
      change += excess(from, -w[c], room) - excess(from, 0, room) + excess(to, w[c], room) - excess(to, 0, room);
    }
    return change;
  }

  // Equal for nodes that weigh about the same in every constraint: within the same power of two.
  uint64_t weight_class(int64_t v) const {
    uint64_t mixed = 0;
    for (int64_t c = 0; c < num_constraints_; ++c) {
      const int64_t w = weight_of(v)[c];
      mixed = mixed * 37 + (w > 0 ? 64 - __builtin_clzll(static_cast<uint64_t>(w)) : 0);
    }
    return mixed;
  }

  void move(int64_t v, int from, int to) {
    const int64_t* const w = weight_of(v);
    for (int64_t c = 0; c < num_constraints_; ++c) {
      total_[from * num_constraints_ + c] -= w[c];
      total_[to * num_constraints_ + c] += w[c];
    }
  }

 private:
  const int64_t* weight_of(int64_t v) const { return weight_.data() + v * num_constraints_; }

  double excess(int64_t at, int64_t added, double room) const {
    const auto limit = static_cast<double>(std::max<int64_t>(limit_[at], 1));
    return std::max(static_cast<double>(total_[at] + added) / limit - room, 0.0);
  }

  int64_t num_constraints_;
  std::vector<int64_t> weight_;  // by node, so that a move reads one line
  std::vector<int64_t> limit_;   // by part, as total_
  std::vector<int64_t> total_;
};

}  // namespace gnnsys
