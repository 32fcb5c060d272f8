// Sums over neighbours. Part of level.h, once per level.
//
// The rows of x lie far apart, so the loop lives on prefetch. The features are walked in tiles whose accumulators stay in
// registers, and acc carries over from chunk to chunk.

// One tile of kVectors vectors. The first tile of a row asks for the whole rows that come next.
template <int kBytes, int kVectors, bool kWeighted, typename T, typename id_t>
inline __attribute__((always_inline)) void add_neighbors(vec_t<acc_t<T>, kBytes> (&sum)[kVectors], const T* x,
                                                         int64_t stride, const Neighbors<id_t>& near,
                                                         const acc_t<T>* coefficient, const T* whole) {
  using A = acc_t<T>;
  const auto add = [&](int64_t k) __attribute__((always_inline)) {
    const T* const row = x + near.ids[k] * stride;
    const vec_t<A, kBytes> factor = kWeighted ? broadcast<kBytes, A>(coefficient[k]) : vec_t<A, kBytes>{};
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      const vec_t<A, kBytes> value = load<kBytes>(row + i * kLanes<A, kBytes>);
      sum[i] += kWeighted ? factor * value : value;
    }
  };
  const RowsAhead<T, id_t> later(whole, stride, near);
  int64_t k = 0;
  for (; k < later.end(); ++k) {
    later.ask(k);
    add(k);
  }
  for (; k < near.count; ++k) {
    add(k);
  }
}

template <int kBytes, int kVectors, bool kWeighted, typename T, typename id_t>
inline void sum_tile(acc_t<T>* acc, const T* x, int64_t stride, const Neighbors<id_t>& near,
                     const acc_t<T>* coefficient, bool fresh, const T* whole) {
  using A = acc_t<T>;
  vec_t<A, kBytes> sum[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    sum[i] = fresh ? vec_t<A, kBytes>{} : load<kBytes>(acc + i * kLanes<A, kBytes>);
  }
  add_neighbors<kBytes, kVectors, kWeighted>(sum, x, stride, near, coefficient, whole);
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    store<kBytes>(acc + i * kLanes<A, kBytes>, sum[i]);
  }
}

// The features that do not fill a vector, by one that begins before them: the others in it are added up and left alone.
template <int kBytes, bool kWeighted, typename T, typename id_t>
inline void sum_rest(acc_t<T>* acc, const T* x, int64_t rest, int64_t stride, const Neighbors<id_t>& near,
                     const acc_t<T>* coefficient, bool fresh) {
  using A = acc_t<T>;
  const int64_t back = kLanes<A, kBytes> - rest;
  vec_t<A, kBytes> sum[1] = {fresh ? vec_t<A, kBytes>{} : load<kBytes>(acc - back)};
  add_neighbors<kBytes, 1, kWeighted>(sum, x - back, stride, near, coefficient, static_cast<const T*>(nullptr));
  store_last(acc, sum[0], rest);
}

// One feature, where a row has fewer than the smallest vector.
template <bool kWeighted, typename T, typename id_t>
inline void sum_one(acc_t<T>* acc, const T* x, int64_t stride, const Neighbors<id_t>& near, const acc_t<T>* coefficient,
                    bool fresh, const T* whole) {
  using A = acc_t<T>;
  const RowsAhead<T, id_t> later(whole, stride, near);
  A sum = fresh ? A{0} : *acc;
  for (int64_t k = 0; k < near.count; ++k) {
    if (k < later.end()) {
      later.ask(k);
    }
    const A value = static_cast<A>(x[near.ids[k] * stride]);
    sum += kWeighted ? coefficient[k] * value : value;
  }
  *acc = sum;
}

template <int kBytes, bool kWeighted, typename T, typename id_t>
void sum_vectors(acc_t<T>* acc, const Rows<T>& rows, const Neighbors<id_t>& near, const acc_t<T>* coefficient,
                 bool fresh) {
  constexpr int64_t kStep = kLanes<acc_t<T>, kBytes>;
  const T* whole = rows.whole;
  int64_t f = 0;
  if (rows.width < kStep) {
    if constexpr (kBytes > 16) {
      sum_vectors<kBytes / 2, kWeighted>(acc, rows, near, coefficient, fresh);
    } else {
      for (; f < rows.width; ++f) {
        sum_one<kWeighted>(acc + f, rows.x + f, rows.stride, near, coefficient, fresh, whole);
        whole = nullptr;
      }
    }
    return;
  }
  const auto tiles = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    for (; f + kVectors * kStep <= rows.width; f += kVectors * kStep) {
      sum_tile<kBytes, kVectors, kWeighted>(acc + f, rows.x + f, rows.stride, near, coefficient, fresh, whole);
      whole = nullptr;
    }
  };
  if constexpr (kBytes == GNNSYS_VECTOR_BYTES) {
    tiles(std::integral_constant<int, kMostVectors>{});
    if constexpr (kBytes == 64) {  // for rows of 100 features, which are many
      tiles(std::integral_constant<int, 6>{});
    }
    tiles(std::integral_constant<int, kMostVectors / 2>{});
    if constexpr (kMostVectors > 8) {
      tiles(std::integral_constant<int, 4>{});
    }
    tiles(std::integral_constant<int, 2>{});
  }
  tiles(std::integral_constant<int, 1>{});
  if (f < rows.width) {
    sum_rest<kBytes, kWeighted>(acc + f, rows.x + f, rows.width - f, rows.stride, near, coefficient, fresh);
  }
}

template <typename T, typename id_t>
void sum_chunk(acc_t<T>* acc, const Rows<T>& rows, const Neighbors<id_t>& near, const acc_t<T>* coefficient,
               bool fresh) {
  if (coefficient != nullptr) {
    sum_vectors<GNNSYS_VECTOR_BYTES, true>(acc, rows, near, coefficient, fresh);
  } else {
    sum_vectors<GNNSYS_VECTOR_BYTES, false>(acc, rows, near, coefficient, fresh);
  }
}
