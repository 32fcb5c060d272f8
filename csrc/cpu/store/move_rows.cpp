// move_rows: out[order[j]] = src[index[j]], whole rows or some of their columns, cast on the way.
//
// What a pull does with rows that are at hand (both lists) and with rows that arrived (no index): they go straight to
// their place in the caller's buffer. Work and bytes: one read and one write per row, plus the lists.
#include "common/id_range.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/row_copy.h"
#include "cpu/store/versions.h"

#include <atomic>
#include <numeric>
#include <optional>

namespace gnnsys {
namespace {

constexpr int64_t kColumnsPrefetch = 512;  // of a row of which some columns are read
// Rows in turn just came in: other cores still receive and send, and are left to that where there are few.
inline int64_t arrived_bytes_per_thread() { return torch::stable::get_num_threads() > 4 ? 1 << 20 : 1 << 22; }

struct Bits128 {
  uint64_t words[2];
};

// Some columns of a row of `size` values, in the order they are named.
template <typename To, typename From>
struct CopyColumns {
  int64_t size;
  const int64_t* columns;
  int64_t num_columns;

  int64_t from_bytes() const { return size * static_cast<int64_t>(sizeof(From)); }
  int64_t wanted_bytes() const { return std::min(from_bytes(), kColumnsPrefetch); }
  void operator()(char* to_rows, int64_t to, const char* from_rows, int64_t from) const {
    To* const out = reinterpret_cast<To*>(to_rows) + to * num_columns;
    const From* const in = reinterpret_cast<const From*>(from_rows) + from * size;
    for (int64_t i = 0; i < num_columns; ++i) {
      if constexpr (std::is_same_v<To, From>) {
        out[i] = in[columns[i]];
      } else {
        out[i] = cast_value<To>(in[columns[i]]);
      }
    }
  }
};

template <typename Body>
void dispatch_columns(const Tensor& out, const Tensor& src, const Tensor& columns, Body&& body) {
  const int64_t size = row_size(src);
  const auto* column = const_data<int64_t>(columns);
  const int64_t num_columns = columns.numel();
  if (out.scalar_type() != src.scalar_type()) {
    return dispatch_cast(out.scalar_type(), "out", src.scalar_type(), "src", [&](auto to, auto from) {
      body(CopyColumns<decltype(to), decltype(from)>{size, column, num_columns});
    });
  }
  switch (src.element_size()) {
    case 1:
      return body(CopyColumns<uint8_t, uint8_t>{size, column, num_columns});
    case 2:
      return body(CopyColumns<uint16_t, uint16_t>{size, column, num_columns});
    case 4:
      return body(CopyColumns<uint32_t, uint32_t>{size, column, num_columns});
    case 8:
      return body(CopyColumns<uint64_t, uint64_t>{size, column, num_columns});
    default:
      return body(CopyColumns<Bits128, Bits128>{size, column, num_columns});
  }
}

template <typename Copy>
int64_t wanted_bytes(const Copy& copy) {
  return copy.from_bytes();
}
template <typename To, typename From>
int64_t wanted_bytes(const CopyColumns<To, From>& copy) {
  return copy.wanted_bytes();
}

constexpr int64_t kRowBlock = 256;  // rows whose numbers are read at once

// A list of rows, or all of them in turn. Read in blocks of int64, so that no copier is made once per type of a list.
struct List {
  const int32_t* narrow = nullptr;
  const int64_t* wide = nullptr;

  static List of(const std::optional<Tensor>& ids) {
    if (!ids.has_value()) {
      return {};
    }
    const bool is_narrow = ids->scalar_type() == ScalarType::Int;
    return is_narrow ? List{const_data<int32_t>(*ids), nullptr} : List{nullptr, const_data<int64_t>(*ids)};
  }

  bool in_turn() const { return narrow == nullptr && wide == nullptr; }

  // Rows [first, first + size); `block` is where they may be written.
  const int64_t* read(int64_t first, int64_t size, int64_t* block) const {
    if (wide != nullptr) {
      return wide + first;
    }
    if (narrow != nullptr) {
      std::copy_n(narrow + first, size, block);
    } else {
      std::iota(block, block + size, first);
    }
    return block;
  }
};

template <typename Copy>
bool move(char* out, const char* src, List index, List order, int64_t size, Versions versions, const Copy copy) {
  const int64_t bytes = copy.from_bytes();
  const int64_t wanted = wanted_bytes(copy);
  const int64_t ahead = index.in_turn() ? 0 : rows_ahead(wanted);  // rows in turn: the hardware knows
  const int64_t bytes_per_thread = index.in_turn() ? arrived_bytes_per_thread() : kBytesPerThread;
  std::atomic<bool> whole{true};
  parallel_for(size, bytes_per_thread / std::max<int64_t>(wanted, 1), [&, out, src](int64_t begin, int64_t end) {
    int64_t from_block[kRowBlock + kMostRowsAhead];
    int64_t to_block[kRowBlock];
    for (int64_t first = begin; first < end && whole; first += kRowBlock) {
      const int64_t count = std::min(kRowBlock, end - first);
      const int64_t readable = std::min(count + ahead, end - first);
      const int64_t asked = ahead == 0 ? 0 : readable - ahead;  // rows before this one ask for one that comes later
      const int64_t* const from = index.read(first, readable, from_block);
      const int64_t* const to = order.read(first, count, to_block);
      for (int64_t i = 0; i < count; ++i) {
        if (i < asked) {
          prefetch_read(src + from[i + ahead] * bytes, wanted, kPrefetchStride);
        }
        if (!versions) {
          copy(out, to[i], src, from[i]);
        } else if (!versions.read(from[i], [&] { copy(out, to[i], src, from[i]); })) {
          whole = false;
          break;
        }
      }
    }
    finish_stores();
  });
  return whole;
}

// How many rows are moved: as many as either list names, or all of src.
int64_t check_lists(const Tensor& src, const std::optional<Tensor>& index, const std::optional<Tensor>& order,
                    const Tensor& out) {
  int64_t size = src.size(0);
  if (index.has_value()) {
    check_ids(*index, "index");
    check_id_range(*index, src.size(0), "index");
    size = index->numel();
  }
  if (order.has_value()) {
    check_ids(*order, "order");
    CHECK_ARG(order->numel() == size, "order must name ", size, " rows of out, got ", order->numel());
    check_id_range(*order, out.size(0), "order");
  } else {
    CHECK_ARG(out.size(0) == size, "out must have ", size, " rows, got ", out.size(0));
  }
  return size;
}

bool move_rows(const Tensor& src, const std::optional<Tensor>& index, const std::optional<Tensor>& order, Tensor out,
               const std::optional<Tensor>& columns, const std::optional<Tensor>& versions) {
  check_rows(src, "src");
  check_rows(out, "out");
  const int64_t size = check_lists(src, index, order, out);
  check_versions(versions, src.size(0));
  if (columns.has_value()) {
    check_vector(*columns, "columns");
    check_dtype(*columns, ScalarType::Long, "columns");
    check_id_range(*columns, row_size(src), "columns");
    CHECK_ARG(row_size(out) == columns->numel(), "out must have rows of ", columns->numel(), " columns, got ",
              row_size(out));
  } else {
    CHECK_ARG(same_row_shape(src, out), "out must have rows of the same shape as src");
  }
  CHECK_ARG(!overlap(src, out), "out must not share memory with src");
  if (size == 0 || row_size(out) == 0) {
    return true;
  }
  bool whole = true;
  const auto run = [&](const auto& copy) {
    whole = move(mutable_data<char>(out), const_data<char>(src), List::of(index), List::of(order), size,
                 Versions::of(versions), copy);
  };
  if (columns.has_value()) {
    dispatch_columns(out, src, *columns, run);
  } else {
    dispatch_copy(out, "out", src, "src", run);
  }
  return whole;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "move_rows", &move_rows); }

}  // namespace gnnsys
