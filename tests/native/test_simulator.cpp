// The simulator's parts, without torch: sums of weights, clocks of pairs, and whole jobs beside a sum over time steps.
#include "cpu/planning/engine.h"
#include "cpu/planning/longest_path.h"
#include "native_test.h"

#include <cmath>

using namespace gnnsys::planning;
using native_test::Random;

namespace {

// Senders on their own machines, all of whose flows go to one receiver: every flow starts at 0 and shares links alone.
struct FlowsFromZero {
  FlowsFromZero(int64_t num_flows, int64_t num_machines, uint64_t seed) {
    Random random(seed);
    const int64_t num_tasks = 2 * num_flows;
    for (int64_t flow = 0; flow < num_flows; ++flow) {
      source.push_back(flow);
      target.push_back(num_flows + flow);
      volume.push_back(static_cast<double>(1 + random.below(1000)) / 100);
    }
    for (int64_t task = 0; task < num_tasks; ++task) {
      machine.push_back(random.below(num_machines));
    }
    seconds.assign(static_cast<size_t>(num_tasks), 0.0);
    threads.assign(static_cast<size_t>(num_tasks), 1.0);
    zeros.assign(static_cast<size_t>(num_tasks), 0);
    for (int64_t link = 0; link < 2 * num_machines; ++link) {
      rates.push_back(static_cast<double>(1 + random.below(4)));
    }
    uplink.assign(static_cast<size_t>(num_machines), -1);
    cores.assign(static_cast<size_t>(num_machines), kNever);
    server_threads.assign(static_cast<size_t>(num_machines), 1);
  }

  Job job() const {
    const auto size = [](const auto& values) { return static_cast<int64_t>(values.size()); };
    return {1, size(machine), size(source), size(uplink), size(rates), machine.data(), seconds.data(), threads.data(),
            zeros.data(), source.data(), target.data(), zeros.data(), zeros.data(), volume.data(), rates.data(),
            uplink.data(), cores.data(), server_threads.data()};
  }

  std::vector<int64_t> machine, zeros, source, target, uplink, server_threads;
  std::vector<double> seconds, threads, volume, rates, cores;
};

// Ends of all flows by Eq. 19-20 in small steps of time.
std::vector<double> ends_in_steps(const Job& job, double step) {
  std::vector<double> left(job.volume, job.volume + job.num_edges);
  std::vector<double> ends(left.size(), 0.0);
  for (double now = step;; now += step) {
    std::vector<double> degree(static_cast<size_t>(job.num_links), 0.0);
    bool any = false;
    const auto links = [&](int64_t e) { return job.links(job.machine[job.source[e]], job.machine[job.target[e]]); };
    for (int64_t e = 0; e < job.num_edges; ++e) {
      if (job.crosses(e) && left[static_cast<size_t>(e)] > 0) {
        any = true;
        ++degree[static_cast<size_t>(links(e)[0])];
        ++degree[static_cast<size_t>(links(e)[1])];
      }
    }
    if (!any) {
      return ends;
    }
    for (int64_t e = 0; e < job.num_edges; ++e) {
      if (job.crosses(e) && left[static_cast<size_t>(e)] > 0) {
        const auto share = [&](int32_t link) { return job.link_rates[link] / degree[static_cast<size_t>(link)]; };
        left[static_cast<size_t>(e)] -= step * std::min(share(links(e)[0]), share(links(e)[1]));
        ends[static_cast<size_t>(e)] = now;
      }
    }
  }
}

}  // namespace

TEST("a sum keeps small weights that huge ones were added to and taken from") {
  ExactSum sum;
  double rest = 0;
  Random random(3);
  for (int i = 0; i < 1000; ++i) {
    const double small = static_cast<double>(1 + random.below(100));
    const double huge = 1e17 * static_cast<double>(1 + random.below(9));
    sum.add(huge);
    sum.add(small);
    sum.add(-huge);
    rest += small;
  }
  EXPECT(sum.value() == rest);
}

TEST("flows end when time steps say so, within a few steps") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const FlowsFromZero flows(1 + static_cast<int64_t>(seed), 4, seed);
    const Job job = flows.job();
    OwnedTimes owned(job);
    const Times times = owned.times();
    run_job(job, Policy::kOes, times);
    const double step = 1e-3;
    const std::vector<double> ends = ends_in_steps(job, step);
    for (int64_t e = 0; e < job.num_edges; ++e) {
      const double end = job.crosses(e) ? times.flow_end[e] : 0;
      EXPECT(std::abs(end - ends[static_cast<size_t>(e)]) <= step * static_cast<double>(job.num_edges + 1));
    }
  }
}

TEST("no policy ends before the longest path at full rates, nor before the busiest link") {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const FlowsFromZero flows(30, 5, seed);
    const Job job = flows.job();
    std::vector<double> full(static_cast<size_t>(job.num_edges), kNever);
    std::vector<double> busy(static_cast<size_t>(job.num_links), 0.0);
    for (int64_t e = 0; e < job.num_edges; ++e) {
      for (const int32_t link : job.links(job.machine[job.source[e]], job.machine[job.target[e]])) {
        if (job.crosses(e) && link >= 0) {
          full[static_cast<size_t>(e)] = std::min(full[static_cast<size_t>(e)], job.link_rates[link]);
          busy[static_cast<size_t>(link)] += job.volume[e] / job.link_rates[link];
        }
      }
    }
    const double least = std::max(LongestPath(job).length(job, full.data()), *std::max_element(busy.begin(), busy.end()));
    OwnedTimes owned(job);
    for (int64_t policy = 0; policy < static_cast<int64_t>(Policy::kCount); ++policy) {
      const double seconds = run_job(job, static_cast<Policy>(policy), owned.times());
      EXPECT(seconds >= least * (1 - 1e-9));
      EXPECT(std::isfinite(seconds));
    }
  }
}
