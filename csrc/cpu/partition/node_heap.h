// Several binary heaps of nodes by gain, a node in at most one of them, its key changed and itself removed at will.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace gnnsys::partition {

class NodeHeaps {
 public:
  NodeHeaps(int64_t num_heaps, int32_t num_nodes)
      : heaps_(num_heaps), key_(num_nodes, 0), heap_(num_nodes, -1), place_(num_nodes, 0) {}

  int32_t num_heaps() const { return static_cast<int32_t>(heaps_.size()); }
  bool empty(int32_t heap) const { return heaps_[heap].empty(); }
  int32_t top(int32_t heap) const { return heaps_[heap].front(); }
  int64_t key(int32_t v) const { return key_[v]; }

  void clear() {
    for (auto& heap : heaps_) {
      for (const int32_t v : heap) {
        heap_[v] = -1;
      }
      heap.clear();
    }
  }

  void set(int32_t v, int32_t heap, int64_t key) {
    if (heap_[v] != heap) {
      remove(v);
      heap_[v] = heap;
      place_[v] = static_cast<int32_t>(heaps_[heap].size());
      heaps_[heap].push_back(v);
      key_[v] = key;
      up(heap, place_[v]);
    } else {
      const int64_t before = std::exchange(key_[v], key);
      key > before ? up(heap, place_[v]) : down(heap, place_[v]);
    }
  }

  void remove(int32_t v) {
    const int32_t heap = heap_[v];
    if (heap < 0) {
      return;
    }
    heap_[v] = -1;
    const int32_t place = place_[v];
    const int32_t last = heaps_[heap].back();
    heaps_[heap].pop_back();
    if (last != v) {
      put(heap, place, last);
      up(heap, place);
      down(heap, place_[last]);
    }
  }

 private:
  // Larger keys first, then smaller ids: the order is total, so the result is one.
  bool before(int32_t a, int32_t b) const { return key_[a] != key_[b] ? key_[a] > key_[b] : a < b; }

  void put(int32_t heap, int32_t place, int32_t v) {
    heaps_[heap][place] = v;
    place_[v] = place;
  }

  void up(int32_t heap, int32_t place) {
    const int32_t v = heaps_[heap][place];
    while (place > 0 && before(v, heaps_[heap][(place - 1) / 2])) {
      put(heap, place, heaps_[heap][(place - 1) / 2]);
      place = (place - 1) / 2;
    }
    put(heap, place, v);
  }

  void down(int32_t heap, int32_t place) {
    const auto& nodes = heaps_[heap];
    const int32_t size = static_cast<int32_t>(nodes.size());
    const int32_t v = nodes[place];
    for (int32_t child = 2 * place + 1; child < size; child = 2 * place + 1) {
      if (child + 1 < size && before(nodes[child + 1], nodes[child])) {
        ++child;
      }
      if (!before(nodes[child], v)) {
        break;
      }
      put(heap, place, nodes[child]);
      place = child;
    }
    put(heap, place, v);
  }

  std::vector<std::vector<int32_t>> heaps_;
  std::vector<int64_t> key_;
  std::vector<int32_t> heap_;
  std::vector<int32_t> place_;
};

}  // namespace gnnsys::partition
