// sample_labor_importance on the device, bit-equal to cpu/labor_importance.cpp, where LABOR-i is explained.
//
// Sources are numbered by their id where there are few enough of them, else by their slot in a hash table: results do not
// depend on numbers. What a round computes of a source is a largest value, so the order of threads does not matter either.
// How c of a column is found is in labor_solve.cuh. The host reads twice: how many in-edges the seeds have, and how many
// are taken.
//
// Bytes per in-edge: its index once, 4 for the number of its source, written once and read two to four times a round, and
// as often a random sector of 8 or 16 bytes per source. Each slot of a source has 16, and its id in a hash table.
#include "common/labor_importance.h"
#include "common/register.h"
#include "common/sample_arguments.h"
#include "common/tensors.h"
#include "cuda/arguments.h"
#include "cuda/columns.cuh"
#include "cuda/id_table.cuh"
#include "cuda/labor_solve.cuh"
#include "cuda/sample.cuh"
#include "cuda/sample_filter.cuh"

#include <algorithm>
#include <optional>
#include <tuple>

namespace gnnsys::cuda {
namespace {

constexpr int64_t kDenseIdsPerEdge = 4;  // sources are numbered by their ids where there are at most so many per edge

// The seeds' in-edges: edges ends[i] to ends[i + 1] are those of column i that are not excluded.
template <typename id_t>
struct Importance {
  Request<id_t> q;
  Report* report;
  int64_t num_src;
  int64_t* ends;
  int64_t* first;    // of each column the first position
  double* scale;     // c of each column; 0 where all edges are taken
  uint32_t* source;  // of each edge the number of its source; kNoSource in the end where it is not taken
  id_t* ids;         // of the slots, -1 where one is free; null where numbers are ids
  uint32_t num_slots;
  double* inverse_pi;  // by number
  word_t* most_scale;  // by number: bits of a double, of which the largest stays; 0 where nothing was offered

  // r / pi, once the rounds are done.
  __device__ double* threshold() const { return reinterpret_cast<double*>(most_scale); }

  __device__ int64_t degree(int64_t i) const { return ends[i + 1] - ends[i]; }
  __device__ id_t id(uint32_t number) const { return ids ? ids[number] : static_cast<id_t>(number); }

  // The position of edge e of column i. Of the excluded ones in the column, x_0 < x_1 < ..., those lie before it that
  // have no more edges before themselves, x_g - first - g, than it has.
  __device__ int64_t position(int64_t i, int64_t e) const {
    const int64_t begin = first[i];
    const int64_t rank = e - ends[i];
    if (q.num_exclude == 0) {
      return begin + rank;
    }
    const int64_t gaps = q.excluded_before(begin);
    int64_t low = gaps;
    int64_t high = q.num_exclude;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (q.exclude[middle] - begin - (middle - gaps) <= rank) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return begin + rank + (low - gaps);
  }

  // The number of a source. A slot is taken once, and numbers never leave it.
  __device__ uint32_t number(id_t id) const {
    if (ids == nullptr) {
      return static_cast<uint32_t>(id);
    }
    for (uint32_t slot = home(static_cast<word_t>(id), num_slots);; slot = next_slot(slot, num_slots)) {
      const id_t seen = __ldcg(ids + slot);
      if (seen == id) {
        return slot;
      }
      if (seen == -1) {
        const id_t old = put(ids + slot, id);
        if (old == -1 || old == id) {
          return slot;
        }
      }
    }
  }

  // Positive doubles are ordered as their bits are.
  __device__ void offer(uint32_t number, double value) const {
    const auto bits = static_cast<word_t>(__double_as_longlong(value));
    if (__ldcg(most_scale + number) < bits) {  // out of date at worst, and then too small
      atomicMax(most_scale + number, bits);
    }
  }

 private:
  __device__ static int32_t put(int32_t* slot, int32_t id) { return atomicCAS(slot, -1, id); }
  __device__ static int64_t put(int64_t* slot, int64_t id) {
    return static_cast<int64_t>(
        atomicCAS(reinterpret_cast<word_t*>(slot), ~word_t{0}, static_cast<word_t>(id)));
  }
};

// The columns of for_rows.
struct ColumnEnds {
  const int64_t* ends;
  int64_t num_rows;

  __device__ void row(int64_t i, int64_t* begin, int64_t* end) const {
    *begin = ends[i];
    *end = ends[i + 1];
  }
};

// body(i, edge) for every edge of every column, a warp or a block for each.
template <typename id_t, typename Body>
__device__ void for_edges(const Importance<id_t>& labor, const Body& body) {
  for_rows(
      ColumnEnds{labor.ends, labor.q.num_seeds},
      [&](int64_t i, int64_t begin, int64_t end) {
        for (int64_t e = begin + threadIdx.x % kWarp; e < end; e += kWarp) {
          body(i, e);
        }
      },
      [&](int64_t i, int64_t begin, int64_t end) {
        for (int64_t e = begin + threadIdx.x; e < end; e += kFilterThreads) {
          body(i, e);
        }
      });
}

// -- before the rounds -------------------------------------------------------------------------------------------------

// counts[i] = edges of column i, in the place of `ends`; its first position and its c where all pi are 1.
template <typename id_t>
__global__ void __launch_bounds__(kFilterThreads) find_columns(Importance<id_t> labor) {
  labor.q.check_exclude(labor.report);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kFilterThreads + threadIdx.x;
  if (i >= labor.q.num_seeds) {
    return;
  }
  int64_t begin;
  int64_t end;
  labor.q.row(i, &begin, &end, labor.report);
  const int64_t gaps = labor.q.num_exclude > 0 ? labor.q.excluded_before(end) - labor.q.excluded_before(begin) : 0;
  const int64_t degree = max(end - begin - gaps, int64_t{0});  // negative only when exclude is out of order
  labor.ends[i] = degree;
  labor.first[i] = begin;
  labor.scale[i] = degree <= labor.q.fanout ? 0.0 : first_scale(degree, labor.q.fanout);
}

// Numbers the sources, and offers them what the first round does. All of them are offered something.
template <typename id_t>
__global__ void __launch_bounds__(kFilterThreads) number_sources(Importance<id_t> labor) {
  for_edges(labor, [&](int64_t i, int64_t e) {
    const int64_t p = labor.position(i, e);
    const id_t id = labor.q.indices.ids[p];
    uint32_t number = 0;
    if (id < 0 || static_cast<int64_t>(id) >= labor.num_src) {
      note(&labor.report->bad_source, p);
    } else {
      number = labor.number(id);
      labor.offer(number, offered_scale(labor.scale[i], 1.0));
    }
    labor.source[e] = number;
  });
}

// -- rounds ------------------------------------------------------------------------------------------------------------

template <typename id_t>
__global__ void __launch_bounds__(kFilterThreads) offer_scales(Importance<id_t> labor) {
  for_edges(labor, [&](int64_t i, int64_t e) {
    const uint32_t u = labor.source[e];
    const double scale = labor.scale[i];
    labor.offer(u, scale == 0.0 ? labor.inverse_pi[u] : scale);
  });
}

// What a slot's source goes through after a round: the first finds pi = 1, the last makes thresholds of most_scale.
struct Update {
  bool is_first;
  bool is_last;
  bool without_rounds;  // pi stays 1
};

template <typename id_t>
__global__ void __launch_bounds__(kFilterThreads) update_sources(Importance<id_t> labor, Update update) {
  const int64_t u = static_cast<int64_t>(blockIdx.x) * kFilterThreads + threadIdx.x;
  if (u >= labor.num_slots || labor.most_scale[u] == 0) {  // nobody's
    return;
  }
  double inverse = update.is_first ? 1.0 : labor.inverse_pi[u];
  if (!update.without_rounds) {
    inverse = next_inverse(inverse, __longlong_as_double(static_cast<long long>(labor.most_scale[u])));
  }
  labor.inverse_pi[u] = inverse;
  if (update.is_last) {
    const Stream stream{labor.q.key, static_cast<uint64_t>(static_cast<int64_t>(labor.id(static_cast<uint32_t>(u)))), 0u};
    labor.threshold()[u] = labor_threshold(stream.word64(0, 0), inverse);
  } else {
    labor.most_scale[u] = 0;
  }
}

// -- c of columns ------------------------------------------------------------------------------------------------------

// scale[i] of the columns with more than `fanout` edges; the others keep theirs, 0.
template <typename id_t>
__global__ void __launch_bounds__(kSolveThreads) solve_columns(Importance<id_t> labor) {
  __shared__ int64_t begins[kQuads + 1];
  __shared__ BlockTallies tallies;
  const int64_t fanout = labor.q.fanout;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kQuads;
  if (threadIdx.x <= kQuads) {
    begins[threadIdx.x] = labor.ends[min(first + threadIdx.x, labor.q.num_seeds)];
  }
  __syncthreads();
  const auto degree = [&](int column) {
    const int64_t size = begins[column + 1] - begins[column];
    return size > fanout ? size : 0;
  };
  const int quad = threadIdx.x / kQuad;
  if (degree(quad) > 0 && degree(quad) <= kSumBlock) {
    const uint32_t* const source = labor.source + begins[quad];
    const auto size = static_cast<int>(degree(quad));
    const double c = solve_column(size, fanout, [&](double at) { return tally_block(source, labor.inverse_pi, size, at); });
    if (threadIdx.x % kQuad == 0) {
      labor.scale[first + quad] = c;
    }
  }
  __syncwarp();
  for (int column = threadIdx.x / kWarp; column < kQuads; column += kSolveThreads / kWarp) {
    if (degree(column) > kSumBlock && degree(column) <= kWarpColumn) {
      const double c = solve_by_warp(labor.source + begins[column], labor.inverse_pi, degree(column), fanout);
      if (threadIdx.x % kWarp == 0) {
        labor.scale[first + column] = c;
      }
    }
  }
  __syncthreads();
  for (int column = 0; column < kQuads; ++column) {
    if (degree(column) > kWarpColumn) {
      const double c = solve_by_block(labor.source + begins[column], labor.inverse_pi, degree(column), fanout, &tallies);
      if (threadIdx.x == 0) {
        labor.scale[first + column] = c;
      }
    }
  }
}

// -- taking ------------------------------------------------------------------------------------------------------------

// counts[i] = taken edges of column i; edges that are not taken lose their source.
template <typename id_t>
__global__ void __launch_bounds__(kFilterThreads) mark_taken(Importance<id_t> labor, int64_t* counts) {
  __shared__ int block_counts[kFilterWarps];
  const int lane = threadIdx.x % kWarp;
  const auto mark = [&](int64_t begin, int64_t end, double scale, int step) {
    int count = 0;
    for (int64_t e = begin; e < end; e += step) {
      const bool is_taken = labor.threshold()[labor.source[e]] < scale;
      count += is_taken;
      if (!is_taken) {
        labor.source[e] = kNoSource;
      }
    }
    return static_cast<int>(warp_sum(count));
  };
  for_rows(
      ColumnEnds{labor.ends, labor.q.num_seeds},
      [&](int64_t i, int64_t begin, int64_t end) {
        const double scale = labor.scale[i];
        const int64_t count = scale == 0.0 ? end - begin : mark(begin + lane, end, scale, kWarp);
        if (lane == 0) {
          counts[i] = count;
        }
      },
      [&](int64_t i, int64_t begin, int64_t end) {
        const double scale = labor.scale[i];
        if (scale == 0.0) {
          if (threadIdx.x == 0) {
            counts[i] = end - begin;
          }
          return;
        }
        int64_t count = mark(begin + threadIdx.x, end, scale, kFilterThreads);
        if (lane == 0) {
          block_counts[threadIdx.x / kWarp] = static_cast<int>(count);
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

template <typename id_t>
struct TakenEdges {
  static constexpr bool kSums = false;
  Importance<id_t> labor;
  int64_t num_rows;

  __device__ void row(int64_t i, int64_t* begin, int64_t* end) const {
    *begin = labor.ends[i];
    *end = labor.ends[i + 1];
  }
  __device__ bool keep(int64_t, int64_t e) const { return labor.source[e] != kNoSource; }
};

template <typename id_t>
struct WriteTaken {
  Importance<id_t> labor;
  id_t* neighbors;
  int64_t* positions;
  float* weights;

  __device__ void operator()(int64_t i, int64_t e, int64_t slot, int64_t) const {
    const uint32_t u = labor.source[e];
    neighbors[slot] = labor.id(u);
    positions[slot] = labor.position(i, e);
    weights[slot] = labor_weight(labor.scale[i], labor.inverse_pi[u], labor.degree(i));
  }
};

// -- the host's side ---------------------------------------------------------------------------------------------------

using LaborResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename id_t>
class Draw {
 public:
  Draw(const Device& device, const Request<id_t>& q, int64_t num_src) : device_(device) {
    ends_ = device.empty({q.num_seeds + 1}, ScalarType::Long);
    first_ = device.empty({q.num_seeds}, ScalarType::Long);
    scale_ = device.empty({q.num_seeds}, ScalarType::Double);
    reports_ = device.workspace<Report>(1);
    labor_.q = q;
    labor_.num_src = num_src;
    labor_.ends = mutable_data<int64_t>(ends_);
    labor_.first = mutable_data<int64_t>(first_);
    labor_.scale = mutable_data<double>(scale_);
    labor_.report = mutable_data<Report>(reports_);
    CUDA_CHECK(cudaMemsetAsync(labor_.report, 0xFF, sizeof(Report), device.stream()));
  }

  LaborResult run(int64_t rounds) {
    const int64_t num_edges = gather();
    if (num_edges > 0) {
      make_room(num_edges);
      compute(rounds);
    }
    return take(num_edges);
  }

 private:
  // Finds the columns; how many edges they have.
  int64_t gather() {
    const int64_t num_seeds = labor_.q.num_seeds;
    find_columns<<<num_blocks(num_seeds, kFilterThreads), kFilterThreads, 0, device_.stream()>>>(labor_);
    CUDA_CHECK_LAUNCH();
    exclusive_sum(device_, num_seeds, CountsAt<int64_t>{labor_.ends}, labor_.ends,
                  reinterpret_cast<int64_t*>(&labor_.report->total));
    const auto num_edges = static_cast<int64_t>(read_report(device_, labor_.q, labor_.report).total);
    CHECK_ARG(num_edges <= kMostLaborEdges, "seeds have 2^32 - 1 in-edges or more: take smaller batches");
    return num_edges;
  }

  void make_room(int64_t num_edges) {
    const bool by_id = labor_.num_src <= kDenseIdsPerEdge * num_edges && labor_.num_src < int64_t{kNoSource};
    const int64_t num_slots =
        by_id ? labor_.num_src : std::min<int64_t>(2 * std::min(num_edges, labor_.num_src), kNoSource);
    labor_.num_slots = static_cast<uint32_t>(num_slots);
    const int64_t room = std::max<int64_t>(num_slots, 1);  // edges have number 0 where no source is any
    source_ = device_.workspace<uint32_t>(num_edges);
    inverse_pi_ = device_.empty({room}, ScalarType::Double);
    most_scale_ = device_.workspace<word_t>(room);
    labor_.source = mutable_data<uint32_t>(source_);
    labor_.inverse_pi = mutable_data<double>(inverse_pi_);
    labor_.most_scale = mutable_data<word_t>(most_scale_);
    CUDA_CHECK(cudaMemsetAsync(labor_.most_scale, 0, static_cast<size_t>(room) * sizeof(word_t), device_.stream()));
    if (!by_id) {
      ids_ = device_.empty({room}, id_type<id_t>());
      labor_.ids = mutable_data<id_t>(ids_);
      CUDA_CHECK(cudaMemsetAsync(labor_.ids, 0xFF, static_cast<size_t>(room) * sizeof(id_t), device_.stream()));
    }
  }

  unsigned column_blocks() const { return num_blocks(labor_.q.num_seeds, kFilterWarps); }

  void compute(int64_t rounds) const {
    number_sources<<<column_blocks(), kFilterThreads, 0, device_.stream()>>>(labor_);
    CUDA_CHECK_LAUNCH();
    if (rounds == 0) {
      update({true, true, true});
    }
    for (int64_t round = 0; round < rounds; ++round) {
      if (round > 0) {
        offer_scales<<<column_blocks(), kFilterThreads, 0, device_.stream()>>>(labor_);
        CUDA_CHECK_LAUNCH();
      }
      update({round == 0, round + 1 == rounds, false});
      solve_columns<<<num_blocks(labor_.q.num_seeds, kQuads), kSolveThreads, 0, device_.stream()>>>(labor_);
      CUDA_CHECK_LAUNCH();
    }
  }

  void update(Update how) const {
    update_sources<<<num_blocks(labor_.num_slots, kFilterThreads), kFilterThreads, 0, device_.stream()>>>(labor_, how);
    CUDA_CHECK_LAUNCH();
  }

  LaborResult take(int64_t num_edges) const {
    const Tensor offsets = device_.empty({labor_.q.num_seeds + 1}, ScalarType::Long);
    auto* const offset = mutable_data<int64_t>(offsets);
    int64_t total = 0;
    if (num_edges > 0) {
      mark_taken<<<column_blocks(), kFilterThreads, 0, device_.stream()>>>(labor_, offset);
      CUDA_CHECK_LAUNCH();
      exclusive_sum(device_, labor_.q.num_seeds, CountsAt<int64_t>{offset}, offset,
                    reinterpret_cast<int64_t*>(&labor_.report->total));
      const Report read = read_report(device_, labor_.q, labor_.report);
      if (read.bad_source != kNoFault) {
        CHECK_ARG(false, "sources must be in [0, ", labor_.num_src, "), got ",
                  read_one(device_, labor_.q.indices.ids + read.bad_source));
      }
      total = static_cast<int64_t>(read.total);
    } else {
      CUDA_CHECK(cudaMemsetAsync(offset, 0, (labor_.q.num_seeds + 1) * sizeof(int64_t), device_.stream()));
    }
    const Tensor neighbors = device_.empty({total}, id_type<id_t>());
    const Tensor positions = device_.empty({total}, ScalarType::Long);
    const Tensor weights = device_.empty({total}, ScalarType::Float);
    if (total > 0) {
      collect_rows(device_, TakenEdges<id_t>{labor_, labor_.q.num_seeds}, offset,
                   WriteTaken<id_t>{labor_, mutable_data<id_t>(neighbors), mutable_data<int64_t>(positions),
                                    mutable_data<float>(weights)});
    }
    return {offsets, neighbors, positions, weights};
  }

  const Device& device_;
  Importance<id_t> labor_{};
  Tensor ends_, first_, scale_, reports_, source_, inverse_pi_, most_scale_, ids_;
};

LaborResult sample_labor_importance(const Tensor& indptr, const Tensor& indices, const Tensor& seeds, int64_t num_src,
                                    int64_t fanout, int64_t rounds, int64_t key, std::optional<Tensor> exclude) {
  CHECK_ARG(seeds.is_cuda(), "seeds must be on the device, like the other tensors");
  const Device device(seeds);
  check_csc(indptr, indices, device);
  check_ids(seeds, device, "seeds");
  check_seed_dtype(seeds, indices);
  CHECK_ARG(fanout >= 1 && fanout < (int64_t{1} << 28), "fanout must be 1 to 2^28 - 1, got ", fanout);
  CHECK_ARG(rounds >= 0, "rounds must be at least 0, got ", rounds);
  CHECK_ARG(num_src >= 0, "num_src must not be negative, got ", num_src);
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
    q.exclude = optional_int64(exclude, device, Where::kDevice, -1, "exclude");
    q.num_exclude = exclude ? exclude->numel() : 0;
    return Draw<id_t>(device, q, num_src).run(rounds);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "sample_labor_importance", &sample_labor_importance); }

}  // namespace gnnsys::cuda
