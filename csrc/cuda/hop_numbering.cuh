// How sample_hops numbers what a hop has found: a hash table per node type (id_table.cuh), all types at once.
#pragma once

#include "cuda/hop_relations.cuh"
#include "cuda/hops.cuh"
#include "cuda/id_table.cuh"

#include <algorithm>
#include <utility>
#include <vector>

namespace gnnsys::cuda {

constexpr int64_t kExpectedRoom = int64_t{1} << 22;  // ids that tables are made for ahead of need: 64 MiB
constexpr int64_t kSectorWords = 4;                  // tables begin with a sector

template <typename id_t>
class HopNumbering {
 public:
  // `relations` are kept by the walk.
  HopNumbering(const Device& device, const std::vector<HopRelation<id_t>>& relations,
               const std::vector<int64_t>& num_nodes, size_t num_hops)
      : device_(device),
        relations_(relations),
        num_hops_(num_hops),
        tables_(num_nodes.size()),
        is_wide_(*std::max_element(num_nodes.begin(), num_nodes.end()) > int64_t{1} << 32) {}

  bool is_wide() const { return is_wide_; }

  // Tables that are at most half full with what is known and what a hop has found, made anew where the last ones are too
  // small. They are made for as many ids as the hops to come may bring, within reason.
  void make_room(const std::vector<Hop<id_t>>& hops, size_t hop, const std::vector<int64_t>& found, word_t* fault) {
    const auto needed = [&](size_t t) { return hops[hop + 1].frontiers[t].first + found[t]; };
    std::vector<size_t> types;
    for (size_t t = 0; t < num_types(); ++t) {
      if (found[t] > 0 && needed(t) > tables_[t].room) {
        types.push_back(t);
      }
    }
    if (types.empty()) {
      return;
    }
    const std::vector<int64_t> expected = expected_ids(hop, found);
    const int64_t limit = kExpectedRoom / static_cast<int64_t>(num_types());
    std::vector<int64_t> begins;
    int64_t words = 0;
    for (const size_t t : types) {
      tables_[t].room = std::max(needed(t), std::min(needed(t) + expected[t], limit));
      begins.push_back(words);
      const int64_t size = 2 * tables_[t].room * (is_wide_ ? 2 : 1);
      words += (size + kSectorWords - 1) / kSectorWords * kSectorWords;
    }
    const Tensor memory = device_.template workspace<word_t>(words);
    auto* const slots = mutable_data<word_t>(memory);
    CUDA_CHECK(cudaMemsetAsync(slots, 0xFF, static_cast<size_t>(words) * sizeof(word_t), device_.stream()));
    std::vector<IdList> known;
    uint32_t tile = 0;
    for (size_t i = 0; i < types.size(); ++i) {
      IdSlots& table = tables_[types[i]];
      table.memory = memory;
      table.slots = slots + begins[i];
      for (size_t earlier = 0; earlier <= hop; ++earlier) {
        const Frontier<id_t>& ids = hops[earlier].frontiers[types[i]];
        if (ids.size > 0) {
          known.push_back(list_of(types[i], ids.ids, ids.size, ids.first));
          known.back().first_tile = tile;
          tile += static_cast<uint32_t>(num_tiles(ids.size));
        }
      }
    }
    IdBatch(device_, Control{fault, nullptr, nullptr, nullptr}, known, 0).insert_ids();
  }

  // Local ids of a hop's neighbours, per type in the order of the relations; new ones go to `fresh`, and how many there
  // are to `told`. `words` are those of a scan over so many tiles.
  void number(const std::vector<Hop<id_t>>& hops, size_t hop, const Told& told, word_t* words, int64_t tiles,
              const std::vector<id_t*>& fresh) const {
    std::vector<IdList> lists;
    uint32_t tile = 0;
    for (size_t t = 0; t < num_types(); ++t) {
      const int64_t known = hops[hop + 1].frontiers[t].first;
      const size_t first_list = lists.size();
      const uint32_t type_begin = tile;
      int64_t first = 0;
      for (size_t r = 0; r < relations_.size(); ++r) {
        const HopEdges<id_t>& at = hops[hop].edges[r];
        if (relations_[r].src != t || at.total == 0) {
          continue;
        }
        IdList list = list_of(t, at.neighbors, at.total, known);
        list.first = static_cast<uint32_t>(first);
        list.first_tile = tile;
        list.type_begin = type_begin;
        list.slot_of = at.slot_of;
        list.local = at.local;
        list.fresh = fresh[t];
        list.fresh_base = known;
        lists.push_back(list);
        first += at.total;
        tile += static_cast<uint32_t>(num_tiles(at.total));
      }
      for (size_t i = first_list; i < lists.size(); ++i) {
        lists[i].type_end = tile;
      }
    }
    IdBatch batch(device_, Control{told.fault(), words, told.fresh(), words + 1}, lists, tiles);
    batch.insert_ids();
    batch.number_ids();
    batch.write_ids(lists);
  }

 private:
  // Where the ids of one type are numbered.
  struct IdSlots {
    Tensor memory;
    word_t* slots = nullptr;
    int64_t room = 0;  // ids that it may hold
  };

  size_t num_types() const { return tables_.size(); }

  IdList list_of(size_t type, const id_t* ids, int64_t size, int64_t base) const {
    IdList list{};
    list.ids = ids;
    list.size = size;
    list.slots = tables_[type].slots;
    list.num_slots = static_cast<uint32_t>(2 * tables_[type].room);
    list.base = static_cast<uint32_t>(base);
    list.type = static_cast<int32_t>(type);
    list.wide_ids = sizeof(id_t) == sizeof(int64_t);
    list.wide_slots = is_wide_;
    return list;
  }

  // How many ids of each type there may be after the hops to come, as their fanouts say, beside those of this hop.
  std::vector<int64_t> expected_ids(size_t hop, const std::vector<int64_t>& found) const {
    std::vector<int64_t> expected(num_types(), 0);
    std::vector<int64_t> frontier = found;
    for (size_t later = hop + 1; later < num_hops_; ++later) {
      std::vector<int64_t> drawn(num_types(), 0);
      for (const HopRelation<id_t>& relation : relations_) {
        const int64_t fanout = std::max<int64_t>(relation.fanouts[later], 0);  // of all edges nothing is known
        drawn[relation.src] =
            std::min(drawn[relation.src] + std::min(frontier[relation.dst], kExpectedRoom) * fanout, kExpectedRoom);
      }
      for (size_t t = 0; t < num_types(); ++t) {
        expected[t] += drawn[t];
      }
      frontier = std::move(drawn);
    }
    return expected;
  }

  const Device& device_;
  const std::vector<HopRelation<id_t>>& relations_;
  size_t num_hops_;
  std::vector<IdSlots> tables_;  // per type
  bool is_wide_;
};

}  // namespace gnnsys::cuda
