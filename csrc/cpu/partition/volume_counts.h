// In-partition degrees (G3 §4.3.2): how many out-neighbours each node has in each part, in min(degree, parts) words.
//
// A node with fewer out-neighbours than there are parts keeps a list of (part, count) pairs, 16 bits each, ended by a
// zero word or the end of its row; any other node keeps one count per part.
#pragma once

#include <cstdint>
#include <vector>

namespace gnnsys {

constexpr int kMaxVolumeParts = 1 << 15;

class PartCounts {
 public:
  // out_degree: how often each node will be counted at most.
  PartCounts(const std::vector<int32_t>& out_degree, int num_parts)
      : num_parts_(num_parts), row_(out_degree.size() + 1) {
    int64_t at = 0;
    for (size_t u = 0; u < out_degree.size(); ++u) {
      row_[u] = at;
      at += out_degree[u] < num_parts ? out_degree[u] : num_parts;
    }
    row_.back() = at;
    words_.assign(at, 0);
  }

  int32_t count(int64_t u, int part) const {
    const uint32_t* const row = words_.data() + row_[u];
    const int64_t size = row_[u + 1] - row_[u];
    if (size == num_parts_) {
      return static_cast<int32_t>(row[part]);
    }
    const int64_t at = find(row, size, part);
    return at < size ? static_cast<int32_t>(row[at] & 0xffff) : 0;  // an unused slot counts 0
  }

  // Both return the count after the change.
  int32_t increment(int64_t u, int part) {
    uint32_t* const row = words_.data() + row_[u];
    const int64_t size = row_[u + 1] - row_[u];
    if (size == num_parts_) {
      return static_cast<int32_t>(++row[part]);
    }
    const int64_t at = find(row, size, part);
    if (row[at] == 0) {
      row[at] = static_cast<uint32_t>(part) << 16;
    }
    return static_cast<int32_t>(++row[at] & 0xffff);
  }

  int32_t decrement(int64_t u, int part) {
    uint32_t* const row = words_.data() + row_[u];
    const int64_t size = row_[u + 1] - row_[u];
    if (size == num_parts_) {
      return static_cast<int32_t>(--row[part]);
    }
    const int64_t at = find(row, size, part);
    const auto left = static_cast<int32_t>(--row[at] & 0xffff);
    if (left == 0) {
      int64_t last = at;
      while (last + 1 < size && row[last + 1] != 0) {
        ++last;
      }
      row[at] = row[last];
      row[last] = 0;
    }
    return left;
  }

 private:
  // Where the pair of `part` is, or the first unused slot, or size.
  static int64_t find(const uint32_t* row, int64_t size, int part) {
    int64_t at = 0;
    while (at < size && row[at] != 0 && (row[at] >> 16) != static_cast<uint32_t>(part)) {
      ++at;
    }
    return at;
  }

  int num_parts_;
  std::vector<int64_t> row_;
  std::vector<uint32_t> words_;
};

}  // namespace gnnsys
