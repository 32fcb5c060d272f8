// The three kernels that number ids, for all lists and types of a call at once. A block takes one tile of one list.
#include "cuda/id_table.cuh"

#include <algorithm>

namespace gnnsys::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kWarpItems = kWarp * kItems;

__device__ const IdList& list_of(const Batch& batch, uint32_t tile) {
  const IdList* lists = batch.elsewhere != nullptr ? batch.elsewhere : batch.here;
  int low = 0;
  int high = batch.num_lists - 1;
  while (low < high) {  // the last list that begins at or before the tile
    const int middle = (low + high + 1) / 2;
    if (lists[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return lists[low];
}

__device__ void report(const Batch& batch, const IdList& list, word_t fault) {
  if (batch.control.fault != nullptr) {
    atomicMin(batch.control.fault, fault);
  }
  if (list.header != nullptr) {  // a table with a bad id in its history is void until it is cleared
    atomicMin(reinterpret_cast<word_t*>(list.header + kFaultWord), fault);
  }
}

// The list's table, the same answer in every thread of every tile. Where there is none, nothing may be done.
__device__ bool open_table(const IdList& list, Table& table, word_t& fault) {
  fault = kNoFault;
  if (list.header == nullptr) {
    table = {list.slots, list.num_slots, list.base, list.wide_slots};
    return true;
  }
  if (!open_header(list.header, list.header_words, table)) {
    fault = kNotInitialised;
  } else if (table.base + list.size > table.num_slots / 2) {
    fault = kTableFull;
  } else {  // what a refused call has put in was never counted, so there may be no room left
    fault = static_cast<word_t>(list.header[kVoidWord]);
  }
  return fault == kNoFault;
}

// Threads of a warp hold consecutive ids, and warps consecutive runs: a tile's order is (warp, item, lane).
__device__ int64_t offset_of(uint32_t tile_of_list, int item) {
  return static_cast<int64_t>(tile_of_list) * kTile + threadIdx.x / kWarp * kWarpItems + item * kWarp +
         threadIdx.x % kWarp;
}

template <typename id_t, typename Slots>
__device__ void insert_tile(const Batch& batch, const IdList& list, const Table& table, const Slots& slots) {
  const auto* ids = static_cast<const id_t*>(list.ids);
  const int64_t bound = table.wide ? INT64_MAX : int64_t{1} << 32;
  const uint32_t tile = blockIdx.x - list.first_tile;
  int64_t id[kItems];
  uint32_t slot[kItems];
  typename Slots::Seen seen[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t at = offset_of(tile, i);
    id[i] = at < list.size ? static_cast<int64_t>(ids[at]) : 0;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {  // all first looks under way together; a bad id's is harmless
    slot[i] = home(static_cast<word_t>(id[i]), table.num_slots);
    seen[i] = slots.load(slot[i]);
  }
  // Items probe side by side: a thread waits as often as its longest search takes steps, not as often as all together.
  uint32_t won[kItems] = {};
  bool searching[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    searching[i] = offset_of(tile, i) < list.size;
    if (searching[i] && (id[i] < 0 || id[i] >= bound)) {
      report(batch, list, fault_of_id(id[i]));
      slot[i] = 0;
      searching[i] = false;
    }
  }
  bool left = true;
  while (left) {
    left = false;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (searching[i]) {
        const uint32_t mine = table.base + list.first + static_cast<uint32_t>(offset_of(tile, i));
        const Offer answer = slots.offer(slot[i], seen[i], static_cast<word_t>(id[i]), mine);
        searching[i] = answer == Offer::kOther;
        won[i] = answer == Offer::kWon ? kWinner : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (searching[i]) {
        slot[i] = next_slot(slot[i], table.num_slots);
        seen[i] = slots.load(slot[i]);
        left = true;
      }
    }
  }
  if (list.slot_of != nullptr) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t at = offset_of(tile, i);
      if (at < list.size) {
        list.slot_of[at] = slot[i] | won[i];
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) insert_kernel(const __grid_constant__ Batch batch) {
  const IdList& list = list_of(batch, blockIdx.x);
  Table table;
  word_t fault = kNoFault;
  const bool open = open_table(list, table, fault);
  if (list.header != nullptr && threadIdx.x == 0 && blockIdx.x == list.first_tile) {
    if (!open) {
      report(batch, list, fault);
    } else if (batch.control.fault != nullptr) {  // what earlier ops could not tell
      atomicMin(batch.control.fault, static_cast<word_t>(list.header[kFaultWord]));
    }
  }
  if (!open) {
    return;
  }
  const auto insert = [&](auto id, auto slots) { insert_tile<decltype(id)>(batch, list, table, slots); };
  const auto with_ids = [&](auto slots) {
    if (list.wide_ids) {
      insert(int64_t{}, slots);
    } else {
      insert(int32_t{}, slots);
    }
  };
  if (table.wide) {
    with_ids(WideSlots{static_cast<ulonglong2*>(table.slots)});
  } else {
    with_ids(NarrowSlots{static_cast<word_t*>(table.slots)});
  }
}

// A winner may have been beaten after its offer: only now is it known who is first. Storing a local id where others
// still compare positions is safe: it is no larger than the winner's own value, and theirs are larger.
__global__ void __launch_bounds__(kThreads) number_kernel(const __grid_constant__ Batch batch) {
  __shared__ uint32_t warp_totals[kWarps];
  const auto tile = static_cast<uint32_t>(take_tile(batch.control.ticket));
  const IdList& list = list_of(batch, tile);
  Table table;
  word_t fault = kNoFault;
  if (!open_table(list, table, fault)) {
    return;
  }
  const Values values(table.slots, table.wide);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const unsigned below = (1u << threadIdx.x % kWarp) - 1;
  const uint32_t base = table.base;
  uint32_t slot[kItems];
  bool may_win[kItems];
  uint32_t value[kItems];
  unsigned winners[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t at = offset_of(tile - list.first_tile, i);
    slot[i] = at < list.size ? list.slot_of[at] : 0;
    may_win[i] = (slot[i] & kWinner) != 0;
    slot[i] &= ~kWinner;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    value[i] = may_win[i] ? values.load(slot[i]) : 0;
  }
  uint32_t warp_total = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t at = offset_of(tile - list.first_tile, i);
    const bool wins = may_win[i] && value[i] == base + list.first + static_cast<uint32_t>(at);
    if (may_win[i] && !wins) {
      list.slot_of[at] = slot[i];
    }
    may_win[i] = wins;
    winners[i] = __ballot_sync(kAllLanes, wins);
    warp_total += __popc(winners[i]);
  }
  if (threadIdx.x % kWarp == 0) {
    warp_totals[warp] = warp_total;
  }
  __syncthreads();
  uint32_t rank = 0;
  uint32_t total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    rank += w < warp ? warp_totals[w] : 0;
    total += warp_totals[w];
  }
  // Tiles of a type are summed from its first one on.
  word_t* const scan_words = batch.control.states + list.type_begin - 1;
  const auto before = static_cast<uint32_t>(sum_of_tiles_before(scan_words, tile - list.type_begin, total));
  if (threadIdx.x == 0 && tile + 1 == list.type_end) {
    batch.control.count[list.type] = before + total;
    if (list.header != nullptr) {
      batch.control.count[1] = base;  // an IdTable is the only type of its call
    }
  }
  rank += base + before;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (may_win[i]) {
      values.store(slot[i], rank + __popc(winners[i] & below));
    }
    rank += __popc(winners[i]);
  }
}

template <typename id_t>
__device__ void write_tile(const IdList& list, const Table& table) {
  const auto* ids = static_cast<const id_t*>(list.ids);
  auto* fresh = static_cast<id_t*>(list.fresh);
  const uint32_t tile = blockIdx.x - list.first_tile;
  if (list.slot_of == nullptr) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t at = offset_of(tile, i);
      if (at < list.size) {
        fresh[list.first + at] = ids[at];
      }
    }
    return;
  }
  const Values values(table.slots, table.wide);
  uint32_t slot[kItems];
  uint32_t value[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t at = offset_of(tile, i);
    slot[i] = at < list.size ? list.slot_of[at] : 0;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    value[i] = values.load(slot[i] & ~kWinner);
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t at = offset_of(tile, i);
    if (at < list.size) {
      list.local[at] = value[i];
      if (slot[i] & kWinner) {
        fresh[value[i] - list.fresh_base] = ids[at];
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ Batch batch) {
  const IdList& list = list_of(batch, blockIdx.x);
  Table table;
  word_t fault = kNoFault;
  if (!open_table(list, table, fault)) {
    return;
  }
  if (list.wide_ids) {
    write_tile<int64_t>(list, table);
  } else {
    write_tile<int32_t>(list, table);
  }
}

}  // namespace

// -- host ------------------------------------------------------------------------------------------------------------

IdBatch::IdBatch(const Device& device, Control control, std::vector<IdList> lists, int64_t num_numbered_tiles)
    : device_(device), num_numbered_tiles_(num_numbered_tiles) {
  batch_.control = control;
  batch_.num_lists = static_cast<int>(lists.size());
  for (const IdList& list : lists) {
    num_tiles_ += num_tiles(list.size);
  }
  set_lists(lists);
}

void IdBatch::set_lists(const std::vector<IdList>& lists) {
  if (lists.size() <= Batch::kInline) {
    std::copy(lists.begin(), lists.end(), batch_.here);
    return;
  }
  elsewhere_ = device_.workspace<IdList>(static_cast<int64_t>(lists.size()));
  // From pageable memory: it is taken before the call returns.
  CUDA_CHECK(cudaMemcpyAsync(elsewhere_.mutable_data_ptr(), lists.data(), lists.size() * sizeof(IdList),
                             cudaMemcpyHostToDevice, device_.stream()));
  batch_.elsewhere = static_cast<const IdList*>(elsewhere_.const_data_ptr());
}

void IdBatch::insert_ids() const {
  if (num_tiles_ > 0) {
    insert_kernel<<<static_cast<unsigned>(num_tiles_), kThreads, 0, device_.stream()>>>(batch_);
    CUDA_CHECK_LAUNCH();
  }
}

void IdBatch::number_ids() const {
  if (num_numbered_tiles_ > 0) {
    number_kernel<<<static_cast<unsigned>(num_numbered_tiles_), kThreads, 0, device_.stream()>>>(batch_);
    CUDA_CHECK_LAUNCH();
  }
}

void IdBatch::write_ids(const std::vector<IdList>& lists) {
  if (num_tiles_ > 0) {
    set_lists(lists);
    write_kernel<<<static_cast<unsigned>(num_tiles_), kThreads, 0, device_.stream()>>>(batch_);
    CUDA_CHECK_LAUNCH();
  }
}

}  // namespace gnnsys::cuda
