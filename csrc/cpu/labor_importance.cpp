// sample_labor_importance: LABOR-i (Balin and Catalyurek 2023, section 3.2), all in-edges of the seeds looked at together.
//
// Edge u -> v is taken where r_u < p, p = min(1, c_v * pi_u). c_v solves sum over u of 1 / min(1, c_v * pi_u) =
// degree(v)^2 / k. A round sets pi_u to the largest c_v * pi_u of its edges, from pi = 1 on. c_v is found without a sort:
// the edges that are certain at c leave the sum, which makes c larger, until no more become so. The order of every
// addition is in common/labor_importance.h, so results depend neither on threads nor on the device. Work: two to four
// passes over the edges per round, 12 bytes for each; none to find c in the first round.
#include "common/labor_importance.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/prefetch.h"
#include "common/register.h"
#include "common/tensors.h"
#include "cpu/arguments.h"
#include "cpu/philox_words.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kColumnsPerShare = 64;
constexpr int64_t kEdgesAhead = 64;  // of a column that comes, at most
constexpr int64_t kDenseIdsPerEdge = 4;  // sources are numbered by a table of all ids where it has at most so many per edge

// In-edges of the seeds: of column i the edges ends[i] to ends[i + 1], each with the number of its source.
struct Edges {
  std::vector<int64_t> ends;
  std::vector<int64_t> positions;  // empty without exclusions: edges of a column are its positions one by one
  std::vector<int64_t> first;      // of each column the first position
  std::vector<uint32_t> source;
  std::vector<int64_t> ids;  // of the numbers

  int64_t degree(size_t i) const { return ends[i + 1] - ends[i]; }
  int64_t position(size_t i, int64_t e) const { return positions.empty() ? first[i] + e - ends[i] : positions[static_cast<size_t>(e)]; }
};

template <typename id_t>
Edges gather_edges(const int64_t* indptr, const id_t* indices, const id_t* seeds, int64_t num_seeds, int64_t num_src,
                   const int64_t* exclude, int64_t num_exclude) {
  Edges edges;
  edges.ends.assign(1, 0);
  edges.ends.reserve(static_cast<size_t>(num_seeds) + 1);
  edges.first.reserve(static_cast<size_t>(num_seeds));
  int64_t total = 0;
  for (int64_t i = 0; i < num_seeds; ++i) {
    const int64_t begin = indptr[seeds[i]];
    const int64_t end = indptr[seeds[i] + 1];
    edges.first.push_back(begin);
    total += end - begin;
    if (num_exclude) {
      const int64_t* gap = std::lower_bound(exclude, exclude + num_exclude, begin);
      for (int64_t p = begin; p < end; ++p) {
        const bool gone = gap != exclude + num_exclude && *gap == p;
        gap += gone;
        if (!gone) {
          edges.positions.push_back(p);
        }
      }
    }
    edges.ends.push_back(num_exclude ? static_cast<int64_t>(edges.positions.size()) : total);
  }
  const int64_t num_edges = edges.ends.back();
  CHECK_ARG(num_edges <= kMostLaborEdges, "seeds have 2^32 - 1 in-edges or more: take smaller batches");
  if (num_edges == 0) {
    return edges;
  }
  edges.source.resize(static_cast<size_t>(num_edges));
  const auto number_all = [&](auto&& number) {
    const auto last = static_cast<size_t>(num_seeds) - 1;
    for (size_t i = 0; i <= last; ++i) {
      const size_t ahead = std::min(i + kColumnsAhead, last);
      prefetch_read(indices + edges.first[ahead], std::min(edges.degree(ahead), kEdgesAhead) * sizeof(id_t));
      uint32_t* const source = edges.source.data() + edges.ends[i];
      const int64_t* const listed = edges.positions.empty() ? nullptr : edges.positions.data() + edges.ends[i];
      const id_t* const in_a_row = indices + edges.first[i];
      for (int64_t e = 0; e < edges.degree(i); ++e) {
        const auto id = static_cast<int64_t>(listed ? indices[listed[e]] : in_a_row[e]);
        CHECK_ARG(static_cast<uint64_t>(id) < static_cast<uint64_t>(num_src), "sources must be in [0, ", num_src, "), got ",
                  id);
        source[e] = number(id);
      }
    }
  };
  if (num_src <= kDenseIdsPerEdge * num_edges) {
    std::vector<uint32_t> known(static_cast<size_t>(num_src), kNoSource);
    number_all([&](int64_t id) {
      uint32_t& slot = known[static_cast<size_t>(id)];
      if (slot == kNoSource) {
        slot = static_cast<uint32_t>(edges.ids.size());
        edges.ids.push_back(id);
      }
      return slot;
    });
  } else {
    std::unordered_map<int64_t, uint32_t> known;
    known.reserve(static_cast<size_t>(num_edges));
    number_all([&](int64_t id) {
      const auto [slot, is_new] = known.try_emplace(id, static_cast<uint32_t>(edges.ids.size()));
      if (is_new) {
        edges.ids.push_back(id);
      }
      return slot->second;
    });
  }
  return edges;
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Adds a block of edges, whose 1 / pi are given, to the tally of their column.
void tally_block(const double* inverse, int64_t size, double c, ColumnTally* tally) {
  double sum[kPartials] = {};
  double smallest[kPartials] = {kInfinity, kInfinity, kInfinity, kInfinity};
  int64_t certain[kPartials] = {};
  const auto add = [&](int64_t e, int64_t to) {
    const double value = inverse[e];
    const bool is_certain = value < c;
    certain[to] += is_certain;
    sum[to] += is_certain ? 0.0 : value;
    smallest[to] = std::min(smallest[to], is_certain ? kInfinity : value);
  };
  const int64_t whole = size - size % kPartials;
  for (int64_t e = 0; e < whole; e += kPartials) {
    for (int64_t l = 0; l < kPartials; ++l) {
      add(e + l, l);
    }
  }
  for (int64_t e = whole; e < size; ++e) {
    add(e, 0);
  }
  tally->sum += (sum[0] + sum[1]) + (sum[2] + sum[3]);
  tally->smallest = std::min({tally->smallest, smallest[0], smallest[1], smallest[2], smallest[3]});
  tally->certain += (certain[0] + certain[1]) + (certain[2] + certain[3]);
}

// scale[i] = c of column i; 0 where all edges are taken. `inverse_pi` is null where all pi are 1.
void solve_all(const Edges& edges, const double* inverse_pi, int64_t fanout, std::vector<double>* scale) {
  const auto num_columns = static_cast<int64_t>(edges.first.size());
  parallel_for(num_columns, kColumnsPerShare, [&](int64_t begin, int64_t end) {
    std::vector<double> inverse;
    for (int64_t i = begin; i < end; ++i) {
      const auto column = static_cast<size_t>(i);
      const int64_t degree = edges.degree(column);
      if (degree <= fanout) {
        (*scale)[column] = 0.0;
        continue;
      }
      if (inverse_pi == nullptr) {
        (*scale)[column] = first_scale(degree, fanout);
        continue;
      }
      if (static_cast<int64_t>(inverse.size()) < degree) {
        inverse.resize(static_cast<size_t>(degree));
      }
      const uint32_t* const source = edges.source.data() + edges.ends[column];
      for (int64_t e = 0; e < degree; ++e) {
        inverse[static_cast<size_t>(e)] = inverse_pi[source[e]];
      }
      (*scale)[column] = solve_column(degree, fanout, [&](double c) {
        ColumnTally tally{0.0, kInfinity, 0};
        for (int64_t e = 0; e < degree; e += kSumBlock) {
          tally_block(inverse.data() + e, std::min(kSumBlock, degree - e), c, &tally);
        }
        return tally;
      });
    }
  });
}

// What the rounds end with: of each source 1 / pi and r / pi, of each column its c.
struct Importance {
  std::vector<double> inverse_pi;
  std::vector<double> threshold;
  std::vector<double> scale;
};

// r_u / pi_u of each source.
void write_thresholds(const std::vector<int64_t>& ids, uint64_t key, const std::vector<double>& inverse_pi,
                      std::vector<double>* threshold) {
  WordBlock block;
  for (size_t first = 0; first < ids.size(); first += kWordBlock) {
    const size_t size = std::min<size_t>(kWordBlock, ids.size() - first);
    for (size_t u = 0; u < size; ++u) {
      block.low[u] = static_cast<uint32_t>(ids[first + u]);
      block.high[u] = static_cast<uint32_t>(static_cast<uint64_t>(ids[first + u]) >> 32);
    }
    make_words64(&block, static_cast<int64_t>(size), key);
    for (size_t u = 0; u < size; ++u) {
      (*threshold)[first + u] = labor_threshold(block.word[u], inverse_pi[first + u]);
    }
  }
}

Importance importance(const Edges& edges, int64_t fanout, int64_t rounds, uint64_t key) {
  const size_t num_sources = edges.ids.size();
  Importance found{std::vector<double>(num_sources, 1.0), std::vector<double>(num_sources),
                   std::vector<double>(edges.first.size())};
  std::vector<double>& most_scale = found.threshold;  // until the rounds are done
  solve_all(edges, nullptr, fanout, &found.scale);
  for (int64_t round = 0; round < rounds; ++round) {
    std::fill(most_scale.begin(), most_scale.end(), 0.0);
    for (size_t i = 0; i < found.scale.size(); ++i) {
      for (int64_t e = edges.ends[i]; e < edges.ends[i + 1]; ++e) {
        const uint32_t u = edges.source[static_cast<size_t>(e)];
        most_scale[u] = std::max(most_scale[u], offered_scale(found.scale[i], found.inverse_pi[u]));
      }
    }
    for (size_t u = 0; u < num_sources; ++u) {
      found.inverse_pi[u] = next_inverse(found.inverse_pi[u], most_scale[u]);
    }
    solve_all(edges, found.inverse_pi.data(), fanout, &found.scale);
  }
  write_thresholds(edges.ids, key, found.inverse_pi, &found.threshold);
  return found;
}

using LaborResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename id_t>
LaborResult draw(const Edges& edges, ScalarType dtype, int64_t fanout, int64_t rounds, uint64_t key) {
  const Importance found = importance(edges, fanout, rounds, key);
  const auto num_columns = static_cast<int64_t>(edges.first.size());
  const Tensor offsets = empty_cpu({num_columns + 1}, ScalarType::Long);
  auto* const offset = mutable_data<int64_t>(offsets);
  const Tensor taken_edges = empty_cpu({edges.ends.back()}, ScalarType::Int);  // their bits are unsigned
  auto* const taken = reinterpret_cast<uint32_t*>(mutable_data<int32_t>(taken_edges));
  int64_t total = 0;
  offset[0] = 0;
  for (size_t i = 0; i < found.scale.size(); ++i) {
    const double scale = found.scale[i] == 0.0 ? kInfinity : found.scale[i];
    for (int64_t e = edges.ends[i]; e < edges.ends[i + 1]; ++e) {  // nothing branches on a number
      taken[total] = static_cast<uint32_t>(e);
      total += found.threshold[edges.source[static_cast<size_t>(e)]] < scale;
    }
    offset[i + 1] = total;
  }
  const Tensor neighbors = empty_cpu({total}, dtype);
  const Tensor positions = empty_cpu({total}, ScalarType::Long);
  const Tensor weights = empty_cpu({total}, ScalarType::Float);
  auto* const neighbor = mutable_data<id_t>(neighbors);
  auto* const position = mutable_data<int64_t>(positions);
  auto* const weight = mutable_data<float>(weights);
  parallel_for(num_columns, kColumnsPerShare, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto column = static_cast<size_t>(i);
      for (int64_t at = offset[i]; at < offset[i + 1]; ++at) {
        const uint32_t u = edges.source[taken[at]];
        neighbor[at] = static_cast<id_t>(edges.ids[u]);
        position[at] = edges.position(column, taken[at]);
        weight[at] = labor_weight(found.scale[column], found.inverse_pi[u], edges.degree(column));
      }
    }
  });
  return {offsets, neighbors, positions, weights};
}

LaborResult sample_labor_importance(const Tensor& indptr, const Tensor& indices, const Tensor& seeds, int64_t num_src,
                                    int64_t fanout, int64_t rounds, int64_t key, const std::optional<Tensor>& exclude) {
  check_seeds(indptr, indices, seeds);
  CHECK_ARG(fanout >= 1 && fanout < (int64_t{1} << 28), "fanout must be 1 to 2^28 - 1, got ", fanout);
  CHECK_ARG(rounds >= 0, "rounds must be at least 0, got ", rounds);
  CHECK_ARG(num_src >= 0, "num_src must not be negative, got ", num_src);
  check_columns(indptr, seeds, indices.numel());
  const int64_t* const excluded = optional_exclude(exclude);
  const int64_t num_excluded = exclude.has_value() ? exclude->numel() : 0;
  return dispatch_ids(indices, [&](auto id) {
    using id_t = decltype(id);
    const auto* const sources = const_data<id_t>(indices);
    const Edges edges = gather_edges(const_data<int64_t>(indptr), sources, const_data<id_t>(seeds), seeds.numel(), num_src,
                                     excluded, num_excluded);
    return draw<id_t>(edges, id_type<id_t>(), fanout, rounds, static_cast<uint64_t>(key));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "sample_labor_importance", &sample_labor_importance); }

}  // namespace gnnsys
