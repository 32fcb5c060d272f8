// even_out: G3's Algorithm 2, the largest load made small (Eq. 4.4) without leaving any limit.
//
// The paper swaps the node of the most loaded part that has most remote neighbours with the one of the least loaded
// part that would have fewest, until loads agree to 0.5% or swaps repeat. To the letter that trades hubs for leaves,
// which breaks edge balance, and pays any number of rows for a swap. Here every row above the mean load has a price,
// which rises with the part's excess; at these prices nodes move and swap among all parts, with partners of their own
// weight that wait to go to an overloaded one (v_min). A temperature lets the search pay now for what helps later. Kept
// is the assignment with the smallest largest load: it only falls, so nothing repeats.
#include "common/register.h"
#include "cpu/partition/volume_arguments.h"

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

  void consider(const VolumeState& state) {
    const int64_t now = state.loads().largest();
    if (now < load || (now == load && state.volume() < volume)) {
      *this = {state.parts(), now, state.volume()};
    }
  }
};

// Dearer where the load is above the level, by five times its excess.
void raise(std::vector<double>* price, const VolumeState& state, double level) {
  constexpr double kSteepness = 5;
  constexpr double kFastest = 0.5;
  constexpr double kHighest = 100;
  for (int p = 0; p < state.num_parts(); ++p) {
    const double excess = static_cast<double>(state.loads().of(p)) / level - 1;
    (*price)[p] = std::min((*price)[p] * (1 + std::clamp(kSteepness * excess, 0.0, kFastest)), kHighest);
  }
}

Stopped even_out_loads(VolumeSearch* search, double tolerance, int64_t most_volume) {
  constexpr double kFirstPrice = 5;  // rows of volume for a row above the mean
  constexpr double kCycleGain = 0.002;
  constexpr double kFirstTemperature = 0.3;
  constexpr double kHotter = 1.5;
  const VolumeState& state = search->state();
  if (balanced(state, tolerance)) {
    return kBalanced;
  }
  Best best{state.parts(), state.loads().largest(), state.volume()};
  const int num_passes = passes_per_cycle(state.graph());
  double hottest = kFirstTemperature;
  for (int cycle = 0; cycle < kMaxCycles; ++cycle, hottest *= kHotter) {
    const int64_t before = best.load;
    std::vector<double> price(state.num_parts(), kFirstPrice);
    for (int pass = 0; pass < num_passes + kRestPasses; ++pass) {
      const double temperature = pass < num_passes ? temperature_at(pass, num_passes, hottest) : 0;
      const double level = mean_load(state);
      search->pass({temperature, level, price, most_volume});
      best.consider(state);
      raise(&price, state, level);
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

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "even_out", &gnnsys::even_out); }
