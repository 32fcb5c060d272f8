// The three steps that number ids, for all lists and types of a call at once; a kernel each, or one for all. A block
// takes one tile of one list.
#include "cuda/id_table.cuh"

#include <cooperative_groups.h>

#include <algorithm>
#include <atomic>

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

// One thread offers one id. Searches are short on average and some are long: a thread that had several would wait for
// the longest of them, and its warp for the longest of all.
template <typename id_t, typename Slots>
__device__ void insert_id(const Batch& batch, const IdList& list, int64_t at, const Table& table, const Slots& slots) {
  if (at >= list.size) {
    return;
  }
  const auto id = static_cast<int64_t>(static_cast<const id_t*>(list.ids)[at]);
  uint32_t slot = 0;
  uint32_t won = 0;
  if (id < 0 || id >= (table.wide ? INT64_MAX : int64_t{1} << 32)) {
    report(batch, list, fault_of_id(id));
  } else {
    const uint32_t mine = table.base + list.first + static_cast<uint32_t>(at);
    slot = home(static_cast<word_t>(id), table.num_slots);
    Offer answer = slots.offer(slot, slots.load(slot), static_cast<word_t>(id), mine);
    while (answer == Offer::kOther) {
      slot = next_slot(slot, table.num_slots);
      answer = slots.offer(slot, slots.load(slot), static_cast<word_t>(id), mine);
    }
    won = answer == Offer::kWon ? kWinner : 0;
  }
  if (list.slot_of != nullptr) {
    list.slot_of[at] = slot | won;
  }
}

// One of the kItems parts of a tile.
__device__ void insert(const Batch& batch, uint32_t part) {
  const uint32_t tile = part / kItems;
  const IdList& list = list_of(batch, tile);
  Table table;
  word_t fault = kNoFault;
  const bool open = open_table(list, table, fault);
  if (list.header != nullptr && threadIdx.x == 0 && part == list.first_tile * kItems) {
    if (!open) {
      report(batch, list, fault);
    } else if (batch.control.fault != nullptr) {  // what earlier ops could not tell
      atomicMin(batch.control.fault, static_cast<word_t>(list.header[kFaultWord]));
    }
  }
  if (!open) {
    return;
  }
  const int64_t at = static_cast<int64_t>(part - list.first_tile * kItems) * kThreads + threadIdx.x;
  const auto with_ids = [&](auto slots) {
    if (list.wide_ids) {
      insert_id<int64_t>(batch, list, at, table, slots);
    } else {
      insert_id<int32_t>(batch, list, at, table, slots);
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
__device__ void number(const Batch& batch, uint32_t tile) {
  __shared__ uint32_t warp_totals[kWarps];
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
__device__ void write_tile(const IdList& list, uint32_t tile, const Table& table) {
  const auto* ids = static_cast<const id_t*>(list.ids);
  auto* fresh = static_cast<id_t*>(list.fresh);
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

__device__ void write(const Batch& batch, uint32_t tile) {
  const IdList& list = list_of(batch, tile);
  Table table;
  word_t fault = kNoFault;
  if (!open_table(list, table, fault)) {
    return;
  }
  if (list.wide_ids) {
    write_tile<int64_t>(list, tile - list.first_tile, table);
  } else {
    write_tile<int32_t>(list, tile - list.first_tile, table);
  }
}

// -- as launches -----------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) insert_kernel(const __grid_constant__ Batch batch) {
  insert(batch, blockIdx.x);
}

__global__ void __launch_bounds__(kThreads) number_kernel(const __grid_constant__ Batch batch) {
  number(batch, static_cast<uint32_t>(take_tile(batch.control.ticket)));
}

__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ Batch batch) {
  write(batch, blockIdx.x);
}

// A few launches take longer than what they do to a hundred thousand ids. All blocks run at once, and each step begins
// when all have done the one before.
struct AtOnce {
  word_t* begin;
  int64_t num_words;  // even
  uint32_t num_tiles;
  uint32_t num_numbered_tiles;
  word_t* told;
  int num_told;
};

__global__ void __launch_bounds__(kThreads, 4)
    all_kernel(const __grid_constant__ Batch batch, const __grid_constant__ AtOnce all) {
  const auto grid = cooperative_groups::this_grid();
  auto* const pairs = reinterpret_cast<ulonglong2*>(all.begin);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < all.num_words / 2;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    pairs[i] = {kEmpty, kEmpty};
  }
  grid.sync();
  for (uint32_t part = blockIdx.x; part < all.num_tiles * kItems; part += gridDim.x) {
    insert(batch, part);
  }
  grid.sync();
  for (;;) {
    const auto tile = static_cast<uint32_t>(take_tile(batch.control.ticket));
    if (tile >= all.num_numbered_tiles) {
      break;
    }
    number(batch, tile);
  }
  grid.sync();
  for (uint32_t tile = blockIdx.x; tile < all.num_tiles; tile += gridDim.x) {
    write(batch, tile);
  }
  if (blockIdx.x == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < all.num_told; i += kThreads) {
      all.told[i] = __ldcg(batch.control.fault + i);
    }
  }
}

// Blocks of all_kernel that a device runs at once; asked for once.
int num_blocks_at_once(const Device& device) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  const int at = device.index() % kDevices;
  int count = known[at].load(std::memory_order_relaxed);
  if (count == 0) {
    int each = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, all_kernel, kThreads, 0));
    count = each * device.num_processors();
    known[at].store(count, std::memory_order_relaxed);
  }
  return count;
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
    insert_kernel<<<static_cast<unsigned>(num_tiles_) * kItems, kThreads, 0, device_.stream()>>>(batch_);
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

void IdBatch::do_all(const std::vector<IdList>& lists, word_t* begin, int64_t num_words, word_t* told, int num_told) {
  set_lists(lists);
  AtOnce all{begin,
             num_words,
             static_cast<uint32_t>(num_tiles_),
             static_cast<uint32_t>(num_numbered_tiles_),
             told,
             num_told};
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(num_tiles_ * kItems, num_blocks_at_once(device_)));
  void* arguments[] = {&batch_, &all};
  CUDA_CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(all_kernel), dim3(blocks), dim3(kThreads),
                                         arguments, 0, device_.stream()));
}

}  // namespace gnnsys::cuda
