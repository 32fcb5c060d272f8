// Edges of many relations by (relation, destination) and by (relation, source), as ops/relation_groups.py describes
// them, in two calls: a dozen launches each, and nothing is waited for. Results have room for as many groups as there
// can be; the host reads from `ends` how many there are.
//
// Bytes per edge with 32-bit keys: 16 a pass of the sort, and 40 before and after.
#include "common/register.h"
#include "cuda/group.cuh"
#include "cuda/scan.cuh"
#include "cuda/sort.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

namespace gnnsys::cuda {
namespace {

constexpr int64_t kInt32Most = std::numeric_limits<int32_t>::max();

// Numbers of the host that kernels read, in one copy; it is over for the host when the call returns.
Tensor on_device(const Device& device, const std::vector<int64_t>& numbers) {
  Tensor there = device.empty({static_cast<int64_t>(numbers.size())}, ScalarType::Long);
  CUDA_CHECK(cudaMemcpyAsync(mutable_data<int64_t>(there), numbers.data(), numbers.size() * sizeof(int64_t),
                             cudaMemcpyHostToDevice, device.stream()));
  return there;
}

std::vector<int64_t> sums_before(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> found{0};
  for (const int64_t size : sizes) {
    found.push_back(found.back() + size);
  }
  return found;
}

// -- by destination --------------------------------------------------------------------------------------------------

// Where the structures of relations lie, and where each one's destinations and edges begin among all.
struct Structures {
  const int64_t* indptr;  // [relations] addresses
  const int64_t* first;   // [relations + 1] destinations
  const int64_t* edge;    // [relations + 1]
  int64_t count;

  __device__ int64_t relation_of(int64_t destination) const { return column_of(first, 0, count - 1, destination); }
  __device__ const int64_t* of(int64_t relation) const {
    return reinterpret_cast<const int64_t*>(static_cast<uintptr_t>(indptr[relation]));
  }
};

struct HasEdges {
  Structures structures;

  __device__ int64_t operator()(int64_t destination) const {
    const int64_t relation = structures.relation_of(destination);
    const int64_t* const indptr = structures.of(relation) + (destination - structures.first[relation]);
    return indptr[1] > indptr[0] ? 1 : 0;
  }
};

__global__ void __launch_bounds__(kGroupThreads)
    destinations_kernel(const Structures structures, const int64_t* __restrict__ place, int64_t num_dst,
                        int64_t* __restrict__ ends, int32_t* __restrict__ dst, int64_t* __restrict__ indptr) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  if (at <= structures.count) {
    ends[at] = place[structures.first[at]];
  }
  if (at == 0) {
    indptr[place[num_dst]] = structures.edge[structures.count];
  }
  if (at >= num_dst) {
    return;
  }
  const int64_t relation = structures.relation_of(at);
  const int64_t local = at - structures.first[relation];
  const int64_t* const edges = structures.of(relation) + local;
  if (at + 1 == structures.first[relation + 1]) {
    const int64_t num_edges = structures.edge[relation + 1] - structures.edge[relation];
    if (edges[1] != num_edges) {
      fault("the end of an indptr", edges[1], num_edges + 1);
    }
  }
  if (place[at + 1] > place[at]) {
    dst[place[at]] = static_cast<int32_t>(local);
    indptr[place[at]] = structures.edge[relation] + edges[0];
  }
}

std::tuple<Tensor, Tensor, Tensor> group_structures(std::vector<Tensor> indptr, std::vector<int64_t> num_edges) {
  CHECK_ARG(!indptr.empty() && indptr.size() == num_edges.size(), "indptr and num_edges must have an entry per relation");
  CHECK_ARG(indptr[0].is_cuda(), "indptr must be on a GPU");
  const Device device(indptr[0]);
  std::vector<int64_t> sizes;
  for (const Tensor& each : indptr) {
    check_vector(each, device, "indptr");
    check_dtype(each, ScalarType::Long, "indptr");
    CHECK_ARG(each.numel() >= 1, "indptr must have num_dst + 1 entries, got none");
    CHECK_ARG(each.numel() <= kInt32Most, "a relation must have fewer than 2^31 destinations, got ", each.numel() - 1);
    sizes.push_back(each.numel() - 1);
  }
  const std::vector<int64_t> first = sums_before(sizes);
  const std::vector<int64_t> edge = sums_before(num_edges);
  const auto count = static_cast<int64_t>(indptr.size());
  std::vector<int64_t> numbers;
  for (const Tensor& each : indptr) {
    numbers.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(each.const_data_ptr())));
  }
  numbers.insert(numbers.end(), first.begin(), first.end());
  numbers.insert(numbers.end(), edge.begin(), edge.end());
  const Tensor there = on_device(device, numbers);
  const auto* const data = const_data<int64_t>(there);
  const Structures structures{data, data + count, data + 2 * count + 1, count};
  const int64_t num_dst = first.back();
  const int64_t most = std::min(num_dst, edge.back());
  Tensor ends = device.empty({count + 1}, ScalarType::Long);
  Tensor dst = device.empty({most}, ScalarType::Int);
  Tensor starts = device.empty({most + 1}, ScalarType::Long);
  const Tensor place = device.empty({num_dst + 1}, ScalarType::Long);
  exclusive_sum(device, num_dst, HasEdges{structures}, mutable_data<int64_t>(place));
  destinations_kernel<<<num_blocks(std::max(num_dst, count + 1), kGroupThreads), kGroupThreads, 0, device.stream()>>>(
      structures, const_data<int64_t>(place), num_dst, mutable_data<int64_t>(ends), mutable_data<int32_t>(dst),
      mutable_data<int64_t>(starts));
  CUDA_CHECK_LAUNCH();
  return {ends, dst, starts};
}

// -- by source -------------------------------------------------------------------------------------------------------

// Where the groups and the sources of each relation begin, [relations + 1] each.
struct Relations {
  const int64_t* group;
  const int64_t* source;
  int64_t count;
};

template <typename T, typename id_t>
__global__ void __launch_bounds__(kGroupThreads)
    pairs_kernel(const int64_t* __restrict__ indptr, int64_t num_groups, const id_t* __restrict__ indices,
                 int64_t num_edges, const Relations relations, T* __restrict__ keys, T* __restrict__ groups) {
  for_each_edge(indptr, num_groups, num_edges, [&](int64_t edge, int64_t group) {
    const int64_t relation = column_of(relations.group, 0, relations.count - 1, group);
    const int64_t first = relations.source[relation];
    const int64_t source = indices[edge];
    if (source < 0 || source >= relations.source[relation + 1] - first) {
      fault("sources of a relation", source, relations.source[relation + 1] - first);
    }
    keys[edge] = static_cast<T>(first + source);
    groups[edge] = static_cast<T>(group);
  });
}

template <typename T>
struct IsFirst {
  const T* keys;

  __device__ int64_t operator()(int64_t at) const { return at == 0 || keys[at] != keys[at - 1] ? 1 : 0; }
};

template <typename T>
__global__ void __launch_bounds__(kGroupThreads)
    sources_kernel(const T* __restrict__ keys, const T* __restrict__ groups, const int64_t* __restrict__ place,
                   int64_t num_edges, const Relations relations, const int32_t* __restrict__ dst,
                   int64_t* __restrict__ ends, int32_t* __restrict__ src, int64_t* __restrict__ indptr,
                   int32_t* __restrict__ indices, int32_t* __restrict__ group) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  if (at <= relations.count) {
    ends[at] = place[lower_bound(keys, 0, num_edges, static_cast<T>(relations.source[at]))];
  }
  if (at == 0) {
    indptr[place[num_edges]] = num_edges;
  }
  if (at >= num_edges) {
    return;
  }
  const auto mine = static_cast<int32_t>(groups[at]);
  group[at] = mine;
  indices[at] = dst[mine];
  if (place[at + 1] > place[at]) {
    const auto key = static_cast<int64_t>(keys[at]);
    // Of relations without sources that begin where another does, column_of finds the one that has some.
    const int64_t relation = column_of(relations.source, 0, relations.count - 1, key);
    src[place[at]] = static_cast<int32_t>(key - relations.source[relation]);
    indptr[place[at]] = at;
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_by_source(const Tensor& indptr, const Tensor& indices,
                                                                   const Tensor& dst, std::vector<int64_t> ends,
                                                                   std::vector<int64_t> num_src) {
  CHECK_ARG(indices.is_cuda(), "indices must be on a GPU");
  const Device device(indices);
  check_ids(indices, device, "indices");
  check_vector(indptr, device, "indptr");
  check_dtype(indptr, ScalarType::Long, "indptr");
  check_vector(dst, device, "dst");
  check_dtype(dst, ScalarType::Int, "dst");
  const auto count = static_cast<int64_t>(num_src.size());
  CHECK_ARG(count > 0 && static_cast<int64_t>(ends.size()) == count + 1, "ends must have an entry more than num_src");
  CHECK_ARG(ends[0] == 0 && std::is_sorted(ends.begin(), ends.end()), "ends must rise from 0");
  const int64_t num_groups = ends.back();
  const int64_t num_edges = indices.numel();
  CHECK_ARG(indptr.numel() == num_groups + 1 && dst.numel() == num_groups, "indptr and dst must have ", num_groups,
            " groups, got ", indptr.numel() - 1, " and ", dst.numel());
  CHECK_ARG(num_groups <= kInt32Most, "groups must be fewer than 2^31, got ", num_groups);
  const std::vector<int64_t> first = sums_before(num_src);
  std::vector<int64_t> numbers = ends;
  numbers.insert(numbers.end(), first.begin(), first.end());
  const Tensor there = on_device(device, numbers);
  const Relations relations{const_data<int64_t>(there), const_data<int64_t>(there) + count + 1, count};
  const int64_t num_keys = first.back();
  const int64_t most = std::min(num_edges, num_keys);
  Tensor t_ends = device.empty({count + 1}, ScalarType::Long);
  Tensor src = device.empty({most}, ScalarType::Int);
  Tensor starts = device.empty({most + 1}, ScalarType::Long);
  Tensor members = device.empty({num_edges}, ScalarType::Int);
  Tensor group = device.empty({num_edges}, ScalarType::Int);
  const auto run = [&](auto key) {
    using T = decltype(key);
    const Tensor keys = device.workspace<T>(num_edges);
    const Tensor groups = device.workspace<T>(num_edges);
    const Tensor sorted_keys = device.workspace<T>(num_edges);
    const Tensor sorted_groups = device.workspace<T>(num_edges);
    const auto data = [](const Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); };
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      if (num_edges > 0) {
        pairs_kernel<<<num_blocks(num_edges, kEdgeTile), kGroupThreads, 0, device.stream()>>>(
            const_data<int64_t>(indptr), num_groups, const_data<id_t>(indices), num_edges, relations, data(keys),
            data(groups));
        CUDA_CHECK_LAUNCH();
      }
    });
    if (num_edges > 0) {
      sort_pairs<T>(device, data(keys), data(sorted_keys), data(groups), data(sorted_groups), num_edges,
                    num_key_bits<T>(num_keys));
    }
    const Tensor place = device.empty({num_edges + 1}, ScalarType::Long);
    exclusive_sum(device, num_edges, IsFirst<T>{data(sorted_keys)}, mutable_data<int64_t>(place));
    sources_kernel<<<num_blocks(std::max(num_edges, count + 1), kGroupThreads), kGroupThreads, 0, device.stream()>>>(
        data(sorted_keys), data(sorted_groups), const_data<int64_t>(place), num_edges, relations,
        const_data<int32_t>(dst), mutable_data<int64_t>(t_ends), mutable_data<int32_t>(src),
        mutable_data<int64_t>(starts), mutable_data<int32_t>(members), mutable_data<int32_t>(group));
    CUDA_CHECK_LAUNCH();
  };
  if (std::max({num_keys, num_edges, num_groups}) <= kInt32Most) {
    run(uint32_t{});
  } else {
    run(uint64_t{});
  }
  return {t_ends, src, starts, members, group};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "group_structures", &group_structures);
  REGISTER_OP(m, "group_by_source", &group_by_source);
}

}  // namespace gnnsys::cuda
