// c of a column, for labor_importance.cu: the sums of common/labor_importance.h, in the same order on the device.
//
// Four threads have the four partial sums of a block of edges. They solve a column of one block by themselves; a warp has
// eight blocks of a longer one at a time, and a thread block 64 where it is very long. Every thread that takes part adds
// the blocks one after the other, so all of them have the same sum and take the same branch. A look at a column reads
// 4 bytes of each edge and a random sector of its source's 1 / pi.
#pragma once

#include "common/labor_importance.h"
#include "cuda/device.h"

#include <limits>

namespace gnnsys::cuda {

constexpr int kQuad = kPartials;
constexpr int kSolveThreads = 256;
constexpr int kQuads = kSolveThreads / kQuad;  // of a thread block
constexpr int kWarpQuads = kWarp / kQuad;
constexpr int64_t kWarpColumn = 32 * kSumBlock;  // edges of the longest column that a warp solves alone
constexpr double kInfinity = std::numeric_limits<double>::infinity();

__device__ inline unsigned quad_lanes() { return 0xFu << (threadIdx.x % kWarp / kQuad * kQuad); }

// The tally of one block of edges, the same in the four threads that make it.
__device__ inline ColumnTally tally_block(const uint32_t* source, const double* inverse_pi, int size, double c) {
  const int part = threadIdx.x % kQuad;
  const int whole = size - size % kPartials;
  double sum = 0.0;
  double smallest = kInfinity;
  int certain = 0;
  const auto add = [&](int e) {
    const double value = __ldg(inverse_pi + __ldg(source + e));
    const bool is_certain = value < c;
    certain += is_certain;
    sum = add_rn(sum, is_certain ? 0.0 : value);
    smallest = fmin(smallest, is_certain ? kInfinity : value);
  };
#pragma unroll 4
  for (int e = part; e < whole; e += kPartials) {
    add(e);
  }
  if (part == 0) {
    for (int e = whole; e < size; ++e) {
      add(e);
    }
  }
  const unsigned lanes = quad_lanes();
  __syncwarp(lanes);
  for (int step = 1; step < kQuad; step *= 2) {  // (s0 + s1) + (s2 + s3): either order of two has the same sum
    sum = add_rn(sum, __shfl_xor_sync(lanes, sum, step));
    smallest = fmin(smallest, __shfl_xor_sync(lanes, smallest, step));
    certain += __shfl_xor_sync(lanes, certain, step);
  }
  return {sum, smallest, certain};
}

// Block number `block` of a column; nothing, which adds 0, behind its end.
__device__ inline ColumnTally tally_block_of(const uint32_t* source, const double* inverse_pi, int64_t degree,
                                             int64_t block, double c) {
  const int64_t begin = block * kSumBlock;
  if (begin >= degree) {
    return {0.0, kInfinity, 0};
  }
  return tally_block(source + begin, inverse_pi, static_cast<int>(min(kSumBlock, degree - begin)), c);
}

__device__ inline void append(ColumnTally* tally, double sum, double smallest, int64_t certain) {
  tally->sum = add_rn(tally->sum, sum);
  tally->smallest = fmin(tally->smallest, smallest);
  tally->certain += certain;
}

// By a whole warp, eight blocks at a time. All lanes have the result.
__device__ inline double solve_by_warp(const uint32_t* source, const double* inverse_pi, int64_t degree,
                                       int64_t fanout) {
  const int quad = threadIdx.x % kWarp / kQuad;
  return solve_column(degree, fanout, [&](double c) {
    ColumnTally tally{0.0, kInfinity, 0};
    for (int64_t block = 0; block * kSumBlock < degree; block += kWarpQuads) {
      const ColumnTally mine = tally_block_of(source, inverse_pi, degree, block + quad, c);
      __syncwarp();
      for (int other = 0; other < kWarpQuads; ++other) {
        append(&tally, __shfl_sync(kAllLanes, mine.sum, other * kQuad),
               __shfl_sync(kAllLanes, mine.smallest, other * kQuad),
               __shfl_sync(kAllLanes, mine.certain, other * kQuad));
      }
    }
    return tally;
  });
}

// Of the blocks of edges that a thread block has at a time.
struct BlockTallies {
  double sum[kQuads];
  double smallest[kQuads];
  int certain[kQuads];
};

// By a whole thread block, 64 blocks of edges at a time. All threads have the result.
__device__ inline double solve_by_block(const uint32_t* source, const double* inverse_pi, int64_t degree,
                                        int64_t fanout, BlockTallies* tallies) {
  const int quad = threadIdx.x / kQuad;
  return solve_column(degree, fanout, [&](double c) {
    ColumnTally tally{0.0, kInfinity, 0};
    for (int64_t block = 0; block * kSumBlock < degree; block += kQuads) {
      const ColumnTally mine = tally_block_of(source, inverse_pi, degree, block + quad, c);
      __syncthreads();  // the tallies before these have been read
      if (threadIdx.x % kQuad == 0) {
        tallies->sum[quad] = mine.sum;
        tallies->smallest[quad] = mine.smallest;
        tallies->certain[quad] = static_cast<int>(mine.certain);
      }
      __syncthreads();
      for (int other = 0; other < kQuads; ++other) {
        append(&tally, tallies->sum[other], tallies->smallest[other], tallies->certain[other]);
      }
    }
    return tally;
  });
}

}  // namespace gnnsys::cuda
