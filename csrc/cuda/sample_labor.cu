// sample_labor and source_words on the device, bit-equal to cpu/sample_labor.cpp, where LABOR-0 is explained.
//
// Which edges are taken is known edge by edge: a word of the source against a limit of the seed. One launch finds each
// seed's limit and counts what is below it, a warp per seed or a block where a row is long (sample_filter.cuh); sums; the
// host reads size and faults once; a second launch makes the words again and writes. Work: two Philox blocks and two
// reads of an index per in-edge of the seeds that have more than the fanout; 12 + sizeof(id_t) bytes per edge taken.
#include "common/register.h"
#include "common/tensors.h"
#include "cuda/arguments.h"
#include "cuda/columns.cuh"
#include "cuda/sample.cuh"
#include "cuda/sample_filter.cuh"

#include <optional>
#include <tuple>

namespace gnnsys::cuda {
namespace {

constexpr int kThreads = 256;

// A seed's in-edges, and which of them are taken.
struct alignas(16) LaborRow {
  int64_t begin;
  uint64_t limit;  // words below it are taken; 0: all, without a word
  uint32_t size;   // 0 also where nothing is to be taken
  uint32_t gaps;   // excluded ones among them
  float weight;

  __device__ int64_t end() const { return begin + size; }
};

template <typename id_t, typename source_t>
struct Labor {
  Request<id_t> q;
  Report* report;
  LaborRow* rows;
  const source_t* source_ids;  // original ids of the sources; the sources themselves when null
  int64_t num_src;

  __device__ LaborRow find(int64_t i) const {
    LaborRow row{};
    int64_t begin;
    int64_t end;
    if (!q.row(i, &begin, &end, report) || q.fanout == 0) {
      return row;
    }
    const int64_t gaps = q.num_exclude > 0 ? q.excluded_before(end) - q.excluded_before(begin) : 0;
    const int64_t degree = end - begin - gaps;
    if (degree <= 0) {  // negative only when exclude is out of order
      return row;
    }
    const bool all = q.fanout < 0 || degree <= q.fanout;
    row.begin = begin;
    row.size = static_cast<uint32_t>(end - begin);
    row.gaps = static_cast<uint32_t>(gaps);
    row.limit = all ? 0 : limit_of(static_cast<uint64_t>(degree));
    row.weight = __fdiv_rn(1.0f, static_cast<float>(all ? degree : q.fanout));
    return row;
  }

  // The number of words w with w * degree < fanout * 2^64: that product divided by the degree and rounded up, 32 bits at
  // a time. The fanout is below the degree, and the degree below 2^32.
  __device__ uint64_t limit_of(uint64_t degree) const {
    const uint64_t wanted = static_cast<uint64_t>(q.fanout) << 32;
    const uint64_t high = wanted / degree;
    const uint64_t rest = (wanted - high * degree) << 32;
    const uint64_t low = rest / degree;
    return (high << 32 | low) + (rest - low * degree != 0);
  }

  __device__ uint32_t tree(int64_t i) const { return q.tree ? static_cast<uint32_t>(q.tree[i]) : 0u; }

  __device__ bool takes(const LaborRow& row, uint32_t tree, int64_t p) const {
    if (row.gaps > 0 && q.is_excluded(p)) {
      return false;
    }
    return row.limit == 0 || Stream{q.key, original(p), tree}.word64(0, 0) < row.limit;
  }

  __device__ uint64_t original(int64_t p) const {
    const auto source = static_cast<uint64_t>(static_cast<int64_t>(q.indices.ids[p]));
    if (source_ids == nullptr) {
      return source;
    }
    if (source >= static_cast<uint64_t>(num_src)) {
      note(&report->bad_source, p);
      return 0;
    }
    return static_cast<uint64_t>(static_cast<int64_t>(source_ids[source]));
  }
};

// The rows of for_rows: those that count_labor finds, or has found.
template <typename id_t, typename source_t, bool kFinds>
struct LaborRows {
  Labor<id_t, source_t> labor;
  int64_t num_rows;

  __device__ void row(int64_t i, int64_t* begin, int64_t* end) const {
    LaborRow row;
    if constexpr (kFinds) {
      row = labor.find(i);
      if (threadIdx.x % kWarp == 0) {
        labor.rows[i] = row;
      }
      __syncwarp();
    } else {
      row = labor.rows[i];
    }
    *begin = row.begin;
    *end = row.end();
  }
};

template <typename id_t, typename source_t>
__global__ void __launch_bounds__(kFilterThreads) count_labor(Labor<id_t, source_t> labor, int64_t* counts) {
  __shared__ int64_t block_counts[kFilterWarps];
  const int lane = threadIdx.x % kWarp;
  const auto tally = [&](int64_t i, const LaborRow& row, int first, int step) {
    int64_t count = 0;
    const uint32_t tree = labor.tree(i);
    for (int64_t p = row.begin + first; p < row.end(); p += step) {
      count += labor.takes(row, tree, p);
    }
    return warp_sum(count);
  };
  labor.q.check_exclude(labor.report);
  for_rows(
      LaborRows<id_t, source_t, true>{labor, labor.q.num_seeds},
      [&](int64_t i, int64_t, int64_t) {
        const LaborRow row = labor.rows[i];
        const int64_t count = row.limit == 0 ? int64_t{row.size} - row.gaps : tally(i, row, lane, kWarp);
        if (lane == 0) {
          counts[i] = count;
        }
      },
      [&](int64_t i, int64_t, int64_t) {
        const LaborRow row = labor.rows[i];
        if (row.limit == 0) {
          if (threadIdx.x == 0) {
            counts[i] = int64_t{row.size} - row.gaps;
          }
          return;
        }
        int64_t count = tally(i, row, threadIdx.x, kFilterThreads);
        if (lane == 0) {
          block_counts[threadIdx.x / kWarp] = count;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
          for (int w = 1; w < kFilterWarps; ++w) {
            count += block_counts[w];
          }
          counts[i] = count;
        }
        __syncthreads();
      });
}

template <typename id_t, typename source_t>
__global__ void __launch_bounds__(kFilterThreads)
    take_labor(Labor<id_t, source_t> labor, const int64_t* offsets, id_t* neighbors, int64_t* positions,
               float* weights) {
  const int lane = threadIdx.x % kWarp;
  const auto write = [&](const LaborRow& row, int64_t p, int64_t slot) {
    positions[slot] = p;
    neighbors[slot] = labor.q.indices.ids[p];
    weights[slot] = row.weight;
  };
  for_rows(
      LaborRows<id_t, source_t, false>{labor, labor.q.num_seeds},
      [&](int64_t i, int64_t, int64_t) {
        const LaborRow row = labor.rows[i];
        const uint32_t tree = labor.tree(i);
        int64_t slot = offsets[i];
        for (int64_t base = row.begin; base < row.end(); base += kWarp) {
          const int64_t p = base + lane;
          const bool keep = p < row.end() && labor.takes(row, tree, p);
          const unsigned kept = __ballot_sync(kAllLanes, keep);
          if (keep) {
            write(row, p, slot + __popc(kept & ((1u << lane) - 1)));
          }
          slot += __popc(kept);
        }
      },
      [&](int64_t i, int64_t, int64_t) {
        const LaborRow row = labor.rows[i];
        const uint32_t tree = labor.tree(i);
        int64_t slot = offsets[i];
        for (int64_t base = row.begin; base < row.end(); base += kFilterThreads) {
          const int64_t p = base + threadIdx.x;
          const bool keep = p < row.end() && labor.takes(row, tree, p);
          int kept;
          const int before = block_exclusive_sum<kFilterThreads>(static_cast<int>(keep), &kept);
          if (keep) {
            write(row, p, slot + before);
          }
          slot += kept;
        }
      });
}

using LaborResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename id_t, typename source_t>
LaborResult collect_labor(const Device& device, const Request<id_t>& q, const source_t* source_ids, int64_t num_src) {
  const Tensor offsets = device.empty({q.num_seeds + 1}, ScalarType::Long);
  auto* const offset = mutable_data<int64_t>(offsets);
  const Tensor rows = device.workspace<LaborRow>(q.num_seeds);
  const Tensor reports = device.workspace<Report>(1);
  auto* const report = mutable_data<Report>(reports);
  CUDA_CHECK(cudaMemsetAsync(report, 0xFF, sizeof(Report), device.stream()));
  const Labor<id_t, source_t> labor{q, report, mutable_data<LaborRow>(rows), source_ids, num_src};
  const unsigned blocks = num_blocks(q.num_seeds, kFilterWarps);
  count_labor<<<blocks, kFilterThreads, 0, device.stream()>>>(labor, offset);
  CUDA_CHECK_LAUNCH();
  exclusive_sum(device, q.num_seeds, CountsAt<int64_t>{offset}, offset, reinterpret_cast<int64_t*>(&report->total));
  Report read;
  device.read(reinterpret_cast<word_t*>(&read), reinterpret_cast<const word_t*>(report), kReportWords);
  check_report(device, q, read);
  if (read.bad_source != kNoFault) {
    CHECK_ARG(false, "sources must be in [0, ", num_src, "), got ", read_one(device, q.indices.ids + read.bad_source));
  }
  const auto total = static_cast<int64_t>(read.total);
  const Tensor neighbors = device.empty({total}, id_type<id_t>());
  const Tensor positions = device.empty({total}, ScalarType::Long);
  const Tensor weights = device.empty({total}, ScalarType::Float);
  if (total > 0) {
    take_labor<<<blocks, kFilterThreads, 0, device.stream()>>>(labor, offset, mutable_data<id_t>(neighbors),
                                                               mutable_data<int64_t>(positions),
                                                               mutable_data<float>(weights));
    CUDA_CHECK_LAUNCH();
  }
  return {offsets, neighbors, positions, weights};
}

LaborResult sample_labor(const Tensor& indptr, const Tensor& indices, const Tensor& seeds, int64_t num_src, int64_t fanout,
                         int64_t key, std::optional<Tensor> source_ids, std::optional<Tensor> exclude,
                         std::optional<Tensor> tree) {
  CHECK_ARG(seeds.is_cuda(), "seeds must be on the device, like the other tensors");
  const Device device(seeds);
  check_csc(indptr, indices, device);
  check_ids(seeds, device, "seeds");
  CHECK_ARG(seeds.scalar_type() == indices.scalar_type(), "seeds must have the dtype of indices, ",
            dtype_name(indices.scalar_type()), ", got ", dtype_name(seeds.scalar_type()));
  CHECK_ARG(fanout >= -1 && fanout < (int64_t{1} << 28), "fanout must be -1 (all) or 0 to 2^28 - 1, got ", fanout);
  if (source_ids) {
    check_readable(*source_ids, device, "source_ids");
    check_index_dtype(*source_ids, "source_ids");
    CHECK_ARG(source_ids->dim() == 1 && source_ids->numel() >= num_src, "source_ids must have an id for each of ", num_src,
              " sources, got ", source_ids->numel());
  }
  return dispatch_ids(indices, [&](auto id) -> LaborResult {
    using id_t = decltype(id);
    Request<id_t> q{};
    q.indptr = const_data<int64_t>(indptr);
    q.indices.ids = const_data<id_t>(indices);
    q.num_rows = indptr.numel() - 1;
    q.num_edges = indices.numel();
    q.seeds = const_data<id_t>(seeds);
    q.num_seeds = seeds.numel();
    q.fanout = fanout;
    q.key = static_cast<uint64_t>(key);
    q.tree = optional_int64(tree, device, Where::kDevice, q.num_seeds, "tree");
    q.exclude = optional_int64(exclude, device, Where::kDevice, -1, "exclude");
    q.num_exclude = exclude ? exclude->numel() : 0;
    return dispatch_ids(source_ids ? *source_ids : indices, [&](auto source) -> LaborResult {
      using source_t = decltype(source);
      return collect_labor<id_t, source_t>(device, q, source_ids ? const_data<source_t>(*source_ids) : nullptr, num_src);
    });
  });
}

template <typename id_t>
__global__ void __launch_bounds__(kThreads) write_words(const id_t* ids, int64_t size, uint64_t key, int64_t* words) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < size) {
    const Stream stream{key, static_cast<uint64_t>(static_cast<int64_t>(ids[i])), 0u};
    words[i] = static_cast<int64_t>(stream.word64(0, 0) >> 1);
  }
}

Tensor source_words(const Tensor& ids, int64_t key) {
  CHECK_ARG(ids.is_cuda(), "ids must be on the device");
  const Device device(ids);
  check_ids(ids, device, "ids");
  const Tensor words = device.empty({ids.numel()}, ScalarType::Long);
  dispatch_ids(ids, [&](auto id) {
    write_words<<<num_blocks(ids.numel(), kThreads), kThreads, 0, device.stream()>>>(
        const_data<decltype(id)>(ids), ids.numel(), static_cast<uint64_t>(key), mutable_data<int64_t>(words));
    CUDA_CHECK_LAUNCH();
  });
  return words;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "sample_labor", &sample_labor);
  REGISTER_OP(m, "source_words", &source_words);
}

}  // namespace gnnsys::cuda
