// A training job on machines, as the simulator reads it, and the times it writes. No torch: tests/native includes this.
//
// Item numbers: task j of iteration n is n * num_tasks + j; the flow of edge e from iteration n is
// iterations * num_tasks + n * num_edges + e. A cause is 2 * item, + 1 where the item's start was the cause; -1 is none.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

namespace gnnsys::planning {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();
constexpr int kMostLinks = 4;  // out, in, out of an uplink, into one

enum class EdgeMode : int64_t { kData = 0, kAfterEnd = 1, kAfterStart = 2 };

// In the order of gnnsys/planning/simulation/policies.py, which says what each one does.
enum class Policy : int64_t { kOes, kMaxmin, kFifo, kFifoBlocking, kMrtf, kMrtfBlocking, kOmcoflow, kCount };

using Links = std::array<int32_t, kMostLinks>;  // -1: none

struct Job {
  int64_t iterations;
  int64_t num_tasks;
  int64_t num_edges;
  int64_t num_machines;
  int64_t num_links;  // out of each machine, into each, out of each uplink, into each
  const int64_t* machine;         // [num_tasks]
  const double* seconds;          // [iterations, num_tasks]
  const double* threads;          // [num_tasks]
  const int64_t* queued;          // [num_tasks]
  const int64_t* source;          // [num_edges]
  const int64_t* target;          // [num_edges]
  const int64_t* lag;             // [num_edges]
  const int64_t* mode;            // [num_edges]
  const double* volume;           // [iterations, num_edges]
  const double* link_rates;       // [num_links]
  const int64_t* uplink;          // [num_machines]
  const double* cores;            // [num_machines]
  const int64_t* server_threads;  // [num_machines]

  int64_t num_uplinks() const { return (num_links - 2 * num_machines) / 2; }
  EdgeMode edge_mode(int64_t edge) const { return static_cast<EdgeMode>(mode[edge]); }
  bool crosses(int64_t edge) const {
    return edge_mode(edge) == EdgeMode::kData && machine[source[edge]] != machine[target[edge]];
  }

  Links links(int64_t from, int64_t to) const {
    Links passed{static_cast<int32_t>(from), static_cast<int32_t>(num_machines + to), -1, -1};
    if (uplink[from] != uplink[to]) {
      if (uplink[from] >= 0) {
        passed[2] = static_cast<int32_t>(2 * num_machines + uplink[from]);
      }
      if (uplink[to] >= 0) {
        passed[3] = static_cast<int32_t>(2 * num_machines + num_uplinks() + uplink[to]);
      }
    }
    return passed;
  }
};

// Where the engine writes; each [iterations, num_tasks] or [iterations, num_edges].
struct Times {
  double* task_ready;
  double* task_start;
  double* task_end;
  int64_t* task_cause;
  double* flow_ready;
  double* flow_start;
  double* flow_end;
  int64_t* flow_cause;
  double* limited;  // [iterations, num_edges, kMostLinks], or null: nobody asks what limited a flow
  double* slowed;   // [iterations, num_tasks] or null: seconds that a task ran where more threads than cores ran
};

// Times for callers in C++, who run many jobs of one size.
class OwnedTimes {
 public:
  explicit OwnedTimes(const Job& job)
      : tasks_(static_cast<size_t>(3 * job.iterations * job.num_tasks)),
        flows_(static_cast<size_t>(3 * job.iterations * job.num_edges)),
        task_cause_(static_cast<size_t>(job.iterations * job.num_tasks)),
        flow_cause_(static_cast<size_t>(job.iterations * job.num_edges)),
        num_tasks_(job.iterations * job.num_tasks),
        num_flows_(job.iterations * job.num_edges) {}

  Times times() {
    double* const tasks = tasks_.data();
    double* const flows = flows_.data();
    return {tasks, tasks + num_tasks_, tasks + 2 * num_tasks_, task_cause_.data(),
            flows, flows + num_flows_, flows + 2 * num_flows_, flow_cause_.data(), nullptr, nullptr};
  }

 private:
  std::vector<double> tasks_;
  std::vector<double> flows_;
  std::vector<int64_t> task_cause_;
  std::vector<int64_t> flow_cause_;
  int64_t num_tasks_;
  int64_t num_flows_;
};

// [num_edges]: the rate by `oes` of an edge's flow if only the flows to its own target were there.
inline std::vector<double> alone_rates(const Job& job) {
  std::unordered_map<int64_t, int64_t> counts;  // by target and link
  const auto for_links = [&](int64_t edge, auto&& visit) {
    for (const int32_t link : job.links(job.machine[job.source[edge]], job.machine[job.target[edge]])) {
      if (link >= 0) {
        visit(link, job.target[edge] * job.num_links + link);
      }
    }
  };
  for (int64_t edge = 0; edge < job.num_edges; ++edge) {
    if (job.crosses(edge)) {
      for_links(edge, [&](int32_t, int64_t key) { ++counts[key]; });
    }
  }
  std::vector<double> rates(static_cast<size_t>(job.num_edges), kNever);
  for (int64_t edge = 0; edge < job.num_edges; ++edge) {
    if (job.crosses(edge)) {
      double& rate = rates[static_cast<size_t>(edge)];
      for_links(edge, [&](int32_t link, int64_t key) {
        rate = std::min(rate, job.link_rates[link] / static_cast<double>(counts.at(key)));
      });
    }
  }
  return rates;
}

}  // namespace gnnsys::planning
