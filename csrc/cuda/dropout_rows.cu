// dropout_rows on the device: bit-equal to cpu/dropout_rows.cpp, as common/row_dropout.h has it.
//
// Work and bytes: one Philox block per four columns, one read and one write of every row. A group of 1 to 32 lanes
// walks over a row; a lane takes 16 bytes at a time where width and address allow it (twice 16 of float64, 8 of half
// precision where no more are aligned), else the values of one Philox block one by one. Rows that are long and few are
// shared by several blocks of threads.
#include "common/register.h"
#include "common/row_dropout.h"
#include "cuda/features.cuh"

#include <algorithm>
#include <vector>

namespace gnnsys::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocksPerProcessor = 16;  // two times what fits: late blocks fill the gaps of early ones
constexpr int64_t kPasses = 8;               // over a row, before it is worth another block of threads

template <typename A>
struct Drop {
  uint32_t threshold;
  A scale;
  uint64_t key;
};

// kColumns values from `first` on. kWhole: all of them are in the row, and it can be read in vectors.
template <typename T, int kColumns, bool kWhole>
__device__ inline void drop_columns(const T* x, int64_t id, int64_t first, int64_t width, const Drop<acc_t<T>>& drop,
                                    T* out) {
  using A = acc_t<T>;
  constexpr int kBytes = kWhole ? std::min<int>(16, kColumns * sizeof(T)) : static_cast<int>(sizeof(T));
  constexpr int kEach = kBytes / static_cast<int>(sizeof(T));
  T value[kColumns] = {};
#pragma unroll
  for (int i = 0; i < kColumns; i += kEach) {
    if constexpr (kWhole) {
      Pack<T, kBytes> pack;
      load(pack, x + first + i);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        value[i + j] = pack.value[j];
      }
    } else if (first + i < width) {
      value[i] = x[first + i];
    }
  }
#pragma unroll
  for (int block = 0; block < kColumns / 4; ++block) {
    const Words words = philox4x32(static_cast<uint32_t>(id), static_cast<uint32_t>(static_cast<uint64_t>(id) >> 32),
                                   static_cast<uint32_t>(first / 4) + block, kRowDropoutStream, drop.key);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      T& one = value[4 * block + j];
      one = from_sum<T>(words.w[j] < drop.threshold ? A{0} : to_sum<A>(one) * drop.scale);
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; i += kEach) {
    if constexpr (kWhole) {
      Pack<T, kBytes> pack;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        pack.value[j] = value[i + j];
      }
      *reinterpret_cast<word_t<kBytes>*>(out + first + i) = pack.word;
    } else if (first + i < width) {
      out[first + i] = value[i];
    }
  }
}

template <typename T, int kColumns, bool kWhole, typename id_t>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const T* x, const id_t* ids, int64_t num_rows, int64_t width, int log2_group, Drop<acc_t<T>> drop,
                   T* out) {
  const int group = 1 << log2_group;
  const int lane = static_cast<int>(threadIdx.x) & (group - 1);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads >> log2_group);
  const int64_t step = static_cast<int64_t>(gridDim.y) * group * kColumns;
  for (int64_t row = blockIdx.x * static_cast<int64_t>(kThreads >> log2_group) + (threadIdx.x >> log2_group);
       row < num_rows; row += stride) {
    const int64_t id = __ldg(ids + row);
    if (id < 0) {
      printf("gnnsys: ids must be >= 0, got %lld at position %lld\n", static_cast<long long>(id),
             static_cast<long long>(row));
      __trap();
    }
    for (int64_t first = (blockIdx.y * static_cast<int64_t>(group) + lane) * kColumns; first < width; first += step) {
      drop_columns<T, kColumns, kWhole>(x + row * width, id, first, width, drop, out + row * width);
    }
  }
}

template <int kColumns, bool kWhole, typename T, typename id_t>
void launch(const Device& device, const T* x, const id_t* ids, int64_t num_rows, int64_t width,
            const Drop<acc_t<T>>& drop, T* out) {
  const int64_t units = (width + kColumns - 1) / kColumns;
  int log2_group = 0;
  while (log2_group < 5 && (int64_t{1} << log2_group) < units) {
    ++log2_group;
  }
  const int64_t most = kBlocksPerProcessor * device.num_processors();
  const int64_t for_rows = std::min<int64_t>(num_blocks(num_rows, kThreads >> log2_group), most);
  const int64_t for_columns = std::min<int64_t>(num_blocks(units, kPasses << log2_group), most / for_rows);
  const dim3 grid(static_cast<unsigned>(for_rows), static_cast<unsigned>(for_columns));
  dropout_kernel<T, kColumns, kWhole>
      <<<grid, kThreads, 0, device.stream()>>>(x, ids, num_rows, width, log2_group, drop, out);
  CUDA_CHECK_LAUNCH();
}

template <typename T, typename id_t>
void launch_widest(const Device& device, const T* x, const id_t* ids, int64_t num_rows, int64_t width,
                   const Drop<acc_t<T>>& drop, T* out) {
  const int aligned = vector_bytes(width * static_cast<int64_t>(sizeof(T)), {x, out});
  if constexpr (sizeof(T) == 2) {
    if (aligned == 16) {
      return launch<8, true>(device, x, ids, num_rows, width, drop, out);
    }
  }
  if (width % 4 == 0 && aligned >= std::min<int>(16, 4 * sizeof(T))) {
    return launch<4, true>(device, x, ids, num_rows, width, drop, out);
  }
  launch<4, false>(device, x, ids, num_rows, width, drop, out);
}

Tensor dropout_rows(const Tensor& x, const Tensor& ids, double p, int64_t key) {
  check_on_device(x, "x");
  const Device device(x);
  check_contiguous(x, device, "x");
  check_ids(ids, device, "ids");
  check_dropout_shapes(x, ids);
  const RowDropout dropout = row_dropout(p, key);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < x.dim(); ++d) {
    shape.push_back(x.size(d));
  }
  const Tensor out = device.empty(shape, x.scalar_type());
  dispatch_features(x, "x", [&](auto value) {
    using T = decltype(value);
    if (x.numel() == 0) {
      return;
    }
    const Drop<acc_t<T>> drop{dropout.threshold, static_cast<acc_t<T>>(dropout.scale), dropout.key};
    dispatch_ids(ids, [&](auto id) {
      launch_widest(device, const_data<T>(x), const_data<decltype(id)>(ids), ids.numel(), row_size(x), drop,
                    mutable_data<T>(out));
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CUDA, m) { REGISTER_OP(m, "dropout_rows", &dropout_rows); }

}  // namespace gnnsys::cuda
