// Policies that put flows in an order and give each what the ones before it left: `fifo` and `mrtf`, filling or blocking.
//
// Every flow may have a rate of its own, so an event visits all active flows, of which an edge has one at most.
#pragma once

#include "cpu/planning/job.h"

namespace gnnsys::planning {

class FlowOrder {
 public:
  FlowOrder(const Job& job, Policy policy, double* limited)
      : job_(job), by_time_(policy == Policy::kMrtf || policy == Policy::kMrtfBlocking),
        blocking_(policy == Policy::kFifoBlocking || policy == Policy::kMrtfBlocking), limited_(limited) {}

  void start(int64_t flow, int64_t edge, double bytes, double handed_over, double now) {
    advance(now);
    Active started{handed_over, flow, bytes, job_.links(job_.machine[job_.source[edge]], job_.machine[job_.target[edge]])};
    for (const int32_t link : started.links) {
      started.full_rate = link < 0 ? started.full_rate : std::min(started.full_rate, job_.link_rates[link]);
    }
    active_.push_back(started);
    changed_ = true;
  }

  void update(double now) {
    if (!changed_) {
      return;
    }
    advance(now);
    changed_ = false;
    put_in_order();
    left_.assign(job_.link_rates, job_.link_rates + job_.num_links);
    next_ = kNever;
    for (Active& flow : active_) {
      set_rate(flow);
      flow.end = flow.rate > 0 ? now + flow.bytes / flow.rate : kNever;
      next_ = std::min(next_, flow.end);
    }
  }

  double next() const { return next_; }

  template <typename Ended>
  void take_ended(double now, Ended&& ended) {
    advance(now);
    const auto kept = std::stable_partition(active_.begin(), active_.end(), [&](const Active& f) { return f.end > now; });
    changed_ |= kept != active_.end();
    ended_.assign(kept, active_.end());
    active_.erase(kept, active_.end());
    for (const Active& flow : ended_) {  // what ends may start others
      ended(flow.flow);
    }
  }

 private:
  struct Active {
    double key;  // the least goes first
    int64_t flow;
    double bytes;  // that remain
    Links links;
    double full_rate = kNever;
    double rate = 0;
    double end = kNever;
    int limit = 0;
    bool operator<(const Active& other) const { return key != other.key ? key < other.key : flow < other.flow; }
  };

  void advance(double now) {
    const double passed = now - since_;
    since_ = now;
    if (passed <= 0) {
      return;
    }
    for (Active& flow : active_) {
      flow.bytes -= flow.rate * passed;
      if (limited_ != nullptr) {
        limited_[flow.flow * kMostLinks + flow.limit] += passed;
      }
    }
  }

  // Nearly sorted already: each flow moves up by a few places.
  void put_in_order() {
    for (size_t i = 0; i < active_.size(); ++i) {
      if (by_time_) {
        active_[i].key = active_[i].bytes / active_[i].full_rate;
      }
      if (i > 0 && active_[i] < active_[i - 1]) {
        const auto from = active_.begin() + static_cast<std::ptrdiff_t>(i);
        std::rotate(std::upper_bound(active_.begin(), from, *from), from, from + 1);
      }
    }
  }

  void set_rate(Active& flow) {
    double rate = kNever;
    for (int k = 0; k < kMostLinks; ++k) {
      const int32_t link = flow.links[static_cast<size_t>(k)];
      if (link >= 0 && left_[static_cast<size_t>(link)] < rate) {
        rate = left_[static_cast<size_t>(link)];
        flow.limit = k;
      }
    }
    flow.rate = blocking_ && rate < flow.full_rate ? 0 : rate;
    if (flow.rate <= 0) {
      return;
    }
    for (const int32_t link : flow.links) {
      if (link >= 0) {
        double& left = left_[static_cast<size_t>(link)];
        left = blocking_ ? 0 : std::max(left - flow.rate, 0.0);
      }
    }
  }

  const Job& job_;
  bool by_time_;
  bool blocking_;
  double* limited_;
  std::vector<Active> active_;
  std::vector<Active> ended_;
  std::vector<double> left_;
  double since_ = 0;
  double next_ = kNever;
  bool changed_ = false;
};

}  // namespace gnnsys::planning
