// Loops over skewed rows, and the grouping of edges that coo -> csc and transpose are, against a stable sort.
#include "common/parallel.h"
#include "cpu/group.h"
#include "cpu/row_work.h"
#include "native_test.h"

#include <numeric>

using namespace gnnsys;
using native_test::Random;

namespace {

// What grouping means: edges in stable order of their group.
template <typename id_t>
bool groups_as_a_stable_sort(const std::vector<int64_t>& group, const std::vector<int64_t>& value, int64_t num_groups,
                             const std::vector<int64_t>& indptr, const std::vector<id_t>& values,
                             const std::vector<id_t>& positions) {
  std::vector<int64_t> order(group.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return group[static_cast<size_t>(a)] < group[static_cast<size_t>(b)];
  });
  for (size_t i = 0; i < order.size(); ++i) {
    const auto edge = static_cast<size_t>(order[i]);
    if (positions[i] != order[i] || values[i] != value[edge] ||
        static_cast<int64_t>(i) < indptr[static_cast<size_t>(group[edge])] ||
        static_cast<int64_t>(i) >= indptr[static_cast<size_t>(group[edge]) + 1]) {
      return false;
    }
  }
  return indptr[0] == 0 && indptr[static_cast<size_t>(num_groups)] == static_cast<int64_t>(group.size());
}

template <typename id_t>
bool coo_agrees(int64_t num_edges, int64_t num_groups, uint64_t seed) {
  Random random(seed);
  std::vector<int64_t> group(static_cast<size_t>(num_edges)), value(group.size());
  std::vector<id_t> group_in(group.size()), value_in(group.size());
  for (size_t e = 0; e < group.size(); ++e) {
    group[e] = random.below(2) ? random.below(num_groups) : random.below(std::min<int64_t>(num_groups, 3));
    value[e] = random.below(1 << 20);
    group_in[e] = static_cast<id_t>(group[e]);
    value_in[e] = static_cast<id_t>(value[e]);
  }
  std::vector<int64_t> indptr(static_cast<size_t>(num_groups) + 1, -1);
  std::vector<id_t> values(group.size()), positions(group.size());
  group_edges(CooEdges<id_t>{group_in.data(), value_in.data()}, num_edges,
              Groups<id_t, id_t>{num_groups, indptr.data(), values.data(), positions.data()});
  return groups_as_a_stable_sort(group, value, num_groups, indptr, values, positions);
}

}  // namespace

TEST("rows of skewed lengths are handed out once each") {
  Random random(1);
  std::vector<int64_t> indptr = {0};
  for (int64_t v = 0; v < 20000; ++v) {
    indptr.push_back(indptr.back() + (random.below(500) == 0 ? random.below(50000) : random.below(5)));
  }
  std::vector<int> visits(20000, 0);
  parallel_for_rows(indptr.data(), 20000, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      ++visits[static_cast<size_t>(v)];
    }
  });
  EXPECT(visits == std::vector<int>(20000, 1));
}

TEST("few edges are grouped as a stable sort would") {
  for (const int64_t edges : {0, 1, 2, 100, 5000}) {
    for (const int64_t groups : {1, 2, 77, 1000}) {
      EXPECT(coo_agrees<int32_t>(edges, groups, 1));
      EXPECT(coo_agrees<int64_t>(edges, groups, 2));
    }
  }
}

TEST("edges beyond the cache are grouped in buckets as a stable sort would, on any number of threads") {
  for (const int threads : {1, 4}) {
    threads_of_tests = threads;
    EXPECT(coo_agrees<int32_t>(300000, 1, 3));
    EXPECT(coo_agrees<int32_t>(300000, 40001, 4));
    EXPECT(coo_agrees<int64_t>(150000, 90000, 5));
  }
  threads_of_tests = 4;
}

TEST("columns are turned into rows as a stable sort would, empty columns included") {
  Random random(6);
  for (const int64_t columns : {1, 50, 60000}) {
    std::vector<int64_t> indptr = {0}, group, value;
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t degree = random.below(3) == 0 ? 0 : random.below(10);
      indptr.push_back(indptr.back() + degree);
      for (int64_t e = 0; e < degree; ++e) {
        group.push_back(random.below(900));
        value.push_back(c);
      }
    }
    const std::vector<int32_t> rows(group.begin(), group.end());
    std::vector<int64_t> out(901);
    std::vector<int32_t> values(group.size()), positions(group.size());
    group_edges(CscEdges<int32_t>{indptr.data(), columns, rows.data()}, indptr.back(),
                Groups<int32_t, int32_t>{900, out.data(), values.data(), positions.data()});
    EXPECT(groups_as_a_stable_sort(group, value, 900, out, values, positions));
  }
}
