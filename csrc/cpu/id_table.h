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
constexpr int64_t max_log2(bool wide) { return wide ? 47 : 31; }  // narrow slots have 32 bits for a local id

// Beyond this load probing gets slow, and the caller is told to make a larger table. A group of ids that starts below it
// may end above: even the smallest table has room for that.
constexpr int64_t max_count(int64_t log2_slots) { return (int64_t{1} << log2_slots) / 8 * 3; }

struct NarrowSlot {
  using home_t = uint32_t;
  uint64_t word;
  // Multiplying 32 bits takes a third of the time of 64 bits on Neoverse N1, and four at a time are one instruction.
  static uint32_t hash(uint64_t id) { return static_cast<uint32_t>(id) * 0x9E3779B1u; }
  bool empty() const { return word == 0; }
  // Empty, or this id's. Written without && and ||: compilers would make two branches, one of them unpredictable.
  bool takes(uint64_t id) const { return (word & -static_cast<uint64_t>(static_cast<uint32_t>(word) != id)) == 0; }
  int64_t local() const { return static_cast<int64_t>(word >> 32) - 1; }
  void set(uint64_t id, int64_t local) { word = (static_cast<uint64_t>(local + 1) << 32) | id; }
};

struct WideSlot {
  using home_t = uint64_t;
  int64_t local_plus_one;
  uint64_t id;
  static uint64_t hash(uint64_t id) { return (id ^ (id >> 32)) * 0x9E3779B97F4A7C15ull; }
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
  using home_t = typename Slot::home_t;

  explicit IdTable(int64_t* words)
      : words_(words),
        slots_(reinterpret_cast<Slot*>(words + kHeader)),
        shift_(8 * static_cast<int>(sizeof(home_t)) - static_cast<int>(words[0])),
        mask_((uint64_t{1} << words[0]) - 1) {}

  int64_t count() const { return words_[1]; }
  void set_count(int64_t count) { words_[1] = count; }
  int64_t max_count() const { return gnnsys::max_count(words_[0]); }
  bool overflowed() const { return words_[2] != 0; }
  void set_overflowed() { words_[2] = 1; }

  home_t home(uint64_t id) const { return Slot::hash(id) >> shift_; }
  // For reading a slot ahead of its use.
  uint64_t first_word(home_t home) const { return *reinterpret_cast<const uint64_t*>(slots_ + home); }

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
