// The simulator's loop: what ends, what that releases, and when the next thing ends. Exact: nothing happens between two
// events. Work is a heap's logarithm per task and flow, and what `Network` does to set rates.
#pragma once

#include "cpu/planning/flow_order.h"
#include "cpu/planning/link_sharing.h"
#include "cpu/planning/task_clocks.h"

#include <set>
#include <stdexcept>
#include <utility>

namespace gnnsys::planning {

template <typename Network>
class Engine {
 public:
  Engine(const Job& job, Policy policy, const Times& times)
      : job_(job), times_(times), network_(job, policy, times.limited), tasks_(job, times.slowed),
        servers_(static_cast<size_t>(job.num_machines)) {
    list_out_edges();
    count_dependencies();
    const int64_t num_tasks = job.iterations * job.num_tasks;
    const int64_t num_flows = job.iterations * job.num_edges;
    for (double* const time : {times.task_ready, times.task_start, times.task_end}) {
      std::fill_n(time, num_tasks, kNotANumber);
    }
    for (double* const time : {times.flow_ready, times.flow_start, times.flow_end}) {
      std::fill_n(time, num_flows, kNotANumber);
    }
    std::fill_n(times.task_cause, num_tasks, int64_t{-1});
    std::fill_n(times.flow_cause, num_flows, int64_t{-1});
    if (times.limited != nullptr) {
      std::fill_n(times.limited, num_flows * kMostLinks, 0.0);
    }
    if (times.slowed != nullptr) {
      std::fill_n(times.slowed, num_tasks, 0.0);
    }
  }

  // The makespan.
  double run() {
    const int64_t num_tasks = job_.iterations * job_.num_tasks;
    for (int64_t item = 0; item < num_tasks; ++item) {
      if (waiting_[static_cast<size_t>(item)] == 0) {
        become_ready(item, -1);
      }
    }
    settle();
    while (num_ended_ < num_tasks) {
      network_.update(now_);
      tasks_.update(now_);
      const double next = std::min(network_.next(), tasks_.next());
      if (next == kNever) {
        throw std::invalid_argument("the tasks wait for one another: their edges form a cycle");
      }
      now_ = std::max(now_, next);
      if (network_.next() <= now_) {
        network_.take_ended(now_, [&](int64_t flow) { ended_flows_.push_back(flow); });
      }
      tasks_.take_ended(now_, [&](int64_t item) { ended_tasks_.push_back(item); });
      settle();
    }
    return now_;
  }

 private:
  struct Server {
    int64_t busy = 0;
    int64_t freed_by = -1;                           // the last task that gave a thread back
    std::set<std::pair<double, int64_t>> requests;  // by when they came
    bool listed = false;
  };

  void list_out_edges() {
    first_edge_.assign(static_cast<size_t>(job_.num_tasks) + 1, 0);
    for (int64_t e = 0; e < job_.num_edges; ++e) {
      ++first_edge_[static_cast<size_t>(job_.source[e]) + 1];
    }
    for (size_t j = 1; j < first_edge_.size(); ++j) {
      first_edge_[j] += first_edge_[j - 1];
    }
    edges_.resize(static_cast<size_t>(job_.num_edges));
    std::vector<int64_t> at(first_edge_.begin(), first_edge_.end() - 1);
    for (int64_t e = 0; e < job_.num_edges; ++e) {
      edges_[static_cast<size_t>(at[static_cast<size_t>(job_.source[e])]++)] = e;
    }
  }

  void count_dependencies() {
    waiting_.assign(static_cast<size_t>(job_.iterations * job_.num_tasks), 0);
    for (int64_t n = 0; n < job_.iterations; ++n) {
      int32_t* const row = waiting_.data() + n * job_.num_tasks;
      std::fill_n(row, job_.num_tasks, n > 0 ? 1 : 0);  // the task's own iteration before (11)
      for (int64_t e = 0; e < job_.num_edges; ++e) {
        row[job_.target[e]] += n >= job_.lag[e] ? 1 : 0;
      }
    }
  }

  template <typename Visit>
  void for_out_edges(int64_t task, Visit&& visit) {
    for (int64_t k = first_edge_[static_cast<size_t>(task)]; k < first_edge_[static_cast<size_t>(task) + 1]; ++k) {
      visit(edges_[static_cast<size_t>(k)]);
    }
  }

  // All that follows at once from what ended now; threads of servers are given out when nothing else is left to do.
  void settle() {
    do {
      while (!ended_flows_.empty() || !ended_tasks_.empty()) {
        std::swap(ended_flows_, flows_now_);
        std::swap(ended_tasks_, tasks_now_);
        for (const int64_t flow : flows_now_) {
          end_flow(flow);
        }
        for (const int64_t item : tasks_now_) {
          end_task(item);
        }
        flows_now_.clear();
        tasks_now_.clear();
      }
    } while (serve());
  }

  bool serve() {
    std::swap(listed_, serving_now_);
    for (const int64_t m : serving_now_) {
      Server& server = servers_[static_cast<size_t>(m)];
      server.listed = false;
      while (!server.requests.empty() && server.busy < job_.server_threads[m]) {
        const auto [came, item] = *server.requests.begin();
        server.requests.erase(server.requests.begin());
        ++server.busy;
        if (came < now_) {
          times_.task_cause[item] = 2 * server.freed_by;
        }
        start_task(item);
      }
    }
    const bool any = !serving_now_.empty();
    serving_now_.clear();
    return any;
  }

  void list(int64_t machine) {
    Server& server = servers_[static_cast<size_t>(machine)];
    if (!server.listed) {
      server.listed = true;
      listed_.push_back(machine);
    }
  }

  // One thing less that a task waits for.
  void release(int64_t task, int64_t iteration, int64_t cause) {
    if (iteration >= job_.iterations) {
      return;
    }
    const int64_t item = iteration * job_.num_tasks + task;
    if (--waiting_[static_cast<size_t>(item)] == 0) {
      become_ready(item, cause);
    }
  }

  void become_ready(int64_t item, int64_t cause) {
    const int64_t task = item % job_.num_tasks;
    times_.task_ready[item] = now_;
    times_.task_cause[item] = cause;
    if (job_.queued[task] != 0) {
      servers_[static_cast<size_t>(job_.machine[task])].requests.emplace(now_, item);
      list(job_.machine[task]);
    } else {
      start_task(item);
    }
  }

  void start_task(int64_t item) {
    const int64_t iteration = item / job_.num_tasks;
    const int64_t task = item % job_.num_tasks;
    times_.task_start[item] = now_;
    for_out_edges(task, [&](int64_t e) {
      if (job_.edge_mode(e) == EdgeMode::kAfterStart) {
        release(job_.target[e], iteration + job_.lag[e], 2 * item + 1);
      }
    });
    if (job_.seconds[item] == 0) {
      ended_tasks_.push_back(item);
    } else {
      tasks_.start(item, task, job_.seconds[item], now_);
    }
  }

  void end_task(int64_t item) {
    const int64_t iteration = item / job_.num_tasks;
    const int64_t task = item % job_.num_tasks;
    times_.task_end[item] = now_;
    ++num_ended_;
    release(task, iteration + 1, 2 * item);
    for_out_edges(task, [&](int64_t e) {
      if (iteration + job_.lag[e] >= job_.iterations || job_.edge_mode(e) == EdgeMode::kAfterStart) {
        return;
      }
      if (!job_.crosses(e)) {
        release(job_.target[e], iteration + job_.lag[e], 2 * item);
        return;
      }
      const int64_t flow = iteration * job_.num_edges + e;
      times_.flow_ready[flow] = now_;
      if (iteration == 0 || times_.flow_end[flow - job_.num_edges] <= now_) {
        start_flow(flow, e, 2 * item);
      }
    });
    if (job_.queued[task] != 0) {
      Server& server = servers_[static_cast<size_t>(job_.machine[task])];
      --server.busy;
      server.freed_by = item;
      list(job_.machine[task]);
    }
  }

  void start_flow(int64_t flow, int64_t edge, int64_t cause) {
    times_.flow_start[flow] = now_;
    times_.flow_cause[flow] = cause;
    if (job_.volume[flow] == 0) {
      ended_flows_.push_back(flow);
    } else {
      network_.start(flow, edge, job_.volume[flow], times_.flow_ready[flow], now_);
    }
  }

  void end_flow(int64_t flow) {
    const int64_t iteration = flow / job_.num_edges;
    const int64_t edge = flow % job_.num_edges;
    const int64_t item = job_.iterations * job_.num_tasks + flow;
    times_.flow_end[flow] = now_;
    release(job_.target[edge], iteration + job_.lag[edge], 2 * item);
    if (iteration + 1 < job_.iterations && times_.flow_ready[flow + job_.num_edges] <= now_) {
      start_flow(flow + job_.num_edges, edge, 2 * item);
    }
  }

  const Job& job_;
  Times times_;
  Network network_;
  TaskClocks tasks_;
  std::vector<int64_t> first_edge_;
  std::vector<int64_t> edges_;
  std::vector<int32_t> waiting_;
  std::vector<Server> servers_;
  std::vector<int64_t> listed_;
  std::vector<int64_t> serving_now_;
  std::vector<int64_t> ended_flows_;
  std::vector<int64_t> ended_tasks_;
  std::vector<int64_t> flows_now_;
  std::vector<int64_t> tasks_now_;
  int64_t num_ended_ = 0;
  double now_ = 0;
};

// Simulates a job, writes its times and returns its makespan.
inline double run_job(const Job& job, Policy policy, const Times& times) {
  switch (policy) {
    case Policy::kOes:
    case Policy::kMaxmin:
    case Policy::kOmcoflow:
      return Engine<LinkSharing>(job, policy, times).run();
    default:
      return Engine<FlowOrder>(job, policy, times).run();
  }
}

}  // namespace gnnsys::planning
