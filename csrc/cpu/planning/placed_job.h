// A training job on machines: what every link and core has to carry under a placement, and the longest path.
//
// A task runs once per iteration on the machine of the placed task it sits with (`host`). An edge joins iteration n of
// its source to iteration n + lag of its target; between machines its bytes are a flow. docs/placement.md has formulas.
#pragma once

#include "common/check.h"

#include <cstdint>
#include <vector>

namespace gnnsys::planning {

// What a receiver of an edge waits for; as in gnnsys/planning/simulation/tasks.py.
enum EdgeMode : int64_t { kData = 0, kAfterEnd = 1, kAfterStart = 2 };

class PlacedJob {
 public:
  // job: host, kind, seconds [N, J], threads, source, target, lag, mode, volume [N, E].
  // cluster: link_rates (out and into each machine, out and into each uplink), uplink [M], cores [M], speeds [K, M].
  PlacedJob(const std::vector<Tensor>& job, const std::vector<Tensor>& cluster);

  int64_t num_placed() const { return num_placed_; }
  int64_t num_machines() const { return num_machines_; }
  int64_t machine(int64_t placed) const { return place_[placed]; }

  void place(const int64_t* placement);  // machines are checked by the caller
  void move(int64_t placed, int64_t machine);

  double busiest_link() const;   // seconds: bytes of all iterations over its rate
  double busiest_cores() const;  // seconds of work on all threads over cores
  double full_rate_path() { return longest_path(false); }
  double sharing_path() { return longest_path(true); }  // Eq. 26: a flow has its link's rate over the link's flows

 private:
  static constexpr int kMostLinks = 4;
  struct Route {
    int64_t links[kMostLinks];
    int num_links = 0;
  };

  void add_edges(const std::vector<int64_t>& edges, double sign);
  void add_work(int64_t placed, double sign);
  double longest_path(bool shares);
  void order_tasks();

  int64_t num_tasks_ = 0, num_edges_ = 0, num_placed_ = 0, num_machines_ = 0, num_uplinks_ = 0, iterations_ = 0;
  std::vector<int64_t> host_, kind_, source_, target_, lag_, mode_;
  std::vector<double> seconds_, threads_;
  std::vector<double> link_rates_, cores_, slowness_;  // slowness [K, M]: 1 / speed
  std::vector<Route> routes_;                          // [M, M]
  std::vector<double> total_volume_;                   // [E] bytes that arrive within the iterations
  std::vector<double> total_work_;                     // [J] seconds x threads at speed 1
  std::vector<std::vector<int64_t>> seated_;           // tasks of each placed task
  std::vector<std::vector<int64_t>> incident_;         // edges with bytes of each placed task, each once

  // In-edges by target, targets in an order in which every edge without a lag goes forward.
  std::vector<int64_t> order_;         // [J]
  std::vector<int64_t> first_;         // [J + 1] of the in-edges of order_[i]
  std::vector<int64_t> in_edge_;       // [E]
  std::vector<int64_t> in_offset_;     // [E] of the time it waits for, from the row of the target's iteration
  std::vector<int64_t> in_lag_;        // [E]
  std::vector<double> in_volume_;      // [N, E] by the target's iteration

  std::vector<int64_t> place_;         // [P]
  std::vector<int64_t> at_;            // [J]
  std::vector<double> link_bytes_;
  std::vector<int64_t> link_flows_;    // of one iteration (Eq. 21-22)
  std::vector<double> work_;           // [M]
  std::vector<double> times_;          // [2, N, J]: ends, then starts
  std::vector<double> flow_end_, in_factor_, pair_factor_;
};

}  // namespace gnnsys::planning
