// sparse_adam_step, sparse_adagrad_step: one optimizer step on the rows that some gradient names, where the rows live.
//
// `ids` and `grads` have one entry per rank. The gradients of a row are summed in the order of the ranks and, within a
// rank, in the order they stand; the sum is divided by `ranks` and the row is updated once. One thread does all of
// a row, so nothing depends on the number of threads. Work: a hash of every id, one read of every gradient, one read
// and write of every row touched and its state.
#include "common/id_range.h"
#include "common/prefetch.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/id_table.h"
#include "cpu/row_copy.h"
#include "cpu/store/versions.h"

#include <array>
#include <atomic>
#include <cmath>
#include <optional>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kValuesPerThread = 1 << 14;
constexpr int64_t kAhead = 4;  // rows that are on their way from memory while one is updated

// The gradients of all ranks, grouped by the row they are for, groups in first-seen order.
struct Grouped {
  std::vector<int64_t> rows;                // [groups]
  std::vector<int64_t> begin;               // [groups + 1], into members
  std::vector<const float*> members;        // gradients, in order
};

void check_gradients(const Tensor& rows, const std::vector<Tensor>& ids, const std::vector<Tensor>& grads) {
  CHECK_ARG(ids.size() == grads.size(), "ids and grads must have one entry per rank each");
  for (size_t k = 0; k < ids.size(); ++k) {
    check_ids(ids[k], "ids");
    check_rows(grads[k], "grads");
    check_dtype(grads[k], ScalarType::Float, "grads");
    CHECK_ARG(grads[k].size(0) == ids[k].numel(), "grads must have ", ids[k].numel(), " rows, got ", grads[k].size(0));
    CHECK_ARG(same_row_shape(grads[k], rows), "grads must have rows of the same shape as the table");
    check_id_range(ids[k], rows.size(0), "ids");
  }
}

Grouped group_gradients(const std::vector<Tensor>& ids, const std::vector<Tensor>& grads, int64_t size) {
  int64_t total = 0;
  for (const Tensor& t : ids) {
    total += t.numel();
  }
  int64_t log2 = kMinLog2;
  while (max_count(log2) < total) {
    ++log2;
  }
  std::vector<int64_t> words(static_cast<size_t>(kHeader + (int64_t{2} << log2)), 0);
  words[0] = log2;
  IdTable<WideSlot> table(words.data());
  Grouped out;
  std::vector<int64_t> group_of;
  group_of.reserve(static_cast<size_t>(total));
  for (const Tensor& t : ids) {
    dispatch_ids(t, [&](auto id) {
      const auto* data = const_data<decltype(id)>(t);
      for (int64_t i = 0; i < t.numel(); ++i) {
        const auto row = static_cast<uint64_t>(data[i]);
        WideSlot* const slot = table.find(row, table.home(row));
        if (slot->empty()) {
          slot->set(row, static_cast<int64_t>(out.rows.size()));
          out.rows.push_back(static_cast<int64_t>(row));
        }
        group_of.push_back(slot->local());
      }
    });
  }
  out.begin.assign(out.rows.size() + 1, 0);
  for (const int64_t g : group_of) {
    ++out.begin[static_cast<size_t>(g) + 1];
  }
  for (size_t g = 0; g < out.rows.size(); ++g) {
    out.begin[g + 1] += out.begin[g];
  }
  std::vector<int64_t> next(out.begin.begin(), out.begin.end() - 1);
  out.members.resize(static_cast<size_t>(total));
  size_t at = 0;
  for (size_t k = 0; k < ids.size(); ++k) {
    const float* const grad = const_data<float>(grads[k]);
    for (int64_t i = 0; i < ids[k].numel(); ++i) {
      out.members[static_cast<size_t>(next[static_cast<size_t>(group_of[at++])]++)] = grad + i * size;
    }
  }
  return out;
}

// Calls change(row, gradient) once for every row named, with all of `locks` held. `touched` are the table and its states.
template <typename Change>
int64_t step(const Tensor& rows, const std::vector<Tensor>& ids, const std::vector<Tensor>& grads, double ranks,
             const std::array<Versions, 3>& locks, const std::vector<const float*>& touched, const Change& change) {
  const int64_t size = row_size(rows);
  const Grouped grouped = group_gradients(ids, grads, size);
  const auto num_groups = static_cast<int64_t>(grouped.rows.size());
  const int threads = num_threads_for(num_groups, kValuesPerThread / std::max<int64_t>(size, 1));
  std::vector<float> scratch(static_cast<size_t>(threads * size));
  const auto divisor = static_cast<float>(ranks);
  std::atomic<bool> written{true};
  on_threads(threads, [&](int t, int n) {
    const Range mine = share_of(num_groups, t, n);
    float* const sum = scratch.data() + t * size;
    for (int64_t g = mine.begin; g < mine.end; ++g) {
      if (g + kAhead < mine.end) {
        const int64_t ahead = grouped.rows[static_cast<size_t>(g + kAhead)] * size;
        for (const float* const table : touched) {
          prefetch_read(table + ahead, size * static_cast<int64_t>(sizeof(float)));
        }
      }
      const auto first = grouped.begin[static_cast<size_t>(g)];
      const auto end = grouped.begin[static_cast<size_t>(g) + 1];
      std::copy_n(grouped.members[static_cast<size_t>(first)], size, sum);
      for (int64_t m = first + 1; m < end; ++m) {
        const float* const grad = grouped.members[static_cast<size_t>(m)];
        for (int64_t i = 0; i < size; ++i) {
          sum[i] += grad[i];
        }
      }
      for (int64_t i = 0; i < size; ++i) {
        sum[i] /= divisor;
      }
      const int64_t row = grouped.rows[static_cast<size_t>(g)];
      size_t held = 0;
      while (held < locks.size() && locks[held].begin_write(row)) {
        ++held;
      }
      if (held == locks.size()) {
        change(row * size, size, sum);
      }
      for (size_t k = 0; k < held; ++k) {
        locks[k].end_write(row);
      }
      if (held < locks.size()) {
        written = false;
        return;
      }
    }
  });
  check_written(written);
  return num_groups;
}

void check_state(const Tensor& rows, const Tensor& state, const char* name) {
  check_rows(state, name);
  check_dtype(state, ScalarType::Float, name);
  CHECK_ARG(state.size(0) == rows.size(0) && same_row_shape(state, rows), name, " must have the table's shape");
}

std::array<Versions, 3> locks_of(const Tensor& rows, const std::vector<Tensor>& versions) {
  CHECK_ARG(versions.size() <= 3, "versions must be those of the table and of its states");
  std::array<Versions, 3> locks;
  for (size_t k = 0; k < versions.size(); ++k) {
    check_versions(versions[k], rows.size(0));
    locks[k] = Versions::of(versions[k]);
  }
  return locks;
}

// torch.optim.SparseAdam: m += (g - m)(1 - b1), v += (g^2 - v)(1 - b2), row -= step_size m / (sqrt(v) + eps), where
// step_size = lr sqrt(1 - b2^t) / (1 - b1^t).
int64_t sparse_adam_step(Tensor rows, Tensor exp_avg, Tensor exp_avg_sq, std::vector<Tensor> versions,
                         std::vector<Tensor> ids, std::vector<Tensor> grads, double ranks, double step_size,
                         double beta1, double beta2, double eps) {
  check_rows(rows, "rows");
  check_dtype(rows, ScalarType::Float, "rows");
  check_state(rows, exp_avg, "exp_avg");
  check_state(rows, exp_avg_sq, "exp_avg_sq");
  check_gradients(rows, ids, grads);
  const auto locks = locks_of(rows, versions);
  float* const row = mutable_data<float>(rows);
  float* const average = mutable_data<float>(exp_avg);
  float* const square = mutable_data<float>(exp_avg_sq);
  const auto rest1 = static_cast<float>(1.0 - beta1);
  const auto rest2 = static_cast<float>(1.0 - beta2);
  const auto small = static_cast<float>(eps);
  const auto negative = static_cast<float>(-step_size);
  const auto change = [=](int64_t at, int64_t size, const float* __restrict grad) {
    float* const __restrict x = row + at;
    float* const __restrict first = average + at;
    float* const __restrict second = square + at;
    for (int64_t i = 0; i < size; ++i) {
      const float m = (grad[i] - first[i]) * rest1 + first[i];
      const float v = (grad[i] * grad[i] - second[i]) * rest2 + second[i];
      first[i] = m;
      second[i] = v;
      x[i] += negative * (m / (std::sqrt(v) + small));
    }
  };
  return step(rows, ids, grads, ranks, locks, {row, average, square}, change);
}

// torch.optim.Adagrad on sparse gradients: s += g^2, row -= step_size g / (sqrt(s) + eps), where
// step_size = lr / (1 + (t - 1) lr_decay).
int64_t sparse_adagrad_step(Tensor rows, Tensor sum, std::vector<Tensor> versions, std::vector<Tensor> ids,
                            std::vector<Tensor> grads, double ranks, double step_size, double eps) {
  check_rows(rows, "rows");
  check_dtype(rows, ScalarType::Float, "rows");
  check_state(rows, sum, "sum");
  check_gradients(rows, ids, grads);
  const auto locks = locks_of(rows, versions);
  float* const row = mutable_data<float>(rows);
  float* const squares = mutable_data<float>(sum);
  const auto small = static_cast<float>(eps);
  const auto negative = static_cast<float>(-step_size);
  const auto change = [=](int64_t at, int64_t size, const float* __restrict grad) {
    float* const __restrict x = row + at;
    float* const __restrict s = squares + at;
    for (int64_t i = 0; i < size; ++i) {
      s[i] += grad[i] * grad[i];
      x[i] += negative * (grad[i] / (std::sqrt(s[i]) + small));
    }
  };
  return step(rows, ids, grads, ranks, locks, {row, squares}, change);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "sparse_adam_step", &sparse_adam_step);
  REGISTER_OP(m, "sparse_adagrad_step", &sparse_adagrad_step);
}

}  // namespace gnnsys
