// simulate_training: a training job on machines, event by event. longest_training_path: how long if nothing was shared.
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/planning/engine.h"
#include "cpu/planning/longest_path.h"

#include <cmath>
#include <tuple>

namespace gnnsys {
namespace {

using planning::Job;

const int64_t* ids(const Tensor& t, const char* name, int64_t size, int64_t least, int64_t bound) {
  check_vector(t, name);
  check_dtype(t, ScalarType::Long, name);
  CHECK_ARG(t.numel() == size, name, " must have ", size, " entries, got ", t.numel());
  const auto* const data = const_data<int64_t>(t);
  for (int64_t i = 0; i < size; ++i) {
    CHECK_ARG(data[i] >= least && data[i] < bound, name, " must be in [", least, ", ", bound, "), got ", data[i]);
  }
  return data;
}

const double* amounts(const Tensor& t, const char* name, int64_t rows, int64_t columns, bool positive, bool finite) {
  check_contiguous(t, name);
  check_dtype(t, ScalarType::Double, name);
  CHECK_ARG(t.numel() == rows * columns, name, " must have ", rows * columns, " entries, got ", t.numel());
  const auto* const data = const_data<double>(t);
  for (int64_t i = 0; i < t.numel(); ++i) {
    const bool good = positive ? data[i] > 0 : data[i] >= 0;
    CHECK_ARG(good && (!finite || std::isfinite(data[i])), name, " must be ", positive ? "more than 0" : "at least 0",
              finite ? " and finite" : "", ", got ", data[i]);
  }
  return data;
}

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
constexpr int64_t kMostLag = int64_t{1} << 32;

// Tasks, edges and demands, which both ops read; machines are left out.
Job job_of(const Tensor& machine, const Tensor& seconds, const Tensor& source, const Tensor& target, const Tensor& lag,
           const Tensor& mode, const Tensor& volume, int64_t num_machines) {
  check_contiguous(seconds, "seconds");
  CHECK_ARG(seconds.dim() == 2, "seconds must have two dimensions, got ", seconds.dim());
  Job job{};
  job.iterations = seconds.size(0);
  job.num_tasks = machine.numel();
  job.num_edges = source.numel();
  job.num_machines = num_machines;
  CHECK_ARG(job.num_tasks >= 1 && job.iterations >= 1, "there must be a task and an iteration, got ", job.num_tasks,
            " and ", job.iterations);
  job.machine = ids(machine, "machine", job.num_tasks, 0, num_machines);
  job.seconds = amounts(seconds, "seconds", job.iterations, job.num_tasks, false, true);
  job.source = ids(source, "source", job.num_edges, 0, job.num_tasks);
  job.target = ids(target, "target", job.num_edges, 0, job.num_tasks);
  job.lag = ids(lag, "lag", job.num_edges, 0, kMostLag);
  job.mode = ids(mode, "mode", job.num_edges, 0, 3);
  job.volume = amounts(volume, "volume", job.iterations, job.num_edges, false, true);
  return job;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> simulate_training(
    const Tensor& machine, const Tensor& seconds, const Tensor& threads, const Tensor& queued, const Tensor& source,
    const Tensor& target, const Tensor& lag, const Tensor& mode, const Tensor& volume, const Tensor& link_rates,
    const Tensor& uplink, const Tensor& cores, const Tensor& server_threads, int64_t policy, bool explain) {
  check_vector(cores, "cores");
  const int64_t num_machines = cores.numel();
  CHECK_ARG(num_machines >= 1, "there must be a machine");
  Job job = job_of(machine, seconds, source, target, lag, mode, volume, num_machines);
  job.num_links = link_rates.numel();
  CHECK_ARG(job.num_links >= 2 * num_machines && job.num_links % 2 == 0, "link_rates must have two entries per machine",
            " and two per uplink, got ", job.num_links, " for ", num_machines, " machines");
  check_vector(link_rates, "link_rates");
  job.threads = amounts(threads, "threads", 1, job.num_tasks, false, true);
  job.queued = ids(queued, "queued", job.num_tasks, 0, 2);
  job.link_rates = amounts(link_rates, "link_rates", 1, job.num_links, true, true);
  job.uplink = ids(uplink, "uplink", num_machines, -1, job.num_uplinks());
  job.cores = amounts(cores, "cores", 1, num_machines, true, false);
  job.server_threads = ids(server_threads, "server_threads", num_machines, 1, kAny);
  const auto count = static_cast<int64_t>(planning::Policy::kCount);
  CHECK_ARG(policy >= 0 && policy < count, "policy must be in [0, ", count, "), got ", policy);

  const Tensor task_times = empty_cpu({3, job.iterations, job.num_tasks}, ScalarType::Double);
  const Tensor task_cause = empty_cpu({job.iterations, job.num_tasks}, ScalarType::Long);
  const Tensor flow_times = empty_cpu({3, job.iterations, job.num_edges}, ScalarType::Double);
  const Tensor flow_cause = empty_cpu({job.iterations, job.num_edges}, ScalarType::Long);
  const Tensor limited =
      empty_cpu({explain ? job.iterations : 0, job.num_edges, planning::kMostLinks}, ScalarType::Double);
  const Tensor slowed = empty_cpu({explain ? job.iterations : 0, job.num_tasks}, ScalarType::Double);
  auto* const tasks = mutable_data<double>(task_times);
  auto* const flows = mutable_data<double>(flow_times);
  const int64_t num_tasks = job.iterations * job.num_tasks;
  const int64_t num_flows = job.iterations * job.num_edges;
  const planning::Times times{tasks, tasks + num_tasks, tasks + 2 * num_tasks, mutable_data<int64_t>(task_cause),
                              flows, flows + num_flows, flows + 2 * num_flows, mutable_data<int64_t>(flow_cause),
                              explain ? mutable_data<double>(limited) : nullptr,
                              explain ? mutable_data<double>(slowed) : nullptr};
  planning::run_job(job, static_cast<planning::Policy>(policy), times);
  return {task_times, task_cause, flow_times, flow_cause, limited, slowed};
}

double longest_training_path(const Tensor& machine, const Tensor& seconds, const Tensor& source, const Tensor& target,
                             const Tensor& lag, const Tensor& mode, const Tensor& volume, const Tensor& flow_rates) {
  const Job job = job_of(machine, seconds, source, target, lag, mode, volume, kAny);
  const double* const rates = amounts(flow_rates, "flow_rates", 1, job.num_edges, true, false);
  return planning::LongestPath(job).length(job, rates);
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "simulate_training", &gnnsys::simulate_training);
  REGISTER_OP(m, "longest_training_path", &gnnsys::longest_training_path);
}
