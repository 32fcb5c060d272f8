// Policies under which all flows of a pair of machines have one rate per weight: `oes`, `omcoflow` and `maxmin`.
//
// An event changes the links of one pair. Under the first two a link gives every flow rate x weight / (weights on it), and
// a flow has the least of its links: an event touches the pairs that pass a changed link, 2 M of them. Under `maxmin` it
// may touch them all.
#pragma once

#include "cpu/planning/pair_clocks.h"

namespace gnnsys::planning {

// A sum that weights are added to and taken from: its error is that of the sum, not of the largest weight ever in it.
class ExactSum {
 public:
  void add(double x) {
    const double sum = high_ + x;
    const double part = sum - high_;
    low_ += (high_ - (sum - part)) + (x - part);
    high_ = sum;
  }
  void clear() { high_ = low_ = 0; }
  double value() const { return high_ + low_; }

 private:
  double high_ = 0;
  double low_ = 0;
};

class LinkSharing {
 public:
  LinkSharing(const Job& job, Policy policy, double* limited)
      : job_(job), policy_(policy), clocks_(job, limited), links_(static_cast<size_t>(job.num_links)),
        changed_(static_cast<size_t>(clocks_.num_pairs()), 0) {
    if (policy == Policy::kOmcoflow) {
      alone_ = alone_rates(job);
    }
    for (int64_t link = 0; link < job.num_links; ++link) {
      links_[static_cast<size_t>(link)].rate = job.link_rates[link];
    }
    for (int64_t p = 0; p < clocks_.num_pairs(); ++p) {
      if (p / job.num_machines != p % job.num_machines) {
        for_links(p, [&](Link& link, int) { link.pairs.push_back(static_cast<int32_t>(p)); });
      }
    }
  }

  void start(int64_t flow, int64_t edge, double bytes, double /*handed_over*/, double now) {
    const int64_t p = job_.machine[job_.source[edge]] * job_.num_machines + job_.machine[job_.target[edge]];
    const double weight = policy_ == Policy::kOmcoflow ? alone_[static_cast<size_t>(edge)] / bytes : 1.0;
    clocks_.start(p, flow, bytes, weight, now);
    change(p, weight, 1);
  }

  // Sets the rates of all flows from now on.
  void update(double now) {
    if (dirty_.empty()) {
      return;
    }
    if (policy_ == Policy::kMaxmin) {
      fill_up(now);
    } else {
      share_out(now);
    }
    for (Link* const link : dirty_) {
      link->dirty = false;
    }
    dirty_.clear();
  }

  double next() { return clocks_.next(); }

  template <typename Ended>
  void take_ended(double now, Ended&& ended) {
    clocks_.take_ended(now, [&](int64_t p, int64_t flow, double weight) {
      change(p, -weight, -1);
      ended(flow);
    });
  }

 private:
  struct Link {
    double rate = 0;
    double share = kNever;  // for each unit of weight
    int64_t count = 0;      // flows
    ExactSum weights;
    bool dirty = false;
    double left = 0;             // of its rate, while it is filled up
    int64_t unset = 0;           // flows that have no rate yet
    std::vector<int32_t> pairs;  // that pass it
  };

  template <typename Visit>
  void for_links(int64_t p, Visit&& visit) {
    const Links& passed = clocks_[p].links;
    for (int k = 0; k < kMostLinks; ++k) {
      if (passed[static_cast<size_t>(k)] >= 0) {
        visit(links_[static_cast<size_t>(passed[static_cast<size_t>(k)])], k);
      }
    }
  }

  void change(int64_t p, double weight, int64_t count) {
    changed_[static_cast<size_t>(p)] = 1;
    for_links(p, [&](Link& link, int) {
      link.count += count;
      link.weights.add(weight);
      if (link.count == 0) {
        link.weights.clear();
      }
      if (!link.dirty) {
        link.dirty = true;
        dirty_.push_back(&link);
      }
    });
  }

  void set_rate(int64_t p, double rate, int limit, double now) {
    char& changed = changed_[static_cast<size_t>(p)];
    if (changed != 0 || rate != clocks_[p].rate || limit != clocks_[p].limit) {
      clocks_.set_rate(p, rate, limit, now);
      changed = 0;
    }
  }

  void share_out(double now) {
    for (Link* const link : dirty_) {
      link->share = link->count == 0 ? kNever : link->rate / link->weights.value();
    }
    for (const Link* const link : dirty_) {
      for (const int32_t p : link->pairs) {
        if (clocks_.count(p) == 0) {
          continue;
        }
        double rate = kNever;
        int limit = 0;
        for_links(p, [&](const Link& passed, int k) {
          if (passed.share < rate) {
            rate = passed.share;
            limit = k;
          }
        });
        set_rate(p, rate, limit, now);
      }
    }
  }

  // Progressive filling: the link that has least for each of its flows gives it to them, and then the next.
  void fill_up(double now) {
    int64_t unset = 0;
    for (Link& link : links_) {
      link.left = link.rate;
      link.unset = link.count;
      unset += link.count;
    }
    set_.assign(changed_.size(), 0);
    double least = 0;  // shares never fall, except by rounding
    while (unset > 0) {
      Link* tightest = nullptr;
      double share = kNever;
      for (Link& link : links_) {
        if (link.unset > 0 && link.left < share * static_cast<double>(link.unset)) {
          share = link.left / static_cast<double>(link.unset);
          tightest = &link;
        }
      }
      least = std::max(least, share);
      for (const int32_t p : tightest->pairs) {
        const int64_t count = clocks_.count(p);
        if (count == 0 || set_[static_cast<size_t>(p)] != 0) {
          continue;
        }
        set_[static_cast<size_t>(p)] = 1;
        int limit = 0;
        for_links(p, [&](Link& link, int k) {
          limit = &link == tightest ? k : limit;
          link.left -= least * static_cast<double>(count);
          link.unset -= count;
          unset -= count;
        });
        set_rate(p, least, limit, now);
      }
    }
  }

  const Job& job_;
  Policy policy_;
  PairClocks clocks_;
  std::vector<Link> links_;
  std::vector<Link*> dirty_;
  std::vector<char> changed_;  // by pair: flows came or went since its rate was set
  std::vector<char> set_;
  std::vector<double> alone_;
};

}  // namespace gnnsys::planning
