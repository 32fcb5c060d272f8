// Inner products of rows, in an order of additions that depends on the width alone. Part of level.h, once per level.
//
// 64 bytes of partial sums, whatever the vectors: feature f is added to number f modulo their count, and a rest by
// sixteen bytes to the first of them.

template <typename T>
inline acc_t<T> dot(const T* a, const T* b, int64_t width) {
  using A = acc_t<T>;
  constexpr int kBytes = GNNSYS_VECTOR_BYTES;
  constexpr int kStep = kLanes<A, kBytes>;
  constexpr int kVectors = 64 / kBytes;
  vec_t<A, kBytes> sum[kVectors] = {};
  int64_t f = 0;
  for (; f + kVectors * kStep <= width; f += kVectors * kStep) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      sum[i] += load<kBytes>(a + f + i * kStep) * load<kBytes>(b + f + i * kStep);
    }
  }
  vec_t<A, 16> part[4];
  if constexpr (kBytes == 16) {  // in registers
    std::copy_n(sum, 4, part);
  } else {
    std::memcpy(part, sum, sizeof(part));
  }
  for (; f + kLanes<A, 16> <= width; f += kLanes<A, 16>) {
    part[0] += load<16>(a + f) * load<16>(b + f);
  }
  A rest{0};
  for (; f < width; ++f) {
    rest += static_cast<A>(a[f]) * static_cast<A>(b[f]);
  }
  const vec_t<A, 16> total = (part[0] + part[1]) + (part[2] + part[3]);
  if constexpr (kLanes<A, 16> == 4) {
    return ((total[0] + total[1]) + (total[2] + total[3])) + rest;
  } else {
    return (total[0] + total[1]) + rest;
  }
}

template <typename T, typename id_t>
void dot_chunk(acc_t<T>* dots, const T* row, const Rows<T>& rows, int64_t heads, const Neighbors<id_t>& near) {
  const RowsAhead<T, id_t> later(rows.whole, rows.stride, near);
  for (int64_t k = 0; k < near.count; ++k) {
    if (k < later.end()) {
      later.ask(k);
    }
    const T* const other = rows.x + near.ids[k] * rows.stride;
    for (int64_t h = 0; h < heads; ++h) {
      dots[k * heads + h] = dot(row + h * rows.width, other + h * rows.width, rows.width);
    }
  }
}
