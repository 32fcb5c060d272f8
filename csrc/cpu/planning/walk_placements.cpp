// placement_bounds and walk_placements: the costs of placements, and the random walk of ETP (Algorithm 3 of DGTP).
#include "common/philox.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/planning/placed_job.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <unordered_set>

namespace gnnsys {
namespace {

using planning::PlacedJob;

enum CostKind : int64_t { kPath = 0, kBound = 1, kLoad = 2 };
constexpr int64_t kFresh = 256;  // accepted moves after which sums are made anew, so that rounding does not add up

void check_placements(const Tensor& placements, const PlacedJob& job) {
  check_contiguous(placements, "placements");
  check_dtype(placements, ScalarType::Long, "placements");
  CHECK_ARG(placements.dim() == 2 && placements.size(1) == job.num_placed(), "placements must be [count, ",
            job.num_placed(), "]");
  const auto* const machines = const_data<int64_t>(placements);
  for (int64_t i = 0; i < placements.numel(); ++i) {
    CHECK_ARG(machines[i] >= 0 && machines[i] < job.num_machines(), "machines are 0 to ", job.num_machines() - 1,
              ", got ", machines[i]);
  }
}

// [count, 4]: full-rate path, busiest link, busiest cores, path with shared links. Work: E x N per placement and path.
Tensor placement_bounds(const std::vector<Tensor>& job, const std::vector<Tensor>& cluster, const Tensor& placements) {
  PlacedJob placed(job, cluster);
  check_placements(placements, placed);
  Tensor out = empty_cpu({placements.size(0), 4}, ScalarType::Double);
  auto* const found = mutable_data<double>(out);
  for (int64_t i = 0; i < placements.size(0); ++i) {
    placed.place(const_data<int64_t>(placements) + i * placed.num_placed());
    found[4 * i] = placed.full_rate_path();
    found[4 * i + 1] = placed.busiest_link();
    found[4 * i + 2] = placed.busiest_cores();
    found[4 * i + 3] = placed.sharing_path();
  }
  return out;
}

// Constraint (2), its relaxation (28) and the penalty of Eq. 27.
class Limits {
 public:
  Limits(const std::vector<Tensor>& limits, const PlacedJob& job, double relaxed) : num_machines_(job.num_machines()) {
    CHECK_ARG(limits.size() == 4, "limits are capacity, room, demand and allowed");
    const char* const names[] = {"capacity", "room", "demand"};
    const int64_t rows[] = {num_machines_, num_machines_, job.num_placed()};
    CHECK_ARG(limits[0].dim() == 2, "capacity must be [machines, resources]");
    num_resources_ = limits[0].size(1);
    std::vector<double>* const into[] = {&capacity_, &room_, &demand_};
    for (int i = 0; i < 3; ++i) {
      check_contiguous(limits[i], names[i]);
      check_dtype(limits[i], ScalarType::Double, names[i]);
      CHECK_ARG(limits[i].numel() == rows[i] * num_resources_, names[i], " must have ", rows[i] * num_resources_,
                " entries, got ", limits[i].numel());
      const auto* const data = const_data<double>(limits[i]);
      into[i]->assign(data, data + limits[i].numel());
    }
    check_contiguous(limits[3], "allowed");
    check_dtype(limits[3], ScalarType::Bool, "allowed");
    CHECK_ARG(limits[3].numel() == job.num_placed() * num_machines_, "allowed must be [placed, machines]");
    const auto* const data = const_data<bool>(limits[3]);
    allowed_.assign(data, data + limits[3].numel());
    for (size_t i = 0; i < room_.size(); ++i) {
      relaxed_room_.push_back(room_[i] + relaxed * capacity_[i]);
    }
  }

  void place(const PlacedJob& job) {
    used_.assign(capacity_.size(), 0.0);
    for (int64_t p = 0; p < job.num_placed(); ++p) {
      add(p, job.machine(p), 1.0);
    }
  }

  void move(int64_t placed, int64_t from, int64_t to) {
    add(placed, from, -1.0);
    add(placed, to, 1.0);
  }

  bool can_take(int64_t placed, int64_t machine) const {
    if (!allowed_[placed * num_machines_ + machine]) {
      return false;
    }
    for (int64_t r = 0; r < num_resources_; ++r) {
      const int64_t i = machine * num_resources_ + r;
      if (used_[i] + demand_[placed * num_resources_ + r] > relaxed_room_[i]) {
        return false;
      }
    }
    return true;
  }

  bool kept() const {
    for (size_t i = 0; i < used_.size(); ++i) {
      if (used_[i] > room_[i]) {
        return false;
      }
    }
    return true;
  }

  double penalty() const {  // the sum of Eq. 27; what is used of nothing was refused before
    double sum = 0.0;
    for (size_t i = 0; i < used_.size(); ++i) {
      if (used_[i] > room_[i]) {
        sum += (used_[i] - capacity_[i]) / capacity_[i];
      }
    }
    return sum;
  }

 private:
  void add(int64_t placed, int64_t machine, double sign) {
    for (int64_t r = 0; r < num_resources_; ++r) {
      used_[machine * num_resources_ + r] += sign * demand_[placed * num_resources_ + r];
    }
  }

  int64_t num_machines_, num_resources_ = 0;
  std::vector<double> capacity_, room_, relaxed_room_, demand_, used_;
  std::vector<bool> allowed_;
};

// Eq. 27 of that kind. Above `enough` a part of it may be returned that is above `enough` too: links and cores take a
// few additions, and where they alone forbid a move no path is needed.
double cost_of(PlacedJob* job, const Limits& limits, int64_t kind,
               double enough = std::numeric_limits<double>::infinity()) {
  const double over = 1.0 + limits.penalty();
  if (kind == kPath) {
    return job->sharing_path() * over;
  }
  const double load = std::max(job->busiest_link(), job->busiest_cores()) * over;
  if (kind == kLoad || load > enough) {
    return load;
  }
  return std::max(load, job->full_rate_path() * over);
}

std::string bytes_of(const PlacedJob& job, std::vector<int64_t>* placement) {
  for (int64_t p = 0; p < job.num_placed(); ++p) {
    (*placement)[p] = job.machine(p);
  }
  return std::string(reinterpret_cast<const char*>(placement->data()), placement->size() * sizeof(int64_t));
}

// Steps of Eq. 29 from `start` on, with a beta that grows evenly in its logarithm where `last_beta` is another one. A step proposes one of `movable` and one of the other machines that can take it, each
// uniformly. Moving back is proposed with the same probability: whoever else can take the task does not change by it.
//
// moves [steps, 3]: task (-1 where no machine can take it), machine, whether it was accepted. costs [steps]: of where
// the walk is behind the step. found [count, placed]: every placement that was accepted, keeps all limits and costs at
// most (1 + near) of the least such cost so far, once, the start first; found_costs, found_steps (-1: the start).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> walk_placements(
    const std::vector<Tensor>& job, const std::vector<Tensor>& cluster, const std::vector<Tensor>& limits,
    const Tensor& start, const Tensor& movable, int64_t kind, int64_t steps, double beta, double last_beta, bool relative,
    double relaxed, double near, int64_t key) {
  PlacedJob placed(job, cluster);
  check_placements(start, placed);
  CHECK_ARG(start.size(0) == 1, "one placement to start from is needed, got ", start.size(0));
  check_vector(movable, "movable");
  check_dtype(movable, ScalarType::Long, "movable");
  const auto* const tasks = const_data<int64_t>(movable);
  for (int64_t i = 0; i < movable.numel(); ++i) {
    CHECK_ARG(tasks[i] >= 0 && tasks[i] < placed.num_placed(), "movable has ", tasks[i], ", there are ",
              placed.num_placed(), " tasks");
  }
  CHECK_ARG(kind >= kPath && kind <= kLoad, "cost must be 0, 1 or 2, got ", kind);
  CHECK_ARG(last_beta == beta || (beta > 0 && last_beta > 0), "a beta that changes must be more than 0");
  CHECK_ARG(steps >= 0 && beta >= 0 && relaxed >= 0 && near >= 0, "steps, beta, relaxed and near must not be negative");
  Limits kept(limits, placed, relaxed);
  placed.place(const_data<int64_t>(start));
  kept.place(placed);

  Tensor moves = empty_cpu({steps, 3}, ScalarType::Long);
  Tensor costs = empty_cpu({steps}, ScalarType::Double);
  auto* move = mutable_data<int64_t>(moves);
  auto* const cost_at = mutable_data<double>(costs);
  double cost = cost_of(&placed, kept, kind);
  const double unit = relative && cost > 0 ? cost : 1.0;
  const double growth = last_beta == beta || steps < 2 ? 0.0 : std::log(last_beta / beta) / (steps - 1);
  double least = kept.kept() ? cost : std::numeric_limits<double>::infinity();
  std::vector<int64_t> now(placed.num_placed()), able;
  std::vector<std::string> found;
  std::unordered_set<std::string> seen;
  std::vector<double> found_costs;
  std::vector<int64_t> found_steps;
  const auto note = [&](int64_t step) {
    least = std::min(least, cost);
    if (const auto [at, is_new] = seen.insert(bytes_of(placed, &now)); is_new) {
      found.push_back(*at);
      found_costs.push_back(cost);
      found_steps.push_back(step);
    }
  };
  if (kept.kept()) {
    note(-1);
  }
  int64_t accepted = 0;
  for (int64_t step = 0; step < steps; ++step, move += 3) {
    const auto word = [&](uint64_t which) { return philox_u64(static_cast<uint64_t>(step), which, key); };
    move[0] = -1;
    move[1] = -1;
    move[2] = 0;
    cost_at[step] = cost;
    if (movable.numel() == 0) {
      continue;
    }
    const auto pick = [&](uint64_t which, size_t count) {
      return static_cast<size_t>(open_unit(word(which)) * static_cast<double>(count));
    };
    const int64_t task = tasks[pick(0, static_cast<size_t>(movable.numel()))];
    const int64_t from = placed.machine(task);
    able.clear();
    for (int64_t m = 0; m < placed.num_machines(); ++m) {
      if (m != from && kept.can_take(task, m)) {
        able.push_back(m);
      }
    }
    if (able.empty()) {
      continue;
    }
    const int64_t to = able[pick(1, able.size())];
    move[0] = task;
    move[1] = to;
    placed.move(task, to);
    kept.move(task, from, to);
    const double now_beta = growth == 0.0 ? beta : beta * std::exp(growth * static_cast<double>(step));
    // Accepted with min(1, exp(beta (cost - next))): if next is at most this, for a number drawn from (0, 1).
    const double most = cost - std::log(open_unit(word(2))) * unit / now_beta;
    const double next = cost_of(&placed, kept, kind, most);
    if (next > most) {
      placed.move(task, from);
      kept.move(task, to, from);
      continue;
    }
    move[2] = 1;
    cost = next;
    if (++accepted % kFresh == 0) {
      bytes_of(placed, &now);
      placed.place(now.data());
      kept.place(placed);
    }
    cost_at[step] = cost;
    if (cost <= (1.0 + near) * least && kept.kept()) {
      note(step);
    }
  }

  const auto count = static_cast<int64_t>(found.size());
  Tensor placements = empty_cpu({count, placed.num_placed()}, ScalarType::Long);
  Tensor their_costs = empty_cpu({count}, ScalarType::Double);
  Tensor their_steps = empty_cpu({count}, ScalarType::Long);
  auto* into = reinterpret_cast<char*>(mutable_data<int64_t>(placements));
  for (const std::string& one : found) {
    into = std::copy(one.begin(), one.end(), into);
  }
  std::copy(found_costs.begin(), found_costs.end(), mutable_data<double>(their_costs));
  std::copy(found_steps.begin(), found_steps.end(), mutable_data<int64_t>(their_steps));
  return {moves, costs, placements, their_costs, their_steps};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "placement_bounds", &placement_bounds);
  REGISTER_OP(m, "walk_placements", &walk_placements);
}

}  // namespace gnnsys
