// gather_rows and scatter_rows: out[i] = src[index[i]] and dst[index[i]] = src[i], for rows of any shape and dtype.
//
// Work and bytes: one read and one write of every row moved, plus the indices. Rows are far apart in memory, so both
// loops ask for the rows of a later index while they copy the present one.
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/prefetch.h"
#include "common/tensors.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>
#include <optional>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace gnnsys {
namespace {

constexpr int64_t kBytesPerThread = 1 << 17;  // below this a second thread costs more than it brings
#ifdef __SSE2__
constexpr int64_t kBytesAhead = 8192;     // rows of so many bytes are on their way while one is copied
constexpr int64_t kPrefetchStride = 64;   // every line is asked for
#else
constexpr int64_t kBytesAhead = 2048;
constexpr int64_t kPrefetchStride = 256;  // a row is read through: the hardware brings the lines between
#endif
constexpr int64_t kStreamFrom = 1 << 22;      // outputs of so many bytes do not stay in the cache anyway
constexpr int64_t kBlockShift = 6;            // scatter: 64 neighbouring rows have the same owner

// Rows between the one being copied and the one being asked for.
int64_t rows_ahead(int64_t row_bytes) {
  return std::clamp<int64_t>(kBytesAhead / std::max<int64_t>(row_bytes, 1), 2, 32);
}

int64_t row_size(const Tensor& t) {
  int64_t size = 1;
  for (int64_t d = 1; d < t.dim(); ++d) {
    size *= t.size(d);
  }
  return size;
}

bool same_row_shape(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim()) {
    return false;
  }
  for (int64_t d = 1; d < a.dim(); ++d) {
    if (a.size(d) != b.size(d)) {
      return false;
    }
  }
  return true;
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
  int64_t bytes;  // a multiple of 64; rows of the output start at multiples of 16
  int64_t from_bytes() const { return bytes; }
  void operator()(char* to_rows, int64_t to, const char* from_rows, int64_t from) const {
    char* const out = to_rows + to * bytes;
    const char* const in = from_rows + from * bytes;
    for (int64_t i = 0; i < bytes; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
    }
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
    for (int64_t i = 0; i < size; ++i) {
      if constexpr (std::is_same_v<To, double> || std::is_same_v<From, double>) {
        out[i] = static_cast<To>(static_cast<double>(in[i]));
      } else {
        out[i] = static_cast<To>(static_cast<float>(in[i]));
      }
    }
  }
};

template <typename Body>
void dispatch_float(ScalarType type, const char* name, Body&& body) {
  switch (type) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Double:
      return body(double{});
    case ScalarType::BFloat16:
      return body(torch::headeronly::BFloat16{});
    case ScalarType::Half:
      return body(torch::headeronly::Half{});
    default:
      throw_argument(name, " must have a floating dtype to be cast, got ", dtype_name(type));
  }
}

// Calls body with the copier that turns rows of `from` into rows of `to`.
template <typename Body>
void dispatch_copy(const Tensor& to, const char* to_name, const Tensor& from, const char* from_name, Body&& body) {
  const int64_t size = row_size(from);
  if (to.scalar_type() != from.scalar_type()) {
    dispatch_float(to.scalar_type(), to_name, [&](auto to_value) {
      dispatch_float(from.scalar_type(), from_name,
                     [&](auto from_value) { body(Cast<decltype(to_value), decltype(from_value)>{size}); });
    });
    return;
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
          reinterpret_cast<uintptr_t>(to.mutable_data_ptr()) % 16 == 0) {
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

template <typename id_t, typename Copy>
void gather_range(char* out, const char* src, const id_t* index, int64_t begin, int64_t end, int64_t bytes,
                  int64_t ahead, const Copy copy) {
  const int64_t last = std::max(begin, end - ahead);
  for (int64_t i = begin; i < last; ++i) {
    prefetch_read(src + index[i + ahead] * bytes, bytes, kPrefetchStride);
    copy(out, i, src, index[i]);
  }
  for (int64_t i = last; i < end; ++i) {
    copy(out, i, src, index[i]);
  }
  finish_stores();
}

// Everything by value: a store through char* may alias whatever is reached through a reference.
template <typename id_t, typename Copy>
void gather(char* out, const char* src, const id_t* index, int64_t size, const Copy copy) {
  const int64_t bytes = copy.from_bytes();
  const int64_t ahead = rows_ahead(bytes);
  parallel_for(size, kBytesPerThread / std::max<int64_t>(bytes, 1), [=](int64_t begin, int64_t end) {
    gather_range(out, src, index, begin, end, bytes, ahead, copy);
  });
}

// Every thread walks all indices and writes the rows it owns, so a row that is named twice is written by one thread,
// in order: the last one wins, whatever the number of threads. Blocks of rows have owners in turn, which keeps
// threads balanced when the indices crowd in one corner of dst.
template <typename id_t, typename Copy>
void scatter(char* dst, const char* src, const id_t* index, int64_t size, const Copy& copy) {
  const int64_t grain = kBytesPerThread / std::max<int64_t>(copy.from_bytes(), 1);
  on_threads(num_threads_for(size, grain), [&](int t, int num_threads) {
    for (int64_t i = 0; i < size; ++i) {
      if (num_threads == 1 || (index[i] >> kBlockShift) % num_threads == t) {
        copy(dst, index[i], src, i);
      }
    }
    finish_stores();
  });
}

void check_rows(const Tensor& t, const char* name) {
  check_contiguous(t, name);
  CHECK_ARG(t.dim() >= 1, name, " must have at least one dimension");
}

bool overlap(const Tensor& a, const Tensor& b) {
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); };
  const auto end = [&](const Tensor& t) { return begin(t) + static_cast<uintptr_t>(t.numel()) * t.element_size(); };
  return a.numel() > 0 && b.numel() > 0 && begin(a) < end(b) && begin(b) < end(a);
}

void gather_rows_out(const Tensor& src, const Tensor& index, Tensor out) {
  check_rows(src, "src");
  check_ids(index, "index");
  check_rows(out, "out");
  CHECK_ARG(out.size(0) == index.numel(), "out must have len(index) = ", index.numel(), " rows, got ", out.size(0));
  CHECK_ARG(same_row_shape(src, out), "out must have rows of the same shape as src");
  check_id_range(index, src.size(0), "index");
  CHECK_ARG(!overlap(src, out), "out must not share memory with src");
  if (out.numel() == 0) {
    return;
  }
  dispatch_copy(out, "out", src, "src", [&](const auto& copy) {
    dispatch_ids(index, [&](auto id) {
      gather(mutable_data<char>(out), const_data<char>(src), const_data<decltype(id)>(index), index.numel(), copy);
    });
  });
}

Tensor gather_rows(const Tensor& src, const Tensor& index, std::optional<ScalarType> dtype) {
  check_rows(src, "src");
  check_ids(index, "index");
  std::vector<int64_t> shape{index.numel()};
  for (int64_t d = 1; d < src.dim(); ++d) {
    shape.push_back(src.size(d));
  }
  Tensor out = torch::stable::new_empty(src, shape, dtype.value_or(src.scalar_type()));
  gather_rows_out(src, index, out);
  return out;
}

void scatter_rows(Tensor dst, const Tensor& index, const Tensor& src) {
  check_rows(dst, "dst");
  check_ids(index, "index");
  check_rows(src, "src");
  CHECK_ARG(src.size(0) == index.numel(), "src must have len(index) = ", index.numel(), " rows, got ", src.size(0));
  CHECK_ARG(same_row_shape(src, dst), "src must have rows of the same shape as dst");
  check_id_range(index, dst.size(0), "index");
  CHECK_ARG(!overlap(src, dst), "src must not share memory with dst");
  if (src.numel() == 0) {
    return;
  }
  dispatch_copy(dst, "dst", src, "src", [&](const auto& copy) {
    dispatch_ids(index, [&](auto id) {
      scatter(mutable_data<char>(dst), const_data<char>(src), const_data<decltype(id)>(index), index.numel(), copy);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
  m.impl("gather_rows_out", TORCH_BOX(&gather_rows_out));
  m.impl("scatter_rows", TORCH_BOX(&scatter_rows));
}

}  // namespace gnnsys
