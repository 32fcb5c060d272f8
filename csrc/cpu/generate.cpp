// Made-up graphs: RMAT edges, edges with planted communities, class features, random permutations.
//
// Every edge, row and id is a pure function of (key, its index) through Philox, so a graph is the same for any number
// of threads. Edges use integer and exact floating-point arithmetic only and are the same on every machine too.
// Work: a Philox block per 16 levels of an RMAT edge, one per planted edge, one per four features.
#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/philox.h"
#include "common/register.h"
#include "common/tensors.h"

#include <cmath>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kEdgeGrain = 1 << 12;  // edges per chunk: its ids stay in the L1 cache

// Random words at (index, purpose): a purpose is a small number that keeps two uses of one index apart.
Words words_at(int64_t index, uint32_t purpose, int64_t key) {
  return philox4x32(static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), purpose, 0,
                    static_cast<uint64_t>(key));
}

// [0, n) from 32 random bits; the bias of at most n / 2^32 does not matter in a made-up graph.
int64_t below(uint32_t word, int64_t n) { return static_cast<int64_t>((static_cast<uint64_t>(word) * n) >> 32); }

void check_edge_outputs(const Tensor& src, const Tensor& dst) {
  check_ids(src, "src");
  check_ids(dst, "dst");
  CHECK_ARG(src.scalar_type() == dst.scalar_type() && src.numel() == dst.numel(),
            "src and dst must have one dtype and one length");
}

// A bijection of [0, n): a Feistel network over the next even power of two, walked until it lands inside.
class Bijection {
 public:
  Bijection(int64_t n, int64_t key) : n_(n), key_(key) {
    while ((int64_t{1} << (2 * half_)) < n) {
      ++half_;
    }
    mask_ = (uint64_t{1} << half_) - 1;
  }

  int64_t operator()(int64_t i) const {
    uint64_t value = static_cast<uint64_t>(i);
    do {
      value = encrypt(value);
    } while (value >= static_cast<uint64_t>(n_));
    return static_cast<int64_t>(value);
  }

 private:
  uint64_t encrypt(uint64_t value) const {
    uint64_t left = value >> half_, right = value & mask_;
    for (uint32_t round = 0; round < 4; ++round) {
      const uint64_t mixed = words_at(static_cast<int64_t>(right), round, key_).w[0];
      left ^= mixed & mask_;
      std::swap(left, right);
    }
    return (left << half_) | right;
  }

  int64_t n_;
  int64_t key_;
  int half_ = 1;  // bits per side; at most 32 for any n that has a tensor
  uint64_t mask_;
};

void generate_permutation(const Tensor& out, int64_t key) {
  check_ids(out, "out");
  const Bijection bijection(out.numel(), key);
  dispatch_ids(out, [&](auto id) {
    auto* const ids = mutable_data<decltype(id)>(out);
    parallel_for(out.numel(), kEdgeGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        ids[i] = static_cast<decltype(id)>(bijection(i));
      }
    });
  });
}

// places[e] -> order[places[e]], in a loop of its own so that its cache misses overlap.
template <typename id_t>
void relabel(id_t* places, int64_t begin, int64_t end, const id_t* order) {
  for (int64_t e = begin; e < end; ++e) {
    places[e] = order[places[e]];
  }
}

// Chakrabarti et al., SDM 2004: at each level an edge falls into quadrant a | b over c | d. Four levels at once: one
// of 256 cells by the alias method (Walker 1977), the word's low byte picking a cell and the rest cell or alias.
class Quadrants {
 public:
  static constexpr int kLevels = 4;
  static constexpr int kCells = 1 << (2 * kLevels);

  Quadrants(double a, double b, double c) {
    const double corner[4] = {a, b, c, 1 - a - b - c};
    double weight[kCells];  // times kCells: 1 is the average
    for (int cell = 0; cell < kCells; ++cell) {
      weight[cell] = kCells;
      for (int level = 0; level < kLevels; ++level) {
        const int quadrant = (cell >> (2 * level)) & 3;
        weight[cell] *= corner[quadrant];
        row_bits_[cell] |= static_cast<uint8_t>((quadrant >> 1) << level);
        column_bits_[cell] |= static_cast<uint8_t>((quadrant & 1) << level);
      }
      alias_[cell] = static_cast<uint8_t>(cell);
      keep_[cell] = 1u << 24;
    }
    std::vector<int> small, large;
    for (int cell = 0; cell < kCells; ++cell) {
      (weight[cell] < 1 ? small : large).push_back(cell);
    }
    while (!small.empty() && !large.empty()) {
      const int low = small.back(), high = large.back();
      small.pop_back();
      keep_[low] = static_cast<uint32_t>(weight[low] * 0x1p24);
      alias_[low] = static_cast<uint8_t>(high);
      weight[high] -= 1 - weight[low];
      if (weight[high] < 1) {
        large.pop_back();
        small.push_back(high);
      }
    }
  }

  // Appends kLevels bits to row and to column.
  void descend(uint32_t word, uint64_t& row, uint64_t& column) const {
    const uint32_t drawn = word & (kCells - 1);
    const uint32_t cell = (word >> 8) < keep_[drawn] ? drawn : alias_[drawn];
    row = (row << kLevels) | row_bits_[cell];
    column = (column << kLevels) | column_bits_[cell];
  }

 private:
  uint32_t keep_[kCells];
  uint8_t alias_[kCells];
  uint8_t row_bits_[kCells] = {};
  uint8_t column_bits_[kCells] = {};
};

// order maps a place in the RMAT matrix to a node id, so that hubs are not the first ids. The matrix has 2^levels
// >= num_nodes rows, cut into num_nodes runs as even as they get.
void generate_rmat(const Tensor& src, const Tensor& dst, const Tensor& order, double a, double b, double c,
                   int64_t key) {
  check_edge_outputs(src, dst);
  check_ids(order, "order");
  check_dtype(order, src.scalar_type(), "order");
  const int64_t num_nodes = order.numel();
  CHECK_ARG(num_nodes > 0 || src.numel() == 0, "order must name at least one node");
  CHECK_ARG(num_nodes <= int64_t{1} << 32, "RMAT has at most 2^32 nodes, got ", num_nodes);
  CHECK_ARG(a >= 0 && b >= 0 && c >= 0 && a + b + c <= 1 + 1e-9, "a, b and c must be >= 0 with a sum of at most 1");
  const Quadrants quadrants(a, b, c);
  int levels = 0;
  while ((int64_t{1} << levels) < num_nodes) {
    levels += Quadrants::kLevels;
  }
  const auto place = [&](uint64_t cell) { return (cell * static_cast<uint64_t>(num_nodes)) >> levels; };
  dispatch_ids(src, [&](auto id) {
    using id_t = decltype(id);
    auto* const from = mutable_data<id_t>(src);
    auto* const to = mutable_data<id_t>(dst);
    parallel_for_dynamic(src.numel(), kEdgeGrain, [&](int64_t begin, int64_t end) {
      for (int64_t e = begin; e < end; ++e) {
        uint64_t row = 0, column = 0;
        for (int level = 0; level < levels; level += 4 * Quadrants::kLevels) {
          const Words words = words_at(e, static_cast<uint32_t>(level), key);
          const int used = std::min(4, (levels - level) / Quadrants::kLevels);
          for (int i = 0; i < used; ++i) {
            quadrants.descend(words.w[i], row, column);
          }
        }
        from[e] = static_cast<id_t>(place(row));
        to[e] = static_cast<id_t>(place(column));
      }
      relabel(from, begin, end, const_data<id_t>(order));
      relabel(to, begin, end, const_data<id_t>(order));
    });
  });
}

// Nodes of one type in num_classes communities of equal size, class after class; inside a class node i of n is drawn
// as floor(n u^skew), u uniform: skew 1 makes all equally likely, skew s > 1 a power law with exponent 1 + s / (s - 1).
struct Community {
  int64_t num_nodes;
  int64_t num_classes;
  int64_t skew;

  int64_t begin(int64_t c) const { return num_nodes * c / num_classes; }

  int64_t draw(int64_t c, uint32_t word) const {
    const double u = word * 0x1p-32;
    double power = u;
    for (int64_t i = 1; i < skew; ++i) {
      power *= u;
    }
    const int64_t size = begin(c + 1) - begin(c);
    return begin(c) + static_cast<int64_t>(static_cast<double>(size) * power);
  }
};

// The source's class: the destination's own with probability `same` / 2^32, otherwise one of the others.
int64_t source_class(uint32_t word, int64_t dst_class, int64_t num_classes, uint64_t same) {
  if (word < same) {
    return dst_class;
  }
  const uint64_t others = (uint64_t{1} << 32) - same;  // words that choose another class
  const auto other = static_cast<int64_t>((word - same) * static_cast<uint64_t>(num_classes - 1) / others);
  return other < dst_class ? other : other + 1;
}

constexpr uint32_t kLoopRetries = 16;

// Edges between communities. Without `loops` source and destination are of one type, with one order.
void generate_planted(const Tensor& src, const Tensor& dst, const Tensor& src_order, const Tensor& dst_order,
                      int64_t num_classes, double homophily, int64_t src_skew, int64_t dst_skew, bool loops,
                      int64_t key) {
  check_edge_outputs(src, dst);
  check_ids(src_order, "src_order");
  check_ids(dst_order, "dst_order");
  check_dtype(src_order, src.scalar_type(), "src_order");
  check_dtype(dst_order, src.scalar_type(), "dst_order");
  CHECK_ARG(num_classes >= 1 && src_order.numel() >= num_classes && dst_order.numel() >= num_classes,
            "num_classes must be between 1 and the number of nodes, got ", num_classes, " for ", src_order.numel(),
            " and ", dst_order.numel(), " nodes");
  CHECK_ARG(homophily >= 0 && homophily <= 1, "homophily must be in [0, 1], got ", homophily);
  CHECK_ARG(src_skew >= 1 && dst_skew >= 1, "skew must be >= 1, got ", src_skew, " and ", dst_skew);
  const Community from{src_order.numel(), num_classes, src_skew}, to{dst_order.numel(), num_classes, dst_skew};
  const auto same = num_classes == 1 ? uint64_t{1} << 32 : static_cast<uint64_t>(homophily * 0x1p32);
  dispatch_ids(src, [&](auto id) {
    using id_t = decltype(id);
    auto* const src_data = mutable_data<id_t>(src);
    auto* const dst_data = mutable_data<id_t>(dst);
    parallel_for_dynamic(src.numel(), kEdgeGrain, [&](int64_t begin, int64_t end) {
      for (int64_t e = begin; e < end; ++e) {
        // A loop is drawn again; where a class is a single node it may stay one after all retries.
        int64_t src_place = 0, dst_place = 0;
        for (uint32_t attempt = 0; attempt < kLoopRetries; ++attempt) {
          const Words words = words_at(e, attempt, key);
          const int64_t dst_class = below(words.w[0], num_classes);
          src_place = from.draw(source_class(words.w[2], dst_class, num_classes, same), words.w[3]);
          dst_place = to.draw(dst_class, words.w[1]);
          if (loops || src_place != dst_place) {
            break;
          }
        }
        src_data[e] = static_cast<id_t>(src_place);
        dst_data[e] = static_cast<id_t>(dst_place);
      }
      relabel(src_data, begin, end, const_data<id_t>(src_order));
      relabel(dst_data, begin, end, const_data<id_t>(dst_order));
    });
  });
}

// Two independent standard normals from two words (Box and Muller).
struct NormalPair {
  float first;
  float second;
};

NormalPair normal_pair(uint32_t word_a, uint32_t word_b) {
  const float radius = std::sqrt(-2.0f * std::log((static_cast<float>(word_a >> 8) + 0.5f) * 0x1p-24f));
  const float angle = static_cast<float>(word_b >> 8) * (0x1p-24f * 6.28318530717958647692f);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

// rows[i] = mean[label[i]] + noise * standard normal.
void generate_features(const Tensor& rows, const Tensor& label, const Tensor& mean, double noise, int64_t key) {
  check_contiguous(rows, "rows");
  check_contiguous(mean, "mean");
  check_dtype(rows, ScalarType::Float, "rows");
  check_dtype(mean, ScalarType::Float, "mean");
  check_vector(label, "label");
  check_dtype(label, ScalarType::Long, "label");
  CHECK_ARG(rows.dim() == 2 && mean.dim() == 2 && rows.size(1) == mean.size(1) && rows.size(0) == label.numel(),
            "rows must be [num_nodes, dim], label [num_nodes] and mean [num_classes, dim]");
  check_id_range(label, mean.size(0), "label");
  const int64_t dim = rows.size(1);
  auto* const out = mutable_data<float>(rows);
  const auto* means = const_data<float>(mean);
  const auto* labels = const_data<int64_t>(label);
  const auto scale = static_cast<float>(noise);
  parallel_for(rows.size(0), 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* const center = means + labels[i] * dim;
      for (int64_t j = 0; j < dim; j += 4) {
        const Words words = words_at(i, static_cast<uint32_t>(j / 4), key);
        const NormalPair p = normal_pair(words.w[0], words.w[1]), q = normal_pair(words.w[2], words.w[3]);
        const float normals[4] = {p.first, p.second, q.first, q.second};
        for (int64_t k = j; k < std::min(j + 4, dim); ++k) {
          out[i * dim + k] = center[k] + scale * normals[k - j];
        }
      }
    }
  });
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "generate_permutation", &gnnsys::generate_permutation);
  REGISTER_OP(m, "generate_rmat", &gnnsys::generate_rmat);
  REGISTER_OP(m, "generate_planted", &gnnsys::generate_planted);
  REGISTER_OP(m, "generate_features", &gnnsys::generate_features);
}
