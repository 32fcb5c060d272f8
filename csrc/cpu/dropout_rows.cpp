// dropout_rows: dropout by (key, node id, column), as common/row_dropout.h has it.
//
// Work and bytes: one Philox block per four columns, sixteen of them at a time, one read and one write of every row. A
// row of a width that is no multiple of four leaves the last words of its last block unused.
#include "common/parallel.h"
#include "common/register.h"
#include "common/row_dropout.h"
#include "common/tensors.h"
#include "cpu/features.h"
#include "cpu/philox_lanes.h"
#include "cpu/vectors/kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

namespace gnnsys {
namespace {

constexpr int64_t kValuesPerThread = 1 << 12;
constexpr int64_t kWords = 4 * kLanes;

// Four blocks' words, which lie lane by lane, as sixteen in a row.
inline void store_blocks(uint32_t* words, const u32x4 (&s)[4]) {
#if defined(__aarch64__)
  vst4q_u32(words, uint32x4x4_t{{(uint32x4_t)s[0], (uint32x4_t)s[1], (uint32x4_t)s[2], (uint32x4_t)s[3]}});
#elif defined(__SSE2__)
  const __m128i low01 = _mm_unpacklo_epi32((__m128i)s[0], (__m128i)s[1]);
  const __m128i low23 = _mm_unpacklo_epi32((__m128i)s[2], (__m128i)s[3]);
  const __m128i high01 = _mm_unpackhi_epi32((__m128i)s[0], (__m128i)s[1]);
  const __m128i high23 = _mm_unpackhi_epi32((__m128i)s[2], (__m128i)s[3]);
  store4(words, (u32x4)_mm_unpacklo_epi64(low01, low23));
  store4(words + 4, (u32x4)_mm_unpackhi_epi64(low01, low23));
  store4(words + 8, (u32x4)_mm_unpacklo_epi64(high01, high23));
  store4(words + 12, (u32x4)_mm_unpackhi_epi64(high01, high23));
#else
  for (int i = 0; i < 16; ++i) {
    words[i] = s[i % 4][i / 4];
  }
#endif
}

// Block `block` of a row: its columns from 4 * block on.
struct Place {
  int64_t row;
  int64_t block;

  void advance(int64_t num_blocks, int64_t blocks_per_row) {
    block += num_blocks;
    while (block >= blocks_per_row) {
      block -= blocks_per_row;
      ++row;
    }
  }
};

// The words of `num_blocks` <= kLanes blocks from `at` on, row after row.
template <typename id_t>
void make_words(const id_t* ids, int64_t blocks_per_row, Place at, int64_t num_blocks, uint64_t key, uint32_t* words) {
  u32x4 state[kChains][4];
  if (at.block + kLanes <= blocks_per_row) {
    const auto id = static_cast<uint64_t>(static_cast<int64_t>(ids[at.row]));
    for (int v = 0; v < kChains; ++v) {
      state[v][0] = splat(static_cast<uint32_t>(id));
      state[v][1] = splat(static_cast<uint32_t>(id >> 32));
      state[v][2] = splat(static_cast<uint32_t>(at.block) + 4 * static_cast<uint32_t>(v)) + u32x4{0, 1, 2, 3};
      state[v][3] = splat(kRowDropoutStream);
    }
  } else {
    uint32_t counters[3][kLanes] = {};
    for (int64_t l = 0; l < num_blocks; ++l, at.advance(1, blocks_per_row)) {
      const auto id = static_cast<uint64_t>(static_cast<int64_t>(ids[at.row]));
      counters[0][l] = static_cast<uint32_t>(id);
      counters[1][l] = static_cast<uint32_t>(id >> 32);
      counters[2][l] = static_cast<uint32_t>(at.block);
    }
    for (int v = 0; v < kChains; ++v) {
      for (int c = 0; c < 3; ++c) {
        state[v][c] = load4(counters[c] + 4 * v);
      }
      state[v][3] = splat(kRowDropoutStream);
    }
  }
  philox4x32_lanes(state, key);
  for (int v = 0; v < kChains; ++v) {
    store_blocks(words + 16 * v, state[v]);
  }
}

// Rows [begin, end). Where the width is a multiple of four, values lie as their words do, across rows too; elsewhere
// the blocks of a row are taken together.
template <typename T, typename id_t>
void drop_rows(const T* x, const id_t* ids, int64_t begin, int64_t end, int64_t width, const RowDropout& dropout,
               T* out) {
  const auto factor = static_cast<acc_t<T>>(dropout.scale);
  const int64_t blocks_per_row = (width + 3) / 4;
  uint32_t words[kWords];
  Place at{begin, 0};
  for (int64_t left = (end - begin) * blocks_per_row; left > 0; left -= kLanes) {
    const int64_t num_blocks = std::min<int64_t>(left, kLanes);
    make_words(ids, blocks_per_row, at, num_blocks, dropout.key, words);
    for (int64_t done = 0; done < num_blocks;) {
      const int64_t first = at.row * width + 4 * at.block;
      const int64_t run = width % 4 == 0 ? num_blocks : std::min(num_blocks - done, blocks_per_row - at.block);
      const int64_t size = width % 4 == 0 ? 4 * run : std::min(4 * run, width - 4 * at.block);
      row_kernels<T>().drop(out + first, x + first, words + 4 * done, size, dropout.threshold, factor);
      at.advance(run, blocks_per_row);
      done += run;
    }
  }
}

template <typename id_t>
void check_not_negative(const id_t* ids, int64_t size) {
  std::atomic<bool> negative{false};
  parallel_for(size, kIdGrain, [&](int64_t begin, int64_t end) {
    id_t smallest = 0;
    for (int64_t i = begin; i < end; ++i) {
      smallest = std::min(smallest, ids[i]);
    }
    if (smallest < 0) {
      negative = true;
    }
  });
  if (negative) {
    const int64_t bad = std::find_if(ids, ids + size, [](id_t id) { return id < 0; }) - ids;
    CHECK_ARG(false, "ids must be >= 0, got ", ids[bad], " at position ", bad);
  }
}

Tensor dropout_rows(const Tensor& x, const Tensor& ids, double p, int64_t key) {
  check_contiguous(x, "x");
  check_ids(ids, "ids");
  check_dropout_shapes(x, ids);
  const RowDropout dropout = row_dropout(p, key);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < x.dim(); ++d) {
    shape.push_back(x.size(d));
  }
  const int64_t width = row_size(x);
  const Tensor out = empty_cpu(shape, x.scalar_type());
  dispatch_features(x, "x", [&](auto value) {
    using T = decltype(value);
    dispatch_ids(ids, [&](auto id) {
      using id_t = decltype(id);
      const id_t* const rows = const_data<id_t>(ids);
      check_not_negative(rows, ids.numel());
      if (x.numel() == 0) {
        return;
      }
      const T* const from = const_data<T>(x);
      T* const to = mutable_data<T>(out);
      parallel_for(ids.numel(), kValuesPerThread / width, [=](int64_t begin, int64_t end) {
        drop_rows(from, rows, begin, end, width, dropout, to);
      });
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CPU, m) { REGISTER_OP(m, "dropout_rows", &dropout_rows); }

}  // namespace gnnsys
