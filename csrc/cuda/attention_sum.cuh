// The three sums of attention over features: rows weighted by a computed coefficient, dots of two rows per edge and
// head, dots of two matrices row by row.
//
// A lane holds one vector of up to 16 bytes that lies within a head. A group of lanes covers a row or a tile of it;
// several neighbours are in flight before the first is used.
#pragma once

#include "cuda/attention.cuh"
#include "cuda/segments.cuh"

namespace gnnsys::cuda {

template <typename T, int V>
struct alignas(sizeof(T) * V) Vector {
  T at[V];
};

// A value by edge and head, that may be stored in another order of edges.
template <typename A>
struct EdgeValue {
  const A* values;
  Positions positions;
  int64_t heads;
  __device__ A operator()(int64_t i) const { return values[checked_position(positions, i / heads) * heads + i % heads]; }
};

// The widest vector of T, up to 16 bytes, that divides a head and that both pointers are aligned to.
template <typename T>
int vector_width(int64_t width, const void* a, const void* b) {
  int lanes = 16 / static_cast<int>(sizeof(T));
  const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  while (lanes > 1 && (width % lanes != 0 || bits % (lanes * sizeof(T)) != 0)) {
    lanes /= 2;
  }
  return lanes;
}

// body(std::integral_constant<int, V>) for V = 1, 2, 4, 8 (as many as fit in 16 bytes).
template <typename T, typename Body>
void with_vector(int lanes, Body&& body) {
  if constexpr (16 / sizeof(T) >= 8) {
    if (lanes == 8) {
      return body(std::integral_constant<int, 8>{});
    }
  }
  if constexpr (16 / sizeof(T) >= 4) {
    if (lanes == 4) {
      return body(std::integral_constant<int, 4>{});
    }
  }
  return lanes == 2 ? body(std::integral_constant<int, 2>{}) : body(std::integral_constant<int, 1>{});
}

// Lanes for `count` vectors: few or a warp.
template <typename Body>
void with_lanes(int64_t count, Body&& body) {
  if (count <= 8) {
    body(std::integral_constant<int, 8>{});
  } else {
    body(std::integral_constant<int, kWarp>{});
  }
}

// out[row] = sum over a segment of coefficient(row, id, position, head) * rows[id]; unit = segment and tile of a row.
template <typename T, typename id_t, int V, int kGroup, typename Coefficient>
__global__ void sum_rows_kernel(Segments segments, Edges<id_t> edges, int64_t size, int64_t width, int64_t tiles,
                                Coefficient coefficient, const T* rows, acc_t<T>* slots, T* out) {
  using A = acc_t<T>;
  constexpr int kInFlight = 4;
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kGroup;
  const int64_t unit = index / tiles;
  const int64_t feature = (index % tiles * kGroup + threadIdx.x % kGroup) * V;
  if (unit >= segments.count() || feature >= size) {
    return;
  }
  const Segment segment = segments.at(unit);
  if (segment.row < 0) {
    return;
  }
  const int64_t head = feature / width;
  A sum[V] = {};
  for (int64_t e = segment.begin; e < segment.end; e += kInFlight) {
    Vector<T, V> near[kInFlight];
    A factor[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (e + k < segment.end) {
        const int64_t id = edges(e + k);
        near[k] = *reinterpret_cast<const Vector<T, V>*>(rows + id * size + feature);
        factor[k] = coefficient(segment.row, id, edges.position(e + k), head);
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (e + k < segment.end) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
          sum[i] += factor[k] * to_sum<A>(near[k].at[i]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (segment.slot >= 0) {
      slots[segment.slot * size + feature + i] = sum[i];
    } else {
      out[segment.row * size + feature + i] = from_sum<T>(sum[i]);
    }
  }
}

template <typename T, typename id_t, typename Coefficient>
void sum_rows(const Device& device, const Segments& segments, const Edges<id_t>& edges, const Shape& shape,
              const Coefficient& coefficient, const T* rows, T* out) {
  using A = acc_t<T>;
  const int64_t size = shape.size();
  if (size == 0 || segments.num_rows == 0) {
    return;
  }
  Tensor slots = device.workspace<A>(segments.num_slots() * size);
  with_vector<T>(vector_width<T>(shape.width, rows, nullptr), [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    with_lanes(size / V, [&](auto group) {
      constexpr int kGroup = decltype(group)::value;
      const int64_t tiles = (size / V + kGroup - 1) / kGroup;
      sum_rows_kernel<T, id_t, V, kGroup>
          <<<num_blocks(segments.count() * tiles * kGroup, 256), 256, 0, device.stream()>>>(
              segments, edges, size, shape.width, tiles, coefficient, rows, mutable_data<A>(slots), out);
      CUDA_CHECK_LAUNCH();
    });
  });
  finish_long_rows(device, segments, const_data<A>(slots), size, out);
}

// <a, b> over [0, width), by the lanes of a group; every lane gets it.
template <typename T, int V, int kGroup>
__device__ acc_t<T> dot_of(const T* a, const T* b, int64_t width) {
  acc_t<T> sum = 0;
  for (int64_t f = threadIdx.x % kGroup * V; f < width; f += kGroup * V) {
    const auto x = *reinterpret_cast<const Vector<T, V>*>(a + f);
    const auto y = *reinterpret_cast<const Vector<T, V>*>(b + f);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      sum += to_sum<acc_t<T>>(x.at[i]) * to_sum<acc_t<T>>(y.at[i]);
    }
  }
  for (int offset = kGroup / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(group_mask<kGroup>(), sum, offset, kGroup);
  }
  return sum;
}

// out[position, head] = gradient(row, id, position, head, <rows[row, head], others[id, head]>); unit = segment and head.
template <typename T, typename id_t, int V, int kGroup, typename Gradient>
__global__ void edge_gradients_kernel(Segments segments, Edges<id_t> edges, Shape shape, Gradient gradient,
                                      const T* rows, const T* others, acc_t<T>* out) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kGroup;
  const int64_t unit = index / shape.heads;
  const int64_t head = index % shape.heads;
  if (unit >= segments.count()) {
    return;
  }
  const Segment segment = segments.at(unit);
  if (segment.row < 0) {
    return;
  }
  const T* const row = rows + segment.row * shape.size() + head * shape.width;
  for (int64_t e = segment.begin; e < segment.end; ++e) {
    const int64_t id = edges(e);
    const T* const other = others + id * shape.size() + head * shape.width;
    const acc_t<T> dot = dot_of<T, V, kGroup>(row, other, shape.width);
    if (threadIdx.x % kGroup == 0) {
      const int64_t position = edges.position(e);
      out[position * shape.heads + head] = gradient(segment.row, id, position, head, dot);
    }
  }
}

template <typename T, typename id_t, typename Gradient>
void edge_gradients(const Device& device, const Segments& segments, const Edges<id_t>& edges, const Shape& shape,
                    const Gradient& gradient, const T* rows, const T* others, acc_t<T>* out) {
  if (shape.heads == 0 || segments.num_edges == 0) {
    return;
  }
  with_vector<T>(vector_width<T>(shape.width, rows, others), [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    with_lanes(shape.width / V, [&](auto group) {
      constexpr int kGroup = decltype(group)::value;
      edge_gradients_kernel<T, id_t, V, kGroup>
          <<<num_blocks(segments.count() * shape.heads * kGroup, 256), 256, 0, device.stream()>>>(
              segments, edges, shape, gradient, rows, others, out);
      CUDA_CHECK_LAUNCH();
    });
  });
}

template <typename T>
__global__ void dot_rows_kernel(int64_t num_rows, int64_t width, const T* a, const T* b, acc_t<T>* dots) {
  constexpr int kGroup = 8;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kGroup;
  if (row >= num_rows) {
    return;
  }
  const acc_t<T> dot = dot_of<T, 1, kGroup>(a + row * width, b + row * width, width);
  if (threadIdx.x % kGroup == 0) {
    dots[row] = dot;
  }
}

// dots[i] = <a[i], b[i]>
template <typename T>
void dot_rows(const Device& device, int64_t num_rows, int64_t width, const T* a, const T* b, acc_t<T>* dots) {
  if (num_rows > 0) {
    dot_rows_kernel<<<num_blocks(num_rows * 8, 256), 256, 0, device.stream()>>>(num_rows, width, a, b, dots);
    CUDA_CHECK_LAUNCH();
  }
}

}  // namespace gnnsys::cuda
