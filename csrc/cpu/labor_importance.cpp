// sample_labor_importance: LABOR-i (Balin and Catalyurek 2023, section 3.2), all in-edges of the seeds looked at together.
//
// Edge u -> v is taken where r_u < p, p = min(1, c_v * pi_u). c_v solves sum over u of 1 / min(1, c_v * pi_u) =
// degree(v)^2 / k. A round sets pi_u to the largest c_v * pi_u of its edges, from pi = 1 on. c_v is found without a sort:
// the edges that are certain at c leave the sum, which makes c larger, until no more become so. Sums are in the order of
// the edges, so results do not depend on threads. Work: a few passes over the edges per round, 12 bytes for each.
#include "common/draw.h"
#include "common/id_range.h"
#include "common/parallel.h"
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
  CHECK_ARG(num_edges < std::numeric_limits<uint32_t>::max(), "seeds have 2^32 - 1 in-edges or more: take smaller batches");
  edges.source.resize(static_cast<size_t>(num_edges));
  const auto number_all = [&](auto&& number) {
    for (size_t i = 0; i < static_cast<size_t>(num_seeds); ++i) {
      for (int64_t e = edges.ends[i]; e < edges.ends[i + 1]; ++e) {
        const auto id = static_cast<int64_t>(indices[edges.position(i, e)]);
        CHECK_ARG(id >= 0 && id < num_src, "sources must be in [0, ", num_src, "), got ", id);
        edges.source[static_cast<size_t>(e)] = number(id);
      }
    }
  };
  constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
  if (num_src <= kDenseIdsPerEdge * num_edges) {
    std::vector<uint32_t> known(static_cast<size_t>(num_src), kNone);
    number_all([&](int64_t id) {
      uint32_t& slot = known[static_cast<size_t>(id)];
      if (slot == kNone) {
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

// c of a column of more than k edges, from 1 / pi of its edges.
double solve(const double* inverse, int64_t degree, int64_t fanout) {
  const double target = static_cast<double>(degree) * static_cast<double>(degree) / static_cast<double>(fanout);
  double c = 0.0;
  int64_t num_certain = -1;
  while (true) {
    double sum[4] = {};
    int64_t certain = 0;
    int64_t e = 0;
    for (; e + 4 <= degree; e += 4) {
      for (int64_t l = 0; l < 4; ++l) {
        const double value = inverse[e + l];
        const bool is_certain = value < c;
        certain += is_certain;
        sum[l] += is_certain ? 0.0 : value;
      }
    }
    for (; e < degree; ++e) {
      certain += inverse[e] < c;
      sum[0] += inverse[e] < c ? 0.0 : inverse[e];
    }
    if (certain <= num_certain || certain == degree) {  // fewer than before by rounding alone
      return c;
    }
    num_certain = certain;
    c = ((sum[0] + sum[1]) + (sum[2] + sum[3])) / (target - static_cast<double>(certain));
  }
}

// scale[i] = c of column i; 0 where all edges are taken.
void solve_all(const Edges& edges, const std::vector<double>& inverse_pi, int64_t fanout, std::vector<double>* scale) {
  const auto num_columns = static_cast<int64_t>(edges.first.size());
  parallel_for(num_columns, kColumnsPerShare, [&](int64_t begin, int64_t end) {
    std::vector<double> inverse;
    for (int64_t i = begin; i < end; ++i) {
      const auto column = static_cast<size_t>(i);
      const int64_t degree = edges.degree(column);
      (*scale)[column] = 0.0;
      if (degree <= fanout) {
        continue;
      }
      if (static_cast<int64_t>(inverse.size()) < degree) {
        inverse.resize(static_cast<size_t>(degree));
      }
      const uint32_t* const source = edges.source.data() + edges.ends[column];
      for (int64_t e = 0; e < degree; ++e) {
        inverse[static_cast<size_t>(e)] = inverse_pi[source[e]];
      }
      (*scale)[column] = solve(inverse.data(), degree, fanout);
    }
  });
}

// 1 / pi after `rounds` rounds.
std::vector<double> importance(const Edges& edges, int64_t fanout, int64_t rounds) {
  std::vector<double> inverse_pi(edges.ids.size(), 1.0);
  std::vector<double> scale(edges.first.size());
  std::vector<double> largest(edges.ids.size());
  for (int64_t round = 0; round < rounds; ++round) {
    solve_all(edges, inverse_pi, fanout, &scale);
    std::fill(largest.begin(), largest.end(), 0.0);
    for (size_t i = 0; i < scale.size(); ++i) {
      for (int64_t e = edges.ends[i]; e < edges.ends[i + 1]; ++e) {
        const uint32_t u = edges.source[static_cast<size_t>(e)];
        const double product = scale[i] == 0.0 ? 1.0 : scale[i] / inverse_pi[u];
        largest[u] = std::max(largest[u], product);
      }
    }
    for (size_t u = 0; u < largest.size(); ++u) {
      inverse_pi[u] = 1.0 / largest[u];
    }
  }
  return inverse_pi;
}

// r_u of each source, in [0, 1]: the 63 high bits of its word.
std::vector<double> make_uniforms(const std::vector<int64_t>& ids, uint64_t key) {
  std::vector<double> uniform(ids.size());
  WordBlock block;
  for (size_t first = 0; first < ids.size(); first += kWordBlock) {
    const size_t size = std::min<size_t>(kWordBlock, ids.size() - first);
    for (size_t u = 0; u < size; ++u) {
      block.low[u] = static_cast<uint32_t>(ids[first + u]);
      block.high[u] = static_cast<uint32_t>(static_cast<uint64_t>(ids[first + u]) >> 32);
    }
    make_words64(&block, static_cast<int64_t>(size), key);
    for (size_t u = 0; u < size; ++u) {
      uniform[first + u] = static_cast<double>(static_cast<int64_t>(block.word[u] >> 1)) * 0x1p-63;
    }
  }
  return uniform;
}

using LaborResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename id_t>
LaborResult draw(const Edges& edges, const id_t* indices, ScalarType dtype, int64_t fanout, int64_t rounds, uint64_t key) {
  const std::vector<double> inverse_pi = importance(edges, fanout, rounds);
  const std::vector<double> uniform = make_uniforms(edges.ids, key);
  std::vector<double> scale(edges.first.size());
  solve_all(edges, inverse_pi, fanout, &scale);
  const auto num_columns = static_cast<int64_t>(edges.first.size());
  const Tensor offsets = empty_cpu({num_columns + 1}, ScalarType::Long);
  auto* const offset = mutable_data<int64_t>(offsets);
  std::vector<int64_t> positions;
  std::vector<float> weights;
  offset[0] = 0;
  for (size_t i = 0; i < scale.size(); ++i) {
    const auto degree = static_cast<double>(edges.degree(i));
    for (int64_t e = edges.ends[i]; e < edges.ends[i + 1]; ++e) {
      const uint32_t u = edges.source[static_cast<size_t>(e)];
      const double p = scale[i] == 0.0 ? 1.0 : scale[i] / inverse_pi[u];
      if (p >= 1.0 || uniform[u] < p) {
        positions.push_back(edges.position(i, e));
        weights.push_back(static_cast<float>(1.0 / (std::min(p, 1.0) * degree)));
      }
    }
    offset[i + 1] = static_cast<int64_t>(positions.size());
  }
  const auto total = static_cast<int64_t>(positions.size());
  const Tensor neighbors = empty_cpu({total}, dtype);
  const Tensor taken = empty_cpu({total}, ScalarType::Long);
  const Tensor weight = empty_cpu({total}, ScalarType::Float);
  std::copy(positions.begin(), positions.end(), mutable_data<int64_t>(taken));
  std::copy(weights.begin(), weights.end(), mutable_data<float>(weight));
  auto* const neighbor = mutable_data<id_t>(neighbors);
  for (int64_t e = 0; e < total; ++e) {
    neighbor[e] = indices[positions[static_cast<size_t>(e)]];
  }
  return {offsets, neighbors, taken, weight};
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
    return draw(edges, sources, id_type<id_t>(), fanout, rounds, static_cast<uint64_t>(key));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "sample_labor_importance", &sample_labor_importance); }

}  // namespace gnnsys
