// LABOR-i's arithmetic, for the host and for devices (cpu/labor_importance.cpp explains it): IEEE + - * / in float64, never
// contracted, in one order of addition, so both have the same bits.
//
// The sum over a column: blocks of kSumBlock edges in order. In a block edge e goes to partial sum e % kPartials, the
// last edges that do not fill kPartials to the first; (s0 + s1) + (s2 + s3) is the block's. Edges that are left out add 0.
#pragma once

#include "common/draw.h"

#include <cstdint>

namespace gnnsys {

constexpr int64_t kSumBlock = 256;  // edges
constexpr int kPartials = 4;
constexpr uint32_t kNoSource = 0xFFFFFFFFu;  // beside the numbers of sources
constexpr int64_t kMostLaborEdges = kNoSource - 1;  // in-edges of all seeds of a call

// What the sum over a column of 1 / p shall be: the variance that `fanout` uniform draws have.
GNNSYS_HD double labor_target(int64_t degree, int64_t fanout) {
  const auto d = static_cast<double>(degree);
  return mul_rn(d, d) / static_cast<double>(fanout);
}

// c of a column whose sources all have pi = 1: no edge is certain, and the sum is the degree, exactly.
GNNSYS_HD double first_scale(int64_t degree, int64_t fanout) {
  return static_cast<double>(degree) / labor_target(degree, fanout);
}

// One look at all 1 / pi of a column: an edge is certain where its own is below c.
struct ColumnTally {
  double sum = 0.0;       // over the edges that are not certain
  double smallest = 0.0;  // among them
  int64_t certain = 0;
};

// c of a column of more than `fanout` edges; look(c) gives its ColumnTally. A look that would find no more edges certain
// than the one before it (fewer by rounding alone) is not taken.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <typename Look>
GNNSYS_HD double solve_column(int64_t degree, int64_t fanout, const Look& look) {
  const double target = labor_target(degree, fanout);
  double c = 0.0;
  int64_t num_certain = -1;
  while (true) {
    const ColumnTally tally = look(c);
    if (tally.certain <= num_certain || tally.certain == degree) {
      return c;
    }
    num_certain = tally.certain;
    c = tally.sum / add_rn(target, -static_cast<double>(tally.certain));
    if (tally.smallest >= c) {
      return c;
    }
  }
}

// What a column with scale c (0: all edges are taken, each with c * pi = 1) offers to a source in a round.
GNNSYS_HD double offered_scale(double scale, double inverse) { return scale == 0.0 ? inverse : scale; }

// 1 / pi of a source after a round, from 1 / pi before it and the largest scale that it was offered. Division is monotone,
// so this is 1 / the largest c * pi of its edges.
GNNSYS_HD double next_inverse(double inverse, double most_scale) { return 1.0 / (most_scale / inverse); }

// r_u / pi_u: the edge is taken where this is below c. r_u is the 53 high bits of the source's word, below 1, so edges
// with c * pi >= 1 always are.
GNNSYS_HD double labor_threshold(uint64_t word, double inverse) {
  return mul_rn(mul_rn(static_cast<double>(static_cast<int64_t>(word >> 11)), 0x1p-53), inverse);
}

// 1 / (degree * probability). scale is 0 where the column takes all.
GNNSYS_HD float labor_weight(double scale, double inverse, int64_t degree) {
  const double p = scale == 0.0 ? 1.0 : scale / inverse;
  return static_cast<float>(1.0 / mul_rn(p < 1.0 ? p : 1.0, static_cast<double>(degree)));
}

}  // namespace gnnsys
