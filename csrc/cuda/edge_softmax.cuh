// The softmax over the in-edges of every row, per head: its shift and total, for scores that are read or computed.
//
// A group of lanes per segment; a lane stays with one head (heads rounded up to a power of two share the group), so a
// row's reductions are shuffles among the lanes of a head. Long rows leave (largest, total) per slot, joined in order.
#pragma once

#include "cuda/attention.cuh"
#include "cuda/segments.cuh"

#include <limits>

namespace gnnsys::cuda {

// How many neighbouring lanes have different heads: the heads, rounded up to a power of two.
inline int head_lanes(int64_t heads) {
  int lanes = 1;
  while (lanes < heads && lanes < kWarp) {
    lanes *= 2;
  }
  return lanes;
}

// Few heads: rows are short, and eight lanes are enough for one.
template <typename Body>
void with_group(int lanes_per_head, Body&& body) {
  if (lanes_per_head <= 2) {
    body(std::integral_constant<int, 8>{});
  } else {
    body(std::integral_constant<int, kWarp>{});
  }
}

// exp(score - shift) summed: what a stretch of a row knows about its softmax.
template <typename A>
struct Total {
  A largest;
  A total;
  __device__ A alpha(A score) const { return exp_of(score - largest) / total; }
};

// A head whose scores are all -inf is shifted by nothing: its total is 0 (and stays NaN where a score is).
template <typename A>
__device__ A finite_shift(A largest) {
  return largest == -std::numeric_limits<A>::infinity() ? A{0} : largest;
}

// Largest score and total of one segment and head, for each lane of the head alike.
template <int kGroup, typename A, typename Score>
__device__ Total<A> total_of(const Score& score, const Segment& segment, int64_t head, int lane, int lanes_per_head) {
  const unsigned mask = group_mask<kGroup>();
  const int64_t first = segment.begin + lane / lanes_per_head;
  const int64_t step = kGroup / lanes_per_head;
  A largest = -std::numeric_limits<A>::infinity();
  for (int64_t e = first; e < segment.end; e += step) {
    largest = max_of(largest, score(e, segment.row, head));
  }
  for (int offset = lanes_per_head; offset < kGroup; offset *= 2) {
    largest = max_of(largest, __shfl_xor_sync(mask, largest, offset, kGroup));
  }
  const A shift = finite_shift(largest);
  A total = 0;
  for (int64_t e = first; e < segment.end; e += step) {
    total += exp_of(score(e, segment.row, head) - shift);
  }
  for (int offset = lanes_per_head; offset < kGroup; offset *= 2) {
    total += __shfl_xor_sync(mask, total, offset, kGroup);
  }
  return {largest, total};
}

// Visits the heads of a segment that this lane works on: visit(head), the same number of times on every lane (a head
// at or beyond `heads` is none, but takes part in shuffles).
template <typename Visit>
__device__ void for_heads(int64_t heads, int lane, int lanes_per_head, Visit&& visit) {
  for (int64_t head = lane % lanes_per_head; head - lane % lanes_per_head < heads; head += lanes_per_head) {
    visit(head);
  }
}

// totals[row, head] of whole rows, `slots` of stretches of long rows.
template <int kGroup, typename A, typename Score>
__global__ void row_totals(Segments segments, Score score, int64_t heads, int lanes_per_head, Total<A>* slots,
                           Total<A>* totals) {
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kGroup;
  if (unit >= segments.count()) {
    return;
  }
  const Segment segment = segments.at(unit);
  if (segment.row < 0) {
    return;
  }
  const int lane = threadIdx.x % kGroup;
  for_heads(heads, lane, lanes_per_head, [&](int64_t head) {
    const Total<A> found = total_of<kGroup, A>(score, segment, min(head, heads - 1), lane, lanes_per_head);
    if (lane >= lanes_per_head || head >= heads) {
      return;
    }
    (segment.slot >= 0 ? slots + segment.slot * heads : totals + segment.row * heads)[head] = found;
  });
}

// Joins the stretches of long rows.
template <typename A>
__global__ void join_totals(Segments segments, const Total<A>* slots, int64_t heads, Total<A>* totals) {
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (unit >= segments.num_slots()) {
    return;
  }
  const Segment segment = segments.at(unit);
  if (segment.row < 0 || segment.begin != segments.indptr[segment.row]) {
    return;
  }
  const int64_t end = segments.end_slot(segment.row);
  for (int64_t head = threadIdx.x % kWarp; head < heads; head += kWarp) {
    A largest = slots[unit * heads + head].largest;
    for (int64_t s = segments.next_slot(unit); s < end; s += 2) {
      largest = max_of(largest, slots[s * heads + head].largest);
    }
    A total = 0;
    for (int64_t s = unit; s < end; s = segments.next_slot(s)) {
      const Total<A> part = slots[s * heads + head];
      if (part.total != 0) {  // a stretch of -inf alone adds nothing, however small the others are
        total += part.total * exp_of(finite_shift(part.largest) - finite_shift(largest));
      }
    }
    totals[segment.row * heads + head] = {largest, total};
  }
}

// What alpha = exp(score - largest) / total needs, per row and head. `score(e, row, head)`.
template <typename A, typename Score>
void softmax_totals(const Device& device, const Segments& segments, const Score& score, int64_t heads,
                    Total<A>* totals) {
  if (heads == 0 || segments.num_rows == 0) {
    return;
  }
  Tensor slots = device.workspace<Total<A>>(segments.num_slots() * heads);
  const int lanes_per_head = head_lanes(heads);
  with_group(lanes_per_head, [&](auto group) {
    constexpr int kGroup = decltype(group)::value;
    row_totals<kGroup, A><<<num_blocks(segments.count() * kGroup, 256), 256, 0, device.stream()>>>(
        segments, score, heads, lanes_per_head, mutable_data<Total<A>>(slots), totals);
    CUDA_CHECK_LAUNCH();
  });
  if (segments.num_slots() > 0) {
    join_totals<A><<<num_blocks(segments.num_slots() * kWarp, 256), 256, 0, device.stream()>>>(
        segments, const_data<Total<A>>(slots), heads, totals);
    CUDA_CHECK_LAUNCH();
  }
}

// sums[row, head] = sum of value(e * heads + head) over a segment's edges, or the same into slots.
template <int kGroup, typename A, typename Value>
__global__ void sum_segments(Segments segments, int64_t heads, int lanes_per_head, Value value, A* slots, A* sums) {
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kGroup;
  if (unit >= segments.count()) {
    return;
  }
  const Segment segment = segments.at(unit);
  if (segment.row < 0) {
    return;
  }
  const int lane = threadIdx.x % kGroup;
  for_heads(heads, lane, lanes_per_head, [&](int64_t head) {
    A sum = 0;
    if (head < heads) {
      for (int64_t e = segment.begin + lane / lanes_per_head; e < segment.end; e += kGroup / lanes_per_head) {
        sum += value(e * heads + head);
      }
    }
    for (int offset = lanes_per_head; offset < kGroup; offset *= 2) {
      sum += __shfl_xor_sync(group_mask<kGroup>(), sum, offset, kGroup);
    }
    if (lane < lanes_per_head && head < heads) {
      (segment.slot >= 0 ? slots + segment.slot * heads : sums + segment.row * heads)[head] = sum;
    }
  });
}

// sums[row, head] of value(e * heads + head) over the edges of every row.
template <typename A, typename Value>
void sum_values(const Device& device, const Segments& segments, int64_t heads, const Value& value, A* sums) {
  if (heads == 0 || segments.num_rows == 0) {
    return;
  }
  Tensor slots = device.workspace<A>(segments.num_slots() * heads);
  const int lanes_per_head = head_lanes(heads);
  with_group(lanes_per_head, [&](auto group) {
    constexpr int kGroup = decltype(group)::value;
    sum_segments<kGroup, A><<<num_blocks(segments.count() * kGroup, 256), 256, 0, device.stream()>>>(
        segments, heads, lanes_per_head, value, mutable_data<A>(slots), sums);
    CUDA_CHECK_LAUNCH();
  });
  finish_long_rows(device, segments, const_data<A>(slots), heads, sums);
}

}  // namespace gnnsys::cuda
