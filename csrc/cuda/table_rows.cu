// read_table: rows of a table as a device reads it: some have a copy in device memory, the others lie in pieces, on the
// device or in host memory that it reads. Rows that are in no piece are left alone: they are on their way from elsewhere.
//
// Rows of host memory are asked for in the order of their ids by a few blocks, as in gather_rows and gather_cached, while
// all other blocks copy what is cached.
//
// Work and bytes: one read and one write of every row, a comparison with every piece, an id and a slot per row.
#include "common/register.h"
#include "cuda/row_order.cuh"

#include <optional>
#include <vector>

namespace gnnsys::cuda {
namespace {

constexpr int kMaxPieces = 64;

// Piece p has the rows first[p] to end[p]; pieces ascend.
template <typename From>
struct TablePieces {
  const From* rows[kMaxPieces];
  int64_t first[kMaxPieces];
  int64_t end[kMaxPieces];
  int count;

  __device__ const From* row(int64_t id, int64_t num_units) const {
    for (int p = 0; p < count; ++p) {
      if (id < end[p]) {
        return id < first[p] ? nullptr : rows[p] + (id - first[p]) * num_units;
      }
    }
    return nullptr;
  }
};

enum class Reads { kAll, kCached, kUncached };

template <typename Unit>
struct ReadTable {
  using From = typename Unit::From;
  typename Unit::To* out;
  TablePieces<From> pieces;
  const From* cache;
  const int* slots;  // null: nothing is cached
  int64_t num_cached;
  Ids index;
  const uint32_t* positions;  // of the ids among the rows of out; null: their own
  int64_t num_rows_of_table;
  unsigned long long* hits;
  Reads reads;
  unsigned found = 0;  // by this thread; a thread sees far fewer than 2^32 rows

  __device__ void locate(const int64_t (&row)[kRows], int64_t num_rows, int64_t num_units, bool counts,
                         const From* (&from)[kRows], typename Unit::To* (&to)[kRows]) {
    int64_t id[kRows];
    int64_t at[kRows];
    int slot[kRows];
    index.load(row, num_rows, id);
    load_positions(positions, row, num_rows, at);
    check_ids(id, num_rows_of_table, "index");
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      slot[r] = slots == nullptr || reads == Reads::kUncached ? -1 : __ldg(slots + id[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool hit = slot[r] >= 0;
      if (slot[r] >= num_cached) {
        fault("slots", slot[r], num_cached);
      }
      found += hit && counts && row[r] < num_rows;
      from[r] = nullptr;
      if (row[r] < num_rows) {
        if (hit) {
          from[r] = cache + slot[r] * num_units;
        } else if (reads != Reads::kCached) {
          from[r] = pieces.row(id[r], num_units);
        }
      }
      to[r] = out + at[r] * num_units;
    }
  }

  // One addition to global memory per block. Whole numbers: the order does not matter.
  __device__ void finish() const {
    if (hits == nullptr) {
      return;  // every thread of the grid agrees
    }
    __shared__ unsigned of_warp[kRowThreads / kWarp];
    const unsigned sum = __reduce_add_sync(kAllLanes, found);
    if (threadIdx.x % kWarp == 0) {
      of_warp[threadIdx.x / kWarp] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned long long total = 0;
      for (const unsigned part : of_warp) {
        total += part;
      }
      atomicAdd(hits, total);
    }
  }
};

template <typename From>
TablePieces<From> make_pieces(const std::vector<Tensor>& srcs, const std::vector<int64_t>& firsts) {
  TablePieces<From> pieces{};
  for (size_t k = 0; k < srcs.size(); ++k) {
    pieces.rows[k] = const_data<From>(srcs[k]);
    pieces.first[k] = firsts[k];
    pieces.end[k] = firsts[k] + srcs[k].size(0);
  }
  pieces.count = static_cast<int>(srcs.size());
  return pieces;
}

void check_pieces(const Device& device, const std::vector<Tensor>& srcs, const std::vector<int64_t>& firsts,
                  int64_t num_rows, const Tensor& like, const Tensor& out) {
  CHECK_ARG(srcs.size() == firsts.size() && srcs.size() <= static_cast<size_t>(kMaxPieces), "srcs must be up to ",
            kMaxPieces, " pieces of the table, and firsts the number of each one's first row");
  int64_t end = 0;
  for (size_t k = 0; k < srcs.size(); ++k) {
    check_rows_from(srcs[k], device, "srcs");
    check_dtype(srcs[k], like.scalar_type(), "srcs");
    CHECK_ARG(srcs[k].is_cuda() == srcs[0].is_cuda(), "srcs must all be on the device, or all in host memory");
    CHECK_ARG(same_row_shape(srcs[k], out), "out must have rows of the same shape as srcs");
    CHECK_ARG(!overlap(srcs[k], out), "out must not share memory with srcs");
    CHECK_ARG(firsts[k] >= end, "pieces of the table must ascend and not overlap");
    end = firsts[k] + srcs[k].size(0);
  }
  CHECK_ARG(end <= num_rows, "the table has ", num_rows, " rows, its pieces end at ", end);
}

void read_table(std::vector<Tensor> srcs, std::vector<int64_t> firsts, std::optional<Tensor> cache,
                std::optional<Tensor> slots, int64_t num_rows, const Tensor& index, Tensor out,
                std::optional<Tensor> hits) {
  const Device device = device_of_index(index);
  check_ids(index, device, "index");
  check_rows_to(out, device, "out");
  CHECK_ARG(out.size(0) == index.numel(), "out must have len(index) = ", index.numel(), " rows, got ", out.size(0));
  CHECK_ARG(cache.has_value() == slots.has_value(), "cache and slots go together, got only one of them");
  CHECK_ARG(cache.has_value() || !srcs.empty(), "there must be a piece of the table, or a cache");
  const Tensor& like = srcs.empty() ? *cache : srcs[0];
  check_pieces(device, srcs, firsts, num_rows, like, out);
  if (cache) {
    check_rows_to(*cache, device, "cache");
    check_dtype(*cache, like.scalar_type(), "cache");
    CHECK_ARG(same_row_shape(*cache, out), "out must have rows of the same shape as cache");
    CHECK_ARG(!overlap(*cache, out), "out must not share memory with cache");
    check_vector(*slots, device, "slots");
    check_dtype(*slots, ScalarType::Int, "slots");
    CHECK_ARG(slots->numel() == num_rows, "slots must have an entry for each of the ", num_rows, " rows, got ",
              slots->numel());
  }
  if (hits) {
    check_vector(*hits, device, "hits");
    check_dtype(*hits, ScalarType::Long, "hits");
    CHECK_ARG(hits->numel() == 1, "hits must have one entry, got ", hits->numel());
  }
  if (out.numel() == 0) {
    return;
  }
  uintptr_t from_bits = cache && cache->numel() > 0 ? address(*cache) : 0;
  for (const Tensor& src : srcs) {
    from_bits |= src.numel() > 0 ? address(src) : 0;  // a piece without rows has no address to speak of
  }
  const bool from_host = !like.is_cuda();
  const RowOrder order(device, index, like, num_rows, slots ? &*slots : nullptr);
  dispatch_units(out, "out", like, "srcs", from_bits, [&](auto unit, int64_t row_values) {
    using Unit = decltype(unit);
    using From = typename Unit::From;
    ReadTable<Unit> all{mutable_data<typename Unit::To>(out),
                        make_pieces<From>(srcs, firsts),
                        cache ? const_data<From>(*cache) : nullptr,
                        slots ? const_data<int>(*slots) : nullptr,
                        cache ? cache->size(0) : 0,
                        Ids(index),
                        nullptr,
                        num_rows,
                        hits ? mutable_data<unsigned long long>(*hits) : nullptr,
                        Reads::kAll};
    ReadTable<Unit> by_id = all;
    by_id.index = order.ids();
    by_id.positions = order.positions();
    if (order.num_left() == nullptr) {
      launch_rows<Unit>(device, by_id, index.numel(), row_values, from_host, from_host && !slots ? kHostBlocks : 0);
      return;
    }
    all.reads = Reads::kCached;
    by_id.reads = Reads::kUncached;
    const RowShape here = row_shape<Unit>(row_values, false);
    const unsigned blocks = kHostBlocks + num_blocks(index.numel(), here.rows_per_block());
    move_both<Unit><<<blocks, kRowThreads, 0, device.stream()>>>(
        by_id, order.num_left(), kHostBlocks, row_shape<Unit>(row_values, from_host), all, index.numel(), here);
    CUDA_CHECK_LAUNCH();
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "read_table", &read_table); }

}  // namespace gnnsys::cuda
