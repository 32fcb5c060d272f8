// Numbering ids in first-seen order with a table of ids, group after group: homes first, then their slots are read, then
// the ids are numbered. One thread does it, in the order of the ids; the table outlives the call.
//
// Work: a far read of the table per id, and a write to the same place. Splitting the table among threads was tried: every
// thread must look at every id, and sixteen of them won a sixth over one.
#pragma once

#include "common/check.h"
#include "cpu/far_reads.h"
#include "cpu/id_table.h"

#include <algorithm>
#include <limits>

namespace gnnsys {

constexpr int64_t kNumbered = 512;  // ids whose slots are read together

inline void check_table(const Tensor& table) {
  check_vector(table, "table");
  check_dtype(table, ScalarType::Long, "table");
  const auto* words = const_data<int64_t>(table);
  CHECK_ARG(table.numel() >= kHeader, "table must have at least ", kHeader, " words, got ", table.numel());
  const int64_t log2 = words[0];
  CHECK_ARG((words[3] == 0 || words[3] == 1) && log2 >= kMinLog2 && log2 <= max_log2(words[3] != 0) &&
                kHeader + (int64_t{1} << log2) * (1 + words[3]) <= table.numel(),
            "table is not initialised: make it with gnnsys.ops.IdTable");
}

// Runs body with the table's own slot type.
template <typename Body>
decltype(auto) with_table(const Tensor& table, Body&& body) {
  check_table(table);
  auto* words = mutable_data<int64_t>(table);
  if (words[3] != 0) {
    return body(IdTable<WideSlot>(words));
  }
  return body(IdTable<NarrowSlot>(words));
}

// Ids end here, by the width of the table's slots.
inline int64_t id_bound(const Tensor& table) {
  return const_data<int64_t>(table)[3] != 0 ? std::numeric_limits<int64_t>::max() : int64_t{1} << 32;
}

// An id that is not in [0, bound), or 0.
template <typename id_t>
id_t find_misfit(const id_t* ids, int64_t size, int64_t bound) {
  id_t low = 0;
  id_t high = 0;
  for (int64_t i = 0; i < size; ++i) {
    low = std::min(low, ids[i]);
    high = std::max(high, ids[i]);
  }
  return low < 0 ? low : high >= bound ? high : 0;
}

inline void check_fits(int64_t misfit, int64_t bound) {
  CHECK_ARG(misfit == 0, "ids must be in [0, ", bound, "), got ", misfit);
}

// Homes of a group of ids, with their slots read ahead of their use.
template <typename Table, typename id_t>
void fetch_group(const Table& table, const id_t* ids, int64_t n, typename Table::home_t* homes) {
  for (int64_t j = 0; j < n; ++j) {
    homes[j] = table.home(static_cast<uint64_t>(ids[j]));
  }
  touch_far(n, [&](int64_t j) { return table.first_word(homes[j]); });
}

// visit(i, slot) for each id in order.
template <typename Table, typename id_t, typename Visit>
void for_each_slot(Table& table, const id_t* ids, int64_t size, Visit&& visit) {
  typename Table::home_t homes[kNumbered];
  for (int64_t group = 0; group < size; group += kNumbered) {
    const int64_t n = std::min(kNumbered, size - group);
    fetch_group(table, ids + group, n, homes);
    for (int64_t j = 0; j < n; ++j) {
      visit(group + j, table.find(static_cast<uint64_t>(ids[group + j]), homes[j]));
    }
  }
}

// Numbers one group from `next` on, new ones into fresh[0..]. Returns the next number.
//
// Whether an id is new cannot be predicted, so nothing branches on it: a known id is written where it stands, and the
// last entry of fresh is overwritten until it is a new one. The table comes by value, to live in registers.
template <typename Table, typename id_t>
int64_t number_group(Table table, const id_t* ids, int64_t n, const typename Table::home_t* homes, int64_t next,
                     int64_t* local, id_t* fresh) {
  for (int64_t j = 0; j < n; ++j) {
    const id_t id = ids[j];
    auto* slot = table.find(static_cast<uint64_t>(id), homes[j]);
    const auto is_new = static_cast<int64_t>(slot->empty());
    const int64_t number = slot->local() + (-is_new & (next + 1));  // an empty slot's local is -1
    slot->set(static_cast<uint64_t>(id), number);
    *fresh = id;
    local[j] = number;
    fresh += is_new;
    next += is_new;
  }
  return next;
}

// Returns how many ids were new; writes them to fresh and every id's local id to local. Stops when the next group might
// fill the table beyond its load: the table then says so, and what it holds is void.
template <typename Table, typename id_t>
int64_t number_ids(Table& table, const id_t* ids, int64_t size, int64_t* local, id_t* fresh) {
  const int64_t first = table.count();
  int64_t next = first;
  typename Table::home_t homes[kNumbered];
  for (int64_t group = 0; group < size; group += kNumbered) {
    if (next > table.max_count()) {
      table.set_overflowed();
      return 0;
    }
    const int64_t n = std::min(kNumbered, size - group);
    fetch_group(table, ids + group, n, homes);
    next = number_group(table, ids + group, n, homes, next, local + group, fresh + (next - first));
  }
  table.set_count(next);
  return next - first;
}

}  // namespace gnnsys
