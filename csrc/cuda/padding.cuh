// Rows made longer so that lanes read them in vectors of 16 bytes. A row of 47 floats can only be read four bytes at a
// time, and a sum over edges of such rows takes twice as long as one of 48: where every row is read often, a copy of
// all rows with room behind each pays for itself.
//
// Work and bytes: one read and one write of every row of x and of out; room for both as long as the op runs.
#pragma once

#include "cuda/features.cuh"

#include <algorithm>

namespace gnnsys::cuda {

constexpr int64_t kPadBytes = int64_t{64} << 20;  // gathered at least, or two launches more are not worth it

// Values of a row with its padding; `size` where rows stay as they are.
inline int64_t padded_size(int64_t size, int64_t value_bytes, int64_t num_rows, int64_t num_edges) {
  const int64_t bytes = size * value_bytes;
  if (bytes % 16 == 0 || value_bytes > 4 || num_edges * bytes < kPadBytes) {
    return size;
  }
  // Reads of a row that pay for its copies: vectors of 8 bytes cost an edge a sixth, shorter ones half of it.
  const int64_t reads = bytes % 8 == 0 ? 32 : 8;
  if (num_edges < reads * num_rows) {
    return size;
  }
  constexpr int64_t kLine = 128;
  const int64_t vectors = (bytes + 15) / 16 * 16;
  const int64_t lines = (bytes + kLine - 1) / kLine * kLine;  // rows that begin with a line are read in fewer of them
  return (10 * lines <= 13 * bytes ? lines : vectors) / value_bytes;
}

// Rows of `from_units` words to rows of `to_units`: what is more is left out, what is missing becomes 0. A warp has a
// row at a time.
template <typename word>
__global__ void __launch_bounds__(256)
    copy_columns(const word* __restrict__ from, int from_units, word* __restrict__ to, int to_units, int64_t num_rows) {
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * (256 / kWarp);
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t row = warp; row < num_rows; row += num_warps) {
    for (int unit = lane; unit < to_units; unit += kWarp) {
      to[row * to_units + unit] = unit < from_units ? __ldg(from + row * from_units + unit) : word{};
    }
  }
}

inline void copy_columns(const Device& device, const void* from, int64_t from_bytes, void* to, int64_t to_bytes,
                         int64_t num_rows) {
  const unsigned blocks = std::min(num_blocks(num_rows, 256 / kWarp), 64u * static_cast<unsigned>(device.num_processors()));
  const auto launch = [&](auto word) {
    using Word = decltype(word);
    copy_columns<Word><<<blocks, 256, 0, device.stream()>>>(
        static_cast<const Word*>(from), static_cast<int>(from_bytes / sizeof(Word)), static_cast<Word*>(to),
        static_cast<int>(to_bytes / sizeof(Word)), num_rows);
    CUDA_CHECK_LAUNCH();
  };
  switch (vector_bytes(from_bytes | to_bytes, {from, to})) {
    case 16:
    case 8:
      return launch(word_t<8>{});
    case 4:
      return launch(word_t<4>{});
    default:
      return launch(word_t<2>{});
  }
}

}  // namespace gnnsys::cuda
