// Sampling with weights, times or exclusions: which candidates a seed has must be found out first.
#pragma once

#include "cpu/choose.h"
#include "cpu/sample.h"

#include <cmath>
#include <utility>
#include <vector>

namespace gnnsys {

// One thread's collector: appends each seed's chosen positions and keeps its scratch between seeds.
template <typename id_t, typename weight_t>
class Collector {
 public:
  Collector(const Request<id_t>& q, const weight_t* weight, Faults* faults) : q_(q), weight_(weight), faults_(faults) {}

  std::vector<int64_t> positions;

  int64_t collect(int64_t i) {
    const size_t before = positions.size();
    const int64_t row = q_.seeds[i];
    begin_ = q_.indptr[row];
    end_ = q_.indptr[row + 1];
    if (!check_row(begin_, end_, q_.num_edges, row, faults_)) {
      return 0;
    }
    if (weight_ != nullptr) {
      weighted(i);
    } else if (q_.timed && !q_.time_sorted) {
      unsorted_time(i);
    } else {
      contiguous(i);
    }
    return static_cast<int64_t>(positions.size() - before);
  }

 private:
  int64_t time_at(int64_t position) const {
    const int64_t index = q_.node_time ? static_cast<int64_t>(q_.indices[position]) : position;
    if (index < 0 || index >= q_.num_times) {
      faults_->no_time = index;
      return std::numeric_limits<int64_t>::max();
    }
    return q_.time[index];
  }

  // The excluded positions inside [begin_, end).
  std::pair<const int64_t*, const int64_t*> excluded(int64_t end) const {
    const int64_t* all_end = q_.exclude + q_.num_exclude;
    const int64_t* first = std::lower_bound(q_.exclude, all_end, begin_);
    return {first, std::lower_bound(first, all_end, end)};
  }

  // Ranks of n candidates: all, the last k, or k at random; ascending.
  void choose_ranks(int64_t i, int64_t n) {
    const int64_t k = q_.count(n);
    ranks_.resize(static_cast<size_t>(k));
    const bool all = k == n && (!q_.replace || q_.fanout < 0);
    if (all || q_.last) {
      // "last" takes the most recent; asked for more than there are (with replacement), the latest is repeated.
      for (int64_t j = 0; j < k; ++j) {
        ranks_[static_cast<size_t>(j)] = static_cast<uint32_t>(std::clamp<int64_t>(n - k + j, 0, n - 1));
      }
      return;
    }
    const Stream stream = q_.stream(i);
    words_.resize(static_cast<size_t>(k));
    make_words(stream, static_cast<uint32_t>(k), words_.data());
    if (q_.replace) {
      chooser_.with_replacement(stream, words_.data(), static_cast<uint32_t>(n), static_cast<uint32_t>(k), ranks_.data());
    } else {
      chooser_.without_replacement(stream, words_.data(), static_cast<uint32_t>(n), static_cast<uint32_t>(k),
                                   ranks_.data());
    }
  }

  // Candidates are [begin_, end) less the excluded ones: ranks are mapped past the gaps. O(k + gaps + log degree).
  void contiguous(int64_t i) {
    int64_t end = end_;
    if (q_.timed) {
      const int64_t limit = q_.seed_time[i];
      int64_t lo = begin_;
      while (lo < end) {
        const int64_t middle = lo + (end - lo) / 2;
        if (time_at(middle) <= limit) {
          lo = middle + 1;
        } else {
          end = middle;
        }
      }
    }
    const auto [first, last] = excluded(end);
    choose_ranks(i, end - begin_ - (last - first));
    const int64_t* gap = first;
    for (const uint32_t rank : ranks_) {
      while (gap != last && *gap - begin_ - (gap - first) <= rank) {
        ++gap;
      }
      positions.push_back(begin_ + rank + (gap - first));
    }
  }

  // Candidates in (time, position) order, as if the neighbourhood were stored sorted. O(degree log degree).
  void unsorted_time(int64_t i) {
    const auto [first, last] = excluded(end_);
    const int64_t* gap = first;
    timed_.clear();
    for (int64_t p = begin_; p < end_; ++p) {
      if (gap != last && *gap == p) {
        ++gap;
        continue;
      }
      const int64_t t = time_at(p);
      if (t <= q_.seed_time[i]) {
        timed_.emplace_back(t, p);
      }
    }
    std::sort(timed_.begin(), timed_.end());
    choose_ranks(i, static_cast<int64_t>(timed_.size()));
    for (const uint32_t rank : ranks_) {
      positions.push_back(timed_[rank].second);
    }
  }

  // Candidates of positive weight, in the input's order. O(degree).
  void weighted(int64_t i) {
    const auto [first, last] = excluded(end_);
    const int64_t* gap = first;
    candidates_.clear();
    double heaviest = 0;
    for (int64_t p = begin_; p < end_; ++p) {
      const auto w = static_cast<double>(weight_[p]);
      if (!(w >= 0) || std::isinf(w)) {
        faults_->bad_weight = p;
        return;
      }
      if (gap != last && *gap == p) {
        ++gap;
      } else if (w > 0) {
        heaviest = std::max(heaviest, w);
        candidates_.push_back(p);
      }
    }
    const auto n = static_cast<int64_t>(candidates_.size());
    const int64_t k = q_.count(n);
    if (k == n && (!q_.replace || q_.fanout < 0)) {
      positions.insert(positions.end(), candidates_.begin(), candidates_.end());
    } else if (q_.replace) {
      weighted_with_replacement(i, k, heaviest);
    } else {
      weighted_without_replacement(i, k);
    }
  }

  // Efraimidis and Spirakis: the k smallest of -ln(u_e) / w_e, u_e addressed by the edge's place in its list.
  void weighted_without_replacement(int64_t i, int64_t k) {
    const Stream stream = q_.stream(i);
    keyed_.clear();
    for (const int64_t p : candidates_) {
      const double u = open_unit(stream.word64(static_cast<uint64_t>(p - begin_), 0));
      keyed_.emplace_back(negative_log(u) / static_cast<double>(weight_[p]), p);
    }
    std::nth_element(keyed_.begin(), keyed_.begin() + k, keyed_.end());
    const size_t start = positions.size();
    for (int64_t j = 0; j < k; ++j) {
      positions.push_back(keyed_[static_cast<size_t>(j)].second);
    }
    std::sort(positions.begin() + static_cast<int64_t>(start), positions.end());
  }

  // Weights become integers of up to 62 - log2(n) bits relative to the heaviest; their sums are exact in any order.
  void weighted_with_replacement(int64_t i, int64_t k, double heaviest) {
    const Stream stream = q_.stream(i);
    int bits = 62;
    while (bits > 0 && (static_cast<int64_t>(candidates_.size()) >> (62 - bits)) > 1) {
      --bits;
    }
    const double scale = std::ldexp(1.0, bits);
    sums_.clear();
    uint64_t total = 0;
    for (const int64_t p : candidates_) {
      total += static_cast<uint64_t>(static_cast<double>(weight_[p]) / heaviest * scale);
      sums_.push_back(total);
    }
    const size_t start = positions.size();
    for (int64_t j = 0; j < k; ++j) {
      const uint64_t r = bounded64(stream, static_cast<uint64_t>(j), total);
      const auto found = std::upper_bound(sums_.begin(), sums_.end(), r) - sums_.begin();
      positions.push_back(candidates_[static_cast<size_t>(found)]);
    }
    std::sort(positions.begin() + static_cast<int64_t>(start), positions.end());
  }

  const Request<id_t>& q_;
  const weight_t* weight_;
  Faults* faults_;
  int64_t begin_ = 0;
  int64_t end_ = 0;
  RankChooser chooser_;
  std::vector<uint32_t> words_;
  std::vector<uint32_t> ranks_;
  std::vector<int64_t> candidates_;
  std::vector<uint64_t> sums_;
  std::vector<std::pair<double, int64_t>> keyed_;
  std::vector<std::pair<int64_t, int64_t>> timed_;
};

}  // namespace gnnsys
