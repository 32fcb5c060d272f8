// Which relations of relation_conv are multiplied together, by the kernels of grouped_products.cuh, and where their rows
// lie meanwhile.
#pragma once

#include "common/relation_conv.h"
#include "cuda/grouped_products.cuh"

#include <cstdint>
#include <set>
#include <vector>

namespace gnnsys::cuda {

constexpr int64_t kSmallProduct = 256 << 20;  // multiply-adds of a relation, on average: below, launches take longer
constexpr int64_t kLargestProduct = 4 * kSmallProduct;  // of any
constexpr size_t kMostTiles = 2;  // for all relations that have one weight tensor
constexpr int64_t kMostShareBytes = 32 << 20;  // of shares in the gradient of weights

// Relations whose rows are one behind the other in a buffer.
struct RelationBatch {
  std::vector<size_t> relations;
  std::vector<int64_t> rows;  // where those of each begin
  int64_t num_rows = 0;

  template <typename IsWanted>
  RelationBatch subset(const IsWanted& is_wanted) const {
    RelationBatch found;
    for (size_t i = 0; i < relations.size(); ++i) {
      if (is_wanted(relations[i])) {
        found.relations.push_back(relations[i]);
        found.rows.push_back(rows[i]);
      }
    }
    found.num_rows = num_rows;
    return found;
  }
};

inline void mark_done(const RelationBatch& some, std::vector<bool>& is_done) {
  for (const size_t r : some.relations) {
    is_done[r] = true;
  }
}

// Relations with edges and a weight of this tensor, up to `most` rows at a time. None where they are few, where two
// have the same weight, or where products take longer than launches.
inline std::vector<RelationBatch> small_relations(size_t slot, const Tensor& weight,
                                             const std::vector<Relation>& relations, const RelationGroups& groups,
                                             int64_t most) {
  const WeightShape shape = WeightShape::of(weight);
  const int64_t size = shape.in * shape.out;
  const int64_t value_bytes = weight.scalar_type() == ScalarType::Double ? 8 : 4;
  std::vector<RelationBatch> found;
  std::set<int64_t> used;
  int64_t num_rows = 0;
  int64_t num_relations = 0;
  for (size_t r = 0; r < relations.size(); ++r) {
    const int64_t count = groups.ends[r + 1] - groups.ends[r];
    if (relations[r].weight != static_cast<int64_t>(slot) || count == 0) {
      continue;
    }
    if (!used.insert(relations[r].row).second) {
      return {};
    }
    const auto fits = [&](const RelationBatch& last) {
      const int64_t num_shares = (last.num_rows + count) / kWeightRows + static_cast<int64_t>(last.relations.size()) + 1;
      return last.num_rows + count <= most && num_shares * size * value_bytes <= kMostShareBytes;
    };
    if (!fits(RelationBatch{}) || count * size > kLargestProduct) {
      continue;
    }
    if (found.empty() || !fits(found.back())) {
      found.emplace_back();
    }
    RelationBatch& last = found.back();
    last.relations.push_back(r);
    last.rows.push_back(last.num_rows);
    last.num_rows += count;
    num_rows += count;
    ++num_relations;
  }
  // Where products are many, the device is late and not the host.
  const bool is_small = num_rows * size < kSmallProduct * num_relations && found.size() <= kMostTiles;
  const bool pays = num_relations >= 2 && shape.blocks == 0 && is_small;
  return pays ? found : std::vector<RelationBatch>{};
}

// Runs body(from, count) for relation `from` of some and those behind it that follow one another with the same slot.
template <typename SlotOf, typename Body>
void for_same(const RelationBatch& some, const std::vector<Relation>& relations, const SlotOf& slot_of,
              const RelationGroups& groups, const Body& body) {
  const std::vector<size_t>& mine = some.relations;
  size_t from = 0;
  while (from < mine.size()) {
    size_t last = from;
    while (last + 1 < mine.size() && groups.ends[mine[last + 1]] == groups.ends[mine[last] + 1] &&
           slot_of(relations[mine[last + 1]]) == slot_of(relations[mine[from]])) {
      ++last;
    }
    body(from, groups.ends[mine[last] + 1] - groups.ends[mine[from]]);
    from = last + 1;
  }
}

inline std::vector<Segments> segments(const RelationBatch& some, const std::vector<Relation>& relations,
                                      const RelationGroups& groups) {
  std::vector<Segments> found;
  for (size_t i = 0; i < some.relations.size(); ++i) {
    if (i % kMostSegments == 0) {
      found.emplace_back();
    }
    const size_t r = some.relations[i];
    found.back().add(some.rows[i], groups.ends[r], groups.ends[r + 1] - groups.ends[r], relations[r].row);
  }
  return found;
}

}  // namespace gnnsys::cuda
