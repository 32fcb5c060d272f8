// The inner loop of every aggregation: acc[f] += coefficient[k] * x[ids[k]][f] over the neighbours of one row.
//
// The rows of x lie far apart, so the loop lives on prefetch. Neighbours come in chunks of kChunk; for each chunk the
// features are walked in tiles whose accumulators stay in registers, and acc carries over from chunk to chunk. Each
// feature is summed in the order of the edges, whatever the tiling.
#pragma once

#include "common/prefetch.h"
#include "common/simd.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gnnsys {

constexpr int64_t kChunk = 128;         // neighbours: their rows fit the second-level cache while tiles go by
constexpr int64_t kNeighborsAhead = 6;  // rows on their way while one is added

// The neighbours of a chunk, and how many ids may be read behind its first one (the chunk and what follows it).
template <typename id_t>
struct Neighbors {
  const id_t* ids;
  int64_t count;
  int64_t readable;
};

template <typename T>
inline void prefetch_row(const T* x, int64_t row, int64_t size) {
  prefetch_read(x + row * size, size * static_cast<int64_t>(sizeof(T)));
}

// One tile of kVectors vectors, of features x[.][0 .. lanes * kVectors). `whole` is set for the first tile of a row:
// it then asks for the whole rows that come next.
template <int kVectors, bool kWeighted, typename T, typename id_t>
inline void accumulate_tile(acc_t<T>* acc, const T* x, int64_t stride, const Neighbors<id_t>& near,
                            const acc_t<T>* coefficient, bool fresh, const T* whole) {
  using A = acc_t<T>;
  constexpr int kLanes = Simd<A>::lanes;
  vec_t<A> sum[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    sum[i] = fresh ? vec_t<A>{} : load(acc + i * kLanes);
  }
  const int64_t ahead = whole == nullptr ? 0 : near.readable - kNeighborsAhead;
  for (int64_t k = 0; k < near.count; ++k) {
    if (k < ahead) {
      prefetch_row(whole, near.ids[k + kNeighborsAhead], stride);
    }
    const T* const row = x + near.ids[k] * stride;
    if constexpr (kWeighted) {
      const vec_t<A> factor = broadcast<A>(coefficient[k]);
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        sum[i] += factor * load(row + i * kLanes);
      }
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        sum[i] += load(row + i * kLanes);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    store(acc + i * kLanes, sum[i]);
  }
}

// The features that do not fill a vector, one by one.
template <bool kWeighted, typename T, typename id_t>
inline void accumulate_one(acc_t<T>* acc, const T* x, int64_t stride, const Neighbors<id_t>& near,
                           const acc_t<T>* coefficient, bool fresh, const T* whole) {
  using A = acc_t<T>;
  const int64_t ahead = whole == nullptr ? 0 : near.readable - kNeighborsAhead;
  A sum = fresh ? A{0} : *acc;
  for (int64_t k = 0; k < near.count; ++k) {
    if (k < ahead) {
      prefetch_row(whole, near.ids[k + kNeighborsAhead], stride);
    }
    const A value = static_cast<A>(x[near.ids[k] * stride]);
    if constexpr (kWeighted) {
      sum += coefficient[k] * value;
    } else {
      sum += value;
    }
  }
  *acc = sum;
}

// One chunk of neighbours, features [0, width) of rows that are `stride` apart. A chunk is `fresh` when it is the
// first of its row: acc is then written, not read.
template <bool kWeighted, typename T, typename id_t>
void accumulate_chunk(acc_t<T>* acc, const T* x, int64_t width, int64_t stride, const Neighbors<id_t>& near,
                      const acc_t<T>* coefficient, bool fresh, const T* whole) {
  constexpr int kLanes = Simd<acc_t<T>>::lanes;
  int64_t f = 0;
  const auto tiles = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    for (; f + kVectors * kLanes <= width; f += kVectors * kLanes) {
      accumulate_tile<kVectors, kWeighted>(acc + f, x + f, stride, near, coefficient, fresh, whole);
      whole = nullptr;
    }
  };
  tiles(std::integral_constant<int, 16>{});
  tiles(std::integral_constant<int, 8>{});
  tiles(std::integral_constant<int, 4>{});
  tiles(std::integral_constant<int, 1>{});
  for (; f < width; ++f) {
    accumulate_one<kWeighted>(acc + f, x + f, stride, near, coefficient, fresh, whole);
    whole = nullptr;
  }
}

// Three ops have the weighted ones, of all types of features and ids: they are compiled once, in accumulate.cpp.
#define GNNSYS_WEIGHTED_CHUNKS(kind, T)                                                                               \
  kind template void accumulate_chunk<true>(acc_t<T>*, const T*, int64_t, int64_t, const Neighbors<int32_t>&,         \
                                            const acc_t<T>*, bool, const T*);                                         \
  kind template void accumulate_chunk<true>(acc_t<T>*, const T*, int64_t, int64_t, const Neighbors<int64_t>&,         \
                                            const acc_t<T>*, bool, const T*);
GNNSYS_WEIGHTED_CHUNKS(extern, float)
GNNSYS_WEIGHTED_CHUNKS(extern, double)
GNNSYS_WEIGHTED_CHUNKS(extern, c10::BFloat16)
GNNSYS_WEIGHTED_CHUNKS(extern, c10::Half)

// Where a row of the output is summed: in place when it has the type of the sum, else in a scratch row of floats.
template <typename T>
class RowSum {
 public:
  explicit RowSum(int64_t width) : scratch_(kInPlace ? 0 : static_cast<size_t>(width)) {}

  acc_t<T>* begin(T* out) {
    if constexpr (kInPlace) {
      return out;
    } else {
      return scratch_.data();
    }
  }

  // out[f] = sum[f] * scale
  void finish(T* out, const acc_t<T>* sum, int64_t width, acc_t<T> scale) const {
    if (kInPlace && scale == acc_t<T>{1}) {
      return;
    }
    for (int64_t f = 0; f < width; ++f) {
      out[f] = static_cast<T>(sum[f] * scale);
    }
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<T, acc_t<T>>;
  std::vector<acc_t<T>> scratch_;
};

}  // namespace gnnsys
