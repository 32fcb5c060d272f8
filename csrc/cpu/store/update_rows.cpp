// update_rows: dst[index[i]] = src[i], or += src[i], on rows that others read meanwhile; fill_uniform: first values.
//
// Work and bytes: one read of every source row, one write (add: and one read) of every row named. Every thread walks
// all indices and handles the blocks of rows it owns, so a row that is named twice is handled by one thread, in order:
// the last write wins and sums are formed in order, for any number of threads.
#include "common/id_range.h"
#include "common/philox.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/row_copy.h"
#include "cpu/store/versions.h"

#include <atomic>
#include <optional>

namespace gnnsys {
namespace {

template <typename T, typename From>
struct Add {
  int64_t size;
  int64_t from_bytes() const { return size * static_cast<int64_t>(sizeof(From)); }
  void operator()(char* to_rows, int64_t to, const char* from_rows, int64_t from) const {
    T* const out = reinterpret_cast<T*>(to_rows) + to * size;
    const From* const in = reinterpret_cast<const From*>(from_rows) + from * size;
    for (int64_t i = 0; i < size; ++i) {
      if constexpr (std::is_integral_v<T>) {
        using unsigned_t = std::make_unsigned_t<T>;  // sums wrap around, as torch's do
        out[i] = static_cast<T>(static_cast<unsigned_t>(out[i]) + static_cast<unsigned_t>(in[i]));
      } else if constexpr (std::is_same_v<T, double> || std::is_same_v<From, double>) {
        out[i] = static_cast<T>(static_cast<double>(out[i]) + static_cast<double>(in[i]));
      } else {
        out[i] = static_cast<T>(static_cast<float>(out[i]) + static_cast<float>(in[i]));
      }
    }
  }
};

template <typename Body>
void dispatch_add(const Tensor& dst, const Tensor& src, Body&& body) {
  const int64_t size = row_size(dst);
  if (dst.scalar_type() == src.scalar_type()) {
    switch (dst.scalar_type()) {
      case ScalarType::Byte:
        return body(Add<uint8_t, uint8_t>{size});
      case ScalarType::Char:
        return body(Add<int8_t, int8_t>{size});
      case ScalarType::Short:
        return body(Add<int16_t, int16_t>{size});
      case ScalarType::Int:
        return body(Add<int32_t, int32_t>{size});
      case ScalarType::Long:
        return body(Add<int64_t, int64_t>{size});
      default:
        break;
    }
  }
  dispatch_float(dst.scalar_type(), "dst", [&](auto to) {
    dispatch_float(src.scalar_type(), "src", [&](auto from) { body(Add<decltype(to), decltype(from)>{size}); });
  });
}

// Whole rows in order, without stores past the cache: the version must not be seen before the row.
template <typename Body>
void dispatch_write(const Tensor& dst, const Tensor& src, Body&& body) {
  if (dst.scalar_type() == src.scalar_type()) {
    return body(CopyBytes{row_size(dst) * static_cast<int64_t>(dst.element_size())});
  }
  dispatch_cast(dst.scalar_type(), "dst", src.scalar_type(), "src", [&](auto to, auto from) {
    body(Cast<decltype(to), decltype(from)>{row_size(dst)});
  });
}

template <typename id_t, typename Change>
bool update(char* dst, const char* src, const id_t* index, int64_t size, Versions versions, const Change change) {
  const int64_t grain = kBytesPerThread / std::max<int64_t>(change.from_bytes(), 1);
  std::atomic<bool> written{true};
  for_shares(num_threads_for(size, grain), [&, dst, src, index](int t, int num_threads) {
    for (int64_t i = 0; i < size; ++i) {
      const int64_t row = index[i];
      if (num_threads == 1 || (row >> Versions::kShift) % num_threads == t) {
        if (!versions.begin_write(row)) {
          written = false;
          return;
        }
        change(dst, row, src, i);
        versions.end_write(row);
      }
    }
  });
  return written;
}

void update_rows(Tensor dst, const std::optional<Tensor>& versions, const Tensor& index, const Tensor& src, bool add) {
  check_rows(dst, "dst");
  check_versions(versions, dst.size(0));
  check_ids(index, "index");
  check_rows(src, "src");
  CHECK_ARG(src.size(0) == index.numel(), "src must have len(index) = ", index.numel(), " rows, got ", src.size(0));
  CHECK_ARG(same_row_shape(src, dst), "src must have rows of the same shape as dst");
  check_id_range(index, dst.size(0), "index");
  CHECK_ARG(!overlap(src, dst), "src must not share memory with dst");
  if (src.numel() == 0) {
    return;
  }
  const auto run = [&](const auto& change) {
    dispatch_ids(index, [&](auto id) {
      check_written(update(mutable_data<char>(dst), const_data<char>(src), const_data<decltype(id)>(index),
                           index.numel(), Versions::of(versions), change));
    });
  };
  if (add) {
    dispatch_add(dst, src, run);
  } else {
    dispatch_write(dst, src, run);
  }
}

// Row r, column c holds low + (high - low) * u, where u is word c % 4 at Philox counter (first + r, c / 4): the same on
// any number of parts.
void fill_uniform(Tensor rows, int64_t first, double low, double high, int64_t key) {
  check_rows(rows, "rows");
  CHECK_ARG(first >= 0, "first must be >= 0, got ", first);
  const int64_t size = row_size(rows);
  dispatch_float(rows.scalar_type(), "rows", [&](auto value) {
    using T = decltype(value);
    T* const out = mutable_data<T>(rows);
    parallel_for(rows.size(0), (1 << 12) / std::max<int64_t>(size, 1), [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const uint64_t row = static_cast<uint64_t>(first) + static_cast<uint64_t>(r);
        Words words{};
        for (int64_t c = 0; c < size; ++c) {
          if (c % 4 == 0) {
            const auto block = static_cast<uint64_t>(c / 4);
            words = philox4x32(static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32),
                               static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                               static_cast<uint64_t>(key));
          }
          const double drawn = low + (high - low) * ((static_cast<double>(words.w[c % 4]) + 0.5) * 0x1p-32);
          if constexpr (std::is_same_v<T, double>) {
            out[r * size + c] = drawn;
          } else {
            out[r * size + c] = static_cast<T>(static_cast<float>(drawn));
          }
        }
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "update_rows", &update_rows);
  REGISTER_OP(m, "fill_uniform", &fill_uniform);
}

}  // namespace gnnsys
