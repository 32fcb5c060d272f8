// Fingerprints of multisets: the sum, modulo 2^64 and in two independent lanes, of a hash of every element.
//
// A sum does not know in which order its terms came, so a graph and its parts have one fingerprint, whatever way they
// are cut or read and however many threads read. Absorbing a word is a bijection of the state, so two rows that differ
// in one word never have the same hash; any other change goes unseen with a chance of about 2^-128. This finds
// accidents, not forgeries. One read of the data; words are little-endian.
#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"

#include <atomic>
#include <cstring>
#include <optional>

namespace gnnsys {
namespace {

constexpr int64_t kColumnsPerChunk = 256;
constexpr int64_t kBytesPerThread = 1 << 16;

inline uint64_t finish(uint64_t x) {  // SplitMix64's
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

struct Lanes {
  uint64_t a;
  uint64_t b;

  static Lanes of(int64_t id) {
    const auto word = static_cast<uint64_t>(id);
    return {finish(word + 0x9E3779B97F4A7C15u), finish(word + 0x6A09E667F3BCC909u)};
  }

  Lanes absorb(uint64_t word) const {
    const uint64_t x = (a ^ word) * 0x9FB21C651E98DF25u;
    const uint64_t y = (b ^ word) * 0xD6E8FEB86659FD93u;
    return {x ^ (x >> 32), y ^ (y >> 32)};
  }

  Lanes absorb_bytes(const char* data, int64_t bytes) const {
    Lanes state = *this;
    uint64_t word = 0;
    for (; bytes >= 8; bytes -= 8, data += 8) {
      std::memcpy(&word, data, 8);
      state = state.absorb(word);
    }
    if (bytes > 0) {
      word = 0;
      std::memcpy(&word, data, static_cast<size_t>(bytes));
      state = state.absorb(word);
    }
    return state;
  }

  void add(const Lanes& element) {
    a += finish(element.a);
    b += finish(element.b);
  }
};

class Total {
 public:
  void add(const Lanes& sum) {
    a_ += sum.a;
    b_ += sum.b;
  }

  Tensor tensor() const {
    const Tensor out = empty_cpu({2}, ScalarType::Long);
    mutable_data<uint64_t>(out)[0] = a_;
    mutable_data<uint64_t>(out)[1] = b_;
    return out;
  }

 private:
  std::atomic<uint64_t> a_{0};
  std::atomic<uint64_t> b_{0};
};

// ids[i] of either width, or i itself where there are none.
class Names {
 public:
  Names(const std::optional<Tensor>& ids, const char* name) {
    if (ids.has_value()) {
      check_ids(*ids, name);
      size_ = ids->numel();
      narrow_ = ids->scalar_type() == ScalarType::Int ? const_data<int32_t>(*ids) : nullptr;
      wide_ = ids->scalar_type() == ScalarType::Long ? const_data<int64_t>(*ids) : nullptr;
    }
  }

  bool given() const { return size_ >= 0; }
  int64_t size() const { return size_; }
  int64_t operator[](int64_t i) const { return narrow_ != nullptr ? narrow_[i] : wide_ != nullptr ? wide_[i] : i; }

 private:
  int64_t size_ = -1;
  const int32_t* narrow_ = nullptr;
  const int64_t* wide_ = nullptr;
};

// indptr of some neighbouring columns: it ascends inside [0, num_edges], and need not cover it.
void check_slice(const Tensor& indptr, int64_t num_edges, const Names& dst_ids) {
  check_vector(indptr, "indptr");
  check_dtype(indptr, ScalarType::Long, "indptr");
  CHECK_ARG(indptr.numel() >= 1, "indptr must have num_columns + 1 entries, got none");
  check_monotone(indptr);
  const auto* p = const_data<int64_t>(indptr);
  CHECK_ARG(p[0] >= 0 && p[indptr.numel() - 1] <= num_edges, "indptr must lie in [0, ", num_edges, "], got ", p[0],
            " to ", p[indptr.numel() - 1]);
  CHECK_ARG(!dst_ids.given() || dst_ids.size() == indptr.numel() - 1, "dst_ids must have one id per column: ",
            indptr.numel() - 1, " columns, ", dst_ids.size(), " ids");
}

// Calls element(column's hash, position): the hash of what is at a position, its destination and rank absorbed.
template <typename Element>
Tensor sum_over_edges(const Tensor& indptr, const Names& dst_ids, const Element& element) {
  const auto* from = const_data<int64_t>(indptr);
  Total total;
  parallel_for_dynamic(indptr.numel() - 1, kColumnsPerChunk, [&](int64_t begin, int64_t end) {
    Lanes sum{0, 0};
    for (int64_t i = begin; i < end; ++i) {
      const Lanes column = Lanes::of(dst_ids[i]);
      for (int64_t p = from[i]; p < from[i + 1]; ++p) {
        sum.add(element(column.absorb(static_cast<uint64_t>(p - from[i])), p));
      }
    }
    total.add(sum);
  });
  return total.tensor();
}

Tensor fingerprint_edges(const Tensor& indptr, const Tensor& indices, const std::optional<Tensor>& dst_ids,
                         const std::optional<Tensor>& src_ids) {
  check_ids(indices, "indices");
  const Names dst(dst_ids, "dst_ids");
  const Names src(src_ids, "src_ids");
  check_slice(indptr, indices.numel(), dst);
  if (src.given()) {
    check_id_range(indices, src.size(), "indices");
  }
  return dispatch_ids(indices, [&](auto id) {
    const auto* sources = const_data<decltype(id)>(indices);
    return sum_over_edges(indptr, dst, [&](const Lanes& edge, int64_t p) {
      return edge.absorb(static_cast<uint64_t>(src[static_cast<int64_t>(sources[p])]));
    });
  });
}

int64_t row_bytes(const Tensor& rows) {
  int64_t bytes = static_cast<int64_t>(rows.element_size());
  for (int64_t d = 1; d < rows.dim(); ++d) {
    bytes *= rows.size(d);
  }
  return bytes;
}

void check_rows(const Tensor& rows) {
  check_contiguous(rows, "rows");
  CHECK_ARG(rows.dim() >= 1, "rows must have at least one dimension");
}

Tensor fingerprint_rows(const Tensor& rows, const std::optional<Tensor>& ids, int64_t first) {
  check_rows(rows);
  const Names names(ids, "ids");
  CHECK_ARG(!names.given() || names.size() == rows.size(0), "ids must name every row: ", rows.size(0), " rows, ",
            names.size(), " ids");
  const auto* data = const_data<char>(rows);
  const int64_t bytes = row_bytes(rows);
  Total total;
  parallel_for(rows.size(0), kBytesPerThread / std::max<int64_t>(bytes, 1), [&](int64_t begin, int64_t end) {
    Lanes sum{0, 0};
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t name = static_cast<uint64_t>(first) + static_cast<uint64_t>(names[i]);  // it may wrap around
      sum.add(Lanes::of(static_cast<int64_t>(name)).absorb_bytes(data + i * bytes, bytes));
    }
    total.add(sum);
  });
  return total.tensor();
}

// order: the row of each position, the position itself where it is not given.
Tensor fingerprint_edge_rows(const Tensor& indptr, const Tensor& rows, const std::optional<Tensor>& dst_ids,
                             const std::optional<Tensor>& order) {
  check_rows(rows);
  const Names dst(dst_ids, "dst_ids");
  const Names row(order, "order");
  if (row.given()) {
    check_id_range(*order, rows.size(0), "order");
  }
  check_slice(indptr, row.given() ? row.size() : rows.size(0), dst);
  const auto* data = const_data<char>(rows);
  const int64_t bytes = row_bytes(rows);
  return sum_over_edges(indptr, dst, [&](const Lanes& edge, int64_t p) {
    return edge.absorb_bytes(data + row[p] * bytes, bytes);
  });
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "fingerprint_edges", &gnnsys::fingerprint_edges);
  REGISTER_OP(m, "fingerprint_rows", &gnnsys::fingerprint_rows);
  REGISTER_OP(m, "fingerprint_edge_rows", &gnnsys::fingerprint_edge_rows);
}
