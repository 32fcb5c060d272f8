// The one way a native loop runs on several threads.
//
// The thread count is torch's (torch.set_num_threads, per calling thread). Work is cut into fixed chunks whose
// bounds depend on the range and the thread count alone; a body must write only what its own index range owns, so
// results never depend on the number of threads. Where bodies throw (there may be no memory for their scratch), one of
// the errors is thrown again once all threads are done.
//
// Threads are OpenMP's, torch's own pool, and a loop always asks for all of them, as torch's do: where a team is smaller
// than the one before, GNU's OpenMP ends the threads that are left over, and the next loop starts them again, at some
// 50 us each. Threads without a share wait at the end of the loop.
//
// ThreadSanitizer cannot see how that pool synchronizes, so builds for it define GNNSYS_STD_THREADS and get a
// std::thread each; the C++ tests, which have no torch, define GNNSYS_WITHOUT_TORCH.
#pragma once

#ifndef GNNSYS_WITHOUT_TORCH
#include "common/shim.h"
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#ifdef GNNSYS_STD_THREADS
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif

namespace gnnsys {

#ifdef GNNSYS_WITHOUT_TORCH
inline int threads_of_tests = 4;
inline int max_threads() { return threads_of_tests; }
#elif defined(GNNSYS_STD_THREADS)
// A race needs two: torch's own loops are kept to one thread there, and ours are not.
inline int max_threads() { return std::max<int>(2, static_cast<int>(torch::stable::get_num_threads())); }
#elif defined(_OPENMP)
inline int max_threads() { return static_cast<int>(torch::stable::get_num_threads()); }
#else
inline int max_threads() { return 1; }
#endif

#ifdef GNNSYS_STD_THREADS
inline bool& inside_loop() {
  static thread_local bool inside = false;
  return inside;
}
inline bool in_parallel() { return inside_loop(); }
#elif defined(_OPENMP)
inline bool in_parallel() { return omp_in_parallel() != 0; }
#else
inline bool in_parallel() { return true; }
#endif

// How many threads a loop over `size` items gets when each is worth at least `grain` items.
inline int num_threads_for(int64_t size, int64_t grain) {
  if (in_parallel()) {
    return 1;
  }
  const int64_t wanted = size / std::max<int64_t>(grain, 1);
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, max_threads()));
}

// What the threads of a loop threw: an exception that left its thread would end the process.
class ThreadErrors {
 public:
  template <typename Body>
  void guard(const Body& body) noexcept {
    try {
      body();
    } catch (...) {
      if (!any_.exchange(true)) {
        first_ = std::current_exception();
      }
    }
  }

  bool any() const { return any_.load(std::memory_order_relaxed); }

  // When all threads are done.
  void rethrow() const {
    if (first_) {
      std::rethrow_exception(first_);
    }
  }

 private:
  std::atomic<bool> any_{false};
  std::exception_ptr first_;
};

// Runs body(thread, num_threads) once on each of num_threads threads.
template <typename Body>
void on_threads(int num_threads, const Body& body) {
  if (num_threads <= 1) {
    body(0, 1);
    return;
  }
  ThreadErrors errors;
#ifdef GNNSYS_STD_THREADS
  const auto run = [&](int t) {
    inside_loop() = true;
    errors.guard([&] { body(t, num_threads); });
    inside_loop() = false;
  };
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(num_threads - 1));
  for (int t = 1; t < num_threads; ++t) {
    others.emplace_back(run, t);
  }
  run(0);
  for (std::thread& other : others) {
    other.join();
  }
#elif defined(_OPENMP)
#pragma omp parallel num_threads(max_threads())
  {
    // OpenMP may grant fewer threads than asked for: a stride over the missing ones keeps all work covered.
    for (int t = omp_get_thread_num(); t < num_threads; t += omp_get_num_threads()) {
      errors.guard([&] { body(t, num_threads); });
    }
  }
#else
  for (int t = 0; t < num_threads; ++t) {
    body(t, num_threads);
  }
#endif
  errors.rethrow();
}

// Even split: the range [begin, end) of `size` items that thread t of num_threads owns.
struct Range {
  int64_t begin;
  int64_t end;
};

inline Range share_of(int64_t size, int t, int num_threads) {
  return {size * t / num_threads, size * (t + 1) / num_threads};
}

// body(begin, end) over disjoint ranges that cover [0, size).
template <typename Body>
void parallel_for(int64_t size, int64_t grain, const Body& body) {
  const int threads = num_threads_for(size, grain);
  on_threads(threads, [&](int t, int n) {
    const Range r = share_of(size, t, n);
    if (r.begin < r.end) {
      body(r.begin, r.end);
    }
  });
}

// body(begin, end) over chunks of `chunk` items handed out as threads become free: for skewed work such as the rows
// of a power-law graph. Which thread runs a chunk must not matter to the result.
template <typename Body>
void parallel_for_dynamic(int64_t size, int64_t chunk, const Body& body) {
  const int64_t num_chunks = (size + chunk - 1) / chunk;
  const int threads = num_threads_for(num_chunks, 1);
  if (threads <= 1) {
    if (size > 0) {
      body(int64_t{0}, size);
    }
    return;
  }
#ifdef GNNSYS_STD_THREADS
  std::atomic<int64_t> next{0};
  on_threads(threads, [&](int, int) {
    for (int64_t c = next.fetch_add(1, std::memory_order_relaxed); c < num_chunks;
         c = next.fetch_add(1, std::memory_order_relaxed)) {
      body(c * chunk, std::min(size, (c + 1) * chunk));
    }
  });
#else
  ThreadErrors errors;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(max_threads())
#endif
  for (int64_t c = 0; c < num_chunks; ++c) {
    if (!errors.any()) {
      errors.guard([&] { body(c * chunk, std::min(size, (c + 1) * chunk)); });
    }
  }
  errors.rethrow();
#endif
}

}  // namespace gnnsys
