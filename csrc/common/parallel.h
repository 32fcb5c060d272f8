// The one way a native loop runs on several threads.
//
// The thread count is torch's (torch.set_num_threads, per calling thread). Work is cut into pieces that threads take as
// they become free, so that a thread without a core holds nobody up (`common/helpers.cpp`). A body must write only what
// its own piece owns: results never depend on which thread runs a piece, nor on the number of threads. Where bodies throw
// (there may be no memory for their scratch), no more pieces are begun, and one of the errors is thrown again once all
// threads are done.
//
// The C++ tests, which have no torch, define GNNSYS_WITHOUT_TORCH. Builds for ThreadSanitizer define
// GNNSYS_LEAST_THREADS=2: there torch's own loops are kept to one thread, and a race needs two.
#pragma once

#include "common/helpers.h"

#ifndef GNNSYS_WITHOUT_TORCH
#include "common/shim.h"
#endif

#include <algorithm>
#include <cstdint>

#ifndef GNNSYS_LEAST_THREADS
#define GNNSYS_LEAST_THREADS 1
#endif

namespace gnnsys {

#ifdef GNNSYS_WITHOUT_TORCH
inline int threads_of_tests = 4;
inline int max_threads() { return threads_of_tests; }
#else
inline int max_threads() {
  return std::max<int>(GNNSYS_LEAST_THREADS, static_cast<int>(torch::stable::get_num_threads()));
}
#endif

constexpr int kSharesPerThread = 4;

// How many threads a loop over `size` items gets when each is worth at least `grain` items.
inline int num_threads_for(int64_t size, int64_t grain) {
  if (inside_loop()) {
    return 1;
  }
  const int64_t wanted = size / std::max<int64_t>(grain, 1);
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, max_threads()));
}

// How many shares such a loop is cut into: one on one thread, else a few per thread, as long as each is worth `grain`.
inline int num_shares_for(int64_t size, int64_t grain) {
  const int threads = num_threads_for(size, grain);
  const int64_t wanted = size / std::max<int64_t>(grain, 1);
  return threads == 1 ? 1 : static_cast<int>(std::min<int64_t>(wanted, int64_t{threads} * kSharesPerThread));
}

// As `run_with_helpers`, on up to num_threads threads.
inline void with_helpers(int num_threads, FunctionRef<void()> caller, FunctionRef<bool()> helper) {
  if (num_threads <= 1 || inside_loop()) {
    caller();
  } else {
    run_with_helpers(num_threads, max_threads(), caller, helper);
  }
}

// body(piece) for every piece in [0, num_pieces), handed out in order to up to num_threads threads.
template <typename Body>
void for_pieces(int64_t num_pieces, int num_threads, const Body& body) {
  const auto threads = static_cast<int>(std::min<int64_t>(num_threads, num_pieces));
  if (threads > 1 && !inside_loop()) {
    run_pieces(num_pieces, threads, max_threads(), body);
    return;
  }
  for (int64_t piece = 0; piece < num_pieces; ++piece) {
    body(piece);
  }
}

// body(share, num_shares) once for each share.
template <typename Body>
void for_shares(int num_shares, const Body& body) {
  for_pieces(num_shares, max_threads(), [&](int64_t share) { body(static_cast<int>(share), num_shares); });
}

// Even split: the range [begin, end) of `size` items that share s of num_shares has.
struct Range {
  int64_t begin;
  int64_t end;
};

inline Range share_of(int64_t size, int s, int num_shares) {
  return {size * s / num_shares, size * (s + 1) / num_shares};
}

// body(begin, end) over disjoint ranges that cover [0, size).
template <typename Body>
void parallel_for(int64_t size, int64_t grain, const Body& body) {
  for_shares(num_shares_for(size, grain), [&](int s, int n) {
    const Range r = share_of(size, s, n);
    if (r.begin < r.end) {
      body(r.begin, r.end);
    }
  });
}

// body(begin, end) over chunks of `chunk` items: for skewed work such as the rows of a power-law graph.
template <typename Body>
void parallel_for_dynamic(int64_t size, int64_t chunk, const Body& body) {
  const int64_t num_chunks = (size + chunk - 1) / chunk;
  const int threads = num_threads_for(num_chunks, 1);
  if (threads > 1) {
    for_pieces(num_chunks, threads, [&](int64_t c) { body(c * chunk, std::min(size, (c + 1) * chunk)); });
  } else if (size > 0) {
    body(int64_t{0}, size);
  }
}

}  // namespace gnnsys
