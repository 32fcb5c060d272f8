// Which grouped seeds each piece of a hop's answers is for: read and checked alike for the host and for devices.
#pragma once

#include "common/check.h"
#include "common/tensors.h"

#include <algorithm>
#include <vector>

namespace gnnsys {

// Some of the grouped seeds, in order, are answered by the next of a piece's entries.
struct Segment {
  int64_t piece;
  int64_t first;
  int64_t size;
  int64_t first_seed = 0;  // in the piece
};

// The segments by first seed; together they must be all seeds, and each piece used up.
inline std::vector<Segment> read_segments(const std::vector<int64_t>& flat, const std::vector<Tensor>& counts,
                                   int64_t num_seeds) {
  CHECK_ARG(flat.size() % 3 == 0, "segments must be triples (piece, first, size)");
  std::vector<Segment> segments;
  std::vector<int64_t> used(counts.size(), 0);
  for (size_t s = 0; s < flat.size(); s += 3) {
    Segment segment{flat[s], flat[s + 1], flat[s + 2]};
    CHECK_ARG(segment.piece >= 0 && segment.piece < static_cast<int64_t>(counts.size()),
              "segments must name a piece of [0, ", counts.size(), "), got ", segment.piece);
    CHECK_ARG(segment.first >= 0 && segment.size >= 0 && segment.first <= num_seeds - segment.size,
              "segments must lie in [0, ", num_seeds, ")");
    segment.first_seed = used[static_cast<size_t>(segment.piece)];
    used[static_cast<size_t>(segment.piece)] += segment.size;
    if (segment.size > 0) {
      segments.push_back(segment);
    }
  }
  for (size_t k = 0; k < counts.size(); ++k) {
    CHECK_ARG(used[k] == counts[k].numel(), "piece ", k, " answers ", counts[k].numel(), " seeds, ", used[k],
              " are asked of it");
  }
  std::sort(segments.begin(), segments.end(), [](const Segment& a, const Segment& b) { return a.first < b.first; });
  int64_t covered = 0;
  for (const Segment& segment : segments) {
    CHECK_ARG(segment.first >= covered, "segments must not overlap, they do at seed ", segment.first);
    CHECK_ARG(segment.first == covered, "segments must cover ", num_seeds, " seeds, they do not cover ", covered);
    covered += segment.size;
  }
  CHECK_ARG(covered == num_seeds, "segments must cover ", num_seeds, " seeds, they cover ", covered);
  return segments;
}

}  // namespace gnnsys
