// Hash maps, heaps, counts and bit sets, each beside a container of the standard library that is given the same calls.
#include "common/parallel.h"
#include "cpu/id_table.h"
#include "cpu/partition/bits.h"
#include "cpu/partition/node_heap.h"
#include "cpu/partition/small_map.h"
#include "cpu/partition/volume_counts.h"
#include "native_test.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

using namespace gnnsys;
using native_test::Random;

namespace {

template <typename Slot>
bool agrees_with_map(uint64_t id_bound, uint64_t seed) {
  const int64_t log2 = kMinLog2;
  std::vector<int64_t> words(static_cast<size_t>(kHeader + (int64_t{sizeof(Slot) / 8} << log2)), 0);
  words[0] = log2;
  IdTable<Slot> table(words.data());
  std::unordered_map<uint64_t, int64_t> want;
  Random random(seed);
  while (static_cast<int64_t>(want.size()) < table.max_count()) {
    // Half of the ids collide in their low bits, and every id comes back.
    const uint64_t id = (random.below(2) ? random.next() : random.next() << 20) % id_bound;
    Slot* const slot = table.find(id, table.home(id));
    if (slot->empty() != (want.count(id) == 0)) {
      return false;
    }
    if (slot->empty()) {
      slot->set(id, table.count());
      table.set_count(table.count() + 1);
    }
    want.emplace(id, static_cast<int64_t>(want.size()));
    if (slot->local() != want.at(id)) {
      return false;
    }
  }
  for (const auto& [id, local] : want) {
    if (table.find(id, table.home(id))->local() != local) {
      return false;
    }
  }
  return table.count() == static_cast<int64_t>(want.size());
}

}  // namespace

TEST("a narrow id table numbers ids as a map does, id 0 and the largest included") {
  EXPECT(agrees_with_map<NarrowSlot>(uint64_t{1} << 32, 1));
  EXPECT(agrees_with_map<NarrowSlot>(1000, 2));
}

TEST("a wide id table numbers ids as a map does") {
  EXPECT(agrees_with_map<WideSlot>(~uint64_t{0}, 3));
  EXPECT(agrees_with_map<WideSlot>(1000, 4));
}

TEST("a small map sums, grows, keeps the order and is empty after clear") {
  partition::SmallMap map;
  Random random(5);
  for (int round = 0; round < 20; ++round) {
    std::map<int32_t, int32_t> want;
    std::vector<int32_t> order;
    const int64_t adds = random.below(3000);
    for (int64_t i = 0; i < adds; ++i) {
      const auto id = static_cast<int32_t>(random.below(2) ? random.below(200) : random.below(1 << 30));
      const auto weight = static_cast<int32_t>(random.below(100) == 0 ? 1 << 30 : random.below(1000));
      if (!want.count(id)) {
        order.push_back(id);
      }
      want[id] = static_cast<int32_t>(std::min<int64_t>(int64_t{want[id]} + weight, 1 << 30));
      map.add(id, weight);
    }
    EXPECT(map.size() == static_cast<int64_t>(order.size()));
    size_t at = 0;
    bool same = true;
    map.for_each([&](int32_t id, int32_t weight) { same = same && id == order[at++] && weight == want[id]; });
    EXPECT(same && at == order.size());
    EXPECT(order.empty() || map.contains(order[0]));
    map.clear();
    EXPECT(map.size() == 0 && (order.empty() || !map.contains(order[0])));
  }
}

TEST("heaps give the largest key first and the smaller node among equals, whatever is set and removed") {
  constexpr int kHeaps = 3;
  constexpr int kNodes = 60;
  partition::NodeHeaps heaps(kHeaps, kNodes);
  std::set<std::pair<int64_t, int32_t>> want[kHeaps];  // (-key, node)
  std::optional<std::pair<int, int64_t>> where[kNodes];
  Random random(6);
  for (int i = 0; i < 20000; ++i) {
    const auto v = static_cast<int32_t>(random.below(kNodes));
    if (where[v]) {
      want[where[v]->first].erase({-where[v]->second, v});
      where[v].reset();
    }
    if (random.below(3) == 0) {
      heaps.remove(v);
    } else {
      const auto heap = static_cast<int32_t>(random.below(kHeaps));
      const int64_t key = random.below(20) - 10;
      heaps.set(v, heap, key);
      want[heap].insert({-key, v});
      where[v] = {heap, key};
    }
    for (int h = 0; h < kHeaps; ++h) {
      EXPECT(heaps.empty(h) == want[h].empty());
      EXPECT(want[h].empty() || heaps.top(h) == want[h].begin()->second);
    }
    if (i % 5000 == 4999) {
      heaps.clear();
      for (int h = 0; h < kHeaps; ++h) {
        want[h].clear();
        EXPECT(heaps.empty(h));
      }
      std::fill(std::begin(where), std::end(where), std::nullopt);
    }
  }
}

TEST("counts per part are those of a plain matrix, in short rows and long ones") {
  constexpr int kParts = 8;
  const std::vector<int32_t> degree = {0, 1, 3, 7, 8, 50};
  PartCounts counts(degree, kParts);
  std::vector<std::vector<int32_t>> want(degree.size(), std::vector<int32_t>(kParts, 0));
  std::vector<int32_t> total(degree.size(), 0);
  Random random(7);
  for (int i = 0; i < 20000; ++i) {
    const auto u = static_cast<size_t>(random.below(static_cast<int64_t>(degree.size())));
    const auto part = static_cast<int>(random.below(kParts));
    if (random.below(2) && total[u] < degree[u]) {
      ++total[u];
      EXPECT(counts.increment(static_cast<int64_t>(u), part) == ++want[u][static_cast<size_t>(part)]);
    } else if (want[u][static_cast<size_t>(part)] > 0) {
      --total[u];
      EXPECT(counts.decrement(static_cast<int64_t>(u), part) == --want[u][static_cast<size_t>(part)]);
    }
    EXPECT(counts.count(static_cast<int64_t>(u), part) == want[u][static_cast<size_t>(part)]);
  }
}

TEST("bits that several threads set are each set once, and rank counts the members before") {
  constexpr int64_t kIds = 5000;
  Random random(8);
  std::vector<int64_t> ids(40000);
  for (int64_t& id : ids) {
    id = random.below(kIds / 3) * 3;
  }
  std::vector<uint64_t> words(static_cast<size_t>(words_for(kIds)), 0);
  std::atomic<int64_t> fresh{0};
  for_shares(4, [&](int s, int n) {
    const Range r = share_of(static_cast<int64_t>(ids.size()), s, n);
    for (int64_t i = r.begin; i < r.end; ++i) {
      fresh += set_bit(words.data(), ids[static_cast<size_t>(i)]);
    }
  });
  const std::set<int64_t> want(ids.begin(), ids.end());
  EXPECT(fresh == static_cast<int64_t>(want.size()));
  std::vector<int32_t> ranks(words.size(), 0);
  for (size_t w = 1; w < words.size(); ++w) {
    ranks[w] = ranks[w - 1] + __builtin_popcountll(words[w - 1]);
  }
  const RankedBits bits{words.data(), ranks.data()};
  for (int64_t id = 0; id < kIds; ++id) {
    EXPECT(bits.has(id) == (want.count(id) == 1));
    EXPECT(bits.rank(id) == std::distance(want.begin(), want.lower_bound(id)));
  }
}
