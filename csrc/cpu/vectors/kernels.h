// The loops over the features of rows. They are compiled once for each kind of vectors that a processor may have
// (baseline.cpp, avx2.cpp, avx512.cpp, from the one source level.h), and one of these is chosen when the library is
// loaded: the widest that the processor has, or what GNNSYS_SIMD says.
//
// Every level gives the same bits. Lanes are features, each feature is added up in the order of its neighbours, products
// and sums are rounded one by one (no fused multiply-add), and a dot product has the same sixteen partial sums.
#pragma once

#include "common/row_types.h"

#include <cstdint>

namespace gnnsys {

constexpr int64_t kChunk = 128;  // neighbours in one call: their rows fit the second-level cache while tiles go by

// How many rows are on their way while one is added: as many lines as the processor can wait for, so more of narrow rows.
// Measured; asked for once per destination, so without a division.
constexpr int64_t neighbors_ahead(int64_t row_bytes) {
#if defined(__x86_64__)
  constexpr int64_t kLeast = 10;
#else
  constexpr int64_t kLeast = 6;
#endif
  return row_bytes > 256 ? kLeast : row_bytes > 128 ? 2 * kLeast : row_bytes > 64 ? 4 * kLeast : 48;
}

// The neighbours of a chunk, and how many ids may be read behind its first one (the chunk and what follows it).
template <typename id_t>
struct Neighbors {
  const id_t* ids;
  int64_t count;
  int64_t readable;
};

// Features [0, width) of rows that are `stride` apart. Where `whole` is set, the whole rows that come next are asked
// for, from there.
template <typename T>
struct Rows {
  const T* x;
  int64_t width;
  int64_t stride;
  const T* whole;
};

// Whole sums, one for each destination: out[v] = dst_scale[v] * the sum of src_scale[u] * x[u] over v's in-edges; 0
// where there are none.
template <typename T, typename id_t>
struct PlainSums {
  const int64_t* indptr;
  const id_t* indices;
  int64_t num_edges;
  int64_t longest;  // destinations with more in-edges are left to the caller
  const T* x;
  int64_t size;  // features of a row
  const acc_t<T>* src_scale;  // null: ones
  const acc_t<T>* dst_scale;  // null: ones
  T* out;
};

template <typename T, typename id_t>
struct NeighborKernels {
  using A = acc_t<T>;

  // Writes the sums of [begin, end) one after another. Returns the first that is not written: `end`, or one that is too
  // long; -1 where there is no such loop for rows of this size.
  int64_t (*sum_rows)(const PlainSums<T, id_t>& sums, int64_t begin, int64_t end);

  // acc[f] += coefficient[k] * x[ids[k]][f] over the chunk, in its order. No coefficients: ones. A chunk is `fresh` when
  // it is the first of its sum: acc is then written, not read.
  void (*sum)(A* acc, const Rows<T>& rows, const Neighbors<id_t>& near, const A* coefficient, bool fresh);

  // The largest (smallest) of coefficient[k] * x[ids[k]][f] so far, and which k it was, counted from `first`. A NaN wins
  // against everything; an arg below 0 loses against everything.
  void (*largest)(A* best, lane_t<A>* arg, const Rows<T>& rows, const Neighbors<id_t>& near, const A* coefficient,
                  int64_t first);
  void (*smallest)(A* best, lane_t<A>* arg, const Rows<T>& rows, const Neighbors<id_t>& near, const A* coefficient,
                   int64_t first);

  // dots[k * heads + h] = <row[h], x[ids[k]][h]>, for rows of `heads` times `width` features.
  void (*dots)(A* dots, const T* row, const Rows<T>& rows, int64_t heads, const Neighbors<id_t>& near);
};

template <typename T>
struct RowKernels {
  acc_t<T> (*dot)(const T* a, const T* b, int64_t width);
  void (*scale)(T* out, const acc_t<T>* sum, int64_t size, acc_t<T> factor);  // out[f] = sum[f] * factor

  // out[f] = x[f] * factor where words[f] is not below the threshold, else +0.
  void (*drop)(T* out, const T* x, const uint32_t* words, int64_t size, uint32_t threshold, acc_t<T> factor);
};

template <typename A>
struct ExpKernel {
  void (*exp)(A* values, int64_t size);  // in place
};

template <typename To, typename From>
struct CastKernel {
  void (*cast)(To* out, const From* in, int64_t size);
};

// What Adam's step of a row takes: 1 - beta1, 1 - beta2, eps and the negative step size.
struct AdamRates {
  float rest1;
  float rest2;
  float eps;
  float negative;
};

struct AdagradRates {
  float eps;
  float negative;
};

// A row, its states, and its gradient.
struct AdamRow {
  float* x;
  float* first;
  float* second;
  const float* grad;
};

struct AdagradRow {
  float* x;
  float* squares;
  const float* grad;
};

// Change a row of `size` values and its states in place, and ask memory for one that comes soon. See sparse_step.cpp.
struct StepKernels {
  void (*adam)(const AdamRow& row, const AdamRow& next, int64_t size, const AdamRates& rates);
  void (*adagrad)(const AdagradRow& row, const AdagradRow& next, int64_t size, const AdagradRates& rates);
};

struct Kernels : NeighborKernels<float, int32_t>,
                 NeighborKernels<float, int64_t>,
                 NeighborKernels<double, int32_t>,
                 NeighborKernels<double, int64_t>,
                 NeighborKernels<BFloat16, int32_t>,
                 NeighborKernels<BFloat16, int64_t>,
                 NeighborKernels<Half, int32_t>,
                 NeighborKernels<Half, int64_t>,
                 RowKernels<float>,
                 RowKernels<double>,
                 RowKernels<BFloat16>,
                 RowKernels<Half>,
                 ExpKernel<float>,
                 ExpKernel<double>,
                 CastKernel<float, BFloat16>,
                 CastKernel<float, Half>,
                 CastKernel<BFloat16, float>,
                 CastKernel<BFloat16, Half>,
                 CastKernel<Half, float>,
                 CastKernel<Half, BFloat16>,
                 StepKernels {
  // Copies a multiple of 64 bytes past the cache, to an address that is a multiple of vector_bytes (x86-64 alone).
  void (*stream)(char* out, const char* in, int64_t bytes);
  int64_t vector_bytes;
};

// The level that was chosen.
extern const Kernels* const kernels;

template <typename T, typename id_t>
inline const NeighborKernels<T, id_t>& neighbor_kernels() {
  return *kernels;
}

template <typename T>
inline const RowKernels<T>& row_kernels() {
  return *kernels;
}

template <typename To, typename From>
inline const CastKernel<To, From>& cast_kernel() {
  return *kernels;
}

template <typename A>
inline void exp_all(A* values, int64_t size) {
  static_cast<const ExpKernel<A>*>(kernels)->exp(values, size);
}

}  // namespace gnnsys
