#include "cpu/planning/placed_job.h"

#include <algorithm>
#include <limits>

namespace gnnsys::planning {
namespace {

template <typename T>
std::vector<T> values_of(const Tensor& t, ScalarType type, int64_t count, const char* name) {
  check_contiguous(t, name);
  check_dtype(t, type, name);
  CHECK_ARG(t.numel() == count, name, " must have ", count, " entries, got ", t.numel());
  const T* const data = const_data<T>(t);
  return std::vector<T>(data, data + count);
}

std::vector<int64_t> numbers_of(const Tensor& t, int64_t count, int64_t low, int64_t high, const char* name) {
  std::vector<int64_t> values = values_of<int64_t>(t, ScalarType::Long, count, name);
  for (const int64_t value : values) {
    CHECK_ARG(value >= low && value < high, name, " must be from ", low, " to ", high - 1, ", got ", value);
  }
  return values;
}

std::vector<double> amounts_of(const Tensor& t, int64_t count, const char* name) {
  std::vector<double> values = values_of<double>(t, ScalarType::Double, count, name);
  for (const double value : values) {
    CHECK_ARG(value >= 0, name, " must be numbers of 0 or more, got ", value);
  }
  return values;
}

constexpr int64_t kMost = int64_t{1} << 31;

}  // namespace

PlacedJob::PlacedJob(const std::vector<Tensor>& job, const std::vector<Tensor>& cluster) {
  CHECK_ARG(job.size() == 9 && cluster.size() == 4, "a job has 9 tensors and a cluster 4");
  const Tensor& seconds = job[2];
  const Tensor& volume = job[8];
  CHECK_ARG(seconds.dim() == 2 && volume.dim() == 2 && seconds.size(0) == volume.size(0) && seconds.size(0) >= 1,
            "seconds and volume must be [iterations, tasks] and [iterations, edges], with one iteration at least");
  iterations_ = seconds.size(0);
  num_tasks_ = seconds.size(1);
  num_edges_ = volume.size(1);
  num_machines_ = cluster[1].numel();
  CHECK_ARG(num_machines_ >= 1 && num_tasks_ >= 1, "there must be a machine and a task");
  const int64_t num_links = cluster[0].numel();
  CHECK_ARG(num_links >= 2 * num_machines_ && num_links % 2 == 0, "a machine has a link out and one in");
  num_uplinks_ = num_links / 2 - num_machines_;
  CHECK_ARG(cluster[3].dim() == 2 && cluster[3].size(1) == num_machines_, "speeds must be [kinds, machines]");
  host_ = numbers_of(job[0], num_tasks_, 0, num_tasks_, "host");
  kind_ = numbers_of(job[1], num_tasks_, 0, cluster[3].size(0), "kind");
  seconds_ = amounts_of(seconds, iterations_ * num_tasks_, "seconds");
  threads_ = amounts_of(job[3], num_tasks_, "threads");
  source_ = numbers_of(job[4], num_edges_, 0, num_tasks_, "source");
  target_ = numbers_of(job[5], num_edges_, 0, num_tasks_, "target");
  lag_ = numbers_of(job[6], num_edges_, 0, kMost, "lag");
  mode_ = numbers_of(job[7], num_edges_, kData, kAfterStart + 1, "mode");
  const std::vector<double> bytes = amounts_of(volume, iterations_ * num_edges_, "volume");
  link_rates_ = amounts_of(cluster[0], num_links, "link_rates");
  const std::vector<int64_t> uplink = numbers_of(cluster[1], num_machines_, -1, num_uplinks_, "uplink");
  cores_ = amounts_of(cluster[2], num_machines_, "cores");
  slowness_ = amounts_of(cluster[3], cluster[3].numel(), "speeds");
  for (double& each : slowness_) {
    CHECK_ARG(each > 0, "a speed must be more than 0");
    each = 1.0 / each;
  }
  for (const double rate : link_rates_) {
    CHECK_ARG(rate > 0, "the rate of a link must be more than 0");
  }
  num_placed_ = 0;
  for (int64_t j = 0; j < num_tasks_; ++j) {
    CHECK_ARG(host_[j] == j ? j == num_placed_ : host_[j] < num_placed_ || host_[host_[j]] == host_[j],
              "placed tasks come first, and others sit with one of them; task ", j, " sits with ", host_[j]);
    num_placed_ += host_[j] == j ? 1 : 0;
  }
  routes_.resize(static_cast<size_t>(num_machines_ * num_machines_));
  for (int64_t from = 0; from < num_machines_; ++from) {
    for (int64_t to = 0; to < num_machines_; ++to) {
      Route& route = routes_[from * num_machines_ + to];
      if (from == to) {
        continue;
      }
      route.links[route.num_links++] = from;
      route.links[route.num_links++] = num_machines_ + to;
      if (uplink[from] != uplink[to]) {
        if (uplink[from] >= 0) {
          route.links[route.num_links++] = 2 * num_machines_ + uplink[from];
        }
        if (uplink[to] >= 0) {
          route.links[route.num_links++] = 2 * num_machines_ + num_uplinks_ + uplink[to];
        }
      }
    }
  }
  total_volume_.assign(num_edges_, 0.0);
  for (int64_t n = 0; n < iterations_; ++n) {
    for (int64_t e = 0; e < num_edges_; ++e) {
      total_volume_[e] += n + lag_[e] < iterations_ ? bytes[n * num_edges_ + e] : 0.0;
    }
  }
  total_work_.assign(num_tasks_, 0.0);
  for (int64_t n = 0; n < iterations_; ++n) {
    for (int64_t j = 0; j < num_tasks_; ++j) {
      total_work_[j] += seconds_[n * num_tasks_ + j] * threads_[j];
    }
  }
  seated_.resize(num_placed_);
  for (int64_t j = 0; j < num_tasks_; ++j) {
    seated_[host_[j]].push_back(j);
  }
  incident_.resize(num_placed_);
  for (int64_t e = 0; e < num_edges_; ++e) {
    const int64_t from = host_[source_[e]], to = host_[target_[e]];
    if (mode_[e] == kData && from != to) {
      incident_[from].push_back(e);
      incident_[to].push_back(e);
    }
  }
  order_tasks();
  in_volume_.assign(static_cast<size_t>(iterations_ * num_edges_), 0.0);
  for (int64_t n = 0; n < iterations_; ++n) {
    for (int64_t i = 0; i < num_edges_; ++i) {
      const int64_t e = in_edge_[i];
      in_volume_[n * num_edges_ + i] = n >= lag_[e] ? bytes[(n - lag_[e]) * num_edges_ + e] : 0.0;
    }
  }
  times_.resize(static_cast<size_t>(2 * iterations_ * num_tasks_));
  flow_end_.resize(num_edges_);
  in_factor_.resize(num_edges_);
  pair_factor_.resize(static_cast<size_t>(num_machines_ * num_machines_));
  place_.assign(num_placed_, 0);
  at_.assign(num_tasks_, 0);
}

void PlacedJob::order_tasks() {
  std::vector<int64_t> waits(num_tasks_, 0);
  std::vector<std::vector<int64_t>> out(num_tasks_), in(num_tasks_);
  for (int64_t e = 0; e < num_edges_; ++e) {
    in[target_[e]].push_back(e);
    if (lag_[e] == 0) {
      out[source_[e]].push_back(target_[e]);
      ++waits[target_[e]];
    }
  }
  for (int64_t j = 0; j < num_tasks_; ++j) {
    if (waits[j] == 0) {
      order_.push_back(j);
    }
  }
  for (size_t i = 0; i < order_.size(); ++i) {
    for (const int64_t next : out[order_[i]]) {
      if (--waits[next] == 0) {
        order_.push_back(next);
      }
    }
  }
  CHECK_ARG(static_cast<int64_t>(order_.size()) == num_tasks_, "tasks of one iteration wait for each other in a circle");
  first_.push_back(0);
  for (const int64_t j : order_) {
    for (const int64_t e : in[j]) {
      in_edge_.push_back(e);
      in_lag_.push_back(lag_[e]);
      const int64_t block = mode_[e] == kAfterStart ? iterations_ * num_tasks_ : 0;
      in_offset_.push_back(block + source_[e] - lag_[e] * num_tasks_);
    }
    first_.push_back(static_cast<int64_t>(in_edge_.size()));
  }
}

void PlacedJob::place(const int64_t* placement) {
  link_bytes_.assign(link_rates_.size(), 0.0);
  link_flows_.assign(link_rates_.size(), 0);
  work_.assign(num_machines_, 0.0);
  std::copy(placement, placement + num_placed_, place_.begin());
  for (int64_t j = 0; j < num_tasks_; ++j) {
    at_[j] = place_[host_[j]];
  }
  for (int64_t p = 0; p < num_placed_; ++p) {
    add_work(p, 1.0);
  }
  for (int64_t e = 0; e < num_edges_; ++e) {
    if (mode_[e] == kData) {
      const Route& route = routes_[at_[source_[e]] * num_machines_ + at_[target_[e]]];
      for (int i = 0; i < route.num_links; ++i) {
        link_bytes_[route.links[i]] += total_volume_[e];
        ++link_flows_[route.links[i]];
      }
    }
  }
}

// Work: a route per edge of the task; a sampler has one per store and one to its worker.
void PlacedJob::move(int64_t placed, int64_t machine) {
  add_edges(incident_[placed], -1.0);
  add_work(placed, -1.0);
  place_[placed] = machine;
  for (const int64_t j : seated_[placed]) {
    at_[j] = machine;
  }
  add_work(placed, 1.0);
  add_edges(incident_[placed], 1.0);
}

void PlacedJob::add_edges(const std::vector<int64_t>& edges, double sign) {
  for (const int64_t e : edges) {
    const Route& route = routes_[at_[source_[e]] * num_machines_ + at_[target_[e]]];
    for (int i = 0; i < route.num_links; ++i) {
      link_bytes_[route.links[i]] += sign * total_volume_[e];
      link_flows_[route.links[i]] += sign > 0 ? 1 : -1;
    }
  }
}

void PlacedJob::add_work(int64_t placed, double sign) {
  for (const int64_t j : seated_[placed]) {
    work_[place_[placed]] += sign * total_work_[j] * slowness_[kind_[j] * num_machines_ + place_[placed]];
  }
}

double PlacedJob::busiest_link() const {
  double most = 0.0;
  for (size_t link = 0; link < link_rates_.size(); ++link) {
    most = std::max(most, link_bytes_[link] / link_rates_[link]);
  }
  return most;
}

double PlacedJob::busiest_cores() const {
  double most = 0.0;
  for (int64_t m = 0; m < num_machines_; ++m) {
    most = std::max(most, work_[m] / cores_[m]);
  }
  return most;
}

// Times follow (8)-(12) as if every flow had its rate to itself. Within a machine the factor is 0, and then a flow's
// end is its sender's. Work: an addition and two comparisons per edge and iteration.
double PlacedJob::longest_path(bool shares) {
  for (int64_t pair = 0; pair < num_machines_ * num_machines_; ++pair) {
    const Route& route = routes_[pair];
    double slowest = 0.0;
    for (int i = 0; i < route.num_links; ++i) {
      const int64_t link = route.links[i];
      const double flows = shares ? static_cast<double>(std::max<int64_t>(link_flows_[link], 1)) : 1.0;
      slowest = std::max(slowest, flows / link_rates_[link]);
    }
    pair_factor_[pair] = slowest;
  }
  for (int64_t i = 0; i < num_edges_; ++i) {
    const int64_t e = in_edge_[i];
    in_factor_[i] = mode_[e] == kData ? pair_factor_[at_[source_[e]] * num_machines_ + at_[target_[e]]] : 0.0;
  }
  std::fill(flow_end_.begin(), flow_end_.end(), 0.0);
  double* const ends = times_.data();
  double* const starts = ends + iterations_ * num_tasks_;
  double last = 0.0;
  for (int64_t n = 0; n < iterations_; ++n) {
    double* const end = ends + n * num_tasks_;
    double* const begin = starts + n * num_tasks_;
    const double* const volume = in_volume_.data() + n * num_edges_;
    for (int64_t i = 0; i < num_tasks_; ++i) {
      const int64_t j = order_[i];
      double start = n > 0 ? (end - num_tasks_)[j] : 0.0;
      for (int64_t k = first_[i]; k < first_[i + 1]; ++k) {
        if (in_lag_[k] <= n) {
          flow_end_[k] = std::max(flow_end_[k], end[in_offset_[k]]) + volume[k] * in_factor_[k];
          start = std::max(start, flow_end_[k]);
        }
      }
      begin[j] = start;
      end[j] = start + seconds_[n * num_tasks_ + j] * slowness_[kind_[j] * num_machines_ + at_[j]];
      last = std::max(last, end[j]);
    }
  }
  return last;
}

}  // namespace gnnsys::planning
