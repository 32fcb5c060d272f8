// What helpers of a loop are measured by, and when they are left alone; of what is local to csrc/common/helpers.cpp.
#include "common/parallel.h"
#include "native_test.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <chrono>

using namespace gnnsys;

TEST("what a helper computed is known after a loop that is shorter than the kernel's tick") {
  int known = 0;  // not in all turns: other processes take the core at times
  for (int turn = 0; turn < 20; ++turn) {
    Help help;
    help.run(
        [] {
          // A look at the thread's own clock would have the kernel bring its times up to date.
          for (const auto end = Clock::now() + microseconds(100); Clock::now() < end;) {
          }
          return false;
        },
        kTurn);
    known += help.computed >= 50;
  }
  EXPECT(known > 10);
}

TEST("a caller that was stopped for an hour while a helper had a piece soon has helpers again") {
  LoopPolicy policy;
  Help help;
  help.lost_core = true;
  const Clock::duration hour = std::chrono::hours(1);
  policy.add_helpers(1, help, hour, hour, Clock::duration::zero());
  EXPECT(policy.choose(Clock::now()) == Way::kAlone);
  EXPECT(policy.choose(Clock::now() + std::chrono::seconds(11)) == Way::kHelpers);
}

TEST("helpers take no signals but those for their own faults") {
  const pthread_t caller = pthread_self();
  std::atomic<bool> seen{false};
  sigset_t mask;
  for (int turn = 0; turn < 500 && !seen; ++turn) {
    for_pieces(2, 2, [&](int64_t) {
      if (pthread_equal(pthread_self(), caller) == 0) {
        pthread_sigmask(SIG_SETMASK, nullptr, &mask);
        seen = true;
      }
      for (const auto end = Clock::now() + milliseconds(20); !seen && Clock::now() < end;) {
        sched_yield();
      }
    });
  }
  EXPECT(seen);
  EXPECT(seen && sigismember(&mask, SIGINT) == 1 && sigismember(&mask, SIGTERM) == 1);
  EXPECT(seen && sigismember(&mask, SIGSEGV) == 0 && sigismember(&mask, SIGBUS) == 0);
}
