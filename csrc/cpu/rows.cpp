// gather_rows and scatter_rows: out[i] = src[index[i]] and dst[index[i]] = src[i], for rows of any shape and dtype; and
// read_rows, which reads as gather_rows does and writes nothing.
//
// Work and bytes: one read and one write of every row moved, plus the indices.
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/row_copy.h"

#include <atomic>
#include <optional>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kBlockShift = 6;  // scatter: 64 neighbouring rows have the same owner

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
  for_shares(num_threads_for(size, grain), [&](int t, int num_threads) {
    for (int64_t i = 0; i < size; ++i) {
      if (num_threads == 1 || (index[i] >> kBlockShift) % num_threads == t) {
        copy(dst, index[i], src, i);
      }
    }
    finish_stores();
  });
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
  Tensor out = empty_cpu(shape, dtype.value_or(src.scalar_type()));
  gather_rows_out(src, index, out);
  return out;
}

// The first word of every 64 bytes of some rows, exclusively or'ed: what it takes to bring rows from memory and nothing
// else, the limit of every gather.
int64_t read_rows(const Tensor& src, const Tensor& index) {
  check_rows(src, "src");
  check_ids(index, "index");
  check_id_range(index, src.size(0), "index");
  const int64_t bytes = row_size(src) * static_cast<int64_t>(src.element_size());
  constexpr auto kWord = static_cast<int64_t>(sizeof(uint64_t));
  CHECK_ARG(bytes % kWord == 0, "rows of src must be a multiple of eight bytes, got ", bytes);
  std::atomic<uint64_t> all{0};
  dispatch_ids(index, [&](auto id) {
    const auto* const ids = const_data<decltype(id)>(index);
    const auto* const rows = const_data<char>(src);
    const int64_t ahead = rows_ahead(bytes);
    parallel_for(index.numel(), kBytesPerThread / std::max<int64_t>(bytes, 1), [&](int64_t begin, int64_t end) {
      uint64_t found = 0;
      for (int64_t i = begin; i < end; ++i) {
        if (i + ahead < end) {
          prefetch_read(rows + ids[i + ahead] * bytes, bytes);
        }
        const char* const row = rows + ids[i] * bytes;
        for (int64_t at = 0; at < bytes; at += kCacheLine) {
          uint64_t word;
          std::memcpy(&word, row + at, sizeof(word));
          found ^= word;
        }
      }
      all ^= found;
    });
  });
  return static_cast<int64_t>(all.load());
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
  REGISTER_OP(m, "gather_rows", &gather_rows);
  REGISTER_OP(m, "gather_rows_out", &gather_rows_out);
  REGISTER_OP(m, "read_rows", &read_rows);
  REGISTER_OP(m, "scatter_rows", &scatter_rows);
}

}  // namespace gnnsys
