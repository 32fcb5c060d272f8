// Restoring balance: parts over a limit give nodes away.
//
// Nodes are taken by what they cost in cut per unit of excess that they relieve; a node taken from the heap is judged
// again before it moves, since loads and ties have changed meanwhile. Where single moves that lower the excess run out
// (two constraints that pull against each other), a heavy node is exchanged for a light one of a part with room; where
// that fails too, moves that even out all loads make room for another try.
#include "cpu/partition/state.h"

#include <queue>
#include <utility>

namespace gnnsys::partition {
namespace {

struct Offer {
  double cost;
  int32_t node;
  int32_t to;

  bool operator<(const Offer& other) const {  // the heap's top is the cheapest
    return cost != other.cost ? cost > other.cost : node > other.node;
  }
};

// v's cheapest way out of its part, to = -1 when none lowers the excess.
Offer offer_of(const State& state, int32_t v) {
  constexpr double kLeast = 1e-12;
  const int32_t from = state.part(v);
  const int32_t* const ties = state.ties(v);
  Offer best{0, v, -1};
  for (int32_t q = 0; q < state.num_parts; ++q) {
    const double relief = q == from ? 0 : state.loads.relief(v, from, q);
    if (relief < kLeast) {
      continue;
    }
    const double loss = static_cast<double>(ties[from]) - ties[q];
    // A gain is better the larger the relief, a loss the smaller per unit of it; relief in parts' average loads.
    const double cost = loss > 0 ? loss / relief : loss * relief;
    if (best.to < 0 || cost < best.cost ||
        (cost == best.cost && state.loads.evening(v, from, q) > state.loads.evening(v, from, best.to))) {
      best = {cost, v, q};
    }
  }
  return best;
}

std::vector<Offer> offers(const State& state) {
  constexpr int64_t kChunk = 4096;
  const int64_t n = state.graph.num_nodes();
  std::vector<uint8_t> over(state.num_parts);
  for (int32_t p = 0; p < state.num_parts; ++p) {
    over[p] = state.loads.over(p);
  }
  const int64_t num_chunks = (n + kChunk - 1) / kChunk;
  std::vector<std::vector<Offer>> found(num_chunks);
  parallel_for_dynamic(num_chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      for (int64_t v = chunk * kChunk; v < std::min(n, (chunk + 1) * kChunk); ++v) {
        if (over[state.part(static_cast<int32_t>(v))]) {
          const Offer offer = offer_of(state, static_cast<int32_t>(v));
          if (offer.to >= 0) {
            found[chunk].push_back(offer);
          }
        }
      }
    }
  });
  std::vector<Offer> all;
  for (const auto& chunk : found) {
    all.insert(all.end(), chunk.begin(), chunk.end());
  }
  return all;
}

// Moves that lower the excess until there is none. False when no move is left that does.
bool relieve(State& state) {
  while (state.loads.excess() > 0) {
    std::priority_queue<Offer> heap(std::less<Offer>{}, offers(state));
    bool moved = false;
    while (!heap.empty() && state.loads.excess() > 0) {
      const Offer offer = heap.top();
      heap.pop();
      const Offer now = offer_of(state, offer.node);
      if (now.to < 0) {
        continue;
      }
      if (!heap.empty() && heap.top().cost < now.cost) {  // no longer the cheapest
        heap.push(now);
        continue;
      }
      state.move(offer.node, now.to);
      moved = true;
    }
    if (!moved) {
      return false;
    }
  }
  return true;
}

// The nodes of one part by their weight in a constraint, and among equals the ones that cost least to lose.
std::vector<int32_t> by_weight(const State& state, int32_t part, int32_t constraint, bool heaviest_first) {
  std::vector<int32_t> nodes;
  std::vector<std::pair<int64_t, int64_t>> rank(state.graph.num_nodes());
  for (int32_t v = 0; v < state.graph.num_nodes(); ++v) {
    if (state.part(v) == part) {
      const int64_t weight = state.loads.weight(v, constraint);
      rank[v] = {heaviest_first ? -weight : weight, state.ties(v)[part]};
      nodes.push_back(v);
    }
  }
  std::sort(nodes.begin(), nodes.end(), [&](int32_t a, int32_t b) {
    return rank[a] != rank[b] ? rank[a] < rank[b] : a < b;
  });
  return nodes;
}

// Exchanges the heaviest nodes of the worst part for the lightest of the one with most room in that constraint, each
// exchange only if it lowers the excess. False when none did.
bool exchange_pairs(State& state) {
  constexpr double kLeast = 1e-12;
  int32_t part = -1;
  int32_t constraint = -1;
  if (!state.loads.worst(&part, &constraint)) {
    return false;
  }
  const int32_t other = state.loads.lightest(constraint);
  if (other == part) {
    return false;
  }
  const std::vector<int32_t> heavy = by_weight(state, part, constraint, true);
  const std::vector<int32_t> light = by_weight(state, other, constraint, false);
  bool exchanged = false;
  for (size_t i = 0, j = 0; i < heavy.size() && j < light.size() && state.loads.is_over(part, constraint); ++i) {
    const double first = state.loads.relief(heavy[i], part, other);
    state.loads.move(heavy[i], part, other);
    const double both = first + state.loads.relief(light[j], other, part);
    state.loads.move(heavy[i], other, part);
    if (both > kLeast) {
      state.move(heavy[i], other);
      state.move(light[j++], part);
      exchanged = true;
    }
  }
  return exchanged;
}

// One pass of moves that lower the sum of squared loads and add no excess.
bool even_out(State& state) {
  constexpr double kLeast = 1e-9;
  bool moved = false;
  for (int32_t v = 0; v < state.graph.num_nodes(); ++v) {
    const int32_t from = state.part(v);
    int32_t best = -1;
    double most = kLeast;
    for (int32_t q = 0; q < state.num_parts; ++q) {
      if (q != from && state.loads.relief(v, from, q) >= 0 && state.loads.evening(v, from, q) > most) {
        best = q;
        most = state.loads.evening(v, from, q);
      }
    }
    if (best >= 0) {
      state.move(v, best);
      moved = true;
    }
  }
  return moved;
}

}  // namespace

void balance(State& state) {
  constexpr int kExchanges = 64;
  constexpr int kTries = 4;
  for (int i = 0; i < kTries; ++i) {
    for (int j = 0; j < kExchanges; ++j) {
      if (relieve(state)) {
        return;
      }
      if (!exchange_pairs(state)) {
        break;
      }
    }
    if (!even_out(state)) {
      return;
    }
  }
  relieve(state);
}

}  // namespace gnnsys::partition
