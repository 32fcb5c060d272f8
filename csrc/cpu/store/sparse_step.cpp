// sparse_adam_step, sparse_adagrad_step: one optimizer step on the rows that some gradient names, where the rows live.
//
// `ids` and `grads` have one entry per rank. The gradients of a row are summed in the order of the ranks and, within a
// rank, in the order they stand; the sum is divided by `ranks` and the row is updated once. One thread does all of
// a row, so nothing depends on the number of threads. Work: a bit or a hash of every id, one read of every gradient, one
// read and write of every row touched and its state.
#include "common/id_range.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/id_table.h"
#include "cpu/row_copy.h"
#include "cpu/store/versions.h"
#include "cpu/vectors/kernels.h"

#include <array>
#include <atomic>
#include <cmath>
#include <optional>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kValuesPerThread = 1 << 14;
constexpr int64_t kRowsPerBit = 256;  // of a table, for each one that is named
constexpr int64_t kAhead = 2;  // rows that are on their way from memory while one is updated

// The gradients of all ranks, grouped by the row they are for, groups in first-seen order.
struct Grouped {
  std::vector<int64_t> rows;          // [groups]
  std::vector<int64_t> begin;         // [groups + 1], into members; empty where each row has one gradient
  std::vector<const float*> members;  // gradients, in order

  int64_t first_of(int64_t group) const { return begin.empty() ? group : begin[static_cast<size_t>(group)]; }
};

// A bit for each row says which were named, where that takes less than a hash of the rows: false where one is named
// twice, or the table is too large for it.
bool all_differ(const std::vector<Tensor>& ids, int64_t total, int64_t num_rows) {
  if (num_rows / kRowsPerBit > total) {
    return false;
  }
  std::vector<uint64_t> named(static_cast<size_t>(num_rows / 64 + 1), 0);
  for (const Tensor& t : ids) {
    bool is_new = true;
    dispatch_ids(t, [&](auto id) {
      const auto* data = const_data<decltype(id)>(t);
      for (int64_t i = 0; i < t.numel() && is_new; ++i) {
        uint64_t& word = named[static_cast<size_t>(data[i] / 64)];
        const uint64_t bit = uint64_t{1} << (data[i] % 64);
        is_new = (word & bit) == 0;
        word |= bit;
      }
    });
    if (!is_new) {
      return false;
    }
  }
  return true;
}

// What group_gradients finds where no row is named twice.
Grouped list_gradients(const std::vector<Tensor>& ids, const std::vector<Tensor>& grads, int64_t total, int64_t size) {
  Grouped out;
  out.rows.reserve(static_cast<size_t>(total));
  out.members.reserve(static_cast<size_t>(total));
  for (size_t k = 0; k < ids.size(); ++k) {
    const float* const grad = const_data<float>(grads[k]);
    dispatch_ids(ids[k], [&](auto id) {
      const auto* data = const_data<decltype(id)>(ids[k]);
      for (int64_t i = 0; i < ids[k].numel(); ++i) {
        out.rows.push_back(static_cast<int64_t>(data[i]));
        out.members.push_back(grad + i * size);
      }
    });
  }
  return out;
}

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

Grouped group_gradients(const std::vector<Tensor>& ids, const std::vector<Tensor>& grads, int64_t num_rows,
                        int64_t size) {
  int64_t total = 0;
  for (const Tensor& t : ids) {
    total += t.numel();
  }
  if (all_differ(ids, total, num_rows)) {
    return list_gradients(ids, grads, total, size);
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

// The sum of a row's gradients over the number of ranks.
class Average {
 public:
  explicit Average(float ranks) : ranks_(ranks) {
    int exponent = 0;
    is_power_ = std::frexp(ranks, &exponent) == 0.5f;
  }

  // In `sum`, which has room for a row, or the only gradient itself where there is one rank. To multiply by the inverse
  // of a power of two rounds as the division does, and takes a tenth of its time.
  const float* operator()(const float* const* members, int64_t count, int64_t size, float* __restrict sum) const {
    if (count == 1 && ranks_ == 1.0f) {
      return members[0];
    }
    std::copy_n(members[0], size, sum);
    for (int64_t m = 1; m < count; ++m) {
      const float* const __restrict grad = members[m];
      for (int64_t i = 0; i < size; ++i) {
        sum[i] += grad[i];
      }
    }
    if (is_power_) {
      const float inverse = 1.0f / ranks_;
      for (int64_t i = 0; i < size; ++i) {
        sum[i] *= inverse;
      }
    } else {
      for (int64_t i = 0; i < size; ++i) {
        sum[i] /= ranks_;
      }
    }
    return sum;
  }

 private:
  float ranks_;
  bool is_power_ = false;
};

// Calls change(row_of(i, gradient), row_of(j, gradient)) once for every row i named, with all of `locks` held. Row j has
// its turn soon.
template <typename RowOf, typename Change>
int64_t step(const Tensor& rows, const std::vector<Tensor>& ids, const std::vector<Tensor>& grads, double ranks,
             const std::array<Versions, 3>& locks, const RowOf& row_of, const Change& change) {
  const int64_t size = row_size(rows);
  const Grouped grouped = group_gradients(ids, grads, rows.size(0), size);
  const auto num_groups = static_cast<int64_t>(grouped.rows.size());
  const int shares = num_shares_for(num_groups, kValuesPerThread / std::max<int64_t>(size, 1));
  const Average average(static_cast<float>(ranks));
  std::atomic<bool> written{true};
  for_shares(shares, [&](int s, int n) {
    const Range mine = share_of(num_groups, s, n);
    std::vector<float> sum(static_cast<size_t>(size));
    for (int64_t g = mine.begin; g < mine.end; ++g) {
      const int64_t soon = std::min(g + kAhead, mine.end - 1);
      const auto next = row_of(grouped.rows[static_cast<size_t>(soon)] * size,
                               grouped.members[static_cast<size_t>(grouped.first_of(soon))]);
      const int64_t first = grouped.first_of(g);
      const int64_t end = grouped.first_of(g + 1);
      const float* const grad = average(grouped.members.data() + first, end - first, size, sum.data());
      const int64_t row = grouped.rows[static_cast<size_t>(g)];
      size_t held = 0;
      while (held < locks.size() && locks[held].hold(row)) {
        ++held;
      }
      if (held == locks.size()) {
        Versions::begin_writes();
        change(row_of(row * size, grad), next, size);
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
  const AdamRates rates{static_cast<float>(1.0 - beta1), static_cast<float>(1.0 - beta2), static_cast<float>(eps),
                        static_cast<float>(-step_size)};
  const auto row_of = [=](int64_t at, const float* grad) { return AdamRow{row + at, average + at, square + at, grad}; };
  const auto change = [=](const AdamRow& now, const AdamRow& next, int64_t size) {
    kernels->adam(now, next, size, rates);
  };
  return step(rows, ids, grads, ranks, locks, row_of, change);
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
  const AdagradRates rates{static_cast<float>(eps), static_cast<float>(-step_size)};
  const auto row_of = [=](int64_t at, const float* grad) { return AdagradRow{row + at, squares + at, grad}; };
  const auto change = [=](const AdagradRow& now, const AdagradRow& next, int64_t size) {
    kernels->adagrad(now, next, size, rates);
  };
  return step(rows, ids, grads, ranks, locks, row_of, change);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "sparse_adam_step", &sparse_adam_step);
  REGISTER_OP(m, "sparse_adagrad_step", &sparse_adagrad_step);
}

}  // namespace gnnsys
