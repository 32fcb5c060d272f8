// Relabelling ids to local ids in first-seen order (number_ids.h), with a table that outlives the call.
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/number_ids.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kIdsPerThread = 16384;

template <typename id_t>
void check_ids_fit(const id_t* ids, int64_t size, int64_t bound) {
  check_fits(find_misfit(ids, size, bound), bound);
}

// Seeds keep their places, repeats included: the local id of a repeated seed is its first place.
template <typename Slot, typename id_t>
void place_seeds(IdTable<Slot>& table, const id_t* ids, int64_t size) {
  const int64_t first = table.count();
  for_each_slot(table, ids, size, [&](int64_t i, auto* slot) {
    if (slot->empty()) {
      slot->set(static_cast<uint64_t>(ids[i]), first + i);
    }
  });
  table.set_count(first + size);
}

void relabel_seeds(const Tensor& table, const Tensor& ids) {
  check_ids(ids, "ids");
  with_table(table, [&](auto map) {
    dispatch_ids(ids, [&](auto id) {
      const auto* values = const_data<decltype(id)>(ids);
      check_ids_fit(values, ids.numel(), id_bound(table));
      CHECK_ARG(map.count() + ids.numel() <= map.max_count(), "table holds up to ", map.max_count(), " ids, not ",
                map.count() + ids.numel(), ": make it larger");
      place_seeds(map, values, ids.numel());
    });
  });
}

std::tuple<Tensor, Tensor> relabel(const Tensor& table, const Tensor& ids) {
  check_ids(ids, "ids");
  const int64_t size = ids.numel();
  return with_table(table, [&](auto map) {
    return dispatch_ids(ids, [&](auto id) {
      using id_t = decltype(id);
      const auto* values = const_data<id_t>(ids);
      check_ids_fit(values, size, id_bound(table));
      Tensor local = empty_cpu({size}, ScalarType::Long);
      Tensor fresh = empty_cpu({size}, id_type<id_t>());
      const int64_t n = number_ids(map, values, size, mutable_data<int64_t>(local), mutable_data<id_t>(fresh));
      return std::make_tuple(local, torch::stable::narrow(fresh, 0, 0, n));
    });
  });
}

// Local ids of ids that may or may not be in the table: -1 for those that are not.
Tensor lookup(const Tensor& table, const Tensor& ids) {
  check_ids(ids, "ids");
  return with_table(table, [&](auto map) {
    return dispatch_ids(ids, [&](auto id) {
      const auto* values = const_data<decltype(id)>(ids);
      check_ids_fit(values, ids.numel(), id_bound(table));
      Tensor local = empty_cpu({ids.numel()}, ScalarType::Long);
      auto* out = mutable_data<int64_t>(local);
      parallel_for(ids.numel(), kIdsPerThread, [&](int64_t lo, int64_t hi) {
        for_each_slot(map, values + lo, hi - lo, [&](int64_t i, auto* slot) {
          out[lo + i] = slot->local();
        });
      });
      return local;
    });
  });
}

void clear_words(int64_t* words, int64_t log2, bool wide) {
  const int64_t header[kHeader] = {log2, 0, 0, wide, 0, 0, 0, 0};
  std::copy(header, header + kHeader, words);
  const int64_t size = (int64_t{1} << log2) * (1 + wide);
  parallel_for(size, 1 << 18, [&](int64_t lo, int64_t hi) {
    std::memset(words + kHeader + lo, 0, static_cast<size_t>(hi - lo) * sizeof(int64_t));
  });
}

// Empties the first 2^log2_slots slots of a table; the tensor may be larger and is then partly unused.
void id_table_init(const Tensor& table, int64_t log2_slots, bool wide) {
  check_vector(table, "table");
  check_dtype(table, ScalarType::Long, "table");
  CHECK_ARG(log2_slots >= kMinLog2 && log2_slots <= max_log2(wide), "log2_slots must be ", kMinLog2, " to ",
            max_log2(wide), ", got ", log2_slots);
  CHECK_ARG(kHeader + (int64_t{1} << log2_slots) * (1 + wide) <= table.numel(), "table has ", table.numel(),
            " words, too few for 2^", log2_slots, wide ? " wide" : "", " slots");
  clear_words(mutable_data<int64_t>(table), log2_slots, wide);
}

// One type of compact: seeds, then what the id lists bring, in the order of the lists.
template <typename id_t>
Tensor compact_type(const Tensor& scratch, const Tensor& seeds, const std::vector<const Tensor*>& lists,
                    const std::vector<Tensor*>& local) {
  int64_t total = seeds.numel();
  for (const Tensor* ids : lists) {
    total += ids->numel();
  }
  int64_t log2 = kMinLog2;
  while (max_count(log2) < total) {
    ++log2;
  }
  id_table_init(scratch, log2, true);
  const int64_t bound = id_bound(scratch);
  IdTable<WideSlot> table(mutable_data<int64_t>(scratch));
  check_ids_fit(const_data<id_t>(seeds), seeds.numel(), bound);
  place_seeds(table, const_data<id_t>(seeds), seeds.numel());
  Tensor nodes = empty_cpu({total}, id_type<id_t>());
  auto* out = mutable_data<id_t>(nodes);
  std::copy_n(const_data<id_t>(seeds), seeds.numel(), out);
  for (size_t k = 0; k < lists.size(); ++k) {
    const auto* ids = const_data<id_t>(*lists[k]);
    check_ids_fit(ids, lists[k]->numel(), bound);
    *local[k] = empty_cpu({lists[k]->numel()}, ScalarType::Long);
    number_ids(table, ids, lists[k]->numel(), mutable_data<int64_t>(*local[k]), out + table.count());
  }
  return torch::stable::narrow(nodes, 0, 0, table.count());
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>> compact(const Tensor& scratch, std::vector<Tensor> seeds,
                                                             std::vector<Tensor> ids, std::vector<int64_t> types) {
  CHECK_ARG(types.size() == ids.size(), "types must name the node type of each ids list: ", ids.size(), " lists, ",
            types.size(), " types");
  for (size_t k = 0; k < ids.size(); ++k) {
    check_ids(ids[k], "ids");
    CHECK_ARG(types[k] >= 0 && types[k] < static_cast<int64_t>(seeds.size()), "types must be in [0, ", seeds.size(),
              "), got ", types[k]);
    CHECK_ARG(ids[k].scalar_type() == seeds[static_cast<size_t>(types[k])].scalar_type(),
              "ids must have the dtype of the seeds of their type");
  }
  std::vector<Tensor> nodes;
  std::vector<Tensor> local(ids.size());
  for (size_t t = 0; t < seeds.size(); ++t) {
    check_ids(seeds[t], "seeds");
    std::vector<const Tensor*> lists;
    std::vector<Tensor*> outputs;
    for (size_t k = 0; k < ids.size(); ++k) {
      if (types[k] == static_cast<int64_t>(t)) {
        lists.push_back(&ids[k]);
        outputs.push_back(&local[k]);
      }
    }
    nodes.push_back(dispatch_ids(seeds[t], [&](auto id) {
      return compact_type<decltype(id)>(scratch, seeds[t], lists, outputs);
    }));
  }
  return {nodes, local};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "id_table_init", &id_table_init);
  REGISTER_OP(m, "relabel_seeds", &relabel_seeds);
  REGISTER_OP(m, "relabel", &relabel);
  REGISTER_OP(m, "lookup", &lookup);
  REGISTER_OP(m, "compact", &compact);
}

}  // namespace gnnsys
