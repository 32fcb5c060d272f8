// The longest path through the tasks and flows of all iterations (§V-B's execution DAG): when the last task would end if
// every flow had a rate of its own and nothing waited for a share of anything.
//
// Work: iterations x (tasks + edges). The order of tasks does not depend on the placement: one object serves a search.
#pragma once

#include "cpu/planning/job.h"

#include <stdexcept>

namespace gnnsys::planning {

class LongestPath {
 public:
  // Reads num_tasks, num_edges, source, target and lag of the job.
  explicit LongestPath(const Job& job) {
    first_edge_.assign(static_cast<size_t>(job.num_tasks) + 1, 0);
    std::vector<int64_t> missing(static_cast<size_t>(job.num_tasks), 0);
    for (int64_t e = 0; e < job.num_edges; ++e) {
      ++first_edge_[static_cast<size_t>(job.source[e]) + 1];
      missing[static_cast<size_t>(job.target[e])] += job.lag[e] == 0 ? 1 : 0;
      most_lag_ = std::max(most_lag_, job.lag[e]);
      if (job.lag[e] > 0) {
        later_.push_back(e);
      }
    }
    for (size_t j = 1; j < first_edge_.size(); ++j) {
      first_edge_[j] += first_edge_[j - 1];
    }
    edges_.resize(static_cast<size_t>(job.num_edges));
    std::vector<int64_t> at(first_edge_.begin(), first_edge_.end() - 1);
    for (int64_t e = 0; e < job.num_edges; ++e) {
      edges_[static_cast<size_t>(at[static_cast<size_t>(job.source[e])]++)] = e;
    }
    for (int64_t j = 0; j < job.num_tasks; ++j) {
      if (missing[static_cast<size_t>(j)] == 0) {
        order_.push_back(j);
      }
    }
    for (size_t i = 0; i < order_.size(); ++i) {
      for_out_edges(order_[i], [&](int64_t e) {
        if (job.lag[e] == 0 && --missing[static_cast<size_t>(job.target[e])] == 0) {
          order_.push_back(job.target[e]);
        }
      });
    }
    if (static_cast<int64_t>(order_.size()) < job.num_tasks) {
      throw std::invalid_argument("the tasks wait for one another: their edges form a cycle");
    }
  }

  // flow_rates [num_edges]: bytes per second of the edges that cross machines.
  double length(const Job& job, const double* flow_rates) {
    const int64_t rows = std::max<int64_t>(std::min(most_lag_, job.iterations), 1) + 1;
    arrives_.assign(static_cast<size_t>(rows * job.num_edges), 0.0);
    end_.assign(static_cast<size_t>(job.num_tasks), 0.0);
    const auto row = [&](int64_t n) { return arrives_.data() + (n % rows) * job.num_edges; };
    for (int64_t n = 0; n < job.iterations; ++n) {
      start_ = end_;  // a task's own iteration before (11)
      for (const int64_t e : later_) {
        if (n >= job.lag[e]) {
          raise(job.target[e], row(n - job.lag[e])[e]);
        }
      }
      const double* const before = row(n + rows - 1);
      double* const arrives = row(n);
      for (const int64_t j : order_) {
        const double start = start_[static_cast<size_t>(j)];
        const double end = start + job.seconds[n * job.num_tasks + j];
        end_[static_cast<size_t>(j)] = end;
        for_out_edges(j, [&](int64_t e) {
          double sent = job.edge_mode(e) == EdgeMode::kAfterStart ? start : end;
          if (job.crosses(e)) {
            sent = std::max(sent, before[e]) + job.volume[n * job.num_edges + e] / flow_rates[e];  // (12)
          }
          arrives[e] = sent;
          if (job.lag[e] == 0) {
            raise(job.target[e], sent);
          }
        });
      }
    }
    return *std::max_element(end_.begin(), end_.end());
  }

 private:
  void raise(int64_t task, double time) {
    double& start = start_[static_cast<size_t>(task)];
    start = std::max(start, time);
  }

  template <typename Visit>
  void for_out_edges(int64_t task, Visit&& visit) const {
    for (int64_t k = first_edge_[static_cast<size_t>(task)]; k < first_edge_[static_cast<size_t>(task) + 1]; ++k) {
      visit(edges_[static_cast<size_t>(k)]);
    }
  }

  int64_t most_lag_ = 0;
  std::vector<int64_t> first_edge_;
  std::vector<int64_t> edges_;
  std::vector<int64_t> order_;
  std::vector<int64_t> later_;  // edges to a later iteration
  std::vector<double> arrives_;  // by edge, of the last iterations
  std::vector<double> start_;
  std::vector<double> end_;
};

}  // namespace gnnsys::planning
