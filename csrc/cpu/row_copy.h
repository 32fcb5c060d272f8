// Rows on their way from one table to another: the copiers of every width and cast, and the checks before them.
//
// A copier is called as copy(to_rows, to, from_rows, from) and moves one row. Rows are far apart in memory, so a loop
// over them asks for the rows of a later index while it copies the present one.
#pragma once

#include "common/check.h"
#include "common/parallel.h"
#include "common/prefetch.h"
#include "common/row_shape.h"
#include "cpu/vectors/kernels.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace gnnsys {

constexpr int64_t kBytesPerThread = 1 << 17;  // below this a second thread costs more than it brings
#ifdef __SSE2__
constexpr int64_t kBytesAhead = 8192;     // rows of so many bytes are on their way while one is copied
constexpr int64_t kPrefetchStride = 64;   // every line is asked for
#else
constexpr int64_t kBytesAhead = 2048;
constexpr int64_t kPrefetchStride = 256;  // a row is read through: the hardware brings the lines between
#endif
constexpr int64_t kStreamFrom = 1 << 22;      // outputs of so many bytes do not stay in the cache anyway

constexpr int64_t kMostRowsAhead = 32;

// Rows between the one being copied and the one being asked for.
inline int64_t rows_ahead(int64_t row_bytes) {
  return std::clamp<int64_t>(kBytesAhead / std::max<int64_t>(row_bytes, 1), 2, kMostRowsAhead);
}

// How a row gets from one place to another. Widths known at compile time are a few loads and stores.
template <int64_t kBytes>
struct CopyFixed {
  int64_t from_bytes() const { return kBytes; }
  void operator()(char* to_rows, int64_t to, const char* from_rows, int64_t from) const {
    std::memcpy(to_rows + to * kBytes, from_rows + from * kBytes, kBytes);
  }
};

// Copies whole blocks from byte i on, returns where it stopped. Inline blocks in ascending order let the core write
// full lines without reading them first; one call of memcpy per row does not, and is half as fast.
template <int64_t kBlock>
inline int64_t copy_blocks(char* out, const char* in, int64_t i, int64_t bytes) {
  for (; i + kBlock <= bytes; i += kBlock) {
    std::memcpy(out + i, in + i, kBlock);
  }
  return i;
}

struct CopyBytes {
  int64_t bytes;
  int64_t from_bytes() const { return bytes; }
  void operator()(char* to_rows, int64_t to, const char* from_rows, int64_t from) const {
    char* const out = to_rows + to * bytes;
    const char* const in = from_rows + from * bytes;
    int64_t i = copy_blocks<256>(out, in, 0, bytes);
    i = copy_blocks<64>(out, in, i, bytes);
    if (i < bytes) {
      std::memcpy(out + i, in + i, static_cast<size_t>(bytes - i));
    }
  }
};

#ifdef __SSE2__
// Whole lines written past the cache: x86 would otherwise read every line of the output before writing it.
struct CopyStream {
  int64_t bytes;  // a multiple of 64; rows of the output start at multiples of a vector
  int64_t from_bytes() const { return bytes; }
  void operator()(char* to_rows, int64_t to, const char* from_rows, int64_t from) const {
    kernels->stream(to_rows + to * bytes, from_rows + from * bytes, bytes);
  }
};
#endif

template <typename To, typename From>
struct Cast {
  int64_t size;
  int64_t from_bytes() const { return size * static_cast<int64_t>(sizeof(From)); }
  void operator()(char* to_rows, int64_t to, const char* from_rows, int64_t from) const {
    To* const out = reinterpret_cast<To*>(to_rows) + to * size;
    const From* const in = reinterpret_cast<const From*>(from_rows) + from * size;
    if constexpr (std::is_same_v<To, double> || std::is_same_v<From, double> || std::is_same_v<To, From>) {
      for (int64_t i = 0; i < size; ++i) {
        out[i] = cast_value<To>(in[i]);
      }
    } else {
      cast_kernel<To, From>().cast(out, in, size);
    }
  }
};

// Calls body with the copier that turns rows of `from` into rows of `to`.
template <typename Body>
void dispatch_copy(const Tensor& to, const char* to_name, const Tensor& from, const char* from_name, Body&& body) {
  const int64_t size = row_size(from);
  if (to.scalar_type() != from.scalar_type()) {
    return dispatch_cast(to.scalar_type(), to_name, from.scalar_type(), from_name, [&](auto to_value, auto from_value) {
      body(Cast<decltype(to_value), decltype(from_value)>{size});
    });
  }
  const int64_t bytes = size * static_cast<int64_t>(from.element_size());
  switch (bytes) {
    case 1:
      return body(CopyFixed<1>{});
    case 2:
      return body(CopyFixed<2>{});
    case 4:
      return body(CopyFixed<4>{});
    case 8:
      return body(CopyFixed<8>{});
    case 16:
      return body(CopyFixed<16>{});
    default:
#ifdef __SSE2__
      if (bytes % kCacheLine == 0 && to.size(0) * bytes >= kStreamFrom &&
          reinterpret_cast<uintptr_t>(to.mutable_data_ptr()) % static_cast<uintptr_t>(kernels->vector_bytes) == 0) {
        return body(CopyStream{bytes});
      }
#endif
      return body(CopyBytes{bytes});
  }
}

// Streamed stores are visible to other threads only after a fence.
inline void finish_stores() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

inline void check_rows(const Tensor& t, const char* name) {
  check_contiguous(t, name);
  CHECK_ARG(t.dim() >= 1, name, " must have at least one dimension");
}

}  // namespace gnnsys
