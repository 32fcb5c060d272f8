// Candidates that are contiguous: nothing filtered, times stored sorted, or some of them excluded. One launch finds
// each seed's candidates and sums what is taken of them; choose.cuh does the rest.
#pragma once

#include "cuda/sample.cuh"

namespace gnnsys::cuda {

constexpr int kCountThreads = 1024;  // seeds per tile: one window of look-back covers 32 tiles

// A seed's candidates: positions from `begin` on, `size` of them when `gaps` excluded ones among them are skipped.
struct alignas(16) Row {
  int64_t begin;
  uint32_t size;
  uint32_t gaps;
};

// Candidates that are contiguous but for excluded ones. The gap before which rank r lies is found by halving: gap g is
// passed when exclude[g] - begin - g <= r, and that ascends with g.
template <bool kGaps>
struct Contiguous {
  const Row* rows;
  const int64_t* exclude;
  const int64_t* first_gaps;  // per seed, in exclude

  __device__ int64_t size(int64_t i) const { return rows[i].size; }

  __device__ uint32_t draw(const Stream& stream, int64_t, uint32_t j, uint32_t bound) const {
    return uniform_draw(stream, j, bound);
  }

  __device__ int64_t position(int64_t i, int64_t rank) const {
    const Row row = rows[i];
    if constexpr (!kGaps) {
      return row.begin + rank;
    }
    const int64_t* const gaps = exclude + first_gaps[i];
    uint32_t lo = 0;
    uint32_t hi = row.gaps;
    while (lo < hi) {
      const uint32_t middle = lo + (hi - lo) / 2;
      if (gaps[middle] - row.begin - middle <= rank) {
        lo = middle + 1;
      } else {
        hi = middle;
      }
    }
    return row.begin + rank + lo;
  }
};

// Positions of [begin, end) whose time is not after the limit: all before the result, as times ascend.
template <typename id_t>
__device__ int64_t end_in_time(const Request<id_t>& q, int64_t begin, int64_t end, int64_t limit, Report* report) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (q.time_at(middle, report) <= limit) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return end;
}

// rows[i] and offsets[0..num_seeds]: a seed per thread, one random 16-byte read each (and the halvings of times and
// exclusions), summed on the way. Where the host does not know the number of seeds yet, q.num_seeds is a bound that the
// grid is made for, and `num_found` on the device the number.
template <typename id_t>
__global__ void __launch_bounds__(kCountThreads)
    count_contiguous(Request<id_t> q, const word_t* num_found, Row* rows, int64_t* first_gaps, int64_t* offsets,
                     Report* report, word_t* words) {
  const int64_t num_seeds = num_found ? min(static_cast<int64_t>(*num_found), q.num_seeds) : q.num_seeds;
  const int64_t tile = take_tile(words);
  const int64_t i = tile * kCountThreads + threadIdx.x;
  int64_t count = 0;
  if (i < num_seeds) {
    int64_t begin;
    int64_t end;
    q.row(i, &begin, &end, report);
    if (q.timed) {
      end = end_in_time(q, begin, end, q.seed_time[i], report);
    }
    int64_t gaps = 0;
    if (q.num_exclude > 0) {
      first_gaps[i] = q.excluded_before(begin);
      gaps = q.excluded_before(end) - first_gaps[i];
    }
    const int64_t size = max(end - begin - gaps, int64_t{0});  // negative only when exclude is out of order
    rows[i] = {begin, static_cast<uint32_t>(size), static_cast<uint32_t>(gaps)};
    count = q.count(size);
  }
  q.check_exclude(report);
  int64_t tile_total;
  int64_t before = block_exclusive_sum<kCountThreads>(count, &tile_total);
  before += sum_of_tiles_before(words, tile, tile_total);
  if (i <= num_seeds) {
    offsets[i] = before;
  }
  if (i == num_seeds) {
    report->total = static_cast<word_t>(before);
  }
}

}  // namespace gnnsys::cuda
