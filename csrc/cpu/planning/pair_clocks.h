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
      : num_machines_(job.num_machines), limited_(limited), pairs_(static_cast<size_t>(job.num_machines * job.num_machines)),
        next_(pairs_.size(), kNever), rows_(static_cast<size_t>(job.num_machines)) {
    for (int64_t p = 0; p < num_pairs(); ++p) {
      pair(p).links = job.links(p / num_machines_, p % num_machines_);
    }
  }

  struct Ending {
    double clock;  // of its pair, when it ends
    int64_t flow;
    double weight;
    bool operator>(const Ending& other) const {
      return clock != other.clock ? clock > other.clock : flow > other.flow;
    }
  };

  struct Pair {
    Links links;
    double clock = 0;
    double since = 0;  // when the clock was right
    double rate = 0;   // of the clock
    int limit = 0;     // which of its links sets the rate
    std::array<double, kMostLinks> limited_by{};  // seconds until `since`
    std::vector<Ending> endings;  // a heap, the first to end on top
  };

  int64_t num_pairs() const { return static_cast<int64_t>(pairs_.size()); }
  const Pair& operator[](int64_t p) const { return pairs_[static_cast<size_t>(p)]; }
  int64_t count(int64_t p) const { return static_cast<int64_t>((*this)[p].endings.size()); }

  void start(int64_t p, int64_t flow, double bytes, double weight, double now) {
    Pair& at = pair(p);
    advance(at, now);
    at.endings.push_back({at.clock + bytes / weight, flow, weight});
    std::push_heap(at.endings.begin(), at.endings.end(), std::greater<>());
    if (limited_ != nullptr) {
      for (int k = 0; k < kMostLinks; ++k) {
        limited_[flow * kMostLinks + k] = -at.limited_by[static_cast<size_t>(k)];
      }
    }
  }

  // Sets a pair's rate from now on; its next end follows from it. Call it for every pair that has lost or got a flow.
  void set_rate(int64_t p, double rate, int limit, double now) {
    Pair& at = pair(p);
    advance(at, now);
    at.rate = rate;
    at.limit = limit;
    set_next(p, at.endings.empty() ? kNever : now + (at.endings.front().clock - at.clock) / rate);
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

  // Takes out every flow that ends by now: ended(pair, flow, weight).
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
  struct Row {
    double next = kNever;
    int64_t pair = -1;  // whose it is
    bool stale = false;
  };

  Pair& pair(int64_t p) { return pairs_[static_cast<size_t>(p)]; }

  static void advance(Pair& at, double now) {
    const double passed = now - at.since;
    at.since = now;
    if (at.endings.empty()) {
      at.clock = 0;  // nothing refers to it: keep it small and so exact
      return;
    }
    at.clock += at.rate * passed;
    at.limited_by[static_cast<size_t>(at.limit)] += passed;
  }

  template <typename Ended>
  void take_first(int64_t p, double now, Ended&& ended) {
    Pair& at = pair(p);
    advance(at, now);
    at.clock = at.endings.front().clock;  // without what was rounded
    while (!at.endings.empty() && at.endings.front().clock <= at.clock) {
      const Ending first = at.endings.front();
      std::pop_heap(at.endings.begin(), at.endings.end(), std::greater<>());
      at.endings.pop_back();
      if (limited_ != nullptr) {
        for (int k = 0; k < kMostLinks; ++k) {
          limited_[first.flow * kMostLinks + k] += at.limited_by[static_cast<size_t>(k)];
        }
      }
      ended(p, first.flow, first.weight);
    }
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
  std::vector<Pair> pairs_;
  std::vector<double> next_;
  std::vector<Row> rows_;
};

}  // namespace gnnsys::planning
