// gather_cached: rows of which some have a copy in a faster place. On the CPU both places are memory; the op is here so
// that what is built on it runs and is tested everywhere, and it is the specification of the kernel in cuda/.
//
// Work and bytes: one read and one write of every row, plus an id and a slot per row.
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "cpu/row_copy.h"

#include <atomic>
#include <optional>

namespace gnnsys {
namespace {

// Every slot that will be used: -1, or a row of the cache.
template <typename id_t>
void check_slots(const int32_t* slots, const id_t* index, int64_t size, int64_t num_cached) {
  for (int64_t i = 0; i < size; ++i) {
    const int32_t slot = slots[index[i]];
    CHECK_ARG(slot < num_cached, "slots must be below ", num_cached, ", the rows of cache, got ", slot, " for row ",
              static_cast<int64_t>(index[i]));
  }
}

template <typename id_t, typename Copy>
int64_t gather(char* out, const char* cache, const int32_t* slots, const char* src, const id_t* index, int64_t size,
               const Copy copy) {
  std::atomic<int64_t> hits{0};
  parallel_for(size, kBytesPerThread / std::max<int64_t>(copy.from_bytes(), 1), [&](int64_t begin, int64_t end) {
    int64_t found = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int32_t slot = slots[index[i]];
      if (slot >= 0) {
        copy(out, i, cache, slot);
        ++found;
      } else {
        copy(out, i, src, index[i]);
      }
    }
    finish_stores();
    hits += found;
  });
  return hits;
}

void gather_cached(const Tensor& cache, const Tensor& slots, const Tensor& src, const Tensor& index, Tensor out,
                   std::optional<Tensor> hits) {
  check_rows(cache, "cache");
  check_rows(src, "src");
  check_ids(index, "index");
  check_rows(out, "out");
  check_vector(slots, "slots");
  check_dtype(slots, ScalarType::Int, "slots");
  CHECK_ARG(slots.numel() == src.size(0), "slots must have an entry for each of the ", src.size(0), " rows of src, got ",
            slots.numel());
  check_dtype(cache, src.scalar_type(), "cache");
  CHECK_ARG(same_row_shape(src, cache), "cache must have rows of the same shape as src");
  CHECK_ARG(out.size(0) == index.numel(), "out must have len(index) = ", index.numel(), " rows, got ", out.size(0));
  CHECK_ARG(same_row_shape(src, out), "out must have rows of the same shape as src");
  CHECK_ARG(!overlap(src, out) && !overlap(cache, out), "out must not share memory with src or cache");
  check_id_range(index, src.size(0), "index");
  if (hits) {
    check_vector(*hits, "hits");
    check_dtype(*hits, ScalarType::Long, "hits");
    CHECK_ARG(hits->numel() == 1, "hits must have one entry, got ", hits->numel());
  }
  dispatch_ids(index, [&](auto id) {
    const auto* ids = const_data<decltype(id)>(index);
    check_slots(const_data<int32_t>(slots), ids, index.numel(), cache.size(0));
    dispatch_copy(out, "out", src, "src", [&](const auto& copy) {
      const int64_t found = gather(mutable_data<char>(out), const_data<char>(cache), const_data<int32_t>(slots),
                                   const_data<char>(src), ids, index.numel(), copy);
      if (hits) {
        *mutable_data<uint64_t>(*hits) += static_cast<uint64_t>(found);  // whatever it holds, no overflow is undefined
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "gather_cached", &gather_cached); }

}  // namespace gnnsys
