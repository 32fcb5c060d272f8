// A map from ids to sums of weights for one node's neighbourhood, emptied and filled again millions of times.
//
// Open addressing; the slots in use are remembered, so that clearing costs what was put in. It grows as it fills.
#pragma once

#include <cstdint>
#include <vector>

namespace gnnsys::partition {

class SmallMap {
 public:
  SmallMap() : slots_(1 << 8), mask_((1 << 8) - 1) {}

  void clear() {
    for (const uint32_t slot : used_) {
      slots_[slot].id = -1;
    }
    used_.clear();
  }

  void add(int32_t id, int32_t weight) {
    uint32_t at = home(id);
    while (slots_[at].id != id) {
      if (slots_[at].id == -1) {
        insert(at, id, weight);
        return;
      }
      at = (at + 1) & mask_;
    }
    slots_[at].weight = weight > kMostWeight - slots_[at].weight ? kMostWeight : slots_[at].weight + weight;
  }

  bool contains(int32_t id) const {
    uint32_t at = home(id);
    while (slots_[at].id != id && slots_[at].id != -1) {
      at = (at + 1) & mask_;
    }
    return slots_[at].id == id;
  }

  int64_t size() const { return static_cast<int64_t>(used_.size()); }

  // body(id, weight), in the order in which ids were first added.
  template <typename Body>
  void for_each(const Body& body) const {
    for (const uint32_t slot : used_) {
      body(slots_[slot].id, slots_[slot].weight);
    }
  }

 private:
  static constexpr int32_t kMostWeight = 1 << 30;  // where sums stop: what is heavier is as good as glued together

  struct Slot {
    int32_t id = -1;
    int32_t weight = 0;
  };

  uint32_t home(int32_t id) const { return (static_cast<uint32_t>(id) * 0x9E3779B1u >> 7) & mask_; }

  void insert(uint32_t at, int32_t id, int32_t weight) {
    slots_[at] = {id, weight};
    used_.push_back(at);
    if (used_.size() * 2 > slots_.size()) {
      grow();
    }
  }

  void grow() {
    std::vector<Slot> entries;
    entries.reserve(used_.size());
    for (const uint32_t slot : used_) {
      entries.push_back(slots_[slot]);
    }
    slots_.assign(slots_.size() * 4, Slot{});
    mask_ = static_cast<uint32_t>(slots_.size() - 1);
    for (size_t i = 0; i < entries.size(); ++i) {
      uint32_t at = home(entries[i].id);
      while (slots_[at].id != -1) {
        at = (at + 1) & mask_;
      }
      slots_[at] = entries[i];
      used_[i] = at;
    }
  }

  std::vector<Slot> slots_;
  std::vector<uint32_t> used_;
  uint32_t mask_;
};

}  // namespace gnnsys::partition
