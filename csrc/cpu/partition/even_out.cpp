// even_out: G3's Algorithm 2, the largest load made small (Eq. 4.4) without leaving any limit.
//
// The paper swaps the node of the most loaded part that has most remote neighbours with the one of the least loaded part
// that would have fewest, until loads agree to 0.5% or swaps repeat. Taken to the letter it trades hubs for leaves, which
// breaks edge balance, pays any number of rows for a swap, and stops at the first swap that does not help. Here every
// row above the mean load has a price, at which nodes move and swap among all parts, with partners of their own weight
// that wait to go to an overloaded part (v_min); a temperature lets the search pay for what helps only later. Kept is
// the assignment with the smallest largest load: it only falls, so nothing repeats.
#include "cpu/partition/volume_arguments.h"

#include <torch/csrc/stable/library.h>

#include <numeric>

namespace gnnsys {
namespace {

enum Stopped : int64_t { kBalanced = 0, kNoImprovement = 1, kOutOfWork = 2 };

std::vector<int64_t> loads_of(const VolumeState& state) {
  std::vector<int64_t> loads(state.num_parts());
  for (int p = 0; p < state.num_parts(); ++p) {
    loads[p] = state.loads().of(p);
  }
  return loads;
}

bool balanced(const VolumeState& state, double tolerance) {
  const std::vector<int64_t> loads = loads_of(state);
  const auto [least, most] = std::minmax_element(loads.begin(), loads.end());
  return static_cast<double>(*most - *least) <= tolerance * static_cast<double>(*most);
}

double mean_load(const VolumeState& state) {
  const std::vector<int64_t> loads = loads_of(state);
  return static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0})) / state.num_parts();
}

struct Best {
  std::vector<int32_t> part;
  int64_t load;
  int64_t volume;

  void consider(const VolumeState& state, int64_t most_volume) {
    const int64_t now = state.loads().largest();
    if (state.volume() <= most_volume && (now < load || (now == load && state.volume() < volume))) {
      *this = {state.parts(), now, state.volume()};
    }
  }
};

Stopped even_out_loads(VolumeSearch* search, double tolerance, int64_t most_volume) {
  constexpr double kFirstPrice = 5;  // rows of volume for a row above the mean
  constexpr double kDearer = 1.1;
  constexpr double kHighestPrice = 100;
  constexpr double kCycleGain = 0.002;
  constexpr double kFirstTemperature = 0.3;
  constexpr double kHotter = 3;
  const VolumeState& state = search->state();
  if (balanced(state, tolerance)) {
    return kBalanced;
  }
  Best best{state.parts(), state.loads().largest(), state.volume()};
  const int num_passes = passes_per_cycle(state.graph());
  const int num_cycles = num_passes < kFewPasses ? 1 : kMaxCycles;
  double hottest = kFirstTemperature;
  for (int cycle = 0; cycle < num_cycles; ++cycle, hottest *= kHotter) {
    const int64_t before = best.load;
    double price = kFirstPrice;
    for (int pass = 0; pass < num_passes + kRestPasses; ++pass) {
      const double temperature = pass < num_passes ? temperature_at(pass, num_passes, hottest) : 0;
      search->pass({temperature, price, mean_load(state)});
      best.consider(state, most_volume);
      price = std::min(price * kDearer, kHighestPrice);
    }
    search->restore(best.part);
    if (balanced(state, tolerance)) {
      return kBalanced;
    }
    if (static_cast<double>(before - best.load) <= kCycleGain * static_cast<double>(before)) {
      return kNoImprovement;
    }
  }
  return kOutOfWork;
}

SearchResult even_out(const Tensor& indptr, const Tensor& indices, const Tensor& part, int64_t num_parts,
                      const Tensor& weights, const Tensor& limits, double tolerance, double slack, int64_t key) {
  CHECK_ARG(tolerance >= 0 && slack >= 0, "tolerance and slack must be >= 0, got ", tolerance, " and ", slack);
  return run_search(indptr, indices, part, num_parts, weights, limits, key, [&](VolumeSearch& search) {
    const auto volume = static_cast<double>(search.state().volume());
    return even_out_loads(&search, tolerance, static_cast<int64_t>(volume * (1 + slack)));
  });
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { m.impl("even_out", TORCH_BOX(&gnnsys::even_out)); }
