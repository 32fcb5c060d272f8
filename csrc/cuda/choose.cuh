// Choosing k of n on the device, bit-equal to cpu/choose.h: all draws of a seed at once, one per lane or thread.
//
// Floyd's rule is sequential (draw j, from [0, n - k + j], is replaced by the rank n - k + j when it is already in), but
// what it asks can be answered for every draw on its own. Draw j is in when an earlier draw had the same value (then
// that value went in, there or before), or when it equals n - k + i of an earlier draw i that was itself replaced. The
// second is a chain that only leads to earlier draws; it is short, as ranks above n - k are few.
//
// Where ranks come from is a Source: `size(i)` candidates of seed i, `draw(stream, i, j, bound)` of them, and
// `position(i, rank)`, the edge that a rank stands for.
#pragma once

#include "cuda/sample.cuh"

namespace gnnsys::cuda {

constexpr int kMaxLanes = kWarp;  // up to this fanout a group of lanes has a seed; above it a block
constexpr int kChooseThreads = 256;

// Draw j of a stream, uniform in [0, bound).
__device__ inline uint32_t uniform_draw(const Stream& stream, uint32_t j, uint32_t bound) {
  const Words r = stream.words(j >> 2, 0);
  const uint32_t even = j & 2 ? r.w[2] : r.w[0];  // by selects: a run-time index would put r into local memory
  const uint32_t odd = j & 2 ? r.w[3] : r.w[1];
  return bounded(stream, j, j & 1 ? odd : even, bound);
}

// A lane's draw of the k its group of kLanes makes, by Floyd's rule. All lanes of the warp take part; lanes from k on
// hold anything.
template <int kLanes>
__device__ uint32_t without_repeats(uint32_t drawn, uint32_t n, uint32_t k) {
  const uint32_t lane = threadIdx.x % kLanes;
  bool taken = false;
  for (uint32_t i = 0; i + 1 < k; ++i) {
    const uint32_t other = __shfl_sync(kAllLanes, drawn, static_cast<int>(i), kLanes);
    taken |= i < lane && other == drawn;
  }
  const uint32_t replaced = drawn - (n - k);  // the draw that would have put this rank in; huge when there is none
  const bool chained = replaced < lane;
  const int first_lane = static_cast<int>(threadIdx.x % kWarp - lane);
  for (unsigned known = __ballot_sync(kAllLanes, taken);;) {
    if (chained && (known >> (static_cast<uint32_t>(first_lane) + replaced) & 1)) {
      taken = true;
    }
    const unsigned now = __ballot_sync(kAllLanes, taken);
    if (now == known) {
      break;
    }
    known = now;
  }
  return taken ? n - k + lane : drawn;
}

// A lane's place among the k values of its group in ascending order; equal ones stay in the order of lanes.
template <int kLanes>
__device__ uint32_t ascending_place(uint32_t value, uint32_t k) {
  const uint32_t lane = threadIdx.x % kLanes;
  uint32_t place = 0;
  for (uint32_t i = 0; i < k; ++i) {
    const uint32_t other = __shfl_sync(kAllLanes, value, static_cast<int>(i), kLanes);
    place += other < value || (other == value && i < lane);
  }
  return place;
}

// "last" takes the most recent; asked for more than there are (with replacement), the first of them is repeated.
__device__ inline uint32_t last_rank(int64_t n, int64_t k, int64_t j) {
  const int64_t rank = n - k + j;
  return static_cast<uint32_t>(rank < 0 ? 0 : rank);
}

// kLanes lanes per seed, kLanes >= fanout >= 0. Work: per seed one row of the source, one random word and one random read
// per edge taken; 8 + sizeof(id_t) bytes written per edge, side by side.
template <int kLanes, typename id_t, typename Source>
__global__ void __launch_bounds__(kChooseThreads)
    choose_small(Request<id_t> q, Source source, const int64_t* offsets, id_t* neighbors, int64_t* positions) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kChooseThreads + threadIdx.x) / kLanes;
  const uint32_t lane = threadIdx.x % kLanes;
  const int64_t n = i < q.num_seeds ? source.size(i) : 0;
  const int64_t k = q.count(n);
  const int64_t out = k > 0 ? offsets[i] : 0;
  const bool drawing = !q.takes_all(n) && !q.last;  // then k is the fanout
  uint32_t rank = q.last ? last_rank(n, k, lane) : lane;
  uint32_t place = lane;
  if (__any_sync(kAllLanes, drawing)) {
    const auto fanout = static_cast<uint32_t>(q.fanout);
    const auto size = static_cast<uint32_t>(n);
    uint32_t drawn = 0;
    if (drawing && lane < fanout) {
      drawn = source.draw(q.stream(i), i, lane, q.replace ? size : size - fanout + lane + 1);
    }
    if (!q.replace) {
      drawn = without_repeats<kLanes>(drawn, size, fanout);
    }
    const uint32_t drawn_place = ascending_place<kLanes>(drawn, fanout);
    if (drawing) {
      rank = drawn;
      place = drawn_place;
    }
  }
  if (lane < k) {
    const int64_t position = source.position(i, rank);
    positions[out + place] = position;
    neighbors[out + place] = q.indices[position];
  }
}

// -- more draws than lanes: a block per seed, in shared memory or, for more than kMaxShared, in a workspace -------------

constexpr uint32_t kMaxShared = 2048;
constexpr word_t kNoKey = ~word_t{0};

// Scratch of a block for k draws, `padded` the power of two that k is sorted as.
inline int64_t scratch_bytes(int64_t padded) { return padded * (sizeof(word_t) + sizeof(uint32_t) + 1); }

inline int64_t padded_to_power(int64_t k) {
  int64_t padded = 2;
  while (padded < k) {
    padded *= 2;
  }
  return padded;
}

// Ascending, by the whole block; size is a power of two. Bitonic: O(size log^2 size) comparisons.
__device__ inline void sort_keys(word_t* keys, uint32_t size) {
  for (uint32_t width = 2; width <= size; width *= 2) {
    for (uint32_t step = width / 2; step > 0; step /= 2) {
      __syncthreads();
      for (uint32_t c = threadIdx.x; c < size / 2; c += blockDim.x) {
        const uint32_t a = c / step * 2 * step + c % step;
        const uint32_t b = a + step;
        const bool up = (a & width) == 0;
        const word_t low = keys[a];
        const word_t high = keys[b];
        if ((low > high) == up) {
          keys[a] = high;
          keys[b] = low;
        }
      }
    }
  }
  __syncthreads();
}

template <typename id_t, typename Source>
__global__ void __launch_bounds__(kChooseThreads)
    choose_large(Request<id_t> q, Source source, const int64_t* offsets, id_t* neighbors, int64_t* positions,
                 uint32_t padded, char* scratch, int64_t scratch_size) {
  extern __shared__ word_t shared[];
  word_t* const keys = scratch ? reinterpret_cast<word_t*>(scratch + blockIdx.x * scratch_size) : shared;
  uint32_t* const draws = reinterpret_cast<uint32_t*>(keys + padded);
  uint8_t* const repeats = reinterpret_cast<uint8_t*>(draws + padded);
  const auto fanout = static_cast<uint32_t>(q.fanout);
  for (int64_t i = blockIdx.x; i < q.num_seeds; i += gridDim.x) {
    const int64_t n = source.size(i);
    const int64_t k = q.count(n);
    const int64_t out = offsets[i];
    const bool drawing = !q.takes_all(n) && !q.last;  // then k is the fanout
    if (drawing) {
      const auto size = static_cast<uint32_t>(n);
      const Stream stream = q.stream(i);
      __syncthreads();  // the keys of the seed before have been used
      for (uint32_t j = threadIdx.x; j < padded; j += kChooseThreads) {
        keys[j] = kNoKey;
        if (j < fanout) {
          draws[j] = source.draw(stream, i, j, q.replace ? size : size - fanout + j + 1);
          keys[j] = static_cast<word_t>(draws[j]) << 32 | j;
        }
      }
      sort_keys(keys, padded);
      if (!q.replace) {
        for (uint32_t at = threadIdx.x; at < fanout; at += kChooseThreads) {
          repeats[static_cast<uint32_t>(keys[at])] = at > 0 && keys[at - 1] >> 32 == keys[at] >> 32;
        }
        __syncthreads();
        const uint32_t base = size - fanout;
        for (uint32_t j = threadIdx.x; j < fanout; j += kChooseThreads) {
          uint32_t at = j;
          while (!repeats[at] && draws[at] - base < at) {
            at = draws[at] - base;
          }
          keys[j] = static_cast<word_t>(repeats[at] ? base + j : draws[j]) << 32;
        }
        sort_keys(keys, padded);
      }
    }
    for (int64_t j = threadIdx.x; j < k; j += kChooseThreads) {
      const auto rank = drawing ? static_cast<uint32_t>(keys[j] >> 32)
                                : q.last ? last_rank(n, k, j) : static_cast<uint32_t>(j);
      const int64_t position = source.position(i, rank);
      positions[out + j] = position;
      neighbors[out + j] = q.indices[position];
    }
  }
}

// -- all of them: an edge per thread, whatever the rows' lengths --------------------------------------------------------

// The row that element e belongs to: the last i in [0, num_rows) with offsets[i] <= e.
__device__ inline int64_t row_of(const int64_t* offsets, int64_t num_rows, int64_t e) {
  int64_t lo = 0;
  int64_t hi = num_rows - 1;
  while (lo < hi) {
    const int64_t middle = hi - (hi - lo) / 2;
    if (offsets[middle] <= e) {
      lo = middle;
    } else {
      hi = middle - 1;
    }
  }
  return lo;
}

template <typename id_t, typename pos_t, typename Indices, typename Source>
__global__ void __launch_bounds__(kChooseThreads)
    take_all(int64_t num_rows, int64_t total, Indices indices, Source source, const int64_t* offsets, id_t* neighbors,
             pos_t* positions) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kChooseThreads + threadIdx.x;
  if (e < total) {
    const int64_t i = row_of(offsets, num_rows, e);
    const int64_t position = source.position(i, e - offsets[i]);
    positions[e] = static_cast<pos_t>(position);
    neighbors[e] = indices[position];
  }
}

// -- the launch ---------------------------------------------------------------------------------------------------------

constexpr int64_t kScratchLimit = int64_t{256} << 20;

template <typename id_t, typename Source>
void choose_large(const Device& device, const Request<id_t>& q, const Source& source, const int64_t* offsets,
                  id_t* neighbors, int64_t* positions) {
  const int64_t padded = padded_to_power(q.fanout);
  const int64_t bytes = scratch_bytes(padded);
  int64_t blocks = std::min<int64_t>(q.num_seeds, int64_t{16} * device.num_processors());
  if (padded <= kMaxShared) {
    choose_large<<<static_cast<unsigned>(blocks), kChooseThreads, bytes, device.stream()>>>(
        q, source, offsets, neighbors, positions, static_cast<uint32_t>(padded), nullptr, 0);
  } else {
    blocks = std::max<int64_t>(1, std::min(blocks, kScratchLimit / bytes));
    const int64_t aligned = (bytes + 15) / 16 * 16;
    const Tensor scratch = device.workspace<char>(blocks * aligned);
    choose_large<<<static_cast<unsigned>(blocks), kChooseThreads, 0, device.stream()>>>(
        q, source, offsets, neighbors, positions, static_cast<uint32_t>(padded), mutable_data<char>(scratch), aligned);
  }
  CUDA_CHECK_LAUNCH();
}

// Writes the chosen edges of every seed to [offsets[i], offsets[i + 1]); total = offsets[num_seeds].
template <typename id_t, typename Source>
void choose(const Device& device, const Request<id_t>& q, const Source& source, const int64_t* offsets, int64_t total,
            id_t* neighbors, int64_t* positions) {
  if (total == 0) {
    return;
  }
  const auto small = [&](auto* kernel, int lanes) {
    kernel<<<num_blocks(q.num_seeds * lanes, kChooseThreads), kChooseThreads, 0, device.stream()>>>(
        q, source, offsets, neighbors, positions);
    CUDA_CHECK_LAUNCH();
  };
  // A seed that draws takes the whole fanout. Where that is more than all seeds take together, none does: there is nothing
  // to draw, and a workspace of the fanout's size, however large that is, is not made.
  if (q.fanout < 0 || q.fanout > total) {
    take_all<<<num_blocks(total, kChooseThreads), kChooseThreads, 0, device.stream()>>>(
        q.num_seeds, total, q.indices, source, offsets, neighbors, positions);
    CUDA_CHECK_LAUNCH();
  } else if (q.fanout <= 8) {
    small(&choose_small<8, id_t, Source>, 8);
  } else if (q.fanout <= 16) {
    small(&choose_small<16, id_t, Source>, 16);
  } else if (q.fanout <= kMaxLanes) {
    small(&choose_small<kMaxLanes, id_t, Source>, kMaxLanes);
  } else {
    choose_large(device, q, source, offsets, neighbors, positions);
  }
}

}  // namespace gnnsys::cuda
