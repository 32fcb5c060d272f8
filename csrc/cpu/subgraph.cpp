// Parts of a CSC (all in-edges of some nodes, all edges among some nodes) and the breadth-first order of its nodes.
// The two parts cost work in proportion to what they hold, not to the whole graph.
#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kColumnsPerChunk = 256;

// A position in a graph of num_edges edges has the dtype of the indices, or int64 where it must.
ScalarType position_type(const Tensor& indices) {
  return indices.numel() <= std::numeric_limits<int32_t>::max() ? indices.scalar_type() : ScalarType::Long;
}

// indptr of a part from degree(i) of its columns.
template <typename Degree>
Tensor indptr_from(int64_t num_columns, const Degree& degree) {
  const Tensor out = empty_cpu({num_columns + 1}, ScalarType::Long);
  auto* const indptr = mutable_data<int64_t>(out);
  indptr[0] = 0;
  parallel_for_dynamic(num_columns, kColumnsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      indptr[i + 1] = degree(i);
    }
  });
  for (int64_t i = 0; i < num_columns; ++i) {
    indptr[i + 1] += indptr[i];
  }
  return out;
}

template <typename id_t, typename node_t, typename pos_t>
void copy_columns(const int64_t* indptr, const id_t* indices, const node_t* nodes, int64_t num_nodes,
                  const int64_t* out_indptr, id_t* neighbors, pos_t* positions) {
  parallel_for_dynamic(num_nodes, kColumnsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t at = out_indptr[i];
      for (int64_t p = indptr[nodes[i]]; p < indptr[nodes[i] + 1]; ++p, ++at) {
        neighbors[at] = indices[p];
        positions[at] = static_cast<pos_t>(p);
      }
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> in_subgraph(const Tensor& indptr, const Tensor& indices, const Tensor& nodes) {
  check_csc(indptr, indices);
  check_ids(nodes, "nodes");
  check_id_range(nodes, indptr.numel() - 1, "nodes");
  check_columns(indptr, nodes, indices.numel());
  const auto* from = const_data<int64_t>(indptr);
  return dispatch_ids(nodes, [&](auto node) {
    const auto* columns = const_data<decltype(node)>(nodes);
    const Tensor out_indptr =
        indptr_from(nodes.numel(), [&](int64_t i) { return from[columns[i] + 1] - from[columns[i]]; });
    const int64_t num_edges = const_data<int64_t>(out_indptr)[nodes.numel()];
    const Tensor neighbors = empty_cpu({num_edges}, indices.scalar_type());
    const Tensor positions = empty_cpu({num_edges}, position_type(indices));
    dispatch_ids(indices, [&](auto id) {
      using id_t = decltype(id);
      dispatch_ids(positions, [&](auto pos) {
        copy_columns(from, const_data<id_t>(indices), columns, nodes.numel(), const_data<int64_t>(out_indptr),
                     mutable_data<id_t>(neighbors), mutable_data<decltype(pos)>(positions));
      });
    });
    return std::tuple<Tensor, Tensor, Tensor>{out_indptr, neighbors, positions};
  });
}

// Node -> the first place it has in a list, by open addressing at most half full. 24 to 48 bytes per node.
class FirstPlace {
 public:
  template <typename node_t>
  FirstPlace(const node_t* nodes, int64_t size) {
    int bits = 1;
    while ((int64_t{1} << bits) < 2 * size) {
      ++bits;
    }
    shift_ = 64 - bits;
    slots_.assign(size_t{1} << bits, Slot{-1, -1});
    for (int64_t i = 0; i < size; ++i) {
      Slot& slot = slots_[find(nodes[i])];
      if (slot.node < 0) {
        slot = {static_cast<int64_t>(nodes[i]), i};
      }
    }
  }

  // -1 when the node is not in the list.
  int64_t operator()(int64_t node) const { return slots_[find(node)].place; }

 private:
  struct Slot {
    int64_t node;
    int64_t place;
  };

  size_t find(int64_t node) const {
    size_t at = (static_cast<uint64_t>(node) * 0x9E3779B97F4A7C15u) >> shift_;
    while (slots_[at].node >= 0 && slots_[at].node != node) {
      at = (at + 1) & (slots_.size() - 1);
    }
    return at;
  }

  int shift_;
  std::vector<Slot> slots_;
};

template <typename id_t, typename node_t>
std::tuple<Tensor, Tensor, Tensor> induce(const Tensor& indptr, const Tensor& indices, const node_t* columns,
                                          int64_t num_columns, const FirstPlace& place) {
  const auto* from = const_data<int64_t>(indptr);
  const auto* rows = const_data<id_t>(indices);
  const Tensor out_indptr = indptr_from(num_columns, [&](int64_t i) {
    int64_t degree = 0;
    for (int64_t p = from[columns[i]]; p < from[columns[i] + 1]; ++p) {
      degree += place(rows[p]) >= 0;
    }
    return degree;
  });
  const auto* to = const_data<int64_t>(out_indptr);
  const Tensor local = empty_cpu({to[num_columns]}, indices.scalar_type());
  const Tensor positions = empty_cpu({to[num_columns]}, position_type(indices));
  dispatch_ids(positions, [&](auto pos) {
    auto* const local_data = mutable_data<id_t>(local);
    auto* const position_data = mutable_data<decltype(pos)>(positions);
    parallel_for_dynamic(num_columns, kColumnsPerChunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        int64_t at = to[i];
        for (int64_t p = from[columns[i]]; p < from[columns[i] + 1]; ++p) {
          if (const int64_t row = place(rows[p]); row >= 0) {
            local_data[at] = static_cast<id_t>(row);
            position_data[at++] = static_cast<decltype(pos)>(p);
          }
        }
      }
    });
  });
  return {out_indptr, local, positions};
}

// src_nodes: the list that sources are looked up in, nodes itself when it is not given.
std::tuple<Tensor, Tensor, Tensor> induced_subgraph(const Tensor& indptr, const Tensor& indices, const Tensor& nodes,
                                                    const std::optional<Tensor>& src_nodes) {
  check_csc(indptr, indices);
  check_ids(nodes, "nodes");
  check_id_range(nodes, indptr.numel() - 1, "nodes");
  check_columns(indptr, nodes, indices.numel());
  const Tensor& sources = src_nodes.has_value() ? *src_nodes : nodes;
  check_ids(sources, "src_nodes");
  check_id_range(sources, std::numeric_limits<int64_t>::max(), "src_nodes");
  const FirstPlace place = dispatch_ids(
      sources, [&](auto node) { return FirstPlace(const_data<decltype(node)>(sources), sources.numel()); });
  return dispatch_ids(nodes, [&](auto node) {
    using node_t = decltype(node);
    return dispatch_ids(indices, [&](auto id) {
      return induce<decltype(id)>(indptr, indices, const_data<node_t>(nodes), nodes.numel(), place);
    });
  });
}

template <typename id_t, typename root_t>
void breadth_first(const int64_t* indptr, const id_t* indices, int64_t num_nodes, const root_t* roots,
                   int64_t num_roots, id_t* order) {
  std::vector<bool> seen(num_nodes, false);
  int64_t reached = 0;
  const auto visit = [&](int64_t node) {
    if (!seen[node]) {
      seen[node] = true;
      order[reached++] = static_cast<id_t>(node);
    }
  };
  int64_t next = 0;  // order[next:reached] is the queue
  const auto drain = [&] {
    for (; next < reached; ++next) {
      for (int64_t p = indptr[order[next]]; p < indptr[order[next] + 1]; ++p) {
        visit(indices[p]);
      }
    }
  };
  for (int64_t i = 0; i < num_roots; ++i) {
    visit(roots[i]);
  }
  drain();
  for (int64_t node = 0; node < num_nodes && reached < num_nodes; ++node) {
    visit(node);
    drain();
  }
}

Tensor bfs_order(const Tensor& indptr, const Tensor& indices, const Tensor& roots) {
  check_csc(indptr, indices);
  check_monotone(indptr);
  const int64_t num_nodes = indptr.numel() - 1;
  check_ids(roots, "roots");
  check_id_range(roots, num_nodes, "roots");
  check_id_range(indices, num_nodes, "indices");
  const Tensor order = empty_cpu({num_nodes}, indices.scalar_type());
  dispatch_ids(indices, [&](auto id) {
    using id_t = decltype(id);
    dispatch_ids(roots, [&](auto root) {
      breadth_first(const_data<int64_t>(indptr), const_data<id_t>(indices), num_nodes,
                    const_data<decltype(root)>(roots), roots.numel(), mutable_data<id_t>(order));
    });
  });
  return order;
}

}  // namespace
}  // namespace gnnsys

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) {
  REGISTER_OP(m, "in_subgraph", &gnnsys::in_subgraph);
  REGISTER_OP(m, "induced_subgraph", &gnnsys::induced_subgraph);
  REGISTER_OP(m, "bfs_order", &gnnsys::bfs_order);
}
