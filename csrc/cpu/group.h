// Stable grouping of edges by one endpoint: what coo -> csc and transpose both are.
//
// What fits in the L2 cache: a counting sort. More: the edges are first partitioned into buckets of neighbouring
// groups, so that the counting sort of a bucket stays in the cache instead of missing on every edge. Work
// O(edges + groups); bytes beside the output: one record per edge (12, or 24 for 64-bit ids). Order inside a group is
// the order of the edges, for any number of threads.
#pragma once

#include "common/parallel.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace gnnsys {

constexpr int64_t kPlainBytes = 1 << 20;    // what a plain counting sort may touch at random: the L2 cache
constexpr int64_t kBucketEdges = 1 << 12;   // edges we would like in a bucket
constexpr int64_t kMaxBuckets = 1 << 10;    // more write streams than this thrash the TLB
constexpr int64_t kEdgesPerThread = 1 << 16;

// Edges given as two arrays; grouped by `group`.
template <typename in_t>
struct CooEdges {
  const in_t* group;
  const in_t* value;

  template <typename Body>
  void for_each(int64_t begin, int64_t end, const Body& body) const {
    for (int64_t e = begin; e < end; ++e) {
      body(e, static_cast<int64_t>(group[e]), static_cast<int64_t>(value[e]));
    }
  }
};

// Edges given as columns; grouped by the row index, so that the value is the column.
template <typename in_t>
struct CscEdges {
  const int64_t* indptr;
  int64_t num_columns;
  const in_t* group;

  template <typename Body>
  void for_each(int64_t begin, int64_t end, const Body& body) const {
    int64_t column = std::upper_bound(indptr, indptr + num_columns + 1, begin) - indptr - 1;
    for (int64_t e = begin; e < end; ++column) {
      const int64_t stop = std::min(end, indptr[column + 1]);
      for (; e < stop; ++e) {
        body(e, static_cast<int64_t>(group[e]), column);
      }
    }
  }
};

// Where the groups go: indptr [num_groups + 1], values and positions [num_edges].
template <typename id_t, typename pos_t>
struct Groups {
  int64_t num_groups;
  int64_t* indptr;
  id_t* values;
  pos_t* positions;
};

// indptr itself is the write cursor: it ends one group too far and is shifted back.
template <typename Edges, typename id_t, typename pos_t>
void group_plain(const Edges& edges, int64_t num_edges, const Groups<id_t, pos_t>& out) {
  std::fill_n(out.indptr, out.num_groups + 1, 0);
  for (int64_t e = 0; e < num_edges; ++e) {
    ++out.indptr[edges.group[e] + 1];
  }
  for (int64_t g = 0; g < out.num_groups; ++g) {
    out.indptr[g + 1] += out.indptr[g];
  }
  edges.for_each(0, num_edges, [&](int64_t e, int64_t group, int64_t value) {
    const int64_t at = out.indptr[group]++;
    out.values[at] = static_cast<id_t>(value);
    out.positions[at] = static_cast<pos_t>(e);
  });
  std::memmove(out.indptr + 1, out.indptr, sizeof(int64_t) * out.num_groups);
  out.indptr[0] = 0;
}

template <typename id_t, typename pos_t>
struct EdgeRecord {
  uint32_t group;  // within its bucket
  id_t value;
  pos_t position;
};

struct Buckets {
  int shift;  // bucket of group g is g >> shift
  int64_t count;
};

inline Buckets choose_buckets(int64_t num_edges, int64_t num_groups) {
  const int64_t wanted = std::clamp<int64_t>(num_edges / kBucketEdges, 1, kMaxBuckets);
  int shift = 0;
  while (((num_groups - 1) >> shift) >= wanted) {
    ++shift;
  }
  return {shift, ((num_groups - 1) >> shift) + 1};
}

// Counting sort of one bucket's records onto its slice of the output, which starts at `first`.
template <typename id_t, typename pos_t>
void group_bucket(const EdgeRecord<id_t, pos_t>* records, int64_t size, int64_t first, int64_t first_group,
                  int64_t num_groups, const Groups<id_t, pos_t>& out) {
  int64_t* const cursor = out.indptr + first_group;
  std::fill_n(cursor, num_groups, 0);
  for (int64_t i = 0; i < size; ++i) {
    ++cursor[records[i].group];
  }
  int64_t at = first;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t degree = cursor[g];
    cursor[g] = at;
    at += degree;
  }
  for (int64_t i = 0; i < size; ++i) {
    const int64_t to = cursor[records[i].group]++;
    out.values[to] = records[i].value;
    out.positions[to] = records[i].position;
  }
  std::memmove(cursor + 1, cursor, sizeof(int64_t) * (num_groups - 1));
  cursor[0] = first;
}

template <typename Edges, typename id_t, typename pos_t>
void group_bucketed(const Edges& edges, int64_t num_edges, const Groups<id_t, pos_t>& out) {
  using Record = EdgeRecord<id_t, pos_t>;
  const Buckets buckets = choose_buckets(num_edges, out.num_groups);
  const int shares = num_shares_for(num_edges, kEdgesPerThread);

  // counts[s * buckets.count + b], turned into each share's first slot in each bucket: bucket-major, then share.
  std::vector<int64_t> counts(shares * buckets.count, 0);
  for_shares(shares, [&](int s, int n) {
    const Range r = share_of(num_edges, s, n);
    int64_t* const mine = counts.data() + s * buckets.count;
    for (int64_t e = r.begin; e < r.end; ++e) {
      ++mine[edges.group[e] >> buckets.shift];
    }
  });
  std::vector<int64_t> bucket_begin(buckets.count + 1);
  int64_t at = 0;
  for (int64_t b = 0; b < buckets.count; ++b) {
    bucket_begin[b] = at;
    for (int s = 0; s < shares; ++s) {
      at += std::exchange(counts[s * buckets.count + b], at);
    }
  }
  bucket_begin[buckets.count] = at;

  const std::unique_ptr<Record[]> scratch(new Record[static_cast<size_t>(num_edges)]);  // not cleared
  Record* const records = scratch.get();
  const int64_t mask = (int64_t{1} << buckets.shift) - 1;
  for_shares(shares, [&](int s, int n) {
    const Range r = share_of(num_edges, s, n);
    int64_t* const slot = counts.data() + s * buckets.count;
    edges.for_each(r.begin, r.end, [&](int64_t e, int64_t group, int64_t value) {
      records[slot[group >> buckets.shift]++] = {static_cast<uint32_t>(group & mask), static_cast<id_t>(value),
                                                 static_cast<pos_t>(e)};
    });
  });
  parallel_for_dynamic(buckets.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first_group = b << buckets.shift;
      const int64_t num_groups = std::min(out.num_groups - first_group, mask + 1);
      group_bucket(records + bucket_begin[b], bucket_begin[b + 1] - bucket_begin[b], bucket_begin[b], first_group,
                   num_groups, out);
    }
  });
  out.indptr[out.num_groups] = num_edges;
}

// Groups must have been checked: every edge's group is in [0, num_groups).
template <typename Edges, typename id_t, typename pos_t>
void group_edges(const Edges& edges, int64_t num_edges, const Groups<id_t, pos_t>& out) {
  const auto edge_bytes = static_cast<int64_t>(sizeof(id_t) + sizeof(pos_t));
  const auto group_bytes = static_cast<int64_t>(sizeof(int64_t));
  if (num_edges * edge_bytes + out.num_groups * group_bytes <= kPlainBytes) {
    group_plain(edges, num_edges, out);
  } else {
    group_bucketed(edges, num_edges, out);
  }
}

}  // namespace gnnsys
