// How LABOR-0 draws on the device, bit-equal to cpu/sample_labor.cpp, where it is explained: for sample_labor.cu and
// sample_hops.cu.
//
// Which edges are taken is known edge by edge: a word of the source against a limit of the seed. `count_labor` finds each
// seed's limit and counts what is below it, a warp per seed or a block where a row is long (sample_filter.cuh). After
// the counts are summed, `take_labor` makes the words again and writes. Work: two Philox blocks and two reads of an index
// per in-edge of the seeds that have more than the fanout; 8 + sizeof(id_t) bytes per edge taken.
#pragma once

#include "cuda/sample.cuh"
#include "cuda/sample_filter.cuh"

namespace gnnsys::cuda {

// A seed's in-edges, and which of them are taken.
struct alignas(16) LaborRow {
  int64_t begin;
  uint64_t limit;  // words below it are taken; 0: all, without a word
  uint32_t size;   // 0 also where nothing is to be taken
  uint32_t gaps;   // excluded ones among them
  float weight;

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

// The rows of for_rows: those that count_labor finds, or has found.
template <typename id_t, bool kFinds>
struct LaborRows {
  Labor<id_t> labor;
  int64_t num_rows;

  __device__ void row(int64_t i, int64_t* begin, int64_t* end) const {
    LaborRow row;
    if constexpr (kFinds) {
      row = labor.find(i);
      if (threadIdx.x % kWarp == 0) {
        labor.rows[i] = row;
      }
      __syncwarp();
    } else {
      row = labor.rows[i];
    }
    *begin = row.begin;
    *end = row.end();
  }
};

template <typename id_t>
__global__ void __launch_bounds__(kFilterThreads) count_labor(Labor<id_t> labor, int64_t* counts) {
  __shared__ int64_t block_counts[kFilterWarps];
  const int lane = threadIdx.x % kWarp;
  const auto tally = [&](int64_t i, const LaborRow& row, int first, int step) {
    int64_t count = 0;
    const uint32_t tree = labor.tree(i);
    for (int64_t p = row.begin + first; p < row.end(); p += step) {
      count += labor.takes(row, tree, p);
    }
    return warp_sum(count);
  };
  labor.q.check_exclude(labor.report);
  const int64_t num_seeds = labor.num_seeds();
  const int64_t mine = static_cast<int64_t>(blockIdx.x) * kFilterWarps + threadIdx.x;
  if (threadIdx.x < kFilterWarps && mine >= num_seeds && mine < labor.q.num_seeds) {
    counts[mine] = 0;  // of a bound: nobody's
  }
  for_rows(
      LaborRows<id_t, true>{labor, num_seeds},
      [&](int64_t i, int64_t, int64_t) {
        const LaborRow row = labor.rows[i];
        const int64_t count = row.limit == 0 ? int64_t{row.size} - row.gaps : tally(i, row, lane, kWarp);
        if (lane == 0) {
          counts[i] = count;
        }
      },
      [&](int64_t i, int64_t, int64_t) {
        const LaborRow row = labor.rows[i];
        if (row.limit == 0) {
          if (threadIdx.x == 0) {
            counts[i] = int64_t{row.size} - row.gaps;
          }
          return;
        }
        int64_t count = tally(i, row, threadIdx.x, kFilterThreads);
        if (lane == 0) {
          block_counts[threadIdx.x / kWarp] = count;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
          for (int w = 1; w < kFilterWarps; ++w) {
            count += block_counts[w];
          }
          counts[i] = count;
        }
        __syncthreads();
      });
}

template <typename id_t>
__global__ void __launch_bounds__(kFilterThreads)
    take_labor(Labor<id_t> labor, const int64_t* offsets, id_t* neighbors, int64_t* positions) {
  const int lane = threadIdx.x % kWarp;
  const auto write = [&](int64_t p, int64_t slot) {
    positions[slot] = p;
    neighbors[slot] = labor.q.indices[p];
  };
  for_rows(
      LaborRows<id_t, false>{labor, labor.q.num_seeds},
      [&](int64_t i, int64_t, int64_t) {
        const LaborRow row = labor.rows[i];
        const uint32_t tree = labor.tree(i);
        int64_t slot = offsets[i];
        for (int64_t base = row.begin; base < row.end(); base += kWarp) {
          const int64_t p = base + lane;
          const bool keep = p < row.end() && labor.takes(row, tree, p);
          const unsigned kept = __ballot_sync(kAllLanes, keep);
          if (keep) {
            write(p, slot + __popc(kept & ((1u << lane) - 1)));
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
            write(p, slot + before);
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

// What is taken of seed i, from offsets[i] on.
template <typename id_t>
void take_labor(const Device& device, const Labor<id_t>& labor, const int64_t* offsets, id_t* neighbors,
                int64_t* positions) {
  take_labor<<<num_blocks(labor.q.num_seeds, kFilterWarps), kFilterThreads, 0, device.stream()>>>(labor, offsets,
                                                                                                  neighbors, positions);
  CUDA_CHECK_LAUNCH();
}

// Throws what is wrong with sources; check_report has thrown the rest.
inline void check_labor_sources(const Report& r, int64_t num_src) {
  CHECK_ARG(r.bad_source == kNoFault, "sources must be in [0, ", num_src, "), they are not at edge position ",
            static_cast<int64_t>(r.bad_source));
}

}  // namespace gnnsys::cuda
