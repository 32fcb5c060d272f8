// Whole sums of rows that fit the registers, one destination after another. Part of level.h, once per level.
//
// Work: one pass over the in-edges, each row of x read once. Nothing is called and nothing is stored in between, which
// is what counts where rows are narrow.

// Rows of kVectors vectors. The last one ends where the row ends, so it may begin inside the one before it: what both
// have is added up twice to the same bits.
template <int kVectors, bool kScaled, typename T, typename id_t>
int64_t sum_rows_of(const PlainSums<T, id_t>& sums, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  constexpr int kBytes = GNNSYS_VECTOR_BYTES;
  constexpr int64_t kStep = kLanes<A, kBytes>;
  constexpr int64_t kRowBytes = kVectors * kStep * static_cast<int64_t>(sizeof(T));
  const int64_t last = sums.size - kStep;
  const int64_t ahead = neighbors_ahead(sums.size * static_cast<int64_t>(sizeof(T)));
  const auto offset = [=](int i) __attribute__((always_inline)) { return i + 1 < kVectors ? i * kStep : last; };
  for (int64_t v = begin; v < end; ++v) {
    const int64_t behind = sums.indptr[v + 1];
    int64_t e = sums.indptr[v];
    if (behind - e > sums.longest) {
      return v;
    }
    const A factor = sums.dst_scale != nullptr && e < behind ? sums.dst_scale[v] : A{1};
    vec_t<A, kBytes> sum[kVectors] = {};
    const auto add = [&](int64_t edge) __attribute__((always_inline)) {
      const int64_t u = sums.indices[edge];
      const T* const row = sums.x + u * sums.size;
      const vec_t<A, kBytes> scale = kScaled ? broadcast<kBytes, A>(sums.src_scale[u]) : vec_t<A, kBytes>{};
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        const vec_t<A, kBytes> value = load<kBytes>(row + offset(i));
        sum[i] += kScaled ? scale * value : value;
      }
    };
    for (const int64_t asked = std::min(behind, sums.num_edges - ahead); e < asked; ++e) {
      const char* const later = reinterpret_cast<const char*>(sums.x + sums.indices[e + ahead] * sums.size);
#pragma GCC unroll 32
      for (int64_t line = 0; line < kRowBytes; line += kCacheLine) {
        __builtin_prefetch(later + line, 0, 3);
      }
      add(e);
    }
    for (; e < behind; ++e) {
      add(e);
    }
    T* const out = sums.out + v * sums.size;
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      store<kBytes>(out + offset(i), sum[i] * factor);
    }
  }
  return end;
}

template <typename T, typename id_t>
int64_t sum_rows(const PlainSums<T, id_t>& sums, int64_t begin, int64_t end) {
  constexpr int64_t kStep = kLanes<acc_t<T>, GNNSYS_VECTOR_BYTES>;
  const int64_t vectors = (sums.size + kStep - 1) / kStep;
  if (sums.size < kStep) {
    return -1;
  }
  const auto with = [&](auto number) {
    constexpr int kVectors = decltype(number)::value;
    return sums.src_scale != nullptr ? sum_rows_of<kVectors, true>(sums, begin, end)
                                     : sum_rows_of<kVectors, false>(sums, begin, end);
  };
  switch (vectors) {
    case 1: return with(std::integral_constant<int, 1>{});
    case 2: return with(std::integral_constant<int, 2>{});
    case 3: return with(std::integral_constant<int, 3>{});
    case 4: return with(std::integral_constant<int, 4>{});
    case 5: return with(std::integral_constant<int, 5>{});
    case 6: return with(std::integral_constant<int, 6>{});
    case 7: return with(std::integral_constant<int, 7>{});
    case 8: return with(std::integral_constant<int, 8>{});
    case 16:
      if constexpr (kMostWhole >= 16) {
        return with(std::integral_constant<int, 16>{});
      }
      [[fallthrough]];
    default: return -1;
  }
}
