// compact (to_block) on the device: every node type of a call in one go, with one wait for the sizes.
//
// Work O(ids). Bytes per int64 id: 12 to clear 1.5 slots (24 for 3, where there are few), 8 + 4 to read it and note its
// slot, 4 + 4 + 8 to read that twice and write its local id; random accesses of a sector: one to insert, one to look up,
// one more for ids that are new.
#include "common/register.h"
#include "cuda/id_table.cuh"

#include "common/tensors.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace gnnsys::cuda {
namespace {

const Tensor& tensor_on_device(const Tensor& scratch, const std::vector<Tensor>& seeds,
                               const std::vector<Tensor>& ids) {
  for (const auto* list : {&seeds, &ids}) {
    for (const Tensor& t : *list) {
      if (t.is_cuda()) {
        return t;
      }
    }
  }
  return scratch;
}

constexpr int64_t kSparse = 1 << 20;
constexpr int64_t kShort = 1 << 18;
constexpr int64_t kNarrow = int64_t{1} << 32;  // ids below it

// The lists of a call and the memory that they share: control words, tables, and each id's slot.
struct Plan {
  std::vector<IdList> lists;  // those of ids by type, then seeds
  std::vector<size_t> which;  // which ids, or which type's seeds, each of them is
  std::vector<int64_t> num_ids;  // of each type, seeds and repeated ones counted
  int64_t most = 0;
  int64_t num_numbered_tiles = 0;
};

void add_list(Plan& plan, const Tensor& ids, IdList list, size_t which, uint32_t& tile, bool wide_slots) {
  if (ids.numel() == 0) {
    return;
  }
  list.ids = ids.const_data_ptr();
  list.size = ids.numel();
  list.wide_ids = ids.scalar_type() == ScalarType::Long;
  list.wide_slots = list.wide_ids && wide_slots;
  list.first_tile = tile;
  tile += static_cast<uint32_t>(num_tiles(list.size));
  plan.lists.push_back(list);
  plan.which.push_back(which);
}

// Sizes and tiles of all lists; where their tables lie is decided by `place`. Lists without ids are left out.
Plan make_plan(const std::vector<Tensor>& seeds, const std::vector<Tensor>& ids, const std::vector<int64_t>& types,
               bool wide_slots) {
  Plan plan;
  std::vector<std::vector<size_t>> lists_of(seeds.size());
  for (size_t k = 0; k < ids.size(); ++k) {
    lists_of[static_cast<size_t>(types[k])].push_back(k);
  }
  uint32_t tile = 0;
  std::vector<IdList> tables(seeds.size(), IdList{});
  for (size_t t = 0; t < seeds.size(); ++t) {
    IdList& table = tables[t];
    table.type = static_cast<int32_t>(t);
    table.base = static_cast<uint32_t>(seeds[t].numel());
    int64_t total = seeds[t].numel();
    for (const size_t k : lists_of[t]) {
      total += ids[k].numel();
    }
    plan.num_ids.push_back(total);
    plan.most = std::max(plan.most, total);
    CHECK_ARG(total < kMaxPositions, "a node type may have up to ", kMaxPositions - 1, " ids in a call, got ", total);
    // Searches are shorter in a sparse table, clearing and missing the cache cost more in a large one.
    table.num_slots = static_cast<uint32_t>((total < kSparse ? 3 * total : total + total / 2) + 8);
    table.type_begin = tile;
    const size_t begin = plan.lists.size();
    uint32_t first = 0;
    for (const size_t k : lists_of[t]) {
      IdList list = table;
      list.first = first;
      first += static_cast<uint32_t>(ids[k].numel());
      add_list(plan, ids[k], list, k, tile, wide_slots);
    }
    table.type_end = tile;
    for (size_t at = begin; at < plan.lists.size(); ++at) {
      plan.lists[at].type_end = tile;
    }
  }
  plan.num_numbered_tiles = tile;
  for (size_t t = 0; t < seeds.size(); ++t) {
    IdList list = tables[t];
    list.base = 0;
    add_list(plan, seeds[t], list, t, tile, wide_slots);
  }
  return plan;
}

// Tables begin with a sector.
constexpr int64_t whole_sectors(int64_t words) { return (words + 3) / 4 * 4; }

// One workspace: control words and tables, all of whose bits are to be set first, and slot numbers.
struct Workspace {
  Tensor memory;
  word_t* begin = nullptr;
  int64_t num_set = 0;  // words
  Control control{};
};

// Gives tables and slot numbers their places.
Workspace place(Plan& plan, const Device& device, size_t num_types) {
  Workspace out;
  const auto num_counts = static_cast<int64_t>(num_types);
  std::vector<int64_t> table_at(num_types, -1);
  int64_t words = whole_sectors(Control::kWords + num_counts + plan.num_numbered_tiles);
  for (const IdList& list : plan.lists) {
    int64_t& at = table_at[static_cast<size_t>(list.type)];
    if (at < 0) {
      at = words;
      words += whole_sectors(static_cast<int64_t>(list.num_slots) * (1 + list.wide_slots));
    }
  }
  out.num_set = words;
  int64_t slot_numbers = 0;
  for (size_t i = 0; i < plan.lists.size() && plan.lists[i].first_tile < plan.num_numbered_tiles; ++i) {
    slot_numbers += plan.lists[i].size;
  }
  out.memory = device.workspace<word_t>(words + (slot_numbers + 1) / 2);
  word_t* const begin = out.begin = static_cast<word_t*>(out.memory.mutable_data_ptr());
  out.control = {begin, begin + 1, begin + Control::kWords, begin + Control::kWords + num_counts};
  auto* slot_of = reinterpret_cast<uint32_t*>(begin + words);
  for (IdList& list : plan.lists) {
    list.slots = begin + table_at[static_cast<size_t>(list.type)];
    if (list.first_tile < plan.num_numbered_tiles) {
      list.slot_of = slot_of;
      slot_of += list.size;
    }
  }
  return out;
}

using Compacted = std::tuple<std::vector<Tensor>, std::vector<Tensor>>;

// Says where the lists of a plan write to.
void aim(Plan& plan, const std::vector<Tensor>& nodes, const std::vector<Tensor>& local) {
  for (size_t i = 0; i < plan.lists.size(); ++i) {
    IdList& list = plan.lists[i];
    list.fresh = nodes[static_cast<size_t>(list.type)].mutable_data_ptr();
    if (list.slot_of != nullptr) {
      list.local = mutable_data<int64_t>(local[plan.which[i]]);
    }
  }
}

// Nothing where an id is too large for narrow slots. Few ids are written where all of them would fit, before it is known
// how many there are: so there is one launch, and one wait for it. Of many, the memory is as large as they are.
std::optional<Compacted> compact_in(const Device& device, const std::vector<Tensor>& seeds,
                                    const std::vector<Tensor>& ids, const std::vector<int64_t>& types,
                                    bool wide_slots) {
  Plan plan = make_plan(seeds, ids, types, wide_slots);
  const Workspace work = place(plan, device, seeds.size());
  std::vector<Tensor> nodes;
  std::vector<Tensor> local;
  for (const Tensor& list : ids) {
    local.push_back(device.empty({list.numel()}, ScalarType::Long));
  }
  std::vector<word_t> told(static_cast<size_t>(Control::kWords) + seeds.size(), kNoFault);
  const bool is_short = plan.most <= kShort && told.size() * sizeof(word_t) <= Landing::kBytes;
  IdBatch batch(device, work.control, plan.lists, plan.num_numbered_tiles);
  if (is_short) {
    for (size_t t = 0; t < seeds.size(); ++t) {
      nodes.push_back(device.empty({plan.num_ids[t]}, seeds[t].scalar_type()));
    }
    aim(plan, nodes, local);
    if (!plan.lists.empty()) {
      auto* const landing = static_cast<word_t*>(Landing::memory());
      batch.do_all(plan.lists, work.begin, work.num_set, landing, static_cast<int>(told.size()));
      CUDA_CHECK(cudaStreamSynchronize(device.stream()));
      std::copy_n(landing, told.size(), told.begin());
    }
  } else {
    CUDA_CHECK(cudaMemsetAsync(work.begin, 0xFF, static_cast<size_t>(work.num_set) * sizeof(word_t), device.stream()));
    batch.insert_ids();
    batch.number_ids();
    device.read(told.data(), work.control.fault, static_cast<int64_t>(told.size()));
  }
  if (!wide_slots && told[0] != kNoFault && id_of_fault(told[0]) >= kNarrow) {
    return std::nullopt;
  }
  check_id_fault(told[0], true);
  for (size_t t = 0; t < seeds.size(); ++t) {
    const word_t count = told[static_cast<size_t>(Control::kWords) + t];  // never written where there were no lists
    const int64_t size = seeds[t].numel() + (count == ~word_t{0} ? 0 : static_cast<int64_t>(count));
    if (is_short) {
      nodes[t] = torch::stable::narrow(nodes[t], 0, 0, size);
    } else {
      nodes.push_back(device.empty({size}, seeds[t].scalar_type()));
    }
  }
  if (!is_short) {
    aim(plan, nodes, local);
    batch.write_ids(plan.lists);
  }
  return Compacted{nodes, local};
}

// The scratch of the CPU's kernel is not needed: torch's allocator keeps blocks for the next call.
Compacted compact(const Tensor& scratch, std::vector<Tensor> seeds, std::vector<Tensor> ids,
                  std::vector<int64_t> types) {
  const Device device(tensor_on_device(scratch, seeds, ids));
  CHECK_ARG(types.size() == ids.size(), "types must name the node type of each ids list: ", ids.size(), " lists, ",
            types.size(), " types");
  for (const Tensor& t : seeds) {
    check_ids(t, device, "seeds");
  }
  for (size_t k = 0; k < ids.size(); ++k) {
    check_ids(ids[k], device, "ids");
    CHECK_ARG(types[k] >= 0 && types[k] < static_cast<int64_t>(seeds.size()), "types must be in [0, ", seeds.size(),
              "), got ", types[k]);
    CHECK_ARG(ids[k].scalar_type() == seeds[static_cast<size_t>(types[k])].scalar_type(),
              "ids must have the dtype of the seeds of their type");
  }
  // int64 ids are hardly ever above 2^32: they take narrow slots, and wide ones only when that turns out wrong.
  std::optional<Compacted> found = compact_in(device, seeds, ids, types, false);
  return found ? *std::move(found) : *compact_in(device, seeds, ids, types, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "compact", &compact); }

}  // namespace gnnsys::cuda
