// Tasks that run: each as if alone, or sharing their machine's cores, where a clock per machine says how much work every
// thread of it has had.
#pragma once

#include "cpu/planning/job.h"

#include <functional>

namespace gnnsys::planning {

class TaskClocks {
 public:
  TaskClocks(const Job& job, double* slowed)
      : job_(job), slowed_(slowed), machines_(static_cast<size_t>(job.num_machines)) {
    for (int64_t m = 0; m < job.num_machines; ++m) {
      shares_cores_ |= job.cores[m] < kNever;
    }
  }

  void start(int64_t item, int64_t task, double seconds, double now) {
    const int64_t m = job_.machine[task];
    if (job_.threads[task] == 0 || job_.cores[m] == kNever) {
      alone_.push_back({now + seconds, item});
      std::push_heap(alone_.begin(), alone_.end(), std::greater<>());
      return;
    }
    Machine& at = machines_[static_cast<size_t>(m)];
    advance(at, now);
    at.running.push_back({at.clock + seconds, item});
    std::push_heap(at.running.begin(), at.running.end(), std::greater<>());
    at.threads += job_.threads[task];
    at.changed = true;
    if (slowed_ != nullptr) {
      slowed_[item] = -at.slow;
    }
  }

  void update(double now) {
    for (int64_t m = 0; shares_cores_ && m < job_.num_machines; ++m) {
      Machine& at = machines_[static_cast<size_t>(m)];
      if (at.changed) {
        advance(at, now);
        at.changed = false;
        at.rate = at.threads > job_.cores[m] ? job_.cores[m] / at.threads : 1.0;
        at.next = at.running.empty() ? kNever : now + (at.running.front().time - at.clock) / at.rate;
      }
    }
  }

  double next() const {
    double first = alone_.empty() ? kNever : alone_.front().time;
    for (size_t m = 0; shares_cores_ && m < machines_.size(); ++m) {
      first = std::min(first, machines_[m].next);
    }
    return first;
  }

  template <typename Ended>
  void take_ended(double now, Ended&& ended) {
    while (!alone_.empty() && alone_.front().time <= now) {
      ended(take(alone_));
    }
    for (size_t m = 0; shares_cores_ && m < machines_.size(); ++m) {
      Machine& at = machines_[m];
      if (at.next > now) {
        continue;
      }
      advance(at, now);
      at.clock = at.running.front().time;
      at.changed = true;
      while (!at.running.empty() && at.running.front().time <= at.clock) {
        const int64_t item = take(at.running);
        at.threads -= job_.threads[item % job_.num_tasks];
        if (slowed_ != nullptr) {
          slowed_[item] += at.slow;
        }
        ended(item);
      }
    }
  }

 private:
  struct Ending {
    double time;
    int64_t item;
    bool operator>(const Ending& other) const { return time != other.time ? time > other.time : item > other.item; }
  };

  struct Machine {
    double clock = 0;
    double since = 0;
    double rate = 1;
    double threads = 0;
    double slow = 0;  // seconds that the rate was less than 1
    double next = kNever;
    bool changed = false;
    std::vector<Ending> running;
  };

  static int64_t take(std::vector<Ending>& heap) {
    const int64_t item = heap.front().item;
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    heap.pop_back();
    return item;
  }

  static void advance(Machine& at, double now) {
    if (at.running.empty()) {
      at.clock = at.threads = 0;
    } else {
      at.clock += at.rate * (now - at.since);
      at.slow += at.rate < 1 ? now - at.since : 0;
    }
    at.since = now;
  }

  const Job& job_;
  double* slowed_;
  bool shares_cores_ = false;
  std::vector<Machine> machines_;
  std::vector<Ending> alone_;
};

}  // namespace gnnsys::planning
