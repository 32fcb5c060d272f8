// Nodes that would leave if another came in exchange: where a search looks for the other half of a swap.
//
// A place is shared by nodes that go the same way and weigh about the same, so that a swap of two of them keeps every
// constraint; it holds the few that cost least. Places may collide, so whoever takes a node out checks its way.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

namespace gnnsys {

struct Waiting {
  int64_t node = -1;
  int to = -1;
  double cost = INFINITY;
};

class WaitingNodes {
 public:
  static constexpr size_t kPerPlace = 4;
  using Place = std::array<Waiting, kPerPlace>;

  explicit WaitingNodes(int64_t num_parts)
      : num_parts_(num_parts), places_(std::min(num_parts * num_parts * kClasses, kMaxPlaces)) {}

  void clear() { std::fill(places_.begin(), places_.end(), Place{}); }

  Place& at(int from, int to, uint64_t weight_class) {
    const uint64_t way = static_cast<uint64_t>(from) * num_parts_ + to;
    return places_[(way * kClasses + weight_class % kClasses) % places_.size()];
  }

  void add(int64_t node, int from, int to, uint64_t weight_class, double cost) {
    Place& place = at(from, to, weight_class);
    const auto cheaper = [](const Waiting& a, const Waiting& b) { return a.cost < b.cost; };
    Waiting& dearest = *std::max_element(place.begin(), place.end(), cheaper);
    if (cost < dearest.cost) {
      dearest = {node, to, cost};
    }
  }

 private:
  static constexpr int64_t kClasses = 16;
  static constexpr int64_t kMaxPlaces = 1 << 16;

  int64_t num_parts_;
  std::vector<Place> places_;
};

}  // namespace gnnsys
