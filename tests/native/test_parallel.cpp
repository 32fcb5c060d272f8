// Loops over threads: what is visited, who takes part, what is thrown, and what a forked process has.
#include "common/parallel.h"
#include "native_test.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

using namespace gnnsys;

namespace {

// Whether `num_threads` threads come to be in one loop at a time: each piece waits a while until all have begun. Threads
// need not come, but in some loop they do.
bool all_take_part(int num_threads) {
  const auto wait = std::chrono::milliseconds(20);
  for (int turn = 0; turn < 500; ++turn) {
    std::atomic<int> begun{0};
    std::atomic<bool> late{false};
    for_pieces(num_threads, num_threads, [&](int64_t) {
      ++begun;
      for (const auto end = std::chrono::steady_clock::now() + wait; begun < num_threads && !late;) {
        std::this_thread::yield();
        late = late || std::chrono::steady_clock::now() > end;
      }
    });
    if (!late) {
      return true;
    }
  }
  return false;
}

}  // namespace

TEST("a loop visits every index once, on any number of threads") {
  for (const int threads : {1, 2, 3, 7}) {
    threads_of_tests = threads;
    for (const int64_t size : {0, 1, 5, 1000}) {
      std::vector<int> visits(static_cast<size_t>(size), 0), dynamic(visits);
      const auto count = [](std::vector<int>& to) {
        return [&to](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            ++to[static_cast<size_t>(i)];
          }
        };
      };
      parallel_for(size, 1, count(visits));
      parallel_for_dynamic(size, 3, count(dynamic));
      EXPECT(visits == std::vector<int>(static_cast<size_t>(size), 1));
      EXPECT(dynamic == visits);
    }
  }
  threads_of_tests = 4;
}

TEST("a loop inside a loop stays on its thread") {
  std::vector<int> inner(4, 0);
  for_shares(4, [&](int s, int) { inner[static_cast<size_t>(s)] = num_threads_for(1 << 20, 1); });
  EXPECT(inner == std::vector<int>(4, 1));
  EXPECT(num_threads_for(1 << 20, 1) == threads_of_tests);
}

TEST("all threads take part in a loop") {
  for (const int threads : {2, 4, 3, 2}) {
    EXPECT(all_take_part(threads));
  }
}

TEST("callers that loop at the same time have helpers of their own, which end with them") {
  std::vector<int64_t> sums(4, 0);
  std::vector<std::thread> callers;
  for (int64_t& sum : sums) {
    callers.emplace_back([&sum] {
      for (int turn = 0; turn < 50; ++turn) {
        std::atomic<int64_t> all{0};
        parallel_for(1000, 1, [&](int64_t begin, int64_t end) { all += end - begin; });
        sum += all;
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT(sums == std::vector<int64_t>(4, 50 * 1000));
}

TEST("an error of any piece reaches the caller, and loops go on working") {
  for (const int64_t bad : {0, 3, 99}) {
    std::atomic<int> before{0};
    bool caught = false;
    try {
      for_pieces(100, 4, [&](int64_t piece) {
        if (piece == bad) {
          throw std::invalid_argument("a piece");
        }
        ++before;
      });
    } catch (const std::invalid_argument&) {
      caught = true;
    }
    EXPECT(caught && before < 100);
  }
  EXPECT(all_take_part(4));
}

#ifndef __SANITIZE_THREAD__  // which ends processes that start threads after a fork
TEST("a forked process has helpers of its own") {
  EXPECT(all_take_part(3));
  const pid_t child = fork();
  if (child == 0) {
    _exit(all_take_part(3) ? 0 : 1);
  }
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT(all_take_part(3));
}
#endif
