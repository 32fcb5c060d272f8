// Finding heavy rows: one read of indptr, 8 bytes per row.
#include "cuda/spmm_split.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace gnnsys::cuda {
namespace {

constexpr int kThreads = 256;

// One thread looks at a row; the warp writes the parts of each heavy one together.
__global__ void find_heavy_rows(const int64_t* __restrict__ indptr, int64_t num_rows, int64_t num_edges, Split split) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t begin = 0;
  int64_t end = 0;
  if (row < num_rows) {
    begin = indptr[row];
    end = indptr[row + 1];
    if (begin < 0 || begin > end || end > num_edges) {  // lists have room for rows that do not overlap
      fault("the end of a row in indptr", end, num_edges + 1);
    }
  }
  for (unsigned heavy = __ballot_sync(kAllLanes, end - begin > split.heavy); heavy != 0; heavy &= heavy - 1) {
    const int source = __ffs(static_cast<int>(heavy)) - 1;
    const int64_t first_edge = __shfl_sync(kAllLanes, begin, source);
    const int64_t degree = __shfl_sync(kAllLanes, end, source) - first_edge;
    const int64_t heavy_row = row - lane + source;
    const auto num_parts = static_cast<int32_t>((degree + split.part - 1) / split.part);
    int32_t first_part = 0;
    int32_t first_slot = -1;
    if (lane == 0) {
      first_part = atomicAdd(&split.counts->parts, num_parts);
      if (num_parts > 1) {
        first_slot = atomicAdd(&split.counts->slots, num_parts);
        split.rows[atomicAdd(&split.counts->rows, 1)] = {heavy_row, first_slot, num_parts};
      }
    }
    first_part = __shfl_sync(kAllLanes, first_part, 0);
    first_slot = __shfl_sync(kAllLanes, first_slot, 0);
    for (int32_t k = lane; k < num_parts; k += kWarp) {
      const int64_t offset = k * split.part;
      const int64_t count = min(split.part, degree - offset);
      split.parts[first_part + k] = {heavy_row, first_edge + offset, static_cast<int32_t>(count),
                                     first_slot < 0 ? -1 : first_slot + k};
    }
  }
}

Tuning read_tuning() {
  Tuning t;
  if (const char* const text = std::getenv("GNNSYS_SPMM_TUNING")) {
    long long heavy = t.heavy;
    long long part = t.part;
    long long max_parts = t.max_parts;
    std::sscanf(text, "%d,%lld,%lld,%lld,%d,%d", &t.row_lanes, &heavy, &part, &max_parts, &t.blocks, &t.rows);
    t.row_lanes = std::clamp(t.row_lanes, 4, kWarp);
    t.heavy = std::clamp<int64_t>(heavy, 1, 1 << 30);
    t.part = std::clamp<int64_t>(part, 1, 1 << 30);
    t.max_parts = std::clamp<int64_t>(max_parts, 1, 1 << 24);
    t.blocks = std::clamp(t.blocks, 1, 32);
    t.rows = std::clamp(t.rows, 1, 1 << 20);
  }
  return t;
}

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

const Tuning& tuning() {
  static const Tuning t = read_tuning();
  return t;
}

RowSplit::RowSplit(const Device& device, const int64_t* indptr, int64_t num_rows, int64_t num_edges, int64_t size,
                   int64_t element_bytes, int threads) {
  const Tuning& t = tuning();
  split_.heavy = t.heavy;
  split_.part = std::max(t.part, (num_edges + t.max_parts - 1) / t.max_parts);
  if (num_edges <= split_.heavy) {
    return;
  }
  // A row of d edges has at most d / part + 1 parts; it is cut when d > part, and then 2 d / part bounds its parts.
  const int64_t parts = num_edges / split_.part + num_edges / (split_.heavy + 1) + 1;
  const int64_t slots = 2 * (num_edges / split_.part) + 2;
  const int64_t rows = num_edges / (split_.part + 1) + 1;
  const int64_t at_parts = aligned(sizeof(SplitCounts));
  const int64_t at_rows = at_parts + aligned(parts * static_cast<int64_t>(sizeof(Part)));
  const int64_t at_partials = at_rows + aligned(rows * static_cast<int64_t>(sizeof(CutRow)));
  memory_ = device.workspace<char>(at_partials + slots * size * element_bytes);
  char* const memory = mutable_data<char>(*memory_);
  split_.counts = reinterpret_cast<SplitCounts*>(memory);
  split_.parts = reinterpret_cast<Part*>(memory + at_parts);
  split_.rows = reinterpret_cast<CutRow*>(memory + at_rows);
  split_.partials = memory + at_partials;
  split_.num_blocks = static_cast<int>(std::min<int64_t>(int64_t{device.num_processors()} * t.blocks,
                                                         num_blocks(parts, threads / kWarp)));
  CUDA_CHECK(cudaMemsetAsync(split_.counts, 0, sizeof(SplitCounts), device.stream()));
  const unsigned blocks = num_blocks(num_rows, kThreads);
  find_heavy_rows<<<blocks, kThreads, 0, device.stream()>>>(indptr, num_rows, num_edges, split_);
  CUDA_CHECK_LAUNCH();
}

}  // namespace gnnsys::cuda
