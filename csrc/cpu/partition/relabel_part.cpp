// Cutting one part out of a CSC: which remote nodes its columns need (the halo), and the columns in local ids.
//
// A part owns the global ids [begin, end). The halo is a set of bits over global ids, so that it comes out ascending
// and a local id is found by counting bits: 3/16 of a byte per node of the graph and hop, nothing per edge. Work and
// bytes: two reads of the part's edges, each with one random read of global_ids; one write of the result.
#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/partition/bits.h"

#include <atomic>
#include <limits>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kColumnsPerChunk = 256;
constexpr int64_t kWordsPerThread = 1 << 12;
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

// What is read: some columns of a CSC whose sources are relabelled by global_ids.
struct Selection {
  const Tensor& indptr;
  const Tensor& indices;
  const Tensor& columns;
  const Tensor& global_ids;

  void check() const {
    check_csc(indptr, indices);
    check_ids(columns, "columns");
    check_id_range(columns, indptr.numel() - 1, "columns");
    check_columns(indptr, columns, indices.numel());
    check_ids(global_ids, "global_ids");
  }

  // Calls body(i, p, global id) for every edge position p of every column i, on many threads. ValueError after the
  // loop when a source or its global id was out of range: body has not seen those.
  template <typename Body>
  void for_each(const Body& body) const {
    std::atomic<bool> outside{false};
    dispatch_ids(indices, [&](auto id) {
      dispatch_ids(columns, [&](auto column) {
        dispatch_ids(global_ids, [&](auto global) {
          visit(const_data<decltype(id)>(indices), const_data<decltype(column)>(columns),
                const_data<decltype(global)>(global_ids), body, &outside);
        });
      });
    });
    CHECK_ARG(!outside, "indices and global_ids must be in [0, ", global_ids.numel(), "), and are not");
  }

 private:
  template <typename id_t, typename column_t, typename global_t, typename Body>
  void visit(const id_t* sources, const column_t* nodes, const global_t* global, const Body& body,
             std::atomic<bool>* outside) const {
    const auto* from = const_data<int64_t>(indptr);
    const auto num_src = static_cast<uint64_t>(global_ids.numel());
    parallel_for_dynamic(columns.numel(), kColumnsPerChunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t p = from[nodes[i]]; p < from[nodes[i] + 1]; ++p) {
          const auto src = static_cast<int64_t>(sources[p]);
          if (static_cast<uint64_t>(src) >= num_src || static_cast<uint64_t>(global[src]) >= num_src) {
            *outside = true;
            continue;
          }
          body(i, p, static_cast<int64_t>(global[src]));
        }
      }
    });
  }
};

void check_own(int64_t begin, int64_t end, int64_t num_src) {
  CHECK_ARG(0 <= begin && begin <= end && end <= num_src, "begin and end must be a range of [0, ", num_src, "), got ",
            begin, " and ", end);
}

void mark_halo(const Tensor& indptr, const Tensor& indices, const Tensor& columns, const Tensor& global_ids,
               int64_t begin, int64_t end, Tensor mask) {
  const Selection selection{indptr, indices, columns, global_ids};
  selection.check();
  check_own(begin, end, global_ids.numel());
  check_bits(mask, global_ids.numel(), "mask");
  auto* const words = mutable_data<uint64_t>(mask);
  selection.for_each([=](int64_t, int64_t, int64_t global) {
    if (global < begin || global >= end) {
      set_bit(words, global);
    }
  });
}

// Takes out of mask what is in an earlier hop; returns the members, ascending, and the rank of every word.
std::tuple<Tensor, Tensor> collect_halo(Tensor mask, std::vector<Tensor> earlier, bool wide) {
  check_vector(mask, "mask");
  check_dtype(mask, ScalarType::Long, "mask");
  const int64_t num_words = mask.numel();
  auto* const words = mutable_data<uint64_t>(mask);
  for (const Tensor& other : earlier) {
    check_bits(other, num_words * kBitsPerWord, "earlier");
    const auto* out = const_data<uint64_t>(other);
    for (int64_t w = 0; w < num_words; ++w) {
      words[w] &= ~out[w];
    }
  }
  const Tensor ranks = empty_cpu({num_words}, ScalarType::Int);
  auto* const rank = mutable_data<int32_t>(ranks);
  int64_t total = 0;
  for (int64_t w = 0; w < num_words; ++w) {
    CHECK_ARG(total <= kInt32Max, "a halo must have fewer than 2^31 nodes: use more parts");
    rank[w] = static_cast<int32_t>(total);
    total += __builtin_popcountll(words[w]);
  }
  CHECK_ARG(wide || num_words <= words_for(kInt32Max), "ids of ", num_words * kBitsPerWord, " nodes need int64");
  const Tensor ids = empty_cpu({total}, wide ? ScalarType::Long : ScalarType::Int);
  dispatch_ids(ids, [&](auto id) {
    using id_t = decltype(id);
    auto* const out = mutable_data<id_t>(ids);
    parallel_for(num_words, kWordsPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) {
        int64_t at = rank[w];
        for (uint64_t left = words[w]; left != 0; left &= left - 1) {
          out[at++] = static_cast<id_t>(w * kBitsPerWord + __builtin_ctzll(left));
        }
      }
    });
  });
  return {ids, ranks};
}

struct Hop {
  RankedBits members;
  int64_t first;  // local id of the smallest member
};

std::vector<Hop> hops_of(const std::vector<Tensor>& masks, const std::vector<Tensor>& ranks, int64_t num_core,
                         int64_t num_src) {
  CHECK_ARG(masks.size() == ranks.size(), "masks and ranks must be equally many, got ", masks.size(), " and ",
            ranks.size());
  std::vector<Hop> hops;
  int64_t first = num_core;
  for (size_t h = 0; h < masks.size(); ++h) {
    check_bits(masks[h], num_src, "masks");
    check_vector(ranks[h], "ranks");
    check_dtype(ranks[h], ScalarType::Int, "ranks");
    const int64_t num_words = masks[h].numel();
    CHECK_ARG(ranks[h].numel() == num_words, "ranks must have one entry per word of its mask");
    hops.push_back({{const_data<uint64_t>(masks[h]), const_data<int32_t>(ranks[h])}, first});
    if (num_words > 0) {
      const RankedBits& members = hops.back().members;
      first += int64_t{members.ranks[num_words - 1]} + __builtin_popcountll(members.words[num_words - 1]);
    }
  }
  CHECK_ARG(first <= kInt32Max, "a part must have fewer than 2^31 nodes of a type, halo included, got ", first,
            ": use more parts");
  return hops;
}

// indptr of the selected columns alone.
Tensor indptr_of(const Selection& selection) {
  const int64_t num_columns = selection.columns.numel();
  const Tensor out = empty_cpu({num_columns + 1}, ScalarType::Long);
  auto* const to = mutable_data<int64_t>(out);
  const auto* from = const_data<int64_t>(selection.indptr);
  to[0] = 0;
  dispatch_ids(selection.columns, [&](auto column) {
    const auto* nodes = const_data<decltype(column)>(selection.columns);
    for (int64_t i = 0; i < num_columns; ++i) {
      to[i + 1] = to[i] + (from[nodes[i] + 1] - from[nodes[i]]);
    }
  });
  return out;
}

// Where the selected edges lie in the CSC, as int32 where they fit.
Tensor positions_of(const Selection& selection, const int64_t* to) {
  const bool narrow = selection.indices.numel() <= kInt32Max;
  const int64_t num_columns = selection.columns.numel();
  const Tensor out = empty_cpu({to[num_columns]}, narrow ? ScalarType::Int : ScalarType::Long);
  const auto* from = const_data<int64_t>(selection.indptr);
  dispatch_ids(out, [&](auto pos) {
    using pos_t = decltype(pos);
    auto* const positions = mutable_data<pos_t>(out);
    dispatch_ids(selection.columns, [&](auto column) {
      const auto* nodes = const_data<decltype(column)>(selection.columns);
      parallel_for_dynamic(num_columns, kColumnsPerChunk, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          int64_t p = from[nodes[i]];
          for (int64_t at = to[i]; at < to[i + 1]; ++at) {
            positions[at] = static_cast<pos_t>(p++);
          }
        }
      });
    });
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> local_columns(const Tensor& indptr, const Tensor& indices, const Tensor& columns,
                                                 const Tensor& global_ids, int64_t begin, int64_t end,
                                                 std::vector<Tensor> masks, std::vector<Tensor> ranks,
                                                 bool with_positions) {
  const Selection selection{indptr, indices, columns, global_ids};
  selection.check();
  check_own(begin, end, global_ids.numel());
  const std::vector<Hop> hops = hops_of(masks, ranks, end - begin, global_ids.numel());
  const Tensor out_indptr = indptr_of(selection);
  const auto* to = const_data<int64_t>(out_indptr);
  const auto* from = const_data<int64_t>(indptr);
  const Tensor local = empty_cpu({to[columns.numel()]}, ScalarType::Int);
  auto* const out = mutable_data<int32_t>(local);
  std::atomic<bool> unmarked{false};
  dispatch_ids(columns, [&](auto column) {
    const auto* nodes = const_data<decltype(column)>(columns);
    selection.for_each([&](int64_t i, int64_t p, int64_t global) {
      int32_t* const place = out + to[i] + (p - from[nodes[i]]);
      if (global >= begin && global < end) {
        *place = static_cast<int32_t>(global - begin);
        return;
      }
      for (const Hop& hop : hops) {
        if (hop.members.has(global)) {
          *place = static_cast<int32_t>(hop.first + hop.members.rank(global));
          return;
        }
      }
      unmarked = true;
    });
  });
  CHECK_ARG(!unmarked, "masks must hold every remote source of the columns: mark them first");
  const Tensor positions = with_positions ? positions_of(selection, to) : empty_cpu({0}, ScalarType::Int);
  return {out_indptr, local, positions};
}

// How many of the ids were not in mask before; a repeated id counts once.
int64_t mark_ids(Tensor mask, const Tensor& ids) {
  check_vector(mask, "mask");
  check_dtype(mask, ScalarType::Long, "mask");
  check_ids(ids, "ids");
  check_id_range(ids, mask.numel() * kBitsPerWord, "ids");
  auto* const words = mutable_data<uint64_t>(mask);
  std::atomic<int64_t> fresh{0};
  dispatch_ids(ids, [&](auto id) {
    const auto* data = const_data<decltype(id)>(ids);
    parallel_for(ids.numel(), kIdGrain, [&](int64_t begin, int64_t end) {
      int64_t mine = 0;
      for (int64_t i = begin; i < end; ++i) {
        mine += set_bit(words, data[i]);
      }
      fresh += mine;
    });
  });
  return fresh;
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "mark_halo", &gnnsys::mark_halo);
  REGISTER_OP(m, "collect_halo", &gnnsys::collect_halo);
  REGISTER_OP(m, "local_columns", &gnnsys::local_columns);
  REGISTER_OP(m, "mark_ids", &gnnsys::mark_ids);
}
