// sample_neighbors where each seed's candidates must be listed first: by weight, or by times that are stored unsorted.
//
// One pass over the seeds' rows counts the candidates, one launch sums candidates and edges taken, the host reads both
// and the faults once, a second pass lists. Weighted samples of up to 32 without replacement need no list
// (sample_smallest.cuh). Work: O(degree) per seed, twice; two sorts of the list where an order is needed.
#include "common/tensors.h"
#include "cuda/choose.cuh"
#include "cuda/sample.cuh"
#include "cuda/sample_filter.cuh"
#include "cuda/sample_smallest.cuh"

#include <cub/device/device_radix_sort.cuh>

namespace gnnsys::cuda {
namespace {

constexpr int kSumThreads = 1024;
constexpr int kThreads = 256;

// -- filters ------------------------------------------------------------------------------------------------------------

template <typename id_t>
struct InTime {
  static constexpr bool kSums = false;
  Request<id_t> q;
  Report* report;
  int64_t num_rows;

  __device__ void row(int64_t i, int64_t* begin, int64_t* end) const { q.row(i, begin, end, report); }
  __device__ bool keep(int64_t i, int64_t p) const {
    return !q.is_excluded(p) && q.time_at(p, report) <= q.seed_time[i];
  }
  __device__ double quantity(int64_t, int64_t) const { return 0; }
  // Orders like the time, as an unsigned number.
  __device__ word_t key(int64_t, int64_t p) const {
    return static_cast<word_t>(q.time_at(p, report)) ^ (word_t{1} << 63);
  }
};

// Edges of positive weight. With sums, for drawing with replacement: weights become integers of up to 62 - log2(n) bits
// relative to the heaviest, as on the CPU, so their sums are exact.
template <typename id_t, typename weight_t, bool kWithSums>
struct Weighted {
  static constexpr bool kSums = kWithSums;
  Request<id_t> q;
  Report* report;
  int64_t num_rows;
  const weight_t* weights;
  const double* heaviest;
  const int64_t* starts;

  __device__ void row(int64_t i, int64_t* begin, int64_t* end) const { q.row(i, begin, end, report); }

  __device__ bool keep(int64_t, int64_t p) const {
    const auto w = static_cast<double>(weights[p]);
    if (!(w >= 0) || isinf(w)) {
      note(&report->bad_weight, p);
      return false;
    }
    return w > 0 && !q.is_excluded(p);
  }

  __device__ double quantity(int64_t, int64_t p) const { return static_cast<double>(weights[p]); }

  __device__ int64_t weight(int64_t i, int64_t p) const {
    const int64_t n = starts[i + 1] - starts[i];
    int bits = 62;
    while (bits > 0 && (n >> (62 - bits)) > 1) {
      --bits;
    }
    const auto scale = static_cast<double>(uint64_t{1} << bits);
    return static_cast<int64_t>(mul_rn(static_cast<double>(weights[p]) / heaviest[i], scale));
  }

  // Efraimidis and Spirakis: -ln(u) / w, u addressed by the edge's place in its row. Not negative, so its bits order it.
  __device__ word_t key(const Stream& stream, int64_t begin, int64_t p) const {
    const double u = open_unit(stream.word64(static_cast<uint64_t>(p - begin), 0));
    return static_cast<word_t>(__double_as_longlong(negative_log(u) / static_cast<double>(weights[p])));
  }
  __device__ word_t key(int64_t i, int64_t p) const { return key(q.stream(i), q.indptr[q.seeds[i]], p); }
};

// -- sources ------------------------------------------------------------------------------------------------------------

// Candidates in a list, seed after seed; with `order`, in that order.
struct Listed {
  const int64_t* starts;
  const int64_t* list;
  const int64_t* order;

  __device__ int64_t size(int64_t i) const { return starts[i + 1] - starts[i]; }
  __device__ uint32_t draw(const Stream& stream, int64_t, uint32_t j, uint32_t bound) const {
    return uniform_draw(stream, j, bound);
  }
  __device__ int64_t position(int64_t i, int64_t rank) const {
    const int64_t at = starts[i] + rank;
    return list[order ? order[at] : at];
  }
};

// Drawn with replacement in proportion to integer weights, whose running sums in each row are given.
struct Proportional : Listed {
  const int64_t* sums;

  __device__ uint32_t draw(const Stream& stream, int64_t i, uint32_t j, uint32_t n) const {
    const int64_t* const mine = sums + starts[i];
    const auto r = static_cast<int64_t>(bounded64(stream, j, static_cast<uint64_t>(mine[n - 1])));
    uint32_t lo = 0;
    uint32_t hi = n - 1;  // r < mine[n - 1]
    while (lo < hi) {
      const uint32_t middle = lo + (hi - lo) / 2;
      if (mine[middle] <= r) {
        lo = middle + 1;
      } else {
        hi = middle;
      }
    }
    return lo;
  }
};

// -- counting -----------------------------------------------------------------------------------------------------------

// starts[0..num_seeds] of the candidates and offsets[0..num_seeds] of the edges taken.
template <typename id_t>
__global__ void __launch_bounds__(kSumThreads)
    sum_counts(Request<id_t> q, const int64_t* counts, int64_t* starts, int64_t* offsets, Report* report,
               word_t* start_words, word_t* offset_words) {
  const int64_t tile = take_tile(start_words);
  const int64_t i = tile * kSumThreads + threadIdx.x;
  const int64_t candidates = i < q.num_seeds ? counts[i] : 0;
  q.check_exclude(report);
  int64_t tile_total;
  int64_t start = block_exclusive_sum<kSumThreads>(candidates, &tile_total);
  start += sum_of_tiles_before(start_words, tile, tile_total);
  int64_t offset = block_exclusive_sum<kSumThreads>(q.count(candidates), &tile_total);
  offset += sum_of_tiles_before(offset_words, tile, tile_total);
  if (i <= q.num_seeds) {
    starts[i] = start;
    offsets[i] = offset;
  }
  if (i == q.num_seeds) {
    report->candidates = static_cast<word_t>(start);
    report->total = static_cast<word_t>(offset);
  }
}

// A call's tensors and where its parts are in them.
template <typename id_t>
struct Call {
  const Device& device;
  Request<id_t> q;
  Tensor offsets;
  Tensor workspace;
  double* heaviest;
  int64_t* counts;
  int64_t* starts;
  Report* report;
  word_t* words;
  Tensor neighbors;
  Tensor positions;
  int64_t candidates = 0;
  int64_t total = 0;

  Call(const Device& on, const Request<id_t>& request)
      : device(on),
        q(request),
        offsets(on.empty({q.num_seeds + 1}, ScalarType::Long)),
        workspace(on.workspace<int64_t>(3 * q.num_seeds + 1 + num_report_words())),
        heaviest(mutable_data<double>(workspace)),
        counts(mutable_data<int64_t>(workspace) + q.num_seeds),
        starts(counts + q.num_seeds),
        report(reinterpret_cast<Report*>(starts + q.num_seeds + 1)),
        words(reinterpret_cast<word_t*>(report + 1)),
        neighbors(offsets),
        positions(offsets) {
    CUDA_CHECK(cudaMemsetAsync(report, 0xFF, num_report_words() * sizeof(word_t), device.stream()));
  }

  unsigned tiles() const { return num_blocks(q.num_seeds + 1, kSumThreads); }
  int64_t num_report_words() const { return kReportWords + 2 * num_scan_words(tiles()); }
  const int64_t* offset() const { return const_data<int64_t>(offsets); }

  // Counts what the filter keeps, makes the outputs, waits.
  template <typename Filter>
  void count(const Filter& filter, bool with_heaviest) {
    count_rows(device, filter, counts, with_heaviest ? heaviest : nullptr);
    sum_counts<<<tiles(), kSumThreads, 0, device.stream()>>>(q, counts, starts, mutable_data<int64_t>(offsets), report,
                                                             words, words + num_scan_words(tiles()));
    CUDA_CHECK_LAUNCH();
    const Report read = read_report(device, q, report);
    candidates = static_cast<int64_t>(read.candidates);
    total = static_cast<int64_t>(read.total);
    neighbors = device.empty({total}, id_type<id_t>());
    positions = device.empty({total}, ScalarType::Long);
  }

  template <typename Source>
  void choose_from(const Source& source) {
    choose(device, q, source, offset(), total, mutable_data<id_t>(neighbors), mutable_data<int64_t>(positions));
  }

  Result result() const { return {offsets, neighbors, positions}; }
};

// -- lists --------------------------------------------------------------------------------------------------------------

struct EmitPosition {
  int64_t* list;
  int64_t* sums;  // or null

  __device__ void operator()(int64_t, int64_t p, int64_t slot, int64_t sum) const {
    list[slot] = p;
    if (sums) {
      sums[slot] = sum;
    }
  }
};

template <typename Filter>
struct EmitKeyed {
  Filter filter;
  int64_t* list;
  word_t* keys;
  uint32_t* seeds;
  int64_t* slots;

  __device__ void operator()(int64_t i, int64_t p, int64_t slot, int64_t) const {
    list[slot] = p;
    keys[slot] = filter.key(i, p);
    seeds[slot] = static_cast<uint32_t>(i);
    slots[slot] = slot;
  }
};

__global__ void __launch_bounds__(kThreads)
    read_seeds(int64_t size, const uint32_t* seeds, const int64_t* order, uint32_t* ordered) {
  const int64_t x = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (x < size) {
    ordered[x] = seeds[order[x]];
  }
}

// Stable: equal keys keep their order.
template <typename key_t>
void sort_pairs(const Device& device, const key_t* keys, key_t* keys_out, const int64_t* values, int64_t* values_out,
                int64_t size, int bits) {
  size_t bytes = 0;
  CUDA_CHECK(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, keys_out, values, values_out, size, 0, bits,
                                             device.stream()));
  const Tensor temporary = device.workspace<char>(static_cast<int64_t>(bytes));
  CUDA_CHECK(cub::DeviceRadixSort::SortPairs(temporary.mutable_data_ptr(), bytes, keys, keys_out, values, values_out,
                                             size, 0, bits, device.stream()));
}

// The candidates of every seed, and their order by (key, position) within it.
struct Ordered {
  Tensor list;   // int64, positions
  Tensor order;  // int64, places in the list
  Tensor seeds;  // uint32, the seed of each place in the order
};

// Sorts by key, then, stable, by seed: rows of any length, and no more launches for many than for few.
template <typename id_t, typename Filter>
Ordered order_candidates(const Call<id_t>& call, const Filter& filter) {
  const Device& device = call.device;
  const int64_t size = call.candidates;
  const Tensor list = device.workspace<int64_t>(size);
  const Tensor keys = device.workspace<word_t>(2 * size);
  const Tensor seeds = device.workspace<uint32_t>(2 * size);
  const Tensor slots = device.workspace<int64_t>(2 * size);
  auto* const key = mutable_data<word_t>(keys);
  auto* const seed = mutable_data<uint32_t>(seeds);
  auto* const slot = mutable_data<int64_t>(slots);
  collect_rows(device, filter, call.starts, EmitKeyed<Filter>{filter, mutable_data<int64_t>(list), key, seed, slot});
  sort_pairs(device, key, key + size, slot, slot + size, size, 64);
  read_seeds<<<num_blocks(size, kThreads), kThreads, 0, device.stream()>>>(size, seed, slot + size, seed + size);
  CUDA_CHECK_LAUNCH();
  int bits = 1;
  while (bits < 32 && (call.q.num_seeds - 1) >> bits != 0) {
    ++bits;
  }
  sort_pairs(device, seed + size, seed, slot + size, slot, size, bits);
  return {list, slots, seeds};
}

// -- weighted, more than 32 without replacement ------------------------------------------------------------------------

// The first of each seed's order are the ones taken.
template <typename id_t>
__global__ void __launch_bounds__(kThreads)
    mark_taken(Request<id_t> q, int64_t size, const uint32_t* seeds, const int64_t* order, const int64_t* starts,
               uint8_t* taken) {
  const int64_t x = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (x < size) {
    const int64_t i = seeds[x];
    taken[order[x]] = x - starts[i] < q.count(starts[i + 1] - starts[i]);
  }
}

// In the list's order, which is the input's: what is taken before an edge is where it goes.
template <typename id_t>
__global__ void __launch_bounds__(kThreads)
    write_taken(EdgeSources<id_t> indices, int64_t size, const int64_t* list, const uint8_t* taken, const int64_t* places,
                id_t* neighbors, int64_t* positions) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c < size && taken[c]) {
    positions[places[c]] = list[c];
    neighbors[places[c]] = indices[list[c]];
  }
}

template <typename id_t, typename Filter>
void choose_first(const Call<id_t>& call, const Filter& filter) {
  const Device& device = call.device;
  const int64_t size = call.candidates;
  const Ordered ordered = order_candidates(call, filter);
  const Tensor taken = device.workspace<uint8_t>(size);
  const Tensor places = device.workspace<int64_t>(size + 1);
  const unsigned blocks = num_blocks(size, kThreads);
  mark_taken<<<blocks, kThreads, 0, device.stream()>>>(call.q, size, const_data<uint32_t>(ordered.seeds),
                                                       const_data<int64_t>(ordered.order), call.starts,
                                                       mutable_data<uint8_t>(taken));
  CUDA_CHECK_LAUNCH();
  exclusive_sum(device, size, CountsAt<uint8_t>{const_data<uint8_t>(taken)}, mutable_data<int64_t>(places));
  write_taken<<<blocks, kThreads, 0, device.stream()>>>(
      call.q.indices, size, const_data<int64_t>(ordered.list), const_data<uint8_t>(taken), const_data<int64_t>(places),
      mutable_data<id_t>(call.neighbors), mutable_data<int64_t>(call.positions));
  CUDA_CHECK_LAUNCH();
}

}  // namespace

// -- the two ways -------------------------------------------------------------------------------------------------------

template <typename id_t>
Result sample_by_time(const Device& device, const Request<id_t>& q) {
  Call<id_t> call(device, q);
  const InTime<id_t> filter{q, call.report, q.num_seeds};
  call.count(filter, false);
  if (call.total > 0) {
    CHECK_ARG(q.num_seeds <= kMaxDegree, "seeds must be fewer than 2^32, got ", q.num_seeds);
    const Ordered ordered = order_candidates(call, filter);
    call.choose_from(Listed{call.starts, const_data<int64_t>(ordered.list), const_data<int64_t>(ordered.order)});
  }
  return call.result();
}

template <typename id_t, typename weight_t>
Result sample_by_weight(const Device& device, const Request<id_t>& q, const weight_t* weight) {
  Call<id_t> call(device, q);
  const Weighted<id_t, weight_t, false> filter{q, call.report, q.num_seeds, weight, call.heaviest, call.starts};
  const bool in_proportion = q.replace && q.fanout >= 0;
  call.count(filter, in_proportion);
  if (call.total == 0) {
    return call.result();
  }
  if (in_proportion || q.fanout < 0) {
    const Tensor list = device.workspace<int64_t>(call.candidates);
    const Tensor sums = device.workspace<int64_t>(in_proportion ? call.candidates : 0);
    auto* const positions = mutable_data<int64_t>(list);
    if (in_proportion) {
      const Weighted<id_t, weight_t, true> summed{q, call.report, q.num_seeds, weight, call.heaviest, call.starts};
      collect_rows(device, summed, call.starts, EmitPosition{positions, mutable_data<int64_t>(sums)});
      call.choose_from(Proportional{{call.starts, positions, nullptr}, const_data<int64_t>(sums)});
    } else {
      collect_rows(device, filter, call.starts, EmitPosition{positions, nullptr});
      call.choose_from(Listed{call.starts, positions, nullptr});
    }
  } else if (q.fanout <= kWarp) {
    choose_smallest<<<num_blocks(q.num_seeds, kFilterWarps), kFilterThreads, 0, device.stream()>>>(
        filter, q, call.offset(), mutable_data<id_t>(call.neighbors), mutable_data<int64_t>(call.positions));
    CUDA_CHECK_LAUNCH();
  } else {
    CHECK_ARG(q.num_seeds <= kMaxDegree, "seeds must be fewer than 2^32, got ", q.num_seeds);
    choose_first(call, filter);
  }
  return call.result();
}

template Result sample_by_time(const Device&, const Request<int32_t>&);
template Result sample_by_time(const Device&, const Request<int64_t>&);
template Result sample_by_weight(const Device&, const Request<int32_t>&, const float*);
template Result sample_by_weight(const Device&, const Request<int64_t>&, const float*);
template Result sample_by_weight(const Device&, const Request<int32_t>&, const double*);
template Result sample_by_weight(const Device&, const Request<int64_t>&, const double*);

}  // namespace gnnsys::cuda
