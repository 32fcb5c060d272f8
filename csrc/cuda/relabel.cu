// IdTable on the device: relabelling hop by hop, with a table that outlives the call. The kernels are in id_table.cu.
//
// The count of ids lives in the table's header, on the device. Only `relabel` waits, for the number of new ids; what
// `relabel_seeds` found wrong is told there. A table that was given a bad id is void until it is initialised again.
#include "common/register.h"
#include "cuda/id_table.cuh"

#include "common/tensors.h"

#include <tuple>

namespace gnnsys::cuda {
namespace {

void check_table(const Tensor& table, const Device& device) {
  check_vector(table, device, "table");
  check_dtype(table, ScalarType::Long, "table");
  CHECK_ARG(table.numel() >= kHeader, "table must have at least ", kHeader, " words, got ", table.numel());
  CHECK_ARG(reinterpret_cast<uintptr_t>(table.const_data_ptr()) % 16 == 0,
            "table must begin at a multiple of 16 bytes");
}

__global__ void set_header(int64_t* header, int64_t log2_slots, bool wide) {
  header[0] = log2_slots;
  header[kCountWord] = 0;
  header[2] = 0;
  header[kWideWord] = wide;
  header[kFaultWord] = header[kVoidWord] = static_cast<int64_t>(kNoFault);
  for (int64_t i = kVoidWord + 1; i < kHeader; ++i) {
    header[i] = 0;
  }
}

__global__ void add_count(int64_t* header, int64_t more) {
  if (static_cast<word_t>(header[kFaultWord]) == kNoFault) {
    header[kCountWord] += more;
  }
  header[kVoidWord] = header[kFaultWord];
}

// Empties the first 2^log2_slots slots of a table; the tensor may be larger and is then partly unused.
void id_table_init(const Tensor& table, int64_t log2_slots, bool wide) {
  CHECK_ARG(table.is_cuda(), "table must be on the device of the ids");
  const Device device(table);
  check_table(table, device);
  CHECK_ARG(log2_slots >= kMinLog2 && log2_slots <= kMaxLog2, "log2_slots must be ", kMinLog2, " to ", kMaxLog2,
            ", got ", log2_slots);
  const int64_t words = (int64_t{1} << log2_slots) * (1 + wide);
  CHECK_ARG(kHeader + words <= table.numel(), "table has ", table.numel(), " words, too few for 2^", log2_slots,
            wide ? " wide" : "", " slots");
  auto* header = mutable_data<int64_t>(table);
  CUDA_CHECK(cudaMemsetAsync(header + kHeader, 0xFF, static_cast<size_t>(words) * sizeof(int64_t), device.stream()));
  set_header<<<1, 1, 0, device.stream()>>>(header, log2_slots, wide);
  CUDA_CHECK_LAUNCH();
}

// The ids of one call; what the table's header says is read on the device.
IdList list_for(const Tensor& table, const Tensor& ids) {
  CHECK_ARG(ids.numel() < kMaxPositions, "ids may be up to ", kMaxPositions - 1, " in a call, got ", ids.numel());
  IdList list{};
  list.ids = ids.const_data_ptr();
  list.size = ids.numel();
  list.header = mutable_data<int64_t>(table);
  list.header_words = table.numel();
  list.wide_ids = ids.scalar_type() == ScalarType::Long;
  list.type_end = static_cast<uint32_t>(num_tiles(list.size));
  return list;
}

// The smallest place of a repeated seed wins, and places are local ids: nothing is left to be numbered.
void relabel_seeds(const Tensor& table, const Tensor& ids) {
  CHECK_ARG(table.is_cuda(), "table must be on the device of the ids");
  const Device device(table);
  check_table(table, device);
  check_ids(ids, device, "ids");
  if (ids.numel() == 0) {
    return;
  }
  const IdList list = list_for(table, ids);
  IdBatch(device, Control{}, {list}, 0).insert_ids();
  add_count<<<1, 1, 0, device.stream()>>>(list.header, ids.numel());  // when every tile has read it
  CUDA_CHECK_LAUNCH();
}

void check_fault(const word_t fault, const Tensor& table, const Device& device) {
  if (fault == kNoFault) {
    return;
  }
  CHECK_ARG(fault != kNotInitialised, "table is not initialised: make it with gnnsys.ops.IdTable");
  auto* const words = mutable_data<int64_t>(table);
  CUDA_CHECK(cudaMemcpyAsync(words + kVoidWord, words + kFaultWord, sizeof(int64_t), cudaMemcpyDeviceToDevice,
                             device.stream()));
  int64_t header[kHeader];
  device.read(header, const_data<int64_t>(table), kHeader);
  CHECK_ARG(fault != kTableFull, "table holds up to ", max_count(header[0]),
            " ids, fewer than were given: make it larger");
  check_id_fault(fault, header[kWideWord] != 0);
}

std::tuple<Tensor, Tensor> relabel(const Tensor& table, const Tensor& ids) {
  CHECK_ARG(table.is_cuda(), "table must be on the device of the ids");
  const Device device(table);
  check_table(table, device);
  check_ids(ids, device, "ids");
  const int64_t size = ids.numel();
  const Tensor local = device.empty({size}, ScalarType::Long);
  if (size == 0) {
    return {local, device.empty({0}, ids.scalar_type())};
  }
  IdList list = list_for(table, ids);
  // Control words (fault, ticket, new ids, base) and the states of the scan, then each id's slot.
  constexpr int64_t kTold = Control::kWords + 2;
  const int64_t cleared = kTold + num_tiles(size);
  const Tensor workspace = device.workspace<word_t>(cleared + (size + 1) / 2);
  Tensor room = device.empty({size}, ids.scalar_type());  // before the table changes: there may be no memory
  auto* const begin = static_cast<word_t*>(workspace.mutable_data_ptr());
  CUDA_CHECK(cudaMemsetAsync(begin, 0xFF, static_cast<size_t>(cleared) * sizeof(word_t), device.stream()));
  list.slot_of = reinterpret_cast<uint32_t*>(begin + cleared);
  const Control control{begin, begin + 1, begin + Control::kWords, begin + kTold};
  IdBatch batch(device, control, {list}, num_tiles(size));
  batch.insert_ids();
  batch.number_ids();
  word_t told[kTold];
  device.read(told, begin, kTold);
  check_fault(told[0], table, device);

  const auto num_fresh = static_cast<int64_t>(told[Control::kWords]);
  const Tensor fresh = torch::stable::narrow(room, 0, 0, num_fresh);
  list.local = mutable_data<int64_t>(local);
  list.fresh = fresh.mutable_data_ptr();
  list.fresh_base = static_cast<int64_t>(told[Control::kWords + 1]);
  batch.write_ids({list});
  add_count<<<1, 1, 0, device.stream()>>>(list.header, num_fresh);
  CUDA_CHECK_LAUNCH();
  return {local, fresh};
}

template <typename Slots>
__device__ int64_t find(const Slots& slots, word_t id, uint32_t num_slots) {
  uint32_t slot = home(id, num_slots);
  auto seen = slots.load(slot);
  while (!Slots::empty(seen) && !Slots::holds(seen, id)) {
    slot = next_slot(slot, num_slots);
    seen = slots.load(slot);
  }
  return Slots::empty(seen) ? -1 : static_cast<int64_t>(Slots::value(seen));
}

template <typename id_t>
__global__ void lookup_kernel(const int64_t* header, int64_t header_words, const id_t* ids, int64_t size,
                              int64_t* local) {
  Table table;
  if (!open_header(header, header_words, table)) {
    fault("log2 of the slots of a table from gnnsys.ops.IdTable", header[0], kMaxLog2 + 1);
    return;
  }
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= size) {
    return;
  }
  const int64_t id = ids[at];
  if (id < 0 || (!table.wide && id >= int64_t{1} << 32)) {
    local[at] = -1;
  } else if (table.wide) {
    local[at] = find(WideSlots{static_cast<ulonglong2*>(table.slots)}, static_cast<word_t>(id), table.num_slots);
  } else {
    local[at] = find(NarrowSlots{static_cast<word_t*>(table.slots)}, static_cast<word_t>(id), table.num_slots);
  }
}

// Local ids of ids that may or may not be in the table: -1 for those that are not, be it that they never could be.
Tensor lookup(const Tensor& table, const Tensor& ids) {
  CHECK_ARG(table.is_cuda(), "table must be on the device of the ids");
  const Device device(table);
  check_table(table, device);
  check_ids(ids, device, "ids");
  const Tensor local = device.empty({ids.numel()}, ScalarType::Long);
  if (ids.numel() > 0) {
    dispatch_ids(ids, [&](auto id) {
      lookup_kernel<<<num_blocks(ids.numel(), kThreads), kThreads, 0, device.stream()>>>(
          const_data<int64_t>(table), table.numel(), const_data<decltype(id)>(ids), ids.numel(),
          mutable_data<int64_t>(local));
      CUDA_CHECK_LAUNCH();
    });
  }
  return local;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) {
  REGISTER_OP(m, "id_table_init", &id_table_init);
  REGISTER_OP(m, "relabel_seeds", &relabel_seeds);
  REGISTER_OP(m, "relabel", &relabel);
  REGISTER_OP(m, "lookup", &lookup);
}

}  // namespace gnnsys::cuda
