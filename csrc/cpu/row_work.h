// Sharing the rows of a CSC among threads when their lengths are skewed.
#pragma once

#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace gnnsys {

constexpr int64_t kWorkPerChunk = 1 << 14;  // rows and edges; small enough to balance, large enough to be free

// The first row at or behind which `work` rows and edges have gone by.
inline int64_t row_at_work(const int64_t* indptr, int64_t num_rows, int64_t work) {
  int64_t low = 0;
  int64_t high = num_rows;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (indptr[middle] + middle < work) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// body(begin, end) over ranges of rows of about equal work, handed out as threads become free. A row is never split,
// so its result cannot depend on the number of threads.
template <typename Body>
void parallel_for_rows(const int64_t* indptr, int64_t num_rows, const Body& body) {
  const int64_t work = indptr[num_rows] + num_rows;
  const int64_t num_chunks = (work + kWorkPerChunk - 1) / kWorkPerChunk;
  parallel_for_dynamic(num_chunks, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = row_at_work(indptr, num_rows, begin * kWorkPerChunk);
    const int64_t last = end == num_chunks ? num_rows : row_at_work(indptr, num_rows, end * kWorkPerChunk);
    if (first < last) {
      body(first, last);
    }
  });
}

// int64, from 0 to num_edges, never decreasing: one pass.
inline void check_indptr(const Tensor& indptr, int64_t num_edges) {
  check_vector(indptr, "indptr");
  check_dtype(indptr, ScalarType::Long, "indptr");
  CHECK_ARG(indptr.numel() >= 1, "indptr must have num_dst + 1 entries, got none");
  const int64_t* const p = const_data<int64_t>(indptr);
  const int64_t num_dst = indptr.numel() - 1;
  std::atomic<bool> sorted{true};
  parallel_for(num_dst, 1 << 15, [&](int64_t begin, int64_t end) {
    bool falls = false;  // compared, not subtracted: a difference of any two entries may wrap around
    for (int64_t i = begin; i < end; ++i) {
      falls |= p[i + 1] < p[i];
    }
    if (falls) {
      sorted.store(false, std::memory_order_relaxed);
    }
  });
  CHECK_ARG(sorted.load() && p[0] == 0 && p[num_dst] == num_edges, "indptr must rise from 0 to the number of edges, ",
            num_edges, "; it runs from ", p[0], " to ", p[num_dst], sorted.load() ? "" : " and decreases in between");
}

// Every entry of a structure: next to nothing beside a pass over the rows that it points to.
inline void check_structure(const Tensor& indptr, const Tensor& indices, int64_t num_src) {
  check_ids(indices, "indices");
  check_indptr(indptr, indices.numel());
  check_id_range(indices, num_src, "indices");
}

}  // namespace gnnsys
