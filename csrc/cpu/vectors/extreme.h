// The largest and smallest values over neighbours, and whose they are. Part of level.h, once per level.

// What wins stays in registers: two of them for each vector of features.
template <bool kMin, int kBytes, int kVectors, typename T, typename id_t>
inline void extreme_tile(acc_t<T>* best_row, lane_t<acc_t<T>>* arg_row, int64_t stored, const T* x, int64_t stride,
                         const Neighbors<id_t>& near, const acc_t<T>* coefficient, int64_t first, const T* whole) {
  using A = acc_t<T>;
  constexpr int kStep = kLanes<A, kBytes>;
  vec_t<A, kBytes> best[kVectors];
  mask_t<A, kBytes> arg[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    best[i] = load<kBytes>(best_row + i * kStep);
    std::memcpy(&arg[i], arg_row + i * kStep, sizeof(arg[i]));
  }
  const RowsAhead<T, id_t> later(whole, stride, near);
  for (int64_t k = 0; k < near.count; ++k) {
    if (k < later.end()) {
      later.ask(k);
    }
    const T* const row = x + near.ids[k] * stride;
    const vec_t<A, kBytes> factor = broadcast<kBytes, A>(coefficient[k]);
    const mask_t<A, kBytes> here = mask_t<A, kBytes>{} + static_cast<lane_t<A>>(first + k);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const vec_t<A, kBytes> value = factor * load<kBytes>(row + i * kStep);
      const mask_t<A, kBytes> nan = (value != value) & (best[i] == best[i]);
      const mask_t<A, kBytes> wins = (kMin ? value < best[i] : value > best[i]) | nan | (arg[i] < 0);
      best[i] = wins ? value : best[i];
      arg[i] = wins ? here : arg[i];
    }
  }
  if (stored < kStep) {  // a rest, in one vector: the features before it are another tile's
    store_last(best_row + kStep - stored, best[0], stored);
    store_last(arg_row + kStep - stored, arg[0], stored);
    return;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    store<kBytes>(best_row + i * kStep, best[i]);
    std::memcpy(arg_row + i * kStep, &arg[i], sizeof(arg[i]));
  }
}

// The same for one feature.
template <bool kMin, typename T, typename id_t>
inline void extreme_one(acc_t<T>* best, lane_t<acc_t<T>>* arg, const T* x, int64_t stride, const Neighbors<id_t>& near,
                        const acc_t<T>* coefficient, int64_t first) {
  using A = acc_t<T>;
  for (int64_t k = 0; k < near.count; ++k) {
    const A value = coefficient[k] * static_cast<A>(x[near.ids[k] * stride]);
    const bool nan = value != value && *best == *best;
    if (*arg < 0 || nan || (kMin ? value < *best : value > *best)) {
      *best = value;
      *arg = static_cast<lane_t<A>>(first + k);
    }
  }
}

template <bool kMin, int kBytes, typename T, typename id_t>
void extreme_vectors(acc_t<T>* best, lane_t<acc_t<T>>* arg, const Rows<T>& rows, const Neighbors<id_t>& near,
                     const acc_t<T>* coefficient, int64_t first) {
  constexpr int64_t kStep = kLanes<acc_t<T>, kBytes>;
  const T* whole = rows.whole;
  int64_t f = 0;
  if (rows.width < kStep) {
    if constexpr (kBytes > 16) {
      extreme_vectors<kMin, kBytes / 2>(best, arg, rows, near, coefficient, first);
    } else {
      for (; f < rows.width; ++f) {
        extreme_one<kMin>(best + f, arg + f, rows.x + f, rows.stride, near, coefficient, first);
      }
    }
    return;
  }
  const auto tiles = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    for (; f + kVectors * kStep <= rows.width; f += kVectors * kStep) {
      extreme_tile<kMin, kBytes, kVectors>(best + f, arg + f, kStep, rows.x + f, rows.stride, near, coefficient, first,
                                           whole);
      whole = nullptr;
    }
  };
  if constexpr (kBytes == GNNSYS_VECTOR_BYTES) {
    tiles(std::integral_constant<int, kMostVectors / 2>{});
  }
  tiles(std::integral_constant<int, 1>{});
  if (f < rows.width) {
    const int64_t back = kStep - (rows.width - f);
    extreme_tile<kMin, kBytes, 1>(best + f - back, arg + f - back, rows.width - f, rows.x + f - back, rows.stride, near,
                                  coefficient, first, whole);
  }
}

template <bool kMin, typename T, typename id_t>
void extreme_chunk(acc_t<T>* best, lane_t<acc_t<T>>* arg, const Rows<T>& rows, const Neighbors<id_t>& near,
                   const acc_t<T>* coefficient, int64_t first) {
  extreme_vectors<kMin, GNNSYS_VECTOR_BYTES>(best, arg, rows, near, coefficient, first);
}
