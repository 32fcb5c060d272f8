// The hash table behind relabelling on the device, and the three steps that number ids with it.
//
// A slot holds an id and a value. Values below `base` are local ids that are known already; an id that is met for the
// first time gets base + its position as a provisional value, and the smallest one wins (atomicMin), so the outcome
// does not depend on the order of threads. Counting the winners in order of position then gives the local ids:
//
//   insert_ids   offers every id to the table, notes its slot and whether it may have won
//   number_ids   a scan over the winners; writes their local ids into the slots
//   write_ids    looks every id's local id up in its slot, and collects the new ids
//
// Two layouts, all bits set being empty. Narrow, for ids below 2^32: one word, value << 32 | id. Wide: two words, the
// id and the value. A slot lies in one 32-byte sector, so an id costs one random access a step.
//
// An IdTable (gnnsys/ops/relabel.py) is a tensor of int64 words: a header, [log2 of the slots, next local id, -, wide,
// fault, void, 2 spare], then the slots. What an op that returns nothing finds wrong waits in the fault word for the next
// op that reports to the host. When an op has ended with a fault, the fault is in the void word too, and every op that
// comes after is refused with it; inside an op nobody looks there, so that all tiles agree.
#pragma once

#include "cuda/scan.cuh"

#include <vector>

namespace gnnsys::cuda {

constexpr int64_t kHeader = 8;
constexpr int64_t kMinLog2 = 10;
constexpr int64_t kMaxLog2 = 31;  // a slot's number shares 32 bits with a flag
constexpr int64_t kCountWord = 1;
constexpr int64_t kWideWord = 3;
constexpr int64_t kFaultWord = 4;
constexpr int64_t kVoidWord = 5;
constexpr int64_t kMaxPositions = int64_t{1} << 30;  // ids of one type in a call

constexpr int kThreads = 256;
constexpr int kItems = 4;
constexpr int kTile = kThreads * kItems;  // ids of one block
constexpr uint32_t kWinner = 0x80000000u;  // beside the number of an id's slot

constexpr word_t kEmpty = ~word_t{0};

// An IdTable holds up to this many ids, repeated seeds counted.
constexpr int64_t max_count(int64_t log2_slots) { return (int64_t{1} << log2_slots) / 2; }

// -- faults: the smallest one is told, ~0 is none --------------------------------------------------------------------

constexpr word_t kTableFull = ~word_t{0} - 1;
constexpr word_t kNotInitialised = ~word_t{0} - 2;

// The lowest negative id comes first, then the highest one. None below 2^32 is ever too high: no clash with the above.
__host__ __device__ constexpr word_t fault_of_id(int64_t id) {
  const auto bits = static_cast<word_t>(id);
  return id < 0 ? bits ^ (word_t{1} << 63) : ~bits;
}

constexpr int64_t id_of_fault(word_t fault) {
  return static_cast<int64_t>(fault >> 63 ? ~fault : fault ^ (word_t{1} << 63));
}

// -- one call's work -------------------------------------------------------------------------------------------------

// One list of ids. Tiles of a list are consecutive, and so are those of all lists of a type in the order of the lists.
struct IdList {
  const void* ids;
  int64_t size;
  int64_t* header;  // of an IdTable, which then says slots, num_slots, base and wide_slots; else null
  int64_t header_words;
  void* slots;
  uint32_t num_slots;
  uint32_t base;        // value of the type's first position
  uint32_t first;       // position of this list's first id
  uint32_t first_tile;  // of this list
  uint32_t type_begin;  // first tile of the type
  uint32_t type_end;
  int32_t type;
  bool wide_ids;    // int64, else int32
  bool wide_slots;
  uint32_t* slot_of;  // [size], the slot of each id, kWinner beside it; null for seeds, whose values are final
  int64_t* local;     // [size]
  void* fresh;        // new ids, the one with local id fresh_base first
  int64_t fresh_base;
};

// Words that every call starts with all bits set: the host reads faults and counts back with one copy.
struct Control {
  word_t* fault;
  word_t* ticket;  // of the scan
  word_t* count;   // [num_types], new ids of each type; then, for an IdTable, the base they were counted from
  word_t* states;  // [num_tiles] of the scan
  static constexpr int64_t kWords = 2;  // before the counts
};

// Lists travel as kernel arguments, or through memory where there are too many.
struct Batch {
  static constexpr int kInline = 32;
  Control control;
  int num_lists;
  const IdList* elsewhere;
  IdList here[kInline];
};

// Lists with a slot_of come first, by type; seeds after them. Tables and control words have all bits set.
class IdBatch {
 public:
  IdBatch(const Device& device, Control control, std::vector<IdList> lists, int64_t num_numbered_tiles);

  void insert_ids() const;
  void number_ids() const;
  // `lists` as before, with where to write to.
  void write_ids(const std::vector<IdList>& lists);

  // All three with one launch, which sets the bits of tables and control words first, [begin, begin + num_words), and
  // ends by writing the first `num_told` control words to `told`, host memory that the device writes.
  void do_all(const std::vector<IdList>& lists, word_t* begin, int64_t num_words, word_t* told, int num_told);

 private:
  void set_lists(const std::vector<IdList>& lists);

  const Device& device_;
  Batch batch_{};
  Tensor elsewhere_;
  int64_t num_tiles_ = 0;
  int64_t num_numbered_tiles_;
};

inline int64_t num_tiles(int64_t size) { return (size + kTile - 1) / kTile; }

// ValueError for what the device found wrong with the ids of a narrow or a wide table.
inline void check_id_fault(word_t fault, bool wide) {
  const int64_t bound = wide ? INT64_MAX : int64_t{1} << 32;
  CHECK_ARG(fault == kNoFault, "ids must be in [0, ", bound, "), got ", id_of_fault(fault));
}

// -- device ----------------------------------------------------------------------------------------------------------

// The slot is another id's; has a smaller value; has ours, until a smaller one comes.
enum class Offer { kOther, kKnown, kWon };

struct NarrowSlots {
  using Seen = word_t;
  word_t* words;

  __device__ Seen load(uint32_t slot) const { return __ldcg(words + slot); }
  __device__ static bool empty(Seen seen) { return seen == kEmpty; }
  __device__ static bool holds(Seen seen, word_t id) { return seen != kEmpty && static_cast<uint32_t>(seen) == id; }
  __device__ static uint32_t value(Seen seen) { return static_cast<uint32_t>(seen >> 32); }

  // `seen` may be out of date: values only sink and an id never leaves, so at worst an atomic is tried in vain.
  __device__ Offer offer(uint32_t slot, Seen seen, word_t id, uint32_t mine) const {
    const word_t word = static_cast<word_t>(mine) << 32 | id;
    if (seen == kEmpty) {
      seen = atomicCAS(words + slot, kEmpty, word);
      if (seen == kEmpty) {
        return Offer::kWon;
      }
    }
    if (static_cast<uint32_t>(seen) != id) {
      return Offer::kOther;
    }
    if (value(seen) < mine) {
      return Offer::kKnown;
    }
    return value(atomicMin(words + slot, word)) < mine ? Offer::kKnown : Offer::kWon;
  }
};

struct WideSlots {
  using Seen = ulonglong2;
  Seen* slots;

  __device__ Seen load(uint32_t slot) const { return __ldcg(slots + slot); }
  __device__ static bool empty(Seen seen) { return seen.x == kEmpty; }
  __device__ static bool holds(Seen seen, word_t id) { return seen.x == id; }
  __device__ static uint32_t value(Seen seen) { return static_cast<uint32_t>(seen.y); }

  __device__ Offer offer(uint32_t slot, Seen seen, word_t id, uint32_t mine) const {
    if (seen.x == kEmpty) {
      const word_t old = atomicCAS(&slots[slot].x, kEmpty, id);
      seen.x = old == kEmpty ? id : old;
      seen.y = kEmpty;
    }
    if (seen.x != id) {
      return Offer::kOther;
    }
    if (value(seen) < mine) {
      return Offer::kKnown;
    }
    auto* value_word = reinterpret_cast<unsigned*>(&slots[slot].y);
    return atomicMin(value_word, mine) < mine ? Offer::kKnown : Offer::kWon;
  }
};

// The value of a slot of either layout, apart from its id.
struct Values {
  uint32_t* words;
  int shift;

  __device__ Values(void* slots, bool wide)
      : words(static_cast<uint32_t*>(slots) + (wide ? 2 : 1)), shift(wide ? 2 : 1) {}
  __device__ uint32_t load(uint32_t slot) const { return __ldcg(words + (static_cast<uint64_t>(slot) << shift)); }
  __device__ void store(uint32_t slot, uint32_t value) const {
    words[static_cast<uint64_t>(slot) << shift] = value;
  }
};

// Where probing for an id begins: mixed, since ids are often consecutive, and scaled to any number of slots.
__device__ inline uint32_t home(word_t id, uint32_t num_slots) {
  id ^= id >> 33;
  id *= 0xFF51AFD7ED558CCDull;
  id ^= id >> 33;
  id *= 0xC4CEB9FE1A85EC53ull;
  return __umulhi(static_cast<uint32_t>(id >> 32), num_slots);
}

__device__ inline uint32_t next_slot(uint32_t slot, uint32_t num_slots) {
  return slot + 1 == num_slots ? 0 : slot + 1;
}

// A table as the kernels use it.
struct Table {
  void* slots;
  uint32_t num_slots;
  uint32_t base;
  bool wide;
};

// False where the words are no table. The count is read once: a later kernel changes it.
__device__ inline bool open_header(const int64_t* header, int64_t num_words, Table& table) {
  const int64_t log2 = header[0];
  const int64_t wide = header[kWideWord];
  const int64_t count = header[kCountWord];
  if (log2 < kMinLog2 || log2 > kMaxLog2 || (wide != 0 && wide != 1) || count < 0 || count > max_count(log2) ||
      kHeader + (int64_t{1} << log2) * (1 + wide) > num_words) {
    return false;
  }
  table = {const_cast<int64_t*>(header) + kHeader, 1u << log2, static_cast<uint32_t>(count), wide != 0};
  return true;
}

}  // namespace gnnsys::cuda
