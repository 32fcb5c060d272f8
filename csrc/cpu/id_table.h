// An open-addressing map from ids to local ids that lives in a tensor, so Python owns its memory and reuses it.
//
// Layout in int64 words: [log2 of the slots, next local id, overflowed, wide, 4 spare] then the slots. A narrow slot is
// one word, (local + 1) << 32 | id, for ids below 2^32; a wide slot is two, {local + 1, id}. Zero is empty. Slots are
// probed one after the other; the load is kept below max_count, so there is always an empty one.
#pragma once

#include "common/check.h"

#include <cstdint>

namespace gnnsys {

constexpr int64_t kHeader = 8;
constexpr int64_t kMinLog2 = 10;

// Beyond this load probing gets slow, and the caller is told to make a larger table. A group of ids that starts below it
// may end above: even the smallest table has room for that.
constexpr int64_t max_count(int64_t log2_slots) { return (int64_t{1} << log2_slots) / 8 * 3; }

struct NarrowSlot {
  uint64_t word;
  bool empty() const { return word == 0; }
  // Empty, or this id's. Written without && and ||: compilers would make two branches, one of them unpredictable.
  bool takes(uint64_t id) const { return (word & -static_cast<uint64_t>(static_cast<uint32_t>(word) != id)) == 0; }
  int64_t local() const { return static_cast<int64_t>(word >> 32) - 1; }
  void set(uint64_t id, int64_t local) { word = (static_cast<uint64_t>(local + 1) << 32) | id; }
};

struct WideSlot {
  int64_t local_plus_one;
  uint64_t id;
  bool empty() const { return local_plus_one == 0; }
  bool takes(uint64_t other) const {
    return (static_cast<uint64_t>(local_plus_one) & -static_cast<uint64_t>(id != other)) == 0;
  }
  int64_t local() const { return local_plus_one - 1; }
  void set(uint64_t new_id, int64_t new_local) {
    id = new_id;
    local_plus_one = new_local + 1;
  }
};

template <typename Slot>
class IdTable {
 public:
  explicit IdTable(int64_t* words)
      : words_(words),
        slots_(reinterpret_cast<Slot*>(words + kHeader)),
        shift_(64 - static_cast<int>(words[0])),
        mask_((uint64_t{1} << words[0]) - 1) {}

  int64_t count() const { return words_[1]; }
  void set_count(int64_t count) { words_[1] = count; }
  int64_t max_count() const { return gnnsys::max_count(words_[0]); }
  bool overflowed() const { return words_[2] != 0; }
  void set_overflowed() { words_[2] = 1; }

  uint64_t home(uint64_t id) const {
    const uint64_t folded = id ^ (id >> 32);
    return folded * 0x9E3779B97F4A7C15ull >> shift_;
  }
  // For reading a slot ahead of its use.
  uint64_t first_word(uint64_t home) const { return *reinterpret_cast<const uint64_t*>(slots_ + home); }

  // The slot that holds id, or the empty one where it goes.
  Slot* find(uint64_t id, uint64_t home) {
    while (!slots_[home].takes(id)) {
      home = (home + 1) & mask_;
    }
    return slots_ + home;
  }

 private:
  int64_t* words_;
  Slot* slots_;
  int shift_;
  uint64_t mask_;
};

}  // namespace gnnsys
