// Heavy rows in parts: what the row kernels of spmm and spmm_extreme need so that one row of a million edges does not
// keep a single warp busy while the device waits.
//
// A row with more than `heavy` edges is left out of the pass over rows and cut into parts of up to `part` edges, which
// warps take from a list on the device. Parts of one row leave partial results in workspace, and a second pass merges
// them in the order of the edges: the place of a part in the list depends on the order of threads, no result does. The
// host never learns how many there are: lists have the size that num_edges allows, kernels the grid of the device.
#pragma once

#include "cuda/features.cuh"

namespace gnnsys::cuda {

// All launch parameters. GNNSYS_SPMM_TUNING="row_lanes,heavy,part,max_parts,blocks,rows" overrides them, for
// measurements.
struct Tuning {
  int row_lanes = 16;         // that share a row of out, at least: short rows need many in flight more than many lanes
  int64_t heavy = 256;        // a row with more edges is left to warps of its own
  int64_t part = 512;         // edges of a part, at least
  int64_t max_parts = 32768;  // of whole parts, so that partial results stay small: parts grow with the graph
  int blocks = 10;            // per multiprocessor that look for parts before rows start
  int rows = 8;               // that lanes take one after the other, at most
};

const Tuning& tuning();

struct Part {
  int64_t row;
  int64_t begin;  // edge
  int32_t count;
  int32_t slot;  // of its partial result; -1: the part is the whole row
};

struct CutRow {
  int64_t row;
  int32_t slot;  // of its first part; the others follow
  int32_t num_parts;
};

struct SplitCounts {
  int32_t parts;
  int32_t slots;
  int32_t rows;
  int32_t unused;
};

// As kernels see it.
struct Split {
  int64_t heavy;
  int64_t part;
  int num_blocks;  // 0: no row can be heavy
  SplitCounts* counts;
  Part* parts;
  CutRow* rows;
  void* partials;  // [slots, size] elements
};

// Finds the heavy rows (two small kernels' worth: indptr is read once), and keeps the workspace.
class RowSplit {
 public:
  // `element_bytes`: of one partial result of one feature; `threads`: of a block of the row kernel.
  RowSplit(const Device& device, const int64_t* indptr, int64_t num_rows, int64_t num_edges, int64_t size,
           int64_t element_bytes, int threads);

  const Split& view() const { return split_; }

 private:
  std::optional<Tensor> memory_;
  Split split_{};
};

}  // namespace gnnsys::cuda
