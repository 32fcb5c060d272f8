// refine_volume: from any assignment to one within all limits that sends fewer rows (the first stage of G3 §4.3.2).
#include "common/register.h"
#include "cpu/partition/volume_arguments.h"

namespace gnnsys {
namespace {

enum Stopped : int64_t { kConverged = 0, kOutOfWork = 1 };

// Until every part is within its limits, at a price in rows that rises until it is paid. The first price makes the
// whole excess of one part worth half the nodes of one.
void remove_excess(VolumeSearch* search) {
  constexpr int kMaxPasses = 60;
  constexpr double kRoom = 0.97;  // further than needed, or the search below would find no part with room
  constexpr double kDearer = 1.3;
  const VolumeState& state = search->state();
  double price = 0.5 * static_cast<double>(state.graph().num_nodes()) / state.num_parts();
  for (int pass = 0; pass < kMaxPasses && search->limits().any_excess(); ++pass) {
    search->relieve(kRoom, price);
    price *= kDearer;
  }
}

// Greedy until a pass saves less than 0.1%; then cycles of heating and cooling, each twice as hot as the one before,
// as long as they save 0.2% and the work allows another one. The best assignment of all is kept.
Stopped refine(VolumeSearch* search) {
  constexpr int kGreedyPasses = 10;
  constexpr double kGreedyGain = 0.001;
  constexpr double kCycleGain = 0.002;
  constexpr double kFirstTemperature = 0.3;
  const VolumeState& state = search->state();
  remove_excess(search);
  for (int pass = 0; pass < kGreedyPasses; ++pass) {
    const auto before = static_cast<double>(state.volume());
    search->pass({});
    if (before - static_cast<double>(state.volume()) <= kGreedyGain * before) {
      break;
    }
  }
  const int num_passes = passes_per_cycle(state.graph());
  const int num_cycles = num_passes < kFewPasses ? 1 : kMaxCycles;
  std::vector<int32_t> best = state.parts();
  int64_t least = state.volume();
  double hottest = kFirstTemperature;
  for (int cycle = 0; cycle < num_cycles && least > 0; ++cycle, hottest *= 2) {
    for (int pass = 0; pass < num_passes; ++pass) {
      search->pass({temperature_at(pass, num_passes, hottest)});
    }
    for (int pass = 0; pass < kRestPasses; ++pass) {
      search->pass({});
    }
    const auto gain = static_cast<double>(least - state.volume());
    const bool enough = gain > kCycleGain * static_cast<double>(least);
    if (gain > 0) {
      best = state.parts();
      least = state.volume();
    }
    if (!enough) {
      search->restore(best);
      return kConverged;
    }
  }
  search->restore(best);
  return least == 0 ? kConverged : kOutOfWork;
}

SearchResult refine_volume(const Tensor& indptr, const Tensor& indices, const Tensor& part, int64_t num_parts,
                           const Tensor& weights, const Tensor& limits, int64_t key) {
  return run_search(indptr, indices, part, num_parts, weights, limits, key,
                    [](VolumeSearch& search) { return refine(&search); });
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "refine_volume", &gnnsys::refine_volume); }
