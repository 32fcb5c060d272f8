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
      } else if constexpr (std::is_same_v<To, double> || std::is_same_v<From, double>) {
        out[i] = static_cast<To>(static_cast<double>(in[columns[i]]));
      } else {
        out[i] = static_cast<To>(static_cast<float>(in[columns[i]]));
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
    dispatch_float(out.scalar_type(), "out", [&](auto to) {
      dispatch_float(src.scalar_type(), "src",
                     [&](auto from) { body(CopyColumns<decltype(to), decltype(from)>{size, column, num_columns}); });
    });
    return;
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

// A list of rows, or all of them in turn.
template <typename id_t>
struct List {
  const id_t* ids;
  int64_t operator[](int64_t i) const { return ids == nullptr ? i : static_cast<int64_t>(ids[i]); }
};

template <typename index_t, typename order_t, typename Copy>
bool move(char* out, const char* src, List<index_t> index, List<order_t> order, int64_t size, Versions versions,
          const Copy copy) {
  const int64_t bytes = copy.from_bytes();
  const int64_t wanted = wanted_bytes(copy);
  const int64_t ahead = index.ids == nullptr ? size : rows_ahead(wanted);  // rows in turn: the hardware knows
  const int64_t bytes_per_thread = index.ids == nullptr ? arrived_bytes_per_thread() : kBytesPerThread;
  std::atomic<bool> whole{true};
  parallel_for(size, bytes_per_thread / std::max<int64_t>(wanted, 1), [&, out, src](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + ahead < end) {
        prefetch_read(src + index[i + ahead] * bytes, wanted, kPrefetchStride);
      }
      const int64_t from = index[i];
      if (!versions) {
        copy(out, order[i], src, from);
      } else if (!versions.read(from, [&] { copy(out, order[i], src, from); })) {
        whole = false;
        break;
      }
    }
    finish_stores();
  });
  return whole;
}

template <typename Body>
void dispatch_list(const std::optional<Tensor>& list, Body&& body) {
  if (!list.has_value()) {
    return body(List<int64_t>{nullptr});
  }
  dispatch_ids(*list, [&](auto id) { body(List<decltype(id)>{const_data<decltype(id)>(*list)}); });
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
    dispatch_list(index, [&](auto from) {
      dispatch_list(order, [&](auto to) {
        whole = move(mutable_data<char>(out), const_data<char>(src), from, to, size, Versions::of(versions), copy);
      });
    });
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
