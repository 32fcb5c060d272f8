// Which ids are in a list, and at which place: by a table of all ids, or by a hash table of (tree, id).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace gnnsys {

constexpr int kIdBits = 40;  // of a key; the rest are those of its tree

// (tree, id) -> its first place in a list. Open addressing, at most half full, behind a bitmap of 8 to 16 bits per entry.
class HashMembers {
 public:
  template <typename id_t>
  HashMembers(const id_t* ids, const int64_t* trees, int64_t size) {
    int bits = 6;
    while ((int64_t{1} << bits) < 2 * size) {
      ++bits;
    }
    shift_ = 64 - bits;
    slots_.assign(size_t{1} << bits, Slot{kEmpty, -1});
    filter_shift_ = shift_ - 2;
    filter_.assign(size_t{1} << (bits + 2 - 6), 0);
    for (int64_t i = 0; i < size; ++i) {
      if (ids[i] >= 0) {  // a negative id is a place that nobody has
        add(key(trees ? trees[i] : 0, ids[i]), i);
      }
    }
  }

  static uint64_t key(int64_t tree, int64_t id) { return static_cast<uint64_t>(tree) << kIdBits | static_cast<uint64_t>(id); }

  // 0 for what is surely not in the list, else 1: eight of nine strangers are told by a bit.
  int64_t maybe(uint64_t wanted) const {
    const uint64_t bit = wanted * kMultiplier >> filter_shift_;
    return static_cast<int64_t>(filter_[bit >> 6] >> (bit & 63) & 1);
  }

  // -1 for what is not in the list.
  int64_t operator()(uint64_t wanted) const {
    size_t at = wanted * kMultiplier >> shift_;
    while (slots_[at].key != wanted && slots_[at].key != kEmpty) {
      at = (at + 1) & (slots_.size() - 1);
    }
    return slots_[at].place;
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  static constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15ull;
  struct Slot {
    uint64_t key;
    int64_t place;
  };

  void add(uint64_t wanted, int64_t place) {
    const uint64_t hash = wanted * kMultiplier;
    const uint64_t bit = hash >> filter_shift_;
    filter_[bit >> 6] |= uint64_t{1} << (bit & 63);
    size_t at = hash >> shift_;
    while (slots_[at].key != wanted && slots_[at].key != kEmpty) {
      at = (at + 1) & (slots_.size() - 1);
    }
    if (slots_[at].key == kEmpty) {
      slots_[at] = {wanted, place};
    }
  }

  int shift_;
  int filter_shift_;
  std::vector<Slot> slots_;
  std::vector<uint64_t> filter_;
};

// id -> its first place in a list, for ids up to the largest of the list. A byte per id, which a near cache may hold,
// tells members; the places of these alone, 4 bytes per id, are ever written and read.
class DenseMembers {
 public:
  template <typename id_t>
  DenseMembers(const id_t* ids, int64_t size, int64_t bound)
      : bound_(static_cast<uint64_t>(bound)),
        is_member_(static_cast<size_t>(bound) + 1, 0),
        places_(new int32_t[static_cast<size_t>(bound)]) {
    for (int64_t i = size - 1; i >= 0; --i) {
      if (ids[i] >= 0) {
        const auto id = static_cast<size_t>(ids[i]);
        is_member_[id] = 1;
        places_[id] = static_cast<int32_t>(i);
      }
    }
  }

  // Places and offsets of those of `size` neighbours that are members; how many there are. Nothing branches on who is
  // one: nobody can guess that.
  template <typename id_t>
  int64_t search(const id_t* neighbor, int64_t size, int32_t* places, uint32_t* offsets) const {
    const uint8_t* const is_member = is_member_.data();
    const uint64_t bound = bound_;  // no member: it stands for all ids that are larger
    int64_t found = 0;
    for (int64_t e = 0; e < size; ++e) {
      offsets[found] = static_cast<uint32_t>(e);
      found += is_member[std::min(static_cast<uint64_t>(neighbor[e]), bound)];
    }
    for (int64_t e = 0; e < found; ++e) {
      places[e] = places_[static_cast<size_t>(neighbor[offsets[e]])];
    }
    return found;
  }

 private:
  uint64_t bound_;
  std::vector<uint8_t> is_member_;
  std::unique_ptr<int32_t[]> places_;
};

}  // namespace gnnsys
