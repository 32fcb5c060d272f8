// Owners of ids, copiers of rows, and rows that are read while others write them.
#include "common/id_range.h"
#include "cpu/owners.h"
#include "cpu/row_copy.h"
#include "cpu/store/versions.h"
#include "native_test.h"

#include <atomic>
#include <numeric>
#include <thread>

using namespace gnnsys;
using native_test::Random;

namespace {

template <typename id_t>
bool owners_agree(int64_t num_owners, Random& random) {
  std::vector<int64_t> bounds = {0};
  for (int64_t b = 0; b < num_owners; ++b) {
    bounds.push_back(bounds.back() + (random.below(3) == 0 ? 0 : random.below(50)));
  }
  if (bounds.back() == 0) {
    return true;
  }
  std::vector<id_t> ids(500);
  for (id_t& id : ids) {
    id = static_cast<id_t>(random.below(bounds.back()));
  }
  std::vector<int32_t> owners(ids.size());
  find_owners(ids.data(), static_cast<int64_t>(ids.size()), bounds.data(), num_owners, owners.data());
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto at = static_cast<size_t>(owners[i]);
    if (owners[i] < 0 || owners[i] >= num_owners || ids[i] < bounds[at] || ids[i] >= bounds[at + 1]) {
      return false;
    }
  }
  return true;
}

// Moves rows one by one in a random order into an array that fits exactly, and compares it with the source.
template <typename Copy>
bool moves_rows(const Copy& copy, int64_t bytes, uint64_t seed) {
  constexpr int64_t kRows = 37;
  Random random(seed);
  std::vector<char> from(static_cast<size_t>(kRows * bytes)), to(from.size(), 0);
  for (char& byte : from) {
    byte = static_cast<char>(random.next());
  }
  std::vector<int64_t> order(kRows);
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size() - 1; i > 0; --i) {
    std::swap(order[i], order[static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1))]);
  }
  for (int64_t i = 0; i < kRows; ++i) {
    copy(to.data(), order[static_cast<size_t>(i)], from.data(), i);
  }
  finish_stores();
  for (int64_t i = 0; i < kRows; ++i) {
    if (std::memcmp(to.data() + order[static_cast<size_t>(i)] * bytes, from.data() + i * bytes,
                    static_cast<size_t>(bytes)) != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST("an id's owner is the range that holds it, with empty ranges, few owners and many") {
  Random random(1);
  for (int64_t num_owners = 1; num_owners < 80; ++num_owners) {
    EXPECT(owners_agree<int32_t>(num_owners, random));
    EXPECT(owners_agree<int64_t>(num_owners, random));
  }
}

TEST("a bound beyond 32 bits owns no 32-bit id") {
  const int64_t bounds[] = {0, 10, int64_t{1} << 40, int64_t{1} << 41};
  const int32_t ids[] = {0, 9, 10, std::numeric_limits<int32_t>::max()};
  int32_t owners[4];
  find_owners(ids, 4, bounds, 3, owners);
  EXPECT(owners[0] == 0 && owners[1] == 0 && owners[2] == 1 && owners[3] == 1);
}

TEST("the first id outside a range is found, whichever thread meets it") {
  std::vector<int64_t> ids(200000, 3);
  EXPECT(first_outside(ids.data(), 200000, 4) == -1);
  EXPECT(first_outside(ids.data(), 0, 0) == -1);
  ids[150000] = -1;
  EXPECT(first_outside(ids.data(), 200000, 4) == 150000);
  ids[70000] = std::numeric_limits<int64_t>::max();
  EXPECT(first_outside(ids.data(), 200000, 4) == 70000);
  const int32_t narrow[] = {0, std::numeric_limits<int32_t>::min()};
  EXPECT(first_outside(narrow, 2, int64_t{1} << 40) == 1);
}

TEST("a row of any width arrives whole and nothing beside it is touched") {
  EXPECT(moves_rows(CopyFixed<1>{}, 1, 1));
  EXPECT(moves_rows(CopyFixed<4>{}, 4, 2));
  EXPECT(moves_rows(CopyFixed<16>{}, 16, 3));
  for (const int64_t bytes : {1, 3, 63, 64, 65, 255, 256, 257, 320, 1000}) {
    EXPECT(moves_rows(CopyBytes{bytes}, bytes, static_cast<uint64_t>(bytes)));
  }
}

TEST("casts of rows are the casts of their values") {
  const std::vector<double> from = {0.0, 1.5, -2.25, 1e30, 3.0, -0.0};
  std::vector<float> narrow(from.size());
  Cast<float, double>{3}(reinterpret_cast<char*>(narrow.data()), 0, reinterpret_cast<const char*>(from.data()), 1);
  Cast<float, double>{3}(reinterpret_cast<char*>(narrow.data()), 1, reinterpret_cast<const char*>(from.data()), 0);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT(narrow[i] == static_cast<float>(from[i + 3]) && narrow[i + 3] == static_cast<float>(from[i]));
  }
}

TEST("a row that is read while it is written is never seen half written") {
  constexpr int64_t kRows = 130;  // of three blocks
  constexpr int64_t kSize = 24;
  std::vector<int64_t> rows(kRows * kSize, 0);
  std::vector<uint32_t> words(static_cast<size_t>(Versions::num_blocks(kRows)), 0);
  const Versions versions(words.data());
  std::atomic<bool> torn{false};
  const CopyBytes copy{kSize * 8};
  const auto write = [&](int64_t seed) {
    Random random(static_cast<uint64_t>(seed));
    for (int64_t i = 0; i < 4000; ++i) {
      const int64_t row = random.below(kRows);
      const std::vector<int64_t> fresh(kSize, seed * 100000 + i);
      if (!versions.begin_write(row)) {
        torn = true;
      }
      copy(reinterpret_cast<char*>(rows.data()), row, reinterpret_cast<const char*>(fresh.data()), 0);
      versions.end_write(row);
    }
  };
  const auto read = [&](uint64_t seed) {
    Random random(seed);
    std::vector<int64_t> seen(kSize);
    for (int i = 0; i < 8000; ++i) {
      const int64_t row = random.below(kRows);
      if (!versions.read(row, [&] {
            copy(reinterpret_cast<char*>(seen.data()), 0, reinterpret_cast<const char*>(rows.data()), row);
          })) {
        torn = true;
      }
      for (const int64_t value : seen) {
        if (value != seen[0]) {
          torn = true;
        }
      }
    }
  };
  std::thread threads[] = {std::thread(write, 1), std::thread(write, 2), std::thread(read, 3), std::thread(read, 4)};
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT(!torn);
  uint64_t writes = 0;
  for (const uint32_t word : words) {
    EXPECT(word % 2 == 0);
    writes += word / 2;
  }
  EXPECT(writes == 8000);
}

TEST("a row whose writer died is waited for no longer than patience lasts, by readers and writers") {
  std::vector<uint32_t> words = {0, 7};
  const Versions versions(words.data(), std::chrono::milliseconds(20));
  bool copied = false;
  EXPECT(!versions.read(64, [&] { copied = true; }) && !copied);
  EXPECT(!versions.begin_write(127) && words[1] == 7);
  EXPECT(versions.read(63, [&] { copied = true; }) && copied);
  EXPECT(versions.begin_write(0) && words[0] == 1);
}
