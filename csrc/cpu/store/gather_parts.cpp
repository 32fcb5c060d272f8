// gather_parts: out[i] = row ids[i] of a table whose rows lie in several parts, in the order of the ids.
//
// Writes ascend, as if the table were in one piece; rows of parts that are not given are left alone. Work and bytes:
// one comparison per id and bound, one read and one write per row.
#include "common/id_range.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/owners.h"
#include "cpu/row_copy.h"

#include <optional>
#include <vector>

namespace gnnsys {
namespace {

// Where a part's rows would start if they were numbered by global id, and a mask: all ones, or zero where the part is
// not given, which makes the address of its rows null.
struct Source {
  uintptr_t base = 0;
  uintptr_t mask = 0;
};

template <typename id_t, typename at_t, typename Copy>
void gather_block(char* out, const at_t* at, int64_t first, const Source* sources, const int32_t* owner,
                  const id_t* ids, int64_t size, int64_t bytes, int64_t ahead, const Copy copy) {
  const char* row[kOwnerBlock];
  for (int64_t i = 0; i < size; ++i) {
    const Source source = sources[owner[i]];
    const uintptr_t address = (source.base + static_cast<uintptr_t>(ids[i]) * static_cast<uintptr_t>(bytes));
    row[i] = reinterpret_cast<const char*>(address & source.mask);
  }
  for (int64_t i = 0; i < std::min(ahead, size); ++i) {
    prefetch_read(row[i], bytes, kPrefetchStride);
  }
  for (int64_t i = 0; i < size; ++i) {
    if (i + ahead < size) {
      prefetch_read(row[i + ahead], bytes, kPrefetchStride);
    }
    if (row[i] != nullptr) {
      copy(out, at == nullptr ? first + i : static_cast<int64_t>(at[first + i]), row[i], 0);
    }
  }
}

void check_sources(const std::vector<Tensor>& srcs, const std::vector<int64_t>& parts, const Tensor& bounds,
                   const Tensor& out) {
  const auto* bound = const_data<int64_t>(bounds);
  CHECK_ARG(!srcs.empty() && srcs.size() == parts.size(), "srcs must be the rows of at least one part, and parts ",
            "their numbers");
  for (size_t k = 0; k < srcs.size(); ++k) {
    check_rows(srcs[k], "srcs");
    const int64_t part = parts[k];
    CHECK_ARG(part >= 0 && part < bounds.numel() - 1, "parts must be in [0, ", bounds.numel() - 1, "), got ", part);
    CHECK_ARG(srcs[k].size(0) == bound[part + 1] - bound[part], "part ", part, " must have ",
              bound[part + 1] - bound[part], " rows, got ", srcs[k].size(0));
    CHECK_ARG(same_row_shape(srcs[k], out), "out must have rows of the same shape as srcs");
    check_dtype(srcs[k], srcs[0].scalar_type(), "srcs");
    CHECK_ARG(!overlap(srcs[k], out), "out must not share memory with srcs");
  }
}

void gather_parts(std::vector<Tensor> srcs, std::vector<int64_t> parts, const Tensor& ids, const Tensor& bounds,
                  Tensor out, const std::optional<Tensor>& at) {
  check_ids(ids, "ids");
  const int64_t num_parts = check_bounds(bounds, "bounds");
  const auto* bound = const_data<int64_t>(bounds);
  check_id_range(ids, bound[num_parts], "ids");
  check_rows(out, "out");
  check_sources(srcs, parts, bounds, out);
  if (at) {
    check_vector(*at, "at");
    check_dtype(*at, ScalarType::Long, "at");
    CHECK_ARG(at->numel() == ids.numel(), "at must name a row of out per id, ", ids.numel(), ", got ", at->numel());
    check_id_range(*at, out.size(0), "at");
  } else {
    CHECK_ARG(out.size(0) == ids.numel(), "out must have ", ids.numel(), " rows, got ", out.size(0));
  }
  if (ids.numel() == 0 || row_size(out) == 0) {
    return;
  }
  dispatch_copy(out, "out", srcs[0], "srcs", [&](const auto& copy) {
    const int64_t bytes = copy.from_bytes();
    std::vector<Source> sources(static_cast<size_t>(num_parts));
    for (size_t k = 0; k < srcs.size(); ++k) {
      const auto before = static_cast<uintptr_t>(bound[parts[k]]) * static_cast<uintptr_t>(bytes);
      sources[static_cast<size_t>(parts[k])] = {reinterpret_cast<uintptr_t>(srcs[k].const_data_ptr()) - before,
                                                ~uintptr_t{0}};
    }
    dispatch_ids(ids, [&](auto id) {
      const auto* in = const_data<decltype(id)>(ids);
      const int64_t* to = at ? const_data<int64_t>(*at) : nullptr;
      auto* const rows = mutable_data<char>(out);
      const Source* const from = sources.data();
      parallel_for(ids.numel(), kBytesPerThread / std::max<int64_t>(bytes, 1), [=](int64_t begin, int64_t end) {
        int32_t owner[kOwnerBlock];
        for (int64_t first = begin; first < end; first += kOwnerBlock) {
          const int64_t size = std::min(kOwnerBlock, end - first);
          find_owners(in + first, size, bound, num_parts, owner);
          gather_block(rows, to, first, from, owner, in + first, size, bytes, rows_ahead(bytes), copy);
        }
        finish_stores();
      });
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "gather_parts", &gather_parts); }

}  // namespace gnnsys
