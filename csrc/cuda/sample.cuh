// What a call of sample_neighbors asks for, as kernels see it, and what they report back: cpu/sample.h on the device.
#pragma once

#include "common/draw.h"
#include "cuda/device.h"
#include "cuda/scan.cuh"

#include <limits>
#include <tuple>

namespace gnnsys::cuda {

constexpr int64_t kMaxDegree = 0xFFFFFFFELL;  // a rank fits 32 bits

// Sizes and faults of a call, read by the host once. All ones at the start: "nothing wrong". Of several faults of a
// kind the smallest is kept, so a message does not depend on the order of threads.
struct Report {
  word_t total;       // edges taken
  word_t candidates;  // edges they are taken from, where candidates are listed
  word_t bad_seed;    // position of a seed that is no row
  word_t bad_tree;    // position of a tree that is out of range
  word_t bad_exclude;
  word_t bad_row;
  word_t bad_weight;
  word_t no_time;
  word_t huge_degree;
  word_t bad_source;  // position of an edge whose source has no original id; told by the op that reads those
};

constexpr int64_t kReportWords = sizeof(Report) / sizeof(word_t);

__device__ inline void note(word_t* fault, int64_t value) { atomicMin(fault, static_cast<word_t>(value)); }

// Whether a call has a fault, besides its sizes.
inline bool has_fault(const Report& r) {
  return (r.bad_seed & r.bad_tree & r.bad_exclude & r.bad_row & r.bad_weight & r.no_time & r.huge_degree) != kNoFault;
}

constexpr int64_t kAllSources = std::numeric_limits<int64_t>::max();

// The edges of one part of a graph, whose sources are named by local ids: core nodes first, then what the halo lists.
struct PartEdges {
  const int32_t* indices;
  const void* halo;
  int64_t first_edge;  // of the part, counted over all parts
  int64_t first;       // global id of its first core node
  int64_t num_core;
  int64_t num_local;
  bool wide_halo;

  // -1 where ids of all sources are read and this is none: whoever looks it up says so.
  __device__ int64_t source(int64_t position) const {
    const int64_t local = indices[position - first_edge];
    if (local < 0 || local >= num_local) {
      if (num_local == kAllSources) {
        return -1;
      }
      fault("local ids of a part", local, num_local);
    }
    if (local < num_core) {
      return first + local;
    }
    return wide_halo ? static_cast<const int64_t*>(halo)[local - num_core]
                     : static_cast<const int32_t*>(halo)[local - num_core];
  }
};

// The sources of edges, by position: an array of ids, or the parts of a graph one after the other.
template <typename id_t>
struct EdgeSources {
  const id_t* ids;
  const PartEdges* parts;  // null: ids
  int num_parts;

  __device__ id_t operator[](int64_t position) const {
    if (parts == nullptr) {  // every thread of the grid agrees
      return ids[position];
    }
    int p = 0;
    while (p + 1 < num_parts && position >= parts[p + 1].first_edge) {
      ++p;
    }
    return static_cast<id_t>(parts[p].source(position));
  }
};

template <typename id_t>
struct Request {
  const int64_t* indptr;
  EdgeSources<id_t> indices;
  int64_t num_rows;
  int64_t num_edges;
  const id_t* seeds;
  int64_t num_seeds;
  int64_t fanout;
  bool replace;
  uint64_t key;
  const id_t* rng_ids;          // original ids of the seeds; the seeds themselves when null
  const int64_t* wide_rng_ids;  // the same where they need 64 bits and local ids do not
  const void* original;         // original ids of all rows, where they are not given seed by seed
  bool wide_original;
  const int64_t* tree;          // null: tree 0
  bool timed;
  const int64_t* time;  // per position, or per node id when node_time
  int64_t num_times;
  bool node_time;
  bool time_sorted;
  const int64_t* seed_time;
  bool last;
  const int64_t* exclude;  // ascending positions
  int64_t num_exclude;

  __device__ Stream stream(int64_t i) const {
    return {key, static_cast<uint64_t>(rng_id(i)), tree ? static_cast<uint32_t>(tree[i]) : 0u};
  }

  // A seed is a row here: `row` has looked at it before anything is drawn.
  __device__ int64_t rng_id(int64_t i) const {
    if (original != nullptr) {
      const auto seed = static_cast<int64_t>(seeds[i]);
      return wide_original ? static_cast<const int64_t*>(original)[seed] : static_cast<const int32_t*>(original)[seed];
    }
    return wide_rng_ids ? wide_rng_ids[i] : static_cast<int64_t>(rng_ids ? rng_ids[i] : seeds[i]);
  }

  // How many of n candidates are taken.
  __device__ int64_t count(int64_t n) const {
    if (fanout < 0 || n == 0) {
      return n;
    }
    return replace || n > fanout ? fanout : n;
  }

  // Whether n candidates are all taken as they are, and nothing is drawn.
  __device__ bool takes_all(int64_t n) const { return fanout < 0 || n == 0 || (!replace && n <= fanout); }

  // Seed i's positions [begin, end). False, with [0, 0), when they do not exist; what is wrong is noted.
  __device__ bool row(int64_t i, int64_t* begin, int64_t* end, Report* report) const {
    *begin = *end = 0;
    const auto seed = static_cast<int64_t>(seeds[i]);
    if (seed < 0 || seed >= num_rows) {
      note(&report->bad_seed, i);
      return false;
    }
    if (tree && (tree[i] < 0 || tree[i] > static_cast<int64_t>(kMaxTree))) {
      note(&report->bad_tree, i);
      return false;
    }
    const int64_t first = indptr[seed];
    const int64_t last_end = indptr[seed + 1];
    if (first < 0 || last_end < first || last_end > num_edges) {
      note(&report->bad_row, seed);
      return false;
    }
    if (last_end - first > kMaxDegree) {
      note(&report->huge_degree, seed);
      return false;
    }
    *begin = first;
    *end = last_end;
    return true;
  }

  // The latest time there is where a node has none, which is noted.
  __device__ int64_t time_at(int64_t position, Report* report) const {
    const int64_t index = node_time ? static_cast<int64_t>(indices[position]) : position;
    if (index >= num_times) {
      note(&report->no_time, index);
    }
    return index < 0 || index >= num_times ? std::numeric_limits<int64_t>::max() : time[index];
  }

  // Where `position` is, or would be, among the excluded.
  __device__ int64_t excluded_before(int64_t position) const {
    int64_t lo = 0;
    int64_t hi = num_exclude;
    while (lo < hi) {
      const int64_t middle = lo + (hi - lo) / 2;
      if (exclude[middle] < position) {
        lo = middle + 1;
      } else {
        hi = middle;
      }
    }
    return lo;
  }

  __device__ bool is_excluded(int64_t position) const {
    if (num_exclude == 0) {
      return false;
    }
    const int64_t at = excluded_before(position);
    return at < num_exclude && exclude[at] == position;
  }

  // Whether the excluded positions ascend: looked at by all threads of a grid together.
  __device__ void check_exclude(Report* report) const {
    const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i + 1 < num_exclude; i += threads) {
      if (exclude[i] >= exclude[i + 1]) {
        note(&report->bad_exclude, i);
      }
    }
  }
};

using Result = std::tuple<Tensor, Tensor, Tensor>;

// Throws what a call's report says is wrong. The messages are the CPU's.
template <typename id_t>
void check_report(const Device& device, const Request<id_t>& q, const Report& r) {
  if (!has_fault(r)) {
    return;
  }
  const auto value = [](word_t fault) { return static_cast<int64_t>(fault); };
  if (r.bad_seed != kNoFault) {
    id_t seed;
    device.read(&seed, q.seeds + r.bad_seed, 1);
    CHECK_ARG(false, "seeds must be in [0, ", q.num_rows, "), got ", seed, " at position ", value(r.bad_seed));
  }
  if (r.bad_tree != kNoFault) {
    int64_t tree;
    device.read(&tree, q.tree + r.bad_tree, 1);
    CHECK_ARG(false, "tree must be in [0, ", static_cast<int64_t>(kMaxTree) + 1, "), got ", tree, " at position ",
              value(r.bad_tree));
  }
  CHECK_ARG(r.bad_exclude == kNoFault, "exclude must be edge positions in ascending order, each once");
  CHECK_ARG(r.bad_row == kNoFault, "indptr must ascend from 0 to len(indices), it does not at node ", value(r.bad_row));
  CHECK_ARG(r.bad_weight == kNoFault, "weight must be finite and not negative, it is not at edge position ",
            value(r.bad_weight));
  CHECK_ARG(r.no_time == kNoFault, "time must have an entry for every source node, it has none for node ",
            value(r.no_time));
  CHECK_ARG(r.huge_degree == kNoFault, "seeds: node ", value(r.huge_degree), " has more than 2^32 - 2 in-edges");
}

// Reads a call's report, waiting for it, and checks it.
template <typename id_t>
Report read_report(const Device& device, const Request<id_t>& q, const Report* on_device) {
  Report r;
  device.read(reinterpret_cast<word_t*>(&r), reinterpret_cast<const word_t*>(on_device), kReportWords);
  check_report(device, q, r);
  return r;
}

// The two ways that are not plain (sample_listed.cu): weights, and times that are stored unsorted.
template <typename id_t>
Result sample_by_time(const Device& device, const Request<id_t>& q);
template <typename id_t, typename weight_t>
Result sample_by_weight(const Device& device, const Request<id_t>& q, const weight_t* weight);

}  // namespace gnnsys::cuda
