// Rows on their way from one table to another on the device: how a warp moves them, whatever their width and dtype.
//
// A row is moved by a group of 1 to 32 lanes, a unit (up to 16 bytes) per lane and pass, and a group has kRows rows on
// their way at once. So a warp asks for 512 bytes and more before it waits for the first of them, for rows of 4 bytes
// as for rows of 4 KB. Tables may lie in pinned host memory: a row is asked for in whole 128-byte lines there, because
// that is what a request over the bus can carry.
//
// What is moved where is said by a Route: locate() finds the ends of kRows rows, nullptr where nothing is to be moved,
// and is built so that the loads of all its rows are under way before the first is looked at; finish() is called once by
// every thread, after the last row.
#pragma once

#include "common/row_shape.h"
#include "cuda/device.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace gnnsys::cuda {

constexpr int kRowThreads = 256;
constexpr int kRows = 4;
constexpr int kBusLine = 128;

// A bus is kept busy by a few hundred KB of requests, which so many blocks make on the whole device: the rest of it is
// left to whatever else runs, and what others ask the bus for does not wait behind megabytes.
constexpr int kHostBlocks = 32;

template <int kBytes>
struct Word;
template <>
struct Word<1> { using type = unsigned char; };
template <>
struct Word<2> { using type = unsigned short; };
template <>
struct Word<4> { using type = unsigned int; };
template <>
struct Word<8> { using type = uint2; };
template <>
struct Word<16> { using type = uint4; };

// What a lane moves at a time. `convert` makes of the word that was read the word that is written.
template <int kBytes>
struct CopyUnit {
  using From = typename Word<kBytes>::type;
  using To = From;
  static constexpr int64_t kValues = kBytes;  // bytes count as the values of a row that is copied as it is
  static __device__ To convert(From word) { return word; }
};

template <typename to_t, typename from_t, int kCount>
struct CastUnit {
  using From = typename Word<kCount * sizeof(from_t)>::type;
  using To = typename Word<kCount * sizeof(to_t)>::type;
  static constexpr int64_t kValues = kCount;
  static __device__ To convert(From word) {
    from_t in[kCount];
    to_t out[kCount];
    memcpy(in, &word, sizeof(word));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out[i] = cast_value<to_t>(in[i]);
    }
    To result;
    memcpy(&result, out, sizeof(result));
    return result;
  }
};

// int32 or int64 ids. The width is asked at run time: every lane of every warp agrees on it.
struct Ids {
  const void* data;
  bool wide;

  explicit Ids(const Tensor& t) : data(t.const_data_ptr()), wide(t.scalar_type() == ScalarType::Long) {}
  explicit Ids(const int32_t* ids) : data(ids), wide(false) {}

  __device__ int64_t operator[](int64_t i) const {
    return wide ? __ldg(static_cast<const long long*>(data) + i) : __ldg(static_cast<const int*>(data) + i);
  }

  // The ids of kRows rows, all asked for before any is looked at; beyond the end, that of the last one.
  __device__ void load(const int64_t (&row)[kRows], int64_t num_rows, int64_t (&id)[kRows]) const {
    if (wide) {
      load_as<long long>(row, num_rows, id);
    } else {
      load_as<int>(row, num_rows, id);
    }
  }

 private:
  template <typename id_t>
  __device__ void load_as(const int64_t (&row)[kRows], int64_t num_rows, int64_t (&id)[kRows]) const {
    id_t found[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      found[r] = __ldg(static_cast<const id_t*>(data) + min(row[r], num_rows - 1));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      id[r] = found[r];
    }
  }
};

__device__ inline bool is_outside(int64_t id, int64_t bound) {
  return static_cast<uint64_t>(id) >= static_cast<uint64_t>(bound);
}

__device__ inline void check_id(int64_t id, int64_t bound, const char* name) {
  if (is_outside(id, bound)) {
    fault(name, id, bound);
  }
}

// One branch for all: loads behind it are not held up by four.
__device__ inline void check_ids(const int64_t (&id)[kRows], int64_t bound, const char* name) {
  bool outside = false;
  int64_t named = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    named = is_outside(id[r], bound) ? id[r] : named;
    outside |= is_outside(id[r], bound);
  }
  if (outside) {
    fault(name, named, bound);
  }
}

// What is the same for every row of a launch. `line_up` starts passes over a row at the lines of the bus.
struct RowShape {
  int num_units;
  int log2_group;
  bool line_up;

  int64_t rows_per_block() const { return static_cast<int64_t>(kRowThreads >> log2_group) * kRows; }
};

// The share of one of `num_blocks` blocks that move rows 0 to num_rows together.
//
// Work and bytes: one read and one write of every row, plus what the route reads.
template <typename Unit, typename Route>
__device__ void move_share(Route& route, int64_t block, int64_t num_blocks, int64_t num_rows, const RowShape& shape) {
  using From = typename Unit::From;
  using To = typename Unit::To;
  const int num_units = shape.num_units;
  const int group = 1 << shape.log2_group;
  const int lane = static_cast<int>(threadIdx.x) & (group - 1);
  const int num_groups = kRowThreads >> shape.log2_group;
  const int64_t per_block = static_cast<int64_t>(num_groups) * kRows;
  const int end = num_units + (shape.line_up ? kBusLine / static_cast<int>(sizeof(From)) - 1 : 0);

  for (int64_t first = block * per_block; first < num_rows; first += num_blocks * per_block) {
    int64_t row[kRows];
    const From* from[kRows];
    To* to[kRows];
    int shift[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row[r] = first + r * num_groups + (threadIdx.x >> shape.log2_group);  // neighbouring groups, neighbouring rows
    }
    route.locate(row, num_rows, num_units, lane == 0, from, to);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      shift[r] = shape.line_up ? static_cast<int>(reinterpret_cast<uintptr_t>(from[r]) % kBusLine / sizeof(From)) : 0;
    }
    for (int u = lane; u < end; u += group) {
      From word[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int unit = u - shift[r];
        if (from[r] != nullptr && unit >= 0 && unit < num_units) {
          word[r] = __ldg(from[r] + unit);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int unit = u - shift[r];
        if (from[r] != nullptr && unit >= 0 && unit < num_units) {
          to[r][unit] = Unit::convert(word[r]);
        }
      }
    }
  }
}

template <typename Unit, typename Route>
__global__ void __launch_bounds__(kRowThreads) move_rows(Route route, int64_t num_rows, RowShape shape) {
  move_share<Unit>(route, blockIdx.x, gridDim.x, num_rows, shape);
  route.finish();
}

// The rows of two routes at once: those of `slow`, as many as `num_slow` says on the device, by the first few blocks and
// those of `fast` by all others.
template <typename Unit, typename Slow, typename Fast>
__global__ void __launch_bounds__(kRowThreads) move_both(Slow slow, const unsigned* num_slow, int num_slow_blocks,
                                                         RowShape slow_shape, Fast fast, int64_t num_fast,
                                                         RowShape fast_shape) {
  const int block = static_cast<int>(blockIdx.x);
  if (block < num_slow_blocks) {
    move_share<Unit>(slow, block, num_slow_blocks, *num_slow, slow_shape);
  } else {
    move_share<Unit>(fast, block - num_slow_blocks, static_cast<int>(gridDim.x) - num_slow_blocks, num_fast, fast_shape);
  }
  fast.finish();
}

// Rows of `row_values` values (bytes where they are copied as they are), some of which come over the bus if `from_host`.
template <typename Unit>
RowShape row_shape(int64_t row_values, bool from_host) {
  const int64_t num_units = row_values / Unit::kValues;
  CHECK_ARG(num_units <= std::numeric_limits<int>::max() - 2 * kBusLine, "rows must be shorter, got ", row_values,
            " values");
  int log2_group = 0;
  while (log2_group < 5 && (int64_t{1} << log2_group) < num_units) {
    ++log2_group;
  }
  return {static_cast<int>(num_units), log2_group, from_host && num_units > kWarp};  // a short row is asked for in one go
}

// Launches move_rows for `num_rows` rows in up to `max_blocks` blocks, 0 for as many as there is work for.
template <typename Unit, typename Route>
void launch_rows(const Device& device, const Route& route, int64_t num_rows, int64_t row_values, bool from_host,
                 int max_blocks) {
  const RowShape shape = row_shape<Unit>(row_values, from_host);
  unsigned blocks = num_blocks(num_rows, shape.rows_per_block());
  if (max_blocks > 0) {
    blocks = std::min(blocks, static_cast<unsigned>(max_blocks));
  }
  move_rows<Unit><<<blocks, kRowThreads, 0, device.stream()>>>(route, num_rows, shape);
  CUDA_CHECK_LAUNCH();
}

inline uintptr_t address(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); }

// Calls body(unit, row_values) with the widest unit in which rows of `from` become rows of `to`. `from_bits` are the
// addresses of all tables that rows come from, or-ed: their common alignment.
template <typename Body>
void dispatch_units(const Tensor& to, const char* to_name, const Tensor& from, const char* from_name,
                    uintptr_t from_bits, Body&& body) {
  const int64_t size = row_size(from);
  const uintptr_t to_bits = address(to);
  if (to.scalar_type() != from.scalar_type()) {
    dispatch_float(to.scalar_type(), to_name, [&](auto to_value) {
      dispatch_float(from.scalar_type(), from_name, [&](auto from_value) {
        using to_t = decltype(to_value);
        using from_t = decltype(from_value);
        if constexpr (!std::is_same_v<to_t, from_t>) {
          constexpr int kCount = 16 / static_cast<int>(std::max(sizeof(to_t), sizeof(from_t)));
          if (size % kCount == 0 && to_bits % (kCount * sizeof(to_t)) == 0 &&
              from_bits % (kCount * sizeof(from_t)) == 0) {
            return body(CastUnit<to_t, from_t, kCount>{}, size);
          }
          return body(CastUnit<to_t, from_t, 1>{}, size);
        }
      });
    });
    return;
  }
  const int64_t bytes = size * static_cast<int64_t>(from.element_size());
  const uintptr_t bits = static_cast<uintptr_t>(bytes) | from_bits | to_bits;
  if (bits % 16 == 0) {
    return body(CopyUnit<16>{}, bytes);
  }
  if (bits % 8 == 0) {
    return body(CopyUnit<8>{}, bytes);
  }
  if (bits % 4 == 0) {
    return body(CopyUnit<4>{}, bytes);
  }
  if (bits % 2 == 0) {
    return body(CopyUnit<2>{}, bytes);
  }
  return body(CopyUnit<1>{}, bytes);
}

inline Device device_of_index(const Tensor& index) {
  CHECK_ARG(index.is_cuda(), "index must be on the device whose kernels move the rows: pass index.cuda()");
  return Device(index);
}

// Rows that the device reads where they are, and rows that it writes.
inline void check_rows_from(const Tensor& t, const Device& device, const char* name) {
  check_readable(t, device, name);
  CHECK_ARG(t.dim() >= 1, name, " must have at least one dimension");
}

inline void check_rows_to(const Tensor& t, const Device& device, const char* name) {
  check_contiguous(t, device, name);
  CHECK_ARG(t.dim() >= 1, name, " must have at least one dimension");
}

}  // namespace gnnsys::cuda
