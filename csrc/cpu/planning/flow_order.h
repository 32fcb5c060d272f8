// Policies that put flows in an order and give each what the ones before it left: `fifo` and `mrtf`, filling or blocking.
//
// Few flows run at a time, since a port is full after one or two of them. An event goes through the order until no port
// has anything left; only where it is asked what limits the flows that wait, it goes through them too.
#pragma once

#include "cpu/planning/job.h"

namespace gnnsys::planning {

class FlowOrder {
 public:
  FlowOrder(const Job& job, Policy policy, double* limited)
      : job_(job), by_time_(policy == Policy::kMrtf || policy == Policy::kMrtfBlocking),
        blocking_(policy == Policy::kFifoBlocking || policy == Policy::kMrtfBlocking), limited_(limited) {}

  void start(int64_t flow, int64_t edge, double bytes, double handed_over, double now) {
    Active started{handed_over, flow, bytes, job_.links(job_.machine[job_.source[edge]], job_.machine[job_.target[edge]])};
    for (const int32_t link : started.links) {
      started.full_rate = link < 0 ? started.full_rate : std::min(started.full_rate, job_.link_rates[link]);
    }
    started.key = by_time_ ? bytes / started.full_rate : handed_over;
    started.limit_since = now;
    if (free_.empty()) {
      free_.push_back(static_cast<int32_t>(active_.size()));
      active_.emplace_back();
    }
    const int32_t slot = free_.back();
    free_.pop_back();
    active_[static_cast<size_t>(slot)] = started;
    insert(slot);
    changed_ = true;
  }

  void update(double now) {
    if (!changed_) {
      return;
    }
    changed_ = false;
    advance(now);
    if (by_time_) {
      put_in_order();
    }
    for (const int32_t slot : running_) {
      at(slot).rate = 0;
      at(slot).end = kNever;
    }
    running_.clear();
    left_.assign(job_.link_rates, job_.link_rates + job_.num_links);
    open_out_ = open_in_ = job_.num_machines;
    next_ = kNever;
    for (const int32_t slot : order_) {
      if ((open_out_ == 0 || open_in_ == 0) && limited_ == nullptr) {
        break;
      }
      Active& flow = at(slot);
      set_rate(flow, now);
      if (flow.rate > 0) {
        flow.end = now + flow.bytes / flow.rate;
        next_ = std::min(next_, flow.end);
        running_.push_back(slot);
      }
    }
  }

  double next() const { return next_; }

  template <typename Ended>
  void take_ended(double now, Ended&& ended) {
    advance(now);
    const auto still = std::stable_partition(running_.begin(), running_.end(), [&](int32_t s) { return at(s).end > now; });
    ended_.assign(still, running_.end());
    running_.erase(still, running_.end());
    for (const int32_t slot : ended_) {
      remove(slot);
      set_limit(at(slot), at(slot).limit, now);
      free_.push_back(slot);
      ended(at(slot).flow);
    }
    changed_ |= !ended_.empty();
  }

 private:
  struct Active {
    double key = 0;  // the least goes first
    int64_t flow = 0;
    double bytes = 0;  // that remain
    Links links{};
    double full_rate = kNever;
    double rate = 0;
    double end = kNever;
    double limit_since = 0;
    int limit = 0;  // which of its links sets the rate
    bool operator<(const Active& other) const { return key != other.key ? key < other.key : flow < other.flow; }
  };

  Active& at(int32_t slot) { return active_[static_cast<size_t>(slot)]; }

  auto place_of(int32_t slot) {
    const auto before = [&](int32_t a, int32_t b) { return at(a) < at(b); };
    return std::lower_bound(order_.begin(), order_.end(), slot, before);
  }
  void insert(int32_t slot) { order_.insert(place_of(slot), slot); }
  void remove(int32_t slot) { order_.erase(place_of(slot)); }

  void advance(double now) {
    const double passed = now - since_;
    since_ = now;
    for (const int32_t slot : running_) {
      at(slot).bytes -= at(slot).rate * passed;
    }
  }

  // What runs needs less time than it did; what waits needs as long as before.
  void put_in_order() {
    for (const int32_t slot : running_) {
      remove(slot);
      at(slot).key = at(slot).bytes / at(slot).full_rate;
      insert(slot);
    }
  }

  void set_limit(Active& flow, int limit, double now) {
    if (limited_ != nullptr) {
      limited_[flow.flow * kMostLinks + flow.limit] += now - flow.limit_since;
    }
    flow.limit_since = now;
    flow.limit = limit;
  }

  void set_rate(Active& flow, double now) {
    double rate = kNever;
    int limit = 0;
    for (int k = 0; k < kMostLinks; ++k) {
      const int32_t link = flow.links[static_cast<size_t>(k)];
      if (link >= 0 && left_[static_cast<size_t>(link)] < rate) {
        rate = left_[static_cast<size_t>(link)];
        limit = k;
      }
    }
    if (limit != flow.limit) {
      set_limit(flow, limit, now);
    }
    flow.rate = blocking_ && rate < flow.full_rate ? 0 : rate;
    if (flow.rate <= 0) {
      return;
    }
    for (const int32_t link : flow.links) {
      if (link >= 0) {
        double& left = left_[static_cast<size_t>(link)];
        left = blocking_ ? 0 : std::max(left - flow.rate, 0.0);
        open_out_ -= left == 0 && link < job_.num_machines ? 1 : 0;
        open_in_ -= left == 0 && link >= job_.num_machines && link < 2 * job_.num_machines ? 1 : 0;
      }
    }
  }

  const Job& job_;
  bool by_time_;
  bool blocking_;
  double* limited_;
  std::vector<Active> active_;  // by slot
  std::vector<int32_t> free_;   // slots that are not in use
  std::vector<int32_t> order_;  // slots
  std::vector<int32_t> running_;
  std::vector<int32_t> ended_;
  std::vector<double> left_;  // by link, of its rate
  int64_t open_out_ = 0;      // machines whose link out has anything left
  int64_t open_in_ = 0;
  double since_ = 0;
  double next_ = kNever;
  bool changed_ = false;
};

}  // namespace gnnsys::planning
