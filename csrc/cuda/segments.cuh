// Rows of a CSC cut into segments of bounded length, so that one row of a million edges does not keep a kernel waiting.
//
// A row of up to kSegment edges is one segment, worked on whole. A longer one is cut where multiples of kSegment edges
// lie: each stretch of kSegment edges touches at most two long rows (the one its first edge is in and the one its last
// edge is in), so two slots per stretch hold all partial results, and no list of long rows has to be made, scanned or
// told to the host. A second kernel adds up the slots of a row in the order of its edges: the same bits in every run.
#pragma once

#include "cuda/features.cuh"

namespace gnnsys::cuda {

constexpr int64_t kSegment = 1024;

struct Segment {
  int64_t row;    // -1: nothing to do
  int64_t begin;  // edges [begin, end)
  int64_t end;
  int64_t slot;  // where its partial result goes; -1: the row is whole
};

struct Segments {
  const int64_t* indptr;
  int64_t num_rows;
  int64_t num_edges;

  __host__ __device__ int64_t num_slots() const {
    return num_edges <= kSegment ? 0 : 2 * ((num_edges + kSegment - 1) / kSegment);
  }
  // Slots first: what is long should start early.
  __host__ __device__ int64_t count() const { return num_slots() + num_rows; }

  // The row that edge e is in.
  __device__ int64_t row_of(int64_t e) const {
    int64_t lo = 0;
    int64_t hi = num_rows;  // indptr[lo] <= e < indptr[hi]
    while (hi - lo > 1) {
      const int64_t middle = lo + (hi - lo) / 2;
      if (indptr[middle] <= e) {
        lo = middle;
      } else {
        hi = middle;
      }
    }
    return lo;
  }

  __device__ Segment at(int64_t unit) const {
    if (unit >= num_slots()) {
      const int64_t row = unit - num_slots();
      const int64_t begin = indptr[row];
      const int64_t end = indptr[row + 1];
      const bool covers = (row > 0 || begin == 0) && (row + 1 < num_rows || end == num_edges);
      if (begin < 0 || end < begin || end > num_edges || !covers) {
        fault("indptr", begin < 0 || begin > num_edges ? begin : end, num_edges + 1);
      }
      return {end - begin > kSegment ? -1 : row, begin, end, -1};
    }
    const int64_t from = unit / 2 * kSegment;
    const int64_t to = min(from + kSegment, num_edges);
    int64_t row = row_of(from);
    if (unit % 2 == 1) {
      const int64_t last = row_of(to - 1);
      row = last == row ? -1 : last;
    }
    if (row < 0 || indptr[row + 1] - indptr[row] <= kSegment) {
      return {-1, 0, 0, -1};
    }
    return {row, max(from, indptr[row]), min(to, indptr[row + 1]), unit};
  }

  // The slot of a long row behind `slot`: it holds the first edge of the next stretch.
  __device__ int64_t next_slot(int64_t slot) const { return slot / 2 * 2 + 2; }
  // One past the last slot that a long row may have.
  __device__ int64_t end_slot(int64_t row) const { return (indptr[row + 1] - 1) / kSegment * 2 + 2; }
};

// out[row, c] = sum of slots[s, c] over the slots of every long row; a warp per slot, that of a row's first slot works.
template <typename A, typename Out>
__global__ void add_slots(Segments segments, const A* slots, int64_t width, Out* out) {
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (unit >= segments.num_slots()) {
    return;
  }
  const Segment segment = segments.at(unit);
  if (segment.row < 0 || segment.begin != segments.indptr[segment.row]) {
    return;
  }
  const int64_t end = segments.end_slot(segment.row);
  for (int64_t c = threadIdx.x % kWarp; c < width; c += kWarp) {
    A sum = slots[unit * width + c];
    for (int64_t s = segments.next_slot(unit); s < end; s += 2) {
      sum += slots[s * width + c];
    }
    out[segment.row * width + c] = from_sum<Out>(sum);
  }
}

template <typename A, typename Out>
void finish_long_rows(const Device& device, const Segments& segments, const A* slots, int64_t width, Out* out) {
  if (segments.num_slots() > 0 && width > 0) {
    add_slots<<<num_blocks(segments.num_slots() * kWarp, 256), 256, 0, device.stream()>>>(segments, slots, width, out);
    CUDA_CHECK_LAUNCH();
  }
}

}  // namespace gnnsys::cuda
