// sample_into_table: sample_neighbors, then relabel of what it found, in one op; for uniform draws that nothing filters.
//
// Seeds are taken in chunks. One thread numbers the chunks' neighbours, in order, as soon as they are drawn, and draws
// when none are ready; the other threads draw. So all of them are busy as long as drawing takes longer than numbering,
// and what comes out is the same on any number of threads. On one thread a chunk's neighbours stay in the first cache.
//
// Work: that of the two ops, without a write and a read of all neighbours on one thread. Rows of seeds and edges go to
// memory that the caller has written to before: the first write to a page is a fault, and clearing it takes longer than
// drawing what it holds.
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/arguments.h"
#include "cpu/number_ids.h"
#include "cpu/sample_plain.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kChunk = 256;  // seeds

// The seeds of a call, chunk after chunk, with their places among all edges.
template <typename id_t>
struct Chunks {
  const Request<id_t>& q;
  const Row* rows;
  const int64_t* offsets;
  int64_t* positions;

  int64_t count() const { return (q.num_seeds + kChunk - 1) / kChunk; }
  int64_t begin(int64_t chunk) const { return chunk * kChunk; }
  int64_t end(int64_t chunk) const { return std::min(q.num_seeds, (chunk + 1) * kChunk); }
  int64_t first_edge(int64_t chunk) const { return offsets[begin(chunk)]; }
  int64_t num_edges(int64_t chunk) const { return offsets[end(chunk)] - first_edge(chunk); }

  PlainWriter<id_t> writer() const { return {q, rows, offsets, positions}; }
  void draw(int64_t chunk, PlainWriter<id_t>* writer, id_t* neighbors) const {
    fill_seeds(q, offsets, begin(chunk), end(chunk), writer, positions, neighbors);
  }
};

// Numbers neighbours chunk after chunk.
template <typename Table, typename id_t>
class Numberer {
 public:
  Numberer(Table table, int64_t bound, int64_t* local, id_t* fresh)
      : table_(table), bound_(bound), local_(local), fresh_(fresh) {}

  // False where the table is full or an id is none, and there is no use in going on.
  bool number(const id_t* neighbors, int64_t size) {
    misfit_ = find_misfit(neighbors, size, bound_);
    if (misfit_ != 0) {
      return false;
    }
    num_fresh_ += number_ids(table_, neighbors, size, local_, fresh_ + num_fresh_);
    local_ += size;
    return !table_.overflowed();
  }

  int64_t num_fresh() const { return num_fresh_; }
  int64_t misfit() const { return misfit_; }

 private:
  Table table_;
  int64_t bound_;
  int64_t* local_;
  id_t* fresh_;
  int64_t num_fresh_ = 0;
  id_t misfit_ = 0;
};

template <typename id_t, typename Numbers>
void in_turn(const Chunks<id_t>& chunks, Numbers* numberer) {
  PlainWriter<id_t> writer = chunks.writer();
  std::vector<id_t> neighbors;
  bool going = true;
  for (int64_t c = 0; c < chunks.count() && going; ++c) {
    neighbors.resize(static_cast<size_t>(chunks.num_edges(c)));
    chunks.draw(c, &writer, neighbors.data());
    going = numberer->number(neighbors.data(), chunks.num_edges(c));
  }
}

// Which chunks are drawn, told by those who draw to the one who numbers.
template <typename id_t>
class Progress {
 public:
  Progress(const Chunks<id_t>& chunks, id_t* neighbors)
      : chunks_(chunks), neighbors_(neighbors), drawn_(static_cast<size_t>(chunks.count())) {}

  // Draws the next chunk; false where none is left. Whoever waits is told of an error too.
  bool draw_next(PlainWriter<id_t>* writer) {
    const int64_t chunk = next_.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= chunks_.count() || is_over()) {
      return false;
    }
    try {
      chunks_.draw(chunk, writer, neighbors_ + chunks_.first_edge(chunk));
    } catch (...) {
      stop();
      throw;
    }
    drawn_[static_cast<size_t>(chunk)].store(true, std::memory_order_release);
    return true;
  }

  bool is_drawn(int64_t chunk) const { return drawn_[static_cast<size_t>(chunk)].load(std::memory_order_acquire); }
  bool is_over() const { return over_.load(std::memory_order_relaxed); }
  void stop() { over_.store(true, std::memory_order_relaxed); }

 private:
  const Chunks<id_t>& chunks_;
  id_t* neighbors_;
  std::vector<std::atomic<bool>> drawn_;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> over_{false};
};

// Numbers what is drawn; draws where nothing is ready, and waits for chunks of others when all are being drawn.
template <typename id_t, typename Numbers>
void number_drawn(const Chunks<id_t>& chunks, const id_t* neighbors, Progress<id_t>* progress, Numbers* numberer) {
  PlainWriter<id_t> writer = chunks.writer();
  for (int64_t c = 0; c < chunks.count() && !progress->is_over();) {
    if (!progress->is_drawn(c)) {
      if (!progress->draw_next(&writer)) {
        std::this_thread::yield();
      }
    } else if (numberer->number(neighbors + chunks.first_edge(c), chunks.num_edges(c))) {
      ++c;
    } else {
      progress->stop();
    }
  }
}

template <typename id_t, typename Numbers>
void side_by_side(const Chunks<id_t>& chunks, int threads, Numbers* numberer) {
  const Tensor scratch = empty_cpu({chunks.offsets[chunks.q.num_seeds]}, id_type<id_t>());
  auto* const neighbors = mutable_data<id_t>(scratch);
  Progress<id_t> progress(chunks, neighbors);
  const auto draw = [&] {
    PlainWriter<id_t> writer = chunks.writer();
    return progress.draw_next(&writer);
  };
  with_helpers(threads, [&] { number_drawn(chunks, neighbors, &progress, numberer); }, draw);
}

using Result = std::tuple<Tensor, Tensor, Tensor>;

template <typename id_t>
Result draw_and_number(const Tensor& table, const Request<id_t>& q, Row* rows, const Tensor& room) {
  Tensor offsets = empty_cpu({q.num_seeds + 1}, ScalarType::Long);
  const int64_t total = count_rows(q, rows, mutable_data<int64_t>(offsets));
  const bool has_room = 2 * total <= room.numel();
  Tensor edges = empty_cpu({2, has_room ? 0 : total}, ScalarType::Long);
  Tensor fresh = empty_cpu({total}, id_type<id_t>());
  auto* const local = mutable_data<int64_t>(has_room ? room : edges);
  const Chunks<id_t> chunks{q, rows, const_data<int64_t>(offsets), local + total};
  const int64_t bound = id_bound(table);
  const int64_t num_fresh = with_table(table, [&](auto map) {
    Numberer<decltype(map), id_t> numberer(map, bound, local, mutable_data<id_t>(fresh));
    const int threads = num_threads_for(q.num_seeds, kSeedsPerThread);
    if (threads == 1) {
      in_turn(chunks, &numberer);
    } else {
      side_by_side(chunks, threads, &numberer);
    }
    check_fits(numberer.misfit(), bound);
    return numberer.num_fresh();
  });
  return {offsets, edges, torch::stable::narrow(fresh, 0, 0, num_fresh)};
}

// Edges are two rows, local ids of sources and positions: at the beginning of `room` where they fit, else returned.
Result sample_into_table(const Tensor& table, const Tensor& indptr, const Tensor& indices, const Tensor& seeds,
                         int64_t fanout, bool replace, int64_t key, const Tensor& rows, const Tensor& room) {
  check_table(table);
  for (const auto& [tensor, name] : {std::pair{&rows, "rows"}, std::pair{&room, "room"}}) {
    check_vector(*tensor, name);
    check_dtype(*tensor, ScalarType::Long, name);
  }
  CHECK_ARG(rows.numel() >= 2 * seeds.numel(), "rows must have two entries per seed, ", 2 * seeds.numel(), ", got ",
            rows.numel());
  check_seeds(indptr, indices, seeds);
  check_fanout(fanout);
  return dispatch_ids(indices, [&](auto id) {
    using id_t = decltype(id);
    Request<id_t> q{};
    q.indptr = const_data<int64_t>(indptr);
    q.indices = const_data<id_t>(indices);
    q.num_rows = indptr.numel() - 1;
    q.num_edges = indices.numel();
    q.seeds = const_data<id_t>(seeds);
    q.num_seeds = seeds.numel();
    q.fanout = fanout;
    q.replace = replace;
    q.key = static_cast<uint64_t>(key);
    return draw_and_number(table, q, static_cast<Row*>(rows.mutable_data_ptr()), room);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "sample_into_table", &sample_into_table); }

}  // namespace gnnsys
