// What rows are made of, and what they are computed in. Half-precision rows are computed in float.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <type_traits>

namespace gnnsys {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// What rows of T are computed in.
template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Counts the features of a row: which neighbour has the largest value of each.
template <typename A>
using lane_t = std::conditional_t<std::is_same_v<A, double>, int64_t, int32_t>;

}  // namespace gnnsys
