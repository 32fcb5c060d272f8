// Flows between pairs of machines, where all flows of a pair have one rate (per weight): a clock and a heap per pair.
//
// A pair's clock says how many bytes (per weight) each of its flows has had. A flow that starts at clock c with b bytes and
// weight w ends when the clock is at c + b / w, whatever rates the pair has until then. So a change of a pair's rate
// touches the pair and none of its flows. Who sets the rates is `Sharing` (link_sharing.h).
#pragma once

#include "cpu/planning/job.h"

#include <functional>

namespace gnnsys::planning {

class PairClocks {
 public:
  PairClocks(const Job& job, double* limited)
      : num_machines_(job.num_machines), limited_(limited), clocks_(static_cast<size_t>(job.num_machines * job.num_machines)),
        limits_(clocks_.size(), 0), next_(clocks_.size(), kNever), flows_(clocks_.size()),
        rows_(static_cast<size_t>(job.num_machines)) {}

  int64_t num_pairs() const { return static_cast<int64_t>(clocks_.size()); }
  int64_t count(int64_t p) const { return static_cast<int64_t>(flows_[static_cast<size_t>(p)].endings.size()); }
  bool is_idle(int64_t p) const { return clocks_[static_cast<size_t>(p)].first == kNever; }
  bool has_rate(int64_t p, double rate, int limit) const {
    return clocks_[static_cast<size_t>(p)].rate == rate && limits_[static_cast<size_t>(p)] == limit;
  }

  void start(int64_t p, int64_t flow, double bytes, double weight, double now) {
    advance(p, now);
    Clock& clock = clocks_[static_cast<size_t>(p)];
    Flows& flows = flows_[static_cast<size_t>(p)];
    flows.endings.push_back({clock.value + bytes / weight, flow, weight});
    std::push_heap(flows.endings.begin(), flows.endings.end(), std::greater<>());
    clock.first = flows.endings.front().clock;
    if (limited_ != nullptr) {
      for (int k = 0; k < kMostLinks; ++k) {
        limited_[flow * kMostLinks + k] = -flows.limited_by[static_cast<size_t>(k)];
      }
    }
  }

  // Sets a pair's rate from now on; its next end follows from it. Call it for every pair that has lost or got a flow.
  void set_rate(int64_t p, double rate, int limit, double now) {
    advance(p, now);
    Clock& clock = clocks_[static_cast<size_t>(p)];
    clock.rate = rate;
    limits_[static_cast<size_t>(p)] = static_cast<int8_t>(limit);
    set_next(p, now + (clock.first - clock.value) / rate);
  }

  // When the next flow ends.
  double next() {
    double first = kNever;
    for (int64_t m = 0; m < num_machines_; ++m) {
      if (rows_[static_cast<size_t>(m)].stale) {
        rescan(m);
      }
      first = std::min(first, rows_[static_cast<size_t>(m)].next);
    }
    return first;
  }

  // Takes out every flow that ends by now: ended(pair, flow, weight). Call it after next().
  template <typename Ended>
  void take_ended(double now, Ended&& ended) {
    for (int64_t m = 0; m < num_machines_; ++m) {
      if (rows_[static_cast<size_t>(m)].next > now) {
        continue;
      }
      for (int64_t p = m * num_machines_; p < (m + 1) * num_machines_; ++p) {
        if (next_[static_cast<size_t>(p)] <= now) {
          take_first(p, now, ended);
        }
      }
    }
  }

 private:
  // What an event reads and writes of every pair that it touches; the rest is in Flows.
  struct Clock {
    double value = 0;
    double since = 0;  // when the value was right
    double rate = 0;
    double first = kNever;  // the value at which the first of its flows ends
  };

  struct Ending {
    double clock;  // of its pair, when it ends
    int64_t flow;
    double weight;
    bool operator>(const Ending& other) const {
      return clock != other.clock ? clock > other.clock : flow > other.flow;
    }
  };

  struct Flows {
    std::vector<Ending> endings;                  // a heap, the first to end on top
    std::array<double, kMostLinks> limited_by{};  // seconds that each of its links set the rate
  };

  struct Row {
    double next = kNever;
    int64_t pair = -1;  // whose it is
    bool stale = false;
  };

  void advance(int64_t p, double now) {
    Clock& clock = clocks_[static_cast<size_t>(p)];
    const double passed = now - clock.since;
    clock.since = now;
    if (clock.first == kNever) {
      clock.value = 0;  // nothing refers to it: keep it small and so exact
      return;
    }
    clock.value += clock.rate * passed;
    if (limited_ != nullptr) {
      flows_[static_cast<size_t>(p)].limited_by[static_cast<size_t>(limits_[static_cast<size_t>(p)])] += passed;
    }
  }

  template <typename Ended>
  void take_first(int64_t p, double now, Ended&& ended) {
    advance(p, now);
    Clock& clock = clocks_[static_cast<size_t>(p)];
    Flows& flows = flows_[static_cast<size_t>(p)];
    clock.value = clock.first;  // without what was rounded
    while (!flows.endings.empty() && flows.endings.front().clock <= clock.value) {
      const Ending first = flows.endings.front();
      std::pop_heap(flows.endings.begin(), flows.endings.end(), std::greater<>());
      flows.endings.pop_back();
      if (limited_ != nullptr) {
        for (int k = 0; k < kMostLinks; ++k) {
          limited_[first.flow * kMostLinks + k] += flows.limited_by[static_cast<size_t>(k)];
        }
      }
      ended(p, first.flow, first.weight);
    }
    clock.first = flows.endings.empty() ? kNever : flows.endings.front().clock;
    set_next(p, kNever);  // until its new rate is set
  }

  void set_next(int64_t p, double time) {
    Row& row = rows_[static_cast<size_t>(p / num_machines_)];
    next_[static_cast<size_t>(p)] = time;
    if (time < row.next) {
      row.next = time;
      row.pair = p;
    } else if (row.pair == p) {
      row.stale = true;
    }
  }

  void rescan(int64_t m) {
    Row& row = rows_[static_cast<size_t>(m)];
    row = Row{};
    for (int64_t p = m * num_machines_; p < (m + 1) * num_machines_; ++p) {
      if (next_[static_cast<size_t>(p)] < row.next) {
        row.next = next_[static_cast<size_t>(p)];
        row.pair = p;
      }
    }
  }

  int64_t num_machines_;
  double* limited_;
  std::vector<Clock> clocks_;
  std::vector<int8_t> limits_;  // which of its links sets a pair's rate
  std::vector<double> next_;    // when a pair's first flow ends
  std::vector<Flows> flows_;
  std::vector<Row> rows_;  // by the machine that sends
};

}  // namespace gnnsys::planning
