// How LABOR-0 draws on the device, bit-equal to cpu/sample_labor.cpp, where it is explained: for sample_labor.cu and
// sample_hops.cu.
//
// Which edges are taken is known edge by edge: a word of the source against a limit of the seed. `count_labor` finds each
// seed's limit, which costs two divisions and so is one thread's work, and counts what is below it, a warp per seed or a
// block where a row is long (sample_filter.cuh). What it took of rows of up to kBitEdges it notes in a bit per edge. After
// the counts are summed, `take_labor` writes; of longer rows it makes the words again. Work: a Philox block and a read of
// an index per in-edge of the seeds that have more than the fanout, two in long rows; 12 + sizeof(id_t) bytes per edge
// taken.
#pragma once

#include "cuda/sample.cuh"
#include "cuda/sample_filter.cuh"

namespace gnnsys::cuda {

constexpr uint32_t kBitEdges = 4 * kWarp;
constexpr int kLaborBlocks = 6;  // at once on a multiprocessor, by 40 registers per thread: what they wait for is memory

// A seed's in-edges, and which of them are taken.
struct alignas(16) LaborRow {
  int64_t begin;
  uint64_t limit;  // words below it are taken; 0: all, without a word
  uint32_t size;   // 0 also where nothing is to be taken
  uint32_t gaps;   // excluded ones among them
  float weight;
  uint32_t taken[kBitEdges / kWarp];  // a bit per edge, where the limit is not 0 and the row has at most kBitEdges

  __device__ bool has_bits() const { return limit != 0 && size <= kBitEdges; }
  __device__ int64_t end() const { return begin + size; }
};

template <typename id_t>
struct Labor {
  Request<id_t> q;
  Report* report;
  LaborRow* rows;
  const void* source_ids;  // original ids of the sources; the sources themselves when null
  bool wide_source_ids;
  int64_t num_src;
  const word_t* num_found;  // how many seeds there are, where the host knows a bound alone; else null

  __device__ int64_t num_seeds() const {
    return num_found ? min(static_cast<int64_t>(*num_found), q.num_seeds) : q.num_seeds;
  }

  __device__ LaborRow find(int64_t i) const {
    LaborRow row{};
    int64_t begin;
    int64_t end;
    if (!q.row(i, &begin, &end, report) || q.fanout == 0) {
      return row;
    }
    const int64_t gaps = q.num_exclude > 0 ? q.excluded_before(end) - q.excluded_before(begin) : 0;
    const int64_t degree = end - begin - gaps;
    if (degree <= 0) {  // negative only when exclude is out of order
      return row;
    }
    const bool all = q.fanout < 0 || degree <= q.fanout;
    row.begin = begin;
    row.size = static_cast<uint32_t>(end - begin);
    row.gaps = static_cast<uint32_t>(gaps);
    row.limit = all ? 0 : limit_of(static_cast<uint64_t>(degree));
    row.weight = __fdiv_rn(1.0f, static_cast<float>(all ? degree : q.fanout));
    return row;
  }

  // The number of words w with w * degree < fanout * 2^64: that product divided by the degree and rounded up, 32 bits at
  // a time. The fanout is below the degree, and the degree below 2^32.
  __device__ uint64_t limit_of(uint64_t degree) const {
    const uint64_t wanted = static_cast<uint64_t>(q.fanout) << 32;
    const uint64_t high = wanted / degree;
    const uint64_t rest = (wanted - high * degree) << 32;
    const uint64_t low = rest / degree;
    return (high << 32 | low) + (rest - low * degree != 0);
  }

  __device__ uint32_t tree(int64_t i) const { return q.tree ? static_cast<uint32_t>(q.tree[i]) : 0u; }

  __device__ bool takes(const LaborRow& row, uint32_t tree, int64_t p) const {
    if (row.gaps > 0 && q.is_excluded(p)) {
      return false;
    }
    return row.limit == 0 || Stream{q.key, original(p), tree}.word64(0, 0) < row.limit;
  }

  __device__ uint64_t original(int64_t p) const {
    const auto source = static_cast<uint64_t>(static_cast<int64_t>(q.indices[p]));
    if (source_ids == nullptr) {
      return source;
    }
    if (source >= static_cast<uint64_t>(num_src)) {
      note(&report->bad_source, p);
      return 0;
    }
    const int64_t id = wide_source_ids ? static_cast<const int64_t*>(source_ids)[source]
                                       : static_cast<const int32_t*>(source_ids)[source];
    return static_cast<uint64_t>(id);
  }
};

// How many edges of a row a warp takes, and which ones, where that is noted; every lane takes part.
template <typename id_t>
__device__ int64_t count_by_warp(const Labor<id_t>& labor, const LaborRow& row, uint32_t tree, uint32_t* taken) {
  const uint32_t lane = threadIdx.x % kWarp;
  int64_t count = 0;
  for (uint32_t base = 0; base < row.size; base += kWarp) {
    const uint32_t e = base + lane;
    const unsigned kept = __ballot_sync(kAllLanes, e < row.size && labor.takes(row, tree, row.begin + e));
    if (row.has_bits() && lane == 0) {
      taken[base / kWarp] = kept;
    }
    count += __popc(kept);
  }
  return count;
}

template <typename id_t>
__global__ void __launch_bounds__(kFilterThreads, kLaborBlocks) count_labor(Labor<id_t> labor, int64_t* counts) {
  __shared__ LaborRow rows[kFilterWarps];
  __shared__ int64_t block_counts[kFilterWarps];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kFilterWarps;
  const int64_t num_seeds = labor.num_seeds();
  labor.q.check_exclude(labor.report);
  if (threadIdx.x < kFilterWarps) {
    const int64_t i = first + threadIdx.x;
    const LaborRow row = i < num_seeds ? labor.find(i) : LaborRow{};
    rows[threadIdx.x] = row;
    if (i < labor.q.num_seeds && row.limit == 0) {
      counts[i] = int64_t{row.size} - row.gaps;  // also of a bound: nobody's
    }
  }
  __syncthreads();
  if (first + warp < num_seeds) {
    const int64_t i = first + warp;
    const LaborRow row = rows[warp];
    if (row.limit != 0 && row.size <= kHeavy) {
      const int64_t count = count_by_warp(labor, row, labor.tree(i), rows[warp].taken);
      if (lane == 0) {
        counts[i] = count;
      }
    }
    if (lane == 0) {
      labor.rows[i] = rows[warp];
    }
  }
  for (int w = 0; w < kFilterWarps; ++w) {  // heavy rows, which nobody has written to since
    if (rows[w].limit == 0 || rows[w].size <= kHeavy) {
      continue;
    }
    const LaborRow row = rows[w];
    const uint32_t tree = labor.tree(first + w);
    int64_t count = 0;
    for (int64_t p = row.begin + threadIdx.x; p < row.end(); p += kFilterThreads) {
      count += labor.takes(row, tree, p);
    }
    count = warp_sum(count);
    if (lane == 0) {
      block_counts[warp] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int other = 1; other < kFilterWarps; ++other) {
        count += block_counts[other];
      }
      counts[first + w] = count;
    }
    __syncthreads();
  }
}

// The rows of for_rows, as count_labor found them.
struct LaborRows {
  const LaborRow* rows;
  int64_t num_rows;

  __device__ void row(int64_t i, int64_t* begin, int64_t* end) const {
    *begin = rows[i].begin;
    *end = rows[i].end();
  }
};

// `weights` may be null.
template <typename id_t>
__global__ void __launch_bounds__(kFilterThreads, kLaborBlocks)
    take_labor(Labor<id_t> labor, const int64_t* offsets, id_t* neighbors, int64_t* positions, float* weights) {
  const int lane = threadIdx.x % kWarp;
  const unsigned below = (1u << lane) - 1;
  const auto write = [&](const LaborRow& row, int64_t p, int64_t slot) {
    positions[slot] = p;
    neighbors[slot] = labor.q.indices[p];
    if (weights) {
      weights[slot] = row.weight;
    }
  };
  for_rows(
      LaborRows{labor.rows, labor.q.num_seeds},
      [&](int64_t i, int64_t, int64_t) {
        const LaborRow row = labor.rows[i];
        int64_t slot = offsets[i];
        if (row.has_bits()) {
#pragma unroll
          for (int w = 0; w < static_cast<int>(kBitEdges / kWarp); ++w) {
            const unsigned kept = row.taken[w];
            if (kept >> lane & 1) {
              write(row, row.begin + w * kWarp + lane, slot + __popc(kept & below));
            }
            slot += __popc(kept);
          }
          return;
        }
        const uint32_t tree = labor.tree(i);
        for (int64_t base = row.begin; base < row.end(); base += kWarp) {
          const int64_t p = base + lane;
          const bool keep = p < row.end() && labor.takes(row, tree, p);
          const unsigned kept = __ballot_sync(kAllLanes, keep);
          if (keep) {
            write(row, p, slot + __popc(kept & below));
          }
          slot += __popc(kept);
        }
      },
      [&](int64_t i, int64_t, int64_t) {
        const LaborRow row = labor.rows[i];
        const uint32_t tree = labor.tree(i);
        int64_t slot = offsets[i];
        for (int64_t base = row.begin; base < row.end(); base += kFilterThreads) {
          const int64_t p = base + threadIdx.x;
          const bool keep = p < row.end() && labor.takes(row, tree, p);
          int kept;
          const int before = block_exclusive_sum<kFilterThreads>(static_cast<int>(keep), &kept);
          if (keep) {
            write(row, p, slot + before);
          }
          slot += kept;
        }
      });
}

// counts[i] of all seeds, and their rows; zeros up to the bound where that is what the host knows.
template <typename id_t>
void count_labor(const Device& device, const Labor<id_t>& labor, int64_t* counts) {
  count_labor<<<num_blocks(labor.q.num_seeds, kFilterWarps), kFilterThreads, 0, device.stream()>>>(labor, counts);
  CUDA_CHECK_LAUNCH();
}

// What is taken of seed i, from offsets[i] on; weights where they are not null.
template <typename id_t>
void take_labor(const Device& device, const Labor<id_t>& labor, const int64_t* offsets, id_t* neighbors,
                int64_t* positions, float* weights) {
  take_labor<<<num_blocks(labor.q.num_seeds, kFilterWarps), kFilterThreads, 0, device.stream()>>>(
      labor, offsets, neighbors, positions, weights);
  CUDA_CHECK_LAUNCH();
}

// Throws what is wrong with sources; check_report has thrown the rest.
inline void check_labor_sources(const Report& r, int64_t num_src) {
  CHECK_ARG(r.bad_source == kNoFault, "sources must be in [0, ", num_src, "), they are not at edge position ",
            static_cast<int64_t>(r.bad_source));
}

}  // namespace gnnsys::cuda
