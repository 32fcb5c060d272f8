// Rows that are read while another process writes them: one counter per 64 rows, odd while one of them is written.
//
// A reader copies a row and takes it if the counter was even and is unchanged; a writer makes the counter odd, writes
// and makes it even again. So a row is never seen half written, readers never write to shared memory, and a reader
// waits only while a row of its own block is being written. A writer that died leaves an odd counter behind: waiting
// ends after kPatience and the caller is told.
#pragma once

#include "common/check.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>

#ifdef __SANITIZE_THREAD__
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
#endif

namespace gnnsys {

class Versions {
 public:
  static constexpr int64_t kShift = 6;
  static constexpr std::chrono::milliseconds kPatience{10000};
  static constexpr int64_t num_blocks(int64_t num_rows) { return ((num_rows - 1) >> kShift) + 1; }

  Versions() = default;
  explicit Versions(uint32_t* words, std::chrono::milliseconds patience = kPatience)
      : words_(words), patience_(patience) {}

  static Versions of(const std::optional<Tensor>& words) {
    return words.has_value() ? Versions(mutable_data<uint32_t>(*words)) : Versions();
  }

  explicit operator bool() const { return words_ != nullptr; }

  // Copies until the copy is whole; false when that took too long.
  template <typename Copy>
  bool read(int64_t row, const Copy& copy) const {
    const uint32_t* const word = words_ + (row >> kShift);
    for (int64_t tries = 0; !gave_up(tries); ++tries) {
      const uint32_t before = __atomic_load_n(word, __ATOMIC_ACQUIRE);
      if ((before & 1) == 0) {
        copy_unordered(copy);
        fence<__ATOMIC_ACQUIRE>();
        if (__atomic_load_n(word, __ATOMIC_RELAXED) == before) {
          return true;
        }
      }
    }
    return false;
  }

  // Several threads may write rows of one block: the odd counter keeps them apart. They all live in one process, and
  // none of them waits for anything while it holds one. False, with nothing held, when that took too long.
  bool begin_write(int64_t row) const {
    if (!hold(row)) {
      return false;
    }
    begin_writes();
    return true;
  }

  void end_write(int64_t row) const {
    if (words_ != nullptr) {
      uint32_t* const word = words_ + (row >> kShift);  // nobody else changes it while it is odd
      __atomic_store_n(word, __atomic_load_n(word, __ATOMIC_RELAXED) + 1, __ATOMIC_RELEASE);
    }
  }

  // begin_write in two steps, for who writes a row in several tables: all of them are held, in their order, and then
  // written. A fence waits for all writes before it, so there is one.
  bool hold(int64_t row) const {
    if (words_ == nullptr) {
      return true;
    }
    uint32_t* const word = words_ + (row >> kShift);
    for (int64_t tries = 0; !gave_up(tries); ++tries) {
      uint32_t before = __atomic_load_n(word, __ATOMIC_RELAXED);
      if ((before & 1) == 0 && __atomic_compare_exchange_n(word, &before, before + 1, /*weak=*/true, __ATOMIC_ACQUIRE,
                                                           __ATOMIC_RELAXED)) {
        return true;
      }
    }
    return false;
  }

  static void begin_writes() {
    fence<__ATOMIC_RELEASE>();  // the counters are seen odd before any byte of a row changes
  }

 private:
  static constexpr int64_t kSpins = 128;

  // ThreadSanitizer knows no fences and takes a copy that is thrown away for a race: it sees the counters alone, which
  // keep writers apart and order a copy that is taken after the write it copies.
  template <int kOrder>
  static void fence() {
#ifndef __SANITIZE_THREAD__
    __atomic_thread_fence(kOrder);
#endif
  }

  template <typename Copy>
  static void copy_unordered(const Copy& copy) {
#ifdef __SANITIZE_THREAD__
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    copy();
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#else
    copy();
#endif
  }

  bool gave_up(int64_t tries) const {
    if (tries < kSpins) {
      return false;
    }
    thread_local std::chrono::steady_clock::time_point began;
    const auto now = std::chrono::steady_clock::now();
    if (tries == kSpins) {
      began = now;
    }
    std::this_thread::yield();
    return now - began > patience_;
  }

  uint32_t* words_ = nullptr;
  std::chrono::milliseconds patience_ = kPatience;
};

// After a loop of writes: what became of a row whose turn never came.
inline void check_written(bool written) {
  if (!written) {
    throw std::runtime_error("a row is marked as being written and was not released in 10 s: its writer died");
  }
}

inline void check_versions(const std::optional<Tensor>& versions, int64_t num_rows) {
  if (versions.has_value()) {
    check_vector(*versions, "versions");
    check_dtype(*versions, ScalarType::Int, "versions");
    CHECK_ARG(versions->numel() >= Versions::num_blocks(num_rows), "versions must have one entry per 64 rows, got ",
              versions->numel(), " for ", num_rows, " rows");
  }
}

}  // namespace gnnsys
