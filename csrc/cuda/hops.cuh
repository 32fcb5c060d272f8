// What sample_hops keeps of each hop, where it keeps it, and how hops are put together in the end.
#pragma once

#include "cuda/group.cuh"
#include "cuda/sample_contiguous.cuh"
#include "cuda/sample_labor.cuh"

namespace gnnsys::cuda {

// What the host reads before a hop: how many edges it takes, and how numbering went in the hop before.
struct Told {
  Report report;
  word_t fault;
  word_t fresh;
};

// Gives arrays their places in one piece of memory, each at a multiple of 16 bytes. Without memory it only measures.
struct Places {
  char* memory;
  int64_t size = 0;

  template <typename T>
  T* take(int64_t count) {
    char* const at = memory == nullptr ? nullptr : memory + size;
    size += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return reinterpret_cast<T*>(at);
  }
};

// One hop: its seeds and how they are counted, then the edges it takes. A pointer's memory is kept by the walk.
template <typename id_t>
struct Hop {
  const id_t* seeds = nullptr;
  int64_t num_seeds = 0;
  int64_t first = 0;  // local id of the first seed
  word_t* count_words = nullptr;
  Row* rows = nullptr;
  LaborRow* labor_rows = nullptr;  // in place of rows, where LABOR draws
  int64_t* offsets = nullptr;

  int64_t total = 0;
  word_t* number_words = nullptr;
  id_t* neighbors = nullptr;
  int64_t* positions = nullptr;
  int64_t* local = nullptr;
  uint32_t* slot_of = nullptr;
};

// -- putting hops together -------------------------------------------------------------------------------------------

template <typename edge_t>
__global__ void __launch_bounds__(kGroupThreads)
    join_edges_kernel(const int64_t* offsets, int64_t num_seeds, int64_t total, int64_t first, const int64_t* local,
                      const int64_t* positions, const LaborRow* labor_rows, const edge_t* edge_ids, int64_t* row,
                      int64_t* col, int64_t* edge, float* weight) {
  for_each_edge(offsets, num_seeds, total, [&](int64_t at, int64_t seed) {
    if (labor_rows != nullptr) {
      weight[at] = labor_rows[seed].weight;
    }
    row[at] = local[at];
    col[at] = first + seed;
    edge[at] = edge_ids == nullptr ? positions[at] : static_cast<int64_t>(edge_ids[positions[at]]);
  });
}

// Ids of several hops behind each other; ends[p] is where piece p ends.
template <typename id_t>
struct Pieces {
  static constexpr int kMost = 8;
  const id_t* ids[kMost];
  int64_t ends[kMost];
  int count;
};

template <typename id_t>
__global__ void __launch_bounds__(kGroupThreads) join_nodes_kernel(const __grid_constant__ Pieces<id_t> pieces,
                                                                   int64_t* nodes) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  int64_t begin = 0;
  for (int p = 0; p < pieces.count; ++p) {
    if (at >= begin && at < pieces.ends[p]) {
      nodes[at] = pieces.ids[p][at - begin];
    }
    begin = pieces.ends[p];
  }
}

}  // namespace gnnsys::cuda
