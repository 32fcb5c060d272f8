// Making and turning CSC on the device: coo -> csc, transpose, and the check that a CSC is one.
//
// Grouping edges by an endpoint is a stable radix sort of (endpoint, position), as many bits of it as there are groups;
// the groups' bounds are then searched in the sorted endpoints. Bytes per edge with 32-bit ids: 16 a pass of eight
// bits, and 28 before and after.
#include "common/register.h"
#include "cuda/group.cuh"
#include "cuda/sort.h"

#include "common/tensors.h"

#include <limits>
#include <tuple>

namespace gnnsys::cuda {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr uint64_t kNowhere = ~uint64_t{0};
using word_t = unsigned long long;  // the type that CUDA's 64-bit atomics take

// -- sorting positions by endpoint -----------------------------------------------------------------------------------

template <typename T, typename in_t>
__global__ void __launch_bounds__(kGroupThreads) keys_kernel(const in_t* ids, int64_t size, T* keys, T* positions) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  if (at < size) {
    positions[at] = static_cast<T>(at);
    if (keys != nullptr) {
      keys[at] = static_cast<T>(ids[at]);
    }
  }
}

// The same for a CSC's row indices, which are checked, and the column of each edge.
template <typename T, typename in_t, typename id_t>
__global__ void __launch_bounds__(kGroupThreads)
    columns_kernel(const int64_t* indptr, int64_t num_columns, const in_t* indices, int64_t num_edges, int64_t num_rows,
                   T* keys, T* positions, id_t* columns) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && (indptr[0] != 0 || indptr[num_columns] != num_edges)) {
    printf("gnnsys: indptr must run from 0 to len(indices) = %lld, got %lld to %lld\n",
           static_cast<long long>(num_edges), static_cast<long long>(indptr[0]),
           static_cast<long long>(indptr[num_columns]));
    __trap();
  }
  for_each_edge(indptr, num_columns, num_edges, [&](int64_t edge, int64_t column) {
    const int64_t row = indices[edge];
    if (row < 0 || row >= num_rows) {
      fault("indices", row, num_rows);
    }
    positions[edge] = static_cast<T>(edge);
    columns[edge] = static_cast<id_t>(column);
    if (keys != nullptr) {
      keys[edge] = static_cast<T>(row);
    }
  });
}

// After the sort: the first blocks find the groups' bounds, the others fetch each edge's other endpoint.
template <typename T, typename in_t, typename id_t, typename pos_t>
__global__ void __launch_bounds__(kGroupThreads)
    groups_kernel(const T* sorted_keys, const T* order, int64_t num_edges, int64_t num_groups, int64_t num_bound_blocks,
                  int64_t* indptr, const in_t* others, id_t* values, pos_t* positions) {
  const int64_t block = blockIdx.x;
  if (block < num_bound_blocks) {
    find_bounds(sorted_keys, num_edges, num_groups, block * kGroupThreads, indptr);
    return;
  }
  const int64_t begin = (block - num_bound_blocks) * kEdgeTile + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kEdgesPerThread; ++i) {
    const int64_t at = begin + i * kGroupThreads;
    if (at < num_edges) {
      const T from = order[at];
      values[at] = static_cast<id_t>(others[from]);
      if (positions != nullptr) {
        positions[at] = static_cast<pos_t>(from);
      }
    }
  }
}

struct Grouped {
  Tensor indptr;
  Tensor values;
  Tensor positions;
};

// Keys and positions of edges, before and after their sort.
template <typename T>
struct Sorting {
  Tensor keys;  // empty where the ids themselves are keys
  Tensor positions;
  Tensor sorted_keys;
  Tensor order;  // also the output where it is of that width

  Sorting(const Device& device, int64_t size, bool ids_are_keys, bool order_is_output)
      : keys(device.workspace<T>(ids_are_keys ? 0 : size)),
        positions(device.workspace<T>(size)),
        sorted_keys(device.workspace<T>(size)),
        order(order_is_output ? device.empty({size}, ScalarType::Int) : device.workspace<T>(size)) {}
};

template <typename T>
T* data_of(const Tensor& workspace) {
  return static_cast<T*>(workspace.mutable_data_ptr());
}

// prepare(id, key, keys, positions) -> the other endpoints of the edges, a tensor of ids that it may have made.
template <typename in_t, typename id_t, typename pos_t, typename T, typename Prepare>
Grouped group_as(const Device& device, const Tensor& ids, int64_t num_groups, const Prepare& prepare) {
  const int64_t num_edges = ids.numel();
  constexpr bool kIdsAreKeys = sizeof(in_t) == sizeof(T);
  constexpr bool kOrderIsOutput = sizeof(T) == 4 && sizeof(pos_t) == 4;
  const Sorting<T> sorting(device, num_edges, kIdsAreKeys, kOrderIsOutput);
  T* const keys = kIdsAreKeys ? nullptr : data_of<T>(sorting.keys);
  const Tensor others = prepare(id_t{}, keys, data_of<T>(sorting.positions));
  const T* const key_of = kIdsAreKeys ? reinterpret_cast<const T*>(ids.const_data_ptr()) : keys;
  sort_pairs<T>(device, key_of, data_of<T>(sorting.sorted_keys), data_of<T>(sorting.positions),
                data_of<T>(sorting.order), num_edges, num_key_bits<T>(num_groups));
  Grouped out{device.empty({num_groups + 1}, ScalarType::Long), device.empty({num_edges}, id_type<id_t>()),
              kOrderIsOutput ? sorting.order : device.empty({num_edges}, id_type<pos_t>())};
  const int64_t bound_blocks = num_blocks(num_groups + 1, kGroupThreads);
  const int64_t edge_blocks = (num_edges + kEdgeTile - 1) / kEdgeTile;
  const auto finish = [&](auto other) {
    using other_t = decltype(other);
    groups_kernel<T, other_t, id_t, pos_t>
        <<<static_cast<unsigned>(bound_blocks + edge_blocks), kGroupThreads, 0, device.stream()>>>(
            data_of<T>(sorting.sorted_keys), data_of<T>(sorting.order), num_edges, num_groups, bound_blocks,
            mutable_data<int64_t>(out.indptr), const_data<other_t>(others), mutable_data<id_t>(out.values),
            kOrderIsOutput ? nullptr : mutable_data<pos_t>(out.positions));
    CUDA_CHECK_LAUNCH();
  };
  dispatch_ids(others, finish);
  return out;
}

// Ids as asked for, positions no narrower than the number of edges needs, sorted in 32 bits where everything fits.
template <typename in_t, typename Prepare>
Grouped group(const Device& device, const Tensor& ids, int64_t num_groups, bool narrow, const Prepare& prepare) {
  const bool small = ids.numel() <= kInt32Max && (sizeof(in_t) == 4 || num_groups <= int64_t{1} << 32);
  if (!narrow) {
    return small ? group_as<in_t, int64_t, int64_t, uint32_t>(device, ids, num_groups, prepare)
                 : group_as<in_t, int64_t, int64_t, uint64_t>(device, ids, num_groups, prepare);
  }
  if (ids.numel() > kInt32Max) {
    return group_as<in_t, int32_t, int64_t, uint64_t>(device, ids, num_groups, prepare);
  }
  return small ? group_as<in_t, int32_t, int32_t, uint32_t>(device, ids, num_groups, prepare)
               : group_as<in_t, int32_t, int32_t, uint64_t>(device, ids, num_groups, prepare);
}

// -- checks that tell the host ---------------------------------------------------------------------------------------

// One entry, wherever the tensor is: for a message.
int64_t entry(const Device& device, const Tensor& ids, int64_t at) {
  return dispatch_ids(ids, [&](auto id) {
    decltype(id) value = 0;
    const auto* from = const_data<decltype(id)>(ids) + at;
    if (ids.is_cuda()) {
      device.read(&value, from, 1);
    } else {
      value = *from;
    }
    return static_cast<int64_t>(value);
  });
}

void check_no_bad_id(const Device& device, const Tensor& ids, uint64_t bad, int64_t limit, const char* name) {
  if (bad != kNowhere) {
    const auto at = static_cast<int64_t>(bad);
    CHECK_ARG(false, name, " must be in [0, ", limit, "), got ", entry(device, ids, at), " at position ", at);
  }
}

// found: the first bad src, the first bad dst, and whether (0) dst ever descends.
template <typename in_t>
__global__ void __launch_bounds__(kGroupThreads)
    coo_kernel(const in_t* src, const in_t* dst, int64_t size, int64_t num_src, int64_t num_dst, word_t* found) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  if (at >= size) {
    return;
  }
  if (src[at] < 0 || src[at] >= num_src) {
    atomicMin(found, static_cast<word_t>(at));
  }
  if (dst[at] < 0 || dst[at] >= num_dst) {
    atomicMin(found + 1, static_cast<word_t>(at));
  }
  if (at > 0 && dst[at - 1] > dst[at]) {
    found[2] = 0;  // everyone who writes writes this
  }
}

// found: the first entry of indptr below the one before it, the first bad index, and the two ends of indptr.
template <typename in_t>
__global__ void __launch_bounds__(kGroupThreads)
    csc_kernel(const int64_t* indptr, int64_t num_columns, const in_t* indices, int64_t num_edges, int64_t num_rows,
               word_t* found) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  if (at < num_columns && indptr[at] > indptr[at + 1]) {
    atomicMin(found, static_cast<word_t>(at + 1));
  }
  if (at < num_edges && (indices[at] < 0 || indices[at] >= num_rows)) {
    atomicMin(found + 1, static_cast<word_t>(at));
  }
  if (at == 0) {
    found[2] = static_cast<word_t>(indptr[0]);
    found[3] = static_cast<word_t>(indptr[num_columns]);
  }
}

template <int kWords>
Tensor all_bits_set(const Device& device) {
  const Tensor words = device.workspace<word_t>(kWords);
  CUDA_CHECK(cudaMemsetAsync(words.mutable_data_ptr(), 0xFF, kWords * sizeof(word_t), device.stream()));
  return words;
}

// -- the ops ---------------------------------------------------------------------------------------------------------

template <typename in_t, typename id_t>
__global__ void __launch_bounds__(kGroupThreads)
    sorted_kernel(const in_t* src, const in_t* dst, int64_t num_edges, int64_t num_dst, int64_t num_bound_blocks,
                  int64_t* indptr, id_t* indices) {
  const int64_t block = blockIdx.x;
  if (block < num_bound_blocks) {
    find_bounds(dst, num_edges, num_dst, block * kGroupThreads, indptr);
    return;
  }
  const int64_t begin = (block - num_bound_blocks) * kEdgeTile + threadIdx.x;
  for (int64_t at = begin; at < begin + kEdgeTile && at < num_edges; at += kGroupThreads) {
    indices[at] = static_cast<id_t>(src[at]);
  }
}

// Edges that come sorted by destination need no permutation: edge_ids stays empty, indices are a copy of src.
template <typename in_t>
Grouped from_sorted(const Device& device, const Tensor& src, const Tensor& dst, int64_t num_dst, bool narrow) {
  const ScalarType type = narrow ? ScalarType::Int : ScalarType::Long;
  Grouped out{device.empty({num_dst + 1}, ScalarType::Long), device.empty({src.numel()}, type),
              device.empty({0}, type)};
  const int64_t bound_blocks = num_blocks(num_dst + 1, kGroupThreads);
  const int64_t edge_blocks = (src.numel() + kEdgeTile - 1) / kEdgeTile;
  dispatch_ids(out.values, [&](auto id) {
    using id_t = decltype(id);
    sorted_kernel<in_t, id_t><<<static_cast<unsigned>(bound_blocks + edge_blocks), kGroupThreads, 0, device.stream()>>>(
        const_data<in_t>(src), const_data<in_t>(dst), src.numel(), num_dst, bound_blocks,
        mutable_data<int64_t>(out.indptr), mutable_data<id_t>(out.values));
    CUDA_CHECK_LAUNCH();
  });
  return out;
}

// Waits once: whether the edges are sorted decides what there is to return.
std::tuple<Tensor, Tensor, Tensor> coo_to_csc(const Tensor& src, const Tensor& dst, int64_t num_src, int64_t num_dst,
                                              bool narrow) {
  const Device device(src.is_cuda() ? src : dst);
  check_ids(src, device, "src");
  check_ids(dst, device, "dst");
  CHECK_ARG(src.scalar_type() == dst.scalar_type(), "src and dst must have one dtype, got ",
            dtype_name(src.scalar_type()), " and ", dtype_name(dst.scalar_type()));
  CHECK_ARG(src.numel() == dst.numel(), "src and dst must be equally long, got ", src.numel(), " and ", dst.numel());
  CHECK_ARG(num_src >= 0 && num_dst >= 0, "num_src and num_dst must be >= 0, got ", num_src, " and ", num_dst);
  const int64_t num_edges = src.numel();
  narrow = src.scalar_type() == ScalarType::Int || (narrow && num_src <= kInt32Max && num_edges <= kInt32Max);
  const Grouped out = dispatch_ids(src, [&](auto id) {
    using in_t = decltype(id);
    const Tensor words = all_bits_set<3>(device);
    coo_kernel<in_t><<<num_blocks(num_edges, kGroupThreads), kGroupThreads, 0, device.stream()>>>(
        const_data<in_t>(src), const_data<in_t>(dst), num_edges, num_src, num_dst, data_of<word_t>(words));
    CUDA_CHECK_LAUNCH();
    word_t found[3];
    device.read(found, data_of<word_t>(words), 3);
    check_no_bad_id(device, src, found[0], num_src, "src");
    check_no_bad_id(device, dst, found[1], num_dst, "dst");
    if (found[2] != 0) {
      return from_sorted<in_t>(device, src, dst, num_dst, narrow);
    }
    return group<in_t>(device, dst, num_dst, narrow, [&](auto, auto* keys, auto* positions) {
      keys_kernel<<<num_blocks(num_edges, kGroupThreads), kGroupThreads, 0, device.stream()>>>(
          const_data<in_t>(dst), num_edges, keys, positions);
      CUDA_CHECK_LAUNCH();
      return src;
    });
  });
  return {out.indptr, out.values, out.positions};
}

// No wait: a training step transposes its blocks. A bad index ends the kernel.
std::tuple<Tensor, Tensor, Tensor> transpose(const Tensor& indptr, const Tensor& indices, int64_t num_src) {
  CHECK_ARG(num_src >= 0, "num_src must be >= 0, got ", num_src);
  const Device device(indptr.is_cuda() ? indptr : indices);
  check_csc(indptr, indices, device);
  const int64_t num_dst = indptr.numel() - 1;
  const int64_t num_edges = indices.numel();
  // The values of the result are columns: they may need more than the 32 bits that held the row indices.
  const bool narrow = indices.scalar_type() == ScalarType::Int && num_dst <= kInt32Max;
  const Grouped out = dispatch_ids(indices, [&](auto id) {
    using in_t = decltype(id);
    return group<in_t>(device, indices, num_src, narrow, [&](auto value, auto* keys, auto* positions) {
      using id_t = decltype(value);
      Tensor columns = device.empty({num_edges}, id_type<id_t>());
      columns_kernel<<<num_blocks(num_edges, kEdgeTile), kGroupThreads, 0, device.stream()>>>(
          const_data<int64_t>(indptr), num_dst, const_data<in_t>(indices), num_edges, num_src, keys, positions,
          mutable_data<id_t>(columns));
      CUDA_CHECK_LAUNCH();
      return columns;
    });
  });
  return {out.indptr, out.values, out.positions};
}

void validate_csc(const Tensor& indptr, const Tensor& indices, int64_t num_src) {
  const Device device(indptr.is_cuda() ? indptr : indices);
  check_csc(indptr, indices, device);
  const int64_t num_columns = indptr.numel() - 1;
  const Tensor words = all_bits_set<4>(device);
  dispatch_ids(indices, [&](auto id) {
    using in_t = decltype(id);
    const int64_t size = num_columns > indices.numel() ? num_columns : indices.numel();
    csc_kernel<in_t><<<num_blocks(size, kGroupThreads), kGroupThreads, 0, device.stream()>>>(
        const_data<int64_t>(indptr), num_columns, const_data<in_t>(indices), indices.numel(), num_src,
        data_of<word_t>(words));
    CUDA_CHECK_LAUNCH();
  });
  word_t found[4];
  device.read(found, data_of<word_t>(words), 4);
  const auto first = static_cast<int64_t>(found[2]);
  const auto last = static_cast<int64_t>(found[3]);
  CHECK_ARG(first == 0 && last == indices.numel(), "indptr must run from 0 to len(indices) = ", indices.numel(),
            ", got ", first, " to ", last);
  if (found[0] != kNowhere) {
    const auto at = static_cast<int64_t>(found[0]);
    CHECK_ARG(false, "indptr must never decrease, got ", entry(device, indptr, at - 1), " then ",
              entry(device, indptr, at), " at position ", at);
  }
  check_no_bad_id(device, indices, found[1], num_src, "indices");
}

}  // namespace
}  // namespace gnnsys::cuda

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "coo_to_csc", &gnnsys::cuda::coo_to_csc);
  REGISTER_OP(m, "transpose", &gnnsys::cuda::transpose);
  REGISTER_OP(m, "validate_csc", &gnnsys::cuda::validate_csc);
}
