// sample_guided: local neighbours first, remote ones by their scores (DGS, section 3.2.3).
//
// `score` is a byte per source: 0 says that the requester owns it (local), 1 to 255 how much it counts (remote). Of k
// draws at a seed the local ones get what `split` says, the rest goes to remote ones, and a deviation of
// d = ceil(deviation * k) is moved between them. Local ones are drawn uniformly, remote ones in proportion to their
// scores, one after the other without putting back: by rejection where few of many are wanted, else by the smallest of
// -ln(u_e) / w_e (Efraimidis and Spirakis), which has the same distribution.
// With `unbiased` every edge is taken by itself with a probability pi_e that is known, and weighs 1 / (pi_e * degree).
// Work: a byte read for each in-edge of a seed that has more than k, and O(k) words; `unbiased` takes a word per edge.
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/arguments.h"
#include "cpu/sample.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace gnnsys {
namespace {

template <typename id_t>
struct GuidedRequest {
  Request<id_t> q;
  const uint8_t* score;
  int64_t num_scores;
  double deviation;
  bool proportional;
  bool unbiased;
};

// How many of k draws go to each side; fractions where draws are unbiased.
struct Shares {
  double local;
  double remote;
};

template <typename id_t>
Shares share_draws(const GuidedRequest<id_t>& g, int64_t k, int64_t num_local, int64_t num_remote) {
  const auto shift = static_cast<int64_t>(std::ceil(g.deviation * static_cast<double>(k)));
  int64_t local;
  if (g.proportional) {  // the uniform split, and from there towards the local side
    local = k * num_local / (num_local + num_remote);
    local = std::min({local + shift, num_local, k});
    local = std::max(local, k - num_remote);
  } else {
    local = std::min(num_local, k);
    local -= std::min({shift, local, num_remote - (k - local)});
  }
  Shares shares{static_cast<double>(local), static_cast<double>(k - local)};
  if (g.unbiased) {  // a side that has any must have a chance
    const double least = std::min(0.5, static_cast<double>(k) / 2);
    if (num_local > 0 && shares.local < least) {
      shares = {least, static_cast<double>(k) - least};
    } else if (num_remote > 0 && shares.remote < least) {
      shares = {static_cast<double>(k) - least, least};
    }
  }
  return shares;
}

// The factor c with sum over e of min(1, c * score_e) = wanted, from how many there are of each score: those that are
// taken for certain are found from the highest score down.
double certain_factor(const std::array<int64_t, 256>& number, double wanted) {
  double rest = 0;
  for (size_t s = 1; s < 256; ++s) {
    rest += static_cast<double>(number[s]) * static_cast<double>(s);
  }
  double left = wanted;
  for (size_t s = 255; s > 0 && rest > 0; --s) {
    if (number[s] == 0) {
      continue;
    }
    const double factor = left / rest;
    if (factor * static_cast<double>(s) <= 1) {
      return factor;
    }
    left -= static_cast<double>(number[s]);
    rest -= static_cast<double>(number[s]) * static_cast<double>(s);
  }
  return 1;  // all are taken
}

// One thread's collector: appends each seed's chosen positions and keeps its scratch between seeds.
template <typename id_t>
class GuidedCollector {
 public:
  GuidedCollector(const GuidedRequest<id_t>& g, Faults* faults) : g_(g), faults_(faults) {}

  std::vector<int64_t> positions;
  std::vector<float> weights;
  std::optional<int64_t> bad_source;  // one without a score

  int64_t collect(int64_t i) {
    const Request<id_t>& q = g_.q;
    const auto before = static_cast<int64_t>(positions.size());
    const int64_t row = q.seeds[i];
    const int64_t begin = q.indptr[row];
    const int64_t end = q.indptr[row + 1];
    if (!check_row(begin, end, q.num_edges, row, faults_) || q.fanout == 0) {
      return 0;
    }
    const int64_t* all_end = q.exclude + q.num_exclude;
    const int64_t* first = std::lower_bound(q.exclude, all_end, begin);
    const int64_t* last = std::lower_bound(first, all_end, end);
    const int64_t degree = end - begin - (last - first);
    if (q.fanout < 0 || degree <= q.fanout) {
      for (int64_t p = begin; p < end; ++p) {
        if (first != last && *first == p) {
          ++first;
        } else {
          positions.push_back(p);
        }
      }
      weigh_all(before, 1.0f / static_cast<float>(std::max<int64_t>(degree, 1)));
      return static_cast<int64_t>(positions.size()) - before;
    }
    if (!split_sides(begin, end, first, last)) {
      return 0;
    }
    const Stream stream = q.stream(i);
    const auto shares = share_draws(g_, q.fanout, num_local_, num_remote_);
    if (g_.unbiased) {
      take_by_chance(stream, begin, degree, shares);
    } else {
      take_local(stream, begin, static_cast<int64_t>(shares.local));
      take_remote(stream, begin, static_cast<int64_t>(shares.remote));
      std::sort(positions.begin() + before, positions.end());
    }
    return static_cast<int64_t>(positions.size()) - before;
  }

  // All seeds were collected.
  void free_scratch() {
    local_ = std::vector<uint32_t>();
    remote_ = std::vector<uint32_t>();
    keyed_ = std::vector<std::pair<double, uint32_t>>();
  }

 private:
  // Words of a stream, by what they are for: the attempt is part of the counter.
  static constexpr uint32_t kKeys = 0;
  static constexpr uint32_t kLocal = 1;
  static constexpr uint32_t kRemote = 2;
  static constexpr int64_t kMostSearched = 512;  // positions that are looked through for each new one

  // Places in the seed's list of the local and of the remote in-edges, ascending. Nothing branches on a score.
  bool split_sides(int64_t begin, int64_t end, const int64_t* first, const int64_t* last) {
    const auto size = static_cast<size_t>(end - begin);
    if (local_.size() < size) {
      local_.resize(size);
      remote_.resize(size);
    }
    const id_t* const sources = g_.q.indices + begin;
    const auto num_scores = static_cast<uint64_t>(g_.num_scores);
    uint32_t* const local = local_.data();
    uint32_t* const remote = remote_.data();
    size_t num_local = 0;
    size_t num_remote = 0;
    uint32_t highest = 0;
    for (size_t e = 0; e < size; ++e) {
      if (first != last && *first == begin + static_cast<int64_t>(e)) {
        ++first;
        continue;
      }
      const auto source = static_cast<uint64_t>(sources[e]);
      if (__builtin_expect(source >= num_scores, 0)) {
        bad_source = static_cast<int64_t>(sources[e]);
        return false;
      }
      const uint32_t score = g_.score[source];
      local[num_local] = remote[num_remote] = static_cast<uint32_t>(e);
      num_local += score == 0;
      num_remote += score != 0;
      highest = std::max(highest, score);
    }
    num_local_ = static_cast<int64_t>(num_local);
    num_remote_ = static_cast<int64_t>(num_remote);
    highest_ = highest;
    return true;
  }

  uint8_t score_at(int64_t begin, uint32_t place) const { return g_.score[g_.q.indices[begin + place]]; }

  static double unit(const Stream& stream, uint32_t place) { return open_unit(stream.word64(place, kKeys)); }

  void weigh_all(int64_t before, float weight) {
    if (g_.unbiased) {
      weights.resize(weights.size() + positions.size() - static_cast<size_t>(before), weight);
    }
  }

  // Uniformly: places are drawn until enough different ones have come, at most half of all; else by keys.
  void take_local(const Stream& stream, int64_t begin, int64_t count) {
    if (take_all(local_, num_local_, begin, count)) {
      return;
    }
    const size_t start = positions.size();
    const int64_t left =
        take_by_rejection(stream, kLocal, local_, num_local_, begin, count, [](uint32_t) { return true; });
    take_by_keys(local_, num_local_, begin, start, left, [&](uint32_t place) { return unit(stream, place); });
  }

  // In proportion to the scores, one after the other without putting back: a place is drawn uniformly and taken with
  // probability score / highest, unless it was taken before.
  void take_remote(const Stream& stream, int64_t begin, int64_t count) {
    if (take_all(remote_, num_remote_, begin, count)) {
      return;
    }
    uint64_t fraction = 0;
    const auto accept = [&](uint32_t place) {
      uint64_t low;
      return mul_high64(fraction, highest_, &low) < score_at(begin, place);
    };
    const size_t start = positions.size();
    const int64_t left = take_by_rejection(stream, kRemote, remote_, num_remote_, begin, count, accept, &fraction);
    take_by_keys(remote_, num_remote_, begin, start, left, [&](uint32_t place) {
      return negative_log(unit(stream, place)) / static_cast<double>(score_at(begin, place));
    });
  }

  bool take_all(const std::vector<uint32_t>& places, int64_t size, int64_t begin, int64_t count) {
    if (count < size) {
      return count == 0;
    }
    for (int64_t j = 0; j < size; ++j) {
      positions.push_back(begin + places[static_cast<size_t>(j)]);
    }
    return true;
  }

  // One word says a place (its product with their number, high half) and, by the low half, a fraction to accept it by.
  // How many are still wanted: all where that is more than half, some where the tries are used up. What was taken is
  // kept then: which tries succeed depends on what is taken.
  template <typename Accept>
  int64_t take_by_rejection(const Stream& stream, uint32_t purpose, const std::vector<uint32_t>& places, int64_t size,
                         int64_t begin, int64_t count, Accept accept, uint64_t* fraction = nullptr) {
    if (2 * count > size || count > kMostSearched) {
      return count;
    }
    const size_t start = positions.size();
    const auto most = static_cast<uint64_t>(32 * count + 64);
    int64_t left = count;
    for (uint64_t t = 0; t < most && left > 0; ++t) {
      uint64_t low;
      const uint64_t rank = mul_high64(stream.word64(t, purpose), static_cast<uint64_t>(size), &low);
      const uint32_t place = places[static_cast<size_t>(rank)];
      if (fraction != nullptr) {
        *fraction = low;
      }
      const int64_t position = begin + place;
      if (!accept(place) ||
          std::find(positions.begin() + static_cast<int64_t>(start), positions.end(), position) != positions.end()) {
        continue;
      }
      positions.push_back(position);
      --left;
    }
    return left;
  }

  // The places with the smallest keys (Efraimidis and Spirakis), among those that are not in positions[start..] yet.
  template <typename Key>
  void take_by_keys(const std::vector<uint32_t>& places, int64_t size, int64_t begin, size_t start, int64_t count,
                    Key key) {
    if (count == 0) {
      return;
    }
    keyed_.clear();
    const auto taken = positions.begin() + static_cast<int64_t>(start);
    for (int64_t j = 0; j < size; ++j) {
      const uint32_t place = places[static_cast<size_t>(j)];
      if (std::find(taken, positions.end(), begin + place) == positions.end()) {
        keyed_.emplace_back(key(place), place);
      }
    }
    std::nth_element(keyed_.begin(), keyed_.begin() + count, keyed_.end());
    for (int64_t j = 0; j < count; ++j) {
      positions.push_back(begin + keyed_[static_cast<size_t>(j)].second);
    }
  }

  // Each edge by itself: expected numbers are the shares. In order of position, both sides merged.
  void take_by_chance(const Stream& stream, int64_t begin, int64_t degree, Shares shares) {
    std::array<int64_t, 256> number{};
    for (int64_t j = 0; j < num_remote_; ++j) {
      ++number[score_at(begin, remote_[static_cast<size_t>(j)])];
    }
    const double factor = certain_factor(number, shares.remote);
    const double of_local = num_local_ == 0 ? 0 : std::min(1.0, shares.local / static_cast<double>(num_local_));
    int64_t a = 0;
    int64_t b = 0;
    while (a < num_local_ || b < num_remote_) {
      const bool is_local = b == num_remote_ || (a < num_local_ && local_[static_cast<size_t>(a)] < remote_[static_cast<size_t>(b)]);
      const uint32_t place = is_local ? local_[static_cast<size_t>(a++)] : remote_[static_cast<size_t>(b++)];
      const double chance =
          is_local ? of_local : std::min(1.0, factor * static_cast<double>(score_at(begin, place)));
      if (unit(stream, place) < chance) {
        positions.push_back(begin + place);
        weights.push_back(static_cast<float>(1.0 / (chance * static_cast<double>(degree))));
      }
    }
  }

  const GuidedRequest<id_t>& g_;
  Faults* faults_;
  std::vector<uint32_t> local_;
  std::vector<uint32_t> remote_;
  int64_t num_local_ = 0;
  int64_t num_remote_ = 0;
  uint64_t highest_ = 0;
  std::vector<std::pair<double, uint32_t>> keyed_;
};

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename id_t>
Result sample_all(const GuidedRequest<id_t>& g) {
  const Request<id_t>& q = g.q;
  Tensor offsets = empty_cpu({q.num_seeds + 1}, ScalarType::Long);
  auto* offset = mutable_data<int64_t>(offsets);
  const int shares = num_shares_for(q.num_seeds, kSeedsPerThread);
  Faults faults;
  std::vector<GuidedCollector<id_t>> collectors(static_cast<size_t>(shares), {g, &faults});
  for_shares(shares, [&](int s, int n) {
    const Range r = share_of(q.num_seeds, s, n);
    auto& collector = collectors[static_cast<size_t>(s)];
    for (int64_t i = r.begin; i < r.end; ++i) {
      offset[i + 1] = collector.collect(i);
    }
    collector.free_scratch();
  });
  faults.raise();
  offset[0] = 0;
  for (int64_t i = 0; i < q.num_seeds; ++i) {
    offset[i + 1] += offset[i];
  }
  for (const auto& collector : collectors) {
    CHECK_ARG(!collector.bad_source, "score must have an entry for every source, ", collector.bad_source.value_or(0),
              " is none of ", g.num_scores);
  }
  const int64_t total = offset[q.num_seeds];
  Tensor neighbors = empty_cpu({total}, id_type<id_t>());
  Tensor positions = empty_cpu({total}, ScalarType::Long);
  Tensor weights = empty_cpu({g.unbiased ? total : 0}, ScalarType::Float);
  auto* neighbor = mutable_data<id_t>(neighbors);
  auto* position = mutable_data<int64_t>(positions);
  auto* weight = mutable_data<float>(weights);
  for_shares(shares, [&](int s, int n) {
    const auto& mine = collectors[static_cast<size_t>(s)];
    int64_t out = offset[share_of(q.num_seeds, s, n).begin];
    std::copy(mine.weights.begin(), mine.weights.end(), weight + (g.unbiased ? out : 0));
    for (const int64_t p : mine.positions) {
      position[out] = p;
      neighbor[out++] = q.indices[p];
    }
  });
  return {offsets, neighbors, positions, weights};
}

Result sample_guided(const Tensor& indptr, const Tensor& indices, const Tensor& seeds, int64_t fanout, int64_t key,
                     const Tensor& score, double deviation, bool proportional, bool unbiased,
                     std::optional<Tensor> exclude, std::optional<Tensor> tree, std::optional<Tensor> rng_ids) {
  check_seeds(indptr, indices, seeds);
  check_fanout(fanout);
  check_vector(score, "score");
  check_dtype(score, ScalarType::Byte, "score");
  CHECK_ARG(deviation >= 0 && deviation <= 1, "deviation must be in [0, 1], got ", deviation);
  if (rng_ids) {
    check_ids(*rng_ids, "rng_ids");
    check_rng_ids(*rng_ids, seeds);
  }
  return dispatch_ids(indices, [&](auto id) -> Result {
    using id_t = decltype(id);
    GuidedRequest<id_t> g{};
    Request<id_t>& q = g.q;
    q.indptr = const_data<int64_t>(indptr);
    q.indices = const_data<id_t>(indices);
    q.num_rows = indptr.numel() - 1;
    q.num_edges = indices.numel();
    q.seeds = const_data<id_t>(seeds);
    q.num_seeds = seeds.numel();
    q.fanout = fanout;
    q.key = static_cast<uint64_t>(key);
    if (rng_ids && rng_ids->scalar_type() == seeds.scalar_type()) {
      q.rng_ids = const_data<id_t>(*rng_ids);
    } else if (rng_ids) {
      q.wide_rng_ids = const_data<int64_t>(*rng_ids);
    }
    q.tree = optional_tree(tree, q.num_seeds);
    q.exclude = optional_exclude(exclude);
    q.num_exclude = exclude ? exclude->numel() : 0;
    g.score = const_data<uint8_t>(score);
    g.num_scores = score.numel();
    g.deviation = deviation;
    g.proportional = proportional;
    g.unbiased = unbiased;
    return sample_all(g);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "sample_guided", &sample_guided); }

}  // namespace gnnsys
