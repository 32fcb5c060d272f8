// compact (to_block) on the device: every node type of a call in one go, with one wait for the sizes.
//
// Work O(ids). Bytes per int64 id: 24 to clear 1.5 slots (48 for 3, where there are few), 8 + 4 to read it and note its
// slot, 4 + 4 + 8 to read that twice and write its local id; random accesses of a sector: one to insert, one to look up,
// one more for ids that are new.
#include "cuda/id_table.cuh"

#include "common/tensors.h"

#include <torch/csrc/stable/library.h>

#include <tuple>
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

// The lists of a call and the memory that they share: control words, tables, and each id's slot.
struct Plan {
  std::vector<IdList> lists;  // those of ids by type, then seeds
  std::vector<size_t> which;  // which ids, or which type's seeds, each of them is
  int64_t num_numbered_tiles = 0;
};

void add_list(Plan& plan, const Tensor& ids, IdList list, size_t which, uint32_t& tile) {
  if (ids.numel() == 0) {
    return;
  }
  list.ids = ids.const_data_ptr();
  list.size = ids.numel();
  list.wide_ids = list.wide_slots = ids.scalar_type() == ScalarType::Long;
  list.first_tile = tile;
  tile += static_cast<uint32_t>(num_tiles(list.size));
  plan.lists.push_back(list);
  plan.which.push_back(which);
}

// Sizes and tiles of all lists; where their tables lie is decided by `place`. Lists without ids are left out.
Plan make_plan(const std::vector<Tensor>& seeds, const std::vector<Tensor>& ids, const std::vector<int64_t>& types) {
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
      add_list(plan, ids[k], list, k, tile);
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
    add_list(plan, seeds[t], list, t, tile);
  }
  return plan;
}

constexpr int64_t even(int64_t words) { return (words + 1) / 2 * 2; }

// Gives tables and slot numbers their places in one workspace, and clears what must be.
Tensor place(Plan& plan, const Device& device, const std::vector<Tensor>& seeds, Control& control) {
  const auto num_types = static_cast<int64_t>(seeds.size());
  std::vector<int64_t> table_at(seeds.size(), -1);
  int64_t words = even(Control::kWords + num_types + plan.num_numbered_tiles);
  for (const IdList& list : plan.lists) {
    int64_t& at = table_at[static_cast<size_t>(list.type)];
    if (at < 0) {
      at = words;
      words += even(static_cast<int64_t>(list.num_slots) * (1 + list.wide_slots));
    }
  }
  const int64_t cleared = words;
  int64_t slot_numbers = 0;
  for (size_t i = 0; i < plan.lists.size() && plan.lists[i].first_tile < plan.num_numbered_tiles; ++i) {
    slot_numbers += plan.lists[i].size;
  }
  const Tensor workspace = device.workspace<word_t>(cleared + even(slot_numbers) / 2);
  auto* const begin = static_cast<word_t*>(workspace.mutable_data_ptr());
  CUDA_CHECK(cudaMemsetAsync(begin, 0xFF, static_cast<size_t>(cleared) * sizeof(word_t), device.stream()));
  control = {begin, begin + 1, begin + Control::kWords,
             begin + Control::kWords + num_types};
  auto* slot_of = reinterpret_cast<uint32_t*>(begin + cleared);
  for (IdList& list : plan.lists) {
    list.slots = begin + table_at[static_cast<size_t>(list.type)];
    if (list.first_tile < plan.num_numbered_tiles) {
      list.slot_of = slot_of;
      slot_of += list.size;
    }
  }
  return workspace;
}

// The scratch of the CPU's kernel is not needed: torch's allocator keeps blocks for the next call.
std::tuple<std::vector<Tensor>, std::vector<Tensor>> compact(const Tensor& scratch, std::vector<Tensor> seeds,
                                                             std::vector<Tensor> ids, std::vector<int64_t> types) {
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
  Plan plan = make_plan(seeds, ids, types);
  Control control{};
  std::vector<word_t> told(static_cast<size_t>(Control::kWords) + seeds.size(), kNoFault);
  Tensor workspace;
  if (!plan.lists.empty()) {
    workspace = place(plan, device, seeds, control);
  }
  IdBatch batch(device, control, plan.lists, plan.num_numbered_tiles);
  batch.insert_ids();
  batch.number_ids();
  if (!plan.lists.empty()) {
    device.read(told.data(), control.fault, static_cast<int64_t>(told.size()));
  }
  check_id_fault(told[0], true);

  std::vector<Tensor> nodes;
  std::vector<Tensor> local;
  for (size_t t = 0; t < seeds.size(); ++t) {
    const word_t count = told[static_cast<size_t>(Control::kWords) + t];  // never written where there were no lists
    const int64_t fresh = count == ~word_t{0} ? 0 : static_cast<int64_t>(count);
    nodes.push_back(device.empty({seeds[t].numel() + fresh}, seeds[t].scalar_type()));
  }
  for (const Tensor& list : ids) {
    local.push_back(device.empty({list.numel()}, ScalarType::Long));
  }
  for (size_t i = 0; i < plan.lists.size(); ++i) {
    IdList& list = plan.lists[i];
    list.fresh = nodes[static_cast<size_t>(list.type)].mutable_data_ptr();
    if (list.slot_of != nullptr) {
      list.local = mutable_data<int64_t>(local[plan.which[i]]);
    }
  }
  batch.write_ids(plan.lists);
  return {nodes, local};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { m.impl("compact", TORCH_BOX(&compact)); }

}  // namespace gnnsys::cuda
