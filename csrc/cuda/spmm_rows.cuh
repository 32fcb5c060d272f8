// The row kernel of every aggregation: out[v] = reduction over in-edges e = (u, v) of coefficient(e) * x[u].
//
// Bytes: one gathered row of x per edge, the structure once, one written row per destination; no message is stored.
// Lanes: a row of x is read by a group of 4 to 32 lanes, a vector each (two where rows are wide); the groups of a
// sub-warp share a row of out and take its neighbours in turn, kUnroll rows of x on their way to each at a time. The
// sub-warp's lanes load the next ids together and pass them on by shuffle. Wider rows than a warp's vectors are cut
// along blockIdx.y. Heavy rows: spmm_split.cuh; rows of odd lengths: padding.cuh. The order of every sum is fixed by the
// degree and the width that is read.
#pragma once

#include "cuda/spmm_reduce.cuh"
#include "cuda/spmm_split.cuh"

namespace gnnsys::cuda {

constexpr int kRowThreads = 128;  // of a block: small, since a block lives as long as its longest row

// What a neighbour's row is multiplied with.
enum class Factor {
  kOne,     // nothing is read
  kEdge,    // one number per edge: weight, src_scale of its source, or their product
  kHead,    // weight by edge and head, and src_scale
  kPicked,  // weight (any) where `picked` says that this edge gave the feature its value, else 0
};

template <typename T, typename O, typename id_t>
struct Aggregation {
  using A = acc_t<T>;
  const int64_t* indptr;
  const id_t* indices;
  Positions positions;  // of an edge in weight
  int64_t num_rows;
  int64_t num_edges;
  int64_t num_cols;  // rows of x
  uint32_t size;     // values in a row of x and of out
  uint32_t width;    // of a head
  const T* x;
  const T* weight;     // [num_edges, heads]; null: ones
  const A* src_scale;  // null: ones
  const A* dst_scale;  // null: ones
  const int32_t* picked;         // kPicked: which in-edge of a row of x
  const int64_t* picked_indptr;  // kPicked: first in-edge of a row of x
  O* out;
  int32_t* arg;  // extremes: which in-edge
  bool add;      // to what out holds
};

// -- the kernel -----------------------------------------------------------------------------------------------------

// How lanes share rows, chosen at the launch.
struct Layout {
  int num_vectors;     // of a row
  int log2_lanes;      // of a group
  int log2_row_lanes;  // of a sub-warp, which has one row of out
  int rows_each;       // that a sub-warp takes one after the other
};

// One edge as a lane keeps it until its turn comes.
template <typename A, typename id_t, Factor kFactor>
struct Edge {
  id_t source = 0;
  A factor{0};           // kEdge
  int64_t position = 0;  // kHead, kPicked: in weight
  int32_t pick = 0;      // kPicked: the edge's place among the in-edges of its row of x
};

// Ids that point outside. They are replaced by 0, which can be read, and told when the row is done: a call in the loop
// would cost it its registers.
template <typename id_t>
struct Wrong {
  id_t source = 0;
  int64_t position = 0;
};

template <Factor kFactor, typename T, typename O, typename id_t>
__device__ inline Edge<acc_t<T>, id_t, kFactor> read_edge(const Aggregation<T, O, id_t>& a, int64_t e,
                                                            Wrong<id_t>& wrong) {
  using A = acc_t<T>;
  Edge<A, id_t, kFactor> edge;
  edge.source = __ldcs(a.indices + e);
  if (!is_inside(edge.source, a.num_cols)) {
    wrong.source = edge.source;
    edge.source = 0;
  }
  if constexpr (kFactor != Factor::kOne) {
    if (kFactor == Factor::kPicked || a.weight != nullptr) {
      edge.position = a.positions(e);
      if (!is_inside(edge.position, a.num_edges)) {
        wrong.position = edge.position;
        edge.position = 0;
      }
    }
    if constexpr (kFactor == Factor::kEdge) {
      edge.factor = a.weight != nullptr ? to_sum<A>(__ldg(a.weight + edge.position)) : A{1};
      if (a.src_scale != nullptr) {
        edge.factor *= __ldg(a.src_scale + edge.source);
      }
    }
    if constexpr (kFactor == Factor::kPicked) {
      edge.pick = static_cast<int32_t>(edge.position - __ldg(a.picked_indptr + edge.source));
    }
  }
  return edge;
}

// The edge that lane `from` of the sub-warp keeps, without its factor: that arrives later than the source, and rows
// need not wait for it.
template <typename A, typename id_t, Factor kFactor>
__device__ inline Edge<A, id_t, kFactor> pass_edge(unsigned mask, const Edge<A, id_t, kFactor>& mine, int from,
                                                   int row_lanes) {
  Edge<A, id_t, kFactor> edge;
  edge.source = __shfl_sync(mask, mine.source, from, row_lanes);
  if constexpr (kFactor == Factor::kHead || kFactor == Factor::kPicked) {
    edge.position = __shfl_sync(mask, mine.position, from, row_lanes);
    if constexpr (kFactor == Factor::kPicked) {
      edge.pick = __shfl_sync(mask, mine.pick, from, row_lanes);
    }
  }
  return edge;
}

// A lane's part of a row of x on its way: the vector, and what it will be multiplied with.
template <Factor kFactor, typename T, int kBytes>
struct Fetched {
  static constexpr int kValues = Pack<T, kBytes>::kValues;
  Pack<T, kBytes> row;
  acc_t<T> factor{0};
  int32_t picked[kFactor == Factor::kPicked ? kValues : 1];
};

template <Factor kFactor, int kBytes, typename T, typename O, typename id_t>
__device__ inline void fetch(Fetched<kFactor, T, kBytes>& to, const Aggregation<T, O, id_t>& a,
                             const Edge<acc_t<T>, id_t, kFactor>& edge, uint32_t feature) {
  using A = acc_t<T>;
  const uint64_t at = static_cast<uint64_t>(edge.source) * a.size + feature;
  load(to.row, a.x + at);
  if constexpr (kFactor == Factor::kHead || kFactor == Factor::kPicked) {
    to.factor = A{1};
    if (a.weight != nullptr) {
      const uint32_t heads = a.size / a.width;
      to.factor = to_sum<A>(__ldg(a.weight + edge.position * heads + feature / a.width));
    }
    if (a.src_scale != nullptr) {
      to.factor *= __ldg(a.src_scale + edge.source);
    }
    if constexpr (kFactor == Factor::kPicked) {
#pragma unroll
      for (int i = 0; i < Fetched<kFactor, T, kBytes>::kValues; ++i) {
        to.picked[i] = __ldg(a.picked + at + i);
      }
    }
  }
}

template <Factor kFactor, typename Op, typename T, int kBytes>
__device__ inline void accumulate(typename Op::Element (&elements)[Pack<T, kBytes>::kValues], const Op& op,
                                  const Fetched<kFactor, T, kBytes>& fetched, int pick, int offset) {
  using A = acc_t<T>;
#pragma unroll
  for (int i = 0; i < Pack<T, kBytes>::kValues; ++i) {
    A value = to_sum<A>(fetched.row.value[i]);
    if constexpr (kFactor == Factor::kPicked) {
      value = fetched.picked[i] == pick ? fetched.factor * value : A{0};
    } else if constexpr (kFactor != Factor::kOne) {
      value *= fetched.factor;
    }
    op.add(elements[i], value, offset);
  }
}

template <int kValues, typename Op, typename T, typename O, typename id_t>
__device__ inline void finish(const Aggregation<T, O, id_t>& a, int64_t row, uint32_t feature, acc_t<T> scale,
                              const typename Op::Element (&elements)[kValues]) {
  using A = acc_t<T>;
  const int64_t at = row * a.size + feature;
  O values[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    A value = elements[i].value * scale;
    if (a.add) {
      value += to_sum<A>(a.out[at + i]);
    }
    values[i] = from_sum<O>(value);
  }
  store_stream<kValues>(a.out + at, values);
  if constexpr (Op::kExtreme) {
    int32_t args[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      args[i] = elements[i].arg;
    }
    store_stream<kValues>(a.arg + at, args);
  }
}

// Vectors on their way per lane: 64 bytes, at most eight loads.
template <int kBytes, int kTiles>
constexpr int kUnroll = (64 / kBytes < 8 ? 64 / kBytes : 8) / kTiles;

// Blocks that share a multiprocessor, hence registers: 48, 64 or 80. What a row needs only at its end may be spilled.
template <typename Op, int kTiles, Factor kFactor>
constexpr int kRowBlocks = Op::kExtreme || kFactor == Factor::kPicked       ? 6
                           : kFactor == Factor::kOne && kTiles == 1 ? 10
                                                                    : 8;

template <typename Op, int kBytes, int kTiles, Factor kFactor, typename T, typename O, typename id_t>
__global__ void __launch_bounds__(kRowThreads, (kRowBlocks<Op, kTiles, kFactor>))
    aggregate_rows(const Aggregation<T, O, id_t> a, const Op op, const Split split, const Layout layout) {
  using A = acc_t<T>;
  using Element = typename Op::Element;
  constexpr int kValues = Pack<T, kBytes>::kValues;
  constexpr int kAhead = kUnroll<kBytes, kTiles>;

  // The first blocks take parts of heavy rows, a warp each, until there are no more; the others a few rows per sub-warp,
  // one after the other: to begin with a new block for every row takes a while in which nothing is fetched.
  const bool parts = static_cast<int>(blockIdx.x) < split.num_blocks;
  const int log2_row_lanes = parts ? 5 : layout.log2_row_lanes;
  const int row_lanes = 1 << log2_row_lanes;
  const int per_block = kRowThreads >> log2_row_lanes;
  const int64_t block = int64_t{blockIdx.x} - (parts ? 0 : split.num_blocks);
  int left = parts ? 0 : layout.rows_each;
  int64_t item = block * per_block * (parts ? 1 : left) + (threadIdx.x >> log2_row_lanes);
  if (item >= (parts ? split.counts->parts : a.num_rows)) {
    return;
  }

  const int lane = static_cast<int>(threadIdx.x) & (row_lanes - 1);
  const int group = lane >> layout.log2_lanes;
  const int num_groups = row_lanes >> layout.log2_lanes;
  const unsigned first_lane = (threadIdx.x % kWarp) & ~static_cast<unsigned>(row_lanes - 1);
  const unsigned mask = row_lanes == kWarp ? kAllLanes : ((1u << row_lanes) - 1) << first_lane;
  const int group_lanes = 1 << layout.log2_lanes;
  const int vector = static_cast<int>(blockIdx.y) * group_lanes * kTiles + (lane & (group_lanes - 1));
  bool active[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    active[t] = vector + t * group_lanes < layout.num_vectors;
  }

  do {
    int64_t row = item;
    int64_t begin = 0;
    int count = 0;
    int slot = -1;
    int first_offset = 0;  // of the part in its row
    bool is_heavy = false;  // left to those who take parts
    if (parts) {
      const Part part = split.parts[item];
      row = part.row;
      begin = part.begin;
      count = part.count;
      slot = part.slot;
      if constexpr (Op::kExtreme) {
        first_offset = static_cast<int>(begin - a.indptr[row]);
      }
    } else {
      begin = __ldg(a.indptr + row);
      const int64_t end = __ldg(a.indptr + row + 1);
      if (begin < 0 || begin > end || end > a.num_edges) {
        fault("the end of a row in indptr", end, a.num_edges + 1);
      }
      is_heavy = end - begin > split.heavy;
      count = is_heavy ? 0 : static_cast<int>(end - begin);
    }
    const A scale = a.dst_scale != nullptr ? __ldg(a.dst_scale + row) : A{1};

    Element elements[kTiles][kValues];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        elements[t][i] = Op::none();
      }
    }

    Wrong<id_t> wrong;
    Edge<A, id_t, kFactor> mine;
    if (lane < count) {
      mine = read_edge<kFactor>(a, begin + lane, wrong);
    }
    for (int base = 0; base < count; base += row_lanes) {
      Edge<A, id_t, kFactor> next;
      if (base + row_lanes + lane < count) {
        next = read_edge<kFactor>(a, begin + base + row_lanes + lane, wrong);
      }
      const int here = min(row_lanes, count - base);
      for (int k0 = 0; k0 < here; k0 += kAhead * num_groups) {
        Fetched<kFactor, T, kBytes> fetched[kAhead][kTiles];
        int picks[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const int k = k0 + j * num_groups + group;
          const Edge<A, id_t, kFactor> edge = pass_edge(mask, mine, k & (row_lanes - 1), row_lanes);
          picks[j] = edge.pick;
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            if (k < here && active[t]) {
              fetch(fetched[j][t], a, edge, static_cast<uint32_t>(vector + t * group_lanes) * kValues);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const int k = k0 + j * num_groups + group;
          if constexpr (kFactor == Factor::kEdge) {
            const A factor = __shfl_sync(mask, mine.factor, k & (row_lanes - 1), row_lanes);
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
              fetched[j][t].factor = k < here ? factor : A{0};
            }
          }
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            if (k < here || !Op::kExtreme) {  // to a sum, a row that was not fetched adds 0
              accumulate(elements[t], op, fetched[j][t], picks[j], first_offset + base + k);
            }
          }
        }
      }
      mine = next;
    }

#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      for (int distance = group_lanes; distance < row_lanes; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          op.merge(elements[t][i], Op::exchange(mask, elements[t][i], distance));
        }
      }
      const auto feature = static_cast<uint32_t>(vector + t * group_lanes) * kValues;
      if (active[t] && group == 0 && !is_heavy) {
        if (slot < 0) {
          finish<kValues, Op>(a, row, feature, scale, elements[t]);
        } else {
          Element* const partial = static_cast<Element*>(split.partials) + int64_t{slot} * a.size + feature;
#pragma unroll
          for (int i = 0; i < kValues; ++i) {
            partial[i] = elements[t][i];
          }
        }
      }
    }
    if (wrong.source != 0) {
      fault("indices", wrong.source, a.num_cols);
    }
    if (wrong.position != 0) {
      fault("positions", wrong.position, a.num_edges);
    }
    --left;
    item += parts ? int64_t{split.num_blocks} * per_block : per_block;
  } while (left != 0 && item < (parts ? split.counts->parts : a.num_rows));
}

// -- the second pass over heavy rows --------------------------------------------------------------------------------

constexpr int kMergeWarps = 8;

// A block takes 32 features of a cut row; its warps take the row's parts in turn, and the first merges what they have.
template <typename Op, typename T, typename O, typename id_t>
__global__ void __launch_bounds__(kMergeWarps * kWarp)
    merge_parts(const Aggregation<T, O, id_t> a, const Op op, const Split split) {
  using A = acc_t<T>;
  using Element = typename Op::Element;
  __shared__ Element found[kMergeWarps][kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t num_columns = (a.size + kWarp - 1) / kWarp;
  const int64_t num_items = split.counts->rows * num_columns;
  for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const CutRow cut = split.rows[item / num_columns];
    const auto feature = static_cast<uint32_t>(item % num_columns) * kWarp + lane;
    Element element = Op::none();
    if (feature < a.size) {
      const Element* const first = static_cast<const Element*>(split.partials) + int64_t{cut.slot} * a.size + feature;
#pragma unroll 8
      for (int part = warp; part < cut.num_parts; part += kMergeWarps) {
        op.merge(element, first[int64_t{part} * a.size]);
      }
    }
    found[warp][lane] = element;
    __syncthreads();
    if (warp == 0 && feature < a.size) {
      for (int other = 1; other < kMergeWarps; ++other) {
        op.merge(element, found[other][lane]);
      }
      const A scale = a.dst_scale != nullptr ? a.dst_scale[cut.row] : A{1};
      const Element only[1] = {element};
      finish<1, Op>(a, cut.row, feature, scale, only);
    }
    __syncthreads();
  }
}

}  // namespace gnnsys::cuda
