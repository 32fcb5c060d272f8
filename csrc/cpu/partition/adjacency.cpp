#include "cpu/partition/adjacency.h"

#include <limits>

namespace gnnsys::partition {

Adjacency::Adjacency(const std::vector<Tensor>& indptr, const std::vector<Tensor>& indices,
                     const std::vector<Tensor>& weight, const std::vector<int64_t>& offsets, int64_t num_nodes) {
  CHECK_ARG(num_nodes >= 0 && num_nodes < std::numeric_limits<int32_t>::max(),
            "num_nodes must be below 2^31 to be partitioned in memory, got ", num_nodes);
  num_nodes_ = static_cast<int32_t>(num_nodes);
  CHECK_ARG(indptr.size() == indices.size() && offsets.size() == 3 * indptr.size() &&
                (weight.empty() || weight.size() == indptr.size()),
            "indptr, indices, weight and offsets (three per list) must describe the same lists");
  for (size_t i = 0; i < indptr.size(); ++i) {
    check_csc(indptr[i], indices[i]);
    check_monotone(indptr[i]);
    check_dtype(indices[i], ScalarType::Int, "indices");
    const int64_t row = offsets[3 * i];
    const int64_t column = offsets[3 * i + 1];
    const int64_t num_columns = offsets[3 * i + 2];
    const int64_t num_rows = indptr[i].numel() - 1;
    CHECK_ARG(row >= 0 && row <= num_nodes - num_rows, "a list of ", num_rows, " rows from ", row, " on does not fit ",
              num_nodes, " nodes");
    CHECK_ARG(column >= 0 && num_columns >= 0 && column <= num_nodes - num_columns, "a list of ", num_columns,
              " columns from ", column, " on does not fit ", num_nodes, " nodes");
    check_id_range(indices[i], num_columns, "indices");
    const int32_t* weights = nullptr;
    if (!weight.empty()) {
      check_vector(weight[i], "weight");
      check_dtype(weight[i], ScalarType::Int, "weight");
      CHECK_ARG(weight[i].numel() == indices[i].numel(), "weight must have one entry per index");
      weights = const_data<int32_t>(weight[i]);
    }
    lists_.push_back({const_data<int64_t>(indptr[i]), const_data<int32_t>(indices[i]), weights,
                      static_cast<int32_t>(row), static_cast<int32_t>(row + num_rows),
                      static_cast<int32_t>(column)});
  }
}

NodeWeights node_weights_of(const Tensor& weights, int64_t num_nodes) {
  check_contiguous(weights, "weights");
  check_dtype(weights, ScalarType::Long, "weights");
  CHECK_ARG(weights.dim() == 2 && weights.size(0) == num_nodes && weights.size(1) >= 1,
            "weights must be [num_nodes, num_constraints] with at least one constraint");
  const auto* const data = const_data<int64_t>(weights);
  std::vector<int64_t> left(static_cast<size_t>(weights.size(1)), kMostWeight);  // sums of any nodes stay below it
  for (int64_t v = 0; v < num_nodes; ++v) {
    for (size_t c = 0; c < left.size(); ++c) {
      const int64_t weight = data[v * static_cast<int64_t>(left.size()) + static_cast<int64_t>(c)];
      CHECK_ARG(weight >= 0 && weight <= left[c], "weights must not be negative and add up to at most 2^62, node ", v,
                " has ", weight);
      left[c] -= weight;
    }
  }
  return {data, static_cast<int32_t>(weights.size(1))};
}

const int64_t* limits_of(const Tensor& limits, const NodeWeights& weights) {
  check_vector(limits, "limits");
  check_dtype(limits, ScalarType::Long, "limits");
  CHECK_ARG(limits.numel() == weights.num_constraints, "limits must have one entry per constraint");
  const auto* const data = const_data<int64_t>(limits);
  for (int64_t c = 0; c < limits.numel(); ++c) {
    CHECK_ARG(data[c] >= 0, "limits must not be negative, got ", data[c]);
  }
  return data;
}

}  // namespace gnnsys::partition
