// edges_within on the device: the in-edges of some columns whose source is in a list; bit-equal to cpu/induced.cpp.
//
// With trees, a node is known by (tree, id). The list goes into a hash table; one pass over the columns' in-edges counts
// those that are found there, the host reads size and faults once, a second pass writes. Work: two random reads of 16
// bytes per in-edge of the columns, and three where it is taken; rows of any length (sample_filter.cuh).
#include "common/register.h"
#include "common/tensors.h"
#include "cuda/arguments.h"
#include "cuda/columns.cuh"
#include "cuda/first_place.cuh"
#include "cuda/group.cuh"
#include "cuda/sample_filter.cuh"

#include <optional>
#include <tuple>

namespace gnnsys::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kIdBits = 40;
constexpr int64_t kMostTrees = int64_t{1} << 23;

// Read by the host once; all ones at the start.
struct WithinReport {
  ColumnReport columns;  // bad_source: place of a source that is no id
  word_t bad_dst_tree;   // places of trees that are out of range
  word_t bad_src_tree;
  word_t bad_exclude;
};

__device__ inline int64_t tree_key(const int64_t* trees, int64_t i) { return trees ? trees[i] << kIdBits : 0; }

__device__ inline bool is_tree(const int64_t* trees, int64_t i, word_t* fault) {
  if (trees == nullptr || (trees[i] >= 0 && trees[i] < kMostTrees)) {
    return true;
  }
  atomicMin(fault, static_cast<word_t>(i));
  return false;
}

template <typename source_t>
__global__ void __launch_bounds__(kThreads)
    list_sources(const source_t* sources, const int64_t* trees, int64_t size, const int64_t* exclude,
                 int64_t num_exclude, FirstPlace table, WithinReport* report) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t e = i; e + 1 < num_exclude; e += threads) {
    if (exclude[e] > exclude[e + 1]) {
      report->bad_exclude = 0;
    }
  }
  if (i >= size || !is_tree(trees, i, &report->bad_src_tree)) {
    return;
  }
  const auto node = static_cast<int64_t>(sources[i]);
  if (node >= int64_t{1} << kIdBits) {
    atomicMin(&report->columns.bad_source, static_cast<word_t>(i));
  } else if (node >= 0) {  // a negative id is a place that nobody has
    table.insert(tree_key(trees, i) | node, i);
  }
}

template <typename node_t, typename id_t>
struct WithinList {
  static constexpr bool kSums = false;
  Columns<node_t> columns;
  const int64_t* trees;
  const id_t* indices;
  FirstPlace places;
  const int64_t* exclude;
  int64_t num_exclude;
  WithinReport* report;
  int64_t num_rows;

  __device__ void row(int64_t i, int64_t* begin, int64_t* end) const {
    columns.row(i, begin, end);
    if (!is_tree(trees, i, &report->bad_dst_tree)) {
      *begin = *end = 0;
    }
  }
  __device__ int64_t place(int64_t i, int64_t p) const {
    return places(tree_key(trees, i) | static_cast<int64_t>(indices[p]));
  }
  __device__ bool keep(int64_t i, int64_t p) const { return place(i, p) >= 0 && !is_excluded(p); }
  __device__ bool is_excluded(int64_t p) const {
    if (num_exclude == 0) {
      return false;
    }
    const int64_t at = lower_bound(exclude, 0, num_exclude, p);
    return at < num_exclude && exclude[at] == p;
  }
  __device__ double quantity(int64_t, int64_t) const { return 0; }
};

template <typename Filter>
struct EmitPlace {
  Filter filter;
  int64_t* places;
  int64_t* positions;

  __device__ void operator()(int64_t i, int64_t p, int64_t slot, int64_t) const {
    places[slot] = filter.place(i, p);
    positions[slot] = p;
  }
};

using Result = std::tuple<Tensor, Tensor, Tensor>;

void check_tree(const Device& device, const int64_t* trees, word_t bad, const char* name) {
  if (bad != kNoFault) {
    CHECK_ARG(false, name, " must be in [0, ", kMostTrees, "), got ", read_one(device, trees + bad), " at position ",
              static_cast<int64_t>(bad));
  }
}

template <typename node_t, typename id_t>
Result find_within(const Device& device, const Tensor& indptr, const Tensor& indices, const Tensor& dst,
                   const int64_t* dst_tree, const Tensor& src, const int64_t* src_tree, const int64_t* exclude,
                   int64_t num_exclude) {
  const Tensor reports = device.workspace<WithinReport>(1);
  auto* const report = mutable_data<WithinReport>(reports);
  CUDA_CHECK(cudaMemsetAsync(report, 0xFF, sizeof(WithinReport), device.stream()));
  const int bits = FirstPlace::bits_for(src.numel());
  const Tensor slots = device.workspace<Slot>(int64_t{1} << bits);
  const FirstPlace places = FirstPlace::clear(device, slots, bits);
  dispatch_ids(src, [&](auto source) {
    list_sources<<<num_blocks(src.numel(), kThreads), kThreads, 0, device.stream()>>>(
        const_data<decltype(source)>(src), src_tree, src.numel(), exclude, num_exclude, places, report);
    CUDA_CHECK_LAUNCH();
  });
  const auto columns = make_columns<node_t>(indptr, indices, dst, &report->columns);
  const WithinList<node_t, id_t> filter{columns, dst_tree,    const_data<id_t>(indices), places,
                                        exclude, num_exclude, report,                    dst.numel()};
  const Tensor offsets = device.empty({dst.numel() + 1}, ScalarType::Long);
  auto* const offset = mutable_data<int64_t>(offsets);
  count_rows(device, filter, offset, nullptr);
  exclusive_sum(device, dst.numel(), CountsAt<int64_t>{offset}, offset,
                reinterpret_cast<int64_t*>(&report->columns.total));
  WithinReport read;
  device.read(reinterpret_cast<word_t*>(&read), reinterpret_cast<const word_t*>(report), sizeof(read) / sizeof(word_t));
  check_columns(device, columns, read.columns, "dst");
  check_tree(device, dst_tree, read.bad_dst_tree, "dst_tree");
  check_tree(device, src_tree, read.bad_src_tree, "src_tree");
  CHECK_ARG(read.bad_exclude == kNoFault, "exclude must ascend");
  if (read.columns.bad_source != kNoFault) {
    dispatch_ids(src, [&](auto source) {
      CHECK_ARG(false, "src must be below 2^", kIdBits, ", got ",
                static_cast<int64_t>(read_one(device, const_data<decltype(source)>(src) + read.columns.bad_source)));
    });
  }
  const auto total = static_cast<int64_t>(read.columns.total);
  const Tensor found = device.empty({total}, ScalarType::Long);
  const Tensor positions = device.empty({total}, ScalarType::Long);
  if (total > 0) {
    collect_rows(device, filter, offset,
                 EmitPlace<WithinList<node_t, id_t>>{filter, mutable_data<int64_t>(found),
                                                     mutable_data<int64_t>(positions)});
  }
  return {offsets, found, positions};
}

Result edges_within(const Tensor& indptr, const Tensor& indices, const Tensor& dst, std::optional<Tensor> dst_tree,
                    const Tensor& src, std::optional<Tensor> src_tree, std::optional<Tensor> exclude) {
  CHECK_ARG(dst.is_cuda(), "dst must be on the device, like the other tensors");
  const Device device(dst);
  check_csc(indptr, indices, device);
  check_ids(dst, device, "dst");
  check_ids(src, device, "src");
  CHECK_ARG(dst_tree.has_value() == src_tree.has_value(), "dst_tree and src_tree go together");
  const int64_t* const of_dst = optional_int64(dst_tree, device, Where::kDevice, dst.numel(), "dst_tree");
  const int64_t* const of_src = optional_int64(src_tree, device, Where::kDevice, src.numel(), "src_tree");
  const int64_t* const excluded = optional_int64(exclude, device, Where::kDevice, -1, "exclude");
  const int64_t num_excluded = exclude ? exclude->numel() : 0;
  return dispatch_ids(dst, [&](auto node) {
    using node_t = decltype(node);
    return dispatch_ids(indices, [&](auto id) {
      return find_within<node_t, decltype(id)>(device, indptr, indices, dst, of_dst, src, of_src, excluded,
                                               num_excluded);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "edges_within", &edges_within); }

}  // namespace gnnsys::cuda
