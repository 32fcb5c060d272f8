// What sample_hops keeps of each hop, where it keeps it, and how hops are put together in the end.
#pragma once

#include "cuda/group.cuh"
#include "cuda/sample_contiguous.cuh"
#include "cuda/sample_labor.cuh"

#include <vector>

namespace gnnsys::cuda {

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

// Nodes of one type that a hop has as seeds: those that the hop before was the first to see.
template <typename id_t>
struct Frontier {
  const id_t* ids = nullptr;
  int64_t size = 0;   // a bound until the host has read the number
  int64_t first = 0;  // local id of the first
};

// One relation in one hop: how the seeds are counted, then the edges it takes.
template <typename id_t>
struct HopEdges {
  bool is_counted = false;  // else it takes no edges, and there is nothing below
  word_t* count_words = nullptr;
  Row* rows = nullptr;
  LaborRow* labor_rows = nullptr;  // in place of rows, where LABOR draws
  int64_t* offsets = nullptr;

  int64_t total = 0;
  id_t* neighbors = nullptr;
  int64_t* positions = nullptr;
  int64_t* local = nullptr;
  uint32_t* slot_of = nullptr;
};

// A pointer's memory is kept by the walk.
template <typename id_t>
struct Hop {
  std::vector<Frontier<id_t>> frontiers;  // per node type
  std::vector<HopEdges<id_t>> edges;      // per relation
};

// What the host reads before a hop, in one piece: how numbering went in the hop before, and of each relation how many
// edges it takes. Words of the device's memory, or of a copy on the host.
struct Told {
  word_t* words;
  int64_t num_types;

  static int64_t num_words(int64_t num_types, int64_t num_relations) {
    return 1 + num_types + num_relations * kReportWords;
  }

  word_t* fault() const { return words; }
  word_t* fresh() const { return words + 1; }  // [num_types], all ones where a type had no lists
  Report* report(size_t relation) const {
    return reinterpret_cast<Report*>(words + 1 + num_types + static_cast<int64_t>(relation) * kReportWords);
  }
};

// -- putting hops together -------------------------------------------------------------------------------------------

constexpr int kMostPieces = 32;  // of a launch: they travel as its arguments

// The edges of one relation and hop, and where they are written to. A tile is kEdgeTile of them.
struct EdgePiece {
  const int64_t* offsets;
  int64_t num_seeds;
  int64_t total;
  int64_t first;  // local id of the first seed
  const int64_t* local;
  const int64_t* positions;
  const LaborRow* labor_rows;  // null: no weights
  const void* edge_ids;        // null: positions
  int64_t* row;
  int64_t* col;
  int64_t* edge;
  float* weight;
  uint32_t end_tile;  // of this piece and those before it
  bool wide_edge_ids;
};

struct EdgePieces {
  EdgePiece pieces[kMostPieces];
  int count;
};

static_assert(sizeof(EdgePieces) <= 4096, "all that a launch takes as arguments");

static __global__ void __launch_bounds__(kGroupThreads) join_edges_kernel(const __grid_constant__ EdgePieces all) {
  int p = 0;
  while (p + 1 < all.count && blockIdx.x >= all.pieces[p].end_tile) {
    ++p;
  }
  const EdgePiece& piece = all.pieces[p];
  const uint32_t first_tile = p == 0 ? 0 : all.pieces[p - 1].end_tile;
  for_each_edge_of_tile(
      static_cast<int64_t>(blockIdx.x - first_tile), piece.offsets, piece.num_seeds, piece.total,
      [&](int64_t at, int64_t seed) {
        if (piece.labor_rows != nullptr) {
          piece.weight[at] = piece.labor_rows[seed].weight;
        }
        piece.row[at] = piece.local[at];
        piece.col[at] = piece.first + seed;
        int64_t edge = piece.positions[at];
        if (piece.edge_ids != nullptr) {
          edge = piece.wide_edge_ids ? static_cast<const int64_t*>(piece.edge_ids)[edge]
                                     : static_cast<const int32_t*>(piece.edge_ids)[edge];
        }
        piece.edge[at] = edge;
      });
}

// Launches what there is and begins anew.
inline void launch_join(const Device& device, EdgePieces& all) {
  if (all.count > 0) {
    join_edges_kernel<<<all.pieces[all.count - 1].end_tile, kGroupThreads, 0, device.stream()>>>(all);
    CUDA_CHECK_LAUNCH();
    all.count = 0;
  }
}

// Ids of node types and hops, and where they are written to.
template <typename id_t>
struct NodePieces {
  const id_t* ids[kMostPieces];
  int64_t* to[kMostPieces];
  int64_t ends[kMostPieces];  // of this piece and those before it
  int count;
};

template <typename id_t>
__global__ void __launch_bounds__(kGroupThreads) join_nodes_kernel(const __grid_constant__ NodePieces<id_t> all) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  int64_t begin = 0;
  for (int p = 0; p < all.count; ++p) {
    if (at >= begin && at < all.ends[p]) {
      all.to[p][at - begin] = all.ids[p][at - begin];
    }
    begin = all.ends[p];
  }
}

template <typename id_t>
void launch_join(const Device& device, NodePieces<id_t>& all) {
  if (all.count > 0) {
    const unsigned blocks = num_blocks(all.ends[all.count - 1], kGroupThreads);
    join_nodes_kernel<<<blocks, kGroupThreads, 0, device.stream()>>>(all);
    CUDA_CHECK_LAUNCH();
    all.count = 0;
  }
}

}  // namespace gnnsys::cuda
